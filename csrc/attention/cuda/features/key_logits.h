// The logits of keys, and the norms of their values.
#pragma once

#include "attention/calls/offsets.h"
#include "attention/cuda/mma/row_lanes.h"
#include "attention/cuda/operands/operands.h"

namespace ikattn::cuda {

// Memory for prepare_logits().
template <typename T>
SplitLogits<T> take_logits(const AttentionParams& params, const DeviceExecutor& executor,
                           bool wants_value_norms) {
  const int64_t keys = params.B * params.key_heads * params.S;
  SplitLogits<T> logits = {executor.take<T>(keys), executor.take<T>(keys)};
  // The slope of |k|_p^2 needs the norm, but for p = 2.
  logits.norms = params.p > 0 && params.p != 2 ? executor.take<T>(keys) : nullptr;
  logits.value_norms = wants_value_norms ? executor.take<float>(keys) : nullptr;
  return logits;
}

namespace {

// Returns key_bias_j; of a mask of bool 0 where it shows the key, and -inf where it hides it.
__device__ __forceinline__ double bias_of_key(const Array& bias, int64_t offset) {
  if (bias.type == ElementType::kNone) return 0;
  if (bias.type != ElementType::kBool) return bounded_offset(load_element<double>(bias, offset));
  return static_cast<const uint8_t*>(bias.data)[offset] != 0 ? 0 : minus_infinity<double>();
}

// Sums over the columns of a key and of its value.
struct KeySums {
  double norm = 0, value_square = 0;
  bool finite = true;  // both
};

// Stores the logit of key j of a head of all batches'; one lane does.
template <typename T>
__device__ __forceinline__ void store_logit(const AttentionParams& params,
                                            const SplitLogits<T>& logits, unsigned bh, int64_t j,
                                            const KeySums& sums) {
  const unsigned heads = static_cast<unsigned>(params.key_heads);
  const int64_t index = int64_t{bh} * params.S + j;
  const int64_t* stride = params.key_bias.stride;
  double logit =
      bias_of_key(params.key_bias, bh / heads * stride[0] + bh % heads * stride[1] + j * stride[2]);
  const bool is_hidden = logit == minus_infinity<double>();
  const double norm = params.p == 0 || !sums.finite || is_hidden ? 0 : sums.norm;
  if (!is_hidden) {
    logit += params.magnitude_scale * norm * norm;
    if (!sums.finite || !is_finite(logit)) logit = NAN;
  }
  store_split(logits, index, logit);
  if (logits.norms != nullptr) {
    logits.norms[index] = sums.finite ? static_cast<T>(norm) : static_cast<T>(NAN);
  }
  if (logits.value_norms != nullptr) {
    logits.value_norms[index] = static_cast<float>(sqrt(sums.value_square));
  }
  if (!sums.finite && is_hidden) logits.low[index] = static_cast<T>(NAN);
}

// Computes the logits of keys `row`, and of others kStep further on each, by the eight lanes of
// each; rows from S on have none. S: how rows are read. kNorms: norms of values may be asked for.
// kAnyP: p may be any, else it is 0 or 2.
template <typename T, typename S, int kStep, bool kNorms, bool kAnyP>
__device__ __forceinline__ void make_logits(const AttentionParams& params,
                                            const SplitLogits<T>& logits, unsigned bh, int64_t row,
                                            int lane) {
  constexpr int kEach = kRowsAtOnce<S>;
  const unsigned heads = static_cast<unsigned>(params.key_heads), b = bh / heads;
  const unsigned group = shared_head(bh % heads, params.key_heads, params.G);
  const int64_t d_v = params.value.type != ElementType::kNone ? params.d_v : 0;
  const int64_t widest = params.d > d_v ? params.d : d_v;
  // A thread's sums over its columns; not_finite: 0, or NaN.
  double squares[kEach] = {}, value_squares[kEach] = {};
  T not_finite[kEach] = {};
  for (int64_t column = lane * 8; column < widest; column += kLaneColumns) {
    EightColumns<T, S> of_key[kEach], of_value[kEach];
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
      const int64_t j = row + r * kStep;
      const bool there = j < params.S;
      of_key[r].load(params.key, b, group, j, column, there ? params.d : 0);
      of_value[r].load(params.value, b, group, j, column, there ? d_v : 0);
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
  double square = 0;
  KeySums sums;
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    const double of_row = sum_of_lanes<kTokenLanes>(squares[r]);
    const double of_value = kNorms ? sum_of_lanes<kTokenLanes>(value_squares[r]) : 0.0;
    const bool all = all_of_row(not_finite[r] == not_finite[r]);
    if (lane != r) continue;
    j = row + r * kStep;
    square = of_row;
    sums.value_square = of_value;
    sums.finite = all;
  }
  sums.norm = sqrt(square);
  if constexpr (kAnyP) {
    // Squares of float64 may leave its range.
    if (params.p > 0 && (params.p != 2 || sizeof(T) == 8)) {
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
        const int64_t other = row + r * kStep;
        const bool there = other < params.S;
        const double of_row = p_norm<T>(Row(params.key, b, group, there ? other : 0), lane,
                                        there ? params.d : 0, params.p);
        if (lane == r) sums.norm = of_row;
      }
    }
  }
  if (j < params.S) store_logit(params, logits, bh, j, sums);
}

}  // namespace
}  // namespace ikattn::cuda
