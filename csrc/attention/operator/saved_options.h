// AttentionOptions between the forward and the backward of an autograd function.
#pragma once

#include <vector>

#include "attention/operator/arguments.h"
#include "support/autograd.h"

namespace ikattn {

// Saves the options that are no tensors under one key, for every key costs a string.
inline void save_numbers(AutogradContext* ctx, const AttentionOptions& options) {
  ctx->saved_data["numbers"] =
      c10::ivalue::Tuple::create(options.p, options.dropout_p, options.is_causal,
                                 options.enable_gqa, options.eps, options.magnitude_scale);
}

// Returns the saved numbers with the tensors, undefined where absent.
inline AttentionOptions saved_options(AutogradContext* ctx, const at::Tensor& key_bias,
                                      const at::Tensor& attn_mask, const at::Tensor& dropout_seed) {
  const std::vector<at::IValue> numbers = ctx->saved_data["numbers"].toTupleRef().elements().vec();
  return {.p = numbers[0].toOptional<double>(),
          .key_bias = or_none(key_bias),
          .attn_mask = or_none(attn_mask),
          .dropout_p = numbers[1].toDouble(),
          .is_causal = numbers[2].toBool(),
          .enable_gqa = numbers[3].toBool(),
          .eps = numbers[4].toDouble(),
          .magnitude_scale = numbers[5].toOptional<double>(),
          .dropout_seed = or_none(dropout_seed)};
}

}  // namespace ikattn
