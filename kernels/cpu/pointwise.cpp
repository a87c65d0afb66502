// Norms, activation, and rotary embedding with the write to the paged cache. One row never looks at another.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "operators.h"
#include "pool.h"
#include "vec.h"

namespace choral {
namespace {

constexpr int64_t ELEMENTS_PER_TASK = 16384;
constexpr int64_t MAX_DIM = 1024;

template <typename Body>
void for_rows(int64_t rows, int64_t width, const Body& body) {
  const int64_t grain = std::max<int64_t>(1, ELEMENTS_PER_TASK / std::max<int64_t>(1, width));
  share((rows + grain - 1) / grain, [&](Turn& turn) {
    for (int64_t task; turn.take(task);)
      for (int64_t row = task * grain; row < std::min((task + 1) * grain, rows); ++row) body(row);
  });
}

template <typename T>
void norm_row(const T* x, const T* weight, T* out, int64_t width, float eps) {
  Vec squares = {};
  for (int64_t i = 0; i < width; i += LANES) {
    const Vec part = load(x + i, width - i);
    squares = fma(part, part, squares);
  }
  const float mean = static_cast<float>(sum_lanes(squares) / static_cast<double>(width));
  const Vec inverse = broadcast(1.0f / std::sqrt(mean + eps));
  for (int64_t i = 0; i < width; i += LANES) {
    const Vec normed = rounded<T>(load(x + i, width - i) * inverse);
    store(out + i, normed * load(weight + i, width - i), width - i);
  }
}

template <typename T>
void add_row(const T* x, const T* residual, T* out, int64_t width) {
  for (int64_t i = 0; i < width; i += LANES)
    store(out + i, load(x + i, width - i) + load(residual + i, width - i), width - i);
}

template <typename T>
void silu_mul_row(const T* gate, const T* up, T* out, int64_t width) {
  for (int64_t i = 0; i < width; i += LANES) {
    const Vec x = load(gate + i, width - i);
    store(out + i, x / (1.0f + exp(-x)) * load(up + i, width - i), width - i);
  }
}

// The first half of a rotated head is written to `low`, the second to `high`.
template <typename T>
void rotate_head(const T* x, const float* cos, const float* sin, int64_t half, T* low, T* high) {
  for (int64_t i = 0; i < half; i += LANES) {
    const int64_t rest = half - i;
    const Vec a = load(x + i, rest), b = load(x + half + i, rest), c = load(cos + i, rest), s = load(sin + i, rest);
    store(low + i, fma(a, c, -(b * s)), rest);
    store(high + i, fma(b, c, a * s), rest);
  }
}

void check_rows(const at::Tensor& x, const at::Tensor& weight) {
  TORCH_CHECK(x.scalar_type() == weight.scalar_type(), "x and weight differ in dtype");
  TORCH_CHECK(weight.dim() == 1 && weight.is_contiguous(), "weight must be a contiguous vector");
  TORCH_CHECK(x.dim() > 0 && x.size(-1) == weight.size(0), "the last dimension of x must match weight");
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> add_rms_norm(
    const at::Tensor& x_, const at::Tensor& residual_, const at::Tensor& weight, double eps) {
  check_rows(x_, weight);
  TORCH_CHECK(x_.sizes() == residual_.sizes() && x_.scalar_type() == residual_.scalar_type(),
              "x and residual differ");
  const at::Tensor x = x_.contiguous(), residual = residual_.contiguous();
  at::Tensor out = at::empty_like(x), total = at::empty_like(x);
  const int64_t width = x.size(-1);
  with_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    const T *a = x.const_data_ptr<T>(), *b = residual.const_data_ptr<T>(), *w = weight.const_data_ptr<T>();
    T *sum = total.data_ptr<T>(), *to = out.data_ptr<T>();
    for_rows(x.numel() / std::max<int64_t>(1, width), width, [&](int64_t row) {
      const int64_t at = row * width;
      add_row(a + at, b + at, sum + at, width);
      norm_row(sum + at, w, to + at, width, static_cast<float>(eps));
    });
  });
  return {out, total};
}

at::Tensor rms_norm(const at::Tensor& x_, const at::Tensor& weight, double eps) {
  check_rows(x_, weight);
  const at::Tensor x = x_.contiguous();
  at::Tensor out = at::empty_like(x);
  const int64_t width = x.size(-1);
  with_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    const T *from = x.const_data_ptr<T>(), *w = weight.const_data_ptr<T>();
    T* to = out.data_ptr<T>();
    for_rows(x.numel() / std::max<int64_t>(1, width), width, [&](int64_t row) {
      norm_row(from + row * width, w, to + row * width, width, static_cast<float>(eps));
    });
  });
  return out;
}

at::Tensor silu_mul(const at::Tensor& gate_up_) {
  const at::Tensor gate_up = gate_up_.contiguous();
  TORCH_CHECK(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, "gate_up must be [T, 2F]");
  const int64_t rows = gate_up.size(0), width = gate_up.size(1) / 2;
  at::Tensor out = at::empty({rows, width}, gate_up.options());
  with_dtype(gate_up, [&](auto zero) {
    using T = decltype(zero);
    const T* from = gate_up.const_data_ptr<T>();
    T* to = out.data_ptr<T>();
    for_rows(rows, 2 * width, [&](int64_t row) {
      const T* gate = from + row * 2 * width;
      silu_mul_row(gate, gate + width, to + row * width, width);
    });
  });
  return out;
}

namespace {

// One layer of the cache, and where one position of one head lies in it.
template <typename T>
struct CacheLayer {
  T *k, *v;
  int64_t heads, dim, block;

  CacheLayer(const at::Tensor& keys, const at::Tensor& values, int64_t layer)
      : k(keys.data_ptr<T>() + layer * keys.stride(0)),
        v(values.data_ptr<T>() + layer * values.stride(0)),
        heads(keys.size(2)), dim(keys.size(3)), block(keys.size(4)) {}

  void write(int64_t slot, int64_t head, const T* key, const T* value) const {
    const int64_t offset = slot % block;
    const int64_t base = (slot / block * heads + head) * dim * block;
    for (int64_t d = 0; d < dim; ++d) k[base + d * block + offset] = key[d];
    std::memcpy(v + base + offset * dim, value, dim * sizeof(T));
  }
};

void check_heads(const at::Tensor& x, int64_t rows, int64_t dim, at::ScalarType dtype) {
  TORCH_CHECK(x.dim() == 3 && x.size(0) == rows && x.size(2) == dim && x.stride(2) == 1 && x.scalar_type() == dtype,
              "q, k and v must be [T, heads, D] of the dtype of the cache, dense in D");
}

void check_below(const at::Tensor& values, int64_t count, int64_t bound, const char* name) {
  TORCH_CHECK(values.dim() == 1 && values.size(0) == count && values.is_contiguous(), name, " must have one per row");
  const int64_t* value = values.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i)
    TORCH_CHECK(value[i] >= 0 && value[i] < bound, name, " must lie in 0..", bound - 1, ", not ", value[i]);
}

}  // namespace

at::Tensor rope_and_cache(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cos_sin,
    const at::Tensor& positions, const at::Tensor& slots, const at::Tensor& k_cache, const at::Tensor& v_cache,
    int64_t layer) {
  const int64_t rows = q.size(0), heads = q.size(1), dim = k_cache.size(3), half = dim / 2;
  for (const at::Tensor* x : {&q, &k, &v}) check_heads(*x, rows, dim, k_cache.scalar_type());
  TORCH_CHECK(k.size(1) == k_cache.size(2) && v.size(1) == k.size(1), "k and v must have the heads of the cache");
  TORCH_CHECK(cos_sin.size(1) == dim && cos_sin.is_contiguous(), "cos_sin must be contiguous [max_len, D]");
  TORCH_CHECK(dim % 2 == 0 && dim <= MAX_DIM, "head_dim must be even and at most ", MAX_DIM);
  check_below(positions, rows, cos_sin.size(0), "positions");
  check_below(slots, rows, k_cache.size(1) * k_cache.size(4), "slots");
  at::Tensor out = at::empty({rows, heads, dim}, q.options());
  with_dtype(q, [&](auto zero) {
    using T = decltype(zero);
    const CacheLayer<T> cache(k_cache, v_cache, layer);
    const T *from_q = q.const_data_ptr<T>(), *from_k = k.const_data_ptr<T>(), *from_v = v.const_data_ptr<T>();
    const float* tables = cos_sin.const_data_ptr<float>();
    const int64_t *position = positions.const_data_ptr<int64_t>(), *slot = slots.const_data_ptr<int64_t>();
    T* to = out.data_ptr<T>();
    for_rows(rows, (heads + 2 * cache.heads) * dim, [&](int64_t row) {
      const float *cos = tables + position[row] * dim, *sin = cos + half;
      for (int64_t h = 0; h < heads; ++h) {
        T* head = to + (row * heads + h) * dim;
        rotate_head(from_q + row * q.stride(0) + h * q.stride(1), cos, sin, half, head, head + half);
      }
      T key[MAX_DIM];
      for (int64_t h = 0; h < cache.heads; ++h) {
        rotate_head(from_k + row * k.stride(0) + h * k.stride(1), cos, sin, half, key, key + half);
        cache.write(slot[row], h, key, from_v + row * v.stride(0) + h * v.stride(1));
      }
    });
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(choral, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  library.def("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)");
  library.def("silu_mul(Tensor gate_up) -> Tensor");
  library.def(
      "rope_and_cache(Tensor q, Tensor k, Tensor v, Tensor cos_sin, Tensor positions, Tensor slots, "
      "Tensor(a!) k_cache, Tensor(b!) v_cache, int layer) -> Tensor");
}

TORCH_LIBRARY_IMPL(choral, CPU, library) {
  library.impl("rms_norm", rms_norm);
  library.impl("add_rms_norm", add_rms_norm);
  library.impl("silu_mul", silu_mul);
  library.impl("rope_and_cache", rope_and_cache);
}

}  // namespace choral
