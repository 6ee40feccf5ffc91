// Memory that both the GPU and the programs in this folder read.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace ikattn {

// Ends the program where there is none.
template <typename T>
T* take_managed(int64_t count) {
  T* numbers = nullptr;
  const cudaError_t status = cudaMallocManaged(&numbers, count * sizeof(T));
  if (status != cudaSuccess) {
    std::printf("no memory: %s\n", cudaGetErrorString(status));
    std::exit(1);
  }
  return numbers;
}

}  // namespace ikattn
