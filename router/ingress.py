"""The router as a Serve deployment: builds the HTTP app inside the replica and gives it the cluster as its engine.

The aggregation actor is a child of the replica on the same node, so that both live and die together. This is the only
place where HTTP, dispatcher and aggregator meet.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from aggregation.actor import AggregatorActor
from cluster.config import ClusterConfig
from router.app import create_app
from router.engine import ModelInfo
from router.limits import RouterLimits
from router.ray_engine import RayEngine, answers
from workers.checkpoint import resolve, tokenizer_folder

READY_POLL_S = 0.25


def router_options(drain_timeout_s: float) -> dict[str, Any]:
    """Serve options of the router. Its limits are a second fence far behind admission."""
    return {
        "name": "router",
        "num_replicas": 1,
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": 100_000,
        "graceful_shutdown_wait_loop_s": 0.2,
        "graceful_shutdown_timeout_s": drain_timeout_s,
    }


@serve.ingress()
class Ingress:
    """The deployment's class: an ASGI app made once per replica, after the groups answer."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ClusterConfig, groups: Any, generation: str
    ) -> None:
        folder = await asyncio.to_thread(resolve, config.model)
        tokenizer = str(await asyncio.to_thread(tokenizer_folder, folder))
        self._limits = RouterLimits(max_n=config.max_n, max_children=config.max_children)
        self._aggregator = _make_aggregator(tokenizer)
        await self._aggregator.ping.remote()
        model = await _await_model(groups, config.served_name or folder.name, tokenizer, generation)
        self._engine = RayEngine(model, groups, self._aggregator, self._aggregator._actor_id.hex(), generation)

    async def drain(self) -> None:
        """See `RayEngine.drain`."""
        await self._engine.drain()

    async def cancel_all(self) -> None:
        """See `RayEngine.cancel_all`."""
        await self._engine.cancel_all()

    def __serve_build_asgi_app__(self) -> Any:
        engine = self._engine
        app = create_app(engine, self._limits)

        @asynccontextmanager
        async def watching(_: FastAPI) -> AsyncIterator[None]:
            await engine.refresh()
            task = asyncio.create_task(engine.watch())
            yield
            task.cancel()

        app.router.lifespan_context = watching
        return app


def _make_aggregator(folder: str) -> Any:
    node = ray.get_runtime_context().get_node_id()
    return AggregatorActor.options(  # type: ignore[attr-defined]
        num_cpus=0,
        max_concurrency=100_000,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
    ).remote(folder)


async def _await_model(groups: Any, name: str, folder: str, generation: str) -> ModelInfo:
    """What the groups serve, once the first of this generation answers; Serve bounds the wait for its replicas."""
    while not (own := [stats for stats in await answers(groups) if stats["generation"] == generation]):
        await asyncio.sleep(READY_POLL_S)
    about = own[0]["about"]
    return ModelInfo(
        name=name,
        folder=folder,
        max_model_len=about["max_model_len"],
        vocab_size=about["vocab_size"],
        exact=about["exact"],
        created=int(time.time()),
    )
