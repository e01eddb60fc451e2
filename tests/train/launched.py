"""What two processes do in `test_launchers.py`: several runs, one after the other, in one start of Python.

Each run comes as JSON: the environment that the launcher makes, the task, and its command line.
"""

import json
import os
import sys
import zlib
from contextlib import suppress
from importlib import import_module
from typing import Any

import sentence_transformers  # noqa: F401
import torch
from accelerate import DistributedType, PartialState
from accelerate.state import AcceleratorState

from tripletune.core.data import jsonl as stored
from tripletune.eval.suites import records
from tripletune.models.graph_llm import embeddings
from tripletune.train import engine, main, text  # noqa: F401

# Several parts for two processes.
PART_BYTES, CHUNK = 2000, 4


def digest_of_replies(_: Any, replies: list[str], *__: Any) -> dict[str, Any]:
    """In place of scores, which are 0 for all that a random model writes."""
    return {"replies": {"mean": float(zlib.crc32(repr(list(replies)).encode()))}}


def prepare() -> None:
    """Make a CPU good enough for DeepSpeed and accelerate's FSDP."""
    torch.distributed.init_process_group("gloo")
    with suppress(ImportError):
        # An operation for CPUs alone, which takes two cores a minute to compile. The package's name `torch` is torch.
        vars(import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None


def run(environment: dict[str, str], task: str, words: list[str]) -> None:
    """One run, as a process of its own would do it."""
    AcceleratorState._reset_state(True)
    before = PartialState._prepare_backend
    os.environ.update(environment)
    if "ACCELERATE_USE_FSDP" in environment:
        # accelerate takes DDP on CPUs, whatever it is told, although FSDP2 works there.
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    code = main(task, argv=words)
    PartialState._prepare_backend = before
    for name in [*environment, "ACCELERATE_TORCH_DEVICE"]:
        os.environ.pop(name, None)
    if code:
        sys.exit(code)


if __name__ == "__main__":
    records.score_predictions = digest_of_replies
    stored.PART_BYTES, embeddings.CHUNK = PART_BYTES, CHUNK
    # As torchrun starts two processes, but what they import is imported once.
    other = os.fork()
    rank = "0" if other else "1"
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": sys.argv[1]}
    prepare()
    for one in json.loads(sys.argv[2]):
        run(*one)
    torch.distributed.barrier()
    sys.stdout.flush()
    failed = bool(other) and os.waitpid(other, 0)[1] != 0
    if failed:
        sys.stderr.write("the second process has failed\n")
    # Threads of the groups that runs have left may still be there: destructors would end the process by SIGABRT.
    os._exit(failed)
