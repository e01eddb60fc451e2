"""How fast the whole HotpotQA-SUBQ builder is when every reply is stored, and that its memory does not grow.

    python benchmarks/build_subq.py
    python benchmarks/build_subq.py --sizes 500 2000 --paths annotations

Synthetic questions in HotpotQA's layout, ten passages each, go through the whole of `data_builders.hotpotqa_subq`:
reader, teacher, checks, labelling, shards, statistics and card. Two paths: `annotations` takes recorded replies from a
file; `ledger` asks `LLMTeacher` through a full ledger, behind which a model that refuses every call proves that nothing
is sent. Each size runs in a process of its own, so that its peak memory is its own. Nothing needs a model.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import PeakMemory, environment, write_result

from tripletune.models.llm.client import CallError, Message, Sampling
from tripletune.models.local.generation import Completion

PATHS = ("annotations", "ledger")
_PASSAGES, _WORDS = 10, 45
_VOCABULARY = [
    f"{start}{middle}{end}"
    for start in ("ka", "lo", "mi", "ne", "ru", "sa", "te", "vo")
    for middle in ("b", "d", "ll", "m", "nt", "r", "st")
    for end in ("a", "en", "ir", "on", "us")
]
_TITLE = re.compile(r"^Document: (?:Book|Author) (\d+)$", re.MULTILINE)
_KIND = re.compile(r"^Document: (Book|Author) ", re.MULTILINE)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the JSON; bad input gives one line and exit code 2."""
    args = _parser().parse_args(argv)
    if args.worker:
        print(json.dumps(_work(Path(args.folder), args.worker, args.step)))
        return 0
    try:
        if min(args.sizes) < 1:
            raise ValueError(f"--sizes {args.sizes}: every size must be at least 1")
        result = measure(args.sizes, args.paths)
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(result["rows"])
    print(f"written to {write_result(args.output, 'build_subq', result)}")
    return 0


def measure(sizes: Sequence[int], paths: Sequence[str]) -> dict[str, Any]:
    """Build every size by every path.

    Returns:
        The content of the JSON file.

    Raises:
        CalledProcessError: a build failed.
    """
    rows = []
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="build_subq_") as name:
            folder = Path(name)
            write_questions(folder, size)
            for path in paths:
                if path == "ledger":
                    _in_process(folder, "fill", size)
                rows.append({"path": path, "questions": size, **_in_process(folder, path, size)})
    return {"rows": rows, "environment": environment()}


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for every build, and what memory did from the smallest to the largest."""
    heads = f"{'records':>9} {'seconds':>8} {'questions/s':>11} {'calls/s':>8} {'peak MB':>8}"
    print(f"{'path':<12} {'questions':>9} {heads}")
    for row in rows:
        rate, calls = row["questions"] / row["seconds"], row["calls"] / row["seconds"]
        print(
            f"{row['path']:<12} {row['questions']:>9,} {row['records']:>9,} {row['seconds']:>8.1f} {rate:>11,.0f} "
            f"{calls if row['calls'] else 0:>8,.0f} {row['peak'] / 1e6:>8.1f}"
        )
    for path in dict.fromkeys(row["path"] for row in rows):
        mine = sorted((row for row in rows if row["path"] == path), key=lambda row: row["questions"])
        if len(mine) > 1:
            first, last = mine[0], mine[-1]
            grown = (last["peak"] - first["peak"]) / 1e6
            print(
                f"{path}: peak memory changes by {grown:+.1f} MB from {first['questions']:,} to {last['questions']:,} "
                f"questions, the input by {(last['input_bytes'] - first['input_bytes']) / 1e6:+.1f} MB"
            )


def write_questions(folder: Path, count: int) -> None:
    """Write `questions.jsonl` and `replies.jsonl`, the same for the same count."""
    chance = random.Random(0)
    questions, replies = folder / "questions.jsonl", folder / "replies.jsonl"
    with questions.open("w", encoding="utf-8") as rows, replies.open("w", encoding="utf-8") as recorded:
        for number in range(count):
            rows.write(json.dumps(_question(number, chance)) + "\n")
            recorded.write(json.dumps(_reply(number)) + "\n")


def _question(number: int, chance: random.Random) -> dict[str, Any]:
    def words() -> str:
        return " ".join(chance.choices(_VOCABULARY, k=_WORDS))

    book, author = f"Book {number}", f"Author {number}"
    context = [
        [book, [f"{book} is a novel by {author}.", f" {words()}."]],
        [author, [f"{author} was born in Town {number}.", f" {words()}."]],
        *([f"Other {number} {other}", [f"{words()}."]] for other in range(_PASSAGES - 2)),
    ]
    chance.shuffle(context)
    return {
        "_id": f"bench{number}",
        "question": f"Where was the author of {book} born?",
        "answer": f"Town {number}",
        "type": "bridge",
        "supporting_facts": [[book, 0], [author, 0]],
        "context": context,
    }


def _facts(number: int, kind: str) -> list[list[str]]:
    name = f"{kind} {number}"
    link = ["written by", f"Author {number}"] if kind == "Book" else ["born in", f"Town {number}"]
    return [[name, *link], *([name, f"property {n}", f"{_VOCABULARY[(number + n) % 280]}"] for n in range(9))]


def _reply(number: int) -> dict[str, Any]:
    titles = {"Book": f"Book {number}", "Author": f"Author {number}"}
    return {
        "_id": f"bench{number}",
        "helpful": list(titles.values()),
        "subqueries": [{"title": title, "question": _ask(number, kind)} for kind, title in titles.items()],
        "triples": {title: _facts(number, kind) for kind, title in titles.items()},
    }


def _ask(number: int, kind: str) -> str:
    return f"Who wrote Book {number}?" if kind == "Book" else f"Where was Author {number} born?"


class SyntheticModel:
    """A `Backend` that answers the three prompts of `LLMTeacher` on these questions at once, or refuses all."""

    model = "synthetic"

    def __init__(self, refuse: bool) -> None:
        self._refuse = refuse

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """The right reply; `CallError` when the model refuses."""
        prompt = messages[-1]["content"]
        if self._refuse:
            raise CallError("the ledger has no reply for a call; it should be full")
        title, kind = _TITLE.search(prompt), _KIND.search(prompt)
        if title is None or kind is None:
            reply: dict[str, Any] = {"documents": [1, 2], "answerable": True}
        elif prompt.startswith("Main question: "):
            reply = {"question": _ask(int(title[1]), kind[1])}
        else:
            reply = {"triples": _facts(int(title[1]), kind[1])}
        return Completion(json.dumps(reply))

    async def close(self) -> None:
        """Nothing is held open."""


def _in_process(folder: Path, step: str, size: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", str(size), "--step", step, "--folder", str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    content: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return content


def _work(folder: Path, size: int, step: str) -> dict[str, Any]:
    """One build, in a process of its own."""
    from tripletune.data_builders.hotpotqa_subq.build import build
    from tripletune.data_builders.hotpotqa_subq.options import BuildOptions
    from tripletune.data_builders.hotpotqa_subq.sources import Source
    from tripletune.models.llm.ledger import Ledger
    from tripletune.models.llm.ledger_client import LedgerClient

    logging.basicConfig(level=logging.ERROR)
    questions, replies = folder / "questions.jsonl", folder / "replies.jsonl"
    annotations = f":{replies}" if step == "annotations" else ""
    source = Source.parse(f"hotpotqa:{questions}{annotations}")
    options = BuildOptions(output=str(folder / f"out_{step}"))

    def open_client() -> LedgerClient:
        return LedgerClient(SyntheticModel(refuse=step != "fill"), Ledger(folder / "ledger.sqlite"))

    with PeakMemory() as memory:
        started = time.perf_counter()
        numbers = build([source], options, None if annotations else open_client)
        seconds = time.perf_counter() - started
    labelled = numbers["tasks"]["answering"]["records"]
    if labelled != size:
        raise ValueError(f"{labelled:,} of {size:,} questions gave records; all should have")
    # Filter, a sub-query and triples for each of two documents.
    calls = 0 if annotations else 5 * size
    size_of_input = questions.stat().st_size + replies.stat().st_size
    return {
        "seconds": seconds,
        "records": numbers["records"],
        "calls": calls,
        "peak": memory.peak,
        "resting": memory.resting,
        "input_bytes": size_of_input,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", default=[5_000, 20_000], metavar="N", help="numbers of questions")
    add("--paths", nargs="+", choices=PATHS, default=list(PATHS), help="where the replies come from")
    add("--output", default="runs/benchmarks", help="folder of the JSON file")
    for hidden, kind in (("--worker", int), ("--step", str), ("--folder", str)):
        add(hidden, type=kind, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
