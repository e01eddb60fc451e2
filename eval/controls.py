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
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from tripletune.core.calls import Completion, Generator
from tripletune.core.data.records import Action, ModelInput, Record, Step
from tripletune.eval.statistics import bootstrap_pairs, correct_table, paired_ratio_difference, sums_of, verdict
from tripletune.rag.results import RESULTS, read_runs

if TYPE_CHECKING:
    from tripletune.llm.graph_generator import LocalGenerator

MODEL, RULE = "model", "rule"
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
Control = Literal["no_facts", "other_facts", "other_graph"]
METRICS = ("action_accuracy", "subquery_f1", "exact_match", "f1")


class Rule:
    """The best rule that reads nothing: the commonest action after each number of steps, and the commonest answer.

    The rule's sub-query is the question itself.
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
        self._answer = answers.most_common(1)[0][0] if answers else ""

    def reply(self, record: Record) -> str:
        """The rule's reply; an unseen number of steps counts as the nearest seen number."""
        if record.task == "answering":
            return self._answer
        if not self._actions:
            return ""
        action = self._actions[min(self._actions, key=lambda steps: (abs(steps - len(record.steps)), steps))]
        return f"{action.value} {record.question}" if action is Action.SUBQ else action.value


class OtherFacts:
    """Makes histories with another question's facts, from the longest history of each question in a stream."""

    def __init__(self, histories: Iterable[tuple[str, tuple[Step, ...]]], seed: int = 0) -> None:
        self._seed = seed
        self._longest: dict[str, tuple[Step, ...]] = {}
        for name, steps in histories:
            if len(steps) > len(self._longest.get(name, ())):
                self._longest[name] = steps
        if len(self._longest) < 2:
            raise ValueError("fewer than two questions have a history, so questions cannot exchange their facts")

    def of(self, question: str, asked: Sequence[Step]) -> tuple[Step, ...]:
        """The given sub-queries with the facts of one other question, which is the same in every run.

        If no other question has enough steps, the facts of the drawn question are repeated.
        """
        others = [name for name in self._longest if name != question]
        enough = [name for name in others if len(self._longest[name]) >= len(asked)]
        steps = self._longest[random.Random(f"{self._seed} {question}").choice(enough or others)]
        return tuple(replace(steps[number % len(steps)], query=step.query) for number, step in enumerate(asked))


def controlled(control: str, given: ModelInput, others: tuple[Step, ...]) -> ModelInput:
    """The model's input under a `Control`; `others` has the sub-queries with another question's facts."""
    if control == "other_graph":
        return replace(given, graph_of=others)
    return replace(given, steps=others if control == "other_facts" else tuple(Step(one.query) for one in given.steps))


class LoopControl(Generator):
    """A Graph-LLM that reads no facts, or another question's facts or graph, instead of what its loop found."""

    def __init__(self, generator: Any, control: Control, facts: OtherFacts | None) -> None:
        self._generator, self._control, self._facts = generator, control, facts
        if control == "other_graph" and not generator.processor.settings.use_graph:
            raise ValueError("control=other_graph exchanges the graph, but the model reads no graph")

    async def generate(self, sample: ModelInput, max_new_tokens: int, evidence: str | None = None) -> Completion:
        """Reply to one input; see `llm.Generator`."""
        if sample.steps:
            others = self._facts.of(sample.question, sample.steps) if self._facts else ()
            sample = controlled(self._control, sample, others)
        return await self._generator.generate(sample, max_new_tokens, evidence)


def run_histories(run: str | Path) -> Iterator[tuple[str, tuple[Step, ...]]]:
    """Stream the first questions of a run of `tripletune eval run`, with the facts that their loops found."""
    for _, row in islice(read_runs(Path(run) / RESULTS, "trace"), _DONORS):
        yield row["trace"]["question"], tuple(map(Step.from_json, row["trace"]["steps"]))


class Controls:
    """Replies of a model to each record, unchanged and under each control; `facts` has other questions' facts."""

    def __init__(self, generator: LocalGenerator, facts: OtherFacts) -> None:
        self._generator, self._facts = generator, facts
        self._without_graph: LocalGenerator | None = None
        if generator.processor.settings.use_graph:
            self._without_graph = copy.copy(generator)
            self._without_graph.processor = generator.processor.without_graph()

    @property
    def names(self) -> list[str]:
        """Names of the replies, the model's own reply first."""
        return [name for name in READS if name != RULE and (self._without_graph or not name.endswith("graph"))]

    def ask(self, batch: Sequence[Record], limit: int, evidence: str | None) -> list[dict[str, Completion]]:
        """The named replies to each record, of at most `limit` tokens; see `llm.Generator`."""
        asked = [(place, *one) for place, record in enumerate(batch) for one in self._variants(record)]
        inputs = [one for *_, one in asked]
        found: list[dict[str, Completion]] = [{} for _ in batch]
        for (place, name, _), reply in zip(asked, self._generator.generate_many(inputs, limit, evidence)):
            found[place][name] = reply
        if self._without_graph is not None:
            inputs = [record.input for record in batch]
            for replies, reply in zip(found, self._without_graph.generate_many(inputs, limit, evidence)):
                replies["no_graph"] = reply
        # A record without history has no facts, so the model's reply stands for the missing controls.
        return [{name: replies.get(name, replies[MODEL]) for name in self.names} for replies in found]

    def _variants(self, record: Record) -> Iterator[tuple[str, ModelInput]]:
        yield MODEL, record.input
        if record.steps:
            others = self._facts.of(record.question_id, record.steps)
            for name in get_args(Control)[: None if self._without_graph else -1]:
                yield name, controlled(name, record.input, others)


def compare_controls(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Score of each control and metric, and the difference "control minus model", paired by question.

    Intervals and tests draw whole questions; `p_holm` corrects for all `METRICS` and controls.
    """
    scores: dict[str, dict[str, list[tuple[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for control, found in {MODEL: row, **row["controls"]}.items():
            for metric in METRICS:
                if metric not in row["scores"]:
                    continue
                with_history = row["task"] == "planning" and row["history"]
                for name in (metric, f"{metric}_with_history") if with_history else (metric,):
                    scores[control][name].append((row["question_id"], found["scores"][metric]))
    table = {
        control: {
            name: {
                "score": bootstrap_pairs(pairs),
                "difference": paired_ratio_difference(sums_of(scores[MODEL][name]), sums_of(pairs)),
            }
            for name, pairs in found.items()
        }
        for control, found in scores.items()
    }
    others = [found for control, found in table.items() if control != MODEL]
    correct_table(found[name]["difference"] for found in others for name in METRICS if name in found)
    return table


def control_table(controls: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """A table of the controls with scores and differences, times 100, and verdicts."""
    metrics = [name for name in METRICS if name in controls[MODEL]]
    rows = []
    for control, found in controls.items():
        row = [READS[control]]
        for metric in metrics:
            difference = found[metric]["difference"]
            gap = {key: 100 * difference[key] for key in ("mean", "low", "high")}
            shown = "{mean:+.1f} ({low:+.1f} to {high:+.1f}): ".format(**gap) + verdict(difference)
            row += [f"{100 * found[metric]['score']['mean']:.1f}", "" if control == MODEL else shown]
        rows.append(row)
    return ["what is read", *(head for metric in metrics for head in (metric, "minus model"))], rows
