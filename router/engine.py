"""What the router asks of the cluster behind it: the one Protocol that keeps HTTP apart from Ray.

`router.ray_engine` implements it over the dispatcher and the aggregation actor, a batch job over one that it replaces
when it is lost; tests implement it in memory.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from aggregation.parent_request import ParentRequest
from aggregation.results import ParentResult, ParentUpdate


class NoHealthyGroupError(Exception):
    """No group can serve now: still starting, draining, or lost. Maps to 503."""


class GenerationError(Exception):
    """A child or its whole parent failed after it was accepted. Maps to 500."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model as the router needs it."""

    name: str
    folder: str
    """Folder with tokenizer.json, tokenizer_config.json and the chat template."""
    max_model_len: int
    """Most tokens of prompt and completion together."""
    vocab_size: int
    exact: bool
    """Whether contract C2 (bit-exact children) holds on this device."""
    created: int
    """Unix seconds."""
    fingerprint: str = ""
    """Identifies what fixes the bits beside the request: weights, tokenizer, data type, device, block size."""


class Engine(Protocol):
    """Cancelling the awaiting task, or closing the iterator, cancels the parent and frees all it holds everywhere."""

    @property
    def model(self) -> ModelInfo: ...

    def stream(self, parent: ParentRequest, *, whole: bool = False) -> AsyncIterator[ParentUpdate]:
        """Deltas as they come; ends after the update that carries the usage.

        With `whole` each choice comes in one piece, when it has finished. Raises NoHealthyGroupError on the first
        step; GenerationError at any.
        """
        ...

    async def complete(self, parent: ParentRequest) -> ParentResult:
        """The whole reply: exactly one choice per child, sorted. Raises as `stream` does."""
        ...

    async def healthy(self) -> bool:
        """Whether any group can serve."""
        ...

    async def metrics(self) -> str:
        """The Prometheus text page, summed over the app."""
        ...
