"""Small jobs on data sets: `tripletune data {stats,validate,peek,split,released,explagraphs,adapt,push}`."""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.data.answers import normalize_answer
from tripletune.core.data.fields import unread_note
from tripletune.core.data.records import Action
from tripletune.core.hub import add_push, push_folder
from tripletune.core.options import convert, setting
from tripletune.core.program import run_program
from tripletune.core.tables import plain_console, printable
from tripletune.data_builders.adapt import Adapted, AdaptOptions, adapt_graph, adapt_rows
from tripletune.data_builders.adapt.layouts import PASSAGE_COLUMNS
from tripletune.data_builders.datasets import RowKind, listed
from tripletune.data_builders.datasets.halves import SplitOptions, split_rows
from tripletune.data_builders.datasets.inspect import (
    count_rows,
    find_rows,
    kind_of,
    mermaid,
    row_text,
    stored_statistics,
    troubles,
    why_empty,
)
from tripletune.data_builders.datasets.kinds import CHATS, RECORDS
from tripletune.data_builders.datasets.split import split_name_problems, split_of
from tripletune.data_builders.datasets.writer import (
    MADE,
    STATISTICS,
    BuildFacts,
    FolderOptions,
    card_tables,
    new_dataset,
)
from tripletune.data_builders.published import (
    HUB_ID,
    OPPOSITE,
    OPPOSITE_CHAIN,
    opposite_questions,
    read_explagraphs,
    read_released,
    split_names,
)

# Different problems that are shown, and the lines of a file that are named for one of them.
_MOST_TROUBLES = 20
_MOST_LINES = 10
_TROUBLE_OF_ROW = re.compile(r"(?P<file>.+?):(?P<line>\d+): (?P<problem>.+)", re.DOTALL)


@dataclass(frozen=True)
class ReleasedOptions:
    """Options of `tripletune data released`."""

    input: str = setting(HUB_ID, "a .jsonl, .json or .parquet file, or a hub id")
    validation_fraction: float = setting(0.05, "share of the questions for validation", at_least=0, below=1)
    split_name: str | None = setting(None, "put all records into one split of this name")
    seed: int = setting(0, "seed of the split")
    limit: int | None = setting(None, "read only the first N records", at_least=1)
    contradictions: Literal["keep", "drop"] = setting(
        "keep",
        "questions that are labelled [NO_RETRIEVAL] and [SUBQ] for the same prompt: keep both, or drop the plans that "
        "search (Algorithm 1 of the paper)",
    )

    def check(self) -> list[str]:
        """Problems besides ranges."""
        return split_name_problems(self.split_name)


@dataclass(frozen=True)
class ExplagraphsOptions:
    """Options of `tripletune data explagraphs`."""

    input: str = field(metadata={"help": "the tab-separated file"})
    seed: int = setting(0, "seed of the split")


def stats(arguments: argparse.Namespace) -> None:
    """Print the statistics of a data set, its splits, and the card's facts on the build."""
    stored = stored_statistics(arguments.folder)
    if stored is not None:
        facts = BuildFacts(**stored.facts)
    else:
        facts = BuildFacts("", "", notes=[f"build: unknown (no {STATISTICS})"])
    empty = why_empty(arguments.folder)
    kind: RowKind[Any] = RECORDS
    if stored is not None and empty is not None:
        _print_unless_empty(empty)
        numbers = stored.numbers
    else:
        # The rows are counted again, since the folder may have been edited or come from another program.
        statistics, leaks = count_rows(arguments.folder, arguments.tokenizer)
        kind = kind_of(arguments.folder)
        numbers = statistics.to_json()
    for table in card_tables(kind, facts, numbers):
        table.show(plain_console(120))
    if Path(arguments.folder).is_file():
        # It has no splits, and nobody knows how it was built.
        _print_unless_empty(f"{kind.plural}: {numbers['records']:,}")
        return
    _print_unless_empty("splits: " + listed(numbers["splits"]))
    if empty is None:
        _print_unless_empty("leakage: " + (listed(leaks) or f"no {kind.name} is in two splits"))
    _print_unless_empty("\n".join(facts.notes))


def validate(arguments: argparse.Namespace) -> int:
    """Print the faults of a data set; the exit code is 1 if there are any."""
    # The line numbers by file and problem, since a file often has the same problem in every row.
    lines_of: dict[tuple[str, str], list[str]] = {}
    count = 0
    unshown = 0
    unread: Counter[str] = Counter()
    for trouble in troubles(arguments.folder, unread):
        count += 1
        row = _TROUBLE_OF_ROW.fullmatch(trouble)
        place = (row["file"], row["problem"]) if row else ("", trouble)
        if place not in lines_of and len(lines_of) == _MOST_TROUBLES:
            unshown += 1
            continue
        lines_of.setdefault(place, []).append(row["line"] if row else "")
    if unread:
        _print_unless_empty(unread_note(arguments.folder, unread))
        if kind_of(arguments.folder) is CHATS and not unread.keys().isdisjoint(PASSAGE_COLUMNS):
            _print_unless_empty(
                f"{arguments.folder} looks like questions with passages, and is read here as chats without them: "
                "tripletune build subq --source READER:FILE makes records of it (docs/guide/data.md)"
            )
    if not count:
        _print_unless_empty(f"{arguments.folder}: every {kind_of(arguments.folder).name} is valid")
        return 0
    for (file, problem), lines in lines_of.items():
        if not file:
            _print_unless_empty(problem)
            continue
        more = len(lines) - _MOST_LINES
        and_more = f" and {more:,} more lines" if more > 0 else ""
        _print_unless_empty(f"{file}:{','.join(lines[:_MOST_LINES])}{and_more}: {problem}")
    if unshown:
        _print_unless_empty(f"... and {unshown:,} more")
    _print_unless_empty(f"{arguments.folder}: {count} problem(s)")
    return 1


def peek(arguments: argparse.Namespace) -> None:
    """Print a row as the model sees it, or its graph."""
    kind = kind_of(arguments.folder)
    selected = find_rows(arguments.folder, arguments.id, arguments.number, arguments.label, arguments.split)
    if arguments.mermaid:
        # Of the rows of a question, the one with most steps shows the whole graph.
        rows = [row for _, row in selected]
        _print_unless_empty(mermaid(kind, max(rows, key=lambda row: len(kind.graphs(row)))))
    else:
        texts = [row_text(kind, row, split) for split, row in selected]
        _print_unless_empty(f"\n\n{'-' * 80}\n\n".join(texts))


def split(arguments: argparse.Namespace) -> None:
    """Divide the rows of a file into training and validation shards; no question, text or chat is in both."""
    options = from_arguments(SplitOptions, arguments)
    _print_unless_empty(f"{options.output}: {listed(split_rows(arguments.source, options))}")


def push(arguments: argparse.Namespace) -> None:
    """Validate a data set and upload it to the Hugging Face Hub."""
    if Path(arguments.folder).is_file():
        raise ValueError(f"{arguments.folder} is a file: name the folder of a data set, with its card README.md")
    for trouble in troubles(arguments.folder):
        raise ValueError(f"{arguments.folder} is not valid, so it was not pushed: {trouble}")
    _print_unless_empty(f"pushed to {push_folder(arguments.folder, arguments.repo, 'dataset', MADE)}")


def released(arguments: argparse.Namespace) -> None:
    """Convert the training data that the RAS authors released into records."""
    # The docstring is the command's help. The data is read twice, as the first row of a question may contradict its
    # last. A split is drawn per question, so that no question is in two.
    options = from_arguments(ReleasedOptions, arguments)
    folder = from_arguments(FolderOptions, arguments)
    drops: Counter[str] = Counter()
    issues: Counter[str] = Counter()
    opposite = opposite_questions(options.input)
    issues[OPPOSITE] = len(opposite)
    questions: set[str] = set()
    with new_dataset(folder, RECORDS, [options.input]) as dataset:
        for record in islice(read_released(options.input, drops, issues), options.limit):
            is_search = record.task == "planning" and record.action is not Action.NO_RETRIEVAL
            if options.contradictions == "drop" and is_search and record.question_id in opposite:
                drops[OPPOSITE_CHAIN] += 1
                continue
            questions.add(record.question_id)
            split = split_of(record.question, options.seed, options.validation_fraction)
            dataset.write(record, options.split_name or split)
        if not dataset.statistics.records:
            raise ValueError(f"{options.input}: no row could be read ({listed(drops) or 'the file is empty'})")
        facts = BuildFacts(
            title="Released RAS records",
            summary="The training data that the authors of RAS released, converted from prompts to records.",
            questions={"ras_released": len(questions)},
            drops={"ras_released": dict(drops)} if drops else {},
            issues=dict(+issues),
            options=asdict(options),
        )
        numbers = dataset.finish(facts)
    if drops:
        _print_unless_empty(f"rows left out: {listed(drops)}")
    if opposite and options.contradictions == "keep":
        _print_unless_empty(f"{len(opposite):,} {OPPOSITE}; --contradictions drop keeps [NO_RETRIEVAL] alone")
    _print_unless_empty(f"{folder.output}: {listed(numbers['splits'])}")


def explagraphs(arguments: argparse.Namespace) -> None:
    """Convert an ExplaGraphs file into answering records, split 60/20/20 at random with a seed."""
    options = from_arguments(ExplagraphsOptions, arguments)
    folder = from_arguments(FolderOptions, arguments)
    issues: Counter[str] = Counter()
    records = list(read_explagraphs(options.input, issues))
    if not records:
        raise ValueError(f"{options.input}: the file holds no rows")
    split_of_question: dict[str, str] = {}
    with new_dataset(folder, RECORDS, [options.input]) as dataset:
        for record, drawn_split in zip(records, split_names(len(records), options.seed), strict=True):
            # A repeated pair of arguments goes into the split of its first occurrence.
            split = split_of_question.setdefault(normalize_answer(record.question), drawn_split)
            dataset.write(record, split)
        facts = BuildFacts(
            title="ExplaGraphs records",
            summary="Stance prediction on commonsense graphs (Saha et al., 2021), split at random 60/20/20 as "
            "G-Retriever does, but with another seed: the test rows differ from those of the G-Retriever paper.",
            questions={"explagraphs": len(split_of_question)},
            issues=dict(+issues),
            options=asdict(options),
        )
        numbers = dataset.finish(facts)
    _print_unless_empty(f"{folder.output}: {listed(numbers['splits'])}")


def adapt(arguments: argparse.Namespace) -> None:
    """Convert a corpus, triples or questions of another project into a file that TripleTune reads."""
    if not arguments.builder:
        _check_not_of_a_builder(arguments.files)
        arguments.input = (*convert(arguments.input, tuple[str, ...]), *arguments.files)
    options = from_arguments(AdaptOptions, arguments)
    if not options.builder:
        _print_unless_empty(f"{options.output}: {listed(adapt_rows(options))}")
        return
    counts = adapt_graph(arguments.files, options)
    made = {name: count for name, count in counts.items() if name in list(Adapted)}
    _print_unless_empty(f"{options.output}: {listed(made)}")
    for name in [name for name in counts if name not in made]:
        _print_unless_empty(f"{counts[name]:>9,} {name}")


def _check_not_of_a_builder(files: Sequence[str]) -> None:
    """Refuse a folder among the files that are named without --from, since graph builders write folders."""
    for file in files:
        if Path(file).is_dir():
            raise ValueError(f"{file} is a folder: name its graph builder with --from, or give a data set with --input")


def _print_unless_empty(text: str) -> None:
    """Print a text that may hold data, unless it is empty."""
    if text:
        print(printable(text))


def _command_line() -> argparse.ArgumentParser:
    """The command line's parser; each command is a function of this module, with the function's name and docstring."""
    parser = CommandParser(prog="tripletune data", description=__doc__, example="tripletune data stats runs/subq")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add_command(function: Callable[[argparse.Namespace], int | None], example: str) -> argparse.ArgumentParser:
        """Add the command with the name and the docstring of its function."""
        name = function.__name__
        about = function.__doc__
        command = commands.add_parser(name, help=about, description=about, example=f"tripletune data {name} {example}")
        command.set_defaults(run=function)
        return command

    command = add_command(stats, "runs/subq")
    _add_folder_argument(command)
    command.add_argument("--tokenizer", help="count tokens with this model's tokenizer instead of words")

    _add_folder_argument(add_command(validate, "runs/subq"))

    command = add_command(peek, "runs/subq --label sufficient --number 3")
    _add_folder_argument(command)
    command.add_argument("--id", help="show the row with this id, or all rows of the question with this id")
    command.add_argument("--number", type=int, help="index of the row to show, counted from 1 after the other filters")
    command.add_argument(
        "--label",
        help="show only rows with this label: subq, sufficient, no_retrieval, answer, direct_answer "
        "(records); facts, no_facts, name (pairs)",
    )
    command.add_argument("--split", help="show only rows of this split")
    command.add_argument("--mermaid", action="store_true", help="print the row's graph as Mermaid text instead")

    command = add_command(split, "chats.jsonl --output runs/chats")
    command.add_argument("source", help="file, folder or data set of the Hub; its rows are written as they are")
    add_arguments(command, SplitOptions)

    command = add_command(released, "--input train_data.jsonl --output runs/ras_released")
    add_arguments(command, ReleasedOptions)
    add_arguments(command.add_argument_group("output"), FolderOptions)

    command = add_command(explagraphs, "--input explagraphs.tsv --output runs/explagraphs")
    add_arguments(command, ExplagraphsOptions)
    add_arguments(command.add_argument_group("output"), FolderOptions)

    add_push(add_command(push, "runs/subq me/subq"))

    command = add_command(adapt, "--input musique_corpus.json --output musique.corpus.jsonl")
    command.add_argument(
        "files",
        nargs="*",
        metavar="FILES",
        help="files to convert, as --input; with --from, files or folders of the graph builder",
    )
    add_arguments(command, AdaptOptions)
    return parser


def _add_folder_argument(command: argparse.ArgumentParser) -> None:
    """Add the data set's folder to a command."""
    command.add_argument("folder", help="folder of a data set, or a file or folder of chats as `train chat` reads them")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; bad input prints one line and gives exit code 2."""
    values = _command_line().parse_args(arguments)
    return run_program(lambda: values.run(values))


if __name__ == "__main__":
    sys.exit(main())
