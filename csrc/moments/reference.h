// The same mathematics in ATen: differentiable in whole, for second derivatives and torch.func, and
// in blocks of tokens where there are no kernels. A block holds E numbers a token.
#pragma once

#include "moments/arguments.h"

namespace ikattn {

// Differentiable; arguments as those of the operators.
TwoTensors reference_key_moments(const at::Tensor& key_features, const at::Tensor& logits,
                                 const at::Tensor& value);
TwoTensors reference_from_moments(const at::Tensor& query_features, const at::Tensor& moments,
                                  const at::Tensor& reference, double eps);
FourTensors reference_causal(const at::Tensor& query_features, const at::Tensor& key_features,
                             const at::Tensor& logits, const at::Tensor& value,
                             const at::Tensor& moments, const at::Tensor& reference, double eps);
TwoTensors reference_merged(const at::Tensor& moments, const at::Tensor& reference,
                            const at::Tensor& other_moments, const at::Tensor& other_reference);

// In blocks, not differentiable.
TwoTensors key_moments_in_blocks(const at::Tensor& key_features, const at::Tensor& logits,
                                 const at::Tensor& value);
ThreeTensors key_moments_backward_in_blocks(const at::Tensor& grad_moments,
                                            const at::Tensor& key_features,
                                            const at::Tensor& logits, const at::Tensor& value,
                                            const at::Tensor& reference,
                                            const std::array<bool, 3>& wanted);
TwoTensors from_moments_in_blocks(const at::Tensor& query_features, const at::Tensor& moments,
                                  const at::Tensor& reference, double eps);
TwoTensors from_moments_backward_in_blocks(const at::Tensor& grad_output,
                                           const at::Tensor& query_features,
                                           const at::Tensor& moments, const at::Tensor& reference,
                                           const at::Tensor& output,
                                           const at::Tensor& log_normalizer, double eps,
                                           const std::array<bool, 2>& wanted);

FourTensors causal_in_blocks(const at::Tensor& query_features, const at::Tensor& key_features,
                             const at::Tensor& logits, const at::Tensor& value,
                             const at::Tensor& moments, const at::Tensor& reference, double eps);
FiveTensors causal_backward_in_blocks(const at::Tensor& grad_output,
                                      const std::optional<at::Tensor>& grad_all_moments,
                                      const at::Tensor& query_features,
                                      const at::Tensor& key_features, const at::Tensor& logits,
                                      const at::Tensor& value, const at::Tensor& moments,
                                      const at::Tensor& reference, const at::Tensor& output,
                                      const at::Tensor& log_normalizer, double eps,
                                      const std::array<bool, 5>& wanted);

}  // namespace ikattn
