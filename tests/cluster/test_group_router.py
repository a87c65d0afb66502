"""The request router obeys the first argument, and lets others work while no replica takes the call."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.request_router.common import PendingRequest

from cluster.group_router import PinnedRequestRouter


@pytest.fixture
def router() -> PinnedRequestRouter:
    """One that was given its replicas, without the rest of Serve."""
    made = object.__new__(PinnedRequestRouter)
    replicas = {name: SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in ("a", "b")}
    made._replicas, made._replicas_list = replicas, list(replicas.values())
    made.num_routing_tasks_in_backoff = 0
    made.num_routing_tasks_in_backoff_gauge = SimpleNamespace(set=lambda value: None)
    made.initial_backoff_s, made.backoff_multiplier, made.max_backoff_s = 0.001, 2, 0.01
    return made


def pending(name: str) -> Any:
    return PendingRequest(args=[name], kwargs={}, metadata=SimpleNamespace(multiplexed_model_id=""))


def names(replicas: list[Any]) -> list[str]:
    return [replica.replica_id.unique_id for replica in replicas]


@pytest.mark.parametrize(("wanted", "chosen"), [("b", ["b"]), ("gone", ["a", "b"])])
def test_the_replica_named_is_chosen_and_any_other_when_it_is_gone(
    router: PinnedRequestRouter, wanted: str, chosen: list[str]
):
    async def run() -> list[str]:
        return names(await anext(router._choose_replicas_with_backoff(pending(wanted))))

    assert asyncio.run(run()) == chosen


def test_asking_again_and_again_lets_others_run(router: PinnedRequestRouter):
    async def run() -> None:
        choices = router._choose_replicas_with_backoff(pending("b"))
        assert [names(await anext(choices)) for _ in range(2)] == [["b"]] * 2
        waiting = asyncio.ensure_future(anext(choices))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(run())
