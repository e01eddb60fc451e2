from __future__ import annotations

import asyncio
from bisect import bisect_left

import pytest

from tests.models.llm.virtual_time import now, run
from tripletune.models.llm.client import Message, Sampling
from tripletune.models.llm.limits import Limits, estimate_tokens

CHAT: list[Message] = [{"role": "user", "content": "x" * 400}]
SAMPLING = Sampling(max_tokens=96)
ESTIMATE = 100 + 4 + 96


async def send(limits: Limits, calls: int, used: int | None = None, seconds: float = 0.0) -> list[float]:
    """Make calls at once; the times at which they were let through, from 0."""
    start, times = now(), []

    async def one() -> None:
        async with limits.permit(CHAT, SAMPLING) as permit:
            times.append(now() - start)
            await asyncio.sleep(seconds)
            if used is not None:
                permit.used(used)

    await asyncio.gather(*(one() for _ in range(calls)))
    return times


def busiest_minute(times: list[float], cost: int = 1) -> int:
    return max(cost * (bisect_left(times, time + 60) - number) for number, time in enumerate(times))


def test_without_limits_everything_goes_at_once():
    assert max(run(send(Limits(), 500))) < 0.5


def test_concurrency_is_kept():
    running = most = 0

    async def main() -> None:
        limits = Limits(concurrency=3)

        async def one() -> None:
            nonlocal running, most
            async with limits.permit(CHAT, SAMPLING):
                running += 1
                most = max(most, running)
                await asyncio.sleep(1)
                running -= 1

        await asyncio.gather(*(one() for _ in range(20)))

    run(main())
    assert most == 3


@pytest.mark.parametrize(("rate", "calls"), [(600, 2000), (3, 9)])
def test_requests_a_minute_are_kept_and_used(rate, calls):
    times = run(send(Limits(requests_per_minute=rate), calls))
    assert busiest_minute(times) <= max(1.09 * rate, rate + 1)
    assert times[-1] == pytest.approx(60 * calls / rate, rel=0.15, abs=21)


def test_tokens_a_minute_are_kept():
    rate = 20_000
    times = run(send(Limits(tokens_per_minute=rate), 300, used=ESTIMATE))
    assert busiest_minute(times, ESTIMATE) <= 1.1 * rate
    assert times[-1] == pytest.approx(60 * 300 * ESTIMATE / rate, rel=0.1)


@pytest.mark.parametrize("used", [ESTIMATE // 4, ESTIMATE * 3])
def test_the_rate_is_that_of_the_real_tokens(used):
    # A slow trickle at first, so that the estimate is corrected before most calls go.
    async def main() -> list[float]:
        limits = Limits(concurrency=4, tokens_per_minute=20_000)
        return await send(limits, 400, used=used, seconds=0.01)

    times = run(main())
    assert times[-1] == pytest.approx(60 * 400 * used / 20_000, rel=0.1)


def test_a_call_larger_than_a_minutes_tokens_goes_through():
    times = run(send(Limits(tokens_per_minute=100), 3, used=ESTIMATE))
    assert times[-1] == pytest.approx(60 * 3 * ESTIMATE / 100, rel=0.1)


def test_a_call_that_was_turned_away_costs_no_tokens():
    async def main() -> list[float]:
        return await send(Limits(concurrency=1, tokens_per_minute=6000), 300, used=0)

    assert max(run(main())) < 1


def test_a_cancelled_call_gives_its_place_back():
    async def main() -> None:
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
    run(asyncio.wait_for(main(), 10_000))
    assert entered == [True]


@pytest.mark.parametrize("name", ["concurrency", "requests_per_minute", "tokens_per_minute", "timeout"])
def test_a_limit_of_zero_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} 0: it must be above 0"):
        Limits(**{name: 0})


def test_the_estimate_counts_bytes_and_the_longest_reply():
    assert estimate_tokens(CHAT, SAMPLING) == ESTIMATE
    assert estimate_tokens([{"role": "user", "content": "日本日本"}], Sampling(max_tokens=1)) == 3 + 4 + 1
