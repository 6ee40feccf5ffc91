// What is added to the logits of keys: key_bias, and masks that are the same for every query, as
// padding is. Calls with such masks take the kernels that calls without a mask take.
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

// Whether an axis has one element, which strides may repeat. Floating-point masks have a gradient
// for each repetition, which pairs tell apart.
inline bool is_one_for_all(const at::Tensor& mask, int64_t axis) {
  if (mask.dim() < -axis || mask.size(axis) == 1) return true;
  return mask.size(axis) > 0 && mask.stride(axis) == 0 && mask.scalar_type() == at::kBool;
}

// Whether the queries of a head have one row of the mask, by its shape and strides. With a single
// query every mask is of keys; in batch-invariant calls the bits of a query must not follow from
// there being others.
inline bool is_key_mask(const std::optional<at::Tensor>& mask, int64_t L) {
  if (!is_present(mask) || is_batch_invariant()) return false;
  return L == 1 || is_one_for_all(*mask, -2);
}

// key_bias, repeated within groups where it has fewer heads than the prepared keys: broadcasts to
// [B, key heads, S].
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

// What a key mask, or a key bias, adds to logits, in float64; bool masks: 0 and -inf. Half as far
// as offsets reach, so that kernels do not cut off what is added to the lowest number.
inline at::Tensor offsets_in_double(const at::Tensor& bias) {
  if (bias.scalar_type() == at::kBool) {
    return at::zeros(bias.sizes(), bias.options().dtype(at::kDouble))
        .masked_fill_(bias.logical_not(), -INFINITY);
  }
  return bounded_offsets(bias, 0.5);
}

// key_bias [B, key_heads, S] and key mask [B, H or key_heads, L, S], or what broadcasts to these,
// as one bias of the keys. No float32 holds their sum.
inline at::Tensor sum_of_offsets(const at::Tensor& key_bias, const at::Tensor& key_mask) {
  at::Tensor row = key_mask.dim() < 2 ? key_mask : key_mask.select(-2, 0);
  if (row.dim() >= 2 && is_one_for_all(key_mask, -3)) row = row.narrow(-2, 0, 1);
  return offsets_in_double(key_bias) + offsets_in_double(row);
}

// A key mask [B, key_heads, S] alone, where it lies.
inline Array array_of_key_mask(const at::Tensor& key_mask, at::IntArrayRef mask_sizes) {
  Array array = array_of(key_mask, mask_sizes);
  array.stride[2] = array.stride[3];  // of heads that are all alike strides are 0
  array.stride[3] = 0;
  return array;
}

// key_bias and mask of a call, and the heads of its prepared keys. A key mask is no mask here, but
// a bias of the keys, or a part of it, which `kept` then holds.
inline void set_offsets(AttentionParams& params, const AttentionSizes& sizes,
                        const AttentionOptions& options, at::Tensor& kept) {
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
    kept = bias_per_key_head(*options.key_bias, params.key_heads);
    if (has_key_mask) kept = sum_of_offsets(kept, *mask);
    params.key_bias = array_of(kept, {sizes.B, params.key_heads, sizes.S});
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
