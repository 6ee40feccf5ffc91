// Tokens in 16-bit operands, which the tensor cores read, in one of two forms.
//
// Folded, where rows need not tell how large their largest key is:
//   phi_k' = c sqrt(e_j) phi(k_j),  e_j = exp(g_j - max g),  S = phi_q . phi_k'
//   w = S S + K eps e_j,  K = (4 M c)^2
// K cancels in the output; c moves the weights to where their 16-bit type is dense: up to 2^15 for
// Half, and bfloat16 takes any.
//
// General, with float masks, and for heads whose keys' magnitudes differ too much where not every
// row sees the largest: phi_k' = phi(k_j), w = (s s + eps) exp(logit_ij - reference_i), s = S / (4
// M). Which one a head takes is known on the device only.
#pragma once

#include <type_traits>

#include "attention/calls/tensor_core_calls.h"
#include "attention/cuda/operands/route.h"
#include "attention/cuda/operands/tokens.h"
#include "support/cuda/float16.h"
#include "support/cuda/warps.h"

namespace ikattn::cuda {

// Returns how many columns a row of features, of their gradients, or of grad_output, has in memory.
// Features lie cosines first, then sines, 64 frequencies after the other (32, in rows of 64).
__host__ __device__ constexpr int64_t padded_columns(int64_t columns) {
  return columns <= 64 ? 64 : (columns + 127) / 128 * 128;
}
// Returns whether there are more than a block holds, which then passes along slices of 128.
inline bool is_wide(const AttentionParams& params) {
  return 2 * params.M > 128 || params.d_v > 128;
}

// Returns the length of rows of per-token numbers that are copied 64 or 128 at a time.
__host__ __device__ inline int64_t padded_tokens(int64_t N) { return (N + 127) / 128 * 128; }

// Factor of weights in the general form, which 1 / Z' has in return: 2^15 moves them to where Half
// is dense; bfloat16 is dense everywhere.
template <typename T>
constexpr float kWeightScale = std::is_same_v<T, Half> ? 32768.0f : 1.0f;

// Scales of the general form: weights are squares of scores times `square`, plus `eps`. Made before
// a kernel, whose instructions read parameters where registers are few.
struct GeneralScales {
  float square, eps;
};

constexpr int kLinearQueries = 128;  // queries that take linear time, or not, together

// A value as Half.
struct HalfValue {
  Array rows;           // [B, G, S, columns], rows aligned to 16 bytes
  int columns;          // a multiple of 8
  const float* scales;  // [B, G]  a power of two that it was multiplied with; nullptr: 1
};

// Features, which lie in [-2, 2], as integers of 8 bits: 2 is 127. The forward of the folded form
// in bfloat16:
//   w = (s s + eps) e_j,  s = phi_q . phi_k,  e_j = exp(g_j - max g)
// A row has 128 columns, of each 16 frequencies 32: four cosines and four sines in turn.
struct Int8Features {
  static constexpr int kColumns = 128, kLargest = 127;

  const int8_t* phi_q = nullptr;  // [B, H, L, kColumns]; nullptr: there are none
  const int8_t* phi_k = nullptr;  // [B, key_heads, S, kColumns]
  // [B, key_heads, padded S]  e_j; 0: hidden; NaN: poisoned
  const BFloat16* magnitudes = nullptr;
  float eps = 0;  // a number of bfloat16
};

// The form of every head, and the numbers that it needs of the keys (tensor_cores/fold_tokens.cu).
struct HeadForms {
  float* scales;  // [B, key_heads, S]  of phi_k'; 0: hidden or poisoned
  // [B, key_heads, padded S]  folded: K eps e_j, 0: hidden; general: the logit, -inf: hidden. NaN:
  // poisoned
  float* terms;
  // [B, key_heads, padded S]  folded: `scales` again, in rows that are copied; general: the low
  // parts of the logits
  float* lows;
  double* largest;  // [B, key_heads]  max g
  // [B, key_heads]  bits: kGeneral: the form; kUnclean: some key or value, hidden or not, is not
  // finite; kFew: so few keys have weight that rows may be those of one
  uint32_t* state;
  unsigned* item_counters;  // [2]  counters of Hopper's items, 0 at first
  GeneralScales general;
  float root_scale;  // sqrt(K)
  float log_scale;   // log K; with scores of integers the offset of the weights' logarithms
};

// Values, and choices of linear time (linear/linear.h), for calls that take it.
struct LinearBlocks {
  HalfValue half_value;
  // [B, H, blocks of kLinearQueries]  which of them take quadratic time all the same; nullptr: all
  const uint32_t* quadratic_blocks;
  const uint32_t* quadratic_heads;  // [B, key_heads]  likewise in the backward
};

struct FoldedTokens {
  const Half* phi_q;  // [B, H, L, padded F]  zero where the query is poisoned
  // [B, H, L]  added to a row's sum of weights in the forward, if it sees a key: NaN where the
  // query is poisoned, else 0. The backward has the normalizer
  const float* poison;
  const Half* phi_k;  // [B, key_heads, S, padded F]
  // The value in 16 bits, as it lies or a copy.
  Array value;        // [B, G, S, value_columns], rows aligned to 16 bytes
  int value_columns;  // a multiple of 8
  // [B, G]  a power of two that float32 was multiplied with, so that its largest are Half's
  // largest: numbers down to 2^-29 of these keep all their 11 bits. nullptr: 1
  const float* value_scales;
  const uint32_t* value_bounds;  // [B, key_heads]  bits of max |V_j| of keys that are not hidden
  HeadForms forms;
  Int8Features int8;
  LinearBlocks linear;
};
// Return where a head's value lies among [B, G], and its scale.
__device__ __forceinline__ int64_t value_head_of(const AttentionParams& params, int64_t b,
                                                 int64_t h) {
  return b * params.G + h * params.G / params.H;
}
__device__ __forceinline__ float value_scale_of(const FoldedTokens& tokens, int64_t value_head) {
  return tokens.value_scales == nullptr ? 1.0f : tokens.value_scales[value_head];
}

// Returns the largest power of two with which numbers up to `bound` stay below 2^15.
__device__ __forceinline__ float fitting_power(float bound) {
  if (!(bound > 0)) return 1;
  const int exponent = static_cast<int>(__float_as_uint(bound) >> 23);  // biased by 127
  return __uint_as_float(static_cast<uint32_t>(min(127 + 14 + 127 - exponent, 254)) << 23);
}

// Raises a bound to x, which is not negative: such floats have the order of their bits.
__device__ __forceinline__ void raise(uint32_t* bound, double x) {
  constexpr double kLargest = 3e38;
  if (x - x == 0) atomicMax(bound, __float_as_uint(static_cast<float>(min(x, kLargest))));
}
// Raises one bound by the numbers of a whole warp.
__device__ __forceinline__ void raise_by_warp(uint32_t* bound, double x) {
  const double most = max_of_lanes(x - x == 0 ? x : 0.0);
  if (threadIdx.x % 32 == 0 && most > 0) raise(bound, most);
}
constexpr uint32_t kGeneral = 1, kUnclean = 2, kFew = 4;
// Keys within this of the largest logit, by which kFew is told, and how many of them are few.
constexpr float kNatsThatCount = 8;
constexpr int kFewKeys = 64;

// Returns whether no head takes the folded form: of a float mask, and of batch-invariant calls,
// whose rows must not follow the largest key where they may not see it.
inline bool is_general_alone(const AttentionParams& params) {
  const bool has_mask = params.mask.type != ElementType::kNone;
  return params.batch_invariant || (has_mask && params.mask.type != ElementType::kBool);
}

// Returns whether every row sees all keys: where it sees the largest one, the folded form is right
// for any spread of magnitudes.
__host__ __device__ inline bool every_row_sees_all(const AttentionParams& params) {
  return params.mask.type == ElementType::kNone && !params.is_causal;
}

// Gradients of one side's features, as Half. A row, of 128 columns each where there are more, has a
// scale of its own: its largest number is Half's.
struct FeatureGradients {
  Half* rows;     // [B, heads, N, padded F]
  float* scales;  // [slices of 128 columns][B, heads, padded N]  of which they are to be multiplied

  FeatureGradients(const DeviceExecutor& executor, int64_t heads, int64_t N, int64_t width)
      : rows(executor.take<Half>(heads * N * width)),
        scales(executor.take<float>((width + 127) / 128 * heads * padded_tokens(N))) {}
};
// Returns where the scale of a head's first token stands, for one slice; `heads` counts all
// batches'.
__device__ __forceinline__ int64_t scale_place(int64_t slice, int64_t heads, int64_t bh,
                                               int64_t N) {
  return (slice * heads + bh) * padded_tokens(N);
}
// Gradients that the pairs leave to the tokens.
struct FoldedGradients {
  FeatureGradients phi_q, phi_k;
  float* logits;  // [B, key_heads, S]
};

struct AngleOperands;

// Bounds that raise() may be called with.
const char* clear_bounds(uint32_t* bounds, int64_t count, Stream stream);

// Returns whether the norms of values are asked for, of which bounds are made.
bool needs_value_norms(const AttentionParams& params, const Route& route, bool for_backward);

// Makes `folded` in four steps: bounds of the values, the form of each head, features, values.
// Features are made from the tokens again, in float32, and rounded once. for_backward: with the
// value's bounds, and without `poison`.
const char* fold_tokens(const AttentionParams& params, const DeviceExecutor& executor,
                        const AngleOperands& operands, const SplitLogits<float>& logits,
                        const Route& route, bool for_backward, FoldedTokens& folded);

}  // namespace ikattn::cuda
