"""`tripletune ask`: one question, and a file of questions without gold answers."""

import json

import pytest

from tests.cli import read_lines, write_lines
from tests.fakes import Client, Model
from tripletune.ask import main
from tripletune.core.calls import CallError
from tripletune.core.data.triples import Triple
from tripletune.eval.ask import write_answers


def test_ask_shows_every_step_and_the_answer(serve, tmp_path, two_pages, capsys):
    llm = serve(Model("[SUBQ] q0", "[SUBQ] Where was Ida Morn born?", "[SUFFICIENT]", answer="Velsund"))
    question = "Where was the author of Glass Harbour born?"
    assert main([question, "--model", str(tmp_path / "model"), *two_pages]) == 0
    out, err = capsys.readouterr()
    assert "BM25 stems by the detected language en (--set language=NAME sets another)" in err
    lines = out.splitlines()
    assert lines[0] == f"Question: {question}"
    assert [line.split(None, 1)[1] for line in lines if line.startswith("  retrieve")] == ["Glass Harbour", "Ida Morn"]
    assert (lines[-5], lines[-1]) == ("  stop      sufficient", "Answer: Velsund")
    assert "  search    Where was Ida Morn born?" in lines
    assert "  triple    Ida Morn | Birthplace | Velsund" in lines
    assert llm.inputs[-1][0].steps[-1].triples == (Triple("Ida Morn", "Birthplace", "Velsund"),)
    assert main(["  ", "--model", str(tmp_path / "model"), *two_pages]) == 2
    assert capsys.readouterr().err == "error: the question is empty\n"


@pytest.mark.parametrize(("model", "is_offered"), [("gpt-4o-mini", True), ("runs/planner", False)])
def test_the_name_of_a_hosted_model_is_no_folder(two_pages, capsys, model, is_offered):
    assert main(["Who?", "--model", model, *two_pages]) == 2
    assert (f"give --llm openai:{model}" in capsys.readouterr().err) is is_offered


@pytest.fixture
def chat_model(monkeypatch):
    """A chat model behind `--teacher`, that replies by the role of the call."""
    replies = {"ircot.think": "So the answer is: Velsund.", "ircot.answer": "Answer: Velsund", "ras.answer": "Velsund"}

    def answer(asked):
        return replies.get(asked.role) or ("[SUFFICIENT]" if "[SUBQ]" in asked.text else "[SUBQ] Who wrote it?")

    client = Client(answer=answer)
    monkeypatch.setattr("tripletune.rag.answering.open_client", lambda options: client)
    return client


@pytest.mark.parametrize("system", ["ras", "ircot"])
def test_ask_with_a_chat_model(two_pages, chat_model, capsys, system):
    teacher = ["--system", system, "--teacher", "openai", "--teacher-model", "m"]
    assert main(["Where was Ida Morn born?", *teacher, *two_pages, "--set", "top_k=1"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert (lines[-5], lines[-1]) == ("  stop      sufficient", "Answer: Velsund")
    assert "  retrieve  Ida Morn" in lines
    assert ("triples.jsonl has no effect: ircot reads no triples" in err) == (system == "ircot")
    assert chat_model.closed


@pytest.mark.parametrize(
    ("plan", "note", "stop", "problem"),
    [
        ("The answer is Velsund.", "no plan can be read in this reply", "malformed", "2 replies of the model could"),
        ("[SUBQ] None", "not searched: this sub-query asks nothing", "no_question", "nothing was searched"),
    ],
)
def test_a_model_that_cannot_plan_is_reported(two_pages, capsys, monkeypatch, plan, note, stop, problem):
    client = Client(answer=lambda asked: "Velsund" if asked.role == "ras.answer" else plan)
    monkeypatch.setattr("tripletune.rag.answering.open_client", lambda options: client)
    words = ["--evidence", "text", "--llm", "openai:m", *two_pages[:2]]
    assert main(["Where was Ida Morn born?", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == f"            ({note})"
    place = lines.index(f"  stop      {stop}")
    assert lines[place + 1].startswith(f"  hint      {problem}")
    assert "or --system standard, which searches once" in lines[place + 1]
    assert main(["Where was Ida Morn born?", "--json", *words]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["answer"] == "Velsund"
    assert problem in printed.err


def test_a_file_of_questions_says_that_the_model_cannot_plan(two_pages, tmp_path, caplog, monkeypatch):
    client = Client(answer=lambda asked: "Velsund" if asked.role == "ras.answer" else "The answer is Velsund.")
    monkeypatch.setattr("tripletune.eval.systems.open_client", lambda options: client)
    monkeypatch.setattr("tripletune.rag.answering.open_client", lambda options: client)
    write_lines(tmp_path / "q.jsonl", [{"question": "Where was Ida Morn born?"}])
    words = ["--evidence", "text", "--llm", "openai:m", *two_pages[:2]]
    assert main(["--questions", str(tmp_path / "q.jsonl"), "--output", str(tmp_path / "out"), *words]) == 0
    (told,) = [line for line in caplog.messages if "could not be read" in line]
    # Each of two plans was asked for twice.
    assert told.startswith("4 of 4 replies of ras.plan could not be read")
    assert "--system standard" in told


def test_triples_of_another_corpus_are_told(two_pages, chat_model, tmp_path, capsys):
    write_lines(tmp_path / "other.jsonl", [{"title": "Oz", "text": "Green.", "triples": [["Oz", "colour", "green"]]}])
    words = [*two_pages[:2], "--triples", str(tmp_path / "other.jsonl"), "--top-k", "1", "--llm", "openai:m"]
    assert main(["Where was Ida Morn born?", *words]) == 0
    out, err = capsys.readouterr()
    assert "  unread    1 of 1 passages have no triples" in out
    assert "other.jsonl has none of the first 2 passages of --corpus" in err


def test_the_chat_model_reads_the_triples_and_a_second_question_finds_them(two_pages, chat_model, tmp_path):
    triple, answer = "(S> Ida Morn| P> born in| O> Velsund)", chat_model.answer
    chat_model.answer = lambda asked: triple if asked.role == "extract.triples" else answer(asked)
    ask = ["Where was Ida Morn born?", "--teacher", "openai", "--teacher-model", "m", *two_pages[:2], "--top-k", "1"]
    ask += ["--extractor", "teacher", "--triples", str(tmp_path / "read.sqlite")]
    for _ in range(2):
        assert main(ask) == 0
        assert chat_model.roles.count("extract.triples") == 1
        assert triple in chat_model.asked[-1].text


def test_a_chat_model_and_a_graph_llm_share_the_work(serve, tmp_path, two_pages, chat_model, capsys):
    serve(Model(answer="Ida Morn"))
    both = ["--teacher", "openai", "--teacher-model", "m", "--model", str(tmp_path / "model")]
    assert main(["Who wrote Glass Harbour?", *both, *two_pages]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Answer: Ida Morn", "the Graph-LLM answers"


def test_a_threshold_of_a_chat_model_without_log_probabilities_costs_one_call(two_pages, chat_model, capsys):
    words = [*two_pages, "--llm", "openai:m", "--top-k", "1"]
    assert main(["Where was Ida Morn born?", *words, "--abstain", "0.5"]) == 1
    assert (
        "script sends no log-probabilities, which abstain compares: set confidence to support"
        in capsys.readouterr().err
    )
    assert chat_model.roles == ["ras.plan"]
    assert main(["Where was Ida Morn born?", *words, "--abstain", "0.5", "--confidence", "support"]) == 0


CITED = {"document": "novels.pdf", "page": 3}


@pytest.fixture
def asked(two_pages, tmp_path, monkeypatch):
    """The words of a call that answers three questions, one of which fails, and the client that replies."""
    rows = [json.loads(line) | CITED for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    write_lines(tmp_path / "corpus.jsonl", rows)
    write_lines(tmp_path / "q.jsonl", [{"id": n, "question": f"Who wrote book {n} of Ida Morn?"} for n in range(3)])
    failing = {"book 1"}

    def answer(call):
        if any(text in call.text for text in failing):
            return CallError("the server refused")
        return f"Morn {call.text.count('book')}"

    client = Client(answer=answer)
    client.failing = failing
    monkeypatch.setattr("tripletune.eval.systems.open_client", lambda options: client)
    monkeypatch.setattr("tripletune.rag.answering.open_client", lambda options: client)
    words = ["--questions", str(tmp_path / "q.jsonl"), "--output", str(tmp_path / "out"), "--price", "1,10"]
    return [*words, "--system", "standard", "--llm", "openai:m", *two_pages[:2], "--top-k", "1"], client


def test_a_file_of_questions_is_answered_and_only_what_failed_is_asked_again(asked, tmp_path, caplog):
    words, client = asked
    assert main(words) == 4
    assert "question 1 failed: CallError: the server refused" in caplog.text
    first, failed, last = read_lines(tmp_path / "out" / "answers.jsonl")
    assert (first["id"], first["question"], first["error"]) == ("0", "Who wrote book 0 of Ida Morn?", "")
    assert first["answer"].startswith("Morn")
    assert [(one["title"], one["document"], one["page"]) for one in first["sources"]] == [("Ida Morn", "novels.pdf", 3)]
    assert (first["calls"], first["rounds"], first["tokens"]) == (1, 1, {"read": 10, "written": 2})
    assert (first["dollars"], first["paid"], first["not_shown"]) == (0.00003, 0.00003, [])
    assert (failed["answer"], failed["error"]) == ("", "CallError: the server refused")
    before = len(client.asked)
    client.failing.clear()
    assert main(words) == 0
    assert len(client.asked) == before + 1
    again = read_lines(tmp_path / "out" / "answers.jsonl")
    assert [again[0], again[2]] == [first, last]
    assert again[1]["answer"]


def test_sources_are_what_the_reader_saw(asked, tmp_path):
    words, _ = asked
    main(words)
    rows = read_lines(tmp_path / "out" / "results.jsonl")

    def sources():
        write_lines(tmp_path / "out" / "results.jsonl", rows)
        write_answers(tmp_path / "out", {})
        return len(read_lines(tmp_path / "out" / "answers.jsonl")[0]["sources"])

    saw = [sources()]
    rows[0]["trace"]["shown"] = []  # no fact of the passage was in the prompt
    saw.append(sources())
    rows[0]["trace"]["details"]["unknown"] = ["shown"]
    assert [*saw, sources()] == [1, 0, 1]


def test_a_question_as_json_has_the_shape_of_a_file_s_answers(asked, tmp_path, capsys):
    words, client = asked
    client.failing.clear()
    assert main(words) == 0
    assert main(["Who wrote book 0 of Ida Morn?", *words[4:]]) == 0
    assert "  sources   [Ida Morn, p. 3]" in capsys.readouterr().out
    assert main(["Who wrote book 0 of Ida Morn?", "--json", *words[4:]]) == 0
    one, (many, *_) = json.loads(capsys.readouterr().out), read_lines(tmp_path / "out" / "answers.jsonl")
    own = ("id", "seconds")
    assert {name: value for name, value in one.items() if name not in own} == {
        name: value for name, value in many.items() if name not in own
    }


@pytest.mark.parametrize("words", [[], ["Why?", "--questions", "q.jsonl"], ["--questions", "q.jsonl"]])
def test_one_question_or_a_file_with_its_folder(words, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err == "error: give one question, or --questions FILE with its --output DIR\n"
