"""One token per draw: logits are changed, filtered by thresholds, and walked by inverse CDF in vocabulary order.

One program per draw, which sums in an order of its own, so draws never look at each other. There is no sort: thresholds
are bisected on integers that order like the logits. Weights are float32, their sums double, noise is Philox. Called by
`kernels.ops`; `kernels.sampling` says what the fields mean.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.logit_changes import changed_logits
from kernels.reference_sampler import TAG
from kernels.sampling import SampleBatch, SampleResult
from kernels.transfer import sent

_TAG = tl.constexpr(TAG)
_WIDE = 4096
"""Tokens that a program looks at together; the block of the inverse CDF, so part of what fixes the bits."""
_WARPS = 8
_LEAST_KEY = tl.constexpr(-(2**31))
_TOP_RANK = tl.constexpr(2**63 - 1)


@triton.jit
def _block(row: tl.tensor, begin: tl.tensor, size: tl.tensor, WIDE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Ids and logits [WIDE] from `begin`; beyond the vocabulary -inf. No logit is -0, which would not order like 0."""
    ids = begin + tl.arange(0, WIDE)
    x = tl.load(row + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
    return ids, tl.where(x == 0.0, 0.0, x)


@triton.jit
def _key(x: tl.tensor) -> tl.tensor:
    """Integers in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _measure(row: tl.tensor, size: tl.tensor, WIDE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The largest logit, and whether any is not a number."""
    best = tl.full((WIDE,), float("-inf"), tl.float32)
    broken = tl.zeros((WIDE,), tl.int32)
    for begin in range(0, size, WIDE):
        _, x = _block(row, begin, size, WIDE)
        broken |= (x != x).to(tl.int32)
        best = tl.maximum(best, x)
    return tl.max(best, 0), tl.max(broken, 0) > 0


@triton.jit
def _next_best(row: tl.tensor, size: tl.tensor, before: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    """The largest rank below `before`. A rank orders by logit, then by lower id: key * 2^32 + 2^31 - 1 - id."""
    found = tl.full((WIDE,), -0x7FFFFFFFFFFFFFFF, tl.int64)
    for begin in range(0, size, WIDE):
        ids, x = _block(row, begin, size, WIDE)
        rank = (_key(x).to(tl.int64) << 32) + (0x7FFFFFFF - ids)
        found = tl.maximum(found, tl.where((ids < size) & (rank < before), rank, found))
    return tl.max(found, 0)


@triton.jit
def _id_of(rank: tl.tensor) -> tl.tensor:
    return 0x7FFFFFFF - (rank & 0xFFFFFFFF)


@triton.jit
def _weights(x: tl.tensor, best: tl.tensor, inverse: tl.tensor, least: tl.tensor, min_p: tl.tensor) -> tl.tensor:
    """e^((x - best) * inverse) of tokens whose key is at least `least` and whose weight at least `min_p`, else 0."""
    weight = tl.exp((x - best) * inverse)
    return tl.where((_key(x) >= least) & (weight >= min_p), weight, 0.0)


@triton.jit
def _mass(
    row: tl.tensor,
    size: tl.tensor,
    best: tl.tensor,
    inverse: tl.tensor,
    least: tl.tensor,
    min_p: tl.tensor,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """Sum of the weights of all tokens: double, over blocks in vocabulary order."""
    total = tl.zeros((1,), tl.float64)
    for begin in range(0, size, WIDE):
        _, x = _block(row, begin, size, WIDE)
        total += tl.sum(_weights(x, best, inverse, least, min_p).to(tl.float64), 0)
    return tl.sum(total, 0)


@triton.jit
def _number(row: tl.tensor, size: tl.tensor, least: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    """How many tokens have a key of at least `least`."""
    found = tl.zeros((WIDE,), tl.int32)
    for begin in range(0, size, WIDE):
        ids, x = _block(row, begin, size, WIDE)
        found += ((ids < size) & (_key(x) >= least)).to(tl.int32)
    return tl.sum(found, 0)


@triton.jit
def _walk(
    row: tl.tensor,
    size: tl.tensor,
    best: tl.tensor,
    inverse: tl.tensor,
    least: tl.tensor,
    min_p: tl.tensor,
    target: tl.tensor,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """The first token at which the running mass passes `target`; rounding may leave it beyond, then the last one."""
    running = tl.zeros((1,), tl.float64)
    token = tl.full((), -1, tl.int32)
    begin = 0
    while begin < size:
        ids, x = _block(row, begin, size, WIDE)
        weight = _weights(x, best, inverse, least, min_p)
        last = tl.max(tl.where(weight > 0.0, ids, -1), 0)
        token = tl.maximum(token, last)
        mass = weight.to(tl.float64)
        after = running + tl.sum(mass, 0)
        begin += WIDE
        if tl.sum(after, 0) > target:
            passed = (running + tl.cumsum(mass, 0) > target) & (weight > 0.0)
            token = tl.min(tl.where(passed, ids, last), 0)
            begin = size
        running = after
    return token


@triton.jit
def _key_of_number(
    row: tl.tensor, size: tl.tensor, best: tl.tensor, number: tl.tensor, WIDE: tl.constexpr
) -> tl.tensor:
    """The largest key that at least `number` tokens reach."""
    low = tl.full((), _LEAST_KEY, tl.int64)
    high = _key(best).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        if _number(row, size, middle.to(tl.int32), WIDE) >= number:
            low = middle
        else:
            high = middle
    return low.to(tl.int32)


@triton.jit
def _key_of_mass(
    row: tl.tensor,
    size: tl.tensor,
    best: tl.tensor,
    inverse: tl.tensor,
    least: tl.tensor,
    target: tl.tensor,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """The largest key such that the tokens that reach it, and `least`, have a mass of `target` or more."""
    low = tl.full((), _LEAST_KEY, tl.int64)
    high = _key(best).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        reached = tl.maximum(middle.to(tl.int32), least)
        if _mass(row, size, best, inverse, reached, 0.0, WIDE) >= target:
            low = middle
        else:
            high = middle
    return low.to(tl.int32)


@triton.jit
def _uniform(seed: tl.tensor, prompt_number: tl.tensor, sample: tl.tensor, position: tl.tensor) -> tl.tensor:
    """As `kernels.reference_sampler.uniform`."""
    counter = tl.full((), _TAG, tl.int32)
    high, low, _, _ = tl.philox(seed, position.to(tl.int32), sample.to(tl.int32), prompt_number.to(tl.int32), counter)
    whole = (high >> 5).to(tl.float64) * 67108864.0 + (low >> 6).to(tl.float64)
    return whole * (1.0 / 9007199254740992.0)


@triton.jit
def _drawn(
    row: tl.tensor,
    size: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    noise: tl.tensor,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """The token of a draw at a temperature above 0; -1 when the mass is no number."""
    inverse = tl.minimum(1.0 / temperature, 3.4028234e38)
    least = tl.full((), _LEAST_KEY, tl.int32)
    if (top_k > 0) & (top_k < size):
        least = _key_of_number(row, size, best, top_k, WIDE)
    if top_p < 1.0:
        target = top_p.to(tl.float64) * _mass(row, size, best, inverse, least, 0.0, WIDE)
        least = tl.maximum(least, _key_of_mass(row, size, best, inverse, least, target, WIDE))
    total = _mass(row, size, best, inverse, least, min_p, WIDE)
    token = tl.full((), -1, tl.int32)
    if (total > 0.0) & (total < float("inf")):
        token = _walk(row, size, best, inverse, least, min_p, total * noise, WIDE)
    return token


@triton.jit
def _pick(
    logits: tl.tensor, changed: tl.tensor, size: tl.tensor, longs: tl.tensor, floats: tl.tensor, ints: tl.tensor,
    tokens: tl.tensor, CHANGED: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Program `draw`. Field f of it stands at f * draws + draw of the tensors of its kind."""
    draw, draws = tl.program_id(0), tl.num_programs(0)
    row = logits + tl.load(longs + draw) * size
    if CHANGED:
        row = changed + draw.to(tl.int64) * size
    temperature = tl.load(floats + draw)
    best, broken = _measure(row, size, WIDE)
    token = tl.full((), -1, tl.int32)
    if (broken == 0) & (best > float("-inf")):
        if temperature == 0.0:
            token = _id_of(_next_best(row, size, _TOP_RANK, WIDE)).to(tl.int32)
        else:
            noise = _uniform(
                tl.load(longs + draws + draw), tl.load(longs + 2 * draws + draw), tl.load(longs + 3 * draws + draw),
                tl.load(longs + 4 * draws + draw),
            )  # fmt: skip
            top_p, min_p = tl.load(floats + draws + draw), tl.load(floats + 2 * draws + draw)
            token = _drawn(row, size, best, temperature, tl.load(ints + draw), top_p, min_p, noise, WIDE)
    tl.store(tokens + draw, token.to(tl.int64))


@triton.jit(do_not_specialize=["width"])
def _report(
    logits: tl.tensor, size: tl.tensor, longs: tl.tensor, ints: tl.tensor, tokens: tl.tensor, logprobs: tl.tensor,
    top_ids: tl.tensor, top_logprobs: tl.tensor, width: tl.tensor, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Program `draw`: log-probabilities from the raw logits, of the token and of the most probable ones."""
    draw = tl.program_id(0)
    count = tl.load(ints + tl.num_programs(0) + draw)
    token = tl.load(tokens + draw)
    if (count >= 0) & (token >= 0):
        row = logits + tl.load(longs + draw) * size
        best, _ = _measure(row, size, WIDE)
        log_sum = tl.log(_mass(row, size, best, 1.0, _LEAST_KEY, 0.0, WIDE).to(tl.float32))
        tl.store(logprobs + draw, tl.load(row + token).to(tl.float32) - best - log_sum)
        rank = tl.full((), _TOP_RANK, tl.int64)
        for place in range(tl.minimum(count, size)):
            rank = _next_best(row, size, rank, WIDE)
            chosen = _id_of(rank)
            tl.store(top_ids + draw * width + place, chosen)
            tl.store(top_logprobs + draw * width + place, tl.load(row + chosen).to(tl.float32) - best - log_sum)


def sample(logits: Tensor, batch: SampleBatch) -> SampleResult:
    """See `kernels.ops.sample`. Nothing here waits for the device if `batch` lies on the CPU."""
    logits, count, size = logits.contiguous(), len(batch.rows), logits.shape[1]
    width = max(0, int(batch.num_logprobs.max())) if count else 0
    result = SampleResult(
        torch.full((count,), -1, device=logits.device),
        torch.zeros(count, device=logits.device),
        torch.full((count, width), -1, device=logits.device),
        torch.zeros(count, width, device=logits.device),
    )
    if count == 0:
        return result
    changed = changed_logits(logits, batch)
    longs = _sent(logits, batch.rows, batch.seed, batch.prompt_number, batch.sample, batch.position)
    floats = _sent(logits, batch.temperature, batch.top_p, batch.min_p)
    ints = _sent(logits, batch.top_k, batch.num_logprobs)
    wide = min(_WIDE, max(16, triton.next_power_of_2(size)))
    _pick[count,](
        logits, logits if changed is None else changed, size, longs, floats, ints, result.tokens,
        CHANGED=changed is not None, WIDE=wide, num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    if int(batch.num_logprobs.max()) >= 0:
        _report[count,](
            logits, size, longs, ints, result.tokens, result.logprobs, result.top_ids, result.top_logprobs, width,
            WIDE=wide, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return result


def _sent(logits: Tensor, *fields: Tensor) -> Tensor:
    """Fields of one type, one below the other, on the device of the logits; sent without waiting for it."""
    return sent(torch.stack(fields), logits.device)
