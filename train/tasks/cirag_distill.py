"""Distil a teacher into a small student for CIRAG's integrator (sections 3.5 and B.4) or for other calls of a system.

Defaults are the paper's: LoRA of rank 64, 2 epochs, batch 2, learning rate 2e-4, loss only on the teacher's decisions.
The paper does not give LoRA's alpha, dropout and layers, the schedule, or the length of a sequence; these are ours.

Questions that have a validation trajectory, of any teacher, are left out of training.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from tripletune.core.data.pairs import Trajectory
from tripletune.core.files import json_line
from tripletune.core.options import other_default, setting
from tripletune.models.fingerprints import content_fingerprint, tokenizer_fingerprint
from tripletune.models.run_folders import PROMPT_FILE, STUDENT, Method, TaskFacts
from tripletune.models.specs import pinned
from tripletune.train.rows.trajectories import TrajectoryEncoder
from tripletune.train.settings import ModelSection, ReplySection, RunConfig, TrainSection
from tripletune.train.sources import Examples, Sources, has_split
from tripletune.train.text import TextSection, TextTask, TextTrainSection, choose_examples, generate_replies

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel

    from tripletune.eval.suites.decisions import Case
    from tripletune.train.engine import EngineMixin
    from tripletune.train.rows.cache import Row

# The longest reply of the loop (`rag.systems.cirag.CiragOptions.max_integration_tokens`).
REPLY_ROOM = 1024
# The number of 64-bit hashes.
_HASHES = 1 << 64


@dataclass
class StudentSection(ModelSection):
    """The student."""

    base: str = other_default(ModelSection, "base", "Qwen/Qwen2.5-7B-Instruct")
    lora_rank: int = other_default(ModelSection, "lora_rank", 64)
    lora_alpha: int = other_default(ModelSection, "lora_alpha", 128)


@dataclass
class TrajectorySection(TextSection):
    """Trajectories and how they become tokens."""

    train: list[str] = setting(  # type: ignore[assignment]
        ["data/trajectories"],
        "folders or files of trajectories; FOLDER=0.5 takes half of its questions",
    )
    validation: list[str] = setting(  # type: ignore[assignment]
        [], "folders or files of validation trajectories (default: the train folders)"
    )
    rounds: str = setting(
        "together",
        "one sequence per trajectory (together) or per round (separate)",
        choices=("together", "separate"),
    )
    learn: str = setting(
        "decisions",
        "learn only the teacher's decisions, or everything, including candidates of later rounds",
        choices=("decisions", "everything"),
    )
    max_tokens: int = setting(
        8192, "maximum tokens of a sequence; a round that is too long even after shortening is left out", at_least=64
    )
    max_prompt_tokens: int | None = setting(
        None, "maximum tokens of a prompt; give the loop the same max_prompt_tokens (default: max_tokens - 1,024)"
    )

    @property
    def prompt_limit(self) -> int:
        """Maximum tokens of a prompt."""
        return self.max_prompt_tokens or max(1, self.max_tokens - REPLY_ROOM)

    def check(self) -> list[str]:
        """Problems of places and limits; prompts and replies must both fit into a sequence."""
        problems = []
        if not self.train:
            problems.append("data.train: name at least one folder of trajectories")
        for name, places in (("train", self.train), ("validation", self.validation)):
            for place in places:
                try:
                    folder_and_share(place)
                except ValueError as error:
                    problems.append(f"data.{name}: {error}")
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
class StudentTrainSection(ReplySection, TextTrainSection):
    """Optimisation."""

    epochs: float = other_default(TrainSection, "epochs", 2.0)
    batch_size: int = other_default(TrainSection, "batch_size", 2)
    learning_rate: float = other_default(TrainSection, "learning_rate", 2e-4)
    eval_max_new_tokens: int = other_default(TrainSection, "eval_max_new_tokens", 512)


@dataclass
class StudentConfig(RunConfig):
    """A whole run."""

    output_dir: str = other_default(RunConfig, "output_dir", "runs/student")
    model: StudentSection = field(default_factory=StudentSection)
    data: TrajectorySection = field(default_factory=TrajectorySection)
    train: StudentTrainSection = field(default_factory=StudentTrainSection)


class LearnedCalls(NamedTuple):
    """The calls that a student learns: their roles, and the system prompt that all share, or None."""

    roles: list[str]
    system_prompt: str | None


class StudentTask(TextTask):
    """Trains a student on its teachers' decisions."""

    Config: ClassVar[type[RunConfig]] = StudentConfig
    usage = "--config smollm2_135m_cirag_cpu --model.base MODEL --data.train runs/trajectories"
    published: ClassVar[str] = "the paper: a batch of 2 on 4 GPUs (it does not say whether per device)"
    method: ClassVar[Method] = "sft"

    @cached_property
    def sources(self) -> Sources:
        """Trajectories to train and to evaluate on, without a question in both.

        Several teachers may have answered the same question, so questions are held out, not trajectories.
        """
        data = self.config.data
        train = [folder_and_share(place) for place in data.train]
        if data.validation_share:
            examples = _trajectories(train, data.train_split, data.max_train_records)
            return examples.divided(data, self.config.seed)
        validation = [folder_and_share(place) for place in data.validation]
        if not validation:
            validation = [(path, share) for path, share in train if has_split(path, data.validation_split)]
        if not validation:
            return Sources(_trajectories(train, data.train_split, data.max_train_records), None)
        evaluated = _trajectories(validation, data.validation_split, data.max_validation_records)
        # All validation questions, not only those that are evaluated.
        return Sources(_trajectories(train, data.train_split, data.max_train_records, evaluated.keys()), evaluated)

    @cached_property
    def encoder(self) -> TrajectoryEncoder:
        """Turns trajectories into rows for the student's template."""
        from tripletune.models.local.chat import eos_token_ids

        ends = eos_token_ids(self.processor, self.model.generation_config)
        return TrajectoryEncoder(self.processor, ends, self.config.data, self.config.model.base)

    def tokenised(self, source: Examples, cache: Path) -> Dataset:
        """Rows of trajectories: of replies to learn, of pairs, or for on-policy distillation of prompts alone."""
        from tripletune.train.rows.cache import PAIR, TEXT, cached_rows
        from tripletune.train.rows.pairs import rows_of_pairs

        data = self.config.data
        encoder = copy.copy(self.encoder)
        if source is not self.sources.train:
            # An evaluation counts only decisions, whatever is learned.
            encoder.everything = False
        learn = "everything" if encoder.everything else "decisions"
        layout = [data.rounds, learn, data.max_tokens, data.prompt_limit]
        tokenizer = tokenizer_fingerprint(self.processor)
        key = ["trajectories", source.digest, layout, tokenizer, encoder.sample(), self.method]
        make: Callable[..., Iterator[Row]] = encoder.prompts if self.method == "on_policy" else encoder.rows
        columns = {**TEXT}
        if self.config.train.preference:
            make = partial(rows_of_pairs, make=make)
            columns |= PAIR
        return cached_rows(key, cache, source.works(make), columns)

    def trainer(self) -> EngineMixin | None:
        """Train on pairs with TRL, if the run has a preference loss."""
        if not self.config.train.preference:
            return None
        from tripletune.train.trl_trainers import PreferenceTrainer

        return PreferenceTrainer(self)

    @cached_property
    def scored(self) -> list[Case]:
        """The decisions to score, all from the integrator's validation trajectories."""
        from tripletune.eval.suites.decisions import decision_cases
        from tripletune.rag.systems.cirag.integration import INTEGRATE_ROLE

        trajectories: Iterable[Trajectory] = self.sources.validation or []
        cases = decision_cases(trajectory for trajectory in trajectories if trajectory.role == INTEGRATE_ROLE)
        return choose_examples(cases, self.config.train.eval_generate_records, lambda case: case.id)

    def prompt_and_expected(self, sample: Case) -> tuple[list[int], str]:
        from tripletune.rag.systems.cirag.integration import write_decision

        return self.encoder.prompt(sample.messages), write_decision(sample.gold)

    def replies(self, model: PreTrainedModel) -> list[str]:
        """Generate the decisions of the scored cases, from prompts as the loop would write them."""
        prompts = [self.encoder.prompt(case.messages) for case in self.scored]
        return generate_replies(model, self.processor, prompts, self.config.train)

    def metrics(self, replies: list[str]) -> dict[str, Any]:
        from tripletune.eval.suites.decisions import score_reply, summarise_decisions

        return summarise_decisions(map(score_reply, self.scored, replies)).metrics

    @cached_property
    def files(self) -> dict[str, str]:
        """The student's facts and prompt, from which the loop knows which calls it answers, and how."""
        learned = self.learned_calls
        limit = self.config.data.prompt_limit
        return student_files(self.config.model, learned.roles, self.method, limit, learned.system_prompt)

    @cached_property
    def learned_calls(self) -> LearnedCalls:
        """What the training trajectories have in common."""
        roles: set[str] = set()
        prompts: set[str] = set()
        for trajectory in self.sources.train:
            roles.add(trajectory.role)
            if len(prompts) < 2:  # two different ones are enough to know
                system_turns = [turn["content"] for turn in trajectory.messages if turn["role"] == "system"]
                prompts.add("\n\n".join(system_turns))
        shared_prompt = prompts.pop() if len(prompts) == 1 else ""
        return LearnedCalls(sorted(roles), shared_prompt or None)

    def facts(self) -> dict[str, Any]:
        """The number of training trajectories of each teacher, for the model card."""
        teachers = {}
        for name, count in sorted(self._counts.items()):
            if name.startswith("of "):
                teachers[name.removeprefix("of ")] = count
        return {"teachers": teachers}

    def warnings(self) -> list[str]:
        """Warn of what makes the student's prompts in the loop differ from those of its training.

        A model must be run as it was trained, and only the user can give the loop the same options.
        """
        counts = self._counts
        warnings = []
        if counts.get("shortened_prompts"):
            limit = self.config.data.prompt_limit
            warnings.append(f"some prompts were shortened: run the loop with max_prompt_tokens={limit}")
        if counts.get("rounds_too_long"):
            warnings.append(
                f"{counts['rounds_too_long']} of {counts['rounds']} rounds do not fit into data.max_tokens and are "
                "left out"
            )
        if self.learned_calls.system_prompt is None:
            warnings.append("the trajectories share no system prompt, so the student is saved without a prompt")
        return warnings

    @property
    def _counts(self) -> dict[str, int]:
        """Counts of the training rows; see `train.rows.trajectories.TrajectoryEncoder.rows`."""
        from tripletune.train.rows.cache import rows_meta

        return rows_meta(self.train)


TASK = StudentTask


def student_files(
    model: ModelSection, roles: list[str], method: Method, max_prompt_tokens: int | None, prompt: str | None
) -> dict[str, str]:
    """Return the texts of a student's small files by name: its facts, such as roles, and its system prompt.

    Args:
        roles: Kinds of calls that the student answers, for example "cirag.integrate".
        method: How it was trained.
        max_prompt_tokens: The prompts that it was trained on; the loop must shorten its prompts likewise.
        prompt: The system prompt of all calls; None if they share none.
    """
    systems = {role.partition(".")[0] for role in roles if "." in role}
    base, commit = pinned(model.base)
    about: TaskFacts = {
        "task": roles[0] if len(roles) == 1 else "student",
        "roles": roles,
        "systems": sorted(systems),
        "base_model": base,
        "base_revision": commit,
        "base_weights": content_fingerprint(model.base),
        "method": method,
        "max_prompt_tokens": max_prompt_tokens,
    }
    files = {STUDENT: json_line(about, 2)}
    if prompt is not None:
        files[PROMPT_FILE] = prompt + "\n"
    return files


def folder_and_share(place: str) -> tuple[str, float]:
    """Read an item of `data.train`: a folder, or FOLDER=SHARE.

    A text after "=" that is no number is part of the path, since paths may hold equals signs.

    Raises:
        ValueError: The share is a number out of range.
    """
    folder, equals, number = place.rpartition("=")
    if not equals:
        return place, 1.0
    try:
        share = float(number)
    except ValueError:
        return place, 1.0
    if not 0 < share <= 1:
        raise ValueError(f"{place!r}: the share must be above 0 and at most 1")
    return folder, share


def _trajectories(
    places: Sequence[tuple[str, float]], split: str, limit: int | None = None, held_out: frozenset[str] = frozenset()
) -> Examples:
    """Return the trajectories of places, each with its share of questions, without those of held-out questions."""

    def keep(trajectory: Trajectory, share: float) -> bool:
        """Whether to train on a trajectory."""
        # Drawn by question: either all or none of a question's trajectories are taken, whatever the order of the file.
        digest = hashlib.blake2b(trajectory.question_id.encode(), digest_size=8).digest()
        return int.from_bytes(digest) < share * _HASHES

    return Examples(
        Trajectory.from_json,
        tuple(places),
        split,
        limit,
        keep,
        name="trajectories",
        keys_of=lambda trajectory: [trajectory.question_id],
        held_out=held_out,
    )
