"""Tokenise trajectories, with labels only at the teacher's decisions (CIRAG, section 3.5, eq. 8).

The student reads the loop's prompts: the loop's code renders and tokenises them (`models/local/chat.py:ChatEncoder`)
and shortens them (`rag/systems/cirag/shortening.py:shorten`).
Templates need no generation tags. The chat, rendered up to a turn, shows where the turn starts and ends. The tokens of
the shorter chat must be a prefix of the tokens of the longer chat, else the template is refused. Labels are a turn's
text and its end token, never its header.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tripletune.core.calls import CallError, Message
from tripletune.core.data.pairs import Trajectory
from tripletune.core.data.records import IGNORED
from tripletune.rag.systems.cirag.shortening import shorten

_NO_THOUGHT = re.compile(r"\s*<think>\s*</think>")


class TrajectoryEncoder:
    """Tokenises trajectories for one student.

    Args:
        eos_token_ids: Tokens that end a reply of the student; see `models.local.chat.eos_token_ids`.
        data: The settings `train.tasks.cirag_distill.TrajectorySection`. `rounds` "together" puts all rounds of a
            trajectory into one row, as long as each rendered prompt continues the previous prompt (some templates
            remove thoughts from earlier replies); "separate" makes one row per round. Both learn the same tokens.
            `learn` "decisions" learns the turns that the trajectory marks; "everything" also learns all turns after
            the first decision, including retrieved candidates. A prompt that is too long loses its oldest candidates.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int], data: Any, model: str = "") -> None:
        from tripletune.models.local.chat import ChatEncoder

        self.together, self.everything = data.rounds == "together", data.learn == "everything"
        self.max_tokens, self.max_prompt_tokens = data.max_tokens, data.prompt_limit
        self._chat = ChatEncoder(tokenizer, model or str(tokenizer.name_or_path))
        names = (str(tokenizer.convert_ids_to_tokens(token)) for token in eos_token_ids)
        # Longest first, because one token's text may be the beginning of another's.
        self._eos_tokens = sorted(filter(None, names), key=len, reverse=True)
        self._template = f"the chat template of {self._chat.model}"

    def rows(self, trajectories: Iterable[Trajectory], counts: Counter[str]) -> Iterator[dict[str, Any]]:
        """Yield the rows of trajectories in their order.

        Args:
            counts: Receives the numbers of `trajectories` (also per teacher: `of <teacher>`), `rounds`, left-out
                `rounds_too_long`, `shortened_prompts` and `candidates_left_out`.

        Yields:
            `input_ids`, `labels` (-100 where nothing is learned) and `length`.
        """
        for trajectory in trajectories:
            counts.update(("trajectories", f"of {trajectory.model}"))
            try:
                for turns, learned in self._chats(trajectory, counts):
                    ids, labels = self.encode(turns, learned)
                    yield {"input_ids": ids, "labels": labels, "length": len(ids)}
            except (ValueError, CallError) as error:
                raise ValueError(f"trajectory {trajectory.id!r}: {error}") from None

    def prompts(self, trajectories: Iterable[Trajectory], counts: Counter[str]) -> Iterator[dict[str, Any]]:
        """Yield the prompts of all learned rounds as rows without labels, for on-policy distillation."""
        for trajectory in trajectories:
            counts.update(("trajectories", f"of {trajectory.model}"))
            for place in _decisions(trajectory):
                prompt, left_out = self._shorter(trajectory.messages[:place])
                ids = self._chat.encode(prompt)
                if self._count_round(counts, len(ids) > self.max_prompt_tokens, left_out):
                    yield {"input_ids": ids, "labels": [IGNORED] * len(ids), "length": len(ids)}

    def sample(self) -> tuple[list[int], list[int]]:
        """Return a sample row, which differs if template or tokenizer change while their folder keeps its name."""
        turns: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        try:
            return self.encode([*turns, {"role": "assistant", "content": "a"}], {2})
        except CallError as error:
            raise ValueError(str(error)) from None

    def prompt(self, turns: Sequence[Message]) -> list[int]:
        """Tokens of a prompt as the loop would send it; the last turn is the user's."""
        return self._chat.encode(self._shorter(turns)[0])

    def encode(self, turns: Sequence[Message], learned: set[int]) -> tuple[list[int], list[int]]:
        """Return the tokens of a chat and their labels, which are -100 outside the learned turns."""
        text = self._chat.render(turns, reply=False)
        ids = self._chat.tokens(text)
        labels = [IGNORED] * len(ids)
        for place in sorted(learned):
            is_reply = turns[place]["role"] == "assistant"
            start, end = (self._reply if is_reply else self._observation)(turns, place, text, ids)
            labels[start:end] = ids[start:end]
        return ids, labels

    def _chats(self, trajectory: Trajectory, counts: Counter[str]) -> Iterator[tuple[list[Message], set[int]]]:
        """Yield the turns of each row, with the indices of the learned turns."""
        messages = trajectory.messages
        decisions = _decisions(trajectory)
        current: list[Message] = []
        shorter = ""
        marked: set[int] = set()
        for before, place in zip([-1, *decisions], decisions):
            learned = {
                one
                for one in range(before + 1, place + 1)
                if trajectory.learned[one] or (self.everything and one > decisions[0])
            }
            prompt, left_out = self._shorter(messages[:place])
            turns = [*prompt, messages[place]]
            text = self._chat.render(turns, reply=False)
            if not self._count_round(counts, len(self._chat.tokens(text)) > self.max_tokens, left_out):
                continue
            goes_on = self.together and current == turns[: len(current)] and text.startswith(shorter)
            if current and not goes_on:
                yield current, marked
            current, shorter, marked = turns, text, marked | learned if goes_on else learned
        if current:
            yield current, marked

    @staticmethod
    def _count_round(counts: Counter[str], is_too_long: bool, left_out: int) -> bool:
        """Count a round, and return whether it is short enough to be used."""
        counts["rounds"] += 1
        if is_too_long:
            counts["rounds_too_long"] += 1
        elif left_out:
            counts["shortened_prompts"] += 1
            counts["candidates_left_out"] += left_out
        return not is_too_long

    def _shorter(self, prompt: Sequence[Message]) -> tuple[list[Message], int]:
        """Shorten a prompt like the loop; return it and the number of left-out candidates."""
        return shorten(prompt, lambda chat: len(self._chat.encode(chat)), self.max_prompt_tokens)

    def _reply(self, turns: Sequence[Message], place: int, text: str, ids: list[int]) -> tuple[int, int]:
        """Start and end (exclusive) of a reply after the loop's prompt."""
        opening = self._chat.render(turns[:place])
        if not text.startswith(opening):
            raise ValueError(
                f"{self._template} changes the turns before turn {place + 1} when a reply follows (some templates "
                "remove thoughts or move the system prompt), so the student would not learn from the loop's prompts: "
                "set data.chat_template to a template that only appends to the chat"
            )
        start = len(opening)
        content = self._chat.as_text(turns[place]["content"]).strip()
        # If the template does not end a prompt with an empty thought, the student has to write the empty thought.
        thought = _NO_THOUGHT.match(text, start)
        places = [len(text) - len(text[at:].lstrip()) for at in (start, thought.end() if thought else start)]
        begin = next((at for at in places if text.startswith(content, at)), None)
        if begin is None:
            raise ValueError(
                f"{self._template} writes {_shown(text[start:])} where the reply {_shown(content)} should begin: "
                "set data.chat_template to a template that writes replies unchanged"
            )
        end = self._end(text, begin + len(content))
        if end is None:
            raise ValueError(
                f"{self._template} ends a reply with {_shown(text[begin + len(content) :])}, but the tokens that "
                f"end a reply of this model are {', '.join(self._eos_tokens) or 'unknown'}: the student would never "
                "learn to stop; set eos_token of the tokenizer, or eos_token_id of the model's generation configuration"
            )
        return self._count(text, ids, start, place), self._count(text, ids, end, place)

    def _observation(self, turns: Sequence[Message], place: int, text: str, ids: list[int]) -> tuple[int, int]:
        """Start and end (exclusive) of a turn that the model does not write, without its header."""
        before, upto = (self._chat.render(turns[:number], reply=False) for number in (place, place + 1))
        content = self._chat.as_text(turns[place]["content"]).strip()
        found = upto.rfind(content)
        if not (text.startswith(upto) and upto.startswith(before)) or found < len(before):
            raise ValueError(f"{self._template} changes the text of turn {place + 1}: set data.learn to decisions")
        end = self._end(text, found + len(content)) or found + len(content)
        # The model never starts such a turn, so a label may include a blank that shares a token with the first word.
        blank = len(text[:found]) - len(text[:found].rstrip())
        start = found if self._is_border(text, ids, found) else found - blank
        return self._count(text, ids, start, place), self._count(text, ids, end, place)

    def _end(self, text: str, position: int) -> int | None:
        """The position after a turn's end token, if it directly follows the turn's text."""
        bare = text[position:].lstrip()
        token = next((one for one in self._eos_tokens if bare.startswith(one)), None)
        return None if token is None else len(text) - len(bare) + len(token)

    def _count(self, text: str, ids: list[int], position: int, place: int) -> int:
        """Return the number of tokens before a position; it must not depend on the text after the position."""
        if not self._is_border(text, ids, position):
            raise ValueError(
                f"turn {place + 1} does not begin and end between two tokens of {self._chat.model} "
                f"({_shown(text[max(0, position - 15) : position + 15])}): remove white space around its text, or "
                "set data.chat_template to a template that separates text and header"
            )
        return len(self._chat.tokens(text[:position]))

    def _is_border(self, text: str, ids: list[int], position: int) -> bool:
        before = self._chat.tokens(text[:position])
        return ids[: len(before)] == before


def _decisions(trajectory: Trajectory) -> list[int]:
    """Return the indices of the turns that the student has to write."""
    marked = zip(trajectory.messages, trajectory.learned)
    return [place for place, (turn, learned) in enumerate(marked) if learned and turn["role"] == "assistant"]


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")
