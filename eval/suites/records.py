"""Score a model's plans and answers on SUBQ records with gold histories (`tripletune eval records`).

No retrieval runs, so this evaluation is fast, and training logs it. A planning record asks for one action. With
q_0 = Q all searches without history have the label `[SUBQ] Q`, so planning is also scored on records with at
least one step. Intervals draw whole questions, because the records of one question share most of their text. With
`--triples` an extractor's triples replace each step's gold triples (RAS, section 3.2), which shows the cost of the
extractor's mistakes. With `--controls` records are also scored under controls (`eval/controls.py`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from tripletune.core.calls import Completion
from tripletune.core.data.jsonl import record_files
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import TASKS, Record, Step, Task, check_evidence, count_steps, read_records
from tripletune.core.data.rendering import Evidence
from tripletune.core.data.triples import Triple
from tripletune.core.files import file_digest
from tripletune.core.options import other_default, setting
from tripletune.eval.controls import MODEL, RULE, Controls, History, OtherFacts, Rule, compare_controls, control_table
from tripletune.eval.result_log import ResultLog
from tripletune.eval.statistics import Interval
from tripletune.eval.suites import (
    Failure,
    Suite,
    SuiteOptions,
    interval_cells,
    show_table,
)
from tripletune.eval.suites._record_scores import (
    EXPLANATIONS,
    ControlReply,
    RecordMetrics,
    RecordRow,
    score_record,
    summarise_records,
)
from tripletune.eval.suites._run_settings import shard_digests, triples_settings
from tripletune.models.fingerprints import model_fingerprint
from tripletune.models.specs import DTYPE_HELP, usual_dtype
from tripletune.rag.graph_models import folder_or_base_model, open_generator
from tripletune.rag.search.options import SearchOptions
from tripletune.rag.systems import LoopOptions
from tripletune.rag.trained import options_of_training
from tripletune.rag.triple_store import StoredTriples, open_triples

if TYPE_CHECKING:
    from tripletune.llm.graph_generator import LocalGenerator


@dataclass(kw_only=True)
class RecordOptions(SuiteOptions):
    """Options of `tripletune eval records`."""

    data: str = setting(dataclasses.MISSING, "folder or file of record shards")
    model: str = setting(dataclasses.MISSING, "run, checkpoint or export folder of a Graph-LLM")
    split: str = setting("validation", "split of the folder")
    evidence: Evidence | None = setting(None, "read the triples or the text of a step (default: as in training)")
    triples: str | None = other_default(SearchOptions, "triples", None)
    extractor: str | None = setting(None, "use this extractor's triples, if --triples has several", needs="triples")
    untrained: bool = setting(False, "allow an untrained base model, as a reference")
    batch_size: int = setting(16, "inputs per forward pass", at_least=1)
    dtype: str | None = setting(None, DTYPE_HELP)
    max_plan_tokens: int = setting(LoopOptions().max_plan_tokens, "maximum tokens of a plan", at_least=1)
    max_answer_tokens: int = setting(LoopOptions().max_answer_tokens, "maximum tokens of an answer", at_least=1)
    controls: bool = setting(
        False,
        "also score a rule that reads nothing, and the model with no facts or graph or with those of another question",
    )
    training_data: str | None = setting(
        None, "with --controls: records whose train split the rule is fitted on (default: --data)", needs="controls"
    )
    seed: int = setting(0, "with --controls: seed for choosing the other question")


class RecordSuite(Suite[RecordOptions, Record, dict[str, Completion], RecordMetrics]):
    """Replies to records; see the module.

    Attributes:
        generator: The Graph-LLM, from `open`.
        training: The files of records from which `rule` is made; empty without controls.
        rule: Control that reads nothing; see `eval.controls.Rule`.
        controls: Replies of the model under all controls; None without `--controls`.
    """

    unit = "record"
    options_class = RecordOptions
    example = "--data runs/subq --model runs/ras/final --output runs/eval/records"
    generator: LocalGenerator

    def __init__(self, options: RecordOptions) -> None:
        self.model = folder_or_base_model(options.model, options.untrained)
        self.store: StoredTriples | None = None
        # Numbers of passages whose triples were looked up; see `with_stored_triples`.
        self.looked_up: Counter[str] = Counter()
        self.training = training_files(options) if options.controls else []
        self.rule = Rule(_read_all_records(self.training))
        self.controls: Controls | None = None
        # Last, since it reads all records: a model or training data that does not exist is found before.
        super().__init__(options)
        if not options.triples:
            self._check_evidence()

    def _check_evidence(self) -> None:
        """Refuse records without the evidence that the model was trained with, or that `--evidence` names."""
        evidence = self.options.evidence or options_of_training(self.model).get("evidence", "triples")
        counts = Counter[str]()
        for record in self.items():
            count_steps(record.steps, counts)
        check_evidence("--evidence", evidence, counts, self.options.data)

    def items(self) -> Iterator[Record]:
        """The records of the split, without the triples of `--triples`, which `batches` adds."""
        return islice(read_records(self.options.data, self.options.split), self.options.limit)

    def settings(self) -> dict[str, Any]:
        """What a row depends on; with controls also the training records, on which the rule is fitted.

        The same command continues a stopped run only if these are equal.
        """
        options = self.options
        return {
            "data": shard_digests(options.data, options.split),
            "model": self.model,
            "weights": model_fingerprint(self.model),
            "triples": triples_settings(options.triples, options.extractor) if options.triples else None,
            "controls": [options.seed, *map(file_digest, self.training)] if options.controls else None,
            "evidence": options.evidence,
            "limit": options.limit,
            "dtype": usual_dtype(options.dtype),
            "max_plan_tokens": options.max_plan_tokens,
            "max_answer_tokens": options.max_answer_tokens,
        }

    def open(self) -> None:
        """Load the Graph-LLM, the store of triples, and the facts of all questions for the controls.

        The controls exchange the facts that the model would read, so with `--triples` those of the store.
        """
        options = self.options
        self.generator = open_generator(self.model, options.untrained, options.batch_size, options.dtype)
        if options.triples:
            database = Path(options.output) / "index" / "triples.sqlite"
            self.store = open_triples(options.triples, database, options.extractor)
        if options.controls:
            shown = with_stored_triples(self.items(), self.store, Counter()) if self.store else self.items()
            histories = (History(record.question_id, record.steps) for record in shown)
            self.controls = Controls(self.generator, OtherFacts(histories, options.seed))

    def batches(self, items: Iterable[Record]) -> Iterator[list[Record]]:
        """Yield many records of one task at once, so that the model can group them by length."""
        stream = with_stored_triples(items, self.store, self.looked_up) if self.store else iter(items)
        # With controls, each record needs five replies. A kill loses the blocks in progress, so these are smaller.
        size = (2 if self.options.controls else 8) * self.options.batch_size
        while block := list(islice(stream, size)):
            for task in TASKS:
                same_task = [record for record in block if record.task == task]
                if same_task:
                    yield same_task

    async def ask(self, batch: list[Record]) -> list[dict[str, Completion]]:
        """Replies by name: the model's own under "model", then those of the controls."""
        options = self.options
        limit = options.max_plan_tokens if batch[0].task == "planning" else options.max_answer_tokens
        if self.controls is not None:
            return self.controls.ask(batch, limit, options.evidence)
        inputs = [record.input for record in batch]
        completions = self.generator.generate_many(inputs, limit, options.evidence)
        return [{MODEL: completion} for completion in completions]

    def score(self, item: Record, reply: dict[str, Completion] | Failure) -> RecordRow:
        """The row of a record; if it failed, all replies count as empty, so that it scores 0 in every column.

        The rule needs no model, so its reply is made here and not in `ask`; it is scored also for a failed record,
        which keeps all columns over the same records.
        """
        if isinstance(reply, Failure):
            replies = dict.fromkeys(self._reply_names, Completion(""))
        else:
            replies = reply
        completion = replies[MODEL]
        row = score_record(item, completion.text)
        if self.controls is not None:
            texts = {RULE: self.rule.reply(item)}
            for name in self._reply_names[1:]:
                texts[name] = replies[name].text
            row.controls = {name: ControlReply(text, score_record(item, text).scores) for name, text in texts.items()}
        if isinstance(reply, Failure):
            row.error = reply.error
        row.prompt_tokens = completion.prompt_tokens
        row.completion_tokens = completion.completion_tokens
        row.truncated_triples = completion.truncated_triples
        row.truncated_words = completion.truncated_words
        row.seconds = completion.seconds
        return row

    @property
    def _reply_names(self) -> list[str]:
        """What each record gets a reply for: the model as it is first, then the controls."""
        return [MODEL] if self.controls is None else self.controls.names

    def summarise(self, log: ResultLog) -> RecordMetrics:
        """Scores by task, and with controls the comparison of each control with the model."""
        options = self.options
        metrics = RecordMetrics(
            model=self.model,
            data=options.data,
            split=options.split,
            scores=summarise_records(RecordRow.from_json(values) for values in log.rows()),
        )
        if options.controls:
            metrics.controls = compare_controls(log.rows())
            metrics.control_table = control_table(metrics.controls)
        return metrics

    def show(self, metrics: RecordMetrics, console: Console) -> None:
        """Print scores by task, the accuracy of actions by gold action and history, and the controls.

        The controls show what a model would score without reading: a score near theirs says little.
        """
        planning, answering = metrics.scores
        rows = [
            *_score_rows("planning", planning.scores),
            *_score_rows("answering", answering.scores),
            *_accuracy_rows("gold action", planning.by_label),
            *_accuracy_rows("steps of history", planning.by_history),
        ]
        heads = ("task", "metric", "score", "95 % interval", "records", "what it says")
        show_table(console, "scores on records with gold history", heads, rows, "questions", metrics.failed)
        if metrics.control_table is not None:
            show_table(console, "the same records without reading", *metrics.control_table)
        if self.looked_up:
            passages, misses = self.looked_up["passages"], self.looked_up["passages_without_triples"]
            console.print(f"{passages} passages looked up, {misses} of them not in {self.options.triples}")


SUITE = RecordSuite


def training_files(options: RecordOptions) -> list[Path]:
    """The files of records to fit the rule on.

    A single shard has no train split, and a rule that was fitted on the evaluated records would know their answers.
    """
    try:
        if options.training_data is None and Path(options.data).is_file():
            raise FileNotFoundError(f"{options.data} is one shard")
        return record_files(options.training_data or options.data, "train")
    except FileNotFoundError as error:
        raise ValueError(
            f"--controls fits a rule on training records, but {error}; name the data set of the model's training with "
            "--training-data"
        ) from None


def _read_all_records(files: Iterable[Path]) -> Iterator[Record]:
    """The records of several files, in order."""
    for file in files:
        yield from read_records(file)


def score_predictions(records: Iterable[Record], replies: Iterable[str]) -> dict[str, Any]:
    """Score the reply to each planning or answering record; the JSON values of `RecordScores`."""
    rows = (score_record(record, reply) for record, reply in zip(records, replies, strict=True))
    return summarise_records(rows).to_json()


def _score_rows(task: Task, scores: Mapping[str, Interval]) -> list[tuple[str, ...]]:
    """Rows for the scores that have records; a file may have only records of one task."""
    rows: list[tuple[str, ...]] = []
    for name, interval in scores.items():
        if interval["n"]:
            rows.append((task, name, *interval_cells(interval), str(interval["n"]), EXPLANATIONS[name]))
    return rows


def _accuracy_rows(kind: str, accuracies: Mapping[str, Interval]) -> list[tuple[str, ...]]:
    """Rows for the accuracy of the action in parts of the planning records; `kind` says what a part has in common."""
    rows: list[tuple[str, ...]] = []
    for name, interval in accuracies.items():
        cells = interval_cells(interval)
        rows.append(("planning", "action_accuracy", *cells, str(interval["n"]), f"{kind}: {name}"))
    return rows


def with_stored_triples(records: Iterable[Record], store: StoredTriples, counts: Counter[str]) -> Iterator[Record]:
    """The records with the store's triples instead of their own.

    The text of a step has its passages one below the other, each after its title. Counts `passages`, and passages that
    the store lacks as `passages_without_triples`.
    """
    for record in records:
        yield replace(
            record, steps=tuple(_step_with_stored_triples(step, record.id, store, counts) for step in record.steps)
        )


def _step_with_stored_triples(step: Step, record: str, store: StoredTriples, counts: Counter[str]) -> Step:
    """A step with the triples that the store has for the passages in its text.

    A step without a text is an error, since without triples it would look like one in which the extractor found
    nothing.
    """
    lines = step.text.split("\n") if step.text.strip() else []
    if not lines:
        raise ValueError(f"record {record!r}: the step {step.query!r} has no text, so its triples can't be looked up")
    distinct: dict[Triple, None] = {}
    while lines:
        passage = _match_first_passage(lines, store)
        counts["passages"] += 1
        if passage.triples is None:
            counts["passages_without_triples"] += 1
        else:
            distinct |= dict.fromkeys(passage.triples)
        lines = lines[passage.lines :]
    return Step(step.query, tuple(distinct), step.text)


class _StoredPassage(NamedTuple):
    """The number of lines of a passage, and its triples; None if the store lacks it."""

    lines: int
    triples: tuple[Triple, ...] | None


def _match_first_passage(lines: list[str], store: StoredTriples) -> _StoredPassage:
    """The first passage of a step's text that the store has; as a passage may have line breaks, the store says its end.

    A passage that the store lacks counts as a title and one line.
    """
    for end in range(2, len(lines) + 1):
        triples = store.get(Passage(lines[0], "\n".join(lines[1:end])))
        if triples is not None:
            return _StoredPassage(end, triples)
    # Without a title, the first line is the text.
    triples = store.get(Passage("", lines[0]))
    if triples is not None:
        return _StoredPassage(1, triples)
    return _StoredPassage(2, None)
