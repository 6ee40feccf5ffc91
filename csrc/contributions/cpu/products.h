// Products of matrices of any strides, in tiles of which one thread computes the whole depth: an
// element is summed in the same order whatever the tiles and the threads are.
#pragma once

#include "contributions/params.h"
#include "support/cpu/elements.h"

namespace ikattn::IKATTN_ISA {
namespace {

template <typename T>
class ProductTile {
 public:
  ProductTile(Workspace& workspace, int64_t rows, int64_t columns)
      : rows_(round_up(rows, kPanel)),
        sums_(workspace.take<T>(rows_ * round_up(columns, kPanel))),
        left_(workspace.take<T>(rows_ * kPanel)),
        right_(workspace.take<T>(kPanel * kPanel)),
        turned_(workspace.take<T>(kPanel * kPanel)) {}

  // Computes rows [i, i + rows) and columns [j, j + columns) of product number [b0, b1].
  void operator()(const ProductParams& params, int64_t b0, int64_t b1, int64_t i, int64_t rows,
                  int64_t j, int64_t columns) const {
    const auto from = [&](const Array& array, int64_t row, int64_t column) {
      const int64_t* stride = array.stride;
      return b0 * stride[0] + b1 * stride[1] + row * stride[2] + column * stride[3];
    };
    const Array &a = params.a, &b = params.b, &c = params.c;
    const int64_t target = from(c, i, j);
    if (params.accumulate) {
      load_panels(c, target, c.stride[2], c.stride[3], rows, columns, sums_, rows_);
    }
    for (int64_t k = 0; k == 0 || k < params.sizes.depth; k += kPanel) {
      const int64_t depth = min_of(kPanel, params.sizes.depth - k);
      for (int64_t r = 0; r < rows; r += kPanel) {
        load_square(a, from(a, i + r, k), min_of(kPanel, rows - r), depth, left_ + r * kPanel);
      }
      for (int64_t n = 0; n < columns; n += kPanel) {
        const int64_t width = min_of(kPanel, columns - n);
        load_square(b, from(b, k, j + n), depth, width, right_);
        panel_gemm<T, Left::kRows>(rows, width, depth, left_, right_, sums_ + n * rows_,
                                   params.accumulate || k > 0);
      }
    }
    store_panels(c, target, c.stride[2], c.stride[3], rows, columns, sums_, rows_);
  }

 private:
  // Loads a matrix of at most 64 x 64; one stored by columns is transposed.
  void load_square(const Array& array, int64_t offset, int64_t rows, int64_t columns,
                   T* square) const {
    const int64_t row_stride = array.stride[2], column_stride = array.stride[3];
    if (column_stride == 1 || row_stride != 1) {
      load_panels(array, offset, row_stride, column_stride, rows, columns, square, kPanel);
      return;
    }
    load_panels(array, offset, column_stride, row_stride, columns, rows, turned_, kPanel);
    transpose_panel(columns, rows, turned_, square);
  }

  int64_t rows_;
  T *sums_, *left_, *right_, *turned_;  // [columns / 64][rows][64], [rows][64], [64][64] twice
};

// Computes a product c that is not empty.
template <typename T>
void multiply(const ProductParams& params, const Executor& all) {
  const auto [outer, inner, rows, columns, depth] = params.sizes;
  // Tiles are wide where there are few rows, and few tiles are divided evenly among threads.
  const int64_t high = min_of(kProductTileRows, round_up(rows, kPanel));
  const int64_t down = ceil_div(rows, high), strips = outer * inner * down;
  const int64_t widest = kProductTileRows / high * kProductTileColumns;
  const int64_t tiles = strips * ceil_div(columns, widest), threads = all.threads;
  const int64_t even = tiles < 4 * threads ? round_up(tiles, threads) : tiles;
  const int64_t wide = round_up(ceil_div(columns, ceil_div(even, strips)), kPanel);
  const int64_t across = ceil_div(columns, wide), tasks = strips * across;
  Executor executor = all;
  executor.threads = static_cast<int>(max_of(1, min_of(all.threads, tasks)));
  Workspace measure;
  static_cast<void>(ProductTile<T>(measure, high, wide));
  char* memory =
      static_cast<char*>(executor.allocate(executor.owner, measure.bytes() * executor.threads));
  parallel(executor, tasks, [&](int64_t task, int thread) {
    Workspace workspace(memory + thread * measure.bytes());
    const int64_t j = task % across * wide, i = task / across % down * high;
    const int64_t matrix = task / (across * down);
    ProductTile<T>(workspace, high, wide)(params, matrix / inner, matrix % inner, i,
                                          min_of(high, rows - i), j, min_of(wide, columns - j));
  });
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
