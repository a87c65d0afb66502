"""Rotary frequencies of a `RopeConfig`: plain, linear, llama3 and yarn, in float32 as in training.

Sources: RoFormer (Su et al. 2021), YaRN (Peng et al. 2023), and the long-context scaling of Llama 3.1.
Called once when a model is built; knows nothing of the tables or kernels the frequencies go into.
"""

import math

import torch

from workers.model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of a head: float32 [head_dim / 2]."""
    periods = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "yarn":
        return _yarn(rope, periods)
    frequencies = 1.0 / periods
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    return frequencies


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by; 1 but for yarn."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _magnitude(rope.factor, rope.mscale) / _magnitude(rope.factor, rope.mscale_all_dim)
    return _magnitude(rope.factor, 1.0)


def _magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Slow pairs are stretched by `factor`, fast ones kept, and those between blended by their wavelength."""
    wavelengths = 2 * math.pi / frequencies
    slow = wavelengths > rope.original_max_len / rope.low_freq_factor
    fast = wavelengths < rope.original_max_len / rope.high_freq_factor
    blend = (rope.original_max_len / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - blend) * frequencies / rope.factor + blend * frequencies
    return torch.where(slow, frequencies / rope.factor, torch.where(fast, frequencies, between))


def _yarn(rope: RopeConfig, periods: torch.Tensor) -> torch.Tensor:
    """Pairs that turn often in the original context are kept, others interpolated, with a ramp between."""
    low, high = _yarn_ramp(rope, 2 * len(periods))
    pairs = torch.arange(len(periods), dtype=torch.float32)
    kept = 1 - torch.clamp((pairs - low) / (high - low), 0, 1)
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _yarn_ramp(rope: RopeConfig, head_dim: int) -> tuple[float, float]:
    """The pairs between which the ramp of yarn runs."""

    def pair(turns: float) -> float:
        return head_dim * math.log(rope.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high if high != low else high + 0.001
