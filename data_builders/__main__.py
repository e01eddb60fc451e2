"""Small jobs on data sets: `tripletune data {stats,validate,peek,merge,released,explagraphs}`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tripletune.data_builders.datasets.card import BuildFacts, Statistics, file_digest, table_rows
from tripletune.data_builders.datasets.folder import FolderOptions, add_folder_arguments, write_dataset
from tripletune.data_builders.datasets.peek import LABELS, find_records, shown
from tripletune.data_builders.datasets.shards import (
    NO_RECORDS,
    SPLIT_NAME,
    STATISTICS,
    dataset_files,
    split_of,
    why_empty,
)
from tripletune.data_builders.datasets.validation import SplitCheck, troubles
from tripletune.data_builders.hotpotqa_subq.merge import merge as merge_shards
from tripletune.data_builders.hotpotqa_subq.released_records import HUB_ID, Rejected, read_released
from tripletune.data_builders.readers.explagraphs import read_explagraphs, split_names
from tripletune.data_builders.text_to_triples.card import LENGTH_HEAD, SOURCE_HEAD, length_rows, source_rows
from tripletune.data_builders.text_to_triples.inspection import (
    find_pair,
    holds_pairs,
    pair_statistics,
    pair_troubles,
    shown_pair,
)
from tripletune.models.data.records import Record, normalize_answer, read_records

_MOST_TROUBLES = 20


def stats(arguments: argparse.Namespace) -> int:
    """Print table 4 of a data set, its splits, and what its card says of the build."""
    path = Path(arguments.folder) / STATISTICS
    if (empty := why_empty(arguments.folder)) is not None:
        print("\n".join([empty, *_build_lines(path)]))
        return 0
    if holds_pairs(arguments.folder):
        found, leaks = pair_statistics(arguments.folder, arguments.tokenizer)
        numbers = found.to_json()
        _print_table(f"{arguments.folder}, lengths in {numbers['unit']}", LENGTH_HEAD, length_rows(numbers))
        _print_table("sources", SOURCE_HEAD, source_rows(numbers))
        _print_splits(numbers, leaks, "text", path)
        return 0
    statistics = Statistics(arguments.tokenizer)
    with SplitCheck() as leakage:
        for split, files in dataset_files(arguments.folder).items():
            for file in files:
                for record in read_records(file):
                    statistics.add(record, split)
                    for _ in leakage.add(record, split):
                        pass
    numbers = statistics.to_json()
    heads = ["", "planning", "paper", "answering", "paper"]
    _print_table(f"{arguments.folder}, lengths in {numbers['unit']}", heads, table_rows(numbers))
    _print_splits(numbers, leakage.found, "question", path)
    return 0


def _print_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for number, heading in enumerate(heads):
        table.add_column(heading, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(table)


def _print_splits(numbers: dict[str, Any], leaks: Counter[str], what: str, path: Path) -> None:
    print("splits: " + _listed(numbers["splits"]))
    print("leakage: " + (_listed(leaks) or f"no {what} stands in two splits"))
    for line in _build_lines(path):
        print(line)


def validate(arguments: argparse.Namespace) -> int:
    """Print what is wrong with a data set; the exit code is 1 when something is."""
    pairs = why_empty(arguments.folder) is None and holds_pairs(arguments.folder)
    count = 0
    for count, trouble in enumerate((pair_troubles if pairs else troubles)(arguments.folder), 1):
        if count <= _MOST_TROUBLES:
            print(trouble)
    if count > _MOST_TROUBLES:
        print(f"... and {count - _MOST_TROUBLES} more")
    what = "pair" if pairs else "record"
    print(f"{arguments.folder}: {count} troubles" if count else f"{arguments.folder}: every {what} is in order")
    return 1 if count else 0


def peek(arguments: argparse.Namespace) -> int:
    """Print a record or pair as the model sees it."""
    if holds_pairs(arguments.folder):
        return _peek_pair(arguments)
    found = find_records(arguments.folder, arguments.id, arguments.number, arguments.label, arguments.split)
    print(f"\n\n{'-' * 80}\n\n".join(shown(record, split) for split, record in found))
    return 0


def _peek_pair(arguments: argparse.Namespace) -> int:
    if arguments.label is not None:
        raise ValueError(f"--label {arguments.label} is for records; {arguments.folder} holds text-to-triples pairs")
    split, pair = find_pair(arguments.folder, arguments.id, arguments.number, arguments.split)
    print(shown_pair(pair, split))
    return 0


def merge(arguments: argparse.Namespace) -> int:
    """Merge the outputs of a sharded build into the data set that one process would have written."""
    numbers = merge_shards(arguments.shards, arguments.output, arguments.overwrite)
    if not numbers["records"]:
        print(why_empty(arguments.output), file=sys.stderr)
        return NO_RECORDS
    print(f"{arguments.output}: {_listed(numbers['splits'])}")
    return 0


def released(arguments: argparse.Namespace) -> int:
    """Turn the training data the RAS authors released into records."""
    if not 0 <= arguments.validation_fraction < 1:
        raise ValueError(f"--validation-fraction {arguments.validation_fraction}: it must be at least 0 and below 1")
    if arguments.limit is not None and arguments.limit < 1:
        raise ValueError(f"--limit {arguments.limit}: it must be at least 1")
    if arguments.split_name is not None and not SPLIT_NAME.fullmatch(arguments.split_name):
        raise ValueError(f"--split-name {arguments.split_name!r}: use letters, digits, underscores and single dots")
    rejected, issues = Rejected(), Counter[str]()

    def records() -> Iterator[tuple[Record, str]]:
        for record in islice(read_released(arguments.input, rejected, issues), arguments.limit):
            split = arguments.split_name or split_of(record.question, arguments.seed, arguments.validation_fraction)
            yield record, split

    def facts(statistics: Statistics) -> BuildFacts:
        if not statistics.records:
            raise ValueError(f"{arguments.input}: no row could be read. {' '.join(rejected.sentences())}".strip())
        return BuildFacts(
            title="Released RAS records",
            summary="The training data that the authors of RAS released, read back from their prompts into records.",
            drops={"ras_released": dict(rejected.counts)} if rejected.counts else {},
            issues=dict(+issues),
            files=_digests(arguments.input),
            options=_options(arguments, "input", "validation_fraction", "split_name", "seed", "limit"),
            notes=rejected.sentences(),
        )

    numbers = write_dataset(records(), facts, FolderOptions.from_arguments(arguments))
    for sentence in rejected.sentences():
        print(sentence)
    print(f"{arguments.output}: {_listed(numbers['splits'])}")
    return 0


def explagraphs(arguments: argparse.Namespace) -> int:
    """Turn an ExplaGraphs file into answering records, split 60/20/20 at random with a seed."""
    options = FolderOptions.from_arguments(arguments)
    # A first reading counts the rows, so that the split needs no row in memory.
    total = sum(1 for _ in read_explagraphs(arguments.input))
    if not total:
        raise ValueError(f"{arguments.input}: the file holds no rows")
    issues: Counter[str] = Counter()

    def records() -> Iterator[tuple[Record, str]]:
        split: dict[str, str] = {}
        for record, drawn in zip(read_explagraphs(arguments.input, issues), split_names(total, arguments.seed)):
            # A pair of arguments that occurs again stays with its first occurrence.
            yield record, split.setdefault(normalize_answer(record.question), drawn)

    def facts(_: Statistics) -> BuildFacts:
        return BuildFacts(
            title="ExplaGraphs records",
            summary="Stance prediction on commonsense graphs (Saha et al., 2021), split at random 60/20/20 as "
            "G-Retriever does, with a seed of our own: the test rows are not the ones of its paper.",
            issues=dict(+issues),
            files=_digests(arguments.input),
            options=_options(arguments, "seed"),
        )

    print(f"{arguments.output}: {_listed(write_dataset(records(), facts, options)['splits'])}")
    return 0


def _build_lines(path: Path) -> list[str]:
    """What `statistics.json` says of the build: teachers, prompts, mended replies, questions left out, oddities."""
    if not path.is_file():
        return [f"build: unknown, there is no {path.name}"]
    try:
        facts = BuildFacts(**json.loads(path.read_text(encoding="utf-8"))["build"])
    except (ValueError, KeyError, TypeError) as error:
        return [f"build: {path} can't be read ({error!r})"]
    lines = [f"teacher of {source}: {name}" for source, name in facts.teachers.items()]
    lines += [f"model for {role}: {name}" for role, name in facts.models.items()]
    lines += [f"prompt {name}: SHA-256 {digest}" for name, digest in facts.prompts.items()]
    lines += [f"calls, {stage}: {_listed(counts)}" for stage, counts in facts.calls.items()]
    lines += [f"replies turned down, {source}: {_listed(counts)}" for source, counts in facts.refused.items()]
    lines += [f"replies in another form, {source}: {_listed(counts)}" for source, counts in facts.recovered.items()]
    lines += [f"mended replies of {source}: {_listed(counts)}" for source, counts in facts.repairs.items()]
    lines += [f"left out of {source}: {_listed(counts)}" for source, counts in facts.drops.items()]
    lines += [f"oddities of the input: {_listed(facts.issues)}"] if facts.issues else []
    return lines + facts.notes


def _listed(counts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def _digests(location: str) -> dict[str, str]:
    return {location: file_digest(location)} if Path(location).is_file() else {}


def _options(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in (*names, "format", "shard_size", "tokenizer")}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tripletune data", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(function: Callable[[argparse.Namespace], int]) -> Callable[..., argparse.Action]:
        added = commands.add_parser(
            function.__name__, help=function.__doc__, description=function.__doc__,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )  # fmt: skip
        added.set_defaults(run=function)
        if function in (released, explagraphs):
            add_folder_arguments(added)
        elif function is not merge:
            added.add_argument("folder", help="folder of the data set")
        return added.add_argument

    add = command(stats)
    add("--tokenizer", help="count tokens with this model's tokenizer instead of words")
    command(validate)
    add = command(peek)
    add("--id", help="the record or pair of this id, or all records of the question of this id")
    add("--number", type=int, help="the how-manieth record, from 1, of those that fit the rest")
    add("--label", choices=tuple(LABELS), help="only records of this label")
    add("--split", help="only records or pairs of this split")
    add = command(merge)
    add("shards", nargs="+", metavar="FOLDER", help="the outputs of all shards")
    add("--output", required=True, help="folder of the merged data set")
    add("--overwrite", action="store_true", help="replace a data set in the output folder")
    add = command(released)
    add("--input", default=HUB_ID, help="a .jsonl, .json or .parquet file, or a hub id")
    add("--validation-fraction", type=float, default=0.05, help="share of the questions for validation")
    add("--split-name", help="put everything into one split of this name instead")
    add("--seed", type=int, default=0, help="seed of the split")
    add("--limit", type=int, help="only the first records")
    add = command(explagraphs)
    add("--input", required=True, help="the tab-separated file")
    add("--seed", type=int, default=0, help="seed of the split")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The command line; bad input ends it with one line and exit code 2."""
    parser = _parser()
    values = parser.parse_args(arguments)
    try:
        found: int = values.run(values)
        # What a pipe refuses must show here, not when the interpreter closes it.
        sys.stdout.flush()
        return found
    except BrokenPipeError:
        # The reader of a pipe, `head` for one, has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    sys.exit(main())
