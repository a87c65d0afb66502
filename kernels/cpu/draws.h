// What a draw is made of: its settings, its noise, and the selection of a threshold without a sort.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace choral {

constexpr uint32_t TAG = 0x43686F72;  // keeps this use of a seed apart from any other

// Philox4x32-10 (Salmon et al., SC 2011); the number is a pure function of its four arguments.
inline double uniform(int64_t seed, int64_t prompt_number, int64_t sample, int64_t position) {
  uint32_t a = position, b = sample, c = prompt_number, d = TAG;
  uint32_t first = seed, second = static_cast<uint64_t>(seed) >> 32;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p = uint64_t{0xD2511F53} * a, q = uint64_t{0xCD9E8D57} * c;
    a = static_cast<uint32_t>(q >> 32) ^ b ^ first;
    b = static_cast<uint32_t>(q);
    c = static_cast<uint32_t>(p >> 32) ^ d ^ second;
    d = static_cast<uint32_t>(p);
    first += 0x9E3779B9;
    second += 0xBB67AE85;
  }
  return ((a >> 5) * 67108864.0 + (b >> 6)) / 9007199254740992.0;
}

// The tensors of a SampleBatch in the order of its fields.
struct Draws {
  const int64_t* rows;
  const float* temperature;
  const int32_t* top_k;
  const float *top_p, *min_p;
  const int64_t *seed, *prompt_number, *sample, *position;
  const int32_t* num_logprobs;
  const float *repetition, *presence, *frequency;
  const int32_t *seen_starts, *seen_ids, *seen_counts, *bias_starts, *bias_ids;
  const float* bias_values;
  const int32_t *banned_starts, *banned_ids, *allowed_starts, *allowed_ids;

  explicit Draws(const std::vector<at::Tensor>& tensors) {
    TORCH_CHECK(tensors.size() == 23, "a sample batch has 23 tensors");
    for (const at::Tensor& x : tensors) TORCH_CHECK(x.is_contiguous(), "sample batch tensors must be contiguous");
    const at::Tensor* next = tensors.data();
    const auto longs = [&next](const int64_t*& to) { to = (next++)->const_data_ptr<int64_t>(); };
    const auto ints = [&next](const int32_t*& to) { to = (next++)->const_data_ptr<int32_t>(); };
    const auto floats = [&next](const float*& to) { to = (next++)->const_data_ptr<float>(); };
    longs(rows), floats(temperature), ints(top_k), floats(top_p), floats(min_p);
    longs(seed), longs(prompt_number), longs(sample), longs(position), ints(num_logprobs);
    floats(repetition), floats(presence), floats(frequency);
    ints(seen_starts), ints(seen_ids), ints(seen_counts);
    ints(bias_starts), ints(bias_ids), floats(bias_values);
    ints(banned_starts), ints(banned_ids), ints(allowed_starts), ints(allowed_ids);
  }
};

struct Candidate { uint32_t key; float weight; };

// Unsigned keys in the order of the floats.
inline uint32_t key_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

inline float from_key(uint32_t key) {
  const uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// The largest key at which the weight of all candidates at or above it reaches `target`; the smallest key of a
// candidate if it never does.
inline uint32_t select(std::vector<Candidate>& candidates, double target) {
  double above = 0;
  for (const int shift : {21, 10, 0}) {
    std::array<double, 2048> mass{};
    const auto bucket = [shift](const Candidate& c) { return (c.key >> shift) & (shift ? 2047u : 1023u); };
    for (const Candidate& c : candidates) mass[bucket(c)] += c.weight;
    uint32_t chosen = 2047;
    for (double skipped = 0, next = 2047; next >= 0; --next) {
      if (mass[next] == 0) continue;
      above += std::exchange(skipped, 0.0);
      chosen = next;
      if (above + mass[chosen] >= target) break;
      skipped = mass[chosen];
    }
    std::erase_if(candidates, [&](const Candidate& c) { return bucket(c) != chosen; });
  }
  return candidates.front().key;
}

}  // namespace choral
