"""What routers ask of a group over its socket: families are taken or refused, children stop, the lost are dropped."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.engine_driver import EngineDriver
from cluster.group_calls import GroupCalls
from cluster.sinks import SinkAddress
from tests.engines import Lab, family
from workers.local_calls import Caller, answer_calls
from workers.local_socket import Streams, listen
from workers.outputs import ChildRef, FinishReason, StepOutput


@pytest.fixture(scope="module")
def lab(tiny_checkpoint: Callable[[str], Path]) -> Lab:
    return Lab(tiny_checkpoint("llama"), dtype="float32")


class Sink:
    """An aggregator that notes tokens and finishes."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, FinishReason] = {}
        self.writers: list[asyncio.StreamWriter] = []

    def push(self, output: StepOutput) -> list[ChildRef]:
        for parent in output.parents.values():
            for child in parent.children.values():
                self.tokens.setdefault(child.index, []).extend(child.token_ids)
                if child.finish_reason is not None:
                    self.finishes[child.index] = child.finish_reason
        return []

    async def serve(self, *streams: *Streams) -> None:
        self.writers.append(streams[1])
        await answer_calls(streams, {"push": self.push})


class Site:
    """A group, a router's way to it, and an aggregator."""

    def __init__(self, driver: EngineDriver, sink: Sink, address: bytes) -> None:
        self.driver, self.sink = driver, sink
        self.address = SinkAddress("sink", None, "here", address)
        self.calls = GroupCalls(driver, "here")

    async def working(self) -> bool:
        return await asyncio.wrap_future(self.driver.call(lambda engine: engine.has_work))


@asynccontextmanager
async def site(lab: Lab) -> AsyncIterator[tuple[Site, Caller]]:
    driver = EngineDriver(
        "g", lab.engine, push_interval_s=0, idle=lambda: None, idle_s=0.05, failed=lambda: pytest.fail("failed")
    )
    sink = Sink()
    server, address = await listen(sink.serve)
    found = Site(driver, sink, address)
    caller = await Caller.connect(found.calls.address)
    try:
        yield found, caller
    finally:
        caller.close()
        server.close()
        driver.stop()


LONG = family("p", [1, 2, 3], range(2), max_tokens=100)


def test_a_family_is_taken_and_its_tokens_go_to_its_aggregator(lab: Lab) -> None:
    request = family("p", [1, 2, 3], range(4))
    expected = {index: list(bits[0]) for (_, index), bits in lab.run([request]).items()}

    async def run() -> None:
        async with site(lab) as (there, caller):
            assert await caller.call("submit", [request], there.address) is True
            while len(there.sink.finishes) < 4:
                await asyncio.sleep(0.01)
            assert there.sink.tokens == expected

    asyncio.run(run())


def test_children_stop_when_the_router_says_so(lab: Lab) -> None:
    async def run() -> None:
        async with site(lab) as (there, caller):
            await caller.call("submit", [LONG], there.address)
            await caller.call("abort", [ChildRef("p", 0), ChildRef("p", 1)])
            assert not await there.working()

    asyncio.run(run())


def test_a_leaving_group_takes_no_family_and_delivers_what_it_has_to_the_end(lab: Lab) -> None:
    async def run() -> None:
        async with site(lab) as (there, caller):
            await caller.call("submit", [LONG], there.address)
            there.calls.leave()
            assert await caller.call("submit", [family("q", [1], range(1))], there.address) is False
            await asyncio.to_thread(there.driver.drain)
            assert there.sink.finishes == dict.fromkeys(range(2), FinishReason.LENGTH)
            assert [len(tokens) for tokens in there.sink.tokens.values()] == [100, 100]

    asyncio.run(run())


def test_what_reports_to_an_aggregator_that_is_gone_stops(lab: Lab) -> None:
    async def run() -> None:
        async with site(lab) as (there, caller):
            await caller.call("submit", [LONG], there.address)
            for writer in there.sink.writers:
                writer.close()
            async with asyncio.timeout(20):
                while await there.working():
                    await asyncio.sleep(0.01)
            assert len(there.sink.finishes) < 2

    asyncio.run(run())


def test_no_way_to_the_aggregator_is_an_error_of_the_call(lab: Lab) -> None:
    async def run() -> None:
        async with site(lab) as (there, caller):
            with pytest.raises(OSError):
                await caller.call("submit", [LONG], SinkAddress("nobody", None, "here", b"\0choral-nobody"))
            assert not await there.working()

    asyncio.run(run())
