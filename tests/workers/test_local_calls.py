"""Calls between processes over a local socket: values, generators and errors come back, and the lost are told."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import pytest

from workers.local_calls import Caller, listen_for_calls


class Unsendable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("no")


class Methods:
    def __init__(self) -> None:
        self.notes: list[Any] = []
        self.go = asyncio.Event()

    def note(self, value: Any) -> int:
        self.notes.append(value)
        return len(self.notes)

    def fail(self, error: Exception) -> None:
        raise error

    def fail_unsendably(self) -> None:
        raise Unsendable("by design")

    def unsendable(self) -> Any:
        return lambda: None

    async def wait(self, value: Any) -> Any:
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.notes.append("cancelled")
            raise
        return value

    async def count(self, most: int, error: Exception | None = None) -> AsyncIterator[int]:
        try:
            for value in range(most):
                yield value
            if error:
                raise error
        finally:
            self.notes.append("ended")


NAMES = ("note", "fail", "fail_unsendably", "unsendable", "wait", "count")


@asynccontextmanager
async def connected(lost: Callable[[], object] = lambda: None) -> AsyncIterator[tuple[Methods, Caller]]:
    """Afterwards nothing runs any more on either side."""
    methods = Methods()
    server, address = await listen_for_calls({name: getattr(methods, name) for name in NAMES})
    caller = await Caller.connect(address, lost)
    try:
        yield methods, caller
    finally:
        caller.close()
        server.close()
        async with asyncio.timeout(10):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0)


def test_plain_methods_run_in_order_and_pass_one_that_waits() -> None:
    async def run() -> None:
        async with connected() as (methods, caller):
            waiting = asyncio.create_task(caller.call("wait", "late"))
            assert await asyncio.gather(*(caller.call("note", value=i) for i in range(5))) == [1, 2, 3, 4, 5]
            assert methods.notes == [0, 1, 2, 3, 4] and not waiting.done()
            methods.go.set()
            assert await waiting == "late"

    asyncio.run(run())


def test_an_error_comes_back_as_it_is_and_says_where_it_was_raised() -> None:
    async def run() -> None:
        async with connected() as (_, caller):
            with pytest.raises(KeyError, match="gone") as caught:
                await caller.call("fail", KeyError("gone"))
            assert "in process" in caught.value.__notes__[0] and "raise error" in caught.value.__notes__[0]
            with pytest.raises(KeyError, match="unknown"):
                await caller.call("unknown")
            with pytest.raises(RuntimeError, match="Unsendable: by design"):
                await caller.call("fail_unsendably")
            with pytest.raises(Exception, match="pickle"):
                await caller.call("unsendable")
            assert await caller.call("note", 1) == 1

    asyncio.run(run())


@pytest.mark.parametrize("error", [None, ValueError("the end")])
def test_what_a_generator_yields_comes_as_it_comes_and_then_how_it_ended(error: Exception | None) -> None:
    async def run() -> None:
        async with connected() as (_, caller):
            taken: asyncio.Queue[Any] = asyncio.Queue()
            caller.follow(lambda value, error: taken.put_nowait(value if error is None else error), "count", 3, error)
            assert [await taken.get() for _ in range(3)] == [0, 1, 2]
            last = await taken.get()
            assert repr(last) == repr(error or StopAsyncIteration())
            assert not caller._takers

    asyncio.run(run())


def test_what_is_forgotten_is_not_taken() -> None:
    async def run() -> None:
        async with connected() as (methods, caller):
            caller.forget(caller.follow(lambda *_: pytest.fail("taken"), "count", 3))
            while not methods.notes:
                await asyncio.sleep(0)
            assert await caller.call("note", 1) == 2

    asyncio.run(run())


def test_a_caller_that_leaves_ends_what_runs_for_it_and_its_calls() -> None:
    async def run() -> None:
        lost = []
        async with connected(lambda: lost.append(1)) as (methods, caller):
            future: Future[Any] = Future()
            caller.call_into(future, "wait", 1)
            waiting = asyncio.create_task(caller.call("wait", 2))
            await caller.call("note", 0)
            caller.close()
            await caller.lost()
            for ended in (asyncio.wrap_future(future), waiting, caller.call("note", 1)):
                with pytest.raises(ConnectionError):
                    await ended
        assert methods.notes == [0, "cancelled", "cancelled"]
        assert lost == [1]

    asyncio.run(run())


def test_an_answer_nobody_waits_for_any_more_is_dropped() -> None:
    async def run() -> None:
        async with connected() as (methods, caller):
            waiting = asyncio.create_task(caller.call("wait", 1))
            await caller.call("note", 0)
            waiting.cancel()
            methods.go.set()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert await caller.call("note", 1) == 2
            assert not caller._takers

    asyncio.run(run())
