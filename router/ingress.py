"""The router as a Serve deployment: builds the HTTP app inside the replica and gives it the cluster as its engine.

This is the only place where HTTP, dispatcher and aggregator meet.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve

from cluster.config import ClusterConfig
from cluster.placement import HEALTH_PERIOD_S
from router.aggregation import Aggregation
from router.app import create_app
from router.batch_executor import BatchExecutor
from router.http_server import listener, serving_on
from router.limits import RouterLimits
from router.middleware import ProxyNamesRequests
from router.ray_engine import RayEngine, answers, model_info
from workers.checkpoint import resolve, tokenizer_folder

log = logging.getLogger(__name__)

ROUTER = "router"
"""The name of the deployment."""
READY_POLL_S = 0.25
LAST_ERRORS_S = 0.5
"""What a router without its aggregator takes to tell its clients so."""


def router_options(drain_timeout_s: float) -> dict[str, Any]:
    """Serve options of the router. Its limits are a second fence far behind admission."""
    return {
        "name": ROUTER,
        "num_replicas": 1,
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": 100_000,
        "health_check_period_s": HEALTH_PERIOD_S,
        "graceful_shutdown_wait_loop_s": 0.2,
        "graceful_shutdown_timeout_s": drain_timeout_s,
    }


@serve.ingress()
class Ingress:
    """The deployment's class: an ASGI app made once per replica, after the groups answer.

    With `listen` it serves HTTP itself at the configured address; otherwise Serve's proxies bring the requests.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ClusterConfig, groups: Any, generation: str, listen: bool
    ) -> None:
        self._config = config
        self._cancelled = False
        self._listener = listener(config.host, config.port, reserved=True) if listen else None
        folder = await asyncio.to_thread(resolve, config.model)
        tokenizer = str(await asyncio.to_thread(tokenizer_folder, folder))
        aggregation = await Aggregation.start(tokenizer)
        self._feed = aggregation.feed
        about = await _await_groups(groups, generation)
        self._engine = RayEngine(model_info(about, tokenizer), groups, aggregation, generation)

    async def drain(self) -> None:
        """Batches stop where they are, to go on after the next start; then see `RayEngine.drain`."""
        if self._batches is not None:
            await self._batches.stop()
        await self._engine.drain()

    async def cancel_all(self) -> None:
        """See `RayEngine.cancel_all`. Nobody waits for clients any more."""
        self._cancelled = True
        await self._engine.cancel_all()

    def __serve_build_asgi_app__(self) -> Any:
        engine = self._engine
        app = create_app(engine, _limits(self._config), _folder(self._config))
        self._batches: BatchExecutor | None = getattr(app.state, "batches", None)
        serving = app.router.lifespan_context

        @asynccontextmanager
        async def watching(app: FastAPI) -> AsyncIterator[None]:
            await engine.refresh()
            tasks = [asyncio.create_task(engine.watch()), asyncio.create_task(self._end_with_aggregator())]
            async with serving(app), self._http(app) as refuse:
                yield
                refuse()
                if not self._cancelled:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._config.drain_timeout_s):
                            await self.drain()
            for task in tasks:
                task.cancel()

        app.router.lifespan_context = watching
        return app if self._listener else ProxyNamesRequests(app)

    async def _end_with_aggregator(self) -> None:
        """End this process when its aggregator is lost, so that Serve replaces both: nothing can be answered here."""
        await self._feed.lost()
        log.error("the aggregator was lost; the router ends, to be started anew")
        await asyncio.sleep(LAST_ERRORS_S)
        os._exit(1)

    def _http(self, app: FastAPI) -> AbstractAsyncContextManager[Callable[[], None]]:
        return serving_on(self._listener, app) if self._listener else nullcontext(lambda: None)


def _limits(config: ClusterConfig) -> RouterLimits:
    running = config.groups * config.max_running
    return RouterLimits(
        max_n=config.max_n,
        max_children=config.max_children,
        running_children=running,
        batch_children=config.batch_children or max(running // 2, 1),
    )


def _folder(config: ClusterConfig) -> Path | None:
    return Path(config.files_dir) if config.files_dir else None


async def _await_groups(groups: Any, generation: str) -> dict[str, Any]:
    """What the groups say of themselves, once the first of this generation answers; Serve bounds the wait."""
    while not (own := [stats for stats in await answers(groups) if stats["generation"] == generation]):
        await asyncio.sleep(READY_POLL_S)
    about: dict[str, Any] = own[0]["about"]
    return about
