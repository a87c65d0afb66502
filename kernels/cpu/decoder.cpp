// All layers of a decoder in one call, so that a step spends its time in kernels and none in between.
//
// The same operators in the same order as `workers.model` calls them one by one, so the bits are the same. Ranks of one
// host gather through shared memory: every linear is cut by output columns and no sum is split.

#include <torch/library.h>

#include <optional>
#include <vector>

#include "operators.h"

namespace choral {
namespace {

using Optional = std::optional<at::Tensor>;

// One rank's way to the whole of what is cut over the ranks.
struct Gather {
  const Optional& memory;
  int64_t rank, sequence;
  double timeout_s;

  at::Tensor operator()(const at::Tensor& x, at::IntArrayRef widths) {
    return memory ? shared_gather(*memory, x.contiguous(), widths, rank, sequence++, timeout_s) : x;
  }
};

// What one layer holds, in the order the caller lists it.
struct Layer {
  const Optional *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias, *attention_norm, *gate_up, *gate_up_bias, *down,
      *down_bias, *following_norm;
};
static_assert(sizeof(Layer) == 12 * sizeof(void*));

at::Tensor normed_heads(const at::Tensor& heads, const Optional& weight, double eps) {
  return weight ? rms_norm(heads.contiguous(), *weight, eps) : heads;
}

}  // namespace

// hidden [T, H], the embedded tokens, through all layers; returns [R, H] after the last norm: those of `wanted` [R],
// and only they are computed once the last layer's keys are written. `weights` holds the first norm, then those of
// `Layer` for each layer in turn; `columns` how many outputs its four linears have. `widths` are three lists of a
// group's cuts, one after the other: attention columns, hidden columns, feed-forward columns; they count only with
// shared `memory`.
at::Tensor decode_layers(
    const at::Tensor& hidden, const at::Tensor& wanted, const c10::List<Optional>& weights, at::IntArrayRef columns,
    const at::Tensor& cos_sin, const at::Tensor& positions, const at::Tensor& slots, const at::Tensor& block_tables,
    const at::Tensor& tiles, const at::Tensor& spans, const at::Tensor& k_cache, const at::Tensor& v_cache,
    double scale, double eps,
    const Optional& memory, at::IntArrayRef widths, int64_t rank, int64_t sequence, double timeout_s) {
  constexpr int64_t FIELDS = sizeof(Layer) / sizeof(void*);
  const int64_t layers = k_cache.size(0), kv_heads = k_cache.size(2), dim = k_cache.size(3), rows = hidden.size(0);
  TORCH_CHECK(static_cast<int64_t>(weights.size()) == 1 + layers * FIELDS, "weights and cache differ in layers");
  const std::vector<Optional> tensors = weights.vec();
  const size_t ranks = widths.size() / 3;
  const auto attention_cut = widths.slice(0, ranks), hidden_cut = widths.slice(ranks, ranks),
             ffn_cut = widths.slice(2 * ranks, ranks);
  Gather gather{memory, rank, sequence, timeout_s};
  at::Tensor residual = hidden, x = rms_norm(hidden, *tensors[0], eps);
  for (int64_t layer = 0; layer < layers; ++layer) {
    const Optional* at = &tensors[1 + layer * FIELDS];
    const Layer w{at, at + 1, at + 2, at + 3, at + 4, at + 5, at + 6, at + 7, at + 8, at + 9, at + 10, at + 11};
    const at::Tensor heads = linear(x, **w.qkv, *w.qkv_bias, columns[0], false).view({rows, -1, dim});
    const int64_t queries = heads.size(1) - 2 * kv_heads;
    const at::Tensor q = rope_and_cache(
        normed_heads(heads.narrow(1, 0, queries), *w.q_norm, eps),
        normed_heads(heads.narrow(1, queries, kv_heads), *w.k_norm, eps),
        heads.narrow(1, queries + kv_heads, kv_heads), cos_sin, positions, slots, k_cache, v_cache, layer);
    const bool fewer = layer == layers - 1 && wanted.size(0) < rows;
    if (fewer && wanted.size(0) == 0) return hidden.narrow(0, 0, 0);
    x = attention(q, positions, block_tables, tiles, spans, k_cache, v_cache, layer, scale);
    if (fewer) x = x.index_select(0, wanted), residual = residual.index_select(0, wanted);
    x = gather(linear(gather(x, attention_cut), **w.out, *w.out_bias, columns[1], false), hidden_cut);
    std::tie(x, residual) = add_rms_norm(x, residual, **w.attention_norm, eps);
    x = silu_mul(linear(x, **w.gate_up, *w.gate_up_bias, columns[2], false));
    x = gather(linear(gather(x, ffn_cut), **w.down, *w.down_bias, columns[3], false), hidden_cut);
    std::tie(x, residual) = add_rms_norm(x, residual, **w.following_norm, eps);
  }
  return x;
}

TORCH_LIBRARY_FRAGMENT(choral, library) {
  library.def(
      "decode_layers(Tensor hidden, Tensor wanted, Tensor?[] weights, int[] columns, Tensor cos_sin, "
      "Tensor positions, Tensor slots, Tensor block_tables, Tensor tiles, Tensor spans, Tensor(a!) k_cache, "
      "Tensor(b!) v_cache, float scale, float eps, Tensor(c!)? memory, int[] widths, int rank, int sequence, float timeout_s) -> Tensor",
      decode_layers);
}

}  // namespace choral
