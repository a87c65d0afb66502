"""The feed between aggregator and router without Ray: order, folding, errors, and what is left of those who leave."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aggregation.aggregator import Aggregator
from aggregation.feed import Feed, FeedServer, _Mailbox
from aggregation.results import (
    AggregationError,
    AggregatorLostError,
    ChoiceDelta,
    ParentClosedError,
    ParentUpdate,
    UnknownParentError,
    Usage,
)
from cluster.sinks import SocketSink
from workers.outputs import ChildRef, FinishReason


def update(*texts: str, usage: Usage | None = None) -> ParentUpdate:
    deltas = [ChoiceDelta(index, text, [ord(text)], None, 1) for index, text in enumerate(texts) if text]
    return ParentUpdate(deltas, usage)


@asynccontextmanager
async def connected(aggregator: Aggregator) -> AsyncIterator[tuple[bytes, Feed]]:
    """The server's address, and a reader; afterwards nothing runs any more."""
    server = FeedServer(aggregator)
    address = await server.listen()
    feed = await Feed.connect(address)
    try:
        yield address, feed
    finally:
        feed.close()
        async with asyncio.timeout(10):
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0)


def test_what_is_not_taken_is_one_update():
    async def run() -> ParentUpdate:
        box = _Mailbox()
        for message in (update("a", "b"), update("", "c"), update("d", "e", usage=Usage(1, 5, 0))):
            box.put(message, None)
        return await box.take()

    folded = asyncio.run(run())
    assert [(delta.index, delta.text) for delta in folded.deltas] == [(0, "ad"), (1, "bce")]
    assert folded.usage == Usage(1, 5, 0)


def test_an_error_comes_after_what_came_before_it():
    async def run() -> None:
        box = _Mailbox()
        box.put(update("a"), None)
        box.put(None, ParentClosedError("closed"))
        assert (await box.take()).deltas[0].text == "a"
        for _ in range(2):
            with pytest.raises(ParentClosedError):
                await box.take()

    asyncio.run(run())


def test_c5_a_reader_that_leaves_and_one_that_finishes_leave_nothing(aggregator, make_parent, make_step):
    async def run() -> None:
        async with connected(aggregator) as (_, feed):
            for name in ("left", "read"):
                aggregator.open(make_parent(1, name), stream=True)
                aggregator.push(make_step({0: [70]}, parent_id=name))
            left, read = feed.updates("left"), feed.updates("read")
            await anext(left)
            await anext(read)
            await left.aclose()
            aggregator.close("left")
            aggregator.push(make_step({0: [71]}, {0: FinishReason.LENGTH}, "read"))
            assert [u.usage is not None async for u in read] == [True]
            assert not feed._caller._takers
        assert aggregator.counters()["parents_alive"] == 0

    asyncio.run(run())


def test_a_reader_without_a_server_says_so_at_once(aggregator, make_parent):
    async def run() -> None:
        async with connected(aggregator) as (_, feed):
            feed.close()
            await feed.lost()
            with pytest.raises(AggregatorLostError):
                await anext(feed.updates("p"))

    asyncio.run(run())


def test_the_router_opens_reads_and_closes_over_the_socket(aggregator, make_parent, make_step):
    async def run() -> None:
        async with connected(aggregator) as (_, feed):
            await feed.call("open", make_parent(2, "p"), stream=False, placement={0: "g"})
            assert (await feed.call("counters"))["children_alive"] == 2
            waiting = asyncio.create_task(feed.call("result", "p"))
            aggregator.push(make_step({0: [70], 1: [71]}, dict.fromkeys(range(2), FinishReason.LENGTH)))
            assert [choice.token_ids for choice in (await waiting).choices] == [[70], [71]]
            await feed.call("open", make_parent(1, "q"), stream=True, placement={0: "g"})
            assert await feed.call("close", "q") == [("g", ChildRef("q", 0))]

    asyncio.run(run())


def test_every_error_of_the_aggregator_is_one_of_aggregation(aggregator, make_parent, monkeypatch):
    def broken(parent: str) -> None:
        raise ArithmeticError("one too many")

    async def run() -> None:
        async with connected(aggregator) as (_, feed):
            with pytest.raises(UnknownParentError, match="'p'"):
                await feed.call("result", "p")
            with pytest.raises(UnknownParentError, match="'p'"):
                await anext(feed.updates("p"))
            monkeypatch.setattr(aggregator, "_record", broken)
            for failing in (feed.call("result", "p"), anext(feed.updates("p"))):
                with pytest.raises(AggregationError, match="one too many"):
                    await failing
            feed.close()
            await feed.lost()
            with pytest.raises(AggregatorLostError):
                await feed.call("result", "p")

    asyncio.run(run())


def test_a_push_over_the_socket_is_answered_with_the_children_to_stop(aggregator, make_parent, make_step):
    async def run() -> None:
        async with connected(aggregator) as (address, feed):
            lost = asyncio.Event()
            sink = await SocketSink.open(address, lost.set)
            aggregator.open(make_parent(1), stream=True)
            known = asyncio.wrap_future(sink.push(make_step({0: [70]})))
            unknown = asyncio.wrap_future(sink.push(make_step({0: [70], 1: [71]}, parent_id="unknown")))
            assert await known == []
            assert await unknown == [ChildRef("unknown", 0), ChildRef("unknown", 1)]
            assert (await anext(feed.updates("p"))).deltas[0].token_ids == [70]
            sink._caller.close()
            await lost.wait()

    asyncio.run(run())


def test_an_aggregator_that_cannot_take_a_push_is_lost_to_the_group(aggregator, make_parent, make_step, monkeypatch):
    def broken(output: object) -> None:
        raise ArithmeticError

    monkeypatch.setattr(aggregator, "push", broken)

    async def run() -> None:
        async with connected(aggregator) as (address, _):
            lost = asyncio.Event()
            sink = await SocketSink.open(address, lost.set)
            with pytest.raises(ArithmeticError):
                await asyncio.wrap_future(sink.push(make_step({0: [70]})))
            await lost.wait()
            with pytest.raises(ConnectionError):
                await asyncio.wrap_future(sink.push(make_step({0: [70]})))

    asyncio.run(run())
