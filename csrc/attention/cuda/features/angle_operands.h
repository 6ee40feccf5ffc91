// Tokens and frequencies as the products that make angles on tensor cores read them.
#pragma once

#include <type_traits>

#include "attention/cuda/operands/feature_source.h"
#include "support/cuda/float16.h"

namespace ikattn::cuda {

constexpr int kAngleFrequencies = 32;  // frequencies of a piece

// Frequencies as rows: [frequency_batches, frequency_heads, w1 and w2, rows, columns], where rows
// are M and columns d, both rounded up to multiples of 64, and zeros.
struct FrequencyRows {
  const float* data;
  int64_t rows, columns;

  __host__ __device__ int64_t set_size() const { return rows * columns; }
};

// Frequencies in 16 bits, by pieces of 32 frequencies and slices of 64 dimensions:
// [frequency_batches, frequency_heads, pieces, slices, planes, w1 and w2, 32, 64], zeros where
// there is none. Rows lie so that of the sums of 16 a lane has four neighbours (frequency_of_row).
// The first planes are numbers of the tokens' type that add up to the frequency, the largest first;
// beside those of bfloat16 there is one of Half, which gradients are multiplied with.
struct SplitFrequencies {
  const void* data;
  // [frequency_batches, frequency_heads, 2]  powers of two that products with the numbers, and with
  // Half, are multiplied with
  const float* units;
  int pieces, slices;
};
// bfloat16: 16 bits, where the tokens have 8. Half: 22, of what fits it times a power of two.
template <typename T>
constexpr int kSplitsOfFrequency = sizeof(T) == 4 ? 1 : 2;
template <typename T>
constexpr int kPlanesOf = std::is_same_v<T, BFloat16> ? 3 : kSplitsOfFrequency<T>;
// Index of the plane that is Half.
template <typename T>
constexpr int kHalfPlane = std::is_same_v<T, BFloat16> ? 2 : 0;

// Operands that the products read: tokens in rows at multiples of 16 bytes, as they lie or copied.
struct AngleOperands {
  FeatureSource queries, keys;
  FrequencyRows frequencies;  // for tokens of float32, and the backward
  SplitFrequencies split;     // for tokens of 16 bits
};
const char* prepare_angles(const AttentionParams& params, const DeviceExecutor& executor,
                           bool for_backward, AngleOperands& operands);

}  // namespace ikattn::cuda
