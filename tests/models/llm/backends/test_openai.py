import asyncio
import logging
import traceback
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("openai")

from tests.models.llm.server import Faults, MockServer, Reply
from tripletune.models.llm.backends.openai import OpenAIBackend
from tripletune.models.llm.client import CallError, Message, Sampling, SetupError, TransientError
from tripletune.models.local.generation import Completion

KEY = "sk-test-0123456789"
CHAT: list[Message] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one two three"}]


@pytest.fixture(autouse=True)
def _no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def ask(server: MockServer, sampling: Sampling | None = None, chat: list[Message] = CHAT, **options: Any) -> Completion:
    """One call over a backend of its own."""
    backend = OpenAIBackend("m", **{"url": server.url, "api_key": KEY, "timeout": 5.0, **options})

    async def go() -> Completion:
        try:
            return await backend.complete(chat, sampling or Sampling())
        finally:
            await backend.close()

    return asyncio.run(go())


def answering(reply: Reply) -> MockServer:
    return MockServer(reply=lambda body: reply)


def test_a_reply() -> None:
    sampling = Sampling(temperature=0.5, top_p=0.9, max_tokens=9, stop=("END", "\n\n"), seed=7)
    with MockServer(reply=lambda body: "four five END six") as server:
        reply = ask(server, sampling)
        assert (reply.text, reply.finish_reason) == ("four five ", "stop")
        assert (reply.prompt_tokens, reply.completion_tokens) == (5, 2)
        assert reply.seconds > 0
        assert server.bodies[0] == {
            "model": "m",
            "messages": CHAT,
            "temperature": 0.5,
            "top_p": 0.9,
            "max_tokens": 9,
            "stop": ["END", "\n\n"],
            "seed": 7,
        }
        assert server.authorizations == {f"Bearer {KEY}"}


def test_a_plain_request_leaves_out_what_is_not_asked_for() -> None:
    with MockServer() as server:
        ask(server)
        assert set(server.bodies[0]) == {"model", "messages", "temperature", "top_p", "max_tokens"}


def test_a_reply_that_is_cut_off() -> None:
    with MockServer(reply=lambda body: "a b c d") as server:
        reply = ask(server, Sampling(max_tokens=2))
        assert (reply.text, reply.finish_reason, reply.completion_tokens) == ("a b", "length", 2)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("rate_limit", "slow down"),
        ("server_error", "the mock failed"),
        ("hang", "no reply within 1 seconds"),
        ("cut_off", "no JSON object"),
        ("broken_off", "no connection"),
        ("drop", "no connection"),
    ],
)
def test_faults_are_transient(kind: str, words: str) -> None:
    with MockServer(faults=Faults(**{kind: 1.0}, at_most=1, retry_after=0.25)) as server:
        with pytest.raises(TransientError, match=words) as caught:
            ask(server, timeout=1.0 if kind == "hang" else 30.0)
        assert caught.value.retry_after == (0.25 if kind == "rate_limit" else None)
        # One attempt, the SDK does not try again by itself; the next one is answered.
        assert sum(server.requests.values()) == 1
        assert ask(server).text == "one two three"


@pytest.mark.parametrize(
    ("reply", "words", "seconds"),
    [
        (Reply(status=408), "408", None),
        (Reply(status=409), "409", None),
        (Reply(status=503, headers={"retry-after-ms": "1500"}), "503", 1.5),
        (Reply(status=529), "529", None),
        (Reply(status=400, headers={"x-should-retry": "true"}), "400", None),
        (Reply(raw="<html>Bad gateway</html>"), "no JSON object: <html>", None),
        (Reply(raw="[]"), "no JSON object", None),
        (Reply(raw="{}"), "without choices", None),
        (Reply(raw='{"choices": []}'), "without choices", None),
        (Reply(raw='{"choices": null, "error": {"message": "upstream died"}}'), "upstream died", None),
        (Reply(raw='{"choices": [{"message": null}]}'), "without choices", None),
    ],
)
def test_what_is_worth_another_attempt(reply: Reply, words: str, seconds: float | None) -> None:
    with answering(reply) as server, pytest.raises(TransientError, match=words) as caught:
        ask(server)
    assert caught.value.retry_after == seconds


@pytest.mark.parametrize(
    ("reply", "advice"),
    [
        (Reply(status=401, message="bad key"), "check the key"),
        (Reply(status=403, message="no"), "may not use this model"),
        (Reply(status=404, message="no such model"), "check the model's name"),
        (Reply(status=400, message="odd"), "the request was refused"),
        (Reply(status=422, message="odd"), "the request was refused"),
        (Reply(status=400, message="'max_tokens' is not supported, use 'max_completion_tokens'"), "token_field"),
        (Reply(status=400, message="'temperature' does not support 0"), "send_temperature=False"),
        (Reply(status=400, message="the maximum context length is 10, lower max_tokens"), "shorten the prompt"),
        (Reply(status=402, message="pay"), "no credit left"),
        (Reply(status=429, raw='{"error": {"message": "pay", "code": "insufficient_quota"}}'), "no credit left"),
        (Reply(status=500, headers={"x-should-retry": "false"}), "the request was refused"),
    ],
)
def test_what_no_attempt_will_better(reply: Reply, advice: str) -> None:
    with answering(reply) as server, pytest.raises(CallError, match=advice):
        ask(server)


@pytest.mark.parametrize(
    ("status", "message", "of_every_call"),
    [
        (401, "bad key", True),
        (402, "pay", True),
        (403, "not allowed", True),
        (403, "your input was flagged", False),
        (404, "no such model", True),
        (400, "'temperature' does not support 0", True),
        (400, "the maximum context length is 10, lower max_tokens", False),
        (400, "input and max_tokens exceed the context limit", False),
        (400, "odd", False),
        (413, "too large", False),
    ],
)
def test_errors_of_every_call_are_told_from_those_of_one(status: int, message: str, of_every_call: bool) -> None:
    with answering(Reply(status=status, message=message)) as server, pytest.raises(CallError) as caught:
        ask(server)
    assert isinstance(caught.value, SetupError) is of_every_call


def test_no_server_there() -> None:
    with MockServer() as server:
        pass
    with pytest.raises(TransientError, match=f"no connection to 127.0.0.1:{server.port}"):
        ask(server)


def test_something_that_speaks_no_http() -> None:
    async def go() -> None:
        async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(10)
            writer.write(b"220 mail.example ESMTP\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(nonsense, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        backend = OpenAIBackend("m", url=f"http://127.0.0.1:{port}/v1", timeout=5)
        async with server:
            with pytest.raises(TransientError, match="no connection"):
                await backend.complete(CHAT, Sampling())
        await backend.close()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("message", "finish", "expected"),
    [
        ('{"content": null}', '"stop"', ("", "stop")),
        ('{"content": "x"}', "null", ("x", "stop")),
        ('{"content": null, "refusal": "I won\'t"}', '"stop"', ("", "refusal")),
        ('{"content": "x"}', '"content_filter"', ("x", "content_filter")),
        ('{"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}', '"stop"', ("ab", "stop")),
    ],
)
def test_shapes_of_a_message(message: str, finish: str, expected: tuple[str, str]) -> None:
    raw = f'{{"choices": [{{"message": {message}, "finish_reason": {finish}}}], "usage": null}}'
    with answering(Reply(raw=raw)) as server:
        reply = ask(server)
        assert (reply.text, reply.finish_reason) == expected
        assert (reply.prompt_tokens, reply.completion_tokens) == (0, 0)


def test_an_empty_reply_is_a_reply() -> None:
    with MockServer(faults=Faults(empty=1.0), usage=False) as server:
        assert ask(server).text == ""


def test_the_name_of_the_token_field() -> None:
    with MockServer() as server:
        ask(server, token_field="max_completion_tokens")
        assert "max_tokens" not in server.bodies[0]
        assert server.bodies[0]["max_completion_tokens"] == 512
    assert OpenAIBackend("m", api_key=KEY).token_field == "max_completion_tokens"
    assert OpenAIBackend("m", "https://x.openai.azure.com/v1", KEY).token_field == "max_completion_tokens"
    assert OpenAIBackend("m", "https://notopenai.com/v1").token_field == "max_tokens"


def test_a_model_that_takes_no_temperature() -> None:
    with MockServer() as server:
        ask(server, send_temperature=False)
        assert not {"temperature", "top_p"} & set(server.bodies[0])
        with pytest.raises(CallError, match="send_temperature=True"):
            ask(server, Sampling(temperature=0.7), send_temperature=False)


def test_more_fields_are_sent_and_named() -> None:
    with MockServer() as server:
        ask(server, extra={"reasoning_effort": "low"})
        assert server.bodies[0]["reasoning_effort"] == "low"
    assert OpenAIBackend("m", "http://h/v1", extra={"top_k": 1}).model == 'openai:m {"top_k":1}'


def test_a_local_server_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hosted-key")
    with MockServer() as server:
        assert ask(server, api_key=None).text == "one two three"
        # The key for the hosted API is not sent elsewhere.
        assert server.authorizations == {"Bearer none"}


def test_keys_and_addresses_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="set OPENAI_API_KEY"):
        OpenAIBackend("m")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert OpenAIBackend("m").model == "openai:m"
    with MockServer() as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        ask(server, url=None, api_key=None)
        assert server.authorizations == {f"Bearer {KEY}"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": ""}, "model: it must be"),
        ({"timeout": 0}, "timeout 0"),
        ({"timeout": float("nan")}, "timeout nan"),
        ({"url": "localhost"}, "must look like"),
        ({"token_field": "tokens"}, "is not one of"),
        ({"url": "http://a:b@h/v1", "api_key": KEY}, "one of them"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OpenAIBackend(**{"model": "m", "url": "http://h/v1", **options})


@pytest.mark.parametrize(
    "reply",
    [
        lambda body: Reply(status=401, message=f"Incorrect API key provided: {KEY}. Header: Bearer {KEY}"),
        lambda body: Reply(status=500, message=f"you sent {KEY}"),
        lambda body: Reply(raw=f"<p>{KEY}</p>"),
        lambda body: Reply(raw=f'{{"error": "{KEY}"}}'),
    ],
)
def test_a_key_is_shown_nowhere(reply: Callable[[dict[str, Any]], Reply], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with MockServer(reply=reply) as server:
        with pytest.raises((CallError, TransientError)) as caught:
            ask(server)
        assert server.authorizations == {f"Bearer {KEY}"}
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + caplog.text
    assert "0123456789" not in shown
    assert "***" in shown
    backend = OpenAIBackend("m", server.url, KEY)
    assert "0123456789" not in repr(backend) + backend.model


def test_a_password_in_the_url_is_sent_and_shown_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with answering(Reply(status=403, message="ann:hunter2 may not")) as server:
        url = server.url.replace("//", "//ann:hunter2@")
        with pytest.raises(CallError) as caught:
            ask(server, url=url, api_key=None)
        assert server.authorizations == {"Basic YW5uOmh1bnRlcjI="}
    backend = OpenAIBackend("m", url)
    assert backend.model == "openai:m"
    shown = "".join(traceback.format_exception(caught.value)) + caplog.text + repr(backend)
    assert "hunter2" not in shown
    assert "YW5uOmh1bnRlcjI=" not in shown


def test_many_calls_at_once() -> None:
    with MockServer(delay=0.1) as server:
        backend = OpenAIBackend("m", server.url, timeout=20)

        async def go() -> list[Completion]:
            chats: list[list[Message]] = [[{"role": "user", "content": f"call {n}"}] for n in range(128)]
            replies = await asyncio.gather(*(backend.complete(chat, Sampling()) for chat in chats))
            await backend.close()
            return replies

        assert [reply.text for reply in asyncio.run(go())] == [f"call {n}" for n in range(128)]
        assert server.most_at_once > 64
        assert set(server.answered.values()) == {1}


def test_a_cancelled_call_leaves_the_backend_usable() -> None:
    with MockServer(faults=Faults(hang=1.0, at_most=1)) as server:
        backend = OpenAIBackend("m", server.url, timeout=20)

        async def go() -> Completion:
            task = asyncio.create_task(backend.complete(CHAT, Sampling()))
            while not server.at_once:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            try:
                return await backend.complete(CHAT, Sampling())
            finally:
                await backend.close()

        assert asyncio.run(go()).text == "one two three"


def test_a_backend_outlives_its_event_loop() -> None:
    with MockServer() as server:
        backend = OpenAIBackend("m", server.url, timeout=5)

        async def go() -> str:
            text = (await backend.complete(CHAT, Sampling())).text
            await backend.close()
            await backend.close()
            return text

        assert [asyncio.run(go()), asyncio.run(go())] == ["one two three"] * 2
