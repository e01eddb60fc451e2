"""Open questions about a corpus: users x tasks x questions."""

import json

import pytest

from tests.cli import read_lines, run, write_lines
from tests.fakes import Backend
from tripletune.core.calls import UnusableReply
from tripletune.data_builders.questions import open_questions
from tripletune.data_builders.questions.open_questions import OpenOptions, drawn_excerpts, read_list
from tripletune.data_builders.readers import get_reader
from tripletune.llm.ledger import Ledger
from tripletune.llm.ledger_client import LedgerClient

CORPUS = [{"title": f"T{number}", "text": f"Text {number} about bees."} for number in range(30)]


def reply(messages):
    """A model that numbers what it names, and asks the same first question for every task."""
    system = messages[0]["content"]
    turn = messages[1]["content"]
    if system.startswith("You describe"):
        assert turn.count("about bees") == 10
        return "A collection about bees."
    assert "A collection about bees." in turn
    if "Name the kinds of people" in system:
        return json.dumps(["A keeper.", "A student.", "One too many."])
    user = turn.partition("User: ")[2].partition("\n")[0]
    if "Name tasks" in system:
        return f'Tasks of {user}:\n```json\n["{user} plans.", "{user} compares."]\n```'
    task = turn.partition("Task: ")[2].partition("\n")[0]
    if task == "A student. compares.":
        return "I can't think of any."
    return json.dumps(["How do bees live?", f"Why does this matter: {task}?"])


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Runs the program with two users, tasks and questions; returns its result and the questions."""
    calls = []
    backend = Backend("openai:m", lambda messages: calls.append(messages) or reply(messages))
    monkeypatch.setattr(open_questions, "open_client", lambda llm: LedgerClient(backend, Ledger(llm.ledger)))
    corpus = write_lines(tmp_path / "corpus.jsonl", CORPUS)

    def start():
        words = ["--corpus", corpus, "--output", tmp_path / "open.jsonl", "--llm", "openai:m", "--excerpts", "10"]
        done = run("build open-questions", *words, "--users", "2", "--tasks", "2", "--questions", "2")
        return done, len(calls)

    return start


def test_users_tasks_and_questions_are_asked_once_and_counted(build, tmp_path):
    done, calls = build()
    assert done.code == 0, done.error
    # A description, the users, two lists of tasks, four of questions, and one more try for the unreadable one.
    assert calls == 1 + 1 + 2 + 4 + 1
    rows = read_lines(tmp_path / "open.jsonl")
    assert [row["question"] for row in rows] == [
        "How do bees live?", "Why does this matter: A keeper. plans.?", "Why does this matter: A keeper. compares.?",
        "Why does this matter: A student. plans.?",
    ]  # fmt: skip
    assert rows[2] | {"user": "A keeper.", "task": "A keeper. compares."} == rows[2]
    assert "questions 4" in done.err
    assert "repeated others 4" in done.err
    questions = list(get_reader("qa")(str(tmp_path / "open.jsonl")))
    assert [question.answers for question in questions] == [()] * 4
    _, again = build()
    assert again == calls, "the ledger has all replies"


def test_excerpts_come_from_the_whole_corpus_in_its_order(tmp_path):
    corpus = write_lines(tmp_path / "corpus.jsonl", CORPUS)
    options = OpenOptions(str(corpus), "o", excerpts=8, excerpt_characters=6, seed=1)
    excerpts = drawn_excerpts(options)
    numbers = [int(excerpt.partition("\n")[0].removeprefix("T")) for excerpt in excerpts]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 8
    assert max(numbers) > 15, "not only the first passages"
    assert all(len(excerpt) <= 6 for excerpt in excerpts)


def test_a_list_with_too_few_different_texts_is_unusable():
    assert read_list('Sure: ["a b", "c", "d"]', 2) == ["a b", "c"]
    with pytest.raises(UnusableReply) as error:
        read_list('["A b", "a  B", ""]', 2)
    assert "1 different texts instead of 2" in error.value.explanation
