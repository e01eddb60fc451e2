"""What it costs to score finished runs again, statistics included."""

from __future__ import annotations

import io
import json
import random
import statistics
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import Options, Result, in_fresh_process, resident
from tripletune.eval import find_metrics, load_task, score_answer
from tripletune.eval.results import ABOUT, METRICS, RESULTS, SETTINGS
from tripletune.models.files import write_json
from tripletune.models.options import setting
from tripletune.rag import Trace, TraceStep

SCORED = "f1,golden_match,label_accuracy,recall@5,recall@15,ndcg@10,mrr"


@dataclass(frozen=True)
class ScoreOptions(Options):
    """Options of `rescore`."""

    records: int = setting(10_000, "questions of each of two runs", at_least=1)


def rescore(options: ScoreOptions) -> Result:
    """Two synthetic runs of HotpotQA's size: `eval score` with seven metrics, then `eval compare` and `eval report`."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        runs = [Path(scratch) / name for name in ("one", "two")]
        for number, folder in enumerate(runs):
            _write_run(folder, options, number)
        size = (runs[0] / RESULTS).stat().st_size
        commands = {
            "eval score, seven metrics": ["score", scratch, "--metrics", SCORED],
            "eval compare": ["compare", *map(str, runs), "--metric", "f1"],
            "eval report": ["report", *map(str, runs), "--output", str(Path(scratch) / "report")],
        }
        for name, words in commands.items():
            taken = [in_fresh_process(_command, words) for _ in range(options.repeats)]
            seconds = statistics.median(one for one, _ in taken)
            row = {"name": name, "records": 2 * options.records, "seconds": seconds, "peak_bytes": taken[0][1]}
            rows.append({**row, "records_per_second": row["records"] / seconds, "passes_seconds": taken})
    notes = [
        f"Two runs of {options.records:,} questions, {size / 1e6:.0f} MB each; seconds of a whole command on both, "
        "with intervals and tests; each in a process of its own."
    ]
    return Result("scoring finished runs again", "name records seconds records_per_second peak_bytes", rows, notes)


def _command(words: list[str]) -> tuple[float, int | None]:
    """Seconds and peak memory of a command."""
    started = time.perf_counter()
    from tripletune.eval.__main__ import main

    with redirect_stdout(io.StringIO()):
        if main(words):
            raise ValueError(f"tripletune eval {words[0]} failed")
    return time.perf_counter() - started, resident("VmHWM")


def _write_run(folder: Path, settings: ScoreOptions, number: int) -> None:
    """A finished run with three rounds of five passages and forty triples a question."""
    drawn, task = random.Random(settings.seed + number), load_task("hotpotqa")
    metrics = {name: find_metrics()[name] for name in task.metrics}
    words = [f"word{place}" for place in range(2000)]
    folder.mkdir()
    with (folder / RESULTS).open("w", encoding="utf-8") as file:
        for question in range(settings.records):
            gold, ids = drawn.sample(words, 3), drawn.sample(range(100_000), 15)
            reply = drawn.sample(gold, drawn.randint(1, 3)) + drawn.sample(words, drawn.randint(0, 4))
            trace = Trace("?", str(question), answer=" ".join(reply), stop_reason="sufficient", calls=4)
            for start in range(0, 15, 5):
                passages = [{"id": str(one), "title": " ".join(gold), "score": 1.0} for one in ids[start : start + 5]]
                trace.steps.append(TraceStep("?", passages, [drawn.sample(words, 3) for _ in range(40)]))
            row: dict[str, Any] = {"id": str(question), "question": "?", "type": drawn.choice(["bridge", "comparison"])}
            row |= {"answers": [" ".join(gold)], "prediction": trace.answer, "error": "", "trace": trace.to_json()}
            row["scores"] = score_answer(trace.answer, row["answers"], metrics)
            row["supporting"] = [str(one) for one in (*drawn.sample(ids, 1), drawn.randrange(100_000))]
            file.write(json.dumps(row) + "\n")
    write_json(folder / SETTINGS, {"system": "standard", "task": {"name": task.name, "metrics": task.metrics}})
    write_json(folder / ABOUT, {"questions": settings.records})
    head = {"system": "standard", "task": task.name, "primary": task.metrics[0], "cost_per_question": {}}
    write_json(folder / METRICS, head)
