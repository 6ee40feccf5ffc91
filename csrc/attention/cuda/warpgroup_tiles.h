// What the kernels of warpgroups share: blocks of two of them, and tiles in shared memory as wgmma
// takes them, boxes of 64 columns: rows of 128 bytes, whose 16-byte chunks are turned by the row.
#pragma once

#include "attention/cuda/folded_tiles.h"

namespace ikattn::cuda {

// Where warpgroups are used: in the folded form of calls without a mask and dropout.
inline bool goes_to_warpgroups(const AttentionParams& params) {
  return params.mask.type == ElementType::kNone && params.dropout_threshold == 0 &&
         has_warpgroups();
}

namespace {

constexpr int kWarpgroups = 2;
constexpr int kWarpgroupThreads = kWarpgroups * 128;
constexpr int kWarpgroupRows = kWarpgroups * 64;  // of a block
// One is read by products that go on while the next is waited for, and one is copied.
constexpr int kTilesInFlight = 3;
constexpr int kBoxColumns = 64;

// The copies that all threads have begun are here, for products, too; and nobody reads the tile of
// two before.
__device__ __forceinline__ void wait_for_tile() {
  cp_async_wait<0>();
  fence_products();
  __syncthreads();
}

// kRows rows of kWidth 16-bit elements.
template <int kRows, int kWidth>
struct Boxes {
  static constexpr int kCount = kWidth / kBoxColumns;
  static constexpr uint32_t kBox = kRows * 128, kBytes = kCount * kBox;

  // Begins to copy them to `base` from rows of `columns` elements; of those from the `count`-th on,
  // zeros.
  template <typename T>
  __device__ static __forceinline__ void copy(uint32_t base, const T* from, int64_t stride,
                                              int columns, int count) {
#pragma unroll
    for (int box = 0; box < kCount; ++box) {
      const RowCopy<kBoxColumns, kWarpgroupThreads> rows(stride, columns - box * kBoxColumns);
      const T* source = rows.inside ? from + box * kBoxColumns : from;
      rows.template begin<kRows>(base + box * kBox, rows.source(source), count);
    }
  }
  // Of the operand at their begin: 16 columns of rows, from the k-th 16 on; and 16 rows, from the
  // k-th 16 on, of a box.
  __device__ static __forceinline__ uint64_t by_columns(uint64_t operand, int k) {
    return wgmma_operand_after(operand, k / 4 * kBox + k % 4 * 32);
  }
  __device__ static __forceinline__ uint64_t by_rows(uint64_t operand, int box, int k) {
    return wgmma_operand_after(operand, box * kBox + k * 2048);
  }
};

// True of a tile's first key, which the compiler does not see: in the same block of code it would
// move what is done between two waits for products behind the second, where the tensor cores have
// nothing to do.
__device__ __forceinline__ bool is_passing(const AttentionParams& params, int64_t j0) {
  return j0 < params.S;
}

// Tiles of kKeys keys of a head, and of their values behind them.
template <typename T, int F, int V, int kKeys>
struct KeyTiles {
  using Keys = Boxes<kKeys, F>;
  using Values = Boxes<kKeys, V>;
  static constexpr uint32_t kValues = Keys::kBytes, kStage = kValues + Values::kBytes;

  const Half* phi_k;
  const T* value;
  int64_t stride, S;
  int columns;

  __device__ __forceinline__ KeyTiles(const AttentionParams& params, const FoldedTokens& tokens,
                                      const QueryBlock& at)
      : phi_k(tokens.phi_k + at.bk * params.S * F),
        value(value_rows<T>(params, tokens, at.b, at.h)),
        stride(tokens.value.stride[2]),
        S(params.S),
        columns(tokens.value_columns) {}
  // Begins to copy a tile.
  __device__ __forceinline__ void copy(uint32_t place, int tile) const {
    const int64_t j0 = tile * int64_t{kKeys};
    const int count = left_of(S, j0);
    Keys::copy(place, phi_k + j0 * F, F, F, count);
    Values::copy(place + kValues, value + j0 * stride, stride, columns, count);
  }
  // Waits until products may read the tile at `place`, an offset. unclean: values may not be
  // finite.
  __device__ __forceinline__ static void wait(Shared<unsigned char> shared, uint32_t place,
                                              bool unclean) {
    wait_for_tile();
    if (!unclean) return;
    clean_values<T, kKeys * V, kWarpgroupThreads>(shared + (place + kValues));
    fence_products();
    __syncthreads();
  }
};

// Numbers of kCount tokens, of an array padded to whole 64, to shared memory.
template <int kCount>
__device__ __forceinline__ void copy_numbers(uint32_t base, const float* from, int64_t first,
                                             int64_t padded, int first_thread = 0) {
  const int thread = static_cast<int>(threadIdx.x) - first_thread;
  if (thread < 0 || thread >= kCount / 4) return;
  const int64_t at = first + thread * 4;
  cp_async_16(base + thread * 16, at < padded ? from + at : from, at < padded ? 16 : 0);
}

// A thread's rows of a block as A: `from` is its first, and 8 rows on the second; zeros where there
// is none, and beyond `columns`.
template <int kWidth, typename T>
__device__ __forceinline__ void load_left(uint32_t (&a)[kWidth / 16][4], const T* from,
                                          int64_t stride, const bool (&there)[2], int columns) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int k = 0; k < kWidth / 8; ++k) {
      const int column = 8 * k + 2 * t;
      const T* row = from + half * 8 * stride + column;
      const bool inside = there[half] && column < columns;
      a[k / 2][half + k % 2 * 2] = inside ? load_vector<uint32_t>(row) : 0;
    }
  }
}

// sums = a b, kWidth on the inner axis.
template <typename T, int kRows, int kWidth, int kSums>
__device__ __forceinline__ void begin_by_columns(float (&sums)[kSums],
                                                 const uint32_t (&a)[kWidth / 16][4], uint32_t b) {
  const uint64_t right = wgmma_operand(b);
#pragma unroll
  for (int k = 0; k < kWidth / 16; ++k) {
    wgmma_by_columns<T>(sums, a[k], Boxes<kRows, kWidth>::by_columns(right, k), k > 0);
  }
}
// The same of an a in shared memory; Left, Right: boxes of both.
template <typename T, typename Left, typename Right>
__device__ __forceinline__ void begin_by_columns(float (&sums)[32], uint32_t a, uint32_t b) {
  const uint64_t left = wgmma_operand(a), right = wgmma_operand(b);
#pragma unroll
  for (int k = 0; k < Right::kCount * kBoxColumns / 16; ++k) {
    wgmma_by_columns<T>(sums, Left::by_columns(left, k), Right::by_columns(right, k), k > 0);
  }
}
// sums[box] += a b, kRows on the inner axis.
template <typename T, int kRows, int kWidth>
__device__ __forceinline__ void begin_by_rows(float (&sums)[kWidth / kBoxColumns][32],
                                              const uint32_t (&a)[kRows / 16][4], uint32_t b) {
  const uint64_t right = wgmma_operand(b);
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k) {
#pragma unroll
    for (int box = 0; box < kWidth / kBoxColumns; ++box) {
      wgmma_by_rows<T>(sums[box], a[k], Boxes<kRows, kWidth>::by_rows(right, box, k), true);
    }
  }
}
// One of a thread's sums [64][64 boxes]: c of its row `half` in tile n of 8.
template <int kBoxes>
__device__ __forceinline__ float sum_at(const float (&sums)[kBoxes][32], int half, int n, int c) {
  return sums[n / 8][n % 8 * 4 + 2 * half + c];
}
// What products have left as sums [64][8 kTiles] becomes A.
template <typename T, int kTiles>
__device__ __forceinline__ void pack_left(const float (&sums)[4 * kTiles],
                                          uint32_t (&a)[kTiles / 2][4]) {
#pragma unroll
  for (int k = 0; k < kTiles / 2; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[k][i] = pack<T>(sums[8 * k + 2 * i], sums[8 * k + 2 * i + 1]);
  }
}

}  // namespace
}  // namespace ikattn::cuda
