// The work list of one attention step, as the planner writes it and the kernel reads it: rows of int32.
#pragma once

#include <cstdint>

namespace choral {

// Rows (query tokens) that go together through the blocks block_begin.. of the table of `sequence`.
struct Span {
  int32_t row_begin, row_end, sequence, block_begin, block_end;
};

// Rows that one thread computes as a whole, with their spans in ascending order of blocks for every row.
struct Tile {
  int32_t row_begin, row_end, span_begin, span_end;
};

}  // namespace choral
