// Attention of the module's three kernels, between its projections.
#pragma once

#include <utility>

#include "ikattn/multihead_attention.h"

namespace ikattn::nn {

struct Heads {
  at::Tensor query, key, value;  // [N, H, L, d], [N, H, S, d], [N, H, S, d]
};

// Bool (true hides) or floating point (added to the logits), as the caller gave them.
struct Masks {
  at::Tensor padding;    // [N, S], or undefined
  at::Tensor attention;  // [1, 1, L, S] or [N, H, L, S], or undefined
  bool is_causal;        // query i sees keys 0..i, besides the above
};

struct Wanted {
  bool weights, average;
  double dropout_p;
};

// Both return the output [N, H, L, d] and the weights, [N, H, L, S] or averaged [N, L, S],
// undefined unless wanted. mask_type is the type of logits made of a bool mask.

std::pair<at::Tensor, at::Tensor> attend_softmax(const MultiheadAttentionOptions& options,
                                                 Heads heads, const Masks& masks,
                                                 at::ScalarType mask_type, const Wanted& wanted);
std::pair<at::Tensor, at::Tensor> attend_implicit(const MultiheadAttentionImpl& module,
                                                  const Heads& heads, const Masks& masks,
                                                  at::ScalarType mask_type, const Wanted& wanted);

}  // namespace ikattn::nn
