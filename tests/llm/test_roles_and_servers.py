import asyncio

import pytest

from tests.llm.server import MockServer, Reply
from tripletune.core.calls import Backend, Completion, LLMClient, RoleClients, TransientError, in_role
from tripletune.llm.backends import LLMOptions, open_client
from tripletune.llm.backends._servers import Servers
from tripletune.llm.ledger_client import LedgerClient, RetriesExhausted, Retry
from tripletune.llm.limits import Limits


class Server(Backend, LLMClient):
    """Counts its calls; one that is down refuses them."""

    def __init__(self, model="m", seconds=0.0, down=False):
        self.model, self.seconds, self.down, self.calls = model, seconds, down, 0

    async def complete(self, messages, sampling):
        self.calls += 1
        await asyncio.sleep(self.seconds)
        if self.down:
            raise TransientError("no connection")
        return Completion(self.model)

    async def chat(self, messages, *, role, sampling=None, question_id=""):
        return await self.complete(messages, sampling)

    def count_tokens(self, messages):
        return 7

    async def close(self):
        self.down = True


def test_the_least_busy_server_gets_a_call_and_one_that_is_down_is_left_alone():
    slow, fast, down = Server(seconds=0.2), Server(seconds=0.02), Server(down=True)
    servers = Servers([slow, fast, down])

    async def run():
        async def worker():
            for _ in range(10):
                await servers.complete([], None)

        await asyncio.gather(*(worker() for _ in range(4)))

    asyncio.run(run())
    assert slow.calls + fast.calls == 40
    assert fast.calls > 2 * slow.calls
    assert down.calls <= 2
    slow.down = fast.down = True
    with pytest.raises(TransientError):
        asyncio.run(servers.complete([], None))
    asyncio.run(servers.close())


def test_a_run_goes_on_with_one_of_two_urls(tmp_path):
    with MockServer(lambda body: "yes") as up, MockServer(lambda body: Reply(status=503)) as down:
        url = f"{down.url}, {up.url},http://127.0.0.1:9/v1"
        options = LLMOptions(model="m", url=url, ledger=str(tmp_path / "l.sqlite"), attempts=1)

        async def run():
            async with open_client(options) as client:
                calls = (client.chat([{"role": "user", "content": str(n)}], role="r") for n in range(20))
                return await asyncio.gather(*calls)

        assert {reply.text for reply in asyncio.run(run())} == {"yes"}
    with pytest.raises(ValueError, match="url must look like"):
        LLMOptions(model="m", url="http://a/v1,b")


def test_a_role_has_its_client():
    default, student, other = Server("default"), Server("student"), Server("other")
    client = RoleClients(default, {"cirag": other, "cirag.integrate": student})

    async def run():
        roles = ("cirag.integrate", "cirag.integrate.repair", "cirag.answer", "ciragx", "t2rag.resolve")
        return [(await client.chat([], role=role)).text for role in roles]

    assert asyncio.run(run()) == ["student", "student", "other", "default", "default"]
    assert (client.model, client.count_tokens([])) == ("default", 7)
    asyncio.run(client.close())
    assert all(one.down for one in (default, student, other))
    assert in_role({"a": 1}, "b", 2) == 2


@pytest.mark.parametrize(("timeout", "calls"), [(0.02, 1), (60.0, 2)])
def test_a_server_rests_after_a_call_that_took_too_long_and_not_after_one_that_was_given_up(timeout, calls):
    first, second = Server(seconds=60), Server()
    servers = Servers([first, second])
    client = LedgerClient(servers, limits=Limits(timeout=timeout), retry=Retry(1))

    async def run():
        with pytest.raises((RetriesExhausted, TimeoutError)):
            await asyncio.wait_for(client.chat([{"role": "user", "content": "a"}], role="r"), 0.3)
        first.seconds = 0
        await servers.complete([], None)

    asyncio.run(run())
    assert first.calls == calls
