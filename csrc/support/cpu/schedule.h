// Tasks from lambdas, and a workspace divided into arrays, for every CPU driver.
#pragma once

#include <sched.h>

#include "support/cpu/vector.h"
#include "support/executor.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace ikattn::IKATTN_ISA {
namespace {

inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Calls function(index, thread) for every index in [0, count).
template <typename Function>
inline void parallel(const Executor& executor, int64_t count, const Function& function) {
  if (count <= 0) return;
  if (executor.threads == 1 || count == 1) {
    for (int64_t index = 0; index < count; ++index) function(index, 0);
    return;
  }
  executor.run(
      executor.threads, count,
      [](void* context, int64_t index, int thread) {
        (*static_cast<const Function*>(context))(index, thread);
      },
      const_cast<Function*>(&function));
}

// One step of the work on a unit: function(place, index, thread) for every index in [0, tasks).
struct Place {
  int64_t unit;
  int64_t slot;  // where the unit's intermediate state is kept
};
template <typename Function>
struct Stage {
  int64_t tasks;
  Function function;
};
template <typename Function>
Stage(int64_t, Function) -> Stage<Function>;

// Units [first, first + count), and their division among threads. Whole: a thread computes all
// stages of a unit, near its caches and without waiting for others; a slot per thread. Not whole:
// every stage is divided among the threads; a slot per unit.
struct Schedule {
  int64_t first, count;
  bool whole;

  static bool has_whole_units(const Executor& executor, int64_t units) {
    return units >= 2 * executor.threads;
  }
  static int64_t slots(const Executor& executor, int64_t units, bool whole) {
    return max_of(1, whole ? executor.threads : units);
  }
};

// Runs all stages of all units, each stage of a unit after the one before. Tasks of one stage of a
// unit start in ascending order of index.
template <typename... Stages>
inline void run_stages(const Executor& executor, const Schedule& schedule,
                       const Stages&... stages) {
  if (schedule.whole) {
    parallel(executor, schedule.count, [&](int64_t i, int thread) {
      const Place place{schedule.first + i, thread};
      const auto run = [&](const auto& stage) {
        for (int64_t index = 0; index < stage.tasks; ++index) stage.function(place, index, thread);
      };
      (run(stages), ...);
    });
    return;
  }
  const int64_t count = schedule.count;
  (parallel(executor, count * stages.tasks,
            [&](int64_t task, int thread) {
              stages.function(Place{schedule.first + task % count, task % count}, task / count,
                              thread);
            }),
   ...);
}

// Order tasks that add to the same memory as 0, 1, ...: wait_for_turn() returns when the tasks
// before `turn` have called end_turn().
inline void wait_for_turn(const int* counter, int64_t turn) {
  for (int spins = 0; __atomic_load_n(counter, __ATOMIC_ACQUIRE) != static_cast<int>(turn);
       ++spins) {
    if (spins > 64) sched_yield();
  }
}
inline void end_turn(int* counter, int64_t turn) {
  __atomic_store_n(counter, static_cast<int>(turn) + 1, __ATOMIC_RELEASE);
}

// Returns the executor, without threads where `elements` are too few to wake them.
inline Executor for_elements(const Executor& executor, int64_t elements) {
  Executor result = executor;
  if (elements < 65536) result.threads = 1;
  return result;
}

// Divides one allocation into arrays. The same code runs twice: with a null base to add up the
// size, then to return the pointers.
class Workspace {
 public:
  explicit Workspace(void* base = nullptr) : base_(static_cast<char*>(base)) {}

  template <typename T>
  T* take(int64_t count) {
    // Bases a power of two apart share cache sets, which an odd number of lines avoids.
    constexpr int64_t kLine = 64;
    int64_t lines = ceil_div(count * static_cast<int64_t>(sizeof(T)), kLine);
    if (lines > 64) lines += 5 + (lines & 1);
    T* result = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += lines * kLine;
#if defined(__SANITIZE_ADDRESS__)
    // A poisoned line between arrays shows AddressSanitizer accesses beyond one.
    used_ += kLine;
    if (base_) __asan_poison_memory_region(base_ + used_ - kLine, kLine);
#endif
    return result;
  }
  int64_t bytes() const { return used_; }
  bool has_memory() const { return base_ != nullptr; }  // false: only added up

 private:
  char* base_;
  int64_t used_ = 0;
};

}  // namespace
}  // namespace ikattn::IKATTN_ISA
