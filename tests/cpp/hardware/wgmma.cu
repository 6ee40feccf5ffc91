// Each form of wgmma that Hopper's kernels use, of operands that TMA copied, alone and on small
// integers, whose sums are exact: tells which one is wrong where a kernel is. Exits with 1 if one
// is.
//
//   nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -Icsrc -Icsrc/include -Itests/cpp
//     tests/cpp/hardware/wgmma.cu -o wgmma
#include <cstdio>

#include "attention/cuda/hopper/pipeline.h"
#include "hardware/managed.h"

namespace ikattn::cuda {
namespace {

enum class Form { kByColumns, kByColumnsBothShared, kByRows };

// out [128][N] = a [128][K] b; b lies [N][K]. By rows out += a b, and b lies [K][N].
template <typename T, Form kForm, int N, int K>
__global__ void __launch_bounds__(kProductThreads, 1)
    product_kernel(float* out, const __grid_constant__ RowMap left_rows,
                   const __grid_constant__ RowMap right_rows) {
#if IKATTN_WARPGROUP_CODE
  constexpr bool kIsByRows = kForm == Form::kByRows;
  constexpr int kRows = kIsByRows ? K : N, kColumns = kIsByRows ? N : K;
  using Left = Boxes<kWarpgroupRows, K>;
  using Right = Boxes<kRows, kColumns>;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int row0 = warp * 16 + g;
  const uint32_t left = shared_address(dynamic_shared<unsigned char>());
  const uint32_t right = left + Left::kBytes;
  const TileBarriers<1> barriers(right + Right::kBytes);
  const uint32_t copied = barriers.item_full(0);
  if (threadIdx.x == 0) {
    barrier_arrive(copied, Left::kBytes + Right::kBytes);
    Left::copy(left, left_rows, 0, 0, 0, copied);
    Right::copy(right, right_rows, 0, 0, 0, copied);
  }
  barrier_wait(copied, 0);
  [[maybe_unused]] uint32_t held[K / 16][4];
  load_left<K>(held, left);
  const auto place_of = [&](int i) {
    return (row0 + i % 4 / 2 * 8) * N + i / 4 * 8 + 2 * t + i % 2;
  };
  float sums[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) sums[i] = out[place_of(i)];
  wgmma_fence();
  if constexpr (kForm == Form::kByRows) {
    begin_by_rows<T, K, N>(reinterpret_cast<float (&)[N / kBoxColumns][32]>(sums), held, right);
  } else if constexpr (kForm == Form::kByColumns) {
    begin_by_columns<T, N, K>(sums, held, right);
  } else {
    const uint32_t warpgroup = __shfl_sync(0xffffffffu, warp / 4, 0);
    begin_by_columns<T, Left, Right>(sums, left + warpgroup * (64 * 128), right);
  }
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    out[place_of(i)] = sums[i];
  }
#else
  (void)out;
  (void)left_rows;
  (void)right_rows;
  __trap();
#endif
}

template <typename T, Form kForm, int N, int K>
bool is_right(const char* name) {
  constexpr int kRows = kWarpgroupRows;
  T *a = take_managed<T>(kRows * K), *b = take_managed<T>(N * K);
  float *out = take_managed<float>(kRows * N), *before = take_managed<float>(kRows * N);
  uint32_t seed = 1;
  const auto draw = [&] {
    seed = seed * 1664525 + 1013904223;
    return from_float<T>(static_cast<float>(seed >> 29) - 4);
  };
  for (int i = 0; i < kRows * K; ++i) a[i] = draw();
  for (int i = 0; i < N * K; ++i) b[i] = draw();
  for (int i = 0; i < kRows * N; ++i) out[i] = before[i] = to_float(draw());
  constexpr bool kIsByRows = kForm == Form::kByRows;
  constexpr int kRightRows = kIsByRows ? K : N;
  constexpr int64_t kRightColumns = kIsByRows ? N : K;
  RowMap left, right;
  const char* error = map_rows(left, a, {1, 1, kRows, K}, {0, 0, K, 1}, kRows);
  if (error == nullptr) {
    error =
        map_rows(right, b, {1, 1, kRightRows, kRightColumns}, {0, 0, kRightColumns, 1}, kRightRows);
  }
  if (error == nullptr) {
    error =
        launch(product_kernel<T, kForm, N, K>, dim3(1), dim3(kProductThreads),
               (kRows + N) * K * sizeof(T) + TileBarriers<1>::kBytes, Stream{}, out, left, right);
  }
  if (error == nullptr) {
    const cudaError_t status = cudaDeviceSynchronize();
    if (status != cudaSuccess) error = cudaGetErrorString(status);
  }
  int wrong = 0;
  for (int i = 0; error == nullptr && i < kRows * N; ++i) {
    float sum = kIsByRows ? before[i] : 0;
    for (int k = 0; k < K; ++k) {
      const T other = b[kIsByRows ? k * N + i % N : i % N * K + k];
      sum += to_float(a[i / N * K + k]) * to_float(other);
    }
    wrong += sum != out[i];
  }
  std::printf("%-23s N %3d, K %3d: %d of %d wrong%s%s\n", name, N, K, wrong, kRows * N,
              error == nullptr ? "" : "; ", error == nullptr ? "" : error);
  return error == nullptr && wrong == 0;
}

// Multiplies integers of 8 bits, K of them on the inner axis: by columns alone, of a in registers.
// Two integers are a column of 16 bits.
template <int N, int K>
__global__ void __launch_bounds__(kProductThreads, 1)
    int8_kernel(int32_t* out, const __grid_constant__ RowMap left_rows,
                const __grid_constant__ RowMap right_rows) {
#if IKATTN_WARPGROUP_CODE
  using Left = Boxes<kWarpgroupRows, K / 2>;
  using Right = Boxes<N, K / 2>;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const uint32_t left = shared_address(dynamic_shared<unsigned char>());
  const uint32_t right = left + Left::kBytes;
  const TileBarriers<1> barriers(right + Right::kBytes);
  const uint32_t copied = barriers.item_full(0);
  if (threadIdx.x == 0) {
    barrier_arrive(copied, Left::kBytes + Right::kBytes);
    Left::copy(left, left_rows, 0, 0, 0, copied);
    Right::copy(right, right_rows, 0, 0, 0, copied);
  }
  barrier_wait(copied, 0);
  uint32_t held[K / 32][4];
  load_left<K / 2>(held, left);
  int32_t sums[N / 2];
  wgmma_fence();
  begin_int8<N, K / 2>(sums, held, right);
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    out[(warp * 16 + g + i % 4 / 2 * 8) * N + i / 4 * 8 + 2 * t + i % 2] = sums[i];
  }
#else
  (void)out;
  (void)left_rows;
  (void)right_rows;
  __trap();
#endif
}

template <int N, int K>
bool is_right_in_int8(const char* name) {
  constexpr int kRows = kWarpgroupRows;
  int8_t *a = take_managed<int8_t>(kRows * K), *b = take_managed<int8_t>(N * K);
  int32_t* out = take_managed<int32_t>(kRows * N);
  uint32_t seed = 1;
  const auto draw = [&] {
    seed = seed * 1664525 + 1013904223;
    return static_cast<int8_t>(seed >> 24);
  };
  for (int i = 0; i < kRows * K; ++i) a[i] = draw();
  for (int i = 0; i < N * K; ++i) b[i] = draw();
  RowMap left, right;
  const char* error = map_rows(left, a, {1, 1, kRows, K / 2}, {0, 0, K / 2, 1}, kRows);
  if (error == nullptr) error = map_rows(right, b, {1, 1, N, K / 2}, {0, 0, K / 2, 1}, N);
  if (error == nullptr) {
    error = launch(int8_kernel<N, K>, dim3(1), dim3(kProductThreads),
                   (kRows + N) * K + TileBarriers<1>::kBytes, Stream{}, out, left, right);
  }
  if (error == nullptr) {
    const cudaError_t status = cudaDeviceSynchronize();
    if (status != cudaSuccess) error = cudaGetErrorString(status);
  }
  int wrong = 0;
  for (int i = 0; error == nullptr && i < kRows * N; ++i) {
    int32_t sum = 0;
    for (int k = 0; k < K; ++k) sum += int32_t{a[i / N * K + k]} * b[i % N * K + k];
    wrong += sum != out[i];
  }
  std::printf("%-23s N %3d, K %3d: %d of %d wrong%s%s\n", name, N, K, wrong, kRows * N,
              error == nullptr ? "" : "; ", error == nullptr ? "" : error);
  return error == nullptr && wrong == 0;
}

template <typename T>
bool are_right() {
  return is_right<T, Form::kByColumns, 128, 64>("by columns") &
         is_right<T, Form::kByColumns, 128, 128>("by columns") &
         is_right<T, Form::kByColumns, 64, 64>("by columns") &
         is_right<T, Form::kByColumns, 64, 128>("by columns") &
         is_right<T, Form::kByColumnsBothShared, 64, 64>("by columns, both shared") &
         is_right<T, Form::kByColumnsBothShared, 64, 128>("by columns, both shared") &
         is_right<T, Form::kByRows, 64, 64>("by rows") &
         is_right<T, Form::kByRows, 64, 128>("by rows") &
         is_right<T, Form::kByRows, 128, 64>("by rows") &
         is_right<T, Form::kByRows, 128, 128>("by rows");
}

}  // namespace
}  // namespace ikattn::cuda

int main() {
  std::puts("float16");
  const bool half = ikattn::cuda::are_right<ikattn::Half>();
  std::puts("bfloat16");
  const bool bfloat16 =
      ikattn::cuda::are_right<ikattn::BFloat16>() &
      ikattn::cuda::is_right<ikattn::BFloat16, ikattn::cuda::Form::kByColumns, 8, 64>("by columns");
  std::puts("int8");
  const bool int8 = ikattn::cuda::is_right_in_int8<128, 128>("a in registers");
  return half & bfloat16 & int8 ? 0 : 1;
}
