import json
import sys
import types
from collections import Counter
from dataclasses import replace

import pytest

from tripletune.eval.__main__ import main
from tripletune.eval.suites.replaced_triples import triples_settings, with_triples
from tripletune.models.data.passages import Passage
from tripletune.models.data.records import Action, Record, Step
from tripletune.models.data.triples import Triple
from tripletune.models.local.generation import Completion
from tripletune.rag.triples.store import Extraction, StoredTriples, TripleStore, passage_key

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
    opened.put(number, (Extraction(passage_key(*names), triples) for names, triples in FOUND.items()))
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
    (found,) = with_triples([given], StoredTriples(store, 1), counts)
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
        list(with_triples([record(" ")], StoredTriples(store, 1), Counter()))


def test_what_results_depend_on(store, tmp_path):
    first = triples_settings(str(store.path))
    assert first == {"store": "s.sqlite", "model": "model", "prompt": "prompt", "passages": 4}
    store.put(store.extractor("other", "prompt"), [Extraction("k", ())])
    with pytest.raises(ValueError, match="several extractors"):
        triples_settings(str(store.path))
    assert triples_settings(str(store.path), "model") == first
    file = tmp_path / "triples.jsonl"
    file.write_text("{}\n")
    assert len(triples_settings(str(file))) == 64
    with pytest.raises(ValueError, match="no extraction store"):
        triples_settings(str(file), "model")


class Reader:
    """Answers with the object of the last triple; its inputs are kept."""

    def __init__(self):
        self.inputs = []

    def generate_many(self, samples, max_new_tokens, evidence=None):
        self.inputs += samples
        last = (sample.steps[-1].triples for sample in samples)
        return [Completion(triples[-1].object if triples else "") for triples in last]

    async def generate(self, sample, max_new_tokens, evidence=None):
        if sample.task == "planning":
            return Completion("[SUFFICIENT]" if sample.steps else f"[SUBQ] {sample.question}")
        return self.generate_many([sample], max_new_tokens)[0]


@pytest.fixture
def model(tmp_path, monkeypatch):
    reader = Reader()
    module = types.ModuleType("tripletune.models.local.generator")
    module.load_generator = lambda folder, batch_size, dtype: reader
    monkeypatch.setitem(sys.modules, "tripletune.models.local.generator", module)
    monkeypatch.setattr("tripletune.eval.suites.questions.check_model_folder", lambda folder: None)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "graph_llm", "base_model": "pypi:none"}')
    return reader


def scores(tmp_path, command, *more, output="out"):
    code = main([command, "--model", str(tmp_path / "model"), "--output", str(tmp_path / output), *more])
    return code, json.loads((tmp_path / output / "metrics.json").read_text()) if code == 0 else None


def test_records_and_the_loop_read_a_store(store, model, tmp_path, capsys):
    store.close()
    (tmp_path / "records").mkdir()
    given = replace(record(Passage("Oslo", "Oslo is a city.").content), answers=("city",))
    (tmp_path / "records" / "test-00000.jsonl").write_text(json.dumps(given.to_json()) + "\n")
    records = ("records", "--data", str(tmp_path / "records"), "--split", "test")
    assert scores(tmp_path, *records)[1]["answering"]["exact_match"]["mean"] == 0.0
    code, _ = scores(tmp_path, *records, "--triples", str(store.path))
    assert code == 2, "the same folder holds the results with gold triples"
    assert "triples was None" in capsys.readouterr().err
    found = scores(tmp_path, *records, "--triples", str(store.path), output="anew")[1]
    assert found["answering"]["exact_match"]["mean"] == 1.0
    assert "1 passages looked up, 0 of them not in" in capsys.readouterr().out

    question = {
        "_id": "q",
        "question": "What is Oslo?",
        "answer": "city",
        "type": "bridge",
        "supporting_facts": [["Oslo", 0]],
        "context": [["Oslo", ["Oslo is a city."]]],
    }
    (tmp_path / "questions.jsonl").write_text(json.dumps(question) + "\n")
    loop = ("run", "--system", "ras", "--task", "hotpotqa", "--data", str(tmp_path / "questions.jsonl"))
    found = scores(tmp_path, *loop, "--triples", str(store.path), output="loop")[1]
    assert found["metrics"]["exact_match"]["mean"] == 1.0
    assert found["counts"]["passages_without_triples"] == 0
    settings = json.loads((tmp_path / "loop" / "settings.json").read_text())
    assert settings["triples"]["model"] == "model"
    assert scores(tmp_path, *loop, "--triples", str(store.path), "--extractor", "gone", output="no")[0] == 2
    assert "holds no triples of gone" in capsys.readouterr().err
