"""Answer one question and show every step (`tripletune ask QUESTION`)."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from tripletune.core.tables import on_one_line, printable
from tripletune.llm.backends import LLMOptions
from tripletune.rag import Trace, TraceAction, TraceStep, citation
from tripletune.rag.answering import open_system
from tripletune.rag.costs import Prices, costs_by_role
from tripletune.rag.system_options import SystemOptions
from tripletune.rag.systems._confidence import MEASURES

logger = logging.getLogger(__name__)

WEAK_MODEL = "try a stronger model, or --system standard, which searches once without a plan"
UNREAD = " have no triples in --triples: run `tripletune rag extract` again, which reads only new passages"


@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    """The answer to a question, as `--json` prints it and `answers.jsonl` holds it.

    Attributes:
        id: The question's id; "" for a question of the command line.
        sources: `{"id", "title"}` of the passages that the answer's reader saw, with document and page if the corpus
            has them; all passages that were found if it is not known which of them the reader saw.
        not_shown: The other passages that were found.
        triples: Distinct triples of all rounds, `[subject, predicate, object]`.
        rounds: Number of searches.
        calls: Calls of models, including those that a ledger answered; the same holds for `tokens` and `dollars`.
        tokens: Tokens of prompts ("read") and of replies ("written").
        dollars: None if no prices are given.
        paid: `dollars` without the calls that a ledger answered.
        error: Why the question failed; "" if it has an answer.
        confidence: How sure the answer is, by the measures of `rag.systems._confidence`.
        withheld: The answer that "I don't know" replaced, since it was not sure enough; "" if none was.
    """

    id: str
    question: str
    answer: str
    sources: list[dict[str, Any]]
    not_shown: list[dict[str, Any]]
    triples: list[list[str]]
    rounds: int
    calls: int
    tokens: dict[str, int]
    dollars: float | None
    paid: float | None
    seconds: float
    error: str
    confidence: dict[str, float]
    withheld: str

    def to_json(self) -> dict[str, Any]:
        """The fields by name; without prices, there are no dollars, and a question that has no id gets none.

        What was withheld is there only if something was.
        """
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        if not self.withheld:
            del values["withheld"]
        if not self.id:
            del values["id"]
        if self.dollars is None:
            del values["dollars"], values["paid"]
        return values


def answer_of(trace: Trace, question: str, prices: Prices) -> AnsweredQuestion:
    """The answer in a trace; `question` is the question as it was asked, without a task's instruction.

    A passage that several rounds found is one source. Dollars are rounded, since sums of prices have digits that no
    bill has; without prices there are none, as 0 would read as "free".
    """
    passages: dict[str, dict[str, Any]] = {}
    triples: dict[tuple[str, ...], None] = {}
    for step in trace.steps:
        for passage in step.passages:
            named = {"id": passage["id"], "title": passage["title"]}
            passages[passage["id"]] = named | passage.get("source", {})
        triples |= dict.fromkeys(map(tuple, step.triples))
    if "shown" in trace.details.get("unknown", ()):
        shown = list(passages)
    else:
        shown = [name for name in trace.shown if name in passages]
    dollars, paid = None, None
    if prices:
        dollars, paid = 0.0, 0.0
        for cost in costs_by_role(trace, prices).values():
            dollars += cost.dollars or 0.0
            paid += (cost.dollars or 0.0) - (cost.cached_dollars or 0.0)
        dollars, paid = round(dollars, 8), round(paid, 8)
    return AnsweredQuestion(
        id=trace.question_id,
        question=question,
        answer=trace.answer,
        sources=[passages[name] for name in shown],
        not_shown=[passage for name, passage in passages.items() if name not in shown],
        triples=list(map(list, triples)),
        rounds=len(trace.steps),
        calls=trace.calls,
        tokens={"read": trace.prompt_tokens, "written": trace.completion_tokens},
        dollars=dollars,
        paid=paid,
        seconds=round(trace.seconds, 3),
        error=trace.error,
        confidence={name: trace.confidence[name] for name in MEASURES if name in trace.confidence},
        withheld=trace.withheld,
    )


def ask_question(
    question: str, options: SystemOptions, teacher: LLMOptions | None, prices: Prices, as_json: bool = False
) -> None:
    """Answer a question, and print every step and the answer, or with `as_json` only the `AnsweredQuestion`.

    Args:
        question: The question.
        options: The system and what it needs.
        teacher: The chat model, or None for systems that use none.
        prices: Dollars per million tokens by role, for the cost; empty: no cost is shown.
        as_json: Print one line of JSON, for programs; steps are then not shown while they happen.
    """
    if not question.strip():
        raise ValueError("the question is empty")

    def show(event: TraceAction | TraceStep) -> None:
        """Print an event at once, so that a user sees the loop working."""
        print("\n".join(event_lines(event)), flush=True)

    with open_system(options, teacher) as system:
        if as_json:
            trace = system.answer(question)
            print(json.dumps(answer_of(trace, question, prices).to_json(), ensure_ascii=False))
            hint = hint_on_model(trace)
            if hint:
                # Not on standard output, which a program reads.
                logger.warning(hint)
            return
        print(f"Question: {on_one_line(question)}", flush=True)
        trace = system.answer(question, watch=show)
    print("\n".join(end_lines(trace, answer_of(trace, question, prices))))


def event_lines(event: TraceAction | TraceStep) -> Iterator[str]:
    """Lines that show a plan, or a search with its passages and triples.

    Passages without triples are pointed out, because the model has not read them although they were found.
    """
    if isinstance(event, TraceAction):
        yield f"  plan      {on_one_line(event.reply)}"
        note = "no plan can be read in this reply" if event.action is None else event.note
        if note:
            yield f"            ({note})"
        return
    titles = ", ".join(map(citation, event.passages))
    yield f"  search    {on_one_line(event.query)}"
    yield f"  retrieve  {on_one_line(titles or 'nothing found')}"
    for triple in event.triples:
        yield f"  triple    {on_one_line(' | '.join(triple))}"
    if event.passages_without_triples:
        yield f"  unread    {event.passages_without_triples} of {len(event.passages)} passages{UNREAD}"


def end_lines(trace: Trace, answer: AnsweredQuestion) -> Iterator[str]:
    """Lines that show why the loop stopped, the sources, the cost and the answer."""
    titles: dict[str, str] = {}
    for step in trace.steps:
        for passage in step.passages:
            titles[passage["id"]] = citation(passage)
    sources = dict.fromkeys(titles[source["id"]] for source in answer.sources)
    cost = cost_text(answer.calls, answer.tokens["read"], answer.tokens["written"], answer.dollars, answer.paid)
    yield f"  stop      {trace.stop_reason}"
    hint = hint_on_model(trace)
    if hint:
        yield f"  hint      {hint}"
    yield f"  sources   {on_one_line(', '.join(sources) or 'none')}"
    yield f"  cost      {cost}, {answer.seconds} s"
    if answer.confidence:
        measures = ", ".join(f"{name} {value:.2f}" for name, value in answer.confidence.items())
        yield f"  sure      {measures}"
    if answer.withheld:
        yield f"  withheld  {on_one_line(answer.withheld)}"
    yield f"Answer: {printable(answer.answer)}"


def hint_on_model(trace: Trace) -> str:
    """What to try if the model's replies could not be read or it never searched; "" if all is well."""
    problem = ""
    if trace.malformed:
        problem = f"{trace.malformed} {'reply' if trace.malformed == 1 else 'replies'} of the model could not be read"
    elif trace.stop_reason == "no_question" and not trace.steps:
        problem = "nothing was searched"
    return f"{problem}: {WEAK_MODEL}" if problem else ""


def cost_text(calls: int, read: int, written: int, dollars: float | None, paid: float | None) -> str:
    """Calls, tokens that were read and written, and dollars if they are known; what was paid only where it is less."""
    text = f"{calls:,} calls, {read:,} tokens read, {written:,} written"
    if dollars is not None:
        text += f", ${dollars:.4g}"
    if paid is not None and paid != dollars:
        text += f" (paid: ${paid:.4g})"
    return text
