// All-gather through memory that the ranks of one host share.
//
// Each rank writes its columns into the buffer, says so in its flag, and reads the whole when every flag has come.
// Two buffers take turns: a rank can only be one call ahead, so what it overwrites has been read by all.

#include <ATen/ops/empty.h>
#include <sched.h>
#include <signal.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <numeric>

#include "operators.h"
#include "pool.h"

namespace choral {
namespace {

constexpr int64_t SPINS_BEFORE_YIELD = 2000;
constexpr int64_t YIELDS_BEFORE_LOOK = 4096;

struct alignas(64) Slot {
  std::atomic<int64_t> sequence;
  std::atomic<int64_t> pid;
};

// Waits until another rank has written its part; a dead or silent one raises.
void wait_for(const Slot& slot, int64_t sequence, int64_t rank, double timeout_s) {
  const auto start = std::chrono::steady_clock::now();
  for (int64_t turn = 0; slot.sequence.load(std::memory_order_acquire) < sequence; ++turn) {
    if (turn < SPINS_BEFORE_YIELD) {
      relax();
      continue;
    }
    sched_yield();
    if (turn % YIELDS_BEFORE_LOOK != 0) continue;
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    TORCH_CHECK(waited.count() < timeout_s, "rank ", rank, " did not answer for ", timeout_s, " s");
    TORCH_CHECK(kill(static_cast<pid_t>(slot.pid.load()), 0) == 0 || errno != ESRCH, "rank ", rank, " is gone");
  }
}

void shared_join(const at::Tensor& memory, int64_t rank) {
  auto* slots = reinterpret_cast<Slot*>(memory.data_ptr<uint8_t>());
  slots[rank].pid.store(getpid());
}

// Puts x [T, widths[rank]] of every rank side by side and waits for all: where [T, sum(widths)] begins. What lies there
// stays until this rank makes the next call.
uint8_t* put(
    const at::Tensor& memory, const at::Tensor& x, at::IntArrayRef widths, int64_t rank, int64_t sequence,
    double timeout_s) {
  const int64_t ranks = static_cast<int64_t>(widths.size()), rows = x.size(0), item = x.element_size();
  int64_t total = 0, before = 0;
  for (int64_t r = 0; r < ranks; ++r) {
    if (r < rank) before += widths[r];
    total += widths[r];
  }
  const int64_t header = ranks * static_cast<int64_t>(sizeof(Slot)), capacity = (memory.numel() - header) / 2;
  TORCH_CHECK(x.is_contiguous() && x.size(1) == widths[rank], "x must be contiguous and as wide as this rank's part");
  TORCH_CHECK(rows * total * item <= capacity, "the gathered rows do not fit the shared memory");
  auto* base = memory.data_ptr<uint8_t>();
  auto* slots = reinterpret_cast<Slot*>(base);
  auto* buffer = base + header + (sequence % 2) * capacity;
  const auto* from = static_cast<const uint8_t*>(x.const_data_ptr());
  const int64_t own = widths[rank] * item;
  for (int64_t row = 0; row < rows; ++row)
    std::memcpy(buffer + row * total * item + before * item, from + row * own, own);
  slots[rank].sequence.store(sequence, std::memory_order_release);
  for (int64_t r = 0; r < ranks; ++r)
    if (r != rank) wait_for(slots[r], sequence, r, timeout_s);
  return buffer;
}

// As `put`; the byte of the memory at which the rows begin.
int64_t shared_put(
    const at::Tensor& memory, const at::Tensor& x, at::IntArrayRef widths, int64_t rank, int64_t sequence,
    double timeout_s) {
  return put(memory, x, widths, rank, sequence, timeout_s) - memory.data_ptr<uint8_t>();
}

}  // namespace

// x [T, widths[rank]] of every rank side by side: [T, sum(widths)]. All ranks make the same calls in the same order.
at::Tensor shared_gather(
    const at::Tensor& memory, const at::Tensor& x, at::IntArrayRef widths, int64_t rank, int64_t sequence,
    double timeout_s) {
  const auto* whole = put(memory, x, widths, rank, sequence, timeout_s);
  at::Tensor out = at::empty({x.size(0), std::accumulate(widths.begin(), widths.end(), int64_t{0})}, x.options());
  std::memcpy(out.data_ptr(), whole, out.nbytes());
  return out;
}

TORCH_LIBRARY_FRAGMENT(choral, library) {
  library.def("shared_join(Tensor(a!) memory, int rank) -> ()");
  library.def("shared_put(Tensor(a!) memory, Tensor x, int[] widths, int rank, int sequence, float timeout_s) -> int");
  library.def(
      "shared_gather(Tensor(a!) memory, Tensor x, int[] widths, int rank, int sequence, float timeout_s) -> Tensor");
}

TORCH_LIBRARY_IMPL(choral, CPU, library) {
  library.impl("shared_join", shared_join);
  library.impl("shared_put", shared_put);
  library.impl("shared_gather", shared_gather);
}

}  // namespace choral
