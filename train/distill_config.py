"""Configuration of CIRAG's trajectory distillation (sections 3.5 and B.4).

Defaults are the paper's: LoRA of rank 64, 2 epochs, batch 2, learning rate 2e-4, loss on the teacher's decisions alone.
The paper does not say LoRA's alpha, dropout and layers, the schedule, or the length of a sequence: those are ours.
Nothing heavy is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from tripletune.train.config import one_of, setting
from tripletune.train.text_config import TextModelSection, TextRunConfig, TextTrainSection, above_zero, missing_files

Method = Literal["sft", "on_policy"]
ROUNDS, LEARN = ("together", "separate"), ("decisions", "everything")
# The longest reply of the loop (`rag.cirag_options.CiragOptions.max_integration_tokens`).
REPLY_ROOM = 1024


@dataclass
class StudentSection(TextModelSection):
    """The student."""

    base: str = setting("Qwen/Qwen2.5-7B-Instruct", "language model: hub id, folder or pypi:package")
    lora_rank: int = setting(64, "LoRA rank r")
    lora_alpha: int = setting(128, "LoRA alpha (the paper does not say)")


@dataclass
class TrajectoryDataSection:
    """Trajectories and how they become tokens."""

    train: list[str] = setting(
        ["data/trajectories"], "folders or files of trajectories, one a teacher; FOLDER=0.5 takes half of its questions"
    )
    validation: list[str] = setting([], "folders or files of validation trajectories; the train folders unless set")
    train_split: str = setting("train", "shards to train on, where a folder is given")
    validation_split: str = setting("validation", "shards to evaluate on, where a folder is given")
    rounds: str = setting("together", "together: a trajectory is one sequence; separate: a sequence for each round")
    learn: str = setting("decisions", "decisions of the teacher; everything: what was retrieved after the first too")
    max_tokens: int = setting(8192, "longest sequence; a round that does not fit even shortened is left out")
    max_prompt_tokens: int | None = setting(
        None, "longest prompt, as --set max_prompt_tokens of the loop; max_tokens less 1,024 unless set"
    )
    chat_template: str | None = setting(None, "Jinja file in the place of the student's chat template; saved with it")
    max_train_records: int | None = setting(None, "train on the first so many trajectories of each folder")
    max_validation_records: int | None = setting(None, "evaluate on the first so many trajectories of each folder")

    @property
    def prompt_limit(self) -> int:
        """Most tokens of a prompt."""
        return self.max_prompt_tokens or max(1, self.max_tokens - REPLY_ROOM)

    def check(self) -> list[str]:
        """Problems that can be seen without loading anything."""
        problems: list[str] = []
        one_of(problems, "data.rounds", self.rounds, ROUNDS)
        one_of(problems, "data.learn", self.learn, LEARN)
        if not self.train:
            problems.append("data.train: name at least one folder of trajectories")
        for name in ("train", "validation"):
            for place in getattr(self, name):
                try:
                    folder_and_share(place)
                except ValueError as error:
                    problems.append(f"data.{name}: {error}")
        if self.max_tokens < 64:
            problems.append(f"data.max_tokens: {self.max_tokens} must be at least 64")
        if self.max_prompt_tokens is None and 64 <= self.max_tokens < 2 * REPLY_ROOM:
            problems.append(
                f"data.max_prompt_tokens is not set, and data.max_tokens {self.max_tokens} leaves prompts only "
                f"{self.prompt_limit} beside a reply of {REPLY_ROOM}, so that what was retrieved would be left out: "
                "set it, or raise data.max_tokens"
            )
        if self.max_prompt_tokens is not None and not 0 < self.max_prompt_tokens < self.max_tokens:
            problems.append(
                f"data.max_prompt_tokens: {self.max_prompt_tokens} must be above 0 and below data.max_tokens "
                f"({self.max_tokens}), so that a reply has room"
            )
        counts = {
            "data.max_train_records": self.max_train_records,
            "data.max_validation_records": self.max_validation_records,
        }
        problems += above_zero({name: value for name, value in counts.items() if value is not None})
        return problems + missing_files({"data.chat_template": self.chat_template})


@dataclass
class DistillTrainSection(TextTrainSection):
    """Optimisation."""

    epochs: float = setting(2.0, "passes over the data")
    batch_size: int = setting(2, "rows a device and micro-batch; with packing, packs")
    learning_rate: float = setting(2e-4, "peak learning rate")
    eval_max_new_tokens: int = setting(512, "longest reply while evaluating")
    method: str = setting("sft", "sft: the teacher's decisions; on_policy: the student's own, judged by the teacher")
    teacher: str | None = setting(None, "on_policy: the teacher on this machine, of the student's vocabulary")
    teacher_revision: str | None = setting(None, "on_policy: hub revision of the teacher")
    divergence: float = setting(1.0, "on_policy: 0 forward KL, 1 reverse KL, between them generalised Jensen-Shannon")
    temperature: float = setting(1.0, "on_policy: of the student's replies and of both distributions")
    max_reply_tokens: int = setting(512, "on_policy: longest reply of the student")

    def check(self) -> list[str]:
        """Problems that can be seen without loading anything."""
        problems = super().check()
        one_of(problems, "train.method", self.method, get_args(Method))
        problems += above_zero({"train.temperature": self.temperature, "train.max_reply_tokens": self.max_reply_tokens})
        if not 0 <= self.divergence <= 1:
            problems.append(f"train.divergence: {self.divergence} must be from 0 to 1")
        if self.method == "on_policy":
            if not self.teacher:
                problems.append("train.method is on_policy: name the teacher as train.teacher")
            if self.packing:
                problems.append("train.packing: on_policy has nothing to pack: replies are written at every step")
        elif self.teacher:
            problems.append("train.teacher is for train.method on_policy; with sft the trajectories are the teacher's")
        return problems


@dataclass
class DistillConfig(TextRunConfig):
    """A whole run."""

    output_dir: str = setting("runs/student", "folder of checkpoints, logs and the result")
    model: StudentSection = field(default_factory=StudentSection)
    data: TrajectoryDataSection = field(default_factory=TrajectoryDataSection)
    train: DistillTrainSection = field(default_factory=DistillTrainSection)

    def check(self) -> list[str]:
        """Problems that can be seen without loading anything."""
        problems = super().check() + self.data.check()
        if self.train.method == "on_policy" and self.data.rounds == "separate":
            problems.append("data.rounds: on_policy asks for every round by itself anyway; leave it out")
        if self.train.method == "on_policy" and self.data.learn == "everything":
            problems.append("data.learn: on_policy learns from the student's replies alone; leave it out")
        return problems


def folder_and_share(place: str) -> tuple[str, float]:
    """Read an item of `data.train`: a folder, or FOLDER=SHARE.

    Raises:
        ValueError: the share is not above 0 and at most 1.
    """
    folder, equals, number = place.rpartition("=")
    if not equals:
        return place, 1.0
    try:
        share = float(number)
    except ValueError:
        return place, 1.0  # a path with an equals sign in it
    if not 0 < share <= 1:
        raise ValueError(f"{place!r}: the share must be above 0 and at most 1")
    return folder, share
