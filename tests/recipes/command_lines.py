"""Recipes as people run them: command lines, real kills, and what a run wrote."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cli import read_lines
from tripletune.core.config import to_yaml

ROOT = Path(__file__).resolve().parents[2]


def command_line(recipe: str, config: Any) -> list[str]:
    """The words behind `python` that run a recipe with a configuration."""
    path = Path(config.output_dir).with_suffix(".yaml")
    path.write_text(to_yaml(config))
    return [str(ROOT / "recipes" / f"{recipe}.py"), "--config", str(path)]


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in another process."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def lines(config: Any, name: str = "losses.jsonl") -> list[dict[str, Any]]:
    """The lines of a log, without the time."""
    return read_lines(Path(config.output_dir) / name, "seconds")
