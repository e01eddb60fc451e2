"""Answer all questions of a file (`tripletune ask --questions FILE`): a run of evaluation without gold answers."""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

from tripletune.core.command_line import from_arguments
from tripletune.core.files import json_line, new_file, read_json
from tripletune.core.options import default_of
from tripletune.eval.results import METRICS, RunMetrics, read_results
from tripletune.eval.running import run_suites
from tripletune.eval.suites.questions import suites_of
from tripletune.eval.systems import QuestionOptions
from tripletune.llm.backends import LLMOptions
from tripletune.rag.ask import UNREAD, WEAK_MODEL, answer_of, cost_text
from tripletune.rag.costs import Prices, read_prices, with_batch_prices
from tripletune.rag.results import RESULTS, ResultRow

logger = logging.getLogger(__name__)
ANSWERS = "answers.jsonl"


def answer_questions_of_file(args: argparse.Namespace, teacher: LLMOptions | None) -> int:
    """Answer the questions of `args.questions`, and write the answers into `args.output`.

    This is a run of the task "qa", whose questions need no gold answer, so it can be stopped and continued like one.

    Args:
        args: The command line of `tripletune ask`.
        teacher: The chat model, if the command line names one.

    Returns:
        The exit code of `tripletune eval run`.
    """
    # The command line has only some of the options of a run, and names the questions as an argument of its own.
    values: dict[str, Any] = {}
    for item in fields(QuestionOptions):
        if not hasattr(args, item.name):
            values[item.name] = default_of(item)
    values |= {"task": "qa", "data": args.questions, "llm": [], "retry_errors": not args.overwrite}
    (suite,) = suites_of(from_arguments(QuestionOptions, args, **values), teacher)
    suite.command = ["tripletune", "ask", *sys.argv[1:]]
    code = run_suites([suite])
    folder = Path(args.output)
    write_answers(folder, with_batch_prices(read_prices(args.price), suite.backends))
    _log_answers_and_cost(folder, RunMetrics.from_json(read_json(folder / METRICS)), with_prices=bool(args.price))
    return code


def write_answers(folder: Path, prices: Prices) -> None:
    """Write an `AnsweredQuestion` for each row of results in a folder; a rewritten file is complete or unchanged."""
    with new_file(folder / ANSWERS) as scratch, scratch.open("w", encoding="utf-8") as file:
        for values in read_results(folder / RESULTS):
            row = ResultRow.from_json(values)
            file.write(json_line(answer_of(row.trace, row.question, prices).to_json()))


def _log_answers_and_cost(folder: Path, metrics: RunMetrics, with_prices: bool) -> None:
    """Log how many questions were answered, what this cost, and how many passages had no triples.

    Costs of answering and of reading passages are added up, since the user pays for both. Without prices no dollars are
    shown, as 0 would read as "free".
    """
    costs = Counter(metrics.cost) + Counter(metrics.indexing)
    dollars, paid = None, None
    if with_prices:
        dollars = costs["dollars"]
        paid = round(costs["dollars"] - costs["cached_dollars"], 8)
    cost = cost_text(costs["calls"], costs["prompt_tokens"], costs["completion_tokens"], dollars, paid)
    if costs["cached_calls"]:
        cost += f"; the ledger answered {costs['cached_calls']:,} of these calls, which cost nothing"
    again = " (the same command asks them again)" if metrics.failed else ""
    answered = metrics.questions - metrics.failed
    logger.info("%s: %d answered, %d failed%s; %s", folder / ANSWERS, answered, metrics.failed, again, cost)
    counts = metrics.counts
    if counts.passages_without_triples:
        logger.warning("%d of %d passages%s", counts.passages_without_triples, counts.passages, UNREAD)
    for replies in metrics.unreadable:
        logger.warning("%s; %s", replies.sentence, WEAK_MODEL)
