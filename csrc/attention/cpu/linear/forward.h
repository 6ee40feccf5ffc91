// Forward pass in linear time: moments of the keys, then their sums with the products of each
// query's features; in a causal call chunk by chunk.
#pragma once

#include "attention/cpu/linear/linear_time.h"

namespace ikattn::IKATTN_ISA {
namespace {

static_assert(kCausalChunk % kCausalRows == 0 && kCausalChunk <= kProductRows);

// The scratch of a thread for rows in linear time.
template <typename T>
struct LinearScratch {
  ProductScratch<T> products;
  Moments<T> growing;           // causal: of the keys before a chunk, one group of panels
  T* lane_sums = nullptr;       // [kProductRows][lanes]
  T* sums = nullptr;            // [rows]   of the weights
  T* out = nullptr;             // [value panels][rows][64]
  uint8_t* by_pairs = nullptr;  // [rows]   marks those that would lose digits

  void take(Workspace& workspace, const AttentionParams& params, const AttentionLayout<T>& layout,
            int64_t rows) {
    const ProductLayout of_features = layout.products();
    products.take(workspace, of_features, layout.d_v, false);
    if (params.is_causal) {
      growing = Moments<T>::take(workspace, PanelGroups::for_chunks(of_features).together,
                                 layout.d_v, false, true);
    }
    lane_sums = workspace.take<T>(kProductRows * kLanes<T>);
    sums = workspace.take<T>(rows);
    out = workspace.take<T>(layout.value_panels() * rows * kPanel);
    by_pairs = workspace.take<uint8_t>(rows);
  }
};

// Sums over the keys before each chunk, for its queries.
template <typename T>
struct EarlierChunks {
  T* phi = nullptr;             // [heads][feature panels][L][64]   of the queries
  uint8_t* poisoned = nullptr;  // [heads][L]
  T* sums = nullptr;            // [heads][L]   of s^2
  T* out = nullptr;             // [heads][value panels][L][64]   sum of s^2 v'
  int* groups = nullptr;        // [heads][chunks]   that have added to it

  void take(Workspace& workspace, const AttentionParams& params, const AttentionLayout<T>& layout) {
    const int64_t rows = layout.heads_per_unit * params.L;
    phi = workspace.take<T>(rows * layout.feature_panels() * kPanel);
    poisoned = workspace.take<uint8_t>(rows);
    sums = workspace.take<T>(rows);
    out = workspace.take<T>(rows * layout.value_panels() * kPanel);
    groups = workspace.take<int>(layout.heads_per_unit * chunk_count(params));
  }
};

// Loads x, factors, and values relative to a center, of the prepared keys [first, first + count)
// into the scratch.
template <typename T>
void load_keys(const AttentionLayout<T>& layout, const PreparedKeys<T>& keys, const T* center,
               int64_t first, int64_t count, const KeyScratch<T>& scratch,
               const ProductScratch<T>& own) {
  for (int64_t j0 = first; j0 < first + count; j0 += kPanel) {
    const int64_t rows = min_of(kPanel, first + count - j0);
    for (int64_t panel = 0; panel < layout.feature_panels(); ++panel) {
      const int64_t block = j0 / kPanel * layout.feature_panels() + panel;
      transpose_panel(layout.feature.columns(panel), rows,
                      keys.by_column.phi + block * kPanel * kPanel,
                      scratch.features + panel * kPanel * kPanel);
    }
    gather_features(layout.feature, rows, scratch.features, kPanel,
                    own.x + (j0 - first) * layout.products().template row_size<T>());
  }
  copy_rows(count, layout.d_v, keys.values + first * kPanel, layout.padded_keys, own.values,
            kMomentTokens);
  subtract_center(count, layout.d_v, center, own.values, kMomentTokens);
  for (int64_t t = 0; t < count; ++t) own.factors[t] = 1;
}

// Adds |phi_j|^2 of the block of keys at j0.
template <typename T>
void add_squares_of_block(const AttentionLayout<T>& layout, const PreparedKeys<T>& keys, int64_t j0,
                          int64_t S, KeySquares& sums) {
  const int64_t count = min_of(kPanel, S - j0);
  for (int64_t first = 0; first < count; first += kLanes<T>) {
    Vec<T> squares{};
    for (int64_t panel = 0; panel < layout.feature_panels(); ++panel) {
      const int64_t block = j0 / kPanel * layout.feature_panels() + panel;
      const T* phi = keys.by_column.phi + block * kPanel * kPanel + first;
      for (int64_t row = 0; row < layout.feature.columns(panel); ++row) {
        squares += load(phi + row * kPanel) * load(phi + row * kPanel);
      }
    }
    for (int64_t c = 0; c < min_of(kLanes<T>, count - first); ++c) {
      sums.add(static_cast<double>(squares[c]));
    }
  }
}

// Computes the features of a block of queries, where the pairs and the chunks read them.
template <typename T>
void prepare_chunk_queries(const AttentionParams& params, const AttentionLayout<T>& layout,
                           const QueryBlock& block, int64_t head, const T* packed,
                           const EarlierChunks<T>& out, T* tokens) {
  const int64_t at = head * layout.feature_panels() * params.L + block.i0;
  prepare_queries(params, layout, block, packed, tokens, out.phi + at * kPanel, params.L,
                  out.poisoned + head * params.L + block.i0);
}

// Computes a group of panels for all chunks in order: adds the sums over earlier keys to the rows
// of a chunk, then adds its keys to the moments.
template <typename T>
void sum_earlier_chunks(const AttentionParams& params, const AttentionLayout<T>& layout,
                        int64_t group, const Panels& panels, const PreparedKeys<T>& keys,
                        const LinearKeys<T>& linear, const EarlierChunks<T>& out,
                        const KeyScratch<T>& of_keys, LinearScratch<T>& scratch) {
  const ProductLayout products = layout.products();
  const ProductScratch<T>& own = scratch.products;
  const int64_t L = params.L, chunks = chunk_count(params);
  scratch.growing.first_panel = panels.begin;
  scratch.growing.clear(panels);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t i0 = chunk * kCausalChunk, rows = min_of(kCausalChunk, L - i0);
    for (int64_t head = 0; chunk > 0 && head < layout.heads_per_unit; ++head) {
      gather_features(layout.feature, rows,
                      out.phi + (head * layout.feature_panels() * L + i0) * kPanel, L, own.x);
      __builtin_memset(scratch.lane_sums, 0, rows * kLanes<T> * sizeof(T));
      read_panels(products, panels, scratch.growing, rows, own, scratch.lane_sums);
      int* turn = out.groups + head * chunks + chunk;
      wait_for_turn(turn, group);
      for (int64_t r = 0; r < rows; ++r) {
        const T sum = sum_of_lanes<T>(load(scratch.lane_sums + r * kLanes<T>));
        T& total = out.sums[head * L + i0 + r];
        total = group > 0 ? total + sum : sum;
      }
      add_panels(rows, layout.d_v, own.partial,
                 out.out + (head * layout.value_panels() * L + i0) * kPanel, L, group > 0);
      end_turn(turn, group);
    }
    const int64_t count = keys_before(params, chunk + 1) - keys_before(params, chunk);
    if (count == 0 || chunk + 1 == chunks) continue;
    move_center(panels, linear.center(chunk), linear.center(chunk + 1), scratch.growing);
    load_keys(layout, keys, linear.center(chunk + 1), i0, count, of_keys, own);
    add_moments(products, panels, count, own, scratch.growing);
  }
}

// Computes own.out [value panels][rows][64] = sum_j w_ij v_j and own.sums = sum_j w_ij over the
// keys that moments hold for a block of queries.
template <typename T>
void sum_by_moments(const AttentionParams& params, const AttentionLayout<T>& layout,
                    const QueryBlock& block, int64_t head, const LinearKeys<T>& keys,
                    const EarlierChunks<T>& earlier, const QueryFeatures<T>& queries, T eps,
                    const LinearScratch<T>& own) {
  const int64_t rows = block.rows, chunk = chunk_of(params, block.i0);
  const T* out = own.out;  // of s^2 v', [value panels][out_rows][64]
  int64_t out_rows = rows;
  if (params.is_causal) {
    out = earlier.out + (head * layout.value_panels() * params.L + block.i0) * kPanel;
    out_rows = params.L;
    __builtin_memcpy(own.sums, earlier.sums + head * params.L + block.i0, rows * sizeof(T));
  } else {
    gather_features(layout.feature, rows, queries.phi, queries.rows, own.products.x);
    __builtin_memset(own.lane_sums, 0, rows * kLanes<T> * sizeof(T));
    read_moments(layout.products(), keys.moments, rows, own.products, own.lane_sums, own.out, rows);
    for (int64_t r = 0; r < rows; ++r) {
      own.sums[r] = sum_of_lanes<T>(load(own.lane_sums + r * kLanes<T>));
    }
  }
  for (int64_t r = 0; r < rows; ++r) own.sums[r] += eps * keys.magnitudes[chunk];
  for (int64_t first = 0; first < layout.d_v; first += kPanel) {
    const T* center = keys.center(chunk) + first;
    for (int64_t r = 0; r < rows; ++r) {
      const T* row = out + first * out_rows + r * kPanel;
      for (int64_t c = 0; c < kPanel; c += kLanes<T>) {
        store<T>(own.out + first * rows + r * kPanel + c,
                 load(row + c) + load(center + c) * own.sums[r]);
      }
    }
  }
}

// The stages that replace pairs, between the keys and the queries.
template <typename T, typename Memory>
struct LinearForwardStages {
  const AttentionParams& params;
  const AttentionLayout<T>& layout;
  const Memory& memory;
  bool is_linear;
  PanelGroups groups;

  bool is_causal() const { return is_linear && params.is_causal; }

  auto description() const {
    return Stage{int64_t{is_linear}, [this](const Place& at, int64_t, int) {
                   auto& unit = memory.slots[at.slot];
                   describe_keys(
                       params, layout, unit.keys, layout.padded_keys,
                       [&](int64_t j0) { return unit.keys.values + j0 * kPanel; },
                       [&](int64_t j0, KeySquares& sums) {
                         add_squares_of_block(layout, unit.keys, j0, params.S, sums);
                       },
                       unit.linear);
                   if (!is_causal()) return;
                   __builtin_memset(unit.earlier.groups, 0,
                                    layout.heads_per_unit * chunk_count(params) * sizeof(int));
                 }};
  }
  auto moments() const {
    return Stage{is_linear && !is_causal() ? groups.count() : 0,
                 [this](const Place& at, int64_t group, int thread) {
                   const auto& unit = memory.slots[at.slot];
                   if (!unit.linear.is_taken) return;
                   const auto& own = memory.scratch[thread];
                   sum_moments(
                       layout.products(), groups.of(group), params.S,
                       [&](int64_t first, int64_t count) {
                         if (unit.keys.are_hidden(first, count)) return false;
                         load_keys(layout, unit.keys, unit.linear.center(0), first, count, own.keys,
                                   own.linear.products);
                         return true;
                       },
                       own.linear.products, unit.linear.moments);
                 }};
  }
  auto chunk_queries() const {
    const int64_t blocks = ceil_div(params.L, kCausalRows);
    return Stage{is_causal() ? layout.heads_per_unit * blocks : 0,
                 [this, blocks](const Place& at, int64_t index, int thread) {
                   if (!memory.slots[at.slot].linear.is_taken) return;
                   const Unit unit = unit_at(params, layout, at.unit);
                   const int64_t head = index / blocks, i0 = index % blocks * kCausalRows;
                   const QueryBlock block{unit.b, unit.first_query_head + head, i0,
                                          min_of(kCausalRows, params.L - i0)};
                   prepare_chunk_queries(
                       params, layout, block, head, memory.frequencies.of(unit, layout.feature),
                       memory.slots[at.slot].earlier, memory.scratch[thread].tokens);
                 }};
  }
  auto earlier_chunks() const {
    return Stage{is_causal() ? groups.count() : 0,
                 [this](const Place& at, int64_t group, int thread) {
                   const auto& unit = memory.slots[at.slot];
                   auto& own = memory.scratch[thread];
                   if (!unit.linear.is_taken) return;
                   sum_earlier_chunks(params, layout, group, groups.of(group), unit.keys,
                                      unit.linear, unit.earlier, own.keys, own.linear);
                 }};
  }
};

template <typename T, typename Memory>
LinearForwardStages(const AttentionParams&, const AttentionLayout<T>&, const Memory&, bool,
                    const PanelGroups&) -> LinearForwardStages<T, Memory>;

}  // namespace
}  // namespace ikattn::IKATTN_ISA
