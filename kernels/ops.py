"""The tensor functions that the model and the sampler call; `kernels.decoder` is all else they need here.

Each call goes to the C++ kernels for CPU tensors and to the Triton kernels for CUDA tensors, else, where these cannot
be had, to the torch reference.
Every function gives a row the same bits whatever other rows share the call. It knows no models, requests
or ranks.
"""

from typing import Any

import torch
from torch import Tensor

from kernels import reference, reference_sampler
from kernels.implementation import cpu_kernels, implementation, triton_kernels
from kernels.kv_cache import AttentionBatch, KVCache
from kernels.linear import PackedLinear, check_row_invariance, multiplies_bfloat16
from kernels.sampling import SampleBatch, SampleResult

__all__ = [
    "AttentionBatch",
    "KVCache",
    "PackedLinear",
    "SampleBatch",
    "SampleResult",
    "add_rms_norm",
    "attention",
    "check_row_invariance",
    "implementation",
    "multiplies_bfloat16",
    "rms_norm",
    "rope_and_cache",
    "rope_tables",
    "sample",
    "silu_mul",
    "uniform",
]


def _kernels(device: torch.device) -> Any:
    """What computes on `device` the operations that all implementations offer alike."""
    return cpu_kernels(device) or triton_kernels(device) or reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, rounded to the dtype of x, times weight."""
    result: Tensor = _kernels(x.device).rms_norm(x, weight, eps)
    return result


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), the sum rounded to the dtype first; all [T, H]."""
    normed, total = _kernels(x.device).add_rms_norm(x, residual, weight, eps)
    return normed, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [T, 2F] = gate | up; rounds once."""
    result: Tensor = _kernels(gate_up.device).silu_mul(gate_up)
    return result


def rope_tables(inv_freq: Tensor, max_len: int, scale: float = 1.0) -> Tensor:
    """Rotary tables float32 [max_len, D] = cos | sin for inv_freq [D / 2], times `scale`."""
    angles = torch.arange(max_len, device=inv_freq.device, dtype=torch.float32)[:, None] * inv_freq.float()
    return torch.cat([angles.cos(), angles.sin()], -1) * scale


def rope_and_cache(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, batch: AttentionBatch, kv: KVCache, layer: int
) -> Tensor:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] by halves (NeoX), write k and v to their slots; returns q.

    The inputs may be strided views of one matrix; arithmetic is float32 and rounds once.
    """
    native = cpu_kernels(q.device)
    if native is None:
        rotated: Tensor = (triton_kernels(q.device) or reference).rope_and_cache(q, k, v, cos_sin, batch, kv, layer)
        return rotated
    turned: Tensor = native.rope_and_cache(q, k, v, cos_sin, batch.positions, batch.slots, kv.k, kv.v, layer)
    return turned


def attention(q: Tensor, batch: AttentionBatch, kv: KVCache, layer: int, scale: float) -> Tensor:
    """Causal attention of rotated q [T, Hq, D] over the paged cache; query head h reads KV head
    h // (Hq / Hkv).

    Returns [T, Hq * D]. The keys of this step must have been written before.
    """
    fast = triton_kernels(q.device)
    if fast is not None:
        output: Tensor = fast.attention(q, batch, kv, layer, scale)
        return output
    native = cpu_kernels(q.device)
    if native is None:
        return reference.attention(q, batch, kv, layer, scale, exact=q.device.type == "cpu")
    attended: Tensor = native.attention(q, batch.positions, batch.block_tables, *batch.plan, kv.k, kv.v, layer, scale)
    return attended


def uniform(seed: Tensor, prompt_number: Tensor, sample: Tensor, position: Tensor) -> Tensor:
    """One number float64 in [0, 1) per draw, a pure function of these four (int64 [R]): Philox4x32-10."""
    return reference_sampler.uniform(seed, prompt_number, sample, position)


def sample(logits: Tensor, batch: SampleBatch) -> SampleResult:
    """Draw one token per entry of `batch` from logits [M, V].

    Order: allowed ids, bias, banned ids, penalties, temperature, top-k, top-p, min-p, draw. A filter keeps
    every token that ties with its threshold. Log-probabilities are of the raw logits. `batch` lies on the CPU; only
    the logits need be on the device.
    """
    fast = triton_kernels(logits.device)
    if fast is not None:
        result: SampleResult = fast.sample(logits, batch)
        return result
    native = cpu_kernels(logits.device)
    if native is None:
        return reference_sampler.sample(logits, batch.to(logits.device))
    return SampleResult(*native.sample(logits, batch.fields()))
