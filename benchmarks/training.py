"""Measure training on the CPU: our trainer and others on the same rows.

Each variant has its own trainer. A pass is a call of the trainer's `train`, timed from the first batch to the last
step, without set-up and checkpoints.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks import ENCODER, MODEL, Options, Result, Way, hide_progress_of_libraries, take_turns
from tripletune.core.config import load_config
from tripletune.core.files import write_json
from tripletune.core.options import setting
from tripletune.core.plugins import load_from
from tripletune.data_builders.subq.build import build
from tripletune.data_builders.subq.options import BuildOptions, Source
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.models.specs import best_dtype
from tripletune.train import engine_of
from tripletune.train.tasks import TrainingTask

if TYPE_CHECKING:
    from transformers import Trainer

_RECIPE = Path(__file__).resolve().parents[1] / "recipes/configs/smollm2_135m_ras_cpu.yaml"
_INTERLEAVED = {"data.prompt_order": "interleaved", "train.batch_size": 1}
_COMPILED = "-compiled"
_PEER = "PEER "
_NO_CHECKPOINTING = {"activation_checkpointing": False}
# Rows of `speed` with our trainer, and the settings of the recipe that they change.
_OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours-text-alone": {"model.use_graph": False},
    "ours-interleaved": _INTERLEAVED,
    "ours-compiled": {"train.torch_compile": True},
    "ours-interleaved-compiled": {**_INTERLEAVED, "train.torch_compile": True},
}


# From the rows of a batch to its tensors by name.
Collator = Callable[[list[dict[str, Any]]], dict[str, Any]]


class Peer(NamedTuple):
    """A row of another trainer.

    Attributes:
        trainer: "trl" or "transformers".
        settings: Arguments that differ from its defaults.
        is_elsewhere: Whether it needs the environment of `--peer-python`.
    """

    trainer: str
    settings: dict[str, Any]
    is_elsewhere: bool = False


_PEERS = {
    "trl-defaults": Peer("trl", {}),
    "trl-best": Peer("trl", _NO_CHECKPOINTING),
    "trl-best-compiled": Peer("trl", {**_NO_CHECKPOINTING, "torch_compile": True}),
    "hf-trainer": Peer("transformers", _NO_CHECKPOINTING),
    "hf-trainer-compiled": Peer("transformers", {**_NO_CHECKPOINTING, "torch_compile": True}),
    "trl-chunked-defaults": Peer("trl", {"loss_type": "chunked_nll"}, is_elsewhere=True),
    "trl-chunked": Peer("trl", {**_NO_CHECKPOINTING, "loss_type": "chunked_nll"}, is_elsewhere=True),
    "trl-chunked-compiled": Peer(
        "trl", {**_NO_CHECKPOINTING, "loss_type": "chunked_nll", "torch_compile": True}, is_elsewhere=True
    ),
}
_WAYS = (*_PEERS, *_OURS)
_USUAL = tuple(name for name in _WAYS if name in _OURS or not _PEERS[name].is_elsewhere)


@dataclass(frozen=True)
class TrainingOptions(Options):
    """Options of `training_step` and `speed`."""

    model: str = setting(MODEL, "language model: hub id, folder or pypi:package")
    steps: int = setting(4, "optimiser steps per pass", at_least=1)
    batch_size: int = setting(4, "records per step", at_least=1)


@dataclass(frozen=True)
class SpeedOptions(TrainingOptions):
    """Options of `speed`."""

    data: str | None = setting(None, "folder of RAS records (default: records of a fictional world)")
    ways: list[str] = setting(list(_USUAL), "rows of the table; compiled rows need a C++ compiler", choices=_WAYS)
    dtype: str = setting(
        "auto", "auto: the fastest type of this processor; float32: to compare losses", choices=("auto", "float32")
    )
    peer_python: str | None = setting(
        None, "with trl-chunked: Python of an environment like this one, but with trl 1.14.2 (pip install --no-deps)"
    )

    def check(self) -> list[str]:
        """A row of another environment needs its Python."""
        elsewhere = [name for name in self.ways if name in _PEERS and _PEERS[name].is_elsewhere]
        if elsewhere and self.peer_python is None:
            return [f"ways: {', '.join(elsewhere)} needs --peer-python"]
        return []


def training_step(options: TrainingOptions) -> Result:
    """Measure how label-only logits, batches by length and shared sequences change a training step of the Graph-LLM.

    "Separate records" is the CPU recipe with one sequence per record, on records of a fictional world; each other row
    changes one setting. Tokens are the computed tokens, padding included.
    """
    hide_progress_of_libraries()
    variants: dict[str, dict[str, Any]] = {
        "separate records": {},
        "logits everywhere": {},
        "random batches": {"train.group_by_length": False},
        "interleaved": _INTERLEAVED,
        "sdpa attention": {"model.attention": "sdpa"},
        "attention in blocks": {"model.attention": "blocks"},
    }
    if _native_bf16():
        variants["float32"] = {"model.dtype": "float32", "train.bf16": "false"}
    count = options.steps * options.batch_size
    with tempfile.TemporaryDirectory() as scratch:
        settings = _recipe_settings(options, scratch) | {"model.attention": "eager"}
        tasks: list[TrainingTask] = []
        ways: list[Way] = []
        for name, changed in variants.items():
            task = _open_task({**settings, **changed})
            trainer = engine_of(task)
            if name == "logits everywhere":
                trainer.data_collator = _with_full_logits(task.collator())
            tasks.append(task)
            ways.append(_trainer_way(name, trainer))
        take_turns(ways, options.repeats)
        rows = []
        for way, task in zip(ways, tasks):
            rows.append(way.row("records", records=count, tokens=_computed_tokens(task)))
    for row in rows:
        row["time_against_first"] = row["seconds"] / rows[0]["seconds"]
    return Result(
        f"training steps of {options.batch_size} records, median of {options.repeats} pass(es)",
        "name records_per_second time_against_first tokens seconds peak_bytes peak_above_rest_bytes",
        rows,
        ["all but float32 in bfloat16" if _native_bf16() else "all in float32: this CPU has no native bfloat16"],
    )


def _with_full_logits(collate: Collator) -> Collator:
    """A collator whose batches make the model compute the logits of all tokens."""
    return lambda rows: {**collate(rows), "full_logits": True}


def speed(options: SpeedOptions) -> Result:
    """Compare our training step with those of other trainers, without graph, on the same records, model and LoRA.

    Every row counts the tokens of prompts and labels in the paper's order. All peers read the batches of our sampler,
    in its order. "Times fastest" is relative to the fastest peer of the run. "Loss difference" is the largest
    difference between a step's loss and that of `ours-text-alone`, in the first pass; a peer whose losses differ
    computes something else.
    """
    hide_progress_of_libraries()
    count = options.steps * options.batch_size
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as processes:
        settings = _recipe_settings(options, scratch, options.data) | {"model.attention": "blocks"}
        # Else records of answers would weigh more than in the peers' losses.
        settings["train.answer_weight"] = 1.0
        if options.dtype == "float32":
            settings |= {"model.dtype": "float32", "train.bf16": "false"}
        text_settings = {**settings, "model.use_graph": False}
        text_task = _open_task(text_settings)
        tokens = sum(text_task.train["length"])
        request = _peer_request(text_task, text_settings, Path(scratch))
        ways = []
        losses: dict[str, list[float]] = {}
        for name in options.ways:
            if name in _OURS:
                task = _open_task({**settings, **_OURS[name]})
                ways.append(_trainer_way(name, engine_of(task), losses))
            else:
                ways.append(PeerWay.start(name, options, request, losses, processes))
        take_turns(ways, options.repeats)
    rows = [way.row("records", "tokens", records=count, tokens=tokens) for way in ways]
    peers = [way for way in ways if way.name in _PEERS]
    fastest = min(peers, key=lambda way: way.median, default=None)
    expected = losses.get("ours-text-alone", [])
    for way, row in zip(ways, rows):
        row["times_fastest"] = None if fastest is None else fastest.median / way.median
        row["losses"] = losses[way.name]
        row["loss_difference"] = None
        if expected and (way in peers or way.name == "ours-text-alone"):
            row["loss_difference"] = max(abs(a - b) for a, b in zip(losses[way.name], expected, strict=True))
    return Result(
        f"{count} records of {tokens / count:.0f} tokens, {options.batch_size} per step, median of {options.repeats}",
        "name records_per_second tokens_per_second times_fastest loss_difference peak_above_rest_bytes",
        rows,
        [] if fastest is None else [f"the fastest peer is {fastest.name}"],
    )


def _peer_request(task: TrainingTask, settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write the rows in our order and the first values of our LoRA; returns the request that names them to peers."""
    from safetensors.torch import save_file

    from benchmarks import peers

    write_json(folder / "rows.json", {"rows": peers.rows_in_our_order(task)})
    save_file(peers.adapter_values(task.model), folder / "adapter.safetensors")
    return {
        "recipe": str(_RECIPE),
        "overrides": dict(settings),
        "rows": str(folder / "rows.json"),
        "adapter": str(folder / "adapter.safetensors"),
        "dtype": "bfloat16" if task.config.train.bf16 != "false" and _native_bf16() else "float32",
    }


@dataclass
class PeerWay(Way):
    """A peer in its own process, which also measures its memory.

    Attributes:
        process: Runs `benchmarks.peer_process`, with pipes of text; `start` sets it.
        losses: Those of each step by way, to which `train` adds the peer's.
    """

    process: Any = None
    losses: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def start(
        cls,
        name: str,
        options: SpeedOptions,
        request: Mapping[str, Any],
        losses: dict[str, list[float]],
        processes: ExitStack,
    ) -> PeerWay:
        """Start the process of a peer, which ends with `processes`, and wait until its trainer is made."""
        peer = _PEERS[name]
        path = Path(request["rows"]).with_name(f"{name}.json")
        # TRL would compute float32 weights in bfloat16.
        types = {"bf16": False} if request["dtype"] == "float32" else {}
        write_json(path, {**request, "trainer": peer.trainer, "settings": types | peer.settings})
        python = options.peer_python if peer.is_elsewhere else sys.executable
        process = subprocess.Popen(
            [str(python), "-m", "benchmarks.peer_process", str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_RECIPE.parents[2],
        )  # fmt: skip
        processes.callback(process.kill)
        way = cls(name, lambda: None, process=process, losses=losses)
        way.work = way.train
        way._read_reply()
        return way

    def train(self) -> float:
        """Let the process train once, keep its losses, and return its seconds."""
        self.process.stdin.write("train\n")
        self.process.stdin.flush()
        reply = self._read_reply()
        self.losses[self.name] = reply["losses"]
        self._last = reply
        return float(reply["seconds"])

    def measure(self) -> None:
        """Measure one pass, with the memory of the peer's process."""
        self.seconds.append(self.train())
        peak, resting = self._last["peak"], self._last["resting"]
        if peak is not None and peak >= (self.peak or 0):
            self.peak = peak
            self.above_rest = peak - resting

    def _read_reply(self) -> dict[str, Any]:
        """Wait for the next object of the process, without the lines of libraries."""
        for line in self.process.stdout:
            if line.startswith(_PEER):
                return dict(json.loads(line.removeprefix(_PEER)))
        raise RuntimeError(f"the process of {self.name} ended with {self.process.wait()}: its error is above")


def _native_bf16() -> bool:
    """Whether this processor computes in bfloat16; else it would be emulated, and slower than float32."""
    import torch

    return best_dtype() is torch.bfloat16


def _recipe_settings(options: TrainingOptions, scratch: str, data: str | None = None) -> dict[str, Any]:
    """Settings for one epoch of full steps in the paper's order, without evaluations and checkpoints.

    Args:
        scratch: Folder for the run, and for the records if there is no `data`.
    """
    count = options.steps * options.batch_size
    # A question gives about four records; these are a third more, so that there are enough.
    questions = max(8, count // 3)
    return {
        "output_dir": f"{scratch}/run",
        "seed": options.seed,
        "data.train": data or _build_records(options.seed, questions, scratch),
        "data.max_train_records": count,
        "data.prompt_order": "instruction_first",
        "model.base": options.model,
        "model.encoder": ENCODER,
        "model.lora_dropout": 0.0,
        "train.epochs": 1,
        "train.batch_size": options.batch_size,
        "train.gradient_accumulation": 1,
        "train.records_per_step": None,
        "train.eval_steps": None,
        "train.save_steps": 10**9,
        "train.logging_steps": 1,
        "train.torch_compile": False,
    }


def _open_task(overrides: Mapping[str, Any]) -> TrainingTask:
    """The task of the CPU recipe, with model and rows loaded."""
    kind = load_from("tripletune.train.tasks", "ras", "training task").TASK
    task = kind(load_config(kind.Config, _RECIPE, overrides))
    task.begin()
    task.validation = None
    return task


def _trainer_way(name: str, trainer: Trainer, losses: dict[str, list[float]] | None = None) -> Way:
    """A pass of a trainer, timed from the first batch to the end of the last step; a pass writes into `losses`."""
    from benchmarks import peers

    clock = peers.Clock()
    trainer.add_callback(clock)

    def train() -> float:
        """Train once, and return the seconds of the clock."""
        trainer.train()
        if losses is not None:
            losses[name] = clock.losses
        return clock.seconds

    return Way(name, train)


def _computed_tokens(task: TrainingTask) -> int:
    """The number of tokens that a pass computes, padding included."""
    size = task.config.train.batch_size
    collate = task.collator()
    order = list(task.sampler(task.train, size))
    tokens = 0
    for start in range(0, len(order), size):
        batch = [task.train[number] for number in order[start : start + size]]
        tokens += collate(batch)["input_ids"].numel()
    return tokens


def _build_records(seed: int, questions: int, scratch: str) -> str:
    """Write the records of a fictional world, and return their folder."""
    write_world(WorldOptions(seed, questions, 0, 0), f"{scratch}/world")
    world, folder = f"{scratch}/world/train", f"{scratch}/records"
    build([Source.parse(f"hotpotqa:{world}.jsonl:{world}.teacher.jsonl")], BuildOptions(folder, split_name="train"))
    return folder
