// Norms |W_h v| of the transformed vectors where the vectors themselves are not needed: |W_h v|^2 =
// v^T G_h v with G_h = W_h^T W_h, with d_v^2 multiply-adds instead of d_v D.
//
// They are computed in float64, from values and projection of at most float32: the error of the
// square, some 1e-8 |W_h| |v| of the norm, is less than that of vectors in float32.
#pragma once

#include "contributions/cpu/vectors.h"

namespace ikattn::IKATTN_ISA {
namespace {

// Computes the norm by its definition, for infinities, whose Gram sum would be NaN.
inline __attribute__((noinline, cold)) float norm_of_vector(const FactorsOfTokens& params,
                                                            int64_t h, const double* value) {
  const int64_t* stride = params.projection.stride;
  double square = 0;
  for (int64_t c = 0; c < params.D; ++c) {
    double sum = 0;
    for (int64_t k = 0; k < params.d_v; ++k) {
      const int64_t offset = c * stride[0] + (h * params.d_v + k) * stride[1];
      sum += load_element<double>(params.projection, offset) * value[k * kPanel];
    }
    square += sum * sum;
  }
  return static_cast<float>(__builtin_sqrt(square));
}

// Computes the value norms from grams [d_v, H d_v], float64: G_h side by side.
inline void value_norms(const FactorsOfTokens& params, const Array& grams, const Executor& all) {
  const int64_t count = params.B * params.S, d_v = params.d_v;
  const int64_t groups = ceil_div(count, kPanel);
  Executor executor = all;
  executor.threads = static_cast<int>(max_of(1, min_of(all.threads, groups)));
  Workspace measure;
  static_cast<void>(HeadProducts<double>(measure, d_v));
  measure.take<double>(kPanelSize);
  char* memory =
      static_cast<char*>(executor.allocate(executor.owner, measure.bytes() * executor.threads));

  parallel(executor, groups, [&](int64_t group, int thread) {
    Workspace workspace(memory + thread * measure.bytes());
    const HeadProducts<double> transform(workspace, d_v);
    double* product = workspace.take<double>(kPanelSize);
    const int64_t first = group * kPanel, here = min_of(kPanel, count - first);
    for (int64_t h = 0; h < params.H; ++h) {
      transform.load_values(params, h / (params.H / params.G), first, here);
      double squares[kPanel] = {};
      for (int64_t c = 0; c < d_v; c += kPanel) {
        transform.multiply(grams, d_v, d_v, h, c, here, product);
        const double* values = transform.values() + c * kPanel;
        const int64_t elements = min_of(kPanel, d_v - c) * kPanel;
        for (int64_t i = 0; i < elements; ++i) {
          squares[i % kPanel] += product[i] * values[i];
        }
      }
      for (int64_t t = 0; t < here; ++t) {
        const int64_t b = (first + t) / params.S, j = (first + t) % params.S;
        const double square = squares[t];
        static_cast<float*>(params.value_norms)[(b * params.H + h) * params.S + j] =
            !is_finite(square) ? norm_of_vector(params, h, transform.values() + t)
            : square > 0       ? static_cast<float>(__builtin_sqrt(square))
                               : 0.0f;
      }
    }
  });
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
