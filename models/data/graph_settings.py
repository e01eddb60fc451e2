"""Settings of a Graph-LLM, each declared here alone: its graph modules' and its prompts'.

`GraphSettings` is a base of the training configuration's `model` section (flags, YAML, card) and of `GraphLLMConfig`
(`config.json`, the layers read it); `PromptSettings` of its `data` section and of `ProcessorSettings`. Defaults are the
paper's (RAS, section D.2 and table 8), or the authors' code where it is silent.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from tripletune.models.options import rare, setting


@dataclass
class GraphSettings:
    """Graph encoder, projector and graph token (RAS, section 3.4)."""

    encoder: str = setting("sentence-transformers/all-roberta-large-v1", "sentence encoder for node and edge texts")
    use_graph: bool = setting(True, "false: no graph encoder and no graph token (ablation No GraphEncode)")
    graph_architecture: str = rare(
        "graph_transformer",
        "graph convolution; …_authors: as in their code, without edge features",
        choices=("graph_transformer", "gat", "gcn", "gat_authors", "gcn_authors"),
    )
    graph_hidden_width: int = rare(1024, "hidden width of the graph encoder", above=0)
    graph_layers: int = rare(3, "graph convolutions", above=0)
    graph_heads: int = rare(8, "attention heads of the graph encoder", above=0)
    graph_dropout: float = rare(0.1, "dropout of the graph encoder", at_least=0, at_most=1)
    graph_attention_dropout: float = rare(
        0.0, "dropout of its attention weights; 0.1 in the authors' code", at_least=0, at_most=1
    )
    graph_pooling: str = rare(
        "subgraphs", "subgraphs: mean per sub-graph, then across; union: mean over G_Q", choices=("subgraphs", "union")
    )
    projector_width: int = rare(2048, "intermediate width of the projector", above=0)
    graph_token: str = rare(
        "paper",
        "normalised: without the projector's offset, and as long as the mean token embedding",
        choices=("paper", "normalised"),
    )


@dataclass
class PromptSettings:
    """How a record becomes a prompt (RAS, sections 3.4 and D.2)."""

    evidence: str = setting(
        "triples",
        "triples; text: passages instead of triples (ablation No Text-to-Triple); graph: facts in the graph alone",
        choices=("triples", "text", "graph"),
    )
    prompt_format: str = rare(
        "auto",
        "chat is the tokenizer's template; auto: chat where there is one",
        choices=("auto", "chat", "plain", "llama2"),
    )
    prompt_order: str = setting(
        "instruction_first",
        "instruction_first (paper); history_first: graph token and instruction after the history; interleaved: a "
        "question is one growing sequence with a graph token for each step, and one row in training",
        choices=("instruction_first", "history_first", "interleaved"),
    )
    max_input_tokens: int = rare(2500, "longest prompt; triples of the oldest step are left out first", at_least=16)
    max_label_tokens: int = rare(300, "longest label, with its end-of-sequence token", at_least=2)


def values_of(kind: type, section: Any) -> dict[str, Any]:
    """The fields of a dataclass in an instance of one of its subclasses."""
    return {item.name: getattr(section, item.name) for item in fields(kind)}
