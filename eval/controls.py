"""Controls of a score: would the model score the same without reading?

A planner may be no better than a rule that counts steps, and a graph token may change nothing. So the records are
scored again with the commonest training reply, and with the model without facts or graph, or with those of another
question. Each control is compared with the model, paired by question. In a loop (`tripletune eval run --set
control=NAME`) a control is a separate run, to compare with `eval compare`.
"""

from __future__ import annotations

import copy
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, cast

from tripletune.core.calls import Completion, Generator
from tripletune.core.data.records import Action, ModelInput, Record, Step
from tripletune.eval.statistics import (
    Difference,
    Interval,
    add_corrected_p_values,
    bootstrap_pairs,
    p_cell,
    paired_ratio_difference,
    sums_by_question,
    verdict,
)
from tripletune.rag.results import RESULTS, ResultRow, fields_as_json, read_result_rows

if TYPE_CHECKING:
    from tripletune.eval.systems import Control
    from tripletune.llm.graph_generator import LocalGenerator
    from tripletune.rag.systems import Tools

MODEL = "model"
RULE = "rule"
# Control -> what it reads, in the words of the tables.
READS = {
    MODEL: "the model, reading everything",
    RULE: "a rule that counts steps",
    "no_facts": "no facts",
    "other_facts": "another question's facts",
    "no_graph": "no graph token",
    "other_graph": "another question's graph, this question's text",
}
# Questions of a run whose facts other questions get; more would fill the memory.
_DONORS = 1000
METRICS = ("action_accuracy", "subquery_f1", "exact_match", "f1")


class Rule:
    """The best rule that reads nothing: the commonest action after each number of steps, and the commonest answer.

    The rule's sub-query is the question itself.

    Args:
        records: Those of training: a rule that was fitted on the scored records would know their labels.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        actions: dict[int, Counter[Action]] = defaultdict(Counter)
        answers: Counter[str] = Counter()
        for record in records:
            if record.task == "planning":
                actions[len(record.steps)][record.action] += 1
            else:
                answers[record.answers[0]] += 1
        self._actions = {steps: counts.most_common(1)[0][0] for steps, counts in actions.items()}
        self._answer = ""
        if answers:
            self._answer = answers.most_common(1)[0][0]

    def reply(self, record: Record) -> str:
        """The rule's reply; an unseen number of steps counts as the nearest seen number."""
        if record.task == "answering":
            return self._answer
        if not self._actions:
            return ""
        asked = len(record.steps)
        nearest = min(self._actions, key=lambda steps: (abs(steps - asked), steps))
        action = self._actions[nearest]
        if action is Action.SUBQ:
            return f"{action.value} {record.question}"
        return action.value


class History(NamedTuple):
    """The steps of a question, with the facts that were found; `question` is its id, or its text in a run."""

    question: str
    steps: tuple[Step, ...]


class OtherFacts:
    """Makes histories with another question's facts.

    Args:
        histories: A stream, of which the longest history of each question is kept.
        seed: With the question it decides whose facts a question gets.
    """

    def __init__(self, histories: Iterable[History], seed: int = 0) -> None:
        self._seed = seed
        # By question.
        self._longest: dict[str, tuple[Step, ...]] = {}
        for question, steps in histories:
            if len(steps) > len(self._longest.get(question, ())):
                self._longest[question] = steps
        if len(self._longest) < 2:
            raise ValueError("fewer than two questions have a history, so questions cannot exchange their facts")

    def exchanged(self, question: str, asked: Sequence[Step]) -> tuple[Step, ...]:
        """The asked sub-queries with the facts of one other question, which is the same in every run.

        Questions with enough steps are preferred, because the model should read as many facts as before. If there is
        none, the facts of the drawn question are repeated.
        """
        others = [name for name in self._longest if name != question]
        enough = [name for name in others if len(self._longest[name]) >= len(asked)]
        drawn = random.Random(f"{self._seed} {question}").choice(enough or others)
        facts = cycle(self._longest[drawn])
        return tuple(replace(fact, query=step.query) for step, fact in zip(asked, facts))


def controlled_input(control: Control, sample: ModelInput, others: tuple[Step, ...]) -> ModelInput:
    """The model's input under a `Control`; `others` has the sub-queries with another question's facts."""
    if control == "other_graph":
        return replace(sample, graph_of=others)
    if control == "other_facts":
        return replace(sample, steps=others)
    return replace(sample, steps=tuple(Step(step.query) for step in sample.steps))


class LoopControl(Generator):
    """A Graph-LLM that reads no facts, or another question's facts or graph, instead of what its loop found.

    Args:
        generator: The Graph-LLM.
        control: What it reads instead of its own facts.
        facts: Facts of other questions; None for a control without them.
    """

    def __init__(self, generator: LocalGenerator, control: Control, facts: OtherFacts | None) -> None:
        self._generator = generator
        self._control = control
        self._facts = facts
        if control == "other_graph" and not generator.processor.settings.use_graph:
            raise ValueError("control=other_graph exchanges the graph, but the model reads no graph")

    async def generate(self, sample: ModelInput, max_new_tokens: int, evidence: str | None = None) -> Completion:
        """Reply to one input; see `llm.Generator`. An input without history has no facts to exchange."""
        if sample.steps:
            others = self._facts.exchanged(sample.question, sample.steps) if self._facts else ()
            sample = controlled_input(self._control, sample, others)
        return await self._generator.generate(sample, max_new_tokens, evidence)


def controlled_tools(tools: Tools, control: Control, control_run: str | None) -> Tools:
    """The tools with Graph-LLMs that read what a control shows, instead of what the loop found.

    Only the models' inputs change: the loop searches and stops as it would, so that the scores differ by what was read.

    Args:
        control_run: Folder of the run whose histories have the other facts; None for a control without them.
    """
    facts = OtherFacts(histories_of_run(control_run)) if control_run else None
    # `eval.systems.run_problems` refuses a control without a Graph-LLM.
    planner = cast("LocalGenerator | None", tools.planner)
    answerer = cast("LocalGenerator | None", tools.answerer)
    return replace(
        tools,
        planner=LoopControl(planner, control, facts) if planner else None,
        answerer=LoopControl(answerer, control, facts) if answerer else None,
    )


def histories_of_run(run: str | Path) -> Iterator[History]:
    """Stream the first `_DONORS` questions of a run of `tripletune eval run`, with the facts that their loops found.

    A question is named by its text, since that is what a loop hands to `LoopControl`.
    """
    for _, values in islice(read_result_rows(Path(run) / RESULTS, "trace"), _DONORS):
        trace = ResultRow.from_json(values).trace
        yield History(trace.question, tuple(map(Step.from_json, map(fields_as_json, trace.steps))))


class Controls:
    """Replies of a model to each record, unchanged and under each control; `facts` has other questions' facts."""

    def __init__(self, generator: LocalGenerator, facts: OtherFacts) -> None:
        self._generator = generator
        self._facts = facts
        # The same model, which reads no graph token; None if it never reads one.
        self._without_graph: LocalGenerator | None = None
        # The controls that are made from the input alone.
        self._controls: list[Control] = ["no_facts", "other_facts"]
        if generator.processor.settings.use_graph:
            self._without_graph = copy.copy(generator)
            self._without_graph.processor = generator.processor.without_graph()
            self._controls.append("other_graph")

    @property
    def names(self) -> list[str]:
        """Names of the replies, the model's own reply first."""
        asked = {MODEL, *self._controls}
        if self._without_graph is not None:
            asked.add("no_graph")
        return [name for name in READS if name in asked]

    def ask(self, batch: Sequence[Record], limit: int, evidence: str | None) -> list[dict[str, Completion]]:
        """The named replies to each record, of at most `limit` tokens; see `llm.Generator`.

        All variants of all records are asked together, so that the model decodes them in full batches.
        """
        replies: list[dict[str, Completion]] = []
        # All inputs of the batch are asked at once; for each, where its reply belongs.
        inputs: list[ModelInput] = []
        places: list[tuple[dict[str, Completion], str]] = []
        for record in batch:
            of_record: dict[str, Completion] = {}
            replies.append(of_record)
            for name, variant in self._inputs_by_control(record):
                inputs.append(variant)
                places.append((of_record, name))
        for (of_record, name), completion in zip(
            places, self._generator.generate_many(inputs, limit, evidence), strict=True
        ):
            of_record[name] = completion
        if self._without_graph is not None:
            own_inputs = [record.input for record in batch]
            completions = self._without_graph.generate_many(own_inputs, limit, evidence)
            for of_record, completion in zip(replies, completions, strict=True):
                of_record["no_graph"] = completion
        return list(map(self._with_missing_controls, replies))

    def _with_missing_controls(self, replies: dict[str, Completion]) -> dict[str, Completion]:
        """The replies in the order of `names`.

        A record without history has no facts, so the model's reply stands for the missing controls.
        """
        return {name: replies.get(name, replies[MODEL]) for name in self.names}

    def _inputs_by_control(self, record: Record) -> Iterator[tuple[str, ModelInput]]:
        """The record's input and its controls, each after the name of its reply; without steps there are no controls.

        The control "no_graph" is not among them: it reads the same input without the graph token.
        """
        yield MODEL, record.input
        if record.steps:
            others = self._facts.exchanged(record.question_id, record.steps)
            for control in self._controls:
                yield control, controlled_input(control, record.input, others)


class ControlScore(TypedDict):
    """A score under a control, and its difference "control minus model"."""

    score: Interval
    difference: Difference


# By control, the model first, then by metric.
ControlScores = dict[str, dict[str, ControlScore]]


def compare_controls(rows: Iterable[Mapping[str, Any]]) -> ControlScores:
    """Score of each control and metric, and the difference "control minus model", paired by question.

    Intervals and tests draw whole questions; `p_holm` corrects for all `METRICS` and controls.
    """
    pairs = _scores_by_question(rows)
    table: ControlScores = {}
    differences = []
    for control, metrics in pairs.items():
        table[control] = {}
        for name, scores in metrics.items():
            difference = paired_ratio_difference(sums_by_question(pairs[MODEL][name]), sums_by_question(scores))
            table[control][name] = {"score": bootstrap_pairs(scores), "difference": difference}
            if control != MODEL and name in METRICS:
                differences.append(difference)
    add_corrected_p_values(differences)
    return table


def _scores_by_question(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, list[tuple[str, float]]]]:
    """Pairs of question and score of scored records, by control and metric.

    Metrics of plans are also counted for the records with history alone, under "METRIC_with_history": without history
    all plans have the same label, and the controls change nothing.
    """
    pairs: dict[str, dict[str, list[tuple[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        scored = [metric for metric in METRICS if metric in row["scores"]]
        is_plan_with_history = row["task"] == "planning" and row["history"] > 0
        for control, reply in {MODEL: row, **row["controls"]}.items():
            for metric in scored:
                pair = (row["question_id"], reply["scores"][metric])
                pairs[control][metric].append(pair)
                if is_plan_with_history:
                    pairs[control][f"{metric}_with_history"].append(pair)
    return pairs


class ControlTable(NamedTuple):
    """A table of controls, which `metrics.json`, the report and the model card show."""

    heads: list[str]
    rows: list[list[str]]


def control_table(controls: ControlScores) -> ControlTable:
    """Heads and rows of a table of the controls with scores and differences, times 100, and verdicts.

    The model's row has no difference, since it is what the others are compared with.
    """
    metrics = [name for name in METRICS if name in controls[MODEL]]
    heads = ["what is read"]
    for metric in metrics:
        heads += [metric, "minus model"]
    rows = []
    for control, scores in controls.items():
        row = [READS[control]]
        for metric in metrics:
            mean = scores[metric]["score"]["mean"]
            row.append("-" if mean is None else f"{100 * mean:.1f}")
            row.append("" if control == MODEL else _difference_in_words(scores[metric]["difference"]))
        rows.append(row)
    return ControlTable(heads, rows)


def _difference_in_words(difference: Difference) -> str:
    """A difference times 100 with its interval, its corrected p-value and the verdict.

    The interval of few questions may be above 0 where the verdict, which is by the p-value, is not "better".
    """
    mean = 100 * difference["mean"]
    low = 100 * difference["low"]
    high = 100 * difference["high"]
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f}), p {p_cell(difference)}: {verdict(difference)}"
