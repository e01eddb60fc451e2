from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tripletune.models.llm import ledger_cli, ledger_writer
from tripletune.models.llm.client import Sampling
from tripletune.models.llm.ledger import Ledger, call_of_json, make_call, sampling_of
from tripletune.models.llm.ledger_file import APPLICATION_ID, SCHEMA_VERSION, LedgerError
from tripletune.models.local.generation import Completion

ROOT = Path(__file__).resolve().parents[3]
MODEL = "openai:m"


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def call(text: str, **sampling):
    return make_call(MODEL, Sampling(**sampling), chat(text))


def reply(text: str = "yes") -> Completion:
    return Completion(text, 10, 2, 0.5, finish_reason="length", retries=3)


def fill(path: Path, *texts: str, role: str = "r", question: str = "q") -> None:
    async def run() -> None:
        with Ledger(path) as ledger:
            for text in texts:
                await ledger.put(call(text), reply(f"re: {text}"), role, question)

    asyncio.run(run())


def rows(path: Path, query: str) -> list[tuple]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "ledger.sqlite"


# Keys.


def test_a_key_is_the_same_for_ever():
    # Written down here: a change of this value makes every ledger out there useless.
    assert call("hello").key == "1d8e0b4e58c5f5571eda253e6b785275a69a5adc"
    assert call("hello", schema="{}").key != call("hello").key


@pytest.mark.parametrize(
    "other",
    [
        make_call("openai:n", Sampling(), chat("a")),
        make_call(MODEL, Sampling(temperature=0.5), chat("a")),
        make_call(MODEL, Sampling(seed=1), chat("a")),
        make_call(MODEL, Sampling(stop=("x",)), chat("a")),
        make_call(MODEL, Sampling(), chat("b")),
        make_call(MODEL, Sampling(), chat("a") * 2),
        make_call(MODEL, Sampling(), [{"role": "system", "content": "a"}]),
    ],
)
def test_whatever_changes_the_reply_changes_the_key(other):
    assert other.key != call("a").key


def test_equal_calls_have_equal_keys():
    turned = [{"content": "a", "role": "user"}]
    assert make_call(MODEL, Sampling(temperature=0, top_p=1), turned) == call("a")


@given(st.text(st.characters(exclude_categories=["Cs"])), st.floats(0, 2), st.lists(st.text("ab"), max_size=2))
def test_a_call_is_read_back_from_what_is_stored(text, temperature, stop):
    made = call(text, temperature=temperature, stop=tuple(stop))
    assert call_of_json(made.model, made.sampling, made.messages) == made
    again = make_call(made.model, sampling_of(made.sampling), json.loads(made.messages))
    assert again == made
    assert len(made.key) <= 64


def test_half_a_character_is_refused_by_name():
    with pytest.raises(ValueError, match=r"half a character \(U\+D83D\)"):
        call("\ud83d")


# Storing.


def test_what_is_put_is_read_back_by_another_process(path):
    fill(path, "a\0b", "日本 🙂")
    with Ledger(path) as ledger:
        found = ledger.get(call("日本 🙂").key)
        assert found == Completion("re: 日本 🙂", 10, 2, 0.5, 0, "length", 3, True)
        assert ledger.get(call("a\0b").key).text == "re: a\0b"
        assert ledger.get(call("c").key) is None


def test_the_first_reply_wins(path):
    async def run() -> tuple[Completion, Completion]:
        with Ledger(path) as one, Ledger(path) as two:
            return await one.put(call("a"), reply("1"), "r"), await two.put(call("a"), reply("2"), "r")

    first, second = asyncio.run(run())
    assert (first.text, second.text) == ("1", "1")
    assert not second.cached


def test_many_puts_at_once_are_all_there(path):
    async def run() -> None:
        with Ledger(path) as ledger:
            await asyncio.gather(*(ledger.put(call(str(n)), reply(str(n)), "r", str(n)) for n in range(1500)))
            assert ledger.get(call("1499").key).text == "1499"

    asyncio.run(run())
    assert rows(path, "SELECT count(*) FROM calls") == [(1500,)]
    assert rows(path, "SELECT count(*) FROM uses") == [(1500,)]


def test_a_bad_row_costs_the_others_nothing(path):
    async def run() -> list:
        with Ledger(path) as ledger:
            puts = [ledger.put(call(text), reply(answer), "r") for text, answer in (("a", "1"), ("b", "\ud800"))]
            return await asyncio.gather(*puts, return_exceptions=True)

    good, bad = asyncio.run(run())
    assert good.text == "1"
    assert isinstance(bad, UnicodeEncodeError)
    assert rows(path, "SELECT text FROM calls") == [("1",)]


def test_a_write_that_must_wait_for_another_process_is_done_by_the_thread(path):
    async def run() -> None:
        with Ledger(path) as ledger:
            other = sqlite3.connect(path, isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            put = asyncio.create_task(ledger.put(call("a"), reply("1"), "r"))
            # The loop is free while the file is taken.
            for _ in range(5):
                await asyncio.sleep(0.01)
            assert not put.done()
            other.execute("COMMIT")
            other.close()
            assert (await put).text == "1"
            await ledger.put(call("b"), reply("2"), "r")

    asyncio.run(run())
    assert rows(path, "SELECT text FROM calls ORDER BY id") == [("1",), ("2",)]


def test_the_wal_is_moved_while_the_loop_writes(path, monkeypatch):
    monkeypatch.setattr(ledger_writer, "_MOVE_AFTER", 50)
    sizes = []

    async def run() -> None:
        with Ledger(path) as ledger:
            for start in range(0, 600, 50):
                await asyncio.gather(
                    *(ledger.put(call(str(n)), reply("x" * 2000), "r") for n in range(start, start + 50))
                )
                # The second comes behind all that the thread does with the first.
                ledger.transact(lambda connection: None)
                ledger.transact(lambda connection: None)
                sizes.append(Path(f"{path}-wal").stat().st_size)

    asyncio.run(run())
    assert rows(path, "SELECT count(*) FROM calls") == [(600,)]
    # Its pages are used again: without that it would be twelve times as long at the end.
    assert sizes[-1] < 3 * sizes[0]


def test_what_waits_when_the_loop_ends_is_stored_by_close(path):
    ledger = Ledger(path)

    async def run() -> None:
        task = asyncio.create_task(ledger.put(call("a"), reply("1"), "r"))
        await asyncio.sleep(0)
        ledger.use(call("a").key, "again", "q")
        task.cancel()

    asyncio.run(run())
    ledger.close()
    assert rows(path, "SELECT text FROM calls") == [("1",)]


def test_a_put_is_stored_though_its_task_was_cancelled(path):
    async def run() -> None:
        with Ledger(path) as ledger:
            task = asyncio.create_task(ledger.put(call("a"), reply(), "r"))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    assert rows(path, "SELECT text FROM calls") == [("yes",)]


def test_a_failure_is_no_reply_and_gives_way_to_one(path):
    async def run() -> None:
        with Ledger(path) as ledger:
            await ledger.fail(call("a"), "no such model", 0, "r", "q")
            assert ledger.get(call("a").key) is None
            assert ledger.state(call("a").key) == ("failed", "no such model")
            await ledger.put(call("a"), reply("1"), "r", "q")
            await ledger.fail(call("a"), "gone", 0, "r", "q")
            assert ledger.get(call("a").key).text == "1"

    asyncio.run(run())
    assert rows(path, "SELECT status, detail FROM calls") == [("ok", "")]


def test_a_pending_call_gives_way_to_its_reply_alone(path):
    async def run() -> None:
        with Ledger(path) as ledger:
            await ledger.wait_for(call("a"))
            ledger.transact(lambda connection: connection.execute("UPDATE calls SET detail = 'file'"))
            await ledger.wait_for(call("a"))
            await ledger.fail(call("a"), "x", 0, "r")
            assert ledger.state(call("a").key) == ("pending", "file")
            await ledger.put(call("a"), reply("1"), "r")
            assert ledger.state(call("a").key) == ("ok", "")

    asyncio.run(run())


def test_uses_keep_role_question_and_order(path):
    fill(path, "a", "b", role="first", question="q1")
    with Ledger(path) as ledger:
        for role, question in (("second", "q2"), ("first", "q1"), ("second", "q2"), ("third", "")):
            ledger.use(call("a").key, role, question)
    found = rows(path, "SELECT key, role, question_id FROM uses JOIN calls ON calls.id = call_id ORDER BY uses.id")
    a, b = call("a").key, call("b").key
    assert found == [(a, "first", "q1"), (b, "first", "q1"), (a, "second", "q2"), (a, "third", "")]


def test_a_writer_that_cannot_start_is_told_at_once(path, monkeypatch):
    def refuse(*_):
        raise sqlite3.OperationalError("too many open files")

    monkeypatch.setattr(ledger_writer, "connect", refuse)
    with pytest.raises(LedgerError, match="too many open files"):
        Ledger(path)


def test_a_closed_ledger_says_so(path):
    ledger = Ledger(path)
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerError, match="is closed"):
        ledger.transact(lambda connection: None)


# Processes.

WRITER = """
import asyncio, sys
from tripletune.models.local.generation import Completion
from tripletune.models.llm.client import Sampling
from tripletune.models.llm.ledger import Ledger, make_call

async def main(path):
    with Ledger(path) as ledger:
        async def one(n):
            call = make_call("openai:m", Sampling(), [{"role": "user", "content": str(n)}])
            await ledger.put(call, Completion(str(n)), "r", str(n))
            print(n, flush=True)
        for start in range(0, 10**6, 8):
            await asyncio.gather(*(one(n) for n in range(start, start + 8)))

asyncio.run(main(sys.argv[1]))
"""


def test_what_a_caller_has_seen_outlives_kill_9(path):
    process = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    seen = [int(process.stdout.readline()) for _ in range(100)]
    os.kill(process.pid, signal.SIGKILL)
    seen += [int(line) for line in process.stdout.read().splitlines() if line]
    process.wait()
    with Ledger(path) as ledger:
        assert all(ledger.get(call(str(n)).key).text == str(n) for n in seen)
    assert list(ledger_cli.troubles(path)) == []


def _write_many(path: str, name: str, start) -> None:
    async def run() -> None:
        start.wait()
        with Ledger(path) as ledger:
            texts = [await ledger.put(call(str(n)), reply(name), "r", name) for n in range(60)]
            Path(f"{path}.{name}").write_text(json.dumps([one.text for one in texts]))

    asyncio.run(run())


def test_processes_on_one_file_see_the_same_replies(path):
    path.parent.mkdir()
    context = multiprocessing.get_context("fork")
    start = context.Barrier(3)
    processes = [context.Process(target=_write_many, args=(str(path), name, start)) for name in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    one, two, three = (json.loads(Path(f"{path}.{name}").read_text()) for name in "abc")
    assert one == two == three
    assert rows(path, "SELECT count(*) FROM calls") == [(60,)]
    assert rows(path, "SELECT count(*) FROM uses") == [(180,)]


# Files that are no ledger.


def other_database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE other (x)")
    connection.close()


def newer(path: Path) -> None:
    Ledger(path).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_text("some text " * 200), "not a database"),
        (other_database, "no ledger; name another file"),
        (newer, "schema 2, this version of TripleTune knows 1: update it"),
        (lambda path: path.mkdir(), "is a folder"),
    ],
)
def test_a_file_that_is_no_ledger_is_refused(tmp_path, make, words):
    path = tmp_path / "x.sqlite"
    make(path)
    with pytest.raises(LedgerError, match=words):
        Ledger(path)


def test_a_damaged_ledger_is_noticed(path, capsys):
    fill(path, *(str(n) * 300 for n in range(40)))
    data = bytearray(path.read_bytes())
    data[8192:40960] = os.urandom(32768)
    path.write_bytes(data)
    code = ledger_cli_code(["verify", str(path)])
    output = capsys.readouterr()
    assert code in (1, 2)
    assert "SQLite" in output.out or "error: " in output.err


def test_a_ledger_is_marked_as_ours(path):
    Ledger(path).close()
    assert rows(path, "PRAGMA application_id") == [(APPLICATION_ID,)]
    assert rows(path, "PRAGMA journal_mode") == [("wal",)]


# The command line.


def ledger_cli_code(arguments: list[str]) -> int:
    try:
        return ledger_cli.main(arguments)
    except SystemExit as error:
        return int(error.code or 0)


@pytest.fixture
def filled(path: Path) -> Path:
    fill(path, "a", "b", role="one")
    fill(path, "c", role="two")

    async def more() -> None:
        with Ledger(path) as ledger:
            await ledger.fail(call("d"), "too long", 0, "two", "q9")
            await ledger.wait_for(call("e"))
            ledger.use(call("a").key, "two", "q7")

    asyncio.run(more())
    return path


def test_statistics_are_by_model_and_role(filled):
    found = {row["role"]: row for row in ledger_cli.statistics(filled)}
    one, two, none = found["one"], found["two"], found[""]
    assert (one["calls"], one["prompt_tokens"], one["completion_tokens"]) == (2, 20, 4)
    assert (one["retries"], one["seconds"], one["uses"]) == (6, 1.0, 2)
    # The call of role "one" that "two" used again is paid for once and used twice.
    assert (two["calls"], two["failed"], two["prompt_tokens"], two["uses"]) == (1, 1, 10, 3)
    assert (none["pending"], none["calls"]) == (1, 0)


def test_stats_prints_a_table(filled, capsys):
    assert ledger_cli.main(["stats", str(filled)]) == 0
    output = capsys.readouterr().out
    assert "completion tokens" in output
    assert [line for line in output.splitlines() if "openai:m" in line and " two " in line]
    assert ledger_cli.main(["stats", "--json", str(filled)]) == 0
    assert json.loads(capsys.readouterr().out) == ledger_cli.statistics(filled)


def test_an_empty_ledger_has_statistics(path, capsys):
    Ledger(path).close()
    assert ledger_cli.main(["stats", str(path)]) == 0
    assert "all" in capsys.readouterr().out


def test_export_and_import_give_the_same_ledger(filled, tmp_path, capsys):
    out, copy = tmp_path / "calls.jsonl", tmp_path / "copy.sqlite"
    assert ledger_cli.main(["export", str(filled), "--output", str(out)]) == 0
    assert ledger_cli.main(["import", str(copy), str(out)]) == 0
    assert "4 calls are new, 0 were there" in capsys.readouterr().out
    assert ledger_cli.main(["import", str(copy), str(out)]) == 0
    assert "0 calls are new, 4 were there" in capsys.readouterr().out
    assert ledger_cli.main(["export", str(copy)]) == 0
    assert capsys.readouterr().out == out.read_text(encoding="utf-8")
    assert ledger_cli.main(["verify", str(copy)]) == 0


def test_export_takes_a_role_and_a_model(filled, capsys):
    ledger_cli.main(["export", str(filled), "--role", "two"])
    texts = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert texts == ["re: a", "re: c", ""]
    ledger_cli.main(["export", str(filled), "--model", "openai:other"])
    assert capsys.readouterr().out == ""


def test_import_keeps_what_is_there(path, tmp_path):
    other, out = tmp_path / "other.sqlite", tmp_path / "calls.jsonl"
    fill(path, "a")
    fill(other, "a", "b")
    ledger_cli.main(["export", str(other), "--output", str(out)])
    out.write_text(out.read_text().replace("re: ", "other: "))
    ledger_cli.main(["import", str(path), str(out)])
    assert rows(path, "SELECT text FROM calls ORDER BY id") == [("re: a",), ("other: b",)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda line: line[:-5], "line 2: "),
        (lambda line: "[]", "line 2: it is not a JSON object"),
        (lambda line: line.replace('"prompt_tokens": 10', '"prompt_tokens": "x"'), "'prompt_tokens' is missing or"),
        (lambda line: line.replace('"prompt_tokens": 10', '"prompt_tokens": -1'), "negative or too large"),
        (lambda line: line.replace('"status": "ok"', '"status": "new"'), "status 'new' is not one of"),
        (lambda line: line.replace('"content": "b"', '"content": "x"'), "line 2: its key is not that of"),
        (lambda line: line.replace('"temperature": 0.0', '"temperature": -1'), "line 2: temperature -1"),
        (lambda line: line.replace("re: b", "\\ud800"), "line 2: 'utf-8' codec"),
        (lambda line: line.replace('[["one", "q"]]', '[["one"]]'), "a use is not a pair"),
    ],
)
def test_a_bad_line_is_named(filled, tmp_path, capsys, change, words):
    out = tmp_path / "calls.jsonl"
    ledger_cli.main(["export", str(filled), "--output", str(out)])
    lines = out.read_text(encoding="utf-8").splitlines()
    changed = change(lines[1])
    assert changed != lines[1]
    out.write_text("\n".join([lines[0], changed, *lines[2:]]), encoding="utf-8")
    assert ledger_cli_code(["import", str(tmp_path / "copy.sqlite"), str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error
    assert error.count("\n") == 1


@given(st.text(max_size=80))
def test_any_line_is_read_or_refused(text):
    with pytest.raises(ValueError, match="file, line 1: "):
        ledger_cli._read_line(text, "file, line 1")


def test_verify_finds_a_changed_row(filled, capsys):
    connection = sqlite3.connect(filled)
    connection.execute("UPDATE calls SET messages = replace(messages, 'b', 'x') WHERE text = 're: b'")
    connection.commit()
    connection.close()
    assert ledger_cli.main(["verify", str(filled)]) == 1
    output = capsys.readouterr().out
    assert f"call {call('b').key}: its key is not that of" in output
    assert "1 troubles; calls: 3 ok, 1 failed, 1 pending" in output


def test_a_ledger_that_is_not_there_is_one_line(path):
    done = subprocess.run(
        [sys.executable, "-m", "tripletune.models.llm.ledger", "stats", str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert done.stderr == f"error: no such ledger: {path}\n"
    assert not path.parent.exists()
