"""A retriever without a model: recall and no scores of answers, from our indexes, a file, or another package."""

import json

import pytest

from tests.cli import read_lines, run, write_lines
from tripletune.core.data.passages import passage_id


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Options for questions about a world and its corpus."""
    folder = tmp_path_factory.mktemp("world")
    assert run("build world", "--output", folder, "--train", 0, "--validation", 0, "--test", 12).code == 0
    return ("--data", folder / "test.jsonl", "--corpus", folder / "test.corpus.jsonl", "--task", "hotpotqa")


def test_the_system_retrieval_has_recall_and_no_scores_of_answers(place, tmp_path):
    done = run("eval", "run", "--system", "retrieval", *place, "--output", tmp_path / "bm25")
    assert done.code == 0, done.err
    assert "first@2" in done.out
    assert "f1" not in done.out
    rows = read_lines(tmp_path / "bm25/results.jsonl")
    # BM25 finds only passages that share a word with the question.
    assert max(len(row["trace"]["steps"][0]["passages"]) for row in rows) == 15
    assert all(row["scores"] == {} for row in rows)
    metrics = json.loads((tmp_path / "bm25/metrics.json").read_text())
    assert list(metrics["recall"]) == [f"{name}@{k}" for name in ("first", "retrieved") for k in (2, 5, 15)]
    assert "without_gold" not in metrics["counts"]

    alone = run("eval", "report", tmp_path / "bm25", "--output", tmp_path / "report")
    assert alone.code == 0, alone.err
    compared = run("eval", "compare", tmp_path / "bm25", tmp_path / "bm25")
    assert "the runs have no score in common" in compared.err
    scored = run("eval", "score", tmp_path / "bm25", "--metrics", "recall@5,ndcg@10,f1")
    assert scored.code == 0, scored.err
    assert "f1 need answers and gold answers" in scored.err
    assert "longest ranking" not in scored.err
    # Both have columns of the task's f1 and exact match, and neither has a value.
    again = run("eval", "run", "--system", "retrieval", *place, "--top-k", 9, "--output", tmp_path / "other")
    assert again.code == 0, again.err
    run("eval", "score", tmp_path / "other", "--metrics", "recall@5,ndcg@10")
    both = ("--across", "top_k", "--output", tmp_path / "report")
    beside = run("eval", "report", tmp_path / "bm25", tmp_path / "other", *both)
    assert beside.code == 0, beside.err
    assert "which other runs of the task lack" not in beside.err


def test_several_systems_share_a_command_line_with_a_retriever(place, tmp_path):
    world = str(place[1]).removesuffix(".jsonl")
    words = (
        "--systems",
        "retrieval,standard",
        "--top-k",
        "5",
        "--oracle",
        world,
        "--triples",
        f"{world}.triples.jsonl",
    )
    done = run("eval", "run", *words, *place, "--output", tmp_path / "both")
    assert done.code == 0, done.err
    scored = run("eval", "score", tmp_path / "both", "--metrics", "recall@5,ndcg@10")
    assert "its longest ranking has 5 passages, so ndcg@10 only count these" in scored.err
    reported = run("eval", "report", tmp_path / "both", "--output", tmp_path / "report")
    assert reported.code == 0, reported.err
    page = (tmp_path / "report/report.md").read_text()
    assert "R@5" in page
    assert "R@15" not in page
    assert "ndcg@10 of standard: its longest ranking has 5 passages" in page
    assert "| f1_hotpotqa |" in page, "a run that only retrieves takes no column away"


def test_a_file_of_rankings_needs_no_answers(place, tmp_path):
    questions = read_lines(place[1])
    first = [{"id": row["_id"], "passages": [row["context"][0][0]]} for row in questions]
    write_lines(tmp_path / "rankings.jsonl", first)
    words = ("--system", "answers", "--answers", tmp_path / "rankings.jsonl", *place, "--output", tmp_path / "out")
    done = run("eval", "run", *words)
    assert done.code == 0, done.err
    assert list(json.loads((tmp_path / "out/metrics.json").read_text())["recall"]) == ["first@2", "retrieved@2"]
    assert "f1" not in done.out
    write_lines(tmp_path / "rankings.jsonl", [{"id": "q"}])
    assert "none of 'answer', 'result', 'prediction' and no 'passages'" in run("eval", "run", *words, "--overwrite").err


def test_questions_without_gold_answers_have_recall(place, tmp_path):
    rows = []
    for row in read_lines(place[1]):
        rows.append(
            {"id": row["_id"], "question": row["question"], "supporting": [fact[0] for fact in row["supporting_facts"]]}
        )
    write_lines(tmp_path / "questions.jsonl", rows)
    words = ("--data", tmp_path / "questions.jsonl", "--corpus", place[3], "--task", "qa", "--output", tmp_path / "out")
    done = run("eval", "run", "--system", "retrieval", *words)
    assert done.code == 0, done.err
    assert "no question has a score" not in done.err
    scored = run("eval", "score", tmp_path / "out", "--metrics", "recall@5,mrr")
    assert scored.code == 0, scored.err
    assert "mrr" in scored.out

    write_lines(tmp_path / "questions.jsonl", [{"id": row["id"], "question": row["question"]} for row in rows])
    nothing = run("eval", "run", "--system", "retrieval", *words, "--overwrite")
    assert nothing.code == 0, nothing.err
    assert "no question has a score: answers need gold answers, and a retriever needs known supporting" in nothing.err


def test_gold_passages_outside_the_corpus_leave_their_questions_out(place, tmp_path):
    ids = {row["title"]: passage_id(row["title"], row["text"]) for row in read_lines(place[3])}
    supporting = {row["_id"]: {fact[0] for fact in row["supporting_facts"]} for row in read_lines(place[1])}
    gold = []
    for question, titles in supporting.items():
        gold.append({"question_id": question, "passages": [ids[title] for title in sorted(titles)]})
    first, second = gold[:2]
    first["passages"].append("of another corpus")
    write_lines(tmp_path / "gold.jsonl", gold)
    words = ("--system", "retrieval", *place, "--gold", tmp_path / "gold.jsonl", "--output", tmp_path / "out")
    done = run("eval", "run", *words)
    assert done.code == 0, done.err
    assert "1 questions have no recall, since --gold" in done.err
    assert f"for example 'of another corpus' for question '{first['question_id']}'" in done.err
    rows = {row["id"]: row for row in read_lines(tmp_path / "out/results.jsonl")}
    assert rows[first["question_id"]]["supporting"] == []
    assert rows[second["question_id"]]["supporting"] == sorted(second["passages"])

    write_lines(tmp_path / "gold.jsonl", [{**row, "passages": ["of another corpus"]} for row in gold])
    assert "has no passage of" in run("eval", "run", *words, "--overwrite").error


def test_passages_outside_the_corpus_are_reported_and_not_scored_in_silence(place, tmp_path):
    rankings = tmp_path / "rankings.jsonl"
    words = ("--system", "answers", "--answers", rankings, *place, "--output", tmp_path / "out", "--overwrite")
    ids = [row["_id"] for row in read_lines(place[1])]
    titles = {row["_id"]: [fact[0] for fact in row["supporting_facts"]] for row in read_lines(place[1])}

    write_lines(rankings, [{"id": name, "passages": ["nonsense-1", "nonsense-2"]} for name in ids])
    refused = run("eval", "run", *words)
    assert refused.code == 2
    assert "none of its passages is in" in refused.err
    assert "for example 'nonsense-1'" in refused.err
    of_contexts = [word for word in words if word not in ("--corpus", place[3])]
    without_corpus = run("eval", "run", *of_contexts)
    assert "2 of 2 found passages are not in the contexts of" in without_corpus.err

    write_lines(rankings, [{"id": name, "passages": [*titles[name], "nonsense-1"]} for name in ids])
    some = run("eval", "run", *words)
    assert some.code == 0, some.err
    assert "found passages are not in" in some.err
    assert f"for example 'nonsense-1' of question '{ids[0]}'" in some.err
    recall = json.loads((tmp_path / "out/metrics.json").read_text())["recall"]
    assert max(score["mean"] for score in recall.values()) == 1.0, "titles name passages, as in `supporting`"

    write_lines(rankings, [{"id": name, "passages": [{"title": title} for title in titles[name]]} for name in ids])
    only_titles = run("eval", "run", *words)
    assert "found passages are not in" not in only_titles.err
    assert json.loads((tmp_path / "out/metrics.json").read_text())["recall"] == recall
