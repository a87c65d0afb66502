"""The feed between aggregator and router without Ray: order, folding, errors, and what is left of those who leave."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aggregation.aggregator import Aggregator
from aggregation.feed import FeedReader, FeedServer, _Mailbox
from aggregation.results import AggregatorLostError, ChoiceDelta, ParentClosedError, ParentUpdate, Usage
from cluster.sinks import SocketSink
from workers.outputs import ChildRef, FinishReason


def update(*texts: str, usage: Usage | None = None) -> ParentUpdate:
    deltas = [ChoiceDelta(index, text, [ord(text)], None, 1) for index, text in enumerate(texts) if text]
    return ParentUpdate(deltas, usage)


@asynccontextmanager
async def connected(aggregator: Aggregator) -> AsyncIterator[tuple[bytes, FeedReader]]:
    """The server's address, and a reader; afterwards nothing runs any more."""
    server = FeedServer(aggregator)
    address = await server.listen()
    reader = await FeedReader.connect(address)
    try:
        yield address, reader
    finally:
        reader.close()
        async with asyncio.timeout(10):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0)


def test_what_is_not_taken_is_one_update():
    async def run() -> ParentUpdate:
        box = _Mailbox()
        for message in (update("a", "b"), update("", "c"), update("d", "e", usage=Usage(1, 5, 0))):
            box.put(message)
        return await box.take()

    folded = asyncio.run(run())
    assert [(delta.index, delta.text) for delta in folded.deltas] == [(0, "ad"), (1, "bce")]
    assert folded.usage == Usage(1, 5, 0)


def test_an_error_comes_after_what_came_before_it():
    async def run() -> None:
        box = _Mailbox()
        box.put(update("a"))
        box.put(ParentClosedError("closed"))
        assert (await box.take()).deltas[0].text == "a"
        for _ in range(2):
            with pytest.raises(ParentClosedError):
                await box.take()

    asyncio.run(run())


def test_c5_a_reader_that_leaves_and_one_that_finishes_leave_nothing(aggregator, make_parent, make_step):
    async def run() -> None:
        async with connected(aggregator) as (_, reader):
            for name in ("left", "read"):
                aggregator.open(make_parent(1, name), stream=True)
                aggregator.push(make_step({0: [70]}, parent_id=name))
            left, read = reader.updates("left"), reader.updates("read")
            await anext(left)
            await anext(read)
            await left.aclose()
            aggregator.close("left")
            aggregator.push(make_step({0: [71]}, {0: FinishReason.LENGTH}, "read"))
            assert [u.usage is not None async for u in read] == [True]
            assert not reader._mailboxes
        assert aggregator.counters()["parents_alive"] == 0

    asyncio.run(run())


def test_a_reader_without_a_server_says_so_at_once(aggregator, make_parent):
    async def run() -> None:
        async with connected(aggregator) as (_, reader):
            reader.close()
            await reader.lost()
            with pytest.raises(AggregatorLostError):
                await anext(reader.updates("p"))

    asyncio.run(run())


def test_a_push_over_the_socket_is_answered_with_the_children_to_stop(aggregator, make_parent, make_step):
    async def run() -> None:
        async with connected(aggregator) as (address, reader):
            lost = asyncio.Event()
            sink = await SocketSink.open(address, lost.set)
            aggregator.open(make_parent(1), stream=True)
            known = asyncio.wrap_future(sink.push(make_step({0: [70]})))
            unknown = asyncio.wrap_future(sink.push(make_step({0: [70], 1: [71]}, parent_id="unknown")))
            assert await known == []
            assert await unknown == [ChildRef("unknown", 0), ChildRef("unknown", 1)]
            assert (await anext(reader.updates("p"))).deltas[0].token_ids == [70]
            sink._writer.close()
            await lost.wait()

    asyncio.run(run())


def test_an_aggregator_that_cannot_take_a_push_is_lost_to_the_group(aggregator, make_parent, make_step, monkeypatch):
    def broken(output: object) -> None:
        raise ArithmeticError

    async def run() -> None:
        async with connected(aggregator) as (address, _):
            lost = asyncio.Event()
            sink = await SocketSink.open(address, lost.set)
            monkeypatch.setattr(aggregator, "push", broken)
            for _ in range(2):
                with pytest.raises(ConnectionError):
                    await asyncio.wrap_future(sink.push(make_step({0: [70]})))
                await lost.wait()

    asyncio.run(run())
