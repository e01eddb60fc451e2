"""Build the Graph-LLM of RAS (section 3.4) from a base model, add an adapter, load it, and generate replies.

A ledger stores, reuses and counts replies of the Graph-LLM like those of any other model.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from tripletune.models.attention import set_attention
from tripletune.models.data.graph_settings import GraphSettings, values_of
from tripletune.models.data.records import ModelInput, Step
from tripletune.models.files import read_json
from tripletune.models.graph_llm.embeddings import EmbeddingTable, LiveEmbeddings, encoder_dimension
from tripletune.models.graph_llm.graphs import SampleGraph, batch_graphs
from tripletune.models.graph_llm.model import GraphLLM, GraphLLMConfig
from tripletune.models.graph_llm.processor import GraphLLMProcessor
from tripletune.models.llm import Backend, Completion, Generator, Message, Sampling
from tripletune.models.llm.ledger import Ledger
from tripletune.models.llm.ledger_client import LedgerClient, Retry
from tripletune.models.loading import (
    LANGUAGE_MODEL_LAYERS,
    SAY_WHAT_IS_MISSING,
    check_specs,
    chosen_layers,
    complete,
    content_fingerprint,
    for_inference,
    layer_numbers,
    load_adapter,
    load_causal_lm,
    parse_dtype,
    pinned,
    put_adapter,
    resolve,
    telling,
    usual_dtype,
    with_revision,
)
from tripletune.models.local import CELLS, Decoder, Draw, Request, decode
from tripletune.models.local.continuous_batch import make_decoder
from tripletune.models.local.service import DecodingService, identity
from tripletune.models.losses import evaluating, scales_alike
from tripletune.models.options import ConfigError, load_config
from tripletune.models.run_folders import CONFIG, is_adapter

_LARGE = 1 << 16  # characters that would block the event loop for too long
GRAPH_MODULES = ("graph_encoder", "projector")
# PEFT's own name for "an adapter without adapter layers": graph-token tuning trains the saved modules alone.
_NO_ADAPTER_LAYERS = "dummy-target-modules"


def build_graph_llm(
    base_model: str,
    *,
    dtype: torch.dtype | None = None,
    attention: str | None = None,
    nf4: bool = False,
    processor_settings: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[GraphLLM, GraphLLMProcessor]:
    """Put new graph modules in front of a pretrained language model, and create the processor.

    Args:
        dtype: Weight type of the language model; graph modules stay float32.
        attention: See `models.attention.set_attention`; None: the default of transformers.
        processor_settings: Fields of `ProcessorSettings`; `settings` are fields of `GraphSettings`.
    """
    language_model, tokenizer = load_causal_lm(base_model, dtype, nf4=nf4)
    if "past_key_values" not in inspect.signature(language_model.forward).parameters:
        raise ValueError(
            f"model {base_model}: {type(language_model).__name__} has no attention layer, but a Graph-LLM needs one "
            "to generate replies; choose a base model in which at least some layers have attention"
        )
    graph = GraphSettings(**settings)
    own = {"use_graph": graph.use_graph, "graph_pooling": graph.graph_pooling}
    processor = GraphLLMProcessor.create(tokenizer, **(processor_settings or {}) | own)
    name, commit = pinned(str(base_model))
    about: dict[str, Any] = {
        "text_config": language_model.config,
        "base_model": name,
        "base_revision": commit,
        "base_weights": content_fingerprint(base_model),
        "encoder_weights": content_fingerprint(graph.encoder) if graph.use_graph else "",
        "text_embedding_width": encoder_dimension(graph.encoder) if graph.use_graph else 0,
        "graph_token_id": processor.graph_token_id,
        "graph_token_norm": _embedding_norm(language_model) if graph.graph_token == "normalised" else None,
    }
    model = GraphLLM(GraphLLMConfig(**asdict(graph) | about), language_model)
    model.is_loaded_in_4bit = nf4  # PEFT reads it
    if attention is not None:
        set_attention(model.language_model, attention)
    model.config._name_or_path = name
    return model.eval(), processor


@torch.no_grad()
def _embedding_norm(language_model: PreTrainedModel) -> float:
    """The mean norm of about a thousand token embeddings, after the scaling that some model families apply."""
    embed: Any = language_model.get_input_embeddings()
    count = embed.weight.shape[0]
    some = torch.arange(0, count, max(1, count // 1000), device=embed.weight.device)
    return float(embed(some).float().norm(dim=-1).mean())


def add_adapter(
    model: GraphLLM,
    *,
    tune: str = "lora",
    rank: int = 8,
    alpha: int = 16,
    dropout: float = 0.05,
    targets: tuple[str, ...] = ("q_proj", "v_proj"),
    options: Mapping[str, Any] | None = None,
) -> GraphLLM | PeftModel:
    """Freeze the language model, add LoRA to it, and make graph encoder and projector fully trainable.

    One PEFT adapter holds all trained weights. Defaults are from the paper's table 8 and the authors' target modules.

    Args:
        tune: "graph_token" adds no LoRA (ablation "No LoRA"); "all" trains the model itself, without an adapter.
        targets: Linear layers of the language model to adapt; "all-linear": all of them except the output layer.
    """
    options = dict(options or {})
    use_graph = model.config.use_graph
    model.labels_only = scales_alike(model.language_model)
    if tune == "all":
        return model
    lora = tune == "lora"
    chosen = chosen_layers(model.language_model, targets, model.config.base_model) if lora else set()
    # A pattern excludes the graph encoder's linear layers, which are fully trained and need no LoRA.
    layers: Any = f"{LANGUAGE_MODEL_LAYERS}({'|'.join(sorted(chosen))})"
    if lora and (numbers := layer_numbers(model, options)):  # PEFT does not accept numbers together with a pattern
        layers = [name for name in numbers if re.fullmatch(layers, name)]
        options.pop("layers_to_transform")
    saved = [*(GRAPH_MODULES if use_graph else ()), *(options.pop("modules_to_save", None) or ())]
    return put_adapter(
        model,
        options,
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=layers if lora else _NO_ADAPTER_LAYERS,
        modules_to_save=saved or None,
    )


def is_graph_llm_folder(folder: str | Path) -> bool:
    """Whether a folder holds a trained Graph-LLM: run, checkpoint, export or merged model."""
    try:
        return bool(read_json(Path(folder) / CONFIG).get("model_type") == GraphLLMConfig.model_type)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False


def load_graph_llm(
    folder: str | Path, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel | PeftModel, GraphLLMProcessor]:
    """Load a trained Graph-LLM and its processor; any other causal LM becomes an untrained Graph-LLM without graph."""
    path = Path(resolve(folder))
    if not is_graph_llm_folder(path):
        if path.is_dir() and not (path / CONFIG).exists():
            raise FileNotFoundError(f"model folder {path} has no {CONFIG}: it is not a model or checkpoint")
        return build_graph_llm(str(folder), dtype=dtype, use_graph=False)
    with telling(path, "Graph-LLM"):
        processor = GraphLLMProcessor.from_pretrained(path)
        config = GraphLLMConfig.from_pretrained(path)
        try:
            load_config(GraphSettings, None, values_of(GraphSettings, config))
        except ConfigError as error:
            raise ValueError(f"{path / CONFIG}: {str(error).partition('  - ')[2]}") from None
        base = with_revision(str(config.base_model), config.base_revision)
        check_specs(path / CONFIG, *[config.encoder] * config.use_graph, *[base] * is_adapter(path))
        if (noted := config.encoder_weights) and content_fingerprint(config.encoder) not in ("", noted):
            known = f"of its training in {path / CONFIG} (if you know that it is the same, remove encoder_weights)"
            raise ValueError(
                f"model {path} was trained with a text encoder other than {config.encoder}: name that {known}"
            )
        model: Any
        if is_adapter(path):
            language_model, _ = load_causal_lm(base, dtype)
            # The base model is frozen and known by name; the folder holds only the adapter.
            model = load_adapter(GraphLLM(config, language_model), path, base)
        else:
            options = SAY_WHAT_IS_MISSING | ({"dtype": dtype} if dtype else {})
            model = complete(GraphLLM.from_pretrained(path, use_safetensors=True, **options), folder)
    return model.eval(), processor


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
