// Gradients of features beside the products with moments, which are by mma.sync or by wgmma: a
// warp's 32 tokens, their rows, and how a chunk of features is finished.
#pragma once

#include "attention/cuda/linear/gradients.h"
#include "attention/cuda/linear/tiles.h"

namespace ikattn::cuda {

namespace {

constexpr uint32_t kSquareBytes = 2 * kMomentColumns;  // bytes of a row of moments
constexpr int kDotPitch = kChunk + 1, kMostChunks = 8;
// Bytes of a warp's 32 tokens: sums for a chunk, and the factors by which each chunk fits Half.
constexpr uint32_t kDotBytes = 32 * kDotPitch * 4, kFitBytes = 32 * kMostChunks * 4;

// Returns one of four numbers, [m][half], that four lanes have parts of: lane t has the sum of the
// t-th.
__device__ __forceinline__ float sum_of_four(const float (&x)[2][2]) {
  const int t = threadIdx.x % 4;
  const bool odd = t % 2 != 0, late = t / 2 != 0;
  float first = odd ? x[0][1] : x[0][0], second = odd ? x[1][1] : x[1][0];
  first += __shfl_xor_sync(0xffffffffu, odd ? x[0][0] : x[0][1], 1);
  second += __shfl_xor_sync(0xffffffffu, odd ? x[1][0] : x[1][1], 1);
  const float other = __shfl_xor_sync(0xffffffffu, late ? first : second, 2);
  return (late ? second : first) + other;
}

// Tokens of a warp, 32 of one side.
struct WarpTokens {
  const GradientSide& side;
  const FeatureChunks& chunks;
  int64_t bh, bk, place, first;  // head, key head, its sums, token

  // Returns the index of token i among all heads' tokens.
  __device__ __forceinline__ int64_t index(int64_t i) const { return bh * side.tokens.N + i; }
  __device__ __forceinline__ bool is_hidden(int64_t i) const {
    return side.logits != nullptr && side.logits[index(i)] == minus_infinity<float>();
  }
};

// Loads the own rows of a warp's tokens, of which `count` are left.
template <typename T>
__device__ __forceinline__ void load_own_rows(Fragment (&own)[kMomentColumns / 16][2],
                                              const WarpTokens& at, int count) {
  const Array& array = at.side.rows;
  const T* rows = rows_of<T>(at.side.tokens, array, at.bh) + at.first * array.stride[2];
#pragma unroll
  for (int k = 0; k < kMomentColumns / 16; ++k) {
    load_rows(own[k], [&](int i, int column) {
      return i < count && 16 * k + column < at.side.tokens.row_columns
                 ? load_vector<uint32_t>(rows + i * array.stride[2] + 16 * k + column)
                 : 0u;
    });
  }
}

// Multiplies features, of kCount chunks, by 16 columns of gram, from `gram` on.
template <int F, int kCount>
__device__ __forceinline__ void multiply_by_gram(float (&products)[2][2][4],
                                                 const Fragment (&features)[kCount][2],
                                                 const Half* gram) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1                                 // registers
  for (int number = 1; number >= 0; --number) {  // the small one first
    const Half* numbers = gram + number * (F * F) + lane / 4 * F + lane % 4 * 2;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const Half* from = numbers + column * 8 * F + 16 * k;
        const uint32_t low = load_vector<uint32_t>(from);
        const uint32_t high = load_vector<uint32_t>(from + 8);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          mma_m16n8k16<Half>(products[m][column], features[k][m].registers, low, high);
        }
      }
    }
  }
}

// Adds up, for two tokens, a lane's part of their own rows, the m-th 16 of the warp's, times their
// rows of products: product(n, i) is the i-th of tile n of 8 columns.
template <typename T, typename Product>
__device__ __forceinline__ void dots_of_rows(float (&parts)[2],
                                             const Fragment (&own)[kMomentColumns / 16][2], int m,
                                             const Product& product) {
  parts[0] = parts[1] = 0;
#pragma unroll
  for (int k = 0; k < kMomentColumns / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = unpack<T>(own[k][m].registers[i]);
      const int n = 2 * k + i / 2, c = i % 2 * 2;
      parts[i % 2] += two.x * product(n, c) + two.y * product(n, c + 1);
    }
  }
}

// Stores the gradients of a chunk of features, made of the tokens' `dots` and their products with
// gram; see finish_rows. Adds their part of the scores of keys to `scores`.
__device__ __forceinline__ void store_chunk(const WarpTokens& at, int chunk,
                                            Shared<const float> dots, Shared<float> fits,
                                            const float (&products)[2][2][4], float gram_unit,
                                            float moment_unit, float (&scores)[2][2]) {
  const GradientSide& side = at.side;
  const LinearTokens& tokens = side.tokens;
  const FeatureChunks& chunks = at.chunks;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const bool of_keys = side.logits != nullptr;
  Fragment of_chunk[2];
  if (of_keys) {
    load_chunk(of_chunk, tokens.phi + at.index(at.first) * chunks.width,
               remaining_of(tokens.N, at.first), chunks, chunk);
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own_row = m * 16 + g + 8 * half;
      const int64_t i = at.first + own_row;
      const bool there = i < tokens.N;
      float delta = 1;
      if (side.deltas != nullptr) {
        delta = there ? side.deltas[at.bh * padded_tokens(tokens.N) + i] : 0.0f;
      }
      float gradient[2][2], most = 0;
#pragma unroll
      for (int column = 0; column < 2; ++column) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float dot = dots[own_row * kDotPitch + column * 8 + 2 * t + c];
          const float x = dot * moment_unit - products[m][column][2 * half + c] * gram_unit * delta;
          gradient[column][c] = x;
          const float size = fabsf(x);
          most = is_finite(size) && size > most ? size : most;
        }
        if (!of_keys) continue;
        const float2 two = unpack<Half>(of_chunk[m].registers[2 * column + half]);
        scores[m][half] += two.x * gradient[column][0] + two.y * gradient[column][1];
      }
      most = max_of_lanes<4>(most);
      const float fit = most > 0 ? fitting_power(most) : 0x1p126f;
      if (t == 0) fits[own_row * kMostChunks + chunk] = fit;
      Half* gradients = side.gradients.rows + at.index(i) * chunks.width;
      store_tiles(gradients + chunks.column(chunk), there,
                  pack_f16x2(gradient[0][0] * fit, gradient[0][1] * fit),
                  pack_f16x2(gradient[1][0] * fit, gradient[1][1] * fit));
    }
  }
}

// Gives the gradients of a row's features one scale; until now each chunk has one, in `fits`. A
// lane finds again what it has stored. Columns of no feature become zero.
__device__ __forceinline__ void finish_rows(const WarpTokens& at, Shared<const float> fits,
                                            int64_t heads) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const FeatureChunks& chunks = at.chunks;
#pragma unroll 1
  for (int index = 0; index < 4; ++index) {
    const int own_row = index / 2 * 16 + index % 2 * 8 + g;
    const int64_t i = at.first + own_row;
    if (i >= at.side.tokens.N) continue;
    float fit = 0x1p126f;
    for (int chunk = 0; chunk < chunks.count; ++chunk) {
      fit = fminf(fit, fits[own_row * kMostChunks + chunk]);
    }
    const float scale = at.side.scales[at.bh * at.side.scale_stride + i];
    const bool is_zero = scale == 0 || at.is_hidden(i);
    if (t == 0) {
      at.side.gradients.scales[scale_place(0, heads, at.bh, at.side.tokens.N) + i] =
          is_zero ? 0.0f : 2 * scale / fit / at.side.pair_units[at.bk];
    }
    Half* gradients = at.side.gradients.rows + at.index(i) * chunks.width + t % 2 * 8 + t / 2 * 4;
    for (int column = 0; column < chunks.width; column += kChunk) {
      const int half = column / (chunks.width / 2);
      const int chunk = (column - half * (chunks.width / 2)) / kChunk;
      uint2 four = make_uint2(0, 0);
      if (chunk < chunks.of_cosines && !is_zero) {
        float ratio = fit / fits[own_row * kMostChunks + half * chunks.of_cosines + chunk];
        if (scale != scale) ratio = scale;  // a poisoned row is NaN, not 0
        four = load_vector<uint2>(gradients + column);
        const float2 low = unpack<Half>(four.x), high = unpack<Half>(four.y);
        four.x = pack_f16x2(low.x * ratio, low.y * ratio);
        four.y = pack_f16x2(high.x * ratio, high.y * ratio);
      }
      store_vector(gradients + column, four);
    }
  }
}

// Stores the gradients of keys' logits: half of phi' . dphi', `scores`, and the part of the term of
// eps.
template <typename T>
__device__ __forceinline__ void store_logit_gradients(const WarpTokens& at, const LinearSums& sums,
                                                      const LinearHead& head,
                                                      const Fragment (&own)[kMomentColumns / 16][2],
                                                      const float (&scores)[2][2]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const float* center = at.side.centers + at.bk * kMomentColumns + 2 * t;
  const float* total = sums.centers + at.place * kMomentColumns + 2 * t;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    float of_eps[2] = {};
#pragma unroll
    for (int k = 0; k < kMomentColumns / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 16 * k + i / 2 * 8;
        const float2 two = unpack<T>(own[k][m].registers[i]);
        const float2 mean = load_vector<float2>(center + column);
        const float2 sum = load_vector<float2>(total + column);
        of_eps[i % 2] += (two.x - mean.x) * sum.x + (two.y - mean.y) * sum.y;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float score = sum_of_lanes<4>(scores[m][half]);
      const float eps = sum_of_lanes<4>(of_eps[half]) * head.row_unit - head.terms;
      const int64_t j = at.first + m * 16 + g + 8 * half;
      if (j >= at.side.tokens.N || t != 0) continue;
      const float term = at.side.tokens.terms[at.bh * padded_tokens(at.side.tokens.N) + j];
      at.side.grad_logits[at.index(j)] =
          at.is_hidden(j) ? 0.0f : (score + term * eps) / at.side.pair_units[at.bk];
    }
  }
}

}  // namespace
}  // namespace ikattn::cuda
