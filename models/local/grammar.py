"""Holds a model to the format of triples while it writes, and ends replies that only repeat themselves.

The grammar needs xgrammar (the extra `grammar`). It accepts what `models.data.triples.format_triples` writes, nothing
at all, and the word for "no facts". It can't keep a reply that is cut off at its limit from ending within a triple.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from tripletune.models.data.pairs import NO_FACTS, read_reply

if TYPE_CHECKING:
    import torch

    from tripletune.models.local.decoding import Request

# A name may hold brackets, and a pipe where no marker can follow it; a backslash escapes what comes next.
GRAMMAR = rf"""
root ::= "" | " "? ("{NO_FACTS}" | triple (", " triple)*)
triple ::= "(S> " name "| P> " name "| O> " name ")"
name ::= first rest*
first ::= [^ |\\\n\r\t] | "\\" [^\n\r]
rest ::= [^|\\\n\r] | "\\" [^\n\r] | "|"+ " "* [^ PO|\\\n\r]
"""

# A reply whose last so many triples all stood there before says nothing new any more.
_REPEATED = 4
# A triple takes some tokens for its markers alone, so shorter replies need not be looked at.
_FEWEST_TOKENS = 4 * _REPEATED


class TripleGrammar:
    """A `models.local.decoding.Constraint`: only tokens that keep a reply within the format.

    Args:
        tokenizer: The model's tokenizer.
        vocabulary: Width of the model's logits.
        ends: Tokens that end a reply.

    Raises:
        ValueError: xgrammar is not installed, or does not know this kind of tokenizer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Collection[int]) -> None:
        self._library = import_xgrammar()
        try:
            known = self._library.TokenizerInfo.from_huggingface(
                tokenizer, vocab_size=vocabulary, stop_token_ids=sorted(ends)
            )
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"xgrammar can't use this tokenizer ({error}): extract without the grammar") from error
        self._compiled = self._library.GrammarCompiler(known).compile_grammar(GRAMMAR)
        # A matcher a reply, and how many of its tokens it has read.
        self._matchers: dict[Request, tuple[Any, int]] = {}

    def restrict(self, logits: torch.Tensor, requests: Sequence[Request]) -> None:
        """Set the logits (B, V) of tokens that would leave the format to minus infinity, in place."""
        library, matchers = self._library, self._matchers
        # Every token is allowed in it; a row that is done stays so.
        mask = library.allocate_token_bitmask(len(requests), logits.shape[-1])
        self._matchers = {}
        for row, request in enumerate(requests):
            if request.done:
                continue
            matcher, read = matchers.get(request, (None, 0))
            if matcher is None or read > len(request.tokens):
                matcher, read = library.GrammarMatcher(self._compiled), 0
            for token in request.tokens[read:]:
                matcher.accept_token(token)
            self._matchers[request] = matcher, len(request.tokens)
            matcher.fill_next_token_bitmask(mask, row)
        library.apply_token_bitmask_inplace(logits, mask.to(logits.device))


class Repetition:
    """Says when a reply only repeats its triples, as greedy decoding of a small model does now and then.

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
        if reply.repeated < _REPEATED:
            return False
        start = len(text)
        for _ in range(_REPEATED):
            start = text.rfind("(S>", 0, max(start, 0))
        return start > 0 and len(read_reply(text[:start]).triples) == len(reply.triples)


def import_xgrammar() -> Any:
    """Import xgrammar.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import xgrammar
    except ImportError as error:
        raise ValueError(
            f"the grammar needs the package {error.name or 'xgrammar'}: pip install 'tripletune[grammar]', or extract "
            "without --grammar"
        ) from None
    return xgrammar
