// Plans which rows of a step go through which blocks together.
//
// Adjacent sequences whose block tables start alike form a tree: its trunk is taken by all their rows, each branch by
// its own. Every row meets its blocks in ascending order, so the plan decides about speed and never about bits.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "attention.h"

namespace choral {
namespace {

constexpr int64_t ROWS_PER_TILE = 64;     // query tokens; times the group of heads gives rows
constexpr int64_t FEWEST_PER_TILE = 4;

class Planner {
 public:
  Planner(const at::Tensor& starts, const at::Tensor& lens, const at::Tensor& tables, int64_t block, bool share)
      : starts_(starts.const_data_ptr<int32_t>()), lens_(lens.const_data_ptr<int32_t>()),
        tables_(tables.const_data_ptr<int32_t>()), width_(tables.size(1)), block_(block),
        sequences_(lens.size(0)), common_(sequences_, 0) {
    for (int64_t s = 1; share && s < sequences_; ++s) common_[s] = common_blocks(s - 1, s);
  }

  // Cuts the rows into tiles: where a sequence shares nothing with the one before it, and after `limit` rows.
  void run(int32_t limit) {
    for (int64_t s = 0; s < sequences_; ++s)
      for (int32_t row = starts_[s]; row < starts_[s + 1];) {
        const bool fresh = row == starts_[s] && (s == 0 || common_[s] == 0);
        if (fresh || row - begin_ == limit) flush(row, s);
        last_ = s;
        row = std::min(starts_[s + 1], begin_ + limit);
        end_ = row;
      }
    flush(end_, sequences_);
  }

  std::vector<Tile> tiles;
  std::vector<Span> spans;

 private:
  int32_t blocks(int64_t s) const { return static_cast<int32_t>((lens_[s] + block_ - 1) / block_); }

  int32_t common_blocks(int64_t a, int64_t b) const {
    const int32_t most = std::min(blocks(a), blocks(b));
    const int32_t *left = tables_ + a * width_, *right = tables_ + b * width_;
    return static_cast<int32_t>(std::mismatch(left, left + most, right).first - left);
  }

  void flush(int32_t next_row, int64_t next_sequence) {
    if (end_ > begin_) {
      const auto first = static_cast<int32_t>(spans.size());
      descend(first_, last_ + 1, 0);
      tiles.push_back({begin_, end_, first, static_cast<int32_t>(spans.size())});
    }
    begin_ = end_ = next_row;
    first_ = next_sequence;
  }

  // The sequences [low, high) have been taken through `from` blocks: go on together as far as they agree, then apart.
  void descend(int64_t low, int64_t high, int32_t from) {
    const int32_t row_begin = std::max(begin_, starts_[low]), row_end = std::min(end_, starts_[high]);
    if (row_begin >= row_end) return;
    int32_t until = blocks(low);
    for (int64_t s = low + 1; s < high; ++s) until = std::min(until, common_[s]);
    if (until > from) spans.push_back({row_begin, row_end, static_cast<int32_t>(low), from, until});
    if (high - low == 1) return;
    for (int64_t s = low, next; s < high; s = next) {
      for (next = s + 1; next < high && common_[next] > until; ++next) {}
      if (next - s > 1 || blocks(s) > until) descend(s, next, until);
    }
  }

  const int32_t *starts_, *lens_, *tables_;
  int64_t width_, block_, sequences_;
  std::vector<int32_t> common_;  // leading blocks a sequence has in common with the one before it
  int32_t begin_ = 0, end_ = 0;  // rows of the tile being filled
  int64_t first_ = 0, last_ = 0;  // its sequences
};

template <typename Record>
at::Tensor as_tensor(const std::vector<Record>& records) {
  at::Tensor out = at::empty({static_cast<int64_t>(records.size()), sizeof(Record) / 4}, at::kInt);
  if (!records.empty()) std::memcpy(out.data_ptr<int32_t>(), records.data(), records.size() * sizeof(Record));
  return out;
}

std::tuple<at::Tensor, at::Tensor> attention_plan(
    const at::Tensor& query_starts, const at::Tensor& context_lens, const at::Tensor& block_tables,
    int64_t block_size, int64_t kv_heads, bool share_prefix) {
  TORCH_CHECK(query_starts.size(0) == context_lens.size(0) + 1 && block_tables.size(0) == context_lens.size(0),
              "query_starts [S + 1], context_lens [S] and block_tables [S, B] do not match");
  for (const at::Tensor* x : {&query_starts, &context_lens, &block_tables})
    TORCH_CHECK(x->is_contiguous(), "query_starts, context_lens and block_tables must be contiguous");
  Planner planner(query_starts, context_lens, block_tables, block_size, share_prefix);
  const int64_t rows = query_starts.const_data_ptr<int32_t>()[context_lens.size(0)];
  const int64_t wanted = (2 * at::get_num_threads() + kv_heads - 1) / kv_heads;
  planner.run(static_cast<int32_t>(std::clamp((rows + wanted - 1) / wanted, FEWEST_PER_TILE, ROWS_PER_TILE)));
  return {as_tensor(planner.tiles), as_tensor(planner.spans)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(choral, library) {
  library.def(
      "attention_plan(Tensor query_starts, Tensor context_lens, Tensor block_tables, int block_size, int kv_heads, "
      "bool share_prefix) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(choral, CPU, library) { library.impl("attention_plan", attention_plan); }

}  // namespace choral
