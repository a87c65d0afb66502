// One register of floats as one value, and the few operations the kernels need on it.
//
// Everything here is a fixed sequence of IEEE operations per lane, so a result never depends on the lane or on what
// the other lanes hold. Sources are compiled with -ffp-contract=off: a fused multiply-add happens where `fma` is
// written and nowhere else. The width is that of the processor: 16 lanes with AVX-512, 8 with AVX, else 4.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#ifdef __AVX__
#include <immintrin.h>
#endif

namespace choral {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr float INFINITE = std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES)));

constexpr int64_t padded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

inline Vec broadcast(float x) { return x - Vec{}; }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_FEATURE_FMA)
  for (int i = 0; i < LANES; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

inline float max_lane(Vec x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(x);
#else
  float best = x[0];
  for (int i = 1; i < LANES; ++i) best = x[i] > best ? x[i] : best;
  return best;
#endif
}

inline bool any(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  int32_t all = 0;
  for (int i = 0; i < LANES; ++i) all |= mask[i];
  return all != 0;
#endif
}

inline double sum_lanes(Vec x) {
  double sum = 0;
  for (int i = 0; i < LANES; ++i) sum += x[i];
  return sum;
}

// e^x with a relative error of about 1e-7; exactly 1 at 0, exactly 0 below -86.9, at most e^88.
inline Vec exp(Vec x) {
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer kept in the low bits
  const Vec bounded = x > 88.0f ? broadcast(88.0f) : x;
  const Vec shifted = fma(bounded, broadcast(1.44269504088896341f), magic);
  const Vec n = shifted - magic;
  const Vec r = fma(n, broadcast(-1.42860682030941723212e-6f), fma(n, broadcast(-0.693145751953125f), bounded));
  Vec p = broadcast(1.0f / 720);
  p = fma(p, r, broadcast(1.0f / 120));
  p = fma(p, r, broadcast(1.0f / 24));
  p = fma(p, r, broadcast(1.0f / 6));
  p = fma(p, r, broadcast(0.5f));
  p = fma(p, r, broadcast(1.0f));
  p = fma(p, r, broadcast(1.0f));
  const Vec scaled = (Vec)((Words)p + ((Words)shifted << 23));
  const Vec result = x < -86.9f ? Vec{} : scaled;
  return x != x ? x : result;
}

// 2^x with a relative error of about 2e-7; exactly 1 at 0, exactly 0 below -150, not a number for one. x at most 127.
inline Vec exp2(Vec x) {
#if defined(__AVX512F__)
  const Vec bounded = _mm512_max_ps(broadcast(-200.0f), x);
  const Vec n = _mm512_roundscale_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const Vec bounded = x < -200.0f ? broadcast(-200.0f) : x, magic = broadcast(12582912.0f);
  const Vec n = (bounded + magic) - magic;
#endif
  const Vec r = bounded - n;
  Vec p = broadcast(0.001326472731307149f);
  p = fma(p, r, broadcast(0.009671512991189957f));
  p = fma(p, r, broadcast(0.05550733581185341f));
  p = fma(p, r, broadcast(0.24022242426872253f));
  p = fma(p, r, broadcast(0.6931470036506653f));
  p = fma(p, r, broadcast(1.0f));
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, n);
#else
  const Vec scaled = (Vec)((Words)p + ((Words)__builtin_convertvector(n, Ints) << 23));
  return x != x ? x : (x < -125.5f ? Vec{} : scaled);
#endif
}

// The largest lane of each of eight vectors, in the lane of its number.
inline Vec max_lanes(const Vec (&x)[8]) {
#if defined(__AVX512F__)
  Vec halves[4], quarters[2];
  for (int i = 0; i < 4; ++i)
    halves[i] = _mm512_max_ps(_mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0x44),
                              _mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0xee));
  for (int i = 0; i < 2; ++i)
    quarters[i] = _mm512_max_ps(_mm512_shuffle_f32x4(halves[2 * i], halves[2 * i + 1], 0x88),
                                _mm512_shuffle_f32x4(halves[2 * i], halves[2 * i + 1], 0xdd));
  const Vec both = _mm512_max_ps(_mm512_shuffle_ps(quarters[0], quarters[1], 0x44),
                                 _mm512_shuffle_ps(quarters[0], quarters[1], 0xee));
  const Vec lanes = _mm512_max_ps(both, _mm512_permute_ps(both, 0xb1));
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 4, 8, 12, 2, 6, 10, 14), lanes);
#else
  Vec lanes = {};
  for (int i = 0; i < std::min(8, LANES); ++i) lanes[i] = max_lane(x[i]);
  return lanes;
#endif
}

inline Vec load(const float* from) {
  Vec x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

inline Vec load(const c10::BFloat16* from) {
  Shorts bits;
  std::memcpy(&bits, from, sizeof(bits));
  return (Vec)(__builtin_convertvector(bits, Words) << 16);
}

inline Vec load(const c10::Half* from) {
  Vec x;
  for (int i = 0; i < LANES; ++i) x[i] = static_cast<float>(from[i]);
  return x;
}

inline void store(float* to, Vec x) { std::memcpy(to, &x, sizeof(x)); }

// Rounds to the nearest, ties to even. The processor's own instruction takes what is below 2^-126 for 0.
inline void store(c10::BFloat16* to, Vec x) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x));
  return;
#endif
  const Words bits = (Words)x;
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Shorts half = __builtin_convertvector(x != x ? (bits >> 16) | 0x40u : rounded, Shorts);
  std::memcpy(to, &half, sizeof(half));
}

inline void store(c10::Half* to, Vec x) {
  for (int i = 0; i < LANES; ++i) to[i] = static_cast<c10::Half>(x[i]);
}

// Two bfloat16 as one factor: a pair of `a` times a pair of `b` adds both products. Where the processor has no
// instruction for it nothing is computed in pairs.
enum class Pair : uint32_t {};

#if defined(__AVX512BF16__)
constexpr bool HAS_PAIRS = true;
inline Words broadcast(Pair x) { return static_cast<uint32_t>(x) - Words{}; }
inline Words load(const Pair* from) {
  Words x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}
inline Vec fma(Words a, Words b, Vec c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
#else
constexpr bool HAS_PAIRS = false;
inline Vec broadcast(Pair) { return Vec{}; }
inline Vec load(const Pair*) { return Vec{}; }
#endif

inline Words load_bits(const c10::BFloat16* from, int64_t count) {
#if defined(__AVX512BF16__)
  if (count >= LANES) return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#endif
  Shorts bits = {};
  std::memcpy(&bits, from, sizeof(c10::BFloat16) * std::min<int64_t>(count, LANES));
  return __builtin_convertvector(bits, Words);
}

// The first `count` of one row paired with those of another, or with zeros.
inline Words pairs(const c10::BFloat16* first, const c10::BFloat16* second, int64_t count) {
  return load_bits(first, count) | (second ? load_bits(second, count) << 16 : Words{});
}
inline void store(Pair* to, Words x) { std::memcpy(to, &x, sizeof(x)); }

// The first `count` lanes only; the others read as `rest` and are not written.
template <typename T>
inline Vec load(const T* from, int64_t count, float rest = 0.0f) {
  if (count >= LANES) return load(from);
  Vec x = broadcast(rest);
#if defined(__AVX512DQ__)
  if constexpr (std::is_same_v<T, float>) {
    if (count == LANES / 2) return _mm512_insertf32x8(x, _mm256_loadu_ps(from), 0);  // many times as fast
  }
#endif
  for (int64_t i = 0; i < count; ++i) x[i] = static_cast<float>(from[i]);
  return x;
}

template <typename T>
inline void store(T* to, Vec x, int64_t count) {
  if (count >= LANES) return store(to, x);
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    if (count == LANES / 2) return _mm256_storeu_ps(to, _mm512_castps512_ps256(x));
  }
#endif
  T lanes[LANES];
  store(lanes, x);
  std::memcpy(to, lanes, count * sizeof(T));
}

template <typename T>
inline Vec rounded(Vec x) {
  T lanes[LANES];
  store(lanes, x);
  return load(lanes);
}

// Calls body with a zero of the tensor's element type.
template <typename Body>
void with_dtype(const at::Tensor& tensor, Body&& body) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return body(float{});
    case at::kBFloat16: return body(c10::BFloat16{});
    case at::kHalf: return body(c10::Half{});
    default: TORCH_CHECK(false, "unsupported dtype ", tensor.scalar_type());
  }
}

}  // namespace choral
