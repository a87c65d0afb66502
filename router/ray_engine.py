"""The router's Engine over Ray: places families, sends them to groups (hop 1), reads the aggregator (hop 3).

Lives in the router's process with the dispatcher. Opening a parent and submitting its families is one unit: whatever
happens in between or afterwards, `_close` frees the parent on aggregator, groups and dispatcher.
"""

import asyncio
import contextvars
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from aggregation.parent_request import ParentRequest
from aggregation.results import AggregationError, ChoiceDelta, ParentResult, ParentUpdate
from cluster.dispatcher import Dispatcher, NoGroupError
from cluster.metrics import add_up, render
from router.aggregation import Aggregation
from router.engine import GenerationError, ModelInfo, NoHealthyGroupError
from workers.outputs import ChildRef, FamilyRequest

log = logging.getLogger(__name__)
T = TypeVar("T")

WATCH_S = 1.0
"""How often the groups are asked whether they live."""
ANSWER_S = 10.0
"""How long a group may take to answer a round of questions."""
CALL_TIMEOUT_S = 60.0
"""A group that does not take or drop a family for so long counts as lost."""

PLACE_ROUNDS = 5
"""How often a family is placed anew when the group chosen for it is leaving."""

DRAIN_POLL_S = 0.1

LOST = (RayError, RayServeException, TimeoutError)
"""What a call to a group raises when the group, or Serve's way to it, is gone."""


class RayEngine:
    """`groups` is the Serve handle of the groups. Only those of this `generation` are used, all if it is None."""

    def __init__(self, model: ModelInfo, groups: Any, aggregation: Aggregation, generation: str | None = None) -> None:
        self._model = model
        self._groups = groups
        self._aggregator, self._feed, self._sink = aggregation.calls, aggregation.feed, aggregation.address
        self._generation = generation
        self._dispatcher = Dispatcher()
        self._stats: list[dict[str, Any]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._active: set[str] = set()
        self._actors: dict[str, Any] = {}
        """The actor of every group that ever answered and is not gone."""
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

    async def cancel_all(self) -> None:
        """Take no new parents, and end the children of those under way with an error."""
        self._draining = True
        await asyncio.gather(
            *(self._aggregator.fail.remote(parent, None, "the server was stopped") for parent in self._active)
        )

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
        """Ask every group for its numbers; children on groups that are gone fail with an error of their own.

        A silent group that lives is leaving (an update, or fewer groups) and finishes the children it has.
        """
        own = [s for s in await answers(self._groups) if self._generation in (None, s["generation"])]
        self._stats = own or self._stats
        self._actors |= {stats["group"]: stats["actor"] for stats in own}
        for group in self._dispatcher.update_groups({stats["group"] for stats in own}):
            if not await self._lives(group):
                await self._give_up(group)

    async def _lives(self, group: str) -> bool:
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._actors[group].__ray_ready__.remote()
        except (RayError, TimeoutError):
            return False
        return True

    async def _give_up(self, group: str) -> None:
        self._dispatcher.drop_group(group)
        if self._actors.pop(group, None) is not None:
            await self._aggregator.fail_group.remote(group, "the group that ran this child was lost")

    async def stream(self, parent: ParentRequest, *, whole: bool = False) -> AsyncIterator[ParentUpdate]:
        self._active.add(parent.parent_id)
        try:
            await self._start(parent, stream=not whole)
            async with aclosing(self._feed.updates(parent.parent_id)) as updates:
                async for update in updates:
                    self._count_finished(parent, update.deltas)
                    yield update
        except (RayError, AggregationError) as error:
            raise _generation_error(error) from error
        finally:
            self._close_later(parent)

    async def complete(self, parent: ParentRequest) -> ParentResult:
        self._active.add(parent.parent_id)
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
        by_group = self._place(parent, range(len(parent.prompts)), stream=stream)
        await self._aggregator.open.remote(parent, stream=stream, placement=_placement(by_group))
        for _ in range(PLACE_ROUNDS):
            if not (refused := await self._send(by_group)):
                return
            await self.refresh()
            by_group = self._place(parent, refused, stream=stream)
            await self._aggregator.place.remote(parent.parent_id, _placement(by_group))
        raise NoHealthyGroupError("every group is leaving")

    async def _while_alive(self, group: str, call: Coroutine[Any, Any, bool]) -> bool:
        """Await a call to a group until the group is given up: Serve would wait for a replica that never returns."""
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({task}, timeout=WATCH_S))[0]:
                if group not in self._dispatcher.groups:
                    return False
            return task.result()
        finally:
            task.cancel()

    async def _send(self, by_group: dict[str, list[FamilyRequest]]) -> list[int]:
        """One call per group. Returns the prompts whose families were refused, because their group is leaving."""
        calls = (self._while_alive(group, self._submit(group, families)) for group, families in by_group.items())
        refused = []
        for (group, families), taken in zip(
            by_group.items(), await asyncio.gather(*map(self._apart, calls)), strict=True
        ):
            if not taken:
                self._dispatcher.leave(group)
                refused += [family.prompt_number for family in families]
        return refused

    def _apart(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `call` in the context this object was made in, outside that of the request.

        Serve gives all calls made in a request's context one id, and takes them for one. Ray cancels them with the
        request, and cleaning up must not be among them.
        """
        return asyncio.get_running_loop().create_task(call, context=self._context.copy())

    def _place(self, parent: ParentRequest, prompts: Iterable[int], *, stream: bool) -> dict[str, list[FamilyRequest]]:
        """The families of these prompts by the group chosen for each. Raises NoHealthyGroupError."""
        by_group: defaultdict[str, list[FamilyRequest]] = defaultdict(list)
        for number in prompts:
            children = parent.children(number)
            indices, tokens = [child.index for child in children], len(parent.prompts[number])
            try:
                group = self._dispatcher.place(parent.parent_id, indices, tokens)
            except NoGroupError as error:
                raise NoHealthyGroupError("no group is ready") from error
            by_group[group].append(parent.family(number, children, self._sink.name, stream=stream))
        return by_group

    async def _submit(self, group: str, families: list[FamilyRequest]) -> bool:
        """Whether the group took them."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                taken: bool = await self._groups.submit.remote(group, families, self._sink)
                return taken
        except LOST as error:
            self._dispatcher.leave(group)
            raise NoHealthyGroupError("the group was lost before it took the request") from error

    def _close_later(self, parent: ParentRequest) -> None:
        """Free everything of a parent in a task of its own, out of reach of the request's cancellation."""
        self._active.discard(parent.parent_id)
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


async def answers(groups: Any) -> list[dict[str, Any]]:
    """The numbers of every group that Serve offers and that answers.

    The timeout is not Serve's, which leaves an error in asyncio's log when the caller is cancelled meanwhile.
    """
    try:
        async with asyncio.timeout(ANSWER_S):
            found = await groups.broadcast("stats").results_async(return_exceptions=True)
    except LOST as error:
        log.info("no answer from the groups: %s", error)
        return []
    return [answer for answer in found if isinstance(answer, dict)]


def model_info(about: Mapping[str, Any], folder: str) -> ModelInfo:
    """What groups say of themselves, as a router needs it; `folder` has the tokenizer."""
    return ModelInfo(
        name=about["name"],
        folder=folder,
        max_model_len=about["max_model_len"],
        vocab_size=about["vocab_size"],
        exact=about["exact"],
        created=int(time.time()),
        fingerprint=about["fingerprint"],
    )


def _placement(by_group: dict[str, list[FamilyRequest]]) -> dict[int, str]:
    """The group of every child by its choice index."""
    return {c.index: group for group, families in by_group.items() for f in families for c in f.children}


def _generation_error(error: RayError | AggregationError) -> GenerationError:
    """What a client may read of an error: the aggregator's own words, nothing of Ray's."""
    cause = error.__cause__ if isinstance(error, RayError) else error
    return GenerationError(str(cause) if isinstance(cause, AggregationError) else "the aggregator was lost")
