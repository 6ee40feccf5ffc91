// Matrix products of panels: arrays X[panel][row][64], panel = column / 64, so that every row
// stride is the constant 64, right operands are contiguous, and one copy serves as left and as
// right operand. A contiguous [rows, 64] array is already one panel.
#pragma once

#include <type_traits>

#include "support/cpu/vector.h"

namespace ikattn::IKATTN_ISA {
namespace {

// A(r, k) = a[r * 64 + k], or a[k * 64 + r]. Of numbers that lie two to a lane or to a vector, k
// counts pairs.
enum class Left { kRows, kColumns };

// The arithmetic of numbers of type T, of rows two to a vector (row_pairs.h), or of 16 bits two to
// a lane (sixteen_bits.h).
struct OneToALane {
  static constexpr bool kHasFactors = false;
  static constexpr int64_t kPerLane = 1;    // numbers
  static constexpr int64_t kPerVector = 1;  // rows of the right operand
};
template <typename T>
struct Numbers : OneToALane {
  using Storage = T;
  using Result = T;
  using Sum = Vec<T>;
  static Vec<T> left(const T* a) { return broadcast(*a); }
  static void multiply_add(Vec<T> left, Vec<T> right, Sum& sum) { sum += left * right; }
  static Vec<T> result(const Sum& sum) { return sum; }
};
template <typename N>
using Storage = typename Numbers<N>::Storage;
template <typename N>
using Result = typename Numbers<N>::Result;

// The factors of sums, by row and by column of c; null: 1.
template <typename T>
struct Factors {
  const T* rows = nullptr;     // [rows]
  const T* columns = nullptr;  // [columns, whole vectors]
};

// c[r][0 .. kVectors) (+)= factors sum_k A(r, k) b[k][0 .. kVectors), one register tile of kRows
// rows. Each element (or pair) of A is broadcast into a register once and used for every column
// vector: loads, not multiply-adds, are what is scarce. A product is summed apart before it is
// added to c, so that the rounding error of n terms in products of 64 is that of 64 + n / 64.
template <typename N, int kRows, int kVectors, Left kLeft>
inline void register_tile(int64_t depth, const Storage<N>* a, const Storage<N>* b, Result<N>* c,
                          bool accumulate, const Factors<Result<N>>& factors) {
  static_assert(kLeft == Left::kRows || Numbers<N>::kPerVector == 1);
  constexpr int64_t kRowStep = kLeft == Left::kRows ? kPanel : 1;
  constexpr int64_t kPerVector = Numbers<N>::kPerVector;
  constexpr int64_t kDepthStep = kLeft == Left::kRows ? kPerVector : kPanel;
  constexpr int64_t kStep = kLanes<Result<N>>;
  typename Numbers<N>::Sum sum[kRows][kVectors] = {};
#pragma GCC unroll 2
  for (int64_t k = 0; k < depth; ++k) {
    Vec<Storage<N>> right[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) right[v] = load(b + k * kPerVector * kPanel + v * kStep);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec<Storage<N>> left = Numbers<N>::left(a + r * kRowStep + k * kDepthStep);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) Numbers<N>::multiply_add(left, right[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      Result<N>* out = c + r * kPanel + v * kStep;
      Vec<Result<N>> product = Numbers<N>::result(sum[r][v]);
      if constexpr (Numbers<N>::kHasFactors) {
        if (factors.rows) product *= factors.rows[r];
        if (factors.columns) product *= load(factors.columns + v * kStep);
      }
      store(out, accumulate ? load(out) + product : product);
    }
  }
}

// Computes all rows of a strip of kVectors column vectors. Rows are split evenly, so that there is
// no ragged tile.
template <typename N, int kVectors, Left kLeft>
inline void strip_gemm(int64_t rows, int64_t depth, const Storage<N>* a, const Storage<N>* b,
                       Result<N>* c, bool accumulate, const Factors<Result<N>>& factors) {
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t begin = tile * rows / tiles;
    const int64_t count = (tile + 1) * rows / tiles - begin;
    const Storage<N>* left = a + begin * (kLeft == Left::kRows ? kPanel : 1);
    Result<N>* out = c + begin * kPanel;
    const Factors<Result<N>> own{factors.rows ? factors.rows + begin : nullptr, factors.columns};
    switch (count) {
      case 1:
        register_tile<N, 1, kVectors, kLeft>(depth, left, b, out, accumulate, own);
        break;
      case 2:
        register_tile<N, 2, kVectors, kLeft>(depth, left, b, out, accumulate, own);
        break;
      case 3:
        register_tile<N, 3, kVectors, kLeft>(depth, left, b, out, accumulate, own);
        break;
      case 4:
        register_tile<N, 4, kVectors, kLeft>(depth, left, b, out, accumulate, own);
        break;
      case 5:
        register_tile<N, 5, kVectors, kLeft>(depth, left, b, out, accumulate, own);
        break;
      default:
        register_tile<N, 6, kVectors, kLeft>(depth, left, b, out, accumulate, own);
        break;
    }
  }
}

// Computes one panel of the product: c[rows][columns] (+)= A[rows][depth] b[depth][columns],
// columns <= 64, in whole vectors: c is overwritten beyond `columns` up to the next vector.
template <typename N, Left kLeft>
inline void panel_gemm(int64_t rows, int64_t columns, int64_t depth, const Storage<N>* a,
                       const Storage<N>* b, Result<N>* c, bool accumulate,
                       Factors<Result<N>> factors = {}) {
  constexpr int64_t kStrip = kStripVectors * kLanes<Result<N>>;
  int64_t vectors = (columns + kLanes<Result<N>> - 1) / kLanes<Result<N>>;
  for (; vectors >= kStripVectors; vectors -= kStripVectors) {
    strip_gemm<N, kStripVectors, kLeft>(rows, depth, a, b, c, accumulate, factors);
    b += kStrip;
    c += kStrip;
    if (factors.columns) factors.columns += kStrip;
  }
  if constexpr (kStripVectors > 2) {
    if (vectors == 3) strip_gemm<N, 3, kLeft>(rows, depth, a, b, c, accumulate, factors);
    if (vectors == 2) strip_gemm<N, 2, kLeft>(rows, depth, a, b, c, accumulate, factors);
  }
  if (vectors == 1) strip_gemm<N, 1, kLeft>(rows, depth, a, b, c, accumulate, factors);
}

// Transposes rows x columns of a 64 x 64 block, both rounded up to whole vectors.
template <typename T>
inline void transpose_panel(int64_t rows, int64_t columns, const T* source, T* target) {
  for (int64_t r = 0; r < rows; r += kLanes<T>) {
    for (int64_t c = 0; c < columns; c += kLanes<T>) {
      transpose_block(source + r * kPanel + c, kPanel, target + c * kPanel + r, kPanel);
    }
  }
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
