"""Triples as graphs: one sub-graph a step and their union, the question graph G_Q (RAS, section 3.2, eq. 5-6), and the
encoders that read them: Graph Transformer (paper), GAT and GCN, with edge features (sections 3.1, D.2 and table 8).

Nodes are the distinct subject and object strings; every triple gives an edge and a reverse edge whose text is
`inverse_` + predicate, so information flows both ways.

Shapes: N nodes and E edges of a sample (or batch), D text-embedding width, H hidden width, S sub-graphs, B samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GATv2Conv, GCNConv, TransformerConv
from torch_geometric.utils import scatter

from tripletune.models.data.triples import Triple

INVERSE = "inverse_"
ARCHITECTURES = ("graph_transformer", "gat", "gcn")


@dataclass(frozen=True, slots=True)
class TextGraph:
    """A graph whose nodes and edges are strings.

    Attributes:
        edges: Source, target and text of each, reverse edges included.
        strings: Every string to embed: nodes, then edges.
    """

    nodes: tuple[str, ...]
    edges: tuple[tuple[int, int, str], ...]
    strings: tuple[str, ...]


def build_graph(triples: Iterable[Triple]) -> TextGraph:
    """Make the graph of some triples; a repeated triple counts once."""
    nodes: dict[str, int] = {}
    edges: list[tuple[int, int, str]] = []
    for triple in dict.fromkeys(triples):
        source = nodes.setdefault(triple.subject, len(nodes))
        target = nodes.setdefault(triple.object, len(nodes))
        edges += [(source, target, triple.predicate), (target, source, INVERSE + triple.predicate)]
    return TextGraph(tuple(nodes), tuple(edges), (*nodes, *(text for _, _, text in edges)))


class GraphRows(NamedTuple):
    """Sub-graphs of a sample as integers: rows of an embedding table and edge end points.

    Attributes:
        node_rows: N rows of the embedding table.
        edge_rows: E rows of the embedding table.
        sources: E node numbers within the sample.
        targets: E node numbers within the sample.
        subgraph: N sub-graph numbers.
    """

    node_rows: list[int]
    edge_rows: list[int]
    sources: list[int]
    targets: list[int]
    subgraph: list[int]


def graph_rows(graphs: Sequence[TextGraph], rows: dict[str, int]) -> GraphRows:
    """Lay sub-graphs side by side as integers; empty ones leave no trace.

    Args:
        graphs: The sub-graphs of one sample.
        rows: Row of the embedding table for every string in them.
    """
    result = GraphRows([], [], [], [], [])
    number = 0
    for graph in graphs:
        if not graph.nodes:
            continue
        offset = len(result.node_rows)
        result.node_rows.extend(rows[name] for name in graph.nodes)
        result.subgraph.extend([number] * len(graph.nodes))
        for source, target, text in graph.edges:
            result.edge_rows.append(rows[text])
            result.sources.append(offset + source)
            result.targets.append(offset + target)
        number += 1
    return result


def batch_graphs(samples: Sequence[GraphRows], vectors: Any, dimension: int) -> Batch:
    """All graphs of a batch as one PyG `Batch`.

    Args:
        samples: One entry a sample, in batch order.
        vectors: Callable from a list of table rows to an (n, D) float tensor.
        dimension: D.

    Returns:
        For N nodes and E edges of all samples `x` (N, D), `edge_index` (2, E), `edge_attr` (E, D), `batch` (N,), the
        sample of each node, and `subgraph_of` (N,), its sub-graph; sub-graphs are numbered through the whole batch.
    """
    data, subgraphs = [], 0
    for sample in samples:
        edge_index = torch.tensor([sample.sources, sample.targets], dtype=torch.long).reshape(2, -1)
        data.append(
            Data(
                x=vectors(sample.node_rows) if sample.node_rows else torch.zeros(0, dimension),
                edge_index=edge_index,
                edge_attr=vectors(sample.edge_rows) if sample.edge_rows else torch.zeros(0, dimension),
                subgraph_of=torch.tensor(sample.subgraph, dtype=torch.long) + subgraphs,
                num_nodes=len(sample.node_rows),
            )
        )
        subgraphs += max(sample.subgraph, default=-1) + 1
    return Batch.from_data_list(data)


def embed_batch(samples: Sequence[Sequence[TextGraph]], embeddings: Any) -> Batch:
    """The `batch_graphs` of graphs whose texts are embedded now, each distinct one once.

    Args:
        samples: The sub-graphs of each sample.
        embeddings: `models.graph_llm.embeddings.LiveEmbeddings`, or what looks texts up as it does.
    """
    texts = list(dict.fromkeys(text for graphs in samples for graph in graphs for text in graph.strings))
    rows = {text: row for row, text in enumerate(texts)}
    vectors = embeddings.vectors(texts)
    return batch_graphs([graph_rows(graphs, rows) for graphs in samples], vectors.__getitem__, embeddings.dimension)


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


class GraphEncoder(nn.Module):
    """Encodes every sub-graph of a batch at once and pools it to one vector a sample.

    Layers alternate convolution and, after all but the last, LayerNorm, ReLU and dropout. Pooling is the mean over
    the nodes of a sub-graph, then the mean over the sub-graphs of a sample; a sample without nodes gives the zero
    vector (section D.2 and the authors' code for the empty case).

    Args:
        architecture: "graph_transformer", "gat" or "gcn".
        in_width: D.
        hidden_width: H; heads are concatenated, so it must be divisible by them.
        num_layers: Convolutions.
        num_heads: Attention heads (not used by "gcn").
        dropout: Dropout between layers.

    Raises:
        ValueError: unknown architecture, or H is not a multiple of the heads.
    """

    def __init__(
        self,
        architecture: str,
        in_width: int,
        hidden_width: int = 1024,
        num_layers: int = 3,
        num_heads: int = 8,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if architecture not in ARCHITECTURES:
            raise ValueError(f"graph architecture {architecture!r} is not one of {', '.join(ARCHITECTURES)}")
        if hidden_width % num_heads:
            raise ValueError(f"graph hidden width {hidden_width} is not a multiple of its {num_heads} heads")
        self.hidden_width = hidden_width
        self.convolutions = nn.ModuleList()
        self.norms = nn.ModuleList()
        for layer in range(num_layers):
            width = in_width if layer == 0 else hidden_width
            self.convolutions.append(_convolution(architecture, width, hidden_width, num_heads, in_width))
            if layer < num_layers - 1:
                self.norms.append(nn.LayerNorm(hidden_width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, graphs: Batch) -> torch.Tensor:
        """Encode the graphs of a batch, from `batch_graphs`.

        Returns:
            (B, H) one vector a sample.
        """
        num_samples = graphs.num_graphs
        weight = self.convolutions[0].parameters().__next__()
        x = graphs.x.to(weight.dtype)
        edge_attr = graphs.edge_attr.to(weight.dtype)
        if x.shape[0] == 0:
            # The parameters still take part, so that distributed training finds a gradient for each of them.
            return x.new_zeros(num_samples, self.hidden_width) + 0.0 * sum(p.sum() for p in self.parameters())
        for layer, convolution in enumerate(self.convolutions):
            x = convolution(x, graphs.edge_index, edge_attr)
            if layer < len(self.norms):
                x = self.dropout(torch.relu(self.norms[layer](x)))
        # No numbered sub-graph is empty.
        pooled = scatter(x, graphs.subgraph_of, dim=0, reduce="mean")
        sample_of = scatter(graphs.batch, graphs.subgraph_of, dim=0, reduce="max")
        return scatter(pooled, sample_of, dim=0, dim_size=num_samples, reduce="mean")


def _convolution(architecture: str, in_width: int, hidden_width: int, heads: int, edge_width: int) -> nn.Module:
    if architecture == "graph_transformer":
        return TransformerConv(in_width, hidden_width // heads, heads=heads, edge_dim=edge_width)
    if architecture == "gat":
        # Self-loops take the mean of a node's edge features (PyG's default fill).
        return GATv2Conv(in_width, hidden_width // heads, heads=heads, edge_dim=edge_width)
    return _EdgeAwareGCN(in_width, hidden_width, edge_width)
