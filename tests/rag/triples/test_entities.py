import csv

import pytest

import tripletune.rag.triples.entities as entities_command
from tests.cli import write_lines
from tests.fakes import Client
from tripletune.rag.__main__ import main

ROWS = [
    {"title": "", "text": "one", "triples": [["Denver", "lies in", "U.S."], ["Ada", "lives in", "Denver, Colorado"]]},
    {"title": "", "text": "two", "triples": [["Denver", "is", "city"], ["Bo", "left", "US"], ["Bo", "left", "Rome"]]},
    {
        "title": "",
        "text": "three",
        "triples": [["US", "is", "large"], ["Rome", "is", "old"], ["Cy", "saw", "Rome, Georgia"]],
    },
]


@pytest.fixture
def clients(monkeypatch):
    """The clients that a command opens; the model says that the first pair of names is one entity."""
    opened = []

    def open_client(options):
        opened.append(Client(answer=lambda asked: "[1]"))
        opened[-1].options = options
        return opened[-1]

    monkeypatch.setattr(entities_command, "open_client", open_client)
    return opened


def run(tmp_path, *more, output="entities.tsv"):
    triples = write_lines(tmp_path / "triples.jsonl", ROWS)
    code = main(["entities", "--triples", str(triples), "--output", str(tmp_path / output), *more])
    if code:
        return code
    with (tmp_path / output).open(newline="") as file:
        return {row["name"]: row for row in csv.DictReader(file, delimiter="\t")}


def test_proposals_are_written_for_a_person(tmp_path):
    rows = run(tmp_path)
    assert [(row["merge"], row["name"], row["into"], row["why"]) for row in rows.values()] == [
        ("no", "Denver, Colorado", "Denver", "comma"),
        ("no", "Rome, Georgia", "Rome", "comma"),
        ("yes", "U.S.", "US", "signs"),
    ]
    assert rows["U.S."]["example"] == "Denver | lies in | U.S."
    assert (rows["U.S."]["passages"], rows["U.S."]["passages_into"]) == ("1", "2")


def test_a_chat_model_decides_the_doubtful_pairs_within_its_budget(tmp_path, clients, capsys):
    rows = run(tmp_path, "--llm", "openai:m", "--budget", "1")
    assert (rows["Denver, Colorado"]["merge"], rows["Denver, Colorado"]["why"]) == ("yes", "comma; the model says yes")
    assert (rows["Rome, Georgia"]["merge"], rows["Rome, Georgia"]["why"]) == ("no", "comma; the model says no")
    (asked,) = clients[0].asked
    assert (
        asked.text.splitlines()[0]
        == '1. "Denver, Colorado" (Ada lives in Denver, Colorado) / "Denver" (Denver lies in U.S.)'
    )
    assert "U.S. Congress" not in asked.text
    assert clients[0].options.ledger == f"{tmp_path / 'entities.tsv'}.ledger.sqlite"


def test_decisions_are_never_lost(tmp_path, capsys):
    run(tmp_path)
    path = tmp_path / "entities.tsv"
    path.write_text(
        path.read_text().replace("no\tDenver, Colorado", "yes\tDenver, Colorado").replace("yes\tU.S.", "no\tU.S.")
    )
    assert run(tmp_path) == 2
    assert "may hold your decisions" in capsys.readouterr().err
    rows = run(tmp_path, "--decided", str(path), output="again.tsv")
    assert {name: row["merge"] for name, row in rows.items()} == {
        "Denver, Colorado": "yes", "U.S.": "no", "Rome, Georgia": "no",
    }  # fmt: skip
