"""The interface of training tasks; `train.engine` trains.

Every file in `train/tasks/` is a training task: it defines a subclass of `TrainingTask`, assigns it to `TASK`, and adds
settings to `train.settings.RunConfig`. Nothing heavy is imported here, so that `--help` and errors appear at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tripletune.core.files import file_digest, flatten
from tripletune.core.plugins import code_of_class
from tripletune.models.fingerprints import encoder_fingerprint, model_fingerprint, teacher_fingerprint
from tripletune.train.settings import PROMPT_FILES, AnyConfig, ReplySection, RunConfig
from tripletune.train.sources import (
    REJECTED_REPLIES,
    Examples,
    PlaceAndShare,
    Sources,
    has_split,
    is_unread_count,
    place_and_share,
    unread_warnings,
)

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tripletune.train.engine import EngineMixin
    from tripletune.train.rows.cache import Row
    from tripletune.train.rows.sampling import EpochSampler, RepeatedSteps
    from tripletune.train.tasks.grpo import LoopQuestions

logger = logging.getLogger(__name__)
# Settings of data sections whose sum bounds the tokens of a row.
_LIMITS = ("max_tokens", "max_input_tokens", "max_label_tokens", "max_source_tokens", "max_target_tokens")
# Functions that return a fingerprint of what a setting names; "" for models of the hub.
_FINGERPRINTS: dict[str, Callable[[str], str]] = {
    "model.base": model_fingerprint,
    "model.adapter": model_fingerprint,
    "model.encoder": encoder_fingerprint,
    "train.teacher": teacher_fingerprint,
    "train.teacher_tokenizer": model_fingerprint,
    **{f"data.{name}": file_digest for name in PROMPT_FILES},
}
# Number of replies that an evaluation shows.
_SHOWN_REPLIES = 20
_TOO_LONG = "lower data.max_…_tokens, or use a model with a longer context"


class TrainingTask:
    """Makes model, rows and collator of a run, and gives the engine scores, samplers and files.

    A subclass sets `Config` and implements `sources`, `load`, `rows` and `collator`; the other methods have defaults.
    The class itself is the task of a run with a given model and rows; see `train.engine.Engine`.

    Attributes:
        usage: Example options for `--help`.
        unit: Name of the rows in logs and results.
        words: Names of counts in output and results, where they differ from those of the rows; "" hides a count.
        published: Rows per optimiser step in the paper, shown beside the run's number.
        copies: Number of copies of a row in an optimiser step.
        together: Number of optimiser steps between which no checkpoint can lie.
        next_command: What the user runs next, with `{run}` for the run folder, and words in capitals for what the
            training does not know; "": unknown.
        loss_parts: Names of parts of the label tokens; an evaluation also shows the loss of each part.
        grouped: Number of rows grouped by length (default: a micro-batch on all processes).
        scored: Validation samples whose replies are scored.
        config: The settings, of the type `Config`.
        model: The model in training; with an adapter, PEFT's wrapper.
        processor: The model's tokenizer, or a Graph-LLM's processor; None for a run with a given model.
        samples: Prompt, expected reply and generated reply of the first scored samples in the last evaluation.
        train: Training rows, once made: a `datasets.Dataset` with a column `length` in tokens.
        validation: Validation rows, once made; None for a run without evaluations.
    """

    Config: ClassVar[type[RunConfig]] = RunConfig
    usage: ClassVar[str] = ""
    unit: str = "rows"
    words: ClassVar[Mapping[str, str]] = {}
    published: ClassVar[str] = ""
    copies: int = 1
    together: int = 1
    next_command: str = ""
    loss_parts: ClassVar[tuple[str, ...]] = ()
    grouped: int | None = None
    config: Any
    model: PreTrainedModel
    processor: Any = None
    train: Any = None
    validation: Any = None
    scored: Any = ()
    samples: Sequence[dict[str, str]] = ()

    def __init__(self, config: AnyConfig) -> None:
        self.config = config

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the processor, which itself is one except for a Graph-LLM."""
        return getattr(self.processor, "tokenizer", self.processor)

    def begin(self) -> None:
        """Load the model and make the rows, which is all that `--dry-run` needs; a trainer is made from both."""
        self.open_model()
        self.open_rows()

    def open_model(self) -> PreTrainedModel:
        """Load the model to train and its processor."""
        self.model, self.processor = self.load()
        return self.model

    def open_rows(self) -> tuple[Dataset, Dataset | None]:
        """Make the rows or open cached rows; all processes share the work (`core.concurrency.build_together`).

        The model must be open: its template, context and fingerprint decide the rows. The warnings come here, before
        the first step, because they need both model and rows.
        """
        self.train = self._rows_of_split("training", self.sources.train)
        self.validation = None
        if self.sources.validation is not None:
            self.validation = self._rows_of_split("validation", self.sources.validation)
        for warning in (*self._size_warnings(), *self._unread_warnings(), *self.warnings()):
            logger.warning("%s", warning)
        return self.train, self.validation

    def _rows_of_split(self, split: str, source: Any) -> Dataset:
        """The rows of training or validation data; an error says which setting has left all of them out."""
        from tripletune.train.rows.cache import NoRowsError

        try:
            return self.rows(source, self.cache)
        except NoRowsError as error:
            reason = self.reason_for_no_rows(error.counts)
            if not reason:
                raise
            raise ValueError(f"there are no rows to learn from in the {split} data: {reason}") from None

    def reason_for_no_rows(self, counts: Mapping[str, int]) -> str:
        """The setting that left out all rows, and what to do, from the counts of the rows; "" if none did."""
        return ""

    @property
    def learns_from_pairs(self) -> bool:
        """Whether rows are pairs of replies (`train.preference`), which have the columns `train.rows.cache.PAIR`."""
        return bool(getattr(self.config.train, "preference", None))

    def _unread_warnings(self) -> list[str]:
        """Warnings about columns and rejected replies of the data that are not read, each once."""
        from tripletune.train.rows.cache import rows_meta

        warnings: list[str] = []
        for rows in (self.train, self.validation):
            if rows is not None:
                warnings += unread_warnings(rows_meta(rows))
        rejected = rows_meta(self.train).get(REJECTED_REPLIES)
        if rejected and isinstance(self.config.train, ReplySection) and not self.learns_from_pairs:
            warnings.append(
                f"{rejected:,} rows have a rejected reply, which is not read: this run learns the chosen replies "
                "alone, as without pairs; train.preference dpo learns from the pairs"
            )
        return list(dict.fromkeys(warnings))

    def _size_warnings(self) -> Iterator[str]:
        """Yield warnings about the sizes of steps and rows; raise an error if the model lacks positions for a row.

        A model with learned positions has no vector for a later one. The settings' limits count too, because rows of
        another data set, or replies of an evaluation, may reach them.
        """
        from tripletune.train.resume import process_count

        per_step = self.rows_per_step(process_count())
        if per_step > len(self.train) * self.copies:
            unit = self._unit_of_rows
            yield f"an optimiser step takes {per_step} {unit}, but only {len(self.train)} exist: it takes them all"
        text_config = self.model.config.get_text_config()
        positions = getattr(text_config, "max_position_embeddings", None)
        # The length of an encoder-decoder's row is source plus target, each of which has positions of its own.
        if text_config.is_encoder_decoder or not positions:
            return
        longest = self._longest_row()
        # Rotary positions continue beyond the trained length, and are often scaled.
        has_rotary_positions = bool(getattr(text_config, "rope_parameters", None))
        if longest > positions and not has_rotary_positions:
            raise ValueError(f"a row has {longest} tokens, but model.base has {positions} positions: {_TOO_LONG}")
        limit = sum(value for name, value in vars(self.config.data).items() if name in _LIMITS)
        longest = max(limit, longest)
        if longest > positions:
            yield f"rows may have {longest} tokens, but model.base has {positions} positions: {_TOO_LONG}"

    def _longest_row(self) -> int:
        """Tokens of the longest row; 0 if no rows have lengths. The memory of a step is estimated from it."""
        from tripletune.train.rows.cache import longest_row

        longest = 0
        for rows in (self.train, self.validation):
            if rows is not None and "length" in rows.column_names:
                longest = max(longest, longest_row(rows))
        return longest

    @cached_property
    def cache(self) -> Path:
        """The folder of tokenised rows and embeddings."""
        return Path(self.config.data.cache or Path(self.config.output_dir) / "cache")

    @cached_property
    def sources(self) -> Sources:
        """Training and validation data; none for a run with given rows."""
        return Sources(None, None)

    @property
    def digest(self) -> dict[str, str]:
        """Fingerprints of what the result depends on.

        These are data, the code of a task from another package, and by setting the local models and files.
        """
        from tripletune.train.resume import CODE_SHA256, TRAIN_SHA256, VALIDATION_SHA256

        digests = {TRAIN_SHA256: _data_digest(self.sources.train, self.train)}
        digests[CODE_SHA256] = code_of_class(__name__, type(self))
        # Validation data matter if they choose the result.
        if self.config.train.best_metric:
            digests[VALIDATION_SHA256] = _data_digest(self.sources.validation, self.validation)
        settings = flatten(asdict(self.config), ".")
        for name, fingerprint in _FINGERPRINTS.items():
            if settings.get(name):
                digests[name] = fingerprint(settings[name])
        # Models of the hub have no fingerprint: their name and revision are settings.
        return {name: digest for name, digest in digests.items() if digest}

    def load(self) -> tuple[PreTrainedModel, Any]:
        """Return the model to train and its tokenizer or processor."""
        raise NotImplementedError

    def rows(self, source: Any, cache: Path) -> Dataset:
        """Tokenise a source once into the cache and return its rows; see `train.rows.cache.cached_rows`."""
        raise NotImplementedError

    def collator(self) -> Callable[[list[Row]], dict[str, Any]]:
        """Return a function that makes a batch of rows: the model's inputs, `labels` (-100 where nothing is learned)
        and, if the task has `loss_parts`, `label_parts` (B, T), the index of each label token's part.
        """
        raise NotImplementedError

    def score(self, model: PreTrainedModel) -> dict[str, float]:
        """Return the scores of an evaluation, without the loss; all processes must call it and share the work.

        The first replies stay in `samples`, from which `train.tracking.Reports` writes `samples.jsonl`.
        """
        from tripletune.eval.statistics import flatten_means

        if not self.scored:
            return {}
        if isinstance(self.config.train, ReplySection):
            limit = self.config.train.eval_max_new_tokens
            logger.info("writing %d replies to evaluate, up to %d tokens each", len(self.scored), limit)
        replies = self.generate_replies(model)
        self.samples = []
        for sample, reply in zip(self.scored[:_SHOWN_REPLIES], replies[:_SHOWN_REPLIES], strict=True):
            prompt, expected = self.prompt_and_expected(sample)
            self.samples.append({"prompt": str(self.tokenizer.decode(prompt)), "expected": expected, "reply": reply})
        return flatten_means(self.metrics(replies))

    def prompt_and_expected(self, sample: Any) -> tuple[list[int], str]:
        """Return prompt tokens and expected reply of a sample of `scored`."""
        raise NotImplementedError

    def generate_replies(self, model: PreTrainedModel) -> list[str]:
        """Generate a model's replies to `scored`, in its order; all processes call it and get all replies."""
        raise NotImplementedError

    def metrics(self, replies: list[str]) -> dict[str, Any]:
        """Return the metrics of replies, nested, with their means."""
        raise NotImplementedError

    def metric_names(self) -> list[str]:
        """Names of an evaluation's losses and scores.

        Known before training by scoring empty replies, so that a mistyped `train.best_metric` is reported at once.
        """
        names = ["loss", *(f"loss_{part}" for part in self.loss_parts)]
        if self.scored:
            metrics = flatten(self.metrics([""] * len(self.scored)), "/")
            names += [name for name, value in metrics.items() if isinstance(value, dict) and "mean" in value]
        return names

    def save(self, folder: Path) -> None:
        """Write the files that a checkpoint needs besides its weights; called only on the main process.

        A run with a given model has no processor: its caller knows how to read it.
        """
        if self.processor is not None:
            self.processor.save_pretrained(folder)

    def sampler(self, rows: Dataset, per_step: int) -> EpochSampler | RepeatedSteps:
        """Return a sampler of the rows; `per_step` is the number of rows per optimiser step.

        Rows are grouped by micro-batch and not by step, since only the rows of a micro-batch are padded to one length.
        """
        from tripletune.train.resume import process_count
        from tripletune.train.rows.sampling import EpochSampler

        seed = self.config.seed
        if "length" not in rows.column_names:  # for example packs, which all have about one length
            return EpochSampler([1] * len(rows), per_step, seed, group_by_length=False)
        lengths = rows.with_format("numpy")["length"][:]
        # The engine sets `grouped` before the sampler is made; see `train.resume.grouped_rows`.
        grouped = self.grouped or self.config.train.batch_size * process_count()
        return EpochSampler(lengths, min(grouped, per_step), seed, self.config.train.group_by_length)

    def trainer(self) -> EngineMixin | None:
        """Return a TRL trainer with `train.engine.EngineMixin`, or None for `train.engine.Engine`."""
        return None

    def prepare(self) -> None:
        """Train on the model's device before the first step; a resumed run does not call this."""

    def facts(self) -> dict[str, Any]:
        """More facts for `training.json`, by name."""
        return {}

    def warnings(self) -> list[str]:
        """Warnings about the rows, which `open_rows` logs before training."""
        return []

    # What logs and a dry run show

    def counts(self) -> list[str]:
        """Return lines with the counts of rows, and of cut and dropped data: nothing is dropped silently."""
        from tripletune.train.rows.cache import rows_meta

        lines = []
        for split, rows in (("train", self.train), ("validation", self.validation)):
            if rows is None:
                lines.append(f"{split}: none")
                continue
            # Columns that are not read have a warning of their own.
            counts = {name: count for name, count in rows_meta(rows).items() if not is_unread_count(name)}
            named = {self.count_name(name): count for name, count in counts.items()}
            counted = [f"{name} {count:,}" for name, count in named.items() if name]
            line = f"{split}: {', '.join(counted)}"
            if _are_packs(rows):
                line += f", in {len(rows):,} packs"
            lines.append(line)
        return lines

    def count_name(self, name: str) -> str:
        """The name of a count in the output; "" hides it. Names with capitals, such as "planning [SUBQ]", stay."""
        if name in self.words:
            return self.words[name]
        if name == REJECTED_REPLIES and not self.learns_from_pairs:
            return "rejected replies (not read)"
        return name.replace("_", " ") if name.islower() else name

    def rows_per_step(self, processes: int) -> int:
        """Rows per optimiser step on all devices together."""
        train = self.config.train
        return int(train.batch_size * train.micro_batches(processes) * processes)

    def step_size(self, processes: int) -> str:
        """Describe the rows per optimiser step of so many processes: number, factors, and the paper's number."""
        train = self.config.train
        micro_batches = train.micro_batches(processes)
        factors = f"batch_size {train.batch_size} x {micro_batches} micro-batch(es) x {processes} process(es)"
        text = f"{self.rows_per_step(processes)} {self._unit_of_rows} per optimiser step ({factors})"
        if self.published:
            text += f"; {self.published}"
        is_grouped = train.group_by_length and "length" in self.train.column_names
        # With several micro-batches, a step combines groups of different lengths.
        if is_grouped and micro_batches == 1 and train.batch_size * processes > 1:
            text += "; all of similar length (train.group_by_length)"
        return text

    @property
    def _unit_of_rows(self) -> str:
        """What the training rows are called: a pack is a row that holds several of the task's `unit`."""
        return "packs" if _are_packs(self.train) else self.unit

    def steps_per_epoch(self, per_step: int) -> int:
        """Return the optimiser steps per epoch, given the rows of a step on all devices; the last may be smaller."""
        return math.ceil(len(self.train) / per_step)

    def notes(self) -> list[str]:
        """More lines about the steps, for the log and the dry run."""
        return []

    def example(self) -> tuple[list[int], list[int]]:
        """Tokens and labels of the first row."""
        row = self.train[0]
        return list(row["input_ids"]), list(row["labels"])

    def examples(self) -> dict[str, tuple[list[int], list[int]]]:
        """Tokens and labels that a dry run shows, by heading: the first row, or both replies of the first pair."""
        if not self.learns_from_pairs:
            # Packing sorts rows by length, so a pack seldom begins with the data's first row.
            heading = "first row of the first pack" if _are_packs(self.train) else "first row"
            return {heading: self.example()}
        row = self.train[0]
        return {
            "first pair, chosen reply": self.example(),
            "first pair, rejected reply (the chosen one becomes likelier than it)": (
                list(row["rejected_input_ids"]),
                list(row["rejected_labels"]),
            ),
        }

    # What several tasks need

    def source_pair(self, read: Callable[..., Any], **options: Any) -> Sources:
        """Return training and validation data; with `data.validation_share`, both are taken from the training data.

        Without validation shards, the second is None. Training examples that have a key of a validation example
        (`Examples.keys_of`) are left out: a model that has seen a question is not measured by it.

        Args:
            read: See `Examples.read`.
            options: More attributes of both `Examples`.
        """
        data = self.config.data
        train_places = [place_and_share(place) for place in data.train]
        train = Examples(read, tuple(train_places), data.train_split, data.max_train_records, **options)
        if data.validation_share:
            return train.divided(data, self.config.seed)
        places = [place_and_share(place) for place in data.validation]
        if not places:
            # Whole, so that runs with other shares are evaluated on the same examples.
            found = [path for path, _ in train_places if has_split(path, data.validation_split)]
            places = [PlaceAndShare(path, 1.0) for path in found]
        if not places:
            return Sources(train, None)
        limit = data.max_validation_records
        validation = Examples(read, tuple(places), data.validation_split, limit, **options)
        # `keys` are of all validation examples, not only of those that are evaluated.
        return Sources(replace(train, held_out=validation.keys()), validation)


def _data_digest(source: Examples | LoopQuestions | None, rows: Dataset | None) -> str:
    """Fingerprint of a source, or else of given rows; "" if there are neither. Resuming compares it."""
    from tripletune.train.rows.cache import rows_digest

    if source is not None:
        return source.digest
    return "" if rows is None else rows_digest(rows)


def _are_packs(rows: Dataset) -> bool:
    """Whether a row holds several samples; see `train.rows.cache.pack_rows`."""
    return "seq_lengths" in rows.column_names


def shared_by_processes(
    model: PreTrainedModel, items: Sequence[Any], work: Callable[[Sequence[Any]], list[str]]
) -> list[str]:
    """Do work on items, a share on each process; return all results, in the order of the items, on every process.

    Processes with a sharded model must call the model together, and shares of other lengths would need other numbers of
    calls, so each process does all the work.
    """
    from accelerate import PartialState
    from accelerate.utils import gather_object

    from tripletune.models.local.fitting import is_sharded

    if is_sharded(model):
        return work(items)
    with PartialState().split_between_processes(list(items)) as mine:
        done = gather_object(work(mine))
    return list(done[: len(items)])  # some versions of accelerate repeat the last one for processes without any
