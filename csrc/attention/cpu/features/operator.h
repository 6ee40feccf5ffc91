// The operator of features, phi(x) unscaled: [B, H, N, 2M], cosines first.
#pragma once

#include "attention/cpu/features/frequency_sums.h"

namespace ikattn::IKATTN_ISA {
namespace {

// Moves rows between feature panels [panels][64][64] and the operator's layout.
//   move(array, offset, stride, count, pointer)
template <typename T, typename Move>
void for_each_feature_row(const FeatureLayout<T>& layout, const Array& array, int64_t offset,
                          int64_t rows, T* panels, const Move& move) {
  for (int64_t panel = 0; panel < layout.panels(); ++panel) {
    const int64_t count = layout.frequencies(panel), half = layout.half(panel);
    const int64_t m0 = panel * kPanelFrequencies;
    for (int64_t r = 0; r < rows; ++r) {
      T* row = panels + (panel * kPanel + r) * kPanel;
      const int64_t at = offset + r * array.stride[2];
      move(array, at + m0 * array.stride[3], array.stride[3], count, row);
      move(array, at + (layout.M + m0) * array.stride[3], array.stride[3], count, row + half);
    }
  }
}

template <typename T>
struct FeaturesScratch {
  T* tokens = nullptr;    // [token panels][64][64]
  T* phi = nullptr;       // [panels][64][64]
  T* grad_phi = nullptr;  // [panels][64][64]
  T* grad_x = nullptr;    // [token panels][64][64]
  T* angles = nullptr;    // [64][64]
  Tangents<T> tangents;

  void take(Workspace& workspace, const FeatureLayout<T>& layout) {
    tokens = workspace.take<T>(layout.token_panels() * kPanel * kPanel);
    phi = workspace.take<T>(layout.panels() * kPanel * kPanel);
    grad_phi = workspace.take<T>(layout.panels() * kPanel * kPanel);
    tangents = {workspace.take<T>(Tangents<T>::size(layout, kPanel)), kPanel};
    grad_x = workspace.take<T>(layout.token_panels() * kPanel * kPanel);
    angles = workspace.take<T>(kPanel * kPanel);
  }
};

template <typename T>
void feature_tokens(const FeaturesParams& params, const FeatureLayout<T>& layout, int64_t b,
                    int64_t h, int64_t begin, int64_t end, const T* packed,
                    const FeaturesScratch<T>& scratch) {
  const Array &x = params.x, &out = params.features;
  for (int64_t n = begin; n < end; n += kPanel) {
    const int64_t rows = min_of(kPanel, end - n);
    load_panels(x, b * x.stride[0] + h * x.stride[1] + n * x.stride[2], x.stride[2], x.stride[3],
                rows, params.d, scratch.tokens, kPanel);
    features<T>(layout, rows, scratch.tokens, kPanel, packed, T(2), nullptr, scratch.phi, kPanel);
    for_each_feature_row(layout, out, b * out.stride[0] + h * out.stride[1] + n * out.stride[2],
                         rows, scratch.phi, store_row<T>);
  }
}

template <typename T>
void feature_tokens_backward(const FeaturesParams& params, const FeatureLayout<T>& layout,
                             int64_t b, int64_t h, int64_t begin, int64_t end, const T* packed,
                             const T* transposed, T* partial, const FeaturesScratch<T>& scratch) {
  const Array &x = params.x, &gradient = params.features, &out = params.grad_x;
  for (int64_t n = begin; n < end; n += kPanel) {
    const int64_t rows = min_of(kPanel, end - n);
    load_panels(x, b * x.stride[0] + h * x.stride[1] + n * x.stride[2], x.stride[2], x.stride[3],
                rows, params.d, scratch.tokens, kPanel);
    features<T>(layout, rows, scratch.tokens, kPanel, packed, T(2), nullptr, scratch.phi, kPanel,
                scratch.tangents);
    __builtin_memset(scratch.grad_phi, 0, layout.panels() * kPanel * kPanel * sizeof(T));
    for_each_feature_row(layout, gradient,
                         b * gradient.stride[0] + h * gradient.stride[1] + n * gradient.stride[2],
                         rows, scratch.grad_phi, load_row<T>);
    features_backward<T>(layout, rows, scratch.tokens, kPanel, transposed, scratch.phi, kPanel,
                         scratch.tangents, T(1), scratch.grad_phi, kPanel,
                         out ? scratch.grad_x : nullptr, partial, scratch.angles);
    if (out) {
      store_panels(out, b * out.stride[0] + h * out.stride[1] + n * out.stride[2], out.stride[2],
                   out.stride[3], rows, params.d, scratch.grad_x, rows);
    }
  }
}

template <typename T>
void spectral_features(const FeaturesParams& params, bool backward, const Executor& executor) {
  const FeatureLayout<T> layout{params.d, params.M, params.stationary()};
  const int64_t sets = params.frequency_batches * params.H;
  const int64_t chunks = ceil_div(params.N, kFrequencyTokens);
  const int64_t tasks = params.B * params.H * chunks;
  const bool wants_frequencies = backward && (params.grad_w1 || params.grad_w2);
  const int64_t size = layout.packed_size();
  // The number of tasks at once; where each has a gradient of frequencies, as many as fit in
  // memory.
  const int64_t held = max_of(int64_t{executor.threads}, gradients_held(layout));
  const int64_t group = wants_frequencies ? min_of(tasks, held) : tasks;
  T *packed = nullptr, *transposed = nullptr, *partials = nullptr, *totals = nullptr;
  FeaturesScratch<T>* scratch = nullptr;
  const auto lay_out = [&](void* base) {
    Workspace workspace(base);
    packed = workspace.take<T>(sets * size);
    if (backward) transposed = workspace.take<T>(sets * layout.transposed_size());
    if (wants_frequencies) {
      partials = workspace.take<T>(group * size);
      totals = workspace.take<T>(sets * size);
    }
    scratch = workspace.take<FeaturesScratch<T>>(executor.threads);
    for (int thread = 0; thread < executor.threads; ++thread) {
      FeaturesScratch<T> own;
      own.take(workspace, layout);
      if (base) scratch[thread] = own;
    }
    return workspace.bytes();
  };
  lay_out(executor.allocate(executor.owner, lay_out(nullptr)));

  const auto set_of = [&](int64_t b, int64_t h) {
    return (params.frequency_batches > 1 ? b : 0) * params.H + h;
  };
  parallel(executor, sets, [&](int64_t set, int) {
    const int64_t b = set / params.H, h = set % params.H;
    pack_frequencies(layout, params.w1, params.w2,
                     b * params.w1.stride[0] + h * params.w1.stride[1],
                     b * params.w2.stride[0] + h * params.w2.stride[1], packed + set * size,
                     transposed ? transposed + set * layout.transposed_size() : nullptr);
  });
  const auto run_task = [&](int64_t task, T* partial, int thread) {
    const int64_t b = task / chunks / params.H, h = task / chunks % params.H;
    const int64_t begin = task % chunks * kFrequencyTokens;
    const int64_t end = min_of(params.N, begin + kFrequencyTokens);
    const int64_t set = set_of(b, h);
    if (!backward) {
      feature_tokens(params, layout, b, h, begin, end, packed + set * size, scratch[thread]);
      return;
    }
    if (partial) __builtin_memset(partial, 0, size * sizeof(T));
    feature_tokens_backward(params, layout, b, h, begin, end, packed + set * size,
                            transposed + set * layout.transposed_size(), partial, scratch[thread]);
  };
  if (wants_frequencies) __builtin_memset(totals, 0, sets * size * sizeof(T));
  for (int64_t first = 0; first < tasks; first += group) {
    const int64_t end = min_of(first + group, tasks);
    parallel(executor, end - first, [&](int64_t index, int thread) {
      run_task(first + index, wants_frequencies ? partials + index * size : nullptr, thread);
    });
    if (!wants_frequencies) continue;
    add_to_sets(FrequencySets{params.H, chunks, params.frequency_batches > 1}, size, first,
                end - first, partials, totals, executor);
  }
  if (!wants_frequencies) return;
  parallel(executor, sets, [&](int64_t set, int) {
    const T* total = totals + set * size;
    T* grad_w1 = static_cast<T*>(params.grad_w1.data);
    T* grad_w2 = static_cast<T*>(params.grad_w2.data);
    const int64_t at = set * params.d * params.M;
    unpack_frequency_gradients(layout, total, grad_w1 ? grad_w1 + at : nullptr,
                               grad_w2 ? grad_w2 + at : nullptr);
  });
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
