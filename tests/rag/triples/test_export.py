import csv

import networkx as nx
import pytest

from tests.cli import run, write_lines
from tripletune.data_builders.adapt import AdaptOptions, adapt_graph

SHARED = ["Ada & Bo", "knows", "\u00d6l\\x"]
ROWS = [
    {
        "id": "p1",
        "title": "Ada",
        "text": 'Ada\'s "text",\nof two lines.',
        "triples": [["Ada & Bo", "a<b", 'C "d"'], SHARED],
    },
    {"id": "p2", "title": "", "text": "Other.", "triples": [SHARED, ["a\u0001b", "is", "B"]]},
    {"id": "p3", "title": "", "text": "Nothing.", "triples": []},
]


@pytest.fixture
def export(tmp_path):
    path = write_lines(tmp_path / "triples.jsonl", ROWS)

    def write(form, *more):
        output = tmp_path / f"graph.{form}"
        words = ("--corpus", path, "--store", path, "--format", form, "--output", output, *more)
        return output, run("rag", "export", *words)

    return write


def stated(clean=str):
    rows = [(*triple, row["id"]) for row in ROWS for triple in row["triples"]]
    return sorted(tuple(map(clean, row)) for row in rows)


def test_graphml_is_a_multigraph_with_an_edge_per_triple_and_passage(export):
    output, ran = export("graphml")
    graph = nx.read_graphml(output)
    names = nx.get_node_attributes(graph, "label")
    edges = []
    for source, target, values in graph.edges(data=True):
        edges.append((names[source], values["predicate"], names[target], values["passage"]))
    assert sorted(edges) == stated(lambda name: name.replace("\u0001", "\ufffd"))
    assert "1 characters that XML can't hold, replaced" in ran.err
    assert "1 passages without triples" in ran.err


def test_tables_hold_every_triple_with_its_passage(export, tmp_path):
    output, ran = export("csv")
    rows = [tuple(row.values())[:4] for row in csv.DictReader(output.open(newline=""))]
    assert sorted(rows) == stated()
    assert "3 texts of passages, which only --corpus has" in ran.err
    options = AdaptOptions(str(tmp_path / "back.jsonl"), builder="csv", corpus=str(tmp_path / "triples.jsonl"))
    counts = adapt_graph([str(output)], options)
    assert (counts["passages"], counts["triples"], counts["passages without triples"]) == (3, 4, 1)


def test_ntriples_come_back_by_their_labels(export, tmp_path):
    output, ran = export("ntriples")
    assert "4 passages of triples: the file does not say which" in ran.err
    assert "1 triples that several passages state" in ran.err
    source = output.rename(tmp_path / "graph.nt")
    counts = adapt_graph([str(source)], AdaptOptions(str(tmp_path / "back.jsonl"), builder="rdf"))
    assert counts["triples"] == 3
    back = (tmp_path / "back.jsonl").read_text()
    assert '["Ada & Bo", "a<b", "C \\"d\\""]' in back
    assert '["Ada & Bo", "knows", "\u00d6l\\\\x"]' in back


def test_neo4j_gets_tables_that_hold_all(export):
    output, ran = export("neo4j")
    tables = {path.name: list(csv.reader(path.open(newline=""))) for path in output.iterdir()}
    assert tables["facts.csv"][0] == [":START_ID(Entity)", "predicate", "passage", ":END_ID(Entity)", ":TYPE"]
    facts = sorted((row[0], row[1], row[3], row[2]) for row in tables["facts.csv"][1:])
    assert facts == stated()
    assert tables["passages.csv"][1][2] == ROWS[0]["text"]
    assert len(tables["entities.csv"]) == 1 + 5
    assert "not in neo4j" not in ran.err
    assert "is not empty; give another folder" in export("neo4j")[1].error
    assert "4 triples" in export("neo4j", "--overwrite")[1].err
