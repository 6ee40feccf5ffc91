// The backward of implicit_kernel_weights through the reference, where there is no kernel for it.
#pragma once

#include "attention/arguments.h"

namespace ikattn {

// Some queries of one head at a time: no [L, S] is held but, under dropout, a byte per weight.
WeightsGradients weights_gradients_by_part(const at::Tensor& grad_weights, const at::Tensor& query,
                                           const at::Tensor& key, const at::Tensor& w1,
                                           const std::optional<at::Tensor>& w2,
                                           const AttentionOptions& options, bool average_heads,
                                           std::array<bool, kWeightsGradients> wanted);

}  // namespace ikattn
