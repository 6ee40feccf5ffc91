// The forward pass: the kernels of a route, one after the other.
#include "attention/cuda/cuda_cores/cuda_cores.h"
#include "attention/cuda/features/angle_products.h"
#include "attention/cuda/linear/linear.h"
#include "attention/cuda/split/split.h"
#include "attention/cuda/tensor_cores/epilogue_forward.h"

namespace ikattn::cuda {
namespace {

const char* forward_on_tensor_cores(const AttentionParams& params, const DeviceExecutor& executor,
                                    const Route& route, const SplitLogits<float>& logits) {
  const Stream stream = executor.stream;
  AngleOperands operands;
  FoldedTokens tokens;
  if (const char* error = prepare_turns(params, executor, false, operands)) return error;
  if (const char* error = fold_tokens(params, executor, operands, logits, route, false, tokens)) {
    return error;
  }
  const Parts parts = take_parts(params, executor, route.parts);
  Begins begins;
  const char* error = nullptr;
  if (route.is_wide) {
    error = wide_forward(params, stream, tokens, parts);
  } else {
    const bool is_linear = route.algorithm == Algorithm::kLinear;
    const bool on_hopper = route.unit == Unit::kHopper && !is_linear;  // of pairs
    if (is_linear) {
      error = linear_forward(params, executor, tokens, begins);
    }
    if (on_hopper) {
      const auto forward = route.int8_scores ? warpgroup_int8_forward : warpgroup_forward;
      error = forward(params, stream, tokens);
    }
    if (error == nullptr) error = folded_forward(params, stream, tokens, parts, begins, on_hopper);
  }
  return error != nullptr ? error : combine_parts(params, stream, tokens, parts);
}

}  // namespace

template <typename T>
const char* attention_forward(const AttentionParams& params, const DeviceExecutor& executor) {
  PreparedTokens<T> tokens;
  const Route route = route_of(params, sizeof(T) == sizeof(double), Pass::kForward);
  const bool folds = route.unit != Unit::kCudaCores && !route.split_products;
  const bool wants_norms = folds && needs_value_norms(params, route, false);
  if (const char* error = prepare_logits(params, executor, wants_norms, tokens.keys)) return error;
  if constexpr (sizeof(T) == sizeof(float)) {
    if (folds) return forward_on_tensor_cores(params, executor, route, tokens.keys);
  }
  if (const char* error = prepare_features(params, executor, tokens)) return error;
  if constexpr (sizeof(T) == sizeof(float)) {
    if (route.split_products) return split_forward(params, executor, tokens);
  }
  return forward_on_cuda_cores(params, executor.stream, tokens);
}

template const char* attention_forward<float>(const AttentionParams&, const DeviceExecutor&);
template const char* attention_forward<double>(const AttentionParams&, const DeviceExecutor&);

}  // namespace ikattn::cuda
