// Attention over edges, target by target.
#pragma once

#include "edge_attention/cpu/rows.h"
#include "edge_attention/cpu/scores.h"

namespace ikattn::IKATTN_ISA {
namespace {

// Sums over edges of one target, head by head. Weights are relative to the largest logit.
template <typename T>
struct WeightedSum {
  double *largest, *sum;  // [H]
  T* values;              // [H, d_v]

  WeightedSum(const Partial<T>& partial, int64_t H)
      : largest(partial.numbers), sum(partial.numbers + H), values(partial.values) {}
};

template <typename T>
inline void attend_piece(const EdgeForwardParams<T>& p, int64_t i, int64_t begin, int64_t end,
                         const EdgeScratch<T>& scratch, const WeightedSum<T>& total) {
  const int64_t H = p.H, d_v = p.d_v, edges = end - begin;
  take_scores(p, i, begin, end, scratch);
  for (int64_t h = 0; h < H; ++h) total.largest[h] = -INFINITY;
  for (int64_t e = 0; e < edges; ++e) {
    for (int64_t h = 0; h < H; ++h) {
      const double logit = static_cast<double>(scratch.logits[e * H + h]);
      total.largest[h] = logit > total.largest[h] ? logit : total.largest[h];
    }
  }
  take_weights(p, edges, total.largest, scratch);

  const T* weights = scratch.logits;
  for (int64_t h = 0; h < H; ++h) total.sum[h] = 0;
  for (int64_t e = 0; e < edges; ++e) {
    for (int64_t h = 0; h < H; ++h) total.sum[h] += static_cast<double>(weights[e * H + h]);
  }
  T* kept = p.weights + begin * H;
  for (int64_t k = 0; k < edges * H; ++k) kept[k] = dropped(p, begin * H + k, weights[k]);

  for (int64_t c = 0; c < H * d_v; ++c) total.values[c] = 0;
  for (int64_t e = 0; e < edges; ++e) {
    const T* values = p.value + p.source[begin + e] * H * d_v;
    for (int64_t h = 0; h < H; ++h) {
      if (is_no_weight(weights[e * H + h])) continue;
      add_multiple(total.values + h * d_v, kept[e * H + h], values + h * d_v, d_v);
    }
  }
}

// Adds up the pieces of a target, in their order, and writes its results.
template <typename T>
inline void finish_target(const EdgeForwardParams<T>& p, int64_t i, const Partials<T>& partials,
                          int64_t first, int64_t pieces) {
  const int64_t H = p.H, d_v = p.d_v;
  const auto piece = [&](int64_t k) { return WeightedSum<T>(partials[first + k], H); };
  for (int64_t h = 0; h < H; ++h) {
    double largest = -INFINITY, sum = 0;
    for (int64_t k = 0; k < pieces; ++k) {
      largest = piece(k).largest[h] > largest ? piece(k).largest[h] : largest;
    }
    T* output = p.output + (i * H + h) * d_v;
    for (int64_t c = 0; c < d_v; ++c) output[c] = 0;
    for (int64_t k = 0; k < pieces; ++k) {
      const WeightedSum<T> part = piece(k);
      const double shift = part.largest[h] - largest;
      const double factor = pieces == 1 || is_hidden(largest) ? 1.0 : std::exp(shift);
      sum += factor * part.sum[h];
      add_multiple(output, static_cast<T>(factor), part.values + h * d_v, d_v);
      part.largest[h] = factor;  // of the piece's weights, from here on
    }
    p.log_normalizer[i * H + h] = sum == 0 ? -INFINITY : std::log(sum) + largest;
    const double scale = sum == 0 ? 1.0 : 1 / sum;
    for (int64_t c = 0; c < d_v; ++c) output[c] *= static_cast<T>(scale);
    for (int64_t k = 0; k < pieces; ++k) piece(k).largest[h] *= scale;
  }
  for (int64_t e = p.rowptr[i]; e < p.rowptr[i + 1]; ++e) {
    const double* factor = piece((e - p.rowptr[i]) / kPieceEdges).largest;
    T* weights = p.weights + e * H;
    for (int64_t h = 0; h < H; ++h) {  // the factor may be NaN
      weights[h] = is_no_weight(weights[h]) ? T(0) : weights[h] * static_cast<T>(factor[h]);
    }
  }
}

template <typename T>
void edge_forward(const EdgeForwardParams<T>& p, const Executor& executor) {
  const Rows rows{p.rowptr, p.N_q};
  const auto lay_out = [&](Workspace workspace, const auto& run) {
    const Partials<T> partials(workspace, rows, executor.threads, {2 * p.H, p.H * p.d_v});
    const EdgeScratches<T> scratch(workspace, executor.threads, kPieceEdges, p.H);
    run(partials, scratch);
    return workspace.bytes();
  };
  const int64_t bytes = lay_out(Workspace(), [](const auto&...) {});
  lay_out(Workspace(executor.allocate(executor.owner, bytes)),
          [&](const Partials<T>& partials, const EdgeScratches<T>& scratch) {
            for_rows(
                rows, partials, executor,
                [&](int64_t i, int64_t begin, int64_t end, const Partial<T>& partial, int thread) {
                  attend_piece(p, i, begin, end, scratch[thread], WeightedSum<T>(partial, p.H));
                },
                [&](int64_t i, int64_t first, int64_t pieces) {
                  finish_target(p, i, partials, first, pieces);
                });
          });
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
