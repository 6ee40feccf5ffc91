// Scores of 16 keys and 32 queries by one warp, and what a pair's weight is made of. Operands are
// read from global memory, which L1 and L2 serve, straight to the registers of a product: a lane
// takes 16 bytes of a row, whose eight elements it has at its inner places of two products. Which
// column is at which place is of no account, as both operands agree.
//
// Lanes g = lane / 4 and t = lane % 4. score[n][2 r + c] is that of key j0 + g + 8 r and query
// q0 + 8 n + 2 t + c, and so is bit 4 n + 2 r + c of visible pairs.
#pragma once

#include "contributions/cuda/streamed/streamed.h"
#include "support/cuda/elements.h"

namespace ikattn::cuda {
namespace {

// Size of a warp's tile: keys, and tiles of 8 queries, half as many where many heads leave no room.
constexpr int kStreamedKeys = 16, kTiles = 4;

// Adds to score[n] the products of 16 keys and 8 kCount queries.
template <typename T, int kCount>
__device__ __forceinline__ void multiply_rows(const StreamedParams& params, int64_t b, int64_t h,
                                              int64_t q0, int64_t j0, float (&score)[kCount][4]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int64_t key_head = h / (params.H / params.G);
  const auto* key = static_cast<const uint16_t*>(params.key.data) + b * params.key.stride[0] +
                    key_head * params.key.stride[1] + t * 8;
  const auto* query = static_cast<const uint16_t*>(params.query.data) + b * params.query.stride[0] +
                      h * params.query.stride[1] + t * 8;
  // Tokens that are not there are the last one, and hidden.
  const uint16_t* low = key + min(j0 + g, params.S - 1) * params.key.stride[2];
  const uint16_t* high = key + min(j0 + g + 8, params.S - 1) * params.key.stride[2];
#pragma unroll 1
  for (int64_t column = 0; column < params.width; column += kOperandColumns) {
    const uint4 a = load_vector<uint4>(low + column), c = load_vector<uint4>(high + column);
    const uint32_t first[4] = {a.x, c.x, a.y, c.y}, second[4] = {a.z, c.z, a.w, c.w};
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int64_t i = min(q0 + 8 * n + g, params.L - 1);
      const uint4 right = load_vector<uint4>(query + i * params.query.stride[2] + column);
      mma_m16n8k16<T>(score[n], first, right.x, right.y);
      mma_m16n8k16<T>(score[n], second, right.z, right.w);
    }
  }
}

// Head that stands for all in visible_pairs(), which returns the pairs that exist and are seen
// under causality and the mask of a head; where masks differ, by one head at least.
constexpr int64_t kAllHeads = -1;

template <int kCount = kTiles>
__device__ __forceinline__ uint32_t visible_pairs(const StreamedParams& params, int64_t b,
                                                  int64_t q0, int64_t j0, int64_t h = kAllHeads) {
  static_assert(kMaskKeys % kStreamedKeys == 0);
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int64_t words = (params.S + kMaskKeys - 1) / kMaskKeys;
  const bool differs = params.mask_heads > 1;
  const bool is_masked = params.mask != nullptr && !(differs && h == kAllHeads);
  const int64_t first = (b * params.mask_heads + (differs ? h : 0)) * params.L;
  uint32_t visible = 0;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int64_t i = q0 + 8 * n + 2 * t + c;
      if (i >= params.L) continue;
      const int64_t end = params.is_causal ? min(params.S, i + 1) : params.S;
      const uint32_t word = is_masked ? params.mask[(first + i) * words + j0 / kMaskKeys] : ~0u;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int64_t j = j0 + g + 8 * r;
        const bool seen = j < end && (word >> (j % kMaskKeys) & 1) != 0;
        visible |= uint32_t{seen} << (4 * n + 2 * r + c);
      }
    }
  }
  return visible;
}

// A weight before it is divided by its row's sum: magnitude exp(logit + low).
struct PairTerm {
  float magnitude, logit, low;
};

struct KeyNumbers {
  float factor = 0, logit = 0, low = 0;

  KeyNumbers() = default;
  __device__ __forceinline__ KeyNumbers(const StreamedParams& params, int64_t b, int64_t h,
                                        int64_t j) {
    const float4 numbers = load_vector<float4>(
        params.key_numbers + ((b * params.H + h) * params.S + min(j, params.S - 1)) * 4);
    factor = numbers.x;
    logit = numbers.y;
    low = numbers.z;
  }
};

__device__ __forceinline__ bool has_offsets(const StreamedParams& params) {
  return params.offsets.type != ElementType::kNone;
}

// Returns the float mask of a pair, which is added to its logit.
__device__ __forceinline__ float offset_of(const StreamedParams& params, int64_t b, int64_t h,
                                           int64_t i, int64_t j) {
  if (!has_offsets(params)) return 0;
  const int64_t* stride = params.offsets.stride;
  const float offset = load_element<float>(params.offsets, b * stride[0] + h * stride[1] +
                                                               min(i, params.L - 1) * stride[2] +
                                                               min(j, params.S - 1) * stride[3]);
  const float farthest = params.farthest_offset;
  return offset - offset == 0 ? fminf(fmaxf(offset, -farthest), farthest) : offset;
}

// Computes the terms of a pair. A hidden pair does not count, whatever it holds, NaN too.
__device__ __forceinline__ PairTerm pair_term(const StreamedParams& params, float score,
                                              float row_factor, const KeyNumbers& key, bool visible,
                                              float offset = 0) {
  const float x = score * row_factor * key.factor;
  PairTerm term{params.is_implicit ? x * x + params.eps : 1.0f,
                params.is_implicit ? key.logit : x + key.logit,
                params.is_implicit ? key.low : 0.0f};
  if (has_offsets(params)) {
    const float logit = term.logit, sum = logit + offset, added = sum - logit;
    term.logit = sum;
    // Adds the rounding error of the sum to the low part, for magnitudes of the implicit kernel may
    // need it.
    const float lost = (logit - (sum - added)) + (offset - added);
    if (params.is_implicit && lost - lost == 0) term.low += lost;
  }
  if (!visible || key.logit == -INFINITY || offset == -INFINITY) term = {1.0f, -INFINITY, 0.0f};
  return term;
}

__device__ __forceinline__ float exp_of(float x) { return fast_exp2(x * 1.44269504f); }

// Returns the weight of a pair, by the numbers of its row.
__device__ __forceinline__ float weight_of(const StreamedParams& params, const PairTerm& term,
                                           const float4& row) {
  const float weight = term.magnitude * exp_of((term.logit - row.y) + (term.low - row.w)) * row.z;
  // A hidden pair is zero in a row that is NaN, too, but for dot attention, as torch has it.
  if (params.is_implicit && term.logit == -INFINITY) return 0;
  return weight > 1 ? 1 : weight;  // rounding exceeds 1, much so for a large logit
}

// Sum of the terms seen so far, relative to the largest logit, which is of two floats: magnitudes
// may be so large that one would lose their differences. NaN and inf end in a NaN.
struct RunningSum {
  float largest = -INFINITY, low = 0, sum = 0;

  __device__ __forceinline__ void add(const PairTerm& term) {
    raise(term.logit, term.low);
    sum += term.magnitude * relative(term.logit, term.low);
  }
  __device__ __forceinline__ void add(const RunningSum& other) {
    raise(other.largest, other.low);
    sum += other.sum * relative(other.largest, other.low);
  }

 private:
  __device__ __forceinline__ float relative(float logit, float rest) const {
    const float reference = largest == -INFINITY ? 0.0f : largest;
    return exp_of((logit - reference) + (rest - low));
  }
  __device__ __forceinline__ void raise(float logit, float rest) {
    if (!(logit > largest || (logit == largest && rest > low))) return;
    const float before = largest, before_low = low;
    largest = logit;
    low = rest;
    sum *= relative(before, before_low);
  }
};

}  // namespace
}  // namespace ikattn::cuda
