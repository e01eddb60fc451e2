"""Distil a teacher into a small student for CIRAG's integrator (sections 3.5 and B.4) or for other calls of a system.

This is the training on chats (`train.tasks.chat`) with CIRAG's settings and checks: prompts are shortened as the loop
shortens them, and the integrator's decisions are scored.

Defaults are the paper's: LoRA of rank 64, 2 epochs, batch 2, learning rate 2e-4, loss only on the teacher's decisions.
The paper does not give LoRA's alpha, dropout and layers, the schedule, or the length of a sequence; these are ours.

Questions that have a validation trajectory, of any teacher, are left out of training.
"""

# Tested in tests/train/tasks/test_student_task.py.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, cast

from tripletune.core.data.pairs import Trajectory
from tripletune.core.options import other_default, rare, setting
from tripletune.train.rows.trajectories import ChatCount
from tripletune.train.settings import DataSection, HindsightSection, ModelSection, RunConfig, TrainSection
from tripletune.train.tasks._hindsight import HindsightTask
from tripletune.train.tasks.chat import ChatSection, ChatTask, ChatTrainSection
from tripletune.train.text import TextTask, choose_examples, generate_replies

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tripletune.eval.suites.decisions import DecisionCase
    from tripletune.train.evaluation import Batch
    from tripletune.train.rows.cache import Row
    from tripletune.train.rows.hindsight import HindsightTextCollator, TaughtQuery
    from tripletune.train.rows.hindsight_prompts import TrajectoryHindsight

# The longest reply of the loop (`rag.systems.cirag.CiragOptions.max_integration_tokens`).
REPLY_ROOM = 1024
# The longest query that the student samples while it trains; queries are short, and a cut one is no worse a sample.
_QUERY_ROOM = 64


@dataclass
class StudentSection(ModelSection):
    """The student."""

    base: str = other_default(ModelSection, "base", "Qwen/Qwen2.5-7B-Instruct")
    lora_rank: int = other_default(ModelSection, "lora_rank", 64)
    lora_alpha: int = other_default(ModelSection, "lora_alpha", 128)


@dataclass
class TrajectorySection(ChatSection):
    """Trajectories and how they become tokens."""

    train: list[str] = other_default(DataSection, "train", ["data/trajectories"])
    learn: str = setting(
        "decisions",
        "learn only the teacher's decisions, or everything: system prompt, question and retrieved candidates, too",
        choices=("decisions", "everything"),
    )
    max_tokens: int = setting(
        8192, "maximum tokens of a sequence; a round that is too long even after shortening is left out", at_least=64
    )
    max_prompt_tokens: int | None = setting(
        None, "maximum tokens of a prompt; give the loop the same max_prompt_tokens (default: max_tokens - 1,024)"
    )

    hindsight_prompt: str | None = rare(
        None, "file that replaces the question in the teacher's prompt, with train.hindsight_weight"
    )

    @property
    def prompt_limit(self) -> int:
        """Maximum tokens of a prompt."""
        return self.max_prompt_tokens or max(1, self.max_tokens - REPLY_ROOM)

    def check(self) -> list[str]:
        """Problems of places and limits; prompts and replies must both fit into a sequence, all named at once."""
        problems = []
        # An explicit limit, or a max_tokens that is refused anyway, needs no second complaint.
        if self.max_prompt_tokens is None and 64 <= self.max_tokens < 2 * REPLY_ROOM:
            problems.append(
                f"data.max_prompt_tokens is not set, and data.max_tokens {self.max_tokens} leaves prompts only "
                f"{self.prompt_limit} tokens beside a reply of {REPLY_ROOM}, too few for retrieved triples: set "
                "data.max_prompt_tokens, or raise data.max_tokens"
            )
        if self.max_prompt_tokens is not None and not 0 < self.max_prompt_tokens < self.max_tokens:
            problems.append(
                f"data.max_prompt_tokens: {self.max_prompt_tokens} must be above 0 and below data.max_tokens "
                f"({self.max_tokens}), so that a reply has room"
            )
        return problems + super().check()


@dataclass
class StudentTrainSection(HindsightSection, ChatTrainSection):
    """Optimisation."""

    epochs: float = other_default(TrainSection, "epochs", 2.0)
    batch_size: int = other_default(TrainSection, "batch_size", 2)
    eval_max_new_tokens: int = other_default(TrainSection, "eval_max_new_tokens", 512)


@dataclass
class StudentConfig(RunConfig):
    """A whole run."""

    output_dir: str = other_default(RunConfig, "output_dir", "runs/student")
    model: StudentSection = field(default_factory=StudentSection)
    data: TrajectorySection = field(default_factory=TrajectorySection)
    train: StudentTrainSection = field(default_factory=StudentTrainSection)


class StudentTask(HindsightTask, ChatTask):
    """Trains a student on its teachers' decisions."""

    Config: ClassVar[type[RunConfig]] = StudentConfig
    usage = "--config smollm2_135m_cirag_cpu --model.base MODEL --data.train runs/trajectories"
    unit: str = "rows"
    published: ClassVar[str] = "the paper: a batch of 2 on 4 GPUs (it does not say whether per device)"
    row_name: ClassVar[str] = "trajectory"
    words: ClassVar[Mapping[str, str]] = {}

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load the student; with hindsight, it must compute a loss with weights."""
        self.refuse_sharding()
        model, tokenizer = super().load()
        if self.hindsight is not None and not self.weighs_labels:
            raise ValueError(
                f"train.hindsight_weight: {self.config.model.base} computes a loss of its own (an encoder-decoder, a "
                "mixture of experts, or logits scaled in an unknown way), in which tokens have no weights: take "
                "another model.base, or leave train.hindsight_weight out"
            )
        return model, tokenizer

    def hindsight_kind(self) -> type[TrajectoryHindsight]:
        """Hindsight of trajectories."""
        from tripletune.train.rows.hindsight_prompts import TrajectoryHindsight

        return TrajectoryHindsight

    def hindsight_of_chats(self) -> TrajectoryHindsight | None:
        """The prompt of the teacher, or None without self-distillation."""
        return cast("TrajectoryHindsight | None", self.hindsight)

    def hindsight_collator(self) -> HindsightTextCollator:
        """The collator of rows with a teacher."""
        from tripletune.train.rows.hindsight import HindsightTextCollator

        return HindsightTextCollator(self.processor.pad_token_id, hindsight_weight=self.config.train.hindsight_weight)

    def collator(self) -> Callable[[list[Row]], Batch]:
        """Pad rows, with what the teacher reads if there is one."""
        return super().collator() if self.hindsight is None else self.hindsight_collator()

    def query_ends(self) -> list[int]:
        """The tokens that end a reply."""
        from tripletune.models.local.chat import eos_token_ids

        return list(eos_token_ids(self.processor, self.model.generation_config))

    def query_limit(self, query: TaughtQuery) -> int:
        """Few tokens, and no more than a sequence has room for, also behind the teacher's longer prompt."""
        longest_prompt = max(query.query, len(query.teacher_prompt))
        return max(1, min(_QUERY_ROOM, self.config.data.max_tokens - longest_prompt))

    @cached_property
    def scored(self) -> list[DecisionCase]:
        """The decisions to score, all from the integrator's validation trajectories.

        Replies of other roles are no decisions, so a student of these alone is judged by its loss.
        """
        from tripletune.eval.suites.decisions import decision_cases
        from tripletune.rag.systems.cirag.integration import INTEGRATE_ROLE

        trajectories: Iterable[Trajectory] = self.sources.validation or []
        cases = decision_cases(trajectory for trajectory in trajectories if trajectory.role == INTEGRATE_ROLE)
        return choose_examples(cases, self.config.train.eval_generate_records, lambda case: case.id)

    def prompt_and_expected(self, sample: DecisionCase) -> tuple[list[int], str]:
        """The prompt of a decision as the loop sends it, and the decision in the form that the student learns."""
        from tripletune.rag.systems.cirag.integration import decision_text

        return self.encoder.prompt(sample.messages), decision_text(sample.gold)

    def generate_replies(self, model: PreTrainedModel) -> list[str]:
        """Generate the decisions of the scored cases, from prompts as the loop would write them."""
        prompts = [self.encoder.prompt(case.messages) for case in self.scored]
        return generate_replies(model, self.processor, prompts, self.config.train)

    def metrics(self, replies: list[str]) -> dict[str, Any]:
        """Score decisions, not words: the loop acts on what a reply says, however it words it."""
        from tripletune.eval.suites.decisions import score_reply, summarise_decisions

        return summarise_decisions(map(score_reply, self.scored, replies)).metrics

    @cached_property
    def next_command(self) -> str:  # type: ignore[override]
        """The scores of the decisions; a student of other calls makes none, and is exported like any model."""
        if not self.scored:
            return TextTask.next_command
        decisions = "tripletune eval decisions --data TRAJECTORIES --model {run} --output FOLDER"
        return f"{decisions}   (in the loop: eval run --system cirag --integrator {{run}})"

    def _saved_limit(self) -> int:
        """The loop must shorten its prompts as those of the training were."""
        return int(self.config.data.prompt_limit)

    def facts(self) -> dict[str, Any]:
        """The number of training trajectories of each teacher, for the model card."""
        return {"teachers": {}, **super().facts()}

    def warnings(self) -> list[str]:
        """Warn of what makes the student's prompts in the loop differ from those of its training.

        A model must be run as it was trained, and only the user can give the loop the same options.
        """
        warnings = []
        if self._counts_of_rows.get(ChatCount.SHORTENED_PROMPTS):
            limit = self.config.data.prompt_limit
            warnings.append(f"some prompts were shortened: run the loop with max_prompt_tokens={limit}")
        warnings += super().warnings()
        if self.learned_calls.system_prompt is None:
            warnings.append("the trajectories share no system prompt, so the student is saved without a prompt")
        return warnings


TASK = StudentTask
