// Splits rows of float32 into two operands of Half, and pads numbers of tokens.
#include "attention/cuda/mma/row_lanes.h"
#include "attention/cuda/operands/feature_source.h"
#include "attention/cuda/split/products.h"
#include "attention/cuda/split/split.h"

namespace ikattn::cuda {
namespace {

// Eight lanes a row, those of the padding included. A row that is not finite becomes zeros: it is
// told by its unit, and others multiply it by 0.
//   from [B, heads, N, columns]
__global__ void __launch_bounds__(kRowThreads, 2)
    split_kernel(Array from, int64_t heads, int64_t N, int64_t columns, SplitRows to) {
  const int64_t padded = padded_tokens(N), width = padded_columns(columns);
  const RowPlace at(heads, padded);
  const bool there = at.row < N;
  const Row row(from, at.b, at.head, there ? at.row : 0);
  float largest = 0, not_finite = 0;
  row.visit<float>(at.lane, there ? columns : 0, [&](const float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      largest = fmaxf(largest, fabsf(x[i]));
      not_finite += x[i] * 0.0f;
    }
  });
  largest = max_of_lanes<kTokenLanes>(largest);
  const bool finite = all_of_row(not_finite == not_finite);
  const float scale = finite ? fitting_power(largest) : 0.0f;
  if (at.lane == 0) {
    to.units[at.bh * padded + at.row] = !finite ? NAN : largest > 0 ? 1 / scale : 0.0f;
  }
  if (!there) return;
  for (int64_t column = at.lane * 8; column < width; column += kLaneColumns) {
    float x[8];
    row.load(x, column, columns);
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      split_two(finite ? x[2 * i] * scale : 0.0f, finite ? x[2 * i + 1] * scale : 0.0f, high[i],
                low[i]);
    }
    const int64_t place = (at.bh * N + at.row) * width + column;
    store_vector(to.high + place, make_uint4(high[0], high[1], high[2], high[3]));
    store_vector(to.low + place, make_uint4(low[0], low[1], low[2], low[3]));
  }
}

const char* split_rows(const DeviceExecutor& executor, const Array& from, int64_t B, int64_t heads,
                       int64_t N, int64_t columns, SplitRows& rows) {
  const int64_t width = padded_columns(columns), padded = padded_tokens(N);
  rows = {executor.take<Half>(B * heads * N * width), executor.take<Half>(B * heads * N * width),
          executor.take<float>(B * heads * padded)};
  return launch(split_kernel, row_blocks(B * heads, padded), dim3(kRowThreads), 0, executor.stream,
                from, heads, N, columns, rows);
}

// Up to three numbers of each token, in rows that can be copied sixteen bytes at a time.
struct TokenNumbers {
  const float* from[3];  // [heads, N]
  float* to[3];          // [heads, padded N]
  float beyond[3];       // numbers that the padding holds
  int64_t N;
};
__global__ void __launch_bounds__(256, 2) pad_kernel(TokenNumbers numbers, int64_t count) {
  const int64_t index = int64_t{blockIdx.x} * 256 + threadIdx.x, padded = padded_tokens(numbers.N);
  if (index >= count) return;
  const int64_t head = index / padded, token = index % padded;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    if (numbers.from[i] == nullptr) continue;
    numbers.to[i][index] =
        token < numbers.N ? numbers.from[i][head * numbers.N + token] : numbers.beyond[i];
  }
}

const char* pad_numbers(const DeviceExecutor& executor, int64_t heads, TokenNumbers& numbers) {
  const int64_t count = heads * padded_tokens(numbers.N);
  for (int i = 0; i < 3; ++i) {
    numbers.to[i] = numbers.from[i] == nullptr ? nullptr : executor.take<float>(count);
  }
  return launch(pad_kernel, dim3(static_cast<unsigned>(ceil_div(count, 256))), dim3(256), 0,
                executor.stream, numbers, count);
}

}  // namespace

const char* split_tokens(const AttentionParams& params, const DeviceExecutor& executor,
                         const PreparedTokens<float>& prepared, SplitTokens& tokens) {
  const int64_t F = 2 * params.M;
  if (const char* error = split_rows(executor, contiguous(prepared.phi_q, params.H, params.L, F),
                                     params.B, params.H, params.L, F, tokens.query)) {
    return error;
  }
  if (const char* error =
          split_rows(executor, contiguous(prepared.phi_k, params.key_heads, params.S, F), params.B,
                     params.key_heads, params.S, F, tokens.key)) {
    return error;
  }
  if (const char* error = split_rows(executor, params.value, params.B, params.G, params.S,
                                     params.d_v, tokens.value)) {
    return error;
  }
  TokenNumbers logits = {.from = {prepared.keys.high, prepared.keys.low, nullptr},
                         .to = {},
                         .beyond = {-INFINITY, 0, 0},
                         .N = params.S};
  if (const char* error = pad_numbers(executor, params.B * params.key_heads, logits)) return error;
  tokens.high = logits.to[0];
  tokens.low = logits.to[1];
  return nullptr;
}

const char* split_queries(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                          const RowState<float>& rows, SplitQueries& queries) {
  if (const char* error = split_rows(executor, params.grad_output, params.B, params.H, params.L,
                                     params.d_v, queries.gradient)) {
    return error;
  }
  TokenNumbers numbers = {.from = {rows.log_normalizer.high, rows.log_normalizer.low, rows.delta},
                          .to = {},
                          .beyond = {INFINITY, 0, 0},
                          .N = params.L};
  if (const char* error = pad_numbers(executor, params.B * params.H, numbers)) return error;
  queries.high = numbers.to[0];
  queries.low = numbers.to[1];
  queries.delta = numbers.to[2];
  return nullptr;
}

}  // namespace ikattn::cuda
