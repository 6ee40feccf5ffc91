// The backward pass: the kernels of a route, one after the other.
#include "attention/cuda/cuda_cores/cuda_cores.h"
#include "attention/cuda/features/angle_products.h"
#include "attention/cuda/hopper/hopper.h"
#include "attention/cuda/linear/linear.h"
#include "attention/cuda/split/split.h"
#include "attention/cuda/tensor_cores/initial_sums.h"
#include "attention/cuda/tensor_cores/rows.h"

namespace ikattn::cuda {
namespace {

// Computes grad_value, and all that `gradients` asks for, on tensor cores.
const char* pairs_on_tensor_cores(const AttentionBackwardParams& params,
                                  const DeviceExecutor& executor, const Route& route,
                                  const SplitLogits<float>& keys, FoldedTokens& tokens,
                                  const FoldedRows& rows, const FoldedGradients& gradients) {
  const Stream stream = executor.stream;
  const float* logits = keys.high;
  const bool on_hopper = route.unit == Unit::kHopper;
  InitialGradients initial;
  const char* error = nullptr;
  if (route.algorithm == Algorithm::kLinear) {
    error = linear_backward(params, executor, tokens, rows, logits, gradients, initial);
  }
  if (error == nullptr && wants_queries(params)) {
    const FeatureGradients& to = gradients.phi_q;
    if (on_hopper) error = warpgroup_query_gradients(params, executor, tokens, rows, to);
    if (error == nullptr) {
      error = route.is_wide
                  ? wide_query_gradients(params, stream, tokens, rows, to)
                  : folded_query_gradients(params, stream, tokens, rows, to, initial, on_hopper);
    }
  }
  if (error == nullptr && wants_keys(params)) {
    if (on_hopper) {
      error = warpgroup_key_gradients(params, executor, tokens, rows, logits, gradients);
    }
    if (error == nullptr) {
      error = route.is_wide ? wide_key_gradients(params, stream, tokens, rows, logits, gradients)
                            : folded_key_gradients(params, stream, tokens, rows, logits, gradients,
                                                   initial, on_hopper);
    }
  }
  return error;
}

const char* backward_on_tensor_cores(const AttentionBackwardParams& params,
                                     const DeviceExecutor& executor, const Route& route,
                                     const SplitLogits<float>& keys, float* grad_logits) {
  const int64_t width = padded_columns(2 * params.M);
  const FoldedGradients gradients = {
      FeatureGradients(executor, params.B * params.H, params.L, width),
      FeatureGradients(executor, params.B * params.key_heads, params.S, width), grad_logits};
  AngleOperands operands;
  FoldedTokens tokens;
  FoldedRows rows;
  if (const char* error = prepare_angles(params, executor, true, operands)) return error;
  if (const char* error = fold_tokens(params, executor, operands, keys, route, true, tokens)) {
    return error;
  }
  if (const char* error = make_folded_rows(params, executor, route, tokens, rows)) return error;
  if (const char* error =
          pairs_on_tensor_cores(params, executor, route, keys, tokens, rows, gradients)) {
    return error;
  }
  return feature_gradients_on_tensor_cores(params, executor, operands, keys, gradients);
}

// Computes the gradients of pairs in float32, by split products or on CUDA cores, or in float64.
template <typename T>
const char* float_pairs(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                        const Route& route, const PreparedTokens<T>& tokens,
                        const RowState<T>& rows, const PairGradients<T>& gradients) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (route.split_products) {
      return split_pair_gradients(params, executor, tokens, rows, gradients);
    }
  }
  return pair_gradients(params, executor, tokens, rows, gradients);
}

}  // namespace

template <typename T>
const char* attention_backward(const AttentionBackwardParams& params,
                               const DeviceExecutor& executor) {
  const Route route = route_of(params, sizeof(T) == sizeof(double), Pass::kBackward);
  const bool folds = route.unit != Unit::kCudaCores && !route.split_products;
  const int64_t F = 2 * params.M, keys = params.B * params.key_heads * params.S;
  PreparedTokens<T> tokens;
  if (const char* error = prepare_logits(params, executor, folds, tokens.keys)) return error;
  T* grad_logits = executor.take<T>(keys);
  if constexpr (sizeof(T) == sizeof(float)) {
    if (folds) {
      const char* error =
          backward_on_tensor_cores(params, executor, route, tokens.keys, grad_logits);
      if (error != nullptr) return error;
    }
  }
  if (!folds || params.grad_mask) {
    RowState<T> rows;
    if (const char* error = prepare_features(params, executor, tokens)) return error;
    if (const char* error = prepare_rows(params, executor, tokens, rows)) return error;
    if (!folds) {
      const PairGradients<T> gradients = {executor.take<T>(params.B * params.H * params.L * F),
                                          executor.take<T>(keys * F), grad_logits};
      if (const char* error = float_pairs(params, executor, route, tokens, rows, gradients)) {
        return error;
      }
      if (const char* error = token_gradients<T>(params, executor, tokens.keys, gradients)) {
        return error;
      }
    }
    if (params.grad_mask) {
      if (const char* error = mask_gradient(params, executor, tokens, rows)) return error;
    }
  }
  if (!params.grad_key_bias) return nullptr;
  return bias_gradient<T>(params, executor.stream, grad_logits);
}

template const char* attention_backward<float>(const AttentionBackwardParams&,
                                               const DeviceExecutor&);
template const char* attention_backward<double>(const AttentionBackwardParams&,
                                                const DeviceExecutor&);

}  // namespace ikattn::cuda
