"""One group as its router reaches it: over the group's local socket where both are on one node, else through Serve.

Used by `ray_engine`. Knows nothing of placement.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Self

from ray.exceptions import RayError

from cluster.sinks import SinkAddress
from workers.local_calls import Caller
from workers.outputs import ChildRef, FamilyRequest

log = logging.getLogger(__name__)

ANSWER_S = 10.0
"""How long a group may take to answer whether it lives."""
CALL_TIMEOUT_S = 60.0
"""A group that does not take or drop a family for so long counts as lost."""


class GroupError(Exception):
    """The group, or the way to it, is gone, or it could not do what was asked."""


class Group:
    """Made by `find`. `groups` is Serve's handle of all of them, `name` and `actor` are this one's."""

    def __init__(self, name: str, actor: Any, groups: Any) -> None:
        self._name, self._actor, self._groups = name, actor, groups
        self._caller: Caller | None = None

    @classmethod
    async def find(cls, stats: Mapping[str, Any], groups: Any, node: str, lost: Callable[[str], object]) -> Self:
        """The group that tells `stats` of itself, from this `node`.

        `lost` is called when the local socket closes, which nothing but the end of the group's process does.
        """
        group = cls(stats["group"], stats["actor"], groups)

        def on_lost() -> None:
            group._caller = None
            lost(group._name)

        if stats["node"] == node:
            try:
                group._caller = await Caller.connect(stats["local"], on_lost)
            except OSError as error:  # a container of its own, for one
                log.warning("no socket of a group on this node, it is called through Serve: %s", error)
        return group

    @property
    def near(self) -> bool:
        """Whether its end is heard of at once."""
        return self._caller is not None

    async def submit(self, families: Sequence[FamilyRequest], sink: SinkAddress) -> bool:
        """Whether the group took them; it does not when it is leaving. Raises GroupError."""
        async with _answered():
            if self._caller is not None:
                taken: bool = await self._caller.call("submit", families, replace(sink, actor=None))
            else:
                taken = await self._groups.submit.remote(self._name, families, sink)
            return taken

    async def abort(self, children: Sequence[ChildRef]) -> None:
        """Raises GroupError."""
        async with _answered():
            if self._caller is not None:
                await self._caller.call("abort", children)
            else:
                await self._groups.abort.remote(self._name, children)

    async def lives(self) -> bool:
        """Whether the group's process is there and answers."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._actor.__ray_ready__.remote()
        except (RayError, TimeoutError):
            return False
        return True

    def close(self) -> None:
        if self._caller is not None:
            self._caller.close()


@asynccontextmanager
async def _answered() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            yield
    except Exception as error:
        raise GroupError(str(error) or type(error).__name__) from error
