"""The engine of plain text in this process: what a step computes, packs, and going on where a run stopped.

`tests/recipes/test_text_to_triples.py` does the same through the command line, with a real kill.
"""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from tripletune.models.label_loss import learn_labels_only
from tripletune.train.extraction_run import load_pairs, model_files
from tripletune.train.run_trainer import newest_checkpoint
from tripletune.train.text_batches import Seq2SeqCollator, TextCollator
from tripletune.train.text_engine import TextSeq2SeqTrainer, make_trainer
from tripletune.train.text_run import load_text_model, train_to_the_end
from tripletune.train.text_sft import TextTrainer

Config = Callable[..., Any]


@pytest.fixture(params=["decoder", "seq2seq"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def trainer_of(config: Any, kind: str) -> Any:
    model, tokenizer = load_text_model(config)
    data = load_pairs(config, model, tokenizer)
    parts = (model, config, tokenizer, data.train, data.validation, data.scorer, model_files(config, model))
    trainer = make_trainer(*parts)
    assert isinstance(trainer, TextSeq2SeqTrainer if kind == "seq2seq" else TextTrainer)
    return trainer


def train(config: Any, kind: str, stop_at: int | None = None) -> Any:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == stop_at

    trainer = trainer_of(config, kind)
    if stop_at is not None:
        trainer.add_callback(Stop())
    checkpoint = newest_checkpoint(config.output_dir)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return trainer


def log(config: Any, name: str = "losses.jsonl") -> list[dict[str, Any]]:
    lines = (Path(config.output_dir) / name).read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


# Twelve rows in batches of two: six steps an epoch. LoRA's dropout is on. A stop in the first epoch and one in the
# second; evaluations, with and without generation, fall between.
@pytest.mark.parametrize(("saved", "stopped"), [(2, 5), pytest.param(8, 9, marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_uninterrupted_run(
    make_extraction_config: Config, tmp_path: Path, kind: str, saved: int, stopped: int
) -> None:
    common = {
        "train.epochs": 2,
        "train.gradient_accumulation": 1,
        "train.save_steps": saved,
        "train.eval_steps": 3,
    }
    seq2seq = kind == "seq2seq"
    whole = make_extraction_config({**common, "output_dir": str(tmp_path / "whole")}, seq2seq)
    expected = weights(train(whole, kind))
    parts = make_extraction_config({**common, "output_dir": str(tmp_path / "parts")}, seq2seq)
    train(parts, kind, stop_at=stopped)
    assert newest_checkpoint(parts.output_dir) == tmp_path / "parts" / f"checkpoint-{stopped // saved * saved}"
    found = weights(train(parts, kind))
    assert log(parts) == log(whole)
    assert [line["step"] for line in log(whole)] == list(range(1, 13))
    assert log(parts, "evaluations.jsonl") == log(whole, "evaluations.jsonl")
    assert [line["step"] for line in log(whole, "evaluations.jsonl")] == [3, 6, 9, 12]
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_accumulation_of_two_times_two_is_a_batch_of_four(
    make_extraction_config: Config, tmp_path: Path, kind: str
) -> None:
    quiet = {"model.lora_dropout": 0.0, "train.epochs": 2, "train.warmup_ratio": 0.0}
    big = {**quiet, "train.batch_size": 4, "train.gradient_accumulation": 1, "output_dir": str(tmp_path / "big")}
    seq2seq = kind == "seq2seq"
    one = train(make_extraction_config(big, seq2seq), kind)
    other = train(make_extraction_config(quiet, seq2seq), kind)
    found = [[line["loss"] for line in log(trainer.config)] for trainer in (one, other)]
    assert len(found[0]) == 6
    assert found[1] == pytest.approx(found[0], rel=1e-3)


def test_the_logged_loss_is_the_mean_over_label_tokens(make_extraction_config: Config, kind: str) -> None:
    config = make_extraction_config({"model.lora_dropout": 0.0, "train.max_steps": 1}, kind == "seq2seq")
    trainer = trainer_of(config, kind)
    rows = [trainer.train_dataset[place] for place in list(trainer._get_train_sampler())[:4]]
    losses = []
    for row in rows:
        batch = trainer.data_collator([row])
        with torch.no_grad():
            # Logits everywhere, and no padding: what transformers' own model computes.
            labels = batch["labels"]
            batch.pop("labels")
            logits = trainer.model.eval()(**batch).logits
        shift = 0 if kind == "seq2seq" else 1
        width = labels.shape[1] - shift
        own = torch.nn.functional.cross_entropy(
            logits[0, :width], labels[0, shift:], ignore_index=-100, reduction="none"
        )
        losses += own[labels[0, shift:] != -100].tolist()
    trainer.train()
    assert log(config)[0]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_an_evaluation_has_a_line_with_loss_and_scores(make_extraction_config: Config, kind: str) -> None:
    trainer = trainer_of(make_extraction_config({"train.eval_steps": 2, "train.epochs": 2}, kind == "seq2seq"), kind)
    trainer.train()
    lines = log(trainer.config, "evaluations.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert all({"loss", "epoch", "rougeL", "normalised/micro/f1", "malformed_output"} <= line.keys() for line in lines)
    # The same step again, as at the end of a run: one line.
    metrics = trainer.evaluate()
    assert len(log(trainer.config, "evaluations.jsonl")) == 3
    assert metrics["eval_loss"] == pytest.approx(lines[-1]["loss"])


def test_a_checkpoint_holds_adapter_tokenizer_and_prompt(make_extraction_config: Config, kind: str) -> None:
    config = make_extraction_config({"train.save_steps": 3}, kind == "seq2seq")
    trainer = train(config, kind)
    folder = Path(config.output_dir) / "checkpoint-3"
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "extractor.json"} <= names
    assert ("prompt.md" in names) == (kind != "seq2seq")
    assert not {"training_args.bin", "README.md"} & names
    assert not (Path(config.output_dir) / "README.md").exists()
    stored = load_file(folder / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in stored.values()) == sum(v.numel() for v in weights(trainer).values())
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == config.model.base


def test_training_all_weights_leaves_a_plain_model(make_extraction_config: Config, kind: str) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = make_extraction_config({"model.lora": False, "train.save_steps": 3}, kind == "seq2seq")
    trainer = train(config, kind)
    auto = AutoModelForSeq2SeqLM if kind == "seq2seq" else AutoModelForCausalLM
    again = auto.from_pretrained(Path(config.output_dir) / "checkpoint-3")
    for name, value in again.named_parameters():
        assert torch.equal(value, dict(trainer.model.named_parameters())[name]), name


def test_training_learns(make_extraction_config: Config, kind: str) -> None:
    config = make_extraction_config({"train.epochs": 12, "model.lora_dropout": 0.0}, kind == "seq2seq")
    train(config, kind)
    found = [line["loss"] for line in log(config)]
    assert sum(found[-3:]) < (0.9 if kind == "seq2seq" else 0.7) * sum(found[:3])


# Labels alone


@pytest.mark.parametrize("family", ["llama", "smollm2", "qwen3", "gemma2", "gemma3", "granite", "gpt2", "cohere"])
def test_logits_at_labels_give_the_loss_and_gradients_of_all_logits(
    tiny_model: Callable[[str], Path], family: str
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model(family), dtype=torch.float32).eval()
    ids = torch.randint(4, 300, (3, 17), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :9], labels[1, 12:] = -100, -100
    whole = model(input_ids=ids, labels=labels)
    whole.loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    assert learn_labels_only(model)
    found = model(input_ids=ids, labels=labels)
    assert found.logits.shape == (int((labels[:, 1:] != -100).sum()), whole.logits.shape[-1])
    assert found.loss.item() == pytest.approx(whole.loss.item(), rel=1e-5)
    found.loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], atol=1e-4, rtol=1e-3), name
    # Without labels, and where all logits are asked for, nothing has changed.
    assert torch.equal(model(input_ids=ids).logits, whole.logits)
    assert model(input_ids=ids, labels=labels, full_logits=True).logits.shape == whole.logits.shape


def test_a_family_with_a_scale_of_its_own_keeps_its_own_loss(tiny_llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    inner = model.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = inner(*args, **kwargs)
        output.logits = output.logits * 3
        return output

    model.forward = scaled
    assert not learn_labels_only(model)
    assert model.forward is scaled


def test_a_batch_without_labels_learns_nothing(tiny_llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    learn_labels_only(model)
    ids = torch.full((1, 6), 5)
    loss = model(input_ids=ids, labels=torch.full((1, 6), -100)).loss
    loss.backward()
    assert loss.item() == 0


# Packs


def packed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "input_ids": [token for row in rows for token in row["input_ids"]],
        "labels": [label for row in rows for label in row["labels"]],
        "seq_lengths": [len(row["input_ids"]) for row in rows],
    }


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize("flatten", [False, True])
def test_packed_samples_have_the_loss_and_gradients_of_separate_ones(
    tiny_model: Callable[[str], Path], extraction_pairs: list[Any], tokenizer: Any, family: str, flatten: bool
) -> None:
    from transformers import AutoModelForCausalLM

    from tripletune.train.extraction_rows import PairEncoder, RowLimits

    model = AutoModelForCausalLM.from_pretrained(tiny_model(family), dtype=torch.float32).eval()
    learn_labels_only(model)
    rows = list(PairEncoder(tokenizer, "Extract.", RowLimits()).rows(extraction_pairs[:5], Counter()))
    total = 0.0
    for row in rows:
        batch = TextCollator(3)([row])
        loss = model(**batch, use_cache=False, num_items_in_batch=1).loss
        loss.backward()
        total += loss.item()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    # Two packs of unlike length in a batch: the shorter one is padded.
    batch = TextCollator(3, flatten=flatten)([packed(rows[:3]), packed(rows[3:])])
    assert len(batch["input_ids"]) == (1 if flatten else 2)
    loss = model(**batch, use_cache=False, num_items_in_batch=1).loss
    assert loss.item() == pytest.approx(total, rel=1e-4)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], atol=2e-3, rtol=1e-3), name


def test_the_first_token_of_a_packed_sample_is_never_a_label() -> None:
    rows = [{"input_ids": [5, 6], "labels": [5, 6]}, {"input_ids": [7, 8, 9], "labels": [7, 8, 9]}]
    batch = TextCollator(3, pad_to_multiple_of=1)([packed(rows)])
    assert batch["labels"].tolist() == [[-100, 6, -100, 8, 9]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2]]


def test_trl_packs_whole_rows(make_extraction_config: Config) -> None:
    plain, packs = (make_extraction_config({"train.packing": on, "train.pack_tokens": 512}) for on in (False, True))
    model, tokenizer = load_text_model(plain)
    separate, together = (load_pairs(config, model, tokenizer).train for config in (plain, packs))
    assert sum(map(len, together["seq_lengths"])) == len(separate)
    assert len(together) < len(separate)
    found = []
    for row in together:
        start = 0
        for length in row["seq_lengths"]:
            found.append((row["input_ids"][start : start + length], row["labels"][start : start + length]))
            start += length
        assert start <= 512
    assert sorted(found) == sorted((row["input_ids"], row["labels"]) for row in separate)


@pytest.mark.slow
def test_a_packed_run_resumes_bit_for_bit(make_extraction_config: Config, tmp_path: Path) -> None:
    common = {
        "train.packing": True,
        "train.pack_tokens": 512,
        "train.batch_size": 1,
        "train.gradient_accumulation": 1,
        "train.epochs": 3,
        "train.save_steps": 4,
        "train.eval_steps": 3,
    }
    whole = make_extraction_config({**common, "output_dir": str(tmp_path / "whole")})
    expected = weights(train(whole, "decoder"))
    parts = make_extraction_config({**common, "output_dir": str(tmp_path / "parts")})
    train(parts, "decoder", stop_at=5)
    found = weights(train(parts, "decoder"))
    assert log(parts) == log(whole)
    assert log(parts, "evaluations.jsonl") == log(whole, "evaluations.jsonl")
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# Encoder-decoders


def test_padding_of_a_target_is_never_learned(tiny_t5: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_t5)
    rows = [{"input_ids": [5, 6, 7], "labels": [8, 2]}, {"input_ids": [5], "labels": [8, 9, 10, 2]}]
    collator = Seq2SeqCollator(3, model.prepare_decoder_input_ids_from_labels, pad_to_multiple_of=1)
    batch = collator(rows)
    assert batch["labels"].tolist() == [[8, 2, -100, -100], [8, 9, 10, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["decoder_input_ids"].tolist() == [[3, 8, 2, 3], [3, 8, 9, 10]]


def test_an_evaluation_at_the_last_step_is_not_repeated() -> None:
    for steps, expected in ((3, 1.0), (2, 2.0)):
        trainer = MagicMock(eval_dataset=[1], last_evaluation=(steps, {"eval_loss": 1.0}))
        trainer.state.global_step = 3
        trainer.evaluate.return_value = {"eval_loss": 2.0}
        metrics, _ = train_to_the_end(trainer, None, "digest")
        assert metrics == {"eval_loss": expected}
