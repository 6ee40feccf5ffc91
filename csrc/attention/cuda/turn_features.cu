// Tokens to features, on tensor cores.
#include "attention/cuda/turn_products.h"

namespace ikattn::cuda {
namespace {

// What a feature is multiplied with, and where the features go.
struct FeatureRows {
  Half* phi;  // [B, heads, N, width]
  int64_t width;
  const float* logits;  // [B, heads, N]  where it is NaN or -inf, features are zero; nullptr: none
  const float* scales;  // [B, heads, N]; nullptr: 1
  bool clean;

  // Of a token's sums of two cosines, or sines.
  __device__ __forceinline__ float scale_of(int64_t index) const {
    if (logits == nullptr) return 1;
    const float logit = logits[index];
    // A hidden key may hold anything, and is multiplied with weights of 0.
    return logit == logit && logit != minus_infinity<float>() ? scales[index] : 0.0f;
  }
  __device__ __forceinline__ float feature(float sum, float scale) const {
    const float x = scale == 0.0f ? 0.0f : sum * scale;
    return clean && !is_finite(x) ? 0.0f : x;
  }
};

// Stores 16 features of a row, of which two tiles' lanes have two each, at `row`: four neighbours
// from each lane, so that a row's are whole sectors.
__device__ __forceinline__ void store_features(Half* row, bool there, uint32_t tile0,
                                               uint32_t tile1) {
  const int t = threadIdx.x % 4;
  const bool odd = t % 2 != 0;
  const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? tile0 : tile1, 1);
  if (!there) return;
  uint2 four;
  four.x = odd ? other : tile0;
  four.y = odd ? tile1 : other;
  store_vector(row + (odd ? 8 : 0) + t / 2 * 4, four);
}

template <typename T, int kSets>
__global__ void __launch_bounds__(kProductThreads, 3)
    turn_feature_kernel(FeatureSource source, FrequencyRows frequencies, FeatureRows rows) {
  const TokenTile<T, kSets> tile(source, frequencies, dynamic_shared<unsigned char>());
  const int t = threadIdx.x % 4, sine = sine_step(rows.width);
  float scales[2][2] = {};
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t token = tile.first + tile.row(m, half);
      if (token < source.N) scales[m][half] = rows.scale_of(tile.bh * source.N + token);
    }
  }
  for (int64_t m0 = 0; m0 < rows.width / 2; m0 += kTurnFrequencies) {
    float turns[2][2 * kSets][2][4] = {};
    tile.make_turns(m0, 0, turns, [] {});
    Half* phi =
        rows.phi + (tile.bh * source.N + tile.first) * rows.width + cosine_column(m0, rows.width);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = tile.row(m, half);
        const float scale = scales[m][half];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          uint32_t cosines[2], sines[2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float cosine[2], sine_of[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              float sine2, cosine2;
              fast_sincos_turns(turns[m][n][j][2 * half + c], &sine_of[c], &cosine[c]);
              if constexpr (kSets == 2) {
                fast_sincos_turns(turns[m][2 + n][j][2 * half + c], &sine2, &cosine2);
              } else {
                sine2 = sine_of[c];
                cosine2 = cosine[c];
              }
              const bool is_one = m0 + 16 * n + 8 * j + 2 * t + c < source.M;
              cosine[c] = rows.feature(cosine[c] + cosine2, is_one ? scale : 0.0f);
              sine_of[c] = rows.feature(sine_of[c] + sine2, is_one ? scale : 0.0f);
            }
            cosines[j] = pack_f16x2(cosine[0], cosine[1]);
            sines[j] = pack_f16x2(sine_of[0], sine_of[1]);
          }
          const bool there = tile.first + row < source.N;
          Half* to = phi + row * rows.width + 16 * n;
          store_features(to, there, cosines[0], cosines[1]);
          store_features(to + sine, there, sines[0], sines[1]);
        }
      }
    }
  }
}

const char* write_side(const FeatureSource& source, const FrequencyRows& frequencies,
                       const FeatureRows& rows, Stream stream) {
  return launch_turns(source, [&]<typename T, int kSets>() {
    const int64_t blocks = source.B * source.heads * ceil_div(source.N, kTurnTokens);
    return launch(turn_feature_kernel<T, kSets>, dim3(static_cast<unsigned>(blocks)),
                  dim3(kProductThreads), TokenTile<T, kSets>::kBytes, stream, source, frequencies,
                  rows);
  });
}

}  // namespace

const char* write_turn_features(const AttentionParams& params, const TurnOperands& operands,
                                const FeatureDestination& destination, bool clean, Stream stream) {
  const int64_t width = padded_columns(2 * params.M);
  if (const char* error = write_side(operands.queries, operands.frequencies,
                                     {destination.phi_q, width, nullptr, nullptr, clean}, stream)) {
    return error;
  }
  return write_side(operands.keys, operands.frequencies,
                    {destination.phi_k, width, destination.logits, destination.scales, false},
                    stream);
}

}  // namespace ikattn::cuda
