// How pairs of the general form become factors of gradients on Hopper. They know log Z, so that
//   E = exp(g_j + m_ij - log Z_i)
// needs no maximum; see tensor_cores/rows.h. Sums of products lie in a thread as rows g and g + 8,
// columns 2t and 2t + 1 of tiles of 8; rows are queries, or, for keys, keys.
#pragma once

#include "attention/cuda/hopper/general_weights.h"
#include "attention/cuda/tensor_cores/epilogue_backward.h"

namespace ikattn::cuda {
namespace {

// Items for a kernel of the general form: that of the folded one has counted with the others.
inline const char* count_anew(const DeviceExecutor& executor, Items& items) {
  items.taken = executor.take<unsigned>(1);
  return clear_bounds(items.taken, 1, executor.stream);
}

// E of a pair that is seen. kLarge: second parts count, and offsets may lie beyond where they end.
template <bool kLarge>
__device__ __forceinline__ float exponential_of(TwoParts<float> key, float offset,
                                                TwoParts<float> normalizer) {
  if constexpr (!kLarge) {
    return fast_exponential(plain_exponent(offset, key.high) - normalizer.high);
  }
  // Nor does a query count that sees nothing, or is none, whatever the key holds.
  const bool is_hidden = key.high == minus_infinity<float>() || offset == minus_infinity<float>();
  if (is_hidden || normalizer.high == INFINITY) return 0;
  return fast_exponential(relative_logit(key, bounded_offset(offset), normalizer));
}
// Whether log Z needs no second part; infinity: of a query that sees nothing.
__device__ __forceinline__ bool is_plain_normalizer(float x) {
  return fabsf(x) < kPlainLogit || x == INFINITY;
}

// What a thread's two queries, the first of them row0, bring to their pairs.
struct GeneralQueries {
  int row0;
  float fit[2], delta[2];
  float normalizer[2], low[2];  // log Z; infinity: sees nothing, or is none

  // fits, deltas: of the item's rows.
  __device__ __forceinline__ GeneralQueries(const AttentionBackwardParams& params,
                                            const FoldedRows& rows, const QueryBlock& at,
                                            Shared<const float> fits, Shared<const float> deltas) {
    const int of_item =
        static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
    row0 = at.i0 + of_item;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + 8 * half;
      fit[half] = fits[of_item + 8 * half] / static_cast<float>(4 * params.M);
      delta[half] = deltas[of_item + 8 * half];
      normalizer[half] = normalizer_of<true>(params, rows, at, row);
      low[half] = row < params.L ? rows.low[at.bh * padded_tokens(params.L) + row] : 0.0f;
      // A poisoned query's scores are 0.
      if (normalizer[half] != normalizer[half]) fit[half] = normalizer[half];
    }
  }
  __device__ __forceinline__ bool are_plain() const {
    return is_plain_normalizer(normalizer[0]) && is_plain_normalizer(normalizer[1]);
  }

  // Scores s and products x of a tile become factors of grad_phi_q.
  //   kept: the rescale of dropout
  template <bool kLarge>
  __device__ __forceinline__ void make(float (&s)[kStep / 2], const float (&x)[kStep / 2],
                                       ElementType type, Shared<const unsigned char> offsets,
                                       const KeyLogits& keys, const PairBits& bits,
                                       float kept) const {
#pragma unroll
    for (int first = 0; first < kStep / 8; first += 2) {
      float of_pairs[8];
      load_offsets(of_pairs, type, offsets, first);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int n = first + i / 4, c = i % 4, half = c / 2;
        const float2 highs = keys.high(n), lows = keys.low(n);
        const TwoParts<float> key = {c % 2 == 0 ? highs.x : highs.y, c % 2 == 0 ? lows.x : lows.y};
        const float e = exponential_of<kLarge>(key, of_pairs[i], {normalizer[half], low[half]});
        const float product = (bits.drops(n, c) ? 0.0f : x[4 * n + c] * kept) - delta[half];
        float& score = s[4 * n + c];
        // A hidden key's value may be anything.
        const bool counts = bits.sees(n, c) && e != 0 && score != 0;
        score = counts ? score * fit[half] * product * e : 0.0f;
      }
    }
  }
};

// Of a tile's queries, in shared memory: log Z in two parts, and deltas between them.
struct TileQueries {
  Shared<const float> numbers;  // [3][kStep]  high, delta, low

  __device__ __forceinline__ float2 at(int which, int n) const {
    return load_vector<float2>(numbers + which * kStep + n * 8 + threadIdx.x % 4 * 2);
  }
  // As KeyLogits::are_plain().
  __device__ __forceinline__ bool are_plain() const {
    const float2 two = load_vector<float2>(numbers + threadIdx.x % 32 * 2);
    return is_plain_normalizer(two.x) && is_plain_normalizer(two.y);
  }
};

// What a thread's two keys bring to their pairs.
struct GeneralKeys {
  float fit, norm, eps;  // norm: 1 / (4 M)
  float terms[2], lows[2];

  // Of keys j and j + 8. fit_of_head: KeyScales::fit
  template <typename T>
  __device__ __forceinline__ static GeneralKeys load(const AttentionParams& params,
                                                     const FoldedTokens& tokens, int64_t bk, int j,
                                                     float fit_of_head) {
    GeneralKeys keys;
    keys.fit = fit_of_head * (1 / kWeightScale<T>);
    keys.norm = 1 / static_cast<float>(4 * params.M);
    keys.eps = static_cast<float>(params.eps);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t key = bk * padded_tokens(params.S) + min(int64_t{j} + 8 * half, params.S - 1);
      keys.terms[half] = tokens.terms[key];
      keys.lows[half] = tokens.lows[key];
    }
    return keys;
  }

  // Scores s and x = V dO^T of a tile become factors: s of grad_phi_k, x of grad_value; logit_sums:
  // the gradients of the keys' logits. By whole warps.
  template <typename T>
  __device__ __forceinline__ void make(float (&s)[kStep / 2], float (&x)[kStep / 2],
                                       ElementType type, Shared<const unsigned char> offsets,
                                       const TileQueries& queries, const PairBits& bits, float kept,
                                       float (&logit_sums)[2]) const {
    const bool is_large =
        !is_plain_logit(terms[0]) || !is_plain_logit(terms[1]) || !queries.are_plain();
    if (__any_sync(0xffffffffu, is_large)) {
      make_factors<T, true>(s, x, type, offsets, queries, bits, kept, logit_sums);
    } else {
      make_factors<T, false>(s, x, type, offsets, queries, bits, kept, logit_sums);
    }
  }

 private:
  template <typename T, bool kLarge>
  __device__ __forceinline__ void make_factors(float (&s)[kStep / 2], float (&x)[kStep / 2],
                                               ElementType type,
                                               Shared<const unsigned char> offsets,
                                               const TileQueries& queries, const PairBits& bits,
                                               float kept, float (&logit_sums)[2]) const {
#pragma unroll
    for (int n = 0; n < kStep / 8; ++n) {
      float of_pairs[4];
      load_turned_offsets(of_pairs, type, offsets, n);
      const float2 highs = queries.at(0, n), deltas = queries.at(1, n), low = queries.at(2, n);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int i = 4 * n + c, half = c / 2;
        const TwoParts<float> normalizer = {c % 2 == 0 ? highs.x : highs.y,
                                            c % 2 == 0 ? low.x : low.y};
        const float e = exponential_of<kLarge>({terms[half], lows[half]}, of_pairs[c], normalizer);
        const float product =
            (bits.drops(n, c) ? 0.0f : x[i] * kept) - (c % 2 == 0 ? deltas.x : deltas.y);
        const float score = s[i] * norm, inverse = kWeightScale<T> * e;
        float similarity = score * score + eps, scaled = inverse * product;
        // A key that no query sees may hold anything.
        if (!bits.sees(n, c) || e == 0) similarity = scaled = 0;
        logit_sums[half] += similarity * scaled;
        s[i] = scaled == 0 ? 0.0f : score * fit * scaled;
        x[i] = similarity == 0 ? 0.0f : similarity * inverse;
      }
    }
  }
};

}  // namespace
}  // namespace ikattn::cuda
