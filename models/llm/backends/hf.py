"""A local transformers model as a backend: calls that wait together run as one batch, in a thread of its own.

Greedy calls share a `models.continuous_batch.ContinuousBatch`: new ones join those under way, ended ones make room, and
the tokens of a system prompt are read once for all calls that have it. Sampled calls, and models that forget (sliding
windows, recurrent layers), run in batches of `generate`.

Greedy replies are the same text for any batch size in float32. Sampled ones are too: each call draws from its own
random generator, so that a reply depends on its messages, settings and seed, and not on its neighbours.

Importing this module imports torch: whoever may do without it imports this module when it is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from tripletune.models.llm.backends.api import ledger_name
from tripletune.models.llm.backends.hf_sampling import Draw, Stop, stop_window
from tripletune.models.llm.chat import ChatEncoder
from tripletune.models.llm.client import CallError, Message, Sampling
from tripletune.models.loading import load_causal_lm, parse_dtype
from tripletune.models.local.continuous_batch import ContinuousBatch, fits
from tripletune.models.local.decoding import Request, context_length, end_tokens
from tripletune.models.local.generation import Completion

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Call(Request):
    """One waiting call: a request with how it is drawn and who waits.

    Attributes:
        sampling: How the reply is drawn.
        future: Who waits for it.
        stopped: Whether it ended at a stop text, or because nobody waits any more.
    """

    sampling: Sampling = field(default_factory=Sampling)
    future: asyncio.Future[Completion] = field(kw_only=True)
    stopped: bool = False

    @property
    def batch_key(self) -> tuple[Sampling, int]:
        # The seed is each call's own affair; everything else holds for a whole batch.
        return replace(self.sampling, seed=None), self.limit


class HFBackend:
    """A causal language model of transformers with its chat template.

    Args:
        model: Hub id, folder or `pypi:package`.
        batch_size: Most calls in one batch; long ones are fewer. On a GPU that runs out of memory batches are halved
            until they fit.
        dtype: "auto" (bfloat16 where the hardware multiplies it natively), "float32", "bfloat16" or "float16".
        template_options: More arguments of the chat template, for example {"enable_thinking": False}. They change
            replies, so they are part of the ledger's name.
        plain: For base models, which have no chat template: the turns' texts, with blank lines between them.

    Attributes:
        model: "hf:<model>" and the template's options.

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
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size} must be at least 1")
        self.model = ledger_name("hf", str(model), template_options)
        self.batch_size = batch_size
        self._lm, self._tokenizer = load_causal_lm(model, parse_dtype(dtype))
        if torch.cuda.is_available():
            self._lm = self._lm.to("cuda")
        self._chat = ChatEncoder(self._tokenizer, self.model, template_options, plain)
        self._ends = end_tokens(self._lm, self._tokenizer)
        # The model's own settings (a repetition penalty, a temperature) are not what a call asks for.
        self._lm.generation_config = GenerationConfig()
        self._context = context_length(self._lm)
        self._waiting: list[_Call] = []
        # Greedy calls in the shared batch, and those that `generate` works on.
        self._running: list[_Call] = []
        self._generating: list[_Call] = []
        self._fits = fits(self._lm)
        self._shared_batch: ContinuousBatch | None = None
        # The shared batch while a thread works on it.
        self._going: ContinuousBatch | None = None
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
        shared = self._chat.shared(messages, ids)
        call = _Call(ids, limit, shared, sampling=sampling, future=future)
        going = self._going
        if going is not None and not sampling.temperature:
            # The batch under way takes it in at its next token.
            self._running.append(call)
            going.add(call)
        else:
            self._waiting.append(call)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """Tokens of a chat as the model reads it, up to where its reply begins."""
        return len(self._chat.encode(messages))

    async def close(self) -> None:
        """End the thread. Calls that still wait fail, and the batch under way stops at its next token."""
        for call in [*self._waiting, *self._running, *self._generating]:
            if not call.future.done() and not call.future.get_loop().is_closed():
                call.future.set_exception(CallError(f"{self.model}: the backend was closed while this call waited"))
        self._waiting, self._running = [], []
        if self._shared_batch is not None:
            self._shared_batch.stop()
            self._shared_batch = self._going = None
        executor, self._executor = self._executor, None
        if executor is not None:
            await asyncio.to_thread(executor.shutdown)

    async def _work(self) -> None:
        while self._waiting or self._running:
            count = -1
            # As long as other tasks still arrive at a call, let them.
            while count != len(self._waiting):
                count = len(self._waiting)
                await asyncio.sleep(0)
            # Those whose callers are gone are dropped, also the ones of an event loop that ended.
            self._waiting = [call for call in self._waiting if not call.future.done()]
            self._going = self._join()
            if self._going is not None:
                replies = await self._in_thread(self._go_on, self._going)
                self._going = None
                _settle(replies)
                self._running = [call for call in self._running if not call.done]
            if calls := self._next_batch():
                self._generating = calls
                _settle(zip(calls, await self._in_thread(self._run, calls)))
                self._generating = []

    async def _in_thread(self, work: Any, *arguments: Any) -> Any:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="hf-backend")
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)

    def _join(self) -> ContinuousBatch | None:
        """Let the greedy calls that wait join those under way; None when there are neither."""
        if not self._fits:
            return None
        new = [call for call in self._waiting if not call.sampling.temperature]
        self._waiting = [call for call in self._waiting if call.sampling.temperature]
        if not new and not self._running:
            return None
        if self._shared_batch is None:
            pad = self._tokenizer.pad_token_id
            pad = int(pad if pad is not None else (self._ends or [0])[0])
            self._shared_batch = ContinuousBatch(self._lm, self._ends, pad, self.batch_size, enough=self._enough)
        # Prompts of a kind next to each other: those that are read together are padded to one length.
        for call in sorted(new, key=lambda call: (call.shared, len(call.prompt))):
            self._shared_batch.add(call)
        self._running += new
        return self._shared_batch

    def _go_on(self, batch: ContinuousBatch) -> list[tuple[_Call, Completion | Exception]]:
        """Work until a call is answered; where one is at fault, they are answered one by one."""
        try:
            batch.run()
            running = list(self._running)
        except Exception as error:
            # What comes from now on waits for the next round.
            self._going = None
            running = list(self._running)
            logger.warning("%s: %s; the %d calls under way run one by one", self.model, error, len(running))
            batch.clear()
            replies = [(call, self._run([call])[0]) for call in running]
            for call in running:
                call.done = True
            return replies
        # Not what `run` gives: it may have ended calls when the event loop of its caller was gone.
        return [(call, self._completion(call, self._row(call), None, call.seconds)) for call in running if call.done]

    def _row(self, call: _Call) -> list[int]:
        """The tokens of a reply with the one that ended it."""
        return [*call.tokens, *(self._ends[:1] if call.ended and not call.stopped else [])]

    def _enough(self, call: Request) -> bool:
        """Whether a greedy reply ends here: at a stop text, or because nobody waits for it."""
        if not isinstance(call, _Call):
            return False
        stops = call.sampling.stop
        if stops and not call.future.done():
            text = self._tokenizer.decode(call.tokens[-stop_window(stops) :], skip_special_tokens=True)
            call.stopped = any(stop in text for stop in stops)
        else:
            call.stopped = call.future.done()
        return call.stopped

    def _next_batch(self) -> list[_Call]:
        """The oldest call for `generate` and those that fit it: same settings, nearest in length."""
        # A greedy call may have come meanwhile; it joins the others.
        waiting = [call for call in self._waiting if call.sampling.temperature or not self._fits]
        if not waiting:
            return []
        oldest = waiting[0]
        alike = [call for call in waiting if call.batch_key == oldest.batch_key]
        alike.sort(key=lambda call: len(call.prompt))
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
                        f"{self.model}: a prompt of {len(calls[0].prompt)} tokens and a reply of up to "
                        f"{calls[0].limit} don't fit the GPU: set dtype bfloat16, lower max_tokens, or take a smaller "
                        "model"
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
        width = max(len(call.prompt) for call in calls)
        ids = torch.tensor([[pad] * (width - len(call.prompt)) + call.prompt for call in calls], device=device)
        mask = torch.tensor([[0] * (width - len(c.prompt)) + [1] * len(c.prompt) for c in calls], device=device)
        stop = Stop(self._tokenizer, sampling.stop, width, calls)
        draw = [Draw(sampling, [call.sampling.seed for call in calls], device)] if sampling.temperature else []
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
            prompt_tokens=len(call.prompt),
            completion_tokens=len(row),
            seconds=seconds,
            finish_reason="stop" if marks or cuts else "length",
        )


def _settle(replies: Iterable[tuple[_Call, Completion | Exception]]) -> None:
    for call, reply in replies:
        if call.future.done():
            continue
        if isinstance(reply, Completion):
            call.future.set_result(reply)
        else:
            call.future.set_exception(reply)
