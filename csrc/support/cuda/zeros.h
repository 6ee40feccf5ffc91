// Memory that is to be zero, without a kernel.
#pragma once

#include "support/cuda/launch.h"

namespace ikattn {

// Queues zeros for `bytes` from `to` on. Returns nullptr, or why they could not be queued. May be
// captured in a graph.
inline const char* queue_zeros(void* to, int64_t bytes, Stream stream) {
#if defined(IKATTN_INTERPRETER)
  (void)stream;
  __builtin_memset(to, 0, static_cast<size_t>(bytes));
  return nullptr;
#else
  const cudaError_t error = cudaMemsetAsync(to, 0, static_cast<size_t>(bytes), stream);
  if (error == cudaSuccess) return nullptr;
  (void)cudaGetLastError();
  return cudaGetErrorString(error);
#endif
}

}  // namespace ikattn
