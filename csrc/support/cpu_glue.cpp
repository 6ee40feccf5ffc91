#include "support/cpu_glue.h"

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>

#include "support/memory.h"

namespace ikattn {
namespace {

// Below this many multiply-adds a call is over before a second thread has woken up.
constexpr double kSerialWork = 4e5;

void run_tasks(int threads, int64_t count, void (*task)(void*, int64_t, int), void* context) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      for (int64_t index; (index = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
        task(context, index, static_cast<int>(thread));
      }
    }
  });
}

}  // namespace

TorchExecutor::TorchExecutor(const char* function, double work) : function_(function) {
  threads = work < kSerialWork || at::in_parallel_region() ? 1 : at::get_num_threads();
  run = run_tasks;
  owner = this;
  allocate = [](void* self, int64_t bytes) {
    auto* executor = static_cast<TorchExecutor*>(self);
    executor->memory_ = with_memory(
        [&] { return c10::GetCPUAllocator()->allocate(static_cast<size_t>(bytes)); },
        [&] {
          return c10::str(executor->function_, ": no memory for ", bytes, " bytes", kWorkingMemory);
        });
    return executor->memory_.get();
  };
}

}  // namespace ikattn
