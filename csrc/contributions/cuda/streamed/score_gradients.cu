// Passes gradients of weights on to scores and to the keys' logits, through the normaliser of each
// row. A block takes 32 queries of a head, and its warps share the keys, twice: for the sum of
// weights times gradients, then for what is left of each. Sums are added up in order.
#include "contributions/cuda/streamed/scores.h"
#include "support/cuda/warps.h"

namespace ikattn::cuda {
namespace {

constexpr int kWarps = 4, kQueries = static_cast<int>(kStripRows);
static_assert(kQueries == 8 * kTiles);

// Rows of the block.
struct PlaceOfRows {
  int64_t b, h, q0;
};

// 16 keys and the block's queries, of a warp.
struct KeyTile {
  float score[kTiles][4] = {};
  uint32_t visible = 0;
  KeyNumbers key[2];
};

template <typename T>
__device__ __forceinline__ void make_tile(const StreamedGradientParams& params,
                                          const PlaceOfRows& at, int64_t j0, KeyTile& tile) {
  const int g = threadIdx.x % 32 / 4;
  multiply_rows<T>(params, at.b, at.h, at.q0, j0, tile.score);
  tile.key[0] = KeyNumbers(params, at.b, at.h, j0 + g);
  tile.key[1] = KeyNumbers(params, at.b, at.h, j0 + g + 8);
}

// A lane's pair (n, r, c) of a tile.
struct OwnPair {
  float weight = 0, slope = 0;  // the weight, and what it changes by with the score
  float grad = 0;
  float* to = nullptr;  // nullptr: there is no such pair
  bool is_hidden = true;
};

__device__ __forceinline__ OwnPair own_pair(const StreamedGradientParams& params,
                                            const PlaceOfRows& at, const KeyTile& tile, int64_t j0,
                                            int n, int r, int c) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int64_t i = at.q0 + 8 * n + 2 * t + c, j = j0 + g + 8 * r;
  OwnPair pair;
  if (i >= params.i0 + params.queries || j >= params.keys) return pair;
  const int64_t head = at.b * params.H + at.h;
  const float4 row = load_vector<float4>(params.rows + (head * params.L + i) * kRowNumbers);
  const float score = tile.score[n][2 * r + c];
  const bool seen = (tile.visible >> (4 * n + 2 * r + c) & 1) != 0;
  const PairTerm term = pair_term(params, score, row.x, tile.key[r], seen);
  pair.is_hidden = term.logit == -INFINITY;
  pair.weight = weight_of(params, term, row);
  pair.slope = pair.weight;
  if (params.is_implicit && !pair.is_hidden) {
    const float x = score * row.x * tile.key[r].factor;
    pair.slope = 2 * x * (exp_of((term.logit - row.y) + (term.low - row.w)) * row.z);
  }
  pair.to = params.grad + (head * params.queries + i - params.i0) * params.keys + j;
  pair.grad = *pair.to;
  return pair;
}

// Calls use(place, tile, j0) for the tiles of 16 keys that are this warp's and that some query
// sees.
template <typename T, typename Use>
__device__ __forceinline__ void for_each_tile(const StreamedGradientParams& params,
                                              const PlaceOfRows& at, const Use& use) {
  const int warp = threadIdx.x / 32;
  const int64_t end = params.is_causal ? min(params.keys, at.q0 + kQueries) : params.keys;
#pragma unroll 1
  for (int64_t j0 = warp * kStreamedKeys; j0 < end; j0 += kWarps * kStreamedKeys) {
    // Unknown to the compiler, the addresses of queries are computed anew for each tile, and take
    // no registers between.
    const PlaceOfRows own{at.b, at.h, at.q0 + unknown_to_compiler(0)};
    KeyTile tile;
    tile.visible = visible_pairs(params, own.b, own.q0, j0);
    if (!__any_sync(0xffffffffu, tile.visible != 0)) continue;
    make_tile<T>(params, own, j0, tile);
    use(own, tile, j0);
  }
}

// Computes delta[n][c]: over all keys, the sum of weights times gradients. parts
// [kWarps][kQueries].
template <typename T>
__device__ __forceinline__ void make_deltas(const StreamedGradientParams& params,
                                            const PlaceOfRows& at, Shared<float> parts,
                                            float (&delta)[kTiles][2]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32;
  for_each_tile<T>(params, at, [&](const PlaceOfRows& own, const KeyTile& tile, int64_t j0) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int index = 0; index < 4; ++index) {
        const OwnPair pair = own_pair(params, own, tile, j0, n, index / 2, index % 2);
        if (!pair.is_hidden) delta[n][index % 2] += pair.weight * pair.grad;
      }
    }
  });
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {  // over the lanes g
        delta[n][c] += __shfl_xor_sync(0xffffffffu, delta[n][c], step);
      }
      if (g == 0) parts[warp * kQueries + 8 * n + 2 * t + c] = delta[n][c];
    }
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      delta[n][c] = 0;
      for (int part = 0; part < kWarps; ++part) {
        delta[n][c] += parts[part * kQueries + 8 * n + 2 * t + c];
      }
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kWarps * 32, 4)
    score_gradient_kernel(StreamedGradientParams params) {
  IKATTN_SHARED(float, parts, kWarps* kQueries);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int64_t tiles = (params.queries + kQueries - 1) / kQueries;
  const int64_t head = blockIdx.x / tiles, part = blockIdx.x % tiles;
  const PlaceOfRows at{head / params.H, head % params.H, params.i0 + part * kQueries};
  float delta[kTiles][2] = {};
  make_deltas<T>(params, at, parts, delta);
  for_each_tile<T>(params, at, [&](const PlaceOfRows& own, const KeyTile& tile, int64_t j0) {
    float sums[2] = {};  // sums of the logits' gradients, [r]
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int index = 0; index < 4; ++index) {
        const int r = index / 2, c = index % 2;
        const OwnPair pair = own_pair(params, own, tile, j0, n, r, c);
        if (pair.to == nullptr) continue;
        // In a row that is NaN the weight of a hidden pair may be so, too.
        const float rest = pair.is_hidden ? 0.0f : pair.grad - delta[n][c];
        *pair.to = pair.slope * rest;
        sums[r] += pair.weight * rest;
      }
    }
    if (params.grad_logits == nullptr) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = sum_of_lanes<4>(sums[r]);
      const int64_t j = j0 + g + 8 * r;
      if (t == 0 && j < params.keys) params.grad_logits[blockIdx.x * params.keys + j] = sum;
    }
  });
}

}  // namespace

const char* streamed_score_gradients(const StreamedGradientParams& params, Stream stream) {
  const auto kernel = params.query.type == ElementType::kBFloat16 ? score_gradient_kernel<BFloat16>
                                                                  : score_gradient_kernel<Half>;
  const int64_t tiles = (params.queries + kQueries - 1) / kQueries;
  return launch(kernel, dim3(static_cast<unsigned>(params.B * params.H * tiles)), dim3(kWarps * 32),
                0, stream, params);
}

}  // namespace ikattn::cuda
