"""Run an authors' public code beside ours on a made-up world, and print where they differ.

    git clone https://github.com/pat-jj/RAS /tmp/RAS && git -C /tmp/RAS checkout 5b4c376
    python -m tests.parity ras --clone /tmp/RAS
    python -m tests.parity t2rag --clone /tmp/T2RAG      # rockcor/T2RAG, 72c43bd
    python -m tests.parity thrag --clone /tmp/TH-RAG     # Tiabet/TH-RAG, 6543fc2

Nothing of theirs is in this folder: their modules are imported from the clone, in a process of their own, with small
stand-ins for packages that are not installed. Models are random or scripted; nothing is downloaded, and no call leaves
this machine. The exit status is 1 if a difference is not named in `docs/evidence/public_code.md`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

REVISIONS = {"ras": "5b4c376", "t2rag": "72c43bd", "thrag": "6543fc2"}


def main() -> int:
    """Compare one system, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__.partition("\n")[0])
    parser.add_argument("system", choices=sorted(REVISIONS))
    parser.add_argument("--clone", required=True, help="path of a clone of the authors' repository")
    options = parser.parse_args()
    root = str(Path(__file__).parents[2])
    # The processes of the other side find this folder, but not the clone's modules in it.
    os.environ.update(PYTHONPATH=root, PYTHONDONTWRITEBYTECODE="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1",
                      OPENAI_API_KEY="none", PYTHONSAFEPATH="1")  # fmt: skip
    clone = Path(options.clone).resolve()
    git = subprocess.run(["git", "-C", str(clone), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    revision = git.stdout.strip()[:7]
    if git.returncode:
        parser.error(f"--clone {options.clone}: it is no git clone: {git.stderr.strip()}")
    if revision != REVISIONS[options.system]:
        print(f"The clone is at {revision}; the page was written with {REVISIONS[options.system]}.", file=sys.stderr)
    started = time.perf_counter()
    part = import_module(f"tests.parity.{options.system}")
    table = import_module("tests.parity.table")
    with tempfile.TemporaryDirectory() as folder:
        rows = part.compare(str(clone), Path(folder))
    print(f"{part.SECTION}, the authors' code at {revision} beside ours ({time.perf_counter() - started:.0f} s)\n")
    status: int = table.show(part.SECTION, rows)
    return status


if __name__ == "__main__":
    sys.exit(main())
