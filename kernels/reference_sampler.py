"""The obvious sampler in torch: one draw after the other, filters by sorting, counter-based noise.

The oracle for the C++ sampler and the fallback. Sums run in double through `cumsum`, which adds in
vocabulary order whatever the thread count. Called by `kernels.ops` only; see `kernels.sampling` for the
meaning of the fields.
"""

import torch
from torch import Tensor

from kernels.sampling import SampleBatch, SampleResult

_MASK = 0xFFFFFFFF
TAG = 0x43686F72
"""Fourth word of the counter: keeps this use of a seed apart from any other."""


def _multiply(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of factor * x for 32-bit values held in int64."""
    low = (x & 0xFFFF) * factor
    high = (x >> 16) * factor + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Philox4x32-10 (Salmon et al., SC 2011): 32-bit words in int64 tensors."""
    a, b, c, d = counter
    first, second = key
    for _ in range(10):
        high_a, low_a = _multiply(0xD2511F53, a)
        high_c, low_c = _multiply(0xCD9E8D57, c)
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
        first, second = (first + 0x9E3779B9) & _MASK, (second + 0xBB67AE85) & _MASK
    return [a, b, c, d]


def uniform(seed: Tensor, prompt_number: Tensor, sample: Tensor, position: Tensor) -> Tensor:
    counter = [position & _MASK, sample & _MASK, prompt_number & _MASK, torch.full_like(seed, TAG)]
    high, low, _, _ = philox(counter, [seed & _MASK, (seed >> 32) & _MASK])
    return ((high >> 5) * 2.0**26 + (low >> 6)).double() * 2.0**-53


def sample(logits: Tensor, batch: SampleBatch) -> SampleResult:
    noise = uniform(batch.seed, batch.prompt_number, batch.sample, batch.position)
    count = len(batch.rows)
    kmax = max(0, int(batch.num_logprobs.max())) if count else 0
    result = SampleResult(
        torch.full((count,), -1, device=logits.device),
        torch.zeros(count, device=logits.device),
        torch.full((count, kmax), -1, device=logits.device),
        torch.zeros(count, kmax, device=logits.device),
    )
    for draw in range(count):
        raw = logits[batch.rows[draw]].float()
        token = _draw(_modified(raw, batch, draw), batch, draw, noise[draw])
        result.tokens[draw] = token
        if token >= 0 and batch.num_logprobs[draw] >= 0:
            _report(raw, token, int(batch.num_logprobs[draw]), draw, result)
    return result


def _segment(starts: Tensor, draw: int, *lists: Tensor) -> list[Tensor]:
    return [entries[int(starts[draw]) : int(starts[draw + 1])] for entries in lists]


def _modified(raw: Tensor, batch: SampleBatch, draw: int) -> Tensor:
    """The logits after allowed ids, bias, banned ids and penalties."""
    logits = raw.clone()
    (allowed,) = _segment(batch.allowed_starts, draw, batch.allowed_ids)
    if len(allowed):
        logits = torch.full_like(raw, float("-inf"))
        logits[allowed.long()] = raw[allowed.long()]
    ids, values = _segment(batch.bias_starts, draw, batch.bias_ids, batch.bias_values)
    logits[ids.long()] += values
    (banned,) = _segment(batch.banned_starts, draw, batch.banned_ids)
    logits[banned.long()] = float("-inf")
    ids, counts = _segment(batch.seen_starts, draw, batch.seen_ids, batch.seen_counts)
    seen = logits[ids.long()]
    seen = torch.where(seen > 0, seen / batch.repetition[draw], seen * batch.repetition[draw])
    seen = seen - batch.frequency[draw] * counts
    logits[ids.long()] = seen - torch.where(counts > 0, batch.presence[draw], 0.0)
    return logits


def _draw(logits: Tensor, batch: SampleBatch, draw: int, noise: Tensor) -> int:
    best = logits.max()
    if logits.isnan().any() or best == float("-inf"):
        return -1
    if batch.temperature[draw] == 0:
        return int((logits == best).nonzero()[0])
    mass = torch.exp((logits - best).double() / batch.temperature[draw].double())
    mass = _filtered(logits, mass, batch, draw)
    running = mass.cumsum(0)
    above = (running > noise * running[-1]).nonzero()
    chosen = above[0] if len(above) else mass.nonzero()[-1]
    return int(chosen)


def _filtered(logits: Tensor, mass: Tensor, batch: SampleBatch, draw: int) -> Tensor:
    """Zero the mass outside top-k, top-p and min-p; every token that ties with a threshold stays."""
    top_k, top_p = int(batch.top_k[draw]), float(batch.top_p[draw])
    ordered, order = logits.sort(descending=True, stable=True)
    if 0 < top_k < len(logits):
        mass = mass.masked_fill(logits < ordered[top_k - 1], 0.0)
    if top_p < 1:
        running = mass[order].cumsum(0)
        reached = int((running < top_p * running[-1]).sum())
        mass = mass.masked_fill(logits < ordered[min(reached, len(logits) - 1)], 0.0)
    return mass.masked_fill(mass < float(batch.min_p[draw]), 0.0)


def _report(raw: Tensor, token: int, count: int, draw: int, result: SampleResult) -> None:
    """Log-probabilities from the raw logits: of the token and of the `count` most probable ones."""
    best = raw.max()
    normaliser = best + torch.exp((raw - best).double()).cumsum(0)[-1].log()
    result.logprobs[draw] = raw[token] - normaliser
    ids = raw.sort(descending=True, stable=True).indices[:count]
    result.top_ids[draw, : len(ids)] = ids
    result.top_logprobs[draw, : len(ids)] = (raw[ids] - normaliser).float()
