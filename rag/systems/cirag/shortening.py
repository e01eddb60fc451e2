"""Shorten the integrator's chat: candidates of earlier rounds are left out first, or else the last new ones."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tripletune.core.calls import Message
from tripletune.core.data.triples import Triple
from tripletune.rag.systems.cirag.integration import CANDIDATES, CANDIDATES_HEADING, triples_as_json

# The share of a chat that is sent again, if the whole chat is too long for the model.
_KEPT_SHARE = 0.85
# Candidates of earlier rounds, in the section historical_context (_FOUND) or in earlier turns (_SHOWN).
_FOUND = re.compile(r"^(facts found: )(.*)$", re.MULTILINE)
_SHOWN = re.compile(rf"^({re.escape(CANDIDATES_HEADING)})(.*)$", re.MULTILINE)


class ShortenedChat(NamedTuple):
    """A chat, and the number of candidates that were left out of it."""

    messages: list[Message]
    left_out: int


def leave_out_candidates(
    messages: Sequence[Message], count: Callable[[Sequence[Message]], int], limit: int
) -> ShortenedChat:
    """Copy a chat without candidates of earlier rounds, until it has at most `limit` tokens.

    Candidates of the oldest round are dropped first, and within a round those with the lowest rank. The question, the
    candidates of the newest round and the integrator's turns stay, so the result can still be too long.

    Args:
        count: Counts the tokens of a chat.
    """
    if count(messages) <= limit:
        return ShortenedChat(list(messages), 0)
    all_earlier = sum(len(_candidates_on_line(shown.line)) for shown in _earlier_candidates(messages))
    # The fewest that are enough, by bisection; if the chat never fits, all earlier candidates are dropped.
    fewest = bisect_left(range(all_earlier), True, key=lambda number: count(_without_oldest(messages, number)) <= limit)
    return ShortenedChat(_without_oldest(messages, fewest), fewest)


def fewer_candidates(messages: Sequence[Message]) -> list[Message] | None:
    """Shorten a chat by about 15 %: drop earlier candidates, or else the last new ones; None if only one is left."""
    limit = int(_KEPT_SHARE * _count_characters(messages))
    shortened, dropped = leave_out_candidates(messages, _count_characters, limit)
    if dropped:
        return shortened
    turn = messages[-1]["content"]
    newest = shown_candidates(turn) or []
    if len(newest) < 2:
        return None
    fewer = triples_as_json(newest[: int(_KEPT_SHARE * len(newest))])
    return [*messages[:-1], {"role": "user", "content": turn.replace(triples_as_json(newest), fewer, 1)}]


def _count_characters(messages: Sequence[Message]) -> int:
    """The length of a chat where no tokenizer is at hand: the model behind a server."""
    return sum(len(turn["content"]) for turn in messages)


def shown_candidates(turn: str) -> list[Triple] | None:
    """The candidates in a user turn of the integrator's chat, in order; None if the turn has no candidates."""
    _, heading, following = turn.partition(CANDIDATES_HEADING)
    if not heading:
        return None
    return _candidates_on_line(following.split("\n", 1)[0])


def _candidates_on_line(line: str) -> list[Triple]:
    """The candidates on a line of a prompt that `integration.messages_of` wrote."""
    try:
        return [Triple(*row) for row in json.loads(line)["fact"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the section {CANDIDATES} of a turn cannot be read: {error}") from None


class _Shown(NamedTuple):
    """Candidates of an earlier round in a chat: the index of their turn, the text before them, and their line."""

    place: int
    before: str
    line: str


def _earlier_candidates(messages: Sequence[Message]) -> list[_Shown]:
    """The candidates of all earlier rounds, oldest first, in either layout."""
    shown = []
    for place, turn in enumerate(messages):
        if turn["role"] != "user":
            continue
        # In the layout "section" they are in the last turn; in the layout "chat" in the turns before it.
        is_last = not any(later["role"] == "user" for later in messages[place + 1 :])
        pattern = _FOUND if is_last else _SHOWN
        for match in pattern.finditer(messages[place]["content"]):
            shown.append(_Shown(place, match[1], match[2]))
    return shown


def _without_oldest(messages: Sequence[Message], number: int) -> list[Message]:
    """Copy a chat without the oldest `number` candidates of earlier rounds, from the end of each round's list."""
    kept = list(messages)
    for place, before, line in _earlier_candidates(messages):
        candidates = _candidates_on_line(line)
        dropped = min(number, len(candidates))
        if dropped:
            number -= dropped
            fewer = triples_as_json(candidates[: len(candidates) - dropped])
            text = kept[place]["content"].replace(f"{before}{line}", f"{before}{fewer}", 1)
            kept[place] = {"role": "user", "content": text}
    return kept
