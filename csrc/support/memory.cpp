#include "support/memory.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ikattn {

at::Tensor in_large_pages(at::Tensor tensor) {
#if defined(__linux__)
  constexpr size_t kPage = size_t{2} << 20;
  // The C library mostly reuses freed blocks that are smaller, without asking the system.
  constexpr size_t kLarge = size_t{16} << 20;
  const size_t bytes = tensor.is_cpu() ? tensor.storage().nbytes() : 0;
  if (bytes < kLarge) return tensor;
  const auto begin = reinterpret_cast<uintptr_t>(tensor.storage().data());
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t end = (begin + bytes) / kPage * kPage;
  // Advice only: a system without large pages refuses it, and nothing else changes.
  madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
  return tensor;
}

bool is_of_memory(const c10::Error& error) {
  if (dynamic_cast<const MissingMemory*>(&error) != nullptr) return false;
  // Earlier work may have failed, which shows at the next call to the device.
  if (dynamic_cast<const c10::AcceleratorError*>(&error) != nullptr) return false;
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr) return true;
  // These are errors of the CPU; of a GPU whose driver does not report the memory of other
  // processes; and of sizes that no memory has.
  const std::string text = error.what_without_backtrace();
  if (text.find("INTERNAL ASSERT") != std::string::npos) return false;  // a fault of torch's own
  for (const char* part : {"DefaultCPUAllocator", "CUDACachingAllocator", "size calculation"}) {
    if (text.find(part) != std::string::npos) return true;
  }
  return false;
}

}  // namespace ikattn
