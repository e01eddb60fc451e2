"""A Graph-LLM of RAS in one file, written by `tripletune checkpoints export` (TripleTune, Apache-2.0).

    from transformers import AutoModel, AutoProcessor

    model = AutoModel.from_pretrained(FOLDER, trust_remote_code=True)
    processor = AutoProcessor.from_pretrained(FOLDER, trust_remote_code=True)
    facts = [("The Glass Harbour", "written by", "Ida Morn"), ("Ida Morn", "born in", "Velsund")]
    inputs = processor("Where was its author born?", [("Who wrote The Glass Harbour?", facts)])
    print(processor.decode(model.generate(**inputs, max_new_tokens=64), inputs))

It needs torch, transformers, peft and torch-geometric. Give the model `base_model=FOLDER` to load the base model from
another place, and the processor `encoder=FOLDER` for the text encoder.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import re
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import jinja2
import torch
from peft import PeftModel
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, TransformerConv
from torch_geometric.utils import scatter
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchFeature,
    GenerationConfig,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import cached_file


def _only_default(default: Any, help: str, **_: Any) -> Any:
    return default


setting = rare = _only_default


@dataclass
class GraphSettings:
    """Graph encoder, projector and graph token (RAS, section 3.4)."""

    encoder: str = setting("sentence-transformers/all-roberta-large-v1", "sentence encoder for node and edge texts")
    use_graph: bool = setting(True, "use the graph encoder and graph token; false: ablation No GraphEncode")
    graph_architecture: str = rare(
        "graph_transformer",
        "graph convolution; the …_authors choices follow the authors' code, without edge features",
        choices=("graph_transformer", "gat", "gcn", "gat_authors", "gcn_authors"),
    )
    graph_hidden_width: int = rare(1024, "hidden width of the graph encoder", above=0)
    graph_layers: int = rare(3, "number of graph convolutions", above=0)
    graph_heads: int = rare(8, "attention heads of the graph encoder", above=0)
    graph_dropout: float = rare(0.1, "dropout of the graph encoder", at_least=0, at_most=1)
    graph_attention_dropout: float = rare(
        0.0, "dropout of the encoder's attention weights; 0.1 in the authors' code", at_least=0, at_most=1
    )
    graph_pooling: str = rare(
        "subgraphs",
        "subgraphs: mean of the means of the sub-graphs; union: mean over all nodes of G_Q",
        choices=("subgraphs", "union"),
    )
    projector_width: int = rare(2048, "intermediate width of the projector", above=0)
    graph_token: str = rare(
        "paper",
        "normalised: output of the projector without its offset, scaled to the mean norm of token embeddings",
        choices=("paper", "normalised"),
    )


class GraphLLMConfig(GraphSettings, PretrainedConfig):
    """Configuration of a `GraphLLM`.

    Attributes:
        base_weights: Fingerprint of the base model; see `models.loading.check_base`. `encoder_weights`: of the encoder.
        graph_token_norm: Norm to which the graph token is scaled after the projector's offset is removed, since that
            offset hides the differences between graphs; None leaves the token unchanged (paper).
    """

    model_type = "graph_llm"
    sub_configs: ClassVar[dict[str, Any]] = {"text_config": AutoConfig}

    text_config: Any = None
    base_model: str = ""
    base_revision: str | None = None
    base_weights: str = ""
    encoder_weights: str = ""
    text_embedding_width: int = 1024
    graph_token_id: int | None = None
    graph_token_norm: float | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.text_config, dict):
            self.text_config = AutoConfig.for_model(**self.text_config)
        if self.graph_token_norm is not None:  # older checkpoints have no `graph_token`
            self.graph_token = "normalised"
        super().__post_init__(**kwargs)


# The label of tokens that are not learned.
IGNORED = -100


def label_logits(model: Any, keep: torch.Tensor, *args: Any, **inputs: Any) -> torch.Tensor:
    """Logits (N, V) of a causal language model, only at positions where `keep` (B, at most T) is true.

    Some families scale their logits: Gemma caps them, Granite divides them, Cohere multiplies them.
    """
    # With a cache, transformers would treat a packed row as one sequence.
    hidden = model.get_decoder()(*args, **inputs, use_cache=False).last_hidden_state
    logits, config = model.get_output_embeddings()(hidden[:, : keep.shape[1]][keep]), model.config.get_text_config()
    if (softcap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits * (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)


class _WithoutEdges(nn.Module):
    """A convolution without edge features."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, edge_attr: torch.Tensor) -> torch.Tensor:
        return self.conv(x, edge_index)


class _EdgeAwareGCN(nn.Module):
    """GCN whose messages also carry the edge feature: the mean of incoming edge features is added before the step.

    `GCNConv` itself takes scalar edge weights only.
    """

    def __init__(self, in_width: int, out_width: int, edge_width: int) -> None:
        super().__init__()
        self.conv = GCNConv(in_width, out_width)
        self.edge = nn.Linear(edge_width, in_width)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, edge_attr: torch.Tensor) -> torch.Tensor:
        incoming = scatter(self.edge(edge_attr), edge_index[1], dim=0, dim_size=x.shape[0], reduce="mean")
        return self.conv(x + incoming, edge_index)


def _convolution(settings: GraphSettings, in_width: int, edge_width: int) -> nn.Module:
    architecture, hidden_width = settings.graph_architecture, settings.graph_hidden_width
    per_head = hidden_width // settings.graph_heads
    dropout = settings.graph_attention_dropout
    options: dict[str, Any] = {"heads": settings.graph_heads, "dropout": dropout, "edge_dim": edge_width}
    if architecture == "graph_transformer":
        return TransformerConv(in_width, per_head, **options)
    if architecture == "gat":
        # Self-loops take the mean of a node's edge features (PyG's default fill).
        return GATv2Conv(in_width, per_head, **options)
    if architecture == "gcn":
        return _EdgeAwareGCN(in_width, hidden_width, edge_width)
    if architecture == "gcn_authors":
        return _WithoutEdges(GCNConv(in_width, hidden_width))
    return _WithoutEdges(GATConv(in_width, hidden_width, **options | {"edge_dim": None, "concat": False}))


class _NodeNorm(nn.BatchNorm1d):
    """Batch normalisation over nodes; a single node uses the running statistics and does not change them."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if len(input) > 1:
            return super().forward(input)
        mean, variance = self.running_mean, self.running_var
        return nn.functional.batch_norm(input, mean, variance, self.weight, self.bias, eps=self.eps)


class GraphEncoder(nn.Module):
    """Encode all sub-graphs of a batch at once, and pool them to one vector per sample.

    Each layer is a convolution; LayerNorm, ReLU and dropout follow every layer except the last. Pooling is the mean
    over the nodes of a sub-graph, then the mean over the sub-graphs of a sample; a sample without nodes gives the zero
    vector (section D.2 and the authors' code for the empty case).

    GAT (GATv2) and GCN use edge features and concatenate heads. `gat_authors` and `gcn_authors` follow the authors'
    code: they use no edge features, they use batch normalisation, and `gat_authors` averages its heads.
    """

    def __init__(self, settings: GraphSettings, in_width: int) -> None:
        super().__init__()
        self.settings = settings
        self.convolutions = nn.ModuleList()
        self.norms = nn.ModuleList()
        hidden = settings.graph_hidden_width
        for layer in range(settings.graph_layers):
            self.convolutions.append(_convolution(settings, hidden if layer else in_width, in_width))
            if layer < settings.graph_layers - 1:
                authors = settings.graph_architecture.endswith("_authors")
                self.norms.append(_NodeNorm(hidden) if authors else nn.LayerNorm(hidden))
        self.dropout = nn.Dropout(settings.graph_dropout)

    def forward(self, graphs: Batch) -> torch.Tensor:
        """Encode the graphs of a batch from `batch_graphs` as (B, H), one vector per sample."""
        num_samples = graphs.num_graphs
        weight = next(self.parameters())
        graphs = graphs.to(weight.device)
        x, edge_index = graphs.x.to(weight.dtype), graphs.edge_index
        edge_attr = graphs.edge_attr.to(weight.dtype)
        empty = x.shape[0] == 0
        if empty:
            # A node with an edge to itself passes through all layers with weight 0, so that distributed training finds
            # a gradient for each parameter, also if parameters are gathered only while their layer runs.
            x, edge_attr = x.new_zeros(1, x.shape[1]), x.new_zeros(1, edge_attr.shape[1])
            edge_index = edge_index.new_zeros(2, 1)
        for layer, convolution in enumerate(self.convolutions):
            x = convolution(x, edge_index, edge_attr)
            if layer < len(self.norms):
                x = torch.relu(self.norms[layer](x))
                # An empty graph draws no random numbers.
                x = x if empty else self.dropout(x)
        if empty:
            return 0.0 * x.expand(num_samples, -1)
        # No numbered sub-graph is empty.
        pooled = scatter(x, graphs.subgraph_of, dim=0, reduce="mean")
        sample_of = scatter(graphs.batch, graphs.subgraph_of, dim=0, reduce="max")
        return scatter(pooled, sample_of, dim=0, dim_size=num_samples, reduce="mean")


def label_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """The mean cross-entropy of label tokens.

    Args:
        logits: (N, V).
        targets: (N,) token ids.
        weights: (N,) weights of the tokens; by default 1.
        num_items_in_batch: Sum of the weights in the whole optimiser step, as divisor of the sum of losses.
    """
    losses = nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    total = (losses if weights is None else losses * weights).sum()
    if num_items_in_batch is None:
        num_items_in_batch = max(targets.numel(), 1) if weights is None else weights.sum()
    return total / num_items_in_batch


class Projector(nn.Sequential):
    """Map (B, H) to (B, W) by two linear layers with a sigmoid between them (authors' code; table 8)."""

    def __init__(self, in_width: int, width: int, out_width: int, bias: bool = True) -> None:
        up, out = nn.Linear(in_width, width), nn.Linear(width, out_width, bias=bias)
        super().__init__(OrderedDict(up=up, sigmoid=nn.Sigmoid(), out=out))


class NormalisedProjector(Projector):
    """A projector without the offset that all graphs share: a token has norm `norm`, or 0 for the empty graph."""

    def __init__(self, in_width: int, width: int, out_width: int, norm: float) -> None:
        super().__init__(in_width, width, out_width, bias=False)
        self.norm = norm

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map encoded graphs (B, H) to graph tokens (B, W)."""
        # Graphs differ by only a few hundredths of the offset; bfloat16 would round these differences.
        with torch.autocast(input.device.type, enabled=False):
            vectors = input.to(self.up.weight.dtype)
            hidden = self.sigmoid(self.up(torch.cat([vectors, torch.zeros_like(vectors[:1])])))
            return self.norm * nn.functional.normalize(self.out(hidden[:-1] - hidden[-1:]), dim=-1, eps=1e-4)


class GraphLLM(PreTrainedModel, GenerationMixin):
    """Graph encoder, projector and a causal language model of any decoder family with attention (not pure Mamba).

    Without `language_model`, a language model with random weights is built from `config.text_config`.
    """

    config_class = GraphLLMConfig
    base_model_prefix = "language_model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    # Whether logits can be computed at label positions only; see `models.losses.scales_alike`.
    labels_only = True
    # Whether training packs rows end to end; see `models.attention`.
    end_to_end = False
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: GraphLLMConfig, language_model: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        if language_model is None:
            language_model = AutoModelForCausalLM.from_config(config.text_config)
        elif language_model.config._attn_implementation is None:
            # Sharing the configuration with a composite model resets the attention: set the fastest kernel that the
            # family supports (some families, for example Gemma 2, do not have scaled_dot_product_attention).
            attention = language_model.get_correct_attn_implementation(None, True)
            language_model.set_attn_implementation(attention)
            if language_model.config._attn_implementation is None:
                # Old families, such as GPT-J, ignore this setter, and without a name they would get no causal mask.
                language_model.config._attn_implementation = attention
        self.language_model = language_model
        self._no_split_modules = list(getattr(language_model, "_no_split_modules", None) or [])
        if config.use_graph:
            self.graph_encoder = GraphEncoder(config, config.text_embedding_width)
            widths = config.graph_hidden_width, config.projector_width, config.text_config.hidden_size
            norm = config.graph_token_norm
            self.projector = Projector(*widths) if norm is None else NormalisedProjector(*widths, norm)
        if hasattr(language_model, "generation_config"):
            self.generation_config = language_model.generation_config
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        # Every part initialises itself; the default would overwrite a loaded language model.
        return

    def get_output_embeddings(self) -> nn.Module:
        """The language model's output layer."""
        return self.language_model.get_output_embeddings()

    def get_decoder(self) -> nn.Module:
        """The language model without its output layer."""
        return self.language_model.get_decoder()

    def embed_inputs(self, input_ids: Any, graph_embeds: torch.Tensor | None) -> torch.Tensor:
        """Token embeddings (B, T, W) of `input_ids` (B, T), in which `graph_embeds` replace the placeholders.

        Without a placeholder, one graph token may still be given, so that the graph modules get a (zero) gradient.
        """
        token_id = self.config.graph_token_id
        embed = self.language_model.get_input_embeddings()
        if token_id is None:
            return embed(input_ids)
        is_graph = input_ids == token_id
        # The placeholder may be outside the vocabulary: look up token 0 instead.
        embeds = embed(torch.where(is_graph, 0, input_ids))
        if graph_embeds is None:
            if bool(is_graph.any()):
                raise ValueError("input_ids hold a graph placeholder, but no graphs were passed")
            return embeds
        placeholders = int(is_graph.sum())
        if placeholders != graph_embeds.shape[0] and (placeholders, graph_embeds.shape[0]) != (0, 1):
            raise ValueError(f"{graph_embeds.shape[0]} graphs were passed for {placeholders} graph placeholders")
        return embeds.masked_scatter(is_graph.unsqueeze(-1), graph_embeds.to(embeds.dtype))

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        graphs: Batch | None = None,
        graph_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        label_weights: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        full_logits: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Run the model.

        Args:
            input_ids: (B, T) tokens, with placeholders where the model uses graphs.
            attention_mask: (B, T).
            position_ids: (B, T); by default counted from the attention mask.
            inputs_embeds: (B, T, W) instead of `input_ids`.
            graphs: PyG batch of the graphs, row after row in the order of their placeholders.
            graph_embeds: (placeholders, W) graph tokens, if they are already computed.
            labels: (B, T), -100 where nothing is learned; this method shifts them.
            label_weights: (B, T), weights of the label tokens in the mean; by default 1.
            logits_to_keep: As in transformers, for generation.
            full_logits: With labels, also compute logits where nothing is learned (for tests and analysis).
            num_items_in_batch: Number of label tokens, or the sum of their weights, in the whole optimiser step.

        Returns:
            The loss, which is the mean cross-entropy of label tokens, or the sum divided by `num_items_in_batch`; the
            logits, (B, T, V), or (label tokens, V) with labels and without `full_logits`; the cache.
        """
        if inputs_embeds is None:
            if graphs is not None and self.config.use_graph:
                graph_embeds = self.projector(self.graph_encoder(graphs))
            inputs_embeds = self.embed_inputs(input_ids, graph_embeds)
        if position_ids is None and attention_mask is not None:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -inputs_embeds.shape[1] :]
        inputs = {
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            **kwargs,
        }
        if labels is None:
            output = self.language_model(**inputs, use_cache=use_cache, logits_to_keep=logits_to_keep)
            return CausalLMOutputWithPast(None, output.logits, output.past_key_values)
        keep = labels[:, 1:] != IGNORED
        targets = labels[:, 1:][keep]
        weights = None if label_weights is None else label_weights[:, 1:][keep]
        if full_logits or not self.labels_only:
            whole = self.language_model(**inputs, use_cache=False).logits
            loss = label_loss(whole[:, :-1][keep], targets, weights, num_items_in_batch)
            return CausalLMOutputWithPast(loss, whole if full_logits else whole[:, :-1][keep])
        if self.end_to_end and attention_mask is None:
            # Tokens after the last label of a row, such as padding, are not computed.
            needed = keep.flip(1).cumsum(1).flip(1) > 0
            places = torch.arange(needed.shape[1], device=needed.device).expand_as(needed)
            inputs |= {"inputs_embeds": inputs_embeds[:, :-1][needed][None], "attention_mask": needed[None, None]}
            inputs["position_ids"], keep = places[needed][None], keep[needed][None]
        logits = label_logits(self.language_model, keep, **inputs)
        return CausalLMOutputWithPast(label_loss(logits, targets, weights, num_items_in_batch), logits)

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        """Pass the graph token on the first step, and on later steps only without a cache."""
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        if kwargs.get("past_key_values") is not None and not kwargs.get("is_first_iteration"):
            inputs.pop("graph_embeds", None)
        return inputs

    @torch.no_grad()
    def generate(self, *args: Any, graphs: Batch | None = None, **kwargs: Any) -> Any:
        """Generate as in transformers; graphs are encoded once, and beams and samples share them."""
        if graphs is not None and self.config.use_graph:
            kwargs["graph_embeds"] = self.projector(self.graph_encoder(graphs))
        return super().generate(*args, **kwargs)


def folder_of(spec: str) -> str:
    """Return a folder or hub id unchanged, or the model folder in the package of `pypi:package`."""
    if not spec.startswith("pypi:"):
        return spec
    package, found = spec.removeprefix("pypi:"), dict[str, str]()
    with suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.files(package) or []
        found = {file.name: str(Path(str(file.locate())).parent) for file in reversed(files)}
    if place := found.get("modules.json") or found.get("config.json"):
        return place
    raise FileNotFoundError(
        f"{spec}: there is no installed Python package {package} with a model folder in it; install it, or give the "
        "model's folder: base_model=FOLDER for the model, encoder=FOLDER for the processor"
    )


def read_settings(place: str, name: str) -> Any:
    """Return the content of a JSON file of a model (folder or hub id), or None if the model has no such file."""
    found = cached_file(place, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else json.loads(Path(found).read_text(encoding="utf-8"))


class AutoGraphLLM(GraphLLM):
    """The model that `AutoModel.from_pretrained(FOLDER, trust_remote_code=True)` returns."""

    @classmethod
    def from_pretrained(cls, folder: Any, *args: Any, config: Any = None, dtype: Any = "auto", **options: Any) -> Any:
        """Load a whole model, or an adapter and the base model that `config.base_model` names."""
        if read_settings(folder, "adapter_config.json") is None:
            return super().from_pretrained(folder, *args, config=config, dtype=dtype, **options)
        safe = {"use_safetensors": True, "trust_remote_code": False, "revision": config.base_revision or "main"}
        place = folder_of(config.base_model)
        language_model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **safe)
        adapted = PeftModel.from_pretrained(cls(config, language_model), str(folder), autocast_adapter_dtype=False)
        model = adapted.get_base_model().eval()
        model.generation_config = GenerationConfig.from_pretrained(folder)
        return model


class SampleGraph(NamedTuple):
    """The non-empty sub-graphs of a sample.

    `nodes` and `edges` are texts or the keys of their embeddings; `subgraph` has the sub-graph number of each node.
    """

    nodes: list[Any]
    edges: list[Any]
    sources: list[int]
    targets: list[int]
    subgraph: list[int]


@dataclass(frozen=True, slots=True)
class EncodedInput:
    """The tokens of a prompt, the graph of each placeholder, and how many triples or words were dropped to fit."""

    input_ids: list[int]
    graphs: list[SampleGraph]
    truncated_triples: int = 0
    truncated_words: int = 0


@dataclass
class PromptSettings:
    """How a record becomes a prompt (RAS, sections 3.4 and D.2)."""

    evidence: str = setting(
        "triples",
        "shown in a step: triples; passages (text, ablation No Text-to-Triple); only the graph token (graph)",
        choices=("triples", "text", "graph"),
    )
    prompt_format: str = rare(
        "auto",
        "prompt format; chat: the tokenizer's chat template; auto: chat if the tokenizer has a template",
        choices=("auto", "chat", "plain", "llama2"),
    )
    prompt_order: str = setting(
        "instruction_first",
        "order of the prompt: instruction_first (paper); history_first: history, graph token, instruction; "
        "interleaved: each question is one growing sequence (one row in training) with a graph token per step",
        choices=("instruction_first", "history_first", "interleaved"),
    )
    max_input_tokens: int = rare(2500, "maximum prompt tokens; the oldest triples are dropped first", at_least=16)
    max_label_tokens: int = rare(300, "maximum label tokens, end-of-sequence token included", at_least=2)


@dataclass(kw_only=True)
class ProcessorSettings(PromptSettings):
    """Settings of a processor, saved beside its tokenizer; the instructions are INST_Plan and INST_Ans.

    With `prompt_format` "plain" a prompt is instruction, blank line, body and line break; "llama2" writes [INST]
    instruction, blank line, body [/INST].
    """

    planning_instruction: str
    answering_instruction: str
    use_graph: bool = True
    graph_pooling: str = "subgraphs"


Task = Literal["planning", "answering"]


_NEEDS_ESCAPE = re.compile(r"\\|\((?=\s*S>)|\|(?=\s*[PO]>)")


@dataclass(frozen=True, slots=True, order=True)
class Triple:
    """One fact. White space in a field is folded to single spaces; an empty field raises a `ValueError`."""

    subject: str
    predicate: str
    object: str

    def __post_init__(self) -> None:
        for name in ("subject", "predicate", "object"):
            folded = " ".join(getattr(self, name).split())
            if not folded:
                raise ValueError(
                    f"triple field {name!r} is empty in {(self.subject, self.predicate, self.object)!r}: "
                    "a triple needs a subject, a predicate and an object"
                )
            object.__setattr__(self, name, folded)

    def __str__(self) -> str:
        names = (_NEEDS_ESCAPE.sub(r"\\\g<0>", name) for name in (self.subject, self.predicate, self.object))
        return "(S> {}| P> {}| O> {})".format(*names)

    def as_list(self) -> list[str]:
        """The JSON form `[subject, predicate, object]`."""
        return [self.subject, self.predicate, self.object]


@dataclass(frozen=True, slots=True)
class Step:
    """One round of retrieval: the sub-query q_i, the triples g_i and the text that the triples come from."""

    query: str
    triples: tuple[Triple, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Everything the model may see: task, main question and the history of steps.

    `graph_of`: other steps whose graph replaces the graph of the history, as a control of the graph token.
    """

    task: Task
    question: str
    steps: tuple[Step, ...] = ()
    graph_of: tuple[Step, ...] | None = None


def format_triples(triples: Iterable[Triple]) -> str:
    """Write triples on one line, separated by a comma and a space."""
    return ", ".join(map(str, triples))


class Action(StrEnum):
    """The planner's three decisions; the values are the interface strings of the paper."""

    SUBQ = "[SUBQ]"
    SUFFICIENT = "[SUFFICIENT]"
    NO_RETRIEVAL = "[NO_RETRIEVAL]"


def one_line(text: str) -> str:
    """Replace line breaks by spaces, so that a text stays on one line of a prompt."""
    return text if text.splitlines() in ([text], []) else " ".join(text.split())


def render_parts(sample: ModelInput, evidence: str = "triples") -> tuple[str, str]:
    """Return the history ("" if it is empty) and the line with the question."""
    lines = []
    for step in sample.steps:
        shown = "" if evidence == "graph" else format_triples(step.triples)
        if evidence == "text":
            shown = " ".join(step.text.split())
        lines += [f"{Action.SUBQ.value} {one_line(step.query)}", f"Retrieved Graph Information: {shown}".rstrip()]
    if not sample.steps and sample.task == "answering":
        lines.append(Action.NO_RETRIEVAL.value)
    return "\n".join(lines), f"Question: {one_line(sample.question)}"


def render_growing(sample: ModelInput, evidence: str = "triples") -> list[str | None]:
    """The text after the question, for prompts that continue the previous prompt and reply of the question.

    Returns:
        Pieces that are tokenised separately; None stands for a step's graph. The planner's real or expected reply is a
        separate piece.
    """
    pieces: list[str | None] = []
    for step in sample.steps:
        asked, found = render_parts(ModelInput(sample.task, sample.question, (step,)), evidence)[0].split("\n")
        pieces += [asked, f"\n{found}\n", None, "\n"]
    if sample.task == "answering":
        pieces += [(Action.SUFFICIENT if sample.steps else Action.NO_RETRIEVAL).value, "\nAnswer:\n"]
    return pieces


@lru_cache(maxsize=8)
def control_tokens(tokenizer: Any) -> dict[int, str]:
    """The special tokens of a tokenizer by their ids."""
    return {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def text_ids(tokenizer: Any, texts: Sequence[str], around: bool = False) -> list[list[int]]:
    """Tokenise texts without control tokens; `around` adds the special tokens that the tokenizer puts around a text."""
    if not texts:
        return []
    read = tokenizer(list(texts), add_special_tokens=around, split_special_tokens=True, return_special_tokens_mask=True)
    control, rows = control_tokens(tokenizer), list[list[int]]()
    for ids, added in zip(read["input_ids"], read["special_tokens_mask"]):
        rows.append(list(ids))
        # Unigram models (SentencePiece) find control tokens among their pieces of text.
        for place in range(len(ids) - 1, -1, -1) if not control.keys().isdisjoint(ids) else ():
            if ids[place] in control and not added[place] and ids[place] != tokenizer.unk_token_id:
                rows[-1][place : place + 1] = tokenizer.convert_tokens_to_ids(list(control[ids[place]]))
    return rows


# Private-use characters mark instruction and body in a chat template, since no text contains them.
_INSTRUCTION, _BODY = "\ue000instruction\ue001", "\ue000body\ue001"


class CallError(RuntimeError):
    """A call failed in a way that a retry cannot fix (refused key, unknown model); the message says what to do."""

    exit_code = 1


class PromptTooLong(CallError):
    """The prompt has more tokens than the model or its server accepts."""


class QuestionTooLong(PromptTooLong, ValueError):
    """A question is too long for the model, even without evidence."""


GRAPH_TOKEN = "<|graph|>"


INVERSE = "inverse_"


def build_graph(steps: Sequence[Step], pooling: str = "subgraphs") -> SampleGraph:
    """Build the graph of a graph token.

    In a sub-graph, equal names become one node, and a repeated triple counts once. With pooling "subgraphs" there is
    one sub-graph per step (paper, section D.2); with "union" the only sub-graph is G_Q (eq. 6).
    """
    graph, groups = SampleGraph([], [], [], [], []), [step.triples for step in steps]
    if pooling == "union":
        groups = [tuple(chain(*groups))]
    for number, triples in enumerate(filter(None, groups)):
        nodes: dict[str, int] = {}
        offset = len(graph.nodes)
        for triple in dict.fromkeys(triples):
            ends = [nodes.setdefault(name, offset + len(nodes)) for name in (triple.subject, triple.object)]
            graph.sources.extend(ends)
            graph.targets.extend(reversed(ends))
            graph.edges.extend([triple.predicate, INVERSE + triple.predicate])
        graph.nodes.extend(nodes)
        graph.subgraph.extend([number] * len(nodes))
    return graph


# Templates of LLaMA 3.1 and 3.2 write today's date by default, but prompts must not change overnight.
DATE = "26 Jul 2024"


def render(sample: ModelInput, evidence: str = "triples") -> str:
    """Write history and question as text, without the instruction.

    With evidence "text" (ablation without text-to-triples) a step shows the retrieved text instead of triples. With
    "graph" a step shows neither: only the graph token holds the facts.
    """
    return "\n".join(part for part in render_parts(sample, evidence) if part)


class GraphLLMProcessor:
    """Render, tokenise and truncate inputs for a `GraphLLM`; `use_graph` adds a placeholder to the tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: ProcessorSettings) -> None:
        self.tokenizer = tokenizer
        self.settings = settings
        if tokenizer.eos_token_id is None:
            raise ValueError(f"{tokenizer.name_or_path}: no end-of-sequence token: set one in tokenizer_config.json")
        self.graph_token_id: int | None = None
        if settings.use_graph:
            tokenizer.add_tokens([GRAPH_TOKEN], special_tokens=True)
            self.graph_token_id = int(tokenizer.convert_tokens_to_ids(GRAPH_TOKEN))
        self._opening, middle, self._closing = self._frame()
        self._graph = [self.graph_token_id] if self.graph_token_id is not None else []
        self._instructions = {"planning": settings.planning_instruction, "answering": settings.answering_instruction}
        grows = settings.prompt_order == "interleaved"
        both, first = "\n".join(self._instructions.values()), [] if grows else self._graph
        self._heads = {
            task: [*self._opening, *first, *self.encode_text(both if grows else instruction), *middle]
            for task, instruction in self._instructions.items()
        }

    def encode_input(self, sample: ModelInput, evidence: str | None = None) -> EncodedInput:
        """Encode prompt and graphs of an input; `evidence` overrides the setting `evidence`."""
        evidence = evidence or self.settings.evidence
        prompt = self.prompt(sample, evidence)
        triples = words = 0
        if len(prompt) > self.settings.max_input_tokens:
            prompt, triples, words = self._shorten(sample, evidence)
        steps = sample.steps if sample.graph_of is None else sample.graph_of
        parts: list[Sequence[Step]] = [steps]
        if self.settings.prompt_order == "interleaved":
            parts = [steps[number : number + 1] for number in range(len(sample.steps))]
        graphs = [build_graph(part, self.settings.graph_pooling) for part in parts] if self.settings.use_graph else []
        return EncodedInput(prompt, graphs, triples, words)

    def without_graph(self) -> GraphLLMProcessor:
        """Return a processor without graph placeholder, to evaluate a model that was trained with it (RAS, table 2)."""
        return GraphLLMProcessor(self.tokenizer, dataclasses.replace(self.settings, use_graph=False))

    def prompt(self, sample: ModelInput, evidence: str) -> list[int]:
        """The whole prompt, without truncation."""
        if self.settings.prompt_order == "instruction_first":
            return [*self._heads[sample.task], *self.encode_text(render(sample, evidence)), *self._closing]
        history, question = render_parts(sample, evidence)
        if self.settings.prompt_order == "interleaved":
            prompt = [*self._heads[sample.task], *self.encode_text(question), *self._closing]
            for piece in render_growing(sample, evidence):
                prompt += self._graph if piece is None else self.encode_text(piece)
            return prompt
        return [
            *self._opening,
            *(self.encode_text(f"{history}\n\n") if history else []),
            *self._graph,
            *self.encode_text(f"{self._instructions[sample.task]}\n\n{question}"),
            *self._closing,
        ]

    def encode_text(self, text: str) -> list[int]:
        """Tokens of a text, without control tokens."""
        return text_ids(self.tokenizer, [text])[0]

    def _frame(self) -> tuple[list[int], list[int], list[int]]:
        """Token ids before the instruction, between instruction and body, and after the body."""
        form = self.settings.prompt_format
        if form == "auto":
            form = "chat" if getattr(self.tokenizer, "chat_template", None) else "plain"
        bos = self.tokenizer.bos_token or ""
        if form == "plain":
            parts = (bos, "\n\n", "\n")
        elif form == "llama2":
            parts = (f"{bos}[INST] ", "\n\n", " [/INST]")
        else:
            parts = self._chat_frame()
        encoded = (self.tokenizer(part, add_special_tokens=False)["input_ids"] if part else [] for part in parts)
        opening, middle, closing = map(list, encoded)
        return opening, middle, closing

    def _chat_frame(self) -> tuple[str, str, str]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(
                "data.prompt_format chat: the tokenizer lacks a chat template; set plain, or use a chat model"
            )
        system = [{"role": "system", "content": _INSTRUCTION}, {"role": "user", "content": _BODY}]
        user = [{"role": "user", "content": f"{_INSTRUCTION}\n\n{_BODY}"}]
        for messages in (user,) if self.settings.prompt_order == "history_first" else (system, user):
            try:
                text = self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, enable_thinking=False, date_string=DATE
                )
            except jinja2.TemplateError:
                continue  # many templates reject a system message, and the sandbox rejects code
            if text.count(_INSTRUCTION) == 1 and text.count(_BODY) == 1:
                opening, rest = text.split(_INSTRUCTION)
                middle, closing = rest.split(_BODY)
                return opening, middle, closing
        raise ValueError("the tokenizer's chat template changes the text of messages; set data.prompt_format to plain")

    def _shorten(self, sample: ModelInput, evidence: str) -> tuple[list[int], int, int]:
        """Drop triples (or words of raw text) until the prompt fits: first those of the oldest step, from its end."""
        limit = self.settings.max_input_tokens
        # Words of more than 20 characters are dropped in parts, since some scripts have no spaces.
        units: list[list[Any]] = [
            {"triples": list(step.triples), "text": re.findall(r"\s*\S{1,20}", step.text)}.get(evidence, [])
            for step in sample.steps
        ]

        def prompt_without(count: int) -> list[int]:
            steps = []
            for step, group in zip(sample.steps, units):
                kept, count = group[: max(len(group) - count, 0)], max(count - len(group), 0)
                changed: dict[str, Any] = {evidence: tuple(kept) if evidence == "triples" else "".join(kept)}
                steps.append(dataclasses.replace(step, **changed) if group else step)
            return self.prompt(dataclasses.replace(sample, steps=tuple(steps)), evidence)

        most = sum(map(len, units))
        count = bisect_left(range(most), True, key=lambda count: len(prompt_without(count)) <= limit)
        prompt = prompt_without(count)
        if len(prompt) > limit:
            raise QuestionTooLong(
                f"question {sample.question[:80]!r}: without any evidence the prompt still has "
                f"{len(prompt) - limit} tokens more than max_input_tokens={limit} allows: raise max_input_tokens"
            )
        return (prompt, count, 0) if evidence == "triples" else (prompt, 0, count)


def batch_graphs(samples: Sequence[SampleGraph], vectors: Callable[[list[Any]], torch.Tensor]) -> Batch:
    """Merge graphs into one PyG `Batch`; `vectors` returns the vectors (n, D) of n texts or keys.

    Returns:
        For N nodes and E edges of all samples: `x` (N, D), `edge_index` (2, E), `edge_attr` (E, D), `batch` (N,), the
        sample of each node, and `subgraph_of` (N,), the sub-graph of each node, numbered across the whole batch.
    """
    found = vectors([one for sample in samples for one in (*sample.nodes, *sample.edges)])
    data, start, subgraphs = [], 0, 0
    for sample in samples:
        middle, end = start + len(sample.nodes), start + len(sample.nodes) + len(sample.edges)
        data.append(
            Data(
                x=found[start:middle],
                edge_index=torch.tensor([sample.sources, sample.targets], dtype=torch.long).reshape(2, -1),
                edge_attr=found[middle:end],
                subgraph_of=torch.tensor(sample.subgraph, dtype=torch.long) + subgraphs,
                num_nodes=len(sample.nodes),
            )
        )
        start, subgraphs = end, subgraphs + max(sample.subgraph, default=-1) + 1
    return Batch.from_data_list(data)


def read_text_alone(tokenizer: Any) -> None:
    """Make an encoder's tokenizer read control tokens as plain text, like `text_ids`, also when a library calls it."""
    from tokenizers import Tokenizer, models, normalizers

    tokenizer.split_special_tokens = True
    core = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(core, Tokenizer) and isinstance(core.model, (models.Unigram, models.WordLevel)):
        names = [token.content for token in core.get_added_tokens_decoder().values() if token.special]
        apart = [normalizers.Replace(name, f"{name[0]} {name[1:]}") for name in names]
        core.normalizer = normalizers.Sequence([*([core.normalizer] if core.normalizer else []), *apart])


class NodeEncoder:
    """Runs a sentence-transformers model with only transformers: mean or first-token pooling, optionally normalised.

    Vectors are rounded to float16, as in training.
    """

    def __init__(self, spec: str) -> None:
        place = folder_of(spec)
        paths = {one["type"].rpartition(".")[2]: one["path"] for one in read_settings(place, "modules.json") or ()}
        pooling = read_settings(place, f"{paths['Pooling']}/config.json") if "Pooling" in paths else {}
        old = [name for name, on in pooling.items() if name.startswith("pooling_mode_") and on is True]
        mode = pooling.get("pooling_mode") or ",".join(old)
        mean, self.first = mode in ("mean", "pooling_mode_mean_tokens"), mode in ("cls", "pooling_mode_cls_token")
        texts = read_settings(place, "sentence_bert_config.json") or {}
        prompts = (read_settings(place, "config_sentence_transformers.json") or {}).get("default_prompt_name")
        turns = prompts or "message" in texts.get("modality_config", ())
        if not (mean or self.first) or turns or paths.keys() - {"Transformer", "Pooling", "Normalize"}:
            raise ValueError(
                f"encoder {spec}: only sentence-transformers models with plain mean or first-token pooling are "
                "supported; set processor.vectors to a function from n texts to (n, D) floats"
            )
        self.unit = "Normalize" in paths
        self.tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        read_text_alone(self.tokenizer)
        safe = {"use_safetensors": True, "trust_remote_code": False}
        self.model = AutoModel.from_pretrained(place, dtype=torch.float32, **safe).eval()
        longest = getattr(self.model.config, "max_position_embeddings", self.tokenizer.model_max_length)
        self.limit = texts.get("max_seq_length") or min(longest, self.tokenizer.model_max_length)

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> torch.Tensor:
        """(n, D) floats."""
        distinct, found = list(dict.fromkeys(texts)), [torch.zeros(0, self.model.config.hidden_size)]
        for start in range(0, len(distinct), 256):
            some = distinct[start : start + 256]
            inputs = self.tokenizer(some, padding=True, truncation=True, max_length=self.limit, return_tensors="pt")
            hidden, mask = self.model(**inputs).last_hidden_state, inputs["attention_mask"].unsqueeze(-1)
            pooled = hidden[:, 0] if self.first else (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
            found.append(torch.nn.functional.normalize(pooled, dim=-1) if self.unit else pooled)
        rows = {text: row for row, text in enumerate(distinct)}
        return torch.cat(found)[[rows[text] for text in texts]].half().float()


class AutoGraphLLMProcessor(GraphLLMProcessor):
    """The processor that `AutoProcessor.from_pretrained(FOLDER, trust_remote_code=True)` returns.

    Attributes:
        vectors: Turns n node and edge texts into (n, D) floats; None until the first graph, then a `NodeEncoder`.
    """

    encoder: str = ""
    vectors: Callable[[Sequence[str]], torch.Tensor] | None = None

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoProcessor") -> None:
        """Do nothing: transformers calls it, but the folder already names the class."""

    @classmethod
    def from_pretrained(cls, folder: str | Path, encoder: str = "", **_: Any) -> AutoGraphLLMProcessor:
        """Load the folder's tokenizer and prompts; `encoder` names the text encoder if it is in another place."""
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        processor = cls(tokenizer, ProcessorSettings(**read_settings(str(folder), "processor_config.json")))
        processor.encoder = encoder or read_settings(str(folder), "config.json")["encoder"]
        return processor

    def __call__(
        self, question: str, steps: Sequence[tuple[str, Sequence[Sequence[str]]]] = (), task: Task = "answering"
    ) -> BatchFeature:
        """Return the inputs of `model.generate` for one question.

        Args:
            steps: The rounds so far: (sub-query, [(subject, predicate, object), …]) each.
            task: "planning" or "answering".
        """
        history = tuple(Step(query, tuple(Triple(*one) for one in triples)) for query, triples in steps)
        encoded = self.encode_input(ModelInput(task, question, history))
        ids = torch.tensor([encoded.input_ids])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if encoded.graphs:
            self.vectors = self.vectors or NodeEncoder(self.encoder)
            inputs["graphs"] = batch_graphs(encoded.graphs, self.vectors)
        return BatchFeature(inputs)

    def decode(self, output: torch.Tensor, inputs: BatchFeature) -> str:
        """Return the reply in the output of `generate` for these inputs."""
        reply = output[0, inputs["input_ids"].shape[1] :]
        return str(self.tokenizer.decode(reply, skip_special_tokens=True)).strip()
