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
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from tripletune.core.calls import Message, UnusableReply
from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.concurrency import all_of
from tripletune.core.files import PROMPTS, file_digest, read_prompt
from tripletune.core.options import setting
from tripletune.eval.report.runs import read_run_without_questions
from tripletune.eval.report.setting import check_comparable, read_across_names
from tripletune.eval.result_log import ResultLog
from tripletune.eval.statistics import Interval, bootstrap_mean
from tripletune.eval.suites import (
    Failure,
    Suite,
    SuiteMetrics,
    SuiteOptions,
    SuiteRow,
    interval_cells,
    show_table,
)
from tripletune.eval.suites._run_settings import chat_model_setting
from tripletune.eval.suites._verdicts import CRITERIA, Verdict, read_winners, shares_of_wins
from tripletune.llm.backends import LLMOptions, add_chat_model, open_client
from tripletune.llm.replies import ask
from tripletune.rag.results import RESULTS, ResultRow, read_result_rows

logger = logging.getLogger(__name__)
KIND = "judge"
PROMPT = PROMPTS / "eval" / "judge_pair.md"


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
        """A run cannot be compared with itself."""
        if Path(self.data).resolve() == Path(self.other).resolve():
            return [f"other: {self.other} is the same run as --data; name another run"]
        return []


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """Two answers to one question, those of `--data` and `--other`, and whether the question `failed` in a run."""

    id: str
    question: str
    answers: tuple[str, str]
    failed: bool = False


@dataclass(slots=True, kw_only=True)
class JudgeRow(SuiteRow):
    """A judged question.

    Attributes:
        failed: The question failed in one of the runs, so that its answer was empty.
        verdicts: Those on both orders of the answers; None for an unreadable reply. Empty if the item failed.
        scores: For each criterion the share of a win, from 0 to 1; empty without both verdicts.
    """

    id: str
    question: str
    failed: bool = False
    verdicts: list[Verdict | None]
    scores: dict[str, float]
    error: str


@dataclass(slots=True, kw_only=True)
class JudgeCounts:
    """Numbers of questions, and of unreadable replies.

    Attributes:
        without_verdict: Questions that are left out, since a verdict is missing.
        failed_answers: Questions that failed in one of the runs.
        left_out: Questions that only one run has.
    """

    questions: int = 0
    errors: int = 0
    without_verdict: int = 0
    unreadable_replies: int = 0
    failed_answers: int = 0
    left_out: int = 0


@dataclass(slots=True, kw_only=True)
class JudgeMetrics(SuiteMetrics):
    """Figures of a comparison.

    Attributes:
        runs: Folders of `--data` and `--other`.
        win_rate: By criterion, the mean score of the run of `--data`.
        agreement: By criterion, the share of questions whose verdicts in both orders agree.
    """

    evaluation: str = KIND
    runs: list[str]
    win_rate: dict[str, Interval]
    agreement: dict[str, Interval]
    counts: JudgeCounts


class _AnsweredQuestion(NamedTuple):
    """A question of a finished run, with the run's answer."""

    question: str
    answer: str
    failed: bool


class JudgeSuite(Suite[JudgeOptions, AnswerPair, list[Verdict | None], JudgeMetrics]):
    """A pairwise judge; see the module."""

    unit = "question"
    options_class = JudgeOptions
    example = "--data runs/eval/ras --other runs/eval/standard --llm openai:gpt-4o-mini --output runs/judged"

    def __init__(self, options: JudgeOptions, teacher: LLMOptions) -> None:
        self.teacher = teacher
        self.prompt = read_prompt(options.prompt)
        # A batch backend does not answer calls now; questions in order give the same request file every time.
        self.concurrency = 1 if teacher.backend == "batch" else options.concurrency
        runs = [read_run_without_questions(options.data)], [read_run_without_questions(options.other)]
        check_comparable(runs, read_across_names(options.across))
        # Last, since it reads all answers: runs that cannot be compared are found before.
        super().__init__(options)

    @classmethod
    def add_arguments(cls, parser: CommandParser) -> None:
        """Add the options of the evaluation and of the judge's model."""
        add_arguments(parser, JudgeOptions)
        add_chat_model(parser.add_argument_group("judge"))

    @classmethod
    def suites(cls, args: argparse.Namespace) -> Sequence[JudgeSuite]:
        """The suite with its judge; the ledger lies in the output folder if none is named."""
        if not args.teacher_model:
            raise ValueError("a judge is needed: --llm BACKEND:MODEL")
        ledger = args.teacher_ledger or str(Path(args.output) / "ledger.sqlite")
        return [cls(from_arguments(JudgeOptions, args), from_arguments(LLMOptions, args, "teacher", ledger=ledger))]

    def items(self) -> Iterator[AnswerPair]:
        """Stream the questions that both runs answered, in the order of `--data`; sets `left_out` for `summarise`.

        Questions with other words under one id are an error, since the judge would compare answers to different
        questions.
        """
        first_file = Path(self.options.data) / RESULTS
        second_file = Path(self.options.other) / RESULTS
        first = _read_answers(first_file)
        second = _read_answers(second_file)
        self.left_out = len(first.keys() ^ second.keys())
        shared = [name for name in first if name in second]
        for name in shared[: self.options.limit]:
            question = first[name].question
            if question != second[name].question:
                raise ValueError(f"question {name} differs in {first_file} and {second_file}: compare runs of one task")
            failed = first[name].failed or second[name].failed
            yield AnswerPair(name, question, (first[name].answer, second[name].answer), failed)

    def settings(self) -> dict[str, Any]:
        """What a row depends on: the contents of both runs, the judge, and its prompt.

        The same command continues a stopped run only if these are equal, so whatever changes a verdict must be among
        them. Contents are digests, since a folder may hold other results by then.
        """
        options = self.options
        judge = chat_model_setting(self.teacher)
        settings: dict[str, Any] = {
            "data": [file_digest(Path(options.data) / RESULTS), file_digest(Path(options.other) / RESULTS)],
            "judge": judge.model,
        }
        if judge.weights is not None:
            settings["judge_weights"] = judge.weights
        return settings | {
            "sampling": [self.teacher.temperature, self.teacher.top_p, self.teacher.seed],
            "prompt": hashlib.sha256(self.prompt.encode()).hexdigest(),
            "limit": options.limit,
            "criteria": options.criteria,
            "repairs": options.repairs,
            "max_reply_tokens": options.max_reply_tokens,
        }

    def open(self) -> None:
        """Open the client of the judge, with its ledger."""
        self.client = open_client(self.teacher)
        self.clients = [self.client]

    async def ask(self, batch: list[AnswerPair]) -> list[list[Verdict | None]]:
        """The judge's verdicts in both orders; None for an unreadable reply. Equal answers are not judged."""
        # `batches` yields one item at a time.
        (pair,) = batch
        if pair.answers[0] == pair.answers[1]:
            tie = dict.fromkeys(self.options.criteria, 0)
            return [[tie, tie]]
        return [await all_of([self._ask_for_verdict(pair, swapped=False), self._ask_for_verdict(pair, swapped=True)])]

    async def _ask_for_verdict(self, pair: AnswerPair, swapped: bool) -> Verdict | None:
        """The judge's verdict on one order of the answers, as seen from `--data`; None for an unreadable reply.

        With `swapped`, the answer of `--other` is shown first, and the signs of the reply are turned back. An
        unreadable verdict is no failure of the item: the other order may be readable, and counts of both are reported.
        """
        first, second = reversed(pair.answers) if swapped else pair.answers
        request = (
            f"Question: {pair.question}\n\n"
            f"Answer 1:\n{first.strip() or '(no answer)'}\n\n"
            f"Answer 2:\n{second.strip() or '(no answer)'}"
        )
        messages: list[Message] = [
            {"role": "system", "content": self.prompt},
            {"role": "user", "content": request},
        ]
        try:
            verdict = await ask(
                self.client,
                messages,
                partial(read_winners, criteria=self.options.criteria),
                role="judge.pair",
                sampling=self.teacher.sampling(self.options.max_reply_tokens),
                question_id=pair.id,
                repairs=self.options.repairs,
            )
        except UnusableReply as error:
            logger.warning("question %s: a verdict can't be read: %s", pair.id, error)
            return None
        if swapped:
            return {criterion: -winner for criterion, winner in verdict.items()}
        return verdict

    def score(self, item: AnswerPair, reply: list[Verdict | None] | Failure) -> JudgeRow:
        """The row of a question; a failed item has no verdicts and no scores, since a tie would be made up.

        Args:
            item: The question with both answers.
            reply: The verdicts of `ask`, one per order, or why the item failed.
        """
        verdicts: list[Verdict | None] = []
        error = ""
        if isinstance(reply, Failure):
            error = reply.error
        else:
            verdicts = reply
        return JudgeRow(
            id=item.id,
            question=item.question,
            failed=item.failed,
            verdicts=verdicts,
            scores=shares_of_wins(verdicts),
            error=error,
        )

    def summarise(self, log: ResultLog) -> JudgeMetrics:
        """Win rates and agreement over the questions with both verdicts.

        A question that lacks a verdict is left out and counted: one order alone would favour the answer whose position
        the judge prefers. The rates of all criteria are therefore over the same questions, apart from rows of older
        versions.
        """
        scores: dict[str, list[float]] = defaultdict(list)
        agreements: dict[str, list[float]] = defaultdict(list)
        counts = JudgeCounts(left_out=self.left_out)
        for values in log.rows():
            row = JudgeRow.from_json(values)
            read = [verdict for verdict in row.verdicts if verdict is not None]
            counts.questions += 1
            counts.errors += bool(row.error)
            counts.failed_answers += row.failed
            counts.unreadable_replies += len(row.verdicts) - len(read)
            # Rows of older versions have scores from one verdict alone.
            if not row.scores or len(read) < len(row.verdicts):
                counts.without_verdict += 1
                continue
            for criterion, score in row.scores.items():
                winners = {verdict[criterion] for verdict in read}
                scores[criterion].append(score)
                agreements[criterion].append(float(len(winners) == 1))
        criteria = self.options.criteria
        return JudgeMetrics(
            runs=[self.options.data, self.options.other],
            win_rate={criterion: bootstrap_mean(scores[criterion]) for criterion in criteria},
            agreement={criterion: bootstrap_mean(agreements[criterion]) for criterion in criteria},
            counts=counts,
        )

    def show(self, metrics: JudgeMetrics, console: Console) -> None:
        """Print the win rates of `--data`, and how often both orders agree: where they do not, the position decided."""
        rows = []
        for criterion, win_rate in metrics.win_rate.items():
            agreement, _ = interval_cells(metrics.agreement[criterion])
            rows.append((criterion, *interval_cells(win_rate), agreement))
        heads = ("criterion", "win rate", "95 % interval", "both orders agree")
        show_table(console, " against ".join(metrics.runs), heads, rows, "questions", metrics.failed)
        counts = metrics.counts
        console.print(
            f"ties count half; {counts.questions} questions, {counts.failed_answers} of them failed in a run, "
            f"{counts.left_out} left out that only one run has, {counts.without_verdict} left out without both "
            f"verdicts; {counts.unreadable_replies} replies that could not be read, {counts.errors} errors"
        )


SUITE = JudgeSuite


def _read_answers(file: Path) -> dict[str, _AnsweredQuestion]:
    """The questions of a finished run with its answers, by id.

    All are in memory at once, since the other run may have them in another order. A failed question has an empty
    answer, which the judge sees as such.
    """
    answers = {}
    for _, values in read_result_rows(file, "question", "prediction"):
        row = ResultRow.from_json(values)
        answers[row.id] = _AnsweredQuestion(row.question, row.prediction, bool(row.error))
    return answers
