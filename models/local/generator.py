"""A `Generator` on a Graph-LLM of this machine: greedy replies, one by one or to many at once.

Calls of many tasks meet in a `DecodingService`; the graphs are read with the prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from tripletune.models.data.records import ModelInput
from tripletune.models.graph_llm.embeddings import LiveEmbeddings
from tripletune.models.graph_llm.graphs import batch_graphs, graph_rows
from tripletune.models.graph_llm.loading import load_graph_llm
from tripletune.models.graph_llm.processor import EncodedInput, GraphLLMProcessor
from tripletune.models.loading import parse_dtype
from tripletune.models.local.continuous_batch import make_decoder
from tripletune.models.local.decoding import Request, decode
from tripletune.models.local.generation import Completion
from tripletune.models.local.service import DecodingService


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
        embeddings: LiveEmbeddings | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size} must be at least 1")
        self.model = model
        self.processor = processor
        config = model.config if not hasattr(model, "get_base_model") else model.get_base_model().config
        self.embeddings = embeddings or LiveEmbeddings(config.encoder, config.text_embedding_width)
        tokenizer = processor.tokenizer
        self._decoder = make_decoder(
            model, [tokenizer.eos_token_id], int(tokenizer.pad_token_id), batch_size, inputs=self._graphs
        )
        self._service = DecodingService(lambda: self._decoder, "the Graph-LLM")

    async def generate(self, sample: ModelInput, max_new_tokens: int, evidence: str | None = None) -> Completion:
        """Reply to one input, together with those of other tasks."""
        request = self._request(sample, max_new_tokens, evidence)
        await self._service.reply(request)
        return self._completion(request)

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
            decode(self._decoder, sorted(requests, key=lambda request: len(request.prompt)))
        finally:
            self.model.train(was_training)
        return [self._completion(request) for request in requests]

    def _request(self, sample: ModelInput, limit: int, evidence: str | None) -> Request:
        encoded = self.processor.encode_input(sample, evidence)
        return Request(list(encoded.input_ids), limit, data=encoded)

    def _graphs(self, requests: Sequence[Request]) -> dict[str, Any]:
        """The graphs of a batch, as `GraphLLM.forward` and `generate` take them."""
        if not self.processor.settings.use_graph:
            return {}
        inputs: list[EncodedInput] = [request.data for request in requests]
        distinct = list(dict.fromkeys(text for item in inputs for graph in item.graphs for text in graph.strings))
        table = self.embeddings.vectors(distinct)
        rows = {text: row for row, text in enumerate(distinct)}
        samples = [graph_rows(item.graphs, rows) for item in inputs]
        batch = batch_graphs(samples, table.__getitem__, self.embeddings.dimension)
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
