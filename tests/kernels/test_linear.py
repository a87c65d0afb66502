"""Packed products: values, rows independent of the batch, columns independent of the cut."""

import pytest
import torch

from kernels import linear, ops
from kernels.implementation import cpu_kernels

SIZES = (1, 2, 3, 5, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 128, 257)
SHAPES = [
    (576, 960),
    (576, 576),
    (576, 3072),
    (1536, 576),
    (576, 49152),
    (32, 64),
    (64, 32),
    (48, 96),
    (40, 72),
    (33, 7),
]
shapes = pytest.mark.parametrize(("inner", "outer"), SHAPES)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def weight_and_rows(inner: int, outer: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(inner * outer)
    weight = torch.randn(outer, inner, generator=generator).to(dtype)
    return weight, torch.randn(max(SIZES), inner, generator=generator).to(dtype)


@dtypes
@pytest.mark.parametrize("biased", [False, True])
def test_values(dtype: torch.dtype, biased: bool):
    weight, x = weight_and_rows(48, 96, dtype)
    bias = torch.arange(96).to(dtype) if biased else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    got = ops.PackedLinear(weight, bias)(x)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=5 * tolerance, check_dtype=False)
    assert got.dtype == dtype


@shapes
@dtypes
def test_c2_rows_do_not_depend_on_their_batch(inner: int, outer: int, dtype: torch.dtype):
    weight, x = weight_and_rows(inner, outer, dtype)
    product = ops.PackedLinear(weight, None)
    whole = product(x)
    for count in (1, 2):
        torch.set_num_threads(count)
        for size in SIZES:
            begin = min(3, len(x) - size)
            assert torch.equal(product(x[begin : begin + size]), whole[begin : begin + size]), size
        assert ops.check_row_invariance(product)


@shapes
@dtypes
def test_c2_columns_do_not_depend_on_the_cut(inner: int, outer: int, dtype: torch.dtype):
    """What tensor parallelism by output columns relies on. oneDNN's hold it for parts of two columns and more."""
    weight, x = weight_and_rows(inner, outer, dtype)
    uncut = ops.PackedLinear(weight, None)
    whole, least = uncut(x), 1 if uncut.kind == "choral" else 2
    cuts = {1, 2, 3, outer // 3, outer // 2 // 64 * 64, outer // 2 + 1, outer - 1}
    for cut in sorted(cut for cut in cuts if least <= cut <= outer - least):
        for part in (slice(0, cut), slice(cut, outer)):
            product = ops.PackedLinear(weight[part], None)
            for size in (1, 8, 33):
                assert torch.equal(product(x[:size]), whole[:size, part]), (cut, size)


@dtypes
def test_unrounded_results_are_float32_and_round_to_the_others(dtype: torch.dtype):
    weight, x = weight_and_rows(48, 96, dtype)
    wide = ops.PackedLinear(weight, None, unrounded=True)(x)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.to(dtype), ops.PackedLinear(weight, None)(x))


@pytest.mark.parametrize("kind", ["choral", "onednn", "tiled", "torch"])
def test_every_path_computes_the_same_values(kind: str, monkeypatch: pytest.MonkeyPatch):
    if kind == "choral" and cpu_kernels(torch.device("cpu")) is None:
        pytest.skip(ops.implementation("cpu"))
    weight, x = weight_and_rows(48, 96, torch.float32)
    bias = torch.arange(96.0)
    monkeypatch.setattr(linear, "_choose", lambda device: kind)
    product = ops.PackedLinear(weight, bias)
    assert product.kind == kind
    torch.testing.assert_close(product(x), x @ weight.T + bias, rtol=1e-4, atol=1e-4)
    if kind != "torch":
        assert ops.check_row_invariance(product)


def test_half_precision_is_computed_in_single(monkeypatch: pytest.MonkeyPatch):
    weight, x = weight_and_rows(48, 96, torch.float16)
    half = ops.PackedLinear(weight, torch.ones(96, dtype=torch.float16))
    single = ops.PackedLinear(weight.float(), torch.ones(96))
    assert torch.equal(half(x), single(x.float()).half())


def test_no_rows():
    assert ops.PackedLinear(torch.ones(8, 16), None)(torch.zeros(0, 16)).shape == (0, 8)


def test_a_layer_that_looks_at_its_batch_is_found_out():
    class Leaky(ops.PackedLinear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return super().__call__(x) * len(x)

    assert not ops.check_row_invariance(Leaky(torch.ones(8, 16), None))
