"""One command for the day a GPU is at hand: training steps at the papers' sizes, decoding, and the GPU tests.

Each part runs in its own process, so an error or a lack of memory ends this part alone. After each part, the JSON is
written, and the same command continues after a stop with the parts that it lacks.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks import Options, Result, Row, hide_progress_of_libraries, write_figures
from tripletune.core.files import read_json, write_json
from tripletune.core.options import setting

_ROOT = Path(__file__).resolve().parents[1]
# A part that gets less time would only load its model.
_LEAST_SECONDS = 20.0
_OPTIONAL = {"flash_attention_2": "flash_attn"}


@dataclass(frozen=True)
class GpuOptions(Options):
    """Options of `gpu`."""

    minutes: float = setting(20, "stop after so many minutes; parts that are left are named", above=0)
    device: str = setting("auto", "auto: the GPU, or an error; cpu: only with --shrink", choices=("auto", "cpu"))
    shrink: bool = setting(False, "two narrow layers and short rows, to try every part on any machine")
    steps: int = setting(12, "steps of a training part, two of them unmeasured", at_least=3)
    parts: list[str] = setting([], "names of parts, or their beginnings (default: all)")
    again: bool = setting(False, "measure parts again that are in the JSON of an earlier call")


class Part(NamedTuple):
    """A part of the benchmark.

    Attributes:
        work: What its process does: a training (`benchmarks.gpu_part`), decoding, or the tests.
        seconds: The longest time that it gets; then it is ended.
        settings: What `benchmarks.gpu_part` reads.
    """

    name: str
    work: str
    seconds: float
    settings: Mapping[str, Any] = MappingProxyType({})


def _ras_part(shape: str, trainer: str = "ours", attention: str = "sdpa", checkpointing: bool = False) -> Part:
    """A RAS step of the paper's recipe, or a peer's step on the same tokens."""
    recipe = "llama2_7b_ras_paper" if shape == "llama-2-7b" else "llama3_8b_ras_paper"
    words = ["ras", shape, trainer]
    if attention != "sdpa":
        words.append(attention)
    if checkpointing:
        words.append("checkpointing")
    settings = {"task": "ras", "recipe": recipe, "shape": shape, "trainer": trainer, "tokens": 2800}
    settings |= {"attention": attention, "checkpointing": checkpointing, "batch_size": 2}
    return Part(" ".join(words), "training", 240, settings)


_CIRAG = {
    "task": "cirag_distill", "recipe": "qwen25_7b_cirag_paper", "shape": "qwen2.5-7b", "trainer": "ours",
    "attention": "sdpa", "checkpointing": True, "batch_size": 1, "tokens": 8192,
}  # fmt: skip
_EXTRACTOR = {
    "task": "text_to_triples", "recipe": "llama32_3b_t2t_paper_text", "shape": "llama-3.2-3b", "trainer": "ours",
    "attention": "sdpa", "checkpointing": True, "batch_size": 32, "tokens": 768,
}  # fmt: skip
# In order of worth: the first of each kind come before the variants of RAS.
PARTS = (
    _ras_part("llama-2-7b"),
    _ras_part("llama-2-7b", checkpointing=True),
    _ras_part("llama-2-7b", "transformers"),
    _ras_part("llama-2-7b", "trl"),
    _ras_part("llama-3-8b"),
    _ras_part("llama-3-8b", checkpointing=True),
    Part("cirag qwen2.5-7b ours checkpointing", "training", 240, _CIRAG),
    Part("extractor llama-3.2-3b ours checkpointing", "training", 240, _EXTRACTOR),
    Part("decoding of 64 loops", "decoding", 300),
    Part("pytest -m gpu", "tests", 420),
    _ras_part("llama-2-7b", attention="flex_attention"),
    _ras_part("llama-2-7b", attention="flash_attention_2"),
    _ras_part("llama-2-7b", "transformers", checkpointing=True),
    _ras_part("llama-2-7b", "trl", checkpointing=True),
    _ras_part("llama-3-8b", "transformers"),
    _ras_part("llama-3-8b", "trl"),
)


def gpu(options: GpuOptions) -> Result:
    """Measure training at the papers' sizes with random weights, decoding and the GPU tests, in order of worth.

    Each part has its own process; the JSON is written after each of them. "Peak GB" is what training allocates on the
    GPU (on a CPU, the resident memory), "estimate" what the dry run says. MFU is the share of the speed of one large
    bfloat16 product on the same device, counted without padding and recomputation.
    """
    hide_progress_of_libraries()
    _check_device(options)
    deadline = time.monotonic() + 60 * options.minutes
    parts = [part for part in PARTS if _is_chosen(part, options)]
    if not parts:
        raise ValueError(f"--parts {', '.join(options.parts)} names no part; parts: {', '.join(p.name for p in PARTS)}")
    rows = {} if options.again else _earlier_rows(options)
    with tempfile.TemporaryDirectory(prefix="gpu-benchmark-") as scratch:
        for number, part in enumerate(parts):
            if part.name not in rows:
                rows[part.name] = _run_part(part, options, Path(scratch), deadline - time.monotonic())
                print(f"{part.name}: {rows[part.name]['status']}", flush=True)
                write_figures(_table_so_far(parts, rows, options), "gpu", options)
            _drop_models(Path(scratch), parts[number + 1 :])
    return _table_so_far(parts, rows, options)


def _check_device(options: GpuOptions) -> None:
    """Refuse a run that would not end: full sizes need a GPU."""
    import torch

    if options.device == "cpu" and not options.shrink:
        raise ValueError("--device cpu: the papers' sizes would take days on a CPU; add --shrink")
    if options.device == "auto" and not torch.cuda.is_available():
        raise ValueError("--device auto: torch sees no GPU here; try the parts with --device cpu --shrink")


def _is_chosen(part: Part, options: GpuOptions) -> bool:
    """Whether `--parts` names a part, or the beginning of its name; without `--parts` all are chosen."""
    return not options.parts or any(part.name.startswith(name) for name in options.parts)


def _earlier_rows(options: GpuOptions) -> dict[str, Row]:
    """The finished parts of an earlier call with the same sizes; other parts are run again."""
    path = Path(options.output) / "gpu.json"
    if not path.is_file():
        return {}
    content = read_json(path)
    same = ("device", "shrink", "steps", "seed")
    if any(content["options"].get(name) != getattr(options, name) for name in same):
        return {}
    return {row["name"]: row for row in content["rows"] if row["status"] == "done"}


def _run_part(part: Part, options: GpuOptions, scratch: Path, left: float) -> Row:
    """Run a part in its own process, and return its row; what goes wrong is the row's status.

    Args:
        left: Seconds until the whole benchmark must end.
    """
    row: Row = {"name": part.name, "status": "not run", **part.settings}
    package = _OPTIONAL.get(part.settings.get("attention", ""))
    if left < _LEAST_SECONDS:
        return row | {"reason": "no time left"}
    if package and not _is_installed(package):
        return row | {"reason": f"{package} is not installed"}
    if options.device == "cpu" and part.settings.get("attention") == "flex_attention":
        return row | {"reason": "flex attention has no backward on a CPU"}
    result = scratch / ("loop.json" if part.work == "decoding" else "result.json")
    result.unlink(missing_ok=True)
    folder = Path(options.output) / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{part.name.replace(' ', '_')}.log"
    begun = time.monotonic()
    row["status"], row["reason"] = _execute_for(
        _command_of_part(part, options, scratch, result), options, log, min(part.seconds, left)
    )
    row["part_seconds"] = time.monotonic() - begun
    row["log"] = str(log)
    if result.is_file():
        content = read_json(result)
        row |= content if part.work == "training" else _loop_figures(content)
    return row


def _command_of_part(part: Part, options: GpuOptions, scratch: Path, result: Path) -> list[str]:
    """The command of a part, without `python`; for a training it writes the request for `benchmarks.gpu_part`."""
    if part.work == "tests":
        chosen = ["-k", "ras"] if options.shrink else []
        return ["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *chosen, "tests/test_gpu.py"]
    if part.work == "decoding":
        questions, alone = (2, 1) if options.shrink else (64, 8)
        counts = ["--questions", str(questions), "--one-by-one", str(alone), "--concurrency", str(questions)]
        return ["-m", "benchmarks", "loop", *counts, "--output", str(result.parent), "--seed", str(options.seed)]
    settings = {
        **part.settings,
        "result": str(result),
        "scratch": str(scratch),
        "shrink": options.shrink,
        "steps": options.steps,
        "seed": options.seed,
        # The rest is for loading and making data.
        "limit": part.seconds / 4,
    }
    request = scratch / "request.json"
    write_json(request, settings)
    return ["-m", "benchmarks.gpu_part", str(request)]


class _Ended(NamedTuple):
    """How a part ended: "done", "stopped", "killed", "out of memory" or "failed", and why unless it is done."""

    status: str
    reason: str


def _execute_for(command: Sequence[str], options: GpuOptions, log: Path, seconds: float) -> _Ended:
    """Run a command in its own process group for at most `seconds`, and write what it prints to `log`."""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    if options.device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TRIPLETUNE_GPU_TESTS": "cpu"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=_ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return _Ended("stopped", f"not done after {seconds:.0f} s")
        finally:
            _kill_group(process)
    if code == 0:
        return _Ended("done", "")
    text = log.read_text(encoding="utf-8", errors="replace")
    if code == -signal.SIGKILL:
        return _Ended("killed", "the main memory may be too small")
    last = [line for line in text.splitlines() if line.strip()][-1:]
    status = "out of memory" if "OutOfMemoryError" in text or "out of memory" in text else "failed"
    return _Ended(status, f"exit code {code}: {' '.join(last)[:200]}")


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children, also those that have outlived it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported here, which would take a GPU's memory."""
    return importlib.util.find_spec(package) is not None


def _loop_figures(content: Row) -> Row:
    """The figures of the case `loop`: questions per second together, and how much faster that is than one by one."""
    alone, together = content["rows"]
    return {
        "seconds": together["seconds"],
        "questions_per_second": together["questions_per_second"],
        "against_one_by_one": together["questions_per_second"] / alone["questions_per_second"],
        "notes": content["notes"],
    }


def _drop_models(scratch: Path, later: Sequence[Part]) -> None:
    """Delete models that no later part needs: four of them do not fit on a small disk."""
    needed = {part.settings.get("shape") for part in later}
    for folder in scratch.glob("models/*"):
        if folder.name not in needed:
            shutil.rmtree(folder)


def _table_so_far(parts: Sequence[Part], rows: dict[str, Row], options: GpuOptions) -> Result:
    """The table so far; parts that were not reached are in it."""
    shown = [rows.get(part.name, {"name": part.name, "status": "not run"}) for part in parts]
    notes = ["sizes are shrunk: no figure says anything about a GPU"] if options.shrink else []
    devices = sorted({row["device"] for row in shown if row.get("device")})
    if devices:
        notes.append(f"device: {', '.join(devices)}")
    notes += [f"{row['name']}: {row['reason']}" for row in shown if row.get("reason")]
    return Result(
        "training steps with random weights, decoding and tests",
        "name status seconds tokens_per_second mfu peak_bytes estimate_bytes",
        shown,
        notes,
    )
