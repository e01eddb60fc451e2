"""Long chats of CIRAG's integrator: the oldest candidates go first, in the loop and in training alike.

The paper shows every candidate of every round (eq. 2). A student with a short context, or a short training sequence,
can't always hold them. What is left out then is what was retrieved longest ago; what was kept of it still stands in
the integrator's own turns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from tripletune.models.data.passages import Passage
from tripletune.models.data.triples import Triple
from tripletune.models.llm.client import Message
from tripletune.rag.retrieval.sentences import Fact
from tripletune.rag.systems.cirag.integration import CANDIDATES, write_triples

_HEADING = f"[[## {CANDIDATES} ##]]\n"
_NOWHERE = Passage("", "", "-")


def shorten(
    messages: Sequence[Message], count: Callable[[Sequence[Message]], int], limit: int
) -> tuple[list[Message], int]:
    """Leave candidates of earlier rounds out until a prompt fits.

    They go round by round from the first one on, and within a round from the last in rank. The question, the candidates
    of the newest round and the integrator's own turns stay, so the result can still be too long.

    Args:
        messages: The integrator's chat up to the newest candidates.
        count: Tokens of a chat.
        limit: Most tokens.

    Returns:
        The chat, and how many candidates were left out.
    """
    if count(messages) <= limit:
        return list(messages), 0
    fewest, most = 1, sum(len(shown_candidates(turn["content"]) or ()) for turn in _earlier(messages))
    if not most:
        return list(messages), 0
    while fewest < most:
        middle = (fewest + most) // 2
        if count(_without(messages, middle)) <= limit:
            most = middle
        else:
            fewest = middle + 1
    return _without(messages, most), most


def shown_candidates(turn: str) -> list[Triple] | None:
    """The candidates in a user turn of the integrator's chat, in their order; None where it shows none.

    Raises:
        ValueError: they are not written as `rag.cirag_integration.write_triples` does.
    """
    _, found, rest = turn.partition(_HEADING)
    if not found:
        return None
    try:
        return [Triple(*row) for row in json.loads(rest.split("\n", 1)[0])["fact"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the section {CANDIDATES} of a turn can't be read: {error}") from None


def _earlier(messages: Sequence[Message]) -> list[Message]:
    """The user turns of the rounds before the newest."""
    return [turn for turn in messages if turn["role"] == "user"][:-1]


def _without(messages: Sequence[Message], number: int) -> list[Message]:
    """The chat without the oldest `number` candidates of earlier rounds."""
    newest = max((place for place, turn in enumerate(messages) if turn["role"] == "user"), default=0)
    kept: list[Message] = []
    for place, turn in enumerate(messages):
        candidates = shown_candidates(turn["content"]) if turn["role"] == "user" and place < newest else None
        if not candidates or not number:
            kept.append(turn)
            continue
        left = candidates[: max(0, len(candidates) - number)]
        number -= len(candidates) - len(left)
        before, heading, rest = turn["content"].partition(_HEADING)
        tail = rest.partition("\n")
        shown = write_triples(Fact(triple, _NOWHERE, "") for triple in left)
        kept.append({"role": "user", "content": f"{before}{heading}{shown}{tail[1]}{tail[2]}"})
    return kept
