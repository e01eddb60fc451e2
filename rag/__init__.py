"""Retrieval, the loops that use the models, and the trace that a loop records for each question.

A `Trace` holds sub-queries, passages, triples, decisions and token counts as plain JSON values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

if TYPE_CHECKING:
    from tripletune.core.calls import Completion
    from tripletune.core.data.passages import Passage
    from tripletune.core.data.records import Step
    from tripletune.rag.search.retrievers import Retrieved

if __name__ == "rag":
    raise ImportError("import the package as tripletune.rag; as rag it would be loaded a second time")


class TracedPassage(TypedDict):
    """A passage that a round found, as traces and results hold it; its text is in the corpus.

    Attributes:
        title: Its title, or its first words if it has none.
        score: The retriever's score, higher is better.
        source: "document", "page" and "heading", if the corpus has them.
    """

    id: str
    title: str
    score: float
    source: NotRequired[dict[str, Any]]


@dataclass(slots=True)
class TraceStep:
    """One round of retrieval and extraction.

    Attributes:
        passages: The hits, best first.
        triples: The triples shown to the model, `[subject, predicate, object]`.
        passages_without_triples: Number of hits that the triple store does not have.
    """

    query: str
    passages: list[TracedPassage]
    triples: list[list[str]]
    passages_without_triples: int = 0


@dataclass(slots=True)
class TraceAction:
    """One planning reply.

    Attributes:
        action: The parsed action; None if the reply is malformed.
        unexpected: `[SUFFICIENT]` before any retrieval, or `[NO_RETRIEVAL]` after it.
        note: What the loop did instead of the action, and why; "" if it did what the reply says.
    """

    reply: str
    action: str | None
    subquery: str = ""
    unexpected: bool = False
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """The fields by name, without an empty note, which older traces lack."""
        values = _json_fields(self)
        if not self.note:
            del values["note"]
        return values


@dataclass(slots=True)
class Trace:
    """Everything that a system did for one question.

    Attributes:
        question: The main question as the model read it.
        stop_reason: Why planning ended: the planner's decision ("sufficient", "no_retrieval"), a limit ("max_rounds",
            "repeated_subquery", "malformed"), or a system that does not plan ("single_pass", "static_context",
            "retrieval_off"). "no_question": the reply says that there is no further query. "no_searchable": T2RAG has
            no clue that can be searched.
        calls: Number of model calls, including the answer's; token counts and truncations are sums over all calls.
        seconds: Wall-clock seconds, including time spent waiting for other questions.
        structuring_seconds: The part of `seconds` spent waiting for triples of passages (RAS, figure 5).
        tallies: Counts that are specific to the system, such as recovered replies by kind; a run's metrics sum them.
        cached: By role, the calls that the ledger answered and their tokens. Like the seconds, these numbers depend on
            earlier and parallel runs.
        confidence: How sure the answer is, by the measures of `rag.systems._confidence`, and "margin": the mean
            difference between the two largest log-probabilities at the answer's tokens.
        withheld: The answer that was replaced by "I don't know", since it was less sure than the option `abstain`.
        shown: Ids of the passages whose text or facts were in the prompt of the answer; empty if that is not known.
        found: All passages by id, in the order in which they were found; not part of the JSON values, like `origins`.
        origins: By each fact as it stands in prompts, the ids of the passages that state it.
    """

    question: str
    question_id: str = ""
    steps: list[TraceStep] = field(default_factory=list)
    actions: list[TraceAction] = field(default_factory=list)
    answer: str = ""
    stop_reason: str = ""
    malformed: int = 0
    unexpected: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    truncated_triples: int = 0
    truncated_words: int = 0
    seconds: float = 0.0
    structuring_seconds: float = 0.0
    error: str = ""
    tallies: dict[str, int] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    cached: dict[str, list[int]] = field(default_factory=dict)
    confidence: dict[str, float] = field(default_factory=dict)
    withheld: str = ""
    shown: list[str] = field(default_factory=list)
    found: dict[str, Passage] = field(default_factory=dict, repr=False)
    origins: dict[str, list[str]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Make this the trace that notes the calls of the current question (`NOTING`)."""
        NOTING.set(self)

    def tally(self, name: str, count: int = 1) -> None:
        """Add to a count that is specific to the system, by name; a run's metrics sum these counts."""
        self.tallies[name] = self.tallies.get(name, 0) + count

    def count(self, completion: Completion) -> None:
        """Add the cost of one model call; calls that the ledger answered count, too (`cached` has their part).

        Of the last call with scores, which answers, it is noted how sure the model was.
        """
        self.calls += 1
        self.prompt_tokens += completion.prompt_tokens
        self.completion_tokens += completion.completion_tokens
        self.truncated_triples += completion.truncated_triples
        self.truncated_words += completion.truncated_words
        if completion.scores is not None:
            self.confidence["probability"] = round(math.exp(completion.scores.logprob), 4)
            self.confidence["margin"] = round(completion.scores.margin, 4)

    def add_step(self, step: Step, hits: Sequence[Retrieved], passages_without_triples: int = 0) -> None:
        """Add a round of retrieval, and show it to the function that watches the question."""
        passages = []
        for hit in hits:
            passage = hit.passage
            traced: TracedPassage = {"id": passage.id, "title": passage.label, "score": hit.score}
            if passage.source:
                traced["source"] = passage.source
            passages.append(traced)
            self.found.setdefault(passage.id, passage)
        triples = [triple.as_list() for triple in step.triples]
        self.steps.append(TraceStep(step.query, passages, triples, passages_without_triples))
        _pass_to_watcher(self.steps[-1])

    def add_action(
        self, reply: str, action: str | None, subquery: str = "", unexpected: bool = False, note: str = ""
    ) -> None:
        """Add a planning reply, and show it to whoever watches the question; see `TraceAction`."""
        self.actions.append(TraceAction(reply, action, subquery, unexpected, note))
        _pass_to_watcher(self.actions[-1])

    def to_json(self) -> dict[str, Any]:
        """The trace as JSON values, without copying nested values; `rag.results.StoredTrace` reads it back."""
        values = _json_fields(self)
        values["steps"] = [_json_fields(step) for step in self.steps]
        values["actions"] = [action.to_json() for action in self.actions]
        return values


# Called with each plan and each round of retrieval of the current question, as they happen.
WATCH: ContextVar[Callable[[TraceAction | TraceStep], None] | None] = ContextVar("watch", default=None)
# The current question's newest trace, which records the calls that read passages for it, and what a failure cost.
NOTING: ContextVar[Trace | None] = ContextVar("noting", default=None)


def citation(passage: TracedPassage) -> str:
    """The title of a passage in a trace; if the passage has a source, in brackets with the page."""
    name = passage["title"] or passage["id"]
    source = passage.get("source")
    if not source:
        return name
    page = source.get("page")
    return f"[{name}, p. {page}]" if page else f"[{name}]"


def _pass_to_watcher(event: TraceAction | TraceStep) -> None:
    """Pass an event to the function that watches the current question, if there is one."""
    watch = WATCH.get()
    if watch is not None:
        watch(event)


def _json_fields(item: Trace | TraceStep | TraceAction) -> dict[str, Any]:
    """The fields of an item by name, without a copy of nested values; `Trace` says which are no JSON values.

    `asdict` is not used, because copying every value took as long as the loop itself.
    """
    return {name: getattr(item, name) for name in item.__slots__ if name not in ("found", "origins")}
