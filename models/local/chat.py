"""Chats of a local model: turn messages into prompt tokens, and restrict replies to triples by a grammar.

The grammar needs xgrammar (the extra `grammar`). It accepts the output of `core.data.triples.format_triples`, an
empty reply, and the word for "no facts". A reply that is cut off at its limit may still end within a triple.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import jinja2

from tripletune.core.calls import CallError, Message
from tripletune.core.data.pairs import NO_FACTS
from tripletune.core.data.triples import parse_triples
from tripletune.models.control_tokens import control_tokens, text_ids

if TYPE_CHECKING:
    import torch

    from tripletune.models.local import Request

# Put into text that looks like a control token; a private-use character, doubled if the text holds it.
_MARK = "\U000f0002"
_PREFIXES = 64
# Templates of LLaMA 3.1 and 3.2 write today's date by default, but prompts must not change overnight.
DATE = "26 Jul 2024"
# A name may hold brackets, and a pipe that cannot begin a marker; a backslash escapes the next character.
GRAMMAR = rf"""
root ::= "" | " "? ("{NO_FACTS}" | triple (", " triple)*)
triple ::= "(S> " name "| P> " name "| O> " name ")"
name ::= first rest*
first ::= [^ |\\\n\r\t] | "\\" [^\n\r]
rest ::= [^|\\\n\r] | "\\" [^\n\r] | "|"+ " "* [^ PO|\\\n\r]
"""

# A reply whose last triples, as many as this, are all repetitions says nothing new.
_REPEATED = 4
# Each triple needs some tokens for its markers, so shorter replies are not checked.
_FEWEST_TOKENS = 4 * _REPEATED


class ChatEncoder:
    """A tokenizer with its chat template.

    Args:
        template_options: More arguments of the template. By default, in training and inference, templates with a date
            get `DATE`, and `enable_thinking` is off.
        plain: For base models without template: join the texts of the turns by blank lines.
    """

    def __init__(
        self, tokenizer: Any, model: str, template_options: Mapping[str, Any] | None = None, plain: bool = False
    ) -> None:
        self.tokenizer, self.model, self.plain = tokenizer, model, plain
        self.template_options = {"date_string": DATE, "enable_thinking": False, **(template_options or {})}
        if not plain and not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"model {model} has no chat template, so it is a base model: use its chat version (often ...-Instruct "
                "or ...-it), or for training set data.chat_template"
            )
        self._prefix = lru_cache(maxsize=_PREFIXES)(self._prefix_of)
        names = sorted(map(re.escape, control_tokens(tokenizer).values()), key=len, reverse=True)
        self._control = re.compile(f"({'|'.join(names) or '(?!)'})")
        self._spelled = re.compile(f"{_MARK}|(?={self._control.pattern}).", re.DOTALL)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of the prompt, up to the beginning of the reply."""
        return self.tokens(self.render(messages))

    def shared(self, messages: Sequence[Message], ids: Sequence[int]) -> int:
        """The number of first tokens of a prompt (`ids`) that all chats with the same system turn share."""
        if len(messages) < 2 or messages[0]["role"] != "system":
            return 0
        known = self._prefix(messages[0]["content"])
        return len(known) if list(ids[: len(known)]) == known else 0

    def render(self, messages: Sequence[Message], reply: bool = True) -> str:
        """Render the turns as text for `tokens`; with `reply`, the text includes the beginning of the reply's turn."""
        if self.plain:
            return "\n\n".join(turn["content"] for turn in messages)
        given = [{"role": turn["role"], "content": self.as_text(turn["content"])} for turn in messages]
        options: Any = {"tokenize": False, "add_generation_prompt": reply, **self.template_options}
        # Some templates, for example Gemma's, reject system turns.
        for turns in (given, joined := join_system(given)):
            try:
                return str(self.tokenizer.apply_chat_template(turns, **options))
            except jinja2.TemplateError as error:
                refused = error
        roles = ", ".join(turn["role"] for turn in joined)
        raise CallError(f"{self.model}: the chat template rejects the turns {roles}: {refused}")

    def as_text(self, content: str) -> str:
        """A turn's text as `render` writes it, with marks in text that looks like a control token."""
        return self._spelled.sub(lambda match: match[0] + _MARK, content)

    def tokens(self, text: str) -> list[int]:
        """Tokens of a text from `render`, without control tokens inside turns."""
        return self.tokens_of([text])[0]

    def tokens_of(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokens` of several texts."""
        if self.plain:
            # Drop the end token that some tokenizers add, because a reply follows.
            around, bare = (text_ids(self.tokenizer, ["a"], around)[0] for around in (True, False))
            return [[*around[: around.index(bare[0])], *ids] for ids in text_ids(self.tokenizer, texts)]
        # The template writes the special tokens itself.
        rows = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        return [self._tokens_apart(text) if _MARK in text else list(ids) for text, ids in zip(texts, rows)]

    def _tokens_apart(self, text: str) -> list[int]:
        """Tokens of a text with marks: parts between control tokens are tokenised separately if they hold a mark."""
        ids, before = list[int](), ""
        for part in [*self._control.split(text), _MARK]:
            if _MARK in part:
                ids += self.tokenizer(before, add_special_tokens=False)["input_ids"] if before else []
                ids += text_ids(self.tokenizer, [re.sub(f"{_MARK}({_MARK}?)", r"\1", part)])[0]
            before = "" if _MARK in part else before + part
        return ids

    def _prefix_of(self, system: str) -> list[int]:
        first: Message = {"role": "system", "content": system}
        # The common prefix of two chats with different user turns is the template's and the system turn's text.
        one, two = (self.encode([first, {"role": "user", "content": text}]) for text in ("0", "Zq"))
        return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two))]


def eos_token_ids(tokenizer: Any, generation_config: Any = None) -> list[int]:
    """Every token that ends a reply: those of the generation settings and the tokenizer's."""
    found = getattr(generation_config, "eos_token_id", None)
    tokens = found if isinstance(found, list) else [found]
    return sorted({int(token) for token in [*tokens, tokenizer.eos_token_id] if token is not None})


def join_system(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Put the system turn at the beginning of the first user turn, for templates without a system role."""
    first, *rest = map(dict, turns)
    if first["role"] != "system":
        return [first, *rest]
    if rest and rest[0]["role"] == "user":
        rest[0]["content"] = f"{first['content']}\n\n{rest[0]['content']}"
        return rest
    return [{"role": "user", "content": first["content"]}, *rest]


class TripleGrammar:
    """Allow only tokens that keep a reply within the format."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Collection[int]) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise ValueError(
                f"the grammar needs the package {error.name or 'xgrammar'}: run pip install 'tripletune[grammar]', or "
                "leave out --set grammar=yes"
            ) from None
        self._library: Any = xgrammar
        try:
            known = self._library.TokenizerInfo.from_huggingface(
                tokenizer, vocab_size=vocabulary, stop_token_ids=sorted(ends)
            )
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"xgrammar can't use this tokenizer ({error}): leave out --set grammar=yes") from error
        self._compiled = self._library.GrammarCompiler(known).compile_grammar(GRAMMAR)
        # Each reply's matcher, and how many tokens the matcher has read.
        self._matchers: dict[Request, tuple[Any, int]] = {}

    def restrict(self, logits: torch.Tensor, requests: Sequence[Request]) -> None:
        """Set the logits (B, V) of tokens that would leave the format to minus infinity, in place."""
        library, matchers = self._library, self._matchers
        # The new mask allows every token; rows that are done keep it.
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
    """Detect replies that only repeat their triples, which greedy decoding of a small model sometimes writes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # A triple can only be complete after a token with a closing bracket.
        self._closing = {token for text, token in tokenizer.get_vocab().items() if ")" in text}

    def found(self, request: Request) -> bool:
        """Whether a reply ends with a complete triple and its last four triples are repetitions."""
        if len(request.tokens) < _FEWEST_TOKENS or request.tokens[-1] not in self._closing:
            return False
        text = self._tokenizer.decode(request.tokens, skip_special_tokens=True).rstrip(" ,")
        if not text.endswith(")"):
            return False
        triples = parse_triples(text).triples
        distinct = set(triples)
        if len(triples) - len(distinct) < _REPEATED:
            return False
        # The last triples say nothing new if the text before them has the same distinct triples.
        start = len(text)
        for _ in range(_REPEATED):
            start = text.rfind("(S>", 0, max(start, 0))
        return start > 0 and set(parse_triples(text[:start]).triples) == distinct
