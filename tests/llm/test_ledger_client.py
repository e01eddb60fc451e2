from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from itertools import pairwise
from typing import TypeVar

import pytest

from tests.cli import sql
from tests.llm.virtual_time import now, run_virtually
from tripletune.core.calls import Backend, CallError, Completion, SetupError, TransientError
from tripletune.llm.ledger import Ledger
from tripletune.llm.ledger_client import LedgerClient, RetriesExhausted, Retry
from tripletune.llm.limits import Limits
from tripletune.llm.programs import statistics

T = TypeVar("T")
QUICK = Retry(first_wait=0, longest_wait=0)


def chat(text="hi"):
    return [{"role": "user", "content": text}]


class Fake(Backend):
    """A backend that follows a script, then echoes; it counts what it was asked."""

    model = "fake:echo"

    def __init__(self, *script, delay=0.0):
        self.script, self.delay = list(script), delay
        self.asked: list[str] = []
        self.times: list[float] = []
        self.cancelled = 0
        self.closed = False

    async def complete(self, messages, sampling):
        self.asked.append(messages[-1]["content"])
        self.times.append(now())
        try:
            await asyncio.sleep(self.delay)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        step = self.script.pop(0) if self.script else f"re: {messages[-1]['content']}"
        if isinstance(step, BaseException):
            raise step
        return step if isinstance(step, Completion) else Completion(step, 10, 2)

    async def close(self):
        self.closed = True


def run(main, backend, path=None, **options):
    async def whole():
        ledger = Ledger(path) if path else None
        async with LedgerClient(backend, ledger, **{"retry": QUICK, **options}) as client:
            return await main(client)

    return asyncio.run(whole())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.sqlite"


def test_a_call_is_made_once_and_then_comes_from_the_ledger(path):
    async def twice(client):
        first = await client.chat(chat(), role="one", question_id="q1")
        return first, await client.chat(chat(), role="two", question_id="q2")

    backend = Fake()
    first, second = run(twice, backend, path)
    assert (first.text, first.cached, first.prompt_tokens) == ("re: hi", False, 10)
    assert second.cached
    assert (second.text, second.prompt_tokens, second.completion_tokens) == ("re: hi", 10, 2)
    assert backend.asked == ["hi"]
    assert backend.closed
    assert sql(path, "SELECT role, question_id FROM uses") == [("one", "q1"), ("two", "q2")]
    later = Fake()
    assert run(lambda client: client.chat(chat(), role="one"), later, path).cached
    assert later.asked == []


@pytest.mark.parametrize("stored", [True, False])
def test_equal_calls_under_way_are_sent_once(path, stored):
    async def many(client):
        calls = (client.chat(chat(), role="r", question_id=str(n)) for n in range(5))
        return await asyncio.gather(*calls)

    backend = Fake(delay=0.01)
    replies = run(many, backend, path if stored else None)
    assert backend.asked == ["hi"]
    assert [reply.cached for reply in replies] == [False, True, True, True, True]
    assert {reply.text for reply in replies} == {"re: hi"}
    if stored:
        assert len(sql(path, "SELECT question_id FROM uses")) == 5


def test_one_waiter_that_is_cancelled_does_not_end_the_call(path):
    async def main(client):
        first = asyncio.create_task(client.chat(chat(), role="r"))
        second = asyncio.create_task(client.chat(chat(), role="r"))
        await asyncio.sleep(0.005)
        first.cancel()
        return await second

    assert run(main, Fake(delay=0.02), path).text == "re: hi"


def test_a_call_that_nobody_waits_for_is_cancelled(path):
    async def main(client):
        task = asyncio.create_task(client.chat(chat(), role="r"))
        await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The same call right after is a new one.
        return await client.chat(chat(), role="r")

    backend = Fake(delay=0.5)
    assert run(main, backend, path).text == "re: hi"
    assert backend.cancelled == 1
    assert backend.asked == ["hi", "hi"]


def test_ctrl_c_keeps_what_was_received(path):
    backend = Fake()

    async def main(client):
        await client.chat(chat("a"), role="r")
        backend.delay = 10
        waiting = [asyncio.create_task(client.chat(chat(text), role="r")) for text in "bc"]
        await asyncio.sleep(0.005)
        # What asyncio.run does on SIGINT: the main task is cancelled.
        asyncio.current_task().cancel()
        await asyncio.gather(*waiting)

    with pytest.raises(asyncio.CancelledError):
        run(main, backend, path)
    assert backend.cancelled == 2
    assert backend.closed
    assert sql(path, "SELECT text FROM calls") == [("re: a",)]


@pytest.mark.parametrize("error", [SetupError("no credit"), TransientError("day quota", retry_after=1e5)])
def test_a_call_that_ends_the_run_waits_for_the_replies_under_way(path, error):
    class Paying(Fake):
        async def complete(self, messages, sampling):
            if messages[-1]["content"] == "bad":
                await asyncio.sleep(0.01)
                raise error
            return await super().complete(messages, sampling)

    backend = Paying(delay=0.05)

    async def main(client):
        async with asyncio.TaskGroup() as group:
            for text in ("a", "b", "bad", "never sent"):
                group.create_task(client.chat(chat(text), role="r"))

    with pytest.raises(ExceptionGroup):
        run(main, backend, path, limits=Limits(concurrency=3))
    assert (backend.asked, backend.cancelled) == (["a", "b"], 0)
    assert sql(path, "SELECT text FROM calls WHERE status = 'ok' ORDER BY text") == [("re: a",), ("re: b",)]


def test_the_end_of_a_run_waits_for_no_retry(path):
    backend = Fake(SetupError("no key"), TransientError("busy", retry_after=500.0), delay=0.01)

    async def main(client):
        async with asyncio.TaskGroup() as group:
            for text in "ab":
                group.create_task(client.chat(chat(text), role="r"))

    with pytest.raises(ExceptionGroup):
        run(main, backend, path)
    assert backend.asked == ["a", "b"]


def test_no_call_goes_out_once_a_reply_could_not_be_stored(path):
    backend = Fake()

    async def main(client):
        await client.chat(chat("a"), role="r")
        client.ledger._opened.execute("PRAGMA query_only = ON")
        for text in "bc":
            with pytest.raises(OSError, match="readonly"):
                await client.chat(chat(text), role="r")
        client.ledger._opened.execute("PRAGMA query_only = OFF")
        return await client.chat(chat("a"), role="r")

    assert run(main, backend, path).cached
    assert backend.asked == ["a", "b"]


@pytest.mark.parametrize("ends_run", [True, False])
def test_a_client_after_a_failure_of_every_call(path, ends_run):
    backend = Fake(SetupError("no such model"), "yes")

    async def main(client):
        client.ends_run = ends_run
        with pytest.raises(SetupError, match=r"^no such model$"):
            await client.chat(chat(), role="r")
        return await client.chat(chat(), role="r")

    if not ends_run:
        assert run(main, backend, path).text == "yes"
        return
    with pytest.raises(SetupError, match="nothing more is sent after an earlier failure; open a new"):
        run(main, backend, path)
    assert len(backend.asked) == 1


# Retries.


def test_a_server_that_is_away_is_reported_at_the_first_attempt(path, caplog):
    def ask(address):
        caplog.clear()
        backend = Fake(*[TransientError("no connection")] * 3, "yes")
        backend.address = address
        run(lambda client: client.chat(chat(), role="r"), backend)
        return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]

    (line,) = ask("http://h:1/v1")
    assert line.startswith("fake:echo at http://h:1/v1: attempt 1 of 8 failed (no connection); next attempt in ")
    assert ask("") == []


def test_passing_failures_are_tried_again(path):
    backend = Fake(TransientError("429"), TransientError("500"), "yes")
    found = run(lambda client: client.chat(chat(), role="r"), backend, path)
    assert (found.text, found.retries) == ("yes", 2)
    assert sql(path, "SELECT text, retries, status FROM calls") == [("yes", 2, "ok")]


def test_a_call_that_keeps_failing_says_that_a_new_run_goes_on(path):
    backend = Fake(*[TransientError("server is busy")] * 9)
    with pytest.raises(RetriesExhausted) as caught:
        run(lambda client: client.chat(chat(), role="filter"), backend, path, retry=Retry(3, 0, 0))
    text = str(caught.value)
    assert "fake:echo, filter: no reply after 3 attempts: server is busy" in text
    assert f"kept in {path}: run the same command again" in text
    assert len(backend.asked) == 3
    assert sql(path, "SELECT status, retries FROM calls") == [("failed", 2)]
    assert run(lambda client: client.chat(chat(), role="filter"), Fake(), path).text == "re: hi"
    assert sql(path, "SELECT status, text FROM calls") == [("ok", "re: hi")]


def test_a_refused_call_is_not_tried_again(path):
    class Refused(CallError):
        pass

    backend = Fake(Refused("no such model"))
    with pytest.raises(Refused, match=r"^no such model$"):
        run(lambda client: client.chat(chat(), role="r"), backend, path)
    assert len(backend.asked) == 1
    assert sql(path, "SELECT status, detail FROM calls") == [("failed", "no such model")]
    with pytest.raises(KeyError):
        run(lambda client: client.chat(chat(), role="r"), Fake(KeyError("bug")), path)


def virtual_times(retry, *script, **limits):
    backend = Fake(*script, delay=limits.pop("delay", 0.0))

    async def main():
        client = LedgerClient(backend, None, Limits(**limits), retry)
        await client.chat(chat(), role="r")

    run_virtually(main())
    return [time - backend.times[0] for time in backend.times]


def test_waits_grow_and_are_drawn_at_random():
    failures = [TransientError("503")] * 7
    waits = []
    for _ in range(3):
        times = virtual_times(Retry(first_wait=1, longest_wait=20), *failures)
        waits.append([after - before for before, after in pairwise(times)])
    for one in waits:
        assert all(wait <= min(2**number, 20) + 0.1 for number, wait in enumerate(one))
    assert waits[0] != waits[1] != waits[2]
    assert max(max(one) for one in waits) > 2


def test_the_servers_wait_is_kept():
    times = virtual_times(Retry(first_wait=0.5), TransientError("429", retry_after=30.0))
    assert 30 <= times[1] <= 30.6
    with pytest.raises(RetriesExhausted, match="the server asks to wait 86400 seconds"):
        virtual_times(Retry(patience=600), TransientError("429", retry_after=86400.0))


def test_a_call_that_hangs_is_tried_again():
    with pytest.raises(RetriesExhausted, match="no reply within 5 seconds"):
        virtual_times(Retry(attempts=2), delay=60.0, timeout=5)


def test_a_reply_in_time_is_taken_though_the_loop_was_held_up():
    """Defect D1: encoders that ran on the loop made it throw away replies, and ask and pay for them again."""
    backend = Fake(delay=0.02)

    async def main(client):
        calls = asyncio.gather(*(client.chat(chat(text), role="r") for text in "abcd"))
        await asyncio.sleep(0.01)
        time.sleep(0.3)
        await calls

    run(main, backend, limits=Limits(timeout=0.1))
    assert (backend.asked, backend.cancelled) == (list("abcd"), 0)


def test_a_waiting_call_leaves_its_place_to_others():
    backend = Fake(TransientError("429", retry_after=100.0))

    async def main():
        client = LedgerClient(backend, None, Limits(concurrency=1))
        await asyncio.gather(*(client.chat(chat(text), role="r") for text in "abc"))

    run_virtually(main())
    assert backend.asked == ["a", "b", "c", "a"]


@pytest.mark.parametrize(
    ("text", "finish", "attempts"),
    [
        ("", "stop", 3),
        (" \n", "tool_calls", 3),
        ("<think>hm", "content_filter", 3),
        ("<think>hm</think>\n", "odd", 3),
        ("", "length", 1),
        ("", "refusal", 1),
    ],
)
def test_a_reply_without_text_is_asked_for_again_and_never_kept(path, text, finish, attempts):
    silent = Completion(text, 10, 5, finish_reason=finish)

    def ask(*script, **options):
        backend = Fake(*script)
        backend.may_be_silent = options.pop("local", False)
        try:
            return run(lambda client: client.chat(chat(), role="r"), backend, path, **options), len(backend.asked)
        except CallError as error:
            return (type(error), str(error)), len(backend.asked)

    retry = Retry(8, 0, 0, empty_attempts=3)
    more = "; allow it more tokens" * (finish == "length")
    failure = (CallError, f"fake:echo, r: the reply holds no text (finish_reason {finish}{more})")
    assert ask(*[silent] * 9, retry=retry) == (failure, attempts)
    assert sql(path, "SELECT text, status, completion_tokens FROM calls") == [("", "failed", 5 * attempts)]
    # A model of this machine has replied; it is asked again all the same.
    for _ in range(2):
        reply, sent = ask(silent, local=True)
        assert (reply.text, sent) == (text, 1)
    # What an earlier version stored as a reply.
    sql(path, f"UPDATE calls SET text = {text!r}, status = 'ok'".replace("\\n", "\n"))
    assert statistics(path)[0]["without_text"] == 1
    reply, sent = ask("yes")
    assert (reply.text, sent) == ("yes", 1)
    assert ask()[1] == 0


def test_a_reply_that_broke_off_is_asked_for_again_and_never_kept(path):
    part = Completion("The river flows from", 10, 5, finish_reason="error", error="upstream failed")
    ask = lambda *script: run(  # noqa: E731
        lambda client: client.chat(chat(), role="r"), Fake(*script), path, retry=Retry(8, 0, 0, empty_attempts=3)
    )
    with pytest.raises(CallError, match=r"r: the reply broke off .finish_reason error: upstream failed"):
        ask(part, part, part)
    assert sql(path, "SELECT text, status, completion_tokens FROM calls") == [("", "failed", 15)]
    whole = ask(part, "From Kelm to Velsund.")
    assert (whole.text, whole.prompt_tokens) == ("From Kelm to Velsund.", 20), "the part was paid for, too"
    # What an earlier version stored as a reply.
    sql(path, "UPDATE calls SET text = 'The river', finish_reason = 'error'")
    assert statistics(path)[0]["without_text"] == 1
    assert ask("From Kelm.").text == "From Kelm."


def test_a_reply_after_some_without_text_is_kept(path):
    silent, said = Completion("", 10, 5), Completion("yes", 10, 1)
    found = run(lambda client: client.chat(chat(), role="r"), Fake(silent, silent, said), path)
    assert (found.text, found.retries) == ("yes", 2)
    assert (found.prompt_tokens, found.completion_tokens) == (30, 11), "all three are paid for"
    assert sql(path, "SELECT prompt_tokens, completion_tokens FROM calls") == [(30, 11)]


def test_unpaired_surrogates_are_replaced_in_replies_and_refused_in_messages(path):
    assert run(lambda client: client.chat(chat(), role="r"), Fake("a\ud83db"), path).text == "a\ufffdb"
    with pytest.raises(CallError, match="r: this call can't be sent: the messages contain an unpaired surrogate"):
        run(lambda client: client.chat(chat("\ud83d"), role="r"), Fake(), path)


# Keys.


@pytest.mark.parametrize("kind", [CallError, SetupError, TransientError])
def test_a_key_that_a_server_echoes_reaches_nothing(path, caplog, kind):
    secret = "hunter2-0123456789"
    backend = Fake(*[kind(f"bad key {secret}")] * 2)
    caplog.set_level(logging.DEBUG)
    with pytest.raises(CallError) as caught:
        run(lambda c: c.chat(chat(), role="r"), backend, path, retry=Retry(2, 0, 0), secrets=[secret])
    assert type(caught.value) is (RetriesExhausted if kind is TransientError else kind)
    assert secret not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert "bad key" in str(caught.value)
    assert secret not in caplog.text
    assert not [file for file in path.parent.iterdir() if secret.encode() in file.read_bytes()]


# Processes.

OTHER = """
import asyncio, sys
from tripletune.llm.backends import LLMOptions, open_client

async def main(url, ledger):
    async with open_client(LLMOptions(model="m", url=url, ledger=ledger)) as client:
        calls = (client.chat([{"role": "user", "content": text}], role="r") for text in "abcd")
        print([reply.cached for reply in await asyncio.gather(*calls)])

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("killed", [False, True])
def test_processes_on_one_ledger_pay_for_a_call_once(path, killed):
    pytest.importorskip("aiohttp")
    from tests.llm.server import MockServer

    with MockServer(delay=1.0) as server:
        command = [sys.executable, "-c", OTHER, server.url, str(path)]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        while not server.at_once:
            time.sleep(0.01)
        if killed:
            time.sleep(0.2)
            processes[0].kill()
        said = sorted(process.communicate()[0].strip() for process in processes)
    # Who makes which call is chance; the one that lives has all replies.
    assert (said[0], said[1].count(",")) == ("", 3) if killed else "".join(said).count("False") == 4
    assert set(server.count("request").values()) <= ({1, 2} if killed else {1})


class Slow(Backend):
    """A server that needs 50 seconds for each of the calls that it has at once."""

    model, address = "slow:m", "http://slow"

    def __init__(self):
        self.running = 0
        self.at_once: list[int] = []

    async def complete(self, messages, sampling):
        self.running += 1
        try:
            await asyncio.sleep(1)
            self.at_once.append(self.running)
            await asyncio.sleep(50 * self.running)
        finally:
            self.running -= 1
        return Completion("yes", 10, 2)


def test_a_slow_server_gets_half_the_calls_after_a_round_without_a_reply(caplog):
    async def ask(backend, calls, timeout, attempts=8):
        limits = Limits(64, timeout=timeout)
        async with LedgerClient(backend, None, limits, Retry(attempts, 0, 0)) as client:
            asked = (client.chat(chat(str(n)), role="r") for n in range(calls))
            return await asyncio.gather(*asked, return_exceptions=True), limits.concurrency

    backend = Slow()
    replies, concurrency = run_virtually(ask(backend, 4, 120))
    assert [reply.text for reply in replies] == ["yes"] * 4
    # A call that ran out of time may be sent again before the last one has, so that a round of three comes between.
    assert backend.at_once[:4] == [4, 4, 4, 4]
    assert concurrency == max(backend.at_once[-2:]) <= 2
    warning = next(record.getMessage() for record in caplog.records if "at once from now on" in record.getMessage())
    assert "calls at once from now on: 2. If" in warning
    assert "raise --teacher-timeout or lower --teacher-concurrency" in warning
    # Where no number helps, the last line names the options, too; an answered call keeps the number.
    (failure, *_), concurrency = run_virtually(ask(Slow(), 4, 10, attempts=3))
    assert isinstance(failure, RetriesExhausted)
    assert "raise --teacher-timeout or lower --teacher-concurrency" in str(failure)
    assert concurrency == 1


def test_a_server_that_has_answered_keeps_its_calls_at_once(caplog):
    async def ask():
        limits = Limits(64, timeout=120)
        backend = Fake(delay=1)
        async with LedgerClient(backend, None, limits, Retry(8, 0, 0)) as client:
            await client.chat(chat(), role="r")
            backend.delay = 200
            asked = [client.chat(chat(str(n)), role="r") for n in range(4)]
            asyncio.get_running_loop().call_later(200, setattr, backend, "delay", 1)
            await asyncio.gather(*asked)
        return limits.concurrency

    assert run_virtually(ask()) == 64
    assert "at once from now on" not in caplog.text
