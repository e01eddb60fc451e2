"""The process of a peer of `benchmarks speed`: `python -m benchmarks.peers.process REQUEST.json`.

A process of its own shows a peer's memory alone, and may belong to an environment with another version of TRL. It
writes a JSON object per line: a first one when it is ready, then one for each line that it reads, after a call of
`train`.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from benchmarks import hide_progress_of_libraries, peers, reset_peak_bytes, resident_bytes
from benchmarks.training import RECIPES, open_task
from tripletune.core.config import load_config
from tripletune.core.files import read_json
from tripletune.core.plugins import load_from

if TYPE_CHECKING:
    from transformers import Trainer


def main(path: str) -> None:
    """Make the trainer that a request describes, and train once for each line of the standard input.

    Args:
        path: The request of `benchmarks.speed:_peer_request`, with the trainer and its arguments.
    """
    hide_progress_of_libraries()
    request = read_json(path)
    trainer = _make_trainer(request)
    clock = peers.Clock()
    trainer.add_callback(clock)
    _write_object({"ready": True})
    for _ in sys.stdin:
        resting = reset_peak_bytes()
        trainer.train()
        peak = resident_bytes("VmHWM")
        _write_object({"seconds": clock.seconds, "losses": clock.losses, "peak": peak, "resting": resting})


def _make_trainer(request: dict[str, Any]) -> Trainer:
    """The trainer of a request. G-Retriever gets the graphs of our task, the others only tokens."""
    if request["trainer"] == "g-retriever":
        task: Any = open_task(request["overrides"], request["task"], request["recipe"])
        in_bfloat16 = request["settings"]["in_bfloat16"]
        return peers.g_retriever_trainer(task, request["dtype"], in_bfloat16)
    kind = load_from("tripletune.train.tasks", request["task"], "training task").TASK
    config = load_config(kind.Config, RECIPES / f"{request['recipe']}.yaml", request["overrides"])
    rows = read_json(request["rows"])["rows"]
    model, tokenizer = peers.adapted_model(config, request["dtype"])
    peers.copy_into_adapter(model, load_file(request["adapter"]))
    make = peers.trl_trainer if request["trainer"] == "trl" else peers.transformers_trainer
    return make(model, tokenizer, rows, config, **request["settings"])


def _write_object(content: dict[str, Any]) -> None:
    """Write an object on one line, which the other process finds among the lines of libraries."""
    sys.stdout.write(f"PEER {json.dumps(content)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
