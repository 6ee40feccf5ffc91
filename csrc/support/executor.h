// Threads and memory for a kernel, without a torch header.
#pragma once

#include <stdint.h>

#include "support/exported.h"

// Declares the table of kernels of every instruction set; those that were not built
// (cmake/ikattnKernel.cmake) are defined nowhere.
#define IKATTN_DECLARE_KERNELS(Table, name) \
  namespace baseline {                      \
  extern IKATTN_EXPORTED const Table name;  \
  }                                         \
  namespace avx2 {                          \
  extern IKATTN_EXPORTED const Table name;  \
  }                                         \
  namespace avx512 {                        \
  extern IKATTN_EXPORTED const Table name;  \
  }

namespace ikattn {

struct Executor {
  int threads = 1;
  // Calls task(context, index, thread) once for every index in [0, count) on up to `threads`
  // threads and returns when all are done. Indices start in increasing order, so that a task may
  // wait for one with a smaller index. `thread` is in [0, threads) and used by one task at a time.
  void (*run)(int threads, int64_t count, void (*task)(void* context, int64_t index, int thread),
              void* context) = nullptr;
  // Allocates memory that lives until the kernel returns, aligned to 64 bytes. Called once.
  void* (*allocate)(void* owner, int64_t bytes) = nullptr;
  void* owner = nullptr;
};

}  // namespace ikattn
