"""An aggregation actor as the process that made it sees it: its handle, its feed, and the address groups push to.

The actor is a child of that process on the same node, so that both live and die together.
"""

from dataclasses import dataclass
from typing import Any, Self

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from aggregation.actor import AggregatorActor
from aggregation.feed import Feed
from cluster.sinks import SinkAddress


@dataclass(frozen=True, slots=True)
class Aggregation:
    """`RayEngine` needs the last two, whoever ends the actor the first."""

    actor: Any
    feed: Feed
    address: SinkAddress

    @classmethod
    async def start(cls, tokenizer_folder: str) -> Self:
        """Raises RayError or OSError when the new actor, or the way to it, is gone at once."""
        node = ray.get_runtime_context().get_node_id()
        actor = AggregatorActor.options(  # type: ignore[attr-defined]
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        ).remote(tokenizer_folder)
        local = await actor.listen.remote()
        address = SinkAddress(actor._actor_id.hex(), actor, node, local)
        return cls(actor, await Feed.connect(local), address)
