"""What a run folder says about its run: the resolved configuration, git revision and versions."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from tripletune.models.run_folders import FINAL
from tripletune.train.config import to_yaml
from tripletune.train.same_run import ENVIRONMENT, PROCESSES, SETTINGS, TRAIN_DIGEST, process_count, write_text

RESULT = FINAL
PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "torch-geometric",
    "datasets",
    "sentence-transformers",
    "trl",
)


def save_run_settings(config: Any, train_digest: str | None = None) -> None:
    """Write the resolved configuration, git revision and versions into the run folder.

    Args:
        config: The run, a dataclass with `output_dir`.
        train_digest: Fingerprint of the training data; `train.same_run.check_same_run` compares it.
    """
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / SETTINGS, to_yaml(config))
    about = {
        "command": sys.argv,
        "git_revision": _git_revision(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        PROCESSES: process_count(),
        TRAIN_DIGEST: train_digest,
    }
    write_text(folder / ENVIRONMENT, json.dumps(about, indent=2) + "\n")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    try:
        root = Path(__file__).parent
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
