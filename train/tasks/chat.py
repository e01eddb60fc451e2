"""Train a chat model on chats (supervised fine-tuning, SFT): on every reply, on the last ones, or on every turn.

Rows have messages, conversations (ShareGPT), prompt and completion, or instruction and output (Alpaca). With
`train.preference`, pairs of a better and a worse reply are learned (DPO and other losses). Chats that begin with the
question of a validation chat are left out of training. Rank, rates and lengths are common values for LoRA.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from tripletune.core.data.chats import UNNAMED_MODEL
from tripletune.core.data.pairs import Trajectory
from tripletune.core.files import json_line
from tripletune.core.options import other_default, rare, setting
from tripletune.models.fingerprints import content_fingerprint, tokenizer_fingerprint
from tripletune.models.run_folders import PROMPT_FILE, STUDENT, Method, TaskFacts
from tripletune.models.specs import pinned_source
from tripletune.train.rows.trajectories import OF_MODEL, ChatCount, TrajectoryEncoder
from tripletune.train.settings import DataSection, ModelSection, ReplySection, RunConfig, TrainSection
from tripletune.train.sources import Examples, Sources
from tripletune.train.text import TextSection, TextTask, TextTrainSection, choose_examples, generate_replies

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel

    from tripletune.models.local.chat import ChatEncoder
    from tripletune.train.engine import EngineMixin
    from tripletune.train.rows.cache import Row
    from tripletune.train.rows.hindsight_prompts import TrajectoryHindsight


@dataclass
class ChatSection(TextSection):
    """Chats and how they become tokens."""

    train: list[str] = other_default(DataSection, "train", ["data/chats"])
    learn: str = setting(
        "replies",
        "learn the replies (but those that their row excludes), only the last of them, or everything: every turn, the "
        "system prompt too",
        choices=("replies", "last", "everything"),
    )
    rounds: str = rare(
        "together", "one sequence per chat (together) or per reply (separate)", choices=("together", "separate")
    )
    max_tokens: int = setting(2048, "maximum tokens of a sequence; what is longer is left out", at_least=16)

    @property
    def prompt_limit(self) -> int:
        """Maximum tokens of a prompt."""
        return self.max_tokens - 1


@dataclass
class ChatTrainSection(ReplySection, TextTrainSection):
    """Optimisation."""

    learning_rate: float = other_default(TrainSection, "learning_rate", 2e-4)


@dataclass
class ChatConfig(RunConfig):
    """A whole run."""

    output_dir: str = other_default(RunConfig, "output_dir", "runs/chat")
    data: ChatSection = field(default_factory=ChatSection)
    train: ChatTrainSection = field(default_factory=ChatTrainSection)


class LearnedCalls(NamedTuple):
    """The calls that a model learns to answer: their roles, and the system prompt that all share, or None."""

    roles: list[str]
    system_prompt: str | None


class ChatTask(TextTask):
    """Trains a model on chats.

    Attributes:
        method: How replies are learned.
        row_name: What a chat is called in messages.
        teacher_chat: Of on-policy distillation: the chats of a teacher with another tokenizer.
    """

    Config: ClassVar[type[RunConfig]] = ChatConfig
    usage = "--data.train chats.jsonl --model.base MODEL"
    unit: str = "chats"
    method: ClassVar[Method] = "sft"
    row_name: ClassVar[str] = "chat"
    words: ClassVar[Mapping[str, str]] = {
        ChatCount.TRAJECTORIES: "chats",
        ChatCount.ROUNDS: "replies",
        ChatCount.ROUNDS_TOO_LONG: "replies too long",
        f"{OF_MODEL}{UNNAMED_MODEL}": "",
    }
    teacher_chat: ChatEncoder | None = None

    @cached_property
    def sources(self) -> Sources:
        """Chats to train and to evaluate on, without a question in both.

        Several models may have answered the same question, so questions are held out, not chats.
        """
        return self.source_pair(
            Trajectory.from_json,
            name=self.plural,
            keys_of=lambda chat: [chat.question_id],
            pairs=self.learns_from_pairs,
        )

    @cached_property
    def encoder(self) -> TrajectoryEncoder:
        """Turns chats into rows for the model's template, with the loss mask of `data.learn`."""
        from tripletune.models.local.chat import eos_token_ids

        ends = eos_token_ids(self.processor, self.model.generation_config)
        data = self.config.data
        return TrajectoryEncoder(self.processor, ends, data, self.config.model.base, self.row_name, self.teacher_chat)

    def tokenised(self, source: Examples, cache: Path) -> Dataset:
        """Rows of chats: of replies to learn, of pairs, or for on-policy distillation of prompts alone.

        The key holds everything that changes a row, since other runs reuse the rows; the sample reveals a change of
        template or end tokens that no setting names.
        """
        from tripletune.train.rows.cache import HINDSIGHT, PAIR, TEACHER, TEXT, cached_rows
        from tripletune.train.rows.pairs import rows_of_pairs

        data = self.config.data
        # A copy, because what is learned differs between training and evaluation.
        encoder = copy.copy(self.encoder)
        is_evaluated = source is not self.sources.train
        if is_evaluated and encoder.learn == "everything":
            # An evaluation counts only replies.
            encoder.learn = "replies"
        layout = [data.rounds, encoder.learn, data.max_tokens, data.prompt_limit]
        tokenizer = tokenizer_fingerprint(self.processor)
        key = ["trajectories", source.digest, layout, tokenizer, encoder.sample(), self.method]
        make: Callable[..., Iterator[Row]] = encoder.prompts if self.method == "on_policy" else encoder.rows
        columns = {**TEXT}
        hindsight = self.hindsight_of_chats()
        if hindsight is not None and not is_evaluated:
            # An evaluation compares losses of labels, which need no teacher.
            make = partial(make, hindsight=hindsight)
            key.append(hindsight.text)
            columns |= HINDSIGHT
        if self.learns_from_pairs:
            make = partial(rows_of_pairs, make=make)
            columns |= PAIR
        if encoder.teacher is not None:
            key.append(tokenizer_fingerprint(encoder.teacher.tokenizer))
            columns |= TEACHER
        return cached_rows(key, cache, source.works(make), columns)

    def hindsight_of_chats(self) -> TrajectoryHindsight | None:
        """The prompt of a teacher with hindsight, whose tokens the rows then have; None: chats have no such teacher."""
        return None

    def trainer(self) -> EngineMixin | None:
        """Train on pairs with TRL, if the run has a preference loss; only then is TRL imported, which takes seconds."""
        if not self.learns_from_pairs:
            return None
        from tripletune.train.trl_trainers import PreferenceTrainer

        return PreferenceTrainer(self)

    @cached_property
    def scored(self) -> list[Any]:
        """The validation chats of which an evaluation generates the last reply that is learned."""
        chats: Iterable[Trajectory] = self.sources.validation or []
        return choose_examples(chats, self.config.train.eval_generate_records, lambda chat: chat.id)

    def prompt_and_expected(self, sample: Any) -> tuple[list[int], str]:
        """The prompt before the last reply that is learned, and that reply; earlier replies stand in the prompt."""
        last = max(turn for turn, is_learned in enumerate(sample.learned) if is_learned)
        return self.encoder.prompt(sample.messages[:last]), sample.messages[last]["content"]

    def generate_replies(self, model: PreTrainedModel) -> list[str]:
        """Generate the last replies of the scored chats, each after the gold turns before it."""
        prompts = []
        for sample in self.scored:
            prompt, _ = self.prompt_and_expected(sample)
            prompts.append(prompt)
        return generate_replies(model, self.processor, prompts, self.config.train)

    def metrics(self, replies: list[str]) -> dict[str, Any]:
        """Compare the words of each reply with those of the chat's own.

        With F1 and exact match, as short answers are scored.
        """
        from tripletune.eval.metrics import exact_match, f1
        from tripletune.eval.statistics import bootstrap_means

        scores: dict[str, list[float]] = {"f1": [], "exact_match": []}
        for sample, reply in zip(self.scored, replies, strict=True):
            _, expected = self.prompt_and_expected(sample)
            scores["f1"].append(f1(reply, [expected]))
            scores["exact_match"].append(exact_match(reply, [expected]))
        return dict(bootstrap_means(scores))

    @cached_property
    def files(self) -> dict[str, str]:
        """The model's facts and its system prompt, from which programs know which calls it answers."""
        learned = self.learned_calls
        return student_files(self.config.model, learned.roles, self.method, self._saved_limit(), learned.system_prompt)

    def _saved_limit(self) -> int | None:
        """The limit of prompts in the model's facts, if its prompts were shortened to it."""
        return None

    @cached_property
    def learned_calls(self) -> LearnedCalls:
        """What the training chats have in common; programs ask the model only what it has learned to answer."""
        roles: set[str] = set()
        prompts: set[str] = set()
        for chat in self.sources.train:
            roles.add(chat.role)
            if len(prompts) < 2:  # two different ones are enough to know
                system_turns = [turn["content"] for turn in chat.messages if turn["role"] == "system"]
                prompts.add("\n\n".join(system_turns))
        shared_prompt = prompts.pop() if len(prompts) == 1 else ""
        return LearnedCalls(sorted(roles), shared_prompt or None)

    def facts(self) -> dict[str, Any]:
        """The number of training chats of each model that wrote them, for the model card.

        The encoder counts chats under "of MODEL"; a row that names no model says nothing about its teacher.
        """
        teachers = {}
        for name, count in sorted(self._counts_of_rows.items()):
            model = name.removeprefix(OF_MODEL)
            if name.startswith(OF_MODEL) and model != UNNAMED_MODEL:
                teachers[model] = count
        return {"teachers": teachers} if teachers else {}

    def reason_for_no_rows(self, counts: Mapping[str, int]) -> str:
        """Say that no chat, pair or prompt is short enough."""
        from tripletune.train.rows.pairs import PAIRS_LEFT_OUT

        data = self.config.data
        too_long = counts.get(ChatCount.ROUNDS_TOO_LONG, 0)
        if counts.get(PAIRS_LEFT_OUT):
            return (
                f"all {counts[PAIRS_LEFT_OUT]:,} pairs have a reply that, with its prompt, is longer than "
                f"data.max_tokens {data.max_tokens}: raise it"
            )
        if not too_long:
            return ""
        if self.method == "on_policy":
            return f"all {too_long:,} prompts are longer than data.max_prompt_tokens {data.prompt_limit}: raise it"
        chats = f"all {counts[ChatCount.TRAJECTORIES]:,} {self.plural}"
        return f"{chats} are longer than data.max_tokens {data.max_tokens}: raise it"

    def warnings(self) -> list[str]:
        """Warn of replies that are left out."""
        too_long = self._counts_of_rows.get(ChatCount.ROUNDS_TOO_LONG, 0)
        if not too_long:
            return []
        rounds = self.words.get(ChatCount.ROUNDS, "rounds")
        total = self._counts_of_rows[ChatCount.ROUNDS]
        return [f"{too_long} of {total} {rounds} do not fit into data.max_tokens and are left out"]

    @property
    def plural(self) -> str:
        """What several chats are called in messages; `row_name` is one of them."""
        return "trajectories" if self.row_name == "trajectory" else "chats"

    @property
    def _counts_of_rows(self) -> dict[str, int]:
        """Counts of the training rows; see `train.rows.trajectories.TrajectoryEncoder.rows`."""
        from tripletune.train.rows.cache import rows_meta

        return rows_meta(self.train)


TASK = ChatTask


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
    base, commit = pinned_source(model.base)
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
