"""A task: its reader, its question template, and its metrics.

Each task is one YAML file in `eval/tasks`. Answer lengths follow section F.2 of RAS, and question templates follow its
table 5. Metrics are functions in `eval/metrics`.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from tripletune.core.data.passages import passages_by_key
from tripletune.core.data.questions import Question
from tripletune.core.files import json_line, new_file
from tripletune.core.options import load_config, nearest, not_one_of, setting
from tripletune.core.plugins import load_from, names_in
from tripletune.data_builders.readers import get_reader
from tripletune.eval import metrics
from tripletune.eval.metrics import CUTS
from tripletune.eval.metrics._labels import refuses

if __name__ == "eval":
    raise ImportError("import it as tripletune.eval; under its short name it would be loaded twice")

logger = logging.getLogger(__name__)
TASKS = Path(__file__).parent / "tasks"
_METRICS = "tripletune.eval.metrics"
GoldKind = Literal["answers", "short_answers", "supporting"]


@dataclass(frozen=True, slots=True)
class Task:
    """One benchmark.

    Attributes:
        reader: The module in `data_builders.readers` that reads the benchmark's files.
        answer: A long answer keeps its paragraphs; a short answer keeps only the first paragraph.
        template: The question as the model reads it; `{question}` is the benchmark's question, which retrieval uses.
        questions: Number of questions to ask, the first ones of the file, if a protocol limits it; None asks all.
        top_k: Passages per round, if a protocol fixes it; None takes the value of the system's paper.
        gold: "optional" also asks questions without a gold answer, which get no scores.
        refusal: The gold answer of an unanswerable question; a refusal in other words is scored as this text.
    """

    name: str
    reader: str = ""
    metrics: tuple[str, ...] = ()
    max_answer_tokens: int = setting(100, "maximum tokens of an answer", at_least=1)
    answer: Literal["short", "long"] = "short"
    template: str = "{question}"
    questions: int | None = setting(None, "ask only the first N questions of the file", at_least=1)
    top_k: int | None = setting(None, "passages per round", at_least=1)
    refusal: str | None = None
    gold: Literal["optional"] | None = None

    def check(self) -> list[str]:
        """The problems of the task, one sentence each."""
        known = {name: metric for name, metric in find_metrics().items() if metric.reads != "supporting"}
        found = [f"{key} is missing" for key in ("reader", "metrics") if not getattr(self, key)]
        found += [not_one_of("metrics", name, list(known)) for name in self.metrics if name not in known]
        return found + ([] if "{question}" in self.template else ["template: {question} is missing"])


def task_names() -> list[str]:
    """The tasks that come with the toolkit."""
    return sorted(file.stem for file in TASKS.glob("*.yaml"))


def load_task(name: str) -> Task:
    """Read a task by name, or from a custom YAML file."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else TASKS / f"{name}.yaml"
    if not path.is_file():
        known = task_names()
        raise ValueError(f"task {name!r} is neither one of {', '.join(known)} nor a YAML file{nearest(name, known)}")
    return load_config(Task, path, {"name": path.stem})


def task_questions(task: Task, data: str, notes: Counter[str] | None = None) -> Iterator[Question]:
    """Stream the questions of a benchmark file; `notes` counts warnings, and unusable rows by reason."""
    notes = Counter() if notes is None else notes
    for item in get_reader(task.reader)(data, notes, source=task.name):
        if isinstance(item, Question):
            if not item.answers and task.gold is None:
                raise ValueError(
                    f"{data}: question {item.id!r} has no gold answer: add one, or use the task qa or "
                    "`tripletune ask --questions`"
                )
            yield item
        else:
            notes[str(item.reason)] += 1


def write_context_corpus(task: Task, data: str, path: Path) -> int:
    """Write the distinct passages of all questions of a file, including questions not evaluated, as one corpus."""
    seen: dict[str, str] = {}
    with new_file(path) as scratch, scratch.open("w", encoding="utf-8") as file:
        for question in task_questions(task, data):
            for passage in question.passages:
                if not passage.text.strip():
                    continue
                if seen.get(passage.id, passage.key) != passage.key:
                    raise ValueError(f"{data}: two passages have the id {passage.id!r}: leave the ids out")
                if passage.id not in seen:
                    seen[passage.id] = passage.key
                    row = {"id": passage.id, "title": passage.title, "text": passage.text}
                    file.write(json_line(row))
        if not seen:
            raise ValueError(
                f"{data}: the questions have no passages, so there is nothing to retrieve from: name a corpus"
            )
    return len(seen)


def context_links(questions: Iterable[Question], corpus: Path) -> dict[str, frozenset[str]]:
    """Gold links by content: the corpus ids of the supporting passages in each question's context.

    A question is left out if the corpus lacks one of its supporting passages. White space and encodings may differ.
    """
    keys = {
        one.id: {p.key for p in map(one.passages.__getitem__, one.supporting) if p.text.strip()} for one in questions
    }
    ids = {key: one.id for key, one in passages_by_key(corpus, set().union(*keys.values())).items()}
    links = {name: frozenset(ids[key] for key in own) for name, own in keys.items() if own and own <= ids.keys()}
    if missing := sum(map(bool, keys.values())) - len(links):
        logger.warning("%s lacks supporting passages of %d questions, so their recall is not known", corpus, missing)
    return links


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, the sentence that tables print about it, and the kind of gold that it reads."""

    score: Callable[[Any, Any], float]
    explanation: str
    reads: GoldKind = "answers"


def find_metrics() -> dict[str, Metric]:
    """All metrics, by name."""
    found = {}
    for module in (metrics, *(load_from(_METRICS, name, "metric") for name in names_in(_METRICS))):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_"):
                said = (inspect.getdoc(function) or name).splitlines()[0].rstrip(".")
                parameters = inspect.signature(function).parameters
                reads: GoldKind = next((gold for gold in get_args(GoldKind) if gold in parameters), "answers")
                if "k" not in parameters:
                    found[name] = Metric(function, said, reads)
                for k in CUTS if "k" in parameters else ():
                    found[f"{name}@{k}"] = Metric(partial(function, k=k), said.replace(" k ", f" {k} "), reads)
    return found


def score_answer(
    prediction: str,
    answers: Sequence[str],
    metrics: Mapping[str, Metric],
    short_answers: Sequence[Sequence[str]] = (),
    refusal: str | None = None,
) -> dict[str, float]:
    """Score a prediction with several metrics; blank gold answers, which every prediction contains, are ignored."""
    filled = [answer for answer in answers if answer.strip()]
    if not filled:
        raise ValueError(f"gold answers are {list(answers)!r}: a metric needs a gold answer that is not blank")
    for name, metric in metrics.items():
        if metric.reads == "short_answers" and not short_answers:
            raise ValueError(f"metric {name} needs short answers, as ASQA's rows have them, but the question has none")
    if refusal and refusal in filled and refuses(prediction):
        prediction = refusal
    gold = {"answers": filled, "short_answers": short_answers}
    scores = {name: float(metric.score(prediction, gold[metric.reads])) for name, metric in metrics.items()}
    if wrong := {name: score for name, score in scores.items() if not 0 <= score <= 1}:
        raise ValueError(f"metric {next(iter(wrong))} returns {wrong} for {prediction!r}: scores must be from 0 to 1")
    return scores
