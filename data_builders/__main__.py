"""Small jobs on record data sets: `python -m data_builders {stats,validate,explagraphs}`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from contextlib import ExitStack

from data_builders.card import BuildFacts, Statistics, file_digest, table_rows, write_card
from data_builders.readers.explagraphs import read_explagraphs, split_names
from data_builders.shards import FORMATS, ShardWriter, check_output, check_shard_options, dataset_files, replaced_folder
from data_builders.validation import troubles
from models.normalize import normalize_answer
from models.records import read_records

_MOST_TROUBLES = 20


def stats(arguments: argparse.Namespace) -> int:
    """Print table 4 of a data set."""
    from rich.console import Console
    from rich.table import Table

    statistics = Statistics(arguments.tokenizer)
    for split, files in dataset_files(arguments.folder).items():
        for file in files:
            for record in read_records(file):
                statistics.add(record, split)
    numbers = statistics.to_json()
    table = Table(title=f"{arguments.folder}, lengths in {numbers['unit']}")
    for heading in ("", "planning", "paper", "answering", "paper"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=not heading)
    for row in table_rows(numbers):
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(table)
    console.print("splits: " + ", ".join(f"{name} {count:,}" for name, count in numbers["splits"].items()))
    return 0


def validate(arguments: argparse.Namespace) -> int:
    """Print what is wrong with a data set; the exit code is 1 when something is."""
    count = 0
    for count, trouble in enumerate(troubles(arguments.folder), 1):
        if count <= _MOST_TROUBLES:
            print(trouble)
    if count > _MOST_TROUBLES:
        print(f"... and {count - _MOST_TROUBLES} more")
    print(f"{arguments.folder}: {count} troubles" if count else f"{arguments.folder}: every record is in order")
    return 1 if count else 0


def explagraphs(arguments: argparse.Namespace) -> int:
    """Turn an ExplaGraphs file into answering records, split 60/20/20 at random with a seed."""
    check_shard_options(arguments.format, arguments.shard_size)
    check_output(arguments.output, arguments.overwrite)
    # A first reading counts the rows, so that the split needs no row in memory.
    total = sum(1 for _ in read_explagraphs(arguments.input))
    if not total:
        raise ValueError(f"{arguments.input}: the file holds no rows")
    issues: Counter[str] = Counter()
    statistics = Statistics(arguments.tokenizer)
    with replaced_folder(arguments.output, arguments.overwrite) as folder:
        with ExitStack() as stack:
            writers: dict[str, ShardWriter] = {}
            split_of: dict[str, str] = {}
            for record, drawn in zip(read_explagraphs(arguments.input, issues), split_names(total, arguments.seed)):
                # A pair of arguments that occurs again stays with its first occurrence.
                split = split_of.setdefault(normalize_answer(record.question), drawn)
                if split not in writers:
                    writer = ShardWriter(folder, split, arguments.format, arguments.shard_size)
                    writers[split] = stack.enter_context(writer)
                writers[split].write(record)
                statistics.add(record, split)
        facts = BuildFacts(
            title="ExplaGraphs records",
            summary="Stance prediction on commonsense graphs (Saha et al., 2021), split at random 60/20/20 as "
            "G-Retriever does, with a seed of our own: the test rows are not the ones of its paper.",
            issues=dict(+issues),
            files={arguments.input: file_digest(arguments.input)},
            options={"seed": arguments.seed, "format": arguments.format, "shard_size": arguments.shard_size},
        )
        write_card(folder, facts, statistics, arguments.format)
    sizes = ", ".join(f"{name} {count:,}" for name, count in statistics.to_json()["splits"].items())
    print(f"{arguments.output}: {sizes}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command line; bad input ends it with one line and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m data_builders", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for function in (stats, validate, explagraphs):
        command = commands.add_parser(
            function.__name__, help=function.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        command.set_defaults(run=function)
        if function is explagraphs:
            command.add_argument("--input", required=True, help="the tab-separated file")
            command.add_argument("--output", required=True, help="folder of the data set")
            command.add_argument("--seed", type=int, default=0, help="seed of the split")
            command.add_argument("--format", choices=FORMATS, default="jsonl", help="format of the shards")
            command.add_argument("--shard-size", type=int, default=50_000, help="records in a shard")
            command.add_argument("--overwrite", action="store_true", help="replace a data set in the output folder")
        else:
            command.add_argument("folder", help="folder of the data set")
        if function is not validate:
            command.add_argument("--tokenizer", help="count tokens with this model's tokenizer instead of words")
    values = parser.parse_args(arguments)
    try:
        return values.run(values)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    sys.exit(main())
