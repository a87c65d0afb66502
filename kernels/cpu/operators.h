// The operators that other sources of this library call; each is documented beside its definition.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace choral {

at::Tensor lasting_zeros(at::IntArrayRef size, at::ScalarType dtype);
at::Tensor linear(
    const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t columns,
    bool unrounded);
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
std::tuple<at::Tensor, at::Tensor> add_rms_norm(
    const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, double eps);
at::Tensor silu_mul(const at::Tensor& gate_up);
at::Tensor rope_and_cache(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cos_sin,
    const at::Tensor& positions, const at::Tensor& slots, const at::Tensor& k_cache, const at::Tensor& v_cache,
    int64_t layer);
at::Tensor attention(
    const at::Tensor& q, const at::Tensor& positions, const at::Tensor& block_tables, const at::Tensor& tiles,
    const at::Tensor& spans, const at::Tensor& k_cache, const at::Tensor& v_cache, int64_t layer, double scale);
at::Tensor shared_gather(
    const at::Tensor& memory, const at::Tensor& x, at::IntArrayRef widths, int64_t rank, int64_t sequence,
    double timeout_s);

}  // namespace choral
