"""Replies that only repeat their triples, as greedy decoding of a small model does now and then up to its limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tripletune.models.data.pairs import read_reply

if TYPE_CHECKING:
    from tripletune.models.local.decoding import Request

# A reply whose last so many triples all stood there before says nothing new any more.
REPEATED = 4
# A triple takes some tokens for its markers alone, so shorter replies need not be looked at.
_FEWEST_TOKENS = 4 * REPEATED


class Circles:
    """Says when a reply goes round in circles.

    Args:
        tokenizer: The model's tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Few tokens close a bracket, and only behind one of them a triple can be whole.
        self._closing = {token for text, token in tokenizer.get_vocab().items() if ")" in text}

    def found(self, request: Request) -> bool:
        """Whether a reply ends with a whole triple, and its last four stood there before."""
        if len(request.tokens) < _FEWEST_TOKENS or request.tokens[-1] not in self._closing:
            return False
        text = self._tokenizer.decode(request.tokens, skip_special_tokens=True).rstrip(" ,")
        if not text.endswith(")"):
            return False
        reply = read_reply(text)
        if reply.repeated < REPEATED:
            return False
        start = len(text)
        for _ in range(REPEATED):
            start = text.rfind("(S>", 0, max(start, 0))
        return start > 0 and len(read_reply(text[:start]).triples) == len(reply.triples)
