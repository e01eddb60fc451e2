"""Triples as graphs: one sub-graph a step and their union, the question graph G_Q (RAS, section 3.2, eq. 5-6).

Nodes are the distinct subject and object strings; every triple gives an edge and a reverse edge whose text is
`inverse_` + predicate, so information flows both ways. `SampleGraph` is the PyG form of all sub-graphs of one sample.

Shapes: N nodes and E edges of a sample (or batch), D text-embedding width, S sub-graphs, B samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch_geometric.data import Batch, Data

from tripletune.models.data.records import Step
from tripletune.models.data.triples import Triple

INVERSE = "inverse_"


@dataclass(frozen=True, slots=True)
class TextGraph:
    """A graph whose nodes and edges are strings; `edges` are (source, target, text), reverse edges included."""

    nodes: tuple[str, ...]
    edges: tuple[tuple[int, int, str], ...]

    @property
    def strings(self) -> list[str]:
        """Every string to embed, nodes first."""
        return [*self.nodes, *(text for _, _, text in self.edges)]


def build_graph(triples: Iterable[Triple]) -> TextGraph:
    """Make the graph of some triples; a repeated triple counts once."""
    nodes: dict[str, int] = {}
    edges: list[tuple[int, int, str]] = []
    for triple in dict.fromkeys(triples):
        source = nodes.setdefault(triple.subject, len(nodes))
        target = nodes.setdefault(triple.object, len(nodes))
        edges += [(source, target, triple.predicate), (target, source, INVERSE + triple.predicate)]
    return TextGraph(tuple(nodes), tuple(edges))


def step_graphs(steps: Sequence[Step]) -> list[TextGraph]:
    """One sub-graph a step, empty ones included (paper, section D.2)."""
    return [build_graph(step.triples) for step in steps]


def question_graph(steps: Sequence[Step]) -> TextGraph:
    """The union G_Q of all sub-graphs (eq. 6): equal names are one node, equal triples one edge."""
    return build_graph(triple for step in steps for triple in step.triples)


class SampleGraph(Data):
    """All sub-graphs of one sample side by side.

    Attributes:
        x: (N, D) node features.
        edge_index: (2, E) source and target of each edge.
        edge_attr: (E, D) edge features.
        subgraph_of: (N,) number of the sub-graph each node belongs to, from 0.
        num_subgraphs: How many sub-graphs there are, empty ones not counted.
    """

    def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Shift sub-graph numbers when samples are batched, as PyG does for node indices."""
        return self.num_subgraphs if key == "subgraph_of" else super().__inc__(key, value, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class GraphRows:
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

    def to_json(self) -> dict[str, list[int]]:
        """Columns of the tokenised data set."""
        return {column.name: getattr(self, column.name) for column in fields(self)}


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
    """
    data = []
    for sample in samples:
        edge_index = torch.tensor([sample.sources, sample.targets], dtype=torch.long).reshape(2, -1)
        data.append(
            SampleGraph(
                x=vectors(sample.node_rows) if sample.node_rows else torch.zeros(0, dimension),
                edge_index=edge_index,
                edge_attr=vectors(sample.edge_rows) if sample.edge_rows else torch.zeros(0, dimension),
                subgraph_of=torch.tensor(sample.subgraph, dtype=torch.long),
                num_subgraphs=sample.subgraph[-1] + 1 if sample.subgraph else 0,
                num_nodes=len(sample.node_rows),
            )
        )
    return Batch.from_data_list(data)
