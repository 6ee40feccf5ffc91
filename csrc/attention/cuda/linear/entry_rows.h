// Entries of a block's tokens times moments: which moments, and what the products become.
#pragma once

#include "attention/cuda/linear/linear.h"
#include "attention/cuda/tensor_cores/blocks.h"

namespace ikattn::cuda {

constexpr uint32_t kMomentBytes = 2 * kMomentColumns;  // bytes of a row

namespace {

// Returns one of a register's two numbers, twice.
__device__ __forceinline__ uint32_t twice(uint32_t two, bool second) {
  return second ? (two >> 16) | (two & 0xffff0000u) : (two & 0xffffu) | (two << 16);
}

// Stores a warp's 32 rows of sums of entries: sum(m, n, i), the i-th of tile n of 8 columns of the
// m-th 16 rows.
template <typename Sum>
__device__ __forceinline__ void store_entries(const EntryProducts& products, int slices,
                                              const Sum& sum) {
  // Found anew: no register holds them over the stages.
  const unsigned thread = unknown_to_compiler(threadIdx.x);
  const unsigned index = unknown_to_compiler(blockIdx.x);
  const LinearTokens& tokens = products.tokens;
  const int slice = static_cast<int>(index) % slices, warp_row = static_cast<int>(thread) / 32 * 32;
  const EntryBlock at(tokens, index / slices);
  if (are_by_pairs(tokens, products.quadratic_blocks, at,
                   warp_row / kLinearQueries * kLinearQueries)) {
    return;
  }
  const int64_t bk = at.bh / tokens.group, b = at.bh / tokens.heads, h = at.bh % tokens.heads;
  const int64_t place = place_of_sums(tokens, products.sums.prefixes, at);
  const LinearHead head = products.sums.heads[place];
  const float* center =
      products.sums.centers + (place * slices + slice) * kMomentColumns + thread % 4 * 2;
  const int64_t* stride = products.output.stride;
  const RowPairs pairs(products.output);
  const float units = products.units == nullptr ? 1.0f : 1 / products.units[bk];
  const float unit = head.moment_unit / tokens.entry_scale;
  const float row_unit = products.in_row_units ? 1.0f : head.row_unit;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t i = at.first + warp_row + m * 16 + thread % 32 / 4 + 8 * half;
      if (i >= tokens.N) continue;
      const bool is_hidden = products.logits != nullptr &&
                             products.logits[at.bh * tokens.N + i] == minus_infinity<float>();
      // The units of rows come last: values may be large where their scales are small.
      float of_center = 1, of_product = unit;
      if (products.goes_on) {
        of_center = products.weights[at.bh * tokens.N + i];
      } else if (products.weights != nullptr) {
        of_product /= products.weights[at.bh * tokens.N + i];
      } else {
        of_center *= tokens.terms[at.bh * padded_tokens(tokens.N) + i] * units;
        of_product *= units;
      }
      of_center *= row_unit;
      of_product *= row_unit;
      pairs.store<kMomentColumns>(b * stride[0] + h * stride[1] + i * stride[2],
                                  slice * kMomentColumns, products.columns, [&](int n) {
                                    const float2 own = load_vector<float2>(center + n * 8);
                                    if (is_hidden) return make_float2(0, 0);
                                    return make_float2(
                                        own.x * of_center + sum(m, n, 2 * half) * of_product,
                                        own.y * of_center + sum(m, n, 2 * half + 1) * of_product);
                                  });
    }
  }
}

}  // namespace
}  // namespace ikattn::cuda
