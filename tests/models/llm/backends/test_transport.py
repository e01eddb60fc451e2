import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("openai")
pytest.importorskip("aiohttp")

import openai

from tripletune.models.llm.backends.transport import Turns, http_client

URL = "http://127.0.0.1:9/v1/chat/completions"
HEADERS = [("Authorization", "Bearer k"), ("Content-Type", "application/json"), ("Accept", "application/json")]


def built(client, **options):
    return client.build_request("post", URL, **{"headers": HEADERS, "timeout": 5.0, "content": b"{}"} | options)


def shown(request):
    headers = sorted((name.lower(), value) for name, value in request.headers.multi_items())
    return request.method, str(request.url), headers, request.read(), request.extensions


async def both():
    return http_client(openai, 5.0), openai.DefaultAioHttpClient(timeout=5.0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"content": '{"text": "日本"}'},
        {"headers": openai.AsyncOpenAI(api_key="k").default_headers},
        {"params": {"api-version": "1"}},
        {"content": None},
        {"timeout": None},
    ],
)
def test_requests_are_those_of_the_library(options):
    async def run():
        quick, plain = await both()
        headers = dict(options.get("headers", HEADERS))
        given = options | {"headers": [(name, str(value)) for name, value in headers.items() if value]}
        assert shown(built(quick, **given)) == shown(built(plain, **given))
        await quick.aclose()
        await plain.aclose()

    asyncio.run(run())


def test_cookies_and_other_addresses_are_left_to_the_library():
    async def run():
        quick, _ = await both()
        assert str(built(quick).url) == URL
        assert str(quick.build_request("POST", "http://other/x", content=b"", timeout=1.0).url) == "http://other/x"
        quick.cookies.set("a", "b")
        assert built(quick).headers["cookie"] == "a=b"
        await quick.aclose()

    asyncio.run(run())


def test_without_aiohttp_the_sdk_has_its_own_client():
    def refuse(**_):
        raise RuntimeError("install the extra")

    assert http_client(SimpleNamespace(), 1.0) is None
    kind = type("Refusing", (openai.DefaultAioHttpClient,), {"__init__": lambda self, **_: refuse()})
    assert http_client(SimpleNamespace(DefaultAioHttpClient=kind), 1.0) is None


def test_replies_that_come_together_go_on_one_after_the_other() -> None:
    done: list[tuple[int, str]] = []

    async def reply(turns: Turns, number: int) -> None:
        await turns.wait()
        done.append((number, "parsed"))
        for _ in range(4):
            await asyncio.sleep(0)
        done.append((number, "sent again"))

    async def all_at_once() -> None:
        turns = Turns()
        await asyncio.gather(*(reply(turns, number) for number in range(5)))

    asyncio.run(all_at_once())
    assert done == [(number, step) for number in range(5) for step in ("parsed", "sent again")]


def test_a_reply_that_is_given_up_keeps_nobody_waiting() -> None:
    async def some_given_up() -> list[bool]:
        turns = Turns()
        waiting = [asyncio.create_task(turns.wait()) for _ in range(6)]
        await asyncio.sleep(0)
        for number in (0, 1, 4):
            waiting[number].cancel()
        await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
        await asyncio.wait_for(turns.wait(), 10)
        return [task.cancelled() for task in waiting]

    assert asyncio.run(some_given_up()) == [False, True, False, False, True, False]
