"""A task: its reader, its prompt's question, and its metrics.

One YAML file in `eval/tasks` per task; answer lengths follow RAS, section F.2, question templates its table 5. Metrics
are functions in `eval/metrics`.
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

from tripletune.data_builders.readers import get_reader
from tripletune.eval import metrics
from tripletune.eval.metrics import CUTS
from tripletune.eval.metrics._labels import refuses
from tripletune.models.data.questions import Question
from tripletune.models.data.records import read_corpus
from tripletune.models.files import json_line, new_file
from tripletune.models.options import load_config, nearest, not_one_of, setting
from tripletune.models.program import load_from, names_in

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
        reader: The module in `data_builders.readers` that reads its files.
        answer: Long answers keep their paragraphs; of a short one the first counts.
        template: The model's form of the question, with `{question}` as in the benchmark, which retrieval uses.
        questions: Only the first N questions of the file are asked, as a protocol says; None: all.
        top_k: Passages per round, as a protocol says; None: as the system's paper says.
        gold: Optional: also ask questions without a gold answer, which get no scores.
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
        """Problems, one sentence each."""
        known = {name: metric for name, metric in find_metrics().items() if metric.reads != "supporting"}
        found = [f"{key} is missing" for key in ("reader", "metrics") if not getattr(self, key)]
        found += [not_one_of("metrics", name, list(known)) for name in self.metrics if name not in known]
        return found + ([] if "{question}" in self.template else ["template: it has no {question}"])


def task_names() -> list[str]:
    """The tasks that come with the toolkit."""
    return sorted(file.stem for file in TASKS.glob("*.yaml"))


def load_task(name: str) -> Task:
    """Read a task by name, or from a YAML file of your own."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else TASKS / f"{name}.yaml"
    if not path.is_file():
        known = task_names()
        raise ValueError(f"task {name!r} is not one of {', '.join(known)}, nor a YAML file{nearest(name, known)}")
    return load_config(Task, path, {"name": path.stem})


def task_questions(task: Task, data: str, notes: Counter[str] | None = None) -> Iterator[Question]:
    """Stream the questions of a benchmark file; `notes` counts warnings, and by reason rows that can't be used."""
    notes = Counter() if notes is None else notes
    for item in get_reader(task.reader)(data, notes, source=task.name):
        if isinstance(item, Question):
            if not item.answers and task.gold is None:
                raise ValueError(
                    f"{data}: question {item.id!r} has no gold answer: give one, or take the task qa or "
                    "`tripletune ask --questions`"
                )
            yield item
        else:
            notes[str(item.reason)] += 1


def write_context_corpus(task: Task, data: str, path: Path) -> int:
    """Write the distinct passages of all questions of a file, also of those not evaluated, as one corpus."""
    seen: set[str] = set()
    with new_file(path) as scratch, scratch.open("w", encoding="utf-8") as file:
        for question in task_questions(task, data):
            for passage in question.passages:
                if passage.id not in seen and passage.text.strip():
                    seen.add(passage.id)
                    row = {"id": passage.id, "title": passage.title, "text": passage.text}
                    file.write(json_line(row))
        if not seen:
            raise ValueError(
                f"{data}: its questions come without passages, so there is nothing to retrieve from: name a corpus"
            )
    return len(seen)


def context_links(questions: Iterable[Question], corpus: Path) -> dict[str, frozenset[str]]:
    """Gold links by content: corpus ids of the supporting passages in questions' contexts.

    Questions whose supporting passages are not all there are left out. White space and encodings may differ.
    """
    keys = {
        one.id: {p.key for p in map(one.passages.__getitem__, one.supporting) if p.text.strip()} for one in questions
    }
    wanted, ids = set().union(*keys.values()), dict[str, str]()
    for passage in read_corpus(corpus) if wanted else ():
        if (key := passage.key) in wanted:
            ids.setdefault(key, passage.id)
    links = {name: frozenset(ids[key] for key in own) for name, own in keys.items() if own and own <= ids.keys()}
    if missing := sum(map(bool, keys.values())) - len(links):
        logger.warning("%s lacks supporting passages of %d questions: no recall is known of them", corpus, missing)
    return links


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, its sentence for tables, and the kind of gold that it reads."""

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
    """Score a prediction with several metrics; blank gold answers, which would occur in every one, are passed over."""
    filled = [answer for answer in answers if answer.strip()]
    if not filled:
        raise ValueError(f"gold answers are {list(answers)!r}: a metric needs one that is not blank")
    for name, metric in metrics.items():
        if metric.reads == "short_answers" and not short_answers:
            raise ValueError(f"metric {name} needs short answers, which the question does not have: ASQA's rows do")
    if refusal and refusal in filled and refuses(prediction):
        prediction = refusal
    gold = {"answers": filled, "short_answers": short_answers}
    scores = {name: float(metric.score(prediction, gold[metric.reads])) for name, metric in metrics.items()}
    if wrong := {name: score for name, score in scores.items() if not 0 <= score <= 1}:
        raise ValueError(f"metric {next(iter(wrong))} gives {wrong} for {prediction!r}: scores are from 0 to 1")
    return scores
