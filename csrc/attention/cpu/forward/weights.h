// The attention weights themselves, per head or averaged over heads.
//
// A thread computes all heads of a block of queries of one batch item in order, so that the average
// needs one row buffer [rows, S] and never [H, rows, S].
#pragma once

#include "attention/cpu/forward/forward.h"

namespace ikattn::IKATTN_ISA {
namespace {

template <typename T>
struct WeightsScratch {
  KeyScratch<T> keys;
  T* tokens = nullptr;   // [token panels][rows][64]
  T* phi = nullptr;      // [feature panels][rows][64]
  T* tiles = nullptr;    // [key_blocks][rows][64]  w of one head
  T* average = nullptr;  // [key_blocks][rows][64]  mean over heads
  T* bias = nullptr;     // [rows][64]
  T* keep = nullptr;     // [rows][64]
  T* factors = nullptr;  // [rows]  of one head's w
  uint8_t* poisoned = nullptr;
  RowState<T> state;

  void take(Workspace& workspace, const AttentionLayout<T>& layout, int64_t rows) {
    keys.take(workspace, layout);
    tokens = workspace.take<T>(layout.feature.token_panels() * rows * kPanel);
    phi = workspace.take<T>(layout.feature_panels() * rows * kPanel);
    tiles = workspace.take<T>(layout.key_blocks * rows * kPanel);
    average = workspace.take<T>(layout.key_blocks * rows * kPanel);
    bias = workspace.take<T>(rows * kPanel);
    keep = workspace.take<T>(rows * kPanel);
    factors = workspace.take<T>(rows);
    poisoned = workspace.take<uint8_t>(rows);
    state.take(workspace, rows);
  }
};

// Writes the unnormalised weights of one head's rows to scratch.tiles; tiles without a visible pair
// are zero.
template <typename T>
void head_weights(const WeightsParams& params, const AttentionLayout<T>& layout,
                  const QueryBlock& block, const T* packed, const PreparedKeys<T>& keys,
                  WeightsScratch<T>& scratch) {
  const int64_t rows = block.rows, tile_size = rows * kPanel;
  prepare_queries(params, layout, block, packed, scratch.tokens, scratch.phi, rows,
                  scratch.poisoned);
  scratch.state.reset(rows);
  __builtin_memset(scratch.tiles, 0, layout.key_blocks * tile_size * sizeof(T));
  const int64_t blocks = visible_key_blocks(params, layout, block);
  for (int64_t key_block = 0; key_block < blocks; ++key_block) {
    const int64_t j0 = key_block * kPanel;
    const int64_t count = min_of(kPanel, params.S - j0);
    const TilePosition at{block.b, block.h, block.i0, rows, j0};
    const Visibility visibility = visibility_of(params, keys, at, scratch.bias);
    if (visibility == Visibility::kNone) continue;
    T* tile = scratch.tiles + key_block * tile_size;
    const T* bias = visibility == Visibility::kMixed ? scratch.bias : nullptr;
    for_each_band(params, at, round_up(count, kLanes<T>), [&](const Band& band) {
      band_weights(params, layout, keys, at, band,
                   QueryFeatures<T>{scratch.phi, nullptr, nullptr, rows}, bias, tile, scratch.state,
                   key_block * kPanel, scratch.tiles);
    });
  }
}

// Sets every visible pair of rows whose factor is NaN to NaN, also pairs whose weight underflowed.
template <typename T>
void spoil_rows(const WeightsParams& params, const PreparedKeys<T>& keys, const TilePosition& at,
                const T* factors, T* bias, T* tile) {
  const Visibility visibility = visibility_of(params, keys, at, bias);
  if (visibility == Visibility::kNone) return;
  for (int64_t r = 0; r < at.rows; ++r) {
    if (factors[r] == factors[r]) continue;
    for (int64_t c = 0; c < min_of(kPanel, params.S - at.j0); ++c) {
      const bool is_later = params.is_causal && at.j0 + c > at.i0 + r;
      const bool is_masked =
          params.mask && visibility == Visibility::kMixed && bias[r * kPanel + c] == -infinity<T>();
      const bool hidden = is_later || is_masked || keys.logits[at.j0 + c] == -infinity<T>();
      tile[r * kPanel + c] = hidden ? T(0) : not_a_number<T>();
    }
  }
}

// Stores w / Z after dropout, or adds it to the average.
template <typename T>
void finish_head(const WeightsParams& params, const AttentionLayout<T>& layout,
                 const QueryBlock& block, const PreparedKeys<T>& keys, WeightsScratch<T>& scratch) {
  const int64_t rows = block.rows, tile_size = rows * kPanel;
  const T share = params.average_heads ? T(1) / static_cast<T>(params.H) : T(1);
  bool any_spoilt = false;
  for (int64_t r = 0; r < rows; ++r) {
    T sum = sum_of_lanes<T>(load(scratch.state.sums + r * kLanes<T>));
    if (scratch.poisoned[r]) sum = not_a_number<T>();
    scratch.factors[r] = sum == 0 ? T(0) : share / sum;
    any_spoilt = any_spoilt || scratch.factors[r] != scratch.factors[r];
  }
  for (int64_t key_block = 0; key_block < layout.key_blocks; ++key_block) {
    const int64_t j0 = key_block * kPanel;
    const int64_t count = min_of(kPanel, params.S - j0);
    T* tile = scratch.tiles + key_block * tile_size;
    T* average = scratch.average + key_block * tile_size;
    const TilePosition at{block.b, block.h, block.i0, rows, j0};
    if (any_spoilt) spoil_rows(params, keys, at, scratch.factors, scratch.bias, tile);
    if (params.dropout_threshold) {
      fill_keep(params, at, kept_factor<T>(params), scratch.keep);
      keep_tile(rows, round_up(count, kLanes<T>), scratch.keep, tile);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const T factor = scratch.factors[r];
      for (int64_t c = r * kPanel; c < r * kPanel + count; c += kLanes<T>) {
        const Vec<T> w = load(tile + c);
        const Vec<T> normalised =
            w == Vec<T>{} ? w : w * factor;  // hidden or dropped, of a NaN row
        store<T>(tile + c, normalised);
        if (params.average_heads) store<T>(average + c, load(average + c) + normalised);
      }
    }
    if (!params.average_heads) {
      const Array& out = params.weights;
      store_panels(out,
                   block.b * out.stride[0] + block.h * out.stride[1] + block.i0 * out.stride[2] +
                       j0 * out.stride[3],
                   out.stride[2], out.stride[3], rows, count, tile, rows);
    }
  }
}

template <typename T>
void store_average(const WeightsParams& params, const QueryBlock& block,
                   const WeightsScratch<T>& scratch) {
  const Array& out = params.weights;
  store_panels(out, block.b * out.stride[0] + block.i0 * out.stride[2], out.stride[2],
               out.stride[3], block.rows, params.S, scratch.average, block.rows);
}

template <typename T>
void attention_weights(const WeightsParams& params, const Executor& executor) {
  const AttentionLayout<T> layout(params);
  const int64_t rows = query_block_rows(params.L, 1, executor.threads, kWeightRows);
  const int64_t blocks = ceil_div(params.L, rows);
  PassMemory<T, ForwardUnit<T>, WeightsScratch<T>> memory;
  memory.allocate(
      executor, params, layout, 0, params.key_heads,
      [&](ForwardUnit<T>& unit, Workspace& workspace) { unit.take(workspace, params, layout); },
      [&](WeightsScratch<T>& own, Workspace& workspace) { own.take(workspace, layout, rows); });

  pack_all_frequencies(params, layout.feature, memory.frequencies, executor);
  const KeyStages keys{params, layout, memory, false};
  for (int64_t b = 0; b < params.B; ++b) {
    run_stages(executor, Schedule{b * params.key_heads, params.key_heads, false}, keys.logits(),
               keys.form(), keys.blocks());
    parallel(executor, blocks, [&](int64_t index, int thread) {
      WeightsScratch<T>& own = memory.scratch[thread];
      const int64_t i0 = index * rows;
      QueryBlock block{b, 0, i0, min_of(rows, params.L - i0)};
      if (params.average_heads) {
        __builtin_memset(own.average, 0, layout.key_blocks * block.rows * kPanel * sizeof(T));
      }
      for (; block.h < params.H; ++block.h) {
        const int64_t head = block.h / layout.heads_per_unit;
        const Unit unit = unit_at(params, layout, b * params.key_heads + head);
        head_weights(params, layout, block, memory.frequencies.of(unit, layout.feature),
                     memory.slots[head].keys, own);
        finish_head(params, layout, block, memory.slots[head].keys, own);
      }
      if (params.average_heads) store_average(params, block, own);
    });
  }
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
