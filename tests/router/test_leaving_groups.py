"""Groups that leave or die under the router's engine: refused families move, silence alone loses nothing."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from aggregation.parent_request import ParentRequest
from cluster.dispatcher import MISSED_ROUNDS
from router.aggregation import Aggregation
from router.engine import NoHealthyGroupError
from router.ray_engine import RayEngine
from tests.router.toy_engine import SINK
from workers.sampling_params import SamplingParams

PARENT = ParentRequest(
    parent_id="p", prompts=((1, 2), (3, 4, 5)), samples=(0, 1), params=SamplingParams(max_tokens=4, seed=0)
)


def remote(function: Callable[..., Any]) -> Any:
    """Something with a `remote`, as Ray's handles have it."""

    async def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return SimpleNamespace(remote=call)


class Groups:
    """The Serve handle: `offered` are the groups Serve still sends calls to, `alive` those whose process lives."""

    def __init__(self, *names: str) -> None:
        self.offered, self.alive = list(names), set(names)
        self.taken: dict[str, list[int]] = {name: [] for name in names}
        self.submit, self.abort = remote(self._submit), remote(lambda group, children: None)

    def _submit(self, group: str, families: Any, aggregator: Any) -> bool:
        if group not in self.offered:
            return False
        self.taken[group] += [family.prompt_number for family in families]
        return True

    def _ready(self, name: str) -> None:
        if name not in self.alive:
            raise RayError("the actor died")

    def broadcast(self, method: str) -> Any:
        async def results(**kwargs: Any) -> list[dict[str, Any]]:
            return [
                {
                    "group": name,
                    "generation": "old" if name.startswith("old") else "new",
                    "node": "another",
                    "actor": SimpleNamespace(__ray_ready__=remote(lambda name=name: self._ready(name))),
                }
                for name in self.offered
            ]

        assert method == "stats"
        return SimpleNamespace(results_async=results)


class Aggregator:
    """Notes what it is told; the result of a parent comes when `answer` is set."""

    def __init__(self) -> None:
        self.placement: dict[int, str] = {}
        self.lost: list[str] = []
        self.failed: list[tuple[str, str]] = []
        self.closed: list[str] = []
        self.answer = asyncio.Event()
        self._methods = {
            "open": lambda parent, stream, placement: self.placement.update(placement),
            "place": lambda parent, placement: self.placement.update(placement),
            "fail_group": lambda group, message: self.lost.append(group),
            "fail": lambda parent, indices, message: self.failed.append((parent, message)),
            "close": lambda parent: self.closed.append(parent) or [],
        }

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """As the feed has it."""
        if method == "result":
            await self.answer.wait()
            return args[0]
        return self._methods[method](*args, **kwargs)


async def started(*names: str) -> tuple[RayEngine, Groups, Aggregator]:
    groups, aggregator = Groups(*names), Aggregator()
    engine = RayEngine(None, groups, Aggregation(None, aggregator, SINK), "new")
    await engine.refresh()
    return engine, groups, aggregator


def test_a_family_a_leaving_group_refused_goes_to_another_and_is_counted_there():
    async def run() -> None:
        engine, groups, aggregator = await started("a", "b")
        groups.offered.remove("a")
        aggregator.answer.set()
        assert await engine.complete(PARENT) == "p"
        assert groups.taken == {"a": [], "b": [0, 1]} or groups.taken == {"a": [], "b": [1, 0]}
        assert aggregator.placement == dict.fromkeys(range(4), "b")
        await engine.drain()
        assert aggregator.closed == ["p"]
        assert engine._dispatcher.counters() == {"children_placed": 0, "tokens_placed": 0}

    asyncio.run(run())


def test_groups_of_another_generation_are_left_alone():
    async def run() -> None:
        engine, groups, aggregator = await started("b", "old a")
        assert engine._dispatcher.groups == ["b"]
        aggregator.answer.set()
        await engine.complete(PARENT)
        assert sorted(groups.taken["b"]) == [0, 1] and groups.taken["old a"] == []
        await engine.drain()

    asyncio.run(run())


def test_when_every_group_is_leaving_the_parent_is_refused_and_closed():
    async def run() -> None:
        engine, groups, aggregator = await started("a")
        groups.offered.clear()
        with pytest.raises(NoHealthyGroupError):
            await engine.complete(PARENT)
        await engine.drain()
        assert aggregator.closed == ["p"]

    asyncio.run(run())


def test_a_silent_group_that_lives_finishes_its_children_and_a_dead_one_fails_them():
    async def run() -> None:
        engine, groups, aggregator = await started("a", "b")
        waiting = asyncio.create_task(engine.complete(PARENT))
        await asyncio.sleep(0)
        groups.offered.remove("a")
        for _ in range(MISSED_ROUNDS + 2):
            await engine.refresh()
        assert aggregator.lost == [] and engine._dispatcher.groups == ["b"]
        groups.alive.remove("a")
        await engine.refresh()
        await engine.refresh()
        assert aggregator.lost == ["a"]
        aggregator.answer.set()
        assert await waiting == "p"
        await engine.drain()

    asyncio.run(run())


def test_when_the_way_to_a_group_closes_its_children_fail_at_once_unless_it_lives():
    async def run() -> None:
        engine, groups, aggregator = await started("a", "b")
        waiting = asyncio.create_task(engine.complete(PARENT))
        while not all(groups.taken.values()):
            await asyncio.sleep(0)
        groups.alive.remove("a")
        for name in ("a", "b"):
            engine._on_lost(name)
        aggregator.answer.set()
        await waiting
        await engine.drain()
        assert aggregator.lost == ["a"] and engine._dispatcher.groups == ["b"]

    asyncio.run(run())


def test_cancelling_everything_fails_every_parent_and_takes_no_more():
    async def run() -> None:
        engine, _, aggregator = await started("a")
        waiting = asyncio.create_task(engine.complete(PARENT))
        await asyncio.sleep(0.01)
        await engine.cancel_all()
        assert [parent for parent, _ in aggregator.failed] == ["p"]
        assert not await engine.healthy()
        with pytest.raises(NoHealthyGroupError):
            await engine.complete(PARENT)
        aggregator.answer.set()
        await waiting

    asyncio.run(run())
