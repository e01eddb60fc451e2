"""Start the process in which the authors' code runs."""

import subprocess
import sys
from pathlib import Path


def run_theirs(module: str, clone: str, folder: Path) -> None:
    """Run a module of this folder; `RuntimeError` with the end of its output if it fails."""
    command = [sys.executable, "-m", f"tests.parity.{module}", clone, str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"the authors' side failed:\n{ran.stderr[-3000:]}")
