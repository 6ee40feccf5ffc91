// Which form a key head takes, and what that form needs of each of its keys: by a kernel of their
// own (tensor_cores/choose_form.cu), or by the kernel of the features, block by block, which then
// leaves in memory how far the keys of every head are.
#pragma once

#include "attention/cuda/operands/math.h"
#include "attention/cuda/operands/value_bounds.h"
#include "support/cuda/warps.h"

namespace ikattn::cuda {

// Of the folded form.
struct FoldScales {
  float c, scaled_eps;
  double most_spread;  // in nats, what it bears
};

// What is left of every key, and of every head; see FoldedTokens.
struct FoldedKeys {
  float *scales, *terms, *lows;
  BFloat16* magnitudes;  // nullptr: not wanted
  double* largest;
  uint32_t* state;
  unsigned* items_taken;
};

// What blocks have left of a key head; zeros at first. Sums and maxima of integers: their order is
// of no account.
struct HeadProgress {
  unsigned long long most, negated_least;  // logits, as ordered_bits(); 0: there is none
  unsigned logits_made, keys_folded;       // ranges of keys
  unsigned keys_that_count, is_unclean;
  uint32_t norm, weighted_norm;  // bits of the largest norms of values
};

// What the form of heads follows from, and where it goes.
struct KeyForms {
  SplitLogits<float> logits;
  FoldScales scales;
  FoldedKeys keys;
  ValueBounds bounds;
  HeadProgress* heads;  // [B, key_heads]
};

namespace {

// The form of a head, and what its keys' magnitudes are relative to.
struct HeadForm {
  double reference;
  bool is_general, is_unclean;
};
// Of the max and the min of the logits, infinities where there is none.
__device__ __forceinline__ HeadForm form_of_spread(double most, double least, bool is_unclean,
                                                   double most_spread) {
  return {most == -INFINITY ? 0.0 : most, most_spread < 0 || most - least > most_spread,
          is_unclean};
}

struct FoldedKey {
  float logit, scale;  // relative to the largest; of the features
};
// Key j of a head of all batches', which may be one of those that rows are padded with: makes and
// stores what the form needs of it.
__device__ __forceinline__ FoldedKey fold_key(const AttentionParams& params, const KeyForms& forms,
                                              const HeadForm& form, unsigned bh, int64_t j) {
  const int64_t from = int64_t{bh} * params.S + j, to = bh * padded_tokens(params.S) + j;
  const bool is_there = j < params.S, general = form.is_general;
  const float high = is_there ? forms.logits.high[from] : -INFINITY;
  const float low = is_there ? forms.logits.low[from] : 0.0f;
  const auto reference_high = static_cast<float>(form.reference);
  const auto reference_low =
      static_cast<float>(form.reference - static_cast<double>(reference_high));
  const bool hidden = high == -INFINITY;
  const float logit = hidden ? -INFINITY : (high - reference_high) + (low - reference_low);
  const float e = hidden ? 0.0f : expf(logit);
  const FoldedKeys& keys = forms.keys;
  keys.terms[to] = !general ? forms.scales.scaled_eps * e : hidden ? -INFINITY : high;
  if (keys.magnitudes != nullptr) keys.magnitudes[to] = to_bfloat16(e);
  const float factor = hidden ? 0.0f : general ? 1.0f : forms.scales.c * sqrtf(e);
  const float scale = logit == logit ? factor : 0.0f;
  keys.lows[to] = !general ? scale : hidden ? 0.0f : low;
  if (is_there) keys.scales[from] = scale;
  return {logit, scale};
}

// The norm of a key's value where it counts for the bounds, else 0. Of weight: norms of keys whose
// features have some.
__device__ __forceinline__ float norm_that_counts(const AttentionParams& params,
                                                  const KeyForms& forms, unsigned bh, int64_t j,
                                                  const FoldedKey& key) {
  if (forms.bounds.of_all == nullptr || j >= params.S || key.logit == -INFINITY) return 0;
  const unsigned heads = static_cast<unsigned>(params.key_heads);
  if (!forms.bounds.keys.sees(params, bh / heads, bh % heads, j)) return 0;
  const float norm = forms.logits.value_norms[int64_t{bh} * params.S + j];
  return is_finite(norm) ? norm : 0;
}
__device__ __forceinline__ bool has_weight(const FoldedKey& key) { return key.scale >= 0x1p-26f; }

// What is left of a head: by one thread, of numbers of all its keys.
__device__ __forceinline__ void store_head(const KeyForms& forms, const HeadForm& form, unsigned bh,
                                           unsigned keys_that_count, float norm,
                                           float weighted_norm) {
  constexpr float kLargest = 3e38f;
  if (bh == 0) forms.keys.items_taken[0] = forms.keys.items_taken[1] = 0;
  forms.keys.largest[bh] = form.reference;
  forms.keys.state[bh] = (form.is_general ? kGeneral : 0u) | (form.is_unclean ? kUnclean : 0u) |
                         (keys_that_count <= kFewKeys ? kFew : 0u);
  const ValueBounds& bounds = forms.bounds;
  if (bounds.of_all != nullptr) bounds.of_all[bh] = __float_as_uint(fminf(norm, kLargest));
  if (bounds.of_weight != nullptr) {
    bounds.of_weight[bh] = __float_as_uint(fminf(weighted_norm, kLargest));
  }
}

// --- Block by block

// Numbers of which the order is that of these bits. None is 0.
__device__ __forceinline__ unsigned long long ordered_bits(double x) {
  const auto bits = static_cast<unsigned long long>(__double_as_longlong(x));
  return (bits >> 63) != 0 ? ~bits : bits | 1ull << 63;
}
__device__ __forceinline__ double of_ordered_bits(unsigned long long bits) {
  if (bits == 0) return -INFINITY;
  return __longlong_as_double(
      static_cast<long long>((bits >> 63) != 0 ? bits & ~(1ull << 63) : ~bits));
}

// Adds the logits of a warp's 32 keys from `first` on, which it has stored, to their head's.
__device__ __forceinline__ void add_logits_of_warp(const AttentionParams& params,
                                                   const KeyForms& forms, unsigned bh,
                                                   int64_t first) {
  const int64_t j = first + threadIdx.x % 32, index = int64_t{bh} * params.S + j;
  double most = -INFINITY, negated_least = -INFINITY;
  bool is_unclean = false;
  if (j < params.S) {
    const float high = forms.logits.high[index], low = forms.logits.low[index];
    const float sum = high + low;
    is_unclean = sum != sum;
    if (is_finite(sum)) {
      most = static_cast<double>(high) + static_cast<double>(low);
      negated_least = -most;
    }
  }
  most = max_of_lanes(most);
  negated_least = max_of_lanes(negated_least);
  is_unclean = __any_sync(0xffffffffu, is_unclean) != 0;
  HeadProgress& head = forms.heads[bh];
  if (threadIdx.x % 32 != 0) return;
  if (is_unclean) atomicOr(&head.is_unclean, 1u);
  if (most == -INFINITY) return;
  atomicMax(&head.most, ordered_bits(most));
  atomicMax(&head.negated_least, ordered_bits(negated_least));
}

// By the whole block, which has added the logits of a range of keys.
__device__ __forceinline__ void report_logits(const KeyForms& forms, unsigned bh) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();  // what the block has stored, before that it has
  atomicAdd(&forms.heads[bh].logits_made, 1u);
}

// Until all ranges of a head's keys have been reported: by the whole block. Blocks that report wait
// for nobody, and were there before.
__device__ __forceinline__ void wait_for_logits(const KeyForms& forms, unsigned bh,
                                                unsigned ranges) {
  if (threadIdx.x == 0) {
    while (atomicAdd(&forms.heads[bh].logits_made, 0u) < ranges) {
    }
    __threadfence();
  }
  __syncthreads();
}

// After wait_for_logits().
__device__ __forceinline__ HeadForm form_that_was_found(const KeyForms& forms, unsigned bh) {
  const HeadProgress& head = forms.heads[bh];
  return form_of_spread(of_ordered_bits(head.most), -of_ordered_bits(head.negated_least),
                        head.is_unclean != 0, forms.scales.most_spread);
}

// Of a warp's 32 keys from `first` on, and what rows are padded with there.
__device__ __forceinline__ void fold_keys_of_warp(const AttentionParams& params,
                                                  const KeyForms& forms, unsigned bh,
                                                  int64_t first) {
  if (first >= padded_tokens(params.S)) return;  // the whole warp
  const int64_t j = first + threadIdx.x % 32;
  const FoldedKey key = fold_key(params, forms, form_that_was_found(forms, bh), bh, j);
  const float norm = norm_that_counts(params, forms, bh, j, key);
  const unsigned counts = __ballot_sync(0xffffffffu, key.logit >= -kNatsThatCount);
  HeadProgress& head = forms.heads[bh];
  if (forms.bounds.of_all != nullptr) raise_by_warp(&head.norm, norm);
  if (forms.bounds.of_weight != nullptr) {
    raise_by_warp(&head.weighted_norm, has_weight(key) ? norm : 0.0f);
  }
  if (threadIdx.x % 32 == 0 && counts != 0) {
    atomicAdd(&head.keys_that_count, static_cast<unsigned>(__popc(counts)));
  }
  __syncwarp();  // scales, which the features are multiplied with
}

// By the whole block, which has folded a range of keys: whoever is the last of a head leaves what
// all have found.
__device__ __forceinline__ void finish_keys(const KeyForms& forms, unsigned bh, unsigned ranges) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();  // what the block has added, before that it has
  HeadProgress& head = forms.heads[bh];
  if (atomicAdd(&head.keys_folded, 1u) + 1 < ranges) return;
  __threadfence();
  store_head(forms, form_that_was_found(forms, bh), bh, atomicAdd(&head.keys_that_count, 0u),
             __uint_as_float(atomicMax(&head.norm, 0u)),
             __uint_as_float(atomicMax(&head.weighted_norm, 0u)));
}

}  // namespace
}  // namespace ikattn::cuda
