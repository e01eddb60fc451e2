"""Chats of a local model: from turns to prompt tokens, and a grammar for replies of triples.

The grammar needs xgrammar (the extra `grammar`). It accepts what `models.data.triples.format_triples` writes, nothing
at all, and the word for "no facts". A reply that is cut off at its limit may still end within a triple.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import jinja2

from tripletune.models.control_tokens import control_tokens, text_ids
from tripletune.models.data.pairs import NO_FACTS, read_reply
from tripletune.models.llm import CallError, Message

if TYPE_CHECKING:
    import torch

    from tripletune.models.local import Request

# Stands in what a turn's text spells like a control token; private use, and doubled where a text has it.
_MARK = "\U000f0002"
_PREFIXES = 64
# Templates of LLaMA 3.1 and 3.2 write the day's date unless given one: prompts must not change overnight.
DATE = "26 Jul 2024"
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


class ChatEncoder:
    """A tokenizer with its chat template.

    Args:
        template_options: More arguments of the template. By default templates with a date get `DATE`, and thinking is
            off (`enable_thinking`), in training and use alike.
        plain: For base models, which have no template: the turns' texts, with blank lines between them.
    """

    def __init__(
        self, tokenizer: Any, model: str, template_options: Mapping[str, Any] | None = None, plain: bool = False
    ) -> None:
        self.tokenizer, self.model, self.plain = tokenizer, model, plain
        self.template_options = {"date_string": DATE, "enable_thinking": False, **(template_options or {})}
        if not plain and not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"model {model} has no chat template, so it is a base model: name its chat version (often ...-Instruct "
                "or ...-it), or, to train it, a template as data.chat_template"
            )
        self._prefix = lru_cache(maxsize=_PREFIXES)(self._prefix_of)
        names = sorted(map(re.escape, control_tokens(tokenizer).values()), key=len, reverse=True)
        self._control = re.compile(f"({'|'.join(names) or '(?!)'})")
        self._spelled = re.compile(f"{_MARK}|(?={self._control.pattern}).", re.DOTALL)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The prompt's tokens, up to where the reply begins."""
        return self.tokens(self.render(messages))

    def shared(self, messages: Sequence[Message], ids: Sequence[int]) -> int:
        """The number of a prompt's first tokens (`ids`) that all chats with its system turn share."""
        if len(messages) < 2 or messages[0]["role"] != "system":
            return 0
        known = self._prefix(messages[0]["content"])
        return len(known) if list(ids[: len(known)]) == known else 0

    def render(self, messages: Sequence[Message], reply: bool = True) -> str:
        """The turns as text for `tokens`, up to where a reply to the last one begins if `reply` is set."""
        if self.plain:
            return "\n\n".join(turn["content"] for turn in messages)
        given = [{"role": turn["role"], "content": self.as_text(turn["content"])} for turn in messages]
        options: Any = {"tokenize": False, "add_generation_prompt": reply, **self.template_options}
        # Not every template knows system turns; Gemma's, for one, refuses them.
        for turns in (given, joined := join_system(given)):
            try:
                return str(self.tokenizer.apply_chat_template(turns, **options))
            except jinja2.TemplateError as error:
                refused = error
        roles = ", ".join(turn["role"] for turn in joined)
        raise CallError(f"{self.model}: its chat template refuses the turns {roles}: {refused}")

    def as_text(self, content: str) -> str:
        """A turn's text as `render` writes it, with marks in what looks like a control token."""
        return self._spelled.sub(lambda match: match[0] + _MARK, content)

    def tokens(self, text: str) -> list[int]:
        """Tokens of a text from `render`, without control tokens inside turns."""
        return self.tokens_of([text])[0]

    def tokens_of(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokens` of several texts."""
        if self.plain:
            # Some tokenizers put an end token behind a text, and a reply is to follow.
            around, bare = (text_ids(self.tokenizer, ["a"], around)[0] for around in (True, False))
            return [[*around[: around.index(bare[0])], *ids] for ids in text_ids(self.tokenizer, texts)]
        # The template writes the special tokens itself.
        rows = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
        return [self._tokens_apart(text) if _MARK in text else list(ids) for text, ids in zip(texts, rows)]

    def _tokens_apart(self, text: str) -> list[int]:
        """Tokens of a text with marks: what stands between two control tokens is read apart where it has one."""
        ids, before = list[int](), ""
        for part in [*self._control.split(text), _MARK]:
            if _MARK in part:
                ids += self.tokenizer(before, add_special_tokens=False)["input_ids"] if before else []
                ids += text_ids(self.tokenizer, [re.sub(f"{_MARK}({_MARK}?)", r"\1", part)])[0]
            before = "" if _MARK in part else before + part
        return ids

    def _prefix_of(self, system: str) -> list[int]:
        first: Message = {"role": "system", "content": system}
        # What two chats without a common word share is the template's and the system turn's.
        one, two = (self.encode([first, {"role": "user", "content": text}]) for text in ("0", "Zq"))
        return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two))]


def eos_token_ids(tokenizer: Any, generation_config: Any = None) -> list[int]:
    """Every token that ends a reply: chat models often have one more than their tokenizer."""
    found = getattr(generation_config, "eos_token_id", None)
    tokens = found if isinstance(found, list) else [found]
    return sorted({int(token) for token in [*tokens, tokenizer.eos_token_id] if token is not None})


def join_system(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The system's turn as the beginning of the first user turn, for templates without a system role."""
    first, *rest = map(dict, turns)
    if first["role"] != "system":
        return [first, *rest]
    if rest and rest[0]["role"] == "user":
        rest[0]["content"] = f"{first['content']}\n\n{rest[0]['content']}"
        return rest
    return [{"role": "user", "content": first["content"]}, *rest]


class TripleGrammar:
    """Only tokens that keep a reply within the format."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Collection[int]) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise ValueError(
                f"the grammar needs the package {error.name or 'xgrammar'}: pip install 'tripletune[grammar]', or "
                "extract without --set grammar=yes"
            ) from None
        self._library: Any = xgrammar
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
    """Says when a reply only repeats its triples, as greedy decoding of a small model does now and then."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Few tokens close a bracket, and only behind one of them a triple can be whole.
        self._closing = {token for text, token in tokenizer.get_vocab().items() if ")" in text}

    def found(self, request: Request) -> bool:
        """Whether a reply ends with a whole triple and its last four are repetitions."""
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
