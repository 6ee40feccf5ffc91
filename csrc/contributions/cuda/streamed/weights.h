// The weights of a tile, of all heads, in shared memory, and their product with a key's factor.
// They are Half over 2^-15, so that a weight has all its 11 bits down to 2^-29.
//
// A Tile says where they lie: place(key, head, n), the 16 bytes of the n-th eight queries, and
// of_part(place, p), the same of the p-th of the kSplits operands that a weight is split into. It
// has kQueries, kChunks = kQueries / 8, and kHeads = 16 kHeadTiles.
#pragma once

#include "contributions/cuda/streamed/scores.h"
#include "support/cuda/warps.h"

namespace ikattn::cuda {
namespace {

constexpr float kWeightScale = 0x1p15f;  // scale of weights in Half

// The place of a block's tile.
struct PlaceOfTile {
  int64_t b, q0, j0;
};

// Returns the smallest weight of a key that is not zero, over 2^-15. It must not be lost for a key
// whose factor is not finite: a query that weighs such a key is not finite either.
__device__ __forceinline__ float smallest_weight(const StreamedParams& params, int64_t b,
                                                 int64_t j) {
  bool is_finite = true;
  for (int variant = 0; variant < params.variants; ++variant) {
    const float* units = variant == 0   ? params.units[0]
                         : variant == 1 ? params.units[1]
                                        : params.units[2];
    const float unit = units[b * params.S + min(j, params.S - 1)];
    is_finite = is_finite && unit - unit == 0;
  }
  return is_finite ? 0.0f : 0x1p-24f;
}

// Puts two neighbouring queries' weights of a head and key, over 2^-15, to where they belong.
template <typename Tile, int kSplits>
__device__ __forceinline__ void store_weights(Shared<unsigned char> weights, uint32_t place,
                                              float x, float y) {
  const uint32_t packed = pack_f16x2(x, y);
  Shared<uint32_t> to = shared_cast<uint32_t>(weights + place);
  to[0] = packed;
  if constexpr (kSplits == 2) {
    const float2 leading = unpack<Half>(packed);
    Shared<uint32_t> rest = shared_cast<uint32_t>(weights + Tile::of_part(place, 1));
    rest[0] = pack_f16x2(x - leading.x, y - leading.y);
  }
}

// Makes the weights of a head and 32 queries (where a tile has fewer, 16), from the q0-th of the
// block on, by a warp.
template <typename T, typename Tile, int kSplits>
__device__ __forceinline__ void make_weights(const StreamedParams& params, const PlaceOfTile& at,
                                             int h, int q0, uint32_t visible,
                                             const float (&smallest)[2],
                                             Shared<unsigned char> weights) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  constexpr int kCount = Tile::kChunks < kTiles ? Tile::kChunks : kTiles;
  float score[kCount][4] = {};
  multiply_rows<T>(params, at.b, h, at.q0 + q0, at.j0, score);
  q0 += unknown_to_compiler(0);  // or addresses of rows would be in registers before their scores
  const int64_t first_row = (at.b * params.H + h) * params.L;
  const KeyNumbers low(params, at.b, h, at.j0 + g), high(params, at.b, h, at.j0 + g + 8);
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int64_t i = at.q0 + q0 + 8 * n + 2 * t + c;
      const float4 row =
          load_vector<float4>(params.rows + (first_row + min(i, params.L - 1)) * kRowNumbers);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float& entry = score[n][2 * r + c];
        const bool seen = (visible >> (4 * n + 2 * r + c) & 1) != 0;
        const float offset = offset_of(params, at.b, h, i, at.j0 + g + 8 * r);
        const PairTerm term = pair_term(params, entry, row.x, r == 0 ? low : high, seen, offset);
        const float weight = weight_of(params, term, row);
        if (params.own != nullptr && i < params.L && at.j0 + g + 8 * r == i + params.diagonal) {
          params.own[first_row + i] = weight;
        }
        const float scaled = weight * kWeightScale;
        entry = weight > 0 ? fmaxf(scaled, smallest[r]) : scaled;  // NaN stays
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      store_weights<Tile, kSplits>(weights, Tile::place(g + 8 * r, h, q0 / 8 + n) + 4 * t,
                                   score[n][2 * r], score[n][2 * r + 1]);
    }
  }
  __syncwarp();  // products follow
}

// Stores zeros in the place of heads that are not there.
template <typename Tile, int kSplits>
__device__ __forceinline__ void clear_weights(int h, Shared<unsigned char> weights) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int n = 0; n < Tile::kChunks; ++n) {
    for (int r = 0; r < 2; ++r) {
      store_weights<Tile, kSplits>(weights, Tile::place(g + 8 * r, h, n) + 4 * t, 0, 0);
    }
  }
}

// A key's transposed factor: the registers of tiles (n, k) of 8 rows and 16 heads.
template <int kHeadTiles, int kSplits>
struct KeyFactor {
  uint2 part[kSplits][2 * kHeadTiles][kHeadTiles];

  __device__ __forceinline__ explicit KeyFactor(const uint32_t* fragments) {
    const int lane = threadIdx.x % 32;
    int tile = 0;
#pragma unroll
    for (int p = 0; p < kSplits; ++p) {
#pragma unroll
      for (int n = 0; n < 2 * kHeadTiles; ++n) {
#pragma unroll
        for (int k = n / 2; k < kHeadTiles; ++k, ++tile) {
          part[p][n][k] = load_vector<uint2>(fragments + tile * 64 + lane * 2);
        }
      }
    }
  }
};

// Computes sums[n] of the m-th 16 queries and 8 rows of the factor, over all heads. Products of two
// small parts are below float32's digits.
template <typename Tile, int kHeadTiles, int kSplits>
__device__ __forceinline__ void multiply_factor(const KeyFactor<kHeadTiles, kSplits>& factor,
                                                uint32_t weights, int key, int m,
                                                float (&sums)[2 * kHeadTiles][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int p = kSplits - 1; p >= 0; --p) {
#pragma unroll
    for (int k = 0; k < kHeadTiles; ++k) {
      uint32_t a[4];
      const int head = 16 * k + lane / 16 * 8 + lane % 8, n = 2 * m + lane / 8 % 2;
      ldmatrix_x4_trans(a, weights + Tile::of_part(Tile::place(key, head, n), p));
#pragma unroll
      for (int q = kSplits - 1 - p; q >= 0; --q) {
#pragma unroll
        for (int row = 0; row <= 2 * k + 1; ++row) {
          const uint2& b = factor.part[q][row][k];
          mma_m16n8k16<Half>(sums[row], a, b.x, b.y);
        }
      }
    }
  }
}

}  // namespace
}  // namespace ikattn::cuda
