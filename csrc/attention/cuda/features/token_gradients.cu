// Gradients of features and logits, back to tokens, on tensor cores.
#include "attention/cuda/features/chained_products.h"

namespace ikattn::cuda {
namespace {

constexpr int kFloatPitch = Slice<float>::kRowBytes / 4;

template <typename T, int kSets>
struct TokenGradientLayout {
  static constexpr uint32_t kGradients = TokenTile<T, kSets>::kBytes;
  static constexpr uint32_t kEnd = kGradients + kAngleTokens * Slice<Half>::kRowBytes;
  // Slopes take the place of tokens that have their size: beside them there is no room for both.
  static constexpr bool kInPlace = sizeof(T) == sizeof(float);
  static constexpr int64_t bytes(bool has_powers) {
    return kEnd + (has_powers && !kInPlace ? int64_t{kAngleTokens} * Slice<float>::kRowBytes : 0);
  }
};

// Loads the scales of the thread's rows of gradients, of the 64 frequencies that m0 is among; 0: no
// token.
template <typename T, int kSets>
__device__ __forceinline__ void load_units(const TokenTile<T, kSets>& tile,
                                           const FeatureGradients& grad_phi, int64_t m0,
                                           float (&row_units)[2][2]) {
  const FeatureSource& source = tile.source;
  const float units = static_cast<float>(angle_units(kSets == 1));
  const float* scales = grad_phi.scales + tile.first +
                        scale_place(m0 / kSliceColumns, source.B * source.heads, tile.bh, source.N);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile.row(m, half);
      row_units[m][half] = row < source.N - tile.first ? units * scales[row] : 0.0f;
    }
  }
}

// Turns the angles of the n-th 16 frequencies into their gradients.
//   incoming [kAngleTokens]: of the cosines and the sines of 32 frequencies, next to each other
template <typename T, int kSets>
__device__ __forceinline__ void make_gradients(const TokenTile<T, kSets>& tile,
                                               const Slice<Half>& incoming, int n,
                                               const float (&row_units)[2][2],
                                               float (&angles)[2][2 * kSets][2][4]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = tile.row(m, half), column = 16 * n + 8 * j + 2 * t;
        const float2 grad_cos = incoming.pair(row, column);
        const float2 grad_sin = incoming.pair(row, kAngleFrequencies + column);
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
          float (&two)[4] = angles[m][2 * set + n][j];
          to_gradient(two[2 * half], row_units[m][half], grad_sin.x, grad_cos.x);
          to_gradient(two[2 * half + 1], row_units[m][half], grad_sin.y, grad_cos.y);
        }
      }
    }
  }
}

// Makes slopes of the magnitude with a power, which are long code: once, and not for every sum. All
// threads of the block call it, and it synchronises them.
template <typename T, int kSets>
__device__ __forceinline__ void make_slopes(const TokenTile<T, kSets>& tile,
                                            const Magnitude<float>& magnitude,
                                            const Slice<float>& slopes) {
  Shared<float> to = shared_cast<float>(slopes.memory);
  if constexpr (TokenGradientLayout<T, kSets>::kInPlace) {
    __syncthreads();  // others may still read tokens
  }
#pragma unroll 1
  for (int index = threadIdx.x; index < kAngleTokens * kSliceColumns / 2;
       index += kProductThreads) {
    const int row = index / (kSliceColumns / 2), column = index % (kSliceColumns / 2) * 2;
    if (row >= tile.source.N - tile.first) continue;
    const KeyMagnitude<float> own(magnitude, tile.bh * tile.source.N + tile.first + row);
    const float2 x = tile.x.pair(row, column);
    const float2 slope =
        own.factor == 0 ? make_float2(0, 0)
                        : make_float2(own.slope(x.x, magnitude.p), own.slope(x.y, magnitude.p));
    store_vector(to + row * kFloatPitch + column, slope);
  }
  __syncthreads();
}

// Stores rows of the result, with the gradients of magnitudes. slopes: those with a power, where
// there are any.
template <typename T, int kSets>
__device__ __forceinline__ void store_tokens(const TokenTile<T, kSets>& tile, const Array& out,
                                             const Magnitude<float>& magnitude,
                                             const Slice<float>& slopes, bool has_powers,
                                             float (&sums)[2][4][2][4]) {
  const FeatureSource& source = tile.source;
  const int64_t c0 = int64_t{blockIdx.y} * kSliceColumns;
  const int t = threadIdx.x % 4;
  const RowPairs pairs(out);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile.row(m, half);
      if (row >= source.N - tile.first) continue;
      const int64_t token = tile.first + row;
      const KeyMagnitude<float> own(magnitude, tile.bh * source.N + token);
      const int64_t to = tile.b * out.stride[0] + tile.head * out.stride[1] + token * out.stride[2];
      if (has_powers || own.factor != 0) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const int column = 8 * n + 2 * t;
          float2 slope;
          if (has_powers) {
            slope = slopes.pair(row, column);
          } else {
            const float2 x = tile.x.pair(row, column);
            slope = make_float2(own.factor * x.x, own.factor * x.y);
          }
          sums[m][n / 2][n % 2][2 * half] += slope.x;
          sums[m][n / 2][n % 2][2 * half + 1] += slope.y;
        }
      }
      pairs.store<kSliceColumns>(to, c0, source.d, [&](int n) {
        const float (&two)[4] = sums[m][n / 2][n % 2];
        return make_float2(two[2 * half], two[2 * half + 1]);
      });
    }
  }
}

// grad_x of 128 tokens and 64 dimensions.
//   out [B, heads, N, d]
template <typename T, int kSets>
__global__ void __launch_bounds__(kProductThreads, 2)
    tf32_token_gradient_kernel(FeatureSource source, FrequencyRows frequencies,
                               FeatureGradients grad_phi, int64_t width, Array out,
                               Magnitude<float> magnitude) {
  // Number of split operands of gradients and frequencies. With one, ptxas loads more ahead than
  // registers hold.
  constexpr int kSplits = 2;
  using L = TokenGradientLayout<T, kSets>;
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const TokenTile<T, kSets> tile(source, frequencies, shared);
  const Slice<Half> incoming{shared + L::kGradients};
  const Slice<float> slopes{L::kInPlace ? tile.x.memory : shared + L::kEnd};
  const int last = static_cast<int>(blockIdx.y);
  const Half* gradients = grad_phi.rows + (tile.bh * source.N + tile.first) * width;
  // Angles of 32 frequencies at a time become their gradients, and these times the frequencies are
  // added up.
  float sums[2][4][2][4] = {};
  for (int64_t m0 = 0; m0 < source.M; m0 += kAngleFrequencies) {
    float angles[2][2 * kSets][2][4] = {}, row_units[2][2];
    tile.make_angles(m0, last, angles, [&] {
      const Half* from = gradients + cosine_column(m0, width);
      incoming.begin_halves<kAngleTokens>(from, from + sine_step(width), width,
                                          source.N - tile.first);
    });
    load_units(tile, grad_phi, m0, row_units);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      make_gradients(tile, incoming, n, row_units, angles);
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        const Tf32Block<kSplits> left_blocks[2] = {
            rounded<kSplits>(block_of(angles[0][2 * set + n])),
            rounded<kSplits>(block_of(angles[1][2 * set + n]))};
        multiply_by_rows(sums, left_blocks, tile.w, set * kAngleFrequencies + 16 * n,
                         [](const Block& block) { return block; });
      }
    }
  }
  const bool has_powers = magnitude.grad_logits != nullptr && magnitude.p != 2;
  if (has_powers) make_slopes(tile, magnitude, slopes);
  store_tokens(tile, out, magnitude, slopes, has_powers, sums);
}

const char* side_gradients(const FeatureSource& source, const FrequencyRows& frequencies,
                           const FeatureGradients& grad_phi, const Array& grad_x,
                           const Magnitude<float>& magnitude, const DeviceExecutor& executor) {
  const bool has_powers = magnitude.grad_logits != nullptr && magnitude.p != 2;
  const dim3 blocks(
      static_cast<unsigned>(source.B * source.heads * ceil_div(source.N, kAngleTokens)),
      static_cast<unsigned>(frequencies.columns / kSliceColumns));
  return launch_angles(source, [&]<typename T, int kSets>() {
    return launch(tf32_token_gradient_kernel<T, kSets>, blocks, dim3(kProductThreads),
                  TokenGradientLayout<T, kSets>::bytes(has_powers), executor.stream, source,
                  frequencies, grad_phi, padded_columns(2 * source.M), grad_x, magnitude);
  });
}

}  // namespace

const char* feature_gradients_on_tensor_cores(const AttentionBackwardParams& params,
                                              const DeviceExecutor& executor,
                                              const AngleOperands& operands,
                                              const SplitLogits<float>& keys,
                                              const FoldedGradients& gradients) {
  const FrequencyRows& frequencies = operands.frequencies;
  float* grad_w1 = data_of<float>(params.grad_w1);
  float* grad_w2 = data_of<float>(params.grad_w2);
  return for_sides(params, keys, gradients,
                   [&](bool of_keys, const FeatureGradients& grad_phi, const Array& grad_x,
                       const auto& magnitude) {
                     const FeatureSource& source = of_keys ? operands.keys : operands.queries;
                     if (goes_in_one_pass(source)) {
                       return gradients_in_one_pass(source, operands.split, grad_phi, grad_x,
                                                    magnitude, grad_w1, grad_w2, executor);
                     }
                     const char* error = grad_x ? side_gradients(source, frequencies, grad_phi,
                                                                 grad_x, magnitude, executor)
                                                : nullptr;
                     if (error != nullptr || !wants_frequencies(params)) return error;
                     return frequency_gradients_on_tensor_cores(source, frequencies, grad_phi,
                                                                grad_w1, grad_w2, executor);
                   });
}

}  // namespace ikattn::cuda
