"""Chats of a local model: turn messages into prompt tokens, and restrict replies to triples or a JSON schema.

The grammar needs xgrammar (the extra `grammar`). That of triples accepts the output of
`core.data.triples.format_triples`, an empty reply, and the word for "no facts". A reply that is cut off at its limit
may still end within a triple or an object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import jinja2

from tripletune.core.calls import CallError, Message
from tripletune.core.data.pairs import NO_FACTS
from tripletune.core.data.triples import escaped_name, parse_triples
from tripletune.models.control_tokens import control_tokens, template_ids, text_ids

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedTokenizerBase

    from tripletune.models.local.requests import Request

# Put into text that looks like a control token; a private-use character, doubled if the text holds it.
_MARK = "\U000f0002"
_PREFIXES = 64
_THOUGHT_END = "</think>"
# Letters after "%" in a format of `strftime`.
_DIRECTIVES = "aAbBcdeFGHIjmMpSTuUVwWxXyYzZf"
# Many templates write today's date by default, but prompts must not change overnight. Those of LLaMA 3.1 and 3.2 take
# the date from `date_string`; those of Mistral, Granite, SmolLM3 and gpt-oss call `strftime_now` (`dated_template`).
DATE = "26 Jul 2024"
TEMPLATE_OPTIONS: dict[str, Any] = {"date_string": DATE, "enable_thinking": False}
# A name may hold brackets, and a pipe that cannot begin a marker; a backslash escapes the next character.
GRAMMAR = rf"""
root ::= "" | " "? ("{NO_FACTS}" | triple (", " triple)*)
triple ::= "(S> " name "| P> " predicate "| O> " name ")"
name ::= first rest*
first ::= [^ |\\\n\r\t] | "\\" [^\n\r]
rest ::= [^|\\\n\r] | "\\" [^\n\r] | "|"+ " "* [^ PO|\\\n\r]
"""
_ANY_PREDICATE = "predicate ::= name\n"

# A reply whose last triples, as many as this, are all repetitions says nothing new.
_REPEATED = 4
# Each triple needs some tokens for its markers, so shorter replies are not checked.
_FEWEST_TOKENS = 4 * _REPEATED


class ChatEncoder:
    """A tokenizer with its chat template.

    Args:
        template_options: More arguments of the template. By default, in training and inference, a template that writes
            the date writes `DATE`, and `enable_thinking` is off.
        plain: For base models without template: join the texts of the turns by blank lines.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model: str,
        template_options: Mapping[str, Any] | None = None,
        plain: bool = False,
    ) -> None:
        """Prepare two expressions: one finds control tokens, the other what `as_text` marks.

        `_spelled` matches a single character, the first of a control token's name, and a mark itself, so that every
        mark in a rendered text can be told from one of the text (`tokens_of`).
        """
        self.tokenizer = tokenizer
        self.model = model
        self.plain = plain
        self.template_options = {**TEMPLATE_OPTIONS, **(template_options or {})}
        if not plain and not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"model {model} has no chat template, so it is a base model: use its chat version (often ...-Instruct "
                "or ...-it), or for training set data.chat_template"
            )
        # Prefixes of the last system turns; the cache belongs to this encoder, since it holds its tokenizer.
        self._prefix = lru_cache(maxsize=_PREFIXES)(self._prefix_of)
        names = [re.escape(name) for name in control_tokens(tokenizer).values()]
        # The longest first, since one control token may be the beginning of another; "(?!)" matches nothing.
        any_name = "|".join(sorted(names, key=len, reverse=True)) or "(?!)"
        self._control = re.compile(f"({any_name})")
        self._spelled = re.compile(f"{_MARK}|(?={self._control.pattern}).", re.DOTALL)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of the prompt, up to the beginning of the reply."""
        return self.tokens(self.render(messages))

    def shared_length(self, messages: Sequence[Message], ids: Sequence[int]) -> int:
        """The number of first tokens of a prompt (`ids`) that all chats with the same system turn share."""
        if len(messages) < 2 or messages[0]["role"] != "system":
            return 0
        prefix = self._prefix(messages[0]["content"])
        # A template may write the turns of a longer chat differently.
        if list(ids[: len(prefix)]) != prefix:
            return 0
        return len(prefix)

    def render(self, messages: Sequence[Message], reply: bool = True) -> str:
        """Render the turns as text for `tokens`; with `reply`, the text includes the beginning of the reply's turn.

        Raises:
            CallError: The template rejects the turns, or writes one of them incompletely.
        """
        if self.plain:
            return "\n\n".join(turn["content"] for turn in messages)
        given: list[Message] = [{"role": turn["role"], "content": self.as_text(turn["content"])} for turn in messages]
        joined = join_system(given)
        options: Any = {"tokenize": False, "add_generation_prompt": reply, **self.template_options}
        template = dated_template(self.tokenizer.get_chat_template())
        problem = ""
        # Some templates reject system turns, for example Gemma's; others leave them out without an error.
        for turns in (given, joined):
            try:
                text = str(self.tokenizer.apply_chat_template(turns, chat_template=template, **options))
            except jinja2.TemplateError as error:
                roles = ", ".join(turn["role"] for turn in turns)
                problem = f"rejects the turns {roles}: {error}"
                continue
            lost = lost_turn(turns, text)
            if lost is None:
                return text
            problem = (
                f"does not write turn {lost + 1} ({turns[lost]['role']}) as it is: use a template that does (for "
                "training, data.chat_template), or leave the turn out"
            )
        raise CallError(f"{self.model}: the chat template {problem}")

    def as_text(self, content: str) -> str:
        """A turn's text as `render` writes it, with marks in text that looks like a control token."""
        return self._spelled.sub(lambda match: match[0] + _MARK, content)

    def tokens(self, text: str) -> list[int]:
        """Tokens of a text from `render`, without control tokens inside turns."""
        return self.tokens_of([text])[0]

    def tokens_of(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokens` of several texts, in one call of the tokenizer."""
        if not texts:
            return []
        if self.plain:
            beginning = self._plain_beginning()
            return [[*beginning, *ids] for ids in text_ids(self.tokenizer, texts)]
        # The template writes the special tokens itself.
        rows = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        tokens = []
        for text, ids in zip(texts, rows, strict=True):
            tokens.append(self._tokens_apart(text) if _MARK in text else list(ids))
        return tokens

    def _plain_beginning(self) -> list[int]:
        """The special tokens that the tokenizer puts before a text; not those after it, because a reply follows."""
        with_special = text_ids(self.tokenizer, ["a"], around=True)[0]
        without_special = text_ids(self.tokenizer, ["a"])[0]
        return with_special[: with_special.index(without_special[0])]

    def _tokens_apart(self, text: str) -> list[int]:
        """Tokens of a text with marks: parts between control tokens are tokenised separately if they hold a mark.

        Only these parts: splitting a text changes its tokens, and a text without marks must have those of training.
        """
        ids: list[int] = []
        # The text since the last part with a mark; it is tokenised as a whole, with its control tokens.
        unmarked = ""
        for part in self._control.split(text):
            if _MARK not in part:
                unmarked += part
                continue
            ids += template_ids(self.tokenizer, unmarked)
            unmarked = ""
            # Remove the marks; a doubled mark is a character of the text.
            ids += text_ids(self.tokenizer, [re.sub(f"{_MARK}({_MARK}?)", r"\1", part)])[0]
        return ids + template_ids(self.tokenizer, unmarked)

    def _prefix_of(self, system: str) -> list[int]:
        """The tokens with which all chats with this system turn begin.

        The common prefix of two chats is the template's and the system turn's text, if their user turns differ from
        their first character on, in kind too, so that they share no token.
        """
        system_turn: Message = {"role": "system", "content": system}
        first_chat = self.encode([system_turn, {"role": "user", "content": "0"}])
        second_chat = self.encode([system_turn, {"role": "user", "content": "Zq"}])
        prefix = []
        # Their lengths may differ: the second user turn may have more tokens.
        for token, other_token in zip(first_chat, second_chat, strict=False):
            if token != other_token:
                break
            prefix.append(token)
        return prefix


def eos_token_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None) -> list[int]:
    """Every token that ends a reply: those of the generation settings and the tokenizer's.

    Chat models end a turn and a text by different tokens, and either file may name only one of them.
    """
    tokens = getattr(generation_config, "eos_token_id", None)
    if not isinstance(tokens, list):
        tokens = [tokens]
    return sorted({int(token) for token in [*tokens, tokenizer.eos_token_id] if token is not None})


def join_system(turns: Sequence[Message]) -> list[Message]:
    """Put the system turn at the beginning of the first user turn, for templates without a system role.

    Without a user turn behind it, the system turn becomes one itself, since such templates begin with a user turn.
    """
    joined = [turn.copy() for turn in turns]
    if joined[0]["role"] != "system":
        return joined
    system = joined[0]["content"]
    if len(joined) > 1 and joined[1]["role"] == "user":
        joined[1]["content"] = f"{system}\n\n{joined[1]['content']}"
        return joined[1:]
    joined[0] = {"role": "user", "content": system}
    return joined


def dated_template(template: str) -> str:
    """A chat template in which `strftime_now` writes the day of `DATE` instead of today.

    transformers passes no functions to templates, so the template itself defines the function.
    """
    macro = _day_macro()
    if "strftime_now" not in template or template.startswith(macro):
        return template
    return macro + template


@cache
def _day_macro() -> str:
    """A macro of Jinja that does what `strftime` does for the day of `DATE`."""
    day = datetime.strptime(DATE, "%d %b %Y")
    filters = ""
    for letter in _DIRECTIVES:
        written = day.strftime(f"%{letter}")
        # "%-d" writes the number without a leading zero.
        short = written.lstrip("0") or "0"
        filters += f"|replace('%{letter}', '{written}')|replace('%-{letter}', '{short}')"
    # The empty expression keeps a line break with which a template may begin.
    return f"{{% macro strftime_now(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}{{{{ '' }}}}"


def lost_turn(turns: Sequence[Mapping[str, Any]], text: str) -> int | None:
    """Index of a turn whose text a template left out or changed; None if the rendered text has all turns.

    White space and the thoughts of a reply do not count, since many templates remove them.
    """
    contents = []
    for index, turn in enumerate(turns):
        content = str(turn["content"])
        if turn["role"] == "assistant":
            content = content.rpartition(_THOUGHT_END)[2]
        contents.append((" ".join(content.split()), index))
    remaining = " ".join(text.split())
    # The longest first: a turn that was left out must not be found inside a longer one.
    for content, index in sorted(contents, key=lambda pair: -len(pair[0])):
        if content not in remaining:
            return index
        remaining = remaining.replace(content, "\0", 1)
    return None


def triple_grammar(predicates: Sequence[str] = ()) -> str:
    """The grammar of triples in xgrammar's EBNF; `predicates` are the only ones that can be written, if there are any.

    A string in the grammar has the escapes of JSON.
    """
    if not predicates:
        return GRAMMAR + _ANY_PREDICATE
    choices = []
    for predicate in predicates:
        choices.append(json.dumps(escaped_name(predicate), ensure_ascii=False))
    return f"{GRAMMAR}predicate ::= {' | '.join(choices)}\n"


class ReplyGrammar:
    """Allow only tokens that keep a reply within its format.

    Args:
        vocabulary: Number of the model's logits.
        ends: End-of-sequence tokens.
        triples: Whether replies without a `Request.schema` can hold only triples; else they are free.
        predicates: The only predicates of these triples; empty: any.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocabulary: int,
        ends: Collection[int],
        triples: bool = True,
        predicates: Sequence[str] = (),
    ) -> None:
        """Prepare xgrammar for the tokenizer, which is an optional package and does not know every kind of tokenizer.

        Raises:
            ValueError: The package is missing, or can't use this tokenizer.
        """
        try:
            import xgrammar
        except ImportError as error:
            raise ValueError(
                f"the grammar needs the package {error.name or 'xgrammar'}: run pip install 'tripletune[grammar]', or "
                "leave out --set grammar=yes and --vocabulary"
            ) from None
        self._library: Any = xgrammar
        try:
            tokens = self._library.TokenizerInfo.from_huggingface(
                tokenizer, vocab_size=vocabulary, stop_token_ids=sorted(ends)
            )
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"xgrammar can't use this tokenizer ({error}): leave out --set grammar=yes") from error
        self._compiler = self._library.GrammarCompiler(tokens)
        self._triples = self._compiler.compile_grammar(triple_grammar(predicates)) if triples else None
        # Each reply's matcher, and how many tokens the matcher has read.
        self._matchers: dict[Request, tuple[Any, int]] = {}

    def compiled_grammar(self, schema: str | None) -> Any:
        """xgrammar's compiled grammar of a JSON schema, or without one that of triples; None: any text is allowed.

        Raises:
            ValueError: The schema can't be compiled.
        """
        if schema is None:
            return self._triples
        try:
            # The compiler keeps what it has compiled. Free white space would let a model write nothing else.
            return self._compiler.compile_json_schema(schema, any_whitespace=False)
        except RuntimeError as error:
            raise ValueError(f"the JSON schema can't be used as a grammar: {error}") from error

    def restrict(self, logits: torch.Tensor, requests: Sequence[Request]) -> None:
        """Set the logits (B, V) of tokens that would leave the format to minus infinity, in place.

        A matcher is kept per request, not per row, since rows move when a reply ends.
        """
        # The new mask allows every token; rows that are done keep it.
        mask = self._library.allocate_token_bitmask(len(requests), logits.shape[-1])
        matchers_before = self._matchers
        self._matchers = {}
        for row, request in enumerate(requests):
            compiled = self.compiled_grammar(request.schema)
            if request.done or compiled is None:
                continue
            matcher, read = matchers_before.get(request, (None, 0))
            # A reply that was started again is shorter than what its matcher has read.
            if matcher is None or read > len(request.tokens):
                matcher = self._library.GrammarMatcher(compiled)
                read = 0
            for token in request.tokens[read:]:
                matcher.accept_token(token)
            self._matchers[request] = matcher, len(request.tokens)
            matcher.fill_next_token_bitmask(mask, row)
        self._library.apply_token_bitmask_inplace(logits, mask.to(logits.device))


class Repetition:
    """Detect replies that only repeat their triples, which greedy decoding of a small model sometimes writes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # A triple can only be complete after a token with a closing bracket.
        self._closing = {token for text, token in tokenizer.get_vocab().items() if ")" in text}

    def only_repeats(self, request: Request) -> bool:
        """Whether a reply ends with a complete triple and its last four triples are repetitions.

        Text is decoded only at the end of a triple, since this is asked after each token.
        """
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
