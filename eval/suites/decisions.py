"""Compare a student's decisions with its teacher's (`tripletune eval decisions`), as CIRAG distils them (3.5).

No retrieval runs: a prompt is a trajectory's chat up to a round's candidates, and the teacher's decision is the gold
answer. Training also logs these scores. The parser of the loop reads the replies. Intervals draw whole questions,
because the rounds of a question share most of their text.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console

from tripletune.core.calls import Completion, Message, Sampling
from tripletune.core.data.jsonl import record_files
from tripletune.core.data.pairs import Trajectory, read_trajectories
from tripletune.core.data.triples import Triple
from tripletune.core.files import file_digest
from tripletune.core.options import setting
from tripletune.eval.metrics import f1
from tripletune.eval.results import ResultLog
from tripletune.eval.statistics import bootstrap_pairs
from tripletune.eval.suites import Failure, Suite, SuiteOptions, interval_cells, show_table
from tripletune.models.loading import DTYPE_HELP, model_fingerprint, resolve, usual_dtype
from tripletune.rag.systems.cirag import CiragOptions
from tripletune.rag.systems.cirag.integration import INTEGRATE_ROLE, Decision, read_decision, shorten, shown_candidates

SCORES = {
    "core_f1": "overlap of the core triples with the teacher's; two empty sets count as equal",
    "query_f1": "word overlap of the next query with the teacher's query, if the teacher continues; stopping scores 0",
    "stop_accuracy": "the reply continues or stops as the teacher does",
    "malformed": "replies without a readable decision, after the parser's repairs",
}
STOP, GO_ON, UNREADABLE = "stop", "go_on", "malformed"


@dataclass(frozen=True, slots=True)
class Case:
    """One decision of a teacher; the id is the trajectory's id with the number of the round."""

    id: str
    question_id: str
    round: int
    teacher: str
    messages: tuple[Message, ...]
    candidates: tuple[Triple, ...]
    earlier: tuple[Triple, ...]
    gold: Decision


@dataclass(kw_only=True)
class DecisionOptions(SuiteOptions):
    """Options of `tripletune eval decisions`."""

    data: str = setting(dataclasses.MISSING, "folder or file of trajectories (`build trajectories`)")
    model: str = setting(dataclasses.MISSING, "the student: run, adapter or model folder, hub id or pypi:<package>")
    split: str = setting("validation", "split of the folder")
    batch_size: int = setting(16, "prompts per forward pass", at_least=1)
    dtype: str | None = setting(None, DTYPE_HELP)
    max_prompt_tokens: int | None = setting(
        None,
        "maximum tokens of a prompt; the oldest candidates are dropped first (default: no limit)",
        at_least=1,
    )
    max_reply_tokens: int = setting(CiragOptions().max_integration_tokens, "maximum tokens of a reply", at_least=1)


class DecisionSuite(Suite):
    """A student's decisions; see the module."""

    unit = "decision"
    options_class = DecisionOptions
    example = "--data runs/cirag/trajectories --model runs/student --output runs/cirag/decisions"

    def __init__(self, options: DecisionOptions) -> None:
        resolve(options.model)
        # Twice as many items as run at once, so that a batch can have prompts of similar length.
        self.concurrency = 2 * options.batch_size
        self.sampling = Sampling(max_tokens=options.max_reply_tokens)
        self.backend: Any = None
        super().__init__(options)

    def items(self) -> Iterator[Case]:
        split = self.options.split if Path(self.options.data).is_dir() else None
        return islice(decision_cases(read_trajectories(self.options.data, split)), self.options.limit)

    def settings(self) -> dict[str, Any]:
        options = self.options
        return {
            "data": [file_digest(file) for file in record_files(options.data, options.split)],
            "model": options.model,
            "weights": model_fingerprint(options.model),
            "dtype": usual_dtype(options.dtype),
            **{name: getattr(options, name) for name in ("limit", "max_prompt_tokens", "max_reply_tokens")},
        }

    def open(self) -> None:
        from tripletune.llm.backends.hf import HFBackend

        self.backend = HFBackend(self.options.model, self.options.batch_size, self.options.dtype)
        self.clients = [self.backend]

    async def ask(self, batch: list[Case]) -> list[tuple[Completion, int]]:
        """The replies to the decisions' prompts, each with the number of left-out candidates."""
        (case,) = batch
        messages, left_out = list(case.messages), 0
        if self.options.max_prompt_tokens is not None:
            messages, left_out = shorten(messages, self.backend.count_tokens, self.options.max_prompt_tokens)
        return [(await self.backend.complete(messages, self.sampling), left_out)]

    def score(self, item: Case, reply: tuple[Completion, int] | Failure) -> dict[str, Any]:
        completion, left_out = (Completion(""), 0) if isinstance(reply, Failure) else reply
        return score_reply(item, completion.text, reply.error if isinstance(reply, Failure) else "") | {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": completion.completion_tokens,
            "cut_off": completion.finish_reason == "length",
            "candidates_left_out": left_out,
            "seconds": completion.seconds,
        }

    def summarise(self, log: ResultLog) -> dict[str, Any]:
        about = {"model": self.options.model, "data": self.options.data, "split": self.options.split}
        return about | summarise_decisions(log.rows())

    def show(self, metrics: Mapping[str, Any], console: Console) -> None:
        rows = [
            ("all", name, *interval_cells(value := metrics["metrics"][name]), str(value["n"]), explanation)
            for name, explanation in SCORES.items()
        ]
        rows += [
            (number, name, *interval_cells(scores[name]), str(scores[name]["n"]), "")
            for number, scores in metrics["by_round"].items()
            for name in ("core_f1", "query_f1", "stop_accuracy")
        ]
        title = f"{metrics['decisions']} decisions on {metrics['questions']} questions, with the teacher's history"
        heads = ("round", "score", "mean", "95 % interval", "decisions", "what it says")
        show_table(console, title, heads, rows, "questions", metrics["failed"])
        faults = ", ".join(f"{name} {count}" for name, count in metrics["faults"].items()) or "none"
        console.print(f"errors {metrics['errors']}, faults of the replies: {faults}")


SUITE = DecisionSuite


def decision_cases(trajectories: Iterable[Trajectory]) -> Iterator[Case]:
    """The learned decisions of trajectories, in order."""
    for trajectory in trajectories:
        if trajectory.role != INTEGRATE_ROLE:
            raise ValueError(
                f"trajectory {trajectory.id!r} has role {trajectory.role}, but only decisions of {INTEGRATE_ROLE} are "
                "scored here"
            )
        earlier: list[Triple] = []
        number = 0
        for place, turn in enumerate(trajectory.messages):
            if turn["role"] != "assistant" or not place:
                continue
            number += 1
            shown = _candidates(trajectory, place - 1)
            gold = read_decision(turn["content"], shown, earlier)
            if trajectory.learned[place]:
                if gold.query is None:
                    raise ValueError(f"trajectory {trajectory.id!r}: decision {number} cannot be read")
                about = f"{trajectory.id}@{number}", trajectory.question_id, number, trajectory.model
                yield Case(*about, trajectory.messages[:place], tuple(shown), tuple(earlier), gold)
            earlier += shown


def score_reply(case: Case, reply: str, error: str = "") -> dict[str, Any]:
    """One row with the teacher's decision, the parsed reply, and its scores; an empty reply scores 0."""
    found = read_decision(reply, case.candidates, case.earlier)
    gold = case.gold
    scores = {
        "core_f1": _set_f1(found, gold) if found.query is not None or found.core else 0.0,
        "stop_accuracy": float(found.query is not None and bool(found.query) == bool(gold.query)),
        "malformed": float(found.query is None),
    }
    if gold.query:
        scores["query_f1"] = f1(found.query or "", (gold.query,))
    return {
        "id": case.id,
        "question_id": case.question_id,
        "round": case.round,
        "teacher": case.teacher,
        "gold": _shown(gold),
        "found": _shown(found),
        "faults": list(found.faults),
        "reply": reply,
        "error": error,
        "scores": scores,
    }


def summarise_decisions(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Metrics of scored rows; `confusion` counts the student's decisions for each decision of the teacher."""
    values: dict[tuple[str, str, str], list[tuple[str, float]]] = defaultdict(list)
    confusion = {gold: dict.fromkeys((STOP, GO_ON, UNREADABLE), 0) for gold in (STOP, GO_ON)}
    faults: Counter[str] = Counter()
    questions, errors = set(), 0
    for row in rows:
        questions.add(row["question_id"])
        errors += bool(row["error"])
        faults.update(row["faults"])
        confusion[row["gold"]["decision"]][row["found"]["decision"]] += 1
        for name, score in row["scores"].items():
            for group in (("", ""), ("round", str(row["round"])), ("teacher", row["teacher"])):
                values[*group, name].append((row["question_id"], score))

    def family(kind: str, key: str) -> dict[str, Any]:
        return {name: bootstrap_pairs(values.get((kind, key, name), ())) for name in SCORES}

    def families(kind: str) -> dict[str, Any]:
        keys = sorted({key for one, key, _ in values if one == kind}, key=lambda key: (len(key), key))
        return {key: family(kind, key) for key in keys}

    return {
        "decisions": sum(sum(row.values()) for row in confusion.values()),
        "questions": len(questions),
        "metrics": family("", ""),
        "by_round": families("round"),
        "by_teacher": families("teacher"),
        "confusion": confusion,
        "faults": dict(sorted(faults.items())),
        "errors": errors,
    }


def _candidates(trajectory: Trajectory, place: int) -> Sequence[Triple]:
    turn = trajectory.messages[place]
    try:
        shown = shown_candidates(turn["content"]) if turn["role"] == "user" else None
    except ValueError as error:
        raise ValueError(f"trajectory {trajectory.id!r}: {error}") from None
    if shown is None:
        raise ValueError(f"trajectory {trajectory.id!r}: turn {place + 1} shows no candidates to decide on")
    return shown


def _set_f1(found: Decision, gold: Decision) -> float:
    one, other = (set(decision.core) for decision in (found, gold))
    if not one and not other:
        return 1.0
    return 2 * len(one & other) / (len(one) + len(other))


def _shown(decision: Decision) -> dict[str, Any]:
    kind = {None: UNREADABLE, "": STOP}.get(decision.query, GO_ON)
    triples = [triple.as_list() for triple in decision.core]
    return {"core_triples": triples, "next_query": decision.query, "decision": kind}
