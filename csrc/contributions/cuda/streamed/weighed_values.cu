// Sums values that each query takes of all keys but its own, [B, H, L, d_v], for mixing ratios. A
// block takes 32 queries of a head and 64 columns. Its four warps make the weights of 64 keys, by
// 16, in float32, which then multiply the values on CUDA cores. Keys come in order.
#include "contributions/cuda/pairs.h"
#include "contributions/cuda/streamed/scores.h"

namespace ikattn::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kQueries = 8 * kTiles, kKeys = kStreamedKeys * kWarps, kColumns = 64;
constexpr int kPitch = kQueries + 4;             // pitch of weights, [key][query]
constexpr int kRows = 4, kLanes = kColumns / 4;  // a thread's queries; threads that share them

struct PlaceOfSums {
  int64_t b, h, q0, column;

  __device__ __forceinline__ explicit PlaceOfSums(const WeighedValueParams& params) {
    const int64_t query_tiles = (params.L + kQueries - 1) / kQueries;
    const int64_t columns = (params.d_v + kColumns - 1) / kColumns;
    int64_t index = blockIdx.x;
    column = index % columns * kColumns;
    index /= columns;
    q0 = index % query_tiles * kQueries;
    index /= query_tiles;
    h = index % params.H;
    b = index / params.H;
  }
};

// Puts the weights of 16 keys from j0 on, in a warp: zero where a key is the query's own or
// padding, NaN where it is not finite.
template <typename T>
__device__ __forceinline__ void put_weights(const WeighedValueParams& params, const PlaceOfSums& at,
                                            int64_t j0, uint32_t visible, Shared<float> weights) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float score[kTiles][4] = {};
  multiply_rows<T>(params, at.b, at.h, at.q0, j0, score);
  const int64_t first_row = (at.b * params.H + at.h) * params.L;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t j = j0 + g + 8 * r, key = min(j, params.S - 1);
    const KeyNumbers numbers(params, at.b, at.h, j);
    const bool counts = j < params.S && !is_padding(params.key_padding, at.b, j);
    const int64_t value_head = at.b * params.value_heads + at.h / (params.H / params.value_heads);
    const bool is_broken = params.broken[value_head * params.S + key] != 0;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int64_t i = at.q0 + 8 * n + 2 * t + c;
        const float4 row =
            load_vector<float4>(params.rows + (first_row + min(i, params.L - 1)) * kRowNumbers);
        const bool seen = (visible >> (4 * n + 2 * r + c) & 1) != 0;
        const PairTerm term = pair_term(params, score[n][2 * r + c], row.x, numbers, seen,
                                        offset_of(params, at.b, at.h, i, j));
        float weight = weight_of(params, term, row);
        if (j == i + params.diagonal) {
          if (at.column == 0 && i < params.L) params.own[first_row + i] = weight;
          weight = 0;
        }
        if (!counts) weight = 0;
        if (is_broken && weight != 0) weight = NAN;
        weights[(g + 8 * r) * kPitch + 8 * n + 2 * t + c] = weight;
      }
    }
  }
}

// Loads the values of the keys from j0 on, [key][column]; zeros in the place of missing ones.
__device__ __forceinline__ void load_values(const WeighedValueParams& params, const PlaceOfSums& at,
                                            int64_t j0, Shared<float> values) {
  const int64_t* stride = params.values.stride;
  const float* from = static_cast<const float*>(params.values.data) + at.b * stride[0] +
                      at.h / (params.H / params.value_heads) * stride[1];
  for (int index = threadIdx.x; index < kKeys * kColumns; index += kThreads) {
    const int64_t j = j0 + index / kColumns, column = at.column + index % kColumns;
    const bool there = j < params.S && column < params.d_v;
    values[index] = there ? from[j * stride[2] + column * stride[3]] : 0.0f;
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 3) weighed_value_kernel(WeighedValueParams params) {
  IKATTN_SHARED(float, weights, kKeys* kPitch);
  IKATTN_SHARED(float, values, kKeys* kColumns);
  PlaceOfSums at(params);
  const int warp = threadIdx.x / 32;
  const int query = threadIdx.x / kLanes * kRows, column = threadIdx.x % kLanes * 4;
  const int64_t end = params.is_causal ? min(params.S, at.q0 + kQueries) : params.S;
  float4 sums[kRows] = {};
  for (int64_t j0 = 0; j0 < end; j0 += kKeys) {
    const int64_t own_j0 = j0 + warp * kStreamedKeys;
    // Unknown to the compiler, the addresses of queries are computed anew for each tile, and take
    // no registers between.
    at.q0 += unknown_to_compiler(0);
    const uint32_t visible =
        own_j0 < params.S ? visible_pairs(params, at.b, at.q0, own_j0, at.h) : 0;
    // Hidden pairs of rows that are NaN are NaN, too; their sums begin at the first tile.
    if (__syncthreads_or(j0 == 0 || visible != 0) == 0) continue;
    put_weights<T>(params, at, own_j0, visible, weights + warp * kStreamedKeys * kPitch);
    load_values(params, at, j0, values);
    __syncthreads();
#pragma unroll 4
    for (int key = 0; key < kKeys; ++key) {
      const float4 weight = load_vector<float4>(weights + key * kPitch + query);
      const float4 value = load_vector<float4>(values + key * kColumns + column);
      const float of_row[kRows] = {weight.x, weight.y, weight.z, weight.w};
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        sums[m].x += of_row[m] * value.x;
        sums[m].y += of_row[m] * value.y;
        sums[m].z += of_row[m] * value.z;
        sums[m].w += of_row[m] * value.w;
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
    const int64_t i = at.q0 + query + m;
    if (i >= params.L) continue;
    float* row = params.sums + ((at.b * params.H + at.h) * params.L + i) * params.d_v;
    const float four[4] = {sums[m].x, sums[m].y, sums[m].z, sums[m].w};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (at.column + column + c < params.d_v) row[at.column + column + c] = four[c];
    }
  }
}

}  // namespace

const char* streamed_weighed_values(const WeighedValueParams& params, Stream stream) {
  const auto kernel = params.query.type == ElementType::kBFloat16 ? weighed_value_kernel<BFloat16>
                                                                  : weighed_value_kernel<Half>;
  const int64_t query_tiles = (params.L + kQueries - 1) / kQueries;
  const int64_t columns = (params.d_v + kColumns - 1) / kColumns;
  return launch(kernel, dim3(static_cast<unsigned>(params.B * params.H * query_tiles * columns)),
                dim3(kThreads), 0, stream, params);
}

}  // namespace ikattn::cuda
