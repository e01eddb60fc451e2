"""Compare rules that decide when to stop searching, at equal searches and calls (`tripletune eval stopping`).

Each question is answered after 0, 1, 2 … N searches and after the planner's own decision. RAS goes on where its
planner would have stopped (`--set stop=fixed`); other systems with rounds are allowed so many searches and may stop
earlier. The rules then choose among these answers (`eval/suites/_stopping_rules.py`), so that all of them are judged on
the same answers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple

from rich.console import Console

from tripletune.core.calls import SAMPLE_SEED, Completion, Generator
from tripletune.core.command_line import CommandParser, add_arguments, from_arguments
from tripletune.core.data.questions import Question
from tripletune.core.data.records import ModelInput, Record, read_records
from tripletune.core.data.words import main_language
from tripletune.core.options import setting
from tripletune.eval.controls import ControlTable
from tripletune.eval.result_log import ResultLog
from tripletune.eval.statistics import P_NOTE
from tripletune.eval.suites import Failure, Suite, SuiteMetrics, SuiteRow, show_table
from tripletune.eval.suites._stopping_figures import (
    RuleFigures,
    SeedsFigures,
    TrainedBench,
    compare_rules,
    differences_table,
    rules_table,
)
from tripletune.eval.suites._stopping_rules import (
    TASR_MARGIN,
    DepthAnswer,
    Ladder,
    Outcome,
    StoppingRule,
    best_depth_rule,
    count_hits,
    counting_rule,
    outcome_at_depth,
    tasr_rule,
    words_rule,
)
from tripletune.eval.suites._stopping_seeds import check_other_seeds, ladders_of_seed
from tripletune.eval.suites.questions import QuestionSuite, suites_of
from tripletune.eval.systems import UNNAMED, QuestionOptions, add_run_arguments
from tripletune.llm.backends import LLMOptions
from tripletune.rag import Trace
from tripletune.rag.systems import LoopOptions, Tools, find_system

KIND = "stopping"
_PLANNER, _COUNTING, _WORDS, _TASR = "the planner", "counting steps", "matching words", "TASR"
# Questions that show the language.
_DETECTED = 100
_BEST = "the best depth of each question (bound)"
_NOTE = (
    "At equal searches or calls: minus the fixed depths around the rule's mean cost, drawn so that the cost is equal. "
    "The bound knows the right answers: no rule can do better."
)


@dataclass(kw_only=True)
class StoppingOptions(QuestionOptions):
    """Options of `tripletune eval stopping`."""

    depths: int = setting(3, "most searches of a question", at_least=2)
    training_data: str | None = setting(
        None, "records whose labels say when counting steps and matching words stop (default: leave out these rules)"
    )
    training_split: str = setting("train", "split of --training-data")
    margin: float = setting(
        TASR_MARGIN, "TASR stops above this calibrated margin: a share of right answers", at_least=0, at_most=1
    )
    other_seeds: list[str] = setting(
        [],
        "output folders of the same command with models of other training seeds, separated by commas: adds the means "
        "over all seeds, with intervals over seeds and questions",
    )


@dataclass(slots=True, kw_only=True)
class StoppingRow(SuiteRow):
    """A question's answers by depth: one line of `results.jsonl`; see `eval.suites._stopping_rules.Ladder`."""

    id: str
    question: str
    answers: list[str]
    error: str = ""
    depths: list[dict[str, Any]]
    planner: dict[str, Any] | None = None


@dataclass(kw_only=True)
class StoppingMetrics(SuiteMetrics):
    """Figures of the evaluation.

    Attributes:
        rules: By the name of a rule.
        rules_table: Cost and scores of the rules as a table, which the report shows; `rules_differences_table` is that
            of differences to fixed depths.
        missing: Sentences on rules that could not be judged.
        seeds: The same of the means over this model and those of `other_seeds`; None without them.
    """

    evaluation: str = KIND
    system: str
    task: str
    questions: int
    rules: dict[str, RuleFigures]
    rules_table: ControlTable
    rules_differences_table: ControlTable
    missing: list[str]
    seeds: SeedsFigures | None = None


class _JudgedRules(NamedTuple):
    """The rules that can be judged, by name, and a sentence on each of the others."""

    rules: dict[str, StoppingRule]
    missing: list[str]


class StoppingSuite(Suite[StoppingOptions, Question, Ladder, StoppingMetrics]):
    """A system that answers each question at every depth.

    Args:
        run: The evaluation of the system's own loop, which reads the questions, opens models and scores answers.
    """

    unit = "question"
    options_class = StoppingOptions
    example = (
        "--system ras --task hotpotqa --data dev.jsonl --corpus dev.corpus.jsonl --triples dev.triples.jsonl "
        "--model runs/ras/final --training-data runs/subq --output runs/eval/stopping"
    )

    def __init__(self, options: StoppingOptions, run: QuestionSuite) -> None:
        self.run = run
        self.concurrency = run.concurrency
        self.backends = run.backends
        names = {item.name for item in fields(run.system.options)}
        self._shallowest = 0 if "stop" in names else 1
        # A model that was trained to search always has no decision of its own.
        self._decides = "stop" in names and run.loop.stop == "adaptive"
        self._fixed = {"stop": "fixed"} if "stop" in names else {}
        super().__init__(options)

    @classmethod
    def add_arguments(cls, parser: CommandParser) -> None:
        """Add the options of a run, and those of this evaluation in a group of their own."""
        add_run_arguments(parser)
        own = [item.name for item in fields(StoppingOptions) if item.name not in _RUN_FIELDS]
        add_arguments(parser.add_argument_group("stopping"), StoppingOptions, only=own)

    @classmethod
    def suites(cls, args: argparse.Namespace) -> Sequence[StoppingSuite]:
        """The suite of one system on one task, whose loop may search `--depths` times.

        Systems without rounds are refused, and so is `max_rounds`, which the depths set.
        """
        options = from_arguments(StoppingOptions, args)
        teacher = from_arguments(LLMOptions, args, "teacher", model=args.teacher_model or UNNAMED)
        if "," in options.system or "," in options.task:
            raise ValueError("--system, --task: name one system and one task, since each has depths of its own")
        system = find_system(options.system)
        # Baselines that search once share RAS's options.
        searches_once = system.options is LoopOptions and not system.plans
        if searches_once or "max_rounds" not in {item.name for item in fields(system.options)}:
            raise ValueError(f"--system {options.system} searches once, so there is nothing to stop")
        if any(assignment.startswith("max_rounds=") for assignment in options.set):
            raise ValueError("max_rounds: --depths says how often to search here; leave max_rounds out")
        of_run = {item.name: getattr(options, item.name) for item in fields(QuestionOptions)}
        of_run["set"] = [*options.set, f"max_rounds={options.depths}"]
        (run,) = suites_of(QuestionOptions(**of_run), teacher)
        suite = cls(options, run)
        check_other_seeds(options.other_seeds, suite.settings())
        return [suite]

    def items(self) -> Iterator[Question]:
        """The questions of the run."""
        return self.run.items()

    def settings(self) -> dict[str, Any]:
        """What a row depends on; the rules choose among the rows later."""
        return {"run": self.run.settings(), "depths": self.options.depths}

    def open(self) -> None:
        """Open the models and indexes of the run, whose clients then count as those of this suite."""
        self.run.open()
        self.clients = self.run.clients
        self.embedded = self.run.embedded

    async def ask(self, batch: list[Question]) -> list[Ladder]:
        """Answer a question at each depth, then as the planner decides; the loops share their first calls."""
        # `batches` yields one item at a time.
        (question,) = batch
        tools = _tools_that_remember(self.run.tools)
        ladder = Ladder(id=question.id)
        for depth in range(self._shallowest, self.options.depths + 1):
            loop = replace(self.run.loop, max_rounds=depth, **self._fixed)
            trace = await self.run.answer(question, loop, tools)
            ladder.depths.append(self._answer_at_depth(question, trace, depth))
        if self._decides:
            trace = await self.run.answer(question, self.run.loop, tools)
            ladder.planner = self._answer_at_depth(question, trace, self.options.depths)
        return [ladder]

    @cached_property
    def _plans(self) -> list[Record]:
        """The planning records of `--training-data`, read once for all seeds; none without it."""
        if not self.options.training_data:
            return []
        return _planning_records(self.options.training_data, self.options.training_split)

    @cached_property
    def _language(self) -> str:
        """The language of the questions, whose stop words do not count as shared."""
        return main_language(item.question for item in islice(self.items(), _DETECTED))

    def _answer_at_depth(self, question: Question, trace: Trace, depth: int) -> DepthAnswer:
        """What the rules need of a loop: the answer with its scores and cost, and how well the searches hit."""
        row = self.run.score(question, trace)
        searches = []
        for step in trace.steps:
            facts = " ".join(f"{subject} {object_}" for subject, _, object_ in step.triples)
            texts = " ".join(trace.found[passage["id"]].content for passage in step.passages)
            searches.append((step.query, facts or texts))
        hits = count_hits(searches, self._language)
        return DepthAnswer(
            depth=depth,
            searches=len(trace.steps),
            calls=trace.calls,
            answer=trace.answer,
            stop_reason=trace.stop_reason,
            scores=row.scores,
            margin=trace.confidence.get("margin"),
            recall=row.supporting_recall,
            hits=hits.searches,
            last_hit=hits.is_last,
        )

    def score(self, item: Question, reply: Ladder | Failure) -> StoppingRow:
        """The row of a question; a failed one has no answers, and scores 0 by every rule."""
        row = StoppingRow(id=item.id, question=item.question, answers=list(item.answers), depths=[])
        if isinstance(reply, Failure):
            row.error = reply.error
            return row
        values = reply.to_json()
        row.depths = values["depths"]
        row.planner = values["planner"]
        return row

    def summarise(self, log: ResultLog) -> StoppingMetrics:
        """What each rule scores and costs over all questions, beside fixed depths and the bound of all rules."""
        metrics = list(self.run.task.metrics)
        ladders = [Ladder.from_json(row) for row in log.rows()]
        judged = self._judged_rules(ladders, metrics[0])
        bench = TrainedBench(ladders, judged.rules)
        figures = self._compare([bench], metrics)
        seeds = None
        if self.options.other_seeds:
            benches = [bench]
            for folder in self.options.other_seeds:
                others = ladders_of_seed(folder, ladders)
                benches.append(TrainedBench(others, self._judged_rules(others, metrics[0]).rules))
            of_seeds = self._compare(benches, metrics)
            seeds = SeedsFigures(
                number=len(benches),
                rules=of_seeds,
                rules_table=rules_table(of_seeds, metrics),
                rules_differences_table=differences_table(of_seeds),
            )
        return StoppingMetrics(
            system=self.run.system.name,
            task=self.run.task.name,
            questions=len(ladders),
            rules=figures,
            rules_table=rules_table(figures, metrics),
            rules_differences_table=differences_table(figures),
            missing=judged.missing,
            seeds=seeds,
        )

    def _compare(self, benches: Sequence[TrainedBench], metrics: Sequence[str]) -> dict[str, RuleFigures]:
        """The figures of fixed depths, rules and the bound over one or several models."""
        fixed: dict[str, StoppingRule] = {}
        for place in range(self.options.depths + 1 - self._shallowest):
            fixed[self._name_of_depth(place + self._shallowest)] = partial(outcome_at_depth, place=place)
        return compare_rules(benches, fixed, {_BEST: best_depth_rule(metrics[0])}, metrics)

    def _name_of_depth(self, depth: int) -> str:
        """The name of a fixed depth; a loop that may stop earlier makes at most so many searches."""
        number = f"{depth} searches" if depth != 1 else "1 search"
        return f"always {number}" if self._fixed else f"at most {number}"

    def _judged_rules(self, ladders: Sequence[Ladder], metric: str) -> _JudgedRules:
        """The rules that can be judged with this model, these options and these answers."""
        rules: dict[str, StoppingRule] = {}
        missing: list[str] = []
        if self._decides:
            rules[_PLANNER] = _planner_rule
        elif self._fixed:
            missing.append("The planner is not judged: its model was trained to search a fixed number of times.")
        if self.options.training_data:
            rules[_COUNTING] = counting_rule(self._plans)
            rules[_WORDS] = words_rule(self._plans, self._language)
        else:
            missing.append("Counting steps and matching words are not judged: name records with --training-data.")
        tasr = tasr_rule(ladders, metric, self.options.margin)
        if tasr is not None:
            rules[_TASR] = tasr
        else:
            missing.append(
                "TASR is not judged: answers have no log-probabilities; --set logprobs=yes asks a chat model for them."
            )
        return _JudgedRules(rules, missing)

    def show(self, metrics: StoppingMetrics, console: Console) -> None:
        """Print the rules with their cost, what the columns say, and the rules that could not be judged."""
        title = f"when to stop: {metrics.system} on {metrics.task}, {metrics.questions} questions"
        show_table(console, title, *metrics.rules_table, "questions")
        if metrics.rules_differences_table.rows:
            show_table(console, "rules minus fixed depths", *metrics.rules_differences_table)
            console.print(f"{_NOTE} Differences are paired by question; {P_NOTE}.")
        if metrics.seeds:
            title = f"mean of {metrics.seeds.number} training seeds"
            show_table(console, title, *metrics.seeds.rules_table, "seeds and questions")
            if metrics.seeds.rules_differences_table.rows:
                show_table(console, f"rules minus fixed depths, {title}", *metrics.seeds.rules_differences_table)
                console.print("Of several seeds, p is that of the two-level bootstrap.")
        for sentence in metrics.missing:
            console.print(sentence)


SUITE = StoppingSuite
_RUN_FIELDS = {item.name for item in fields(QuestionOptions)}


def _planner_rule(ladder: Ladder) -> Outcome:
    """The answer after the planner's own decision; nothing if the question failed."""
    if ladder.planner is None:
        return outcome_at_depth(Ladder(id=ladder.id), 0)
    return outcome_at_depth(Ladder(id=ladder.id, depths=[ladder.planner]), 0)


def _planning_records(folder: str, split: str) -> list[Record]:
    """The planning records of a folder's split, or of a file."""
    return [record for record in read_records(folder, split) if record.task == "planning"]


class _Remembered(Generator):
    """A Graph-LLM whose replies to one question are kept: the loops of all depths begin alike."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._replies: dict[tuple[Any, ...], Completion] = {}

    async def generate(self, sample: ModelInput, max_new_tokens: int, evidence: str | None = None) -> Completion:
        """Reply to one input; see `Generator`."""
        key = (sample, max_new_tokens, evidence, SAMPLE_SEED.get())
        if key not in self._replies:
            self._replies[key] = await self._generator.generate(sample, max_new_tokens, evidence)
        return self._replies[key]


def _tools_that_remember(tools: Tools) -> Tools:
    """The tools for one question, with Graph-LLMs that keep their replies; one that has both roles keeps them once."""
    planner = _Remembered(tools.planner) if tools.planner else None
    answerer = planner if tools.answerer is tools.planner else None
    if tools.answerer and answerer is None:
        answerer = _Remembered(tools.answerer)
    return replace(tools, planner=planner, answerer=answerer)
