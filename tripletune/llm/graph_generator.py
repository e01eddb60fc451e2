"""Generation with a Graph-LLM on this machine; a ledger keeps its replies like those of any other model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from tripletune.core.calls import Backend, Completion, Generator, Message, Sampling
from tripletune.core.data.records import ModelInput, Step
from tripletune.llm.ledger import Ledger
from tripletune.llm.ledger_client import LedgerClient, Retry
from tripletune.models.graph_llm import load_graph_llm
from tripletune.models.graph_llm.embeddings import EmbeddingTable, LiveEmbeddings
from tripletune.models.graph_llm.graphs import SampleGraph, batch_graphs
from tripletune.models.graph_llm.processor import GraphLLMProcessor
from tripletune.models.local import CELLS, Decoder, Draw, Request, decode
from tripletune.models.local.continuous_batch import make_decoder
from tripletune.models.local.service import DecodingService, identity
from tripletune.models.lora import for_inference
from tripletune.models.losses import evaluating
from tripletune.models.specs import parse_dtype, usual_dtype

_LARGE = 1 << 16  # characters that would block the event loop for too long


class LocalGenerator(DecodingService, Generator, Backend):
    """Generation with a `GraphLLM`, greedy unless its `sampling` says otherwise.

    Args:
        model: The model, with or without PEFT adapter; `generate` needs it in eval mode.
        embeddings: Source of node and edge vectors; by default each string is embedded at its first use.
    """

    def __init__(
        self,
        model: Any,
        processor: GraphLLMProcessor,
        batch_size: int = 16,
        embeddings: LiveEmbeddings | EmbeddingTable | None = None,
        name: str = "the Graph-LLM",
        ledger: str | Path | None = None,
    ) -> None:
        super().__init__(self._make_decoder, name)
        self.graph_llm, self.processor = model, processor
        self.embeddings = embeddings or LiveEmbeddings(model.config.encoder, model.config.text_embedding_width)
        self.batch_size, self._cells = batch_size, CELLS
        self._ledger = ledger
        self._client = None if ledger is None else LedgerClient(self, Ledger(ledger), retry=Retry(1))
        self.sampling = Sampling()
        self._closing = False

    def __copy__(self) -> LocalGenerator:
        """Return a generator with the same weights, but with separate calls, thread and ledger client."""
        about = (self.graph_llm, self.processor, self.batch_size, self.embeddings, self.model, self._ledger)
        twin = LocalGenerator(*about)
        twin.sampling = self.sampling
        return twin

    async def generate(self, sample: ModelInput, max_new_tokens: int, evidence: str | None = None) -> Completion:
        """Reply to one input; inputs of concurrent tasks are batched."""
        if self._client is None:
            return await self.decode(sample, max_new_tokens, evidence)
        content = {
            "task": sample.task,
            "question": sample.question,
            "steps": [step.to_json() for step in sample.steps],
            "evidence": evidence,
            "graph": self.processor.settings.use_graph,
        }
        if sample.graph_of is not None:
            content["graph_of"] = [step.to_json() for step in sample.graph_of]
        messages: list[Message] = [{"role": "user", "content": json.dumps(content, ensure_ascii=False)}]
        sampling = replace(self.sampling, max_tokens=max_new_tokens)
        completion = await self._client.chat(messages, role=f"ras.{sample.task}", sampling=sampling)
        # The ledger does not store what was cut from the prompt.
        encoded = self.processor.encode_input(sample, evidence)
        triples, words = encoded.truncated_triples, encoded.truncated_words
        return replace(completion, truncated_triples=triples, truncated_words=words)

    async def decode(self, sample: ModelInput, max_new_tokens: int, evidence: str | None = None) -> Completion:
        """Like `generate`, without the ledger."""
        make = partial(self._request, sample, max_new_tokens, evidence)
        large = sum(len(step.text) + 60 * len(step.triples) for step in sample.steps) + len(sample.question) > _LARGE
        request = await asyncio.to_thread(make) if large else make()
        await self.reply(request)
        return self._completion(request)

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Reply to an input that `generate` wrote as a chat; the ledger client calls this method."""
        row = json.loads(messages[-1]["content"])
        steps, graph = (tuple(map(Step.from_json, row.get(name) or ())) for name in ("steps", "graph_of"))
        sample = ModelInput(row["task"], row["question"], steps, graph if "graph_of" in row else None)
        return await self.decode(sample, sampling.max_tokens, row["evidence"])

    async def close(self) -> None:
        """End the thread, and close the ledger."""
        if self._client is None or self._closing:
            await super().close()
        else:
            self._closing = True
            await self._client.close()  # which closes its backend, this generator

    def generate_many(
        self,
        samples: Sequence[ModelInput],
        max_new_tokens: int,
        evidence: str | None = None,
    ) -> list[Completion]:
        """Reply to many inputs, in the order given; the model's training mode is restored."""
        requests = [self._request(sample, max_new_tokens, evidence) for sample in samples]
        with evaluating(self.graph_llm):
            decoder = self._make_decoder()
            decode(decoder, sorted(requests, key=lambda request: len(request.prompt)))
        # The decoder reduces the sizes when memory runs out; later calls keep the smaller sizes.
        self.batch_size, self._cells = decoder.rows, decoder.cells
        return [self._completion(request) for request in requests]

    def _make_decoder(self) -> Decoder:
        tokenizer = self.processor.tokenizer
        eos_ids, pad = [tokenizer.eos_token_id], int(tokenizer.pad_token_id)
        return make_decoder(self.graph_llm, eos_ids, pad, self.batch_size, cells=self._cells, inputs=self._graphs)

    def _request(self, sample: ModelInput, limit: int, evidence: str | None) -> Request:
        encoded, token = self.processor.encode_input(sample, evidence), self.processor.graph_token_id
        places = [place for place, found in enumerate(encoded.input_ids) if found == token]
        inputs = dict(zip(places, encoded.graphs))
        # In the paper's order the graph of all steps comes first, so no two prompts share a prefix.
        grows = token is None or self.processor.settings.prompt_order != "instruction_first"
        ids = list(encoded.input_ids)
        return Request(ids, limit, draw=Draw.of(self.sampling, ids), inputs=inputs, grows=grows, data=encoded)

    def _graphs(self, graphs: Sequence[SampleGraph]) -> dict[str, Any]:
        return {"graphs": batch_graphs(graphs, self.embeddings.vectors)} if graphs else {}

    def _completion(self, request: Request) -> Completion:
        text = self.processor.tokenizer.decode(request.tokens, skip_special_tokens=True).strip()
        triples, words = request.data.truncated_triples, request.data.truncated_words
        return replace(request.completion(text), truncated_triples=triples, truncated_words=words)


def load_generator(
    folder: str | Path, batch_size: int = 16, dtype: str = "float32", ledger: str | Path | None = None
) -> LocalGenerator:
    """Load a trained Graph-LLM (or a plain base model) for inference; in float32 replies do not depend on the batch."""
    model, processor = load_graph_llm(folder, parse_dtype(dtype))
    if isinstance(model, PeftModel):
        model = for_inference(model)
    kind = usual_dtype(dtype)
    name = identity(f"graph:{folder}{'' if kind == 'float32' else f' {kind}'}", folder)
    if torch.cuda.is_available():
        model = model.to("cuda")
    return LocalGenerator(model, processor, batch_size, name=name, ledger=ledger)
