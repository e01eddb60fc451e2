from __future__ import annotations

import asyncio
import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.cli import run, sql
from tripletune.core.calls import CallError, Completion, Message, RepliesPending, Sampling
from tripletune.llm.backends import LLMOptions
from tripletune.llm.backends._batch_replies import batch_reply
from tripletune.llm.backends.batch import BatchBackend, FileRoom, waiting
from tripletune.llm.ledger import Ledger, make_call
from tripletune.llm.ledger_client import LedgerClient

ROOT = Path(__file__).resolve().parents[4]
SYSTEM: Message = {"role": "system", "content": "Be brief."}


def chat(text):
    return [SYSTEM, {"role": "user", "content": text}]


class Build:
    """A build in one folder, run again and again."""

    def __init__(self, folder, layout="openai", room=None, **options):
        self.folder, self.layout, self.room, self.options = folder, layout, room, options
        self.ledger = folder / "calls.sqlite"

    def run(self, *texts, sampling=None):
        """Make calls; replies, or what was raised."""

        async def main():
            ledger = Ledger(self.ledger)
            options = LLMOptions("batch", "m", batch_layout=self.layout, **self.options)
            backend = BatchBackend(options, ledger, self.room)
            async with LedgerClient(backend, ledger) as client:
                calls = (client.chat(chat(t), role="r", sampling=sampling, question_id=t) for t in texts)
                found = await asyncio.gather(*calls, return_exceptions=True)
                self.message = client.pending_message()
            return found

        return asyncio.run(main())

    @property
    def files(self):
        return sorted((self.folder / "calls.sqlite.batch").glob("*"))

    def requests(self, file=None):
        files = [file] if file else self.files
        return [json.loads(line) for one in files for line in one.read_text(encoding="utf-8").splitlines()]

    def answer(self, reply, name="replies.jsonl"):
        """Answer all requests of the last file."""
        path = self.folder / name
        lines = (json.dumps({"custom_id": one["custom_id"], **reply(one)}) for one in self.requests(self.files[-1]))
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path


def openai_reply(request):
    message = {"role": "assistant", "content": "re: " + request["body"]["messages"][-1]["content"]}
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
    body = {"choices": [{"index": 0, "message": message, "finish_reason": "length"}], "usage": usage}
    return {"id": "batch_req_1", "response": {"status_code": 200, "request_id": "x", "body": body}, "error": None}


def anthropic_reply(request):
    text = "re: " + request["params"]["messages"][-1]["content"]
    usage = {"input_tokens": 4, "cache_read_input_tokens": 6, "output_tokens": 2}
    message = {"content": [{"type": "text", "text": text}], "stop_reason": "max_tokens", "usage": usage}
    return {"result": {"type": "succeeded", "message": message}}


REPLIES = {"openai": openai_reply, "anthropic": anthropic_reply}


def imported(build, path):
    return run("batch", "import", "--ledger", build.ledger, "--replies", path).out


def failed_for_now(request):
    return {"response": None, "error": {"code": "batch_expired", "message": "too late"}}


def refused(request):
    return {"response": {"status_code": 400, "body": {"error": {"message": "bad word sk-1234567890"}}}, "error": None}


def errored(error):
    return {"result": {"type": "errored", "error": {"type": "error", "error": error}}}


# Requests.


@pytest.mark.parametrize("layout", ["openai", "anthropic"])
def test_a_build_stops_and_goes_on(tmp_path, layout):
    build = Build(tmp_path, layout)
    first = build.run("a", "b")
    assert all(isinstance(one, RepliesPending) for one in first)
    assert "Calls that wait for replies: 2." in build.message
    assert str(build.files[0]) in build.message
    assert f"import --ledger {build.ledger} --replies FILE" in build.message
    assert "2 replies stored, 0 were known" in imported(build, build.answer(REPLIES[layout]))
    second = build.run("a", "b", "c")
    assert [one.text for one in second[:2]] == ["re: a", "re: b"]
    assert (second[0].prompt_tokens, second[0].completion_tokens, second[0].finish_reason) == (10, 2, "length")
    assert not second[0].cached, "a reply that was imported for this call was sent for it"
    assert isinstance(second[2], RepliesPending)
    assert len(build.files) == 2
    imported(build, build.answer(REPLIES[layout], "more.jsonl"))
    assert [one.text for one in build.run("a", "b", "c")] == ["re: a", "re: b", "re: c"]
    assert build.message is None
    assert len(build.files) == 2
    assert sql(build.ledger, "SELECT role, question_id FROM uses ORDER BY id") == [("r", "a"), ("r", "b"), ("r", "c")]


@pytest.mark.parametrize("layout", ["openai", "anthropic"])
def test_bodies_and_names_are_those_of_the_live_backends(tmp_path, layout):
    # One name in the ledger for both ways of calling: they must ask for the same.
    pytest.importorskip(layout)
    options = {"extra": '{"effort": "é"}', "token_field": "max_completion_tokens"}
    backend = importlib.import_module(f"tripletune.llm.backends.{layout}")
    kind = backend.OpenAIBackend if layout == "openai" else backend.AnthropicBackend
    live, sampling = kind(LLMOptions(layout, "m", "http://h:1", **options)), Sampling(max_tokens=64)
    build = Build(tmp_path, layout, **options)
    build.run("a é", sampling=sampling)
    (request,) = build.requests()
    assert live.model == f'{layout}:m {{"effort":"é"}}'
    key, body = make_call(live.model, sampling, chat("a é")).key, live.body(chat("a é"), sampling)
    post = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    assert request == {"custom_id": key, **(post if layout == "openai" else {"params": body})}


@pytest.mark.parametrize(("room", "sizes"), [((2, 10**9), [2, 2, 1]), ((100, 700), [2, 2, 1]), ((100, 10), [1] * 5)])
def test_files_are_split_where_the_provider_says(tmp_path, room, sizes):
    build = Build(tmp_path, room=FileRoom(*room))
    build.run(*"abcde")
    assert [len(build.requests(file)) for file in build.files] == sizes
    # A request that is larger than a file is written alone.
    assert all(file.stat().st_size <= room[1] for file in build.files) or sizes == [1] * 5
    assert len({one["custom_id"] for one in build.requests()}) == 5


def test_a_call_that_cannot_be_sent_fails_at_once(tmp_path):
    build = Build(tmp_path, "anthropic")
    (found,) = build.run("a", sampling=Sampling(temperature=0.7))
    assert isinstance(found, CallError)
    assert "temperature 0.7" in str(found)
    assert build.files == []


# Crashes.

KILLED = """
import asyncio, os, signal, sys
from tripletune.llm.backends.batch import BatchBackend
from tripletune.llm.ledger import Ledger
from tripletune.llm.ledger_client import LedgerClient
from tripletune.llm.backends import LLMOptions

async def main(folder, when):
    ledger = Ledger(f"{folder}/calls.sqlite")
    backend = BatchBackend(LLMOptions("batch", "m"), ledger)
    client = LedgerClient(backend, ledger)
    chats = ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": t}] for t in "abc")
    await asyncio.gather(*(client.chat(chat, role="r") for chat in chats), return_exceptions=True)
    if when == "renamed":
        replace = os.replace
        def replace_and_die(*names):
            replace(*names)
            os.kill(os.getpid(), signal.SIGKILL)
        os.replace = replace_and_die
    if when == "writing":
        os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
    if when == "asked":
        os.kill(os.getpid(), signal.SIGKILL)
    backend.write()

asyncio.run(main(sys.argv[1], sys.argv[2]))
"""


@pytest.mark.parametrize("when", ["asked", "writing", "renamed"])
def test_kill_9_neither_loses_nor_repeats_a_call(tmp_path, when):
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path, when], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    build = Build(tmp_path)
    build.run("a", "b", "c", "d")
    finished = [file for file in build.files if file.suffix == ".jsonl"]
    texts = [one["body"]["messages"][-1]["content"] for file in finished for one in build.requests(file)]
    assert sorted(texts) == ["a", "b", "c", "d"]


# Replies.


def test_an_import_of_the_same_file_changes_nothing(tmp_path):
    build = Build(tmp_path)
    build.run("a", "b")
    path = build.answer(failed_for_now)
    assert "2 calls failed temporarily" in imported(build, path)
    build.run("a", "b")
    assert len(build.files) == 2
    assert "was imported before" in imported(build, path)
    build.run("a", "b")
    assert len(build.files) == 2
    with Ledger(build.ledger) as ledger:
        assert [row.calls for row in waiting(ledger)] == [2]


def test_refused_calls_fail_until_they_are_reset(tmp_path):
    build = Build(tmp_path)
    build.run("a")
    assert "1 calls were refused" in imported(build, build.answer(refused))
    for _ in range(2):
        (found,) = build.run("a")
        assert isinstance(found, CallError)
        assert "refused in a batch: 400: bad word" in str(found)
        assert "sk-1234567890" not in str(found)
        assert str(found).count(f"reset --ledger {build.ledger} --refused") == 1
    assert build.message is None
    ran = run("batch", "reset", "--ledger", build.ledger, "--refused")
    assert "1 calls will be in the request file" in ran.out
    assert isinstance(build.run("a")[0], RepliesPending)
    assert len(build.files) == 2


def test_a_lost_file_is_written_again(tmp_path):
    build = Build(tmp_path)
    build.run("a", "b")
    assert run("batch", "reset", "--ledger", build.ledger, "--file", build.files[0]).code == 0
    build.run("a")
    assert len(build.requests(build.files[1])) == 2
    ran = run("batch", "reset", "--ledger", build.ledger, "--file", "other")
    assert (ran.code, ran.error[:29]) == (2, "error: no call waits in other")


def test_status_shows_what_waits(tmp_path):
    build = Build(tmp_path)
    build.run("a", "b")
    assert (
        run("batch", "status", "--ledger", build.ledger).out
        == f"{build.files[0]}: calls of openai:m that wait: 2 of 2\n"
    )
    imported(build, build.answer(failed_for_now))
    assert run("batch", "status", "--ledger", build.ledger).out == "(no file yet): calls of openai:m that wait: 2\n"


def test_a_partly_answered_file_is_not_to_be_sent_again(tmp_path):
    build = Build(tmp_path)
    build.run("a", "b", "c")
    assert f"New: send {build.files[0]} to" in build.message
    replies = build.answer(openai_reply)
    replies.write_text("".join(replies.read_text().splitlines(keepends=True)[:2]))
    assert "calls that still wait for replies: 1\n" in imported(build, replies)
    build.run("a", "b", "c", "d")
    assert f"New: send {build.files[1]} to" in build.message
    assert f"Written by an earlier run: {build.files[0]} (waiting: 1 of its 3 calls)" in build.message


def test_live_replies_stand_against_late_ones(tmp_path):
    build = Build(tmp_path)
    build.run("a", "b")
    with Ledger(build.ledger) as ledger:
        asyncio.run(ledger.store(make_call("openai:m", Sampling(), chat("a")), Completion("live"), "r"))
    assert "1 replies stored, 1 were known" in imported(build, build.answer(openai_reply))
    assert [one.text for one in build.run("a", "b")] == ["live", "re: b"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", ":2: not a reply of a batch: the line has no custom_id"),
        ('{"custom_id": "x"}', "(is this a request file?). Nothing was imported"),
        ("", "none of its 0 replies belongs to a call"),
    ],
)
def test_a_bad_file_changes_nothing(tmp_path, text, words):
    build = Build(tmp_path)
    build.run("a")
    path = build.answer(openai_reply)
    path.write_text(path.read_text() + text if text else "\n")
    ran = run("batch", "import", "--ledger", build.ledger, "--replies", path)
    assert ran.code == 2
    assert words in ran.error
    assert isinstance(build.run("a")[0], RepliesPending)


def chat_reply(content, finish="stop"):
    message = {"content": content, "reasoning_content": "hm"}
    return {
        "response": {"status_code": 200, "body": {"choices": [{"message": message, "finish_reason": finish}]}},
    }


def test_what_went_wrong_is_read():
    for content in (None, 7, [], [1], {}, True, "", " \n"):
        reason = "the reply holds no text (finish_reason stop)"
        assert batch_reply({"custom_id": "k", **chat_reply(content)}) == ("k", None, reason, False)
    for line, reason, is_refused in (
        (chat_reply(None, "length"), "the reply holds no text (finish_reason length; allow it more tokens)", True),
        (chat_reply("The river", "error"), "the reply broke off (finish_reason error)", False),
        (chat_reply(None, "tool_calls"), "the reply holds no text (finish_reason tool_calls)", False),
        (
            {"result": {"type": "succeeded", "message": {"content": []}}},
            "the reply holds no text (finish_reason stop)",
            False,
        ),
        (failed_for_now({}), "batch_expired: too late", False),
        ({"response": {"status_code": 429, "body": {"error": {"code": "busy"}}}}, "busy: no words", False),
        ({"response": {"status_code": 401, "body": "x"}}, "401: no words", False),
        (
            {
                "response": {"status_code": 400, "body": {"message": "prompt of 9000 tokens", "code": 400}},
                "error": None,
            },
            "400: prompt of 9000 tokens",
            True,
        ),
        ({"response": {"status_code": 400, "body": {"error": "too long"}}}, "400: too long", True),
        ({"error": "expired"}, "error: expired", False),
        ({"response": {"status_code": 404, "body": {"error": {"message": "model"}}}}, "404: model", True),
        ({"response": {"status_code": 200, "body": {"choices": []}}}, "a response without a reply", False),
        ({"result": {"type": "expired"}}, "expired: no words", False),
        (errored({"type": "overloaded_error"}), "overloaded_error: no words", False),
        (errored({"type": "invalid_request_error", "message": "long"}), "invalid_request_error: long", True),
    ):
        assert batch_reply({"custom_id": "k", **line}) == ("k", None, reason, is_refused)


NAMES = ["response", "result", "error", "body", "choices", "message", "content", "status_code", "type", "usage"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=15,
)


@given(json_values, st.sampled_from(["response", "result", "error"]))
@example({"type": ""}, "result")
def test_any_line_is_a_reply_or_refused(value, name):
    try:
        found: Any = batch_reply({"custom_id": "k", name: value})
    except ValueError as error:
        found = str(error)
    assert "not a reply of a batch" in found if isinstance(found, str) else found.completion or found.reason
