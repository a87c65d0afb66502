"""A linear layer whose rows do not depend on the batch they are in.

Owns the packing of weights. On CPU a packed oneDNN product is used; a single row is padded to two, since
only then its bits may differ. Where packing is not available, the batch is cut into padded tiles of one
fixed shape. It knows nothing of models or ranks; a layer cut by output columns gives the bits of the
whole one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_TILE = 16


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class PackedLinear:
    """y = x W^T + b for weight [N, K] and bias [N]; x [T, K] gives [T, N] in the dtype of x."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        weight = weight.detach()
        self.dtype, self.device = weight.dtype, weight.device
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.detach()
        self._packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self._packed else weight
        self._tiled = weight.device.type == "cpu" and not self._packed

    @property
    def kind(self) -> str:
        """How the product is computed, for the log."""
        return "packed oneDNN" if self._packed else f"padded tiles of {_TILE} rows" if self._tiled else "torch"

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed:
            return self._multiply_packed(x)
        return self._multiply_tiled(x) if self._tiled else F.linear(x, self._weight, self._bias)

    def _multiply_packed(self, x: Tensor) -> Tensor:
        if len(x) == 0:
            return x.new_empty(0, self.out_features)
        rows = x.expand(2, -1).contiguous() if len(x) == 1 else x
        y: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return y[: len(x)]

    def _multiply_tiled(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, -len(x) % _TILE))
        tiles = [F.linear(tile, self._weight, self._bias) for tile in padded.view(-1, _TILE, self.in_features)]
        return torch.cat(tiles)[: len(x)] if len(x) else x.new_empty(0, self.out_features)


def check_row_invariance(linear: PackedLinear, sizes: tuple[int, ...] = (2, 3, 7, 8, 33, 64)) -> bool:
    """Whether rows of random input come out bit for bit as they do alone, at each of these batch sizes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(sizes), linear.in_features, generator=generator).to(linear.device, linear.dtype)
    alone = torch.cat([linear(row[None]) for row in x])
    return all(torch.equal(linear(x[:size]), alone[:size]) for size in sizes)
