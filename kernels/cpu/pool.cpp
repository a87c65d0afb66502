#include "pool.h"

#include <ATen/Parallel.h>

#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace choral {

// `ticket` holds the number of the job in its upper half and how many tasks wait in its lower half, so that nobody
// takes a task of one job for one of another. Who has taken one may read the rest: the job cannot end before it is done.
struct Job {
  alignas(64) std::atomic<uint64_t> ticket{0};
  alignas(64) std::atomic<uint32_t> undone{0};
  void (*body)(const void*, Turn&) = nullptr;
  const void* context = nullptr;
  std::mutex failing;
  std::exception_ptr failure;

  void run(Turn& turn) {
    try {
      body(context, turn);
    } catch (...) {
      const std::lock_guard guard(failing);
      if (!failure) failure = std::current_exception();
      for (int64_t task; turn.take(task);) {}
    }
  }
};

namespace {

constexpr int SPINS = 2000;  // some tens of microseconds: longer than the gap between two jobs of a step

// Waits awake for a while; whether it has come to be `ready`.
template <typename Ready>
bool soon(const Ready& ready) {
  for (int spin = 0; spin < SPINS; ++spin) {
    if (ready()) return true;
    relax();
  }
  return false;
}

// Waits until `ready`, at first awake. `word` changes, and is notified, when it may have become so.
template <typename Ready>
void await(std::atomic<uint32_t>& word, const Ready& ready) {
  if (soon(ready)) return;
  for (uint32_t seen = word.load(); !ready(); seen = word.load()) word.wait(seen);
}

class Pool {
 public:
  // Ends with the process, and is never destroyed: helpers may sleep in it.
  static Pool& get() {
    static Pool* const pool = new Pool;
    return *pool;
  }

  void share(int64_t tasks, void (*body)(const void*, Turn&), const void* context) {
    const int threads = at::get_num_threads();
    if (tasks == 1 || threads == 1 || busy_.exchange(true)) return alone(tasks, body, context);
    for (; helpers_ < threads - 1; ++helpers_) std::thread([this] { help(); }).detach();
    job_.body = body, job_.context = context;
    job_.undone = static_cast<uint32_t>(tasks);
    job_.ticket = uint64_t{++epoch_} << 32 | static_cast<uint64_t>(tasks);
    if (sleepers_.load() > 0) {
      ++bell_;
      bell_.notify_all();
    }
    {
      Turn turn(job_, epoch_);
      job_.run(turn);
    }
    await(job_.undone, [&] { return job_.undone.load(std::memory_order_acquire) == 0; });
    const std::exception_ptr failure = std::exchange(job_.failure, nullptr);
    busy_ = false;
    if (failure) std::rethrow_exception(failure);
  }

 private:
  static void alone(int64_t tasks, void (*body)(const void*, Turn&), const void* context) {
    Job job;
    job.undone = static_cast<uint32_t>(tasks);
    job.ticket = static_cast<uint64_t>(tasks);
    Turn turn(job, 0);
    body(context, turn);
  }

  void help() {
    while (true) {
      uint64_t ticket = job_.ticket.load();
      if (static_cast<uint32_t>(ticket) == 0) {
        rest();
      } else if (job_.ticket.compare_exchange_weak(ticket, ticket - 1)) {
        Turn turn(job_, static_cast<uint32_t>(ticket >> 32), static_cast<uint32_t>(ticket) - 1);
        job_.run(turn);
      }
    }
  }

  void rest() {
    if (soon([this] { return waiting(); })) return;
    const uint32_t heard = bell_.load();
    ++sleepers_;
    if (!waiting()) bell_.wait(heard);
    --sleepers_;
  }

  bool waiting() const { return static_cast<uint32_t>(job_.ticket.load()) != 0; }

  Job job_;
  std::atomic<bool> busy_{false};
  alignas(64) std::atomic<uint32_t> bell_{0}, sleepers_{0};
  uint32_t epoch_ = 0;
  int helpers_ = 0;
};

}  // namespace

bool Turn::take(int64_t& task) {
  if (next_ >= 0) {
    task = std::exchange(next_, -1);
    return true;
  }
  done();
  uint64_t ticket = job_.ticket.load();
  while (ticket >> 32 == epoch_ && static_cast<uint32_t>(ticket) != 0)
    if (job_.ticket.compare_exchange_weak(ticket, ticket - 1)) {
      task = static_cast<uint32_t>(ticket) - 1;
      return holds_ = true;
    }
  return false;
}

void Turn::done() {
  const bool last = std::exchange(holds_, false) && job_.undone.fetch_sub(1, std::memory_order_acq_rel) == 1;
  if (last) job_.undone.notify_one();
}

void share(int64_t tasks, void (*body)(const void*, Turn&), const void* context) {
  if (tasks > 0) Pool::get().share(tasks, body, context);
}

}  // namespace choral
