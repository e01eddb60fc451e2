"""The benchmark for a GPU: parts that fail do not end it, and it continues. Sizes are those that it says."""

import json

import pytest
import torch

from benchmarks import gpu, shapes
from benchmarks.gpu import GpuOptions, Part
from tripletune.core.data.triples import Triple, format_triples
from tripletune.models.loading import load_tokenizer
from tripletune.models.specs import resolve

SECONDS = {"good": 30.0, "memory": 30.0, "crash": 30.0, "slow": 2.0, "last": 30.0}
PARTS = tuple(Part(name, "training", seconds, {"shape": name}) for name, seconds in SECONDS.items())
CODE = {
    "good": 'open(sys.argv[1], \'w\').write(\'{"seconds": 2.5, "device": "this one"}\')',
    "memory": "raise RuntimeError('CUDA out of memory. Tried to allocate')",
    "crash": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "slow": "import time; time.sleep(600)",
    "last": 'open(sys.argv[1], \'w\').write(\'{"seconds": 1.5, "device": "this one"}\')',
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the benchmark with parts of one line of Python; the rows by name, and which parts ran."""
    ran = []

    def command(part, options, scratch, result):
        ran.append(part.name)
        return ["-c", f"import sys; {CODE[part.name]}", str(result)]

    monkeypatch.setattr(
        gpu, "PARTS", tuple(part._replace(seconds=2.0 if part.name == "slow" else 30.0) for part in PARTS)
    )
    monkeypatch.setattr(gpu, "_command_of_part", command)

    def go(**options):
        ran.clear()
        chosen = GpuOptions(device="cpu", shrink=True, output=str(tmp_path), **options)
        result = gpu.gpu(chosen)
        stored = json.loads((tmp_path / "gpu.json").read_text())["rows"] if (tmp_path / "gpu.json").exists() else []
        return {row["name"]: row for row in result.rows}, list(ran), stored

    return go


def test_a_part_that_fails_is_a_row_and_the_next_part_runs(run):
    rows, ran, stored = run()
    assert ran == ["good", "memory", "crash", "slow", "last"]
    statuses = {name: row["status"] for name, row in rows.items()}
    expected = {"good": "done", "memory": "out of memory", "crash": "failed", "slow": "stopped", "last": "done"}
    assert statuses == expected
    assert rows["good"]["seconds"] == 2.5
    assert rows["last"]["seconds"] == 1.5, "not what an earlier part has written"
    assert "CUDA out of memory" in rows["memory"]["reason"]
    assert rows["slow"]["part_seconds"] < 20
    assert {row["name"]: row["status"] for row in stored} == expected


def test_a_second_call_runs_what_is_not_done(run):
    run()
    rows, ran, _ = run()
    assert ran == ["memory", "crash", "slow"]
    assert rows["last"]["seconds"] == 1.5
    _, ran, _ = run(steps=5)
    assert ran == list(CODE), "other sizes are other figures"
    _, ran, _ = run(steps=5, again=True, parts=["go"])
    assert ran == ["good"]


def test_no_part_begins_without_time(run):
    rows, ran, _ = run(minutes=0.1)
    assert not ran
    assert {row["reason"] for row in rows.values()} == {"no time left"}


def test_full_sizes_need_a_gpu(tmp_path):
    with pytest.raises(ValueError, match="add --shrink"):
        gpu.gpu(GpuOptions(device="cpu", output=str(tmp_path)))


def test_operations_of_a_step():
    """Two layers of width 8, counted by hand: weights of a layer 4 x 64 + 3 x 8 x 16 = 640, head 8 x 10."""
    config = type("Config", (), {
        "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 10,
    })()  # fmt: skip
    attention = 2 * 6 * (16 / 2 + 4 / 2) * 8 * 2
    assert shapes.step_flops(config, [4, 2], 3, trains_all=False) == 4 * (1280 * 6 + 80 * 3) + attention
    assert shapes.step_flops(config, [4, 2], 3, trains_all=True) == 6 * (1280 * 6 + 80 * 3) + attention


def test_shapes_are_those_of_the_models():
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"llama-2-7b": 6.738, "llama-3-8b": 8.030, "qwen2.5-7b": 7.616, "llama-3.2-3b": 3.213}
    for name, billions in sizes.items():
        shape = shapes.SHAPES[name]
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.model_type, **shape.fields))
        assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.001)
        small = shapes.shrunk(shape).fields
        groups = shape.fields["num_attention_heads"] / shape.fields["num_key_value_heads"]
        assert small["num_attention_heads"] / small["num_key_value_heads"] == groups


def test_rows_have_the_wanted_length(tmp_path):
    triples = shapes.world_triples(tmp_path / "world", 7)
    shapes.write_model(
        shapes.shrunk(shapes.SHAPES["llama-3-8b"]), tmp_path / "model", "float32", shapes.texts_of(triples)
    )
    tokenizer = load_tokenizer(resolve(str(tmp_path / "model")))
    shapes.write_records(triples, 4, 1000, tokenizer, tmp_path / "records")
    rows = [json.loads(line) for line in (tmp_path / "records" / "train-00000.jsonl").read_text().splitlines()]
    assert {row["task"] for row in rows} == {"planning", "answering"}
    for row in rows:
        known = [Triple(*parts) for step in row["steps"] for parts in step["triples"]]
        assert 1000 < len(tokenizer(format_triples(known))["input_ids"]) < 1250, (
            "somewhat more, to be cut to one length"
        )
    shapes.write_trajectories(triples, 2, 1000, tokenizer, tmp_path / "chats")
    for line in (tmp_path / "chats" / "train-00000.jsonl").read_text().splitlines():
        chat = json.loads(line)
        text = "\n".join(message["content"] for message in chat["messages"])
        assert 1000 < len(tokenizer(text)["input_ids"]) < 1700, "more than wanted, for the run to cut"
        assert sum(chat["learned"]) == 3, "a decision for each of three rounds"
    shapes.write_pairs(triples, 2, tmp_path / "pairs")
    pairs = [json.loads(line) for line in (tmp_path / "pairs" / "train-00000.jsonl").read_text().splitlines()]
    assert [len(pair["triples"]) for pair in pairs] == [14, 14]
    assert all(fact[2] in pair["text"] for pair in pairs for fact in pair["triples"])
