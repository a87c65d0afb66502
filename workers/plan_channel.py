"""How rank 0 tells the other ranks of its group what to run: a few integers per step, and no Ray call.

Uses a gloo group of its own, so that it works beside NCCL. A message is a packed plan; an empty one is a heartbeat, so
that a quiet group is not taken for a dead one.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

INLINE = 4096
"""Values that travel in the first message; only a larger plan needs a second one."""

HEARTBEAT, STOP = 0, -1


class PlanChannel:
    """Made by every rank of an initialised process group, in the same order. A silent peer raises after `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def send(self, packed: Tensor) -> None:
        """A plan as int64 values, at least one."""
        self._broadcast_first(packed.numel(), packed[: INLINE - 1])
        if packed.numel() > INLINE - 1:
            dist.broadcast(packed[INLINE - 1 :].contiguous(), 0, group=self._group)

    def heartbeat(self) -> None:
        self._broadcast_first(HEARTBEAT, None)

    def stop(self) -> None:
        """Tell the other ranks to leave their loop; nothing may be sent afterwards."""
        self._broadcast_first(STOP, None)

    def _broadcast_first(self, size: int, values: Tensor | None) -> None:
        first = torch.zeros(INLINE, dtype=torch.int64)
        first[0] = size
        if values is not None:
            first[1 : 1 + values.numel()] = values
        dist.broadcast(first, 0, group=self._group)

    def receive(self) -> Tensor | None:
        """The next plan; None when rank 0 says stop."""
        first = torch.empty(INLINE, dtype=torch.int64)
        while True:
            dist.broadcast(first, 0, group=self._group)
            if (size := int(first[0])) == STOP:
                return None
            if size != HEARTBEAT:
                break
        rest = size - (INLINE - 1)
        if rest <= 0:
            return first[1 : 1 + size]
        tail = torch.empty(rest, dtype=torch.int64)
        dist.broadcast(tail, 0, group=self._group)
        return torch.cat([first[1:], tail])
