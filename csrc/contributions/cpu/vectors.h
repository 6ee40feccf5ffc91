// The transformed vectors f_h(x_j) = W_h v_jh of a few tokens, as products of panels.
//
// The rows of the projection, without a copy, are the left operand, and the transposed values of
// the tokens the right one; the product is transposed when it is stored.
#pragma once

#include "contributions/params.h"
#include "support/cpu/elements.h"
#include "support/cpu/panel_gemm.h"
#include "support/cpu/schedule.h"

namespace ikattn::IKATTN_ISA {
namespace {

// Returns the length of a row of D elements, padded with zeros to whole panels.
inline int64_t padded_size(int64_t D) { return round_up(D, kPanel); }

// Returns the number of tokens that are computed together. More read the projection less often, but
// their vectors should stay near the second-level cache, and every thread should have some.
template <typename T>
int64_t tokens_together(const FactorsOfTokens& params, int64_t threads) {
  const int64_t bytes_each =
      max_of(1, params.H * padded_size(params.D)) * static_cast<int64_t>(sizeof(T));
  const int64_t fitting = min_of(kVectorCache / bytes_each, ceil_div(params.B * params.S, threads));
  return fitting < 32 ? 16 : fitting < 64 ? 32 : 64;
}

template <typename T>
class VectorProducts {
 public:
  VectorProducts(Workspace& workspace, int64_t d_v)
      : tokens_(workspace.take<T>(kPanel * kPanel)),
        values_(workspace.take<T>(round_up(d_v, kPanel) * kPanel)),
        rows_(workspace.take<T>(round_up(d_v, kPanel) * kPanel)),
        product_(workspace.take<T>(kPanel * kPanel)) {}

  // Computes vectors [count, in whole vectors][H][padded size], zero beyond D, of the tokens
  // [first, first + count) of all batch items, at most 64.
  void operator()(const FactorsOfTokens& params, int64_t first, int64_t count, T* vectors) const {
    const int64_t size = padded_size(params.D);
    for (int64_t h = 0; h < params.H; ++h) {
      load_values(params, h, first, count);
      for (int64_t c = 0; c < size; c += kPanel) {
        multiply(params.projection, params.D, params.d_v, h, c, count);
        for (int64_t i = (params.D - c) * kPanel; i < kPanel * kPanel; ++i) product_[i] = 0;
        for (int64_t t = 0; t < count; t += kLanes<T>) {
          for (int64_t row = 0; row < kPanel; row += kLanes<T>) {
            transpose_block(product_ + row * kPanel + t, kPanel,
                            vectors + (t * params.H + h) * size + c + row, params.H * size);
          }
        }
      }
    }
  }

  // Loads the transposed values [d_v][64] of head h.
  void load_values(const FactorsOfTokens& params, int64_t h, int64_t first, int64_t count) const {
    const Array& value = params.value;
    const int64_t* stride = value.stride;
    const int64_t of_head = h / (params.H / params.G) * stride[1];
    for (int64_t k = 0; k < params.d_v; k += kPanel) {
      const int64_t depth = min_of(kPanel, params.d_v - k);
      for (int64_t t = 0, run; t < count; t += run) {  // a run of tokens of one batch item
        const int64_t b = (first + t) / params.S, j = (first + t) % params.S;
        run = min_of(count - t, params.S - j);
        load_panels(value, b * stride[0] + of_head + j * stride[2] + k * stride[3], stride[2],
                    stride[3], run, depth, tokens_ + t * kPanel, run);
      }
      transpose_panel(count, depth, tokens_, values_ + k * kPanel);
    }
  }

  // Computes the product [64][count]: elements [c, c + 64), at most D, of the vectors of head h;
  // projection is [D, H d_v].
  void multiply(const Array& projection, int64_t D, int64_t d_v, int64_t h, int64_t c,
                int64_t count) const {
    const int64_t* stride = projection.stride;
    const int64_t rows = min_of(kPanel, D - c);
    load_panels(projection, c * stride[0] + h * d_v * stride[1], stride[0], stride[1], rows, d_v,
                rows_, kPanel);
    for (int64_t k = 0; k == 0 || k < d_v; k += kPanel) {
      panel_gemm<T, Left::kRows>(rows, count, min_of(kPanel, d_v - k), rows_ + k * kPanel,
                                 values_ + k * kPanel, product_, k > 0);
    }
  }

  const T* values() const { return values_; }
  const T* product() const { return product_; }

 private:
  T *tokens_, *values_, *rows_, *product_;  // [64][64]; [d_v][64], [64][d_v] in panels; [64][64]
};

}  // namespace
}  // namespace ikattn::IKATTN_ISA
