// One token per draw: logits are modified, filtered by thresholds, and walked by inverse CDF in vocabulary order.
//
// Every sum has a fixed order within a draw, and draws never look at each other. There is no sort: a filter first
// gathers the tokens near the maximum that can matter, then finds its threshold by radix selection on keys that order
// like the logits.

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "draws.h"
#include "pool.h"
#include "vec.h"

namespace choral {
namespace {

constexpr int64_t BLOCK = 1024;  // tokens per block of the inverse CDF

// Working memory and steps for one draw after the other over a vocabulary of `size` tokens.
class Sampler {
 public:
  explicit Sampler(int64_t size)
      : size_(size), end_(padded(size)), logits_(end_), mass_(end_), sums_((size + BLOCK - 1) / BLOCK) {}

  template <typename T>
  void read(const T* row) {
    for (int64_t i = 0; i < end_; i += LANES) store(&logits_[i], load(row + i, size_ - i, -INFINITE));
  }

  // Log of the sum of all e^logit.
  double normaliser() {
    measure();
    return best_ + std::log(weigh(1.0f, -INFINITE, 0.0f));
  }

  // The `count` largest logits, best first, ties by lower id.
  void top(int64_t count, double normaliser, int64_t* ids, float* logprobs) const {
    int64_t held = 0;
    float least = -INFINITE;
    for (int64_t i = 0; i < end_; i += LANES) {
      if (held == count && !any(load(&logits_[i]) > least)) continue;
      for (int64_t id = i; id < std::min(i + LANES, size_); ++id) {
        if (held == count && !(logits_[id] > least)) continue;
        int64_t at = held < count ? held++ : count - 1;
        for (; at > 0 && logits_[id] > logits_[ids[at - 1]]; --at) ids[at] = ids[at - 1];
        ids[at] = id;
        least = logits_[ids[held - 1]];
      }
    }
    for (int64_t i = 0; i < held; ++i) logprobs[i] = static_cast<float>(logits_[ids[i]] - normaliser);
  }

  void modify(const Draws& draws, int64_t draw) {
    if (draws.allowed_starts[draw + 1] > draws.allowed_starts[draw]) allow_only(draws, draw);
    for (int32_t i = draws.bias_starts[draw]; i < draws.bias_starts[draw + 1]; ++i)
      at(draws.bias_ids[i]) += draws.bias_values[i];
    for (int32_t i = draws.banned_starts[draw]; i < draws.banned_starts[draw + 1]; ++i)
      at(draws.banned_ids[i]) = -INFINITE;
    for (int32_t i = draws.seen_starts[draw]; i < draws.seen_starts[draw + 1]; ++i) {
      float& x = at(draws.seen_ids[i]);
      const int32_t count = draws.seen_counts[i];
      x = x > 0 ? x / draws.repetition[draw] : x * draws.repetition[draw];
      x = x - draws.frequency[draw] * static_cast<float>(count);
      if (count > 0) x = x - draws.presence[draw];
    }
  }

  // The token of a draw, -1 when there is none to draw.
  int64_t pick(const Draws& draws, int64_t draw) {
    measure();
    if (invalid_ || best_ == -INFINITE) return -1;
    if (draws.temperature[draw] == 0) return first_best();
    const float temperature = draws.temperature[draw];
    const float inverse = std::min(1.0f / temperature, std::numeric_limits<float>::max());
    const double top_p = draws.top_p[draw];
    float threshold = -INFINITE;
    if (draws.top_k[draw] > 0 && draws.top_k[draw] < size_)
      threshold = find_threshold(draws.top_k[draw], temperature, false);
    double total = weigh(inverse, threshold, top_p < 1 ? 0.0f : draws.min_p[draw]);
    if (top_p < 1) {
      threshold = std::max(threshold, find_threshold(top_p * total, temperature, true));
      total = weigh(inverse, threshold, draws.min_p[draw]);
    }
    if (!(total > 0 && total < INFINITE)) return -1;
    return walk(total * uniform(draws.seed[draw], draws.prompt_number[draw], draws.sample[draw], draws.position[draw]));
  }

 private:
  float& at(int32_t id) {
    TORCH_CHECK(id >= 0 && id < size_, "token id ", id, " lies outside the vocabulary of ", size_);
    return logits_[id];
  }

  void allow_only(const Draws& draws, int64_t draw) {
    std::vector<std::pair<int32_t, float>> kept;
    for (int32_t i = draws.allowed_starts[draw]; i < draws.allowed_starts[draw + 1]; ++i)
      kept.emplace_back(draws.allowed_ids[i], at(draws.allowed_ids[i]));
    std::fill(logits_.begin(), logits_.end(), -INFINITE);
    for (const auto& [id, logit] : kept) logits_[id] = logit;
  }

  void measure() {
    Vec best = broadcast(-INFINITE);
    Ints invalid = {};
    for (int64_t i = 0; i < end_; i += LANES) {
      const Vec x = load(&logits_[i]);
      best = larger(best, x);
      invalid |= x != x;
    }
    best_ = max_lane(best);
    invalid_ = any(invalid);
  }

  int64_t first_best() const {
    return std::find(logits_.begin(), logits_.end(), best_) - logits_.begin();
  }

  // Fills mass_ with e^((logit - best) * inverse) of the tokens kept, sums_ with the sum of each block; the total.
  double weigh(float inverse, float threshold, float min_p) {
    double total = 0;
    for (size_t b = 0; b < sums_.size(); ++b) {
      Vec sum = {};
      for (int64_t i = b * BLOCK; i < std::min<int64_t>((b + 1) * BLOCK, end_); i += LANES) {
        const Vec x = load(&logits_[i]);
        const Vec weight = exp((x - best_) * inverse);
        const Vec kept = (x >= threshold) & (weight >= min_p) ? weight : Vec{};
        store(&mass_[i], kept);
        sum += kept;
      }
      total += sums_[b] = sum_lanes(sum);
    }
    return total;
  }

  // The largest value such that the tokens at or above it reach `target` together, in mass or in number. Brackets it
  // by whole passes first, so that only few candidates need the selection.
  float find_threshold(double target, float temperature, bool by_mass) {
    float low = -INFINITE, high = INFINITE;
    double above = 0;
    const auto probe = [&](float value) {
      const double weight = weight_from(value, by_mass);
      (weight >= target ? low : high) = value;
      if (weight < target) above = weight;
      return weight >= target;
    };
    for (const float reach : {1.0f, 4.0f, 16.0f, INFINITE})
      if (probe(best_ - reach * temperature)) break;
    for (int halving = 0; halving < 6 && low < best_ && low > -INFINITE; ++halving)
      probe(0.5f * (low + std::min(high, best_)));
    gather(low, high, by_mass);
    return candidates_.empty() ? low : from_key(select(candidates_, target - above));
  }

  double weight_from(float least, bool by_mass) const {
    double total = 0;
    for (int64_t block = 0; block < end_; block += BLOCK) {
      Vec sum = {};
      for (int64_t i = block; i < std::min(block + BLOCK, end_); i += LANES)
        sum += load(&logits_[i]) >= least ? (by_mass ? load(&mass_[i]) : broadcast(1.0f)) : Vec{};
      total += sum_lanes(sum);
    }
    return total;
  }

  void gather(float least, float below, bool by_mass) {
    candidates_.clear();
    for (int64_t i = 0; i < end_; i += LANES) {
      const Vec x = load(&logits_[i]);
      if (!any((x >= least) & (x < below))) continue;
      for (int64_t id = i; id < std::min(i + LANES, size_); ++id)
        if (const float weight = by_mass ? mass_[id] : 1.0f; logits_[id] >= least && logits_[id] < below && weight > 0)
          candidates_.push_back({key_of(logits_[id]), weight});
    }
  }

  // The first token, in vocabulary order, at which the running mass passes `target`; rounding may leave it beyond the
  // end, then the last token with mass.
  int64_t walk(double target) const {
    double running = 0;
    int64_t block = 0;
    bool passed = false;
    for (size_t b = 0; b < sums_.size() && !passed; ++b) {
      if (sums_[b] == 0) continue;
      block = b;
      passed = running + sums_[b] > target;
      if (!passed) running += sums_[b];
    }
    int64_t token = -1;
    for (int64_t i = block * BLOCK; i < std::min((block + 1) * BLOCK, size_); ++i) {
      if (mass_[i] == 0) continue;
      token = i;
      running += mass_[i];
      if (passed && running > target) break;
    }
    return token;
  }

  int64_t size_, end_;
  std::vector<float> logits_, mass_;
  std::vector<double> sums_;
  std::vector<Candidate> candidates_;
  float best_ = -INFINITE;
  bool invalid_ = false;
};

struct Results {
  int64_t* tokens;
  float* logprobs;
  int64_t* top_ids;
  float* top_logprobs;
  int64_t width;
};

template <typename T>
void run_draw(Sampler& sampler, const T* row, int64_t size, const Draws& draws, int64_t draw, const Results& results) {
  sampler.read(row);
  const int64_t wanted = draws.num_logprobs[draw];
  double normaliser = 0;
  if (wanted >= 0) {
    normaliser = sampler.normaliser();
    const int64_t at = draw * results.width;
    if (wanted > 0) sampler.top(std::min(wanted, size), normaliser, results.top_ids + at, results.top_logprobs + at);
  }
  sampler.modify(draws, draw);
  const int64_t token = results.tokens[draw] = sampler.pick(draws, draw);
  if (wanted >= 0 && token >= 0)
    results.logprobs[draw] = static_cast<float>(static_cast<float>(row[token]) - normaliser);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> sample(
    const at::Tensor& logits_, const std::vector<at::Tensor>& batch) {
  const Draws draws(batch);
  const at::Tensor logits = logits_.contiguous();
  const int64_t count = batch[0].size(0), size = logits.size(1);
  int64_t width = 0;
  for (int64_t draw = 0; draw < count; ++draw) {
    TORCH_CHECK(draws.rows[draw] >= 0 && draws.rows[draw] < logits.size(0), "rows must name rows of the logits");
    width = std::max<int64_t>(width, draws.num_logprobs[draw]);
  }
  at::Tensor tokens = at::full({count}, -1, at::kLong), logprobs = at::full({count}, 0, at::kFloat);
  at::Tensor top_ids = at::full({count, width}, -1, at::kLong), top_logprobs = at::full({count, width}, 0, at::kFloat);
  const Results results{tokens.data_ptr<int64_t>(), logprobs.data_ptr<float>(), top_ids.data_ptr<int64_t>(),
                        top_logprobs.data_ptr<float>(), width};
  with_dtype(logits, [&](auto zero) {
    using T = decltype(zero);
    const T* from = logits.const_data_ptr<T>();
    share(count, [&](Turn& turn) {
      Sampler sampler(size);
      for (int64_t draw; turn.take(draw);)
        run_draw(sampler, from + draws.rows[draw] * size, size, draws, draw, results);
    });
  });
  return {tokens, logprobs, top_ids, top_logprobs};
}

std::string instruction_set() {
#if defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#else
  return "portable";
#endif
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(choral, library) {
  library.def("sample(Tensor logits, Tensor[] batch) -> (Tensor, Tensor, Tensor, Tensor)");
  library.def("instruction_set() -> str", instruction_set);
}

TORCH_LIBRARY_IMPL(choral, CPU, library) { library.impl("sample", sample); }

}  // namespace choral
