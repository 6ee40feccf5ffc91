// Which pairs of a tile masks, causality and dropout leave, on Hopper: two bits for each of a
// thread's sums of 16 rows of its warp and 64 columns. They are found before the tile's own
// products begin, which leave few registers, while the other warpgroup's go on.
//
// Rows are queries and columns keys, or, turned, the other way round.
#pragma once

#include "attention/cuda/hopper/pipeline.h"
#include "attention/cuda/tensor_cores/pairs.h"

namespace ikattn::cuda {

// What masks and dropout are for the kernels. A bool mask of pairs is bits, in the order of who
// reads them: [batches, heads, row blocks of 16, column blocks of 64, 32 lanes]; rows and columns
// that there are not are hidden.
struct PairMask {
  const uint32_t* words = nullptr;  // nullptr: there is no mask
  int64_t batch = 0, head = 0;      // strides, in words; 0 where all are one
  int column_blocks = 0;
  float kept = 1;  // what dropout multiplies the weights with that it keeps

  // The thread's word of the 16 rows from `row` and the 64 columns from `column` on.
  __device__ __forceinline__ uint32_t word(int b, int h, int row, int column) const {
    const int64_t block = int64_t{row / 16} * column_blocks + column / 64;
    return words[b * batch + h * head + block * 32 + threadIdx.x % 32];
  }
};

// Those of a call, bits in memory of the executor. turned: rows are keys.
const char* make_pair_mask(const AttentionParams& params, const DeviceExecutor& executor,
                           bool turned, PairMask& mask);

namespace {

// Of c of tile n of 8, of 64 columns. Dropout finds one bit in each byte at a time.
__host__ __device__ constexpr int bit_of(int n, int c) {
  return 8 * (2 * (n % 2) + c % 2) + n / 2 * 2 + c / 2;
}

struct PairBits {
  uint32_t seen, dropped;

  __device__ __forceinline__ bool sees(int n, int c) const {
    return (seen >> bit_of(n, c) & 1) != 0;
  }
  __device__ __forceinline__ bool drops(int n, int c) const {
    return (dropped >> bit_of(n, c) & 1) != 0;
  }
};

// Of the columns 0 and 1 of a thread in tile n, of a row: all ones in 16 bits where the bit is one.
__device__ __forceinline__ uint32_t ones_where(uint32_t bits, int n, int half) {
  const uint32_t bytes = (bits >> (n / 2 * 2 + half) & 0x01010101u) * 0xffu;
  return __byte_perm(bytes, 0, n % 2 == 0 ? 0x1100 : 0x3322);
}

// Which columns the thread's rows see. Not turned: up to `diagonal`, its first row; turned: from
// there on.
template <bool kTurned>
__device__ __forceinline__ uint32_t causal_bits(int diagonal) {
  const int t = threadIdx.x % 4;
  uint32_t bits = 0;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int column = n * 8 + 2 * t + c % 2 - 8 * (c / 2);
      const bool sees = kTurned ? column >= diagonal : column <= diagonal;
      bits |= static_cast<uint32_t>(sees) << bit_of(n, c);
    }
  }
  return bits;
}

// The top bit of each byte that is below the threshold.
__device__ __forceinline__ uint32_t bytes_below(uint32_t bytes, uint32_t threshold) {
  const uint32_t all = threshold * 0x01010101u;
  // Of seven bits each, which no byte borrows from another: not below.
  const uint32_t not_below = (bytes | 0x80808080u) - (all & 0x7f7f7f7fu);
  const uint32_t either = threshold < 128 ? bytes | not_below : bytes & not_below;
  return ~either & 0x80808080u;
}

// What dropout drops. Rows of two neighbours of a lane share calls of the generator
// (support/philox.h): each makes those of one of two blocks of 16 columns, and hands over half. By
// whole warps.
template <bool kTurned>
__device__ __forceinline__ uint32_t dropped_bits(const AttentionParams& params, int bh, int row,
                                                 int column) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const bool is_odd = g % 2 != 0;
  uint32_t bits = 0;
#pragma unroll 1  // registers are few
  for (int first = 0; first < 4; first += 2) {
    const int of_rows = row / 4 + g / 2, of_columns = (column / 16 + first + g % 2) * 4 + t;
    const PhiloxBlock bytes = dropout_group(params.dropout, bh, kTurned ? of_columns : of_rows,
                                            kTurned ? of_rows : of_columns);
    uint32_t of_member[4];  // rows, each of four columns
    if constexpr (kTurned) {
      const uint32_t low01 = __byte_perm(bytes.word[0], bytes.word[1], 0x5140);
      const uint32_t low23 = __byte_perm(bytes.word[2], bytes.word[3], 0x5140);
      const uint32_t high01 = __byte_perm(bytes.word[0], bytes.word[1], 0x7362);
      const uint32_t high23 = __byte_perm(bytes.word[2], bytes.word[3], 0x7362);
      of_member[0] = __byte_perm(low01, low23, 0x5410);
      of_member[1] = __byte_perm(low01, low23, 0x7632);
      of_member[2] = __byte_perm(high01, high23, 0x5410);
      of_member[3] = __byte_perm(high01, high23, 0x7632);
    } else {
#pragma unroll
      for (int member = 0; member < 4; ++member) of_member[member] = bytes.word[member];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t even = of_member[2 * half], odd = of_member[2 * half + 1];
      const uint32_t own = is_odd ? odd : even;
      const uint32_t other = __shfl_xor_sync(0xffffffffu, is_odd ? even : odd, 4);
      const uint32_t blocks[2] = {is_odd ? other : own, is_odd ? own : other};
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        bits |= bytes_below(blocks[block], params.dropout_threshold) >>
                (7 - (2 * (first + block) + half));
      }
    }
  }
  return bits;
}

// Of the warp's 16 rows from `row` and the 64 columns from `column` on, of a query head.
template <bool kTurned>
__device__ __forceinline__ PairBits find_pairs(const AttentionParams& params, const PairMask& mask,
                                               int b, int h, int row, int column) {
  PairBits bits = {0xffffffffu, 0};
  if (mask.words != nullptr) bits.seen = mask.word(b, h, row, column);
  if (params.is_causal) {
    const int diagonal = row + static_cast<int>(threadIdx.x) % 32 / 4 - column;
    // All columns of all rows, else.
    if (kTurned ? row + 15 > column : row < column + 63)
      bits.seen &= causal_bits<kTurned>(diagonal);
  }
  if (params.dropout_threshold != 0) {
    bits.dropped = dropped_bits<kTurned>(params, b * static_cast<int>(params.H) + h, row, column);
  }
  return bits;
}

// Whether a kernel that is compiled for kPairs hides later keys.
template <Pairs kPairs>
__device__ __forceinline__ bool is_causal_call(const AttentionParams& params) {
  return kPairs == Pairs::kAny ? params.is_causal : kPairs == Pairs::kCausal;
}

// Calls launch.operator()<Pairs>() for what a call needs.
template <typename Launch>
const char* launch_pairs(const AttentionParams& params, const Launch& launch) {
  if (params.mask.type != ElementType::kNone || params.dropout_threshold != 0) {
    return launch.template operator()<Pairs::kAny>();
  }
  return params.is_causal ? launch.template operator()<Pairs::kCausal>()
                          : launch.template operator()<Pairs::kAll>();
}

}  // namespace
}  // namespace ikattn::cuda
