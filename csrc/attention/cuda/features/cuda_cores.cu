// Tokens to features, on CUDA cores, and logits.
#include "attention/cuda/features/angles.h"
#include "attention/cuda/features/key_logits.h"
#include "attention/cuda/features/operator.h"

namespace ikattn::cuda {
namespace {

template <typename T>
__global__ void __launch_bounds__(kTokenThreads, 2)
    feature_kernel(FeatureSource source, Array phi, const T* logits) {
  visit_angles<T>(source, [&](int64_t b, int64_t head, int64_t index, int64_t token, int64_t m,
                              const Angle<T>& angle) {
    const T logit = logits == nullptr ? T(0) : logits[index];
    // A hidden key may hold anything, and is multiplied with weights of 0.
    const bool counts = logit == logit && logit != minus_infinity<T>();
    const Tokens out(phi, b, head);
    out.store<T>(token, m, counts ? angle.cos1 + angle.cos2 : T(0));
    out.store<T>(token, source.M + m, counts ? angle.sin1 + angle.sin2 : T(0));
  });
}

// The keys' logits, and the norms of their values where they are asked for.
template <typename T, typename S>
__global__ void __launch_bounds__(kRowThreads, 3)
    logit_kernel(AttentionParams params, SplitLogits<T> logits) {
  const RowPlace at(params.key_heads, params.S, kRowsAtOnce<S>);
  make_logits<T, S, kRowsOfBlock, true, true>(params, logits, at.bh, at.row, at.lane);
}

}  // namespace

FeatureSource source_of(const AttentionParams& params, bool keys) {
  FeatureSource source;
  source.x = keys ? params.key : params.query;
  source.w1 = params.w1;
  source.w2 = params.w2;
  source.B = params.B;
  source.heads = keys ? params.key_heads : params.H;
  source.x_heads = keys ? params.G : params.H;
  source.N = keys ? params.S : params.L;
  source.d = params.d;
  source.M = params.M;
  source.frequency_heads = params.frequency_heads;
  source.frequency_batches = params.frequency_batches;
  return source;
}

FeatureSource source_of(const FeaturesParams& params) {
  FeatureSource source;
  source.x = params.x;
  source.w1 = params.w1;
  source.w2 = params.w2;
  source.B = params.B;
  source.heads = source.x_heads = source.frequency_heads = params.H;
  source.N = params.N;
  source.d = params.d;
  source.M = params.M;
  source.frequency_batches = params.frequency_batches;
  return source;
}

template <typename T>
const char* write_features(const FeatureSource& source, const Array& phi, const T* logits,
                           Stream stream) {
  return launch_angles<T>(feature_kernel<T>, source, stream, phi, logits);
}

template <typename T>
const char* prepare_logits(const AttentionParams& params, const DeviceExecutor& executor,
                           bool wants_value_norms, SplitLogits<T>& logits) {
  logits = take_logits<T>(params, executor, wants_value_norms);
  const auto queue = [&]<typename S>() {
    return launch(logit_kernel<T, S>,
                  row_blocks(params.B * params.key_heads, params.S, kRowsAtOnce<S>),
                  dim3(kRowThreads), 0, executor.stream, params, logits);
  };
  if constexpr (sizeof(T) == 8) {
    return queue.template operator()<Any>();
  } else {
    const bool lie_in_eights =
        lies_in_eights(params.key, params.d) && lies_in_eights(params.value, params.d_v);
    return launch_rows(lie_in_eights, params.key.type, queue);
  }
}

template <typename T>
const char* prepare_features(const AttentionParams& params, const DeviceExecutor& executor,
                             PreparedTokens<T>& prepared) {
  const int64_t F = 2 * params.M, keys = params.B * params.key_heads * params.S;
  T* phi_q = executor.take<T>(params.B * params.H * params.L * F);
  T* phi_k = executor.take<T>(keys * F);
  prepared.phi_q = phi_q;
  prepared.phi_k = phi_k;
  if (const char* error =
          write_features<T>(source_of(params, false), contiguous(phi_q, params.H, params.L, F),
                            nullptr, executor.stream)) {
    return error;
  }
  return write_features<T>(source_of(params, true),
                           contiguous(phi_k, params.key_heads, params.S, F), prepared.keys.high,
                           executor.stream);
}

template <typename T>
const char* prepare_tokens(const AttentionParams& params, const DeviceExecutor& executor,
                           PreparedTokens<T>& prepared) {
  if (const char* error = prepare_logits(params, executor, false, prepared.keys)) return error;
  return prepare_features(params, executor, prepared);
}

template <typename T>
const char* features(const FeaturesParams& params, bool backward, const DeviceExecutor& executor) {
  if (backward) return feature_gradients<T>(params, executor);
  if (goes_to_tensor_cores(params)) return features_on_tensor_cores(params, executor);
  return write_features<T>(source_of(params), params.features, nullptr, executor.stream);
}

#define IKATTN_INSTANTIATE(T)                                                                 \
  template const char* prepare_logits<T>(const AttentionParams&, const DeviceExecutor&, bool, \
                                         SplitLogits<T>&);                                    \
  template const char* prepare_features<T>(const AttentionParams&, const DeviceExecutor&,     \
                                           PreparedTokens<T>&);                               \
  template const char* prepare_tokens<T>(const AttentionParams&, const DeviceExecutor&,       \
                                         PreparedTokens<T>&);                                 \
  template const char* features<T>(const FeaturesParams&, bool, const DeviceExecutor&);
IKATTN_INSTANTIATE(float)
IKATTN_INSTANTIATE(double)
#undef IKATTN_INSTANTIATE

}  // namespace ikattn::cuda
