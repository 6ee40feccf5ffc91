// Tokens to features, on CUDA cores, and logits.
#include "attention/cuda/features/angles.h"
#include "attention/cuda/features/operator.h"
#include "attention/cuda/mma/row_lanes.h"

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

// key_bias_j, of a mask of bool 0 where it shows the key, and -inf where it hides it.
__device__ __forceinline__ double bias_of_key(const Array& bias, int64_t offset) {
  if (bias.type == ElementType::kNone) return 0;
  if (bias.type != ElementType::kBool) return bounded_offset(load_element<double>(bias, offset));
  return static_cast<const uint8_t*>(bias.data)[offset] != 0 ? 0 : minus_infinity<double>();
}

// The keys' logits, and the norms of their values where they are asked for.
template <typename T, typename S>
__global__ void __launch_bounds__(kRowThreads, 3)
    logit_kernel(AttentionParams params, SplitLogits<T> logits) {
  constexpr int kEach = kRowsAtOnce<S>;
  const RowPlace at(params.key_heads, params.S, kEach);
  const unsigned group = shared_head(at.head, params.key_heads, params.G);
  const int64_t d_v = params.value.type != ElementType::kNone ? params.d_v : 0;
  const int64_t widest = params.d > d_v ? params.d : d_v;
  // A thread's sums over its columns; not_finite: 0, or NaN.
  double squares[kEach] = {}, value_squares[kEach] = {};
  T not_finite[kEach] = {};
  for (int64_t column = at.lane * 8; column < widest; column += kLaneColumns) {
    EightColumns<T, S> of_key[kEach], of_value[kEach];
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
      const int64_t j = at.row + r * kRowsOfBlock;
      const bool there = j < params.S;
      of_key[r].load(params.key, at.b, group, j, column, there ? params.d : 0);
      of_value[r].load(params.value, at.b, group, j, column, there ? d_v : 0);
    }
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
      T x[8];
      of_key[r].unpack_to(x);
      add_row(x, is_half<S>(params.key), squares[r], not_finite[r]);
      of_value[r].unpack_to(x);
      add_row(x, is_half<S>(params.value), value_squares[r], not_finite[r]);
    }
  }
  // One lane for each row from here on.
  int64_t j = params.S;
  double square = 0, value_square = 0;
  bool finite = true;
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    const double of_row = sum_of_lanes<kTokenLanes>(squares[r]);
    const double of_value = sum_of_lanes<kTokenLanes>(value_squares[r]);
    const bool all = all_of_row(not_finite[r] == not_finite[r]);
    if (at.lane != r) continue;
    j = at.row + r * kRowsOfBlock;
    square = of_row;
    value_square = of_value;
    finite = all;
  }
  double norm = sqrt(square);
  if (params.p > 0 && (params.p != 2 || sizeof(T) == 8)) {
    // Squares of float64 may leave its range.
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
      const int64_t row = at.row + r * kRowsOfBlock;
      const bool there = row < params.S;
      const double of_row = p_norm<T>(Row(params.key, at.b, group, there ? row : 0), at.lane,
                                      there ? params.d : 0, params.p);
      if (at.lane == r) norm = of_row;
    }
  }
  if (j >= params.S) return;
  const int64_t index = int64_t{at.bh} * params.S + j;
  const int64_t* stride = params.key_bias.stride;
  double logit =
      bias_of_key(params.key_bias, at.b * stride[0] + at.head * stride[1] + j * stride[2]);
  if (params.p == 0 || !finite || logit == minus_infinity<double>()) norm = 0;
  if (logit != minus_infinity<double>()) {
    logit += params.magnitude_scale * norm * norm;
    if (!finite || !is_finite(logit)) logit = NAN;
  }
  store_split(logits, index, logit);
  if (logits.norms != nullptr)
    logits.norms[index] = finite ? static_cast<T>(norm) : static_cast<T>(NAN);
  if (logits.value_norms != nullptr) {
    logits.value_norms[index] = static_cast<float>(sqrt(value_square));
  }
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
                           bool wants_value_norms, SplitLogits<T>& logits) {
  const int64_t keys = params.B * params.key_heads * params.S;
  logits.high = executor.take<T>(keys);
  logits.low = executor.take<T>(keys);
  // The slope of |k|_p^2 needs the norm, but for p = 2.
  logits.norms = params.p > 0 && params.p != 2 ? executor.take<T>(keys) : nullptr;
  logits.value_norms = wants_value_norms ? executor.take<float>(keys) : nullptr;
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
