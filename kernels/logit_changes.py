"""What allowed ids, bias, banned ids and penalties do to the logits of a step, as a few array operations.

For samplers that draw from whole rows; arithmetic and order are those of `kernels.reference_sampler`. Knows no draws
beyond their lists. Called by the Triton sampler.
"""

import torch
from torch import Tensor

from kernels.sampling import SampleBatch
from kernels.transfer import sent


def changed_logits(logits: Tensor, batch: SampleBatch) -> Tensor | None:
    """float32 [R, V], a row per draw; None where no draw changes any logit. IndexError for an id outside [0, V)."""
    if not any(map(len, (batch.allowed_ids, batch.bias_ids, batch.banned_ids, batch.seen_ids))):
        return None
    changed = logits[sent(batch.rows, logits.device)].float()
    _allow(changed, batch)
    _, cells = _cells(batch.bias_starts, batch.bias_ids, changed)
    changed.view(-1)[cells] += sent(batch.bias_values, changed.device)
    _, cells = _cells(batch.banned_starts, batch.banned_ids, changed)
    changed.view(-1)[cells] = float("-inf")
    _penalise(changed, batch)
    return changed


def _cells(starts: Tensor, ids: Tensor, changed: Tensor) -> tuple[Tensor, Tensor]:
    """For every entry of a list its draw, where the list lies, and its place in the flat logits, on their device."""
    size = changed.shape[1]
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        raise IndexError(f"token ids must lie in 0..{size - 1}")
    owner = torch.repeat_interleave(torch.arange(len(changed), device=ids.device), starts.diff())
    return owner, sent(owner * size + ids, changed.device)


def _allow(changed: Tensor, batch: SampleBatch) -> None:
    owner, cells = _cells(batch.allowed_starts, batch.allowed_ids, changed)
    kept = changed.view(-1)[cells]
    changed[sent(owner, changed.device)] = float("-inf")
    changed.view(-1)[cells] = kept


def _penalise(changed: Tensor, batch: SampleBatch) -> None:
    owner, cells = _cells(batch.seen_starts, batch.seen_ids, changed)
    values = torch.stack([batch.repetition[owner], batch.frequency[owner], batch.presence[owner]])
    repetition, frequency, presence = sent(values, changed.device)
    counts = sent(batch.seen_counts, changed.device)
    seen = changed.view(-1)[cells]
    seen = torch.where(seen > 0, seen / repetition, seen * repetition) - frequency * counts
    changed.view(-1)[cells] = seen - torch.where(counts > 0, presence, 0.0)
