// Weights of pairs, and their gradients, in the kernels of split products. The general form of
// operands/operands.h, in float32. A thread has those of fragments: rows g and g + 8 of 16, columns
// 2t and 2t + 1 of two tiles of 8.
#pragma once

#include "attention/cuda/split/products.h"
#include "attention/cuda/split/split.h"
#include "attention/cuda/tensor_cores/pairs.h"

namespace ikattn::cuda {
namespace {

constexpr int kSplitRows = 64;  // that a block owns, 16 a warp

// Finds the logit of a pair, and returns whether it is seen. kCausal: there is no mask.
template <Pairs kPairs, bool kTransposed>
__device__ __forceinline__ bool find_logit(const FragmentPairs<kPairs, kTransposed>& at, int n,
                                           int c, TwoParts<float> key, TwoParts<float>& logit) {
  if (!at.sees(n, c) || key.high == minus_infinity<float>()) return false;
  logit = key;
  if constexpr (kPairs == Pairs::kGeneral) {
    const float mask = at.visible.logit(at.row_of(n, c), at.column_of(n, c));
    if (mask == minus_infinity<float>()) return false;
    logit = masked_logit(key, mask);
  }
  return true;
}

__device__ __forceinline__ float difference(TwoParts<float> a, TwoParts<float> b) {
  return (a.high - b.high) + (a.low - b.low);
}

// Running softmax of a thread's two rows: the largest logit so far, and the sum of the weights
// relative to it.
struct WeightRows {
  float sums[2] = {};
  TwoParts<float> largest[2] = {{minus_infinity<float>(), 0}, {minus_infinity<float>(), 0}};

  __device__ __forceinline__ double reference(int half) const {
    if (largest[half].high == minus_infinity<float>()) return 0;
    return static_cast<double>(largest[half].high) + static_cast<double>(largest[half].low);
  }

  // Makes weights of the similarities of 16 keys, 0 for hidden pairs; `rescales` is the factor of
  // the sums so far. All lanes of the warp call it.
  template <Pairs kPairs>
  __device__ __forceinline__ void weigh(float (&s)[2][4], const FragmentPairs<kPairs>& at,
                                        const KeyColumns& keys, float eps, float (&rescales)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      TwoParts<float> logits[4];
      bool seen[4];
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const int n = pair / 2, c = 2 * half + pair % 2;
        seen[pair] = find_logit(at, n, c, keys.logit(n, c), logits[pair]);
      }
      rescales[half] = raise(half, logits, seen);
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        float& similarity = s[pair / 2][2 * half + pair % 2];
        float weight = 0;
        if (seen[pair]) {
          weight = (similarity * similarity + eps) *
                   exponential(difference(logits[pair], largest[half]));
          // Weights have 23 bits, which two splits of Half hold: the products with values and the
          // sums take the same numbers.
          weight = __uint_as_float(__float_as_uint(weight) & ~1u);
        }
        sums[half] += weight;
        similarity = weight;
      }
    }
  }

 private:
  // Raises the largest logit, by its high part, then by its low one; returns what the sums of what
  // came before are to be multiplied with.
  __device__ __forceinline__ float raise(int half, const TwoParts<float> (&logits)[4],
                                         const bool (&seen)[4]) {
    const TwoParts<float> before = largest[half];
    float high = before.high;  // comparisons pass over NaN
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      if (seen[pair] && logits[pair].high > high) high = logits[pair].high;
    }
    high = max_of_lanes<4>(high);
    float low = high == before.high ? before.low : minus_infinity<float>();
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      if (seen[pair] && logits[pair].high == high && logits[pair].low > low) {
        low = logits[pair].low;
      }
    }
    largest[half] = {high, max_of_lanes<4>(low)};
    // Nothing but NaN can be there before the first finite logit.
    const float rescale = before.high == minus_infinity<float>()
                              ? 1.0f
                              : exponential(difference(before, largest[half]));
    sums[half] *= rescale;
    return rescale;
  }
};

// Numbers that all pairs of a backward kernel share.
struct PairConstants {
  float norm, eps, dropout_scale;  // 1 / 4M; dropout_scale: the rescale of dropout

  explicit PairConstants(const AttentionParams& params)
      : norm(1 / static_cast<float>(4 * params.M)),
        eps(static_cast<float>(params.eps)),
        dropout_scale(static_cast<float>(dropout_rescale(params.dropout_threshold))) {}
};

// A query of a pair: log Z, and delta (cuda_cores/backward.cu).
struct PairQuery {
  TwoParts<float> normalizer;
  float delta;
};

// Gradients of a pair: the weight under dropout, and the gradients of its logit and of its
// similarity.
struct PairGradient {
  float weight, logit, similarity;
};
// Computes a pair's gradients. incoming: dO . V; zeros for a hidden pair, whatever it holds.
template <Pairs kPairs, bool kTransposed>
__device__ __forceinline__ PairGradient pair_gradient(const FragmentPairs<kPairs, kTransposed>& at,
                                                      int n, int c, TwoParts<float> key,
                                                      const PairQuery& query, float similarity,
                                                      float incoming,
                                                      const PairConstants& constants) {
  TwoParts<float> logit;
  if (query.normalizer.high == INFINITY || !find_logit(at, n, c, key, logit)) return {0, 0, 0};
  const float e = exponential(difference(logit, query.normalizer));
  const float weight = (similarity * similarity + constants.eps) * e;
  const float survives = at.drops(n, c) ? 0.0f : constants.dropout_scale;
  const float x = incoming * survives - query.delta;
  return {weight * survives, weight * x, 2 * constants.norm * similarity * e * x};
}

// Calls launch.operator()<F, V, Pairs>() for the widths of rows of features and of the value, and
// for masks and dropout or without. Batch-invariant calls always take the same kernel.
template <typename Launch>
const char* launch_split(const AttentionParams& params, const Launch& launch) {
  const bool is_general = params.mask.type != ElementType::kNone || params.dropout_threshold != 0 ||
                          params.batch_invariant;
  const auto of_pairs = [&]<int F, int V>() {
    return is_general ? launch.template operator()<F, V, Pairs::kGeneral>()
                      : launch.template operator()<F, V, Pairs::kCausal>();
  };
  const auto of_features = [&]<int F>() {
    return params.d_v <= 64 ? of_pairs.template operator()<F, 64>()
                            : of_pairs.template operator()<F, 128>();
  };
  return padded_columns(2 * params.M) == 64 ? of_features.template operator()<64>()
                                            : of_features.template operator()<128>();
}

}  // namespace
}  // namespace ikattn::cuda
