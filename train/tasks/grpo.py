"""Reinforcement learning of a student inside its loop (an option beyond the papers), on TRL's `GRPOTrainer`.

The trained student is CIRAG's integrator in `tripletune eval run`. The loop answers each question several times, and
the student's replies in runs with a larger reward become more likely (GRPO; Shao et al., 2024). `train.kl` keeps the
student near a teacher or the initial student; with `train.kl_on failed`, only in runs with a wrong answer (DGPO).
"""

# Tested in tests/train/test_grpo.py.

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tripletune.core.data.records import IGNORED
from tripletune.core.options import other_default, setting
from tripletune.train.settings import DataSection, RunConfig, TrainSection
from tripletune.train.sources import Sources
from tripletune.train.tasks.chat import student_files
from tripletune.train.tasks.cirag_distill import StudentSection
from tripletune.train.tasks.cirag_on_policy import PromptTask

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tripletune.eval.suites.questions import QuestionSuite
    from tripletune.train.engine import EngineMixin
    from tripletune.train.rows.cache import Row

# Options of the loop that the student and the run folder decide.
_OWN_LOOP_OPTIONS = ("system", "integrator", "model", "planner_model", "output")
# The fields of a question that a run of the loop needs; the passages are in the corpus.
_FIELDS = ("id", "question", "answers", "type", "source", "search", "short_answers")
_COLUMNS = {"prompt": "string", "input_ids": "[int32]", "labels": "[int32]", "length": "int32"}


@dataclass
class LoopSection:
    """The loop to run."""

    loop: dict[str, Any] = setting(
        {},
        "options of `tripletune eval run` and CIRAG by name, except system, integrator, model and output; `teacher` "
        "holds the chat model's options",
    )
    max_tokens: int = setting(2048, "maximum tokens of a run; later tokens are not learned", at_least=64)
    cache: str | None = other_default(DataSection, "cache", None)

    def check(self) -> list[str]:
        """Options of the loop that the student decides, or that an evaluation would refuse.

        They are read here as `tripletune eval run` would read them, before the model is loaded.
        """
        from tripletune.eval.systems import read_options

        needless = [name for name in _OWN_LOOP_OPTIONS if name in self.loop]
        if needless:
            return [f"data.loop: leave out {', '.join(needless)}: CIRAG's integrator is the student"]
        try:
            read_options(self.loop | {"system": "cirag", "output": "."})
        except ValueError as error:
            return [f"data.loop: {error}"]
        return []


@dataclass
class GrpoTrainSection(TrainSection):
    """Optimisation; a row is a run of the loop."""

    epochs: float = other_default(TrainSection, "epochs", 1.0)
    learning_rate: float = other_default(TrainSection, "learning_rate", 1e-5)
    logging_steps: int = other_default(TrainSection, "logging_steps", 1)
    save_steps: int = other_default(TrainSection, "save_steps", 20)
    runs: int = setting(8, "runs per question, compared with each other", at_least=2)
    rollout_steps: int = setting(
        1, "optimiser steps per batch of runs; more is faster, but learns from an older student's runs", at_least=1
    )
    temperature: float = setting(1.0, "temperature of the student's replies", above=0)
    answer_reward: float = setting(1.0, "weight of the answer's token F1")
    recall_reward: float = setting(0.2, "weight of the share of supporting passages with core triples")
    format_reward: float = setting(0.1, "weight of the share of faultless replies")
    search_cost: float = setting(0.02, "cost of a search", at_least=0)
    kl: float = setting(0.04, "weight of the KL divergence from the teacher; 0.04 in GRPO's paper", at_least=0)
    kl_on: str = setting("all", "KL divergence in all or in failed runs (DGPO)", choices=("all", "failed"), needs="kl")
    teacher: str = setting("", "local model with the student's vocabulary (default: the initial student)", needs="kl")

    def check(self) -> list[str]:
        """Problems of any run, and of two kinds of settings that do not fit rollouts.

        A checkpoint inside of a rollout would lose its runs, which a resumed run cannot make again, because the student
        has changed since. Nothing is evaluated, because only the loop can score a student, and `tripletune eval run`
        does that with intervals.
        """
        problems = super().check()
        if self.save_steps % self.rollout_steps:
            problems.append(
                f"train.save_steps {self.save_steps} must be a multiple of train.rollout_steps {self.rollout_steps}"
            )
        for item in fields(self):
            if item.name.startswith("eval_") and getattr(self, item.name) != item.default:
                problems.append(f"train.{item.name}: train grpo does not evaluate: run tripletune eval run")
        return problems

    def micro_batches(self, processes: int) -> int:
        """Micro-batches of an optimiser step; a rollout must hold all runs of each question, which are compared."""
        count = super().micro_batches(processes)
        rollout = self.batch_size * count * processes * self.rollout_steps
        if rollout % self.runs:
            raise ValueError(
                f"{rollout} runs are made together (train.batch_size x micro-batches x processes x "
                "train.rollout_steps): "
                f"this must be a multiple of train.runs {self.runs}, so change one of these numbers"
            )
        return count


@dataclass
class GrpoConfig(RunConfig):
    """A whole run."""

    output_dir: str = other_default(RunConfig, "output_dir", "runs/grpo")
    model: StudentSection = field(default_factory=StudentSection)
    data: LoopSection = field(default_factory=LoopSection)  # type: ignore[assignment]
    train: GrpoTrainSection = field(default_factory=GrpoTrainSection)


@dataclass(frozen=True)
class LoopQuestions:
    """The questions of a run, in the place of `train.sources.Examples`.

    Attributes:
        paths: The files of questions.
        digest: Fingerprint of all settings of a run except the student, with the content of its files.
    """

    paths: list[str]
    digest: str

    def check(self) -> None:
        """Check nothing: the suite, whose settings `digest` was made of, has checked the questions."""


class GrpoTask(PromptTask):
    """Trains a student on its own runs of the loop."""

    Config: ClassVar[type[RunConfig]] = GrpoConfig
    usage = "--config smollm2_135m_grpo_cpu --model.base MODEL"
    unit: str = "questions"
    config: GrpoConfig
    teacher: PreTrainedModel | None = None

    def __init__(self, config: GrpoConfig) -> None:
        super().__init__(config)
        self.copies = config.train.runs
        self.together = config.train.rollout_steps

    @cached_property
    def suite(self) -> QuestionSuite:
        """The evaluation that runs the loop and scores its answers.

        It is the one of `tripletune eval run`, so a reward means what an evaluation reports. A batch of replies could
        take a day, so a teacher that answers in batches does not fit.
        """
        from tripletune.eval.suites.questions import suites_of
        from tripletune.eval.systems import read_options

        own = {"system": "cirag", "output": f"{self.config.output_dir}/loop"}
        # One suite per eval task; the rewards of a run are those of one task.
        suite, *others = suites_of(*read_options(self.config.data.loop | own))
        missing = []
        if others:
            missing.append("only one task")
        if not suite.options.corpus:
            missing.append("a corpus")
        if "f1" not in suite.metrics:
            missing.append("a task with the score f1")
        if suite.teacher is None or suite.teacher.backend == "batch":
            missing.append("a teacher with a backend other than batch")
        if missing:
            raise ValueError(f"data.loop needs {'; '.join(missing)}")
        return suite

    @cached_property
    def sources(self) -> Sources:
        """The loop's questions; their digest covers the loop's settings too, which decide the rewards."""
        settings = json.dumps(self.suite.settings(), sort_keys=True, default=str)
        digest = hashlib.sha256(settings.encode()).hexdigest()
        return Sources(LoopQuestions([str(self.suite.options.data)], digest), None)

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load the student and, where TRL would not, the model from which it must not diverge.

        For a student with an adapter, TRL takes the initial adapter itself.
        """
        from tripletune.train.resume import sharding

        kind = sharding()
        if kind in ("ZeRO-3", "FSDP2"):
            raise ValueError(f"{kind}: the loop needs the whole model on each device: use ddp.yaml or zero2.yaml")
        model, tokenizer = super().load()
        if self.config.train.teacher:
            self.teacher = load_teacher(self.config, model, tokenizer)
        elif self.config.model.tune == "all" and self.config.train.kl:
            # TRL would load the base if `model.base` is an adapter folder.
            initial_student, _ = super().load()
            self.teacher = initial_student.requires_grad_(False)
        return model, tokenizer

    def rows(self, source: LoopQuestions, cache: Path) -> Dataset:
        """Make one row per question, with the question as JSON and the maximum tokens of a run as length.

        A rollout turns it into rows of tokens; these columns are what samplers, counts and the dry run read. The
        question's own tokens are there for the dry run to show.
        """
        from tripletune.train.rows.cache import cached_rows

        length = self.config.data.max_tokens

        def make(counts: Counter[str]) -> Iterator[Row]:
            """Yield the rows; nothing is cut or dropped, so nothing is counted."""
            for question in self.suite.items():
                stored = {name: getattr(question, name) for name in _FIELDS} | {"passages": (), "supporting": ()}
                ids = self.processor(question.question)["input_ids"]
                yield {"prompt": json.dumps(stored), "input_ids": ids, "labels": [IGNORED] * len(ids), "length": length}

        return cached_rows(["questions", source.digest, length, self._initial_student], cache, [make], _COLUMNS)

    def trainer(self) -> EngineMixin:
        """TRL's trainer, whose rollouts are runs of the loop."""
        from tripletune.train.trl_trainers.grpo import GrpoTrainer

        return GrpoTrainer(self)

    def step_size(self, processes: int) -> str:
        """Describe the rows per optimiser step, which are runs here, not questions."""
        return super().step_size(processes).replace(self.unit, f"runs, {self.copies} per question,", 1)

    def warnings(self) -> list[str]:
        """Warn if the student was trained before with another prompt than the loop's."""
        from tripletune.rag.systems.cirag.student import warning_of_other_prompt

        warning = warning_of_other_prompt(self._initial_student, self.suite.loop.prompts)
        return [warning] if warning else []

    @cached_property
    def files(self) -> dict[str, str]:
        """The student's facts and prompt, as for a student of `cirag_distill`, so that the loop runs it likewise."""
        from tripletune.llm.question_client import load_prompts
        from tripletune.rag.systems.cirag import PROMPT_NAMES
        from tripletune.rag.systems.cirag.integration import INTEGRATE_ROLE, INTEGRATION_PROMPT

        loop = self.suite.loop
        prompt = load_prompts(PROMPT_NAMES, loop.prompts).texts[INTEGRATION_PROMPT].strip()
        return student_files(self.config.model, [INTEGRATE_ROLE], "grpo", loop.max_prompt_tokens, prompt)

    @property
    def _initial_student(self) -> str:
        """The model that the student starts from."""
        return str(self.config.model.adapter or self.config.model.base)


TASK = GrpoTask


def load_teacher(config: GrpoConfig, student: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
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
