"""Whether the trackers of a run can be used, asked before a model is loaded."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence


def check_tracking(report_to: Sequence[str]) -> None:
    """Make sure that a run can report to its trackers.

    Args:
        report_to: Trackers by name: "wandb", "tensorboard", "none".

    Raises:
        ValueError: a package is missing, or W&B has no login.
    """
    if "tensorboard" in report_to and not (_installed("tensorboard") or _installed("tensorboardX")):
        raise ValueError(
            "report_to tensorboard: the package is not installed; pip install tensorboard, or leave it out"
        )
    if "wandb" not in report_to:
        return
    if not _installed("wandb"):
        raise ValueError("report_to wandb: the package is not installed; pip install wandb, or leave it out")
    if os.environ.get("WANDB_MODE", "online") in ("offline", "disabled", "dryrun"):
        return
    import wandb

    try:
        # Looks for a key; asks for one where there is a terminal.
        wandb.login()
    except wandb.errors.UsageError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"report_to wandb: {reason}. To keep the run's records here instead set WANDB_MODE=offline; without W&B: "
            "--report_to none"
        ) from None


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
