#include "interpreter/sample_warpgroups.h"
#include "support/cuda/intrinsics.h"
#include "support/cuda/warpgroups.h"

namespace ikattn::sample {
namespace {

// A warpgroup's product in the ways the kernels use: out [64][columns] = a [64][64] b, which lies
// [column][inner] (128 columns) or [inner][column] (64).
template <typename T, bool kByRows>
__global__ void __launch_bounds__(128)
    warpgroup_kernel(const T* a, const T* b, float* out, Misuse misuse) {
#if IKATTN_WARPGROUP_CODE
  constexpr int kColumns = kByRows ? 64 : 128, kInner = 64;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  // 64 elements in a row of either: 128 bytes.
  for (int chunk = threadIdx.x; chunk < (kByRows ? kInner : kColumns) * 8; chunk += 128) {
    const uint32_t row = chunk / 8;
    cp_async_16(base + row * 128 + ((chunk ^ row) & 7) * 16, b + chunk * 8);
  }
  cp_async_commit();
  uint32_t left[kInner / 16][4];
  for (int k = 0; k < kInner / 16; ++k) {
    for (int i = 0; i < 4; ++i) {
      const int row = warp * 16 + g + 8 * (i % 2), column = k * 16 + 2 * t + 8 * (i / 2);
      left[k][i] = load_vector<uint32_t>(a + row * kInner + column);
    }
  }
  cp_async_wait<0>();
  if (misuse != Misuse::kNoFence) fence_async();
  if (misuse != Misuse::kNoBarrier) __syncthreads();
  float sums[kColumns / 2] = {};
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kInner / 16; ++k) {
    if constexpr (kByRows) {
      wgmma_by_rows<T>(sums, left[k], wgmma_operand(base + k * 2048), k > 0);
    } else {
      wgmma_by_columns<T>(sums, left[k], wgmma_operand(base + k * 32), k > 0);
    }
  }
  wgmma_commit();
#if defined(IKATTN_INTERPRETER)  // nvcc would not let these pass
  if (misuse == Misuse::kChangedA) left[0][0] ^= 0x8000;
  const float early = sums[0];
#endif
  wgmma_wait<0>();
#if defined(IKATTN_INTERPRETER)
  if (misuse == Misuse::kEarlySums) sums[0] = early;
#endif
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    const int row = warp * 16 + g + 8 * (i % 4 / 2), column = i / 4 * 8 + 2 * t + i % 2;
    out[row * kColumns + column] = sums[i];
  }
#else
  (void)a;
  (void)b;
  (void)out;
  (void)misuse;
  __trap();
#endif
}

}  // namespace

const char* product_by_columns(const Half* a, const Half* b, float* out, Misuse misuse) {
  return launch(warpgroup_kernel<Half, false>, 1, 128, 128 * 128, nullptr, a, b, out, misuse);
}
template <typename T>
const char* product_by_rows(const T* a, const T* b, float* out) {
  return launch(warpgroup_kernel<T, true>, 1, 128, 64 * 128, nullptr, a, b, out, Misuse::kNone);
}
template const char* product_by_rows(const Half*, const Half*, float*);
template const char* product_by_rows(const BFloat16*, const BFloat16*, float*);

}  // namespace ikattn::sample
