"""A linear layer whose rows do not depend on the batch they are in.

Owns the packing of weights. On CPU a packed oneDNN product is used; a single row is padded to two, since only
then its bits may differ. Where packing is not available, the batch is cut into padded tiles of one fixed
shape. It knows nothing of models or ranks. A layer cut by output columns gives the bits of the whole one, if
no part has less than two columns.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_TILE = 16


class PackedLinear:
    """y = x W^T + b for weight [N, K] and bias [N]; x [T, K] gives [T, N] in the dtype of x.

    A 16-bit dtype that the processor cannot multiply is packed, and computed, in float32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype, self.device = weight.dtype, weight.device
        self.kind = _choose(self.device)
        self._compute = _compute_dtype(self.dtype, self.device)
        self._bias = None if bias is None else bias.detach().to(self._compute)
        self._weight = weight.detach().to(self._compute)
        if self.kind == "packed":
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight.contiguous())

    @property
    def packed(self) -> tuple[Tensor, Tensor | None] | None:
        """(weight, bias) as oneDNN takes them, for callers in C++; None where another path computes."""
        return (self._weight, self._bias) if self.kind == "packed" and self._compute == self.dtype else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._compute != self.dtype:
            x = x.to(self._compute)
        y = self._multiply(x) if len(x) else x.new_empty(0, self.out_features)
        return y if self._compute == self.dtype else y.to(self.dtype)

    def _multiply(self, x: Tensor) -> Tensor:
        if self.kind == "packed":
            return self._multiply_packed(x)
        if self.kind == "tiled":
            return self._multiply_tiled(x)
        return F.linear(x, self._weight, self._bias)

    def _multiply_packed(self, x: Tensor) -> Tensor:
        alone = len(x) == 1
        rows = torch.cat((x, x)) if alone else x
        y: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, self._weight, self._bias, "none", [], "")
        return y[:1] if alone else y

    def _multiply_tiled(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, -len(x) % _TILE)).view(-1, _TILE, self.in_features)
        return torch.cat([F.linear(tile, self._weight, self._bias) for tile in padded])[: len(x)]


def _choose(device: torch.device) -> str:
    """How products are computed: "packed" by oneDNN, "tiled" in a fixed shape, or by "torch" as it comes."""
    if device.type != "cpu":
        return "torch"
    return "packed" if torch._C._has_mkldnn else "tiled"


def _compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    if device.type != "cpu" or dtype == torch.float32:
        return dtype
    native = torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype if dtype == torch.bfloat16 and native else torch.float32


def check_row_invariance(linear: PackedLinear, sizes: tuple[int, ...] = (2, 3, 7, 8, 33, 64)) -> bool:
    """Whether rows of random input come out bit for bit as they do alone, at each of these batch sizes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(sizes), linear.in_features, generator=generator).to(linear.device, linear.dtype)
    alone = torch.cat([linear(row[None]) for row in x])
    return all(torch.equal(linear(x[:size]), alone[:size]) for size in sizes)
