import asyncio
import errno
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli import run, sql
from tripletune.core.calls import Completion, Sampling
from tripletune.core.sqlite import UnusableFile
from tripletune.llm.ledger import LEDGER, Ledger, make_call, sampling_of, seed_repeats
from tripletune.llm.programs import ledger_troubles

ROOT = Path(__file__).resolve().parents[3]
MODEL = "openai:m"


def chat(text):
    return [{"role": "user", "content": text}]


def call(text, **sampling):
    return make_call(MODEL, Sampling(**sampling), chat(text))


def reply(text="yes"):
    return Completion(text, 10, 2, 0.5, finish_reason="length", retries=3)


def put(ledger, *what):
    return asyncio.run(ledger.store(*what))


def fill(path, *texts, role="r", question="q"):
    with Ledger(path) as ledger:
        for text in texts:
            put(ledger, call(text), reply(f"re: {text}"), role, question)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "ledger.sqlite"


def test_equal_replies_of_different_seeds_are_counted(path):
    with Ledger(path) as ledger:
        for seed, said in enumerate(("a", "a", "b")):
            put(ledger, call("x", temperature=1.0, seed=seed), reply(said), "r", "q")
            put(ledger, call("y", temperature=0.0, seed=seed), reply("greedy"), "r", "q")
        put(ledger, call("z", temperature=1.0, seed=0), reply("a"), "r", "q")
    assert seed_repeats(path) == seed_repeats(path, ["r"]) == (3, 1)
    assert seed_repeats(path, ["other"]) == (0, 0)
    said = "3 calls differ only in their seed; 1 of them have the reply of another seed"
    assert said in run("ledger", "stats", path).out


# Keys.


def test_a_key_is_the_same_for_ever():
    # Written down here: a change of this value makes every ledger out there useless.
    assert call("hello").key == "1d8e0b4e58c5f5571eda253e6b785275a69a5adc"
    # The same of triple stores, whose key is not sorted.
    assert list(Sampling(schema="{}").to_json()) == ["temperature", "top_p", "max_tokens", "stop", "seed", "schema"]


def test_whatever_changes_the_reply_changes_the_key():
    others = [
        make_call("openai:n", Sampling(), chat("a")),
        *(call("a", **other) for other in ({"temperature": 0.5}, {"seed": 1}, {"schema": "{}"})),
        call("b"),
        make_call(MODEL, Sampling(), chat("a") * 2),
        make_call(MODEL, Sampling(), [{"role": "system", "content": "a"}]),
    ]
    assert len({call("a").key, *(other.key for other in others)}) == len(others) + 1
    assert make_call(MODEL, Sampling(temperature=0, top_p=1), [{"content": "a", "role": "user"}]) == call("a")


@given(st.text(st.characters(exclude_categories=["Cs"])), st.floats(0, 2))
def test_a_call_is_read_back_from_what_is_stored(text, temperature):
    made = call(text, temperature=temperature)
    assert make_call(made.model, made.sampling, made.messages) == made
    again = make_call(made.model, sampling_of(made.sampling), json.loads(made.messages))
    assert again == made
    assert len(made.key) <= 64


# Storing.


def test_what_is_put_is_read_back_by_another_process(path):
    fill(path, "a\0b", "日本 🙂")
    with Ledger(path) as ledger:
        found = ledger.get(call("日本 🙂").key)
        assert found == Completion("re: 日本 🙂", 10, 2, 0.5, 0, "length", 3, True, key=found.key)
        assert found.key == call("日本 🙂").key
        assert ledger.get(call("a\0b").key).text == "re: a\0b"
        assert ledger.get(call("c").key) is None


def test_the_first_reply_wins(path):
    with Ledger(path) as one, Ledger(path) as two:
        first, second = put(one, call("a"), reply("1"), "r"), put(two, call("a"), reply("2"), "r")
    assert (first.text, second.text) == ("1", "1")
    assert not second.cached


def test_a_reply_is_in_the_file_before_a_caller_goes_on(path):
    async def store(ledger, n):
        kept = await ledger.store(call(str(n)), reply(f"re: {n}"), "r", str(n))
        assert (kept.text,) in sql(path, "SELECT text FROM calls")

    async def run():
        with Ledger(path) as ledger:
            await asyncio.gather(*(store(ledger, n) for n in range(5)), store(ledger, 2))

    asyncio.run(run())
    assert len(sql(path, "SELECT text FROM calls")) == 5


def test_a_bad_row_costs_the_others_nothing(path):
    with Ledger(path) as ledger:
        put(ledger, call("a"), reply("1"), "r")
        with pytest.raises(UnusableFile):
            put(ledger, call("b"), replace(reply(), seconds=None), "r")
        put(ledger, call("c"), reply("3"), "r")
    assert sql(path, "SELECT text FROM calls") == [("1",), ("3",)]


def test_a_failure_is_no_reply_and_gives_way_to_one(path):
    with Ledger(path) as ledger:
        ledger.fail(call("a"), "no such model", 0, "r", "q")
        assert ledger.get(call("a").key) is None
        assert ledger.state(call("a").key) == ("failed", "no such model")
        put(ledger, call("a"), reply("1"), "r", "q")
        ledger.fail(call("a"), "gone", 0, "r", "q")
        assert ledger.get(call("a").key).text == "1"
    assert sql(path, "SELECT status, detail FROM calls") == [("ok", "")]


def test_a_pending_call_gives_way_to_its_reply_alone(path):
    with Ledger(path) as ledger:
        ledger.wait_for(call("a"))
        with ledger.transaction() as connection:
            connection.execute("UPDATE calls SET detail = 'file'")
        ledger.wait_for(call("a"))
        ledger.fail(call("a"), "x", 0, "r")
        assert ledger.state(call("a").key) == ("pending", "file")
        put(ledger, call("a"), reply("1"), "r")
        assert ledger.state(call("a").key) == ("ok", "")


def test_uses_keep_role_question_and_order(path):
    fill(path, "a", "b", role="first", question="q1")
    with Ledger(path) as ledger:
        for role, question in (("second", "q2"), ("first", "q1"), ("second", "q2"), ("third", "")):
            ledger.use(call("a").key, role, question)
    found = sql(path, "SELECT key, role, question_id FROM uses JOIN calls ON calls.id = call_id ORDER BY uses.id")
    a, b = call("a").key, call("b").key
    assert found == [(a, "first", "q1"), (b, "first", "q1"), (a, "second", "q2"), (a, "third", "")]


def test_a_full_disk_is_reported_as_such(path):
    with Ledger(path) as ledger:
        put(ledger, call("a"), reply("1"), "r")
        with ledger.transaction() as connection:
            pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(OSError, match="can't be written") as caught:
            put(ledger, call("b"), reply("x" * 10**6), "r")
        assert caught.value.errno == errno.ENOSPC
        assert ledger.get(call("a").key).text == "1"


def test_a_closed_ledger_says_so_and_an_unused_one_leaves_no_file(path):
    ledger = Ledger(path)
    ledger.close()
    ledger.close()
    with pytest.raises(UnusableFile, match="is closed"):
        ledger.get("x")
    assert not path.parent.exists()


# Processes.

WRITER = """
import asyncio
import sys
from tripletune.core.calls import Completion
from tripletune.core.calls import Sampling
from tripletune.llm.ledger import Ledger, make_call

with Ledger(sys.argv[1]) as ledger:
    for n in range(10**6):
        call = make_call("openai:m", Sampling(), [{"role": "user", "content": str(n)}])
        asyncio.run(ledger.store(call, Completion(str(n)), "r", str(n)))
        print(n, flush=True)
"""


def test_what_a_caller_has_seen_outlives_kill_9(path):
    process = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    seen = [int(process.stdout.readline()) for _ in range(100)]
    os.kill(process.pid, signal.SIGKILL)
    seen += [int(line) for line in process.stdout.read().splitlines() if line]
    process.wait()
    with Ledger(path) as ledger:
        assert all(ledger.get(call(str(n)).key).text == str(n) for n in seen)
    assert list(ledger_troubles(path)) == []


def _write_many(path, name, start):
    start.wait()
    with Ledger(path) as ledger:
        texts = [put(ledger, call(str(n)), reply(name), "r", name) for n in range(60)]
        Path(f"{path}.{name}").write_text(json.dumps([one.text for one in texts]))


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
    assert sql(path, "PRAGMA application_id") == [(LEDGER.application,)]
    assert sql(path, "SELECT count(*) FROM calls") == [(60,)]
    assert sql(path, "SELECT count(*) FROM uses") == [(180,)]


# Damage.


def test_a_damaged_ledger_is_noticed(path):
    fill(path, *(str(n) * 300 for n in range(40)))
    data = bytearray(path.read_bytes())
    data[8192:40960] = os.urandom(32768)
    path.write_bytes(data)
    ran = run("ledger", "verify", path)
    assert ran.code in (1, 2)
    assert "SQLite" in ran.out or "error: " in ran.err


# The command line.


@pytest.fixture
def filled(path):
    fill(path, "a", "b", role="one")
    fill(path, "c", role="two")

    with Ledger(path) as ledger:
        ledger.fail(call("d"), "too long", 0, "two", "q9")
        ledger.wait_for(call("e"))
        ledger.use(call("a").key, "two", "q7")
    return path


def test_statistics_are_by_model_and_role(filled):
    assert "completion tokens" in run("ledger", "stats", filled).out
    found = {row["role"]: row for row in json.loads(run("ledger", "stats", "--json", filled).out)}
    one, two, none = found["one"], found["two"], found[""]
    assert (one["calls"], one["prompt_tokens"], one["completion_tokens"]) == (2, 20, 4)
    assert (one["retries"], one["seconds"], one["uses"]) == (6, 1.0, 2)
    # The call of role "one" that "two" used again is paid for once and used twice.
    assert (two["calls"], two["failed"], two["prompt_tokens"], two["uses"]) == (1, 1, 10, 3)
    assert (none["pending"], none["calls"]) == (1, 0)


def test_export_and_import_give_the_same_ledger(filled, tmp_path):
    out, copy = tmp_path / "calls.jsonl", tmp_path / "copy.sqlite"
    run("ledger", "export", filled, "--output", out)
    assert "4 calls are new, 0 were known" in run("ledger", "import", copy, out).out
    assert "0 calls are new, 4 were known" in run("ledger", "import", copy, out).out
    assert run("ledger", "export", copy).out == out.read_text(encoding="utf-8")
    assert run("ledger", "verify", copy).code == 0


def test_a_file_without_calls_is_refused_and_makes_no_ledger(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "holds no calls" in run("ledger", "import", tmp_path / "new.sqlite", tmp_path / "empty.jsonl").error
    assert not (tmp_path / "new.sqlite").exists()


def test_export_of_a_role_takes_the_roles_below_it(path):
    for role, text in (
        ("t2rag.resolve", "a"),
        ("t2rag.resolve.repair", "b"),
        ("t2rag_long", "c"),
        ("t2ragXresolve", "d"),
    ):
        fill(path, text, role=role)

    def texts(role):
        return [json.loads(line)["text"] for line in run("ledger", "export", path, "--role", role).out.splitlines()]

    assert texts("t2rag") == texts("t2rag.resolve") == ["re: a", "re: b"]
    assert texts("t2rag.resolve.repair") == ["re: b"]


def test_export_takes_a_role_and_a_model(filled):
    lines = run("ledger", "export", filled, "--role", "two").out.splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["re: a", "re: c", ""]
    assert "no answered call of model openai:other" in run("ledger", "export", filled, "--model", "openai:other").error


def test_import_keeps_what_is_there(path, tmp_path):
    other, out = tmp_path / "other.sqlite", tmp_path / "calls.jsonl"
    fill(path, "a")
    fill(other, "a", "b")
    run("ledger", "export", other, "--output", out)
    out.write_text(out.read_text().replace("re: ", "other: "))
    run("ledger", "import", path, out)
    assert sql(path, "SELECT text FROM calls ORDER BY id") == [("re: a",), ("other: b",)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda line: line[:-5], ":2: not valid JSON"),
        (lambda line: line.replace('"status": "ok"', '"status": "new"'), "status 'new' is not one of"),
        (lambda line: line.replace('"content": "b"', '"content": "x"'), ":2: the key does not match"),
        (lambda line: line.replace('"content": "b"', '"content": 7'), ":2: messages[0].content must be text, found 7"),
        (
            lambda line: re.sub(r'"messages": \[.*?\]', '"messages": null', line),
            ":2: messages must be a list",
        ),
        (
            lambda line: line.replace('"temperature": 0.0', '"temperature": {}'),
            ":2: sampling: temperature must",
        ),
        (lambda line: re.sub(r'"sampling": {.*?}', '"sampling": []', line), ":2: sampling must be an object, found []"),
        (lambda line: line.replace('"text": "re: b"', '"text": 7'), ":2: text must be text, found 7"),
    ],
)
def test_a_bad_line_is_named(filled, tmp_path, change, words):
    out = tmp_path / "calls.jsonl"
    run("ledger", "export", filled, "--output", out)
    lines = out.read_text(encoding="utf-8").splitlines()
    bad = change(lines[1])
    assert bad != lines[1]
    out.write_text("\n".join([lines[0], bad, *lines[2:]]), encoding="utf-8")
    ran = run("ledger", "import", tmp_path / "copy.sqlite", out)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert words in ran.error
    assert not (tmp_path / "copy.sqlite").exists()


def test_verify_finds_a_changed_row(filled):
    sql(filled, "UPDATE calls SET messages = replace(messages, 'b', 'x') WHERE text = 're: b'")
    ran = run("ledger", "verify", filled)
    assert ran.code == 1
    assert f"call {call('b').key}: the key does not match" in ran.out
    assert "1 problems; calls: 3 ok, 1 failed, 1 pending\n" in ran.out
    sql(filled, "UPDATE calls SET text = '' WHERE text = 're: a'")
    shown = "calls: 2 ok, 1 failed, 1 pending, 1 ok without a usable reply, which the next run repeats\n"
    assert run("ledger", "verify", filled).out.endswith(shown)


def test_a_place_without_a_ledger_is_one_line(tmp_path):
    place = tmp_path / "none" / "x"
    assert run("ledger", "stats", place) == (2, "", f"error: no such ledger: {place}\n")
    assert not list(tmp_path.iterdir())
