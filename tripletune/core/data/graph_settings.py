"""Settings of a Graph-LLM's graph modules and prompts, declared only here.

`GraphSettings` is a base class of the training configuration's `model` section (flags, YAML, card) and of
`GraphLLMConfig` (`config.json`). `PromptSettings` is a base class of the training configuration's `data` section and of
`ProcessorSettings`. Defaults come from the paper (RAS, section D.2 and table 8), or else from the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from tripletune.core.options import rare, setting


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
    prompt_text: str = rare(
        "apart",
        "instruction and body are tokenised apart, or joined into one text as in the authors' code (with formats that "
        "have only a blank line between them)",
        choices=("apart", "joined"),
    )
    max_input_tokens: int = rare(2500, "maximum prompt tokens; the oldest triples are dropped first", at_least=16)
    max_label_tokens: int = rare(300, "maximum label tokens, end-of-sequence token included", at_least=2)


def values_of(kind: type, section: object) -> dict[str, Any]:
    """The values that an instance of a subclass has for the fields of the dataclass `kind`."""
    return {item.name: getattr(section, item.name) for item in fields(kind)}
