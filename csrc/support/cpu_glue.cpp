#include "support/cpu_glue.h"

#include <ATen/Parallel.h>

#include <atomic>

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

ElementType element_type(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return ElementType::kFloat64;
    case at::kFloat:
      return ElementType::kFloat32;
    case at::kBFloat16:
      return ElementType::kBFloat16;
    case at::kHalf:
      return ElementType::kFloat16;
    case at::kBool:
      return ElementType::kBool;
    default:
      TORCH_INTERNAL_ASSERT(false, "no kernel reads ", type);
  }
}

}  // namespace

Array array_of(const at::Tensor& tensor, at::IntArrayRef sizes) {
  const at::Tensor view = tensor.expand(sizes);
  Array array;
  array.data = const_cast<void*>(view.const_data_ptr());
  array.type = element_type(view.scalar_type());
  for (int64_t axis = 0; axis < view.dim(); ++axis) {
    array.stride[axis] = view.size(axis) == 1 ? 0 : view.stride(axis);
  }
  return array;
}

TorchExecutor::TorchExecutor(double work) {
  threads = work < kSerialWork || at::in_parallel_region() ? 1 : at::get_num_threads();
  run = run_tasks;
  owner = this;
  allocate = [](void* self, int64_t bytes) {
    auto* executor = static_cast<TorchExecutor*>(self);
    executor->memory_ = at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
    return executor->memory_.mutable_data_ptr();
  };
}

}  // namespace ikattn
