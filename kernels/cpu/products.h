// Products of a few rows with a block that lies in the cache, in one fixed order of sums for every row.
#pragma once

#include "vec.h"

namespace choral {
namespace {

constexpr int64_t ROWS_AT_ONCE = LANES == 16 ? 8 : 4;  // as many as the registers hold sums for

// c[r][n] = sum over k, in order, of a[r][k] * b[k][n], for R rows and NV vectors of columns. Entries of a and b are
// floats, or pairs of bfloat16, of which one k then takes two.
template <int R, int NV, typename A, typename B>
inline void product_tile(const A* a, int64_t lda, const B* b, int64_t ldb, float* c, int64_t ldc, int64_t depth) {
  Vec sums[R][NV] = {};
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

template <int R, typename A, typename B>
void product_rows(const A* a, int64_t lda, const B* b, int64_t columns, float* c, int64_t depth) {
  int64_t n = 0;
  if (columns % (3 * LANES) == 0)
    for (; n < columns; n += 3 * LANES) product_tile<R, 3>(a, lda, b + n, columns, c + n, columns, depth);
  for (; n + 2 * LANES <= columns; n += 2 * LANES) product_tile<R, 2>(a, lda, b + n, columns, c + n, columns, depth);
  if (n < columns) product_tile<R, 1>(a, lda, b + n, columns, c + n, columns, depth);
}

// Rows of a are lda apart; b and c are dense with `columns`, a multiple of LANES.
template <typename A, typename B>
void product(const A* a, int64_t lda, int64_t rows, const B* b, int64_t columns, float* c, int64_t depth) {
  for (; rows >= ROWS_AT_ONCE; rows -= ROWS_AT_ONCE, a += ROWS_AT_ONCE * lda, c += ROWS_AT_ONCE * columns)
    product_rows<ROWS_AT_ONCE>(a, lda, b, columns, c, depth);
  switch (rows) {
    case 7: return product_rows<7>(a, lda, b, columns, c, depth);
    case 6: return product_rows<6>(a, lda, b, columns, c, depth);
    case 5: return product_rows<5>(a, lda, b, columns, c, depth);
    case 4: return product_rows<4>(a, lda, b, columns, c, depth);
    case 3: return product_rows<3>(a, lda, b, columns, c, depth);
    case 2: return product_rows<2>(a, lda, b, columns, c, depth);
    case 1: return product_rows<1>(a, lda, b, columns, c, depth);
    default: return;
  }
}

}  // namespace
}  // namespace choral
