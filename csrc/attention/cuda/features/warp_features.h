// Makes rows of features from the angles of a warp's tokens.
#pragma once

#include "attention/cuda/features/angle_products.h"
#include "attention/cuda/features/feature_values.h"

namespace ikattn::cuda {

// Destination of the features of one side.
struct FeatureRows {
  Half* phi;  // [B, heads, N, width]
  int width;
  // Logits and scales of keys: where the logit is NaN or -inf, features are zero, others are
  // multiplied with their scale. nullptr: queries; integers alone
  const float* logits;  // [B, heads, N]
  const float* scales;  // [B, heads, N]
  // Marks of queries, whose features become zero where they are not finite: NaN there, else 0;
  // nullptr: not wanted
  float* poison;  // [B, heads, N]
  // State of every `group` heads, where heads in the folded form have integers.
  const uint32_t* state;
  int group;
  int8_t* int8;  // [B, heads, N, Int8Features::kColumns]; nullptr: not wanted beside Half

  // Returns whether another kernel makes the features of a head.
  template <FeatureForm kForm>
  __device__ __forceinline__ bool leaves(int64_t bh) const {
    if (state == nullptr) return false;
    const bool is_general =
        (state[static_cast<unsigned>(bh) / static_cast<unsigned>(group)] & kGeneral) != 0;
    return is_general != (kForm == FeatureForm::kHalf);
  }

  // Returns the factor of a token's sums of two cosines, or sines.
  __device__ __forceinline__ float scale_of(int64_t index) const {
    if (logits == nullptr) return 1;
    const float logit = logits[index];
    // A hidden key may hold anything, and is multiplied with weights of 0.
    if (logit != logit || logit == minus_infinity<float>()) return 0;
    return scales == nullptr ? 1.0f : scales[index];
  }
};

struct FeatureSide {
  FeatureSource source;
  FeatureRows rows;
  unsigned blocks;
};
// Features that a launch makes: of the keys, and of the queries, whose blocks come behind.
struct FeatureSides {
  FeatureSide sides[2];
};

namespace {

// The features of a warp's 32 tokens, 16 frequencies at a time, of their angles as products leave
// them: rows g and g + 8 of two tiles of 16. kIsSplit: of SplitFrequencies, where a lane has four
// neighbours. kWidth: of a row, or 0.
template <int kSets, bool kIsSplit, int kWidth, FeatureForm kForm>
class WarpFeatures {
  static constexpr bool kInt8 = kForm != FeatureForm::kHalf, kHalf = kForm != FeatureForm::kInt8;
  static_assert(!kInt8 || kIsSplit);
  static constexpr int kRows = 4;  // rows of a thread

 public:
  // Takes the tokens from `first` on of the head `bh`, of N.
  __device__ __forceinline__ WarpFeatures(const FeatureRows& rows, int64_t bh, int64_t first,
                                          int64_t N)
      : rows_(rows),
        first_row_(bh * N + first),
        tokens_(static_cast<int>(min(N - first, int64_t{32}))) {
    phi_ = rows_.phi + (first_row_ + row(0)) * width() + threadIdx.x % 4 * (kIsSplit ? 4 : 0);
    if (kInt8 && rows_.int8 != nullptr) {
      int8_ = rows_.int8 + (first_row_ + row(0)) * Int8Features::kColumns + threadIdx.x % 4 * 8;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      scales_[i] = 0;
      if (row(i) < tokens_) scales_[i] = rows.scale_of(first_row_ + row(i));
    }
  }

  // Stores the features of 16 frequencies from m0 on, of M. angle(m, set, j, i), in units of `unit`
  // of a cycle: of tile m of tokens and j of 8 frequencies.
  template <typename Angle>
  __device__ __forceinline__ void store(int m0, int M, float unit, const Angle& angle) {
    const int sine_at = sine_step(width()), t = static_cast<int>(threadIdx.x) % 4;
    // Bits of pairs of features, ones where there is a frequency.
    uint32_t present[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      present[j] = half_present(M - m0 - (kIsSplit ? 4 * t + 2 * j : 2 * t + 8 * j));
    }
    Half* phi = phi_ + cosine_column(m0, width());
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int m = i / 2, half = i % 2;
      // Integers have one scale for all. Half of each sum is made.
      const float scale = kInt8 ? scales_[i] * (1 / kInt8OfOne) : 2 * scales_[i];
      // Masks clear hidden keys, for these may hold NaN.
      const uint32_t counts = scales_[i] == 0 ? 0u : 0xffffffffu;
      uint32_t cosines[2], sines[2];
      float four_cosines[4], four_sines[4];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float cosine[2], sine[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float first = angle(m, 0, j, 2 * half + c);
          if constexpr (kSets == 2) {
            half_sums<kForm>(first, angle(m, 1, j, 2 * half + c), unit, sine[c], cosine[c]);
          } else {
            sine_and_cosine<kForm>(first, unit, sine[c], cosine[c]);
          }
          not_finite_[i] = fmaf(cosine[c], 0.0f, not_finite_[i]);
          four_cosines[2 * j + c] = cosine[c];
          four_sines[2 * j + c] = sine[c];
          if constexpr (kForm == FeatureForm::kBoth) {
            cosine[c] = fmaf(cosine[c], 2 * kInt8OfOne, kInteger) - kInteger;
            sine[c] = fmaf(sine[c], 2 * kInt8OfOne, kInteger) - kInteger;
          }
          cosine[c] *= scale;
          sine[c] *= scale;
        }
        if constexpr (!kHalf) continue;
        cosines[j] = pack_f16x2(cosine[0], cosine[1]) & present[j] & counts;
        sines[j] = pack_f16x2(sine[0], sine[1]) & present[j] & counts;
      }
      Half* to = phi + 8 * i * width();
      if constexpr (kInt8) {
        const uint32_t mask = counts & int8_present(M - m0 - 4 * t);
        if (row(i) < tokens_ && int8_ != nullptr) {
          store_vector(int8_ + 8 * i * Int8Features::kColumns + 2 * m0,
                       make_uint2(pack_int8(four_cosines, 2 * kInt8OfOne) & mask,
                                  pack_int8(four_sines, 2 * kInt8OfOne) & mask));
        }
      }
      if constexpr (!kHalf) continue;
      if constexpr (kIsSplit) {
        if (row(i) < tokens_) {
          store_vector(to, make_uint2(cosines[0], cosines[1]));
          store_vector(to + sine_at, make_uint2(sines[0], sines[1]));
        }
      } else {
        const bool there = row(i) < tokens_;
        store_tiles(to, there, cosines[0], cosines[1]);
        store_tiles(to + sine_at, there, sines[0], sines[1]);
      }
    }
    __syncwarp();  // lanes of no token come to the next product with the others
  }

  // Marks queries that are not finite, after all frequencies.
  __device__ __forceinline__ void finish() {
    if (rows_.logits != nullptr) return;
    __syncwarp();  // rows are stored
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float poison = sum_of_lanes<4>(not_finite_[i]);
      if (row(i) >= tokens_) continue;
      if (rows_.poison != nullptr && t == 0) rows_.poison[first_row_ + row(i)] = poison;
      if (poison == poison) continue;
      if (kInt8 && int8_ != nullptr) {
        int8_t* to = rows_.int8 + (first_row_ + row(i)) * Int8Features::kColumns;
#pragma unroll
        for (int column = 0; column < Int8Features::kColumns; column += 64) {
          store_vector(to + column + 16 * t, make_uint4(0, 0, 0, 0));
        }
      }
      if constexpr (!kHalf) continue;
      Half* to = rows_.phi + (first_row_ + row(i)) * width();
#pragma unroll 1
      for (int column = 8 * t; column < width(); column += 32) {
        store_vector(to + column, make_uint4(0, 0, 0, 0));
      }
    }
    __syncwarp();  // lanes of no token come to the next product with the others
  }

 private:
  // Returns row i of a thread, of the warp's tokens; a thread's rows are eight apart.
  __device__ __forceinline__ static int row(int i) {
    return 8 * i + static_cast<int>(threadIdx.x) % 32 / 4;
  }
  __device__ __forceinline__ int width() const { return kWidth == 0 ? rows_.width : kWidth; }

  const FeatureRows& rows_;
  int64_t first_row_;
  int tokens_;
  Half* phi_;  // features of the thread's first row, where it begins
  int8_t* int8_ = nullptr;
  float scales_[kRows];
  float not_finite_[kRows] = {};  // 0, or NaN
};

}  // namespace
}  // namespace ikattn::cuda
