import json
from collections import Counter
from dataclasses import replace

import pytest

from tests.cli import read_lines, write_lines
from tripletune.core.calls import Completion, Generator
from tripletune.core.data.passages import Passage
from tripletune.core.data.records import Action, Record, Step
from tripletune.core.data.triples import Triple
from tripletune.eval.__main__ import main
from tripletune.eval.statistics import flatten_means
from tripletune.eval.suites._run_settings import triples_settings
from tripletune.eval.suites.records import score_predictions, with_stored_triples
from tripletune.rag.triple_store import Extraction, StoredTriples, TripleStore

STEP = Step("Q1?", (Triple("a", "b", "c"),), "text")


def plan(name, action, subquery="", steps=0):
    question = name.split(":")[0]
    return Record(name, question, "planning", "Q?", action, (STEP,) * steps, subquery)


def answer(name, *answers):
    return Record(name, name.split(":")[0], "answering", "Q?", Action.SUFFICIENT, (STEP,), "", answers)


RECORDS = [
    plan("q1:0", Action.SUBQ, "Q?"),
    plan("q1:1", Action.SUBQ, "Who is sufficient?", 1),
    plan("q1:2", Action.SUFFICIENT, steps=2),
    answer("q1:a", "yes"),
    plan("q2:0", Action.NO_RETRIEVAL),
    answer("q2:a", "A", "Alpha Centauri"),
]
REPLIES = ["[SUBQ] Q?", "[SUBQ] Who is not sufficient?", "[SUBQ] more?", "Yes, both", "maybe", "alpha centauri"]


def test_scores_by_hand():
    metrics = score_predictions(RECORDS, REPLIES)
    planning, answering = metrics["planning"], metrics["answering"]
    assert (planning["records"], answering["records"]) == (4, 2)
    assert planning["action_accuracy"]["mean"] == 0.5
    alone = {"mean": 0.5, "low": 0.0125, "high": 0.9875, "n": 2}
    assert planning["action_accuracy_with_history"] == pytest.approx(alone), "one question alone says little"
    assert planning["malformed"]["mean"] == 0.25
    assert planning["subquery_f1"]["n"] == 2
    assert planning["subquery_f1"]["mean"] == pytest.approx((1 + 6 / 7) / 2)
    assert planning["subquery_f1_with_history"]["mean"] == pytest.approx(6 / 7)
    by_label = {label: found["mean"] for label, found in planning["action_accuracy_by_label"].items()}
    assert by_label == {"[NO_RETRIEVAL]": 0.0, "[SUBQ]": 1.0, "[SUFFICIENT]": 0.0}
    assert {k: v["mean"] for k, v in planning["action_accuracy_by_history"].items()} == {"0": 0.5, "1": 1.0, "2": 0.0}
    assert {action for action, count in planning["confusion"]["[SUFFICIENT]"].items() if count} == {"[SUBQ]"}
    assert planning["confusion"]["[NO_RETRIEVAL]"]["malformed"] == 1
    assert answering["exact_match"]["mean"] == 0.5
    assert answering["f1"]["mean"] == pytest.approx((2 / 3 + 1) / 2)
    assert answering["f1_hotpotqa"]["mean"] == 0.5


@pytest.mark.parametrize("reply", ["[SUFFICIENT] Who?", "Who?", "[SUBQ]", "[NO_RETRIEVAL]"])
def test_another_action_scores_0_in_subquery_f1(reply):
    assert score_predictions([plan("q:0", Action.SUBQ, "Who?")], [reply])["planning"]["subquery_f1"]["mean"] == 0.0


def test_missing_kinds_are_none_and_left_out_of_the_flat_form():
    metrics = score_predictions([answer("q:a", "x")], ["x"])
    assert metrics["planning"]["action_accuracy"] == {"mean": None, "low": None, "high": None, "n": 0}
    assert flatten_means(metrics) == {"answering/exact_match": 1.0, "answering/f1": 1.0, "answering/f1_hotpotqa": 1.0}
    assert flatten_means(score_predictions(RECORDS, REPLIES))["planning/action_accuracy_by_history/1"] == 1.0


FOUND = {
    ("Oslo", "Oslo is a city."): (Triple("Oslo", "is", "city"),),
    ("Norway", "Norway is a land.\nIt is cold."): (Triple("Norway", "is", "land"), Triple("Oslo", "is", "city")),
    ("", "No title here."): (Triple("it", "has", "no title"),),
    ("Empty", "Says nothing."): (),
}


@pytest.fixture
def store(tmp_path):
    opened = TripleStore(tmp_path / "s.sqlite")
    number = opened.extractor("model", "prompt")
    opened.put(number, (Extraction(Passage(*names).key, triples) for names, triples in FOUND.items()))
    yield opened
    opened.close()


def record(*texts):
    steps = tuple(Step(f"q{n}", (Triple("gold", "is", str(n)),), text) for n, text in enumerate(texts))
    return Record("r", "r", "answering", "Q?", Action.SUFFICIENT, steps, answers=("a",))


def test_each_step_gets_what_was_found_in_its_passages(store):
    texts = [
        Passage("Oslo", "Oslo is a city.").content,
        # A passage with a line break, among others; one of them says nothing, one was never read.
        "\n".join(
            Passage(*names).content
            for names in (
                ("Empty", "Says nothing."),
                ("Norway", "Norway is a land.\nIt is cold."),
                ("Gone", "Was never read."),
                ("Oslo", "Oslo is a city."),
            )
        ),
        "No title here.",
    ]
    counts = Counter()
    given = record(*texts)
    (found,) = with_stored_triples([given], StoredTriples(store, 1), counts)
    assert [step.triples for step in found.steps] == [
        (Triple("Oslo", "is", "city"),),
        (Triple("Norway", "is", "land"), Triple("Oslo", "is", "city")),
        (Triple("it", "has", "no title"),),
    ]
    assert [(step.query, step.text) for step in found.steps] == [(step.query, step.text) for step in given.steps]
    assert counts == {"passages": 6, "passages_without_triples": 1}
    assert (found.answers, found.question) == (given.answers, given.question)


def test_a_step_without_text_can_not_be_read_anew(store):
    with pytest.raises(ValueError, match="record 'r': the step 'q0' has no text"):
        list(with_stored_triples([record(" ")], StoredTriples(store, 1), Counter()))


def test_what_results_depend_on(store, tmp_path):
    first = triples_settings(str(store.path))
    assert first == {"model": "model", "prompt": "prompt", "passages": 4, "digest": store.digest(1)}
    store.put(store.extractor("other", "prompt"), [Extraction("k", ())])
    with pytest.raises(ValueError, match="several extractors"):
        triples_settings(str(store.path))
    assert triples_settings(str(store.path), "model") == first
    file = tmp_path / "triples.jsonl"
    file.write_text("{}\n")
    assert len(triples_settings(str(file))) == 64
    with pytest.raises(ValueError, match="is not an extraction store"):
        triples_settings(str(file), "model")


class Reader(Generator):
    """Answers with the object of the last triple; a batch is of one task."""

    def generate_many(self, samples, max_new_tokens, evidence=None):
        assert len({sample.task for sample in samples}) == 1
        last = (sample.steps[-1].triples if sample.steps else () for sample in samples)
        return [Completion(triples[-1].object if triples else "") for triples in last]

    async def generate(self, sample, max_new_tokens, evidence=None):
        if sample.task == "planning":
            return Completion("[SUFFICIENT]" if sample.steps else f"[SUBQ] {sample.question}")
        return self.generate_many([sample], max_new_tokens)[0]


@pytest.fixture
def model(serve):
    return serve(Reader())


def scores(tmp_path, command, *more, output="out"):
    code = main([command, "--model", str(tmp_path / "model"), "--output", str(tmp_path / output), *more])
    return code, json.loads((tmp_path / output / "metrics.json").read_text()) if code == 0 else None


def test_the_command_keeps_the_order_of_the_records(model, tmp_path, capsys):
    write_lines(tmp_path / "subq" / "validation-00000.jsonl", [one.to_json() for one in RECORDS])
    call = ("records", "--data", f"{tmp_path}/subq")
    found = scores(tmp_path, *call)[1]
    assert (found["planning"]["malformed"]["mean"], found["answering"]["records"]) == (1.0, 2)
    rows = read_lines(tmp_path / "out" / "results.jsonl")
    assert [(row["id"], row["error"]) for row in rows] == [(one.id, "") for one in RECORDS]
    assert "gold action: [SUBQ]" in capsys.readouterr().out


def test_records_without_the_evidence_of_the_prompts_are_refused(model, tmp_path, error_of):
    without_text = replace(RECORDS[3], steps=(replace(STEP, text=""),))
    write_lines(tmp_path / "subq" / "validation-00000.jsonl", [without_text.to_json()])
    call = ("records", "--data", f"{tmp_path}/subq")
    assert scores(tmp_path, *call, "--evidence", "text", output="text")[0] == 2
    assert "--evidence text: 1 of 1 steps in" in error_of()
    assert scores(tmp_path, *call, output="triples")[0] == 0


def test_records_and_the_loop_read_a_store(store, model, tmp_path, capsys):
    store.close()
    given = replace(record(Passage("Oslo", "Oslo is a city.").content), answers=("city",))
    write_lines(tmp_path / "records" / "test-00000.jsonl", [given.to_json()])
    records = ("records", "--data", f"{tmp_path}/records", "--split", "test")
    assert scores(tmp_path, *records)[1]["answering"]["exact_match"]["mean"] == 0.0
    code, _ = scores(tmp_path, *records, "--triples", str(store.path))
    assert code == 2, "the same folder holds the results with gold triples"
    assert "triples.model was None" in capsys.readouterr().err
    found = scores(tmp_path, *records, "--triples", str(store.path), output="anew")[1]
    assert found["answering"]["exact_match"]["mean"] == 1.0
    assert "1 passages looked up, 0 of them not in" in capsys.readouterr().out

    question = {"_id": "q", "question": "What is Oslo?", "answer": "city", "type": "bridge"}
    question |= {"supporting_facts": [["Oslo", 0]], "context": [["Oslo", ["Oslo is a city."]]]}
    questions = write_lines(tmp_path / "questions.jsonl", [question])
    loop = ("run", "--system", "ras", "--task", "hotpotqa", "--data", str(questions))
    found = scores(tmp_path, *loop, "--triples", str(store.path), output="loop")[1]
    assert found["metrics"]["exact_match"]["mean"] == 1.0
    assert found["counts"]["passages_without_triples"] == 0
    settings = json.loads((tmp_path / "loop" / "settings.json").read_text())
    assert settings["triples"]["model"] == "model"
