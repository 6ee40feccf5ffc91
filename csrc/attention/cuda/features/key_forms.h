// The form that a key head takes, and numbers that the form needs of each of its keys
// (tensor_cores/fold_tokens.cu).
#pragma once

#include "attention/cuda/operands/math.h"
#include "attention/cuda/operands/value_bounds.h"
#include "support/cuda/warps.h"

namespace ikattn::cuda {

// Scales of the folded form.
struct FoldScales {
  float c, scaled_eps;
  double most_spread;  // in nats, what it bears
};

// Logits from which the form of heads follows, and results of the choice.
struct KeyForms {
  SplitLogits<float> logits;
  FoldScales scales;
  HeadForms keys;
  BFloat16* magnitudes;  // Int8Features::magnitudes; nullptr: not wanted
  ValueBounds bounds;
};

namespace {

// The form of a head, and what its keys' magnitudes are relative to.
struct HeadForm {
  double reference;
  bool is_general, is_unclean;
};
// Returns the form for the max and the min of the logits, which are infinities where there is none.
__device__ __forceinline__ HeadForm form_of_spread(double most, double least, bool is_unclean,
                                                   double most_spread) {
  return {most == -INFINITY ? 0.0 : most, most_spread < 0 || most - least > most_spread,
          is_unclean};
}

struct FoldedKey {
  float logit, scale;  // relative to the largest; of the features
};
// Makes and stores the numbers that the form needs of key j of a head of all batches', which may be
// padding.
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
  const HeadForms& keys = forms.keys;
  keys.terms[to] = !general ? forms.scales.scaled_eps * e : hidden ? -INFINITY : high;
  if (forms.magnitudes != nullptr) forms.magnitudes[to] = to_bfloat16(e);
  const float factor = hidden ? 0.0f : general ? 1.0f : forms.scales.c * sqrtf(e);
  const float scale = logit == logit ? factor : 0.0f;
  keys.lows[to] = !general ? scale : hidden ? 0.0f : low;
  if (is_there) keys.scales[from] = scale;
  return {logit, scale};
}

// Returns the norm of a key's value where it counts for the bounds, else 0.
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

// Stores a head's results; one thread does, from sums over all its keys.
__device__ __forceinline__ void store_head(const KeyForms& forms, const HeadForm& form, unsigned bh,
                                           unsigned keys_that_count, float norm,
                                           float weighted_norm) {
  constexpr float kLargest = 3e38f;
  if (bh == 0) forms.keys.item_counters[0] = forms.keys.item_counters[1] = 0;
  forms.keys.largest[bh] = form.reference;
  forms.keys.state[bh] = (form.is_general ? kGeneral : 0u) | (form.is_unclean ? kUnclean : 0u) |
                         (keys_that_count <= kFewKeys ? kFew : 0u);
  const ValueBounds& bounds = forms.bounds;
  if (bounds.of_all != nullptr) bounds.of_all[bh] = __float_as_uint(fminf(norm, kLargest));
  if (bounds.of_weight != nullptr) {
    bounds.of_weight[bh] = __float_as_uint(fminf(weighted_norm, kLargest));
  }
}

}  // namespace
}  // namespace ikattn::cuda
