import json

import pytest

from tests.cli import read_lines, run, write_lines
from tests.data_builders.rows import shared
from tripletune.core.data.passages import Passage, read_corpus
from tripletune.data_builders.adapt import AdaptOptions, adapt_rows
from tripletune.data_builders.readers import get_reader
from tripletune.rag.triple_store import open_triples


def adapt(tmp_path, content, **options):
    source, output = tmp_path / options.pop("name", "in.json"), tmp_path / "out.jsonl"
    source.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
    counts = adapt_rows(AdaptOptions(str(output), (str(source),), **options))
    return read_lines(output), counts


def test_openie_files_become_a_triple_store_and_the_graph_is_counted(tmp_path):
    docs = [
        {"idx": "c1", "passage": "Ada\nShe died in Kelm.", "extracted_entities": ["Ada"],
         "extracted_triples": [["Ada", "died in", "Kelm"], ["ADA", "died in", "Kelm!"], ["odd"]]},
        {"idx": "c2", "passage": "Kelm\nA town.", "extracted_triples": []},
    ]  # fmt: skip
    _, counts = adapt(tmp_path, {"docs": docs, "avg_ent_chars": 3})
    assert counts == {
        "passages": 2, "triples": 3, "nodes": 2, "relations": 1, "distinct triples": 1,
        "rows with idx, which is not read": 2, "rows with extracted_entities, which is not read": 1,
    }  # fmt: skip
    found = open_triples(tmp_path / "out.jsonl", tmp_path / "store.sqlite")
    assert len(found.get(Passage("Ada", "She died in Kelm."))) == 2
    assert found.get(Passage("Kelm", "A town.")) == ()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([{"title": "A", "text": "a", "idx": 1}], [("A", "a")]),
        ('{"id": "7", "contents": "\\"A b\\"\\na c"}\n{"id": "8", "contents": "x"}\n', [("A b", "a c"), ("", "x")]),
        ({"corpus_name": "Medical", "context": "One. Two."}, [("Medical", "One. Two.")]),
        ([{"title": "N", "body": "One is here. Two is not."}], [("N", "One is here."), ("N", "Two is not.")]),
        ([{"input": q, "context": "Book.", "meta": {"title": "B"}, "_id": q} for q in "xy"], [("B", "Book.")]),
    ],
)  # fmt: skip
def test_corpora_of_other_projects_become_passages(tmp_path, content, expected):
    adapt(tmp_path, content, piece_limit=20)
    assert [(passage.title, passage.text) for passage in read_corpus(tmp_path / "out.jsonl")] == expected


def test_two_wiki_questions_get_the_aliases_of_their_answer(tmp_path):
    write_lines(tmp_path / "aliases.json", [{"Q_id": "Q30", "aliases": ["USA"], "demonyms": ["American"]}])
    rows = [json.loads(line) for line in shared("2wikimultihopqa_dev.jsonl").read_text().splitlines()[:2]]
    rows[0]["answer_id"] = "Q30"
    write_lines(tmp_path / "dev.jsonl", rows)
    words = ["--input", tmp_path / "dev.jsonl", "--output", tmp_path / "out.jsonl"]
    ran = run("data", "adapt", *words, "--aliases", tmp_path / "aliases.json")
    assert "questions with aliases 1" in ran.out
    first, second = get_reader("two_wiki")(str(tmp_path / "out.jsonl"))
    assert first.answers == (rows[0]["answer"], "USA", "American")
    assert len(second.answers) == 1


@pytest.mark.parametrize(
    ("good", "blank"),
    [
        ({"_id": 0, "title": 1984, "text": "a"}, {"text": None}),
        ({"id": None, "contents": "A\na"}, {"contents": " "}),
        ({"passage": "A\na", "extracted_triples": None}, {"passage": "", "extracted_triples": []}),
        ({"title": "A", "body": "a"}, {"body": ""}),
        ({"corpus_name": "A", "context": "a"}, {"corpus_name": "A", "context": None}),
    ],
)
def test_rows_without_text_are_left_out_and_other_values_refused(tmp_path, good, blank):
    rows, counts = adapt(tmp_path, [good, blank, blank])
    assert (counts["passages"], counts["rows without text, left out"]) == (1, 2)
    (passage,) = read_corpus(tmp_path / "out.jsonl")
    assert (passage.text, passage.title) == ("a", str(good.get("title", "A")))
    assert (rows[0].get("id"), rows[0].get("triples", [])) == ("0" if "_id" in good else None, [])
    key = next(name for name in blank if name not in ("corpus_name", "extracted_triples"))
    for change in ({key: 7}, {key: [1]}, {key: {"a": 1}}, {key: float("nan")}, {"title": ["x"]}):
        with pytest.raises(ValueError, match=r"in\.json(:\d+)?: .*(must be|not valid JSON)"):
            adapt(tmp_path, [good, {**blank, key: "a"} | change])
    with pytest.raises(ValueError, match="the file holds no row with a text"):
        adapt(tmp_path, [blank])
    with pytest.raises(ValueError, match="the triples must be a list, found 7"):
        adapt(tmp_path, [{"text": "a", "triples": 7}])


def test_silver_triples_are_counted_and_other_rows_refused(tmp_path):
    _, counts = adapt(tmp_path, shared("openie_musique_silver.jsonl").read_text(), name="in.jsonl")
    assert counts["passages"] == 1888
    assert counts["distinct triples"] <= counts["triples"]
    with pytest.raises(ValueError, match="the layout of the row is unknown; it has foo"):
        adapt(tmp_path, [{"foo": 1}])
    with pytest.raises(ValueError, match="in the input"):
        adapt(tmp_path, [], name="out.jsonl")


@pytest.mark.parametrize(
    ("row", "identity"),
    [
        ({"id": "test_0", "question": "Q?", "golden_answers": ["A"], "metadata": {}}, "test_0"),
        ({"id": "1", "source": "Novel-2", "question": "Q?", "answer": "A", "question_type": "Fact"}, "Novel-2:1"),
        ({"_id": "u1", "input": "Q?", "answers": ["A"], "context": "long", "label": "cs"}, "u1"),
    ],
)  # fmt: skip
def test_questions_of_other_projects(tmp_path, row, identity):
    (question,) = get_reader("qa")(write_lines(tmp_path / "rows.jsonl", [row]))
    assert (question.id, question.question, question.answers) == (identity, "Q?", ("A",))
    assert question.type == row.get("question_type", "")


def test_long_texts_stay_whole_and_a_folder_of_documents_is_sent_elsewhere(tmp_path):
    long = "One is here. " * 9
    (row, _), counts = adapt(tmp_path, [{"title": "A", "text": long}, {"text": "Short."}], piece_limit=20)
    assert row["text"] == long.strip()
    assert counts["longer than --piece-limit, left whole"] == 1
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("A.")
    ran = run("data", "adapt", "--input", tmp_path / "docs", "--output", tmp_path / "other.jsonl")
    assert "docs: not a data set of files (" in ran.error
    assert ran.error.endswith("or cut documents into passages with `tripletune build passages`")


def test_rows_of_another_text_column_are_sent_to_build_passages_which_reads_them(tmp_path):
    write_lines(tmp_path / "dump.jsonl", [{"page_content": "Ada lived in Kelm.", "metadata": {}}])
    build = "`tripletune build passages --documents "
    with pytest.raises(ValueError, match=f"page_content, metadata \\({build}{tmp_path / 'dump.jsonl'} --output DIR`"):
        list(read_corpus(tmp_path / "dump.jsonl"))
    ran = run("data", "adapt", tmp_path / "dump.jsonl", "--output", tmp_path / "adapted.jsonl")
    assert "it has page_content, metadata: write the corpus as lines" in ran.error
    assert f"{build}FILE --output DIR`" in ran.error
    run("build passages", "--documents", tmp_path / "dump.jsonl", "--output", tmp_path / "mine")
    assert [passage.text for passage in read_corpus(tmp_path / "mine")] == ["Ada lived in Kelm."]


def test_files_are_named_with_input_or_without(tmp_path):
    (tmp_path / "a.csv").write_text("id,title,text\n1,Ada,She lived in Kelm.\n")
    (tmp_path / "b.tsv").write_text("id\ttitle\ttext\n2\tBo\tHe lived in Morn.\n")
    output = tmp_path / "out.jsonl"
    for words in (["--input", tmp_path / "a.csv", tmp_path / "b.tsv"], [tmp_path / "a.csv", tmp_path / "b.tsv"]):
        output.unlink(missing_ok=True)
        run("data", "adapt", *words, "--output", output)
        assert [(passage.id, passage.title) for passage in read_corpus(output)] == [("1", "Ada"), ("2", "Bo")]
    ran = run("data", "adapt", "--output", output)
    assert "input: name the file to convert" in ran.error


LABELLED = {
    "triple": ["Ada", "lived in", "Kelm"], "sentence": "Ada lived in Kelm.",
    "subject": {"subtopic": "writer", "main_topic": "Literature"},
    "object": {"subtopic": "town", "main_topic": "Geography"},
}  # fmt: skip


def test_chunks_and_labelled_triples_of_th_rag(tmp_path):
    rows, counts = adapt(tmp_path, {"c-0": {"content": "Ada lived in Kelm.", "tokens": 5}, "c-1": {"content": "Bo."}})
    assert rows == [{"title": "", "id": "c-0", "text": "Ada lived in Kelm."}, {"title": "", "id": "c-1", "text": "Bo."}]
    assert counts == {"passages": 2, "rows with tokens, which is not read": 1}
    graph = [{"chunk_id": "c-0", "content": "Ada lived in Kelm.", "triples": [LABELLED]}]
    rows, counts = adapt(tmp_path, graph)
    assert rows == [
        {"title": "", "id": "c-0", "text": "Ada lived in Kelm.", "statements": [LABELLED],
         "triples": [["Ada", "lived in", "Kelm"]]}
    ]  # fmt: skip
    assert (counts["passages"], counts["triples"]) == (1, 1)


def test_texts_with_an_extractors_reply(tmp_path):
    row = {"text": "Ada lived in Kelm.", "generated_triple": "(S> Ada| P> lived in| O> Kelm), (S> broken"}
    rows, counts = adapt(tmp_path, [row])
    assert rows == [{"title": "", "text": "Ada lived in Kelm.", "triples": [["Ada", "lived in", "Kelm"]]}]
    assert counts["triples"] == 1


def test_a_chunk_whose_extraction_failed_has_no_statements(tmp_path):
    failed = {"chunk_id": "c-1", "content": "Bo keeps bees.", "triples": [], "error": "cut off"}
    rows, counts = adapt(tmp_path, [{"chunk_id": "c-0", "content": "Ada.", "triples": [LABELLED]}, failed])
    assert [len(row["statements"]) for row in rows] == [1, 0]
    assert counts["chunks whose extraction failed, without triples"] == 1


def test_passages_are_joined_into_windows(tmp_path):
    passages = [{"title": name, "id": f"p{name}", "text": f"{name} is a town. It has {name} people."} for name in "ABC"]
    rows, counts = adapt(tmp_path, passages, window=12, window_overlap=0)
    assert rows == [
        {"title": "", "id": "window-00000", "text": "A\nA is a town. It has A people.\nB\nB is a town.",
         "passages": ["pA", "pB"]},
        {"title": "", "id": "window-00001", "text": "It has B people.\nC\nC is a town. It has C people.",
         "passages": ["pB", "pC"]},
    ]  # fmt: skip
    assert counts == {"passages": 3, "windows": 2}
    assert next(iter(read_corpus(tmp_path / "out.jsonl"))).id == "window-00000"
    overlapping, _ = adapt(tmp_path, passages, window=12, window_overlap=3)
    assert overlapping[1]["text"].startswith("B is a town. It has B people.")
    texts = "\n\n".join(f"{passage['title']}\n{passage['text']}" for passage in passages)
    rows, _ = adapt(tmp_path, texts, name="contexts.txt", window=12, window_overlap=0)
    assert len(rows) == 2, "a text file, as TH-RAG's"
    book = {"corpus_name": "Book", "context": " ".join(f"Sentence {number} is here." for number in range(50))}
    rows, _ = adapt(tmp_path, book, window=100, piece_limit=50)
    assert rows[0]["text"].startswith("Book\nSentence 0 is here. Sentence 1"), "a book is cut once"


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (
            {"docs": [{"passage": "A\nb", "extracted_triples": [["a", "b", "c"]]}]},
            {"window": 9},
            "which a window would",
        ),
        ([{"title": "A", "text": "a"}], {"window": 9, "window_overlap": 9}, "must be fewer than those of a window"),
        ([{"title": "A", "text": "a"}], {"window_overlap": 9}, "window"),
    ],
)
def test_windows_that_would_lose_something_are_refused(tmp_path, row, options, message):
    with pytest.raises(ValueError, match=message):
        adapt(tmp_path, row, **options)
