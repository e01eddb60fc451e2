"""Generation with a Graph-LLM on this machine; a ledger keeps its replies like those of any other model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from peft import PeftModel

from tripletune.core.calls import Backend, Completion, Generator, Message, Sampling, with_sample_seed
from tripletune.core.data.records import ModelInput, Step
from tripletune.llm.ledger import Ledger
from tripletune.llm.ledger_client import LedgerClient, Retry
from tripletune.models.graph_llm import load_graph_llm
from tripletune.models.graph_llm.embeddings import EmbeddingTable, LiveEmbeddings
from tripletune.models.graph_llm.graphs import SampleGraph, batch_graphs
from tripletune.models.graph_llm.processor import EncodedInput, GraphLLMProcessor
from tripletune.models.local import CELLS, Decoder, decode
from tripletune.models.local.continuous_batch import make_decoder
from tripletune.models.local.requests import Draw, Request
from tripletune.models.local.service import DecodingService, fingerprinted_name
from tripletune.models.losses import evaluating
from tripletune.models.merging import for_inference
from tripletune.models.specs import parse_dtype, usual_dtype

if TYPE_CHECKING:
    from tripletune.models.graph_llm import GraphLLM

# Characters of an input whose tokenization would block the event loop for too long, and those of a typical triple.
_LARGE = 1 << 16
_TRIPLE_SIZE = 60


class _RequestOrigin(NamedTuple):
    """What a request was made from."""

    sample: ModelInput
    encoded: EncodedInput


class LocalGenerator(DecodingService, Generator, Backend):
    """Generation with a `GraphLLM`, greedy unless its `sampling` says otherwise.

    Args:
        model: The model, with or without PEFT adapter; `generate` needs it in eval mode.
        processor: Renders and tokenises samples as in training.
        batch_size: Maximum replies decoded at once; it shrinks when memory runs out.
        embeddings: Source of node and edge vectors; by default each string is embedded at its first use.
        name: The model's name in ledger and messages.
        ledger: Where replies are kept; None: nowhere.
    """

    def __init__(
        self,
        model: GraphLLM,
        processor: GraphLLMProcessor,
        batch_size: int = 16,
        embeddings: LiveEmbeddings | EmbeddingTable | None = None,
        name: str = "the Graph-LLM",
        ledger: str | Path | None = None,
    ) -> None:
        """Set up the service; with a ledger, a client of which this generator is the backend calls `complete`."""
        super().__init__(self._make_decoder, name)
        self.graph_llm = model
        self.processor = processor
        self.embeddings = embeddings or LiveEmbeddings(model.config.encoder, model.config.text_embedding_width)
        self.batch_size = batch_size
        self._cells = CELLS
        self._ledger = ledger
        self._client: LedgerClient | None = None
        if ledger is not None:
            # A call on this machine that failed would fail again.
            self._client = LedgerClient(self, Ledger(ledger), retry=Retry(attempts=1))
        self.sampling = Sampling()
        self._closing = False

    def __copy__(self) -> LocalGenerator:
        """Return a generator with the same weights, but with separate calls, thread and ledger client."""
        twin = LocalGenerator(
            self.graph_llm, self.processor, self.batch_size, self.embeddings, self.model, self._ledger
        )
        twin.sampling = self.sampling
        return twin

    async def generate(self, sample: ModelInput, max_new_tokens: int, evidence: str | None = None) -> Completion:
        """Reply to one input; inputs of concurrent tasks are batched.

        The ledger's keys are chats, so the input is written as a chat with one message, which `complete` reads again. A
        field that most inputs lack is left out, so that keys of earlier ledgers stay valid.
        """
        sampling = with_sample_seed(replace(self.sampling, max_tokens=max_new_tokens))
        if self._client is None:
            return await self.decode(sample, sampling, evidence)
        content = {
            "task": sample.task,
            "question": sample.question,
            "steps": [step.to_json() for step in sample.steps],
            "evidence": evidence,
            "graph": self.processor.settings.use_graph,
        }
        if sample.graph_of is not None:
            content["graph_of"] = [step.to_json() for step in sample.graph_of]
        if sample.begun:
            content["begun"] = sample.begun
        messages: list[Message] = [{"role": "user", "content": json.dumps(content, ensure_ascii=False)}]
        completion = await self._client.chat(messages, role=f"ras.{sample.task}", sampling=sampling)
        # The ledger does not store what was cut from the prompt.
        encoded = self.processor.encode_input(sample, evidence)
        return _with_truncation(completion, encoded)

    async def decode(self, sample: ModelInput, sampling: Sampling, evidence: str | None = None) -> Completion:
        """Like `generate`, without the ledger; a large input is tokenised in a thread, so that other tasks go on."""
        make_request = partial(self._make_request, sample, sampling, evidence)
        size = len(sample.question)
        for step in sample.steps:
            size += len(step.text) + _TRIPLE_SIZE * len(step.triples)
        if size > _LARGE:
            request = await asyncio.to_thread(make_request)
        else:
            request = make_request()
        await self.reply(request)
        return self._completion_of(request)

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """Reply to an input that `generate` wrote as a chat; the ledger client calls this method."""
        row = json.loads(messages[-1]["content"])
        steps = tuple(Step.from_json(step) for step in row["steps"])
        graph_of = None
        if "graph_of" in row:
            graph_of = tuple(Step.from_json(step) for step in row["graph_of"])
        sample = ModelInput(row["task"], row["question"], steps, graph_of, row.get("begun", ""))
        return await self.decode(sample, sampling, row["evidence"])

    async def close(self) -> None:
        """End the thread, and close the ledger.

        The client of the ledger closes its backend, which is this generator, so the call comes here twice.
        """
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
        """Reply to many inputs, in the order given; the model's training mode is restored.

        Args:
            samples: Questions with their steps.
            max_new_tokens: Maximum tokens of a reply.
            evidence: What steps show; None: as in training.
        """
        sampling = replace(self.sampling, max_tokens=max_new_tokens)
        requests = [self._make_request(sample, sampling, evidence) for sample in samples]
        with evaluating(self.graph_llm):
            decoder = self._make_decoder()
            # Requests of similar length are decoded together, with less padding.
            decode(decoder, sorted(requests, key=lambda request: len(request.prompt)))
        # The decoder reduces the sizes when memory runs out; later calls keep the smaller sizes.
        self.batch_size = decoder.rows
        self._cells = decoder.cells
        return [self._completion_of(request) for request in requests]

    def _make_decoder(self) -> Decoder:
        """A decoder with the sizes that the memory allowed before."""
        tokenizer = self.processor.tokenizer
        eos_ids = [tokenizer.eos_token_id]
        pad = int(tokenizer.pad_token_id)
        return make_decoder(
            self.graph_llm, eos_ids, pad, self.batch_size, cells=self._cells, inputs=self._graph_arguments
        )

    def _make_request(self, sample: ModelInput, sampling: Sampling, evidence: str | None) -> Request:
        """The request to decode a reply; its `data` is what `_completion_of` needs.

        Only answers are scored, since only of an answer anybody asks how sure the model is.
        """
        encoded = self._encode_with_beginning(sample, evidence)
        ids = list(encoded.input_ids)
        graph_token = self.processor.graph_token_id
        # The graphs by the place of their graph token in the prompt.
        places = [place for place, token in enumerate(ids) if token == graph_token]
        graphs = dict(zip(places, encoded.graphs, strict=True))
        # In the paper's order the graph of all steps comes first, so no two prompts share a prefix.
        grows = graph_token is None or self.processor.settings.prompt_order != "instruction_first"
        request = Request(ids, sampling.max_tokens, draw=Draw.of(sampling, ids), inputs=graphs, grows=grows)
        request.scored = sample.task == "answering"
        request.data = _RequestOrigin(sample, encoded)
        return request

    def _encode_with_beginning(self, sample: ModelInput, evidence: str | None) -> EncodedInput:
        """The prompt with the beginning of the reply, if that is given, tokenised as a label begins."""
        encoded = self.processor.encode_input(sample, evidence)
        if not sample.begun:
            return encoded
        return replace(encoded, input_ids=[*encoded.input_ids, *self.processor.encode_text(sample.begun)])

    def _graph_arguments(self, graphs: Sequence[SampleGraph]) -> dict[str, Any]:
        """The argument of the model's forward pass that holds the graphs of a batch of prompts."""
        if not graphs:
            return {}
        return {"graphs": batch_graphs(graphs, self.embeddings.vectors)}

    def _completion_of(self, request: Request) -> Completion:
        """The reply of a finished request."""
        asked: _RequestOrigin = request.data
        text = self.processor.tokenizer.decode(request.tokens, skip_special_tokens=True)
        return _with_truncation(request.completion(f"{asked.sample.begun}{text}".strip()), asked.encoded)


def _with_truncation(completion: Completion, encoded: EncodedInput) -> Completion:
    """A completion with what was cut from its prompt."""
    return replace(completion, truncated_triples=encoded.truncated_triples, truncated_words=encoded.truncated_words)


def load_generator(
    folder: str | Path, batch_size: int = 16, dtype: str = "float32", ledger: str | Path | None = None
) -> LocalGenerator:
    """Load a trained Graph-LLM (or a plain base model) for inference; in float32 replies do not depend on the batch.

    The name in the ledger holds the folder's fingerprint and any type but float32, since both change replies.
    """
    model, processor = load_graph_llm(folder, parse_dtype(dtype))
    if isinstance(model, PeftModel):
        model = for_inference(model)
    name = f"graph:{folder}"
    dtype = usual_dtype(dtype)
    if dtype != "float32":
        name += f" {dtype}"
    name = fingerprinted_name(name, folder)
    if torch.cuda.is_available():
        model = model.to("cuda")
    return LocalGenerator(model, processor, batch_size, name=name, ledger=ledger)
