// What the tensor-core kernels share: blocks of four warps, tiles of 64 tokens of 16-bit rows in
// shared memory, two stages of them in flight, and where fragments lie.
#pragma once

#include <type_traits>

#include "attention/cuda/folded.h"
#include "attention/cuda/fragments.h"
#include "attention/cuda/tiles.h"
#include "support/cuda/intrinsics.h"

namespace ikattn::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kFoldedThreads = kWarps * 32;
constexpr int kStep = 64;  // tokens that a block passes by at a time
constexpr int kStages = 2;

// Copies rows of 16-bit elements, kWidth of them in shared memory: a thread takes one 16-byte
// column, and every kRowStep-th row of it. The rows' places differ by constants: kRowStep is a
// multiple of 8, the period of the swizzle.
template <int kWidth>
struct RowCopy {
  static constexpr int kRowStep = kFoldedThreads / (kWidth / 8);
  static_assert(kRowStep % 8 == 0);

  int64_t stride;  // elements from row to row
  uint32_t place;
  int row, column;  // of the thread
  bool inside;      // false: beyond the columns that there are; zeros

  __device__ __forceinline__ RowCopy(int64_t row_stride, int columns)
      : stride(row_stride), row(threadIdx.x / (kWidth / 8)) {
    const int chunk = threadIdx.x % (kWidth / 8);
    place = swizzled(row, chunk, 2 * kWidth);
    column = chunk * 8;
    inside = column < columns;
  }
  // The thread's place in an array whose rows begin at `rows`.
  template <typename T>
  __device__ __forceinline__ const T* source(const T* rows) const {
    return rows + row * stride + (inside ? column : 0);
  }
  // Begins to copy kRows rows from a thread's place; of those from the `count`-th on, zeros.
  template <int kRows, typename T>
  __device__ __forceinline__ void begin(uint32_t base, const T* from, int count) const {
#pragma unroll
    for (int step = 0; step < kRows / kRowStep; ++step) {
      const bool there = inside && row + step * kRowStep < count;
      cp_async_16(base + place + step * (kRowStep * 2 * kWidth),
                  there ? from + step * kRowStep * stride : from, there ? 16 : 0);
    }
  }
};

// Where a lane reads fragments of a 16-row chunk: column fragment k (32 bytes) of chunk c is at
// place[k % 4] + k / 4 * 128 + c * 16 rows, the latter two known when compiling.
struct FragmentPlaces {
  uint32_t place[4];

  __device__ FragmentPlaces(uint32_t start, int row, int half, uint32_t row_bytes) {
#pragma unroll
    for (int k = 0; k < 4; ++k) place[k] = start + swizzled(row, 2 * k + half, row_bytes);
  }
  // Of A, and of B that lies [k][n] and is read with trans.
  __device__ static __forceinline__ FragmentPlaces of_rows(uint32_t start, uint32_t row_bytes) {
    const int lane = threadIdx.x % 32;
    return FragmentPlaces(start, lane % 16, lane / 16, row_bytes);
  }
  // Of B that lies [n][k].
  __device__ static __forceinline__ FragmentPlaces of_columns(uint32_t start, uint32_t row_bytes) {
    const int lane = threadIdx.x % 32;
    return FragmentPlaces(start, lane % 8 + 8 * (lane / 16), lane / 8 % 2, row_bytes);
  }
  template <int kRowBytes>
  __device__ __forceinline__ uint32_t at(int chunk, int k) const {
    return place[k % 4] + k / 4 * 128 + chunk * 16 * kRowBytes;
  }
};

// Four registers of a lane: an operand A, or two tiles of B side by side.
struct Fragment {
  uint32_t registers[4];

  // The n-th of two tiles of sums that, side by side, are this A.
  template <typename T>
  __device__ __forceinline__ void put(int n, const float (&tile)[4]) {
    registers[2 * n] = pack<T>(tile[0], tile[1]);
    registers[2 * n + 1] = pack<T>(tile[2], tile[3]);
  }
};
__device__ __forceinline__ Fragment load_fragment(uint32_t row_address) {
  Fragment fragment;
  ldmatrix_x4(fragment.registers, row_address);
  return fragment;
}

// sums[m] += left(m, k) right(k) over kCount fragments of the inner axis; 16 columns of right,
// which lies [column][inner] at right(k).
template <typename T, int kCount, int kRowTiles, typename Left, typename Address>
__device__ __forceinline__ void multiply_by_columns(float (&sums)[kRowTiles][2][4],
                                                    const Left& left, const Address& right) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const Fragment b = load_fragment(right(k));
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const Fragment a = left(m, k);
      mma_m16n8k16<T>(sums[m][0], a.registers, b.registers[0], b.registers[1]);
      mma_m16n8k16<T>(sums[m][1], a.registers, b.registers[2], b.registers[3]);
    }
  }
}

// sums[m] += left[m] right, 16 on the inner axis; right lies [inner][column], 16 columns of it at
// right(n).
template <typename T, int kColumnTiles, int kRowTiles, typename Address>
__device__ __forceinline__ void multiply_by_rows(float (&sums)[kRowTiles][kColumnTiles][4],
                                                 const Fragment (&left)[kRowTiles],
                                                 const Address& right) {
#pragma unroll
  for (int n = 0; n < kColumnTiles / 2; ++n) {
    uint32_t b[4];
    ldmatrix_x4_trans(b, right(n));
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      mma_m16n8k16<T>(sums[m][2 * n], left[m].registers, b[0], b[1]);
      mma_m16n8k16<T>(sums[m][2 * n + 1], left[m].registers, b[2], b[3]);
    }
  }
}

// The value rows of poisoned keys become zero: what such a key does is in its eps. Others may
// read them after a barrier.
template <typename T, int kCount, int kThreads = kFoldedThreads>
__device__ __forceinline__ void clean_values(Shared<unsigned char> tile) {
  Shared<uint16_t> values = shared_cast<uint16_t>(tile);
  for (int index = threadIdx.x; index < kCount; index += kThreads) {
    const uint16_t bits = values[index];
    if (!is_finite(to_float(T{bits}))) values[index] = 0;
  }
}

// The queries of one of the blocks that own `rows` queries of a head each, and their keys and
// values. 32 bits: a grid has not more blocks, and no GPU room for more tokens.
struct QueryBlock {
  int bh, i0, b, h, bk, key_head, value_head;

  __device__ __forceinline__ QueryBlock(const AttentionParams& params, int rows, int64_t index) {
    const int blocks = static_cast<int>((params.L + rows - 1) / rows);
    const int at = static_cast<int>(index), heads = static_cast<int>(params.H);
    const int key_heads = static_cast<int>(params.key_heads);
    bh = at / blocks;
    // The last rows first: under causality they have the most to do.
    i0 = (blocks - 1 - at % blocks) * rows;
    b = bh / heads;
    h = bh % heads;
    key_head = h / (heads / key_heads);
    bk = b * key_heads + key_head;
    value_head = h / (heads / static_cast<int>(params.G));
  }
};

// The same of the keys of one of the blocks that own `rows` of them, and the tiles of queries that
// it passes along: those of all heads that share the keys, one head after the other.
struct KeyBlock {
  int bk, j0, b, key_head, value_head;
  int group;              // heads that share the keys
  int first_tile, tiles;  // of kStep queries, of each of these heads
  int steps;              // tiles of all of them

  __device__ __forceinline__ KeyBlock(const AttentionParams& params, int rows, bool is_causal,
                                      int64_t index) {
    const int blocks = static_cast<int>((params.S + rows - 1) / rows);
    const int at = static_cast<int>(index), key_heads = static_cast<int>(params.key_heads);
    bk = at / blocks;
    // The first keys first: under causality they have the most to do.
    j0 = at % blocks * rows;
    b = bk / key_heads;
    key_head = bk % key_heads;
    value_head = key_head / (key_heads / static_cast<int>(params.G));
    group = static_cast<int>(params.H) / key_heads;
    const int all_tiles = static_cast<int>((params.L + kStep - 1) / kStep);
    first_tile = is_causal ? min(j0 / kStep, all_tiles) : 0;
    tiles = all_tiles - first_tile;
    steps = tiles * group;
  }
};

// The tiles of kStep keys that a block of `rows` queries passes along: those it sees, or its share
// of them, the part-th of `parts`.
struct TileRange {
  int first, end;

  __device__ __forceinline__ TileRange(int from, int to) : first(from), end(to) {}
  __device__ __forceinline__ TileRange(const AttentionParams& params, const QueryBlock& at,
                                       int rows, int part = 0, int parts = 1) {
    const int64_t seen = params.is_causal ? min(params.S, int64_t{at.i0} + rows) : params.S;
    const int all = static_cast<int>((seen + kStep - 1) / kStep), each = (all + parts - 1) / parts;
    first = part * each;
    end = min(first + each, all);
  }
};

// visit(column, n) for the pairs of neighbouring columns that a thread has of a row of sums: those
// of tile n of 8.
template <int kWidth, typename Visit>
__device__ __forceinline__ void for_pairs(const Visit& visit) {
#pragma unroll
  for (int n = 0; n < kWidth / 8; ++n) visit(n * 8 + static_cast<int>(threadIdx.x) % 4 * 2, n);
}

// The rows of the value that belong to a query head.
template <typename T>
__device__ __forceinline__ const T* value_rows(const AttentionParams& params,
                                               const FoldedTokens& tokens, int64_t b, int64_t h) {
  return static_cast<const T*>(tokens.value.data) + b * tokens.value.stride[0] +
         h * params.G / params.H * tokens.value.stride[1];
}

// Tokens from the first of a tile on; beyond 2^31 a tile is full all the same.
__device__ __forceinline__ int left_of(int64_t count, int64_t first) {
  return static_cast<int>(min(count - first, int64_t{1} << 30));
}

// What a kernel is compiled for. In the folded form: all pairs; those that causality lets be; or
// bool masks and dropout, too. kGeneral: the general form, with all of these and float masks.
enum class Pairs { kAll, kCausal, kAny, kGeneral };

template <Pairs kPairs>
constexpr bool kDrops = kPairs == Pairs::kAny || kPairs == Pairs::kGeneral;

// Calls launch.operator()<Pairs>() for what a call needs: both forms where the device decides.
template <typename Launch>
const char* launch_forms(const AttentionParams& params, const Launch& launch) {
  const char* error = nullptr;
  if (has_float_mask(params)) return launch.template operator()<Pairs::kGeneral>();
  if (params.mask.type != ElementType::kNone || params.dropout_threshold != 0) {
    error = launch.template operator()<Pairs::kAny>();
  } else if (params.is_causal) {
    error = launch.template operator()<Pairs::kCausal>();
  } else {
    error = launch.template operator()<Pairs::kAll>();
  }
  if (error != nullptr || every_row_sees_all(params)) return error;
  return launch.template operator()<Pairs::kGeneral>();
}

// Calls launch.operator()<T>() for the 16-bit type.
template <typename Launch>
const char* launch_type(const AttentionParams& params, const Launch& launch) {
  return params.value.type == ElementType::kBFloat16 ? launch.template operator()<BFloat16>()
                                                     : launch.template operator()<Half>();
}
// Calls launch.operator()<T, F, V>() for the 16-bit type and the widths that rows of features
// and of the value have in shared memory.
template <typename Launch>
const char* launch_sizes(const AttentionParams& params, const Launch& launch) {
  const auto of_features = [&]<typename T, int F>() {
    return params.d_v <= 64 ? launch.template operator()<T, F, 64>()
                            : launch.template operator()<T, F, 128>();
  };
  return launch_type(params, [&]<typename T>() {
    return padded_columns(2 * params.M) == 64 ? of_features.template operator()<T, 64>()
                                              : of_features.template operator()<T, 128>();
  });
}

// Whether another kernel computes this head.
template <Pairs kPairs>
__device__ __forceinline__ bool is_of_other_form(uint32_t state) {
  return ((state & kGeneral) != 0) != (kPairs == Pairs::kGeneral);
}

// Whether linear_backward has the gradients of a key head.
__device__ __forceinline__ bool is_without_pairs(const FoldedTokens& tokens, int64_t bk) {
  return tokens.heads_by_pairs != nullptr && tokens.heads_by_pairs[bk] == 0;
}

// Tiles of 16 rows per warp: as many as the registers hold.
template <int V>
constexpr int kRowTilesFor = V <= 64 ? 2 : 1;

}  // namespace
}  // namespace ikattn::cuda
