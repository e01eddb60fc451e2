"""The mock server is what other tests trust: it is tested too."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.models.llm.server import (
    Faults,
    MockServer,
    Reply,
    answered_in,
    body_key,
    import_reply,
    read_log,
    server_process,
)


def body(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


def post(url: str, bodies: list[dict[str, Any]], path: str = "/chat/completions") -> list[tuple[int, str]]:
    """Status and text of each; 0 and the kind of error if there was none."""

    async def one(session: aiohttp.ClientSession, item: dict[str, Any]) -> tuple[int, str]:
        try:
            async with session.post(url + path, json=item) as response:
                return response.status, await response.text()
        except aiohttp.ClientError as error:
            return 0, type(error).__name__

    async def go() -> list[tuple[int, str]]:
        async with aiohttp.ClientSession() as session:
            return [await one(session, item) for item in bodies]

    return asyncio.run(go())


def test_faults_do_not_depend_on_the_order_of_requests() -> None:
    faults = Faults(rate_limit=0.3, server_error=0.2, drop=0.1, cut_off=0.1, seed=5)
    bodies = [body(f"q{n}") for n in range(40)]

    def statuses(order: list[dict[str, Any]]) -> dict[str, int]:
        with MockServer(faults=faults) as server:
            found = {body_key(item): status for item, (status, _) in zip(order, post(server.url, order))}
            assert sum(server.faulty.values()) + sum(server.answered.values()) == 40
            return found

    forward = statuses(bodies)
    assert forward == statuses(bodies[::-1])
    assert set(forward.values()) == {0, 200, 429, 500}


def test_faults_end() -> None:
    with MockServer(faults=Faults(server_error=1.0, at_most=2)) as server:
        found = post(server.url, [body("q")] * 4)
        assert [status for status, _ in found] == [500, 500, 200, 200]
        assert server.answered[body_key(body("q"))] == 2


def test_probabilities_above_one() -> None:
    with pytest.raises(ValueError, match="above 1"):
        Faults(drop=0.6, hang=0.6)


def test_the_log_says_what_was_answered(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with MockServer(faults=Faults(rate_limit=1.0, at_most=1), log=log) as server:
        post(server.url, [body("a"), body("a"), body("b"), body("b"), body("b")])
    log.write_text(log.read_text() + '{"event": "answ', encoding="utf-8")
    assert answered_in(log) == {body_key(body("a")): 1, body_key(body("b")): 2}
    events = [event["event"] for event in read_log(log)]
    assert events == ["request", "fault", "request", "answered"] * 2 + ["request", "answered"]
    assert read_log(tmp_path / "none") == []


def test_replies_of_their_own() -> None:
    replies = {"status": Reply(status=404, message="no"), "raw": Reply(raw="{}"), "end": Reply("x", "content_filter")}
    with MockServer(reply=lambda item: replies[item["messages"][-1]["content"]]) as server:
        found = post(server.url, [body(name) for name in replies])
        assert found[0][0] == 404
        assert found[1] == (200, "{}")
        assert json.loads(found[2][1])["choices"][0]["finish_reason"] == "content_filter"
        assert json.loads(post(server.root, [{**body("end"), "max_tokens": 3}], "/v1/messages")[0][1])["content"]


def test_a_process_of_its_own(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    faults = Faults(empty=1.0, at_most=1, retry_after=0.5)
    with server_process(faults=faults, log=log, reply="tests.models.llm.server:echo") as url:
        texts = [json.loads(text)["choices"][0]["message"]["content"] for _, text in post(url, [body("hello")] * 2)]
        assert texts == ["", "hello"]
    # It is killed, and what it noted is there.
    assert list(answered_in(log).values()) == [1]
    with pytest.raises(AssertionError):
        assert post(url, [body("hello")])[0][0] == 200


def test_importing_a_reply_function() -> None:
    found: Callable[[dict[str, Any]], Any] = import_reply("tests.models.llm.server:body_key")
    assert found({}) == body_key({})
