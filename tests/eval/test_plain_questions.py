"""The plain format, read everywhere a benchmark is."""

import json
from collections import Counter

import pytest

from tests.cli import read_lines, write_lines
from tripletune.core.data.questions import Dropped, DropReason
from tripletune.core.data.records import read_records
from tripletune.core.data.triples import Triple
from tripletune.data_builders.readers import get_reader, with_linked_passages
from tripletune.data_builders.subq.__main__ import main as subq
from tripletune.data_builders.trajectories.build import main as trajectories
from tripletune.data_builders.world.build import WorldOptions, write_world
from tripletune.eval import load_task, task_questions, write_context_corpus
from tripletune.eval.__main__ import main as evaluate

CONTEXT = [{"id": "p0", "title": "Dune", "text": "By Ada."}, {"title": "Ada", "text": "Born in Kelm."}]
STEPS = [
    {"question": "who wrote dune", "answer": "Ada", "triples": [["Dune", "author", "Ada"]]},
    {"question": "Where was #1 born?", "passage": "Ada", "triples": [["Ada", "born in", "Kelm"]]},
]
ROW = {"question": "Where was the author of Dune born?", "answers": "Kelm", "supporting": ["Dune", "Ada"]}


def read(tmp_path, *rows):
    return list(get_reader("qa")(write_lines(tmp_path / "rows.jsonl", rows)))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A world of which the plain format is made; titles of supporting passages are those of its corpus."""
    folder = tmp_path_factory.mktemp("world")
    write_world(WorldOptions(seed=5, train=0, validation=0, test=8, common_knowledge=0), folder)
    rows = [
        {"id": row["_id"], "question": row["question"], "answers": row["answer"],
         "supporting": list(dict.fromkeys(title for title, _ in row["supporting_facts"]))}
        for row in read_lines(folder / "test.jsonl")
    ]  # fmt: skip
    write_lines(folder / "plain.jsonl", rows)
    plain = [row["question"] for row in rows]
    (folder / "questions.txt").write_text("\ufeff" + "\n\n".join([*plain, plain[0]]))
    return folder


def run(world, data, output, *more):
    named = ["--system", "ras", "--task", "qa", "--data", f"{world}/{data}", "--oracle", f"{world}/test"]
    named += ["--corpus", f"{world}/test.corpus.jsonl", "--triples", f"{world}/test.triples.jsonl"]
    return evaluate(["run", *named, "--output", str(output), *more])


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("ground_truth", "Kelm"), ("ground_truths", ["Kelm", "Kelm Old Town"]), ("reference", "Kelm"),
        ("expected_answer", ["Kelm"]), ("expected_output", "Kelm"), ("gold_answers", '["Kelm"]'), ("ideal", "Kelm"),
        ("answers", {"text": ["Kelm"], "answer_start": [4]}), ("reference_answer", 1999),
    ],
)  # fmt: skip
def test_gold_answers_under_the_names_of_other_tools(tmp_path, name, stored):
    (asked,) = read(tmp_path, {"user_input": "Where was Ada born?", name: stored})
    assert asked.question == "Where was Ada born?"
    assert asked.answers[0] in ("Kelm", "1999")
    (both,) = read(tmp_path, {"question": "Where?", "answer": "Oslo", name: stored})
    assert both.answers[0] == "Oslo" or name == "answers"


def test_supporting_passages_by_title_or_id_and_steps(tmp_path):
    own, by_id, other, bare = read(
        tmp_path, ROW | {"context": CONTEXT, "steps": STEPS}, ROW | {"context": CONTEXT, "supporting": "p0"},
        ROW | {"context": CONTEXT[:1], "steps": STEPS}, {"question": "Why?", "answers": []},
    )  # fmt: skip
    assert [one.title for one in own.passages] == ["Dune", "Ada"]
    assert (own.supporting, by_id.supporting, own.links) == ((0, 1), (0,), ())
    assert [(hop.passage_index, hop.triples) for hop in own.hops] == [
        (0, (Triple("Dune", "author", "Ada"),)), (1, (Triple("Ada", "born in", "Kelm"),)),
    ]  # fmt: skip
    assert (other.supporting, other.links) == ((), ("Dune", "Ada"))
    assert (bare.answers, bare.supporting, bare.links) == ((), (), ())
    corpus = write_lines(tmp_path / "corpus.jsonl", CONTEXT)
    found, unknown, same = with_linked_passages(
        lambda: [other, read(tmp_path, ROW | {"supporting": "Oz"})[0], bare], corpus
    )
    assert [found.passages[one].title for one in found.supporting] == ["Dune", "Ada"]
    assert [found.passages[hop.passage_index].title for hop in found.hops] == ["Dune", "Ada"]
    assert isinstance(unknown, Dropped)
    assert unknown.reason is DropReason.SUPPORT_NOT_IN_CONTEXT
    assert same == bare
    twice = write_lines(tmp_path / "twice.jsonl", [*CONTEXT, {"title": "Ada", "text": "Another."}])
    assert isinstance(next(with_linked_passages(lambda: [other], twice)), Dropped), (
        "a title of two passages names neither"
    )


def test_supporting_passages_that_the_corpus_lacks_are_named(world, tmp_path, caplog):
    rows = read_lines(world / "plain.jsonl")
    rows[0]["supporting"] = ["no_such.txt"]
    write_lines(world / "unplaced.jsonl", rows)
    assert run(world, "unplaced.jsonl", tmp_path / "run") == 0
    assert "1 questions have no recall, since a supporting passage is neither an id nor" in caplog.text
    assert f"one of question {rows[0]['id']!r}: 'no_such.txt'" in caplog.text
    recall = json.loads((tmp_path / "run" / "metrics.json").read_text())["recall"]
    assert {one["n"] for one in recall.values()} == {len(rows) - 1}


def test_ids_that_name_another_passage_in_each_question_are_refused(tmp_path):
    rows = [ROW | {"context": [{"id": "0", "title": name, "text": f"{name} is a town."}]} for name in ("Kelm", "Sarn")]
    data = str(write_lines(tmp_path / "rows.jsonl", [{**row, "id": str(n)} for n, row in enumerate(rows)]))
    with pytest.raises(ValueError, match="two passages have the id '0': leave the ids out"):
        write_context_corpus(load_task("qa"), data, tmp_path / "corpus.jsonl")
    write_lines(tmp_path / "rows.jsonl", [rows[0] | {"id": "a"}, rows[0] | {"id": "b"}])
    assert write_context_corpus(load_task("qa"), data, tmp_path / "corpus.jsonl") == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": " "}, "'question' must be a non-empty string"),
        (ROW | {"steps": [{"triples": []}]}, "lacks question"),
        (ROW | {"supporting": [], "steps": [{"question": "Who wrote Dune?"}]}, "no triples and no passage"),
        (ROW | {"supporting": [{"title": "Dune"}]}, "supporting must be text"),
    ],
)
def test_bad_rows_are_named(tmp_path, row, message):
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1.*{message}"):
        read(tmp_path, row)


def test_steps_and_recorded_replies_become_records(world, tmp_path, capsys):
    write_lines(tmp_path / "steps.jsonl", [ROW | {"context": CONTEXT, "steps": STEPS}])
    assert (
        subq(["--source", f"qa:{tmp_path}/steps.jsonl", "--output", f"{tmp_path}/steps", "--split-name", "train"]) == 0
    )
    labels = [one.label for one in read_records(tmp_path / "steps")]
    assert labels == [f"[SUBQ] {ROW['question']}", "[SUBQ] Where was Ada born?", "[SUFFICIENT]", "Kelm"]
    source = ["--source", f"qa:{world}/plain.jsonl:{world}/test.teacher.jsonl", "--split-name", "train", "--output"]
    assert subq([*source, f"{tmp_path}/plain", "--corpus", f"{world}/test.corpus.jsonl"]) == 0
    official = ["--source", f"qa=hotpotqa:{world}/test.jsonl:{world}/test.teacher.jsonl", "--split-name", "train"]
    assert subq([*official, "--output", f"{tmp_path}/official"]) == 0
    assert list(read_records(tmp_path / "plain")) == list(read_records(tmp_path / "official"))
    assert subq([*source, f"{tmp_path}/none"]) == 2
    assert "give this corpus with --corpus" in capsys.readouterr().err


def test_a_loop_finds_what_supports_a_question_and_right_runs_become_records(world, tmp_path):
    rows = read_lines(world / "plain.jsonl")
    for row in rows:
        del row["supporting"]
    rows[0]["answers"], rows[1]["answers"] = "wrong", []
    write_lines(world / "bare.jsonl", rows)
    assert run(world, "bare.jsonl", tmp_path / "run") == 0
    words = ["--system", "ras", "--records", "--min-score", "exact_match=1", "--results", str(tmp_path / "run")]
    assert trajectories([*words, "--output", str(tmp_path / "records")]) == 0
    found = list(read_records(tmp_path / "records"))
    assert {one.question_id for one in found} == {row["id"] for row in rows[2:]}
    assert all(step.triples for one in found for step in one.steps)
    left_out = json.loads((tmp_path / "records" / "statistics.json").read_text())["build"]["drops"]["all"]
    assert (left_out["no gold answer"], left_out["exact_match below 1"]) == (1, 1)


def test_questions_without_gold_are_answered_and_not_scored(world, tmp_path, capsys):
    assert run(world, "plain.jsonl", tmp_path / "gold") == 0
    assert run(world, "questions.txt", tmp_path / "none") == 0
    gold, none = (list(read_lines(tmp_path / name / "results.jsonl")) for name in ("gold", "none"))
    assert [row["prediction"] for row in gold] == [row["prediction"] for row in none]
    assert all(row["supporting_recall"] == 1 for row in gold), "the corpus has what the rows name"
    assert all(row["scores"] == {} for row in none)
    metrics = json.loads((tmp_path / "none" / "metrics.json").read_text())
    assert metrics["metrics"]["f1"] == {"mean": None, "low": None, "high": None, "n": 0}
    assert (metrics["questions"], metrics["counts"]["without_gold"]) == (8, 8)
    assert evaluate(["report", str(tmp_path / "gold"), str(tmp_path / "none"), "--output", str(tmp_path / "page")]) == 0
    assert "| ras | 8 | 0 | - | - | - |" in (tmp_path / "page" / "report.md").read_text()
    capsys.readouterr()
    words = ["run", "--system", "no_retrieval", "--oracle", f"{world}/test", "--data", f"{world}/questions.txt"]
    assert evaluate([*words, "--task", "nq", "--output", str(tmp_path / "nq")]) == 2
    assert "has no gold answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "answers"),
    [
        ("politician|political leader|pol", ("politician", "political leader", "pol")),
        ("Orlen | Orlen, Tolm", ("Orlen", "Orlen, Tolm")),
        ("Oslo|", ("Oslo",)),
        ("|", ("|",)),
        (["a|b", "c"], ("a|b", "c")),
    ],
)
def test_answers_joined_by_bars_are_single_answers(tmp_path, answer, answers):
    (question,) = read(tmp_path, {"_id": "q", "question": "Who?", "answer": answer})
    assert question.answers == answers


@pytest.mark.parametrize(
    "context",
    [
        [["7_Veltor_processed", []], ["Kelm", ["A town.", " It is old."]]],
        [{"title": "Veltor", "sentences": []}, {"title": "Kelm", "sentences": ["A town.", "It is old."]}],
        {"title": ["Veltor", "Kelm"], "sentences": [[], ["A town.", "It is old."]]},
    ],
)
def test_a_context_of_sentences_and_of_titles_alone(tmp_path, context):
    (question,) = read(tmp_path, {"_id": "q", "question": "Who?", "answer": "x", "context": context})
    assert [(passage.title, passage.text) for passage in question.passages] == [("Kelm", "A town. It is old.")]


def test_paragraphs_of_which_some_support_the_answer(tmp_path):
    paragraphs = [{"title": "A", "text": "One."}, {"title": "B", "paragraph_text": "Two.", "is_supporting": True}]
    (question,) = read(tmp_path, {"id": "q", "question": "Who?", "answer": "x", "paragraphs": paragraphs})
    assert [passage.title for passage in question.passages] == ["A", "B"]
    assert question.supporting == (1,)


def test_a_step_of_its_own_is_not_looked_for_in_the_corpus(tmp_path):
    steps = [{"question": "a"}, {"question": "b", "text": "Own.", "triples": [["x", "y", "z"]]}]
    (question,) = read(tmp_path, {"question": "Who?", "answer": "x", "supporting": ["Doc A"], "steps": steps})
    assert question.links == ("Doc A",)
    assert [question.passages[index].text for index in question.supporting] == ["Own."]
    assert [hop.passage_index for hop in question.hops] == [1, 0], "the linked passage follows the row's own"


def test_questions_without_a_gold_answer_are_counted_before_they_are_asked(tmp_path):
    rows = [{"question": "Where?", "groundtruth": "Kelm"}, {"question": "Who?", "ground_truth": "Ada"}]
    notes = Counter()
    assert len(list(task_questions(load_task("qa"), str(write_lines(tmp_path / "rows.jsonl", rows)), notes))) == 2
    assert notes == {"question(s) without a gold answer, which are not scored": 1}
