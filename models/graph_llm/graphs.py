"""Build graphs from triples, one sub-graph per step or their union, the question graph G_Q (RAS, section 3.2, eq. 5-6),
and encode them: Graph Transformer (paper), GAT and GCN, with edge features (sections 3.1, D.2 and table 8).

Nodes are the distinct subject and object strings; every triple gives an edge and a reverse edge whose text is
`inverse_` + predicate, so information flows both ways.

Shapes: N nodes and E edges of a sample (or batch), D text-embedding width, H hidden width, S sub-graphs, B samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, TransformerConv
from torch_geometric.utils import scatter

from tripletune.core.data.graph_settings import GraphSettings
from tripletune.core.data.records import Step

INVERSE = "inverse_"


class SampleGraph(NamedTuple):
    """The non-empty sub-graphs of a sample.

    `nodes` and `edges` are texts or the keys of their embeddings; `subgraph` has the sub-graph number of each node.
    """

    nodes: list[Any]
    edges: list[Any]
    sources: list[int]
    targets: list[int]
    subgraph: list[int]


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


class _WithoutEdges(nn.Module):
    """A convolution without edge features."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, edge_attr: torch.Tensor) -> torch.Tensor:
        return self.conv(x, edge_index)


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
