// The way back from the norms |R_j a_ij| to the weights of all heads, and to the keys as sums of
// a_ij a_ij^T. A block owns 16 keys and goes through the queries, 32 at a time, so that every sum
// has one order. Weights are made as pairs.cu makes them. Then each warp takes some keys, 16
// queries at a time: directions R a / n, their product with R, heads by queries, and a product of
// weights, heads by queries, with themselves. What the weights' gradients are goes where the
// weights were.
#include "contributions/cuda/pairs.h"
#include "contributions/cuda/streamed/weights.h"
#include "support/cuda/warps.h"

namespace ikattn::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// Four bytes for each key, head and query: a weight as one or two operands of Half, and then its
// gradient. Those of a key, a head and 16 queries lie in 64 bytes of their own.
template <int kHeadTiles>
struct GradientTile {
  static constexpr int kQueries = static_cast<int>(kStripRows), kChunks = kQueries / 8;
  static constexpr int kHeads = 16 * kHeadTiles;
  static constexpr int kFragments = static_cast<int>(fragment_tiles(kHeadTiles));
  static constexpr int64_t kBytes = int64_t{kStreamedKeys} * kHeads * kQueries * 4;

  __device__ static __forceinline__ uint32_t place(int key, int head, int n) {
    return slot(key, head, n / 2 * 4 + n % 2);
  }
  __device__ static __forceinline__ uint32_t of_part(uint32_t place, int p) {
    return place ^ static_cast<uint32_t>(p * 32);
  }
  __device__ static __forceinline__ uint32_t gradient(int key, int head, int query) {
    return slot(key, head, query / 4) + static_cast<uint32_t>(query % 4 * 4);
  }

 private:
  // Returns the place of 16 bytes, swizzled so that neighbouring keys, and neighbouring heads, lie
  // in different banks.
  __device__ static __forceinline__ uint32_t slot(int key, int head, int n) {
    return static_cast<uint32_t>((key * kHeads + head) * kQueries * 4 +
                                 (n ^ ((key + head) & 7)) * 16);
  }
};

// Directions of 16 queries and a key in a lane: [r] is of query g + 8 r.
template <int kHeadTiles, int kSplits>
struct Directions {
  uint32_t left[kSplits][kHeadTiles][4];  // R a / n, as left operands
  float scale[2] = {};                    // g, times the unit of the factor
  float slope[2] = {};                    // g / |R a|, of R and a as operands have them
};

// Numbers of a key that a warp's lanes hold.
struct OwnKey {
  int place = 0;  // in the tile
  int64_t token = 0, j = 0;
  float unit = 0, broken = 0;  // 0, or NaN where the factor is not finite
  bool counts = false;
};

__device__ __forceinline__ OwnKey own_key(const StreamedGradientParams& params,
                                          const PlaceOfTile& at, int place) {
  OwnKey key;
  key.place = place;
  key.j = at.j0 + place;
  key.token = at.b * params.S + key.j;
  const float unit = params.units[0][key.token];
  key.broken = unit - unit;
  key.unit = unit - unit == 0 ? unit : 1.0f;
  key.counts = unit != 0 && !is_padding(params.key_padding, at.b, key.j);
  return key;
}

// Makes the directions of 16 queries from the i-th on; sums: R a.
template <int kHeadTiles, int kSplits>
__device__ __forceinline__ void make_directions(const StreamedGradientParams& params, int64_t b,
                                                int64_t i, const OwnKey& key,
                                                float (&sums)[2 * kHeadTiles][4],
                                                Directions<kHeadTiles, kSplits>& out) {
  const int g = threadIdx.x % 32 / 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t query = i + 8 * r + g;
    float square = 0;
#pragma unroll
    for (int n = 0; n < 2 * kHeadTiles; ++n) {
      square += sums[n][2 * r] * sums[n][2 * r] + sums[n][2 * r + 1] * sums[n][2 * r + 1];
    }
    square = sum_of_lanes<4>(square);
    const bool counts = square != 0 && key.counts &&
                        query < min(params.L, params.i0 + params.queries) &&
                        !is_padding(params.query_padding, b, query);
    const float inverse = counts ? 1 / sqrtf(square) : 0.0f;
    float incoming = 0;
    if (counts) {
      const int64_t* stride = params.grad_norms.stride;
      incoming =
          static_cast<const float*>(
              params.grad_norms
                  .data)[b * stride[0] + (query - params.i0) * stride[1] + key.j * stride[2]] +
          key.broken;
    }
    out.scale[r] = incoming * key.unit;
    out.slope[r] = incoming * inverse;
#pragma unroll
    for (int n = 0; n < 2 * kHeadTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& sum = sums[n][2 * r + c];
        sum = counts ? sum * inverse : 0.0f;
      }
      const uint32_t packed = pack_f16x2(sums[n][2 * r], sums[n][2 * r + 1]);
      out.left[0][n / 2][n % 2 * 2 + r] = packed;
      if constexpr (kSplits == 2) {
        const float2 leading = unpack<Half>(packed);
        out.left[1][n / 2][n % 2 * 2 + r] =
            pack_f16x2(sums[n][2 * r] - leading.x, sums[n][2 * r + 1] - leading.y);
      }
    }
  }
}

// Computes sums[n] of 16 queries and 8 heads, over the rows of the factor: R^T times directions.
template <int kHeadTiles, int kSplits>
__device__ __forceinline__ void multiply_reversed(const uint32_t* fragments,
                                                  const Directions<kHeadTiles, kSplits>& directions,
                                                  float (&sums)[2 * kHeadTiles][4]) {
  constexpr int kCount = static_cast<int>(fragment_tiles(kHeadTiles));
  const uint32_t* own = fragments + threadIdx.x % 32 * 2;
  int tile = 0;
#pragma unroll
  for (int n = 0; n < 2 * kHeadTiles; ++n) {
#pragma unroll
    for (int k = 0; k <= n / 2; ++k, ++tile) {
#pragma unroll
      for (int q = kSplits - 1; q >= 0; --q) {
        const uint2 right = load_vector<uint2>(own + (q * kCount + tile) * 64);
#pragma unroll
        for (int p = kSplits - 1 - q; p >= 0; --p) {
          mma_m16n8k16<Half>(sums[n], directions.left[p][k], right.x, right.y);
        }
      }
    }
  }
}

// Returns the largest power of two that keeps numbers up to `largest` in Half, and one over it.
__device__ __forceinline__ float2 half_scale(float largest) {
  const bool has_size = largest > 0 && largest - largest == 0;
  const int exponent = has_size ? max(ilogbf(largest), -100) : 14;
  return make_float2(ldexpf(1.0f, 14 - exponent), ldexpf(1.0f, exponent - 14));
}

// Adds to totals[k][n] of 16 and 8 heads the sum over the m-th 16 queries of slope a a^T. The left
// operand is slope a, over a power of two of its own; the right one a as it lies.
template <typename Tile, int kHeadTiles, int kSplits>
__device__ __forceinline__ void add_outer(uint32_t weights, int key, int m, const float (&slope)[2],
                                          float (&totals)[kHeadTiles][2 * kHeadTiles][4]) {
  const int lane = threadIdx.x % 32, t = lane % 4;
  uint32_t right[kSplits][kHeadTiles][4], left[kSplits][4];
#pragma unroll
  for (int p = 0; p < kSplits; ++p) {
#pragma unroll
    for (int k = 0; k < kHeadTiles; ++k) {
      const int head = 16 * k + lane / 8 % 2 * 8 + lane % 8;
      ldmatrix_x4(right[p][k],
                  weights + Tile::of_part(Tile::place(key, head, 2 * m + lane / 16), p));
    }
  }
  float slopes[2][2];  // slopes of queries 2 t + c + 8 half, from the lanes that have them
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      slopes[half][c] = __shfl_sync(0xffffffffu, slope[half], 8 * t + 4 * c);
    }
  }
#pragma unroll
  for (int k = 0; k < kHeadTiles; ++k) {
    float scaled[4][2], largest = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 weight = unpack<Half>(right[0][k][i]);
      if constexpr (kSplits == 2) {
        const float2 rest = unpack<Half>(right[1][k][i]);
        weight.x += rest.x;
        weight.y += rest.y;
      }
      scaled[i][0] = slopes[i / 2][0] * weight.x;
      scaled[i][1] = slopes[i / 2][1] * weight.y;
      largest = fmaxf(largest, fmaxf(fabsf(scaled[i][0]), fabsf(scaled[i][1])));
    }
    const float2 scale = half_scale(max_of_lanes(largest));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = scaled[i][0] * scale.x, y = scaled[i][1] * scale.x;
      left[0][i] = pack_f16x2(x, y);
      if constexpr (kSplits == 2) {
        const float2 leading = unpack<Half>(left[0][i]);
        left[1][i] = pack_f16x2(x - leading.x, y - leading.y);
      }
    }
#pragma unroll
    for (int n = 0; n < 2 * kHeadTiles; ++n) {
      float sums[4] = {};
#pragma unroll
      for (int q = kSplits - 1; q >= 0; --q) {
#pragma unroll
        for (int p = kSplits - 1 - q; p >= 0; --p) {
          const uint32_t (&of_weights)[4] = right[q][n / 2];
          mma_m16n8k16<Half>(sums, left[p], of_weights[n % 2], of_weights[n % 2 + 2]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) totals[k][n][i] += sums[i] * scale.y;
    }
  }
}

// Stores the sums in the key's matrix.
template <int kHeadTiles>
__device__ __forceinline__ void store_outer(const StreamedGradientParams& params, const OwnKey& key,
                                            const float (&totals)[kHeadTiles][2 * kHeadTiles][4]) {
  constexpr int kHeads = 16 * kHeadTiles;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const float scale = key.unit == 0 ? 0.0f : 1 / kWeightScale / key.unit;
  float* own = params.outer + (key.token * kHeads + g) * kHeads + 2 * t;
#pragma unroll
  for (int k = 0; k < kHeadTiles; ++k) {
#pragma unroll
    for (int n = 0; n < 2 * kHeadTiles; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float* at = own + (16 * k + 8 * r) * kHeads + 8 * n;
        float2 two = load_vector<float2>(at);
        two.x += totals[k][n][2 * r] * scale;
        two.y += totals[k][n][2 * r + 1] * scale;
        store_vector(at, two);
      }
    }
  }
}

// Computes all gradients of a key and the tile's queries, in a warp.
template <int kHeadTiles, int kSplits>
__device__ __forceinline__ void through_key(const StreamedGradientParams& params,
                                            const PlaceOfTile& at, int place,
                                            Shared<unsigned char> weights) {
  using OwnTile = GradientTile<kHeadTiles>;
  constexpr int kWords = kSplits * OwnTile::kFragments * 64;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float totals[kHeadTiles][2 * kHeadTiles][4] = {};
#pragma unroll 1
  for (int m = 0; m < OwnTile::kQueries / 16; ++m) {
    // Unknown to the compiler, the key's numbers are computed anew in each round, and take no
    // registers between.
    const int own = place + static_cast<int>(unknown_to_compiler(0));
    const OwnKey key = own_key(params, at, own);
    Directions<kHeadTiles, kSplits> directions;
    {
      const KeyFactor<kHeadTiles, kSplits> factor(params.fragments[0] + key.token * kWords);
      float sums[2 * kHeadTiles][4] = {};
      multiply_factor<OwnTile>(factor, shared_address(weights), place, m, sums);
      make_directions(params, at.b, at.q0 + 16 * m, key, sums, directions);
    }
    if (params.outer != nullptr) {
      add_outer<OwnTile, kHeadTiles, kSplits>(shared_address(weights), place, m, directions.slope,
                                              totals);
    }
    if (params.grad != nullptr) {
      float sums[2 * kHeadTiles][4] = {};
      multiply_reversed(params.reversed + key.token * kWords, directions, sums);
      __syncwarp();  // all lanes have read these weights
#pragma unroll
      for (int n = 0; n < 2 * kHeadTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int query = 16 * m + 8 * (i / 2) + g, head = 8 * n + 2 * t + i % 2;
          shared_cast<float>(weights + OwnTile::gradient(place, head, query))[0] =
              sums[n][i] * directions.scale[i / 2];
        }
      }
    }
    __syncwarp();  // products follow
  }
  if (params.outer != nullptr) store_outer<kHeadTiles>(params, own_key(params, at, place), totals);
}

// Stores the gradients of the tile's weights, or zeros, 16 keys of a row side by side.
template <typename Tile>
__device__ __forceinline__ void store_gradients(const StreamedGradientParams& params,
                                                const PlaceOfTile& at, bool is_seen,
                                                Shared<unsigned char> gradients) {
  const int key = threadIdx.x % kStreamedKeys;
  if (at.j0 + key >= params.keys) return;
  const int64_t rows = min(int64_t{Tile::kQueries}, params.i0 + params.queries - at.q0);
  for (int index = threadIdx.x / kStreamedKeys; index < params.H * Tile::kQueries;
       index += kThreads / kStreamedKeys) {
    const int h = index / Tile::kQueries, query = index % Tile::kQueries;
    if (query >= rows) continue;
    float* to = params.grad +
                ((at.b * params.H + h) * params.queries + at.q0 - params.i0 + query) * params.keys +
                at.j0 + key;
    const float x =
        is_seen ? shared_cast<float>(gradients + Tile::gradient(key, h, query))[0] : 0.0f;
    *to = params.is_first ? x : *to + x;
  }
}

// Returns the place of the tile from query q0 on. Made anew for each, or it would stay in
// registers.
__device__ __forceinline__ PlaceOfTile place_of_block(const StreamedGradientParams& params,
                                                      int64_t q0) {
  const int64_t key_tiles = (params.keys + kStreamedKeys - 1) / kStreamedKeys;
  const int64_t block = blockIdx.x + unknown_to_compiler(0);
  return {block / key_tiles, q0, block % key_tiles * kStreamedKeys};
}

// Dynamic shared memory: weights, then their gradients, [key][head][query].
template <typename T, int kHeadTiles, int kSplits>
__global__ void __launch_bounds__(kThreads, 2)
    streamed_pair_gradient_kernel(StreamedGradientParams params) {
  using OwnTile = GradientTile<kHeadTiles>;
  Shared<unsigned char> weights = dynamic_shared<unsigned char>();
  const int g = threadIdx.x % 32 / 4, warp = threadIdx.x / 32;
#pragma unroll 1
  for (int64_t q0 = params.i0; q0 < params.i0 + params.queries; q0 += OwnTile::kQueries) {
    const PlaceOfTile at = place_of_block(params, q0);
    const uint32_t visible = visible_pairs(params, at.b, at.q0, at.j0);
    const bool is_seen = __syncthreads_or(visible != 0) != 0;
    if (is_seen) {
      const float smallest[2] = {smallest_weight(params, at.b, at.j0 + g),
                                 smallest_weight(params, at.b, at.j0 + g + 8)};
#pragma unroll 1
      for (int h = warp; h < OwnTile::kHeads; h += kWarps) {
        if (h < params.H) {
          make_weights<T, OwnTile, kSplits>(params, at, h, 0, visible, smallest, weights);
        } else {
          clear_weights<OwnTile, kSplits>(h, weights);
        }
      }
      __syncthreads();
#pragma unroll 1
      for (int key = warp; key < kStreamedKeys; key += kWarps) {
        if (at.j0 + key < params.S) through_key<kHeadTiles, kSplits>(params, at, key, weights);
      }
      __syncthreads();
    }
    if (params.grad != nullptr) store_gradients<OwnTile>(params, at, is_seen, weights);
  }
}

template <typename T, int kHeadTiles, int kSplits>
const char* launch_gradients(const StreamedGradientParams& params, Stream stream) {
  const int64_t key_tiles = (params.keys + kStreamedKeys - 1) / kStreamedKeys;
  return launch(streamed_pair_gradient_kernel<T, kHeadTiles, kSplits>,
                dim3(static_cast<unsigned>(params.B * key_tiles)), dim3(kThreads),
                GradientTile<kHeadTiles>::kBytes, stream, params);
}

template <typename T, int kSplits>
const char* launch_heads(const StreamedGradientParams& params, Stream stream) {
  return params.H <= 16 ? launch_gradients<T, 1, kSplits>(params, stream)
                        : launch_gradients<T, 2, kSplits>(params, stream);
}

}  // namespace

const char* streamed_pair_gradients(const StreamedGradientParams& params, Stream stream) {
  if (params.H > kMostStreamedHeads) return "there must be at most 32 heads";
  if (params.is_split) return launch_heads<Half, 2>(params, stream);
  return params.query.type == ElementType::kBFloat16 ? launch_heads<BFloat16, 1>(params, stream)
                                                     : launch_heads<Half, 1>(params, stream);
}

}  // namespace ikattn::cuda
