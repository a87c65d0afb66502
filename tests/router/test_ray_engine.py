"""The engine over Ray with handles that fail: a group lost on the way is a 503, and everything is given back."""

import asyncio
import gc
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentBroadcastResponse

from aggregation.parent_request import ParentRequest
from router.aggregation import Aggregation
from router.engine import NoHealthyGroupError
from router.ray_engine import RayEngine, answers
from tests.router.toy_engine import SINK, ToyEngine
from workers.outputs import ChildRef
from workers.sampling_params import SamplingParams


class Handle:
    """`handle.method.remote(...)`, or `handle.call("method", ...)` as a feed has it, notes the call and answers what
    `answers` has, or raises or awaits it."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((name, args))
        answer = self.answers.get(name)
        if isinstance(answer, Exception):
            raise answer
        return await answer() if callable(answer) else answer

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(self.call, name))

    def broadcast(self, name: str) -> Any:
        actor = Handle(__ray_ready__=RayActorError())
        answers = [
            {"group": group, "generation": "g", "actor": actor, "node": "another"} for group in self.answers["alive"]
        ]

        class Broadcast:
            async def results_async(self, **_: Any) -> list[Any]:
                return answers

        return Broadcast()


def parent(prompts: int = 1) -> ParentRequest:
    params = SamplingParams(max_tokens=4, seed=1)
    return ParentRequest(parent_id="p", prompts=((1, 2, 3),) * prompts, samples=(0, 1), params=params)


async def failing(groups: Handle, aggregator: Handle, request: ParentRequest) -> RayEngine:
    """An engine after a request that found no group."""
    engine = RayEngine(ToyEngine(Path()).model, groups, Aggregation(None, aggregator, SINK))
    await engine.refresh()
    with pytest.raises(NoHealthyGroupError):
        await engine.complete(request)
    while engine._tasks:
        await asyncio.sleep(0)
    return engine


@pytest.mark.parametrize(
    "error",
    [
        RayServeException("the group is gone"),
        DeploymentUnavailableError("groups"),
        BackPressureError(1, 1),
        RayActorError(),
        TimeoutError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_group_that_cannot_be_reached_is_a_503_and_dropped(error: Exception) -> None:
    groups, aggregator = Handle(alive=["g"], submit=error), Handle(close=[])
    engine = asyncio.run(failing(groups, aggregator, parent()))
    assert not asyncio.run(engine.healthy())
    assert engine._dispatcher.counters() == {"children_placed": 0, "tokens_placed": 0}
    assert [name for name, _ in aggregator.calls] == ["open", "close"]


def test_closing_frees_the_other_groups_when_one_cannot_be_reached() -> None:
    lost = RayServeException("gone")
    placed = [(group, ChildRef("p", index)) for index, group in enumerate(("g", "h"))]
    groups = Handle(alive=["g", "h"], submit=lost, abort=lost)
    asyncio.run(failing(groups, Handle(close=placed), parent(2)))
    assert {args[0] for name, args in groups.calls if name == "abort"} == {"g", "h"}


def test_a_call_that_serve_never_delivers_ends_when_the_group_is_given_up() -> None:
    async def run() -> None:
        groups = Handle(alive=["g"], submit=asyncio.Event().wait)
        engine = RayEngine(ToyEngine(Path()).model, groups, Aggregation(None, Handle(close=[]), SINK))
        await engine.refresh()
        reply = asyncio.create_task(engine.complete(parent()))
        while not groups.calls:
            await asyncio.sleep(0)
        groups.answers["alive"] = []
        engine._dispatcher.drop_group("g")
        async with asyncio.timeout(30):
            with pytest.raises(NoHealthyGroupError):
                await reply
        await engine.drain()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_stopping_while_the_groups_are_asked_leaves_no_error_in_the_log() -> None:
    """With Serve's own way to collect the answers; only the groups are replaced by ones that never answer."""
    asked, errors = asyncio.Event(), []

    class Broadcast(DeploymentBroadcastResponse):
        def __init__(self) -> None:
            pass

        async def _fetch_replica_results_async(self) -> list[Any]:
            return [SimpleNamespace(get_async=self._never)]

        async def _never(self) -> None:
            asked.set()
            await asyncio.Event().wait()

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        asking = asyncio.create_task(answers(SimpleNamespace(broadcast=lambda _: Broadcast())))
        await asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        del asking
        gc.collect()

    asyncio.run(run())
    assert not errors
