// The smallest ring of stages, for compute-sanitizer's racecheck: one stage of one number, which a
// thread of warp 1 fills again and again and warp 0 reads. Each form is right by the rules of
// mbarriers, and its sum is checked; what racecheck says of it tells what the tool follows.
//
//   nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -Icsrc -Icsrc/include -Itests/cpp
//     tests/cpp/hardware/ring.cu -o ring
//   compute-sanitizer --tool racecheck ./ring copies     # filled by bulk copies, as in our kernels
//   compute-sanitizer --tool racecheck ./ring stores     # filled by ordinary stores
//   compute-sanitizer --tool racecheck ./ring library    # the same, with barriers of libcu++
#include <cstdio>
#include <cstring>

// NVIDIA's packages of nvcc do not have this header.
#if __has_include(<cuda/barrier>)
#include <cuda/barrier>
#define IKATTN_HAS_LIBRARY 1
#else
#define IKATTN_HAS_LIBRARY 0
#endif

#include "hardware/managed.h"
#include "support/cuda/bulk_copies.h"
#include "support/cuda/intrinsics.h"
#include "support/cuda/warpgroups.h"

namespace ikattn::sample {
namespace {

constexpr int kRounds = 8, kNumbers = 32;

// sum[lane] of numbers [kRounds][32]; by barriers in PTX.
template <bool kByCopies>
__global__ void __launch_bounds__(64) ring_kernel(const float* numbers, float* sum) {
#if IKATTN_WARPGROUP_CODE
  IKATTN_SHARED(float, stage, kNumbers);
  IKATTN_SHARED(uint64_t, barriers, 2);
  const uint32_t full = shared_address(&barriers[0]), read = shared_address(&barriers[1]);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    barrier_init(full, 1);
    barrier_init(read, 1);
    fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x >= 32) {
    if (lane > 0) return;
    for (int round = 0; round < kRounds; ++round) {
      barrier_wait(read, (round + 1) % 2);
      if constexpr (kByCopies) {
        barrier_arrive(full, kNumbers * 4);
        begin_bytes(shared_address(stage), numbers + round * kNumbers, kNumbers * 4, full);
      } else {
        for (int i = 0; i < kNumbers; ++i) stage[i] = numbers[round * kNumbers + i];
        barrier_arrive(full);
      }
    }
    return;
  }
  float total = 0;
  for (int round = 0; round < kRounds; ++round) {
    barrier_wait(full, round % 2);
    total += stage[lane];
    if constexpr (kByCopies) fence_async();
    __syncwarp();
    if (lane == 0) barrier_arrive(read);
  }
  sum[lane] = total;
#else
  (void)numbers;
  (void)sum;
#endif
}

#if IKATTN_HAS_LIBRARY
// Adds up by barriers that the tool has a word for.
__global__ void __launch_bounds__(64) library_kernel(const float* numbers, float* sum) {
  using Barrier = ::cuda::barrier<::cuda::thread_scope_block>;
  IKATTN_SHARED(float, stage, kNumbers);
#pragma nv_diag_suppress static_var_with_dynamic_init
  __shared__ Barrier full, read;
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    init(&full, 33);
    init(&read, 33);
  }
  __syncthreads();
  if (threadIdx.x >= 32) {
    if (lane > 0) return;
    for (int round = 0; round < kRounds; ++round) {
      for (int i = 0; i < kNumbers; ++i) stage[i] = numbers[round * kNumbers + i];
      full.arrive_and_wait();
      read.arrive_and_wait();
    }
    return;
  }
  float total = 0;
  for (int round = 0; round < kRounds; ++round) {
    full.arrive_and_wait();
    total += stage[lane];
    read.arrive_and_wait();
  }
  sum[lane] = total;
}
#endif

}  // namespace
}  // namespace ikattn::sample

int main(int count, char** arguments) {
  using namespace ikattn;
  using namespace ikattn::sample;
  const char* form = count > 1 ? arguments[1] : "copies";
  float *numbers = take_managed<float>(kRounds * kNumbers), *sum = take_managed<float>(kNumbers);
  for (int i = 0; i < kRounds * kNumbers; ++i) numbers[i] = static_cast<float>(i);
  if (std::strcmp(form, "copies") == 0) {
    ring_kernel<true><<<1, 64>>>(numbers, sum);
  } else if (std::strcmp(form, "stores") == 0) {
    ring_kernel<false><<<1, 64>>>(numbers, sum);
  } else {
#if IKATTN_HAS_LIBRARY
    library_kernel<<<1, 64>>>(numbers, sum);
#endif
  }
  const cudaError_t status = cudaDeviceSynchronize();
  int wrong = 0;
  for (int lane = 0; lane < kNumbers; ++lane) {
    float expected = 0;
    for (int round = 0; round < kRounds; ++round) {
      expected += static_cast<float>(round * kNumbers + lane);
    }
    wrong += sum[lane] != expected;
  }
  std::printf("%s: %s, %d wrong\n", form, cudaGetErrorString(status), wrong);
  return status == cudaSuccess && wrong == 0 ? 0 : 1;
}
