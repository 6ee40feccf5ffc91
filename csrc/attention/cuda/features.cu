// Tokens to features, on the ordinary units, and logits.
#include "attention/cuda/angles.h"
#include "attention/cuda/token_rows.h"

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

// The keys' logits.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, 3)
    logit_kernel(AttentionParams params, SplitLogits<T> logits) {
  const RowPlace at(params.key_heads, params.S);
  const unsigned group = shared_head(at.head, params.key_heads, params.G);
  const int64_t j = at.row, index = at.bh * params.S + j;
  const bool there = j < params.S;
  const Row key(params.key, at.b, group, j), value(params.value, at.b, group, j);
  const int64_t d = there ? params.d : 0;
  const int64_t d_v = there && params.value.type != ElementType::kNone ? params.d_v : 0;
  // The first columns of both are under way before either is looked at.
  T of_key[8], of_value[8];
  key.load(of_key, at.lane * 8, d);
  value.load(of_value, at.lane * 8, d_v);
  double logit = 0;
  if (there && params.key_bias.type != ElementType::kNone) {
    const int64_t* stride = params.key_bias.stride;
    logit = bounded_offset(load_element<double>(
        params.key_bias, at.b * stride[0] + at.head * stride[1] + j * stride[2]));
  }
  bool finite = all_finite(of_key) && all_finite(of_value);
  double squares = squares_of(of_key, key.is_half());
  key.visit<T>(
      at.lane, d,
      [&](const T(&x)[8]) {
        finite &= all_finite(x);
        squares += squares_of(x, key.is_half());
      },
      kLaneColumns);
  value.visit<T>(at.lane, d_v, [&](const T(&x)[8]) { finite &= all_finite(x); }, kLaneColumns);
  finite = all_of_row(finite);
  double norm = 0;
  if (params.p > 0) {
    const bool counts = there && finite && logit != minus_infinity<double>();
    // Squares of float64 may leave its range.
    norm = params.p == 2 && sizeof(T) == 4
               ? sqrt(sum_of_lanes<kTokenLanes>(counts ? squares : 0.0))
               : p_norm<T>(key, at.lane, counts ? params.d : 0, params.p);
  }
  if (!there || at.lane != 0) return;
  if (logit != minus_infinity<double>()) {
    logit += params.magnitude_scale * norm * norm;
    if (!finite || !is_finite(logit)) logit = NAN;
  }
  store_split(logits, index, logit);
  if (logits.norms != nullptr)
    logits.norms[index] = finite ? static_cast<T>(norm) : static_cast<T>(NAN);
  if (!finite && logit == minus_infinity<double>()) logits.low[index] = static_cast<T>(NAN);
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
                           SplitLogits<T>& logits) {
  const int64_t keys = params.B * params.key_heads * params.S;
  logits.high = executor.take<T>(keys);
  logits.low = executor.take<T>(keys);
  // The slope of |k|_p^2 needs the norm, but for p = 2.
  logits.norms = params.p > 0 && params.p != 2 ? executor.take<T>(keys) : nullptr;
  return launch(logit_kernel<T>, row_blocks(params.B * params.key_heads, params.S),
                dim3(kRowThreads), 0, executor.stream, params, logits);
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
  if (const char* error = prepare_logits(params, executor, prepared.keys)) return error;
  return prepare_features(params, executor, prepared);
}

template <typename T>
const char* features(const FeaturesParams& params, bool backward, const DeviceExecutor& executor) {
  if (backward) return feature_gradients<T>(params, executor);
  return write_features<T>(source_of(params), params.features, nullptr, executor.stream);
}

#define IKATTN_INSTANTIATE(T)                                                             \
  template const char* prepare_logits<T>(const AttentionParams&, const DeviceExecutor&,   \
                                         SplitLogits<T>&);                                \
  template const char* prepare_features<T>(const AttentionParams&, const DeviceExecutor&, \
                                           PreparedTokens<T>&);                           \
  template const char* prepare_tokens<T>(const AttentionParams&, const DeviceExecutor&,   \
                                         PreparedTokens<T>&);                             \
  template const char* features<T>(const FeaturesParams&, bool, const DeviceExecutor&);
IKATTN_INSTANTIATE(float)
IKATTN_INSTANTIATE(double)
#undef IKATTN_INSTANTIATE

}  // namespace ikattn::cuda
