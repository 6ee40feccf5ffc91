// The forward pass: one block per 64 queries of a head, and per 64 columns of the value.
//
// The general form: a running maximum of the logits per row rescales what came before. The logits
// do not depend on the scores, so that no score enters an exponential.
//
// Of weights, for their backward: what comes in for a pair is in the place of its value.
#include "attention/cuda/cuda_cores/cuda_cores.h"
#include "attention/cuda/cuda_cores/tile_product.h"

namespace ikattn::cuda {
namespace {

// Shared memory: operands of the scores, the weights, the values.
template <typename T>
constexpr int64_t forward_shared() {
  return (2 * kDepth * kPitch + 2 * kTile * kPitch) * int64_t{sizeof(T)};
}

// Number that the weights of a row are relative to: the largest logit so far, whose second part
// counts where it is large.
template <typename T>
class RowReference {
 public:
  // Takes a thread's visible logits into account; returns the factor of what has been summed
  // before. All lanes of a warp must come.
  __device__ __forceinline__ T raise(const TwoParts<T> (&logits)[kPerThread],
                                     const bool (&visible)[kPerThread]) {
    const T before = largest_, before_low = low_;
    T most = minus_infinity<T>();
    bool any_large = false;
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) {
      if (!visible[c]) continue;
      any_large = any_large || is_large(logits[c].high);
      most = logits[c].high > most ? logits[c].high : most;  // passes over NaN
    }
    most = max_of_lanes<kRowLanes>(most);
    if (most > before) {
      largest_ = most;
      low_ = 0;
    }
    if (__any_sync(0xffffffffu, any_large)) raise_low(logits, visible, most > before, any_large);
    // Nothing but NaN can be there before the first finite logit.
    return before == minus_infinity<T>() ? T(1)
                                         : exponential((before - largest_) + (before_low - low_));
  }
  __device__ __forceinline__ T exponential_of(TwoParts<T> logit) const {
    return exponential((logit.high - largest_) + (logit.low - low_));
  }
  __device__ __forceinline__ double value() const {
    if (largest_ == minus_infinity<T>()) return 0;
    return static_cast<double>(largest_) + static_cast<double>(low_);
  }

 private:
  __device__ __forceinline__ void raise_low(const TwoParts<T> (&logits)[kPerThread],
                                            const bool (&visible)[kPerThread], bool rose,
                                            bool any_large) {
    any_large =
        max_of_lanes<kRowLanes>(static_cast<int>(any_large)) != 0;  // now whether the row has one
    T most = minus_infinity<T>();
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) {
      if (!visible[c] || logits[c].high != largest_) continue;
      most = logits[c].low > most ? logits[c].low : most;
    }
    most = max_of_lanes<kRowLanes>(most);
    if (any_large && most != minus_infinity<T>() && (rose || most > low_)) low_ = most;
  }

  T largest_ = minus_infinity<T>(), low_ = 0;
};

// A thread's logits of query i, of the keys of a tile from j0 on, and whether it sees them.
template <typename T>
struct RowLogits {
  TwoParts<T> logits[kPerThread];
  bool visible[kPerThread];

  //   first: where the head's keys begin
  __device__ __forceinline__ RowLogits(const AttentionParams& params,
                                       const PreparedTokens<T>& tokens, const ThreadTile& at,
                                       int64_t b, int64_t h, int64_t i, int64_t j0, int64_t first) {
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) {
      const int64_t j = j0 + at.column(c);
      T mask;
      visible[c] = is_visible(params, b, h, i, j, mask);
      const T high = visible[c] ? tokens.keys.high[first + j] : minus_infinity<T>();
      visible[c] = visible[c] && high != minus_infinity<T>();
      if (!visible[c]) continue;
      logits[c] = masked_logit({high, tokens.keys.low[first + j]}, mask);
    }
  }
};

// Stores the results of query i, and log Z, from a thread's parts of the sum of weights, of their
// incoming gradients, and of the columns of the output; output_scale: the rescale of dropout. All
// lanes of a row must come.
template <typename T, bool kOfWeights>
__device__ __forceinline__ void store_row(const AttentionParams& params, const ThreadTile& at,
                                          const Tokens& out, int64_t bh, int64_t i, int64_t column0,
                                          const RowReference<T>& reference, T output_scale, T sum,
                                          T incoming, const T (&output)[kPerThread]) {
  const T total = sum_of_lanes<kRowLanes>(sum);
  const T own = kOfWeights ? sum_of_lanes<kRowLanes>(incoming) : T(0);
  if (i >= params.L) return;
  if (blockIdx.y == 0 && at.column_lane == 0) {
    static_cast<double*>(params.log_normalizer.data)[bh * params.L + i] =
        total == 0 ? minus_infinity<double>() : reference.value() + log(static_cast<double>(total));
  }
  if constexpr (kOfWeights) {
    if (at.column_lane == 0) out.store<T>(i, 0, total == 0 ? T(0) : own * (output_scale / total));
  } else {
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) {
      const int64_t column = column0 + slice_column(at, c);
      if (column >= params.d_v) continue;
      // A poisoned key's values are zero: what it does to the row is in the sum.
      T result = total == 0 ? T(0) : output[c] * (output_scale / total);
      if (total != total) result = total;
      out.store<T>(i, column, result);
    }
  }
}

template <typename T, bool kOfWeights>
__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(AttentionParams params, PreparedTokens<T> tokens) {
  Shared<T> operands = dynamic_shared<T>();
  Shared<T> weights = operands + 2 * kDepth * kPitch;  // [64 queries][64 keys]
  Shared<T> values = weights + kTile * kPitch;         // [64 keys][64 columns]
  const ThreadTile at;
  const int64_t row_blocks = (params.L + kTile - 1) / kTile;
  const int64_t bh = blockIdx.x / row_blocks, i0 = blockIdx.x % row_blocks * kTile;
  const int64_t b = bh / params.H, h = bh % params.H;
  const int64_t key_head = h * params.key_heads / params.H, F = 2 * params.M;
  const int64_t key_base = (b * params.key_heads + key_head) * params.S;
  const int64_t column0 = int64_t{blockIdx.y} * kTile;
  const T* phi_q = tokens.phi_q + (bh * params.L + i0) * F;
  const T* phi_k = tokens.phi_k + key_base * F;
  const Tokens value(params.value, b, h * params.G / params.H);
  const T norm = T(1) / static_cast<T>(4 * params.M), eps = static_cast<T>(params.eps);

  T output[kPerThread][kPerThread] = {};
  T incoming[kPerThread] = {};  // gradients of weights: the sums of incoming ones
  RowReference<T> references[kPerThread];
  T sum[kPerThread] = {};
  const int64_t end = visible_keys(params, i0);
  for (int64_t j0 = 0; j0 < end; j0 += kTile) {
    // 1. Scores of 64 x 64 pairs.
    T s[kPerThread][kPerThread];
    dot_tile<T>(
        at, F, [&](int row, int64_t f) { return i0 + row < params.L ? phi_q[row * F + f] : T(0); },
        [&](int key, int64_t f) { return j0 + key < params.S ? phi_k[(j0 + key) * F + f] : T(0); },
        operands, s);
    const Dropout dropout(params, bh, i0 + at.row_lane / 4 * 16, j0 + at.column_lane / 4 * 16,
                          at.row_lane % 4, at.column_lane % 4, true);
    // 2. Their weights, relative to the largest logit of the row so far.
#pragma unroll
    for (int r = 0; r < kPerThread; ++r) {
      const int64_t i = i0 + at.row(r);
      const RowLogits<T> row(params, tokens, at, b, h, i, j0, key_base);
      const T rescale = references[r].raise(row.logits, row.visible);
      sum[r] *= rescale;
      if (kOfWeights) incoming[r] *= rescale;
#pragma unroll
      for (int c = 0; c < kPerThread; ++c) {
        output[r][c] *= rescale;
        const T score = s[r][c] * norm;
        const T weight = row.visible[c]
                             ? (score * score + eps) * references[r].exponential_of(row.logits[c])
                             : T(0);
        sum[r] += weight;
        const bool keeps = dropout.keeps(r, c);
        if constexpr (kOfWeights) {
          // For what is hidden or dropped anything may come in.
          if (!row.visible[c] || !keeps) continue;
          incoming[r] += weight * weight_gradient<T>(params, b, h, i, j0 + at.column(c));
        } else {
          weights[at.row(r) * kPitch + at.column(c)] = keeps ? weight : T(0);
        }
      }
    }
    // 3. Weights times values.
    if constexpr (kOfWeights) continue;
    fill_tile<T>(values, [&](int key, int column) {
      if (j0 + key >= params.S || column0 + column >= params.d_v) return T(0);
      const T x = value.load<T>(j0 + key, column0 + column);
      return is_finite(x) ? x : T(0);  // its key is poisoned
    });
    __syncthreads();
    accumulate_tile<T>(at, weights, values, output);
  }
  // 4. Rows of the result, and log Z.
  const T output_scale = static_cast<T>(dropout_rescale(params.dropout_threshold));
  const Tokens out(params.output, b, h);
#pragma unroll
  for (int r = 0; r < kPerThread; ++r) {
    store_row<T, kOfWeights>(params, at, out, bh, i0 + at.row(r), column0, references[r],
                             output_scale, sum[r], incoming[r], output[r]);
  }
}

}  // namespace

template <typename T>
const char* forward_on_cuda_cores(const AttentionParams& params, Stream stream,
                                  const PreparedTokens<T>& tokens) {
  const auto blocks = static_cast<unsigned>(params.B * params.H * ceil_div(params.L, kTile));
  const auto slices = static_cast<unsigned>(params.d_v > 0 ? ceil_div(params.d_v, kTile) : 1);
  return launch(params.grad_weights ? forward_kernel<T, true> : forward_kernel<T, false>,
                dim3(blocks, slices), dim3(kThreads), forward_shared<T>(), stream, params, tokens);
}

template const char* forward_on_cuda_cores<float>(const AttentionParams&, Stream,
                                                  const PreparedTokens<float>&);
template const char* forward_on_cuda_cores<double>(const AttentionParams&, Stream,
                                                   const PreparedTokens<double>&);

}  // namespace ikattn::cuda
