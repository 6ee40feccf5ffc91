// Gradients by target for queries and edges, then by source for keys and values.
#pragma once

#include "edge_attention/cpu/rows.h"
#include "edge_attention/cpu/scores.h"

namespace ikattn::IKATTN_ISA {
namespace {

// The number of edges of a target whose products, weights and gradients are in memory at once.
constexpr int64_t kGradientEdges = 32;

// Computes the weighted sum of the gradients of a head's weights, sum_e weight_e grad_e. Without
// gradients of the weights themselves it is the product of the output and its gradient.
template <typename T>
inline void take_means(const EdgeQueryGradientParams<T>& p, int64_t i, double* mean) {
  for (int64_t h = 0; h < p.H; ++h) {
    const int64_t at = (i * p.H + h) * p.d_v;
    mean[h] = static_cast<double>(dot(p.output + at, p.grad_output + at, p.d_v));
  }
}

// Adds the gradients of the weights to the means, for edges [begin, end) of target i.
template <typename T>
inline void add_to_means(const EdgeQueryGradientParams<T>& p, int64_t i, int64_t begin, int64_t end,
                         const EdgeScratch<T>& scratch, double* mean) {
  const int64_t H = p.H;
  for (int64_t first = begin; first < end; first += kGradientEdges) {
    const int64_t last = min_of(first + kGradientEdges, end);
    take_scores(p, i, first, last, scratch);
    take_weights(p, last - first, p.log_normalizer + i * H, scratch);
    for (int64_t e = first; e < last; ++e) {
      for (int64_t h = 0; h < H; ++h) {
        const T weight = dropped(p, e * H + h, scratch.logits[(e - first) * H + h]);
        mean[h] += static_cast<double>(weight) * static_cast<double>(p.grad_weights[e * H + h]);
      }
    }
  }
}

// Fills of_edges for edges [begin, end) of target i, and adds to the gradient of the query's
// features.
template <typename T>
inline void query_gradients_of(const EdgeQueryGradientParams<T>& p, int64_t i, int64_t begin,
                               int64_t end, const double* mean, const EdgeScratch<T>& scratch,
                               T* grad_query) {
  const int64_t H = p.H, d_v = p.d_v, F = p.F;
  take_scores(p, i, begin, end, scratch);
  take_weights(p, end - begin, p.log_normalizer + i * H, scratch);
  const T* grad_output = p.grad_output + i * H * d_v;
  const T of_score = T(1) / static_cast<T>(p.exponential ? 1 : F);
  for (int64_t e = begin; e < end; ++e) {
    const T* value = p.value + p.source[e] * H * d_v;
    const T* key = p.key_features + p.source[e] * H * F;
    T *grad_logits = p.of_edges + 3 * e * H, *grad_products = grad_logits + H;
    T* kept = grad_products + H;
    for (int64_t h = 0; h < H; ++h) {
      grad_logits[h] = dot(grad_output + h * d_v, value + h * d_v, d_v);
    }
    if (p.grad_weights != nullptr) {
      for (int64_t h = 0; h < H; ++h) grad_logits[h] += p.grad_weights[e * H + h];
    }
    const T *weights = scratch.logits + (e - begin) * H, *s = scratch.products + (e - begin) * H;
    for (int64_t h = 0; h < H; ++h) {
      kept[h] = dropped(p, e * H + h, weights[h]);
      const T gradient = dropped(p, e * H + h, grad_logits[h]);
      grad_logits[h] = weights[h] * (gradient - static_cast<T>(mean[h]));
      if (p.exponential) grad_logits[h] *= s[h];  // the slope
      const T slope = p.exponential ? T(1) : s[h] / (s[h] * s[h] + p.eps);
      grad_products[h] = grad_logits[h] * slope * of_score;
    }
    for (int64_t h = 0; h < H; ++h) {
      if (is_no_weight(weights[h])) {  // what is hidden may be NaN
        grad_logits[h] = grad_products[h] = kept[h] = 0;
        continue;
      }
      add_multiple(grad_query + h * F, grad_products[h], key + h * F, F);
    }
  }
}

template <typename T>
void edge_query_gradients(const EdgeQueryGradientParams<T>& p, const Executor& executor) {
  const Rows rows{p.rowptr, p.N_q};
  const int64_t H = p.H, width = p.H * p.F;
  const bool adds_to_means = p.grad_weights != nullptr;
  const auto lay_out = [&](Workspace workspace, const auto& run) {
    double* means = workspace.take<double>(p.N_q * H);
    const Partials<T> partials(workspace, rows, executor.threads, {H, width});
    const EdgeScratches<T> scratch(workspace, executor.threads, kGradientEdges, H);
    run(means, partials, scratch);
    return workspace.bytes();
  };
  const auto run = [&](double* means, const Partials<T>& partials,
                       const EdgeScratches<T>& scratch) {
    if (adds_to_means) {
      for_rows(
          rows, partials, executor,
          [&](int64_t i, int64_t begin, int64_t end, const Partial<T>& partial, int thread) {
            for (int64_t h = 0; h < H; ++h) partial.numbers[h] = 0;
            for (int64_t c = 0; c < width; ++c) partial.values[c] = 0;
            add_to_means(p, i, begin, end, scratch[thread], partial.numbers);
          },
          [&](int64_t i, int64_t first, int64_t pieces) {
            const Partial<T> total = partials.total(first, pieces);
            take_means(p, i, means + i * H);
            for (int64_t h = 0; h < H; ++h) means[i * H + h] += total.numbers[h];
          });
    }
    for_rows(
        rows, partials, executor,
        [&](int64_t i, int64_t begin, int64_t end, const Partial<T>& partial, int thread) {
          double* mean = partial.numbers;
          if (adds_to_means) {
            for (int64_t h = 0; h < H; ++h) mean[h] = means[i * H + h];
          } else {
            take_means(p, i, mean);
          }
          for (int64_t c = 0; c < width; ++c) partial.values[c] = 0;
          for (int64_t first = begin; first < end; first += kGradientEdges) {
            query_gradients_of(p, i, first, min_of(first + kGradientEdges, end), mean,
                               scratch[thread], partial.values);
          }
        },
        [&](int64_t i, int64_t first, int64_t pieces) {
          const T* total = partials.total(first, pieces).values;
          for (int64_t c = 0; c < width; ++c) p.grad_query_features[i * width + c] = total[c];
        });
  };
  const int64_t bytes = lay_out(Workspace(), [](const auto&...) {});
  lay_out(Workspace(executor.allocate(executor.owner, bytes)), run);
}

// Sums over the edges of one source: gradients of its logits [H], features [H, F] and value [H,
// d_v].
template <typename T>
inline void key_gradients_of(const EdgeKeyGradientParams<T>& p, int64_t begin, int64_t end,
                             const Partial<T>& partial) {
  const int64_t H = p.H, F = p.F, d_v = p.d_v;
  double* grad_logits = partial.numbers;
  T *grad_key = partial.values, *grad_value = partial.values + H * F;
  for (int64_t h = 0; h < H; ++h) grad_logits[h] = 0;
  for (int64_t c = 0; c < H * (F + d_v); ++c) partial.values[c] = 0;
  for (int64_t place = begin; place < end; ++place) {
    if (place + kAhead < p.E) {
      const int64_t next = p.by_source[place + kAhead], target = p.target[place + kAhead];
      prefetch(p.query_features + target * H * F, H * F);
      prefetch(p.grad_output + target * H * d_v, H * d_v);
      prefetch(p.of_edges + 3 * next * H, 3 * H);
    }
    const int64_t e = p.by_source[place], i = p.target[place];
    const T* of_edge = p.of_edges + 3 * e * H;
    for (int64_t h = 0; h < H; ++h) grad_logits[h] += static_cast<double>(of_edge[h]);
    for (int64_t h = 0; h < H; ++h) {
      if (of_edge[H + h] == 0 && of_edge[2 * H + h] == 0) continue;  // hidden: may be NaN
      add_multiple(grad_key + h * F, of_edge[H + h], p.query_features + (i * H + h) * F, F);
      add_multiple(grad_value + h * d_v, of_edge[2 * H + h], p.grad_output + (i * H + h) * d_v,
                   d_v);
    }
  }
}

template <typename T>
void edge_key_gradients(const EdgeKeyGradientParams<T>& p, const Executor& executor) {
  const Rows rows{p.colptr, p.N_k};
  const int64_t H = p.H, F = p.F, d_v = p.d_v;
  const auto lay_out = [&](Workspace workspace, const auto& run) {
    run(Partials<T>(workspace, rows, executor.threads, {H, H * (F + d_v)}));
    return workspace.bytes();
  };
  const int64_t bytes = lay_out(Workspace(), [](const auto&) {});
  lay_out(Workspace(executor.allocate(executor.owner, bytes)), [&](const Partials<T>& partials) {
    for_rows(
        rows, partials, executor,
        [&](int64_t, int64_t begin, int64_t end, const Partial<T>& partial, int) {
          key_gradients_of(p, begin, end, partial);
        },
        [&](int64_t j, int64_t first, int64_t pieces) {
          const Partial<T> total = partials.total(first, pieces);
          const T *grad_key = total.values, *grad_value = total.values + H * F;
          for (int64_t h = 0; h < H; ++h) {
            p.grad_key_logits[j * H + h] = static_cast<T>(total.numbers[h]);
          }
          for (int64_t c = 0; c < H * F; ++c) p.grad_key_features[j * H * F + c] = grad_key[c];
          for (int64_t c = 0; c < H * d_v; ++c) p.grad_value[j * H * d_v + c] = grad_value[c];
        });
  });
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
