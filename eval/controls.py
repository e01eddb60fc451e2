"""Controls of a score on records: does the model read, or would it score the same without?

A planner can stop as well as a rule that counts steps, and a graph token can change nothing. So the same records are
scored again with the commonest reply of the training records, and with the same model after its facts or its graph
were removed or exchanged with another question's. Each control is compared with the model, paired by question.
"""

from __future__ import annotations

import copy
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tripletune.eval.statistics import GAP, bootstrap_pairs
from tripletune.models.data.records import Action, ModelInput, Record, Step
from tripletune.models.llm import Completion

if TYPE_CHECKING:
    from tripletune.models.graph_llm import LocalGenerator

MODEL, RULE = "model", "rule"
# Control -> what it reads, as tables say it.
READS = {
    MODEL: "the model, reading everything",
    RULE: "a rule that counts steps",
    "no_facts": "no facts",
    "other_facts": "another question's facts",
    "no_graph": "no graph token",
    "other_graph": "another question's graph, its own text",
}
METRICS = ("action_accuracy", "subquery_f1", "exact_match", "f1")


class Rule:
    """The best rule that reads nothing: the commonest action after each number of steps, the commonest answer.

    Its sub-query is the question itself.

    Args:
        records: The training records, streamed.
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
        """What the rule replies; a number of steps that no training record has counts as the nearest one."""
        if record.task == "answering":
            return self._answer
        if not self._actions:
            return ""
        action = self._actions[min(self._actions, key=lambda steps: (abs(steps - len(record.steps)), steps))]
        return f"{action.value} {record.question}" if action is Action.SUBQ else action.value


class OtherFacts:
    """Histories with the facts of another question.

    Args:
        records: The records that are scored, streamed; the longest history of each question is kept.
        seed: Seed of the choice.

    Raises:
        ValueError: only one question has a history, so that there is no other.
    """

    def __init__(self, records: Iterable[Record], seed: int) -> None:
        self._seed = seed
        self._longest: dict[str, tuple[Step, ...]] = {}
        for record in records:
            if len(record.steps) > len(self._longest.get(record.question_id, ())):
                self._longest[record.question_id] = record.steps
        if len(self._longest) == 1:
            raise ValueError("--controls exchanges the facts of questions, and only one question has a history")

    def of(self, record: Record) -> tuple[Step, ...]:
        """The record's sub-queries, each with the facts of a step of another question, the same in every run.

        A question with at least as many steps is chosen where there is one; the facts of a shorter one are repeated.
        """
        others = [name for name in self._longest if name != record.question_id]
        enough = [name for name in others if len(self._longest[name]) >= len(record.steps)]
        steps = self._longest[random.Random(f"{self._seed} {record.question_id}").choice(enough or others)]
        return tuple(replace(steps[number % len(steps)], query=step.query) for number, step in enumerate(record.steps))


class Controls:
    """A model that replies to each record as it is, and without what it should read.

    Args:
        generator: The model; one without a graph has no controls of it.
        facts: The facts of other questions.
    """

    def __init__(self, generator: LocalGenerator, facts: OtherFacts) -> None:
        self._generator, self._facts = generator, facts
        self._without_graph: LocalGenerator | None = None
        if generator.processor.settings.use_graph:
            self._without_graph = copy.copy(generator)
            self._without_graph.processor = generator.processor.without_graph()

    @property
    def names(self) -> list[str]:
        """Whose replies there are: the model's first."""
        return [name for name in READS if name != RULE and (self._without_graph or not name.endswith("graph"))]

    def ask(self, batch: Sequence[Record], limit: int, evidence: str | None) -> list[dict[str, Completion]]:
        """Replies to each record by name.

        Args:
            batch: Records of one task.
            limit: Longest reply, in tokens.
            evidence: "triples" or "text"; None keeps the model's setting.
        """
        asked = [(place, *one) for place, record in enumerate(batch) for one in self._variants(record)]
        inputs, graphs = [one for _, _, one, _ in asked], [steps for *_, steps in asked]
        found: list[dict[str, Completion]] = [{} for _ in batch]
        for (place, name, *_), reply in zip(asked, self._generator.generate_many(inputs, limit, evidence, graphs)):
            found[place][name] = reply
        if self._without_graph is not None:
            inputs = [record.input for record in batch]
            for replies, reply in zip(found, self._without_graph.generate_many(inputs, limit, evidence)):
                replies["no_graph"] = reply
        # A record without history has no facts to take away.
        return [{name: replies.get(name, replies[MODEL]) for name in self.names} for replies in found]

    def _variants(self, record: Record) -> Iterator[tuple[str, ModelInput, tuple[Step, ...]]]:
        """Name, input and the steps whose graphs are read."""
        given, steps = record.input, record.steps
        yield MODEL, given, steps
        if steps:
            bare, others = tuple(Step(step.query) for step in steps), self._facts.of(record)
            yield "no_facts", replace(given, steps=bare), bare
            yield "other_facts", replace(given, steps=others), others
            if self._without_graph is not None:
                yield "other_graph", given, others


def compare_controls(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Scores of the controls, and their differences to the model.

    Args:
        rows: Rows of `tripletune eval records --controls`, streamed.

    Returns:
        `{control: {metric: {"score", "difference"}}}`, the model's scores under "model" with difference 0; planning
        metrics also `_with_history`. Intervals draw whole questions; the difference is "control minus model", paired
        by record.
    """
    scores: dict[str, dict[str, list[tuple[str, float]]]] = defaultdict(lambda: defaultdict(list))
    gaps: dict[str, dict[str, list[tuple[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for control, found in {MODEL: row, **row["controls"]}.items():
            for metric in METRICS:
                if metric not in row["scores"]:
                    continue
                with_history = row["task"] == "planning" and row["history"]
                for name in (metric, f"{metric}_with_history") if with_history else (metric,):
                    score = found["scores"][metric]
                    scores[control][name].append((row["question_id"], score))
                    gaps[control][name].append((row["question_id"], score - row["scores"][metric]))
    return {
        control: {
            name: {"score": bootstrap_pairs(pairs), "difference": bootstrap_pairs(gaps[control][name], GAP)}
            for name, pairs in found.items()
        }
        for control, found in scores.items()
    }


def control_table(controls: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The controls as a table: heads, and a row for each with its scores and differences, times 100.

    Args:
        controls: What `compare_controls` returns.
    """
    metrics = [name for name in METRICS if name in controls[MODEL]]
    rows = []
    for control, found in controls.items():
        row = [READS[control]]
        for metric in metrics:
            gap = {key: 100 * found[metric]["difference"][key] for key in ("mean", "low", "high")}
            told = "" if control == MODEL else "{mean:+.1f} ({low:+.1f} to {high:+.1f})".format(**gap)
            row += [f"{100 * found[metric]['score']['mean']:.1f}", told]
        rows.append(row)
    return ["what is read", *(head for metric in metrics for head in (metric, "minus model"))], rows
