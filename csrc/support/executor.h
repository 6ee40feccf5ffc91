// How a kernel asks for threads and memory without a torch header.
#pragma once

#include <stdint.h>

namespace ikattn {

struct Executor {
  int threads = 1;
  // Calls task(context, index, thread) once for every index in [0, count) on up to `threads`
  // threads and returns when all are done. Indices are begun in increasing order, so that a task
  // may wait for what a task with a smaller index does. `thread` is in [0, threads) and used by one
  // task at a time.
  void (*run)(int threads, int64_t count, void (*task)(void* context, int64_t index, int thread),
              void* context) = nullptr;
  // Memory that lives until the kernel returns, aligned to 64 bytes. Called once.
  void* (*allocate)(void* owner, int64_t bytes) = nullptr;
  void* owner = nullptr;
};

}  // namespace ikattn
