"""Teacher trajectories for distillation, from the call ledger of any system and role (CIRAG, section 3.5).

`tripletune eval run` leaves a ledger with every call and results with every score. This builder joins them: the calls
of a role become chats whose assistant turns are the teacher's decisions, filtered by the results. Retrieved candidates
are context and not learned (eq. 8), unless `data.learn` of the recipes adds them.

    tripletune build trajectories --results runs/eval/cirag_train --output runs/trajectories \\
        --min-score exact_match=1 --no-repairs --no-repeated-query --min-recall 1
    tripletune build trajectories --system t2rag --roles resolve --results runs/eval/t2rag_train --output runs/t2rag

A Graph-LLM has no chats: `--records` writes its plans (or those of a chat model) and the gold answers as records.

`--pairs` needs several runs of the same questions. Where the runs give different replies to one prompt, it keeps two:
the reply after which most runs pass all filters, and the reply after which fewest runs do.

`--source` needs no run: the gold steps of MuSiQue or 2WikiMultiHopQA become decisions (`trajectories.annotated`).

The paper names no filter, so no filter is on by default. The card counts what each filter left out. Calls without a
question, such as the extraction of TH-RAG, are all kept.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.data.pairs import Trajectory
from tripletune.core.files import file_digest
from tripletune.core.program import run_program
from tripletune.data_builders.datasets import Numbers, listed
from tripletune.data_builders.datasets.lookup import SeenTable
from tripletune.data_builders.datasets.writer import BuildFacts, DatasetWriter, FolderOptions, new_dataset
from tripletune.data_builders.trajectories.annotated import AnnotatedRuns
from tripletune.data_builders.trajectories.filters import filters_of
from tripletune.data_builders.trajectories.options import TrajectoryOptions
from tripletune.data_builders.trajectories.runs import ChatRuns, QuestionRun, RunDrop, record_runs
from tripletune.data_builders.trajectories.selection import preference_pairs, shortest_runs
from tripletune.llm.ledger import canonical, seed_repeats
from tripletune.rag.results import RESULTS

logger = logging.getLogger(__name__)

LEDGER = "ledger.sqlite"


def build_trajectories(
    results: Sequence[str], options: TrajectoryOptions, folder: FolderOptions, ledgers: Sequence[str] = ()
) -> Numbers:
    """Write the trajectories of one or more runs, or of the sources of the options.

    Runs are streamed through filters and selection, since a ledger may be larger than memory.

    Args:
        results: Output folders of `tripletune eval run`, or their results files; none with `options.source`.
        ledgers: One ledger for all results, or one for each; none: see `ledgers_of`.

    Returns:
        The statistics of the data set, as in its `statistics.json`.
    """
    if bool(results) == bool(options.source):
        raise ValueError(
            "name --results (runs of a model) or --source (a benchmark's gold steps): to learn from both, build two "
            "data sets and name both in data.train"
        )
    results_files = _results_files(results, ledgers)
    ledger_files = [] if options.records else ledgers_of(results_files, ledgers)
    options.check_ledgers(ledger_files)
    filters = filters_of(options)
    drops: Counter[str] = Counter()
    annotated = AnnotatedRuns(options, drops)
    with new_dataset(folder, options.kind, [*results_files, *ledger_files, *annotated.files]) as dataset:
        if options.source:
            runs = annotated.read()
        elif options.records:
            runs = record_runs(results_files, options, filters, drops)
        else:
            runs = ChatRuns(options, filters, drops).read(results_files, ledger_files)
        if options.shortest is not None:
            runs = shortest_runs(runs, options.shortest, options.kind, drops)
        if options.pairs:
            runs = preference_pairs(runs, options.kind)
        _write_rows(runs, dataset, options, drops)
        # A filter that left nothing out is named too, with its zero.
        left_out = {str(reason): number for reason, number in drops.items() if number}
        for run_filter in filters:
            left_out[run_filter.reason] = drops[run_filter.reason]
        if not dataset.statistics.records:
            raise ValueError(_why_nothing_left(left_out, options))
        facts = BuildFacts(
            title=f"{options.kind.plural.capitalize()} of {options.system}",
            summary=_card_summary(options, ledger_files),
            teachers=annotated.teachers,
            drops={"all": left_out},
            issues=_seed_issues(options, ledger_files) | dict(annotated.issues),
            files={str(file): file_digest(file) for file in results_files},
            options={"results": list(results), "ledgers": list(ledgers), **asdict(options)},
        )
        statistics = dataset.finish(facts)
    reasons = "; ".join(f"{number:,} x {reason}" for reason, number in left_out.items() if number)
    logger.info("left out: %s", reasons or "none")
    return statistics


def _results_files(results: Sequence[str], ledgers: Sequence[str]) -> list[Path]:
    """The results files, of which folders hold one each; an error if they don't fit the ledgers, or are missing.

    All missing files are named at once. With fewer ledgers than results it would not be clear which belongs to which.
    """
    if len(ledgers) > 1 and len(ledgers) != len(results):
        raise ValueError(f"{len(ledgers)} ledgers and {len(results)} results: name one ledger for all, or one each")
    files = []
    for path in map(Path, results):
        files.append(path / RESULTS if path.is_dir() else path)
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(f"no such file: {', '.join(missing)}")
    return files


def ledgers_of(results_files: Sequence[Path], ledgers: Sequence[str] = ()) -> list[Path]:
    """The ledger of each results file.

    Without named ledgers, it is the one beside the results, or in the folder of a run of several systems
    (DIR/TASK/SYSTEM).
    """
    if len(ledgers) == 1:
        return [Path(ledgers[0])] * len(results_files)
    if ledgers:
        return [Path(ledger) for ledger in ledgers]
    files = []
    for results_file in results_files:
        places = [folder / LEDGER for folder in results_file.parents[:3]]
        present = [place for place in places if place.is_file()]
        # Where there is none, the error will name the first place.
        files.append(present[0] if present else places[0])
    return files


def _write_rows(
    runs: Iterator[QuestionRun], dataset: DatasetWriter[Any], options: TrajectoryOptions, drops: Counter[str]
) -> None:
    """Write the rows of the first `limit` runs; a chat that was written before is counted in `drops` instead.

    A chat is the same if all its messages are, whatever run it is from.
    """
    with SeenTable() as seen:
        for number, run in enumerate(runs, 1):
            for row in run.rows:
                # Pairs are of one reply each, and were made of repeated chats on purpose.
                if isinstance(row, Trajectory) and not options.pairs:
                    is_new = seen.add_if_new("chat", canonical(list(row.messages)))
                else:
                    is_new = True
                if is_new:
                    dataset.write(row, run.split)
                else:
                    drops[RunDrop.REPEATED_CHAT] += 1
            # islice would read, and count, one more run before it ends.
            if number == options.limit:
                break


def _card_summary(options: TrajectoryOptions, ledger_files: Sequence[Path]) -> str:
    """The first paragraph of the card: what the rows are, and what `learned` means, which the layout does not show."""
    if options.records:
        return "Plans of a model in its own runs, and the gold answers."
    if options.source:
        return (
            "Annotated, not a model's: a benchmark's gold steps as decisions of CIRAG's integrator, with thoughts of "
            "fixed words; `learned` marks the turns that count in the loss."
        )
    roles: set[str] = set()
    for ledger in ledger_files:
        roles |= set(options.roles_in(ledger))
    return f"Chats of {', '.join(sorted(roles))}; `learned` marks the turns that count in the loss."


def _seed_issues(options: TrajectoryOptions, ledger_files: Sequence[Path]) -> dict[str, int]:
    """How many replies of the ledgers are equal to one with another seed, which is no second sample.

    Returns:
        A warning for the card with its number; empty if there is none.
    """
    calls = 0
    equal = 0
    for ledger in dict.fromkeys(ledger_files):
        repeats = seed_repeats(ledger, options.roles_in(ledger))
        calls += repeats.calls
        equal += repeats.equal
    if not equal:
        return {}
    if 2 * equal > calls:
        form = "%d of %d replies are equal to one with another seed: does the server sample? See docs/guide/teachers.md"
        logger.warning(form, equal, calls)
    return {f"replies equal to one with another seed (of {calls:,})": equal}


def _why_nothing_left(left_out: dict[str, int], options: TrajectoryOptions) -> str:
    """The error for a data set without rows: why each row was left out, since some option is too strict."""
    reasons = ", ".join(f"{reason}: {number}" for reason, number in left_out.items()) or "the results are empty"
    if options.pairs:
        reasons += ", or good and bad runs of a question never differ at one prompt"
    return f"nothing is left ({reasons})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; bad input prints one line and gives exit code 2."""
    parser = CommandParser(
        prog="tripletune build trajectories",
        description="Convert the ledger and the results of a loop into trajectories to distil.",
        example="tripletune build trajectories --results runs/eval/cirag_train --min-score exact_match=1 "
        "--output runs/trajectories",
    )
    group = parser.add_argument_group("what to read")
    group.add_argument("--results", action="append", default=[], metavar="DIR",
        help="output folder of `tripletune eval run`, or its results file; repeatable")  # fmt: skip
    group.add_argument("--ledger", action="append", default=[], metavar="FILE", dest="ledgers",
        help="one ledger for all results, or one for each (default: ledger.sqlite beside the results, or in "
        "the folder of a run of several systems)")  # fmt: skip
    add_arguments(parser.add_argument_group("which trajectories"), TrajectoryOptions)
    add_arguments(parser.add_argument_group("output"), FolderOptions)
    parsed = parser.parse_args(arguments)

    def program() -> None:
        """Build the trajectories of the command line."""
        options = from_arguments(TrajectoryOptions, parsed)
        folder = from_arguments(FolderOptions, parsed)
        statistics = build_trajectories(parsed.results, options, folder, parsed.ledgers)
        logger.info("%s: %s", folder.output, listed(statistics["splits"]))

    return run_program(program)


if __name__ == "__main__":
    sys.exit(main())
