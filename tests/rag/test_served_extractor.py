"""A trained extractor on a server reads in the loop, with the instruction of its training."""

import pytest

from tests.cli import write_lines
from tests.fakes import Client
from tripletune.llm.backends import LLMOptions
from tripletune.rag.ask import ask_question
from tripletune.rag.served_extractor import is_served, open_served_extractor
from tripletune.rag.system_options import SystemOptions

TRIPLE = "(S> Ida Morn| P> born in| O> Velsund)"
SPEC = "openai:ext@http://127.0.0.1:9/v1"


@pytest.fixture
def clients(monkeypatch):
    """The chat model that plans and answers, and the server of the extractor."""
    chat = Client(answer=lambda asked: "Velsund" if asked.role == "ras.answer" else "[SUFFICIENT]")
    server = Client(answer=lambda asked: TRIPLE)
    monkeypatch.setattr("tripletune.rag.answering.open_client", lambda options: chat)
    monkeypatch.setattr("tripletune.rag.served_extractor.open_client", lambda options: server)
    return chat, server


@pytest.fixture
def corpus(tmp_path):
    write_lines(tmp_path / "corpus.jsonl", [{"title": "Ida Morn", "text": "Born in Velsund."}])
    return str(tmp_path / "corpus.jsonl")


def test_it_reads_each_passage_with_the_prompt_of_its_training(tmp_path, corpus, clients):
    chat, server = clients
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "prompt.md").write_text("Write the facts down.\n", encoding="utf-8")
    options = SystemOptions.of(
        corpus=corpus, triples=str(tmp_path / "t.sqlite"), extractor=SPEC,
        extractor_set=(f"prompt={tmp_path / 'export'}",), planning="no",
    )  # fmt: skip
    for _ in range(2):
        ask_question("Where was Ida Morn born?", options, LLMOptions(backend="openai", model="m"), {})
    (asked,) = server.asked
    assert [message["content"] for message in asked.messages] == [
        "Write the facts down.", "Ida Morn: Born in Velsund."
    ]  # fmt: skip
    assert TRIPLE in chat.asked[-1].text


def test_without_a_prompt_it_gets_the_default_of_training(clients):
    from tripletune.core.data.pairs import load_instruction

    assert open_served_extractor(SPEC).instruction == load_instruction()


@pytest.mark.parametrize(
    ("setting", "message"),
    [("prompt=nowhere.md", "there is no nowhere.md"), ("beams=4", "beams"), ("max_tokens=0", "max_tokens")],
)
def test_options_that_a_server_cannot_take_are_refused(clients, setting, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        open_served_extractor(SPEC, (setting,))


def test_folders_and_packages_are_not_servers():
    names = ["runs/ext", "pypi:some-package", "owner/name", "teacher", "hf:runs/ext", "1"]
    assert not any(map(is_served, names))
    assert is_served(SPEC)
