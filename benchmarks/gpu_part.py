"""The process of a training part of `benchmarks.gpu`: `python -m benchmarks.gpu_part REQUEST.json`.

It writes a model with random weights if there is none, makes rows of the wanted length, trains a few steps with our
trainer or a peer, and writes its figures to the file that the request names.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import ENCODER, peers, quiet, reset_peak, resident, shapes
from tripletune.core.config import load_config
from tripletune.core.files import read_json, write_json
from tripletune.core.plugins import load_from
from tripletune.models.loading import load_tokenizer
from tripletune.train import engine_of
from tripletune.train.dry_run import estimate_memory

_RECIPES = Path(__file__).resolve().parents[1] / "recipes" / "configs"
# The first steps reserve memory and choose kernels.
_UNMEASURED = 2
_SHRUNK_TOKENS = 640
_PRODUCT = {"cuda": 8192, "cpu": 1024}


def main(path: str) -> None:
    """Do what a request says, and write the result."""
    request = read_json(path)
    quiet()
    trains_all = request["task"] == "text_to_triples"
    task = _open_task(request, trains_all)
    row: dict[str, Any] = {"device": _device_name(), "estimate_bytes": estimate_memory(task).total}
    if request["trainer"] == "ours":
        trainer = engine_of(task)
    else:
        trainer = _peer(task, request)
        # The peer has its own model; ours gave the rows.
        del row["estimate_bytes"]
    clock = peers.Clock(request["limit"])
    trainer.add_callback(clock)
    resting = _reset_peak()
    trainer.train()
    row |= _speed(task, clock, trains_all)
    row["peak_bytes"] = _peak()
    row["resting_bytes"] = resting
    write_json(request["result"], row)


def _open_task(request: dict[str, Any], trains_all: bool) -> Any:
    """A paper's task with a random model and rows of the wanted length.

    For a peer on RAS records, the task has no graph, as the peer has none.
    """
    scratch = Path(request["scratch"])
    shape = shapes.SHAPES[request["shape"]]
    tokens = request["tokens"]
    batch_size = request["batch_size"]
    if request["shrink"]:
        shape = shapes.shrunk(shape)
        tokens = _SHRUNK_TOKENS
        batch_size = min(batch_size, 2)
    triples = shapes.world_triples(scratch / f"world-{time.time_ns()}", request["seed"])
    model = scratch / "models" / request["shape"]
    # Frozen weights are stored as they are used; AdamW needs float32.
    shapes.write_model(shape, model, "float32" if trains_all else "bfloat16", shapes.texts_of(triples))
    data = scratch / f"data-{time.time_ns()}"
    count = batch_size * request["steps"]
    limits = _write_data(request["task"], triples, count, tokens, load_tokenizer(model), data)
    settings = {
        "output_dir": str(scratch / f"run-{time.time_ns()}"),
        "seed": request["seed"],
        "model.base": str(model),
        "model.attention": request["attention"],
        "train.batch_size": batch_size,
        "train.records_per_step": None,
        "train.gradient_accumulation": 1,
        "train.gradient_checkpointing": request["checkpointing"],
        "train.max_steps": request["steps"],
        "train.eval_steps": None,
        "train.save_steps": 10**9,
        "train.logging_steps": 1,
        "train.workers": 0,
        "report_to": [],
    }
    kind = load_from("tripletune.train.tasks", request["task"], "training task").TASK
    recipe = _RECIPES / f"{request['recipe']}.yaml"
    task = kind(load_config(kind.Config, recipe, settings | limits | _graph_settings(request)))
    task.begin()
    task.validation = None
    return task


def _graph_settings(request: dict[str, Any]) -> dict[str, Any]:
    """Settings of RAS alone: an encoder that is at hand, and no graph for a peer."""
    if request["task"] != "ras":
        return {}
    settings = {"model.encoder": ENCODER, "model.use_graph": request["trainer"] == "ours"}
    if request["shrink"]:
        settings |= {"model.graph_hidden_width": 64, "model.projector_width": 64}
    return settings


def _write_data(task: str, triples: Any, count: int, tokens: int, tokenizer: Any, folder: Path) -> dict[str, Any]:
    """Write rows of about `tokens` tokens, and return the settings of the data section."""
    if task == "ras":
        label_room = min(300, tokens // 4)
        shapes.write_records(triples, count, tokens, tokenizer, folder)
        return {
            "data.train": str(folder),
            "data.max_input_tokens": tokens - label_room,
            "data.max_label_tokens": label_room,
        }
    if task == "cirag_distill":
        shapes.write_trajectories(triples, count, tokens, tokenizer, folder)
        return {"data.train": [str(folder)], "data.max_tokens": tokens, "data.max_prompt_tokens": tokens * 7 // 8}
    shapes.write_pairs(triples, count, folder)
    return {"data.train": str(folder)}


def _peer(task: Any, request: dict[str, Any]) -> Any:
    """A peer's trainer on the rows of our task, whose model is dropped first."""
    rows = peers.rows_in_our_order(task)
    task.model = None
    model, tokenizer = peers.adapted_model(task.config, "bfloat16", request["attention"])
    settings = {"activation_checkpointing": request["checkpointing"]}
    if request["trainer"] == "trl":
        return peers.trl_trainer(model, tokenizer, rows, task.config, **settings)
    return peers.transformers_trainer(model, tokenizer, rows, task.config, **settings)


def _speed(task: Any, clock: peers.Clock, trains_all: bool) -> dict[str, Any]:
    """The speed of the measured steps, from the tokens of an average step."""
    measured = clock.steps[_UNMEASURED:]
    if not measured:
        raise ValueError(
            f"only {len(clock.steps)} step(s) ended in time, of which the first {_UNMEASURED} do not count"
        )
    batch_size = task.config.train.batch_size
    lengths = []
    labels = 0
    for row in task.train:
        lengths.append(len(row["input_ids"]))
        labels += sum(label != -100 for label in row["labels"])
    steps = len(lengths) / batch_size
    config = _text_config(task)
    flops = shapes.step_flops(config, lengths, labels, trains_all) / steps
    seconds = statistics.median(measured)
    peak = _product_flops()
    return {
        "seconds": seconds,
        "steps_seconds": clock.steps,
        "losses": clock.losses,
        "tokens": sum(lengths) / steps,
        "tokens_per_second": sum(lengths) / steps / seconds,
        "flops": flops,
        "product_flops_per_second": peak,
        "mfu": flops / seconds / peak,
    }


def _text_config(task: Any) -> Any:
    """The configuration of the language model."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(task.config.model.base)


def _product_flops() -> float:
    """Operations per second of one large bfloat16 product, the best of five."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = _PRODUCT[device]
    matrix = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    best = 0.0
    for _ in range(5):
        begun = time.perf_counter()
        torch.mm(matrix, matrix)
        if device == "cuda":
            torch.cuda.synchronize()
        best = max(best, 2.0 * size**3 / (time.perf_counter() - begun))
    return best


def _device_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} thread(s)"


def _reset_peak() -> int | None:
    """Reset the peak, and return the bytes in use."""
    if not torch.cuda.is_available():
        return reset_peak()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def _peak() -> int | None:
    if not torch.cuda.is_available():
        return resident("VmHWM")
    return int(torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    main(sys.argv[1])
