// The backward pass on tensor cores: what every query brings to its pairs, then one kernel whose
// blocks own queries and one whose blocks own keys, so that no sum depends on the order in which
// blocks run.
#include "attention/cuda/folded_backward.h"
#include "attention/cuda/folded_tiles.h"
#include "attention/cuda/p_norm.h"

namespace ikattn::cuda {
namespace {

// A warp per query.
__global__ void __launch_bounds__(kFoldedThreads, 2)
    gradient_bound_kernel(AttentionBackwardParams params, FoldedRows rows) {
  const int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (index >= params.B * params.H * params.L) return;  // the whole warp
  const int64_t bh = index / params.L;
  const Tokens gradient(params.grad_output, bh / params.H, bh % params.H);
  const int lane = threadIdx.x % 32;
  const double norm = p_norm(gradient, index % params.L, params.d_v, 2, lane);
  if (lane == 0) raise(rows.gradient_bound + key_head_of(params, bh), norm);
}

// A warp per query, those of the padding included.
template <typename T>
__global__ void __launch_bounds__(kFoldedThreads, 2)
    folded_row_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows) {
  const int64_t V = padded_columns(params.d_v);
  const int lane = threadIdx.x % 32;
  const int64_t padded = padded_tokens(params.L);
  const int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (index >= params.B * params.H * padded) return;  // the whole warp
  const int64_t bh = index / padded, i = index % padded, bk = key_head_of(params, bh);
  const bool general = (tokens.state[bk] & kGeneral) != 0;
  float normalizer = general ? INFINITY : 0.0f, low = 0, fit = 1;
  double delta = 0;
  if (i < params.L) {  // the whole warp
    const Tokens output(params.output, bh / params.H, bh % params.H);
    const Tokens gradient(params.grad_output, bh / params.H, bh % params.H);
    double square = 0;
    bool finite = true;
    for (int64_t c = lane; c < params.d_v; c += 32) {
      const double incoming = gradient.load<double>(i, c);
      finite = finite && is_finite(incoming);
      square += incoming * incoming;
    }
    finite = __all_sync(0xffffffffu, finite);
    const float gradient_scale = gradient_scale_of(rows, bk);
    const float value_scale =
        value_scale_of(tokens, value_head_of(params, bh / params.H, bh % params.H));
    // delta is that of the rounded gradient, which the pairs meet: what they add up to vanishes.
    T* row = static_cast<T*>(rows.gradients) + (bh * params.L + i) * V;
    for (int64_t c = lane; c < V; c += 32) {
      const bool there = finite && c < params.d_v;
      const T rounded = from_float<T>(there ? gradient.load<float>(i, c) * gradient_scale : 0.0f);
      if (there) delta += output.load<double>(i, c) * static_cast<double>(to_float(rounded));
      row[c] = rounded;
    }
    delta = sum_of_lanes(delta) * value_scale;
    const double log_normalizer =
        static_cast<const double*>(params.log_normalizer.data)[bh * params.L + i];
    const double kept = dropout_rescale(params.dropout_threshold);
    const double size = sqrt(sum_of_lanes(square)) * kept * gradient_scale;
    const float limit = 0.5f / sqrtf(static_cast<float>(params.eps));
    float by_query = limit, by_key = limit;  // what bounds the score's factor
    if (log_normalizer != minus_infinity<double>()) {
      if (!finite) {
        normalizer = NAN;
      } else if (general) {
        normalizer = static_cast<float>(log_normalizer);
        if (is_finite(log_normalizer)) {
          low = static_cast<float>(log_normalizer - static_cast<double>(normalizer));
        }
      } else {
        normalizer =
            static_cast<float>(exp(static_cast<double>(tokens.largest[bk]) -
                                   static_cast<double>(tokens.log_scale) - log_normalizer));
        const float root = sqrtf(normalizer), scaled_root = tokens.root_scale * root;
        by_query = root > 0 ? 1 / root : 0.0f;
        by_key = scaled_root < limit ? scaled_root : limit;
      }
      if (lane == 0 && normalizer == normalizer) raise(rows.row_bound + bk, size * by_key);
    }
    const float value_bound = __uint_as_float(tokens.value_bounds[bk]) * value_scale;
    fit = fit_of(2 * static_cast<float>(size) * value_bound * by_query);
  }
  if (lane != 0) return;
  rows.normalizer[index] = normalizer;
  rows.low[index] = low;
  rows.delta[index] = static_cast<float>(delta);
  rows.fit[index] = fit;
}

}  // namespace

const char* folded_backward(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                            const SplitLogits<float>& logits, const FoldedTokens& tokens,
                            const PairGradients<float>& gradients) {
  const int64_t heads = params.B * params.H, key_heads = params.B * params.key_heads;
  const int64_t padded = heads * padded_tokens(params.L);
  const auto blocks = [](int64_t count) { return dim3(static_cast<unsigned>(count)); };
  const Stream stream = executor.stream;
  const float* high = logits.high;
  FoldedRows rows = {};
  for (float** numbers : {&rows.normalizer, &rows.low, &rows.delta, &rows.fit}) {
    *numbers = executor.take<float>(padded);
  }
  rows.row_bound = executor.take<uint32_t>(key_heads);
  if (params.value.type == ElementType::kFloat32) {
    rows.gradient_bound = executor.take<uint32_t>(key_heads);
  }
  if (const char* error = clear_bounds(rows.row_bound, key_heads, stream)) return error;
  if (rows.gradient_bound != nullptr) {
    if (const char* error = clear_bounds(rows.gradient_bound, key_heads, stream)) return error;
    if (const char* error =
            launch(gradient_bound_kernel, blocks(ceil_div(heads * params.L, kWarps)),
                   dim3(kFoldedThreads), 0, stream, params, rows)) {
      return error;
    }
  }
  const char* error = launch_type(params, [&]<typename T>() {
    rows.gradients = executor.take<T>(heads * params.L * padded_columns(params.d_v));
    return launch(folded_row_kernel<T>, blocks(ceil_div(padded, kWarps)), dim3(kFoldedThreads), 0,
                  stream, params, tokens, rows);
  });
  if (error == nullptr && wants_queries(params)) {
    const auto of_queries = is_wide(params) ? wide_query_gradients : folded_query_gradients;
    error = of_queries(params, stream, tokens, rows, gradients.phi_q);
  }
  if (error == nullptr && wants_keys(params)) {
    const auto of_keys = is_wide(params) ? wide_key_gradients : folded_key_gradients;
    error = of_keys(params, stream, tokens, rows, high, gradients);
  }
  return error;
}

}  // namespace ikattn::cuda
