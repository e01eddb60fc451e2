"""Build graphs from triples, one sub-graph per step or their union, the question graph G_Q (RAS, section 3.2, eq. 5-6),
and encode them: Graph Transformer (paper), GAT and GCN, with edge features (sections 3.1, D.2 and table 8).

Nodes are the distinct subject and object strings; every triple gives an edge and a reverse edge whose text is
`inverse_` + predicate, so information flows both ways.

Shapes: N nodes and E edges of a sample (or batch), D text-embedding width, H hidden width, S sub-graphs, B samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, TransformerConv
from torch_geometric.utils import scatter

from tripletune.core.data.graph_settings import GraphSettings
from tripletune.core.data.records import Step

INVERSE = "inverse_"
# The text of a node or edge, or in prepared training data the key of its vector (`embeddings.string_key`).
Label = TypeVar("Label", str, int)


class SampleGraph(NamedTuple, Generic[Label]):
    """The non-empty sub-graphs of a sample.

    Attributes:
        nodes: Labels of the nodes.
        edges: Labels of the edges.
        sources: For each edge, the number of the node where it begins.
        targets: For each edge, the number of the node where it ends.
        subgraph: For each node, the number of its sub-graph.
    """

    nodes: list[Label]
    edges: list[Label]
    sources: list[int]
    targets: list[int]
    subgraph: list[int]


def build_graph(steps: Sequence[Step], pooling: str = "subgraphs") -> SampleGraph[str]:
    """Build the graph of a graph token.

    In a sub-graph, equal names become one node, and a repeated triple counts once. With pooling "subgraphs" there is
    one sub-graph per step (paper, section D.2); with "union" the only sub-graph is G_Q (eq. 6).
    """
    groups = [step.triples for step in steps]
    if pooling == "union":
        groups = [tuple(chain(*groups))]
    graph = SampleGraph[str](nodes=[], edges=[], sources=[], targets=[], subgraph=[])
    # A step without triples gets no sub-graph, and no number.
    non_empty = [triples for triples in groups if triples]
    for number, triples in enumerate(non_empty):
        # Names of this sub-graph's nodes, and their numbers in the whole graph.
        nodes: dict[str, int] = {}
        offset = len(graph.nodes)
        for triple in dict.fromkeys(triples):
            subject = nodes.setdefault(triple.subject, offset + len(nodes))
            object_ = nodes.setdefault(triple.object, offset + len(nodes))
            # An edge, and the reverse edge. Sources, targets and edges stay in step: entry i is edge i.
            graph.sources.extend([subject, object_])
            graph.targets.extend([object_, subject])
            graph.edges.extend([triple.predicate, INVERSE + triple.predicate])
        graph.nodes.extend(nodes)
        graph.subgraph.extend([number] * len(nodes))
    return graph


def batch_graphs(samples: Sequence[SampleGraph[Label]], vectors: Callable[[list[Label]], torch.Tensor]) -> Batch:
    """Merge graphs into one PyG `Batch`; `vectors` returns the vectors (n, D) of n labels.

    PyG moves the node numbers of a sample behind those of the samples before it, but knows nothing of sub-graphs, whose
    numbers are moved here.

    Returns:
        For N nodes and E edges of all samples: `x` (N, D), `edge_index` (2, E), `edge_attr` (E, D), `batch` (N,), the
        sample of each node, and `subgraph_of` (N,), the sub-graph of each node, numbered across the whole batch.
    """
    # Nodes and edges of one sample after the other, so that one call embeds them all.
    labels: list[Label] = []
    for sample in samples:
        labels += sample.nodes
        labels += sample.edges
    embeddings = vectors(labels)
    graphs = []
    start = 0
    subgraphs_before = 0
    for sample in samples:
        edges_start = start + len(sample.nodes)
        end = edges_start + len(sample.edges)
        graphs.append(
            Data(
                x=embeddings[start:edges_start],
                edge_index=torch.tensor([sample.sources, sample.targets], dtype=torch.long).reshape(2, -1),
                edge_attr=embeddings[edges_start:end],
                subgraph_of=torch.tensor(sample.subgraph, dtype=torch.long) + subgraphs_before,
                num_nodes=len(sample.nodes),
            )
        )
        start = end
        subgraphs_before += max(sample.subgraph, default=-1) + 1
    return Batch.from_data_list(graphs)


class _EdgeAwareGCN(nn.Module):
    """GCN whose messages also carry the edge feature: the mean of incoming edge features is added before the step.

    `GCNConv` itself takes scalar edge weights only.

    Args:
        in_width: Width of a node's input vector.
        out_width: Width of its output vector.
        edge_width: Width of an edge's vector.
    """

    def __init__(self, in_width: int, out_width: int, edge_width: int) -> None:
        super().__init__()
        self.conv = GCNConv(in_width, out_width)
        self.edge = nn.Linear(edge_width, in_width)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, edge_attr: torch.Tensor) -> torch.Tensor:
        """Turn node vectors (N, `in_width`) into (N, `out_width`); a node without incoming edges adds nothing."""
        # (N, width of x): the mean of the edges that end at each node.
        incoming = scatter(self.edge(edge_attr), edge_index[1], dim=0, dim_size=x.shape[0], reduce="mean")
        return self.conv(x + incoming, edge_index)


class _WithoutEdges(nn.Module):
    """A convolution without edge features."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, edge_attr: torch.Tensor) -> torch.Tensor:
        """Convolve without `edge_attr`, which is taken so that the encoder calls all convolutions alike."""
        return self.conv(x, edge_index)


class _NodeNorm(nn.BatchNorm1d):
    """Batch normalisation over nodes; a single node uses the running statistics and does not change them.

    A single node has no variance, so torch raises an error for it in training.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise node vectors (N, H); a single node has no variance, and is normalised by the running statistics."""
        if len(input) > 1:
            return super().forward(input)
        return nn.functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )


class GraphEncoder(nn.Module):
    """Encode all sub-graphs of a batch at once, and pool them to one vector per sample.

    Each layer is a convolution; LayerNorm, ReLU and dropout follow every layer except the last. Pooling is the mean
    over the nodes of a sub-graph, then the mean over the sub-graphs of a sample; a sample without nodes gives the zero
    vector (section D.2 and the authors' code for the empty case).

    GAT (GATv2) and GCN use edge features and concatenate heads. `gat_authors` and `gcn_authors` follow the authors'
    code: they use no edge features, they use batch normalisation, and `gat_authors` averages its heads.

    Args:
        settings: Convolution, layers, widths and dropout.
        in_width: Width D of the vectors of nodes and edges.
    """

    def __init__(self, settings: GraphSettings, in_width: int) -> None:
        """Make the layers in their order, in which they draw their random numbers.

        Edges keep their text width in all layers, while nodes have it only in the first.
        """
        super().__init__()
        self.settings = settings
        self.convolutions = nn.ModuleList()
        self.norms = nn.ModuleList()
        hidden = settings.graph_hidden_width
        norm = _NodeNorm if settings.graph_architecture.endswith("_authors") else nn.LayerNorm
        for layer in range(settings.graph_layers):
            layer_in_width = in_width if layer == 0 else hidden
            self.convolutions.append(_convolution_of_layer(settings, layer_in_width, in_width))
            if layer < settings.graph_layers - 1:
                self.norms.append(norm(hidden))
        self.dropout = nn.Dropout(settings.graph_dropout)

    def forward(self, graphs: Batch) -> torch.Tensor:
        """Encode the graphs of a batch from `batch_graphs` as (B, H), one vector per sample.

        A sample may have several sub-graphs, one per step: nodes are averaged per sub-graph, and sub-graphs per sample,
        so a large step does not outweigh a small one. A batch without nodes gives zeros with a gradient.
        """
        num_samples = graphs.num_graphs
        weight = next(self.parameters())
        graphs = graphs.to(weight.device)
        x = graphs.x.to(weight.dtype)
        edge_index = graphs.edge_index
        edge_attr = graphs.edge_attr.to(weight.dtype)
        is_empty = x.shape[0] == 0
        if is_empty:
            # A node with an edge to itself passes through all layers with weight 0, so that distributed training finds
            # a gradient for each parameter, also if parameters are gathered only while their layer runs.
            x = x.new_zeros(1, x.shape[1])
            edge_attr = x.new_zeros(1, edge_attr.shape[1])
            edge_index = edge_index.new_zeros(2, 1)
        for layer, convolution in enumerate(self.convolutions):
            x = convolution(x, edge_index, edge_attr)
            if layer < len(self.norms):
                x = torch.relu(self.norms[layer](x))
                # An empty graph draws no random numbers.
                if not is_empty:
                    x = self.dropout(x)
        if is_empty:
            return 0.0 * x.expand(num_samples, -1)
        # (sub-graphs, H), then the sample of each sub-graph; no numbered sub-graph is empty.
        pooled = scatter(x, graphs.subgraph_of, dim=0, reduce="mean")
        sample_of = scatter(graphs.batch, graphs.subgraph_of, dim=0, reduce="max")
        return scatter(pooled, sample_of, dim=0, dim_size=num_samples, reduce="mean")


def _convolution_of_layer(settings: GraphSettings, in_width: int, edge_width: int) -> nn.Module:
    """The graph convolution of one layer, from `in_width` to `graph_hidden_width`.

    Where heads are concatenated, each has its share of the width, so all architectures have the same output; the heads
    of `gat_authors` are averaged, so each has the whole width.
    """
    architecture = settings.graph_architecture
    hidden_width = settings.graph_hidden_width
    per_head = hidden_width // settings.graph_heads
    options: dict[str, Any] = {"heads": settings.graph_heads, "dropout": settings.graph_attention_dropout}
    if architecture == "graph_transformer":
        return TransformerConv(in_width, per_head, edge_dim=edge_width, **options)
    if architecture == "gat":
        # Self-loops take the mean of a node's edge features (PyG's default fill).
        return GATv2Conv(in_width, per_head, edge_dim=edge_width, **options)
    if architecture == "gcn":
        return _EdgeAwareGCN(in_width, hidden_width, edge_width)
    if architecture == "gcn_authors":
        return _WithoutEdges(GCNConv(in_width, hidden_width))
    # "gat_authors", the last choice of the option.
    return _WithoutEdges(GATConv(in_width, hidden_width, concat=False, **options))
