// The mathematics of moments in ATen: references, differentiable and at once, for second
// derivatives and torch.func; and the operators composed of it, in blocks of tokens, where there
// are no kernels.
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

// The operators, which are not differentiable. A block has E numbers a token.
TwoTensors composed_key_moments(const at::Tensor& key_features, const at::Tensor& logits,
                                const at::Tensor& value);
ThreeTensors composed_key_moments_backward(const at::Tensor& grad_moments,
                                           const at::Tensor& key_features, const at::Tensor& logits,
                                           const at::Tensor& value, const at::Tensor& reference,
                                           std::array<bool, 3> wanted);
TwoTensors composed_from_moments(const at::Tensor& query_features, const at::Tensor& moments,
                                 const at::Tensor& reference, double eps);
TwoTensors composed_from_moments_backward(const at::Tensor& grad_output,
                                          const at::Tensor& query_features,
                                          const at::Tensor& moments, const at::Tensor& reference,
                                          const at::Tensor& output,
                                          const at::Tensor& log_normalizer, double eps,
                                          std::array<bool, 2> wanted);

FourTensors composed_causal(const at::Tensor& query_features, const at::Tensor& key_features,
                            const at::Tensor& logits, const at::Tensor& value,
                            const at::Tensor& moments, const at::Tensor& reference, double eps);
FiveTensors composed_causal_backward(const at::Tensor& grad_output,
                                     const std::optional<at::Tensor>& grad_all_moments,
                                     const at::Tensor& query_features,
                                     const at::Tensor& key_features, const at::Tensor& logits,
                                     const at::Tensor& value, const at::Tensor& moments,
                                     const at::Tensor& reference, const at::Tensor& output,
                                     const at::Tensor& log_normalizer, double eps,
                                     std::array<bool, 5> wanted);

}  // namespace ikattn
