"""What two processes do in `test_launched.py`: command lines of `tripletune eval`, all in one start of Python.

Each line of the input starts two processes, as torchrun does: JSON of a port, of how many rows a process writes until
it is killed (0: no kill), and of the command lines. A line of the output has their exit codes.
"""

import json
import os
import signal
import sys
from typing import Any

import sentence_transformers  # noqa: F401

import tripletune.models.graph_llm  # noqa: F401
from tripletune.eval.__main__ import main
from tripletune.eval.result_log import ResultLog


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
    for line in sys.stdin:
        port, killed, commands = json.loads(line)
        children = []
        for rank in (0, 1):
            if not (child := os.fork()):
                os.dup2(2, 1)
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
                os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
                if killed:
                    kill_after(killed + rank)
                os._exit(max(main(words) for words in commands))
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)
    os._exit(0)  # what was imported is not taken down
