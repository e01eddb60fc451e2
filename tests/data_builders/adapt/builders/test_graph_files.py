"""Files of graph builders, in the layouts that the packages named in `data_builders/adapt/builders` write."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.cli import read_lines, run, write_lines
from tripletune.core.data.passages import Passage
from tripletune.data_builders.adapt import AdaptOptions, adapt_graph
from tripletune.rag.triple_store import open_triples

TEXT = "Piet Zand is the mayor of Velsund. McDonald's Mill stands there."


def adapt(tmp_path, builder, *files, **options):
    output = tmp_path / "made" / "out.jsonl"
    counts = adapt_graph([str(file) for file in files], AdaptOptions(str(output), builder=builder, **options))
    kept = json.loads((tmp_path / "made" / "out.jsonl.counts.json").read_text())
    assert kept["from"] == builder
    assert kept["counts"] == counts
    return read_lines(output), counts


def lightrag(tmp_path, replies, edges=()):
    folder = tmp_path / "rag_storage"
    folder.mkdir(exist_ok=True)
    chunk = {"content": TEXT, "file_path": "velsund.txt", "full_doc_id": "d", "tokens": 9}
    (folder / "kv_store_text_chunks.json").write_text(json.dumps({"c-0": chunk, "c-1": {"content": "Nothing."}}))
    cache = {}
    for number, reply in enumerate(replies):
        cache[f"default:extract:{number}"] = {"return": reply, "cache_type": "extract", "chunk_id": "c-0"}
    cache["default:query:x"] = {"return": "relation<|#|>a<|#|>b<|#|>c<|#|>d", "cache_type": "query", "chunk_id": "c-0"}
    if replies:
        (folder / "kv_store_llm_response_cache.json").write_text(json.dumps(cache))
    if edges:
        names = ("keywords", "description", "source_id")
        keys = "".join(f'<key id="{name}" for="edge" attr.name="{name}" attr.type="string"/>' for name in names)
        rows = ""
        for source, target, *values in edges:
            data = "".join(f'<data key="{name}">{value}</data>' for name, value in zip(names, values, strict=True))
            rows += f'<edge source="{source}" target="{target}">{data}</edge>'
        graph = f'{keys}<graph edgedefault="undirected">{rows}</graph>'
        text = f'<graphml xmlns="http://graphml.graphdrawing.org/xmlns">{graph}</graphml>'
        (folder / "graph_chunk_entity_relation.graphml").write_text(text)
    return folder


REPLY = """entity<|#|>Piet Zand<|#|>person<|#|>The mayor.
relation<|#|>Piet Zand<|#|>Velsund<|#|>mayor of<|#|>Piet Zand governs Velsund.
relation<|#|>"McDonald's Mill"<|#>Velsund<|#|><|#|>The mill stands in Velsund.
relation<|#|>Velsund<|#|>cut off
<|COMPLETE|>"""
# The graph is undirected: LightRAG writes this relation from Velsund to Piet Zand.
EDGES = [
    ("Velsund", "Piet Zand", "mayor of", "Piet Zand governs Velsund.", "c-0"),
    ("Velsund", "Ida River", "waters", "By hand.", "c-0&lt;SEP&gt;c-9"),
]


def test_lightrag_relations_are_as_the_reply_had_them(tmp_path):
    rows, counts = adapt(tmp_path, "lightrag", lightrag(tmp_path, [REPLY], EDGES))
    assert rows[0]["document"] == "velsund.txt"
    assert rows[0]["triples"] == [
        ["Piet Zand", "mayor of", "Velsund"],
        ["McDonald's Mill", "The mill stands in Velsund.", "Velsund"],
        ["Velsund", "waters", "Ida River"],
    ]
    assert rows[1] == {"title": "", "id": "c-1", "text": "Nothing.", "triples": []}
    assert counts["relations of replies without five fields, left out"] == 1
    assert counts["triples without a predicate: the description stands in its place"] == 1
    assert counts["relations of the graph that no cached reply states"] == 2
    assert counts["triples whose direction the graph lost"] == 2
    assert counts["triples without a passage, left out"] == 1, "the chunk c-9 is gone"
    assert counts["relations of replies that the graph no longer has, kept"] == 1
    found = open_triples(tmp_path / "made" / "out.jsonl", tmp_path / "store.sqlite")
    assert len(found.get(Passage("", TEXT))) == 3


def test_lightrag_replies_in_json_and_a_folder_without_replies(tmp_path):
    relation = {"source": "Piet Zand", "target": "Velsund", "keywords": "mayor of", "description": "He governs it."}
    reply = json.dumps({"entities": [{"name": "Velsund"}], "relationships": [relation, {"source": "x"}]})
    rows, counts = adapt(tmp_path, "lightrag", lightrag(tmp_path, [reply]) / "kv_store_text_chunks.json")
    assert rows[0]["triples"] == [["Piet Zand", "mayor of", "Velsund"]]
    assert counts["relations of replies without five fields, left out"] == 1
    (tmp_path / "rag_storage" / "kv_store_llm_response_cache.json").unlink()
    rows, counts = adapt(tmp_path, "lightrag", lightrag(tmp_path, [], EDGES[:1]))
    assert rows[0]["triples"] == [["Velsund", "mayor of", "Piet Zand"]]
    assert counts["triples whose direction the graph lost"] == 1


def test_graphrag_has_descriptions_and_names_in_capitals(tmp_path):
    folder = tmp_path / "project" / "output"
    folder.mkdir(parents=True)
    relations = [
        {"source": "PIET ZAND", "target": "VELSUND", "description": "He governs it.", "text_unit_ids": ["u1", "u2"]},
        {"source": "MCDONALD'S MILL", "target": "VELSUND", "description": "", "text_unit_ids": ["u1"]},
    ]
    units = [{"id": "u1", "text": TEXT, "document_id": "d1"}, {"id": "u2", "text": "Velsund.", "document_id": "d1"}]
    documents = [{"id": "d1", "title": "velsund.txt"}]
    tables = {"text_units": units, "documents": documents, "relationships": relations}
    for name, rows in tables.items():
        parquet.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    rows, counts = adapt(tmp_path, "graphrag", folder.parent)
    assert rows[0]["triples"] == [
        ["Piet Zand", "He governs it.", "Velsund"],
        ["McDonald's Mill", "related to", "Velsund"],
    ]
    assert rows[1]["triples"] == [["PIET ZAND", "He governs it.", "Velsund"]], "u2 does not name him"
    assert rows[0]["document"] == "velsund.txt"
    assert counts["names that are not in their passage"] == 1
    assert counts["relations that several text units state with one description"] == 1
    assert counts["triples without a predicate: 'related to' stands in its place"] == 1


def test_llamaindex_names_get_the_spelling_of_their_chunk(tmp_path):
    def relation(source, label, target, **properties):
        return {"label": label, "source_id": source, "target_id": target, "properties": properties}

    chunk = {"label": "text_chunk", "text": TEXT, "id_": "c", "properties": {"title": "Velsund", "file_name": "v.md"}}
    store = {
        "nodes": {
            "c": chunk,
            "Piet zand": {"label": "entity", "name": "Piet zand"},
            "d": {"text": "More.", "id_": "d"},
        },
        "relations": {
            "1": relation("Piet zand", "Mayor of", "Velsund", triplet_source_id="c"),
            "2": relation("Mcdonald's mill", "STANDS_IN", "Velsund", triplet_source_id="c"),
            "3": relation("c", "NEXT", "d"),
            "4": relation("Piet zand", "Likes", "Velsund"),
        },
        "triplets": [],
    }
    store_file = tmp_path / "property_graph_store.json"
    store_file.write_text(json.dumps(store))
    rows, counts = adapt(tmp_path, "llamaindex", store_file)
    assert rows[0] == {
        "title": "Velsund", "id": "c", "text": TEXT, "document": "v.md",
        "triples": [["Piet Zand", "mayor of", "Velsund"], ["McDonald's Mill", "stands in", "Velsund"]],
    }  # fmt: skip
    assert counts["relations between chunks, left out"] == 1
    assert counts["triples without a passage, left out"] == 1
    assert counts["names that the graph spells otherwise, now spelled as in their passage"] == 2


def document(*relationships, **source):
    rows = []
    for head, label, tail in relationships:
        rows.append({"source": {"id": head, "type": "T"}, "target": {"id": tail, "type": "T"}, "type": label})
    return {"nodes": [], "relationships": rows, "source": {"id": None, "page_content": TEXT, "metadata": {}} | source}


def test_langchain_documents(tmp_path):
    rows = [document(("Mcdonald'S Mill", "STANDS_IN", "Velsund")), document(page_content="Empty.", id="e")]
    rows, counts = adapt(tmp_path, "langchain", write_lines(tmp_path / "graph.jsonl", rows))
    assert rows[0]["triples"] == [["McDonald's Mill", "stands in", "Velsund"]]
    assert (rows[1]["id"], rows[1]["triples"]) == ("e", [])
    assert counts["passages without triples"] == 1
    dumped = [{"lc": 1, "type": "not_implemented", "id": ["langchain"], "repr": "GraphDocument(nodes=[])"}]
    with pytest.raises(ValueError, match=r"write each document by `document.model_dump_json\(\)`"):
        adapt(tmp_path, "langchain", write_lines(tmp_path / "dumped.jsonl", dumped))


def test_hipporag_keeps_ids_and_counts_what_no_triple_names(tmp_path):
    doc = {"idx": "chunk-1", "passage": f"Velsund\n{TEXT}", "extracted_entities": ["Piet Zand", "Ida"],
           "extracted_triples": [["Piet Zand", "mayor of", "Velsund"], ["odd"]]}  # fmt: skip
    (tmp_path / "openie.json").write_text(json.dumps({"docs": [doc], "avg_ent_chars": 3}))
    rows, counts = adapt(tmp_path, "hipporag", tmp_path / "openie.json")
    assert (rows[0]["id"], rows[0]["title"], rows[0]["text"]) == ("chunk-1", "Velsund", TEXT)
    assert counts["entities that no triple names, left out"] == 1
    assert counts["triples with an empty part, left out"] == 1


NT = r"""
<http://x.org/Q1> <http://www.w3.org/2000/01/rdf-schema#label> "Velsund"@de .
<http://x.org/Q1> <http://www.w3.org/2000/01/rdf-schema#label> "Velsund town"@en .
<http://x.org/Q1> <http://www.w3.org/2000/01/rdf-schema#comment> "A town.\nIt is \u00f6ld." .
<http://x.org/Piet_Zand> <http://x.org/mayorOf> <http://x.org/Q1> .
<http://x.org/Q1> <http://x.org/code> "007"^^<http://www.w3.org/2001/XMLSchema#integer> .
<http://x.org/Q1> <http://x.org/at> _:b0 .
not a line
# a comment
"""


def test_rdf_has_labels_instead_of_addresses(tmp_path):
    (tmp_path / "graph.nt").write_text(NT)
    rows, counts = adapt(tmp_path, "rdf", tmp_path / "graph.nt")
    assert rows == [
        {"title": "Piet Zand", "text": "Piet Zand mayor of Velsund town.",
         "triples": [["Piet Zand", "mayor of", "Velsund town"]]},
        {"title": "Velsund town", "text": "A town. It is öld. Velsund town code 007.",
         "triples": [["Velsund town", "code", "007"]]},
    ]  # fmt: skip
    for name in ("URIs without a label, named by their last part", "triples with a blank node, left out",
                 "datatypes and languages of literals, left out", "lines that are not N-Triples, left out",
                 "further labels and texts of a URI (other languages), left out"):  # fmt: skip
        assert counts[name] == 1, name


def test_triples_without_passages_go_to_those_that_name_both_ends(tmp_path):
    table = "head,relation,tail,passage_id,note\nPiet  Zand,mayor of,VELSUND,,x\nIda,likes,Velsund,,\nZed,is,B,p2,\n"
    (tmp_path / "triples.csv").write_text(table)
    passages = [{"id": "p1", "title": "", "text": TEXT, "page": 3}, {"id": "p2", "title": "B", "text": "Idas."}]
    corpus = write_lines(tmp_path / "corpus.jsonl", passages)
    rows, counts = adapt(tmp_path, "csv", tmp_path / "triples.csv", corpus=corpus)
    assert [row["triples"] for row in rows] == [[["Piet Zand", "mayor of", "VELSUND"]], [["Zed", "is", "B"]]]
    assert rows[0]["page"] == 3
    assert counts["triples without a passage, left out"] == 1
    assert counts["cells of other columns, left out"] == 3
    assert counts["names that are not in their passage"] == 1, "the passage p2 has no Zed"
    (tmp_path / "texts.csv").write_text(
        "subject,object,text\nPiet Zand,Velsund,Piet rules.\nPiet,Velsund,Piet rules.\n"
    )
    rows, counts = adapt(tmp_path, "csv", tmp_path / "texts.csv")
    assert [len(row["triples"]) for row in rows] == [2]
    assert counts["triples without a predicate: 'related to' stands in its place"] == 2


def test_what_is_no_graph_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("one,two\n1,2\n")
    (tmp_path / "b.nt").write_text("# nothing\n")
    (tmp_path / "c.ttl").write_text("x")
    cases = [
        (("lightrag", tmp_path / "empty"), "has no kv_store_text_chunks.json (it holds nothing): give the folder"),
        (("graphrag", tmp_path / "none"), "has no text_units.parquet (it does not exist)"),
        (("csv", tmp_path / "a.csv"), "the table needs one column of each: subject, head"),
        (("rdf", tmp_path / "b.nt"), "no passage has a triple (the files are empty)"),
        (("hipporag", tmp_path / "empty"), "is a folder; give its openie_results"),
    ]  # fmt: skip
    for (builder, file), message in cases:
        ran = run("data", "adapt", "--from", builder, file, "--output", tmp_path / "o.jsonl")
        assert message in ran.error, ran.error
        assert not (tmp_path / "o.jsonl").exists()
    ran = run("data", "adapt", tmp_path / "empty", "--output", tmp_path / "o.jsonl")
    assert f"{tmp_path / 'empty'} is a folder: name its graph builder with --from" in ran.error
    ran = run("data", "adapt", tmp_path / "a.csv", "--output", tmp_path / "o.jsonl")
    assert "files of a graph builder need --from" in ran.error
    ran = run("data", "adapt", "--from", "lightrag", "x", "--corpus", "y", "--output", tmp_path / "o.jsonl")
    assert "corpus: the files of lightrag have passages of their own" in ran.error
