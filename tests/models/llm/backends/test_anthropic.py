import asyncio
import logging
import traceback
from typing import Any

import pytest

pytest.importorskip("anthropic")

from tests.models.llm.server import Faults, MockServer, Reply
from tripletune.models.llm.backends import anthropic as module
from tripletune.models.llm.backends.anthropic import AnthropicBackend
from tripletune.models.llm.client import CallError, Message, Sampling, TransientError
from tripletune.models.local.generation import Completion

KEY = "sk-ant-test-0123456789"
CHAT: list[Message] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one two three"}]
LONG = "Follow these rules. " * 200


@pytest.fixture(autouse=True)
def _no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)


def ask_all(server: MockServer, chats: list[list[Message]], sampling: Sampling, **options: Any) -> list[Completion]:
    backend = AnthropicBackend("m", **{"url": server.root, "api_key": KEY, "timeout": 5.0, **options})

    async def go() -> list[Completion]:
        try:
            return [await backend.complete(chat, sampling) for chat in chats]
        finally:
            await backend.close()

    return asyncio.run(go())


def ask(server: MockServer, sampling: Sampling | None = None, **options: Any) -> Completion:
    return ask_all(server, [CHAT], sampling or Sampling(), **options)[0]


def test_a_reply() -> None:
    with MockServer(reply=lambda body: "four five END six") as server:
        reply = ask(server, Sampling(max_tokens=9, stop=("END",), seed=7))
        assert (reply.text, reply.finish_reason) == ("four five ", "stop")
        assert (reply.prompt_tokens, reply.completion_tokens) == (5, 2)
        assert reply.seconds > 0
        assert server.bodies[0] == {
            "model": "m",
            "system": "Be brief.",
            "messages": [{"role": "user", "content": "one two three"}],
            "max_tokens": 9,
            "stop_sequences": ["END"],
        }
        assert server.authorizations == {f"Bearer {KEY}"}


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("refusal", "refusal"),
    ],
)
def test_how_a_reply_ended(reason: str, expected: str) -> None:
    with MockServer(reply=lambda body: Reply("x", reason)) as server:
        assert ask(server).finish_reason == expected


def test_only_text_is_the_reply() -> None:
    raw = (
        '{"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}, '
        '{"type": "text", "text": "b"}], "stop_reason": null}'
    )
    with MockServer(reply=lambda body: Reply(raw=raw)) as server:
        reply = ask(server)
        assert (reply.text, reply.finish_reason, reply.prompt_tokens) == ("ab", "stop", 0)


def test_a_long_system_prompt_is_cached_from_its_second_call_on() -> None:
    chats: list[list[Message]] = [
        [{"role": "system", "content": LONG}, {"role": "user", "content": f"question {n}"}] for n in range(3)
    ]
    with MockServer() as server:
        replies = ask_all(server, chats, Sampling())
        block = {"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}
        assert [body["system"] for body in server.bodies] == [LONG, [block], [block]]
        # Written to or read from the cache: they are tokens of the prompt all the same.
        assert [reply.prompt_tokens for reply in replies] == [602] * 3
        ask_all(server, chats, Sampling(), cache_system=False)
        assert [body["system"] for body in server.bodies][3:] == [LONG] * 3


def test_a_short_or_single_system_prompt_is_not_cached() -> None:
    singles: list[list[Message]] = [
        [{"role": "system", "content": f"{n} {LONG}"}, {"role": "user", "content": "q"}] for n in range(3)
    ]
    with MockServer() as server:
        ask_all(server, [CHAT] * 3, Sampling())
        ask_all(server, singles, Sampling())
        assert all(isinstance(body["system"], str) for body in server.bodies)


def test_remembered_prompts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 3)
    backend = AnthropicBackend("m", "http://h", KEY)
    found = [backend._comes_again(f"{n} {LONG}") for n in (0, 1, 2, 0, 3, 0, 1)]
    assert found == [False, False, False, True, False, True, False]
    assert len(backend._seen) == 3


def test_temperature_is_sent_on_request_alone() -> None:
    with MockServer() as server:
        ask(server, Sampling(temperature=0.5), send_temperature=True)
        assert server.bodies[0]["temperature"] == 0.5
        assert "top_p" not in server.bodies[0]
        ask(server, Sampling(top_p=0.5), send_temperature=True)
        assert server.bodies[1]["top_p"] == 0.5
        with pytest.raises(CallError, match="send_temperature=True"):
            ask(server, Sampling(temperature=0.5))


def test_the_api_version_fits_what_is_sent() -> None:
    async def headers(backend: AnthropicBackend) -> Any:
        client = backend._connection._open()
        await backend.close()
        return client.default_headers

    old = asyncio.run(headers(AnthropicBackend("m", "http://h", KEY, send_temperature=True)))
    assert old["anthropic-version"] == "2023-06-01"
    new = asyncio.run(headers(AnthropicBackend("m", "http://h", KEY)))
    assert "anthropic-version" in new


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
        assert sum(server.requests.values()) == 1
        assert ask(server).text == "one two three"


@pytest.mark.parametrize(
    "reply",
    [
        Reply(status=529, message="overloaded"),
        Reply(status=413, raw="", headers={"x-should-retry": "true"}),
        Reply(raw="{}"),
        Reply(raw="null"),
    ],
)
def test_what_is_worth_another_attempt(reply: Reply) -> None:
    with MockServer(reply=lambda body: reply) as server, pytest.raises(TransientError):
        ask(server)


@pytest.mark.parametrize(
    ("status", "message", "advice"),
    [
        (401, "invalid x-api-key", "check the key"),
        (403, "no", "may not use this model"),
        (404, "model: m", "check the model's name"),
        (400, "odd", "the request was refused"),
        (400, "`temperature` is deprecated for this model", "send_temperature=False"),
        (400, "prompt is too long: 3 tokens", "shorten the prompt"),
        (400, "Your credit balance is too low", "no credit left"),
        (413, "request_too_large", "shorten the prompt"),
    ],
)
def test_what_no_attempt_will_better(status: int, message: str, advice: str) -> None:
    reply = Reply(status=status, message=message)
    with MockServer(reply=lambda body: reply) as server, pytest.raises(CallError, match=advice):
        ask(server)


def test_a_chat_of_the_system_alone() -> None:
    backend = AnthropicBackend("m", "http://127.0.0.1:9", KEY)
    with pytest.raises(CallError, match="no user turn"):
        asyncio.run(backend.complete(CHAT[:1], Sampling()))


def test_keys_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="set ANTHROPIC_API_KEY"):
        AnthropicBackend("m")
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    backend = AnthropicBackend("m", extra={"thinking": {"type": "disabled"}})
    assert backend.model == 'anthropic:m {"thinking":{"type":"disabled"}}'
    with MockServer() as server:
        # The key of the environment is not sent to another server.
        ask(server, api_key=None)
        assert server.authorizations == {"Bearer none"}
        monkeypatch.setenv("ANTHROPIC_BASE_URL", server.root)
        ask(server, url=None, api_key=None)
        assert f"Bearer {KEY}" in server.authorizations
    for options, words in (({"model": ""}, "model: it must"), ({"timeout": -1}, "timeout -1")):
        with pytest.raises(ValueError, match=words):
            AnthropicBackend(**{"model": "m", **options})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one of them"):
        AnthropicBackend("m", "http://a:b@h", KEY)


@pytest.mark.parametrize("status", [401, 500])
def test_a_key_is_shown_nowhere(status: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with MockServer(reply=lambda body: Reply(status=status, message=f"key {KEY}")) as server:
        with pytest.raises((CallError, TransientError)) as caught:
            ask(server)
        assert server.authorizations == {f"Bearer {KEY}"}
    shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value) + caplog.text
    assert "0123456789" not in shown
    assert "***" in shown
    assert "0123456789" not in repr(AnthropicBackend("m", server.root, KEY))


def test_a_password_in_the_url_is_sent_as_a_header() -> None:
    with MockServer() as server:
        ask(server, url=server.root.replace("//", "//ann:hunter2@"), api_key=None)
        assert server.authorizations == {"Basic YW5uOmh1bnRlcjI="}


def test_many_calls_at_once() -> None:
    with MockServer(delay=0.05) as server:
        backend = AnthropicBackend("m", server.root, KEY, timeout=20)

        async def go() -> list[Completion]:
            chats: list[list[Message]] = [[{"role": "user", "content": f"call {n}"}] for n in range(64)]
            replies = await asyncio.gather(*(backend.complete(chat, Sampling()) for chat in chats))
            await backend.close()
            return replies

        assert [reply.text for reply in asyncio.run(go())] == [f"call {n}" for n in range(64)]
        assert server.most_at_once > 32
