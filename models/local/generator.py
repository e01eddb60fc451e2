"""A `Generator` on a local model: calls that wait together are answered in one batch.

Loops are written for one question each; many run at once as asyncio tasks. Their calls meet here, are grouped by
length, and run as left-padded batches with greedy decoding.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from tripletune.models.data.records import ModelInput
from tripletune.models.graph_llm.embeddings import LiveEmbeddings
from tripletune.models.graph_llm.graphs import batch_graphs, graph_rows
from tripletune.models.graph_llm.loading import load_graph_llm
from tripletune.models.graph_llm.processor import EncodedInput, GraphLLMProcessor, pad_batch
from tripletune.models.loading import parse_dtype
from tripletune.models.local.generation import Completion


class LocalGenerator:
    """Greedy generation with a `GraphLLM`, one by one or many at once.

    Args:
        model: The model, with or without PEFT adapter.
        processor: Its processor.
        batch_size: Most inputs in one batch.
        embeddings: Source of node and edge vectors; by default each string is embedded when first seen.
    """

    def __init__(
        self,
        model: Any,
        processor: GraphLLMProcessor,
        batch_size: int = 16,
        embeddings: LiveEmbeddings | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size} must be at least 1")
        self.model = model
        self.processor = processor
        self.batch_size = batch_size
        config = model.config if not hasattr(model, "get_base_model") else model.get_base_model().config
        self.embeddings = embeddings or LiveEmbeddings(config.encoder, config.text_embedding_width)
        self._waiting: list[tuple[ModelInput, int, str | None, asyncio.Future[Completion]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def generate(self, sample: ModelInput, max_new_tokens: int, evidence: str | None = None) -> Completion:
        """Reply to one input; waits until the calls of other tasks have joined, then all run together."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((sample, max_new_tokens, evidence, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        count = -1
        while self._waiting:
            # As long as other tasks still arrive at a call, let them.
            while count != len(self._waiting):
                count = len(self._waiting)
                await asyncio.sleep(0)
            calls, self._waiting = self._waiting, []
            count = -1
            groups: dict[tuple[int, str | None], list[int]] = {}
            for number, (_, limit, evidence, _) in enumerate(calls):
                groups.setdefault((limit, evidence), []).append(number)
            for (limit, evidence), numbers in groups.items():
                try:
                    replies = self.generate_many([calls[n][0] for n in numbers], limit, evidence)
                except Exception:
                    # One bad input must not fail its neighbours: find it by itself.
                    self._one_by_one([calls[n] for n in numbers])
                    continue
                for number, reply in zip(numbers, replies):
                    if not calls[number][3].done():
                        calls[number][3].set_result(reply)
            await asyncio.sleep(0)

    def _one_by_one(self, calls: Sequence[tuple[ModelInput, int, str | None, asyncio.Future[Completion]]]) -> None:
        for sample, limit, evidence, future in calls:
            if future.done():
                continue
            try:
                future.set_result(self.generate_many([sample], limit, evidence)[0])
            except Exception as error:
                future.set_exception(error)

    def generate_many(
        self, samples: Sequence[ModelInput], max_new_tokens: int, evidence: str | None = None
    ) -> list[Completion]:
        """Reply to many inputs, in the order given.

        Args:
            samples: The inputs.
            max_new_tokens: Longest reply, in tokens.
            evidence: "triples" or "text"; None keeps the processor's setting.
        """
        encoded = [self.processor.encode_input(sample, evidence) for sample in samples]
        order = sorted(range(len(encoded)), key=lambda number: len(encoded[number].input_ids))
        replies: list[Completion | None] = [None] * len(encoded)
        for start in range(0, len(order), self.batch_size):
            numbers = order[start : start + self.batch_size]
            for number, reply in zip(numbers, self._run([encoded[n] for n in numbers], max_new_tokens)):
                replies[number] = reply
        return [reply for reply in replies if reply is not None]

    @torch.inference_mode()
    def _run(self, inputs: list[EncodedInput], max_new_tokens: int) -> list[Completion]:
        start = time.perf_counter()
        tokenizer = self.processor.tokenizer
        pad = int(tokenizer.pad_token_id)
        ids, mask = pad_batch([item.input_ids for item in inputs], pad, side="left")
        device = self.model.device
        extra: dict[str, Any] = {}
        if self.processor.settings.use_graph:
            strings = [text for item in inputs for graph in item.graphs for text in graph.strings]
            distinct = list(dict.fromkeys(strings))
            table = self.embeddings.vectors(distinct)
            rows = {text: row for row, text in enumerate(distinct)}
            samples = [graph_rows(item.graphs, rows) for item in inputs]
            extra["graphs"] = batch_graphs(samples, table.__getitem__, self.embeddings.dimension).to(device)
        was_training = self.model.training
        self.model.eval()
        try:
            output = self.model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                # A base model's own generation settings (Qwen: a repetition penalty) are not what was trained, and
                # look up the placeholder in the vocabulary, where it need not be.
                num_beams=1,
                repetition_penalty=1.0,
                no_repeat_ngram_size=0,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=pad,
                use_cache=True,
                **extra,
            )
        finally:
            self.model.train(was_training)
        seconds = (time.perf_counter() - start) / len(inputs)
        return [self._completion(item, row.tolist(), seconds) for item, row in zip(inputs, output[:, ids.shape[1] :])]

    def _completion(self, item: EncodedInput, reply: list[int], seconds: float) -> Completion:
        eos = self.processor.tokenizer.eos_token_id
        stopped = eos in reply
        length = reply.index(eos) + 1 if stopped else len(reply)
        return Completion(
            text=self.processor.decode(reply[:length]),
            prompt_tokens=len(item.input_ids),
            completion_tokens=length,
            seconds=seconds,
            truncated_triples=item.truncated_triples,
            truncated_words=item.truncated_words,
            finish_reason="stop" if stopped else "length",
        )


def load_generator(folder: str | Path, batch_size: int = 16, dtype: str = "float32") -> LocalGenerator:
    """Load a trained Graph-LLM (or a plain base model) for inference.

    Args:
        folder: Run, checkpoint, export or merged folder, or a base-model spec.
        batch_size: Most inputs in one batch.
        dtype: "float32" (default: replies do not depend on the batch), "bfloat16" or "auto".
    """
    model, processor = load_graph_llm(folder, parse_dtype(dtype))
    if isinstance(model, PeftModel):
        # Adapter layers run beside every linear layer, in float32; merged, they cost nothing.
        model = model.merge_and_unload().eval()
    if torch.cuda.is_available():
        model = model.to("cuda")
    return LocalGenerator(model, processor, batch_size)
