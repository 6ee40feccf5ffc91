// Norms of the summed contributions of every pair: |R_j a_ij|, with R_j triangular.
//
// A task computes a block of rows with all keys, 64 at a time: their factors stay in the
// first-level cache while a few rows at a time use them, so that a loaded factor serves several
// pairs. Up to 16 heads, the H elements of R a of each row are accumulators in registers and the
// loops over the triangle are unrolled; weights are then read without a copy, and prefetched a
// block ahead, for rows of H matrices are more streams than the processor prefetches.
#pragma once

#include <type_traits>
#include <utility>

#include "contributions/params.h"
#include "support/cpu/elements.h"
#include "support/cpu/vector_math.h"

namespace ikattn::IKATTN_ISA {
namespace {

inline bool is_padding(const Array& padding, int64_t b, int64_t token) {
  return padding && static_cast<const uint8_t*>(
                        padding.data)[b * padding.stride[0] + token * padding.stride[1]] != 0;
}

// Loads the weights of `rows` queries from i on and the 64 keys from j0 on, as [H][kRowGroup][64];
// zero where query or key is padding or beyond the end.
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

template <typename Function, int... kIndex>
__attribute__((always_inline)) inline void each(std::integer_sequence<int, kIndex...>,
                                                Function&& function) {
  (function(std::integral_constant<int, kIndex>()), ...);
}

// Weights of some rows and 64 keys, [H][rows][64] by strides. The weights `ahead` elements further
// on are prefetched.
template <typename T>
struct WeightBlock {
  const T* data;
  int64_t head_stride, row_stride, ahead = 0;
};

// Keeps the compiler from loading the same vector for every use: loads are as scarce as
// multiply-adds.
template <typename T>
inline Vec<T> in_register(Vec<T> value) {
#if defined(__SSE2__)
  asm("" : "+v"(value));
#endif
  return value;
}

// Tells from the or-ed bits of a key's weights whether one is neither 0 nor -0. Where none is, the
// norm is 0, for the key may hold NaN.
template <typename T>
inline Bits<T> is_weighed(Bits<T> bits) {
  return (bits & ~(Bits<T>)broadcast(T(-0.0))) != 0;
}

template <typename T>
inline bool any_lane(Bits<T> mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_testz_si256((__m256i)mask, (__m256i)mask) == 0;
#else
  bool any = false;
  for (int lane = 0; lane < kLanes<T>; ++lane) any |= mask[lane] != 0;
  return any;
#endif
}

// Computes the norms of one vector of keys in float64, for squares may overflow float32 where the
// norm does not.
template <typename T>
__attribute__((noinline, cold)) void norms_in_double(int64_t H, const WeightBlock<T>& weights,
                                                     int64_t m, const T* factors, int64_t c,
                                                     T* norms) {
  for (int64_t lane = c; lane < c + kLanes<T>; ++lane) {
    const T* r = factors + lane;
    const T* a = weights.data + m * weights.row_stride + lane;
    double square = 0;
    bool weighed = false;
    for (int64_t h = 0; h < H; ++h) {
      double sum = 0;
      weighed |= a[h * weights.head_stride] != 0;
      for (int64_t k = h; k < H; ++k, r += kFactorBlock) {
        sum += static_cast<double>(*r) * static_cast<double>(a[k * weights.head_stride]);
      }
      square += sum * sum;
    }
    norms[lane] = weighed ? static_cast<T>(__builtin_sqrt(square)) : T(0);
  }
}

// Stores the norms of row m for one vector of keys, from their squares and the weights' bits.
template <typename T>
inline void store_norms(int64_t H, const WeightBlock<T>& weights, int64_t m, const T* factors,
                        int64_t c, Vec<T> squares, Bits<T> seen, T* norms) {
  const Bits<T> weighed = is_weighed<T>(seen);
  store(norms + c, weighed ? square_root<T>(squares) : Vec<T>{});
  if constexpr (sizeof(T) == 4) {
    if (any_lane<T>(weighed & ~(squares < T(1e37)))) {
      norms_in_double(H, weights, m, factors, c, norms);
    }
  }
}

constexpr int kMostUnrolledHeads = 16;

// Returns the number of rows whose accumulators and operands fit the registers.
constexpr int rows_at_once(int H) {
  const int fitting = (kRegisters - 3) / (H + 2);
  return fitting < 1 ? 1 : fitting > kRowGroup ? kRowGroup : fitting;
}

// Computes norms [kRows][64] of kRows rows and one block of keys.
//   factors [triangle(kHeads)][64]
template <typename T, int kHeads, int kRows>
void unrolled_norms(const WeightBlock<T>& weights, const T* factors, T* norms) {
  constexpr auto kRowNumbers = std::make_integer_sequence<int, kRows>();
  for (int64_t c = 0; c < kFactorBlock; c += kLanes<T>) {
    Vec<T> sums[kRows][kHeads] = {};
    Bits<T> seen[kRows] = {};
    each(std::make_integer_sequence<int, kHeads>(), [&](auto k) __attribute__((always_inline)) {
      Vec<T> a[kRows];
      each(kRowNumbers, [&](auto m) __attribute__((always_inline)) {
        const T* row = weights.data + k * weights.head_stride + m * weights.row_stride + c;
        a[m] = load(row);
        seen[m] |= (Bits<T>)a[m];
        __builtin_prefetch(row + weights.ahead, 0, 2);  // to the second-level cache
      });
      each(std::make_integer_sequence<int, k + 1>(), [&](auto h) __attribute__((always_inline)) {
        constexpr int kEntry = h * kHeads - h * (h - 1) / 2 + (k - h);
        const Vec<T> factor = in_register<T>(load(factors + kEntry * kFactorBlock + c));
        each(kRowNumbers,
             [&](auto m) __attribute__((always_inline)) { sums[m][h] += factor * a[m]; });
      });
    });
    each(kRowNumbers, [&](auto m) __attribute__((always_inline)) {
      Vec<T> squares{};
      each(std::make_integer_sequence<int, kHeads>(),
           [&](auto h) __attribute__((always_inline)) { squares += sums[m][h] * sums[m][h]; });
      store_norms(kHeads, weights, m, factors, c, squares, seen[m], norms + m * kFactorBlock);
    });
  }
}

// Computes the norms for any number of heads and kRowGroup rows.
template <typename T>
void looped_norms(int64_t H, const WeightBlock<T>& weights, const T* factors, T* norms) {
  for (int64_t c = 0; c < kFactorBlock; c += kLanes<T>) {
    Vec<T> squares[kRowGroup] = {};
    Bits<T> seen[kRowGroup] = {};
    const T* r = factors + c;
    for (int64_t h = 0; h < H; ++h) {
      Vec<T> sums[kRowGroup] = {};
      const T* a = weights.data + h * weights.head_stride + c;
#pragma GCC unroll 4
      for (int m = 0; m < kRowGroup; ++m) seen[m] |= (Bits<T>)load(a + m * weights.row_stride);
      for (int64_t k = h; k < H; ++k, r += kFactorBlock, a += weights.head_stride) {
        const Vec<T> factor = load(r);
#pragma GCC unroll 4
        for (int m = 0; m < kRowGroup; ++m) sums[m] += factor * load(a + m * weights.row_stride);
      }
#pragma GCC unroll 4
      for (int m = 0; m < kRowGroup; ++m) squares[m] += sums[m] * sums[m];
    }
#pragma GCC unroll 4
    for (int m = 0; m < kRowGroup; ++m) {
      store_norms(H, weights, m, factors, c, squares[m], seen[m], norms + m * kFactorBlock);
    }
  }
}

// The functions for H heads.
template <typename T>
struct NormsOfHeads {
  int rows = kRowGroup;  // at once
  // the functions for `rows` rows, and for one; nullptr: looped_norms
  void (*several)(const WeightBlock<T>&, const T*, T*) = nullptr;
  void (*single)(const WeightBlock<T>&, const T*, T*) = nullptr;
};

template <typename T>
NormsOfHeads<T> norms_of_heads(int64_t H) {
  NormsOfHeads<T> result;
  each(std::make_integer_sequence<int, kMostUnrolledHeads>(), [&](auto index) {
    constexpr int kHeads = index + 1, kRows = rows_at_once(kHeads);
    if (H == kHeads) {
      result = {kRows, unrolled_norms<T, kHeads, kRows>, unrolled_norms<T, kHeads, 1>};
    }
  });
  return result;
}

// Computes the norms of at most kernels.rows queries from i on and one block of keys.
//   norms [kRowGroup][64], overwritten
template <typename T>
void store_block(const PairParams& params, const NormsOfHeads<T>& kernels,
                 const WeightBlock<T>& weights, int64_t b, int64_t i, int64_t rows, int64_t block,
                 T* norms) {
  const int64_t blocks = ceil_div(params.S, kFactorBlock), entries = triangle(params.H);
  const int64_t j0 = block * kFactorBlock, count = min_of(kFactorBlock, params.S - j0);
  for (int v = 0; v < params.variants; ++v) {
    const T* factors =
        static_cast<const T*>(params.factors[v]) + (b * blocks + block) * entries * kFactorBlock;
    if (!kernels.several) {
      looped_norms(params.H, weights, factors, norms);
    } else if (rows == kernels.rows) {
      kernels.several(weights, factors, norms);
    } else {
      WeightBlock<T> row = weights;
      for (int64_t m = 0; m < rows; ++m, row.data += row.row_stride) {
        kernels.single(row, factors, norms + m * kFactorBlock);
      }
    }
    const Array& out = params.norms[v];
    for (int64_t m = 0; m < rows; ++m) {
      const int64_t offset = b * out.stride[0] + (i + m) * out.stride[1] + j0 * out.stride[2];
      store_row(out, offset, out.stride[2], count, norms + m * kFactorBlock);
    }
  }
}

// Tells whether 64 weights of each of these rows can be read without a copy.
template <typename T>
bool lie_ready(const PairParams& params, int64_t b, int64_t i, int64_t rows, int64_t count) {
  constexpr ElementType kType = sizeof(T) == 8 ? ElementType::kFloat64 : ElementType::kFloat32;
  if (params.weights.type != kType || params.weights.stride[3] != 1 || count < kFactorBlock ||
      params.key_padding) {
    return false;
  }
  for (int64_t m = 0; m < rows; ++m) {
    if (is_padding(params.query_padding, b, i + m)) return false;
  }
  return true;
}

template <typename T>
void pair_norms(const PairParams& params, const Executor& executor) {
  const int64_t H = params.H, S = params.S;
  const int64_t blocks = ceil_div(S, kFactorBlock);
  const NormsOfHeads<T> kernels = norms_of_heads<T>(H);
  Workspace measure;
  measure.take<T>((H + 1) * kRowGroup * kFactorBlock);
  char* memory = static_cast<char*>(
      executor.allocate(executor.owner, measure.bytes() * max_of(1, executor.threads)));

  const int64_t row_blocks = ceil_div(params.rows, kPairRows);
  parallel(executor, params.B * row_blocks, [&](int64_t task, int thread) {
    Workspace workspace(memory + thread * measure.bytes());
    T* copies = workspace.take<T>((H + 1) * kRowGroup * kFactorBlock);
    T* norms = copies + H * kRowGroup * kFactorBlock;
    const int64_t b = task / row_blocks, first = task % row_blocks * kPairRows;
    const int64_t end = min_of(first + kPairRows, params.rows);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t j0 = block * kFactorBlock, count = min_of(kFactorBlock, S - j0);
      for (int64_t i = first; i < end; i += kernels.rows) {
        const int64_t rows = min_of(kernels.rows, end - i);
        WeightBlock<T> weights{copies, kRowGroup * kFactorBlock, kFactorBlock};
        const Array& given = params.weights;
        if (kernels.several && lie_ready<T>(params, b, i, rows, count)) {
          const int64_t* stride = given.stride;
          const int64_t offset = b * stride[0] + i * stride[2] + j0;
          const int64_t ahead = j0 + 2 * kFactorBlock <= S ? kFactorBlock : 0;
          weights = {static_cast<const T*>(given.data) + offset, stride[1], stride[2], ahead};
        } else {
          load_weights(params, b, i, rows, j0, count, copies);
        }
        store_block(params, kernels, weights, b, i, rows, block, norms);
      }
    }
  });
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
