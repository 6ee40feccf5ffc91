// Turns scores into weights in the forward pass on tensor cores, and keeps their rounding.
#pragma once

#include "attention/cuda/tensor_cores/pairs.h"

namespace ikattn::cuda {
namespace {

// Returns the error of rounding two weights to T.
template <typename T>
__device__ __forceinline__ float rounding_of(uint32_t rounded, float low, float high) {
  const float2 two = unpack<T>(rounded);
  return (two.x - low) + (two.y - high);
}
// Returns the next number of bfloat16 that is not less.
__device__ __forceinline__ float rounded_up(float x) {
  const uint32_t bits = __float_as_uint(x);
  return __uint_as_float((x > 0 ? bits + 0xffffu : bits) & 0xffff0000u);
}

// A number of each of a thread's two rows, in one register, of which there are no more: 8 bits of
// it are enough.
class RowPair {
 public:
  __device__ __forceinline__ float operator[](int half) const {
    const float2 both = unpack<BFloat16>(both_);
    return half == 0 ? both.x : both.y;
  }
  __device__ __forceinline__ void set(float first, float second) {
    both_ = pack<BFloat16>(first, second);
  }

 private:
  uint32_t both_ = 0;
};
// Errors that rounding has added to a row's weights: to be told from 0, and to repair a weight's 8
// or 11 bits.
class Roundings : public RowPair {
 public:
  __device__ __forceinline__ void add(float first, float second) {
    set((*this)[0] + first, (*this)[1] + second);
  }
  __device__ __forceinline__ void multiply(const float (&scales)[2]) {
    set((*this)[0] * scales[0], (*this)[1] * scales[1]);
  }
};

// Weights of a thread's two rows, and their sums.
//
// Weights are rounded before they multiply the value. A row that sees one key alone should be its
// value all the same, or its gradients, which vanish, would be what roundings leave, over the
// score: so an output is divided by the sum of rounded weights where rows may see few keys. Others,
// of many keys, are divided by the sum itself, which takes less time.
template <typename T, Pairs kPairs>
struct ForwardRows {
  float sums[2] = {};
  Roundings roundings;  // where they count
  // General: of the logits, what the weights are relative to: the largest, whose second part
  // counts where they are large. It is rounded up, or weights could be too large for Half.
  float largest[2] = {minus_infinity<float>(), minus_infinity<float>()};
  RowPair largest_lows;

  __device__ __forceinline__ double reference(int half) const {
    return static_cast<double>(largest[half]) + static_cast<double>(largest_lows[half]);
  }

  // Makes weights of the scores of 16 keys, 0 for dropped pairs. Rescales the rows' `output` where
  // their reference changes.
  //   few: of the head, kFew
  template <int kTiles>
  __device__ __forceinline__ Fragment weigh(float (&s)[2][4], const FragmentPairs<kPairs>& at,
                                            const KeyColumns& keys, const GeneralScales& scales,
                                            bool few, float (&output)[kTiles][4]) {
    [[maybe_unused]] float masks[2][4];
    [[maybe_unused]] uint32_t seen = 0;  // bit 4n + c; and 8 + row: of large logits
    if constexpr (kPairs == Pairs::kGeneral) {
      float most[2] = {largest[0], largest[1]}, lows[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          masks[n][c] = 0;
          if (!at.sees(n, c) || keys.terms[n][c % 2] == minus_infinity<float>()) continue;
          const float mask = at.visible.logit(at.row_of(n, c), at.column_of(n, c));
          if (mask == minus_infinity<float>()) continue;
          seen |= 1u << (4 * n + c);
          masks[n][c] = mask;
          const float logit = keys.terms[n][c % 2] + mask;
          if (is_large(mask) || is_large(keys.terms[n][c % 2])) seen |= 256u << (c / 2);
          most[c / 2] = logit > most[c / 2] ? logit : most[c / 2];  // passes over NaN
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        most[half] = max_of_lanes<4>(most[half]);
        lows[half] = most[half] == largest[half] ? largest_lows[half] : 0;
      }
      if (__any_sync(0xffffffffu, seen > 255)) find_large(keys, masks, seen, most, lows);
      RowPair most_lows;
      most_lows.set(lows[0], lows[1]);
      float rescale[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float before = largest[half];
        // Nothing but NaN can be there before the first finite logit.
        rescale[half] =
            before == minus_infinity<float>()
                ? 1
                : fast_exponential((before - most[half]) + (largest_lows[half] - most_lows[half]));
        sums[half] *= rescale[half];
        largest[half] = most[half];
      }
      largest_lows = most_lows;
      roundings.multiply(rescale);
      if (__any_sync(0xffffffffu, rescale[0] != 1 || rescale[1] != 1)) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) output[n][c] *= rescale[c / 2];
        }
      }
    }
    Fragment weights;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float score = s[n][c];
        float weight;
        if constexpr (kPairs == Pairs::kGeneral) {
          const float similarity = score * score * scales.square + scales.eps;
          const TwoParts<float> reference = {
              largest[c / 2] == minus_infinity<float>() ? 0 : largest[c / 2], largest_lows[c / 2]};
          const float logit = relative_logit(keys.logit(n, c), masks[n][c], reference);
          const bool sees = (seen >> (4 * n + c) & 1) != 0;
          weight = sees ? similarity * fast_exponential(logit) : 0.0f;
        } else {
          weight = score * score + keys.terms[n][c % 2];
          if (kPairs != Pairs::kAll && !at.sees(n, c)) weight = 0;
        }
        sums[c / 2] += weight;
        s[n][c] = at.drops(n, c) ? 0 : weight;
      }
      weights.template put<T>(n, s[n]);
      if (kDrops<kPairs> || few || (kPairs == Pairs::kCausal && at.visible.diagonal < kStep)) {
        roundings.add(rounding_of<T>(weights.registers[2 * n], s[n][0], s[n][1]),
                      rounding_of<T>(weights.registers[2 * n + 1], s[n][2], s[n][3]));
      }
    }
    return weights;
  }

 private:
  // Finds the largest logits so far, `most`, and their second parts, for rows that see large ones.
  // All lanes of a warp must come.
  __device__ __forceinline__ void find_large(const KeyColumns& keys, const float (&masks)[2][4],
                                             uint32_t seen, float (&most)[2],
                                             float (&lows)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto for_seen = [&](const auto& function) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          const int n = pair / 2, c = 2 * half + pair % 2;
          if ((seen >> (4 * n + c) & 1) == 0) continue;
          function(masked_logit(keys.logit(n, c), masks[n][c]));
        }
      };
      float high = largest[half];
      for_seen([&](TwoParts<float> logit) { high = logit.high > high ? logit.high : high; });
      high = max_of_lanes<4>(high);
      float low = high == largest[half] ? largest_lows[half] : minus_infinity<float>();
      for_seen([&](TwoParts<float> logit) {
        if (logit.high == high && logit.low > low) low = logit.low;
      });
      low = max_of_lanes<4>(low);
      if (max_of_lanes<4>(seen >> (8 + half) & 1) == 0) continue;
      most[half] = high;
      lows[half] = rounded_up(low);
    }
  }
};

}  // namespace
}  // namespace ikattn::cuda
