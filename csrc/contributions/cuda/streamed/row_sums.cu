// Computes the reference of every row's weights: the largest logit, and one over their sum. A block
// takes 32 queries of a head, and its warps share the keys; sums are added up in order.
#include "contributions/cuda/streamed/scores.h"

namespace ikattn::cuda {
namespace {

constexpr int kWarps = 4, kQueries = 8 * kTiles;

// Adds up a lane's queries over the keys of its warp.
template <typename T>
__device__ __forceinline__ void add_keys(const StreamedParams& params, int64_t b, int64_t h,
                                         int64_t q0, RunningSum (&sums)[kTiles][2]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32;
  float factor[kTiles][2];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int64_t i = min(q0 + 8 * n + 2 * t + c, params.L - 1);
      factor[n][c] = params.rows[((b * params.H + h) * params.L + i) * kRowNumbers];
    }
  }
  const int64_t end = params.is_causal ? min(params.S, q0 + kQueries) : params.S;
  for (int64_t j0 = warp * kStreamedKeys; j0 < end; j0 += kWarps * kStreamedKeys) {
    // Unknown to the compiler, the addresses of queries are computed anew for each tile, and take
    // no registers between.
    const int64_t q = q0 + unknown_to_compiler(0);
    const uint32_t visible = visible_pairs(params, b, q, j0, h);
    if (!__any_sync(0xffffffffu, visible != 0)) continue;
    float score[kTiles][4] = {};
    multiply_rows<T>(params, b, h, q, j0, score);
    const KeyNumbers low(params, b, h, j0 + g), high(params, b, h, j0 + g + 8);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint32_t own = visible >> (4 * n + c);
        const int64_t i = q + 8 * n + 2 * t + c, j = j0 + g;
        sums[n][c].add(pair_term(params, score[n][c], factor[n][c], low, own & 1,
                                 offset_of(params, b, h, i, j)));
        sums[n][c].add(pair_term(params, score[n][2 + c], factor[n][c], high, own >> 2 & 1,
                                 offset_of(params, b, h, i, j + 8)));
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kWarps * 32, 4) row_sum_kernel(StreamedParams params) {
  IKATTN_SHARED(float, parts, kWarps * kQueries * 3);
  const int t = threadIdx.x % 4, warp = threadIdx.x / 32;
  const int64_t query_tiles = (params.L + kQueries - 1) / kQueries;
  const int64_t head = blockIdx.x / query_tiles, b = head / params.H, h = head % params.H;
  const int64_t q0 = blockIdx.x % query_tiles * kQueries;
  RunningSum sums[kTiles][2];
  add_keys<T>(params, b, h, q0, sums);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      RunningSum& sum = sums[n][c];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {  // over the lanes g
        RunningSum other;
        other.largest = __shfl_xor_sync(0xffffffffu, sum.largest, step);
        other.low = __shfl_xor_sync(0xffffffffu, sum.low, step);
        other.sum = __shfl_xor_sync(0xffffffffu, sum.sum, step);
        sum.add(other);
      }
      if (threadIdx.x % 32 / 4 != 0) continue;
      const int at = (warp * kQueries + 8 * n + 2 * t + c) * 3;
      parts[at] = sum.largest;
      parts[at + 1] = sum.low;
      parts[at + 2] = sum.sum;
    }
  }
  __syncthreads();
  const int64_t i = q0 + threadIdx.x;
  if (threadIdx.x >= kQueries || i >= params.L) return;
  RunningSum total;
  for (int part = 0; part < kWarps; ++part) {
    RunningSum of_warp;
    const int at = (part * kQueries + static_cast<int>(threadIdx.x)) * 3;
    of_warp.largest = parts[at];
    of_warp.low = parts[at + 1];
    of_warp.sum = parts[at + 2];
    total.add(of_warp);
  }
  // A row that sees nothing is zero.
  const bool is_blind = total.largest == -INFINITY;
  float* row = params.rows + ((b * params.H + h) * params.L + i) * kRowNumbers;
  row[1] = is_blind ? 0.0f : total.largest;
  row[2] = is_blind ? total.sum : 1 / total.sum;
  row[3] = total.low;
}

}  // namespace

const char* streamed_row_sums(const StreamedParams& params, Stream stream) {
  const auto kernel =
      params.query.type == ElementType::kBFloat16 ? row_sum_kernel<BFloat16> : row_sum_kernel<Half>;
  const int64_t query_tiles = (params.L + kQueries - 1) / kQueries;
  return launch(kernel, dim3(static_cast<unsigned>(params.B * params.H * query_tiles)),
                dim3(kWarps * 32), 0, stream, params);
}

}  // namespace ikattn::cuda
