"""What both benchmarks share: peak memory of a stretch of work, the machine they ran on, and the JSON they leave."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
import time
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "peft", "torch-geometric", "sentence-transformers")
_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class PeakMemory:
    """Peak resident memory of a stretch of work, in bytes; a context manager.

    Linux can reset the high-water mark of a process, so each stretch has a peak of its own. Elsewhere `own` is False
    and the peak is that of the process so far.

    Attributes:
        resting: Resident bytes when the stretch began, or None where the system does not tell.
        peak: Peak resident bytes.
        own: Whether the peak belongs to this stretch alone.
    """

    def __init__(self) -> None:
        self.resting: int | None = None
        self.peak = 0
        self.own = False

    def __enter__(self) -> PeakMemory:
        _give_back()
        try:
            _CLEAR_REFS.write_text("5")
            self.own = True
        except OSError:
            self.own = False
        self.resting = _status("VmRSS")
        return self

    def __exit__(self, *exception: object) -> None:
        self.peak = (_status("VmHWM") if self.own else None) or _lifetime_peak()


def quiet() -> None:
    """Keep loading bars and deprecation notes of libraries out of the output."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)


def environment() -> dict[str, Any]:
    """Machine and versions, for the JSON beside the figures."""
    import torch

    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "omp": {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GLIBC_TUNABLES")},
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in _PACKAGES},
        "command": ["python", *sys.argv],
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def write_result(folder: str | Path, name: str, content: dict[str, Any]) -> Path:
    """Write `<folder>/<name>.json` in one step."""
    path = Path(folder) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(scratch, path)
    return path


def gigabytes(count: float | None) -> str:
    """A number of bytes for a table."""
    return "-" if count is None else f"{count / 1e9:.2f}"


def _give_back() -> None:
    # What an earlier stretch freed stays in the allocator's hands, and would count as this one's.
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return


def _status(field: str) -> int | None:
    try:
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)


def _lifetime_peak() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
