"""Scores of triples as a graph, as PiVe (Han et al., 2024) and GraphJudge (Huang et al., 2025) compute them.

Both run one script, `graph_evaluation/metrics/graph_matching.py` of github.com/Jiuzhouh/PiVe. Fields are compared in
lower case and without white space around them. Two nodes have one edge at most; the last triple gives its label.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tripletune.models.data.triples import Triple

# Added to the gold graph's nodes and edges, so that a distance lies between 0 and 1; PiVe's constant.
_WORST = 30
# networkx's search takes exponential time. After so long the best distance so far stands, which is an upper bound.
EDIT_SECONDS = 10.0


def triple_matches(gold: Sequence[Triple], predicted: Sequence[Triple]) -> tuple[int, int, int]:
    """Equal triples, predicted ones and gold ones, each once: T-F1 is their micro-averaged F1."""
    first, second = ({_plain(triple) for triple in triples} for triples in (predicted, gold))
    return len(first & second), len(first), len(second)


def same_graph(gold: Sequence[Triple], predicted: Sequence[Triple]) -> bool:
    """Whether the graphs are isomorphic with equal labels of edges; the share of such texts is G-F1.

    Names of nodes are not compared, as in the script.
    """
    from networkx import is_isomorphic

    return bool(is_isomorphic(_graph(gold), _graph(predicted), edge_match=lambda one, other: one == other))


def edit_distance(gold: Sequence[Triple], predicted: Sequence[Triple], seconds: float = EDIT_SECONDS) -> float:
    """Graph edit distance (GED), divided by the gold graph's nodes and edges plus 30; 0 for equal graphs.

    A node or an edge put in, taken out or given another label costs 1.
    """
    from networkx import graph_edit_distance

    first, second = _graph(gold), _graph(predicted)

    def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
        return bool(one["label"] == other["label"])

    distance = graph_edit_distance(first, second, node_match=same, edge_match=same, timeout=seconds)
    if distance is None:  # there was no time for one path: all of one graph taken out, all of the other put in
        distance = sum(len(graph) + graph.number_of_edges() for graph in (first, second))
    return min(1.0, distance / (len(first) + first.number_of_edges() + _WORST))


def _graph(triples: Sequence[Triple]) -> Any:
    from networkx import DiGraph  # comes with torch; imported here, since it takes a while

    graph = DiGraph()
    for subject, predicate, last in map(_plain, triples):
        graph.add_node(subject, label=subject)
        graph.add_node(last, label=last)
        graph.add_edge(subject, last, label=predicate)
    return graph


def _plain(triple: Triple) -> tuple[str, str, str]:
    subject, predicate, last = (field.lower().strip() for field in triple.as_list())
    return subject, predicate, last
