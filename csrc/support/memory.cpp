#include "support/memory.h"

namespace ikattn {

bool is_of_memory(const c10::Error& error) {
  if (dynamic_cast<const MissingMemory*>(&error) != nullptr) return false;
  // A fault of earlier work, which shows wherever the device is asked next.
  if (dynamic_cast<const c10::AcceleratorError*>(&error) != nullptr) return false;
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr) return true;
  // Of the CPU; of a GPU whose driver does not tell torch how much memory others use; and of sizes
  // that no memory has.
  const std::string text = error.what_without_backtrace();
  if (text.find("INTERNAL ASSERT") != std::string::npos) return false;  // a fault of torch's own
  for (const char* part : {"DefaultCPUAllocator", "CUDACachingAllocator", "size calculation"}) {
    if (text.find(part) != std::string::npos) return true;
  }
  return false;
}

}  // namespace ikattn
