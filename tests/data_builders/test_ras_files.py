"""Files of RAS's public code, in the layout that its scripts write; the rows are made up."""

import json
import pickle

import pytest

from tests.cli import read_lines, run
from tripletune.core.data.passages import Passage
from tripletune.data_builders.readers import get_reader
from tripletune.data_builders.readers.ras_labels import NO_QUESTION

FIRST = "Glass Harbour is a novel by Ida Morn."
SECOND = "Ida Morn was born in Velsund."
ASIDE = "Ida Morn kept bees."
ROW = {
    "question": "Where was the author of Glass Harbour born?",
    "answer": "Velsund",
    "type": "bridge",
    # The filter removed ASIDE here, but kept its sub-query, as its topic still has a sentence.
    "supporting_docs": {"glass harbour": [FIRST], "ida morn": [SECOND, ""]},
    "sub_queries": [
        {"sub_query": "Who wrote Glass Harbour?", "doc_topic": "glass harbour", "supporting_doc": FIRST},
        {"sub_query": "What did Ida Morn keep?", "doc_topic": "ida morn", "supporting_doc": ASIDE},
        {"sub_query": "What is Ida Morn's #1 birthplace?", "doc_topic": "ida morn", "supporting_doc": SECOND},
    ],
}
FALLBACK = {
    "question": "When did the Lantern Guild close?",
    "answer": "1702",
    "type": "bridge",
    "supporting_docs": {"lantern guild": ["The Lantern Guild closed in 1702."]},
    "sub_queries": [
        {"sub_query": "What does this document tell us about lantern guild?", "doc_topic": "lantern guild",
         "supporting_doc": "The Lantern Guild closed in 1702.", "is_fallback": True}
    ],
}  # fmt: skip
TRIPLES = [
    {
        "text": FIRST,
        "generated_triple": "(S> Glass Harbour| P> author| O> Ida Morn), (S> Glass Harbour| P> is| O> novel)",
    },
    {"text": SECOND, "generated_triple": "(S> Ida Morn| P> born in| O> Velsund), (S> Ida Morn| P> kept| O> be"},
]


@pytest.fixture
def labels(tmp_path):
    path = tmp_path / "hotpot_filtered.json"
    path.write_text(json.dumps([ROW, ROW, FALLBACK], indent=2))
    return path


def test_a_sub_query_belongs_to_its_sentence(labels):
    issues = {NO_QUESTION: 0}
    first, _, fallback = get_reader("ras_labels")(str(labels), issues)
    assert first.passages == (Passage("glass harbour", FIRST), Passage("ida morn", SECOND))
    assert [hop.question for hop in first.hops] == ["Who wrote Glass Harbour?", "What is Ida Morn's #1 birthplace?"]
    assert (fallback.hops[0].question, issues[NO_QUESTION]) == ("", 1)


@pytest.mark.parametrize("wrapped", [False, True])
def test_paid_labels_and_triples_become_records(tmp_path, labels, wrapped):
    triples = tmp_path / "text_triples.json"
    triples.write_text(json.dumps({"results": TRIPLES} if wrapped else TRIPLES))
    stored, output = tmp_path / "triples.jsonl", tmp_path / "subq"
    adapted = run("data", "adapt", "--input", triples, "--output", stored)
    assert "malformed triples, left out 1" in adapted.out
    source = f"ras_labels:{labels}:{stored}"
    built = run("build subq", *f"--source {source} --output {output} --first-subquery generated --split-name x".split())
    assert built.code == 0, built.err
    records = read_lines(output / "x-00000.jsonl")
    assert [(record["action"], record["subquery"]) for record in records if record["task"] == "planning"] == [
        ("[SUBQ]", "Who wrote Glass Harbour?"),
        ("[SUBQ]", "What is Ida Morn's #1 birthplace?"),
        ("[SUFFICIENT]", ""),
    ], "labels are kept word for word"
    assert records[-1]["steps"][1]["triples"] == [["Ida Morn", "born in", "Velsund"]], "what was cut off is left out"
    card = (output / "README.md").read_text()
    assert "question id seen before" in card
    assert "a helpful document has no sub-query" in card


def test_their_direct_answers_are_matched_by_the_question(tmp_path, labels):
    labels.write_text(json.dumps([ROW]))
    answers = tmp_path / "subquery_classification.json"
    row = {"question": ROW["question"], "true_answer": "Velsund", "llm_answer": "Velsund.", "needs_subquery": False}
    answers.write_text(json.dumps([row]))
    triples, output = tmp_path / "triples.jsonl", tmp_path / "subq"
    triples.write_text(json.dumps({"title": "", "text": FIRST, "triples": [["a", "b", "c"]]}))
    words = f"--source ras_labels:{labels}:{triples} --set direct_answers={answers} --output {output} --split-name x"
    # No question needs the triples, so that the file would be of another corpus.
    built = run("build subq", *words.split())
    assert built.code == 0, built.err
    assert {record["action"] for record in read_lines(output / "x-00000.jsonl")} == {"[NO_RETRIEVAL]"}


def test_labelled_sentences_are_passages_for_an_extractor(tmp_path, labels):
    output = tmp_path / "sentences.jsonl"
    run("data", "adapt", "--input", labels, "--output", output)
    assert [row["text"] for row in read_lines(output)] == [FIRST, SECOND, "The Lantern Guild closed in 1702."]


def test_labels_without_triples_or_sub_queries_are_refused(tmp_path, labels):
    built = run("build subq", "--source", f"ras_labels:{labels}", "--output", tmp_path / "subq")
    assert built.code == 2
    assert "has sub-queries, but no triples: name a triple file" in built.err
    labels.write_text(json.dumps([{name: value for name, value in ROW.items() if name != "sub_queries"}]))
    with pytest.raises(ValueError, match=r"has no 'sub_queries'; .* --source hotpotqa:FILE with a teacher"):
        next(get_reader("ras_labels")(str(labels)))


@pytest.mark.parametrize("torch_file", [False, True])
def test_pickles_are_refused_with_a_way_out(tmp_path, torch_file):
    path = tmp_path / ("graphs.pt" if torch_file else "train.pkl")
    if torch_file:
        torch = pytest.importorskip("torch")
        torch.save([{"input": "x", "label": "y"}], path)
    else:
        path.write_bytes(pickle.dumps([{"input": "x", "label": "y"}]))
    for command in ("released", "adapt"):
        refused = run("data", command, "--input", path, "--output", tmp_path / "out")
        assert refused.code == 2
        assert f"{path}: this is a pickle, which may run code when it is opened" in refused.error
        assert "python -c" in refused.error


def test_answers_of_a_run_are_scored(tmp_path):
    """Both layouts: a loop's lists, and the rows of the answerer alone."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"id": "q", "question": "Where is the harbour?", "answer": "Port Ellen"}) + "\n")
    lists = {"question": ["Where is the harbour?"], "answer": ["Port Ellen"], "output": ["Port Ellen</s>"]}
    rows = [{"input": "You are an answerer.\nQuestion: Where is the harbour?", "prediction": "Port Ellen", "label": ""}]
    words = f"run --system answers --task qa --data {questions}".split()
    for name, content in (("lists", lists), ("rows", rows)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(content))
        assert run("eval", *words, "--answers", path, "--output", tmp_path / name).code == 0
        scores = json.loads((tmp_path / name / "metrics.json").read_text())["metrics"]
        assert scores["exact_match"]["mean"] == 1
    path.write_text(json.dumps(lists | {"question": ["Where is the harbour?", "Who?"]}))
    refused = run("eval", *words, "--answers", path, "--output", tmp_path / "short")
    assert "1 answers to 2 questions" in refused.error
    adapted = run("data", "adapt", "--input", path, "--output", tmp_path / "out.jsonl")
    assert "this is the output of a run, which has no passages" in adapted.error
