import asyncio
from contextlib import aclosing

import pytest

from tripletune.data_builders.hotpotqa_subq.in_order import in_order


async def collect(items, work, concurrency):
    return [pair async for pair in in_order(iter(items), work, concurrency)]


def test_results_come_in_the_order_of_the_items():
    async def work(number):
        for _ in range(5 - number % 5):
            await asyncio.sleep(0)
        return -number

    found = asyncio.run(collect(range(50), work, 4))
    assert found == [(number, -number) for number in range(50)]


def test_work_that_never_waits_is_done_too():
    async def work(number):
        return number

    assert len(asyncio.run(collect(range(1000), work, 3))) == 1000


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_slow_item_stalls_nothing_until_the_window_is_full(concurrency):
    started, most, at_work, drawn = [], 0, 0, 0
    slow = None

    def items():
        nonlocal drawn
        for number in range(100):
            drawn += 1
            yield number

    async def work(number):
        nonlocal most, at_work
        started.append(number)
        at_work += 1
        most = max(most, at_work)
        if number == 0:
            await slow.wait()
        else:
            for _ in range(6):
                await asyncio.sleep(0)
        at_work -= 1
        return number

    async def go():
        nonlocal slow
        slow = asyncio.Event()
        found = []

        async def read():
            async for number, _ in in_order(items(), work, concurrency):
                found.append(number)

        task = asyncio.create_task(read())
        for _ in range(500):
            await asyncio.sleep(0)
        held = len(started), drawn, list(found)
        slow.set()
        await task
        return held, found

    (begun, taken, early), found = asyncio.run(go())
    assert early == []
    # With room for one, the slow item has it; else the others go on, as far as the window reaches.
    assert begun == (1 if concurrency == 1 else 4 * concurrency + 1)
    assert taken <= 4 * concurrency + 2
    assert most == concurrency
    assert found == list(range(100))


def test_an_error_comes_at_its_turn_and_leaves_nothing_running():
    ended = []

    async def work(number):
        if number == 2:
            raise ValueError("two")
        try:
            if number > 2:
                await asyncio.sleep(60)
        finally:
            ended.append(number)
        return number

    found = []

    async def read():
        async with aclosing(in_order(iter(range(10)), work, 4)) as results:
            async for number, _ in results:
                found.append(number)

    async def go():
        with pytest.raises(ValueError, match="two"):
            await read()
        return len(asyncio.all_tasks())

    assert asyncio.run(go()) == 1
    assert found == [0, 1]
    assert set(ended) >= {0, 1}
