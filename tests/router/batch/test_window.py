"""The window: never more than its capacity, first come first served, nothing lost to cancelled waiters."""

import asyncio

from router.batch.window import Window


def test_waiters_get_in_by_turn_and_a_cancelled_one_blocks_nobody():
    async def run() -> None:
        window, order = Window(lambda: 4), []

        async def worker(name: str, weight: int) -> None:
            async with window.hold(weight):
                order.append(name)
                await asyncio.sleep(0.001)

        async with asyncio.TaskGroup() as group:
            await window.acquire(3)
            tasks = [group.create_task(worker(name, weight)) for name, weight in (("a", 4), ("b", 1), ("c", 3))]
            await asyncio.sleep(0)
            assert order == []  # b would fit, but a came first
            tasks[0].cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert order == ["b"]
            window.release(3)
        assert order == ["b", "c"] and window.in_use == 0

    asyncio.run(run())


def test_what_is_larger_than_the_window_runs_alone():
    async def run() -> None:
        window = Window(lambda: 4)
        await window.acquire(10)
        small = asyncio.create_task(window.acquire(1))
        await asyncio.sleep(0)
        assert not small.done()
        window.release(10)
        await small
        assert window.in_use == 1

    asyncio.run(run())


def test_a_window_that_grows_lets_waiters_in_and_one_of_size_zero_nobody():
    async def run() -> None:
        size = 0
        window = Window(lambda: size)
        waiter = asyncio.create_task(window.acquire(2))
        await asyncio.sleep(0)
        window.refresh()
        await asyncio.sleep(0)
        assert not waiter.done()
        size = 2
        window.refresh()
        await waiter

    asyncio.run(run())
