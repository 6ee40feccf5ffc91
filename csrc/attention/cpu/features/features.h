// Spectral features of tokens, as panels.
//
// With u = x.(w1 + w2)/2 and v = x.(w1 - w2)/2 in cycles,
//   cos t1 + cos t2 = 2 cos u cos v      sin t1 + sin t2 = 2 sin u cos v
// A feature panel holds 32 frequencies: their cosines, then their sines. The last panel may be
// narrower; then either half is padded with zeros to whole vectors, or to half a vector where that
// is enough. In that case a vector stored at the cosines overwrites the sines, and one stored at
// the sines runs past them: they are loaded in pairs, then stored, cosines first.
#pragma once

#include "support/cpu/elements.h"
#include "support/cpu/vector_math.h"

namespace ikattn::IKATTN_ISA {
namespace {

constexpr int64_t kPanelFrequencies = kPanel / 2;

template <typename T>
struct FeatureLayout {
  int64_t d = 0, M = 0;
  bool stationary = false;

  int64_t token_panels() const { return ceil_div(d, kPanel); }
  int64_t panels() const { return ceil_div(M, kPanelFrequencies); }
  int64_t frequencies(int64_t panel) const {
    return min_of(kPanelFrequencies, M - panel * kPanelFrequencies);
  }
  // Returns the columns of the cosines, after which the sines start.
  int64_t half(int64_t panel) const {
    const int64_t count = frequencies(panel);
    return count <= kLanes<T> / 2 ? kLanes<T> / 2 : round_up(count, kLanes<T>);
  }
  int64_t columns(int64_t panel) const { return 2 * half(panel); }
  int64_t width() const { return (panels() - 1) * kPanel + columns(panels() - 1); }
  int64_t packed_rows() const { return round_up(d, kLanes<T>); }
  // Return the elements of one head's packed frequencies, and of their transpose.
  int64_t packed_size() const { return panels() * packed_rows() * kPanel; }
  int64_t transposed_size() const { return panels() * token_panels() * kPanel * kPanel; }
};

// Packs W+ = (w1 + w2)/2 and W- = (w1 - w2)/2 of one head as [panel][packed_rows][64], columns u
// then v, the right operand of the angles; and transposed, [panel][d / 64][64][64], the right
// operand of the gradient of x.
template <typename T>
void pack_frequencies(const FeatureLayout<T>& layout, const Array& w1, const Array& w2,
                      int64_t offset1, int64_t offset2, T* packed, T* transposed) {
  const int64_t packed_rows = layout.packed_rows();
  T row1[kPanelFrequencies], row2[kPanelFrequencies];
  for (int64_t panel = 0; panel < layout.panels(); ++panel) {
    T* out = packed + panel * packed_rows * kPanel;
    const int64_t count = layout.frequencies(panel);
    const int64_t half = layout.half(panel);
    const int64_t m0 = panel * kPanelFrequencies;
    for (int64_t i = 0; i < packed_rows * kPanel; ++i) out[i] = 0;
    for (int64_t c = 0; c < layout.d; ++c) {
      load_row(w1, offset1 + c * w1.stride[2] + m0 * w1.stride[3], w1.stride[3], count, row1);
      T* u = out + c * kPanel;
      if (layout.stationary) {
        for (int64_t m = 0; m < count; ++m) u[m] = row1[m];
        continue;
      }
      load_row(w2, offset2 + c * w2.stride[2] + m0 * w2.stride[3], w2.stride[3], count, row2);
      for (int64_t m = 0; m < count; ++m) {
        u[m] = (row1[m] + row2[m]) * T(0.5);
        u[half + m] = (row1[m] - row2[m]) * T(0.5);
      }
    }
    if (transposed == nullptr) continue;
    for (int64_t first = 0; first < layout.d; first += kPanel) {
      transpose_panel(min_of(kPanel, layout.d - first), layout.columns(panel), out + first * kPanel,
                      transposed + (panel * layout.token_panels() * kPanel + first) * kPanel);
    }
  }
}

// Computes the angles in cycles, u then v, of `rows` tokens: out [rows][64], x
// [token_panels][x_rows][64].
template <typename T>
void angles(const FeatureLayout<T>& layout, int64_t panel, int64_t rows, const T* x, int64_t x_rows,
            const T* packed, T* out) {
  const T* frequencies = packed + panel * layout.packed_rows() * kPanel;
  const int64_t columns = layout.stationary ? layout.half(panel) : layout.columns(panel);
  for (int64_t first = 0; first < layout.d; first += kPanel) {
    panel_gemm<T, Left::kRows>(rows, columns, min_of(kPanel, layout.d - first), x + first * x_rows,
                               frequencies + first * kPanel, out, first > 0);
  }
}

// Fills column_scale[c] with scale, or 0 for a padded frequency.
template <typename T>
void fill_column_scale(const FeatureLayout<T>& layout, int64_t panel, T scale, T* column_scale) {
  for (int64_t m = 0; m < kPanelFrequencies; ++m) {
    column_scale[m] = m < layout.frequencies(panel) ? scale : T(0);
  }
}

// The input of features_backward() beside phi: tan v, [panels][rows][32]; null: not wanted.
template <typename T>
struct Tangents {
  T* data = nullptr;
  int64_t rows = 0;

  T* at(int64_t panel, int64_t row) const {
    return data + (panel * rows + row) * kPanelFrequencies;
  }
  Tangents from(int64_t row) const { return {data ? at(0, row) : nullptr, rows}; }
  void clear(const FeatureLayout<T>& layout, int64_t row) const {
    if (data == nullptr || layout.stationary) return;
    for (int64_t panel = 0; panel < layout.panels(); ++panel) {
      __builtin_memset(at(panel, row), 0, kPanelFrequencies * sizeof(T));
    }
  }
  static int64_t size(const FeatureLayout<T>& layout, int64_t rows) {
    return layout.stationary ? 0 : layout.panels() * rows * kPanelFrequencies;
  }
};

// Returns tan v for this cosine, which it makes other than zero. The cosine is that of the forward,
// or w in the backward would not be the w that Z sums.
template <typename T>
inline Vec<T> tangent(Vec<T> v, Vec<T>& cosine_v) {
  Vec<T> sine, cosine;
  sincos_cycles<T>(v, sine, cosine);
  cosine_v = cosine_v == Vec<T>{} ? broadcast(T(1e-18)) : cosine_v;
  return sine / cosine_v;
}

// Computes phi = scale row_scale [cos u cos v, sin u cos v] of `rows` tokens into phi
// [panels][phi_rows][64]; row_scale may be null.
template <typename T>
void features(const FeatureLayout<T>& layout, int64_t rows, const T* x, int64_t x_rows,
              const T* packed, T scale, const T* row_scale, T* phi, int64_t phi_rows,
              const Tangents<T>& tangents = {}) {
  T column_scale[kPanelFrequencies];
  for (int64_t panel = 0; panel < layout.panels(); ++panel) {
    T* out = phi + panel * phi_rows * kPanel;
    const int64_t half = layout.half(panel);
    angles(layout, panel, rows, x, x_rows, packed, out);
    fill_column_scale(layout, panel, scale, column_scale);
    for (int64_t r = 0; r < rows; ++r) {
      const T token_scale = row_scale ? row_scale[r] : T(1);
      for (int64_t c = 0; c < half; c += kLanes<T>) {
        T* cosines = out + r * kPanel + c;
        Vec<T> sine, cosine;
        sincos_cycles<T>(load(cosines), sine, cosine);
        Vec<T> common = load(column_scale + c) * token_scale;
        if (!layout.stationary) {
          const Vec<T> v = load(cosines + half);
          Vec<T> cosine_v = cos_cycles<T>(v);
          if (tangents.data) store<T>(tangents.at(panel, r) + c, tangent<T>(v, cosine_v));
          common *= cosine_v;
        }
        store<T>(cosines, cosine * common);
        store<T>(cosines + half, sine * common);
      }
    }
  }
}

// Computes the gradients of x and of the packed frequencies of `rows` tokens from g, the gradient
// of the phi above times 1 / gradient_scale, without computing an angle again.
//   phi          [panels][phi_rows][64], scales included
//   g            [panels][g_rows][64]
//   grad_x       [token_panels][rows][64], overwritten (null: not wanted)
//   grad_packed  [panels][packed_rows][64], added to (null: not wanted)
//   angle_tile   [rows][64] scratch
// du = phi_c g_s - phi_s g_c,  dv = -tan v (phi_c g_c + phi_s g_s), in radians.
template <typename T>
void features_backward(const FeatureLayout<T>& layout, int64_t rows, const T* x, int64_t x_rows,
                       const T* transposed, const T* phi, int64_t phi_rows,
                       const Tangents<T>& tangents, T gradient_scale, const T* g, int64_t g_rows,
                       T* grad_x, T* grad_packed, T* angle_tile) {
  const T turns_scale = gradient_scale * T(6.283185307179586476925);
  for (int64_t panel = 0; panel < layout.panels(); ++panel) {
    const int64_t half = layout.half(panel);
    const int64_t columns = layout.stationary ? half : 2 * half;
    for (int64_t r = 0; r < rows; ++r) {
      const T* gradient = g + (panel * g_rows + r) * kPanel;
      const T* cosines = phi + (panel * phi_rows + r) * kPanel;
      for (int64_t c = 0; c < half; c += kLanes<T>) {
        const Vec<T> g_c = load(gradient + c), g_s = load(gradient + half + c);
        const Vec<T> phi_c = load(cosines + c), phi_s = load(cosines + half + c);
        T* u = angle_tile + r * kPanel + c;
        store<T>(u, (phi_c * g_s - phi_s * g_c) * turns_scale);
        if (layout.stationary) continue;
        store<T>(u + half,
                 (phi_c * g_c + phi_s * g_s) * load(tangents.at(panel, r) + c) * -turns_scale);
      }
    }
    for (int64_t first = 0; first < layout.d; first += kPanel) {
      const int64_t width = min_of(kPanel, layout.d - first);
      if (grad_x) {
        const T* right = transposed + (panel * layout.token_panels() * kPanel + first) * kPanel;
        panel_gemm<T, Left::kRows>(rows, width, columns, angle_tile, right, grad_x + first * rows,
                                   panel > 0);
      }
      if (grad_packed) {
        panel_gemm<T, Left::kColumns>(width, columns, rows, x + first * x_rows, angle_tile,
                                      grad_packed + (panel * layout.packed_rows() + first) * kPanel,
                                      true);
      }
    }
  }
}

// Stores grad w1 = (gradW+ + gradW-)/2 and grad w2 = (gradW+ - gradW-)/2 of one head, contiguous
// [d, M].
template <typename T>
void unpack_frequency_gradients(const FeatureLayout<T>& layout, const T* grad_packed, T* grad_w1,
                                T* grad_w2) {
  for (int64_t panel = 0; panel < layout.panels(); ++panel) {
    const int64_t half = layout.half(panel);
    for (int64_t c = 0; c < layout.d; ++c) {
      const T* u = grad_packed + (panel * layout.packed_rows() + c) * kPanel;
      for (int64_t m = 0; m < layout.frequencies(panel); ++m) {
        const int64_t at = c * layout.M + panel * kPanelFrequencies + m;
        if (layout.stationary) {
          grad_w1[at] = u[m];
          continue;
        }
        if (grad_w1) grad_w1[at] = (u[m] + u[half + m]) * T(0.5);
        if (grad_w2) grad_w2[at] = (u[m] - u[half + m]) * T(0.5);
      }
    }
  }
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
