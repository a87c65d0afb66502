"""Sending small tensors to a device without waiting for what the device is doing.

Knows nothing of what they mean. Called by what is made on the CPU for a step: plans, batches, draws.
"""

import torch
from torch import Tensor


def sent(x: Tensor, device: torch.device) -> Tensor:
    """`x` on `device`. From the CPU to a GPU it goes through pinned memory, in order with the work queued there."""
    if x.device.type == device.type:
        return x
    pinned = device.type == "cuda" and x.numel() > 0
    return (x.pin_memory() if pinned else x).to(device, non_blocking=True)
