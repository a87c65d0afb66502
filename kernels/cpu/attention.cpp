// Ragged paged attention with shared prefixes.
//
// A row is one query head of one token. For every block of its sequence, in ascending order, a row raises its running
// maximum, rescales its running sum and weighted values to it, and adds those of the block. That recipe is the same
// whatever rows are computed beside it: rows of one tile only share the block that is loaded, so tiles, threads and
// shared prefixes change the speed and no bit. Positions that a row does not see have weight 0 in it.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "operators.h"
#include "pool.h"
#include "products.h"
#include "vec.h"

namespace choral {
namespace {

constexpr int64_t CACHE_LINE = 64;
constexpr float LOG2_E = 1.44269504088896341f;

// The rows of one tile for one KV head, and one block at a time. Sums are float32. With bfloat16 and a processor that
// multiplies it, factors stay bfloat16, two by two (`Pair`): the weights are rounded to it, queries and keys are it.
template <typename T>
class TileWorker {
 public:
  static constexpr bool PAIRS = HAS_PAIRS && std::is_same_v<T, c10::BFloat16>;
  using Factor = std::conditional_t<PAIRS, Pair, float>;
  static constexpr int64_t EACH = PAIRS ? 2 : 1;  // values in a factor

  TileWorker(int64_t rows, int64_t dim, int64_t block, float scale)
      : dim_(dim), wide_(padded(dim)), block_(block), columns_(padded(block)), scale_(scale * LOG2_E), maxima_(rows),
        valid_(rows),
        memory_(ROWS_AT_ONCE * columns_ + rows * (2 * wide_ + LANES) + dim * columns_ + block * wide_ + LANES, 0.0f) {
    float* next = memory_.data() + (-reinterpret_cast<uintptr_t>(memory_.data()) % sizeof(Vec)) / sizeof(float);
    const auto take = [&next](int64_t size) { return std::exchange(next, next + padded(size)); };
    keys_ = reinterpret_cast<Factor*>(take(dim * columns_));
    values_ = reinterpret_cast<Factor*>(take(block * wide_));
    queries_ = reinterpret_cast<Factor*>(take(rows * dim));
    weights_ = take(ROWS_AT_ONCE * columns_);
    output_ = take(rows * wide_);
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

  // Names the block that comes next, or none: it is fetched piece by piece while this one is computed.
  void expect(const T* k, const T* v) { next_k_ = k, next_v_ = v; }

  // Says how many positions of the current block row `row` sees, for an `attend` of which not `all` lanes count.
  void set_valid(int64_t row, int64_t positions) { valid_[row] = static_cast<int32_t>(positions); }

  // Adds the current block to the rows [first, first + rows), which see `all` lanes of it, or what was set. No row
  // sees more than the first `seen` positions. Rows do not mix, so it does not matter how many go at once.
  void attend(int64_t first, int64_t rows, int64_t seen, bool all) {
    const int64_t bytes = dim_ * block_ * static_cast<int64_t>(sizeof(T));
    const int64_t piece = (bytes * ROWS_AT_ONCE / rows + CACHE_LINE) / CACHE_LINE * CACHE_LINE;
    for (int64_t at = 0; rows > 0; first += ROWS_AT_ONCE, rows -= ROWS_AT_ONCE, at += piece) {
      if (next_k_ != nullptr) fetch(at, std::min(at + piece, bytes));
      const int64_t count = std::min(rows, ROWS_AT_ONCE);
      if (all) attend_few<true>(first, count, seen);
      else attend_few<false>(first, count, seen);
    }
  }

  void finish(int64_t row, T* to) const {
    const Vec total = broadcast(static_cast<float>(sum_lanes(load(totals_ + row * LANES))));
    for (int64_t d = 0; d < dim_; d += LANES) store(to + d, load(output_ + row * wide_ + d) / total, dim_ - d);
  }

 private:
  void fetch(int64_t begin, int64_t end) const {
    for (int64_t at = begin; at < end; at += CACHE_LINE) {
      __builtin_prefetch(reinterpret_cast<const char*>(next_k_) + at);
      __builtin_prefetch(reinterpret_cast<const char*>(next_v_) + at);
    }
  }

  template <bool ALL>
  void attend_few(int64_t first, int64_t rows, int64_t seen) {
    const Factor* queries = queries_ + first * (dim_ / EACH);
    multiply<false>(queries, dim_ / EACH, rows, k_, keys_, columns_, weights_, dim_ / EACH, nullptr);
    float keep[ROWS_AT_ONCE];
    weigh<ALL>(first, rows, keep);
    const Factor* weights = reinterpret_cast<const Factor*>(weights_);
    const int64_t depth = (seen + EACH - 1) / EACH;
    multiply<true>(weights, columns_, rows, v_, values_, wide_, output_ + first * wide_, depth, keep);
  }

  // Turns scores into weights 2^(scaled score - running maximum) and adds them to the rows' totals. What a row had
  // before counts `keep` times from now on.
  template <bool ALL>
  void weigh(int64_t first, int64_t rows, float* keep) {
    Ints lane;
    for (int i = 0; i < LANES; ++i) lane[i] = i;
    Vec best[8] = {};
    for (int64_t r = 0; r < rows; ++r) {
      best[r] = broadcast(-INFINITE);
      for (int64_t i = 0; i < columns_; i += LANES) {
        Vec score = load(weights_ + r * columns_ + i);
        if constexpr (!ALL) {
          score = lane < valid_[first + r] - static_cast<int32_t>(i) ? score : broadcast(-INFINITE);
          store(weights_ + r * columns_ + i, score);
        }
        best[r] = larger(score, best[r]);
      }
    }
    const Vec before = load(maxima_.data() + first, rows);
    const Vec maximum = larger(max_lanes(best) * scale_, before);
    const Vec shift = maximum == -INFINITE ? Vec{} : -maximum;  // a row that has not seen anything yet
    store(maxima_.data() + first, maximum, rows);
    store(keep, exp2(before + shift), rows);
    for (int64_t r = 0; r < rows; ++r) {
      float *weights = weights_ + r * columns_, *total = totals_ + (first + r) * LANES;
      Vec sum = {};
      for (int64_t i = 0; i < columns_; i += LANES) {
        const Vec weight = exp2(fma(load(weights + i), broadcast(scale_), broadcast(shift[r])));
        sum += weight;
        // As bfloat16 they take the first half of the row, where the scores have been read already.
        if constexpr (PAIRS) store(reinterpret_cast<c10::BFloat16*>(weights) + i, weight);
        else store(weights + i, weight);
      }
      store(total, fma(load(total), broadcast(keep[r]), sum));
    }
  }

  // A product with the current block, read where it lies or as it was converted.
  template <bool ADDS>
  void multiply(const Factor* a, int64_t lda, int64_t rows, const T* lies, const Factor* converted, int64_t columns,
                float* to, int64_t depth, const float* keep) const {
    if constexpr (!PAIRS) {
      if (direct_) return product<ADDS>(a, lda, rows, lies, columns, to, depth, keep);
    }
    product<ADDS>(a, lda, rows, converted, columns, to, depth, keep);
  }

  int64_t dim_, wide_, block_, columns_;
  float scale_;
  const T *k_ = nullptr, *v_ = nullptr, *next_k_ = nullptr, *next_v_ = nullptr;
  bool direct_ = false;
  std::vector<float> maxima_;
  std::vector<int32_t> valid_;
  std::vector<float> memory_;
  Factor *keys_, *values_, *queries_;
  float *weights_, *output_, *totals_;
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
    const Span* last = spans + tile.span_end - 1;
    for (int32_t s = tile.span_begin; s < tile.span_end; ++s) follow(spans[s], last, tile.row_begin, kv_head, worker);
    for (int64_t row = tile.row_begin; row < tile.row_end; ++row)
      for (int64_t g = 0; g < group; ++g)
        worker.finish((row - tile.row_begin) * group + g, out + (row * heads + kv_head * group + g) * dim);
  }

  int64_t block_at(const Span& span, int64_t index, int64_t kv_head) const {
    return (tables[span.sequence * width + index] * kv_heads + kv_head) * dim * block;
  }

  void follow(const Span& span, const Span* last, int64_t first_row, int64_t kv_head, TileWorker<T>& worker) const {
    const auto [least, most] = std::minmax_element(positions + span.row_begin, positions + span.row_end);
    const int64_t end = std::min<int64_t>(span.block_end, *most / block + 1);
    for (int64_t index = span.block_begin; index < end; ++index) {
      const int64_t at = block_at(span, index, kv_head);
      const int64_t seen = std::min(block, *most + 1 - index * block);
      worker.use_block(k + at, v + at, (span.row_end - span.row_begin) * group, seen);
      const bool more = index + 1 < end, another = more || &span != last;
      const int64_t next = more      ? block_at(span, index + 1, kv_head)
                           : another ? block_at((&span)[1], (&span)[1].block_begin, kv_head)
                                     : 0;
      worker.expect(another ? k + next : nullptr, v + next);
      const bool all = block % LANES == 0 && *least >= (index + 1) * block - 1;
      for (int64_t row = span.row_begin; !all && row < span.row_end; ++row)
        for (int64_t g = 0; g < group; ++g)
          worker.set_valid((row - first_row) * group + g, std::min(block, positions[row] - index * block + 1));
      worker.attend((span.row_begin - first_row) * group, (span.row_end - span.row_begin) * group, seen, all);
    }
  }
};

template <typename T>
void run_tasks(const Step<T>& step, int64_t tiles) {
  int64_t most = 0;
  for (int64_t t = 0; t < tiles; ++t) most = std::max<int64_t>(most, step.tiles[t].row_end - step.tiles[t].row_begin);
  share(tiles * step.kv_heads, [&](Turn& turn) {
    TileWorker<T> worker(most * step.group, step.dim, step.block, step.scale);
    // The last rows of a long prompt have the most blocks: they go first.
    for (int64_t task; turn.take(task);) step.run(tiles - 1 - task / step.kv_heads, task % step.kv_heads, worker);
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
