"""Compare the answers of two finished runs with a language model as judge (`tripletune eval judge`).

This is for open questions: the judge reads both answers and names the better answer by each criterion, as for
UltraDomain in LightRAG (Guo et al., 2024) and TH-RAG (section C.4). Judges favour a position, so they see every pair in
both orders, a win in one order counts half, and a question needs both verdicts. Prompt and criteria are options.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console

from tripletune.core.calls import Message, UnusableReply
from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.files import PROMPTS, file_digest, read_prompt
from tripletune.core.options import setting
from tripletune.eval.report.runs import Run
from tripletune.eval.report.setting import check_across, check_comparable
from tripletune.eval.results import ResultLog, read_about
from tripletune.eval.statistics import bootstrap_mean
from tripletune.eval.suites import Failure, Suite, SuiteOptions, interval_cells, show_table
from tripletune.eval.systems import chat_model
from tripletune.llm.backends import LLMOptions, add_chat_model, open_client
from tripletune.llm.concurrency import all_of
from tripletune.llm.replies import ask
from tripletune.llm.reply_json import find_json
from tripletune.rag.results import RESULTS, read_runs

logger = logging.getLogger(__name__)
KIND = "judge"
PROMPT = PROMPTS / "eval" / "judge_pair.md"
CRITERIA = ("comprehensiveness", "diversity", "empowerment", "overall")
_NUMBER = re.compile(r"(?<!\d)[12](?!\d)")
_LEAD = re.compile(r"\W*(?:answer\W*)?([12])\b(?!\W*(?:and|or|&|/))", re.IGNORECASE)
_TIE = re.compile(r"\b(0|tie|draw|equal|both|neither|same)\b", re.IGNORECASE)


@dataclass(kw_only=True)
class JudgeOptions(SuiteOptions):
    """Options of `tripletune eval judge`, without those of the judge's model."""

    data: str = setting(dataclasses.MISSING, "output folder of the run whose win rate is reported")
    other: str = setting(dataclasses.MISSING, "output folder of the run to compare --data with")
    across: str | None = setting(None, "settings in which the runs may differ, such as top_k,model")
    prompt: str = setting(str(PROMPT), "file with the judge's instructions")
    criteria: tuple[str, ...] = setting(CRITERIA, "criteria that the prompt asks for, in the order of tables")
    repairs: int = setting(1, "maximum repair turns for an unreadable reply", at_least=0)
    max_reply_tokens: int = setting(512, "maximum tokens of a reply", at_least=1)
    concurrency: int = setting(16, "questions judged at once", at_least=1)

    def check(self) -> list[str]:
        same = Path(self.data).resolve() == Path(self.other).resolve()
        return [f"other: {self.other} is the same run as --data; name another run"] if same else []


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one question, those of `--data` and `--other`, and whether the question `failed` in a run."""

    id: str
    question: str
    answers: tuple[str, str]
    failed: bool = False


class JudgeSuite(Suite):
    """A pairwise judge; see the module."""

    unit = "question"
    options_class = JudgeOptions
    example = "--data runs/eval/ras --other runs/eval/standard --llm openai:gpt-4o-mini --output runs/judged"

    def __init__(self, options: JudgeOptions, teacher: LLMOptions) -> None:
        self.teacher, self.prompt = teacher, read_prompt(options.prompt)
        self.concurrency = 1 if teacher.backend == "batch" else options.concurrency
        runs = [[Run(folder, "", *read_about(Path(folder)))] for folder in (options.data, options.other)]
        check_comparable(runs, check_across(options.across))
        super().__init__(options)

    @classmethod
    def add_arguments(cls, parser: CommandParser) -> None:
        add_arguments(parser, JudgeOptions)
        add_chat_model(parser.add_argument_group("judge"))

    @classmethod
    def suites(cls, args: argparse.Namespace) -> Sequence[JudgeSuite]:
        if not args.teacher_model:
            raise ValueError("a judge is needed: --llm BACKEND:MODEL")
        ledger = args.teacher_ledger or str(Path(args.output) / "ledger.sqlite")
        return [cls(from_arguments(JudgeOptions, args), from_arguments(LLMOptions, args, "teacher", ledger=ledger))]

    def items(self) -> Iterator[Pair]:
        """Stream the questions that both runs answered."""
        files = [Path(folder) / RESULTS for folder in (self.options.data, self.options.other)]
        first, second = (
            {row["id"]: (row["question"], row["prediction"], bool(row.get("error"))) for _, row in rows}
            for rows in (read_runs(file, "question", "prediction") for file in files)
        )
        self.left_out = len(first.keys() ^ second.keys())
        for name in islice(filter(second.__contains__, first), self.options.limit):
            (question, one, failed), (same, other, lost) = first[name], second[name]
            if question != same:
                raise ValueError(f"question {name} differs in {files[0]} and {files[1]}: compare runs of one task")
            yield Pair(name, question, (one, other), failed or lost)

    def settings(self) -> dict[str, Any]:
        options = self.options
        return {
            "data": [file_digest(Path(folder) / RESULTS) for folder in (options.data, options.other)],
            **chat_model(self.teacher, "judge"),
            "sampling": [self.teacher.temperature, self.teacher.top_p, self.teacher.seed],
            "prompt": hashlib.sha256(self.prompt.encode()).hexdigest(),
            **{name: getattr(options, name) for name in ("limit", "criteria", "repairs", "max_reply_tokens")},
        }

    def open(self) -> None:
        self.client = open_client(self.teacher)
        self.clients = [self.client]

    async def ask(self, batch: list[Pair]) -> list[list[dict[str, int] | None]]:
        """The judge's verdicts in both orders; None for an unreadable reply. Equal answers are not judged."""
        (pair,) = batch
        if pair.answers[0] == pair.answers[1]:
            return [[dict.fromkeys(self.options.criteria, 0)] * 2]
        return [await all_of(self._verdict(pair, order) for order in (False, True))]

    async def _verdict(self, pair: Pair, swapped: bool) -> dict[str, int] | None:
        """For each criterion 1 if the answer of `--data` is better, -1 if the other answer is better, else 0."""
        shown = pair.answers[::-1] if swapped else pair.answers
        texts = (f"Answer {place}:\n{text.strip() or '(no answer)'}" for place, text in enumerate(shown, 1))
        messages: list[Message] = [
            {"role": "system", "content": self.prompt},
            {"role": "user", "content": "\n\n".join((f"Question: {pair.question}", *texts))},
        ]
        read = partial(read_verdict, criteria=self.options.criteria)
        sampling = self.teacher.sampling(self.options.max_reply_tokens)
        try:
            verdict = await ask(
                self.client, messages, read, role="judge.pair", sampling=sampling, question_id=pair.id,
                repairs=self.options.repairs,
            )  # fmt: skip
        except UnusableReply as error:
            logger.warning("question %s: a verdict can't be read: %s", pair.id, error)
            return None
        return {name: -one if swapped else one for name, one in verdict.items()}

    def score(self, item: Pair, reply: list[dict[str, int] | None] | Failure) -> dict[str, Any]:
        """The row of a question: its verdicts, and for each criterion the share of a win; ties count half."""
        error, verdicts = (reply.error, []) if isinstance(reply, Failure) else ("", reply)
        known = [verdict for verdict in verdicts if verdict]
        scores = {name: sum(0.5 + one[name] / 2 for one in known) / 2 for name in (known[0] if len(known) == 2 else ())}
        row = {"id": item.id, "question": item.question, "failed": item.failed}
        return {**row, "verdicts": verdicts, "scores": scores, "error": error}

    def summarise(self, log: ResultLog) -> dict[str, Any]:
        values, agree = ({name: list[float]() for name in self.options.criteria} for _ in range(2))
        counts = Counter[str](questions=0, errors=0, without_verdict=0, unreadable_replies=0, failed_answers=0)
        for row in log.rows():
            scores = {} if None in row["verdicts"] else row["scores"]
            counts.update(questions=1, errors=bool(row["error"]), failed_answers=row.get("failed", False))
            counts.update(without_verdict=not scores, unreadable_replies=row["verdicts"].count(None))
            for name, value in scores.items():
                values[name].append(value)
                agree[name].append(float(len({one[name] for one in row["verdicts"]}) == 1))
        return {
            "evaluation": KIND,
            "runs": [self.options.data, self.options.other],
            "win_rate": {name: bootstrap_mean(found) for name, found in values.items()},
            "agreement": {name: bootstrap_mean(found) for name, found in agree.items()},
            "counts": {**counts, "left_out": self.left_out},
        }

    def show(self, metrics: Mapping[str, Any], console: Console) -> None:
        agree = metrics["agreement"]
        rows = [
            (name, *interval_cells(one), interval_cells(agree[name])[0]) for name, one in metrics["win_rate"].items()
        ]
        heads = ("criterion", "win rate", "95 % interval", "both orders agree")
        show_table(console, " against ".join(metrics["runs"]), heads, rows, "questions", metrics["failed"])
        counts = metrics["counts"]
        console.print(
            f"ties count half; {counts['questions']} questions, {counts['failed_answers']} of them failed in a run, "
            f"{counts['left_out']} left out that only one run has, {counts['without_verdict']} left out without both "
            f"verdicts; {counts['unreadable_replies']} replies that could not be read, {counts['errors']} errors"
        )


SUITE = JudgeSuite


def read_verdict(text: str, criteria: Sequence[str] = CRITERIA) -> dict[str, int]:
    """Read a judge's JSON; for each criterion return 1 for the first answer, -1 for the second, 0 for a tie.

    A value of the JSON is a number, "Answer 2", a word for a tie, or an object with a "winner" (LightRAG's prompt).
    """
    advice = f"write one JSON object with the keys {', '.join(criteria)}, each 1, 2 or 0"
    found: dict[str, int] = {}
    # "overall" before "overall_explanation"
    for key, one in sorted(find_json(text, dict, advice=advice).items(), key=lambda pair: len(str(pair[0]))):
        name = next((name for name in criteria if str(key).lower().startswith(name.lower())), None)
        winner = str({key.lower(): inner for key, inner in one.items()}.get("winner") if isinstance(one, dict) else one)
        lead = _LEAD.match(winner)
        winners = {lead[1]} if lead else set(_NUMBER.findall(winner))
        if name and name not in found and (len(winners) == 1 or _TIE.search(winner)):
            found[name] = {"1": 1, "2": -1}[winners.pop()] if len(winners) == 1 else 0
    if missing := [name for name in criteria if name not in found]:
        raise UnusableReply("no_verdict", f"The reply names no winner for {', '.join(missing)}; {advice}.")
    return {name: found[name] for name in criteria}
