"""The engine over handles that behave like Ray's at their worst; real ones are in `tests/system`."""

import asyncio
from typing import Any

import pytest

from aggregation.parent_request import ParentRequest
from router.engine import ModelInfo, NoHealthyGroupError
from router.ray_engine import RayEngine
from workers.sampling_params import SamplingParams

MODEL = ModelInfo("m", "/nowhere", 100, 300, True, 0)


class Remote:
    """A handle whose methods are coroutine functions."""

    def __init__(self, **methods: Any) -> None:
        for name, method in methods.items():
            setattr(self, name, type("Method", (), {"remote": staticmethod(method)}))


def test_a_call_that_serve_never_delivers_ends_when_the_group_is_given_up():
    async def forever(*_: object) -> None:
        await asyncio.Event().wait()

    async def nothing(*_: object, **__: object) -> list[Any]:
        return []

    async def run() -> None:
        groups = Remote(submit=forever, abort=nothing)
        aggregator = Remote(open=nothing, close=nothing)
        engine = RayEngine(MODEL, groups, aggregator, "sink")
        engine._dispatcher.update_groups({"g"})
        parent = ParentRequest(
            parent_id="p", prompts=((1,),), samples=(0,), params=SamplingParams(max_tokens=1, seed=0)
        )
        reply = asyncio.create_task(engine.complete(parent))
        await asyncio.sleep(0)
        engine._dispatcher.drop_group("g")
        async with asyncio.timeout(30):
            with pytest.raises(NoHealthyGroupError):
                await reply
        await engine.drain()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
