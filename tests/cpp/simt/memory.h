// Memory of a test, and the executor that lets the CPU kernels run in it, serially.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>

#include "support/executor.h"

namespace ikattn {

class Memory {
 public:
  // Aligned as executors promise.
  void* take(int64_t bytes) {
    blocks_.emplace_back(std::aligned_alloc(64, (bytes + 63) / 64 * 64 + 64), std::free);
    return blocks_.back().get();
  }

 private:
  std::deque<std::unique_ptr<void, void (*)(void*)>> blocks_;
};

inline Executor cpu_executor(Memory& memory) {
  Executor executor;
  executor.run = [](int, int64_t count, void (*task)(void*, int64_t, int), void* context) {
    for (int64_t index = 0; index < count; ++index) task(context, index, 0);
  };
  executor.allocate = [](void* owner, int64_t bytes) {
    return static_cast<Memory*>(owner)->take(bytes);
  };
  executor.owner = &memory;
  return executor;
}

}  // namespace ikattn
