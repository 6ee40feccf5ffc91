// Gradients of the frequencies, on tensor cores.
#include "attention/cuda/features/chained_products.h"
#include "attention/cuda/features/frequency_parts.h"

namespace ikattn::cuda {
namespace {

constexpr int kFrequencyTokens = 64;  // that a block passes by at a time
constexpr int64_t kTokensOfShare = 512;

// The shares' parts: a block's 64 frequencies, 16 of each warp, and 64 dimensions.
template <typename T, int kSets>
struct FrequencyLayout {
  static constexpr uint32_t kTokensAt = kSets * kTile * Slice<float>::kRowBytes;
  static constexpr uint32_t kCosines = kTokensAt + kFrequencyTokens * Slice<T>::kRowBytes;
  static constexpr uint32_t kSines = kCosines + kFrequencyTokens * Slice<Half>::kRowBytes;
  static constexpr uint32_t kScales = kSines + kFrequencyTokens * Slice<Half>::kRowBytes;
  static constexpr int64_t kBytes = kScales + kFrequencyTokens * 4;
};
// Places of what a block reads of 64 tokens.
template <typename T, int kSets>
struct FrequencyTile {
  using L = FrequencyLayout<T, kSets>;

  Slice<float> w;
  Slice<T> x;
  Slice<Half> cosines, sines;
  Shared<float> scales;  // [kFrequencyTokens]

  __device__ __forceinline__ explicit FrequencyTile(Shared<unsigned char> shared)
      : w{shared},
        x{shared + L::kTokensAt},
        cosines{shared + L::kCosines},
        sines{shared + L::kSines},
        scales(shared_cast<float>(shared + L::kScales)) {}

  // Begins to copy gradients of `remaining` tokens, `left` columns of a row from `from` on.
  __device__ __forceinline__ void begin_gradients(const Half* from, const float* row_scales,
                                                  int64_t width, int64_t left,
                                                  int remaining) const {
    // The sines follow 32 frequencies; where there are fewer, nobody stores what is read in their
    // place.
    cosines.template begin<kFrequencyTokens>(0, from, width, left, remaining);
    sines.template begin<kFrequencyTokens>(0, from + sine_step(width), width,
                                           left - sine_step(width), remaining);
    if (threadIdx.x < kFrequencyTokens / 4) {
      cp_async_16(shared_address(scales + threadIdx.x * 4), row_scales + threadIdx.x * 4);
    }
  }

  // Turns the angles of the n-th 16 tokens into their gradients. first_place: of the thread's first
  // token and frequency.
  __device__ __forceinline__ void make_gradients(int n, uint32_t first_place,
                                                 float (&angles)[kSets][4][2][4]) const {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 16 * n + 8 * j + 2 * t + i % 2;
        // The next token, and the eighth frequency further on, are in the chunk beside it: both
        // even, they are swizzled by the last bit.
        const uint32_t place = first_place + (i % 2 != i / 2 ? 16 : 0) +
                               (16 * n + 8 * j + i % 2) * Slice<Half>::kRowBytes;
        const float of_cosine = cosines.at(place), of_sine = sines.at(place);
        const float row_scale = scales[token];
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
          to_gradient(angles[set][n][j][i], row_scale, of_sine, of_cosine);
        }
      }
    }
  }
};

// Stores the block's part of the sums.
template <int kSets>
__device__ __forceinline__ void store_part(const FeatureSource& source,
                                           const FrequencyBlock<float>& block,
                                           const float (&sums)[kSets][4][2][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const float units = static_cast<float>(angle_units(kSets == 1));
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int64_t m = block.m0 + 16 * warp + g + 8 * (i / 2);
          const int64_t c = block.c0 + 16 * n + 8 * j + 2 * t + i % 2;
          if (m < source.M && c < source.d) {
            block.part[set * block.size + c * source.M + m] = units * sums[set][n][j][i];
          }
        }
      }
    }
  }
}

template <typename T, int kSets>
__global__ void __launch_bounds__(kProductThreads, 2)
    tf32_frequency_gradient_kernel(FeatureSource source, FrequencyRows frequencies,
                                   FeatureGradients grad_phi, int64_t width,
                                   FrequencyParts<float> parts) {
  constexpr int kSplits = kTf32Splits<T>;
  const FrequencyTile<T, kSets> tile(dynamic_shared<unsigned char>());
  const FrequencyBlock<float> block(source, parts);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t first_place = Slice<Half>::place_of_element(2 * (lane % 4), 16 * warp + lane / 4);
  const bool is_whole = frequencies.columns == kSliceColumns;
  const int last = static_cast<int>(block.c0 / kSliceColumns);
  const int64_t column = cosine_column(block.m0, width);
  // Tokens of all heads that share the frequencies, 64 at a time: angles become their gradients,
  // and these times the tokens are added up.
  bool is_first = true;
  float sums[kSets][4][2][4] = {};
  for (int64_t unit = block.first_head; unit < block.end_head; ++unit) {
    const int64_t b = block.batch(unit), head = block.head(unit);
    const AngleRows<T> rows(source, frequencies, kSets, b, head);
    const int64_t bh = b * source.heads + head;
    const Half* gradients = grad_phi.rows + (bh * source.N + block.first) * width + column;
    const float* row_scales = grad_phi.scales + block.first +
                              scale_place(block.m0 / 64, source.B * source.heads, bh, source.N);
    const int tokens = static_cast<int>(block.end - block.first);
    for (int token0 = 0; token0 < tokens; token0 += kFrequencyTokens) {
      float angles[kSets][4][2][4] = {};
      pass_slices(
          frequencies, last,
          [&](int slice) {
            rows.template begin<kFrequencyTokens>(tile.x, block.first + token0, block.end, source.d,
                                                  slice);
            if (!is_whole || is_first) {
              begin_frequencies<kTile, kSets>(tile.w, rows.w, frequencies, block.m0, slice);
            }
            is_first = false;
            if (slice != last) return;
            tile.begin_gradients(gradients + token0 * width, row_scales + token0, width,
                                 width - column, tokens - token0);
          },
          [&] {
            multiply_slices(
                angles, tile.w, [&](int set) { return set * kTile + 16 * warp; }, tile.x,
                [](int n) { return 16 * n; });
          });
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        tile.make_gradients(n, first_place, angles);
        Tf32Block<kSplits> left_blocks[kSets];
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
          left_blocks[set] = rounded<kSplits>(block_of(angles[set][n]));
        }
        // A token without gradient has none, whatever it holds; with one, it is NaN there, too.
        multiply_by_rows(sums, left_blocks, tile.x, 16 * n,
                         [](const Block& of_tokens) { return finite_of(of_tokens); });
      }
    }
  }
  store_part<kSets>(source, block, sums);
}

}  // namespace

const char* frequency_gradients_on_tensor_cores(const FeatureSource& source,
                                                const FrequencyRows& frequencies,
                                                const FeatureGradients& grad_phi, float* grad_w1,
                                                float* grad_w2, const DeviceExecutor& executor) {
  const FrequencyParts<float> parts(source, kTokensOfShare, &executor);
  const char* error = launch_angles(source, [&]<typename T, int kSets>() {
    return launch(tf32_frequency_gradient_kernel<T, kSets>, parts.blocks(source),
                  dim3(kProductThreads), FrequencyLayout<T, kSets>::kBytes, executor.stream, source,
                  frequencies, grad_phi, padded_columns(2 * source.M), parts);
  });
  if (error != nullptr) return error;
  return add_frequency_parts(source, parts, grad_w1, grad_w2, executor.stream);
}

}  // namespace ikattn::cuda
