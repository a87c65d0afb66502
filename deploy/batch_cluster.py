"""The cluster of a batch job: a Choral that runs there already, or groups of its own, and the engine over them.

The job has its own aggregator, asks the groups without HTTP, and makes a new aggregator when that one is lost. Groups
it started are marked in the output folder, so that a job that was killed finds and in the end stops them.
Called by `deploy.batch`.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from aggregation.parent_request import ParentRequest
from aggregation.results import ParentResult, ParentUpdate
from cluster.config import ClusterConfig
from cluster.placement import GROUPS
from deploy.app import Beside, RunningCluster, Say, StartError, app_status, connect, start
from deploy.errors import CommandError
from deploy.serve_config import APP
from router.aggregation import Aggregation
from router.batch.store import SampleStore
from router.engine import GenerationError, ModelInfo
from router.ray_engine import RayEngine, answers, model_info
from workers.checkpoint import resolve, tokenizer_folder

log = logging.getLogger(__name__)

PING_S = 10.0
RETRY_S = 1.0
ANSWER_S = 30.0
"""An aggregator silent for so long is taken for lost."""

COMING_UP_S = 120.0
"""Longest wait for an application that is there but does not answer."""
LOST = (RayError, OSError)
"""What making an aggregator raises when it, or the way to it, is gone at once."""
_OWN = "groups"
"""The note in the output folder that says which groups the job has started."""


class JobEngine:
    """An Engine over the groups of a running application. `open` before use, `close` in the end."""

    def __init__(self, model: ModelInfo) -> None:
        self._model = model
        self._groups = serve.get_deployment_handle(GROUPS, APP)
        self._replacing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._engine: RayEngine | None = None

    @property
    def model(self) -> ModelInfo:
        return self._model

    @property
    def groups(self) -> int:
        return self._engine.groups if self._engine else 0

    @property
    def slots(self) -> int:
        return self._engine.slots if self._engine else 0

    async def open(self) -> None:
        await self._renew()
        self._watcher = asyncio.create_task(self._watch_aggregator())

    async def close(self) -> None:
        self._watcher.cancel()
        self._let_go()
        ray.kill(self._aggregator)

    def _let_go(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    async def healthy(self) -> bool:
        return self._engine is not None and await self._engine.healthy()

    async def metrics(self) -> str:
        return await self._engine.metrics() if self._engine else ""

    async def stream(self, parent: ParentRequest, *, whole: bool = False) -> AsyncIterator[ParentUpdate]:
        if (engine := self._engine) is None:
            raise GenerationError("the aggregator was lost")
        updates: Any = engine.stream(parent, whole=whole)
        try:
            async with contextlib.aclosing(updates):
                async for update in updates:
                    yield update
        except (GenerationError, RayError, RayServeException) as error:
            with contextlib.suppress(*LOST):  # the watcher goes on trying
                await self._check_aggregator()
            raise GenerationError(str(error).partition("\n")[0]) from error

    async def complete(self, parent: ParentRequest) -> ParentResult:
        assert self._engine is not None
        return await self._engine.complete(parent)

    async def _watch_aggregator(self) -> None:
        """A lost aggregator is heard of at once, one that hangs is found by asking."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PING_S):
                    await self._feed.lost()
            try:
                await self._check_aggregator()
            except LOST:
                log.exception("could not make a new aggregator")
                await asyncio.sleep(RETRY_S)

    async def _check_aggregator(self) -> None:
        """Put a new aggregator in the place of one that does not answer."""
        async with self._replacing:
            try:
                if self._engine is not None:
                    async with asyncio.timeout(ANSWER_S):
                        await self._aggregator.ping.remote()
                    return
            except (RayError, TimeoutError):
                self._let_go()
            ray.kill(self._aggregator)
            await self._renew()

    async def _renew(self) -> None:
        aggregation = await Aggregation.start(self._model.folder)
        self._aggregator, self._feed = aggregation.actor, aggregation.feed
        engine = RayEngine(self._model, self._groups, aggregation)
        await engine.refresh()
        self._tasks = [asyncio.create_task(engine.watch())]
        self._engine = engine


@contextlib.contextmanager
def job_groups(
    config: ClusterConfig, store: SampleStore, running: bool, say: Say, beside: Beside
) -> Iterator[ModelInfo]:
    """What the groups that answer serve: those that run already, or else groups started here and stopped at the end.

    `running` is the answer of `join`; `beside` begins while groups start. Groups of this very job, left by a run
    that was killed, are taken over, or stopped when they are to be others now. Raises CommandError when groups cannot
    start.
    """
    wanted = config.model_dump(mode="json", exclude={"port", "address"})
    left = store.notes.get(_OWN)
    if running and left is None:
        say("asking the Choral that runs on this cluster")
        yield about()
        return
    if running and left == wanted:
        say("taking over the groups of the run before")
        cluster = RunningCluster(config, "")
    else:
        if running:
            RunningCluster(config, "").stop()
        ray.shutdown()
        store.note(_OWN, wanted)
        cluster = _started(config, say, beside)
    with cluster, contextlib.closing(beside):
        yield about()
    store.note(_OWN, None)


def stop_left_groups(config: ClusterConfig, store: SampleStore, running: bool) -> None:
    """Stop the groups of a job that was killed after its last sample."""
    if running and store.notes.get(_OWN) is not None:
        RunningCluster(config, "").stop()
        store.note(_OWN, None)


def is_own(store: SampleStore) -> bool:
    """Whether this job started the groups that run."""
    return store.notes.get(_OWN) is not None


def _started(config: ClusterConfig, say: Say, beside: Beside) -> RunningCluster:
    try:
        return start(config, say=say, beside=beside, router=False)
    except StartError as error:
        raise CommandError(str(error)) from error


def join(config: ClusterConfig, say: Say) -> bool:
    """Connect to the cluster at `config.address`; whether Choral answers there, once it is up if it is coming up.

    Raises CommandError when there is no cluster, or a Choral that does not come up.
    """
    try:
        connect(config, say)
    except (OSError, StartError) as error:
        raise CommandError(str(error)) from error
    deadline = time.monotonic() + COMING_UP_S
    while (status := app_status()) not in (None, ApplicationStatus.RUNNING):
        if time.monotonic() > deadline:
            raise CommandError(f"the Choral on this cluster is {status.value.lower()} and does not come up")
        time.sleep(0.5)
    return status is ApplicationStatus.RUNNING


def about() -> ModelInfo:
    """What the groups of the running application serve. Raises CommandError if none answers."""
    if not (found := asyncio.run(answers(serve.get_deployment_handle(GROUPS, APP)))):
        raise CommandError("no group of the Choral on this cluster answers")
    about = found[0]["about"]
    return model_info(about, str(tokenizer_folder(resolve(about["model"]))))
