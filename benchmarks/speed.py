"""Compare our training step with those of other trainers on the same rows, for each kind of data that we train on.

Peers run in processes of their own (`benchmarks.peers.process`), and read the batches of our sampler in its order.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import Result, Way, hide_progress_of_libraries, shapes, take_turns
from benchmarks.training import (
    INTERLEAVED,
    TrainingOptions,
    native_bf16,
    open_task,
    pass_settings,
    recipe_settings,
    trainer_way,
)
from tripletune.core.files import write_json
from tripletune.core.options import setting
from tripletune.models.loading import load_tokenizer
from tripletune.train import engine_of
from tripletune.train.tasks import TrainingTask

_ROOT = Path(__file__).resolve().parents[1]
_PEER = "PEER "
_NO_CHECKPOINTING = {"activation_checkpointing": False}
_CHECKPOINTING = {"train.gradient_checkpointing": True}
# Rows with our trainer, and the settings of the recipe that they change.
_OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours-text-alone": {"model.use_graph": False},
    "ours-interleaved": INTERLEAVED,
    "ours-compiled": {"train.torch_compile": True},
    "ours-interleaved-compiled": {**INTERLEAVED, "train.torch_compile": True},
    "ours-lean": _CHECKPOINTING,
    "ours-lean-compiled": {**_CHECKPOINTING, "train.torch_compile": True},
    "ours-interleaved-lean": {**INTERLEAVED, **_CHECKPOINTING},
}
# These need records.
_OF_RECORDS = ("ours-text-alone", "ours-interleaved", "ours-interleaved-compiled", "ours-interleaved-lean")


class Peer(NamedTuple):
    """A row of another trainer.

    Attributes:
        trainer: "trl", "transformers" or "g-retriever".
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
    "g-retriever": Peer("g-retriever", {"in_bfloat16": False}),
    "g-retriever-bfloat16": Peer("g-retriever", {"in_bfloat16": True}),
}
_GRAPH_PEERS = tuple(name for name, peer in _PEERS.items() if peer.trainer == "g-retriever")
_WAYS = (*_PEERS, *_OURS)


class Work(NamedTuple):
    """A kind of data, and how it is trained.

    Attributes:
        task: The training task.
        recipe: The recipe whose settings both sides use.
        reference: Our row that computes what peers compute.
        settings: Settings that differ from the recipe's.
    """

    task: str
    recipe: str
    reference: str
    settings: dict[str, Any]


_WORKS = {
    # Else records of answers would weigh more than in the peers' losses.
    "records": Work(
        "ras",
        "smollm2_135m_ras_cpu",
        "ours-text-alone",
        {"model.attention": "blocks", "train.answer_weight": 1.0},
    ),
    # G-Retriever has one graph per question, LoRA of rank 8 on two layers, and a projector as wide as its encoder.
    "graphs": Work(
        "ras",
        "smollm2_135m_ras_cpu",
        "ours",
        {
            "model.attention": "blocks",
            "train.answer_weight": 1.0,
            "model.graph_pooling": "union",
            "model.graph_dropout": 0.0,
            "model.projector_width": 512,
            "model.lora_rank": 8,
            "model.lora_alpha": 16,
            "model.lora_targets": ["q_proj", "v_proj"],
        },
    ),
    "trajectories": Work("cirag_distill", "smollm2_135m_cirag_cpu", "ours", {}),
    "pairs": Work("text_to_triples", "smollm2_135m_t2t_cpu", "ours", {}),
}
# Tokens of a made trajectory, of which there are three decisions.
_TRAJECTORY_TOKENS = 1200


@dataclass(frozen=True)
class SpeedOptions(TrainingOptions):
    """Options of `speed`."""

    work: str = setting(
        "records",
        "what is trained: RAS records, records with their graphs beside G-Retriever, CIRAG's trajectories, or pairs of "
        "a text and its triples",
        choices=tuple(_WORKS),
    )
    data: str | None = setting(None, "folder of RAS records (default: records of a fictional world)")
    ways: list[str] = setting([], "rows of the table (default: all that need no other environment)", choices=_WAYS)
    dtype: str = setting(
        "auto", "auto: the fastest type of this processor; float32: to compare losses", choices=("auto", "float32")
    )
    peer_python: str | None = setting(
        None, "with trl-chunked: Python of an environment like this one, but with trl 1.14.2 (pip install --no-deps)"
    )

    def check(self) -> list[str]:
        """Problems of rows: one of another environment needs its Python, and one of other data is not made."""
        problems = []
        elsewhere = [name for name in self.ways if name in _PEERS and _PEERS[name].is_elsewhere]
        if elsewhere and self.peer_python is None:
            problems.append(f"ways: {', '.join(elsewhere)} needs --peer-python")
        unfit = [name for name in self.ways if not _trains(name, self.work)]
        if unfit:
            problems.append(f"ways: {', '.join(unfit)} does not train {self.work}")
        if self.data is not None and _WORKS[self.work].task != "ras":
            problems.append(f"data: {self.work} are made here, so leave --data out")
        return problems


def _trains(name: str, work: str) -> bool:
    """Whether a row trains a kind of data: G-Retriever needs graphs, and other peers have none."""
    if name in _PEERS:
        return (name in _GRAPH_PEERS) == (work == "graphs")
    if work == "graphs":
        return name != "ours-text-alone"
    return work == "records" or name not in _OF_RECORDS


def speed(options: SpeedOptions) -> Result:
    """Compare our training step with those of other trainers on the same rows, model and LoRA.

    Every row counts the tokens of prompts and labels in the paper's order. All peers read the batches of our sampler,
    in its order. "Times fastest" is relative to the fastest peer of the run. "Loss difference" is the largest
    difference between a step's loss and that of our row without a graph (with one beside G-Retriever), in the first
    pass; a peer whose losses differ computes something else.
    """
    hide_progress_of_libraries()
    work = _WORKS[options.work]
    count = options.steps * options.batch_size
    names = options.ways or [
        name for name in _WAYS if _trains(name, options.work) and not (name in _PEERS and _PEERS[name].is_elsewhere)
    ]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as processes:
        settings = _settings_of_our_rows(options, work, scratch)
        shared_settings = settings | _OURS[work.reference]
        shared_task = open_task(shared_settings, work.task, work.recipe)
        tokens = sum(shared_task.train["length"])
        request = _peer_request(shared_task, work, shared_settings, Path(scratch))
        ways = []
        losses: dict[str, list[float]] = {}
        for name in names:
            if name in _OURS:
                task = open_task(settings | _OURS[name], work.task, work.recipe)
                ways.append(trainer_way(name, engine_of(task), losses))
            else:
                ways.append(PeerWay.start(name, options, request, losses, processes))
        take_turns(ways, options.repeats)
    rows = [way.row("records", "tokens", records=count, tokens=tokens) for way in ways]
    peers = [way for way in ways if way.name in _PEERS]
    fastest = min(peers, key=lambda way: way.median, default=None)
    expected = losses.get(work.reference, [])
    for way, row in zip(ways, rows):
        row["slowest_and_fastest"] = f"{count / max(way.seconds):.3g} {count / min(way.seconds):.3g}"
        row["times_fastest"] = None if fastest is None else fastest.median / way.median
        row["losses"] = losses[way.name]
        row["loss_difference"] = None
        if expected and (way in peers or way.name == work.reference):
            row["loss_difference"] = max(abs(a - b) for a, b in zip(losses[way.name], expected, strict=True))
    return Result(
        f"{count} {options.work} of {tokens / count:.0f} tokens, {options.batch_size} per step, "
        f"median of {options.repeats}",
        "name records_per_second slowest_and_fastest tokens_per_second times_fastest loss_difference "
        "peak_above_rest_bytes",
        rows,
        [] if fastest is None else [f"the fastest peer is {fastest.name}"],
    )


def _settings_of_our_rows(options: SpeedOptions, work: Work, scratch: str) -> dict[str, Any]:
    """Settings of all our rows; trajectories and pairs are written to `scratch`."""
    settings = {**work.settings}
    if work.task == "ras":
        settings |= recipe_settings(options, scratch, options.data)
    else:
        settings |= pass_settings(options, scratch)
        triples = shapes.world_triples(Path(scratch) / "world", options.seed)
        folder = Path(scratch) / options.work
        count = options.steps * options.batch_size
        if options.work == "pairs":
            shapes.write_pairs(triples, count, folder)
            settings["data.train"] = str(folder)
        else:
            tokenizer = load_tokenizer(options.model)
            shapes.write_trajectories(triples, count, _TRAJECTORY_TOKENS, tokenizer, folder)
            settings["data.train"] = [str(folder)]
    if options.dtype == "float32":
        settings |= {"model.dtype": "float32", "train.bf16": "false"}
    return settings


def _peer_request(task: TrainingTask, work: Work, settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write the rows in our order and the first values of our LoRA; returns the request that names them to peers."""
    from safetensors.torch import save_file

    from benchmarks import peers

    write_json(folder / "rows.json", {"rows": peers.rows_in_our_order(task)})
    save_file(peers.adapter_values(task.model), folder / "adapter.safetensors")
    return {
        "task": work.task,
        "recipe": work.recipe,
        "overrides": dict(settings),
        "rows": str(folder / "rows.json"),
        "adapter": str(folder / "adapter.safetensors"),
        "dtype": "bfloat16" if task.config.train.bf16 != "false" and native_bf16() else "float32",
    }


@dataclass
class PeerWay(Way):
    """A peer in its own process, which also measures its memory.

    Attributes:
        process: Runs `benchmarks.peers.process`, with pipes of text; `start` sets it.
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
            [str(python), "-m", "benchmarks.peers.process", str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT,
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
