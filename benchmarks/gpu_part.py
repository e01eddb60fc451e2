"""The process of a training part of `benchmarks.gpu`: `python -m benchmarks.gpu_part REQUEST.json`.

It writes a model with random weights if there is none, makes rows of the wanted length, trains a few steps with our
trainer or a peer, and writes its figures to the file that the request names.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import ENCODER, Row, hide_progress_of_libraries, peers, reset_peak_bytes, resident_bytes, shapes
from tripletune.core.config import load_config
from tripletune.core.data.triples import Triple
from tripletune.core.files import read_json, write_json
from tripletune.core.plugins import load_from
from tripletune.models.loading import load_tokenizer
from tripletune.train import engine_of
from tripletune.train.dry_run import estimate_memory
from tripletune.train.tasks import TrainingTask

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, Trainer

_RECIPES = Path(__file__).resolve().parents[1] / "recipes" / "configs"
# The first steps reserve memory and choose kernels.
_UNMEASURED = 2
_SHRUNK_TOKENS = 640
# Rows and columns of the product that shows the speed of a device.
_PRODUCT = {"cuda": 8192, "cpu": 1024}
# The JSON of `benchmarks.gpu:_command_of_part`: a part's settings, its folders, and limits.
Request = dict[str, Any]


def main(path: str) -> None:
    """Do what a request says, and write the result."""
    request = read_json(path)
    hide_progress_of_libraries()
    # Of the papers' runs, only the extractor's trains all weights and not an adapter.
    trains_all = request["task"] == "text_to_triples"
    task = _open_task(request, trains_all)
    row: Row = {"device": _device_name(), "estimate_bytes": estimate_memory(task).total}
    if request["trainer"] == "ours":
        trainer = engine_of(task)
    else:
        trainer = _trainer_of_peer(task, request)
        # The peer has its own model; ours gave the rows.
        del row["estimate_bytes"]
    clock = peers.Clock(request["limit"])
    trainer.add_callback(clock)
    resting = _reset_peak_bytes()
    trainer.train()
    row |= _speed_figures(task, clock, trains_all)
    row["peak_bytes"] = _peak_bytes()
    row["resting_bytes"] = resting
    write_json(request["result"], row)


def _open_task(request: Request, trains_all: bool) -> TrainingTask:
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
    limits = _write_rows(request["task"], triples, count, tokens, load_tokenizer(model), data)
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


def _graph_settings(request: Request) -> dict[str, Any]:
    """Settings of RAS alone: an encoder that is at hand, and no graph for a peer."""
    if request["task"] != "ras":
        return {}
    settings = {"model.encoder": ENCODER, "model.use_graph": request["trainer"] == "ours"}
    if request["shrink"]:
        settings |= {"model.graph_hidden_width": 64, "model.projector_width": 64}
    return settings


def _write_rows(
    task: str,
    triples: Sequence[Triple],
    count: int,
    tokens: int,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
) -> dict[str, Any]:
    """Write `count` rows of about `tokens` tokens into `folder`, and return the data settings of the run by name."""
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


def _trainer_of_peer(task: TrainingTask, request: Request) -> Trainer:
    """A peer's trainer on the rows of our task; sets `task.model` to None first, since two models may not fit."""
    rows = peers.rows_in_our_order(task)
    task.model = None  # type: ignore[assignment]
    model, tokenizer = peers.adapted_model(task.config, "bfloat16", request["attention"])
    settings = {"activation_checkpointing": request["checkpointing"]}
    if request["trainer"] == "trl":
        return peers.trl_trainer(model, tokenizer, rows, task.config, **settings)
    return peers.transformers_trainer(model, tokenizer, rows, task.config, **settings)


def _speed_figures(task: TrainingTask, clock: peers.Clock, trains_all: bool) -> Row:
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


def _text_config(task: TrainingTask) -> PretrainedConfig:
    """The configuration of the language model, also of a task whose own model was dropped for a peer's."""
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
    """The name of the GPU, or of the CPU with its threads, which decide its speed."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} thread(s)"


def _reset_peak_bytes() -> int | None:
    """Reset the peak, and return the bytes in use now: allocated on the GPU, or resident without one."""
    if not torch.cuda.is_available():
        return reset_peak_bytes()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def _peak_bytes() -> int | None:
    """The peak since `_reset_peak_bytes`: allocated on the GPU, or resident without one."""
    if not torch.cuda.is_available():
        return resident_bytes("VmHWM")
    return int(torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    main(sys.argv[1])
