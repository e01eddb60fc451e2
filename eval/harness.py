"""Runs a system over a task: one record a question, resumable, with metrics that keep failed questions in.

A question that fails is a record with its error and score 0. Many questions run at once as asyncio tasks; the model
groups their calls, and the final file is in the order of the benchmark, so concurrency changes nothing in it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tripletune.data_builders.hotpotqa_subq.questions import Question
from tripletune.eval.metrics import score_answer
from tripletune.eval.progress import Progress
from tripletune.eval.results import METRICS, ResultLog
from tripletune.eval.statistics import bootstrap_mean
from tripletune.eval.task import Task
from tripletune.models.files import write_json
from tripletune.models.llm.client import RepliesPending, SetupError
from tripletune.models.llm.ledger_client import RetriesExhausted
from tripletune.rag.systems import System, Tools
from tripletune.rag.trace import Trace

logger = logging.getLogger(__name__)

_COSTS = ("calls", "prompt_tokens", "completion_tokens", "truncated_triples", "truncated_words")


@dataclass(frozen=True, slots=True)
class Setup:
    """One system on one task.

    Attributes:
        system: The loop.
        task: How questions are put and scored.
        tools: Model, retriever and triples.
        options: Settings of the loop, of the class `system.options`.
        own_contexts: Whether the corpus was built from the questions' own passages; then the share of supporting
            passages that was retrieved can be measured.
        gold: Ids of the supporting passages in the corpus, by question id; they go before `own_contexts`.
    """

    system: System
    task: Task
    tools: Tools
    options: Any
    own_contexts: bool = False
    gold: Mapping[str, frozenset[str]] | None = None


class QuestionsPending(RuntimeError):
    """Questions wait for replies of a batch; the message says what to do. The other questions have their rows."""


def run_task(
    setup: Setup, questions: Iterable[Question], ids: list[str], log: ResultLog, concurrency: int = 64
) -> dict[str, Any]:
    """Answer the questions that have no row yet, then sort the rows and write `metrics.json`.

    Args:
        setup: System, task and tools.
        questions: All questions, streamed once.
        ids: Their ids, in order.
        log: Where the rows go; questions it knows are passed over.
        concurrency: Questions under way at once.

    Returns:
        The metrics, as written.

    Raises:
        ValueError: `concurrency` is below 1.
        QuestionsPending: questions wait for a batch; run again when it is answered.
        RetriesExhausted: the model's server does not answer; run again later.
        SetupError: a key, an address or a model's name is at fault.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency is {concurrency}: at least one question must be under way")
    started, before = time.perf_counter(), len(log.done)
    with Progress(len(ids), before) as progress:
        pending = asyncio.run(_run_all(setup, questions, log, concurrency, progress))
    if pending:
        raise QuestionsPending(pending)
    return finish_task(setup, ids, log, len(log.done) - before, time.perf_counter() - started)


async def answer_questions(
    setup: Setup, questions: Iterable[Question], log: ResultLog, concurrency: int, progress: Progress
) -> int:
    """Answer the questions that have no row yet. The tools stay open, so that several tasks can share a model.

    Args:
        setup: System, task and tools.
        questions: All questions, streamed once.
        log: Where the rows go.
        concurrency: Questions under way at once.
        progress: Told of every answer.

    Returns:
        How many questions wait for a batch; `pending_message` says what to do about them.
    """
    waiting = 0
    open_questions = (question for question in questions if question.id not in log.done)

    async def work() -> None:
        nonlocal waiting
        # All workers draw from one iterator: never more than `concurrency` questions are in memory.
        for question in open_questions:
            try:
                log.append(await answer_question(setup, question))
                progress.advance()
            except RepliesPending:
                waiting += 1

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return waiting


def finish_task(setup: Setup, ids: list[str], log: ResultLog, answered: int, seconds: float) -> dict[str, Any]:
    """Sort the rows of a task that is answered, and write `metrics.json`.

    Args:
        setup: System, task and tools.
        ids: The questions' ids, in order.
        log: Has a row for each of them.
        answered: Questions answered in this session.
        seconds: How long that took.

    Returns:
        The metrics, as written.
    """
    log.finish(ids)
    metrics = summarise(setup, log)
    path = log.folder / METRICS
    if answered or not path.exists():
        rate = round(answered / seconds, 4)
        metrics["session"] = {"questions": answered, "seconds": round(seconds, 3), "questions_per_second": rate}
    else:
        # Nothing was left to do, so the speed of the last real session is the one worth keeping.
        metrics["session"] = json.loads(path.read_text(encoding="utf-8"))["session"]
    write_json(path, metrics)
    return metrics


async def answer_question(setup: Setup, question: Question) -> dict[str, Any]:
    """Run the system on one question and score its answer; an exception becomes the record's error.

    Raises:
        RepliesPending: the question waits for a batch.
        RetriesExhausted: the server does not answer, which is no fault of the question.
        SetupError: every other question would fail in the same way.
    """
    prompt = setup.task.prompt(question)
    started = time.perf_counter()
    tools = replace(setup.tools, question_id=question.id)
    try:
        trace = await setup.system.run(prompt, question.question, tools, setup.options)
    except (RepliesPending, RetriesExhausted, SetupError):
        raise
    # Whatever goes wrong with one question must not lose it or the others.
    except Exception as error:
        logger.warning("question %s failed: %s: %s", question.id, type(error).__name__, error)
        logger.debug("traceback of question %s", question.id, exc_info=True)
        trace = Trace(prompt, error=f"{type(error).__name__}: {error}", seconds=time.perf_counter() - started)
    trace.question_id = question.id
    # Scoring is outside: a metric that fails is a fault of the run, not of the question.
    scores = score_answer(trace.answer, question.answers, setup.task.metrics)
    wanted = _wanted(setup, question)
    return {
        "id": question.id,
        "question": question.question,
        "type": question.type,
        "answers": list(question.answers),
        "prediction": trace.answer,
        "scores": dict.fromkeys(scores, 0.0) if trace.error else scores,
        "supporting": sorted(wanted),
        "supporting_recall": _supporting_recall(wanted, trace),
        "error": trace.error,
        "trace": trace.to_json(),
    }


def summarise(setup: Setup, log: ResultLog) -> dict[str, Any]:
    """Metrics of a complete results file: scores with intervals, what the loop did, what it cost."""
    names = setup.task.metrics
    scores: dict[str, list[float]] = {name: [] for name in names}
    by_type: dict[str, list[float]] = {}
    counts: dict[str, Counter[str]] = {"stop_reasons": Counter(), "actions": Counter(), "tallies": Counter()}
    sums: Counter[str] = Counter()
    recalls: list[float] = []
    seconds = 0.0
    for row in log.rows():
        trace = row["trace"]
        for name in names:
            scores[name].append(row["scores"][name])
        by_type.setdefault(row["type"] or "all", []).append(row["scores"][names[0]])
        if row["supporting_recall"] is not None:
            recalls.append(row["supporting_recall"])
        counts["stop_reasons"][trace["stop_reason"] or "error"] += 1
        counts["actions"].update(action["action"] or "malformed" for action in trace["actions"])
        sums.update(errors=int(bool(row["error"])), questions=1, rounds=len(trace["steps"]))
        sums.update(malformed_plans=trace["malformed"], unexpected_plans=trace["unexpected"])
        sums.update(triples=sum(len(step["triples"]) for step in trace["steps"]))
        sums.update(passages=sum(len(step["passages"]) for step in trace["steps"]))
        sums.update(passages_without_triples=sum(step["passages_without_triples"] for step in trace["steps"]))
        # Results of earlier versions lack some of these.
        sums.update({name: trace.get(name, 0) for name in _COSTS})
        counts["tallies"].update(trace.get("tallies", {}))
        seconds += trace["seconds"]
    total = max(1, sums["questions"])
    return {
        "system": setup.system.name,
        "task": setup.task.name,
        "primary": names[0],
        "questions": sums["questions"],
        "metrics": {name: bootstrap_mean(values).to_json() for name, values in scores.items()},
        "by_type": {kind: bootstrap_mean(values).to_json() for kind, values in sorted(by_type.items())},
        "supporting_recall": bootstrap_mean(recalls).to_json(),
        "counts": {
            **{
                name: sums[name]
                for name in (
                    "errors",
                    "malformed_plans",
                    "unexpected_plans",
                    "rounds",
                    "passages",
                    "passages_without_triples",
                    "triples",
                )
            },
            "stop_reasons": dict(sorted(counts["stop_reasons"].items())),
            "actions": dict(sorted(counts["actions"].items())),
            "tallies": dict(sorted(counts["tallies"].items())),
        },
        "cost": {name: sums[name] for name in _COSTS},
        "cost_per_question": {name: round(sums[name] / total, 3) for name in _COSTS}
        | {"seconds": round(seconds / total, 4)},
    }


async def _run_all(
    setup: Setup, questions: Iterable[Question], log: ResultLog, concurrency: int, progress: Progress
) -> str:
    """Answer the questions and close the tools; gives what to do about questions that wait for a batch, if any."""
    try:
        waiting = await answer_questions(setup, questions, log, concurrency, progress)
        return pending_message(setup.tools, waiting) if waiting else ""
    finally:
        await setup.tools.close()


def pending_message(tools: Tools, waiting: int) -> str:
    """Write the request files of what waits for a batch, and say what to do with them."""
    clients = (tools.llm, tools.integrator)
    found = [message() for one in clients if (message := getattr(one, "pending_message", None)) is not None]
    return " ".join([f"{waiting:,} questions wait.", *dict.fromkeys(text for text in found if text)])


def _wanted(setup: Setup, question: Question) -> frozenset[str]:
    """Ids of the passages that should be found."""
    if setup.gold is not None:
        return setup.gold.get(question.id, frozenset())
    supporting = question.supporting if setup.own_contexts else ()
    return frozenset(question.passages[index].id for index in supporting)


def _supporting_recall(wanted: frozenset[str], trace: Trace) -> float | None:
    """Share of the supporting passages among all that were retrieved; None where nothing is to be found."""
    if not wanted or not trace.steps:
        return None
    found = {passage["id"] for step in trace.steps for passage in step.passages}
    return len(wanted & found) / len(wanted)
