// A block of queries of the forward pass: from its pairs, or in linear time, to out and log Z.
//
// Every row is summed over its keys in one order, ascending where all are pairs, so that the result
// does not depend on threads or tiling. Every 1024 keys have sums of their own, which are added in
// order, by one thread or, where queries are few, by several.
#pragma once

#include "attention/cpu/linear/forward.h"

namespace ikattn::IKATTN_ISA {
namespace {

template <typename T>
struct ForwardUnit {
  PreparedKeys<T> keys;
  LinearKeys<T> linear;
  EarlierChunks<T> earlier;  // causal, in linear time
  // Present where threads share the keys of a block of queries:
  RowSums<T>* parts = nullptr;  // [blocks][parts]
  uint8_t* poisoned = nullptr;  // [blocks][parts][rows]

  void take(Workspace& workspace, const AttentionParams& params, const AttentionLayout<T>& layout,
            bool is_linear = false) {
    keys.take(workspace, layout, false);
    if (!is_linear) return;
    linear.take(workspace, params, layout);
    if (params.is_causal) earlier.take(workspace, params, layout);
  }
  void take_parts(Workspace& workspace, const AttentionLayout<T>& layout, int64_t count,
                  int64_t rows) {
    parts = workspace.take<RowSums<T>>(count);
    poisoned = workspace.take<uint8_t>(count * rows);
    for (int64_t part = 0; part < count; ++part) {
      RowSums<T> own;
      own.take(workspace, layout, rows);
      if (workspace.has_memory()) parts[part] = own;
    }
  }
};

template <typename T>
struct ForwardScratch {
  KeyScratch<T> keys;
  T* tokens = nullptr;             // [token panels][rows][64]
  T* phi = nullptr;                // [feature panels][rows][64]
  int32_t* narrow_phi = nullptr;   // [score panels][rows][64]
  float* steps = nullptr;          // [rows]
  T* tile = nullptr;               // [rows][64]   s, then w
  int32_t* narrow_tile = nullptr;  // [rows][64]   w or a part of it, two to a lane
  T* bias = nullptr;               // [rows][64]
  T* keep = nullptr;               // [rows][64]
  T* grad_weights = nullptr;       // [rows][64]
  uint8_t* poisoned = nullptr;     // [rows]
  RowSums<T> sums, earlier;        // of the part at hand, and of those before
  LinearScratch<T> linear;

  void take(Workspace& workspace, const AttentionParams& params, const AttentionLayout<T>& layout,
            int64_t rows, bool is_linear) {
    if (is_linear) linear.take(workspace, params, layout, rows);
    keys.take(workspace, layout);
    tokens = workspace.take<T>(layout.feature.token_panels() * rows * kPanel);
    phi = workspace.take<T>(layout.feature_panels() * rows * kPanel);
    if (layout.narrow_scores) {
      narrow_phi = workspace.take<int32_t>(layout.scores().panels() * rows * kPanel);
      steps = workspace.take<float>(rows);
    }
    tile = workspace.take<T>(rows * kPanel);
    if (layout.weight_parts > 0) narrow_tile = workspace.take<int32_t>(rows * kPanel);
    bias = workspace.take<T>(rows * kPanel);
    keep = workspace.take<T>(rows * kPanel);
    if (params.grad_weights) grad_weights = workspace.take<T>(rows * kPanel);
    poisoned = workspace.take<uint8_t>(rows);
    sums.take(workspace, layout, rows);
    if (layout.key_blocks > kPartBlocks) earlier.take(workspace, layout, rows);
  }
};

// Adds w v of one band of a tile to out, for weights that `scratch.keep` does not drop, split into
// bfloat16.
template <typename T>
void accumulate_narrow_values(const AttentionParams& params, const AttentionLayout<T>& layout,
                              const PreparedKeys<T>& keys, const TilePosition& at, const Band& band,
                              const ForwardScratch<T>& scratch) {
  const int64_t count = min_of(params.S - at.j0, band.columns), first_row = band.row * kPanel;
  T* w = scratch.tile + first_row;
  const auto join = [&] { join_columns(band.rows, count, w, at.rows, scratch.narrow_tile); };
  if (T* sums = scratch.sums.state.from(band.row).rounded_sums) {
    // Row sums include dropped weights.
    join();
    add_row_sums(band.rows, count, scratch.narrow_tile, sums);
  }
  if (params.dropout_threshold) {
    multiply_tile(band.rows, band.columns, scratch.keep + first_row, w);
  }
  for (int part = 0; part < layout.weight_parts; ++part) {
    if (part > 0) subtract_bfloat16(band.rows, count, w);
    if (layout.weight_parts > 1 || params.dropout_threshold) join();
    for (int64_t first = 0; first < layout.d_v; first += kPanel) {
      panel_gemm<BFloat16x2, Left::kRows>(
          band.rows, min_of(kPanel, layout.d_v - first), ceil_div(count, 2), scratch.narrow_tile,
          keys.narrow_values + (first * layout.padded_keys + at.j0 * kPanel) / 2,
          scratch.sums.out + first * at.rows + first_row, true);
    }
  }
}

// Adds the rows' sums of w times its gradient to out. The gradient may be anything where w is
// hidden (bias is that of the band, as in tile_weights) or dropped.
template <typename T>
void accumulate_incoming(const AttentionParams& params, const PreparedKeys<T>& keys,
                         const TilePosition& at, const Band& band, const T* bias,
                         const ForwardScratch<T>& scratch) {
  const int64_t first_row = band.row * kPanel;
  const T* w = scratch.tile + first_row;
  T* incoming = scratch.grad_weights;
  load_incoming(params, keys, at, band.row, band.rows, band.columns, incoming);
  if (params.dropout_threshold) {
    keep_tile(band.rows, band.columns, scratch.keep + first_row, incoming);
  }
  for (int64_t r = 0; r < band.rows; ++r) {
    Vec<T> sum{};
    for (int64_t c = r * kPanel; c < r * kPanel + band.columns; c += kLanes<T>) {
      Vec<T> product = load(w + c) * load(incoming + c);
      if (bias) product = load(bias + c) == -infinity<T>() ? Vec<T>{} : product;
      sum += product;
    }
    scratch.sums.out[first_row + r * kPanel] += sum_of_lanes<T>(sum);
  }
}

// Adds w v to out.
template <typename T>
void accumulate_values(const AttentionParams& params, const AttentionLayout<T>& layout,
                       const PreparedKeys<T>& keys, const TilePosition& at, const Band& band,
                       const ForwardScratch<T>& scratch) {
  if constexpr (kTakes16Bits<T>) {
    if (layout.weight_parts > 0) {
      return accumulate_narrow_values(params, layout, keys, at, band, scratch);
    }
  }
  const int64_t count = min_of(params.S - at.j0, band.columns), first_row = band.row * kPanel;
  T* w = scratch.tile + first_row;
  if (params.dropout_threshold) {
    multiply_tile(band.rows, band.columns, scratch.keep + first_row, w);
  }
  if constexpr (std::is_same_v<T, float>) {
    if (layout.pairs_values()) {
      // An odd last key is paired with one whose weight and value are zero.
      return multiply_row_pairs(band.rows, ceil_div(count, 2), w, keys.row_pairs(at.j0),
                                scratch.sums.out + first_row);
    }
  }
  for (int64_t first = 0; first < layout.d_v; first += kPanel) {
    panel_gemm<T, Left::kRows>(band.rows, min_of(kPanel, layout.d_v - first), count, w,
                               keys.values + first * layout.padded_keys + at.j0 * kPanel,
                               scratch.sums.out + first * at.rows + first_row, true);
  }
}

// Stores out / Z and log Z. Rows that see no key are zero; poisoned rows that see one are NaN.
template <typename T>
void finish_rows(const AttentionParams& params, const KeyForm& form, const QueryBlock& block,
                 const ForwardScratch<T>& scratch) {
  T* out = scratch.sums.out;
  const T kept = params.dropout_threshold ? kept_factor<T>(params) : T(1);
  for (int64_t r = 0; r < block.rows; ++r) {
    T sum = sum_of_lanes<T>(load(scratch.sums.state.sums + r * kLanes<T>)), divisor = sum;
    if (const T* rounded = scratch.sums.state.rounded_sums) {
      divisor = sum_of_lanes<T>(load(rounded + r * kLanes<T>)) / kept;
    }
    if (scratch.poisoned[r] && sum != 0) sum = divisor = not_a_number<T>();
    const double row_reference =
        form.reference + (form.folded ? 0.0 : static_cast<double>(scratch.sums.state.maxima[r]));
    const double log_normalizer =
        sum == 0 ? -infinity<double>() : logarithm(static_cast<double>(sum)) + row_reference;
    const T factor = divisor == 0 ? T(0) : 1 / divisor;
    for (int64_t first = 0; first < params.d_v; first += kPanel) {
      T* row = out + first * block.rows + r * kPanel;
      for (int64_t c = 0; c < kPanel; c += kLanes<T>) store<T>(row + c, load(row + c) * factor);
    }
    store_element(params.log_normalizer,
                  block.b * params.log_normalizer.stride[0] +
                      block.h * params.log_normalizer.stride[1] +
                      (block.i0 + r) * params.log_normalizer.stride[2],
                  log_normalizer);
  }
  const Array& output = params.output;
  store_panels(
      output, block.b * output.stride[0] + block.h * output.stride[1] + block.i0 * output.stride[2],
      output.stride[2], output.stride[3], block.rows, params.d_v, out, block.rows);
}

// Adds blocks [begin, end) of keys, pair by pair, to out and the row sums of a block of queries.
template <typename T>
void add_pairs(const AttentionParams& params, const AttentionLayout<T>& layout,
               const QueryBlock& block, const QueryFeatures<T>& queries,
               const PreparedKeys<T>& keys, int64_t begin, int64_t end,
               ForwardScratch<T>& scratch) {
  const int64_t rows = block.rows;
  [[maybe_unused]] const AmxTiles tiles;
  bool has_earlier = false;
  for (int64_t key_block = begin; key_block < end; ++key_block) {
    if (key_block > begin && key_block % kPartBlocks == 0) {
      if (has_earlier) add_earlier(layout, rows, scratch.earlier, scratch.sums);
      has_earlier = true;
      const RowSums<T> part = scratch.sums;
      scratch.sums = scratch.earlier;
      scratch.earlier = part;
      scratch.sums.reset(layout, rows);
    }
    const int64_t j0 = key_block * kPanel;
    const int64_t count = min_of(kPanel, params.S - j0);
    const TilePosition at{block.b, block.h, block.i0, rows, j0};
    const Visibility visibility = visibility_of(params, keys, at, scratch.bias);
    if (visibility == Visibility::kNone) continue;
    const T* bias = visibility == Visibility::kMixed ? scratch.bias : nullptr;
    if (params.dropout_threshold) {
      // Rounded weights keep a factor of 1, for finish_rows rescales their complete sum.
      fill_keep(params, at, scratch.sums.state.rounded_sums ? T(1) : kept_factor<T>(params),
                scratch.keep);
    }
    for_each_band(params, at, round_up(count, kLanes<T>), [&](const Band& band) {
      band_weights(params, layout, keys, at, band, queries, bias, scratch.tile, scratch.sums.state,
                   params.d_v, scratch.sums.out);
      if (params.grad_weights) {
        accumulate_incoming(params, keys, at, band, terms_of(params, band, bias), scratch);
      } else {
        accumulate_values(params, layout, keys, at, band, scratch);
      }
    });
  }
  if (has_earlier) add_earlier(layout, rows, scratch.earlier, scratch.sums);
}

// Adds the keys that moments hold to the sums of a block of queries. Each row decides for itself
// between moments and pairs, so that its result does not depend on the rest of its block.
template <typename T>
void add_moments_or_pairs(const AttentionParams& params, const AttentionLayout<T>& layout,
                          const QueryBlock& block, int64_t head, const QueryFeatures<T>& queries,
                          int64_t held_blocks, const ForwardUnit<T>& unit,
                          ForwardScratch<T>& scratch) {
  const int64_t rows = block.rows, value_columns = layout.value_panels() * kPanel;
  const LinearScratch<T>& own = scratch.linear;
  sum_by_moments(params, layout, block, head, unit.linear, unit.earlier, queries,
                 static_cast<T>(params.eps), own);
  const T of_keys = unit.linear.squares[chunk_of(params, block.i0)];
  bool any_by_pairs = false;
  for (int64_t r = 0; r < rows; ++r) {
    own.sums[r] += sum_of_lanes<T>(load(scratch.sums.state.sums + r * kLanes<T>));
    const T square = square_of(layout.feature, queries.phi, queries.rows, r);
    own.by_pairs[r] = !keeps_digits(layout.products(), own.sums[r], square, of_keys);
    any_by_pairs |= own.by_pairs[r] != 0;
  }
  add_panels(rows, layout.d_v, scratch.sums.out, own.out, rows, true);
  if (any_by_pairs) add_pairs(params, layout, block, queries, unit.keys, 0, held_blocks, scratch);
  for (int64_t r = 0; r < rows; ++r) {
    if (own.by_pairs[r]) continue;
    Vec<T> sum{};
    sum[0] = own.sums[r];
    store<T>(scratch.sums.state.sums + r * kLanes<T>, sum);
    for (int64_t first = 0; first < value_columns; first += kPanel) {
      const int64_t at = first * rows + r * kPanel;
      copy_row(own.out + at, scratch.sums.out + at);
    }
  }
}

// Computes the features of a block of queries in the scratch.
template <typename T>
QueryFeatures<T> make_queries(const AttentionParams& params, const AttentionLayout<T>& layout,
                              const QueryBlock& block, const T* packed,
                              const ForwardScratch<T>& scratch) {
  const int64_t rows = block.rows;
  prepare_queries(params, layout, block, packed, scratch.tokens, scratch.phi, rows,
                  scratch.poisoned);
  narrow_query_features(layout, rows, scratch.phi, rows, scratch.steps, scratch.narrow_phi);
  return {scratch.phi, scratch.narrow_phi, scratch.steps, rows};
}

// Computes a block of queries of head `head` of the unit.
template <typename T>
void forward_block(const AttentionParams& params, const AttentionLayout<T>& layout,
                   const QueryBlock& block, int64_t head, const T* packed,
                   const ForwardUnit<T>& unit, ForwardScratch<T>& scratch) {
  const int64_t rows = block.rows;
  QueryFeatures<T> queries;
  if (unit.linear.is_taken && params.is_causal) {
    const EarlierChunks<T>& from = unit.earlier;
    const int64_t at = head * layout.feature_panels() * params.L + block.i0;
    queries = {from.phi + at * kPanel, nullptr, nullptr, params.L};
    __builtin_memcpy(scratch.poisoned, from.poisoned + head * params.L + block.i0, rows);
  } else {
    queries = make_queries(params, layout, block, packed, scratch);
  }
  scratch.sums.reset(layout, rows);

  int64_t held_blocks = 0;  // of keys, whose moments there are
  if (unit.linear.is_taken) {
    held_blocks = ceil_div(keys_before(params, chunk_of(params, block.i0)), kPanel);
  }
  add_pairs(params, layout, block, queries, unit.keys, held_blocks,
            visible_key_blocks(params, layout, block), scratch);
  if (held_blocks > 0) {
    add_moments_or_pairs(params, layout, block, head, queries, held_blocks, unit, scratch);
  }
  finish_rows(params, unit.keys.form, block, scratch);
}

// Computes the sums of one part of the keys for a block of queries in `scratch`.
template <typename T>
void forward_part(const AttentionParams& params, const AttentionLayout<T>& layout,
                  const QueryBlock& block, int64_t part, const T* packed,
                  const PreparedKeys<T>& keys, ForwardScratch<T>& scratch) {
  const QueryFeatures<T> queries = make_queries(params, layout, block, packed, scratch);
  const int64_t begin = part * kPartBlocks;
  scratch.sums.reset(layout, block.rows);
  add_pairs(params, layout, block, queries, keys, begin,
            min_of(begin + kPartBlocks, visible_key_blocks(params, layout, block)), scratch);
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
