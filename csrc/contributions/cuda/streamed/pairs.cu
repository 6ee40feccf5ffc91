// The norms |R_j a_ij| of 16 keys and 16 to 64 queries by a block. First each warp makes the
// weights of some heads, in Half, over 2^-15, so that a weight has all its 11 bits down to 2^-29.
// Then each takes some keys: a product of weights, queries by heads, and the transposed factor,
// heads by rows, whose squares add up to the norm.
#include "contributions/cuda/pairs.h"
#include "contributions/cuda/streamed/weights.h"
#include "support/cuda/warps.h"

namespace ikattn::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// kHeadTiles: 16 heads each; kSplits: split operands of Half of a weight, and of a factor.
template <int kHeadTiles, int kSplits>
struct Tile {
  static constexpr int kQueries = 64 / kSplits / (kHeadTiles > 2 ? 2 : 1), kChunks = kQueries / 8;
  static constexpr int kHeads = 16 * kHeadTiles;
  static constexpr int kPartBytes = kStreamedKeys * kHeads * kQueries * 2;
  static constexpr int kPitch = kStreamedKeys + 1;  // pitch of norms, [variant][query][key]
  static constexpr int kFragments = static_cast<int>(fragment_tiles(kHeadTiles));
  static constexpr int64_t shared_bytes(int variants) {
    return kSplits * kPartBytes + int64_t{variants} * kQueries * kPitch * 4;
  }

  // Returns the place of 16 bytes of the weights [key][head][query], the n-th eight queries:
  // rotated, and neighbouring keys, and neighbouring heads, lie in different banks.
  __device__ static __forceinline__ uint32_t place(int key, int head, int n) {
    const int turn = key + head / (8 / kChunks);
    return static_cast<uint32_t>((key * kHeads + head) * kQueries * 2 +
                                 ((n ^ turn) & (kChunks - 1)) * 16);
  }
  // Returns the same place of the p-th part.
  __device__ static __forceinline__ uint32_t of_part(uint32_t place, int p) {
    return place + static_cast<uint32_t>(p * kPartBytes);
  }
};

template <typename Tile>
__device__ __forceinline__ PlaceOfTile place_of_tile(const StreamedParams& params) {
  const int64_t key_tiles = (params.S + kStreamedKeys - 1) / kStreamedKeys;
  const int64_t query_tiles = (params.L + Tile::kQueries - 1) / Tile::kQueries;
  const int64_t of_queries = blockIdx.x / key_tiles;
  return {of_queries / query_tiles, of_queries % query_tiles * Tile::kQueries,
          blockIdx.x % key_tiles * kStreamedKeys};
}

// Computes the norms of a key and all queries of the block, in a warp.
template <typename Tile, int kHeadTiles, int kSplits>
__device__ __forceinline__ void make_norms(const uint32_t* fragments, float unit, uint32_t weights,
                                           int key, Shared<float> norms) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const KeyFactor<kHeadTiles, kSplits> factor(fragments);
#pragma unroll 1
  for (int m = 0; m < Tile::kQueries / 16; ++m) {
    float sums[2 * kHeadTiles][4] = {};
    multiply_factor<Tile>(factor, weights, key, m, sums);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float square = 0;
#pragma unroll
      for (int n = 0; n < 2 * kHeadTiles; ++n) {
        square += sums[n][2 * r] * sums[n][2 * r] + sums[n][2 * r + 1] * sums[n][2 * r + 1];
      }
      square = sum_of_lanes<4>(square);
      // A key without weight is nothing, whatever it holds.
      const float norm = square == 0 ? 0.0f : sqrtf(square) / kWeightScale * unit;
      if (t == 0) norms[(16 * m + 8 * r + g) * Tile::kPitch + key] = norm;
    }
    __syncwarp();  // products follow
  }
}

// Stores zeros where no pair of the block is seen, and NaN in the rows of queries that are not
// finite.
template <typename Tile>
__device__ __forceinline__ void fill_norms(const StreamedParams& params, const PlaceOfTile& at,
                                           Shared<float> norms) {
  if (threadIdx.x >= Tile::kQueries) return;
  const int64_t i = min(at.q0 + threadIdx.x, params.L - 1);
  float fill = 0;
  for (int64_t h = 0; h < params.H; ++h) {
    const float inverse = params.rows[((at.b * params.H + h) * params.L + i) * kRowNumbers + 2];
    if (inverse != inverse && !params.is_implicit) fill = inverse;
  }
  for (int variant = 0; variant < params.variants; ++variant) {
    for (int key = 0; key < kStreamedKeys; ++key) {
      norms[(variant * Tile::kQueries + threadIdx.x) * Tile::kPitch + key] = fill;
    }
  }
}

// Stores norms in the maps, 16 keys of a row side by side; zeros where query or key is padding.
template <typename Tile>
__device__ __forceinline__ void store_norms(const StreamedParams& params, const PlaceOfTile& at,
                                            Shared<const float> norms) {
  const int64_t j = at.j0 + threadIdx.x % kStreamedKeys;
  if (j >= params.S) return;
  const bool key_counts = !is_padding(params.key_padding, at.b, j);
  for (int query = threadIdx.x / kStreamedKeys; query < Tile::kQueries;
       query += kThreads / kStreamedKeys) {
    const int64_t i = at.q0 + query;
    if (i >= params.L) break;
    const bool counts = key_counts && !is_padding(params.query_padding, at.b, i);
#pragma unroll 1
    for (int variant = 0; variant < params.variants; ++variant) {
      const Array& out = variant == 0   ? params.norms[0]
                         : variant == 1 ? params.norms[1]
                                        : params.norms[2];
      const float norm =
          norms[(variant * Tile::kQueries + query) * Tile::kPitch + threadIdx.x % kStreamedKeys];
      static_cast<float*>(out.data)[at.b * out.stride[0] + i * out.stride[1] + j * out.stride[2]] =
          counts ? norm : 0.0f;
    }
  }
}

// Dynamic shared memory: weights [kSplits][key][head][query], then norms.
template <typename T, int kHeadTiles, int kSplits>
__global__ void __launch_bounds__(kThreads, kHeadTiles > 2 ? 1 : 2)
    streamed_pair_kernel(StreamedParams params) {
  using OwnTile = Tile<kHeadTiles, kSplits>;
  Shared<unsigned char> weights = dynamic_shared<unsigned char>();
  Shared<float> norms = shared_cast<float>(weights + kSplits * OwnTile::kPartBytes);
  const PlaceOfTile at = place_of_tile<OwnTile>(params);
  const int g = threadIdx.x % 32 / 4, warp = threadIdx.x / 32;
  constexpr int kCount = OwnTile::kChunks < kTiles ? OwnTile::kChunks : kTiles;
  constexpr int kRounds = OwnTile::kChunks / kCount;
  uint32_t visible[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    visible[round] = visible_pairs<kCount>(params, at.b, at.q0 + round * 8 * kCount, at.j0);
  }
  if (__syncthreads_or((visible[0] | visible[kRounds - 1]) != 0) != 0) {
    const float smallest[2] = {smallest_weight(params, at.b, at.j0 + g),
                               smallest_weight(params, at.b, at.j0 + g + 8)};
#pragma unroll 1
    for (int h = warp; h < OwnTile::kHeads; h += kWarps) {
      if (h < params.H) {
#pragma unroll 1
        for (int round = 0; round < kRounds; ++round) {
          uint32_t seen = round == 0 ? visible[0] : visible[kRounds - 1];
          const int q0 = round * 8 * kCount;
          if (params.mask_heads > 1) {
            seen = visible_pairs<kCount>(params, at.b, at.q0 + q0, at.j0, h);
          }
          make_weights<T, OwnTile, kSplits>(params, at, h, q0, seen, smallest, weights);
        }
      } else {
        clear_weights<OwnTile, kSplits>(h, weights);
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int index = warp; index < params.variants * kStreamedKeys; index += kWarps) {
      const int key = index % kStreamedKeys, variant = index / kStreamedKeys;
      const int64_t token = at.b * params.S + at.j0 + key;
      if (at.j0 + key >= params.S) continue;
      const uint32_t* fragments = variant == 0   ? params.fragments[0]
                                  : variant == 1 ? params.fragments[1]
                                                 : params.fragments[2];
      const float* units = variant == 0   ? params.units[0]
                           : variant == 1 ? params.units[1]
                                          : params.units[2];
      make_norms<OwnTile, kHeadTiles, kSplits>(
          fragments + token * kSplits * OwnTile::kFragments * 64, units[token],
          shared_address(weights), key, norms + variant * OwnTile::kQueries * OwnTile::kPitch);
    }
  } else {
    fill_norms<OwnTile>(params, at, norms);
  }
  __syncthreads();
  store_norms<OwnTile>(params, at, norms);
}

template <typename T, int kHeadTiles, int kSplits>
const char* launch_pairs(const StreamedParams& params, Stream stream) {
  using OwnTile = Tile<kHeadTiles, kSplits>;
  const int64_t key_tiles = (params.S + kStreamedKeys - 1) / kStreamedKeys;
  const int64_t query_tiles = (params.L + OwnTile::kQueries - 1) / OwnTile::kQueries;
  return launch(streamed_pair_kernel<T, kHeadTiles, kSplits>,
                dim3(static_cast<unsigned>(params.B * query_tiles * key_tiles)), dim3(kThreads),
                OwnTile::shared_bytes(params.variants), stream, params);
}

template <typename T, int kSplits>
const char* launch_heads(const StreamedParams& params, Stream stream) {
  return params.H <= 16   ? launch_pairs<T, 1, kSplits>(params, stream)
         : params.H <= 32 ? launch_pairs<T, 2, kSplits>(params, stream)
         : params.H <= 48 ? launch_pairs<T, 3, kSplits>(params, stream)
                          : launch_pairs<T, 4, kSplits>(params, stream);
}

}  // namespace

const char* streamed_pair_norms(const StreamedParams& params, Stream stream) {
  if (params.H > kMostNormHeads) return "there must be at most 64 heads";
  if (params.is_split) return launch_heads<Half, 2>(params, stream);
  return params.query.type == ElementType::kBFloat16 ? launch_heads<BFloat16, 1>(params, stream)
                                                     : launch_heads<Half, 1>(params, stream);
}

}  // namespace ikattn::cuda
