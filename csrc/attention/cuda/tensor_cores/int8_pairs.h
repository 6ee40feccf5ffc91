// What the kernels of scores in integers of 8 bits share (Int8Features): products, and how their
// sums become numbers.
#pragma once

#include "attention/cuda/tensor_cores/pairs.h"
#include "support/cuda/integer_products.h"

namespace ikattn::cuda {
namespace {

constexpr int kInt8Words = Int8Features::kColumns / 2;       // 16-bit columns of a row of features
constexpr int kInt8Fragments = Int8Features::kColumns / 32;  // of the inner axis
constexpr uint32_t kInt8RowBytes = Int8Features::kColumns;
constexpr int kInt8Step = 32;  // tokens that a block of the backward passes by at a time
// A score of features, of one of integers.
constexpr float kScoreOfIntegers = 4.0f / (Int8Features::kLargest * Int8Features::kLargest);

// A row as 16-bit columns, which copies and fragments count.
__device__ __forceinline__ const uint16_t* int8_row(const int8_t* features, int64_t row) {
  return reinterpret_cast<const uint16_t*>(features + row * Int8Features::kColumns);
}

// Sums of products begin with the bits of a float near which floats are integers: so they are bits
// of floats, and an addition makes numbers of them. A score is less than 2^21.
constexpr float kIntegers = 0x1.8p23f;
constexpr int32_t kIntegersBits = 0x4b400000;
static_assert(Int8Features::kColumns * Int8Features::kLargest * Int8Features::kLargest < 1 << 22);

__device__ __forceinline__ float integer_of(int32_t sum) {
  return __uint_as_float(static_cast<uint32_t>(sum)) - kIntegers;
}

// The features of rows g and g + 8 of 16 from `first` on, of `count`, as A fragments. What
// load_rows() does, in two registers fewer, without which the forward pass would spill.
__device__ __forceinline__ void load_int8_rows(Fragment (&rows)[kInt8Fragments],
                                               const int8_t* features, int64_t first,
                                               int64_t count) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t i = first + g + 8 * half;
    const int8_t* row = features + i * Int8Features::kColumns + 4 * t;
#pragma unroll
    for (int k = 0; k < kInt8Fragments; ++k) {
      uint32_t (&registers)[4] = rows[k].registers;
      registers[half] = i < count ? load_vector<uint32_t>(row + 32 * k) : 0;
      registers[half + 2] = i < count ? load_vector<uint32_t>(row + 32 * k + 16) : 0;
    }
  }
}

// The address of fragment k of those that begin at `first`, FragmentPlaces::place[0] behind a
// multiple of 128: no registers hold the others.
__device__ __forceinline__ uint32_t fragment_at(uint32_t first, int k) {
  return (first ^ static_cast<uint32_t>(k % 4 * 32)) + k / 4 * 128;
}

// sums[m] = left(m) right^T, of 16 rows of right, whose fragments lie at right(k).
template <int kRowTiles, typename Left, typename Address>
__device__ __forceinline__ void multiply_int8(int32_t (&sums)[kRowTiles][2][4], const Left& left,
                                              const Address& right) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[m][i / 4][i % 4] = kIntegersBits;
  }
#pragma unroll
  for (int k = 0; k < kInt8Fragments; ++k) {
    const Fragment b = load_fragment(right(k));
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const Fragment& a = left(m, k);
      mma_m16n8k32_int8(sums[m][0], a.registers, b.registers[0], b.registers[1]);
      mma_m16n8k32_int8(sums[m][1], a.registers, b.registers[2], b.registers[3]);
    }
  }
}

// Calls launch.operator()<V, Pairs>() for the width of the value and what a call of the folded form
// needs.
template <typename Launch>
const char* launch_int8(const AttentionParams& params, const Launch& launch) {
  const auto of_width = [&]<int V>() {
    if (params.mask.type != ElementType::kNone || params.dropout_threshold != 0) {
      return launch.template operator()<V, Pairs::kAny>();
    }
    return params.is_causal ? launch.template operator()<V, Pairs::kCausal>()
                            : launch.template operator()<V, Pairs::kAll>();
  };
  return params.d_v <= 64 ? of_width.template operator()<64>()
                          : of_width.template operator()<128>();
}

}  // namespace
}  // namespace ikattn::cuda
