import torch
from hypothesis import given
from hypothesis import strategies as st

from tripletune.models.data.records import Step
from tripletune.models.data.triples import Triple
from tripletune.models.graph_llm.graphs import batch_graphs, build_graph, graph_rows, question_graph, step_graphs

FIRST = (Triple("a", "p", "b"), Triple("b", "q", "c"))
SECOND = (Triple("b", "q", "c"), Triple("x", "r", "y"))
STEPS = (Step("1", FIRST), Step("2"), Step("3", SECOND))
NAMES = st.sampled_from("abcde")
TRIPLES = st.lists(st.builds(Triple, NAMES, NAMES, NAMES), max_size=8)


def table(strings: list[str]) -> tuple[dict[str, int], torch.Tensor]:
    rows = {text: number for number, text in enumerate(dict.fromkeys(strings))}
    return rows, torch.arange(len(rows) * 2, dtype=torch.float32).reshape(-1, 2)


def test_nodes_are_distinct_and_edges_go_both_ways() -> None:
    graph = build_graph(FIRST)
    assert graph.nodes == ("a", "b", "c")
    assert graph.edges == ((0, 1, "p"), (1, 0, "inverse_p"), (1, 2, "q"), (2, 1, "inverse_q"))
    assert graph.strings == ["a", "b", "c", "p", "inverse_p", "q", "inverse_q"]


def test_a_self_loop_and_a_repeated_triple() -> None:
    graph = build_graph([Triple("a", "is", "a"), Triple("a", "is", "a")])
    assert graph.nodes == ("a",)
    assert graph.edges == ((0, 0, "is"), (0, 0, "inverse_is"))


def test_one_graph_a_step_and_their_union() -> None:
    assert [len(graph.nodes) for graph in step_graphs(STEPS)] == [3, 0, 4]
    union = question_graph(STEPS)
    assert union.nodes == ("a", "b", "c", "x", "y")
    assert [text for _, _, text in union.edges] == ["p", "inverse_p", "q", "inverse_q", "r", "inverse_r"]


@given(TRIPLES, TRIPLES)
def test_the_union_has_the_nodes_and_edges_of_its_parts(first: list[Triple], second: list[Triple]) -> None:
    def named(graphs: list) -> set[tuple[str, str, str]]:
        return {(graph.nodes[s], text, graph.nodes[t]) for graph in graphs for s, t, text in graph.edges}

    steps = [Step("1", tuple(first)), Step("2", tuple(second))]
    union = question_graph(steps)
    assert named([union]) == named(step_graphs(steps))
    assert set(union.nodes) == {name for graph in step_graphs(steps) for name in graph.nodes}
    assert len(set(union.nodes)) == len(union.nodes)
    assert len(union.edges) == 2 * len({*first, *second})


def test_rows_of_a_sample_skip_empty_sub_graphs() -> None:
    graphs = step_graphs(STEPS)
    rows, _ = table([text for graph in graphs for text in graph.strings])
    sample = graph_rows(graphs, rows)
    assert sample.subgraph == [0, 0, 0, 1, 1, 1, 1]
    assert sample.node_rows == [rows[name] for name in "abcbcxy"]
    assert sample.sources == [0, 1, 1, 2, 3, 4, 5, 6]
    assert sample.targets == [1, 0, 2, 1, 4, 3, 6, 5]
    assert sample.edge_rows == [
        rows[text] for text in ("p", "inverse_p", "q", "inverse_q", "q", "inverse_q", "r", "inverse_r")
    ]


def test_a_batch_of_three_with_an_empty_one() -> None:
    graphs = step_graphs(STEPS)
    rows, vectors = table([text for graph in graphs for text in graph.strings])
    samples = [graph_rows(graphs, rows), graph_rows([], rows), graph_rows(graphs[2:], rows)]
    batch = batch_graphs(samples, vectors.__getitem__, 2)
    assert batch.num_graphs == 3
    assert batch.x.tolist() == vectors[samples[0].node_rows + samples[2].node_rows].tolist()
    assert batch.edge_attr.tolist() == vectors[samples[0].edge_rows + samples[2].edge_rows].tolist()
    assert batch.edge_index[:, 8:].tolist() == [[7, 8, 9, 10], [8, 7, 10, 9]]
    assert batch.subgraph_of.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert batch.batch.tolist() == [0] * 7 + [2] * 4


def test_a_batch_of_empty_graphs_has_the_right_shapes() -> None:
    batch = batch_graphs([graph_rows([], {}), graph_rows([], {})], torch.zeros(0, 5).__getitem__, 5)
    assert (batch.num_graphs, batch.x.shape, batch.edge_attr.shape) == (2, (0, 5), (0, 5))
    assert batch.edge_index.shape == (2, 0)
