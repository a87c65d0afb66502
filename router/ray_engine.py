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
from router.groups import Group, GroupError
from workers.outputs import ChildRef, FamilyRequest

log = logging.getLogger(__name__)
T = TypeVar("T")

WATCH_S = 1.0
"""How often the groups are asked whether they live."""
CALM_S = 5.0
"""How often while all of them are on this node, where it is heard at once when one ends."""
RESTLESS_S = 60.0
"""For so long after a group was lost a new one is looked for as often as ever."""
ROUND_S = 10.0
"""How long the groups may take to answer a round of questions."""
PLACE_ROUNDS = 5
"""How often a family is placed anew when the group chosen for it is leaving."""

DRAIN_POLL_S = 0.1


class RayEngine:
    """`groups` is the Serve handle of the groups. Only those of this `generation` are used, all if it is None."""

    def __init__(self, model: ModelInfo, groups: Any, aggregation: Aggregation, generation: str | None = None) -> None:
        self._model = model
        self._handle = groups
        self._aggregator, self._sink = aggregation.feed, aggregation.address
        self._generation = generation
        self._dispatcher = Dispatcher()
        self._stats: list[dict[str, Any]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._active: set[str] = set()
        self._groups: dict[str, Group] = {}
        """Every group that ever answered and is not gone."""
        self._restless_until = 0.0
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
            *(self._aggregator.call("fail", parent, None, "the server was stopped") for parent in self._active)
        )

    async def metrics(self) -> str:
        await self.refresh()
        parts = [*self._stats, await self._aggregator.call("counters"), self._dispatcher.counters()]
        return render({**add_up(parts), "groups_alive": len(self._dispatcher.groups)})

    async def watch(self) -> None:
        """Keep the list of living groups; runs as long as the router."""
        while True:
            try:
                await self.refresh()
            except Exception:
                log.exception("could not ask the groups")
            calm = self._groups and all(group.near for group in self._groups.values())
            await asyncio.sleep(CALM_S if calm and time.monotonic() > self._restless_until else WATCH_S)

    async def refresh(self) -> None:
        """Ask every group for its numbers; children on groups that are gone fail with an error of their own.

        A silent group that lives is leaving (an update, or fewer groups) and finishes the children it has.
        """
        own = [s for s in await answers(self._handle) if self._generation in (None, s["generation"])]
        self._stats = own or self._stats
        for stats in own:
            if stats["group"] not in self._groups:
                found = await Group.find(stats, self._handle, self._sink.node, self._on_lost)
                if self._groups.setdefault(stats["group"], found) is not found:
                    found.close()
        for name in self._dispatcher.update_groups({stats["group"] for stats in own}):
            await self._give_up_if_dead(name)

    def close(self) -> None:
        """Let go of the groups."""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            group.close()

    def _on_lost(self, name: str) -> None:
        self._do_later(self._give_up_if_dead(name))

    async def _give_up_if_dead(self, name: str) -> None:
        if (group := self._groups.get(name)) is not None and await group.lives():
            return
        self._dispatcher.drop_group(name)
        if self._groups.pop(name, None) is not None:
            self._restless_until = time.monotonic() + RESTLESS_S
            await self._aggregator.call("fail_group", name, "the group that ran this child was lost")

    async def stream(self, parent: ParentRequest, *, whole: bool = False) -> AsyncIterator[ParentUpdate]:
        self._active.add(parent.parent_id)
        try:
            await self._start(parent, stream=not whole)
            async with aclosing(self._aggregator.updates(parent.parent_id)) as updates:
                async for update in updates:
                    self._count_finished(parent, update.deltas)
                    yield update
        except AggregationError as error:
            raise GenerationError(str(error)) from error
        finally:
            self._close_later(parent)

    async def complete(self, parent: ParentRequest) -> ParentResult:
        self._active.add(parent.parent_id)
        try:
            await self._start(parent, stream=False)
            result: ParentResult = await self._aggregator.call("result", parent.parent_id)
            return result
        except AggregationError as error:
            raise GenerationError(str(error)) from error
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
        await self._aggregator.call("open", parent, stream=stream, placement=_placement(by_group))
        for _ in range(PLACE_ROUNDS):
            if not (refused := await self._send(by_group)):
                return
            await self.refresh()
            by_group = self._place(parent, refused, stream=stream)
            await self._aggregator.call("place", parent.parent_id, _placement(by_group))
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

    async def _submit(self, name: str, families: list[FamilyRequest]) -> bool:
        """Whether the group took them."""
        if (group := self._groups.get(name)) is None:
            return False
        try:
            return await group.submit(families, self._sink)
        except GroupError as error:
            self._dispatcher.leave(name)
            raise NoHealthyGroupError("the group was lost before it took the request") from error

    def _close_later(self, parent: ParentRequest) -> None:
        """Free everything of a parent, out of reach of the request's cancellation."""
        self._active.discard(parent.parent_id)
        self._dispatcher.release(parent.parent_id, range(parent.num_children))
        self._do_later(self._close(parent))

    def _do_later(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._apart(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close(self, parent: ParentRequest) -> None:
        by_group: defaultdict[str, list[ChildRef]] = defaultdict(list)
        try:
            for group, child in await self._aggregator.call("close", parent.parent_id):
                by_group[group].append(child)
        except AggregationError as error:
            log.warning("could not close parent %s: %s", parent.parent_id, error)
        await asyncio.gather(*(self._abort(name, children) for name, children in by_group.items()))

    async def _abort(self, name: str, children: list[ChildRef]) -> None:
        try:
            if (group := self._groups.get(name)) is not None:
                await group.abort(children)
        except GroupError as error:
            log.warning("could not free %d children on a group: %s", len(children), error)


async def answers(groups: Any) -> list[dict[str, Any]]:
    """The numbers of every group that Serve offers and that answers.

    The timeout is not Serve's, which leaves an error in asyncio's log when the caller is cancelled meanwhile.
    """
    try:
        async with asyncio.timeout(ROUND_S):
            found = await groups.broadcast("stats").results_async(return_exceptions=True)
    except (RayError, RayServeException, TimeoutError) as error:
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
