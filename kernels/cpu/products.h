// Products of a few rows with a block that lies in the cache, in one fixed order of sums for every row.
#pragma once

#include <type_traits>

#include "vec.h"

namespace choral {
namespace {

constexpr int64_t ROWS_AT_ONCE = LANES == 16 ? 8 : 4;  // as many as the registers hold sums for

// c[r][n] = sum over k, in order, of a[r][k] * b[k][n], for R rows and NV vectors of columns. Entries of a and b are
// floats, or pairs of bfloat16, of which one k then takes two. With ADDS the sum begins with keep[r] * c[r][n].
template <int R, int NV, bool ADDS, typename A, typename B>
inline void product_tile(
    const A* a, int64_t lda, const B* b, int64_t ldb, float* c, int64_t ldc, int64_t depth, const float* keep) {
  Vec sums[R][NV] = {};
  if constexpr (ADDS) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
      for (int n = 0; n < NV; ++n) sums[r][n] = load(c + r * ldc + n * LANES) * keep[r];
  }
  for (int64_t k = 0; k < depth; ++k) {
    decltype(load(b)) row[NV];
#pragma GCC unroll 3
    for (int n = 0; n < NV; ++n) row[n] = load(b + k * ldb + n * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const auto factor = broadcast(a[r * lda + k]);
#pragma GCC unroll 3
      for (int n = 0; n < NV; ++n) sums[r][n] = fma(factor, row[n], sums[r][n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
    for (int n = 0; n < NV; ++n) store(c + r * ldc + n * LANES, sums[r][n]);
}

template <int R, bool ADDS, typename A, typename B>
void product_rows(const A* a, int64_t lda, const B* b, int64_t columns, float* c, int64_t depth, const float* keep) {
  const auto tile = [&]<int NV>(int64_t n, std::integral_constant<int, NV>) {
    product_tile<R, NV, ADDS>(a, lda, b + n, columns, c + n, columns, depth, keep);
  };
  int64_t n = 0;
  if (columns % (3 * LANES) == 0)
    for (; n < columns; n += 3 * LANES) tile(n, std::integral_constant<int, 3>{});
  for (; n + 2 * LANES <= columns; n += 2 * LANES) tile(n, std::integral_constant<int, 2>{});
  if (n < columns) tile(n, std::integral_constant<int, 1>{});
}

// Rows of a are lda apart; b and c are dense with `columns`, a multiple of LANES.
template <bool ADDS = false, typename A, typename B>
void product(const A* a, int64_t lda, int64_t rows, const B* b, int64_t columns, float* c, int64_t depth,
             const float* keep = nullptr) {
  const auto some = [&]<int R>(std::integral_constant<int, R>) {
    product_rows<R, ADDS>(a, lda, b, columns, c, depth, keep);
  };
  for (; rows >= ROWS_AT_ONCE; rows -= ROWS_AT_ONCE, a += ROWS_AT_ONCE * lda, c += ROWS_AT_ONCE * columns) {
    some(std::integral_constant<int, ROWS_AT_ONCE>{});
    if constexpr (ADDS) keep += ROWS_AT_ONCE;
  }
  switch (rows) {
    case 7: return some(std::integral_constant<int, 7>{});
    case 6: return some(std::integral_constant<int, 6>{});
    case 5: return some(std::integral_constant<int, 5>{});
    case 4: return some(std::integral_constant<int, 4>{});
    case 3: return some(std::integral_constant<int, 3>{});
    case 2: return some(std::integral_constant<int, 2>{});
    case 1: return some(std::integral_constant<int, 1>{});
    default: return;
  }
}

}  // namespace
}  // namespace choral
