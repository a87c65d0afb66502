"""The router's Engine over Ray: places families, sends them to groups (hop 1), reads the aggregator (hop 3).

Lives in the router's process with the dispatcher. Opening a parent and submitting its families is one unit: whatever
happens in between or afterwards, `_close` frees the parent on aggregator, groups and dispatcher.
"""

import asyncio
import contextvars
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from aggregation.parent_request import ParentRequest
from aggregation.results import AggregationError, ChoiceDelta, ParentResult, ParentUpdate
from cluster.dispatcher import Dispatcher, NoGroupError
from cluster.metrics import add_up, render
from router.engine import GenerationError, ModelInfo, NoHealthyGroupError
from workers.outputs import ChildRef, FamilyRequest

log = logging.getLogger(__name__)

WATCH_S = 1.0
"""How often the groups are asked whether they live."""
ANSWER_S = 10.0
"""How long a group may take to answer a round of questions."""
CALL_TIMEOUT_S = 60.0
"""A group that does not take or drop a family for so long counts as lost."""

DRAIN_POLL_S = 0.1

LOST = (RayError, RayServeException, TimeoutError)
"""What a call to a group raises when the group, or Serve's way to it, is gone."""


class RayEngine:
    """`groups` is the Serve handle of the groups, `aggregator` an AggregatorActor on this node, `sink` its name."""

    def __init__(self, model: ModelInfo, groups: Any, aggregator: Any, sink: str) -> None:
        self._model = model
        self._groups = groups
        self._aggregator = aggregator
        self._sink = sink
        self._dispatcher = Dispatcher()
        self._stats: list[dict[str, Any]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._active = 0
        self._draining = False
        self._context = contextvars.copy_context()

    @property
    def model(self) -> ModelInfo:
        return self._model

    @property
    def groups(self) -> int:
        """How many groups are alive."""
        return len(self._dispatcher.groups)

    @property
    def slots(self) -> int:
        """How many children the living groups compute at once, all together."""
        alive = set(self._dispatcher.groups)
        return sum(stats["about"]["max_running"] for stats in self._stats if stats["group"] in alive)

    async def healthy(self) -> bool:
        return bool(self._dispatcher.groups) and not self._draining

    async def drain(self) -> None:
        """Take no new parents; returns when those under way have been answered and freed."""
        self._draining = True
        while self._active or self._tasks:
            await asyncio.sleep(DRAIN_POLL_S)

    async def metrics(self) -> str:
        await self.refresh()
        parts = [*self._stats, await self._aggregator.counters.remote(), self._dispatcher.counters()]
        return render({**add_up(parts), "groups_alive": len(self._dispatcher.groups)})

    async def watch(self) -> None:
        """Keep the list of living groups; runs as long as the router."""
        while True:
            try:
                await self.refresh()
            except Exception:
                log.exception("could not ask the groups")
            await asyncio.sleep(WATCH_S)

    async def refresh(self) -> None:
        """Ask every group for its numbers; children on groups that are gone fail with an error of their own."""
        answers = await self._ask_groups()
        self._stats = answers or self._stats
        for group in self._dispatcher.update_groups({stats["group"] for stats in answers}):
            await self._aggregator.fail_group.remote(group, "the group that ran this child was lost")

    async def _ask_groups(self) -> list[dict[str, Any]]:
        """The numbers of every group that answers."""
        try:
            call = self._groups.broadcast("stats")
            answers = await call.results_async(timeout_s=ANSWER_S, return_exceptions=True)
        except LOST as error:
            log.warning("no answer from the groups: %s", error)
            return []
        return [answer for answer in answers if isinstance(answer, dict)]

    async def stream(self, parent: ParentRequest, *, whole: bool = False) -> AsyncIterator[ParentUpdate]:
        self._active += 1
        try:
            await self._start(parent, stream=not whole)
            async for ref in self._aggregator.updates.remote(parent.parent_id):
                update: ParentUpdate = await ref
                self._count_finished(parent, update.deltas)
                yield update
        except RayError as error:
            raise _generation_error(error) from error
        finally:
            self._close_later(parent)

    async def complete(self, parent: ParentRequest) -> ParentResult:
        self._active += 1
        try:
            await self._start(parent, stream=False)
            result: ParentResult = await self._aggregator.result.remote(parent.parent_id)
            return result
        except RayError as error:
            raise _generation_error(error) from error
        finally:
            self._close_later(parent)

    def _count_finished(self, parent: ParentRequest, deltas: list[ChoiceDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                self._dispatcher.finished(parent.parent_id, delta.index)

    async def _start(self, parent: ParentRequest, *, stream: bool) -> None:
        """Place every family, open the parent, send one call per group. Raises NoHealthyGroupError."""
        if self._draining:
            raise NoHealthyGroupError("the server is shutting down")
        try:
            by_group = self._place(parent)
        except NoGroupError as error:
            raise NoHealthyGroupError("no group is ready") from error
        placement = {c.index: group for group, families in by_group.items() for f in families for c in f.children}
        await self._aggregator.open.remote(parent, stream=stream, placement=placement)
        calls = (self._while_alive(group, self._submit(group, families)) for group, families in by_group.items())
        await asyncio.gather(*(self._apart(call) for call in calls))

    async def _while_alive(self, group: str, call: Coroutine[Any, Any, None]) -> None:
        """Await a call to a group until the group is given up: Serve would wait for a replica that never returns."""
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({task}, timeout=WATCH_S))[0]:
                if group not in self._dispatcher.groups:
                    raise NoHealthyGroupError("the group was lost before it took the request")
            task.result()
        finally:
            task.cancel()

    def _apart(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `call` in the context this object was made in, outside that of the request.

        Serve gives all calls made in a request's context one id, and takes them for one. Ray cancels them with the
        request, and cleaning up must not be among them.
        """
        return asyncio.get_running_loop().create_task(call, context=self._context.copy())

    def _place(self, parent: ParentRequest) -> dict[str, list[FamilyRequest]]:
        by_group: defaultdict[str, list[FamilyRequest]] = defaultdict(list)
        for number, prompt in enumerate(parent.prompts):
            children = parent.children(number)
            group = self._dispatcher.place(parent.parent_id, [child.index for child in children], len(prompt))
            by_group[group].append(parent.family(number, children, self._sink))
        return by_group

    async def _submit(self, group: str, families: list[FamilyRequest]) -> None:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._groups.submit.remote(group, families, self._aggregator)
        except LOST as error:
            self._dispatcher.drop_group(group)
            raise NoHealthyGroupError("the group was lost before it took the request") from error

    def _close_later(self, parent: ParentRequest) -> None:
        """Free everything of a parent in a task of its own, out of reach of the request's cancellation."""
        self._active -= 1
        self._dispatcher.release(parent.parent_id, range(parent.num_children))
        task = self._apart(self._close(parent))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close(self, parent: ParentRequest) -> None:
        by_group: defaultdict[str, list[ChildRef]] = defaultdict(list)
        try:
            for group, child in await self._aggregator.close.remote(parent.parent_id):
                by_group[group].append(child)
        except RayError as error:
            log.warning("could not close parent %s: %s", parent.parent_id, error)
        await asyncio.gather(*(self._abort(group, children) for group, children in by_group.items()))

    async def _abort(self, group: str, children: list[ChildRef]) -> None:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._groups.abort.remote(group, children)
        except LOST as error:
            log.warning("could not free %d children on a group: %s", len(children), error)


def _generation_error(error: RayError) -> GenerationError:
    """What a client may read of an error: the aggregator's own words, nothing of Ray's."""
    cause = error.__cause__
    return GenerationError(str(cause) if isinstance(cause, AggregationError) else "the aggregator was lost")
