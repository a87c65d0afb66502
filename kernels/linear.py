"""A linear layer whose rows do not depend on the batch they are in.

Owns the packing of weights. On CPU our own product sums every row in one order. Without it oneDNN's is used, where a
single row is padded to two, since only then its bits may differ; without that, the batch is cut into padded tiles of
one fixed shape. It knows nothing of models or ranks. A layer cut by output columns gives the bits of the whole one (of
oneDNN's, if no part has less than two columns).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.implementation import cpu_kernels

_TILE = 16


class PackedLinear:
    """y = x W^T + b for weight [N, K] and bias [N]; x [T, K] gives [T, N] in the dtype of x, or `unrounded` in float32.

    A 16-bit dtype that the processor cannot multiply is packed, and computed, in float32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, unrounded: bool = False) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype, self.device, self.unrounded = weight.dtype, weight.device, unrounded
        self.kind = _choose(self.device)
        self._compute = _compute_dtype(self.dtype, self.device)
        self._bias = None if bias is None else bias.detach().to(self._compute)
        self._weight = weight.detach().to(self._compute)
        if self.kind == "choral":
            self._weight = cpu_kernels(self.device).pack_linear(self._weight)
            self._bias = None if bias is None else bias.detach().float()
        elif self.kind == "onednn":
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight.contiguous())

    @property
    def packed(self) -> tuple[Tensor, Tensor | None] | None:
        """(weight, bias) as the C++ kernels take them; None where another path computes."""
        return (self._weight, self._bias) if self.kind == "choral" and self._compute == self.dtype else None

    def __call__(self, x: Tensor) -> Tensor:
        y = self._multiply(x.to(self._compute)) if len(x) else x.new_empty(0, self.out_features)
        return y.to(torch.float32 if self.unrounded else self.dtype)

    def _multiply(self, x: Tensor) -> Tensor:
        if self.kind == "choral":
            y: Tensor = cpu_kernels(x.device).linear(x, self._weight, self._bias, self.out_features, self.unrounded)
            return y
        if self.kind == "onednn":
            return self._multiply_onednn(x)
        if self.kind == "tiled":
            return self._multiply_tiled(x)
        return F.linear(x, self._weight, self._bias)

    def _multiply_onednn(self, x: Tensor) -> Tensor:
        alone = len(x) == 1
        rows = torch.cat((x, x)) if alone else x
        y: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, self._weight, self._bias, "none", [], "")
        return y[:1] if alone else y

    def _multiply_tiled(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, -len(x) % _TILE)).view(-1, _TILE, self.in_features)
        return torch.cat([F.linear(tile, self._weight, self._bias) for tile in padded])[: len(x)]


def _choose(device: torch.device) -> str:
    """How products are computed: by "choral" or by "onednn", "tiled" in a fixed shape, or by "torch" as it comes."""
    if device.type != "cpu":
        return "torch"
    if cpu_kernels(device) is not None:
        return "choral"
    return "onednn" if torch._C._has_mkldnn else "tiled"


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a CPU multiplies bfloat16 as it is."""
    native = cpu_kernels(device)
    if native is not None:
        return bool(native.multiplies_bfloat16())
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    if device.type != "cpu" or (dtype == torch.bfloat16 and multiplies_bfloat16(device)):
        return dtype
    return torch.float32


def check_row_invariance(linear: PackedLinear, sizes: tuple[int, ...] = (2, 3, 7, 8, 33, 64)) -> bool:
    """Whether rows of random input come out bit for bit as they do alone, at each of these batch sizes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(sizes), linear.in_features, generator=generator).to(linear.device, linear.dtype)
    alone = torch.cat([linear(row[None]) for row in x])
    return all(torch.equal(linear(x[:size]), alone[:size]) for size in sizes)
