// Rules by which kernels are written and launched: one source for nvcc and for the tests without a
// GPU.
//
// A .cu file is CUDA C++ that includes this header, support/cuda/intrinsics.h and plain structs; no
// torch header, no cuda_*.h. nvcc compiles it for a GPU. With IKATTN_INTERPRETER defined, g++
// compiles the same text as C++ and launch() runs it in the block interpreter of
// csrc/interpreter, which reports shared-memory races, accesses out of bounds, barriers and
// warp operations that not all threads reach.
//
// Both builds have
//   __global__ __device__ __host__ __forceinline__ __launch_bounds__ __restrict__
//   __grid_constant__ #pragma unroll
//   threadIdx blockIdx blockDim gridDim, dim3, float2 float4 uint2 uint4 ... and make_float2 ...
//   __syncthreads, __syncthreads_or/and/count, __syncwarp, __threadfence
//   __shfl_sync, __shfl_xor_sync, __shfl_down_sync, __shfl_up_sync, __any_sync, __all_sync,
//     __ballot_sync: mask 0xffffffff, width 32, values of at most 8 bytes
//   atomicAdd, atomicMax, atomicMin, atomicOr on int and unsigned; __ldg; min, max; C's functions
//     of float and double, rsqrt[f], sincospi[f], __float_as_uint and relatives, __popc, __clz
//
// Shared memory never appears as `__shared__` or as a plain pointer, but as
//   IKATTN_SHARED(float, sums, 32);             a static array, one axis, aligned to 16 bytes
//   Shared<Half> keys = dynamic_shared<Half>(offset_bytes);
//                                               a place in the launch's dynamic shared memory
// Shared<T> is T* under nvcc. In the interpreter it is a class that checks each access:
//   keys[i], keys[i] = x, keys[i] += x, keys + i, &keys[i], Shared<const T> from Shared<T>,
//   shared_cast<uint32_t>(keys), atomicAdd(&keys[i], 1), f(Shared<T>) with T deduced,
//   load_vector<float4>(keys + i), store_vector(keys + i, v): one aligned access; on global
//   pointers too.
// It has no `->`, no `keys[i].x` and no `auto x = keys[i]`: name the value's type,
// `float x = keys[i]`.
//
// Order of accesses to shared memory: __syncthreads for the block, __syncwarp within a warp.
// Shuffles, votes and mma do not: CUDA promises no memory ordering for them. Two threads that write
// the same value to the same place race, too: use __syncthreads_or or atomicOr for flags. All
// threads of a block pass every __syncthreads, all 32 lanes every warp operation: return early only
// where the whole block does.
#pragma once

#if defined(IKATTN_INTERPRETER)
#include "interpreter/device.h"
#else

#include <cuda_runtime.h>
#include <stdint.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "support/cuda/families.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "ikattn's kernels need compute capability 8.0"
#endif

#define IKATTN_SHARED(T, name, count) __shared__ __align__(16) T name[count]

namespace ikattn {

using Stream = cudaStream_t;

template <typename T>
using Shared = T*;

// Returns dynamic shared memory, aligned to 1024 bytes, as a TMA box with 128-byte swizzle needs. A
// kernel that has static arrays, too, pays for it with up to 1 KiB.
template <typename T>
__device__ __forceinline__ Shared<T> dynamic_shared(uint32_t offset_bytes = 0) {
  extern __shared__ __align__(1024) unsigned char ikattn_dynamic_shared[];
  return reinterpret_cast<T*>(ikattn_dynamic_shared + offset_bytes);
}

template <typename To, typename From>
__device__ __forceinline__ Shared<To> shared_cast(From* from) {
  return reinterpret_cast<To*>(from);
}

template <typename Vector, typename T>
__device__ __forceinline__ Vector load_vector(const T* from) {
  return *reinterpret_cast<const Vector*>(from);
}

template <typename Vector, typename T>
__device__ __forceinline__ void store_vector(T* to, const Vector& value) {
  *reinterpret_cast<Vector*>(to) = value;
}

// Returns how many multiprocessors the current device has; 1 where nobody tells.
inline int multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    (void)cudaGetLastError();
    return 1;
  }
  return count;
}

// Returns how many bytes of shared memory a block of the current device may have.
inline int64_t most_shared_memory() {
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
          cudaSuccess) {
    (void)cudaGetLastError();
    return 48 * 1024;
  }
  return bytes;
}

// Returns the current device; 0 where nobody tells.
inline int current_device() {
  int device = 0;
  if (cudaGetDevice(&device) == cudaSuccess) return device;
  (void)cudaGetLastError();
  return 0;
}

// Returns the name of the current device and the version of its driver, apart by a tab.
inline std::string gpu_and_driver() {
  cudaDeviceProp properties;
  int driver = 0;
  if (cudaGetDeviceProperties(&properties, current_device()) != cudaSuccess ||
      cudaDriverGetVersion(&driver) != cudaSuccess) {
    (void)cudaGetLastError();
    return "unknown\t0";
  }
  return std::string(properties.name) + "\t" + std::to_string(driver);
}

// Returns whether the current device runs kernels compiled for sm_90a, this library has them, and
// they are on.
inline bool has_warpgroups() {
#if IKATTN_HAVE_WARPGROUPS
  int major = 0;
  if (!cuda::is_on(Family::kHopper)) return false;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, current_device()) !=
      cudaSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  return major == 9;
#else
  return false;
#endif
}

// Returns nullptr, or why the current device does not run `kernel`: it has no code for its
// architecture.
template <typename... Parameters>
inline const char* why_not_here(void (*kernel)(Parameters...)) {
  cudaFuncAttributes attributes;
  const cudaError_t error =
      cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
  if (error == cudaSuccess) return nullptr;
  (void)cudaGetLastError();  // or the next call that asks would be blamed
  return cudaGetErrorString(error);
}

// Lets a kernel have so much dynamic shared memory on the current device, or more: another thread
// may be about to launch it with what it asked for. What it has is remembered: the runtime is
// asked once.
inline cudaError_t allow_dynamic_shared(const void* kernel, int bytes) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, int> allowed;  // [kernel, device]
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const std::lock_guard<std::mutex> lock(mutex);
  int& most = allowed[{kernel, device}];
  if (most >= bytes) return cudaSuccess;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) most = bytes;
  return error;
}

// Queues kernel(arguments...) on `stream`. Returns nullptr, or why it could not be queued; a fault
// of the kernel itself shows later, as always in CUDA. An empty grid is no error. Does not
// synchronise and may be captured in a graph.
template <typename... Parameters, typename... Arguments>
inline const char* launch(void (*kernel)(Parameters...), dim3 grid, dim3 block,
                          size_t dynamic_shared_bytes, Stream stream, Arguments&&... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return nullptr;
  // A kernel gets 48 KiB, static arrays included, unless it asks for more.
  if (dynamic_shared_bytes > 32 * 1024) {
    const cudaError_t error = allow_dynamic_shared(reinterpret_cast<const void*>(kernel),
                                                   static_cast<int>(dynamic_shared_bytes));
    if (error != cudaSuccess) {
      (void)cudaGetLastError();
      return error == cudaErrorInvalidValue
                 ? "head sizes, or heads, are too large for the shared memory of this GPU"
                 : cudaGetErrorString(error);
    }
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = dynamic_shared_bytes;
  config.stream = stream;
  const cudaError_t error =
      cudaLaunchKernelEx(&config, kernel, static_cast<Arguments&&>(arguments)...);
  if (error == cudaSuccess) return nullptr;
  (void)cudaGetLastError();
  return cudaGetErrorString(error);
}

}  // namespace ikattn

#endif  // IKATTN_INTERPRETER
