"""Answer one question and show every step, or answer all questions of a file (`tripletune ask`).

A file of questions runs as in `tripletune eval run`, without gold answers: the same command continues a stopped run and
asks failed questions again.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.files import json_line, new_file, read_json
from tripletune.core.options import default_of
from tripletune.core.program import run_program
from tripletune.core.tables import on_one_line, printable
from tripletune.eval.costs import COSTS, PRICE_HELP, Prices, read_prices, spent
from tripletune.eval.results import METRICS, read_results
from tripletune.eval.suites import run_suites
from tripletune.eval.suites.questions import suites_of
from tripletune.eval.systems import QuestionOptions
from tripletune.llm.backends import LLMOptions
from tripletune.rag import Trace, TraceAction, TraceStep, cited
from tripletune.rag.answering import SystemOptions, add_system_arguments, open_system, teacher_of
from tripletune.rag.results import RESULTS

logger = logging.getLogger(__name__)
ANSWERS = "answers.jsonl"
_UNREAD = " have no triples in --triples: run `tripletune rag extract` again, which reads only new passages"


def answer_of(row: Mapping[str, Any], prices: Prices) -> dict[str, Any]:
    """The answer of a row of results, with sources, found triples and cost.

    Sources are the passages that the answer's reader saw, or all found passages if that is not known. Tokens and
    dollars include calls that a ledger answered; `paid` does not.
    """
    trace = row["trace"]
    passages = [one for step in trace["steps"] for one in step["passages"]]
    found = {one["id"]: {"id": one["id"], "title": one["title"], **one.get("source", {})} for one in passages}
    unknown = "shown" in trace["details"].get("unknown", ())
    shown = [*found.values()] if unknown else [found[name] for name in trace["shown"] if name in found]
    triples = dict.fromkeys(tuple(triple) for step in trace["steps"] for triple in step["triples"])
    costs = sum(map(Counter, spent(trace, prices).values()), Counter[str]())
    return {
        **{"id": row["id"], "question": row["question"], "answer": row["prediction"]},
        "sources": shown,
        "not_shown": [one for one in found.values() if one not in shown],
        "triples": [list(triple) for triple in triples],
        "rounds": len(trace["steps"]),
        "calls": trace["calls"],
        "tokens": {"read": trace["prompt_tokens"], "written": trace["completion_tokens"]},
        **({"dollars": round(costs["dollars"], 8), "paid": _paid(costs)} if prices else {}),
        **{"seconds": round(trace["seconds"], 3), "error": row["error"]},
    }


def event_lines(event: TraceAction | TraceStep) -> Iterator[str]:
    """Lines that show a plan, or a search with its passages and triples."""
    if isinstance(event, TraceAction):
        yield f"  plan      {on_one_line(event.reply)}"
        return
    yield f"  search    {on_one_line(event.query)}"
    yield f"  retrieve  {on_one_line(', '.join(map(cited, event.passages)) or 'nothing found')}"
    for triple in event.triples:
        yield f"  triple    {on_one_line(' | '.join(triple))}"
    if event.passages_without_triples:
        yield f"  unread    {event.passages_without_triples} of {len(event.passages)} passages{_UNREAD}"


def _end_lines(trace: Trace, answer: Mapping[str, Any]) -> Iterator[str]:
    names = {one["id"]: cited(one) for step in trace.steps for one in step.passages}
    sources = dict.fromkeys(names[one["id"]] for one in answer["sources"])
    yield f"  stop      {trace.stop_reason}"
    yield f"  sources   {on_one_line(', '.join(sources) or 'none')}"
    tokens = answer["tokens"]
    cost = _cost(answer["calls"], tokens["read"], tokens["written"], answer.get("dollars"), answer.get("paid"))
    yield f"  cost      {cost}, {answer['seconds']} s"
    yield f"Answer: {printable(trace.answer)}"


def _one(args: argparse.Namespace, teacher: LLMOptions | None) -> None:
    if not args.question.strip():
        raise ValueError("the question is empty")

    def show(lines: Iterator[str]) -> None:
        if not args.json:
            print("\n".join(lines), flush=True)

    prices = read_prices(args.price)
    with open_system(from_arguments(SystemOptions, args), teacher) as system:
        show(iter([f"Question: {on_one_line(args.question)}"]))
        trace = system.answer(args.question, watch=lambda event: show(event_lines(event)))
    row = {"id": "", "question": args.question, "prediction": trace.answer, "error": trace.error}
    answer = answer_of({**row, "trace": trace.to_json()}, prices)
    show(_end_lines(trace, answer))
    if args.json:
        print(json.dumps(answer, ensure_ascii=False))


def _many(args: argparse.Namespace, teacher: LLMOptions | None) -> int:
    rest = {item.name: default_of(item) for item in fields(QuestionOptions) if not hasattr(args, item.name)}
    given = rest | {"task": "qa", "data": args.questions, "llm": [], "retry_errors": not args.overwrite}
    (suite,) = suites_of(from_arguments(QuestionOptions, args, **given), teacher)
    suite.command = ["tripletune", "ask", *sys.argv[1:]]
    code = run_suites([suite])
    folder = Path(args.output)
    with new_file(folder / ANSWERS) as scratch, scratch.open("w", encoding="utf-8") as file:
        for row in read_results(folder / RESULTS):
            file.write(json_line(answer_of(row, suite.prices)))
    found = read_json(folder / METRICS)
    costs = Counter(found["cost"]) + Counter(found["indexing"])
    money = (costs["dollars"], _paid(costs)) if suite.prices else ()
    cost = _cost(*(costs[name] for name in COSTS), *money)
    if cached := costs["cached_calls"]:
        cost += f"; the ledger answered {cached:,} of these calls, which cost nothing"
    answered, failed = found["questions"] - found["failed"], found["failed"]
    again = " (the same command asks them again)" if failed else ""
    logger.info("%s: %d answered, %d failed%s; %s", folder / ANSWERS, answered, failed, again, cost)
    if unread := found["counts"]["passages_without_triples"]:
        logger.warning("%d of %d passages%s", unread, found["counts"]["passages"], _UNREAD)
    return code


def _paid(costs: Mapping[str, float]) -> float:
    return round(costs["dollars"] - costs["cached_dollars"], 8)


def _cost(calls: int, read: int, written: int, dollars: float | None = None, paid: float | None = None) -> str:
    money = "" if dollars is None else f", ${dollars:.4g}"
    money += "" if paid == dollars else f" (paid: ${paid:.4g})"
    return f"{calls:,} calls, {read:,} tokens read, {written:,} written{money}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, with the exit codes of `tripletune eval run`."""
    parser = CommandParser(
        prog="tripletune ask",
        description="Answer one question and show every step, or all questions of a file.",
        others="an option of the system, for example max_passages=10; repeatable",
        example='tripletune ask "Who wrote it?" --model runs/demo/export --corpus mine --triples triples.jsonl\n'
        "  tripletune ask --questions questions.jsonl --output runs/answers --llm openai:NAME --corpus mine …",
    )
    add = parser.add_argument
    add("question", nargs="?", help="one question, in quotes")
    add("--json", action="store_true", help="print the answer as one JSON object, with sources, triples and cost")
    group = parser.add_argument_group("many questions")
    group.add_argument("--questions", metavar="FILE",
        help="answer all questions of a file: JSON lines, or a .txt file with one question per line")  # fmt: skip
    group.add_argument("--output", metavar="DIR",
        help=f"folder for {ANSWERS}; the same command continues and asks failed questions again")  # fmt: skip
    add_arguments(group, QuestionOptions, only=("limit", "concurrency", "max_failed"))
    group = add_system_arguments(parser)
    group.add_argument("--price", action="append", default=[], metavar="IN,OUT", help=PRICE_HELP)
    args = parser.parse_args(argv)

    def program() -> int | None:
        if (args.question is None) == (args.questions is None) or bool(args.questions) != bool(args.output):
            raise ValueError("give one question, or --questions FILE with its --output DIR")
        teacher = teacher_of(args)
        if args.questions:
            return _many(args, teacher)
        _one(args, teacher)
        return None

    stopped = "stopped; the answers are kept, run the same command again to continue"
    return run_program(program, level=logging.INFO if args.questions else logging.WARNING, stopped=stopped)


if __name__ == "__main__":
    sys.exit(main())
