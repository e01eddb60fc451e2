"""What two processes do in `test_launched.py`: command lines of `tripletune eval`, in one start of Python.

Arguments: a port; how many rows a process writes until it is killed, 0 for no kill; the command lines as JSON.
"""

import json
import os
import signal
import sys
from typing import Any

import sentence_transformers  # noqa: F401

import tripletune.models.graph_llm  # noqa: F401
from tripletune.eval.__main__ import main
from tripletune.eval.results import ResultLog


def kill_after(rows: int) -> None:
    """Kill this process when it has written so many rows, and half of the next."""
    append = ResultLog.append

    def short(log: ResultLog, row: dict[str, Any]) -> None:
        nonlocal rows
        if not rows:
            log._file.write(json.dumps(row)[:20])
            log._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        rows -= 1
        append(log, row)

    ResultLog.append = short  # type: ignore[method-assign]


if __name__ == "__main__":
    # As torchrun starts two processes, but what they import is imported once.
    other = os.fork()
    rank = "0" if other else "1"
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": sys.argv[1]}
    if int(sys.argv[2]):
        kill_after(int(sys.argv[2]) + int(rank))
    codes = [main(words) for words in json.loads(sys.argv[3])]
    failed = other and os.waitpid(other, 0)[1]
    sys.exit(1 if failed or any(codes) else 0)
