// The operators of moments in differentiable ATen, for second derivatives and torch.func.
// reference.cpp composes the operators of devices without kernels of the same functions, in blocks
// of tokens.
#pragma once

#include "moments/arguments.h"

namespace ikattn {

// The references take the arguments of the operators.
TwoTensors reference_key_moments(const at::Tensor& key_features, const at::Tensor& logits,
                                 const at::Tensor& value);
TwoTensors reference_from_moments(const at::Tensor& query_features, const at::Tensor& moments,
                                  const at::Tensor& reference, double eps);
FourTensors reference_causal(const at::Tensor& query_features, const at::Tensor& key_features,
                             const at::Tensor& logits, const at::Tensor& value,
                             const at::Tensor& moments, const at::Tensor& reference, double eps);
TwoTensors reference_merged(const at::Tensor& moments, const at::Tensor& reference,
                            const at::Tensor& other_moments, const at::Tensor& other_reference);

}  // namespace ikattn
