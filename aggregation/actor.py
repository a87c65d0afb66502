"""The aggregator as a Ray actor: one per router replica, on the router's node.

The router opens and closes parents, and reads them whole here or in pieces through `feed`; groups push deltas, through
the feed too where they are on the same node. Adds nothing to `Aggregator` but the wire; the creator sets
`max_concurrency` to the number of parents that may be read at once, and more.
"""

from collections.abc import Sequence

import ray

from aggregation.aggregator import Aggregator
from aggregation.feed import FeedServer
from aggregation.parent import Placement
from aggregation.parent_request import ParentRequest
from aggregation.results import ParentResult
from workers.outputs import ChildRef, StepOutput


@ray.remote
class AggregatorActor:
    """See `Aggregator` for every method."""

    def __init__(self, tokenizer_folder: str) -> None:
        self._aggregator = Aggregator(tokenizer_folder)
        self._feed = FeedServer(self._aggregator)

    async def ping(self) -> None:
        """Answers when the event loop runs."""

    async def listen(self) -> bytes:
        """The local address of the feed; see `FeedServer`."""
        return await self._feed.listen()

    async def open(self, parent: ParentRequest, *, stream: bool, placement: dict[int, str] | None = None) -> None:
        self._aggregator.open(parent, stream=stream, placement=placement)

    async def place(self, parent_id: str, placement: dict[int, str]) -> None:
        self._aggregator.place(parent_id, placement)

    async def push(self, output: StepOutput) -> list[ChildRef]:
        return self._aggregator.push(output)

    async def result(self, parent_id: str) -> ParentResult:
        return await self._aggregator.result(parent_id)

    async def fail(self, parent_id: str, indices: Sequence[int] | None, message: str) -> None:
        self._aggregator.fail(parent_id, indices, message)

    async def fail_group(self, group: str, message: str) -> list[ChildRef]:
        return self._aggregator.fail_group(group, message)

    async def close(self, parent_id: str) -> list[Placement]:
        return self._aggregator.close(parent_id)

    async def counters(self) -> dict[str, int]:
        return self._aggregator.counters()
