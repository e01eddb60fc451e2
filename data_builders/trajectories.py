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

The paper names no filter, so no filter is on by default. The card counts what each filter left out. Calls without a
question, such as the extraction of TH-RAG, are all kept.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from tripletune.core.calls import Message
from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.data.pairs import Trajectory
from tripletune.core.data.passages import passage_id
from tripletune.core.data.questions import DropReason
from tripletune.core.data.records import Action, Record, Step
from tripletune.core.files import file_digest, read_json, read_prompt
from tripletune.core.options import CheckedOptions, setting
from tripletune.core.program import progress, run_program
from tripletune.data_builders.datasets import RowKind, SeenTable, listed
from tripletune.data_builders.datasets.kinds import RECORDS, TRAJECTORIES, with_rejected
from tripletune.data_builders.datasets.writer import BuildFacts, FolderOptions, new_dataset, split_of
from tripletune.data_builders.ledger_chats import Chat, RoleCalls, calls_in
from tripletune.llm.ledger import canonical
from tripletune.llm.replies import REPAIR_ROLE
from tripletune.rag.results import RESULTS, kept_facts, read_runs
from tripletune.rag.systems import find_system, system_names

logger = logging.getLogger(__name__)

LEDGER, ABOUT = "ledger.sqlite", "run.json"


@dataclass(frozen=True)
class TrajectoryOptions(CheckedOptions):
    """Which trajectories are kept."""

    system: str = setting("cirag", "learn the calls of this system", choices=system_names())
    records: bool = setting(False, "write planning and answering records of RAS, of any planner; no ledger is read")
    pairs: bool = setting(
        False, "write a better and a worse reply wherever runs of a question differ, for train.preference"
    )
    roles: tuple[str, ...] = setting(
        (), "calls to learn, for example resolve; repeatable (default: all; for cirag only integrate, as in the paper)"
    )
    model: str | None = setting(None, "train only on calls to this model (its name as in the ledger)")
    prompt: str | None = setting(
        None,
        "file with the student's system prompt, if not the teacher's; its loop needs the same (--set prompts=FOLDER)",
    )
    min_score: tuple[str, ...] = setting((), "minimum score, for example exact_match=1 or f1=0.8; repeatable")
    no_repairs: bool = setting(False, "leave out chats with a repaired or recovered reply")
    no_repeated_query: bool = setting(False, "leave out questions that ended with a repeated query")
    answer_kept: bool = setting(
        False, "leave out questions of which no kept fact names a gold answer, and those with yes or no (cirag)"
    )
    min_recall: float | None = setting(None, "minimum share of supporting passages that were retrieved")
    shortest: int | None = setting(None, "keep the N runs per question with the fewest turns or steps", at_least=1)
    limit: int | None = setting(None, "keep the first N runs of the results; the paper has 3,000", at_least=1)
    validation_fraction: float = setting(0.0, "share of the questions for validation", at_least=0, below=1)
    seed: int = setting(0, "seed of the split")

    def check(self) -> list[str]:
        """Problems of scores, of systems without plans, and of pairs."""
        found = []
        for text in self.min_score:
            try:
                _score(text)
            except ValueError:
                found.append(f"min_score: {text!r}: write it as METRIC=VALUE, for example exact_match=1")
        if self.records and self.system in system_names() and not find_system(self.system).plans:
            found.append(f"records: {self.system} has no plans to learn; name the system of a Graph-LLM: --system ras")
        if self.records and self.prompt:
            found.append("prompt: records hold no prompt; give the recipe its own (data.planning_prompt)")
        if self.answer_kept and self.system != "cirag":
            found.append(f"answer_kept: {self.system} keeps no facts as CIRAG does; set min_score")
        if self.pairs and (not (self.min_score or self.answer_kept) or self.shortest is not None):
            found.append("pairs: set min_score or answer_kept, which say what a good run is, and leave out shortest")
        return found

    @property
    def kind(self) -> RowKind[Any]:
        """The kind of rows to write."""
        kind: RowKind[Any] = RECORDS if self.records else TRAJECTORIES
        return with_rejected(kind) if self.pairs else kind

    def roles_in(self, ledger: Path) -> list[str]:
        """The full names of the wanted roles in a ledger."""
        named = self.roles or (("integrate",) if self.system == "cirag" else ())
        full = [f"{self.system}.{name.removeprefix(f'{self.system}.')}" for name in named]
        return full or sorted({role for role, _ in calls_in(ledger) if role.startswith(f"{self.system}.")})

    def check_ledgers(self, ledgers: Sequence[Path]) -> None:
        """Raise `ValueError` for a system, role or model that has no call in any of the ledgers."""
        if self.records:
            return
        known = sorted(set().union(*map(calls_in, ledgers)))
        wanted = {role for ledger in ledgers for role in self.roles_in(ledger)} or {f"{self.system}.…"}
        if none := wanted - {role for role, model in known if self.model in (None, model)}:
            asked = f"{', '.join(sorted(none))}{f' by {self.model}' if self.model else ''}"
            held = ", ".join(f"{role} by {model}" for role, model in known)
            raise ValueError(f"no ledger has a call of {asked}; the ledgers have {held or 'no calls'}")
        if self.prompt and len(wanted) > 1:
            raise ValueError(f"prompt: {', '.join(sorted(wanted))} do not share one prompt: name one with --roles")


def _score(text: str) -> tuple[str, float]:
    name, _, least = text.partition("=")
    return name.strip(), float(least)


def _sources(results: Sequence[str], ledgers: Sequence[str], records: bool) -> list[tuple[Path, ...]]:
    """Results files with their ledgers (none for records)."""
    if len(ledgers) > 1 and len(ledgers) != len(results):
        raise ValueError(f"{len(ledgers)} ledgers and {len(results)} results: name one ledger for all, or one each")
    files = [Path(text) / RESULTS if Path(text).is_dir() else Path(text) for text in results]
    if missing := [str(file) for file in files if not file.is_file()]:
        raise FileNotFoundError(f"no such file: {', '.join(missing)}")
    if records:
        return [(file,) for file in files]
    if ledgers:
        return list(zip(files, map(Path, [*ledgers] * (len(files) if len(ledgers) == 1 else 1))))
    # The ledger is beside the results, or in the folder of a run of several systems (DIR/TASK/SYSTEM).
    places = ([folder / LEDGER for folder in file.parents[:3]] for file in files)
    return [(file, next(filter(Path.is_file, some), some[0])) for file, some in zip(files, places)]


# Reason for leaving a trajectory out -> whether it is kept, given its row of the results and its chat.
Filters = dict[str, Callable[[dict[str, Any], Chat], bool]]


def _filters(options: TrajectoryOptions) -> Filters:
    scores = map(_score, options.min_score)
    found: Filters = {f"{name} below {least:g}": partial(_has_score, name, least) for name, least in scores}
    if options.no_repairs:
        found["a reply was repaired or recovered from"] = lambda row, chat: not chat.faults
    if options.no_repeated_query:
        found["a query was repeated"] = lambda row, chat: row["trace"].get("stop_reason") != "repeated_subquery"
    if options.answer_kept:
        found["no kept fact names a gold answer"] = lambda row, chat: (kept_facts(row) or (0, False))[1]
    if (recall := options.min_recall) is not None:
        found[f"less than {recall:g} of the supporting passages retrieved"] = partial(_has_recall, recall)
    return found


def _failed(filters: Filters, row: dict[str, Any], chat: Chat) -> str | None:
    return next((reason for reason, keeps in filters.items() if not keeps(row, chat)), None)


def build_trajectories(
    results: Sequence[str], options: TrajectoryOptions, folder: FolderOptions, ledgers: Sequence[str] = ()
) -> dict[str, Any]:
    """Write the trajectories of one or more runs; see the command line for the arguments."""
    sources = _sources(results, ledgers, options.records)
    options.check_ledgers([ledger for _, *one in sources for ledger in one])
    filters = _filters(options)
    drops: Counter[str] = Counter()
    with new_dataset(folder, options.kind, [file for pair in sources for file in pair]) as dataset, SeenTable() as seen:
        found = (_own_records if options.records else _trajectories)(sources, options, filters, drops)
        chosen = found if options.shortest is None else _shortest(found, options.shortest, options.kind, drops)
        chosen = _pairs(found, options.kind) if options.pairs else chosen
        for number, run in enumerate(chosen, 1):
            for row in run.rows:
                if options.kind is not TRAJECTORIES or seen.first("chat", canonical(list(row.messages))) is None:
                    dataset.write(row, run.split)
                else:
                    drops["repeated chat"] += 1
            # islice would read, and count, one more run before it ends.
            if number == options.limit:
                break
        left_out = dict(+drops) | {reason: drops[reason] for reason in filters}
        if not dataset.statistics.records:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in left_out.items()) or "the results are empty"
            parted = ", or good and bad runs of a question never differ at one prompt" if options.pairs else ""
            raise ValueError(f"nothing is left ({reasons}{parted})")
        about = "Plans of a model in its own runs, and the gold answers."
        if not options.records:
            roles = sorted({role for _, ledger in sources for role in options.roles_in(ledger)})
            about = f"Chats of {', '.join(roles)}; `learned` marks the turns that count in the loss."
        facts = BuildFacts(
            title=f"{options.kind.plural.capitalize()} of {options.system}",
            summary=about,
            drops={"all": left_out},
            files={str(file): file_digest(file) for file, *_ in sources},
            options={"results": list(results), "ledgers": list(ledgers), **asdict(options)},
        )
        statistics = dataset.finish(facts)
    logger.info("left out: %s", listed(left_out) or "none")
    return statistics


class _Run(NamedTuple):
    """Rows of a run: trajectories of `size` turns or records of `size` steps; for pairs, a row per reply of a chat."""

    question_id: str
    size: int
    rows: Any
    split: str
    good: bool = True


def _trajectories(
    sources: Sequence[tuple[Path, ...]], options: TrajectoryOptions, filters: Filters, drops: Counter[str]
) -> Iterator[_Run]:
    system = Message(role="system", content=read_prompt(options.prompt)) if options.prompt else None

    def told(chat: Chat) -> tuple[Message, ...]:
        return tuple(system if system and one["role"] == "system" else one for one in chat.messages)

    with SeenTable() as seen:

        def made(chats: list[tuple[str, Chat]], question_id: str, text: str, size: int, good: bool) -> Iterator[_Run]:
            new = [seen.first("chat", canonical(list(chat.messages))) is None for _, chat in chats]
            if not (options.pairs or any(new)):
                drops["repeated chat"] += len(new)
                return
            # A question has several trajectories if it has several runs, several roles, or a chat per round.
            names = (f"{question_id}:{number}" for number in count())
            free = (name for name in names if seen.first("id", name) is None)
            rows = [
                Trajectory(next(free), question_id, role, chat.model, told(chat), chat.learned) for role, chat in chats
            ]
            rows = [reply for one in rows for reply in _replies(one)] if options.pairs else rows
            yield _Run(question_id, size, rows, split_of(text, options.seed, options.validation_fraction), good)

        for results, ledger in sources:
            with ExitStack() as stack:
                roles = options.roles_in(ledger)
                opened = [stack.enter_context(RoleCalls(ledger, role, options.model)) for role in roles]
                for row in _all_rows(results):
                    found = [(one, _failed(filters, row, one[1])) for one in _chats(row, opened, drops)]
                    kept = [one for one, failed in found if not failed]
                    parts = [([one], not failed) for one, failed in found] if options.pairs else [(kept, True)]
                    drops.update(failed for _, failed in found if failed and not options.pairs)
                    size = sum(len(chat.messages) for (_, chat), _ in found)
                    for chats, good in parts:
                        yield from made(chats, row["id"], row["question"], size, good)
                for calls in opened:
                    for chat in calls.corpus_chats():
                        text, size = chat.messages[-2]["content"], len(chat.messages)
                        yield from made([(calls.role, chat)], f"corpus:{passage_id('', text)}", text, size, True)


def _own_records(
    sources: Sequence[tuple[Path, ...]], options: TrajectoryOptions, filters: Filters, drops: Counter[str]
) -> Iterator[_Run]:
    """The records of a Graph-LLM's runs: each plan after its history, and the gold answer after all steps."""
    chat = Chat("", (), (), (), True)
    for sample, (results,) in enumerate(sources):
        for row in _all_rows(results):
            # The question as the model read it, with the words that the task adds.
            trace, name, question = row["trace"], f"{row['id']}:{sample}", row["trace"]["question"]
            steps = tuple(map(Step.from_json, trace["steps"]))
            reasons = {
                "the question failed": bool(row.get("error")),
                str(DropReason.NO_ANSWER): not any(map(str.strip, row["answers"])),
                "a plan was unreadable or out of place": trace["malformed"] + trace["unexpected"] > 0,
                "no triples in any step": bool(steps) and not any(step.triples for step in steps),
            }
            broken = next((reason for reason, is_so in reasons.items() if is_so), None)
            failed = broken or _failed(filters, row, chat)
            if failed and (broken or not options.pairs):
                drops[failed] += 1
                continue
            done = Action.SUFFICIENT if steps else Action.NO_RETRIEVAL
            found = [Record(f"{name}:answer", row["id"], "answering", question, done, steps, "", tuple(row["answers"]))]
            for number, one in enumerate(trace["actions"]):
                # A repeated sub-query was not searched, so it has no step and is not learned.
                if number < len(steps) or one["action"] != Action.SUBQ:
                    plan = Action(one["action"]), steps[:number], one["subquery"]
                    found.append(Record(f"{name}:{number}", row["id"], "planning", question, *plan))
            # Pairs have only plans, since the gold answer is not a reply of the model.
            wanted = found[1:] if options.pairs else found
            rows = [replace(one, source=options.system) for one in wanted]
            split = split_of(row["question"], options.seed, options.validation_fraction)
            yield _Run(row["id"], len(steps), rows, split, not failed)


def _shortest(found: Iterable[_Run], most: int, kind: RowKind[Any], drops: Counter[str]) -> Iterator[_Run]:
    """Yield the shortest runs per question, in order; the runs are stored on disk."""
    with closing(sqlite3.connect("")) as table:
        table.execute("CREATE TABLE found (question, size, rows, split, good)")
        runs = (one._replace(rows=json.dumps([row.to_json() for row in one.rows])) for one in found)
        table.executemany("INSERT INTO found VALUES (?, ?, ?, ?, ?)", runs)
        place = "row_number() OVER (PARTITION BY question ORDER BY size, rowid)"
        for rank, *run in table.execute(f"SELECT {place}, * FROM found ORDER BY rowid"):
            if rank <= most:
                one = _Run(*run)
                yield one._replace(rows=[kind.read(row, "a row") for row in json.loads(one.rows)])
            else:
                drops["other runs of the question are shorter"] += 1


def _replies(one: Trajectory) -> list[Trajectory]:
    """Return, for each reply of the model, the trajectory up to it, with only this reply learned."""
    return [
        replace(one, id=f"{one.id}:{at}", messages=one.messages[: at + 1], learned=(*[False] * at, True))
        for at, turn in enumerate(one.messages)
        if one.learned[at] and turn["role"] == "assistant"
    ]


def _pairs(found: Iterable[_Run], kind: RowKind[Any]) -> Iterator[_Run]:
    """Pair the best and the worst reply to each prompt, by the share of good runs; the runs are stored on disk."""
    with closing(sqlite3.connect("")) as table:
        table.execute("CREATE TABLE found (question, role, prompt, reply, good, row, split)")
        for run in found:
            for one in run.rows:
                row = json.dumps(one.to_json())
                values = (run.question_id, getattr(one, "role", ""), *kind.text(one), run.good, row, run.split)
                table.execute("INSERT INTO found VALUES (?, ?, ?, ?, ?, ?, ?)", values)
        replies = table.execute(
            "SELECT question, role, prompt, reply, row, split, avg(good) AS share, min(rowid) AS place FROM found "
            "GROUP BY question, role, prompt, reply ORDER BY question, role, prompt, share DESC, place"
        )
        for (question, *_), group in groupby(replies, key=itemgetter(0, 1, 2)):
            ranked = [one[3:7] for one in group]
            (_, row, split, most), (rejected, _, _, least) = ranked[0], ranked[-1]
            if most > least:
                better = replace(kind.read(json.loads(row), "a row"), rejected=rejected)
                yield _Run(question, 1, [better], split)


def _chats(row: dict[str, Any], opened: Sequence[RoleCalls], drops: Counter[str]) -> list[tuple[str, Chat]]:
    """The readable chats of a row's run, with their roles."""
    if row.get("error"):
        drops["the question failed"] += 1
        return []
    calls = row["trace"]["details"].get("calls", {})
    found = []
    for one in opened:
        keys = [*calls.get(one.role, ()), *calls.get(one.role + REPAIR_ROLE, ())]
        found += [(one.role, chat) for chat in one.chats(row["id"], keys)]
    if not found:
        drops["the ledger has no chat of this run"] += 1
    drops["the last decision cannot be read or was cut off"] += sum(not chat.readable for _, chat in found)
    return [(role, chat) for role, chat in found if chat.readable]


def _has_score(name: str, least: float, row: dict[str, Any], chat: Chat) -> bool:
    if row["scores"] and name not in row["scores"]:
        raise ValueError(f"the results have no score {name!r}; they have {', '.join(row['scores'])}")
    # A question without a gold answer has no scores.
    return bool(row["scores"].get(name, -1) >= least)


def _has_recall(least: float, row: dict[str, Any], chat: Chat) -> bool:
    if (found := row.get("supporting_recall")) is None:
        if not row["trace"]["steps"]:
            return not row.get("supporting")
        raise ValueError(
            f"question {row['id']!r}: the results don't say which supporting passages were retrieved: "
            "run eval with --gold (`tripletune build corpus` writes the file), or leave out --min-recall"
        )
    return bool(found >= least)


def _all_rows(results: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a results file, and warn if the run did not end."""
    found, about = 0, results.parent / ABOUT
    rows = read_runs(results, "question", "scores", "trace", partial=True)
    for _, row in progress(rows, str(results)):
        found += 1
        yield row
    whole = read_json(about).get("questions", 0) if about.is_file() else 0
    if found < whole:
        logger.warning("%s is of a run that did not end: it has %d of %d questions", results, found, whole)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; bad input prints one line and gives exit code 2."""
    parser = CommandParser(
        prog="tripletune build trajectories",
        description="Convert the ledger and the results of a loop into trajectories to distil.",
        example="tripletune build trajectories --results runs/eval/cirag_train --min-score exact_match=1 "
        "--output runs/trajectories",
    )
    group = parser.add_argument_group("what to read")
    group.add_argument("--results", action="append", required=True, metavar="DIR",
        help="output folder of `tripletune eval run`, or its results file; repeatable")  # fmt: skip
    group.add_argument("--ledger", action="append", default=[], metavar="FILE", dest="ledgers",
        help="one ledger for all results, or one for each (default: ledger.sqlite beside the results, or in "
        "the folder of a run of several systems)")  # fmt: skip
    add_arguments(parser.add_argument_group("which trajectories"), TrajectoryOptions)
    add_arguments(parser.add_argument_group("output"), FolderOptions)
    parsed = parser.parse_args(arguments)

    def program() -> None:
        options, folder = from_arguments(TrajectoryOptions, parsed), from_arguments(FolderOptions, parsed)
        statistics = build_trajectories(parsed.results, options, folder, parsed.ledgers)
        logger.info("%s: %s", folder.output, statistics["splits"])

    return run_program(program)


if __name__ == "__main__":
    sys.exit(main())
