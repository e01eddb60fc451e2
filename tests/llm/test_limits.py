"""`llm.limits`: the rates of calls and tokens, on virtual time."""

import asyncio
from bisect import bisect_left

import pytest

from tests.llm.virtual_time import now, run_virtually
from tripletune.core.calls import Message, Sampling
from tripletune.llm.limits import Limits

CHAT: list[Message] = [{"role": "user", "content": "x" * 400}]
SAMPLING = Sampling(max_tokens=96)
ESTIMATE = 100 + 4 + 96


async def send(limits, calls, used=None, seconds=0.0):
    """Make calls at once; the times at which they were let through, from 0."""
    start, times = now(), []

    async def one():
        async with limits.permit(CHAT, SAMPLING) as cost:
            times.append(now() - start)
            await asyncio.sleep(seconds)
            if used is not None:
                cost(used)

    await asyncio.gather(*(one() for _ in range(calls)))
    return times


def busiest_minute(times, cost=1):
    return max(cost * (bisect_left(times, time + 60) - number) for number, time in enumerate(times))


@pytest.mark.parametrize(("rate", "calls"), [(600, 2000), (3, 9)])
def test_requests_a_minute_are_kept_and_used(rate, calls):
    times = run_virtually(send(Limits(requests_per_minute=rate), calls))
    assert busiest_minute(times) <= max(1.09 * rate, rate + 1)
    assert times[-1] == pytest.approx(60 * calls / rate, rel=0.15, abs=21)


@pytest.mark.parametrize(("rate", "calls"), [(20_000, 300), (100, 3)])
def test_tokens_a_minute_are_kept(rate, calls):
    # A call of 200 tokens goes through where a minute has 100.
    times = run_virtually(send(Limits(tokens_per_minute=rate), calls, used=ESTIMATE))
    assert busiest_minute(times, ESTIMATE) <= max(1.1 * rate, ESTIMATE)
    assert times[-1] == pytest.approx(60 * calls * ESTIMATE / rate, rel=0.1)


@pytest.mark.parametrize("used", [0, ESTIMATE // 4, ESTIMATE * 3])
def test_the_rate_is_that_of_the_real_tokens(used):
    # A slow trickle at first, so that the estimate is corrected before most calls go.
    async def main():
        limits = Limits(concurrency=4, tokens_per_minute=20_000)
        return await send(limits, 400, used=used, seconds=0.01)

    times = run_virtually(main())
    assert times[-1] == pytest.approx(60 * 400 * used / 20_000, rel=0.1, abs=2)


def test_a_cancelled_call_gives_its_place_back():
    async def main():
        limits = Limits(concurrency=1, tokens_per_minute=60)
        waiting = [asyncio.create_task(send(limits, 1)) for _ in range(3)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended)
        async with limits.permit(CHAT, SAMPLING):
            entered.append(True)

    entered: list[bool] = []
    run_virtually(asyncio.wait_for(main(), 10_000))
    assert entered == [True]
