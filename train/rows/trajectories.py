"""Tokenise trajectories, with labels only at the teacher's decisions (CIRAG, section 3.5, eq. 8).

The student reads the loop's prompts: the loop's code renders and tokenises them (`models/local/chat.py:ChatEncoder`)
and shortens them (`rag/systems/cirag/shortening.py:leave_out_candidates`).
Templates need no generation tags. The chat, rendered up to a turn, shows where the turn starts and ends. The tokens of
the shorter chat must be a prefix of the tokens of the longer chat, else the template is refused. Labels are a turn's
text and its end token, never its header.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from tripletune.core.calls import CallError, Message
from tripletune.core.data.pairs import Trajectory
from tripletune.core.data.records import IGNORED
from tripletune.rag.systems.cirag.shortening import ShortenedChat, leave_out_candidates
from tripletune.train.rows.cache import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tripletune.models.local.chat import ChatEncoder
    from tripletune.train.rows.hindsight_prompts import TrajectoryHindsight
    from tripletune.train.tasks.chat import ChatSection

# A character that no chat holds.
_MARKER = "\ue000"
_NO_THOUGHT = re.compile(r"\s*<think>\s*</think>")
# The beginning of the name of a count: trajectories of a teacher, whose name follows.
OF_MODEL = "of "


class ChatCount(StrEnum):
    """What is counted while trajectories are tokenised; logs and `training.json` show these names.

    Attributes:
        TRAJECTORIES: All trajectories; also per teacher, under `OF_MODEL` and its name.
        ROUNDS: Decisions that the student has to write, with their prompts.
        ROUNDS_TOO_LONG: Rounds that are left out because they do not fit.
        SHORTENED_PROMPTS: Prompts of rounds that lost candidates.
        CANDIDATES_LEFT_OUT: The candidates that these prompts lost.
    """

    TRAJECTORIES = "trajectories"
    ROUNDS = "rounds"
    ROUNDS_TOO_LONG = "rounds_too_long"
    SHORTENED_PROMPTS = "shortened_prompts"
    CANDIDATES_LEFT_OUT = "candidates_left_out"


class TokensAndLabels(NamedTuple):
    """The tokens of a chat, and as many labels, which are -100 where nothing is learned."""

    ids: list[int]
    labels: list[int]


class _TokenSpan(NamedTuple):
    """The index of a span's first token, and of the token after its last one."""

    start: int
    end: int


class _SystemStart(NamedTuple):
    """A rendered beginning of a chat, and the place in it where the system's text begins."""

    text: str
    start: int


@dataclass(frozen=True)
class LearnedChat:
    """A chat that becomes a row.

    Attributes:
        turns: The turns up to a decision of the student.
        text: The turns as the chat template renders them.
        learned: Indices of the turns that have labels.
    """

    turns: list[Message]
    text: str
    learned: set[int]

    def is_continued_by(self, turns: Sequence[Message], text: str) -> bool:
        """Whether turns and rendered text of a later round begin with those of this chat."""
        return self.turns == list(turns[: len(self.turns)]) and text.startswith(self.text)


class TrajectoryEncoder:
    """Tokenises trajectories for one student.

    Args:
        eos_token_ids: Tokens that end a reply of the student; see `models.local.chat.eos_token_ids`.
        data: `rounds` "together" puts all rounds of a trajectory into one row, as long as each rendered prompt
            continues the previous prompt (some templates remove thoughts from earlier replies); "separate" makes one
            row per round. Both learn the same tokens. `learn` "replies" (CIRAG: "decisions") learns the turns that the
            trajectory marks, "last" only the last of them, "everything" every turn up to the last of them, also system
            prompt, questions and retrieved candidates. A prompt that is too long loses its oldest candidates.
        model: The student's name in error messages.
        row_name: What a trajectory is called in error messages.
        teacher: The chats of a teacher with another tokenizer, for `prompts`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Sequence[int],
        data: ChatSection,
        model: str = "",
        row_name: str = "trajectory",
        teacher: ChatEncoder | None = None,
    ) -> None:
        from tripletune.models.local.chat import ChatEncoder

        self.together = data.rounds == "together"
        self.learn = data.learn
        self.row_name = row_name
        self.teacher = teacher
        self.max_tokens = data.max_tokens
        self.max_prompt_tokens = data.prompt_limit
        self.chat = ChatEncoder(tokenizer, model or str(tokenizer.name_or_path))
        eos_tokens = [str(tokenizer.convert_ids_to_tokens(token_id)) for token_id in eos_token_ids]
        # Longest first, because one token's text may be the beginning of another's. An empty text would always match.
        self._eos_tokens = sorted([token for token in eos_tokens if token], key=len, reverse=True)
        self._template = f"the chat template of {self.chat.model}"

    def rows(
        self, trajectories: Iterable[Trajectory], counts: Counter[str], hindsight: TrajectoryHindsight | None = None
    ) -> Iterator[Row]:
        """Yield the rows of trajectories in their order.

        Args:
            counts: Receives each `ChatCount` that is not 0.
            hindsight: Adds the columns of `train.rows.hindsight`, from which queries are taught.

        Yields:
            `input_ids`, `labels` (-100 where nothing is learned) and `length`.
        """
        for trajectory in trajectories:
            _count_trajectory(counts, trajectory)
            try:
                for chat in self._chats_of_trajectory(trajectory, counts):
                    ids, labels = self.encode(chat.turns, chat.learned)
                    row: Row = {"input_ids": ids, "labels": labels, "length": len(ids)}
                    if hindsight is not None:
                        row |= hindsight.columns(trajectory, chat, ids, self, counts)
                    yield row
            except (ValueError, CallError) as error:
                raise ValueError(f"{self.row_name} {trajectory.id!r}: {error}") from None

    def prompts(self, trajectories: Iterable[Trajectory], counts: Counter[str]) -> Iterator[Row]:
        """Yield the prompts of all learned rounds as rows without labels, for on-policy distillation.

        A reply is generated to each prompt, so rounds are never put together. `max_prompt_tokens` leaves room for it.
        A teacher with another tokenizer reads the same turns in its own template (`teacher_prompt`).
        """
        for trajectory in trajectories:
            _count_trajectory(counts, trajectory)
            for decision in _turns_of_decisions(trajectory):
                prompt, left_out = self._shorten_like_loop(trajectory.messages[:decision])
                ids = self.chat.encode(prompt)
                is_too_long = len(ids) > self.max_prompt_tokens
                _count_round(counts, is_too_long, left_out)
                if is_too_long:
                    continue
                row: Row = {"input_ids": ids, "labels": [IGNORED] * len(ids), "length": len(ids)}
                if self.teacher is not None:
                    row["teacher_prompt"] = self.teacher.encode(prompt)
                yield row

    def sample(self) -> TokensAndLabels:
        """Return a sample row, which shows a change of the end tokens, and a template that can't be used."""
        turns: list[Message] = [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "a"},
        ]
        try:
            return self.encode(turns, {2})
        except CallError as error:
            raise ValueError(str(error)) from None

    def prompt(self, turns: Sequence[Message]) -> list[int]:
        """Tokens of a prompt as the loop would send it; the last turn is the user's."""
        shortened, _ = self._shorten_like_loop(turns)
        return self.chat.encode(shortened)

    def encode(self, turns: Sequence[Message], learned: set[int]) -> TokensAndLabels:
        """Tokenise a chat, with labels at the turns `learned`.

        The chat is rendered and tokenised as a whole, as the model reads it; the turns are then found in its tokens.
        """
        text = self.chat.render(turns, reply=False)
        ids = self.chat.tokens(text)
        labels = [IGNORED] * len(ids)
        for turn in sorted(learned):
            # A greeting has no prompt at whose end it would begin.
            if turn > 0 and turns[turn]["role"] == "assistant":
                start, end = self.reply_span(turns, turn, text, ids)
            else:
                start, end = self._observation_span(turns, turn, text, ids)
            labels[start:end] = ids[start:end]
        return TokensAndLabels(ids, labels)

    def _chats_of_trajectory(self, trajectory: Trajectory, counts: Counter[str]) -> Iterator[LearnedChat]:
        """Yield the chats of a trajectory that become rows, each with one or several of its rounds.

        A chat is yielded only when the next round does not continue it, because a later round may still grow it. A
        round that is too long is left out alone: a later one, whose prompt is shortened by itself, may fit.
        """
        # The chat that may still grow.
        chat: LearnedChat | None = None
        decisions = _turns_of_decisions(trajectory)
        if self.learn == "last":
            decisions = decisions[-1:]
        # The first turn behind the last decision; a round is the turns from there to the next decision.
        round_start = 0
        for decision in decisions:
            learned = self._learned_turns(trajectory, range(round_start, decision + 1))
            round_start = decision + 1
            prompt, left_out = self._shorten_like_loop(trajectory.messages[:decision])
            turns = [*prompt, trajectory.messages[decision]]
            text = self.chat.render(turns, reply=False)
            is_too_long = len(self.chat.tokens(text)) > self.max_tokens
            _count_round(counts, is_too_long, left_out)
            if is_too_long:
                continue
            if chat is not None:
                if self.together and chat.is_continued_by(turns, text):
                    learned |= chat.learned
                else:
                    yield chat
            chat = LearnedChat(turns, text, learned)
        if chat is not None:
            yield chat

    def _learned_turns(self, trajectory: Trajectory, turns: range) -> set[int]:
        """Return those of a round's turns that have labels; the last of the round is a decision."""
        if self.learn == "everything":
            return set(turns)
        if self.learn == "last":
            return {turns[-1]}
        return {turn for turn in turns if trajectory.learned[turn]}

    def _shorten_like_loop(self, prompt: Sequence[Message]) -> ShortenedChat:
        """A prompt as the loop would shorten it, since a student must read in training what it reads in use."""
        return leave_out_candidates(prompt, self._count_prompt_tokens, self.max_prompt_tokens)

    def _count_prompt_tokens(self, prompt: Sequence[Message]) -> int:
        """Tokens of a prompt as the loop counts them when it shortens."""
        return len(self.chat.encode(prompt))

    def reply_span(self, turns: Sequence[Message], turn: int, text: str, ids: list[int]) -> _TokenSpan:
        """The tokens of a reply: from the first one after the loop's prompt to its end token.

        The labels begin exactly where the loop's prompt ends, so the student learns to write what the loop will not. A
        template with which this cannot be is refused, since a shifted mask is not seen in the loss
        (`tests/train/rows/test_trajectories.py:test_templates_that_would_give_a_wrong_mask`).

        Args:
            text: The rendered `turns`.
            ids: The tokens of `text`.
        """
        prompt = self.chat.render(turns[:turn])
        if not text.startswith(prompt):
            raise ValueError(
                f"{self._template} changes the turns before turn {turn + 1} when a reply follows (some templates "
                "remove thoughts or move the system prompt), so the student would not learn from the loop's prompts: "
                "set data.chat_template to a template that only appends to the chat"
            )
        start = len(prompt)
        content = self.chat.as_text(turns[turn]["content"]).strip()
        content_start = _content_start(text, start, content)
        if content_start is None:
            raise ValueError(
                f"{self._template} writes {_quoted_start(text[start:])} where the reply {_quoted_start(content)} "
                "should begin: set data.chat_template to a template that writes replies unchanged"
            )
        content_end = content_start + len(content)
        end = self._end_of_turn(text, content_end)
        if end is None:
            raise ValueError(
                f"{self._template} ends a reply with {_quoted_start(text[content_end:])}, but the tokens that "
                f"end a reply of this model are {', '.join(self._eos_tokens) or 'unknown'}: the student would never "
                "learn to stop; set eos_token of the tokenizer, or eos_token_id of the model's generation configuration"
            )
        return _TokenSpan(self._count_tokens(text, ids, start, turn), self._count_tokens(text, ids, end, turn))

    def _observation_span(self, turns: Sequence[Message], turn: int, text: str, ids: list[int]) -> _TokenSpan:
        """Like `reply_span`, for a turn that the model does not write, without its header.

        Args:
            turns: The chat, as the template takes it.
            turn: Index of the turn.
            text: The whole rendered chat.
            ids: Its tokens.

        Returns:
            The tokens of the content, with the end of the turn if there is one.

        Raises:
            ValueError: The template does not write the content as it is, so its tokens can't be found.
        """
        content = self.chat.as_text(turns[turn]["content"]).strip()
        if turns[turn]["role"] == "system":
            through, start = self._system_start(turns, turn)
        else:
            through = self.chat.render(turns[: turn + 1], reply=False)
            start = through.rfind(content)
        is_unchanged = start >= 0 and text.startswith(through) and through.startswith(content, start)
        if not is_unchanged:
            raise ValueError(f"{self._template} changes the text of turn {turn + 1}: leave data.learn at its default")
        content_end = start + len(content)
        end = self._end_of_turn(text, content_end) or content_end
        if not self._is_border(text, ids, start):
            # The model never starts such a turn, so a label may include a blank that shares a token with the first
            # word.
            start = len(text[:start].rstrip())
        return _TokenSpan(self._count_tokens(text, ids, start, turn), self._count_tokens(text, ids, end, turn))

    def _system_start(self, turns: Sequence[Message], turn: int) -> _SystemStart:
        """The chat up to the first question, rendered, and where the system's text begins in it.

        Some templates reject a chat of a system turn alone, or write its text into the first question. The text begins
        where the rendered chat changes when a character is put before it.
        """
        beginning = list(turns[: turn + 2])
        through = self.chat.render(beginning, reply=False)
        beginning[turn] = {"role": "system", "content": _MARKER + beginning[turn]["content"].strip()}
        start = 0
        for character, marked in zip(through, self.chat.render(beginning, reply=False), strict=False):
            if character != marked:
                break
            start += 1
        return _SystemStart(through, start)

    def _end_of_turn(self, text: str, position: int) -> int | None:
        """The position after a turn's end token, if it directly follows the turn's text."""
        token_start = _after_blanks(text, position)
        for token in self._eos_tokens:
            if text.startswith(token, token_start):
                return token_start + len(token)
        return None

    def _count_tokens(self, text: str, ids: list[int], position: int, turn: int) -> int:
        """Return the number of tokens before a position; it must not depend on the text after the position."""
        if not self._is_border(text, ids, position):
            raise ValueError(
                f"turn {turn + 1} does not begin and end between two tokens of {self.chat.model} "
                f"({_quoted_start(text[max(0, position - 15) : position + 15])}): remove white space around its text, "
                "or set data.chat_template to a template that separates text and header"
            )
        return len(self.chat.tokens(text[:position]))

    def _is_border(self, text: str, ids: list[int], position: int) -> bool:
        """Whether a position lies between two tokens of a text: the text before it has the same tokens alone."""
        before = self.chat.tokens(text[:position])
        return ids[: len(before)] == before


def _count_trajectory(counts: Counter[str], trajectory: Trajectory) -> None:
    """Add a trajectory to `counts`, and once more for its teacher, for the model card."""
    counts[ChatCount.TRAJECTORIES] += 1
    counts[f"{OF_MODEL}{trajectory.model}"] += 1


def _count_round(counts: Counter[str], is_too_long: bool, left_out: int) -> None:
    """Add a round to `counts`, and what shortening its prompt left out if the round is used."""
    counts[ChatCount.ROUNDS] += 1
    if is_too_long:
        counts[ChatCount.ROUNDS_TOO_LONG] += 1
    elif left_out:
        counts[ChatCount.SHORTENED_PROMPTS] += 1
        counts[ChatCount.CANDIDATES_LEFT_OUT] += left_out


def _turns_of_decisions(trajectory: Trajectory) -> list[int]:
    """The indices of the turns that the student has to write: marked replies, but not marked turns of the loop."""
    turns = enumerate(zip(trajectory.messages, trajectory.learned, strict=True))
    return [turn for turn, (message, is_learned) in turns if is_learned and message["role"] == "assistant"]


def _content_start(text: str, start: int, content: str) -> int | None:
    """Return where a reply's content begins, after white space and an empty thought; None if other text stands there.

    If the template does not end a prompt with an empty thought, the student has to write the empty thought.
    """
    position = _after_blanks(text, start)
    if text.startswith(content, position):
        return position
    thought = _NO_THOUGHT.match(text, start)
    if thought is None:
        return None
    position = _after_blanks(text, thought.end())
    return position if text.startswith(content, position) else None


def _after_blanks(text: str, position: int) -> int:
    """The position of the first character at or after `position` that is no white space."""
    return len(text) - len(text[position:].lstrip())


def _quoted_start(text: str) -> str:
    """The beginning of a text for an error message."""
    return repr(text if len(text) <= 40 else f"{text[:40]}...")
