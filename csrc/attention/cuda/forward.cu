// The forward pass, and the weights: the kernels of a route, one after the other.
#include "attention/cuda/cuda_cores/cuda_cores.h"
#include "attention/cuda/features/angle_products.h"
#include "attention/cuda/hopper/hopper.h"
#include "attention/cuda/linear/linear.h"
#include "attention/cuda/split/split.h"
#include "attention/cuda/tensor_cores/epilogue_forward.h"
#include "attention/cuda/tensor_cores/weights.h"

namespace ikattn::cuda {
namespace {

const char* prepare_folded_logits(const AttentionParams& params, const DeviceExecutor& executor,
                                  const Route& route, SplitLogits<float>& logits) {
  return prepare_logits(params, executor, needs_value_norms(params, route, false), logits);
}

const char* forward_on_tensor_cores(const AttentionParams& params, const DeviceExecutor& executor,
                                    const Route& route, const SplitLogits<float>& logits,
                                    FoldedTokens& tokens) {
  const Stream stream = executor.stream;
  AngleOperands operands;
  if (const char* error = prepare_angles(params, executor, false, operands)) return error;
  if (const char* error = fold_tokens(params, executor, operands, logits, route, false, tokens)) {
    return error;
  }
  const Parts parts = take_parts(params, executor, route.parts);
  InitialSums initial;
  const char* error = nullptr;
  if (route.is_wide) {
    error = wide_forward(params, stream, tokens, parts);
  } else {
    const bool on_hopper = route.unit == Unit::kHopper;
    if (route.algorithm == Algorithm::kLinear) {
      error = linear_forward(params, executor, tokens, initial);
    } else if (on_hopper) {
      error = route.int8_scores ? warpgroup_int8_forward(params, executor, tokens)
                                : warpgroup_forward(params, executor, tokens);
    }
    if (error == nullptr) {
      error = folded_forward(params, stream, tokens, parts, initial, on_hopper);
    }
  }
  return error != nullptr ? error : combine_parts(params, stream, tokens, parts);
}

}  // namespace

template <typename T>
const char* attention_forward(const AttentionParams& params, const DeviceExecutor& executor) {
  PreparedTokens<T> tokens;
  const Route route = route_of(params, sizeof(T) == sizeof(double), Pass::kForward);
  if constexpr (sizeof(T) == sizeof(float)) {
    if (route.unit != Unit::kCudaCores && !route.split_products) {
      FoldedTokens folded;
      if (const char* error = prepare_folded_logits(params, executor, route, tokens.keys)) {
        return error;
      }
      return forward_on_tensor_cores(params, executor, route, tokens.keys, folded);
    }
  }
  if (const char* error = prepare_tokens(params, executor, tokens)) return error;
  if constexpr (sizeof(T) == sizeof(float)) {
    if (route.split_products) return split_forward(params, executor, tokens);
  }
  return forward_on_cuda_cores(params, executor.stream, tokens);
}

template <typename T>
const char* attention_weights(const WeightsParams& params, const DeviceExecutor& executor) {
  if (sizeof(T) == sizeof(double) || !has_weights_on_tensor_cores(params)) {
    return weights_on_cuda_cores<T>(params, executor);
  }
  AttentionParams call;
  SplitLogits<float> logits;
  FoldedTokens tokens;
  if (const char* error = normalizer_call(params, executor, call)) return error;
  const Route route = route_of(call, false, Pass::kForward);
  if (const char* error = prepare_folded_logits(call, executor, route, logits)) return error;
  if (const char* error = forward_on_tensor_cores(call, executor, route, logits, tokens)) {
    return error;
  }
  return weights_on_tensor_cores(params, call, tokens, executor.stream);
}

template const char* attention_weights<float>(const WeightsParams&, const DeviceExecutor&);
template const char* attention_weights<double>(const WeightsParams&, const DeviceExecutor&);
template const char* attention_forward<float>(const AttentionParams&, const DeviceExecutor&);
template const char* attention_forward<double>(const AttentionParams&, const DeviceExecutor&);

}  // namespace ikattn::cuda
