from __future__ import annotations

import asyncio
import email.utils
import logging
import math
import sys
import time
import traceback
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("aiohttp")

from tests.llm.server import Faults, MockServer, Reply
from tripletune.core.calls import CallError, Sampling, SetupError, TransientError, ledger_name, redact
from tripletune.llm.backends import LLMOptions, open_client
from tripletune.llm.backends._responses import read_chat, retry_after, sum_of_counts
from tripletune.llm.backends.anthropic import AnthropicBackend, messages_body, read_message
from tripletune.llm.backends.openai import OpenAIBackend, chat_body

KEY = "sk-test-0123456789"
CHAT: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one two three"}]
KINDS: Any = [OpenAIBackend, AnthropicBackend]
both = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _no_settings_of_the_machine(monkeypatch):
    for provider in ("OPENAI", "ANTHROPIC"):
        for name in ("API_KEY", "BASE_URL", "AUTH_TOKEN"):
            monkeypatch.delenv(f"{provider}_{name}", raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def name_of(kind):
    return "openai" if kind is OpenAIBackend else "anthropic"


def url_of(kind, server):
    return server.url if kind is OpenAIBackend else server.root


def make(kind, url="http://h", key=KEY, **options):
    return kind(LLMOptions(name_of(kind), "m", url, **options), key)


def ask(kind, server, sampling=None, **options):
    """A call over a backend of its own."""
    backend = make(kind, url_of(kind, server), **options)

    async def go():
        try:
            return await backend.complete(CHAT, sampling or Sampling())
        finally:
            await backend.close()

    return asyncio.run(go())


def answering(reply):
    return MockServer(reply=lambda body: reply)


def essence(reply):
    return reply.text, reply.finish_reason, reply.prompt_tokens, reply.completion_tokens


# Requests and replies.


def test_a_chat_completion():
    sampling = Sampling(0.5, 0.9, 9, 7, '{"type": "object"}')
    with MockServer(reply=lambda body: "four five") as server:
        reply = ask(OpenAIBackend, server, sampling, extra='{"top_k": 3}')
        assert essence(reply) == ("four five", "stop", 5, 2)
        assert reply.seconds > 0
        schema = {"name": "reply", "strict": True, "schema": {"type": "object"}}
        assert server.bodies[0] == {
            **{"model": "m", "messages": CHAT, "temperature": 0.5, "top_p": 0.9, "max_tokens": 9},
            **{"seed": 7, "top_k": 3},
            "response_format": {"type": "json_schema", "json_schema": schema},
        }
        assert server.authorizations == {KEY}
        ask(OpenAIBackend, server)
        assert set(server.bodies[1]) == {"model", "messages", "temperature", "top_p", "max_tokens"}


def test_a_message():
    with MockServer(reply=lambda body: "four five") as server:
        reply = ask(AnthropicBackend, server, Sampling(max_tokens=9, seed=7))
        # Two of them were read from the cache: they are tokens of the prompt all the same.
        assert essence(reply) == ("four five", "stop", 5, 2)
        assert (reply.cache_read, reply.cache_written) == (2, 0)
        assert server.bodies[0] == {
            **{"model": "m", "messages": CHAT[1:], "max_tokens": 9},
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        }
        assert server.authorizations == {KEY}


def test_shapes_of_a_message():
    reasons = {"end_turn": "stop", "max_tokens": "length", "refusal": "refusal", None: "unfinished"}
    for reason, expected in reasons.items():
        blocks = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        reply = read_message({"content": blocks, "stop_reason": reason})
        assert (reply.text, reply.finish_reason, reply.prompt_tokens) == ("ab", expected, 0)
    assert read_message({"content": None}) is None
    whole = read_message({"content": [{"type": "text", "text": "a"}]})
    assert (whole.finish_reason, whole.is_whole) == ("stop", True), "a server without this field"


SHAPES = [
    ({"content": None}, "stop", ("", "stop")),
    ({"content": "x"}, None, ("x", "unfinished")),
    ({"content": None, "refusal": "I won't"}, "stop", ("", "refusal")),
    ({"content": "x"}, "content_filter", ("x", "content_filter")),
    ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "stop", ("ab", "stop")),
]


def test_shapes_of_a_chat_completion():
    for message, finish, expected in SHAPES:
        reply = read_chat({"choices": [{"message": message, "finish_reason": finish}], "usage": None})
        assert essence(reply) == (*expected, 0, 0)
    assert [read_chat(one) for one in ({}, {"choices": []}, {"choices": [{"message": None}]})] == [None] * 3


# Reasons of OpenAI, Anthropic, Gemini, Cohere, TGI and gateways.
WHOLE = ("stop", "STOP", "end_turn", "stop_sequence", "eos_token", "EOS", "COMPLETE", "completed")
PARTS = (
    "length", "max_tokens", "MAX_TOKENS", "model_length", "max_output_tokens", "incomplete", "content_filter", "SAFETY",
    "RECITATION", "refusal", "pause_turn", "tool_calls", "error", "abort", "cancelled", "unknown", None,
)  # fmt: skip


@pytest.mark.parametrize("reason", [*WHOLE, *PARTS])
def test_only_reasons_that_end_a_reply_make_it_whole(reason):
    chat = read_chat({"choices": [{"message": {"content": "x"}, "finish_reason": reason}]})
    message = read_message({"content": [{"type": "text", "text": "x"}], "stop_reason": reason})
    assert (chat.is_whole, message.is_whole) == (reason in WHOLE, reason in WHOLE)


@pytest.mark.parametrize("place", ["body", "choice", "message"])
@pytest.mark.parametrize("error", [{"code": 502, "message": "upstream\nfailed"}, "upstream failed"])
def test_an_error_beside_a_text_makes_it_a_part(place, error):
    message = {"content": "The river flows from"}
    choice = {"message": message, "finish_reason": "stop"}
    body = {"choices": [choice], "error": None}
    {"body": body, "choice": choice, "message": message}[place]["error"] = error
    reply = read_chat(body)
    assert (reply.finish_reason, reply.error, reply.is_whole) == ("error", "upstream failed", False)
    block = {"content": [{"type": "text", "text": "The river"}], "stop_reason": "end_turn", "error": error}
    assert read_message(block).finish_reason == "error"


@pytest.mark.parametrize(
    ("usage", "read", "written"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 6.0, "cache_creation_tokens": 2}}, 6, 2),
        ({"prompt_cache_hit_tokens": "6", "prompt_cache_miss_tokens": 3}, 6, 0),
        ({"prompt_tokens_details": None}, 0, 0),
        ({"prompt_tokens_details": [1]}, 0, 0),
    ],
)
def test_tokens_of_the_providers_cache(usage, read, written):
    choices = [{"message": {"content": "x"}}]
    reply = read_chat({"choices": choices, "usage": {"prompt_tokens": 9, **usage}})
    assert (reply.prompt_tokens, reply.cache_read, reply.cache_written) == (9, read, written)


@both
def test_a_temperature_is_sent_where_the_model_takes_one(kind):
    body = make(kind, send_temperature="yes").body(CHAT, Sampling(temperature=0.5, top_p=0.5))
    assert (body["temperature"], body["top_p"]) == (0.5, 0.5)
    silent = make(kind, send_temperature="no")
    assert not {"temperature", "top_p"} & set(silent.body(CHAT, Sampling()))
    with pytest.raises(SetupError, match="Set send_temperature to yes"):
        silent.body(CHAT, Sampling(temperature=0.7))


def test_what_only_messages_need():
    old = make(AnthropicBackend, send_temperature="yes")
    assert "top_p" not in old.body(CHAT, Sampling(temperature=0.5)), "some models take one of the two"
    assert old.headers("k") == {"x-api-key": "k", "anthropic-version": "2023-06-01"}
    assert make(AnthropicBackend).headers("k")["anthropic-version"] > "2023-06-01"
    with pytest.raises(SetupError, match="JSON schema"):
        make(AnthropicBackend).body(CHAT, Sampling(schema="{}"))


@pytest.mark.parametrize(
    ("url", "field"),
    [
        (None, "max_completion_tokens"),
        ("https://x.openai.azure.com/v1", "max_completion_tokens"),
        ("https://notopenai.com/v1", "max_tokens"),
    ],
)
def test_the_name_of_the_token_field(url, field):
    assert make(OpenAIBackend, url).body(CHAT, Sampling())[field] == 512
    chosen = make(OpenAIBackend, url, token_field="max_completion_tokens").body(CHAT, Sampling())
    assert [name for name in chosen if name.startswith("max")] == ["max_completion_tokens"]


# What goes wrong.


FAULTS = {"rate_limit": "slow down", "server_error": "failed", "cut_off": "not a JSON", "drop": "no connection"}


@pytest.mark.parametrize(("kind", "fault"), [(OpenAIBackend, fault) for fault in FAULTS] + [(AnthropicBackend, "drop")])
def test_faults_are_transient(kind, fault):
    with MockServer(faults=Faults(**{fault: 1.0}, at_most=1, retry_after=0.25)) as server:
        with pytest.raises(TransientError, match=FAULTS[fault]) as caught:
            ask(kind, server)
        assert caught.value.retry_after == (0.25 if fault == "rate_limit" else None)
        # One attempt, the SDK does not try again by itself; the next one is answered.
        assert server.count("request").total() == 1
        assert ask(kind, server).text == "one two three"


@pytest.mark.parametrize(
    ("kind", "reply", "words", "seconds"),
    [
        (OpenAIBackend, Reply(status=408), "408", None),
        (OpenAIBackend, Reply(status=503, headers={"retry-after-ms": "1500"}), "503", 1.5),
        (AnthropicBackend, Reply(status=529), "529", None),
        (OpenAIBackend, Reply(status=400, headers={"x-should-retry": "true"}), "400", None),
        (OpenAIBackend, Reply(raw="<html>Bad gateway</html>"), "not a JSON object: <html>", None),
        (AnthropicBackend, Reply(raw="{}"), "without a reply", None),
        (OpenAIBackend, Reply(raw='{"choices": null, "error": {"message": "upstream died"}}'), "upstream died", None),
    ],
)
def test_what_is_worth_another_attempt(kind, reply, words, seconds):
    with answering(reply) as server, pytest.raises(TransientError, match=words) as caught:
        ask(kind, server)
    assert caught.value.retry_after == seconds


@pytest.mark.parametrize(
    ("reply", "advice", "of_every_call"),
    [
        (Reply(status=401, message="bad key"), "check the key", True),
        (Reply(status=402, message="pay"), "no credit left", True),
        (Reply(status=403, message="your input was flagged"), "may not use", False),
        (Reply(status=404, message="no such model"), "check the model's name", True),
        (Reply(status=400, message="'max_tokens' is not supported here"), "token_field", True),
        (Reply(status=400, message="the maximum context length is 10, lower max_tokens"), "shorten", False),
        (Reply(status=400, message="Your credit balance is too low"), "no credit left", True),
        (Reply(status=429, raw='{"error": {"message": "pay", "code": "insufficient_quota"}}'), "no credit", True),
        (Reply(status=500, headers={"x-should-retry": "false"}), "the request was refused", False),
    ],
)
def test_what_no_attempt_will_answer(reply, advice, of_every_call):
    with answering(reply) as server, pytest.raises(CallError, match=advice) as caught:
        ask(OpenAIBackend, server)
    assert isinstance(caught.value, SetupError) is of_every_call


@both
def test_a_proxy_of_the_environment_is_used_unless_the_host_is_exempt(kind, monkeypatch):
    with answering("by proxy") as proxy:
        # The proxy is the mock server itself, which answers for a host that does not exist.
        monkeypatch.setenv("HTTP_PROXY", proxy.root)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        address = "http://model.invalid" + ("/v1" if kind is OpenAIBackend else "")

        async def go():
            backend = make(kind, address)
            try:
                return await backend.complete(CHAT, Sampling())
            finally:
                await backend.close()

        assert asyncio.run(go()).text == "by proxy"
        monkeypatch.setenv("NO_PROXY", "model.invalid")
        with pytest.raises(TransientError, match=r"model\.invalid"):
            asyncio.run(go())


@both
def test_a_password_of_netrc_is_not_sent(kind, monkeypatch, tmp_path):
    """The key is what a call authenticates with; a second header would be an error of aiohttp."""
    netrc = tmp_path / "netrc"
    netrc.write_text("default login someone password secret\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    with answering("fine") as server:
        assert ask(kind, server).text == "fine"
        assert not any("Basic" in sent for sent in server.authorizations)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@both
def test_prompts_follow_no_redirect(kind, status):
    with MockServer() as other:
        reply = Reply(status=status, headers={"Location": f"{other.url}/chat/completions"})
        with answering(reply) as server, pytest.raises(SetupError, match=f"redirects to {other.url}.*set url"):
            ask(kind, server)
        assert not other.bodies


# Keys and addresses.


@both
def test_keys_and_addresses_from_the_environment(kind, monkeypatch):
    with pytest.raises(ValueError, match=f"set {kind.key_variable}"):
        make(kind, None, None)
    assert make(kind, extra='{"b": 1, "a": {"x": "é"}}').model == f'{name_of(kind)}:m {{"a":{{"x":"é"}},"b":1}}'
    with MockServer() as server:
        monkeypatch.setenv(kind.url_variable, url_of(kind, server))
        options = LLMOptions(name_of(kind), "m")

        async def go(environment):
            async with open_client(options, environment) as client:
                await client.chat(CHAT, role="r")

        asyncio.run(go({kind.key_variable: KEY}))
        asyncio.run(go({}))
        assert server.authorizations == {KEY, "none"}
    for url in ("localhost:8000", "http://", "http://u:secret@h/v1", "http://h:port/v1", "http://["):
        monkeypatch.setenv(kind.url_variable, url)
        with pytest.raises(ValueError, match=f"{kind.url_variable} must look like") as error:
            make(kind, None)
        assert "secret" not in str(error.value)


def test_the_providers_key_does_not_go_to_another_server():
    async def main(url):
        async with open_client(LLMOptions(model="m", url=url), {"OPENAI_API_KEY": KEY}) as client:
            await client.chat(CHAT, role="r")

    with MockServer() as server:
        asyncio.run(main(server.url))
        assert server.authorizations == {"none"}


@pytest.mark.parametrize(
    ("kind", "reply"),
    [
        (OpenAIBackend, Reply("yes")),
        (AnthropicBackend, Reply(status=401, message=f"Incorrect API key provided: {KEY}. Header: Bearer {KEY}")),
        (OpenAIBackend, Reply(status=500, message=f"you sent {KEY}")),
        (OpenAIBackend, Reply(raw=f"<p>{KEY}</p>")),
        (OpenAIBackend, Reply(raw=f'{{"error": "{KEY}"}}')),
    ],
)
def test_a_key_reaches_no_file_no_log_line_and_no_error(kind, reply, tmp_path, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    shown = []

    async def main(url):
        options = LLMOptions(name_of(kind), "m", url, "MY_KEY", str(tmp_path / "l.sqlite"), attempts=1)
        client = open_client(options, {"MY_KEY": KEY})
        shown.extend([client.model, repr(options), repr(client), repr(client.backend), repr(vars(client.backend))])
        try:
            await client.chat(CHAT, role="r")
        except CallError as error:
            shown.extend(traceback.format_exception(error))
        # Read while the WAL is there: closing moves it into the file.
        shown.extend(file.read_bytes().decode("latin-1") for file in tmp_path.iterdir())
        await client.close()

    with answering(reply) as server:
        asyncio.run(main(url_of(kind, server)))
        assert server.authorizations == {KEY}
    shown.extend(file.read_bytes().decode("latin-1") for file in tmp_path.iterdir())
    shown.extend([caplog.text, *capfd.readouterr()])
    assert not [text for text in shown if "0123456789" in text]
    assert any((reply.text or "***") in text for text in shown)


@given(st.text(), st.text(alphabet=st.characters(categories=["L", "N"]), min_size=5))
def test_a_secret_is_never_left(before, secret):
    assert secret not in redact(f"{before}{secret}, {secret}.", [secret, ""]).replace("***", " ")


def test_what_looks_like_a_key_is_hidden():
    for text in ("Incorrect API key: sk-proj-abc_12*3", "Authorization: Bearer abc.def", "http://ann:word@host/v1"):
        shown = redact(text)
        assert "***" in shown
        assert not any(part in shown for part in ("proj", "abc", "word"))
    text = "the model's max_tokens: 12 (see https://host/v1/x), ask-me-anything"
    assert redact(text, [""]) == text


# Small parts.


WAITS = [
    ({}, None),
    ({"retry-after": "7"}, 7.0),
    ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
    ({"retry-after-ms": "soon", "retry-after": "7"}, 7.0),
    ({"retry-after": "-3"}, None),
    ({"retry-after": "nan"}, None),
    ({"retry-after": email.utils.formatdate(1030, usegmt=True)}, 30.0),
    ({"retry-after": email.utils.formatdate(900, usegmt=True)}, 0.0),
]


def test_retry_after(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    assert [retry_after(headers) for headers, _ in WAITS] == [seconds for _, seconds in WAITS]


@given(st.dictionaries(st.sampled_from(["retry-after", "retry-after-ms"]), st.text()))
def test_retry_after_takes_anything(headers):
    found = retry_after(headers)
    assert found is None or (math.isfinite(found) and found >= 0)


def test_names_counts_and_the_extra(monkeypatch):
    assert ledger_name("openai", "m", None) == ledger_name("openai", "m", {}) == "openai:m"
    values = {"a": 3, "b": 4, "c": None, "d": "x", "e": -1, "f": True, "g": 2**70, "h": math.nan, "i": "inf", "j": []}
    assert (sum_of_counts(values, *"abcdefghijk"), sum_of_counts("x", "a")) == (7, 0)
    assert sum_of_counts({"a": 1000.0, "b": "5", "c": "6.0"}, *"abc") == 1011
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(ImportError, match="aiohttp"):
        make(OpenAIBackend)


# Event loops.


def test_many_calls_at_once_and_then_another_event_loop():
    with MockServer(delay=0.1) as server:
        backend = make(OpenAIBackend, server.url)

        async def go(numbers):
            chats = [[{"role": "user", "content": f"call {n}"}] for n in numbers]
            replies = await asyncio.gather(*(backend.complete(chat, Sampling()) for chat in chats))
            await backend.close()
            await backend.close()
            return [reply.text for reply in replies]

        assert asyncio.run(go(range(128))) == [f"call {n}" for n in range(128)]
        # The backend outlives its event loop.
        assert asyncio.run(go([128])) == ["call 128"]
        assert server.most_at_once > 64
        assert set(server.count("answered").values()) == {1}


def candidates(*logprobs):
    return [{"token": f"t{number}", "logprob": logprob} for number, logprob in enumerate(logprobs)]


def test_scores_are_the_means_over_a_replys_tokens():
    content = [
        {"logprob": -0.1, "top_logprobs": candidates(-0.1, -2.1)},
        {"logprob": -3.0, "top_logprobs": candidates(-0.5, -1.5)},
    ]
    choice = {"message": {"content": "x"}, "logprobs": {"content": content}}
    scores = read_chat({"choices": [choice]}).scores
    assert scores == (pytest.approx(-1.55), pytest.approx(1.5))
    of_prompt = {"token_logprobs": [-0.1, -3.0], "top_logprobs": [{"a": -0.1, "b": -2.1}, {"c": -0.5, "d": -1.5}]}
    assert read_chat({"choices": [{"text": "x", "logprobs": of_prompt}]}).scores == pytest.approx(scores)


@pytest.mark.parametrize(
    "logprobs",
    [
        None,
        [],
        {},
        {"content": []},
        {"content": "x"},
        {"content": [{}]},
        {"content": [{"logprob": -1.0, "top_logprobs": candidates(-1.0)}]},
        {"token_logprobs": None, "top_logprobs": None},
        {"token_logprobs": [None], "top_logprobs": [None]},
    ],
)
def test_half_of_the_log_probabilities_says_nothing(logprobs):
    assert read_chat({"choices": [{"message": {"content": "x"}, "logprobs": logprobs}]}).scores is None


def test_log_probabilities_are_asked_for_only_with_a_scored_call():
    chat = [{"role": "user", "content": "x"}]
    options = LLMOptions(model="m")
    assert "logprobs" not in chat_body(options, True, chat, Sampling())
    body = chat_body(options, True, chat, Sampling(scored=True))
    assert (body["logprobs"], body["top_logprobs"]) == (True, 2)
    with pytest.raises(SetupError, match="Anthropic's API has none"):
        messages_body(options, chat, Sampling(scored=True))
