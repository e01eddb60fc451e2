"""Training on plain text in this process: what a step computes, labels alone, packs, and encoder-decoders."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.cli import read_lines
from tripletune.models.attention import keeps_apart
from tripletune.models.losses import learn_labels_only
from tripletune.train import engine_of
from tripletune.train.rows.batches import TextCollator
from tripletune.train.tasks.text_to_triples import PairEncoder, PairSection
from tripletune.train.text import TextTrainSection, choose_examples, generate_replies


@pytest.fixture(params=["decoder", "seq2seq"])
def kind(request):
    return str(request.param)


def log(trainer):
    return [line["loss"] for line in read_lines(Path(trainer.config.output_dir) / "losses.jsonl")]


@pytest.fixture
def trainer_of(begin_task, kind):
    """A trainer of the kind: `trainer_of({"train.epochs": 2})`."""
    return lambda overrides: engine_of(begin_task("text_to_triples", overrides, seq2seq=kind == "seq2seq"))


def test_accumulation_of_two_times_two_is_a_batch_of_four(trainer_of, tmp_path):
    quiet = {"model.lora_dropout": 0.0, "train.epochs": 2, "train.warmup_ratio": 0.0, "train.group_by_length": False}
    big = {**quiet, "train.batch_size": 4, "train.gradient_accumulation": 1, "output_dir": str(tmp_path / "big")}
    one, other = trainer_of(big), trainer_of(quiet)
    one.train()
    other.train()
    assert len(log(one)) == 6
    assert log(other) == pytest.approx(log(one), rel=1e-3)


def test_the_logged_loss_is_the_mean_over_label_tokens(trainer_of, kind):
    trainer = trainer_of({"model.lora_dropout": 0.0, "train.max_steps": 1})
    rows = [trainer.train_dataset[place] for place in list(trainer._get_train_sampler())[:4]]
    losses = []
    for row in rows:
        batch = trainer.data_collator([row])
        with torch.no_grad():
            # Logits everywhere, and no padding: what transformers' own model computes.
            labels = batch.pop("labels")
            logits = trainer.model.eval()(**batch).logits
        shift = 0 if kind == "seq2seq" else 1
        width = labels.shape[1] - shift
        own = torch.nn.functional.cross_entropy(
            logits[0, :width], labels[0, shift:], ignore_index=-100, reduction="none"
        )
        losses += own[labels[0, shift:] != -100].tolist()
    trainer.train()
    assert log(trainer)[0] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_training_all_weights_leaves_a_plain_model(trainer_of, kind):
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    trainer = trainer_of({"model.tune": "all", "train.save_steps": 3})
    trainer.train()
    auto = AutoModelForSeq2SeqLM if kind == "seq2seq" else AutoModelForCausalLM
    again = auto.from_pretrained(Path(trainer.config.output_dir) / "checkpoint-3")
    for name, value in again.named_parameters():
        assert torch.equal(value, dict(trainer.model.named_parameters())[name]), name


# Replies


def section(batch):
    return TextTrainSection(eval_batch_size=batch, eval_max_new_tokens=8)


@pytest.mark.parametrize("seq2seq", [False, True])
def test_replies_are_those_of_one_prompt_at_a_time(tiny_llama, tiny_t5, tokenizer, extraction_pairs, seq2seq):
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind, folder = (AutoModelForSeq2SeqLM, tiny_t5) if seq2seq else (AutoModelForCausalLM, tiny_llama)
    model = kind.from_pretrained(folder, dtype=torch.float32).train()
    encoder = PairEncoder(tokenizer, None if seq2seq else "Extract.", PairSection())
    prompts = encoder.prompts([pair.source_text for pair in extraction_pairs[:5]])
    together = generate_replies(model, tokenizer, prompts, section(4))
    assert model.training
    assert together == [generate_replies(model, tokenizer, [prompt], section(1))[0] for prompt in prompts]


def test_the_examples_that_are_scored_do_not_depend_on_their_order(extraction_pairs):
    chosen = choose_examples(extraction_pairs, 4, lambda pair: pair.source_text)
    assert len(chosen) == 4
    assert choose_examples(reversed(extraction_pairs), 4, lambda pair: pair.source_text) == chosen


def test_scores_are_those_of_the_replies(make_task, tokenizer, monkeypatch):
    task = make_task("text_to_triples")
    task.encoder, task.processor = PairEncoder(tokenizer, "Extract.", PairSection()), tokenizer
    replies = [pair.target or "NONE" for pair in task.scored]
    monkeypatch.setattr("tripletune.train.tasks.text_to_triples.generate_replies", lambda *args: replies)
    scores = task.score(None)
    assert (scores["exact/micro/f1"], scores["normalised/macro/f1"], scores["malformed_output"]) == (1, 1, 0)
    replies[:] = ["(S> cut| P", "junk"]
    assert task.score(None)["malformed_output"] == 1


# Packs


def packed(rows):
    return {
        "input_ids": [token for row in rows for token in row["input_ids"]],
        "labels": [label for row in rows for label in row["labels"]],
        "seq_lengths": [len(row["input_ids"]) for row in rows],
    }


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize("flatten", [False, True])
def test_packed_samples_have_the_loss_and_gradients_of_separate_ones(
    tiny_model, extraction_pairs, tokenizer, family, flatten
):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model(family), dtype=torch.float32).eval()
    assert keeps_apart(model)
    learn_labels_only(model)
    rows = list(PairEncoder(tokenizer, "Extract.", PairSection()).rows(extraction_pairs[:5], Counter()))
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


@pytest.mark.parametrize("family", ["lfm2", "mamba"])
def test_packs_of_a_model_with_convolutions_or_states_are_refused(family, make_task, tiny_model):
    change = {"model.base": str(tiny_model(family)), "model.tune": "all", "train.packing": True}
    with pytest.raises(ValueError, match=rf"train\.packing: .*{family}.* mixes the samples of a pack: set"):
        make_task("text_to_triples", change).load()
    make_task("text_to_triples", change | {"train.packing": False}).load()


def test_the_first_token_of_a_packed_sample_is_never_a_label():
    rows = [{"input_ids": [5, 6], "labels": [5, 6]}, {"input_ids": [7, 8, 9], "labels": [7, 8, 9]}]
    batch = TextCollator(3)([packed(rows)])
    assert batch["labels"].tolist() == [[-100, 6, -100, 8, 9, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0, 1, 2]]


# Encoder-decoders


def test_padding_of_a_target_is_never_learned(begin_task):
    task = begin_task("text_to_triples", seq2seq=True)
    rows = [{"input_ids": [5, 6, 7], "labels": [8, 2]}, {"input_ids": [5], "labels": [8, 9, 10, 2]}]
    batch = task.collator()(rows)
    assert {tuple(tensor.shape) for tensor in batch.values()} == {(2, 8)}
    assert batch["labels"][:, :4].tolist() == [[8, 2, -100, -100], [8, 9, 10, 2]]
    assert batch["attention_mask"][:, :3].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["decoder_input_ids"][:, :4].tolist() == [[3, 8, 2, 3], [3, 8, 9, 10]]
    assert (batch["labels"][:, 4:] == -100).all()
