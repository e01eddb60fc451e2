"""The engine in this process: what a step computes, what a checkpoint holds, and its logs.

What holds for every task is in `test_contract.py`; `tests/recipes/` does the same through the real command line, with
real kills.
"""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import TrainingArguments

from tests.cli import read_lines
from tripletune.core.data.records import Action, Record
from tripletune.core.files import lock_folder
from tripletune.models.compilation import compile_layers
from tripletune.train import engine_of
from tripletune.train.arguments import shared_arguments
from tripletune.train.engine import Engine
from tripletune.train.settings import EngineConfig, TrainSection
from tripletune.train.tasks import TrainingTask
from tripletune.train.tasks.ras import GraphTask


def trainer_of(config):
    task = GraphTask(config)
    task.begin()
    return engine_of(task)


def train(config):
    trainer = trainer_of(config)
    trainer.train()
    return trainer


def losses(config):
    return [(line["step"], line["loss"]) for line in read_lines(Path(config.output_dir) / "losses.jsonl")]


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def test_any_model_and_any_rows_are_trained_and_resumed_exactly(tmp_path, monkeypatch, killed_behind):
    page = (Path(__file__).parents[2] / "docs/guide/own_training.md").read_text()
    example = page.split("## Train a model of your own")[1].split("```python\n")[1].split("```")[0]
    assert len(example.splitlines()) <= 20

    def run_in(folder):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        exec(example, names := {"__name__": folder})
        logs = (Path("runs/sides") / name for name in ("losses.jsonl", "evaluations.jsonl"))
        found = [[json.loads(line) | {"seconds": 0} for line in log.read_text().splitlines()] for log in logs]
        return {"logs": found, "weights": load_file("runs/sides/final/model.safetensors"), "engine": names["engine"]}

    whole = run_in("whole")
    with killed_behind(2):
        run_in("parts")
    parts = run_in("parts")
    assert [line["step"] for line in whole["logs"][0]] == [1, 2, 3]
    assert parts["logs"] == whole["logs"]
    assert all(torch.equal(parts["weights"][name], value) for name, value in whole["weights"].items())

    def other(count, settings, **options):
        last = parts["engine"]
        rows = last.train_dataset.select(range(count))
        return Engine(last.model, rows, last.data_collator, settings, validation=last.eval_dataset, **options)

    with pytest.raises(ValueError, match="the content of the training data has changed"):
        other(8, parts["engine"].config).run()

    class Scored(TrainingTask):
        def score(self, model):
            return {"bias": model.bias.sum().item()}

    scored = EngineConfig("runs/scored", train=TrainSection(max_steps=1))
    assert "eval_bias" in other(8, scored, task=Scored(scored)).run()


def test_compiled_layers_learn_the_same(make_config, tmp_path, monkeypatch):
    found: list[int] = []

    def compile_quickly(model):
        found.append(compile_layers(model, "aot_eager"))

    monkeypatch.setattr("tripletune.train.engine.compile_layers", compile_quickly)
    quiet = {"model.graph_dropout": 0.0, "model.lora_dropout": 0.0, "train.max_steps": 3}
    plain = make_config({**quiet, "output_dir": str(tmp_path / "plain")})
    compiled = make_config({**quiet, "train.torch_compile": True, "output_dir": str(tmp_path / "compiled")})
    names = weights(train(plain)).keys()
    trainer = train(compiled)
    assert weights(trainer).keys() == names
    assert found == [len(trainer.model.get_decoder().layers)]
    for (_, one), (_, other) in zip(losses(plain), losses(compiled), strict=True):
        assert other == pytest.approx(one, rel=1e-3)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    trainer.evaluate()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs, "evaluation runs the model as written"


def test_a_second_start_leaves_a_running_run_alone(make_config, tmp_path):
    first = trainer_of(make_config())
    first.run(None)
    folder = tmp_path / "run"
    (folder / "final").mkdir(exist_ok=True)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    second = trainer_of(make_config({"train.learning_rate": 0.05, "resume": False}))
    with lock_folder(folder, ""), pytest.raises(ValueError, match=r"another process trains in .*run: wait"):
        second.run(None)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    assert list(folder.glob("checkpoint-*"))
    assert (folder / "final").is_dir()
    second.run(None)
    assert "learning_rate: 0.05" in (folder / "config.yaml").read_text()
    assert (folder / "final.previous").is_dir()


QUIET = {"model.graph_dropout": 0.0, "model.lora_dropout": 0.0}


@pytest.mark.parametrize("batch", [1, 4, 12])
def test_records_have_the_weights_that_were_asked_for_in_every_step(make_config, records, batch):
    once = {"train.batch_size": batch, "train.records_per_step": 12, "train.max_steps": 1, "train.eval_steps": 1}
    for weights, answers in (
        ({"train.loss_per": "record"}, 1),
        ({"train.loss_per": "record", "train.answer_weight": 3.0}, 3),
    ):
        config = make_config({**QUIET, **once, **weights})
        trainer = trainer_of(config)
        alone, each = [], [answers if record.task == "answering" else 1 for record in records]
        for row in trainer.train_dataset:
            inputs = trainer.data_collator([row])
            del inputs["label_parts"], inputs["label_weights"]
            alone.append(trainer.model.eval()(**inputs).loss.item())
        trainer.train()
        mean = sum(one * weight for one, weight in zip(alone, each, strict=True)) / sum(each)
        assert losses(config) == [(1, pytest.approx(mean, rel=1e-5))]


@pytest.mark.parametrize(
    "options",
    [{"train.answer_weight": 3.0}, {"train.action_weight": 4.0}, {"train.loss_per": "record"},
     {"data.learn_copies": False},
     {"data.prompt_order": "interleaved", "train.batch_size": 1, "train.answer_weight": 3.0}],
)  # fmt: skip
def test_an_evaluation_weighs_all_label_tokens_alike(make_config, write_records, records, options):
    question = "Who was born in London?"
    copied = Record("c", "c", "planning", question, Action.SUBQ, (), question)

    def evaluated(changes):
        config = make_config({**QUIET, **changes})
        write_records([*records[:6], copied], "validation")
        trainer = trainer_of(config)
        trainer.task.score = lambda model: {}
        found = trainer.evaluate()
        counts = [0, 0]
        for row in trainer.eval_dataset:
            for start, end, marker in row["spans"]:
                counts[marker == 0] += end - start
        parts = found["eval_loss_planning"], found["eval_loss_answering"]
        whole = sum(loss * count for loss, count in zip(parts, counts)) / sum(counts)
        assert found["eval_loss"] == pytest.approx(whole, rel=1e-5)
        row = read_lines(Path(config.output_dir) / "evaluations.jsonl")[-1]
        assert (row["loss"], row["loss_planning"], row["loss_answering"]) == (found["eval_loss"], *parts)
        return found["eval_loss"], *parts

    plain = {name: value for name, value in options.items() if not name.endswith(("_weight", "_per", "_copies"))}
    assert evaluated(options) == pytest.approx(evaluated(plain), rel=1e-6)


@pytest.mark.parametrize("old", [False, True])
def test_a_run_goes_on_in_its_order_in_other_micro_batches(make_config, tmp_path, killed_behind, monkeypatch, old):
    steps = {**QUIET, "train.max_steps": 5, "train.save_steps": 2, "train.batch_size": 2, "train.records_per_step": 4}
    if old:  # a run of an earlier version, which grouped the rows of a step
        monkeypatch.setattr("tripletune.train.resume.grouped_rows", lambda *_: 4)
    for name in ("whole", "parts"):
        with nullcontext() if name == "whole" else killed_behind(3):
            trainer_of(make_config({**steps, "output_dir": str(tmp_path / name)})).run()
    monkeypatch.undo()
    if old:
        about = json.loads((tmp_path / "parts" / "environment.json").read_text())
        del about["rows_grouped"]
        (tmp_path / "parts" / "environment.json").write_text(json.dumps(about))
    config = make_config({**steps, "output_dir": str(tmp_path / "parts"), "train.batch_size": 1})
    trainer_of(config).run()
    whole = read_lines(tmp_path / "whole" / "losses.jsonl")
    assert losses(config) == [(line["step"], pytest.approx(line["loss"], rel=1e-3)) for line in whole]


def test_the_learning_rate_counts_optimiser_steps(make_config):
    # Six steps of two micro-batches; a schedule over twelve would hardly have passed its peak.
    config = make_config({"train.epochs": 2, "train.gradient_accumulation": 2, "train.warmup_ratio": 0.34})
    trainer = train(config)
    rates = [line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line]
    assert len(rates) == 6
    assert trainer.state.max_steps == 6
    # A share of 1 is a warm-up to the end, and not one step.
    config.train.warmup_ratio = 1.0
    assert TrainingArguments(**shared_arguments(config)).get_warmup_steps(7) == 7
    # transformers logs the rate a step was done with; the one after the last step is zero.
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(0.0, abs=1e-9)
    peak = config.train.learning_rate
    assert rates == pytest.approx([0, peak / 3, peak * 2 / 3, peak, peak * 0.75, peak * 0.25])


def test_a_checkpoint_holds_what_is_trained_and_loads_by_itself(make_config, records):
    from tripletune.llm.graph_generator import LocalGenerator, load_generator

    config = make_config({"train.save_steps": 3})
    trainer = train(config)
    folder = Path(config.output_dir) / "checkpoint-3"
    stored = load_file(folder / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in stored.values()) == sum(
        value.numel() for value in weights(trainer).values()
    )
    inputs = [record.input for record in records[:4]]
    expected = LocalGenerator(trainer.model, trainer.task.processor).generate_many(inputs, 5)
    found = load_generator(folder).generate_many(inputs, 5)
    assert [reply.text for reply in found] == [reply.text for reply in expected]


@pytest.mark.parametrize(
    "change", [{"model.tune": "graph_token"}, {"model.use_graph": False}, {"model.graph_pooling": "union"}]
)
def test_the_ablations_train(make_config, change):
    config = make_config({**change, "train.epochs": 3})
    before = weights(trainer_of(config))
    after = weights(train(config))
    assert before.keys() == after.keys()
    assert all(torch.isfinite(value).all() for value in after.values())
    # A's gradient is zero at the first step, because B is zero; after nine steps everything has moved.
    still = [name for name in after if torch.equal(before[name], after[name])]
    assert not [name for name in still if not name.endswith("lin_key.bias")]


@pytest.mark.parametrize(
    ("family", "more"),
    [("smollm2", {}), ("gemma2", {}), ("llama", {"data.prompt_order": "interleaved", "train.batch_size": 1})],
)
def test_gradient_checkpointing_trains_to_the_same_weights(make_config, tmp_path, family, more):
    quiet = {**more, "model.graph_dropout": 0.0, "model.lora_dropout": 0.0}
    plain = make_config({**quiet, "output_dir": str(tmp_path / "plain")}, family)
    saving = make_config(
        {**quiet, "output_dir": str(tmp_path / "saving"), "train.gradient_checkpointing": True}, family
    )
    expected, trainer = weights(train(plain)), train(saving)
    assert trainer.model.get_base_model().is_gradient_checkpointing
    for name, value in weights(trainer).items():
        assert torch.allclose(value, expected[name], atol=1e-4), name


def test_without_graph_checkpointing_still_reaches_the_adapter(make_config, tmp_path):
    # Here nothing before the first layer is trained, and a checkpointed layer drops gradients unless its input asks.
    config = make_config({"model.use_graph": False, "train.gradient_checkpointing": True, "train.epochs": 2})
    before = weights(trainer_of(config))
    after = weights(train(config))
    assert any("lora_B" in name and not torch.equal(before[name], after[name]) for name in after)


def test_what_can_not_be_compiled_is_refused():
    with pytest.raises(ValueError, match="Linear has no stack of equal layers"):
        compile_layers(nn.Linear(2, 2), "eager")
