// Matrix products of panels: arrays X[panel][row][64], panel = column / 64, so that every row
// stride is the constant 64, right operands are contiguous, and one copy serves as left and as
// right operand. A contiguous [rows, 64] array is already one panel.
#pragma once

#include "support/cpu/vector.h"

namespace ikattn::IKATTN_ISA {
namespace {

constexpr int64_t kPanel = 64;    // columns of a panel
constexpr int64_t kTileRows = 6;  // rows of a register tile

enum class Left { kRows, kColumns };  // A(r, k) = a[r * 64 + k], or a[k * 64 + r]

// c[r][0 .. kVectors) (+)= sum_k A(r, k) b[k][0 .. kVectors), one register tile of kRows rows.
// Each element of A is broadcast into a register once and used for every column vector: loads, not
// multiply-adds, are what is scarce.
template <typename T, int kRows, int kVectors, Left kLeft>
inline void register_tile(int64_t depth, const T* a, const T* b, T* c, bool accumulate) {
  constexpr int64_t kRowStep = kLeft == Left::kRows ? kPanel : 1;
  constexpr int64_t kDepthStep = kLeft == Left::kRows ? 1 : kPanel;
  Vec<T> sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = accumulate ? load(c + r * kPanel + v * kLanes<T>) : Vec<T>{};
    }
  }
#pragma GCC unroll 2
  for (int64_t k = 0; k < depth; ++k) {
    Vec<T> right[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) right[v] = load(b + k * kPanel + v * kLanes<T>);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec<T> left = broadcast(a[r * kRowStep + k * kDepthStep]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] += left * right[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(c + r * kPanel + v * kLanes<T>, sum[r][v]);
  }
}

// All rows of a strip of kVectors column vectors. Rows are split evenly, so that there is no ragged
// tile.
template <typename T, int kVectors, Left kLeft>
inline void strip_gemm(int64_t rows, int64_t depth, const T* a, const T* b, T* c, bool accumulate) {
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t begin = tile * rows / tiles;
    const int64_t count = (tile + 1) * rows / tiles - begin;
    const T* left = a + begin * (kLeft == Left::kRows ? kPanel : 1);
    T* out = c + begin * kPanel;
    switch (count) {
      case 1:
        register_tile<T, 1, kVectors, kLeft>(depth, left, b, out, accumulate);
        break;
      case 2:
        register_tile<T, 2, kVectors, kLeft>(depth, left, b, out, accumulate);
        break;
      case 3:
        register_tile<T, 3, kVectors, kLeft>(depth, left, b, out, accumulate);
        break;
      case 4:
        register_tile<T, 4, kVectors, kLeft>(depth, left, b, out, accumulate);
        break;
      case 5:
        register_tile<T, 5, kVectors, kLeft>(depth, left, b, out, accumulate);
        break;
      default:
        register_tile<T, 6, kVectors, kLeft>(depth, left, b, out, accumulate);
        break;
    }
  }
}

// One panel of the product: c[rows][columns] (+)= A[rows][depth] b[depth][columns], columns <= 64,
// computed in whole vectors: what lies in c beyond `columns` up to the next vector is overwritten.
template <typename T, Left kLeft>
inline void panel_gemm(int64_t rows, int64_t columns, int64_t depth, const T* a, const T* b, T* c,
                       bool accumulate) {
  int64_t vectors = (columns + kLanes<T> - 1) / kLanes<T>;
  for (; vectors >= kStripVectors; vectors -= kStripVectors) {
    strip_gemm<T, kStripVectors, kLeft>(rows, depth, a, b, c, accumulate);
    b += kStripVectors * kLanes<T>;
    c += kStripVectors * kLanes<T>;
  }
  if constexpr (kStripVectors > 2) {
    if (vectors == 3) strip_gemm<T, 3, kLeft>(rows, depth, a, b, c, accumulate);
    if (vectors == 2) strip_gemm<T, 2, kLeft>(rows, depth, a, b, c, accumulate);
  }
  if (vectors == 1) strip_gemm<T, 1, kLeft>(rows, depth, a, b, c, accumulate);
}

// target[c][r] = source[r][c] for rows x columns of a 64 x 64 block, both rounded up to whole
// vectors.
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
