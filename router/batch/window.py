"""How many sequences a batch has under way: a bounded window in which a family weighs n, first come first served.

Called by `runner`. Whoever shares the engine with others (online requests) lets `capacity` shrink and grow.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Window:
    """Room for `capacity()` sequences; call `refresh` when that may have changed.

    What weighs more than the whole window gets in when it is empty.
    """

    def __init__(self, capacity: Callable[[], int]) -> None:
        self.capacity = capacity
        self.in_use = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, weight: int) -> AsyncIterator[None]:
        """Room for `weight` sequences as long as the block runs."""
        await self.acquire(weight)
        try:
            yield
        finally:
            self.release(weight)

    async def acquire(self, weight: int) -> None:
        """Returns when there is room and nobody waits longer."""
        if not self._waiting and self._fits(weight):
            self.in_use += weight
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((weight, turn))
        try:
            await turn
        except asyncio.CancelledError:
            self._leave(weight, turn)
            raise

    def release(self, weight: int) -> None:
        self.in_use -= weight
        self.refresh()

    def refresh(self) -> None:
        """Let in whoever fits now."""
        while self._waiting and self._fits(self._waiting[0][0]):
            weight, turn = self._waiting.popleft()
            if not turn.cancelled():
                self.in_use += weight
                turn.set_result(None)

    def _fits(self, weight: int) -> bool:
        capacity = self.capacity()
        return self.in_use + weight <= capacity or (self.in_use == 0 and capacity > 0)

    def _leave(self, weight: int, turn: "asyncio.Future[None]") -> None:
        """Cancelled while waiting, or just after the turn came."""
        if turn.done() and not turn.cancelled():
            self.release(weight)
        else:
            self._waiting = deque(entry for entry in self._waiting if entry[1] is not turn)
            self.refresh()
