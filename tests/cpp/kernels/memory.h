// Memory of a test, and the executor that lets the CPU kernels run in it, serially.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>

#include "support/executor.h"

namespace ikattn {

class Memory {
 public:
  // Aligned as executors promise. NaNs, so that what is read before it is written shows.
  void* take(int64_t bytes) {
    blocks_.emplace_back(std::aligned_alloc(64, (bytes + 63) / 64 * 64 + 64), std::free);
    taken_ += bytes;
    if (bytes > 0) std::memset(blocks_.back().get(), 0xff, static_cast<size_t>(bytes));
    return blocks_.back().get();
  }
  int64_t taken() const { return taken_; }  // bytes

 private:
  std::deque<std::unique_ptr<void, void (*)(void*)>> blocks_;
  int64_t taken_ = 0;
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
