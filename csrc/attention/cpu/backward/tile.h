// One tile of pairs in the backward pass: its products, of the compute type or of 16 bits, two to a
// lane.
#pragma once

#include "attention/cpu/backward/pair_gradients.h"
#include "attention/cpu/backward/state.h"

namespace ikattn::IKATTN_ISA {
namespace {

// The operands of the products over pairs, as numbers N: the unit's queries, the sweep's keys, and
// a tile. "By row" means that rows of one column share a lane, and not columns of one row.
template <typename N>
struct PairOperands {
  const Storage<N>* grad_out;         // [heads][panels of N][L][64]
  const Storage<N>* grad_out_by_row;  // [heads][value panels][L in lanes][64]
  const Storage<N>* phi_by_row;       // [heads][feature panels][L in lanes][64]
  const Storage<N>* key_features;  // [feature panels][key_rows][64]   by row, of the first key on
  int64_t key_rows;                // in lanes
  const Storage<N>* values;        // [key blocks][panels of N][64][64]   columns by row
  const Storage<N>* weights;       // [64 in lanes][64]   by row
  const Storage<N>* ds;            // [64][64]
  const Storage<N>* ds_by_row;     // [64 in lanes][64]
};

template <typename T>
PairOperands<T> operands_of(const AttentionLayout<T>& layout, const BackwardUnit<T>& state,
                            const BackwardScratch<T>& scratch, int64_t first_key, T*) {
  return {
      state.grad_out,     state.grad_out,       state.phi, state.keys.features + first_key * kPanel,
      layout.padded_keys, scratch.sweep.values, scratch.w, scratch.s,
      scratch.s};
}

inline PairOperands<BFloat16x2> operands_of(const AttentionLayout<float>&,
                                            const BackwardUnit<float>& state,
                                            const BackwardScratch<float>& scratch, int64_t,
                                            BFloat16x2*) {
  return {state.narrow.grad_out,   state.narrow.grad_out_by_row,
          state.narrow.phi_by_row, scratch.sweep.narrow_features,
          kSweepKeys / 2,          scratch.sweep.narrow_values,
          scratch.narrow_w_by_row, scratch.narrow_ds,
          scratch.narrow_ds_by_row};
}

// One tile of pairs: up to 64 queries of one head against 64 keys.
template <typename N, typename T>
struct Tile {
  const BackwardPlan<T>& plan;
  BackwardUnit<T>& state;
  const BackwardScratch<T>& scratch;
  int64_t head;   // of the unit
  int64_t block;  // of the sweep's keys
  TilePosition at;
  PairOperands<N> operands;

  static constexpr int64_t kPerLane = Numbers<N>::kPerLane;
  static constexpr bool kRounds = !std::is_same_v<N, T>;

  const AttentionLayout<T>& layout() const { return plan.layout; }
  int64_t keys() const { return min_of(kPanel, plan.params.S - at.j0); }
  // Returns a row of the query side, or its first lanes, in [heads][panels][L in lanes][64].
  int64_t of_queries(int64_t panels, int64_t panel, int64_t row, int64_t per_lane) const {
    return ((head * panels + panel) * ceil_div(plan.params.L, per_lane) + row / per_lane) * kPanel;
  }
  // Returns the factors 1/Z, which dO of 16 bits does not include in the folded form.
  const T* row_factors(int64_t row) const {
    if (!kRounds || !state.keys.form.folded) return nullptr;
    return state.rows.factor + head * plan.params.L + at.i0 + row;
  }

  // Returns the inputs of the arithmetic between the products; bias is that of the tile, or null.
  PairTile<T> pairs(int64_t columns, const T* bias) const {
    const AttentionBackwardParams& params = plan.params;
    const int64_t first_row = head * params.L + at.i0;
    return {at.rows,
            columns,
            params.is_causal ? at.j0 - at.i0 : -kPanel,
            state.keys.weight_terms + at.j0,
            state.keys.logits + at.j0,
            state.rows.delta + first_row,
            state.rows.log_normalizer + first_row,
            state.rows.log_normalizer_rest + first_row,
            state.rows.poisoned + first_row,
            bias,
            params.dropout_threshold && !params.grad_weights ? scratch.keep : nullptr,
            static_cast<T>(params.eps)};
  }

  // Loads the gradient of the weights of one band less its mean, which replaces dP - delta; it
  // subtracts before anything is rounded.
  void load_weight_gradients(const Band& band) const {
    T* dp = scratch.dp + band.row * kPanel;
    load_incoming(plan.params, state.keys, at, band.row, band.rows, band.columns, dp);
    if (plan.params.dropout_threshold) {
      keep_tile(band.rows, band.columns, scratch.keep + band.row * kPanel, dp);
    }
    const int64_t first_row = head * plan.params.L + at.i0 + band.row;
    for (int64_t r = 0; r < band.rows; ++r) {
      const T factor = state.rows.factor[first_row + r], mean = state.rows.mean[first_row + r];
      for (int64_t c = r * kPanel; c < r * kPanel + band.columns; c += kLanes<T>) {
        store<T>(dp + c, factor == 0 ? Vec<T>{} : (load(dp + c) - mean) * factor);
      }
    }
  }

  // Computes s = phi_q phi_k^T and dP = dO V^T of one band.
  void score(const Band& band) const {
    const int64_t L = plan.params.L, row = at.i0 + band.row, d_v = layout().d_v;
    const bool is_narrow = layout().narrow_scores;
    const QueryFeatures<T> queries{
        state.phi + of_queries(layout().feature_panels(), 0, row, 1),
        is_narrow ? state.narrow.phi + of_queries(layout().scores().panels(), 0, row, 1) : nullptr,
        is_narrow ? state.narrow.steps + head * L + row : nullptr, L};
    const int64_t panels = ceil_div(d_v, kPerLane * kPanel);
    if (plan.params.grad_weights) load_weight_gradients(band);
    scratch.sweep.by_column.multiply(layout(), block, band.rows, queries, band.columns,
                                     scratch.s + band.row * kPanel);
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t width = min_of(kPerLane * kPanel, d_v - panel * kPerLane * kPanel);
      panel_gemm<N, Left::kRows>(band.rows, band.columns, ceil_div(width, kPerLane),
                                 operands.grad_out + of_queries(panels, panel, row, 1),
                                 operands.values + (block * panels + panel) * kPanel * kPanel,
                                 scratch.dp + band.row * kPanel, panel > 0,
                                 {row_factors(band.row), nullptr});
    }
  }

  // Packs ds as the products below read it.
  void narrow() const {
    if constexpr (kRounds) {
      const int64_t columns = round_up(keys(), kLanes<T>);
      stack_rows(at.rows, columns, scratch.s, nullptr, scratch.narrow_ds_by_row);
      join_columns(at.rows, columns, scratch.s, kPanel, scratch.narrow_ds);
    }
  }

  // Packs the weights of `count` keys as dV reads them: less their least, which multiplies the sum
  // of dO. The least is 0 for a key that a row does not see, for dO of that row must not reach it,
  // not even rounded.
  void narrow_weights(int64_t column, int64_t count, int64_t row, T* least) const {
    const T *w = scratch.w + row * kPanel + column, *factors = row_factors(row);
    for (int64_t c = 0; c < count; c += kLanes<T>) {
      Vec<T> of_column = broadcast(infinity<T>());
      for (int64_t r = 0; r < at.rows - row; ++r) {
        const Vec<T> x = load(w + r * kPanel + c) * (factors ? factors[r] : T(1));
        of_column = of_column < x ? of_column : x;
      }
      store<T>(least + c, of_column);
    }
    stack_rows(at.rows - row, count, w, factors,
               scratch.narrow_w_by_row + row / kPerLane * kPanel + column, least);
  }

  // Adds w^T dO to dV or, where keys fill the lanes, dO^T w to dV^T.
  template <typename M>
  void add_to_values(int64_t count, int64_t width, int64_t depth, const Storage<M>* w,
                     const Storage<M>* grad_out, T* sum) const {
    if (layout().has_half_values()) {
      panel_gemm<M, Left::kColumns>(width, count, depth, grad_out, w, sum, true);
    } else {
      panel_gemm<M, Left::kColumns>(count, width, depth, w, grad_out, sum, true);
    }
  }

  // Adds w^T dO to dV and ds^T phi_q to dphi_k of `count` keys, over the rows from `row` on.
  void add_to_keys(int64_t column, int64_t count, int64_t row) const {
    const int64_t rows = at.rows - row, depth = ceil_div(rows, kPerLane);
    const int64_t left = row / kPerLane * kPanel + column;
    if (rows <= 0) return;
    const int64_t values = layout().value_panels(), features = layout().feature_panels();
    alignas(64) T least[kPanel];
    if constexpr (kRounds) narrow_weights(column, count, row, least);
    for (int64_t panel = 0; panel < values; ++panel) {
      const int64_t width = min_of(kPanel, layout().d_v - panel * kPanel);
      const Storage<N>* grad_out =
          operands.grad_out_by_row + of_queries(values, panel, at.i0 + row, kPerLane);
      T* sum =
          layout().has_half_values()
              ? scratch.sweep.grad_value_by_column + block * kLanes<T> * kPanel + column
              : scratch.sweep.grad_value + (panel * kSweepKeys + block * kPanel + column) * kPanel;
      add_to_values<N>(count, width, depth, operands.weights + left, grad_out, sum);
      if constexpr (kRounds) {
        alignas(64) T of_rows[kPanel];
        alignas(64) Storage<N> ones[kPanel / kPerLane];
        for (Storage<N>& pair : ones) pair = kBFloat16Ones;
        panel_gemm<N, Left::kRows>(1, width, depth, ones, grad_out, of_rows, false);
        add_to_values<T>(count, width, 1, least, of_rows, sum);
      }
    }
    for (int64_t panel = 0; panel < features; ++panel) {
      panel_gemm<N, Left::kColumns>(
          count, layout().feature.columns(panel), depth, operands.ds_by_row + left,
          operands.phi_by_row + of_queries(features, panel, at.i0 + row, kPerLane),
          state.grad_phi_k + (panel * state.held_keys + at.j0 % state.held_keys + column) * kPanel,
          true);
    }
  }

  // Adds up ds of one band before it is rounded, the factors of the centre of the features.
  void add_to_sums(const Band& band) const {
    if constexpr (kRounds) {
      const T* roots = state.keys.feature_scales + at.j0;
      T* of_keys = state.narrow.key_sums + at.j0;
      T* of_rows = state.narrow.row_sums + (head * plan.params.L + at.i0 + band.row) * kLanes<T>;
      Vec<T> sums[kPanel / kLanes<T>] = {};
      for (int64_t r = 0; r < band.rows; ++r) {
        const T* ds = scratch.s + (band.row + r) * kPanel;
        Vec<T> sum = load(of_rows + r * kLanes<T>);
        for (int64_t c = 0; c < band.columns; c += kLanes<T>) {
          sum += load(ds + c) * load(roots + c);
          sums[c / kLanes<T>] += load(ds + c);
        }
        store<T>(of_rows + r * kLanes<T>, sum);
      }
      for (int64_t c = 0; c < band.columns; c += kLanes<T>) {
        store<T>(of_keys + c, load(of_keys + c) + sums[c / kLanes<T>]);
      }
    }
  }

  // Adds ds phi_k of one band to dphi_q.
  void add_to_queries(const Band& band) const {
    const int64_t panels = layout().feature_panels();
    for (int64_t panel = 0; panel < panels; ++panel) {
      panel_gemm<N, Left::kRows>(
          band.rows, layout().feature.columns(panel),
          ceil_div(min_of(keys(), band.columns), kPerLane), operands.ds + band.row * kPanel,
          operands.key_features + (panel * operands.key_rows + block * kPanel / kPerLane) * kPanel,
          state.grad_phi_q + of_queries(panels, panel, at.i0 + band.row, 1), true);
    }
  }
};

}  // namespace
}  // namespace ikattn::IKATTN_ISA
