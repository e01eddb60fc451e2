import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tripletune.core.data.graph_settings import GraphSettings
from tripletune.core.data.records import Step
from tripletune.core.data.triples import Triple
from tripletune.models.graph_llm.graphs import GraphEncoder, SampleGraph, batch_graphs, build_graph

FIRST = (Triple("a", "p", "b"), Triple("b", "q", "c"))
SECOND = (Triple("b", "q", "c"), Triple("x", "r", "y"))
STEPS = [Step("", FIRST), Step(""), Step("", SECOND)]
NAMES = st.sampled_from("abcde")
TRIPLES = st.lists(st.builds(Triple, NAMES, NAMES, NAMES), max_size=8)
ARCHITECTURES = ("graph_transformer", "gat", "gcn", "gat_authors", "gcn_authors")
TABLE = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))


def test_a_self_loop_and_a_repeated_triple():
    graph = build_graph([Step("", (Triple("a", "is", "a"), Triple("a", "is", "a")))])
    assert graph == (["a"], ["is", "inverse_is"], [0, 0], [0, 0], [0])


@given(TRIPLES, TRIPLES)
def test_the_union_has_the_nodes_and_edges_of_its_parts(first, second):
    def named(graph):
        ends = zip(graph.sources, graph.edges, graph.targets)
        return {(graph.nodes[source], text, graph.nodes[target]) for source, text, target in ends}

    steps = [Step("", tuple(first)), Step("", tuple(second))]
    union, parts = build_graph(steps, "union"), build_graph(steps)
    assert named(union) == named(parts)
    assert sorted(union.nodes) == sorted(set(parts.nodes))
    assert len(union.edges) == 2 * len({*first, *second})


def test_sub_graphs_lie_side_by_side_and_empty_ones_leave_no_trace():
    sample = build_graph(STEPS)
    assert sample.subgraph == [0, 0, 0, 1, 1, 1, 1]
    assert sample.nodes == [*"abcbcxy"]
    assert sample.sources == [0, 1, 1, 2, 3, 4, 5, 6]
    assert sample.targets == [1, 0, 2, 1, 4, 3, 6, 5]
    assert sample.edges == ["p", "inverse_p", "q", "inverse_q", "q", "inverse_q", "r", "inverse_r"]


def test_a_batch_of_three_with_an_empty_one():
    samples = [build_graph(steps) for steps in (STEPS, (), STEPS[2:])]
    batch = batch_graphs(samples, lambda texts: torch.tensor([[ord(text[-1]), len(text)] for text in texts]))
    assert batch.num_graphs == 3
    assert batch.x[:, 0].tolist() == [*map(ord, "abcbcxybcxy")]
    assert batch.edge_attr.tolist() == [[ord(name), size] for name in "pqqrqr" for size in (1, 9)]
    assert batch.edge_index[:, 8:].tolist() == [[7, 8, 9, 10], [8, 7, 10, 9]]
    assert batch.subgraph_of.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert batch.batch.tolist() == [0] * 7 + [2] * 4


def sample(seed, sizes):
    """Sub-graphs of the given sizes, each a ring with edges both ways."""
    generator = torch.Generator().manual_seed(seed)
    rows = SampleGraph([], [], [], [], [])
    for number, size in enumerate(sizes):
        offset = len(rows.nodes)
        rows.nodes.extend(torch.randint(0, 40, (size,), generator=generator).tolist())
        rows.subgraph.extend([number] * size)
        for node in range(size):
            ends = (offset + node, offset + (node + 1) % size)
            for source, target in (ends, ends[::-1]):
                rows.sources.append(source)
                rows.targets.append(target)
                rows.edges.append(int(torch.randint(0, 40, (), generator=generator)))
    return rows


def batch(*samples):
    return batch_graphs(samples, TABLE.__getitem__)


def encoder(architecture="graph_transformer", **options):
    torch.manual_seed(1)
    settings = {"graph_hidden_width": 8, "graph_heads": 2, **options}
    return GraphEncoder(GraphSettings(graph_architecture=architecture, **settings), 6).eval()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_batch_gives_what_each_graph_gives_alone(architecture):
    samples = [sample(1, (3, 2)), sample(2, ()), sample(3, (4,)), sample(4, (1, 1, 5))]
    model = encoder(architecture)
    together = model(batch(*samples))
    assert together.shape == (4, 8)
    for row, one in enumerate(samples):
        assert torch.allclose(together[row], model(batch(one))[0], atol=1e-6)
    assert not torch.allclose(together[0], together[2], atol=1e-3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_order_of_nodes_and_edges_does_not_matter(architecture):
    one = sample(5, (3, 4))
    order = [4, 0, 6, 2, 5, 1, 3]
    place = {old: new for new, old in enumerate(order)}
    edges = list(reversed(range(len(one.sources))))
    other = SampleGraph(
        [one.nodes[node] for node in order],
        [one.edges[edge] for edge in edges],
        [place[one.sources[edge]] for edge in edges],
        [place[one.targets[edge]] for edge in edges],
        [one.subgraph[node] for node in order],
    )
    model = encoder(architecture)
    assert torch.allclose(model(batch(one)), model(batch(other)), atol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_edge_texts_and_edge_direction_count(architecture):
    one = sample(6, (3,))
    relabelled = SampleGraph(one.nodes, [(row + 1) % 40 for row in one.edges], one.sources, one.targets, one.subgraph)
    model = encoder(architecture)
    alike = torch.allclose(model(batch(one)), model(batch(relabelled)), atol=1e-4)
    assert alike == architecture.endswith("_authors"), "the authors' own read no edge texts"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_pooling_is_the_mean_of_sub_graphs_not_of_nodes(architecture):
    samples = [build_graph(steps) for steps in (STEPS, STEPS[:1], STEPS[2:])]
    embedded = batch_graphs(samples, lambda texts: TABLE[[ord(text[-1]) % 40 for text in texts]])
    both, first, second = encoder(architecture)(embedded)
    assert torch.allclose(both, (first + second) / 2, atol=1e-6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_sample_without_graph_is_the_zero_vector_and_every_parameter_has_a_gradient(architecture):
    model = encoder(architecture).train()
    before = torch.get_rng_state()
    empty = model(batch(sample(1, ()), sample(2, ())))
    assert torch.equal(empty, torch.zeros(2, 8))
    assert torch.equal(torch.get_rng_state(), before), "a batch without graphs draws nothing"
    mixed = model(batch(sample(1, ()), sample(2, (3,)), sample(3, ())))
    assert torch.equal(mixed[[0, 2]], torch.zeros(2, 8))
    assert mixed[1].abs().sum() > 0
    for found in (empty, mixed, model(batch(sample(0, (2, 2)), sample(1, (1,))))):
        model.zero_grad()
        (found**2).sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("architecture", ["graph_transformer", "gat", "gat_authors"])
@pytest.mark.parametrize("share", ["graph_dropout", "graph_attention_dropout"])
def test_dropout_is_for_training_alone(architecture, share):
    model, one = encoder(architecture, **{"graph_dropout": 0.0, share: 0.5}), batch(sample(9, (6,)))
    assert torch.equal(model(one), encoder(architecture, graph_dropout=0.0)(one))
    model.train()
    assert not torch.equal(model(one), model(one))
