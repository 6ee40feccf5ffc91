// Gradients of features and logits, back to tokens and frequencies, on tensor cores. Turns are made
// again, so that what a turn's gradients are multiplied with next finds them in registers.
#include "attention/cuda/frequency_parts.h"
#include "attention/cuda/turn_gradients.h"
#include "attention/cuda/turn_products.h"

namespace ikattn::cuda {
namespace {

constexpr int kFrequencyTokens = 64;  // that a block passes by at a time
constexpr int64_t kTokensOfShare = 512;

// A number of TF32, to nearest, or two.
template <int kParts>
__device__ __forceinline__ Tf32Block<kParts> rounded(Block block) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if constexpr (kParts == 1) block.element[i][c] = tf32_rounded(block.element[i][c]);
    }
  }
  return Tf32Block<kParts>(block);
}

__device__ __forceinline__ Block finite_of(Block block) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (!is_finite(block.element[i][c])) block.element[i][c] = 0;
    }
  }
  return block;
}

// sums[m][n] += left[m] right, where `left` has 16 columns and right's 16 rows begin at row0; 16
// columns of right in each sums[.][n].
template <int kParts, int kRows, typename T, typename Clean>
__device__ __forceinline__ void multiply_by_rows(float (&sums)[kRows][4][2][4],
                                                 const Tf32Block<kParts> (&left)[kRows],
                                                 const Slice<T>& right, int row0,
                                                 const Clean& clean) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const Tf32Block<kParts> block = rounded<kParts>(clean(right.transposed_block(row0, 16 * n)));
#pragma unroll
    for (int m = 0; m < kRows; ++m) multiply(sums[m][n], left[m], block);
  }
}

// A turn becomes its gradient.
__device__ __forceinline__ void to_gradient(float& turn, float units, float grad_sin,
                                            float grad_cos) {
  float sine, cosine;
  fast_sincos_turns(turn, &sine, &cosine);
  turn = turn_gradient(units, sine, cosine, grad_sin, grad_cos);
}

// grad_x of 128 tokens and 64 dimensions.
//   grad_phi [B, heads, N, width], out [B, heads, N, d]
template <typename T, int kSets>
struct TokenGradientLayout {
  static constexpr uint32_t kGradients = TokenTile<T, kSets>::kBytes;
  static constexpr int64_t kBytes = kGradients + int64_t{kTurnTokens} * Slice<float>::kRowBytes;
};
template <typename T, int kSets>
__global__ void __launch_bounds__(kProductThreads, 2)
    turn_token_kernel(FeatureSource source, FrequencyRows frequencies, const float* grad_phi,
                      int64_t width, Array out, Magnitude<float> magnitude) {
  // Of gradients and frequencies. With one, ptxas loads more ahead than registers hold.
  constexpr int kParts = 2;
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const TokenTile<T, kSets> tile(source, frequencies, shared);
  // Of the cosines and the sines of 32 frequencies, next to each other.
  const Slice<float> incoming{shared + TokenGradientLayout<T, kSets>::kGradients};
  const int last = static_cast<int>(blockIdx.y), t = threadIdx.x % 4;
  const int64_t left = source.N - tile.first;
  const float units = static_cast<float>(turn_units(kSets == 1));
  const float* gradients = grad_phi + (tile.bh * source.N + tile.first) * width;
  float sums[2][4][2][4] = {};
  for (int64_t m0 = 0; m0 < source.M; m0 += kTurnFrequencies) {
    float turns[2][2 * kSets][2][4] = {};
    tile.make_turns(m0, last, turns, [&] {
      const float* from = gradients + cosine_column(m0, width);
      incoming.begin_halves<kTurnTokens>(from, from + sine_step(width), width, left);
    });
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int row = tile.row(m, half), column = 16 * n + 8 * j + 2 * t;
            const float2 grad_cos = incoming.pair(row, column);
            const float2 grad_sin = incoming.pair(row, kTurnFrequencies + column);
#pragma unroll
            for (int set = 0; set < kSets; ++set) {
              float (&two)[4] = turns[m][2 * set + n][j];
              to_gradient(two[2 * half], units, grad_sin.x, grad_cos.x);
              to_gradient(two[2 * half + 1], units, grad_sin.y, grad_cos.y);
            }
          }
        }
      }
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        const Tf32Block<kParts> left_blocks[2] = {rounded<kParts>(block_of(turns[0][2 * set + n])),
                                                  rounded<kParts>(block_of(turns[1][2 * set + n]))};
        multiply_by_rows(sums, left_blocks, tile.w, set * kTurnFrequencies + 16 * n,
                         [](const Block& block) { return block; });
      }
    }
  }
  const int64_t c0 = int64_t{last} * kSliceColumns;
  const RowPairs pairs(out);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile.row(m, half);
      if (row >= left) continue;
      const int64_t token = tile.first + row;
      const KeyMagnitude<float> own(magnitude, tile.bh * source.N + token);
      const int64_t to = tile.b * out.stride[0] + tile.head * out.stride[1] + token * out.stride[2];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int column = 16 * n + 8 * j + 2 * t;
          float2 sum = make_float2(sums[m][n][j][2 * half], sums[m][n][j][2 * half + 1]);
          if (own.factor != 0) {
            const float2 x = tile.x.pair(row, column);
            sum.x += own.slope(x.x, magnitude.p);
            sum.y += own.slope(x.y, magnitude.p);
          }
          pairs.store(to, c0 + column, source.d, sum);
        }
      }
    }
  }
}

// The shares' parts: a block's 64 frequencies, 16 of each warp, and 64 dimensions.
template <typename T, int kSets>
struct FrequencyLayout {
  static constexpr uint32_t kTokensAt = kSets * kTile * Slice<float>::kRowBytes;
  static constexpr uint32_t kCosines = kTokensAt + kFrequencyTokens * Slice<T>::kRowBytes;
  static constexpr uint32_t kSines = kCosines + kFrequencyTokens * Slice<float>::kRowBytes;
  static constexpr int64_t kBytes = kSines + int64_t{kFrequencyTokens} * Slice<float>::kRowBytes;
};
template <typename T, int kSets>
__global__ void __launch_bounds__(kProductThreads, 2)
    turn_frequency_kernel(FeatureSource source, FrequencyRows frequencies, const float* grad_phi,
                          int64_t width, FrequencyParts<float> parts) {
  using L = FrequencyLayout<T, kSets>;
  constexpr int kParts = kTf32Parts<T>;
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const Slice<float> w{shared};
  const Slice<T> x{shared + L::kTokensAt};
  const Slice<float> cosines{shared + L::kCosines}, sines{shared + L::kSines};
  const FrequencyBlock<float> block(source, parts);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int slices = static_cast<int>(frequencies.columns / kSliceColumns);
  const int last = static_cast<int>(block.c0 / kSliceColumns);
  const float units = static_cast<float>(turn_units(kSets == 1));
  const int64_t column = cosine_column(block.m0, width);
  bool is_first = true;
  float sums[kSets][4][2][4] = {};
  for (int64_t unit = block.first_head; unit < block.end_head; ++unit) {
    const int64_t b = block.batch(unit), head = block.head(unit);
    const TurnRows<T> rows(source, frequencies, kSets, b, head);
    const float* gradients = grad_phi + (b * source.heads + head) * source.N * width + column;
    for (int64_t token0 = block.first; token0 < block.end; token0 += kFrequencyTokens) {
      const int64_t left = block.end - token0;
      float turns[kSets][4][2][4] = {};
      for (int step = 1; step <= slices; ++step) {
        const int slice = (last + step) % slices;
        const int64_t c = int64_t{slice} * kSliceColumns;
        __syncthreads();  // nobody reads what was there
        x.template begin<kFrequencyTokens>(0, rows.x + token0 * rows.x_stride + c, rows.x_stride,
                                           source.d - c, left);
        if (slices > 1 || is_first) {
#pragma unroll
          for (int set = 0; set < kSets; ++set) {
            w.begin<kTile>(
                set * kTile,
                rows.w + set * frequencies.set_size() + block.m0 * frequencies.columns + c,
                frequencies.columns, kSliceColumns, kTile);
          }
        }
        if (step == slices) {
          const float* from = gradients + token0 * width;
          // Of 32 frequencies alone, the sines follow; nobody stores what they are taken for here.
          cosines.begin<kFrequencyTokens>(0, from, width, width - column, left);
          sines.begin<kFrequencyTokens>(0, from + sine_step(width), width,
                                        width - column - sine_step(width), left);
        }
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        is_first = false;
        multiply_slices(
            turns, w, [&](int set) { return set * kTile + 16 * warp; }, x,
            [](int n) { return 16 * n; });
      }
      Shared<const float> grad_cos = shared_cast<float>(cosines.memory);
      Shared<const float> grad_sin = shared_cast<float>(sines.memory);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int token = 16 * n + 8 * j + 2 * t + i % 2, m = 16 * warp + g + 8 * (i / 2);
            const int at = token * static_cast<int>(Slice<float>::kRowBytes / 4) + m;
            const float of_cosine = grad_cos[at], of_sine = grad_sin[at];
#pragma unroll
            for (int set = 0; set < kSets; ++set) {
              to_gradient(turns[set][n][j][i], units, of_sine, of_cosine);
            }
          }
        }
        Tf32Block<kParts> left_blocks[kSets];
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
          left_blocks[set] = rounded<kParts>(block_of(turns[set][n]));
        }
        // A token without gradient has none, whatever it holds; with one, it is NaN there, too.
        multiply_by_rows(sums, left_blocks, x, 16 * n,
                         [](const Block& tokens) { return finite_of(tokens); });
      }
    }
  }
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
            block.part[set * block.size + c * source.M + m] = sums[set][n][j][i];
          }
        }
      }
    }
  }
}

const char* side_gradients(const FeatureSource& source, const FrequencyRows& frequencies,
                           const float* grad_phi, const Array& grad_x, float* grad_w1,
                           float* grad_w2, const Magnitude<float>& magnitude,
                           const DeviceExecutor& executor) {
  const int64_t width = padded_columns(2 * source.M);
  if (grad_x) {
    const dim3 blocks(
        static_cast<unsigned>(source.B * source.heads * ceil_div(source.N, kTurnTokens)),
        static_cast<unsigned>(frequencies.columns / kSliceColumns));
    const char* error = launch_turns(source, [&]<typename T, int kSets>() {
      return launch(turn_token_kernel<T, kSets>, blocks, dim3(kProductThreads),
                    TokenGradientLayout<T, kSets>::kBytes, executor.stream, source, frequencies,
                    grad_phi, width, grad_x, magnitude);
    });
    if (error != nullptr) return error;
  }
  if (grad_w1 == nullptr && grad_w2 == nullptr) return nullptr;
  const FrequencyParts<float> parts(source, kTokensOfShare, executor);
  const char* error = launch_turns(source, [&]<typename T, int kSets>() {
    return launch(turn_frequency_kernel<T, kSets>, parts.blocks(source), dim3(kProductThreads),
                  FrequencyLayout<T, kSets>::kBytes, executor.stream, source, frequencies, grad_phi,
                  width, parts);
  });
  if (error != nullptr) return error;
  return add_frequency_parts(source, parts, grad_w1, grad_w2, executor.stream);
}

}  // namespace

const char* turn_gradients(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                           const TurnOperands& operands, const SplitLogits<float>& keys,
                           const PairGradients<float>& gradients) {
  float* grad_w1 = data_of<float>(params.grad_w1);
  float* grad_w2 = data_of<float>(params.grad_w2);
  const float* grad_phi_q = gradients.phi_q;
  const float* grad_phi_k = gradients.phi_k;
  const float* grad_logits = gradients.logits;
  if (wants_queries(params)) {
    if (const char* error = side_gradients(operands.queries, operands.frequencies, grad_phi_q,
                                           params.grad_query, grad_w1, grad_w2, {}, executor)) {
      return error;
    }
  }
  if (!params.grad_key && !wants_frequencies(params)) return nullptr;
  return side_gradients(operands.keys, operands.frequencies, grad_phi_k, params.grad_key, grad_w1,
                        grad_w2, Magnitude<float>(params, keys, grad_logits), executor);
}

}  // namespace ikattn::cuda
