import json

import pytest

from tripletune.models.data.records import Passage, Step
from tripletune.models.llm.client import Completion
from tripletune.models.rendering import parse_plan
from tripletune.rag import __main__ as rag_main
from tripletune.rag.retrieval.retrievers import Retrieved
from tripletune.rag.trace import Trace


@pytest.fixture
def world(tmp_path):
    passages = [
        {"title": "Glass Harbour", "text": "A novel by Ida Morn."},
        {"title": "Ida Morn", "text": "Born in Velsund."},
    ]
    facts = [[["Glass Harbour", "Author", "Ida Morn"]], [["Ida Morn", "Birthplace", "Velsund"]]]
    corpus, triples = tmp_path / "corpus.jsonl", tmp_path / "triples.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in passages))
    triples.write_text("".join(json.dumps({**p, "triples": t}) + "\n" for p, t in zip(passages, facts)))
    return ["--corpus", str(corpus), "--triples", str(triples), "--top-k", "1"]


class Scripted:
    async def generate(self, sample, max_new_tokens, evidence=None):
        if sample.task == "answering":
            return Completion(sample.steps[-1].triples[0].object)
        plans = ["[SUBQ] q0", "[SUBQ] Where was Ida Morn born?", "[SUFFICIENT]"]
        return Completion(plans[len(sample.steps)])


@pytest.fixture
def model(tmp_path, make_graph_llm, monkeypatch):
    from tripletune.models.graph_llm.loading import add_adapter

    llm, processor = make_graph_llm()
    folder = tmp_path / "run" / "final"
    adapted = add_adapter(llm)
    adapted.save_pretrained(folder)
    adapted.get_base_model().config.save_pretrained(folder)
    processor.save_pretrained(folder)
    return tmp_path / "run"


def test_ask_shows_every_step_and_the_answer(model, world, monkeypatch, capsys):
    monkeypatch.setattr("tripletune.models.local.generator.load_generator", lambda *args, **options: Scripted())
    question = "Where was the author of Glass Harbour born?"
    assert rag_main.main(["ask", question, "--model", str(model), *world]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Question: {question}"
    assert [line.split(None, 1)[1] for line in lines if line.startswith("  retrieve")] == ["Glass Harbour", "Ida Morn"]
    assert lines[-2:] == ["  stop      sufficient", "Answer: Velsund"]


def test_a_plan_that_cannot_be_read_is_shown_with_what_was_retrieved_after_it(capsys):
    trace = Trace("Who?", stop_reason="repeated_subquery", answer="Ida Morn")
    for reply in ("no marker", "[SUBQ] Where?", "[SUBQ] Where?"):
        trace.add_plan(reply, parse_plan(reply), False)
    for query, titles in (("Who?", ["A", "B"]), ("Where?", [])):
        hits = [Retrieved(Passage(f"{title}\x1b[31m", "text"), 1.0) for title in titles]
        trace.add_step(Step(query), hits)
    rag_main.show(trace)
    assert [line.strip() for line in capsys.readouterr().out.splitlines()[1:6]] == [
        "plan      no marker",
        "retrieve  A\ufffd[31m, B\ufffd[31m",  # no title steers the terminal
        "plan      [SUBQ] Where?",
        "retrieve  nothing found",
        "plan      [SUBQ] Where?",
    ]


def test_ask_runs_a_real_model_from_a_run_folder(model, world, capsys):
    assert rag_main.main(["ask", "Who?", "--model", str(model), "--max-rounds", "1", *world]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Question: Who?\n")
    assert "\nAnswer: " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "no such folder: nowhere"),
        (["--corpus", ""], "--corpus"),
        (["--triples", ""], "--triples"),
        (["--max-rounds", "-1"], "max_rounds: -1 must"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(model, world, capsys, arguments, message):
    assert rag_main.main(["ask", "Who?", "--model", str(model), *world, *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert error.startswith("error: ")
    assert "\n" not in error


def test_an_empty_question_is_refused(model, world, capsys):
    assert rag_main.main(["ask", "  ", "--model", str(model), *world]) == 2
    assert capsys.readouterr().err == "error: the question is empty\n"
