"""A `Generator` on a Graph-LLM of this machine: greedy replies, one by one or to many at once.

Calls of many tasks meet in a `DecodingService`; the graphs are read with the prompts. With a ledger they are calls like
those of any other model: kept, found again, and accounted for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from tripletune.models.data.records import ModelInput, Step
from tripletune.models.files import weights_fingerprint
from tripletune.models.graph_llm import load_graph_llm
from tripletune.models.graph_llm.embeddings import EmbeddingTable, LiveEmbeddings
from tripletune.models.graph_llm.graphs import embed_batch
from tripletune.models.graph_llm.processor import GraphLLMProcessor
from tripletune.models.llm import Completion, Message, Sampling
from tripletune.models.llm.backends.hf import DecodingService
from tripletune.models.llm.ledger import Ledger
from tripletune.models.llm.ledger_client import LedgerClient, Retry
from tripletune.models.loading import parse_dtype, resolve
from tripletune.models.local import Decoder, Request, decode
from tripletune.models.local.continuous_batch import make_decoder


class LocalGenerator:
    """Greedy generation with a `GraphLLM`.

    Args:
        model: The model, with or without PEFT adapter; for `generate` in eval mode.
        processor: Its processor.
        batch_size: Most inputs in one batch; it changes no reply in float32.
        embeddings: Source of node and edge vectors; by default each string is embedded when first seen.
    """

    def __init__(
        self,
        model: Any,
        processor: GraphLLMProcessor,
        batch_size: int = 16,
        embeddings: LiveEmbeddings | EmbeddingTable | None = None,
    ) -> None:
        self.model = model
        self.processor = processor
        config = model.config if not hasattr(model, "get_base_model") else model.get_base_model().config
        self.embeddings = embeddings or LiveEmbeddings(config.encoder, config.text_embedding_width)
        self.batch_size = batch_size
        self._service = DecodingService(self._decoder, "the Graph-LLM")
        self._client: LedgerClient | None = None

    async def generate(self, sample: ModelInput, max_new_tokens: int, evidence: str | None = None) -> Completion:
        """Reply to one input, together with those of other tasks."""
        if self._client is None:
            return await self.decode(sample, max_new_tokens, evidence)
        content = {
            "task": sample.task,
            "question": sample.question,
            "steps": [step.to_json() for step in sample.steps],
            "evidence": evidence,
            "graph": self.processor.settings.use_graph,
        }
        messages: list[Message] = [{"role": "user", "content": json.dumps(content, ensure_ascii=False)}]
        sampling = Sampling(max_tokens=max_new_tokens)
        completion = await self._client.chat(messages, role=f"ras.{sample.task}", sampling=sampling)
        # The ledger does not keep what was left out of the prompt.
        encoded = self.processor.encode_input(sample, evidence)
        triples, words = encoded.truncated_triples, encoded.truncated_words
        return replace(completion, truncated_triples=triples, truncated_words=words)

    async def decode(self, sample: ModelInput, max_new_tokens: int, evidence: str | None = None) -> Completion:
        """`generate` without a look at the ledger."""
        request = self._request(sample, max_new_tokens, evidence)
        await self._service.reply(request)
        return self._completion(request)

    async def close(self) -> None:
        """End the thread, and close the ledger."""
        await (self._service if self._client is None else self._client).close()

    def generate_many(
        self, samples: Sequence[ModelInput], max_new_tokens: int, evidence: str | None = None
    ) -> list[Completion]:
        """Reply to many inputs, in the order given; the model's training mode is as before afterwards.

        Args:
            samples: The inputs.
            max_new_tokens: Longest reply, in tokens.
            evidence: "triples" or "text"; None keeps the processor's setting.
        """
        requests = [self._request(sample, max_new_tokens, evidence) for sample in samples]
        was_training = self.model.training
        self.model.eval()
        try:
            decode(self._decoder(), sorted(requests, key=lambda request: len(request.prompt)))
        finally:
            self.model.train(was_training)
        return [self._completion(request) for request in requests]

    def _decoder(self) -> Decoder:
        tokenizer = self.processor.tokenizer
        ends, pad = [tokenizer.eos_token_id], int(tokenizer.pad_token_id)
        return make_decoder(self.model, ends, pad, self.batch_size, inputs=self._graphs)

    def _request(self, sample: ModelInput, limit: int, evidence: str | None) -> Request:
        encoded = self.processor.encode_input(sample, evidence)
        return Request(list(encoded.input_ids), limit, data=encoded)

    def _graphs(self, requests: Sequence[Request]) -> dict[str, Any]:
        """The graphs of a batch, as `GraphLLM.forward` and `generate` take them."""
        if not self.processor.settings.use_graph:
            return {}
        batch = embed_batch([request.data.graphs for request in requests], self.embeddings)
        return {"graphs": batch.to(self.model.device)}

    def _completion(self, request: Request) -> Completion:
        return Completion(
            text=self.processor.decode(request.tokens),
            prompt_tokens=len(request.prompt),
            completion_tokens=len(request.tokens) + request.ended,
            seconds=request.seconds,
            truncated_triples=request.data.truncated_triples,
            truncated_words=request.data.truncated_words,
            finish_reason="stop" if request.ended else "length",
        )


class _GraphBackend:
    """The `models.llm.Backend` of a generator: a call's message is the input as JSON."""

    def __init__(self, generator: LocalGenerator, model: str) -> None:
        self.model, self._generator = model, generator

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        row = json.loads(messages[-1]["content"])
        sample = ModelInput(row["task"], row["question"], tuple(Step.from_json(step) for step in row["steps"]))
        return await self._generator.decode(sample, sampling.max_tokens, row["evidence"])

    async def close(self) -> None:
        await self._generator._service.close()


def load_generator(
    folder: str | Path, batch_size: int = 16, dtype: str = "float32", ledger: str | Path | None = None
) -> LocalGenerator:
    """Load a trained Graph-LLM (or a plain base model) for inference.

    Args:
        folder: Run, checkpoint, export or merged folder, or a base-model spec.
        batch_size: Most inputs in one batch.
        dtype: "float32" (default: replies do not depend on the batch), "bfloat16" or "auto".
        ledger: SQLite file of the call ledger; None keeps no calls.
    """
    model, processor = load_graph_llm(folder, parse_dtype(dtype))
    if isinstance(model, PeftModel):
        # Adapter layers run beside every linear layer, in float32; merged, they cost nothing.
        model = model.merge_and_unload().eval()
    if torch.cuda.is_available():
        model = model.to("cuda")
    generator = LocalGenerator(model, processor, batch_size)
    if ledger is not None:
        name = f"graph:{folder}{'' if dtype == 'float32' else f' {dtype}'}@{weights_fingerprint(resolve(folder))}"
        generator._client = LedgerClient(_GraphBackend(generator, name), Ledger(ledger), retry=Retry(1))
    return generator
