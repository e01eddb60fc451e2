"""Score a model's plans and answers on SUBQ records with gold histories (`tripletune eval records`).

No retrieval runs, so this evaluation is fast, and training logs it. A planning record asks for one action. With
q_0 = Q all searches without history have the label `[SUBQ] Q`, so planning is also scored on records with at
least one step. Intervals draw whole questions, because the records of one question share most of their text. With
`--triples` an extractor's triples replace each step's gold triples (RAS, section 3.2), which shows the cost of the
extractor's mistakes. With `--controls` records are also scored under controls (`eval/controls.py`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from rich.console import Console

from tripletune.core.calls import Completion
from tripletune.core.data.jsonl import record_files
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import Action, Record, Step, read_records
from tripletune.core.data.rendering import Evidence, parse_plan
from tripletune.core.data.triples import Triple
from tripletune.core.files import file_digest
from tripletune.core.options import other_default, setting
from tripletune.eval import find_metrics, score_answer
from tripletune.eval.controls import MODEL, RULE, Controls, OtherFacts, Rule, compare_controls, control_table
from tripletune.eval.results import ResultLog
from tripletune.eval.statistics import bootstrap_pairs
from tripletune.eval.suites import Failure, Suite, SuiteOptions, interval_cells, show_table
from tripletune.eval.systems import triples_settings
from tripletune.models.loading import DTYPE_HELP, model_fingerprint, usual_dtype
from tripletune.rag.answering import model_spec, open_generator
from tripletune.rag.search.options import SearchOptions
from tripletune.rag.systems import LoopOptions
from tripletune.rag.triple_store import StoredTriples, open_triples

MALFORMED = "malformed"
ANSWER_METRICS = {name: find_metrics()[name] for name in ("exact_match", "f1", "f1_hotpotqa")}
EXPLANATIONS = {
    "action_accuracy": "the predicted action is the gold one",
    "action_accuracy_with_history": "the same, for records with at least one step of history",
    "subquery_f1": "token overlap with the gold sub-query, if there is one; another action scores 0",
    "subquery_f1_with_history": "the same, for records with at least one step of history",
    MALFORMED: "replies that do not start with an action",
    **{name: metric.explanation for name, metric in ANSWER_METRICS.items()},
}
_PLANNING = [name for name in EXPLANATIONS if name not in ANSWER_METRICS]
_LABELS = [action.value for action in Action]


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


class RecordSuite(Suite):
    """Replies to records; see the module."""

    unit = "record"
    options_class = RecordOptions
    example = "--data runs/subq --model runs/ras/final --output runs/eval/records"

    def __init__(self, options: RecordOptions) -> None:
        self.model = model_spec(options.model, options.untrained)
        self.generator: Any = None
        self.store: StoredTriples | None = None
        self.looked_up: Counter[str] = Counter()
        self.training = training_files(options) if options.controls else []
        self.rule = Rule(record for file in self.training for record in read_records(file))
        self.controls: Controls | None = None
        super().__init__(options)

    def items(self) -> Iterator[Record]:
        return islice(read_records(self.options.data, self.options.split), self.options.limit)

    def settings(self) -> dict[str, Any]:
        options = self.options
        return {
            "data": [file_digest(file) for file in record_files(options.data, options.split)],
            "model": self.model,
            "weights": model_fingerprint(self.model),
            "triples": triples_settings(options.triples, options.extractor) if options.triples else None,
            "controls": [options.seed, *map(file_digest, self.training)] if options.controls else None,
            "evidence": options.evidence,
            "limit": options.limit,
            "dtype": usual_dtype(options.dtype),
            **{name: getattr(options, name) for name in ("max_plan_tokens", "max_answer_tokens")},
        }

    def open(self) -> None:
        options = self.options
        self.generator = open_generator(self.model, options.untrained, options.batch_size, options.dtype)
        if options.triples:
            database = Path(options.output) / "index" / "triples.sqlite"
            self.store = open_triples(options.triples, database, options.extractor)
        if options.controls:
            shown = with_triples(self.items(), self.store, Counter()) if self.store else self.items()
            histories = ((record.question_id, record.steps) for record in shown)
            self.controls = Controls(self.generator, OtherFacts(histories, options.seed))

    def batches(self, items: Iterable[Record]) -> Iterator[list[Record]]:
        """Yield many records of one task at once, so that the model can group them by length."""
        stream = with_triples(items, self.store, self.looked_up) if self.store else iter(items)
        # With controls, each record needs five replies. A kill loses the blocks in progress, so these are smaller.
        size = (2 if self.options.controls else 8) * self.options.batch_size
        while block := list(islice(stream, size)):
            block.sort(key=lambda record: record.task != "planning")
            yield from (list(group) for _, group in groupby(block, key=lambda record: record.task))

    async def ask(self, batch: list[Record]) -> list[dict[str, Completion]]:
        options = self.options
        limit = options.max_plan_tokens if batch[0].task == "planning" else options.max_answer_tokens
        if self.controls is not None:
            return self.controls.ask(batch, limit, options.evidence)
        found = self.generator.generate_many([one.input for one in batch], limit, options.evidence)
        return [{MODEL: reply} for reply in found]

    def score(self, item: Record, reply: dict[str, Completion] | Failure) -> dict[str, Any]:
        names = self.controls.names if self.controls is not None else [MODEL]
        replies = dict.fromkeys(names, Completion("")) if isinstance(reply, Failure) else reply
        completion = replies[MODEL]
        row = score_record(item, completion.text)
        if self.controls is not None:
            texts = {RULE: self.rule.reply(item)} | {name: replies[name].text for name in names[1:]}
            scored = {name: score_record(item, text) for name, text in texts.items()}
            row["controls"] = {name: {key: one[key] for key in ("reply", "scores")} for name, one in scored.items()}
        return row | {
            "error": reply.error if isinstance(reply, Failure) else "",
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": completion.completion_tokens,
            "truncated_triples": completion.truncated_triples,
            "truncated_words": completion.truncated_words,
            "seconds": completion.seconds,
        }

    def summarise(self, log: ResultLog) -> dict[str, Any]:
        about = {"model": self.model, "data": self.options.data, "split": self.options.split}
        found = about | summarise_records(log.rows())
        if self.options.controls:
            # The report and the model card also use the table.
            found["controls"] = compare_controls(log.rows())
            found["control_table"] = control_table(found["controls"])
        return found

    def show(self, metrics: Mapping[str, Any], console: Console) -> None:
        rows = [
            (task, name, *interval_cells(value), str(value["n"]), explanation)
            for task in ("planning", "answering")
            for name, explanation in EXPLANATIONS.items()
            if (value := metrics[task].get(name)) and value["n"]
        ]
        for family, what in (("label", "gold action"), ("history", "steps of history")):
            for key, value in metrics["planning"][f"action_accuracy_by_{family}"].items():
                rows.append(("planning", "action_accuracy", *interval_cells(value), str(value["n"]), f"{what}: {key}"))
        heads = ("task", "metric", "score", "95 % interval", "records", "what it says")
        show_table(console, "scores on records with gold history", heads, rows, "questions", metrics["failed"])
        if "controls" in metrics:
            show_table(console, "the same records without reading", *metrics["control_table"])
        if self.looked_up:
            passages, misses = self.looked_up["passages"], self.looked_up["passages_without_triples"]
            console.print(f"{passages} passages looked up, {misses} of them not in {self.options.triples}")


SUITE = RecordSuite


def training_files(options: RecordOptions) -> list[Path]:
    """The files of records to fit the rule on."""
    try:
        if options.training_data is None and Path(options.data).is_file():
            raise FileNotFoundError(f"{options.data} is one shard")
        return record_files(options.training_data or options.data, "train")
    except FileNotFoundError as error:
        raise ValueError(
            f"--controls fits a rule on training records, but {error}; name the data set of the model's training with "
            "--training-data"
        ) from None


def score_predictions(records: Iterable[Record], replies: Iterable[str]) -> dict[str, Any]:
    """Score the reply to each planning or answering record; see `summarise_records`."""
    return summarise_records(score_record(record, reply) for record, reply in zip(records, replies, strict=True))


def score_record(record: Record, reply: str) -> dict[str, Any]:
    """One row with the record, the reply, and its scores."""
    row: dict[str, Any] = {
        "id": record.id,
        "question_id": record.question_id,
        "task": record.task,
        "history": len(record.steps),
        "gold": record.label,
        "reply": reply,
    }
    if record.task == "answering":
        return row | {"scores": score_answer(reply.strip(), record.answers, ANSWER_METRICS)}
    plan = parse_plan(reply)
    scores = {"action_accuracy": float(plan.action is record.action), MALFORMED: float(plan.action is None)}
    if record.action is Action.SUBQ:
        overlap = ANSWER_METRICS["f1"].score
        scores["subquery_f1"] = overlap(plan.subquery, (record.subquery,)) if plan.action is Action.SUBQ else 0.0
    return row | {
        "gold_action": record.action.value,
        "action": plan.action.value if plan.action else MALFORMED,
        "scores": scores,
    }


def summarise_records(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Metrics of scored rows; `confusion` counts the predicted actions for each gold action."""
    values: dict[str, list[tuple[str, float]]] = defaultdict(list)
    confusion = {gold: dict.fromkeys([*_LABELS, MALFORMED], 0) for gold in _LABELS}
    records = {"planning": 0, "answering": 0}
    for row in rows:
        planning = row["task"] == "planning"
        records[row["task"]] += 1
        for name, score in row["scores"].items():
            keys = [name]
            if planning and row["history"] and name != MALFORMED:
                keys.append(f"{name}_with_history")
            if name == "action_accuracy":
                keys += [f"label:{row['gold_action']}", f"history:{row['history']}"]
            for key in keys:
                values[key].append((row["question_id"], score))
        if planning:
            confusion[row["gold_action"]][row["action"]] += 1

    def interval(key: str) -> dict[str, Any]:
        return bootstrap_pairs(values.get(key, ()))

    def family(prefix: str) -> dict[str, Any]:
        return {key.removeprefix(prefix): interval(key) for key in sorted(values) if key.startswith(prefix)}

    return {
        "planning": {
            "records": records["planning"],
            **{name: interval(name) for name in _PLANNING},
            "action_accuracy_by_label": family("label:"),
            "action_accuracy_by_history": family("history:"),
            "confusion": confusion,
        },
        "answering": {"records": records["answering"], **{name: interval(name) for name in ANSWER_METRICS}},
    }


def with_triples(records: Iterable[Record], store: StoredTriples, counts: Counter[str]) -> Iterator[Record]:
    """The records with the store's triples instead of their own.

    The text of a step has its passages one below the other, each after its title. Counts `passages`, and passages that
    the store lacks as `passages_without_triples`.
    """
    for record in records:
        yield replace(record, steps=tuple(_looked_up(step, record.id, store, counts) for step in record.steps))


def _looked_up(step: Step, record: str, store: StoredTriples, counts: Counter[str]) -> Step:
    lines = step.text.split("\n") if step.text.strip() else []
    if not lines:
        raise ValueError(f"record {record!r}: the step {step.query!r} has no text, so its triples can't be looked up")
    found: dict[Triple, None] = {}
    while lines:
        end, triples = _first_known(lines, store)
        counts["passages"] += 1
        counts["passages_without_triples"] += triples is None
        found |= dict.fromkeys(triples or ())
        lines = lines[end:]
    return Step(step.query, tuple(found), step.text)


def _first_known(lines: list[str], store: StoredTriples) -> tuple[int, tuple[Triple, ...] | None]:
    """End and triples of the first passage; its text may have line breaks."""
    for end in range(2, len(lines) + 1):
        triples = store.get(Passage(lines[0], "\n".join(lines[1:end])))
        if triples is not None:
            return end, triples
    # Without a title, the first line is the text.
    triples = store.get(Passage("", lines[0]))
    return (1, triples) if triples is not None else (2, None)
