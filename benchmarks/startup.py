"""What comes before the first step of a RAS run at the paper's size: strings are embedded and rows tokenised.

The encoder only sleeps, so that its rate is the same with one process and with several that share this machine's cores.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import MODEL, Options, PeakMemory, Result
from tripletune.models.files import file_digest
from tripletune.models.loading import load_tokenizer, resolve
from tripletune.models.options import load_config, setting
from tripletune.models.program import load_from

# Distinct predicates, each of which has a reverse edge, and records of a question.
_PREDICATES, _RECORDS = 1000, 3
_WORDS = ("Ash", "Birch", "Cedar", "Dale", "Elm", "Field", "Grove", "Heath", "Isle", "Knoll")


@dataclass(frozen=True)
class StartupOptions(Options):
    """Options of `startup`."""

    repeats: int = setting(1, "each start is made once", choices=(1,))
    records: int = setting(208_000, "synthetic records, three of a question", at_least=_RECORDS)
    strings: int = setting(2_000_000, "distinct node and edge strings", at_least=2 * _PREDICATES)
    rate: int = setting(50_000, "strings per second and process that the encoder would embed", at_least=1)
    width: int = setting(1024, "numbers of a vector", at_least=8)
    processes: int = setting(2, "processes of the second and third start", at_least=1)
    timeout: int = setting(30, "seconds that a process waits for another in a collective", at_least=1)
    model: str = setting(MODEL, "language model whose tokenizer is used")


def startup(options: StartupOptions) -> Result:
    """Seconds from records on disk to rows and embeddings: one process, several, and the second start.

    Memory is the highest peak of a process over what it had before; files that it has mapped count.
    """
    resolve(options.model)
    rows, made = [], []
    with tempfile.TemporaryDirectory() as folder:
        data = _write_records(options, Path(folder))
        for name, processes in (("one process", 1), ("several", options.processes), ("again", options.processes)):
            output = Path(folder, "one" if name == "one process" else "several")
            found = _start_all(processes, options, data, str(output))
            rows.append(
                {"name": name, "processes": processes, **{key: max(one[key] for one in found) for key in found[0]}}
            )
            results = sorted(path for ending in ("arrow", "npy") for path in output.rglob(f"*.{ending}"))
            made.append([file_digest(path) for path in results])
    ratio = rows[1]["seconds"] / (rows[0]["seconds"] / options.processes)
    return Result(
        f"start-up with {options.records:,} records and {options.strings:,} strings",
        "name processes seconds strings_seconds rows_seconds wait_seconds peak_above_rest_bytes",
        rows,
        [
            f"{ratio:.2f} x an ideal division; {'the same' if made[0] == made[1] == made[2] else 'OTHER'} files",
            f"a collective may take {options.timeout} s",
        ],
    )


def _write_records(options: StartupOptions, folder: Path) -> str:
    questions = options.records // _RECORDS
    nodes = options.strings - 2 * _PREDICATES

    def rows() -> Iterator[dict[str, Any]]:
        # The last question is the first again, of which so many records are taken as lack.
        for number in range(questions + 1):
            at = number % questions
            names = [_name(one) for one in range(at * nodes // questions, (at + 1) * nodes // questions)]
            steps = []
            for part in range(_RECORDS - 1):
                subject, *objects = names[part :: _RECORDS - 1]
                triples = [
                    [subject, _name((number + place) % _PREDICATES).lower(), one] for place, one in enumerate(objects)
                ]
                steps.append({"query": f"What is known of {subject}?", "triples": triples, "text": ""})
            for seen in range(_RECORDS):
                ends = seen == _RECORDS - 1
                yield {
                    "id": f"{number}:{seen}", "question_id": str(number), "question": f"Is {names[0]} by {names[-1]}?",
                    "task": "answering" if ends else "planning", "steps": steps[:seen],
                    "action": "[SUFFICIENT]" if ends else "[SUBQ]", "subquery": "" if ends else steps[seen]["query"],
                    "answers": [names[-1]], "source": "made",
                }  # fmt: skip

    path = folder / "records.jsonl"
    with path.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in islice(rows(), options.records))
    return str(path)


def _name(number: int) -> str:
    return f"{_WORDS[number % 10]} {number:x}"


def _start_all(processes: int, options: StartupOptions, data: str, folder: str) -> list[dict[str, Any]]:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        jobs = [pool.submit(_start, rank, processes, port, options, data, folder) for rank in range(processes)]
        return [job.result() for job in jobs]


def _start(rank: int, processes: int, port: int, options: StartupOptions, data: str, folder: str) -> dict[str, Any]:
    """One process of a run, up to where training would begin."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    from accelerate import PartialState

    from tripletune.models.graph_llm import embeddings
    from tripletune.models.graph_llm.processor import GraphLLMProcessor

    class Sleeping:
        dimension = options.width

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def encode(self, strings: Sequence[str]) -> np.ndarray:
            begun = time.perf_counter()
            vectors = np.zeros((len(strings), self.dimension), np.float16)
            # So that a vector is known by its string.
            keys = np.array([embeddings.string_key(text) for text in strings], np.int64)
            vectors[:, :8] = keys.view(np.uint8).reshape(-1, 8)
            time.sleep(max(0.0, len(strings) / options.rate - (time.perf_counter() - begun)))
            return vectors

    embeddings.TextEncoder = Sleeping  # type: ignore[misc, assignment]
    state = PartialState(cpu=True, timeout=timedelta(seconds=options.timeout))
    kind = load_from("tripletune.train.tasks", "ras", "training task").TASK
    settings = {"data.train": data, "output_dir": folder, "model.base": options.model, "model.encoder": "sleeping"}
    task = kind(load_config(kind.Config, None, settings))
    task.processor = GraphLLMProcessor.create(load_tokenizer(options.model))
    state.wait_for_everyone()
    with PeakMemory() as memory:
        times, made = [time.perf_counter()], []
        for work in (lambda: task.table, lambda: task.rows(task.sources[0], task.cache), state.wait_for_everyone):
            made.append(work())
            times.append(time.perf_counter())
    names = [_name(number) for number in range(0, options.strings - 2 * _PREDICATES, options.strings // 50)]
    alike = np.array_equal(task.table.vectors(names).numpy(), Sleeping().encode(names))
    if not alike or len(made[1]) != options.records:
        raise ValueError("a string has another's vector, or a record is missing")
    parts = zip(("strings_seconds", "rows_seconds", "wait_seconds"), times, times[1:])
    found = {"seconds": times[-1] - times[0]} | {name: end - begin for name, begin, end in parts}
    return found | {"peak_above_rest_bytes": memory.above_rest or 0, "peak_bytes": memory.peak or 0}
