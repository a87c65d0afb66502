"""A group as its router reaches it: over the socket on one node, else through Serve, and errors of either are one."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from cluster.sinks import SinkAddress
from router.groups import Group, GroupError
from workers.local_calls import answer_calls
from workers.local_socket import Streams, listen
from workers.outputs import ChildRef

SINK = SinkAddress("sink", "an actor", "here", b"address")
FAMILIES: Any = ["family"]
CHILDREN = [ChildRef("p", 0)]


class Process:
    """The group's process: notes what reaches it, and by which way."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.lost: list[str] = []
        self.error: Exception | None = None
        self._servers: list[asyncio.StreamWriter] = []
        remote = SimpleNamespace(remote=self._over_serve)
        self.serve = SimpleNamespace(submit=remote, abort=remote)

    async def _over_serve(self, *args: Any) -> bool:
        return await self._hear("Serve", *args)

    async def submit(self, *args: Any) -> bool:
        return await self._hear("socket", *args)

    abort = submit

    async def _hear(self, *heard: Any) -> bool:
        self.heard.append(heard)
        if self.error:
            raise self.error
        return True

    async def run(self, *streams: *Streams) -> None:
        self._servers.append(streams[1])
        await answer_calls(streams, {"submit": self.submit, "abort": self.abort})

    async def find(self, node: str, address: bytes, actor: Any = None) -> Group:
        stats = {"group": "g", "actor": actor, "node": "here", "local": address}
        return await Group.find(stats, self.serve, node, self.lost.append)

    async def end(self) -> None:
        for writer in self._servers:
            writer.close()
        while not self.lost:
            await asyncio.sleep(0)


@asynccontextmanager
async def process() -> AsyncIterator[tuple[Process, bytes]]:
    group = Process()
    server, address = await listen(group.run)
    yield group, address
    server.close()


def test_on_one_node_it_is_called_over_the_socket_and_its_end_is_heard_of() -> None:
    async def run() -> None:
        async with process() as (there, address):
            group = await there.find("here", address)
            assert group.near
            assert await group.submit(FAMILIES, SINK)
            await group.abort(CHILDREN)
            assert there.heard == [
                ("socket", FAMILIES, SinkAddress("sink", None, "here", b"address")),
                ("socket", CHILDREN),
            ]
            await there.end()
            assert there.lost == ["g"] and not group.near

    asyncio.run(run())


@pytest.mark.parametrize("node", ["here", "there"])
def test_elsewhere_or_where_no_socket_answers_it_is_called_through_serve(node: str) -> None:
    async def run() -> None:
        there = Process()
        group = await there.find(node, b"\0choral-nobody")
        assert not group.near
        await group.submit(FAMILIES, SINK)
        await group.abort(CHILDREN)
        assert there.heard == [("Serve", "g", FAMILIES, SINK), ("Serve", "g", CHILDREN)]

    asyncio.run(run())


@pytest.mark.parametrize("node", ["here", "there"])
@pytest.mark.parametrize("error", [RuntimeError("the group failed"), RayActorError(), TimeoutError()])
def test_whatever_goes_wrong_is_an_error_of_the_group(node: str, error: Exception) -> None:
    async def run() -> None:
        async with process() as (there, address):
            group = await there.find(node, address)
            there.error = error
            for call in (group.submit(FAMILIES, SINK), group.abort(CHILDREN)):
                with pytest.raises(GroupError) as caught:
                    await call
                assert str(caught.value)
            group.close()

    asyncio.run(run())


def test_a_call_under_way_when_the_process_ends_fails() -> None:
    async def run() -> None:
        async with process() as (there, address):
            group = await there.find("here", address)

            async def end() -> None:
                while not there.heard:
                    await asyncio.sleep(0)
                await there.end()

            there._hear = _never(there.heard)
            ending = asyncio.create_task(end())
            with pytest.raises(GroupError, match="gone"):
                await group.submit(FAMILIES, SINK)
            await ending

    asyncio.run(run())


@pytest.mark.parametrize(("answer", "alive"), [(None, True), (RayActorError(), False)])
def test_it_lives_when_its_actor_answers(answer: Exception | None, alive: bool) -> None:
    async def ready() -> None:
        if answer:
            raise answer

    async def run() -> None:
        actor = SimpleNamespace(__ray_ready__=SimpleNamespace(remote=ready))
        assert await (await Process().find("there", b"", actor)).lives() is alive

    asyncio.run(run())


def _never(heard: list[Any]) -> Any:
    async def hear(*what: Sequence[Any]) -> None:
        heard.append(what)
        await asyncio.Event().wait()

    return hear
