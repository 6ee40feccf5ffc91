// The backward pass on tensor cores: numbers of every query that its pairs need.
#include "attention/cuda/mma/row_lanes.h"
#include "attention/cuda/tensor_cores/blocks.h"
#include "attention/cuda/tensor_cores/rows.h"
#include "support/philox.h"

namespace ikattn::cuda {
namespace {

__global__ void __launch_bounds__(kRowThreads, 2)
    gradient_bound_kernel(AttentionBackwardParams params, FoldedRows rows) {
  const RowPlace at(params.H, params.L);
  const Row gradient(params.grad_output, at.b, at.head, at.row);
  const double norm = p_norm<float>(gradient, at.lane, at.row < params.L ? params.d_v : 0, 2);
  raise_by_warp(rows.gradient_bound + key_head_of(params, at.bh), norm);
}

// Sums over a row's columns: |dO|^2, delta, and whether dO is finite.
struct RowSums {
  double square, delta;
  bool finite;
};

// Stores the numbers of query i that the pairs need, and its share of the bounds, by whole warps; a
// lane without a row comes with padded L or more.
__device__ __forceinline__ void store_row_numbers(const AttentionBackwardParams& params,
                                                  const FoldedTokens& tokens,
                                                  const FoldedRows& rows, const RowPlace& at,
                                                  int64_t i, const RowSums& sums) {
  const int64_t padded = padded_tokens(params.L), bk = key_head_of(params, at.bh);
  const bool there = i < params.L;
  const double dropout_scale = dropout_rescale(params.dropout_threshold);
  const double size = sqrt(sums.square) * dropout_scale * gradient_scale_of(rows, bk);
  const bool general = (tokens.forms.state[bk] & kGeneral) != 0;
  float normalizer = general ? INFINITY : 0.0f, low = 0, fit = 1;
  double bound = 0;
  if (there) {
    const double log_normalizer =
        static_cast<const double*>(params.log_normalizer.data)[at.bh * params.L + i];
    const float limit = 0.5f / sqrtf(static_cast<float>(params.eps));
    float by_query = limit, by_key = limit;  // bounds of the score's factor
    if (log_normalizer != minus_infinity<double>()) {
      if (!sums.finite) {
        normalizer = NAN;
      } else if (general) {
        normalizer = static_cast<float>(log_normalizer);
        if (is_finite(log_normalizer)) {
          low = static_cast<float>(log_normalizer - static_cast<double>(normalizer));
        }
      } else {
        normalizer =
            static_cast<float>(exp(tokens.forms.largest[bk] -
                                   static_cast<double>(tokens.forms.log_scale) - log_normalizer));
        const float root = sqrtf(normalizer), scaled_root = tokens.forms.root_scale * root;
        by_query = root > 0 ? 1 / root : 0.0f;
        by_key = scaled_root < limit ? scaled_root : limit;
      }
      if (normalizer == normalizer) bound = size * by_key;
    }
    const float value_bound = __uint_as_float(tokens.value_bounds[bk]) *
                              value_scale_of(tokens, value_head_of(params, at.b, at.head));
    fit = fit_of(2 * static_cast<float>(size) * value_bound * by_query);
  }
  raise_by_warp(rows.row_bound + bk, bound);
  if (rows.weighted_bound != nullptr) {
    raise_by_warp(rows.weighted_bound + bk, there ? size * static_cast<double>(normalizer) : 0.0);
  }
  if (i >= padded) return;
  const int64_t index = at.bh * padded + i;
  rows.normalizer[index] = normalizer;
  rows.low[index] = low;
  rows.delta[index] = static_cast<float>(sums.delta);
  rows.fit[index] = fit;
}

// Every query, those of the padding included. T: of the rounded gradients; S: how rows are read.
template <typename T, typename S>
__global__ void __launch_bounds__(kRowThreads, 2)
    folded_row_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows) {
  constexpr int kEach = kRowsAtOnce<S>;
  const int64_t V = padded_columns(params.d_v), padded = padded_tokens(params.L);
  const RowPlace at(params.H, padded, kEach);
  const int64_t bk = key_head_of(params, at.bh);
  const float gradient_scale = gradient_scale_of(rows, bk);
  const float value_scale = value_scale_of(tokens, value_head_of(params, at.b, at.head));
  double squares[kEach] = {};
  float not_finite[kEach] = {};
  // A row that is not finite is as if it held zeros: whether it is has to be known first. Of up to
  // 64 columns it is read once.
  EightColumns<float, S> incoming[kEach], attended[kEach];
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    const int64_t i = at.row + r * kRowsOfBlock, d_v = i < params.L ? params.d_v : 0;
    incoming[r].load(params.grad_output, at.b, at.head, i, at.lane * 8, d_v);
    attended[r].load(params.output, at.b, at.head, i, at.lane * 8, d_v);
  }
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    const int64_t i = at.row + r * kRowsOfBlock, d_v = i < params.L ? params.d_v : 0;
    float x[8];
    incoming[r].unpack_to(x);
    add_row(x, is_half<S>(params.grad_output), squares[r], not_finite[r]);
    for (int64_t column = at.lane * 8 + kLaneColumns; column < d_v; column += kLaneColumns) {
      EightColumns<float, S> more;
      more.load(params.grad_output, at.b, at.head, i, column, d_v);
      more.unpack_to(x);
      add_row(x, is_half<S>(params.grad_output), squares[r], not_finite[r]);
    }
  }
  // One lane for each row in the end.
  int64_t i = padded;
  double square = 0, delta = 0;
  bool finite = true;
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    const int64_t row_index = at.row + r * kRowsOfBlock;
    const int64_t columns = row_index < params.L ? params.d_v : 0;
    const bool all = all_of_row(not_finite[r] == not_finite[r]);
    // delta is made of the rounded gradient, as the pairs are: their sum vanishes.
    T* row = static_cast<T*>(rows.gradients) + (at.bh * params.L + row_index) * V;
    double of_row = 0;
    for (int64_t column = at.lane * 8; row_index < params.L && column < V; column += kLaneColumns) {
      if (column >= kLaneColumns) {
        incoming[r].load(params.grad_output, at.b, at.head, row_index, column, columns);
        attended[r].load(params.output, at.b, at.head, row_index, column, columns);
      }
      float x[8], y[8];
      incoming[r].unpack_to(x);
      attended[r].unpack_to(y);
      uint32_t packed[4];
      double sum = 0;
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        packed[pair] =
            all ? pack<T>(x[2 * pair] * gradient_scale, x[2 * pair + 1] * gradient_scale) : 0u;
        const float2 rounded = unpack<T>(packed[pair]);
        x[2 * pair] = rounded.x;
        x[2 * pair + 1] = rounded.y;
      }
      if (is_half<S>(params.output)) {
        // Products of two numbers of 16 bits are exact in float32.
#pragma unroll
        for (int k = 0; k < 8; ++k) x[k] *= y[k];
        sum =
            static_cast<double>(((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])));
      } else {
#pragma unroll
        for (int k = 0; k < 8; ++k) sum += static_cast<double>(x[k]) * static_cast<double>(y[k]);
      }
      of_row += all ? sum : 0.0;
      store_vector(row + column, make_uint4(packed[0], packed[1], packed[2], packed[3]));
    }
    const double of_square = sum_of_lanes<kTokenLanes>(squares[r]);
    const double of_delta = sum_of_lanes<kTokenLanes>(of_row);
    if (at.lane != r) continue;
    i = row_index;
    square = of_square;
    delta = of_delta * value_scale;
    finite = all;
  }
  store_row_numbers(params, tokens, rows, at, i, {square, delta, finite});
}

}  // namespace

const char* make_folded_rows(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                             const Route& route, const FoldedTokens& tokens, FoldedRows& rows) {
  const int64_t heads = params.B * params.H, key_heads = params.B * params.key_heads;
  const int64_t padded = heads * padded_tokens(params.L);
  const Stream stream = executor.stream;
  rows = {};
  for (float** numbers : {&rows.normalizer, &rows.low, &rows.delta, &rows.fit}) {
    *numbers = executor.take<float>(padded);
  }
  const bool is_linear = route.algorithm == Algorithm::kLinear;
  const bool is_scaled = params.value.type == ElementType::kFloat32 || is_linear;
  // One after the other, to be cleared together.
  const int64_t count = (is_linear ? 3 : is_scaled ? 2 : 1) * key_heads;
  rows.row_bound = executor.take<uint32_t>(count);
  if (is_scaled) rows.gradient_bound = rows.row_bound + key_heads;
  if (is_linear) rows.weighted_bound = rows.gradient_bound + key_heads;
  if (const char* error = clear_bounds(rows.row_bound, count, stream)) return error;
  if (is_scaled) {
    if (const char* error = launch(gradient_bound_kernel, row_blocks(heads, params.L),
                                   dim3(kRowThreads), 0, stream, params, rows)) {
      return error;
    }
  }
  return launch_type(params, [&]<typename T>() {
    rows.gradients = executor.take<T>(heads * params.L * padded_columns(params.d_v));
    const bool lie_in_eights = params.grad_output.type == params.output.type &&
                               lies_in_eights(params.grad_output, params.d_v) &&
                               lies_in_eights(params.output, params.d_v);
    const auto queue = [&]<typename S>() {
      return launch(folded_row_kernel<T, S>,
                    row_blocks(heads, padded_tokens(params.L), kRowsAtOnce<S>), dim3(kRowThreads),
                    0, stream, params, tokens, rows);
    };
    return lie_in_eights ? queue.template operator()<T>() : queue.template operator()<Any>();
  });
}

}  // namespace ikattn::cuda
