// Work shared by the threads of a rank, none of which ever waits for one that has not begun.
//
// A job is a number of tasks. The caller does them one by one, and every helper that is awake joins in; the job is over
// when all tasks are done, whoever did them. So a helper that has lost its core to another process, or sleeps, delays
// nobody, where a team that meets at a barrier would stand still. Which thread does a task changes no bit.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace choral {

// For a loop that waits awake.
inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Job;

// One thread's way to tasks of a job: `for (int64_t task; turn.take(task);)` until none is left.
class Turn {
 public:
  Turn(Job& job, uint32_t epoch) : job_(job), epoch_(epoch) {}
  Turn(Job& job, uint32_t epoch, int64_t first) : job_(job), epoch_(epoch), next_(first), holds_(true) {}
  Turn(const Turn&) = delete;
  ~Turn() { done(); }

  // The next task; the one taken before counts as done. Tasks are handed out from the last to the first.
  bool take(int64_t& task);

 private:
  void done();

  Job& job_;
  uint32_t epoch_;
  int64_t next_ = -1;  // a task this turn began with
  bool holds_ = false;
};

// Calls `body` once on the caller and once on each helper that gets a task; returns when all tasks are done, and raises
// what a body raised. Called from within a body, or from two threads at once, the caller does it alone.
void share(int64_t tasks, void (*body)(const void* context, Turn& turn), const void* context);

template <typename Body>
void share(int64_t tasks, const Body& body) {
  share(tasks, [](const void* context, Turn& turn) { (*static_cast<const Body*>(context))(turn); }, &body);
}

}  // namespace choral
