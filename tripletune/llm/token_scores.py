"""Read how sure a server's model was of its reply: the log-probabilities in the response of a completion.

A chat's choice has a list of objects, one per token (`{"logprob", "top_logprobs": [{"logprob"}]}`); the completion of a
prompt has parallel lists ("token_logprobs", "top_logprobs").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tripletune.core.calls import TokenScores

# The fields of a request for a chat that ask for the chosen token's log-probability and the two largest ones.
ASKED = {"logprobs": True, "top_logprobs": 2}


class _Token(NamedTuple):
    """The log-probability of the chosen token, and those of the likeliest tokens at its place."""

    chosen: float
    likeliest: list[float]


def scores_in(logprobs: object) -> TokenScores | None:
    """The scores of a reply from the field "logprobs" of its choice; None if not every token has two log-probabilities.

    Servers differ in what they send, so anything else than the two forms says nothing about the reply.
    """
    if not isinstance(logprobs, dict):
        return None
    chosen = []
    margins = []
    try:
        for token in _tokens_in(logprobs):
            best, second = sorted(token.likeliest, reverse=True)[:2]
            chosen.append(float(token.chosen))
            margins.append(float(best - second))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return TokenScores.of(chosen, margins)


def _tokens_in(logprobs: dict[str, Any]) -> Iterator[_Token]:
    """The tokens of a reply in either form."""
    if logprobs.get("content") is not None:
        for token in logprobs["content"]:
            yield _Token(token["logprob"], [candidate["logprob"] for candidate in token["top_logprobs"]])
        return
    for chosen, candidates in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        yield _Token(chosen, list(candidates.values()))
