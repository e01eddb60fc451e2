"""The process of a peer of `benchmarks speed`: `python -m benchmarks.peer_process REQUEST.json`.

A process of its own shows a peer's memory alone, and may belong to an environment with another version of TRL. It
writes a JSON object per line: a first one when it is ready, then one for each line that it reads, after a call of
`train`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from safetensors.torch import load_file

from benchmarks import hide_progress_of_libraries, peers, reset_peak_bytes, resident_bytes
from tripletune.core.config import load_config
from tripletune.core.files import read_json
from tripletune.train.tasks.ras import GraphConfig


def main(path: str) -> None:
    """Make the trainer that a request describes, and train once for each line of the standard input.

    Args:
        path: The request of `benchmarks.training:_peer_request`, with the trainer and its arguments.
    """
    hide_progress_of_libraries()
    request = read_json(path)
    config = load_config(GraphConfig, request["recipe"], request["overrides"])
    rows = read_json(request["rows"])["rows"]
    model, tokenizer = peers.adapted_model(config, request["dtype"])
    peers.copy_into_adapter(model, load_file(request["adapter"]))
    make = peers.trl_trainer if request["trainer"] == "trl" else peers.transformers_trainer
    trainer = make(model, tokenizer, rows, config, **request["settings"])
    clock = peers.Clock()
    trainer.add_callback(clock)
    _write_object({"ready": True})
    for _ in sys.stdin:
        resting = reset_peak_bytes()
        trainer.train()
        peak = resident_bytes("VmHWM")
        _write_object({"seconds": clock.seconds, "losses": clock.losses, "peak": peak, "resting": resting})


def _write_object(content: dict[str, Any]) -> None:
    """Write an object on one line, which the other process finds among the lines of libraries."""
    sys.stdout.write(f"PEER {json.dumps(content)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
