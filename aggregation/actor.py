"""The aggregator as a Ray actor: one per router replica, on the router's node.

Its router and the groups of its node talk to it through `feed`; groups on other nodes push by calling the actor. Adds
nothing to `Aggregator` but the wire.
"""

import ray

from aggregation.aggregator import Aggregator
from aggregation.feed import FeedServer
from workers.outputs import ChildRef, StepOutput


@ray.remote
class AggregatorActor:
    """See `Aggregator`."""

    def __init__(self, tokenizer_folder: str) -> None:
        self._aggregator = Aggregator(tokenizer_folder)
        self._feed = FeedServer(self._aggregator)

    async def ping(self) -> None:
        """Answers when the event loop runs."""

    async def listen(self) -> bytes:
        """The local address of the feed; see `FeedServer`."""
        return await self._feed.listen()

    async def push(self, output: StepOutput) -> list[ChildRef]:
        return self._aggregator.push(output)
