// Entries of a block's tokens times moments: which moments, and what the products become.
#pragma once

#include "attention/cuda/linear/linear.h"
#include "attention/cuda/tensor_cores/blocks.h"

namespace ikattn::cuda {

constexpr uint32_t kMomentBytes = 2 * kMomentColumns;  // of a row

// The same by wgmma, on Hopper.
const char* warpgroup_entry_products(const AttentionParams& params, const EntryProducts& products,
                                     Stream stream);

namespace {

// One of a register's two numbers, twice.
__device__ __forceinline__ uint32_t twice(uint32_t two, bool second) {
  return second ? (two >> 16) | (two & 0xffff0000u) : (two & 0xffffu) | (two << 16);
}

// Whether pairs have the 128 queries from the row-th of a block on; of rows beyond the last, yes.
__device__ __forceinline__ bool are_by_pairs(const EntryProducts& products, const EntryBlock& at,
                                             int row) {
  if (products.quadratic_blocks == nullptr) return false;
  const int blocks = static_cast<int>((products.tokens.N + kLinearQueries - 1) / kLinearQueries);
  const int block = (at.first + row) / kLinearQueries;
  return block >= blocks || products.quadratic_blocks[int64_t{at.bh} * blocks + block] != 0;
}

// Whether a block of tokens has nothing to do.
__device__ __forceinline__ bool is_left_out(const EntryProducts& products, const EntryBlock& at) {
  return leaves_out(products.tokens, at.bh / products.tokens.group) ||
         (are_by_pairs(products, at, 0) && are_by_pairs(products, at, kLinearQueries));
}

// Which of the sums of all heads and prefixes the tokens of a block take.
__device__ __forceinline__ int64_t place_of_sums(const EntryProducts& products,
                                                 const EntryBlock& at) {
  const Prefixes& prefixes = products.sums.prefixes;
  return int64_t{at.bh / products.tokens.group} * prefixes.count + prefixes.of_queries(at.first);
}

// The 32 rows of a warp, of what their entries have added up to: sum(m, n, i), the i-th of tile n
// of 8 columns of the m-th 16 rows.
template <typename Sum>
__device__ __forceinline__ void store_entries(const EntryProducts& products, int slices,
                                              int64_t d_v, const Sum& sum) {
  // Found anew: no register holds them over the stages.
  const unsigned thread = unknown_to_compiler(threadIdx.x);
  const unsigned index = unknown_to_compiler(blockIdx.x);
  const LinearTokens& tokens = products.tokens;
  const int slice = static_cast<int>(index) % slices, warp_row = static_cast<int>(thread) / 32 * 32;
  const EntryBlock at(tokens, index / slices);
  if (are_by_pairs(products, at, warp_row / kLinearQueries * kLinearQueries)) return;
  const int64_t bk = at.bh / tokens.group, b = at.bh / tokens.heads, h = at.bh % tokens.heads;
  const int64_t place = place_of_sums(products, at);
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
      pairs.store<kMomentColumns>(
          b * stride[0] + h * stride[1] + i * stride[2], slice * kMomentColumns, d_v, [&](int n) {
            const float2 own = load_vector<float2>(center + n * 8);
            if (is_hidden) return make_float2(0, 0);
            return make_float2(own.x * of_center + sum(m, n, 2 * half) * of_product,
                               own.y * of_center + sum(m, n, 2 * half + 1) * of_product);
          });
    }
  }
}

}  // namespace
}  // namespace ikattn::cuda
