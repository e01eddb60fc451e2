"""A build with a teacher LLM against a server that fails in every way, killed again and again (issue: acceptance 1)."""

import json
import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("aiohttp")

from tests.cli import sql
from tests.data_builders.rows import build_facts, shards
from tests.data_builders.subq_replies import WorldTeacher
from tests.llm.server import Faults, MockServer, body_key

QUESTIONS, KILLS, CONCURRENCY = 40, 3, 8
FAULTS = Faults(
    rate_limit=0.05, server_error=0.04, hang=0.01, cut_off=0.03, broken_off=0.03, drop=0.03, empty=0.03, seed=11,
    at_most=2, hang_seconds=20.0,
)  # fmt: skip
KEY = "sk-secret-key-of-the-fault-test"


def command(url, output):
    return [
        *(sys.executable, "-m", "tripletune.data_builders.subq"),
        *("--source", f"hotpotqa:{output.with_name('questions.jsonl')}"),
        *("--output", str(output), "--teacher", "openai", "--teacher-model", "m", "--teacher-url", url),
        *("--set", "teacher.api_key_env=SUBQ_KEY", "--teacher-concurrency", str(CONCURRENCY), "--teacher-timeout", "2"),
        *("--concurrency", str(CONCURRENCY), "--set", "shard_size=50", "--validation-fraction", "0.3"),
    ]


def stored_calls(ledger):
    """The messages of every call that the ledger has a reply to."""
    try:
        rows = sql(ledger, "SELECT messages FROM calls WHERE status = 'ok'") if ledger.exists() else []
    except sqlite3.OperationalError:
        # Killed before the table was made.
        return set()
    return {canonical(json.loads(text)) for (text,) in rows}


def canonical(messages):
    return json.dumps(messages, sort_keys=True)


def kill_after(process, server, answers, pause):
    """Kill a build once the server has given so many answers more, or let it end."""
    goal = server.count("answered").total() + answers
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if server.count("answered").total() >= goal:
            time.sleep(pause)
            break
        time.sleep(0.05)
    process.kill()
    process.wait()


def test_killed_builds_end_with_the_bytes_of_an_undisturbed_one(tmp_path, monkeypatch):
    monkeypatch.setenv("SUBQ_KEY", KEY)
    teacher, calm = WorldTeacher(tmp_path, train=QUESTIONS), tmp_path / "calm"
    with MockServer(teacher.reply) as server:
        subprocess.run(command(server.url, calm), check=True, capture_output=True)
    assert shards(calm)

    teacher.wrong = 0.25
    output, chance = tmp_path / "rough", random.Random(3)
    ledger = Path(f"{output}.ledger.sqlite")
    stored: list[tuple[int, set[str]]] = []
    kills = 0
    with MockServer(teacher.reply, 0.02, FAULTS) as server:
        for _ in range(KILLS):
            process = subprocess.Popen(
                command(server.url, output), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            kill_after(process, server, chance.randint(5, 30), chance.uniform(0, 0.1))
            kills += process.returncode == -9
            # Requests that were on their way at the kill arrive by now.
            time.sleep(0.1)
            stored.append((len(server.events), stored_calls(ledger)))
            assert not output.exists()
        last = subprocess.run(command(server.url, output), capture_output=True, text=True, check=False)
        assert last.returncode == 0, last.stderr
    assert kills == KILLS
    assert shards(output) == shards(calm)

    events = server.events
    calls = {body_key(body): canonical(body["messages"]) for body in server.bodies}
    assert {event.what for event in events} == {"request", "answered", *Faults.KINDS}
    for end, known in stored:
        again = [event for event in events[end:] if event.what == "request" and calls[event.key] in known]
        assert not again, "a stored reply was asked for again"
    answered = server.count("answered")
    lost = Counter(
        event.key
        for (end, known), start in zip(stored, (0, *(end for end, _ in stored)))
        for event in events[start:end]
        if event.what == "answered" and calls[event.key] not in known
    )
    assert all(count - 1 <= lost[key] for key, count in answered.items())
    assert sum(lost.values()) <= KILLS * CONCURRENCY

    build = build_facts(output)
    assert build["repairs"]["hotpotqa"]
    assert not build["drops"]
    written = [path for path in (tmp_path).rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert not written
    assert KEY not in last.stderr
    assert "HTTP Request" not in last.stderr
