// The backward pass on tensor cores: what every query brings to its pairs, then one kernel whose
// blocks own queries and one whose blocks own keys, so that no sum depends on the order in which
// blocks run.
#include "attention/cuda/folded_backward.h"
#include "attention/cuda/folded_tiles.h"
#include "attention/cuda/linear_time.h"
#include "attention/cuda/token_rows.h"

namespace ikattn::cuda {
namespace {

__global__ void __launch_bounds__(kRowThreads, 2)
    gradient_bound_kernel(AttentionBackwardParams params, FoldedRows rows) {
  const RowPlace at(params.H, params.L);
  const Row gradient(params.grad_output, at.b, at.head, at.row);
  const double norm = p_norm<float>(gradient, at.lane, at.row < params.L ? params.d_v : 0, 2);
  raise_by_warp(rows.gradient_bound + key_head_of(params, at.bh), norm);
}

// Every query, those of the padding included.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, 2)
    folded_row_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows) {
  const int64_t V = padded_columns(params.d_v), padded = padded_tokens(params.L);
  const RowPlace at(params.H, padded);
  const int64_t i = at.row, index = at.bh * padded + i, bk = key_head_of(params, at.bh);
  const bool there = i < params.L;
  const Row output(params.output, at.b, at.head, i);
  const Row gradient(params.grad_output, at.b, at.head, i);
  const int64_t d_v = there ? params.d_v : 0;
  // The first columns of both are under way before either is looked at.
  float incoming[8], attended[8];
  gradient.load(incoming, at.lane * 8, d_v);
  output.load(attended, at.lane * 8, d_v);
  const double log_normalizer =
      there ? static_cast<const double*>(params.log_normalizer.data)[at.bh * params.L + i]
            : minus_infinity<double>();
  double square = squares_of(incoming, gradient.is_half()), delta = 0;
  bool finite = all_finite(incoming);
  gradient.visit<float>(
      at.lane, d_v,
      [&](const float (&x)[8]) {
        finite &= all_finite(x);
        square += squares_of(x, gradient.is_half());
      },
      kLaneColumns);
  finite = all_of_row(finite);
  const float gradient_scale = gradient_scale_of(rows, bk);
  const float value_scale = value_scale_of(tokens, value_head_of(params, at.b, at.head));
  const int64_t columns = finite ? params.d_v : 0;  // others are as if they held zeros
  if (!finite) {
#pragma unroll
    for (int k = 0; k < 8; ++k) incoming[k] = attended[k] = 0;
  }
  // delta is that of the rounded gradient, which the pairs meet: what they add up to vanishes.
  T* row = static_cast<T*>(rows.gradients) + (at.bh * params.L + i) * V;
  for (int64_t column = at.lane * 8; there && column < V; column += kLaneColumns) {
    if (column >= kLaneColumns) {
      gradient.load(incoming, column, columns);
      output.load(attended, column, columns);
    }
    uint32_t packed[4];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      packed[pair] =
          pack<T>(incoming[2 * pair] * gradient_scale, incoming[2 * pair + 1] * gradient_scale);
      const float2 rounded = unpack<T>(packed[pair]);
      delta += static_cast<double>(attended[2 * pair]) * static_cast<double>(rounded.x);
      delta += static_cast<double>(attended[2 * pair + 1]) * static_cast<double>(rounded.y);
    }
    store_vector(row + column, make_uint4(packed[0], packed[1], packed[2], packed[3]));
  }
  delta = sum_of_lanes<kTokenLanes>(delta) * value_scale;
  const double kept = dropout_rescale(params.dropout_threshold);
  const double size = sqrt(sum_of_lanes<kTokenLanes>(square)) * kept * gradient_scale;

  const bool general = (tokens.state[bk] & kGeneral) != 0;
  float normalizer = general ? INFINITY : 0.0f, low = 0, fit = 1;
  double bound = 0;
  if (there) {
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
        normalizer = static_cast<float>(
            exp(tokens.largest[bk] - static_cast<double>(tokens.log_scale) - log_normalizer));
        const float root = sqrtf(normalizer), scaled_root = tokens.root_scale * root;
        by_query = root > 0 ? 1 / root : 0.0f;
        by_key = scaled_root < limit ? scaled_root : limit;
      }
      if (normalizer == normalizer) bound = size * by_key;
    }
    const float value_bound = __uint_as_float(tokens.value_bounds[bk]) * value_scale;
    fit = fit_of(2 * static_cast<float>(size) * value_bound * by_query);
  }
  raise_by_warp(rows.row_bound + bk, bound);
  if (rows.weighted_bound != nullptr) {
    raise_by_warp(rows.weighted_bound + bk, size * static_cast<double>(normalizer));
  }
  if (at.lane != 0) return;
  rows.normalizer[index] = normalizer;
  rows.low[index] = low;
  rows.delta[index] = static_cast<float>(delta);
  rows.fit[index] = fit;
}

}  // namespace

const char* folded_backward(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                            const SplitLogits<float>& logits, const FoldedTokens& tokens,
                            const FoldedGradients& gradients) {
  const int64_t heads = params.B * params.H, key_heads = params.B * params.key_heads;
  const int64_t padded = heads * padded_tokens(params.L);
  const Stream stream = executor.stream;
  const float* high = logits.high;
  FoldedRows rows = {};
  for (float** numbers : {&rows.normalizer, &rows.low, &rows.delta, &rows.fit}) {
    *numbers = executor.take<float>(padded);
  }
  rows.row_bound = executor.take<uint32_t>(key_heads);
  const bool is_linear = goes_without_pairs(params, true);
  if (params.value.type == ElementType::kFloat32 || is_linear) {
    rows.gradient_bound = executor.take<uint32_t>(key_heads);
  }
  if (const char* error = clear_bounds(rows.row_bound, key_heads, stream)) return error;
  if (is_linear) {
    rows.weighted_bound = executor.take<uint32_t>(key_heads);
    if (const char* error = clear_bounds(rows.weighted_bound, key_heads, stream)) return error;
  }
  if (rows.gradient_bound != nullptr) {
    if (const char* error = clear_bounds(rows.gradient_bound, key_heads, stream)) return error;
    if (const char* error = launch(gradient_bound_kernel, row_blocks(heads, params.L),
                                   dim3(kRowThreads), 0, stream, params, rows)) {
      return error;
    }
  }
  const char* error = launch_type(params, [&]<typename T>() {
    rows.gradients = executor.take<T>(heads * params.L * padded_columns(params.d_v));
    return launch(folded_row_kernel<T>, row_blocks(heads, padded_tokens(params.L)),
                  dim3(kRowThreads), 0, stream, params, tokens, rows);
  });
  FoldedTokens left = tokens;
  if (error == nullptr && is_linear) {
    error = linear_backward(params, executor, left, rows, high, gradients);
  }
  if (error == nullptr && wants_queries(params)) {
    const auto of_queries = is_wide(params) ? wide_query_gradients : folded_query_gradients;
    error = of_queries(params, stream, left, rows, gradients.phi_q);
  }
  if (error == nullptr && wants_keys(params)) {
    const auto of_keys = is_wide(params) ? wide_key_gradients : folded_key_gradients;
    error = of_keys(params, stream, left, rows, high, gradients);
  }
  return error;
}

}  // namespace ikattn::cuda
