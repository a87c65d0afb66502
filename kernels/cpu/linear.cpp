// y = x W^T + b with weights packed once: a row is summed over its inputs in one order, whoever is beside it.
//
// An output is one chain of multiply-adds in a register, over pairs of bfloat16 where the processor multiplies those,
// else over floats. So neither the number of rows, nor the cut of the columns, nor the threads change a bit. Panels of
// columns are taken by whichever thread is free: a thread that loses its core for a moment does not stop the other.

#include <ATen/Parallel.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>

#include "operators.h"
#include "pool.h"
#include "products.h"

namespace choral {
namespace {

constexpr int64_t PANEL = 3 * LANES;  // columns whose sums, for ROWS_AT_ONCE rows, fill the registers
constexpr int64_t TURNS = 8;          // how often a thread comes back for more panels, at least where there are many

// Panel p of packed weights [P, depth, PANEL] holds the columns from p * PANEL on; what is beyond the last is zero.
template <typename Factor, typename Out>
struct Product {
  const Factor *x, *weight;
  const float* bias;
  Out* y;
  int64_t rows, depth, columns;

  void panel(int64_t p) const {
    const Factor* w = weight + p * depth * PANEL;
    for (int64_t row = 0; row < rows; row += ROWS_AT_ONCE) {
      float sums[ROWS_AT_ONCE * PANEL];
      const int64_t count = std::min(ROWS_AT_ONCE, rows - row);
      product(x + row * depth, depth, count, w, PANEL, sums, depth);
      for (int64_t r = 0; r < count; ++r) write(sums + r * PANEL, y + (row + r) * columns, p * PANEL);
    }
  }

  void write(const float* sums, Out* row, int64_t first) const {
    for (int64_t i = 0; i < PANEL && first + i < columns; i += LANES) {
      const int64_t count = columns - first - i;
      Vec sum = load(sums + i);
      if (bias) sum = sum + load(bias + first + i, count);
      store(row + first + i, sum, count);
    }
  }

  void run() const {
    const int64_t panels = (columns + PANEL - 1) / PANEL, threads = at::get_num_threads();
    const int64_t size = std::max<int64_t>(1, panels / (threads * TURNS));
    share((panels + size - 1) / size, [&](Turn& turn) {
      for (int64_t task; turn.take(task);)
        for (int64_t p = task * size; p < std::min((task + 1) * size, panels); ++p) panel(p);
    });
  }
};

template <typename Factor, typename Element>
void multiply(const at::Tensor& x, const at::Tensor& packed, const float* bias, at::Tensor& y) {
  with_dtype(y, [&](auto zero) {
    using Out = decltype(zero);
    Product<Factor, Out>{
        reinterpret_cast<const Factor*>(x.const_data_ptr<Element>()),
        reinterpret_cast<const Factor*>(packed.const_data_ptr<Element>()), bias, y.data_ptr<Out>(), x.size(0),
        packed.size(1), y.size(1)}.run();
  });
}

}  // namespace

// Whether bfloat16 is multiplied as it is; else it has to be packed in float32.
bool multiplies_bfloat16() { return HAS_PAIRS; }

// weight [N, K], float32 or bfloat16, to [panels, K, PANEL], or to [panels, K / 2, PANEL, 2] for bfloat16.
at::Tensor pack_linear(const at::Tensor& weight_) {
  const at::Tensor weight = weight_.contiguous();
  const int64_t columns = weight.size(0), inputs = weight.size(1), panels = (columns + PANEL - 1) / PANEL;
  const bool paired = weight.scalar_type() == at::kBFloat16;
  TORCH_CHECK(paired ? HAS_PAIRS : weight.scalar_type() == at::kFloat, "cannot multiply ", weight.scalar_type());
  const int64_t pair = paired ? 2 : 1, depth = (inputs + pair - 1) / pair;
  at::Tensor packed = lasting_zeros({panels, depth, PANEL, pair}, weight.scalar_type());
  with_dtype(weight, [&](auto zero) {
    using T = decltype(zero);
    const T* from = weight.const_data_ptr<T>();
    T* to = packed.data_ptr<T>();
    at::parallel_for(0, columns, 1, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n)
        for (int64_t k = 0; k < inputs; ++k)
          to[((n / PANEL * depth + k / pair) * PANEL + n % PANEL) * pair + k % pair] = from[n * inputs + k];
    });
  });
  return packed;
}

// x [T, K] times packed weights, plus bias float32 [columns]: [T, columns] in the dtype of x, or unrounded.
at::Tensor linear(
    const at::Tensor& x_, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t columns,
    bool unrounded) {
  const int64_t pair = packed.size(3);
  TORCH_CHECK(x_.dim() == 2 && x_.scalar_type() == packed.scalar_type(), "x must be [T, K] of the weights' dtype");
  TORCH_CHECK((x_.size(1) + pair - 1) / pair == packed.size(1), "x and weights differ in inputs");
  TORCH_CHECK(columns <= packed.size(0) * PANEL && columns > (packed.size(0) - 1) * PANEL, "wrong number of columns");
  TORCH_CHECK(!bias || (bias->scalar_type() == at::kFloat && bias->size(0) == columns), "bias must be float32 [N]");
  const at::Tensor x = x_.size(1) % pair ? at::constant_pad_nd(x_, {0, 1}) : x_.contiguous();
  at::Tensor y = at::empty({x.size(0), columns}, unrounded ? x.options().dtype(at::kFloat) : x.options());
  const float* offset = bias ? bias->const_data_ptr<float>() : nullptr;
  if (pair == 2) multiply<Pair, c10::BFloat16>(x, packed, offset, y);
  else multiply<float, float>(x, packed, offset, y);
  return y;
}

TORCH_LIBRARY_FRAGMENT(choral, library) {
  library.def("multiplies_bfloat16() -> bool", multiplies_bfloat16);
  library.def("pack_linear(Tensor weight) -> Tensor");
  library.def("linear(Tensor x, Tensor packed, Tensor? bias, int columns, bool unrounded=False) -> Tensor");
}

TORCH_LIBRARY_IMPL(choral, CPU, library) {
  library.impl("pack_linear", pack_linear);
  library.impl("linear", linear);
}

}  // namespace choral
