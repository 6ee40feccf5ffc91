// Pairs of 64 queries and 64 keys in the backward of short calls on Hopper: factors of both sides'
// gradients, from one score and one product with the incoming gradient.
#pragma once

#include "attention/cuda/hopper/short_tiles.h"
#include "attention/cuda/tensor_cores/epilogue_backward.h"
#include "support/cuda/transposed_products.h"

namespace ikattn::cuda {

constexpr int kChunkRows = 256;  // queries that a block has at a time
constexpr int kBackwardStages = 2;
constexpr uint32_t kUnitBytes = 32;  // numbers of a ShortUnit

// Layout of shared memory, in bytes.
template <typename T, int F, int V>
struct ShortBackwardLayout {
  using Queries = Boxes<kChunkRows, F>;
  using Gradients = Boxes<kChunkRows, V>;  // incoming
  using Factors = Boxes<kChunkRows, kStep>;
  using Tiles = KeyTiles<T, F, V, kStep>;
  using Barriers = TileBarriers<1, kBackwardStages>;
  static constexpr uint32_t kRowNumbers = kChunkRows * 4;
  static constexpr uint32_t kKeyNumbers = kStep * 4;

  static constexpr uint32_t kGradients = Queries::kBytes;
  // Factors of the keys' gradients, [query][key]: gradients of scores, and weights.
  static constexpr uint32_t kScoreGradients = kGradients + Gradients::kBytes;
  static constexpr uint32_t kWeights = kScoreGradients + Factors::kBytes;
  static constexpr uint32_t kTiles = kWeights + Factors::kBytes;  // [stage]
  // [3][kChunkRows]  normalizers, deltas and fits
  static constexpr uint32_t kRows = kTiles + kBackwardStages * Tiles::kStage;
  static constexpr uint32_t kKeys = kRows + 3 * kRowNumbers;  // [stage][2][kStep]  terms and scales
  // [16 queries each][kStep]  sums over these, of the gradients of logits
  static constexpr uint32_t kLogits = kKeys + kBackwardStages * 2 * kKeyNumbers;
  static constexpr uint32_t kLogitSums = kLogits + kChunkRows / 16 * kStep * 4;  // [kMostKeys]
  static constexpr int kMostKeys = 512;
  static constexpr uint32_t kBarriers = kLogitSums + kMostKeys * 4;
  static constexpr int64_t kBytes = kBarriers + Barriers::kBytes + 16 + kUnitBytes;

  // Barriers: the factors of a tile are there; they are read.
  static constexpr uint32_t kFactorsThere = kBarriers + Barriers::kBytes;
  static constexpr uint32_t kFactorsRead = kFactorsThere + 8;
  static constexpr uint32_t kUnit =
      kFactorsRead + 8;  // barrier where the multiplying warpgroups end a unit
};

namespace {

// A unit of a key head: 256 queries of one of the heads that share it, one after the other. Whoever
// copies tells the others by shared memory: no register holds it over the tiles.
struct ShortUnit {
  int i0, blocks;  // the first query, and how many 64 of them there are
  int tiles,
      before;  // tiles of kStep keys: that the unit passes, and that those before have passed
  int is_last;
  int bh;  // the head, of all batches'

  __device__ __forceinline__ ShortUnit(const AttentionParams& params, bool is_causal, int bk,
                                       int unit) {
    const auto queries = static_cast<int>(params.L);
    const auto all = static_cast<int>((params.S + kStep - 1) / kStep);
    const int chunks = (queries + kChunkRows - 1) / kChunkRows;
    const int chunk = unit % chunks;
    const auto met = [&](int of) {
      return is_causal ? min(all, (of + 1) * (kChunkRows / kStep)) : all;
    };
    i0 = chunk * kChunkRows;
    blocks = (min(kChunkRows, queries - i0) + 63) / 64;
    is_last = unit == count(params) - 1;
    // The last one passes all tiles, seen or not: it stores their gradients.
    tiles = is_last != 0 ? all : met(chunk);
    before = unit == 0 ? 0 : met(min(unit, chunks) - 1);
    bh = bk * (static_cast<int>(params.H) / static_cast<int>(params.key_heads)) + unit / chunks;
  }
  __device__ __forceinline__ explicit ShortUnit(Shared<const int> numbers)
      : i0(numbers[0]),
        blocks(numbers[1]),
        tiles(numbers[2]),
        before(numbers[3]),
        is_last(numbers[4]),
        bh(numbers[5]) {}
  __device__ __forceinline__ void tell(Shared<int> numbers) const {
    numbers[0] = i0;
    numbers[1] = blocks;
    numbers[2] = tiles;
    numbers[3] = before;
    numbers[4] = is_last;
    numbers[5] = bh;
  }
  // Returns the first 64 queries that see a tile of keys.
  template <bool kCausal>
  __device__ __forceinline__ int first_block(int tile) const {
    return kCausal ? min(blocks, max(0, tile - i0 / 64)) : 0;
  }
  // Returns the number of units of a key head.
  __device__ __forceinline__ static int count(const AttentionParams& params) {
    const auto chunks = (static_cast<int>(params.L) + kChunkRows - 1) / kChunkRows;
    return chunks * (static_cast<int>(params.H) / static_cast<int>(params.key_heads));
  }
};

// A key head. Divided anew wherever it is asked for: no register holds it over the tiles.
struct ShortKeyHead {
  int b, key_head, value_head, of_values;  // of_values: of all batches'

  __device__ __forceinline__ ShortKeyHead(const AttentionParams& params, int bk) {
    const auto key_heads =
        static_cast<int>(unknown_to_compiler(static_cast<unsigned>(params.key_heads)));
    b = bk / key_heads;
    key_head = bk % key_heads;
    value_head = key_head / (key_heads / static_cast<int>(params.G));
    of_values = b * static_cast<int>(params.G) + value_head;
  }
};

// Numbers of a thread's two queries that their pairs need.
struct ShortRows {
  float inverse[2], delta[2], fit[2];

  // Loads the numbers. row: the first of both, of the unit's
  template <typename T>
  __device__ __forceinline__ static ShortRows load(Shared<const float> numbers, int row) {
    ShortRows rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.inverse[half] = numbers[row + 8 * half] * kWeightScale<T>;
      rows.delta[half] = numbers[kChunkRows + row + 8 * half];
      rows.fit[half] = numbers[2 * kChunkRows + row + 8 * half];
    }
    return rows;
  }
};

// Sums over the eight rows of lanes: each time a lane keeps one half, and hands over the other.
//   bit: the bit in which lanes that exchange differ
template <int kCount, int kParts>
__device__ __forceinline__ void add_halves(float (&parts)[kParts], unsigned lane, unsigned bit) {
  const bool is_upper = (lane & bit) != 0;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const float kept = is_upper ? parts[i + kCount / 2] : parts[i];
    const float other = is_upper ? parts[i] : parts[i + kCount / 2];
    parts[i] = kept + __shfl_xor_sync(0xffffffffu, other, static_cast<int>(bit));
  }
}

// Scores s and products x = dO V^T of a thread's two queries become factors.
template <typename T, bool kCausal, uint32_t kFromScoresToWeights>
struct ShortFactors {
  ShortRows rows;
  Shared<const float> keys;  // terms and scales of the tile's keys
  float key_fit;             // times a scale, makes a key's factors fit
  // The tile's last key that the first of the queries sees, of those from the thread's first on.
  int last;
  Shared<unsigned char> to;  // where the queries' factors of the keys' gradients stand, as rows
  int row;                   // row of the first of the queries

  // Makes A of grad_phi_q, factors in shared memory, and parts of the logits' gradients, for 8
  // keys.
  __device__ __forceinline__ void make(int n, const float (&s)[32], const float (&x)[32],
                                       uint32_t (&products)[kStep / 16][4], float& first_part,
                                       float& second_part) const {
    const int t = static_cast<int>(unknown_to_compiler(threadIdx.x)) % 4;
    const float2 terms = load_vector<float2>(keys + (n * 8 + 2 * t));
    const float2 scales = load_vector<float2>(keys + (kStep + n * 8 + 2 * t));
    first_part = second_part = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float of_query[2], of_key[2], weight[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int i = 4 * n + 2 * half + c;
        const bool sees = !kCausal || n * 8 + c - 8 * half <= last;
        const float inverse = sees ? rows.inverse[half] : 0.0f;
        const float difference = x[i] - rows.delta[half];
        float similarity = fmaf(s[i], s[i], c == 0 ? terms.x : terms.y);
        float scaled = inverse * difference;
        // A key that no query sees may hold anything. Without masks it is hidden, and what its
        // own sums are does not count.
        if (kCausal && inverse == 0) similarity = scaled = 0;
        float& part = c == 0 ? first_part : second_part;
        part = fmaf(similarity, scaled, part);
        // A hidden key's score is 0, and its value may be anything.
        of_query[c] = sees && s[i] != 0 ? s[i] * (difference * rows.fit[half]) : 0.0f;
        of_key[c] = s[i] * ((c == 0 ? scales.x : scales.y) * key_fit) * scaled;
        weight[c] = similarity * inverse;
      }
      products[n / 2][n % 2 * 2 + half] = pack<Half>(of_query[0], of_query[1]);
      Shared<unsigned char> place = to + (swizzled(row + 8 * half, n, 128) + t * 4);
      store_vector(shared_cast<uint32_t>(place), pack<Half>(of_key[0], of_key[1]));
      store_vector(shared_cast<uint32_t>(place + kFromScoresToWeights),
                   pack<T>(weight[0], weight[1]));
    }
  }
  // Makes the factors of the tile's keys. logits: where the sums of the warp's queries go, of the
  // logits' gradients
  __device__ __forceinline__ void make(const float (&s)[32], const float (&x)[32],
                                       uint32_t (&products)[kStep / 16][4],
                                       Shared<float> logits) const {
    const unsigned lane = unknown_to_compiler(threadIdx.x) % 32;
    float parts[kStep / 8];
#pragma unroll
    for (int n = 0; n < kStep / 16; ++n) {
      float four[4];
      make(n, s, x, products, four[0], four[1]);
      make(n + kStep / 16, s, x, products, four[2], four[3]);
      add_halves<4>(four, lane, 16);
      parts[2 * n] = four[0];
      parts[2 * n + 1] = four[1];
    }
    add_halves<8>(parts, lane, 8);
    add_halves<4>(parts, lane, 4);
    const unsigned n = lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
    store_vector(logits + (n * 8 + lane % 4 * 2), make_float2(parts[0], parts[1]));
  }
};

// Sums of 64 keys that a warpgroup has, [64][64 kBoxes], in memory between two units, whose same
// threads write and read them.
template <int kBoxes>
__device__ __forceinline__ void load_sums(const float* from, float (&sums)[kBoxes][32]) {
  const unsigned thread = unknown_to_compiler(threadIdx.x) % 128;
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
      const float4 four = load_vector<float4>(from + (box * 4096 + i * 128 + thread * 4));
      sums[box][i] = four.x;
      sums[box][i + 1] = four.y;
      sums[box][i + 2] = four.z;
      sums[box][i + 3] = four.w;
    }
  }
}
template <int kBoxes>
__device__ __forceinline__ void save_sums(float* to, const float (&sums)[kBoxes][32]) {
  const unsigned thread = unknown_to_compiler(threadIdx.x) % 128;
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
      store_vector(to + (box * 4096 + i * 128 + thread * 4),
                   make_float4(sums[box][i], sums[box][i + 1], sums[box][i + 2], sums[box][i + 3]));
    }
  }
}

}  // namespace
}  // namespace ikattn::cuda
