"""Calls between processes of one user on one host: a method's name and arguments go one way over a local socket, what
it returns, yields or raises comes back.

Any number of calls may be under way on a connection. Plain methods run in the order in which they were called, before
anything that was called later; coroutines and asynchronous generators run beside each other.
"""

import asyncio
import inspect
import os
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import aclosing, suppress
from itertools import count
from typing import Any, Self

from workers.local_socket import Streams, connect, listen, receive, send

Take = Callable[[Any, BaseException | None], object]
"""Gets a value, or None and what was raised."""


class Caller:
    """The calling end, on the event loop it was made on. `lost` is called once when the other end is gone."""

    def __init__(self, streams: Streams, lost: Callable[[], object] = lambda: None) -> None:
        self._reader, self._writer = streams
        self._lost = lost
        self._numbers = count()
        self._takers: dict[int, Take] = {}
        self._task = asyncio.create_task(self._receive())

    @classmethod
    async def connect(cls, address: bytes, lost: Callable[[], object] = lambda: None) -> Self:
        """Raises OSError when nobody listens there."""
        return cls(await connect(address), lost)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What the method returns. Raises what it raises, or ConnectionError when the other end is gone."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.call_into(answer, method, *args, **kwargs)
        return await answer

    def call_into(self, answer: "asyncio.Future[Any] | Future[Any]", method: str, *args: Any, **kwargs: Any) -> None:
        """As `call`, the outcome into a future of either kind."""

        def take(value: Any, error: BaseException | None) -> None:
            if answer.done():
                return
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)

        self.follow(take, method, *args, **kwargs)

    def follow(self, take: Take, method: str, *args: Any, **kwargs: Any) -> int:
        """Call; `take` gets everything a generator yields as it comes, and after that a StopAsyncIteration.

        Returns the number of the call, for `forget`.
        """
        number = next(self._numbers)
        if self._task.done():
            take(None, _gone())
        else:
            self._takers[number] = take
            send(self._writer, (number, method, args, kwargs))
        return number

    def forget(self, number: int) -> None:
        """Take nothing more of a call. The other end is not told."""
        self._takers.pop(number, None)

    async def lost(self) -> None:
        """Returns when the other end is gone."""
        await asyncio.wait((self._task,))

    def close(self) -> None:
        """Calls under way fail, as when the other end is gone."""
        self._writer.close()

    async def _receive(self) -> None:
        try:
            with suppress(OSError, EOFError):
                while True:
                    number, last, value, error = await receive(self._reader)
                    take = self._takers.pop(number, None) if last else self._takers.get(number)
                    if take is not None:
                        take(value, error)
        finally:
            self._writer.close()
            takers, self._takers = self._takers, {}
            for take in takers.values():
                take(None, _gone())
            self._lost()


async def listen_for_calls(methods: Mapping[str, Callable[..., Any]]) -> tuple[asyncio.Server, bytes]:
    """Answer the calls of every process of this user; answers the address. Raises OSError where there is none."""

    async def serve(*streams: *Streams) -> None:
        await answer_calls(streams, methods)

    return await listen(serve)


async def answer_calls(streams: Streams, methods: Mapping[str, Callable[..., Any]]) -> None:
    """The other end: answer until the caller has left; what still runs for it then is cancelled."""
    reader, writer = streams
    try:
        async with asyncio.TaskGroup() as running:
            while True:
                number, method, args, kwargs = await receive(reader)
                try:
                    outcome = methods[method](*args, **kwargs)
                except Exception as error:
                    _raise_there(writer, number, error)
                    continue
                if inspect.iscoroutine(outcome):
                    running.create_task(_return_later(writer, number, outcome))
                elif inspect.isasyncgen(outcome):
                    running.create_task(_yield(writer, number, outcome))
                else:
                    _return(writer, number, outcome)
    except* (OSError, EOFError):
        pass


async def _return_later(writer: asyncio.StreamWriter, number: int, outcome: Coroutine[Any, Any, Any]) -> None:
    try:
        value = await outcome
    except Exception as error:
        _raise_there(writer, number, error)
    else:
        _return(writer, number, value)


async def _yield(writer: asyncio.StreamWriter, number: int, outcome: AsyncGenerator[Any, Any]) -> None:
    try:
        async with aclosing(outcome) as values:
            async for value in values:
                send(writer, (number, False, value, None))
                await writer.drain()
        send(writer, (number, True, None, StopAsyncIteration()))
    except Exception as error:
        _raise_there(writer, number, error)


def _return(writer: asyncio.StreamWriter, number: int, value: Any) -> None:
    try:
        send(writer, (number, True, value, None))
    except Exception as error:
        _raise_there(writer, number, error)


def _raise_there(writer: asyncio.StreamWriter, number: int, error: Exception) -> None:
    """With a note that tells where it was raised; as its text alone if it cannot be sent."""
    error.add_note(f"in process {os.getpid()}: {''.join(traceback.format_exception(error))}")
    try:
        send(writer, (number, True, None, error))
    except Exception:
        send(writer, (number, True, None, RuntimeError(f"{type(error).__name__}: {error}")))


def _gone() -> ConnectionError:
    return ConnectionError("the other end is gone")
