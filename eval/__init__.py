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

from tripletune.core.config import load_config
from tripletune.core.data.passages import passages_by_key
from tripletune.core.data.questions import Question
from tripletune.core.files import json_line, new_file
from tripletune.core.options import nearest, not_one_of, setting
from tripletune.core.plugins import code_digests, entry_point, load_from, names_in
from tripletune.data_builders.readers import get_reader
from tripletune.eval import metrics
from tripletune.eval.metrics import CUTS
from tripletune.eval.metrics._labels import refuses

if __name__ == "eval":
    raise ImportError("import it as tripletune.eval; under its short name it would be loaded twice")

logger = logging.getLogger(__name__)
TASKS = Path(__file__).parent / "tasks"
_METRICS = "tripletune.eval.metrics"
_READERS = "tripletune.data_builders.readers"
# The gold that a metric reads: the second argument of its function has this name.
GoldKind = Literal["answers", "short_answers", "supporting"]


@dataclass(frozen=True, slots=True)
class Task:
    """One benchmark.

    Attributes:
        name: The task's name on the command line, which is the name of its file.
        reader: The module in `data_builders.readers` that reads the benchmark's files.
        metrics: Names of functions in `eval/metrics`; the first is the headline.
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
        # Scores of rankings need gold passages, which many tasks lack, so `tripletune eval score` adds them.
        of_answers = [name for name, metric in find_metrics().items() if metric.reads != "supporting"]
        problems = []
        if not self.reader:
            problems.append("reader is missing")
        if not self.metrics:
            problems.append("metrics is missing")
        problems += [not_one_of("metrics", name, of_answers) for name in self.metrics if name not in of_answers]
        if "{question}" not in self.template:
            problems.append("template: {question} is missing")
        return problems


def task_names() -> list[str]:
    """The tasks that come with the toolkit."""
    return sorted(file.stem for file in TASKS.glob("*.yaml"))


def about_tasks() -> dict[str, str]:
    """The comment at the head of each task's file, by name."""
    about = {}
    for name in task_names():
        lines = []
        for line in (TASKS / f"{name}.yaml").read_text(encoding="utf-8").splitlines():
            if not line.startswith("# "):
                break
            lines.append(line.removeprefix("# "))
        about[name] = " ".join(lines)
    return about


def load_task(name: str) -> Task:
    """Read a task by name, or from a custom YAML file; its name is then that of the file.

    Raises:
        ValueError: There is no such task or file.
        ConfigError: A setting is wrong.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else TASKS / f"{name}.yaml"
    if not path.is_file():
        names = task_names()
        raise ValueError(f"task {name!r} is neither one of {', '.join(names)} nor a YAML file{nearest(name, names)}")
    return load_config(Task, path, {"name": path.stem})


def task_questions(task: Task, data: str, notes: Counter[str] | None = None) -> Iterator[Question]:
    """Stream the questions of a benchmark file; `notes` counts warnings, and unusable rows by reason.

    A question without a gold answer is an error unless the task allows it: its score would be missing from every mean.
    """
    notes = Counter() if notes is None else notes
    for item in get_reader(task.reader)(data, notes, source=task.name):
        if not isinstance(item, Question):
            notes[str(item.reason)] += 1
            continue
        if not item.answers and task.gold is None:
            raise ValueError(
                f"{data}: question {item.id!r} has no gold answer: add one, or use the task qa or "
                "`tripletune ask --questions`"
            )
        if not item.answers:
            # Said before anything runs: the column of the answers may have a name that is not read.
            notes["question(s) without a gold answer, which are not scored"] += 1
        yield item


def write_context_corpus(task: Task, data: str, path: Path) -> int:
    """Write the distinct passages of all questions of a file, including questions not evaluated, as one corpus.

    With `--limit` the corpus stays that of the whole file, so that retrieval is as hard as for all questions.

    Returns:
        The number of passages.
    """
    written: dict[str, str] = {}  # id -> content key
    with new_file(path) as scratch, scratch.open("w", encoding="utf-8") as file:
        for question in task_questions(task, data):
            for passage in question.passages:
                if not passage.text.strip():
                    continue
                if passage.id not in written:
                    written[passage.id] = passage.key
                    file.write(json_line({"id": passage.id, "title": passage.title, "text": passage.text}))
                elif written[passage.id] != passage.key:
                    raise ValueError(f"{data}: two passages have the id {passage.id!r}: leave the ids out")
        if not written:
            raise ValueError(
                f"{data}: the questions have no passages, so there is nothing to retrieve from: name a corpus"
            )
    return len(written)


def context_links(questions: Iterable[Question], corpus: Path) -> dict[str, frozenset[str]]:
    """Gold links by content: the corpus ids of the supporting passages in each question's context.

    A question is left out if the corpus lacks one of its supporting passages, since full recall would then be
    impossible. White space and encodings may differ.
    """
    wanted: dict[str, set[str]] = {}  # question id -> content keys of its supporting passages
    for question in questions:
        supporting = [question.passages[index] for index in question.supporting]
        wanted[question.id] = {passage.key for passage in supporting if passage.text.strip()}
    stored = passages_by_key(corpus, set().union(*wanted.values()))
    links: dict[str, frozenset[str]] = {}
    incomplete = 0
    for question_id, keys in wanted.items():
        if not keys:
            continue
        if keys <= stored.keys():
            links[question_id] = frozenset(stored[key].id for key in keys)
        else:
            incomplete += 1
    if incomplete:
        logger.warning("%s lacks supporting passages of %d questions, so their recall is not known", corpus, incomplete)
    return links


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric.

    Attributes:
        score: From the prediction (or the final ranking of passages) and the gold, a score from 0 to 1.
        explanation: The sentence that tables print about the metric.
        reads: The kind of gold that `score` gets.
    """

    score: Callable[[Any, Any], float]
    explanation: str
    reads: GoldKind = "answers"


def find_metrics() -> dict[str, Metric]:
    """All metrics, by name: the public functions that a module of metrics defines itself, not those that it imports."""
    by_name: dict[str, Metric] = {}
    added = [load_from(_METRICS, name, "metric") for name in names_in(_METRICS)]
    for module in (metrics, *added):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            is_own = function.__module__ == module.__name__
            if is_own and not name.startswith("_"):
                by_name |= _metrics_of(name, function)
    return by_name


def code_of_task(task: Task) -> dict[str, str]:
    """Digests by file of the reader and the metrics of a task, if other packages add them.

    A metric may be a `partial`, whose module is that of the function in it (`func`).
    """
    digests: dict[str, str] = {}
    if entry_point(_READERS, task.reader):
        digests |= code_digests(_READERS, task.reader)
    metrics_of_task = find_metrics()
    for name in names_in(_METRICS):
        if entry_point(_METRICS, name) is None:
            continue
        module = load_from(_METRICS, name, "metric").__name__
        used = [metrics_of_task[metric].score for metric in task.metrics]
        if any(getattr(score, "func", score).__module__ == module for score in used):
            digests |= code_digests(_METRICS, name)
    return digests


def _metrics_of(name: str, function: Callable[..., float]) -> dict[str, Metric]:
    """The metric of a function; with an argument `k`, one for each of `CUTS`.

    The second argument's name says what the metric reads, so that a new metric needs no registration.
    """
    explanation = (inspect.getdoc(function) or name).splitlines()[0].rstrip(".")
    parameters = inspect.signature(function).parameters
    kinds = [kind for kind in get_args(GoldKind) if kind in parameters]
    reads: GoldKind = kinds[0] if kinds else "answers"
    if "k" not in parameters:
        return {name: Metric(function, explanation, reads)}
    by_name = {}
    for k in CUTS:
        explanation_at_k = explanation.replace(" k ", f" {k} ")
        by_name[f"{name}@{k}"] = Metric(partial(function, k=k), explanation_at_k, reads)
    return by_name


def score_answer(
    prediction: str,
    answers: Sequence[str],
    metrics: Mapping[str, Metric],
    short_answers: Sequence[Sequence[str]] = (),
    refusal: str | None = None,
) -> dict[str, float]:
    """Score a prediction with several metrics; blank gold answers, which every prediction contains, are ignored.

    A metric that fails or leaves the range from 0 to 1 raises an error, since a wrong score would enter every mean.

    Args:
        answers: The gold answer and its aliases.
        metrics: Metrics by name, none of them of rankings.
        short_answers: For an ambiguous question (ASQA), the aliases of each reading's short answer.
        refusal: The gold answer of an unanswerable question; see `Task`.
    """
    filled = [answer for answer in answers if answer.strip()]
    if not filled:
        raise ValueError(f"gold answers are {list(answers)!r}: a metric needs a gold answer that is not blank")
    for name, metric in metrics.items():
        if metric.reads == "short_answers" and not short_answers:
            raise ValueError(f"metric {name} needs short answers, as ASQA's rows have them, but the question has none")
    if refusal and refusal in filled and refuses(prediction):
        prediction = refusal
    scores: dict[str, float] = {}
    for name, metric in metrics.items():
        gold = short_answers if metric.reads == "short_answers" else filled
        scores[name] = float(metric.score(prediction, gold))
        # `not` also refuses NaN.
        if not 0 <= scores[name] <= 1:
            raise ValueError(f"metric {name} returns {scores[name]} for {prediction!r}: scores must be from 0 to 1")
    return scores
