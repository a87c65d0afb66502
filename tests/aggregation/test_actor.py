"""The aggregator over a real Ray actor: the same answers, and nothing left behind."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aggregation.feed import Feed
from aggregation.results import AggregatorLostError, ParentResult, ParentUpdate, UnknownParentError, Usage
from workers.outputs import ChildRef, FinishReason

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def actor(tokenizer_folder) -> Iterator[Any]:
    from aggregation.actor import AggregatorActor

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    handle = AggregatorActor.options(num_cpus=0).remote(str(tokenizer_folder))
    ray.get(handle.ping.remote())
    yield handle
    ray.shutdown()


async def collect(updates: AsyncIterator[ParentUpdate]) -> list[ParentUpdate]:
    return [update async for update in updates]


def alive(actor: Any) -> tuple[int, int]:
    async def ask() -> dict[str, int]:
        async with reader(actor) as feed:
            return await feed.call("counters")

    counters = asyncio.run(ask())
    return counters["parents_alive"], counters["children_alive"]


@asynccontextmanager
async def reader(handle: Any) -> AsyncIterator[Feed]:
    feed = await Feed.connect(await handle.listen.remote())
    try:
        yield feed
    finally:
        feed.close()


def test_a_stream_over_the_wire(actor, tokenizer, make_parent, make_step):
    ids = tokenizer.encode("the 😀 end").ids

    async def run():
        async with reader(actor) as feed:
            await feed.call("open", make_parent(2), stream=True)
            await feed.call("place", "p", {0: "g", 1: "g"})
            updates = asyncio.create_task(collect(feed.updates("p")))
            for position, token in enumerate(ids):
                last = position == len(ids) - 1
                finish = dict.fromkeys(range(2), FinishReason.LENGTH) if last else {}
                assert await actor.push.remote(make_step({0: [token], 1: [token]}, finish)) == []
            return await updates

    updates = asyncio.run(run())
    for index in range(2):
        deltas = [delta for update in updates for delta in update.deltas if delta.index == index]
        assert "".join(delta.text for delta in deltas) == "the 😀 end"
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    assert updates[-1].usage == Usage(3, 2 * len(ids), 0)
    assert alive(actor) == (0, 0)


def test_a_slow_reader_gets_few_folded_updates_with_everything_in_them(actor, tokenizer, make_parent, make_step):
    a = tokenizer.token_to_id("a")

    async def run():
        async with reader(actor) as feed:
            await feed.call("open", make_parent(1), stream=True)
            await actor.push.remote(make_step({0: [a]}))
            updates = feed.updates("p")
            first = await anext(updates)
            for _ in range(100):
                await actor.push.remote(make_step({0: [a]}))
            await actor.push.remote(make_step({0: [a]}, {0: FinishReason.LENGTH}))
            return [first, *await collect(updates)]

    updates = asyncio.run(run())
    assert "".join(delta.text for update in updates for delta in update.deltas) == "a" * 102
    assert updates[-1].usage == Usage(3, 102, 0)
    assert len(updates) <= 3


def test_many_parents_share_one_feed(actor, tokenizer, make_parent, make_step):
    a, b = tokenizer.token_to_id("a"), tokenizer.token_to_id("b")
    tokens = {"p": a, "q": b}

    async def run():
        async with reader(actor) as feed:
            for name in tokens:
                await feed.call("open", make_parent(1, name), stream=True)
            streams = {name: asyncio.create_task(collect(feed.updates(name))) for name in tokens}
            for name, token in tokens.items():
                await actor.push.remote(make_step({0: [token]}, {0: FinishReason.LENGTH}, name))
            return {name: await stream for name, stream in streams.items()}

    texts = {name: "".join(d.text for u in updates for d in u.deltas) for name, updates in asyncio.run(run()).items()}
    assert texts == {"p": "a", "q": "b"}
    assert alive(actor) == (0, 0)


def test_a_reader_whose_aggregator_dies_hears_of_it(tokenizer_folder, actor, make_parent):
    from aggregation.actor import AggregatorActor

    mortal = AggregatorActor.options(num_cpus=0).remote(str(tokenizer_folder))

    async def run():
        async with reader(mortal) as feed:
            await feed.call("open", make_parent(1), stream=True)
            stream = asyncio.create_task(collect(feed.updates("p")))
            await asyncio.sleep(0.1)
            ray.kill(mortal)
            for updates in (stream, collect(feed.updates("q"))):
                with pytest.raises(AggregatorLostError):
                    await updates

    asyncio.run(run())


def test_a_result_over_the_wire(actor, tokenizer, make_parent, make_step):
    a = tokenizer.token_to_id("a")

    async def run() -> ParentResult:
        async with reader(actor) as feed:
            await feed.call("open", make_parent(2, stop=("aa",)), stream=False, placement={0: "g", 1: "h"})
            waiting = asyncio.create_task(feed.call("result", "p"))
            assert await actor.push.remote(make_step({0: [a, a]})) == [ChildRef("p", 0)]
            assert await feed.call("fail_group", "h", "h was lost") == [ChildRef("p", 1)]
            return await waiting

    assert [(c.text, c.finish_reason, c.error) for c in asyncio.run(run()).choices] == [
        ("", "stop", None),
        ("", "error", "h was lost"),
    ]
    assert alive(actor) == (0, 0)


def test_c5_a_reader_that_goes_away_leaves_nothing_after_close(actor, make_parent, make_step):
    async def run():
        async with reader(actor) as feed:
            await feed.call("open", make_parent(2), stream=True, placement={0: "g", 1: "g"})
            await actor.push.remote(make_step({0: [70]}))
            await anext(feed.updates("p"))
        async with reader(actor) as feed:
            return await feed.call("close", "p")

    assert asyncio.run(run()) == [("g", ChildRef("p", 0)), ("g", ChildRef("p", 1))]
    assert alive(actor) == (0, 0)


def test_errors_keep_their_type_over_the_wire(actor, make_parent):
    async def read(name: str):
        async with reader(actor) as feed:
            await collect(feed.updates(name))

    async def place(name: str):
        async with reader(actor) as feed:
            await feed.call("place", name, {0: "g"})

    for call in (read, place):
        with pytest.raises(UnknownParentError, match="'gone'"):
            asyncio.run(call("gone"))
