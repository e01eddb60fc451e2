"""A local transformers model as a backend: calls that wait together run as one batch, in a thread of its own.

Greedy replies are the same text for any batch size in float32. Sampled ones are too: each call draws from its own
random generator, so that a reply depends on its messages, settings and seed, and not on its neighbours.

Importing this module imports torch: whoever may do without it imports this module when it is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from models.generation import Completion
from models.llm.api import ledger_name
from models.llm.chat import ChatEncoder
from models.llm.client import CallError, Message, Sampling
from models.sources import load_causal_lm, parse_dtype

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Call:
    """One waiting call: its prompt's tokens, how many may be written, and who waits."""

    ids: list[int]
    limit: int
    sampling: Sampling
    future: asyncio.Future[Completion]

    @property
    def batch_key(self) -> tuple[Sampling, int]:
        # The seed is each call's own affair; everything else holds for a whole batch.
        return replace(self.sampling, seed=None), self.limit


class HFBackend:
    """A causal language model of transformers with its chat template.

    Args:
        model: Hub id, folder or `pypi:package`.
        batch_size: Most calls in one batch. On a GPU that runs out of memory it is halved until batches fit.
        dtype: "auto" (bfloat16 where the hardware multiplies it natively), "float32", "bfloat16" or "float16".
        template_options: More arguments of the chat template, for example {"enable_thinking": False}. They change
            replies, so they are part of the ledger's name.
        plain: For base models, which have no chat template: the turns' texts, with a blank line after each.

    Attributes:
        model: "hf:<model>" and the template's options.

    Raises:
        FileNotFoundError: no such model.
        ValueError: an option makes no sense, or the model has no chat template and `plain` is not set.
    """

    def __init__(
        self,
        model: str,
        batch_size: int = 16,
        dtype: str = "auto",
        template_options: Mapping[str, Any] | None = None,
        plain: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size} must be at least 1")
        self.model = ledger_name("hf", str(model), template_options)
        self.batch_size = batch_size
        self._lm, self._tokenizer = load_causal_lm(model, parse_dtype(dtype))
        if torch.cuda.is_available():
            self._lm = self._lm.to("cuda")
        self._chat = ChatEncoder(self._tokenizer, self.model, template_options, plain)
        self._ends = _end_tokens(self._lm, self._tokenizer)
        # The model's own settings (a repetition penalty, a temperature) are not what a call asks for.
        self._lm.generation_config = GenerationConfig()
        self._context = _context_length(self._lm)
        self._waiting: list[_Call] = []
        self._running: list[_Call] = []
        self._worker: asyncio.Task[None] | None = None
        self._executor: ThreadPoolExecutor | None = None

    def __repr__(self) -> str:
        return f"HFBackend({self.model!r}, batch_size={self.batch_size})"

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Reply to a chat, together with the calls that wait; see `models.llm.client.Backend`.

        A reply is cut at the end of the model's context if that comes before `max_tokens`.
        """
        ids = self._chat.encode(messages)
        limit = sampling.max_tokens
        if self._context is not None:
            if len(ids) >= self._context:
                raise CallError(
                    f"{self.model}: the prompt has {len(ids)} tokens and the model's context {self._context}: "
                    "shorten the prompt or take a model with a longer context"
                )
            limit = min(limit, self._context - len(ids))
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Call(ids, limit, sampling, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def close(self) -> None:
        """End the thread. Calls that still wait fail, and the batch under way stops at its next token."""
        for call in [*self._waiting, *self._running]:
            if not call.future.done() and not call.future.get_loop().is_closed():
                call.future.set_exception(CallError(f"{self.model}: the backend was closed while this call waited"))
        self._waiting = []
        executor, self._executor = self._executor, None
        if executor is not None:
            await asyncio.to_thread(executor.shutdown)

    async def _work(self) -> None:
        count = -1
        while self._waiting:
            # As long as other tasks still arrive at a call, let them.
            while count != len(self._waiting):
                count = len(self._waiting)
                await asyncio.sleep(0)
            count = -1
            batch = self._next_batch()
            if not batch:
                continue
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="hf-backend")
            self._running = batch
            loop = asyncio.get_running_loop()
            replies = await loop.run_in_executor(self._executor, self._run, batch)
            self._running = []
            for call, reply in zip(batch, replies):
                if call.future.done():
                    continue
                if isinstance(reply, Completion):
                    call.future.set_result(reply)
                else:
                    call.future.set_exception(reply)

    def _next_batch(self) -> list[_Call]:
        """The oldest call and those that fit it: same settings, nearest in length."""
        # Those whose callers are gone are dropped, also the ones of an event loop that ended.
        self._waiting = [call for call in self._waiting if not call.future.done()]
        if not self._waiting:
            return []
        oldest = self._waiting[0]
        alike = [call for call in self._waiting if call.batch_key == oldest.batch_key]
        alike.sort(key=lambda call: len(call.ids))
        start = alike.index(oldest) // self.batch_size * self.batch_size
        batch = alike[start : start + self.batch_size]
        chosen = set(map(id, batch))
        self._waiting = [call for call in self._waiting if id(call) not in chosen]
        return batch

    def _run(self, calls: list[_Call]) -> list[Completion | Exception]:
        """Reply to a batch; in halves if it does not fit the GPU, one by one if it fails otherwise."""
        try:
            return list(self._generate(calls))
        except torch.OutOfMemoryError:
            if len(calls) == 1:
                return [
                    CallError(
                        f"{self.model}: a prompt of {len(calls[0].ids)} tokens and a reply of up to {calls[0].limit} "
                        "don't fit the GPU: set dtype bfloat16, lower max_tokens, or take a smaller model"
                    )
                ]
            cut = len(calls) // 2
            self.batch_size = min(self.batch_size, max(1, cut))
            logger.warning("%s: out of GPU memory with %d calls; at most %d now", self.model, len(calls), cut)
        except Exception as error:
            if len(calls) == 1:
                return [error]
            # One bad call must not fail its neighbours: find it by itself.
            cut = 1
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        parts = [calls[start : start + cut] for start in range(0, len(calls), cut)]
        return [reply for part in parts for reply in self._run(part)]

    @torch.inference_mode()
    def _generate(self, calls: Sequence[_Call]) -> list[Completion]:
        start = time.perf_counter()
        sampling, limit = calls[0].batch_key
        pad = int(self._tokenizer.pad_token_id if self._tokenizer.pad_token_id is not None else self._ends[0])
        device = self._lm.device
        width = max(len(call.ids) for call in calls)
        ids = torch.tensor([[pad] * (width - len(call.ids)) + call.ids for call in calls], device=device)
        mask = torch.tensor([[0] * (width - len(c.ids)) + [1] * len(c.ids) for c in calls], device=device)
        stop = _Stop(self._tokenizer, sampling.stop, width, calls)
        draw = [_Draw(sampling, [call.sampling.seed for call in calls], device)] if sampling.temperature else []
        output = self._lm.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=limit,
            # Sampling is the processor's: the arg max of noisy scores.
            do_sample=False,
            logits_processor=LogitsProcessorList(draw),
            stopping_criteria=StoppingCriteriaList([stop]),
            eos_token_id=self._ends or None,
            pad_token_id=pad,
            use_cache=True,
        )
        seconds = (time.perf_counter() - start) / len(calls)
        rows = output[:, width:].tolist()
        return [
            self._completion(call, row, stop.ends.get(n), seconds) for n, (call, row) in enumerate(zip(calls, rows))
        ]

    def _completion(self, call: _Call, row: list[int], ended: int | None, seconds: float) -> Completion:
        row = row[:ended]
        marks = [place for place, token in enumerate(row) if token in self._ends]
        row = row[: marks[0] + 1] if marks else row
        text = self._tokenizer.decode(row, skip_special_tokens=True)
        cuts = [place for stop in call.sampling.stop if (place := text.find(stop)) >= 0]
        return Completion(
            text=text[: min(cuts)] if cuts else text,
            prompt_tokens=len(call.ids),
            completion_tokens=len(row),
            seconds=seconds,
            finish_reason="stop" if marks or cuts else "length",
        )


class _Draw(LogitsProcessor):
    """Sampling with a random generator for each row.

    The arg max of log-probabilities plus Gumbel noise is a sample (the Gumbel-max trick), and the noise is drawn row
    by row, so that neighbours don't change it.
    """

    def __init__(self, sampling: Sampling, seeds: Sequence[int | None], device: torch.device) -> None:
        self.sampling = sampling
        self.generators = []
        for seed in seeds:
            generator = torch.Generator(device)
            generator.manual_seed(secrets.randbits(63) if seed is None else seed % 2**63)
            self.generators.append(generator)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Change (B, V) scores; `input_ids` (B, T) is not looked at."""
        scores = scores.float() / self.sampling.temperature
        if self.sampling.top_p < 1:
            ordered, order = scores.softmax(-1).sort(dim=-1, descending=True)
            # A token is kept if those before it don't reach top_p yet; so the first always is.
            drop = ordered.cumsum(-1) - ordered >= self.sampling.top_p
            scores = scores.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)
        noise = torch.empty_like(scores)
        for row, generator in zip(noise, self.generators):
            row.exponential_(generator=generator)
        return scores - noise.clamp_min(torch.finfo(noise.dtype).tiny).log()


class _Stop(StoppingCriteria):
    """Ends a row at a stop text, and the whole batch when nobody waits for it any more.

    Attributes:
        ends: Row -> number of tokens it had written when a stop text appeared.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], width: int, calls: Sequence[_Call]) -> None:
        self.tokenizer, self.stops, self.width, self.calls = tokenizer, tuple(stops), width, calls
        self.ends: dict[int, int] = {}
        # A character is at most four tokens (its bytes); a few more, so that the window's edge does not matter.
        self.window = 4 * max(map(len, self.stops), default=0) + 8

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """(B,) whether each row is at its end; `input_ids` is (B, T)."""
        rows = len(self.calls)
        if all(call.future.done() for call in self.calls):
            return torch.ones(rows, dtype=torch.bool, device=input_ids.device)
        if self.stops:
            written = input_ids.shape[1] - self.width
            tails = input_ids[:, -min(written, self.window) :].tolist()
            for row, tail in enumerate(tails):
                if row not in self.ends:
                    text = self.tokenizer.decode(tail, skip_special_tokens=True)
                    if any(stop in text for stop in self.stops):
                        self.ends[row] = written
        done = [row in self.ends for row in range(rows)]
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)


def _end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends a reply: chat models often have one more than their tokenizer says."""
    found = getattr(model.generation_config, "eos_token_id", None)
    tokens = found if isinstance(found, list) else [found]
    return sorted({int(token) for token in [*tokens, tokenizer.eos_token_id] if token is not None})


def _context_length(model: Any) -> int | None:
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(length) if length else None
