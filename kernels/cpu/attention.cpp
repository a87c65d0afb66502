// Ragged paged attention with shared prefixes.
//
// A row is one query head of one token. For every block of its sequence, in ascending order, a row gets a partial
// result (maximum, sum, weighted values) and merges it into its running one. That recipe is the same whatever rows
// are computed beside it: rows of one tile only share the block that is loaded, so tiles, threads and shared prefixes
// change the speed and no bit. Lanes of positions that a row does not see never enter its sums.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "operators.h"
#include "products.h"
#include "vec.h"

namespace choral {
namespace {

// Turns the scores of one row, times `scale`, into weights e^(s - max) over its `valid` first positions; the rest is 0.
inline float softmax_row(float* scores, int64_t columns, int64_t valid, float scale, float* lane_sums) {
  Ints lane;
  for (int i = 0; i < LANES; ++i) lane[i] = i;
  Vec best = broadcast(-INFINITE);
  for (int64_t i = 0; i < columns; i += LANES) {
    const Vec s = lane < static_cast<int32_t>(valid - i) ? load(scores + i) * scale : broadcast(-INFINITE);
    store(scores + i, s);
    best = larger(best, s);
  }
  const float maximum = max_lane(best);
  Vec sums = {};
  for (int64_t i = 0; i < columns; i += LANES) {
    const Vec weight = exp(load(scores + i) - maximum);
    store(scores + i, weight);
    sums += weight;
  }
  store(lane_sums, sums);
  return maximum;
}

// The rows of one tile for one KV head, and one block at a time. Sums are float32. With bfloat16 and a processor that
// multiplies it, factors stay bfloat16, two by two (`Pair`): the weights are rounded to it, queries and keys are it.
template <typename T>
class TileWorker {
 public:
  static constexpr bool PAIRS = HAS_PAIRS && std::is_same_v<T, c10::BFloat16>;
  using Factor = std::conditional_t<PAIRS, Pair, float>;
  static constexpr int64_t EACH = PAIRS ? 2 : 1;  // values in a factor

  TileWorker(int64_t rows, int64_t dim, int64_t block, float scale)
      : dim_(dim), wide_(padded(dim)), block_(block), columns_(padded(block)), scale_(scale), maxima_(rows),
        block_maxima_(rows + LANES),
        memory_(rows * (columns_ + 3 * wide_ + 2 * LANES) + dim * columns_ + block * wide_ + LANES, 0.0f) {
    float* next = memory_.data() + (-reinterpret_cast<uintptr_t>(memory_.data()) % sizeof(Vec)) / sizeof(float);
    const auto take = [&next](int64_t size) { return std::exchange(next, next + padded(size)); };
    keys_ = reinterpret_cast<Factor*>(take(dim * columns_));
    values_ = reinterpret_cast<Factor*>(take(block * wide_));
    queries_ = reinterpret_cast<Factor*>(take(rows * dim));
    weights_ = take(rows * columns_);
    partial_ = take(rows * wide_);
    output_ = take(rows * wide_);
    lane_sums_ = take(rows * LANES);
    totals_ = take(rows * LANES);
  }

  void start(int64_t rows) {
    std::fill_n(maxima_.data(), rows, -INFINITE);
    std::fill_n(output_, rows * wide_, 0.0f);
    std::fill_n(totals_, rows * LANES, 0.0f);
  }

  void set_query(int64_t row, const T* query) {
    Factor* to = queries_ + row * (dim_ / EACH);
    if constexpr (PAIRS) std::memcpy(to, query, dim_ * sizeof(T));
    else for (int64_t d = 0; d < dim_; d += LANES) store(to + d, load(query + d, dim_ - d), dim_ - d);
  }

  // Makes a block, of which `seen` positions count for some row, current for `attend`. For few rows it is read where
  // it lies, else converted once.
  void use_block(const T* k, const T* v, int64_t rows, int64_t seen) {
    k_ = k, v_ = v;
    if constexpr (PAIRS) {
      for (int64_t d = 0; d < dim_; d += 2)
        for (int64_t j = 0; j < block_; j += LANES)
          store(keys_ + d / 2 * columns_ + j, pairs(k + d * block_ + j, k + (d + 1) * block_ + j, block_ - j));
      for (int64_t j = 0; j < seen; j += 2) {
        // A value no row sees may be anything, and zero times that is not always zero.
        const T* second = j + 1 < seen ? v + (j + 1) * dim_ : nullptr;
        for (int64_t d = 0; d < dim_; d += LANES)
          store(values_ + j / 2 * wide_ + d, pairs(v + j * dim_ + d, second ? second + d : nullptr, dim_ - d));
      }
    } else if (!(direct_ = rows <= ROWS_AT_ONCE && wide_ == dim_ && columns_ == block_)) {
      for (int64_t d = 0; d < dim_; ++d)
        for (int64_t j = 0; j < block_; j += LANES)
          store(keys_ + d * columns_ + j, load(k + d * block_ + j, block_ - j));
      for (int64_t j = 0; j < block_; ++j)
        for (int64_t d = 0; d < dim_; d += LANES) store(values_ + j * wide_ + d, load(v + j * dim_ + d, dim_ - d));
    }
  }

  // Adds the current block, of which the first `valid` positions count, to the rows [first, first + rows).
  void attend(int64_t first, int64_t rows, int64_t valid) {
    const Factor* queries = queries_ + first * (dim_ / EACH);
    multiply(queries, dim_ / EACH, rows, k_, keys_, columns_, weights_, dim_ / EACH);
    for (int64_t r = 0; r < rows; ++r) {
      float* weights = weights_ + r * columns_;
      block_maxima_[r] = softmax_row(weights, columns_, valid, scale_, lane_sums_ + r * LANES);
      if constexpr (PAIRS) round_in_place(weights);
    }
    const Factor* weights = reinterpret_cast<const Factor*>(weights_);
    const int64_t depth = (valid + EACH - 1) / EACH;
    multiply(weights, columns_, rows, v_, values_, wide_, partial_, depth);
    for (int64_t r = 0; r < rows; r += LANES) merge(first + r, r, std::min<int64_t>(LANES, rows - r));
  }

  void finish(int64_t row, T* to) const {
    const Vec total = broadcast(static_cast<float>(sum_lanes(load(totals_ + row * LANES))));
    for (int64_t d = 0; d < dim_; d += LANES) store(to + d, load(output_ + row * wide_ + d) / total, dim_ - d);
  }

 private:
  // A product with the current block, read where it lies or as it was converted.
  void multiply(const Factor* a, int64_t lda, int64_t rows, const T* lies, const Factor* converted, int64_t columns,
                float* to, int64_t depth) const {
    if constexpr (!PAIRS) {
      if (direct_) return product(a, lda, rows, lies, columns, to, depth);
    }
    product(a, lda, rows, converted, columns, to, depth);
  }

  // The weights of a row as bfloat16 at its beginning, where the floats have been read already.
  void round_in_place(float* weights) const {
    for (int64_t j = 0; j < columns_; j += LANES)
      store(reinterpret_cast<c10::BFloat16*>(weights) + j, load(weights + j));
  }

  // Of two rescaling factors one is always exactly 1.
  void merge(int64_t row, int64_t part, int64_t rows) {
    const Vec before = load(maxima_.data() + row, rows), now = load(block_maxima_.data() + part, rows);
    const Vec both = larger(before, now);
    const Vec keep = exp(before - both), add = exp(now - both);
    store(maxima_.data() + row, both, rows);
    for (int64_t r = 0; r < rows; ++r) {
      blend(totals_ + (row + r) * LANES, lane_sums_ + (part + r) * LANES, LANES, keep[r], add[r]);
      blend(output_ + (row + r) * wide_, partial_ + (part + r) * wide_, wide_, keep[r], add[r]);
    }
  }

  static void blend(float* running, const float* fresh, int64_t size, float keep, float add) {
    for (int64_t i = 0; i < size; i += LANES)
      store(running + i, fma(load(running + i), broadcast(keep), load(fresh + i) * add));
  }

  int64_t dim_, wide_, block_, columns_;
  float scale_;
  const T *k_ = nullptr, *v_ = nullptr;
  bool direct_ = false;
  std::vector<float> maxima_, block_maxima_, memory_;
  Factor *keys_, *values_, *queries_;
  float *weights_, *partial_, *output_, *lane_sums_, *totals_;
};

template <typename T>
struct Step {
  const T *q, *k, *v;
  T* out;
  const int64_t* positions;
  const int32_t* tables;
  const Tile* tiles;
  const Span* spans;
  int64_t row_stride, head_stride, width, heads, kv_heads, group, dim, block;
  float scale;

  void run(int64_t tile_index, int64_t kv_head, TileWorker<T>& worker) const {
    const Tile& tile = tiles[tile_index];
    worker.start((tile.row_end - tile.row_begin) * group);
    for (int64_t row = tile.row_begin; row < tile.row_end; ++row)
      for (int64_t g = 0; g < group; ++g)
        worker.set_query((row - tile.row_begin) * group + g,
                         q + row * row_stride + (kv_head * group + g) * head_stride);
    for (int32_t s = tile.span_begin; s < tile.span_end; ++s) follow(spans[s], tile.row_begin, kv_head, worker);
    for (int64_t row = tile.row_begin; row < tile.row_end; ++row)
      for (int64_t g = 0; g < group; ++g)
        worker.finish((row - tile.row_begin) * group + g, out + (row * heads + kv_head * group + g) * dim);
  }

  void follow(const Span& span, int64_t first_row, int64_t kv_head, TileWorker<T>& worker) const {
    const auto [least, most] = std::minmax_element(positions + span.row_begin, positions + span.row_end);
    const int64_t end = std::min<int64_t>(span.block_end, *most / block + 1);
    for (int64_t index = span.block_begin; index < end; ++index) {
      const int64_t at = (tables[span.sequence * width + index] * kv_heads + kv_head) * dim * block;
      const int64_t seen = std::min(block, *most + 1 - index * block);
      worker.use_block(k + at, v + at, (span.row_end - span.row_begin) * group, seen);
      if (*least >= (index + 1) * block - 1) {
        worker.attend((span.row_begin - first_row) * group, (span.row_end - span.row_begin) * group, block);
        continue;
      }
      for (int64_t row = span.row_begin; row < span.row_end; ++row) {
        const int64_t valid = std::min(block, positions[row] - index * block + 1);
        if (valid > 0) worker.attend((row - first_row) * group, group, valid);
      }
    }
  }
};

template <typename T>
void run_tasks(const Step<T>& step, int64_t tiles) {
  int64_t most = 0;
  for (int64_t t = 0; t < tiles; ++t) most = std::max<int64_t>(most, step.tiles[t].row_end - step.tiles[t].row_begin);
  const int64_t tasks = tiles * step.kv_heads;
  std::atomic<int64_t> left{tasks};
  at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), tasks), 1, [&](int64_t, int64_t) {
    TileWorker<T> worker(most * step.group, step.dim, step.block, step.scale);
    for (int64_t task; (task = --left) >= 0;) step.run(task / step.kv_heads, task % step.kv_heads, worker);
  });
}

}  // namespace

at::Tensor attention(
    const at::Tensor& q, const at::Tensor& positions, const at::Tensor& block_tables, const at::Tensor& tiles,
    const at::Tensor& spans, const at::Tensor& k_cache, const at::Tensor& v_cache, int64_t layer, double scale) {
  const int64_t rows = q.size(0), heads = q.size(1), dim = q.size(2), kv_heads = k_cache.size(2);
  TORCH_CHECK(q.dim() == 3 && q.stride(2) == 1 && dim == k_cache.size(3), "q must be [T, heads, D], dense in D");
  TORCH_CHECK(q.scalar_type() == k_cache.scalar_type(), "q and the cache differ in dtype");
  TORCH_CHECK(heads % kv_heads == 0, "query heads must be a multiple of KV heads");
  TORCH_CHECK(positions.size(0) == rows, "q and positions differ in rows");
  at::Tensor out = at::empty({rows, heads * dim}, q.options());
  with_dtype(q, [&](auto zero) {
    using T = decltype(zero);
    const Step<T> step{
        q.const_data_ptr<T>(), k_cache.const_data_ptr<T>() + layer * k_cache.stride(0),
        v_cache.const_data_ptr<T>() + layer * v_cache.stride(0), out.data_ptr<T>(),
        positions.const_data_ptr<int64_t>(), block_tables.const_data_ptr<int32_t>(),
        reinterpret_cast<const Tile*>(tiles.const_data_ptr<int32_t>()),
        reinterpret_cast<const Span*>(spans.const_data_ptr<int32_t>()),
        q.stride(0), q.stride(1), block_tables.size(1), heads, kv_heads, heads / kv_heads, dim, k_cache.size(4),
        static_cast<float>(scale)};
    run_tasks(step, tiles.size(0));
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(choral, library) {
  library.def(
      "attention(Tensor q, Tensor positions, Tensor block_tables, Tensor tiles, Tensor spans, Tensor k_cache, "
      "Tensor v_cache, int layer, float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(choral, CPU, library) {
  library.impl("attention", attention);
}

}  // namespace choral
