// The transformed vectors f_h(x_j) = W_h v_jh of a few tokens, as products of panels: rows of the
// projection are the left operand, and the transposed values of the tokens the right one.
#pragma once

#include "contributions/params.h"
#include "support/cpu/elements.h"
#include "support/cpu/panel_gemm.h"
#include "support/cpu/schedule.h"

namespace ikattn::IKATTN_ISA {
namespace {

constexpr int64_t kPanelSize = kPanel * kPanel;

// Returns the number of tokens whose values are taken together: every thread should have some.
inline int64_t tokens_together(int64_t tokens, int64_t threads) {
  const int64_t fitting = ceil_div(tokens, threads);
  return fitting <= 16 ? 16 : fitting <= 32 ? 32 : 64;
}

// Products of a matrix with the values of some tokens.
template <typename T>
class HeadProducts {
 public:
  // Holds the values of `heads` heads at a time.
  HeadProducts(Workspace& workspace, int64_t d_v, int64_t heads = 1)
      : size_(round_up(d_v, kPanel) * kPanel),
        tokens_(workspace.take<T>(kPanelSize)),
        values_(workspace.take<T>(heads * size_)),
        rows_(workspace.take<T>(size_)) {}

  // Loads the transposed values [d_v][64] of head g of the tokens [first, first + count) of all
  // batch items, at most 64, as those of `place`.
  void load_values(const FactorsOfTokens& params, int64_t g, int64_t first, int64_t count,
                   int64_t place = 0) const {
    const Array& value = params.value;
    const int64_t* stride = value.stride;
    for (int64_t k = 0; k < params.d_v; k += kPanel) {
      const int64_t depth = min_of(kPanel, params.d_v - k);
      for (int64_t t = 0, run; t < count; t += run) {  // a run of tokens of one batch item
        const int64_t b = (first + t) / params.S, j = (first + t) % params.S;
        run = min_of(count - t, params.S - j);
        load_panels(value, b * stride[0] + g * stride[1] + j * stride[2] + k * stride[3], stride[2],
                    stride[3], run, depth, tokens_ + t * kPanel, run);
      }
      transpose_panel(count, depth, tokens_, values_ + place * size_ + k * kPanel);
    }
  }

  // Computes the product [64][count] of the rows [c, c + 64), at most D, of head h's part of a
  // matrix [D, H d_v] with the values of `place`.
  void multiply(const Array& matrix, int64_t D, int64_t d_v, int64_t h, int64_t c, int64_t count,
                T* product, int64_t place = 0) const {
    const int64_t* stride = matrix.stride;
    const int64_t rows = min_of(kPanel, D - c);
    load_panels(matrix, c * stride[0] + h * d_v * stride[1], stride[0], stride[1], rows, d_v, rows_,
                kPanel);
    for (int64_t k = 0; k == 0 || k < d_v; k += kPanel) {
      panel_gemm<T, Left::kRows>(rows, count, min_of(kPanel, d_v - k), rows_ + k * kPanel,
                                 values_ + place * size_ + k * kPanel, product, k > 0);
    }
  }

  const T* values() const { return values_; }

 private:
  int64_t size_;
  T *tokens_, *values_, *rows_;  // [64][64]; [heads][d_v][64], [64][d_v] in panels
};

}  // namespace
}  // namespace ikattn::IKATTN_ISA
