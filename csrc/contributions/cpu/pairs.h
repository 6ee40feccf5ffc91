// Norms of the summed contributions of every pair: |R_j a_ij|, R_j triangular.
//
// A task takes a block of rows through the keys, 64 at a time: their factors stay in the
// first-level cache while the rows pass, four at a time, so that a factor loaded serves four pairs.
#pragma once

#include "contributions/params.h"
#include "support/cpu/elements.h"

namespace ikattn::IKATTN_ISA {
namespace {

constexpr int64_t kPairRows = 32;
constexpr int kRowGroup = 4;

template <typename T>
inline Vec<T> square_root(Vec<T> x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    return (Vec<T>)_mm512_maskz_sqrt_ps(static_cast<__mmask16>(-1), (__m512)x);
  } else {
    return (Vec<T>)_mm512_maskz_sqrt_pd(static_cast<__mmask8>(-1), (__m512d)x);
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) {
    return (Vec<T>)_mm256_sqrt_ps((__m256)x);
  } else {
    return (Vec<T>)_mm256_sqrt_pd((__m256d)x);
  }
#else
  Vec<T> root = x;
  for (int lane = 0; lane < kLanes<T>; ++lane) {
    root[lane] = static_cast<T>(__builtin_sqrt(x[lane]));
  }
  return root;
#endif
}

inline bool is_padding(const Array& padding, int64_t b, int64_t token) {
  return padding && static_cast<const uint8_t*>(
                        padding.data)[b * padding.stride[0] + token * padding.stride[1]] != 0;
}

// Weights of `rows` queries from i on and the 64 keys from j0 on, as [H][kRowGroup][64]; zero where
// query or key is padding or beyond the end.
template <typename T>
void load_weights(const PairParams& params, int64_t b, int64_t i, int64_t rows, int64_t j0,
                  int64_t count, T* weights) {
  const Array& array = params.weights;
  for (int64_t h = 0; h < params.H; ++h) {
    for (int64_t m = 0; m < kRowGroup; ++m) {
      T* row = weights + (h * kRowGroup + m) * kFactorBlock;
      const bool visible = m < rows && !is_padding(params.query_padding, b, i + m);
      if (visible) {
        const int64_t offset = b * array.stride[0] + h * array.stride[1] +
                               (i + m) * array.stride[2] + j0 * array.stride[3];
        load_row(array, offset, array.stride[3], count, row);
      }
      for (int64_t c = visible ? count : 0; c < kFactorBlock; ++c) row[c] = 0;
    }
  }
  if (!params.key_padding) return;
  for (int64_t c = 0; c < count; ++c) {
    if (!is_padding(params.key_padding, b, j0 + c)) continue;
    for (int64_t r = 0; r < params.H * kRowGroup; ++r) weights[r * kFactorBlock + c] = 0;
  }
}

// norms [kRowGroup][64] of one group of rows and one block of keys.
//   weights [H][kRowGroup][64]   factors [triangle(H)][64]
template <typename T>
void block_norms(int64_t H, const T* weights, const T* factors, T* norms) {
  for (int64_t c = 0; c < kFactorBlock; c += kLanes<T>) {
    Vec<T> squares[kRowGroup] = {};
    Bits<T> weighed[kRowGroup] = {};
    const T* r = factors + c;
    for (int64_t h = 0; h < H; ++h) {
      Vec<T> sums[kRowGroup] = {};
      const T* a = weights + h * kRowGroup * kFactorBlock + c;
#pragma GCC unroll 4
      for (int m = 0; m < kRowGroup; ++m) weighed[m] |= load(a + m * kFactorBlock) != T(0);
      for (int64_t k = h; k < H; ++k, r += kFactorBlock, a += kRowGroup * kFactorBlock) {
        const Vec<T> factor = load(r);
#pragma GCC unroll 4
        for (int m = 0; m < kRowGroup; ++m) sums[m] += factor * load(a + m * kFactorBlock);
      }
#pragma GCC unroll 4
      for (int m = 0; m < kRowGroup; ++m) squares[m] += sums[m] * sums[m];
    }
#pragma GCC unroll 4
    for (int m = 0; m < kRowGroup; ++m) {
      // A key without weight is selected away: what it holds may be NaN.
      store(norms + m * kFactorBlock + c, weighed[m] ? square_root<T>(squares[m]) : Vec<T>{});
    }
  }
}

template <typename T>
void pair_norms(const PairParams& params, const Executor& executor) {
  const int64_t H = params.H, S = params.S, entries = triangle(H);
  const int64_t blocks = ceil_div(S, kFactorBlock);
  Workspace measure;
  measure.take<T>((H + 1) * kRowGroup * kFactorBlock);
  char* memory = static_cast<char*>(
      executor.allocate(executor.owner, measure.bytes() * max_of(1, executor.threads)));

  const int64_t row_blocks = ceil_div(params.rows, kPairRows);
  parallel(executor, params.B * row_blocks, [&](int64_t task, int thread) {
    Workspace workspace(memory + thread * measure.bytes());
    T* weights = workspace.take<T>((H + 1) * kRowGroup * kFactorBlock);
    T* norms = weights + H * kRowGroup * kFactorBlock;
    const int64_t b = task / row_blocks, first = task % row_blocks * kPairRows;
    const int64_t end = min_of(first + kPairRows, params.rows);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t j0 = block * kFactorBlock, count = min_of(kFactorBlock, S - j0);
      for (int64_t i = first; i < end; i += kRowGroup) {
        const int64_t rows = min_of(kRowGroup, end - i);
        load_weights(params, b, i, rows, j0, count, weights);
        for (int v = 0; v < params.variants; ++v) {
          const T* factors = static_cast<const T*>(params.factors[v]) +
                             (b * blocks + block) * entries * kFactorBlock;
          block_norms(H, weights, factors, norms);
          const Array& out = params.norms[v];
          for (int64_t m = 0; m < rows; ++m) {
            const int64_t offset = b * out.stride[0] + (i + m) * out.stride[1] + j0 * out.stride[2];
            store_row(out, offset, out.stride[2], count, norms + m * kFactorBlock);
          }
        }
      }
    }
  });
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
