"""On-policy distillation of CIRAG's integrator, from a teacher on this machine (an option beyond the paper).

The student writes its own decision after each prompt of the trajectories, and learns the teacher's probability of each
token (generalised Jensen-Shannon divergence; Agarwal et al., 2024) with TRL's `DistillationTrainer`. Only the prompts
of the trajectories are used. Each step generates replies, so it is many times slower than learning from given replies.
"""

# Tested in tests/train/tasks/test_student_task.py.

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, cast

from tripletune.core.options import setting
from tripletune.models.run_folders import Method
from tripletune.train.settings import RunConfig
from tripletune.train.tasks.cirag_distill import StudentConfig, StudentTask, StudentTrainSection
from tripletune.train.text import TextTask

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tripletune.train.engine import EngineMixin
    from tripletune.train.rows.sampling import EpochSampler, RepeatedSteps
    from tripletune.train.tasks.grpo import GrpoConfig


@dataclass
class OnPolicyTrainSection(StudentTrainSection):
    """Optimisation."""

    teacher: str = setting("", "local teacher (owner/name[@revision] or folder) with the student's vocabulary")
    divergence: float = setting(
        1.0, "divergence: 0 forward KL, 1 reverse KL; in between, generalised Jensen-Shannon", at_least=0, at_most=1
    )
    temperature: float = setting(1.0, "temperature of the student's replies and of both distributions", above=0)
    max_reply_tokens: int = setting(512, "maximum tokens of the student's reply", above=0)

    def check(self) -> list[str]:
        """Problems of any training of a student, and a missing teacher, whose probabilities are what is learned."""
        problems = super().check()
        if not self.teacher:
            problems.append("train.teacher: name the teacher")
        return problems


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


class OnPolicyTask(PromptTask, StudentTask):
    """Trains a student on its own replies."""

    Config: ClassVar[type[RunConfig]] = OnPolicyConfig
    usage = "--config smollm2_135m_cirag_cpu --train.teacher FOLDER"
    method: ClassVar[Method] = "on_policy"
    config: OnPolicyConfig
    teacher: PreTrainedModel

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load the student, and the teacher, which must have the student's vocabulary."""
        model, tokenizer = super().load()
        self.teacher = load_teacher(self.config, model, tokenizer)
        return model, tokenizer

    def trainer(self) -> EngineMixin:
        """TRL's trainer, which samples the student's replies."""
        from tripletune.train.trl_trainers import OnPolicyTrainer

        return OnPolicyTrainer(self)


TASK = OnPolicyTask


def load_teacher(
    config: OnPolicyConfig | GrpoConfig, student: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """Return the frozen teacher; make sure that it has the student's vocabulary.

    The vocabularies are compared before the teacher is loaded, which may be many times larger than the student.
    """
    from tripletune.models.loading import load_language_model, load_tokenizer

    spec = str(config.train.teacher)
    theirs = load_tokenizer(spec).get_vocab()
    ours = tokenizer.get_vocab()
    if theirs != ours:
        different = sum(ours.get(token) != token_id for token, token_id in theirs.items())
        raise ValueError(
            f"train.teacher {spec} and model.base {config.model.base} do not share a vocabulary ({len(theirs)} and "
            f"{len(ours)} tokens, {different} of the teacher's with other ids in the student's), but the loss compares "
            "token by token: use a teacher of the student's family, or train cirag_distill on its trajectories"
        )
    teacher = load_language_model(spec, merge=False)
    # An output layer can be wider than its vocabulary.
    width = student.config.get_text_config().vocab_size
    teacher_width = teacher.config.get_text_config().vocab_size
    if width != teacher_width:
        raise ValueError(
            f"the student has {width} logits and the teacher has {teacher_width}: they share a vocabulary, but their "
            f"output layers are padded differently; use a teacher with {width} logits"
        )
    return teacher.requires_grad_(False)
