// How scores become weights in the general form, of a warpgroup's 64 queries and 64 keys:
//   w = (s s + eps) exp(g_j + m_ij - r_i)
// with r_i the largest exponent that row i has met. It does not depend on the scores. Sums of
// products lie in a thread as rows g and g + 8, columns 2t and 2t + 1 of tiles of 8.
#pragma once

#include "attention/cuda/hopper/offsets.h"
#include "attention/cuda/hopper/pairs.h"
#include "attention/cuda/tensor_cores/forward_pairs.h"
#include "attention/offsets.h"

namespace ikattn::cuda {
namespace {

// Logits below this in size need no second part: they lose 2^-15 of a weight at most.
constexpr float kPlainLogit = 256;
__device__ __forceinline__ bool is_plain_logit(float x) {
  return fabsf(x) < kPlainLogit || x == minus_infinity<float>();
}

// What is no number, or infinite, must not spoil the sum with the -inf of a hidden key; of a pair
// that is seen it makes the row's largest exponent a large one.
__device__ __forceinline__ float plain_exponent(float offset, float key) {
  return fminf(offset, 1e30f) + key;
}

// Whether a kernel of the general form has something to do. By the whole block, which meets.
__device__ __forceinline__ bool has_general_head(const AttentionParams& params,
                                                 const FoldedTokens& tokens) {
  bool found = false;
  for (int64_t head = threadIdx.x; head < params.B * params.key_heads; head += kWarpgroupThreads) {
    found = found || (tokens.state[head] & kGeneral) != 0;
  }
  return __syncthreads_or(found) != 0;
}

// Of a tile's keys, in shared memory: logits, -inf where hidden, in two parts.
struct KeyLogits {
  Shared<const float> highs, lows;

  // Whether those that the lane looks at need no second part; a warp's lanes look at all.
  __device__ __forceinline__ bool are_plain() const {
    const float2 two = load_vector<float2>(highs + threadIdx.x % 32 * 2);
    return is_plain_logit(two.x) && is_plain_logit(two.y);
  }

  // Of the keys of the thread's columns of tile n of 8.
  __device__ __forceinline__ float2 high(int n) const {
    return load_vector<float2>(highs + n * 8 + threadIdx.x % 4 * 2);
  }
  __device__ __forceinline__ float2 low(int n) const {
    return load_vector<float2>(lows + n * 8 + threadIdx.x % 4 * 2);
  }
};

// What the weights of a thread's two rows have added up to, what they are relative to, and what
// sums of the tiles before are to be multiplied with.
struct GeneralRows {
  float sums[2] = {}, roundings[2] = {};  // as in ForwardRows
  // The largest exponents, in two parts; -inf: none but of hidden or poisoned pairs.
  float largest[2] = {minus_infinity<float>(), minus_infinity<float>()};
  float lows[2] = {};
  float rescale[2] = {1, 1};

  // Exponentials of a tile's pairs, 0 of those that `bits` does not see. By whole warps.
  __device__ __forceinline__ void exponentials_of(float (&e)[kStep / 2], ElementType type,
                                                  Shared<const unsigned char> offsets,
                                                  const KeyLogits& keys, const PairBits& bits) {
    const float before[2] = {largest[0], largest[1]}, lows_before[2] = {lows[0], lows[1]};
    load_exponents(e, type, offsets, bits);
    if (!make_plain(e, keys)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        largest[half] = before[half];
        lows[half] = lows_before[half];
      }
      load_exponents(e, type, offsets, bits);
      make_large(e, keys);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Nothing but NaN can be there before the first finite exponent.
      rescale[half] =
          before[half] == minus_infinity<float>()
              ? 1
              : fast_exponential((before[half] - largest[half]) + (lows_before[half] - lows[half]));
      sums[half] *= rescale[half];
      roundings[half] *= rescale[half];
    }
  }

  // Scores become weights, those of dropped pairs 0; e: exponentials.
  template <typename T>
  __device__ __forceinline__ void weigh(float (&s)[kStep / 2], const float (&e)[kStep / 2],
                                        const GeneralScales& scales, const PairBits& bits) {
#pragma unroll
    for (int i = 0; i < kStep / 2; ++i) {
      s[i] = (s[i] * s[i] * scales.square + scales.eps) * e[i];
      sums[i % 4 / 2] += s[i];
    }
    if (__any_sync(0xffffffffu, bits.dropped != 0)) {
#pragma unroll
      for (int i = 0; i < kStep / 2; ++i) s[i] = bits.drops(i / 4, i % 4) ? 0.0f : s[i];
    }
#pragma unroll
    for (int i = 0; i < kStep / 2; i += 2) {
      roundings[i % 4 / 2] += rounding_of<T>(pack<T>(s[i], s[i + 1]), s[i], s[i + 1]);
    }
  }

  // What has been added up before the tile follows.
  template <int kBoxes>
  __device__ __forceinline__ void rescale_sums(float (&output)[kBoxes][32]) const {
    if (!__any_sync(0xffffffffu, rescale[0] != 1 || rescale[1] != 1)) return;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
#pragma unroll
      for (int i = 0; i < 32; ++i) output[box][i] *= rescale[i % 4 / 2];
    }
  }

 private:
  // What the mask adds; -inf of pairs that `bits` does not see.
  __device__ __forceinline__ static void load_exponents(float (&e)[kStep / 2], ElementType type,
                                                        Shared<const unsigned char> offsets,
                                                        const PairBits& bits) {
    load_offsets(e, type, offsets);
    if (!__any_sync(0xffffffffu, bits.seen != 0xffffffffu)) return;
#pragma unroll
    for (int i = 0; i < kStep / 2; ++i) {
      if (!bits.sees(i / 4, i % 4)) e[i] = minus_infinity<float>();
    }
  }

  // Offsets become exponentials, unless logits are so large that their second parts count: then
  // false. An exponent far below the largest of its row may be off, for its exponential is 0.
  __device__ __forceinline__ bool make_plain(float (&e)[kStep / 2], const KeyLogits& keys) {
    const float before[2] = {largest[0], largest[1]};
    bool is_plain = keys.are_plain();
#pragma unroll
    for (int n = 0; n < kStep / 8; ++n) {
      const float2 of_keys = keys.high(n);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float& exponent = e[4 * n + c];
        exponent = plain_exponent(exponent, c % 2 == 0 ? of_keys.x : of_keys.y);
        largest[c / 2] = fmaxf(largest[c / 2], exponent);  // passes over NaN
      }
    }
    float reference[2];  // as a power of two
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = max_of_lanes<4>(largest[half]);
      if (largest[half] != before[half]) lows[half] = 0;
      is_plain = is_plain && is_plain_logit(largest[half]);
      reference[half] =
          largest[half] == minus_infinity<float>() ? 0 : (largest[half] + lows[half]) * kLog2E;
    }
    if (__any_sync(0xffffffffu, !is_plain)) return false;
#pragma unroll
    for (int i = 0; i < kStep / 2; ++i) {
      e[i] = fast_exp2(fmaf(e[i], kLog2E, -reference[i % 4 / 2]));
    }
    return true;
  }

  // The same of any logits.
  __device__ __forceinline__ void make_large(float (&e)[kStep / 2], const KeyLogits& keys) {
    const auto for_seen = [&](const auto& visit) {
#pragma unroll
      for (int n = 0; n < kStep / 8; ++n) {
        const float2 highs = keys.high(n), low = keys.low(n);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const TwoParts<float> key = {c % 2 == 0 ? highs.x : highs.y, c % 2 == 0 ? low.x : low.y};
          float& exponent = e[4 * n + c];
          const bool is_hidden =
              key.high == minus_infinity<float>() || exponent == minus_infinity<float>();
          visit(key, exponent, c / 2, is_hidden);
        }
      }
    };
    for_seen([&](TwoParts<float> key, float& exponent, int half, bool is_hidden) {
      exponent = bounded_offset(exponent);
      const TwoParts<float> logit = masked_logit(key, exponent);
      const bool is_larger =
          logit.high > largest[half] || (logit.high == largest[half] && logit.low > lows[half]);
      if (is_hidden || !is_larger) return;  // NaN is no larger
      largest[half] = logit.high;
      lows[half] = logit.low;
    });
    TwoParts<float> reference[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float most = max_of_lanes<4>(largest[half]);
      lows[half] = max_of_lanes<4>(largest[half] == most ? lows[half] : minus_infinity<float>());
      largest[half] = most;
      reference[half] = {most == minus_infinity<float>() ? 0 : most, lows[half]};
    }
    for_seen([&](TwoParts<float> key, float& exponent, int half, bool is_hidden) {
      exponent =
          is_hidden ? 0.0f : fast_exponential(relative_logit(key, exponent, reference[half]));
    });
  }

  static constexpr float kLog2E = 1.44269504f;
};

}  // namespace
}  // namespace ikattn::cuda
