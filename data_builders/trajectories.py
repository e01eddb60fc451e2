"""Teacher trajectories to distil, out of the call ledger of any loop and for any of its roles (CIRAG, section 3.5).

`tripletune eval run` leaves a ledger with every call and results with every score. This builder joins them: the
calls of a role become chats whose assistant turns are the teacher's decisions, and what the results say decides which
are kept. Retrieved candidates are context and not learned (eq. 8); `--learn observations` adds them.

    tripletune build trajectories --results runs/eval/cirag_train --output runs/trajectories \\
        --min-score exact_match=1 --no-repairs --no-repeated-query --min-recall 1

The paper names no filter, so none is the default. What each would leave out by itself, and what it left out after those
before it, is in the card.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, count
from operator import or_
from pathlib import Path
from typing import Any, Literal

from tripletune.data_builders.datasets.kinds import TRAJECTORIES
from tripletune.data_builders.datasets.lookup import SeenTable, progress
from tripletune.data_builders.datasets.writer import BuildFacts, FolderOptions, new_dataset, split_of
from tripletune.data_builders.ledger_chats import Chat, RoleCalls, replies_of
from tripletune.models.data.records import read_jsonl
from tripletune.models.data.trajectories import Trajectory
from tripletune.models.files import file_digest, read_json
from tripletune.models.llm.ledger import canonical
from tripletune.models.options import add_arguments, from_arguments, require, setting
from tripletune.models.program import run_program
from tripletune.rag.systems.cirag.integration import INTEGRATE_ROLE

logger = logging.getLogger(__name__)

RESULTS, LEDGER, ABOUT = "results.jsonl", "ledger.sqlite", "run.json"
_CHOSEN_ENDS = ("no_question", "sufficient", "no_retrieval")


@dataclass(frozen=True)
class TrajectoryOptions:
    """Which trajectories are kept, and what of them is learned.

    Raises:
        ValueError: a value makes no sense.
    """

    role: str = setting(INTEGRATE_ROLE, "role whose decisions are learned")
    model: str | None = setting(None, "only calls of this model, as the ledger calls it")
    min_score: tuple[str, ...] = setting(
        (), "least score of the answer, for example exact_match=1 or f1=0.8; repeatable"
    )
    no_repairs: bool = setting(False, "leave out chats with a reply that was repaired or recovered from")
    no_repeated_query: bool = setting(False, "leave out questions that ended by a repeated query")
    ended_by_choice: bool = setting(False, "leave out questions that ended by a limit or a malformed reply")
    min_recall: float | None = setting(None, "least share of the supporting passages that was retrieved")
    learn: Literal["decisions", "observations"] = setting(
        "decisions",
        "what the loss counts: the decisions (the paper), or every turn after the first prompt, observations too",
    )
    limit: int | None = setting(None, "most trajectories, in the order of --results; the paper has 3,000", at_least=1)
    validation_fraction: float = setting(0.0, "share of the questions for validation", at_least=0, below=1)
    seed: int = setting(0, "seed of the split")

    def __post_init__(self) -> None:
        require(self)

    def check(self) -> list[str]:
        """Scores that are none."""
        found = []
        for text in self.min_score:
            try:
                _score(text)
            except ValueError:
                found.append(f"min_score: {text!r}: write it as METRIC=VALUE, for example exact_match=1")
        return found


def _score(text: str) -> tuple[str, float]:
    name, _, least = text.partition("=")
    return name.strip(), float(least)


def _sources(results: Sequence[str], ledgers: Sequence[str]) -> list[tuple[Path, Path]]:
    """Results files with their ledgers."""
    if len(ledgers) > 1 and len(ledgers) != len(results):
        raise ValueError(f"{len(ledgers)} ledgers and {len(results)} results: name one ledger for all, or one for each")
    files = [Path(text) / RESULTS if Path(text).is_dir() else Path(text) for text in results]
    named = [Path(text) for text in ledgers] or [file.parent / LEDGER for file in files]
    pairs = list(zip(files, named * len(files) if len(named) == 1 else named))
    for file in (file for pair in pairs for file in pair):
        if not file.is_file():
            raise FileNotFoundError(f"no such file: {file}")
    return pairs


# Whether a trajectory is kept, given its results row and its chat.
Filter = Callable[[dict[str, Any], Chat], bool]


class Filters:
    """What the options leave out: each filter by itself, and each after those before it."""

    def __init__(self, options: TrajectoryOptions) -> None:
        self._alone: Counter[str] = Counter()
        self._in_order: Counter[str] = Counter()
        self._looked_at = 0
        self._filters: dict[str, Filter] = {}
        for name, least in map(_score, options.min_score):
            self._filters[f"{name} below {least:g}"] = partial(_has_score, name, least)
        if options.no_repairs:
            self._filters["a reply was repaired or recovered from"] = lambda row, chat: not chat.faults
        if options.no_repeated_query:
            self._filters["a query was repeated"] = lambda row, chat: (
                row["trace"].get("stop_reason") != "repeated_subquery"
            )
        if options.ended_by_choice:
            ended = "the loop did not end by the model's own decision"
            self._filters[ended] = lambda row, chat: row["trace"].get("stop_reason") in _CHOSEN_ENDS
        if (recall := options.min_recall) is not None:
            name = f"less than {recall:g} of the supporting passages retrieved"
            self._filters[name] = partial(_has_recall, recall)

    def keep(self, row: dict[str, Any], chat: Chat) -> bool:
        """Whether all filters keep a trajectory; it is counted."""
        self._looked_at += 1
        failed = [reason for reason, keeps in self._filters.items() if not keeps(row, chat)]
        self._alone.update(failed)
        self._in_order.update(failed[:1])
        return not failed

    def left_out(self) -> dict[str, int]:
        """How many each filter left out after those before it."""
        return {reason: self._in_order[reason] for reason in self._filters}

    def sentences(self) -> list[str]:
        """The counts in words."""
        return [
            f"Filter: {reason}: {self._alone[reason]:,} of {self._looked_at:,} by itself, "
            f"{self._in_order[reason]:,} after the filters before it."
            for reason in self._filters
        ]


def build_trajectories(
    results: Sequence[str], options: TrajectoryOptions, folder: FolderOptions, ledgers: Sequence[str] = ()
) -> dict[str, Any]:
    """Write the trajectories of one or more runs.

    Args:
        results: Output folders of `tripletune eval run`, or their results files.
        options: What to build.
        folder: Where.
        ledgers: Ledgers: one for all results, or one for each; none: `ledger.sqlite` beside each results file.

    Returns:
        The statistics.

    Raises:
        FileNotFoundError: there are no such results, or there is no ledger.
        ValueError: a file is damaged, a metric is not in the results, or no trajectory is left.
        FileExistsError: the output folder is taken.
    """
    sources = _sources(results, ledgers)
    filters = Filters(options)
    drops: Counter[str] = Counter()
    with new_dataset(folder, TRAJECTORIES, [file for pair in sources for file in pair]) as dataset:
        for row, split in _trajectories(sources, options, filters, drops):
            dataset.write(row, split)
            # Not islice, which would look at one more row before it ends, and count it.
            if dataset.statistics.records == options.limit:
                break
        left_out = dict(+drops) | filters.left_out()
        if not dataset.statistics.records:
            told = ", ".join(f"{reason}: {count}" for reason, count in left_out.items()) or "the results are empty"
            raise ValueError(f"no trajectory is left ({told})")
        facts = BuildFacts(
            title=f"Trajectories of {options.role}",
            summary=f"Chats of the role `{options.role}`; `learned` marks the turns that count in the loss.",
            drops={"all": left_out},
            files={str(file): file_digest(file) for file, _ in sources},
            options={"results": list(results), "ledgers": list(ledgers), **asdict(options)},
            notes=filters.sentences(),
        )
        statistics = dataset.finish(facts)
    for sentence in filters.sentences():
        logger.info("%s", sentence)
    return statistics


def _trajectories(
    sources: Sequence[tuple[Path, Path]], options: TrajectoryOptions, filters: Filters, drops: Counter[str]
) -> Iterator[tuple[Trajectory, str]]:
    with SeenTable() as seen:
        for results, ledger in sources:
            with RoleCalls(ledger, options.role, options.model) as calls:
                found = 0
                for row in progress(_rows(results), str(results)):
                    found += 1
                    split = split_of(row["question"], options.seed, options.validation_fraction)
                    for chat in _chats(row, calls, options, drops):
                        if not filters.keep(row, chat):
                            continue
                        if seen.first("chat", canonical(list(chat.messages))) is not None:
                            drops["the same chat was there before"] += 1
                            continue
                        # Several runs of one question, or a chat per round, give it several trajectories.
                        names = (f"{row['id']}:{number}" for number in count())
                        name = next(name for name in names if seen.first("id", name) is None)
                        learned = chat.learned
                        if options.learn == "observations":
                            learned = tuple(accumulate(learned, or_))
                        yield Trajectory(name, row["id"], options.role, chat.model, chat.messages, learned), split
            about = results.parent / ABOUT
            whole = read_json(about).get("questions", 0) if about.is_file() else 0
            if found < whole:
                # Nobody would miss the questions of a run that was stopped before its end.
                logger.warning("%s is of a run that did not end: it has %d of %d questions", results, found, whole)


def _chats(row: dict[str, Any], calls: RoleCalls, options: TrajectoryOptions, drops: Counter[str]) -> list[Chat]:
    """The readable chats of a row's run."""
    if row.get("error"):
        drops["the question failed"] += 1
        return []
    chats = calls.chats(row["id"], replies_of(row["trace"], options.role))
    if not chats:
        drops["the ledger has no chat of this run"] += 1
    drops["the last decision cannot be read"] += sum(not chat.readable for chat in chats)
    return [chat for chat in chats if chat.readable]


def _has_score(name: str, least: float, row: dict[str, Any], chat: Chat) -> bool:
    if name not in row["scores"]:
        raise ValueError(f"the results have no score {name!r}; they have {', '.join(row['scores'])}")
    return bool(row["scores"][name] >= least)


def _has_recall(least: float, row: dict[str, Any], chat: Chat) -> bool:
    found = row.get("supporting_recall")
    if found is None:
        raise ValueError(
            f"question {row['id']!r}: its results don't say which supporting passages were retrieved: "
            "run eval with --gold (data_builders.corpus writes the file), or leave out --min-recall"
        )
    return bool(found >= least)


def _rows(results: Path) -> Iterator[dict[str, Any]]:
    """The rows of a results file."""
    rows = read_jsonl(results)
    while True:
        try:
            where, row = next(rows)
        except StopIteration:
            return
        except ValueError as error:
            raise ValueError(f"{error}; a run that was killed leaves half a line: give its command again") from None
        missing = [name for name in ("id", "question", "scores", "trace") if name not in row]
        if missing:
            raise ValueError(f"{where}: not a row of `tripletune eval run`: it lacks {', '.join(missing)}")
        if not isinstance(row["trace"], dict) or not isinstance(row["scores"], dict) or None in row["scores"].values():
            raise ValueError(f"{where}: not a row of `tripletune eval run`: its scores or its trace are damaged")
        yield row


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; bad input ends it with one line and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="tripletune build trajectories",
        description="Turn the ledger and the results of a loop into trajectories to distil.",
    )
    group = parser.add_argument_group("what to read")
    group.add_argument("--results", action="append", required=True, metavar="DIR",
        help="output folder of `tripletune eval run`, or its results file; repeatable")  # fmt: skip
    group.add_argument("--ledger", action="append", default=[], metavar="FILE", dest="ledgers",
        help="one ledger for all results, or one for each (default: ledger.sqlite beside the results)")  # fmt: skip
    add_arguments(parser.add_argument_group("which trajectories, and what of them is learned"), TrajectoryOptions)
    add_arguments(parser.add_argument_group("where and how they are written"), FolderOptions)
    parsed = parser.parse_args(arguments)

    def program() -> None:
        options, folder = from_arguments(TrajectoryOptions, parsed), from_arguments(FolderOptions, parsed)
        statistics = build_trajectories(parsed.results, options, folder, parsed.ledgers)
        logger.info("%s: %s", folder.output, statistics["splits"])

    return run_program(program)


if __name__ == "__main__":
    sys.exit(main())
