// Results of the forward kernels on tensor cores, made from the sums of a row.
#pragma once

#include "attention/cuda/tensor_cores/pairs.h"

namespace ikattn::cuda {

// Partial results of blocks that share the keys, where queries are few; they are then combined.
struct Parts {
  int count = 1;                // number of parts; 1: a block finishes its rows
  float* output = nullptr;      // [part][B, H, L, padded d_v]  sum of w V
  float* sums = nullptr;        // [part][B, H, L]              sum of w
  float* roundings = nullptr;   // [part][B, H, L]            ForwardRows::roundings
  double* reference = nullptr;  // [part][B, H, L]              general: that of w
};
Parts take_parts(const AttentionParams& params, const DeviceExecutor& executor, int count);
// The results of all parts, where there are several.
const char* combine_parts(const AttentionParams& params, Stream stream, const FoldedTokens& tokens,
                          const Parts& parts);

// Sums over the keys before a query's chunk, which causal calls in linear time compute for blocks
// that are not in tokens.linear.quadratic_blocks: pairs go on from there.
struct InitialSums {
  const float* output = nullptr;  // [B, H, L, padded d_v]  sum of w V; nullptr: there are none
  const float* sums = nullptr;    // [B, H, L]              sum of w
  int chunk = 0, most = 0;        // tokens of a chunk; chunks before a query's, at most

  // Returns the first key of the chunk of queries from the i-th on.
  __device__ __forceinline__ int first_key(int i) const { return min(i / chunk, most) * chunk; }
};

// Output and log Z of the queries in tokens.linear.quadratic_blocks, or their parts; of others that
// begin with something, too. general_alone: other kernels have the folded form.
const char* folded_forward(const AttentionParams& params, Stream stream, const FoldedTokens& tokens,
                           const Parts& parts, const InitialSums& initial, bool general_alone);

// Computes the forward of wide rows, all of them.
const char* wide_forward(const AttentionParams& params, Stream stream, const FoldedTokens& tokens,
                         const Parts& parts);

namespace {

// Returns log x of x > 0, to 1e-7: the exponent's part in float64. A logarithm of float64 takes
// longer than a tile's products, and nothing goes on beside it.
__device__ __forceinline__ double logarithm(float x) {
  constexpr double kLog2 = 0.69314718055994530942;
  const bool is_small = x < 0x1p-126f;
  const uint32_t bits = __float_as_uint(is_small ? x * 0x1p64f : x);
  if (bits >= 0x7f800000u) return static_cast<double>(x);  // infinity, or NaN
  // The mantissa lies between the roots of a half and of two.
  const uint32_t above_root = bits - 0x3f3504f3u;
  const int exponent = static_cast<int>(above_root) >> 23;
  const float mantissa = __uint_as_float((above_root & 0x007fffffu) + 0x3f3504f3u);
  return fma(static_cast<double>(is_small ? exponent - 64 : exponent), kLog2,
             static_cast<double>(logf(mantissa)));
}

// Returns the logarithm of a row's normalizer; `reference` is log Z where the sum is 1.
__device__ __forceinline__ double log_normalizer_of(float sum, double reference) {
  return sum == 0 ? minus_infinity<double>() : logarithm(sum) + reference;
}
template <typename T, bool kGeneral>
__device__ __forceinline__ double reference_of(const FoldedTokens& tokens, int64_t bk,
                                               double of_row) {
  return kGeneral ? of_row - log(static_cast<double>(kWeightScale<T>))
                  : tokens.forms.largest[bk] - static_cast<double>(tokens.forms.log_scale);
}
// Returns the row's sum, NaN if its query is not finite, and sees a key.
__device__ __forceinline__ float with_poison(const FoldedTokens& tokens, int64_t row, float sum) {
  return sum == 0 ? sum : sum + tokens.poison[row];
}

// Stores the results of query i, V columns of its row from `first` on. weighted(n, c): the thread's
// sums; sum: of weights, NaN where the row is; reference: log Z where it is 1; output_scale: the
// rescale of dropout, over the scale of the value.
template <int V, typename Weighted>
__device__ __forceinline__ void store_result(const AttentionParams& params, const QueryBlock& at,
                                             int64_t i, int first, float sum, float rounding,
                                             double reference, float output_scale,
                                             const Weighted& weighted) {
  if (threadIdx.x % 4 == 0 && first == 0) {
    static_cast<double*>(params.log_normalizer.data)[int64_t{at.bh} * params.L + i] =
        log_normalizer_of(sum, reference);
  }
  const int64_t* stride = params.output.stride;
  const RowPairs pairs(params.output);
  const int64_t to = at.b * stride[0] + at.h * stride[1] + i * stride[2];
  const float scale = output_scale / (sum + rounding);
  pairs.store<V>(to, first, params.d_v, [&](int n) {
    return sum == 0 ? make_float2(0, 0)
                    : make_float2(weighted(n, 0) * scale, weighted(n, 1) * scale);
  });
}
// Stores what a block has of a row: its part, or the results. reference: ForwardRows'.
template <typename T, int V, bool kGeneral, typename Weighted>
__device__ __forceinline__ void store_row(const AttentionParams& params, const FoldedTokens& tokens,
                                          const Parts& parts, int64_t part, const QueryBlock& at,
                                          int64_t i, int first, float sum, float rounding,
                                          double reference, float output_scale,
                                          const Weighted& weighted) {
  const int64_t row = int64_t{at.bh} * params.L + i;
  const bool tells = threadIdx.x % 4 == 0 && first == 0;
  if (parts.count > 1) {
    const int64_t part_row = part * params.B * params.H * params.L + row;
    if (tells) {
      parts.sums[part_row] = sum;
      parts.roundings[part_row] = rounding;
      if (kGeneral) parts.reference[part_row] = reference;
    }
    const int width = static_cast<int>(padded_columns(params.d_v));  // may be less than a slice
    float* columns = parts.output + part_row * width + first;
    for_pairs<V>([&](int column, int n) {
      if (column >= width - first) return;
      store_vector(columns + column, make_float2(weighted(n, 0), weighted(n, 1)));
    });
    return;
  }
  store_result<V>(params, at, i, first, with_poison(tokens, row, sum), rounding,
                  reference_of<T, kGeneral>(tokens, at.bk, reference), output_scale, weighted);
}

}  // namespace
}  // namespace ikattn::cuda
