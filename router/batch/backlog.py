"""The rows that are ready to be sampled but not started: a bounded look-ahead from which the longest goes first.

Filled and emptied by `runner` on one event loop.
"""

import asyncio
import heapq
from itertools import count

from router.batch.rows import Row


class Backlog:
    """At most `size` rows. Without the longest first, the last rows of a job could be the longest."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._heap: list[tuple[tuple[int, int], int, Row]] = []
        self._order = count()
        self._changed = asyncio.Condition()
        self.closed = False
        """Whether the input has ended."""

    def __len__(self) -> int:
        return len(self._heap)

    async def put(self, row: Row) -> None:
        """Waits while the backlog is full."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._heap) < self._size)
            longest, whole = row.length
            heapq.heappush(self._heap, ((-longest, -whole), next(self._order), row))
            self._changed.notify_all()

    async def close(self) -> None:
        async with self._changed:
            self.closed = True
            self._changed.notify_all()

    async def get(self) -> Row | None:
        """The longest row; None at the end."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._heap or self.closed)
            if not self._heap:
                return None
            row = heapq.heappop(self._heap)[2]
            self._changed.notify_all()
            return row
