// The offsets of keys' logits: key_bias, and masks that are the same for every query, such as
// padding. Calls with such masks take the kernels of calls without a mask.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <cmath>

#include "attention/calls/determinism.h"
#include "attention/calls/params.h"
#include "attention/operator/arguments.h"
#include "attention/operator/reference.h"
#include "support/glue.h"

namespace ikattn {
namespace {

// Tells whether an axis has one element, which strides may repeat. A repeated floating-point mask
// has a gradient for each repetition, and counts as several elements.
inline bool is_one_for_all(const at::Tensor& mask, int64_t axis) {
  if (mask.dim() < -axis || mask.size(axis) == 1) return true;
  return mask.size(axis) > 0 && mask.stride(axis) == 0 && mask.scalar_type() == at::kBool;
}

// Tells whether the queries of a head share one row of the mask, by its shape and strides. With a
// single query every mask is a key mask; in batch-invariant calls the bits of a query must not
// depend on the number of queries.
inline bool is_key_mask(const std::optional<at::Tensor>& mask, int64_t L) {
  if (!is_present(mask) || is_batch_invariant()) return false;
  return L == 1 || is_one_for_all(*mask, -2);
}

// Repeats key_bias within groups where it has fewer heads than the prepared keys; the result
// broadcasts to [B, key heads, S].
inline at::Tensor bias_per_key_head(const at::Tensor& bias, int64_t key_heads) {
  const int64_t heads = bias.dim() < 2 ? 1 : bias.size(-2);
  if (heads == 1 || heads == key_heads) return bias;
  return bias.repeat_interleave(key_heads / heads, -2);
}

inline bool has_bias_per_query_head(const AttentionOptions& options, const AttentionSizes& sizes) {
  if (!is_present(options.key_bias) || options.key_bias->dim() < 2) return false;
  const int64_t heads = options.key_bias->size(-2);
  return heads == sizes.H && heads != sizes.G;
}

// Returns the offsets of a key mask or a key bias in float64; bool masks give 0 and -inf. They are
// bounded to half of what kernels allow, so that the sum of two is not cut off.
inline at::Tensor offsets_in_double(const at::Tensor& bias) {
  if (bias.scalar_type() == at::kBool) {
    return at::zeros(bias.sizes(), bias.options().dtype(at::kDouble))
        .masked_fill_(bias.logical_not(), -INFINITY);
  }
  return bounded_offsets(bias.to(at::kDouble), 0.5);
}

// Adds key_bias [B, key_heads, S] and key mask [B, H or key_heads, L, S], or tensors that broadcast
// to these. The sum is float64, for float32 would round it.
inline at::Tensor sum_of_offsets(const at::Tensor& key_bias, const at::Tensor& key_mask) {
  at::Tensor row = key_mask.dim() < 2 ? key_mask : key_mask.select(-2, 0);
  if (row.dim() >= 2 && is_one_for_all(key_mask, -3)) row = row.narrow(-2, 0, 1);
  return sum_of_logits(offsets_in_double(key_bias), offsets_in_double(row));
}

// Returns a key mask as an array [B, key_heads, S], without a copy.
inline Array array_of_key_mask(const at::Tensor& key_mask, at::IntArrayRef mask_sizes) {
  Array array = array_of(key_mask, mask_sizes);
  array.stride[2] = array.stride[3];  // the stride of heads that are all alike is 0
  array.stride[3] = 0;
  return array;
}

// Sets key_bias and mask of a call, and the heads of its prepared keys. A key mask becomes a bias
// of the keys, or a part of it, in a tensor that `held` owns.
inline void set_offsets(AttentionParams& params, const AttentionSizes& sizes,
                        const AttentionOptions& options, at::Tensor& held) {
  const std::optional<at::Tensor>& mask = options.attn_mask;
  const bool has_bias = is_present(options.key_bias);
  const bool differs_by_head = is_present(mask) && !is_one_for_all(*mask, -3);
  bool per_query_head = sizes.frequency_heads != sizes.G || has_bias_per_query_head(options, sizes);
  // Keys of a group are not prepared for each of its heads for the sake of a few queries.
  const bool pays = !differs_by_head || per_query_head || sizes.H == sizes.G || sizes.L >= 64;
  const bool has_key_mask = pays && is_key_mask(mask, sizes.L);
  per_query_head = per_query_head || (has_key_mask && differs_by_head);
  params.key_heads = per_query_head ? sizes.H : sizes.G;
  if (has_bias) {
    held = bias_per_key_head(*options.key_bias, params.key_heads);
    if (has_key_mask) held = sum_of_offsets(held, *mask);
    params.key_bias = array_of(held, {sizes.B, params.key_heads, sizes.S});
  }
  if (!is_present(mask)) return;
  const std::array<int64_t, 4> mask_sizes = {sizes.B, sizes.H, sizes.L, sizes.S};
  if (!has_key_mask) {
    params.mask = array_of(*mask, mask_sizes);
  } else if (!has_bias) {
    params.key_bias = array_of_key_mask(*mask, mask_sizes);
  }
}

}  // namespace
}  // namespace ikattn
