// Masks and dropout of one tile [rows][64] of the weight matrix.
#pragma once

#include "attention/calls/offsets.h"
#include "attention/calls/params.h"
#include "support/cpu/elements.h"
#include "support/cpu/schedule.h"
#include "support/philox.h"

namespace ikattn::IKATTN_ISA {
namespace {

enum class Visibility { kAll, kNone, kMixed };

// The position of a tile: query head (b, h), first row i0 and first column j0.
struct TilePosition {
  int64_t b, h, i0, rows, j0;
};

// Rows of a tile that are computed together, over as many columns as the last of them sees.
struct Band {
  int64_t row, rows, columns;
  bool crosses_diagonal;
};

// Calls function(band) for a whole tile or, where the diagonal crosses it, for the rows that see
// anything: nearly half of such a tile is left out.
template <typename Function>
inline void for_each_band(const AttentionParams& params, const TilePosition& at, int64_t columns,
                          const Function& function) {
  const int64_t above = at.j0 - at.i0;  // rows that do not see the first key
  int64_t row = params.is_causal ? max_of(0, above) : 0;
  while (row < at.rows) {
    const bool crosses = params.is_causal && row - above < columns - 1;
    const int64_t rows = crosses ? min_of(kBandRows, at.rows - row) : at.rows - row;
    function(
        Band{row, rows, crosses ? min_of(columns, row + kBandRows - above) : columns, crosses});
    row += rows;
  }
}

// Calls function(column, columns, row) for bands of keys, where row is the first that sees any of
// them.
template <typename Function>
inline void for_each_key_band(const AttentionParams& params, const TilePosition& at,
                              int64_t columns, const Function& function) {
  const int64_t above = at.j0 - at.i0;
  if (!params.is_causal || above + columns <= 1) return function(0, columns, 0);
  for (int64_t column = 0; column < columns; column += kBandRows) {
    function(column, min_of(kBandRows, columns - column), max_of(0, above + column));
  }
}

// Loads one row of the mask as additive terms: 0 or the float mask's value where visible, -inf
// where hidden.
template <typename T>
inline void load_mask_row(const Array& mask, int64_t offset, int64_t count, T* bias) {
  if (mask.type != ElementType::kBool) {
    load_row(mask, offset, mask.stride[3], count, bias);
    for (int64_t c = 0; c < count; ++c) bias[c] = bounded_offset(bias[c]);
    return;
  }
  const uint8_t* visible = static_cast<const uint8_t*>(mask.data) + offset;
  for (int64_t c = 0; c < count; ++c) {
    bias[c] = visible[c * mask.stride[3]] ? T(0) : -infinity<T>();
  }
}

// Fills bias [rows][64] of a tile that the diagonal crosses, for the rows of its bands that do.
template <typename T>
inline void fill_causal_bias(const TilePosition& at, T* bias) {
  const int64_t above = at.j0 - at.i0;
  for (int64_t r = max_of(0, above); r < min_of(at.rows, above + kPanel); ++r) {
    for (int64_t c = 0; c < kPanel; ++c) {
      bias[r * kPanel + c] = c <= r - above ? T(0) : -infinity<T>();
    }
  }
}

// Fills bias [rows][64] with the additive terms of a tile, causal part included; with a mask,
// columns past the last key are hidden, and keys whose logit is -inf, for the mask may be NaN
// there. Returns kAll, with bias untouched, where there is nothing to add.
template <typename T>
Visibility fill_bias(const AttentionParams& params, const TilePosition& at, const T* logits,
                     T* bias) {
  const int64_t columns = min_of(kPanel, params.S - at.j0);
  const bool crosses_diagonal = params.is_causal && at.j0 + columns - 1 > at.i0;
  if (params.is_causal && at.j0 >= at.i0 + at.rows) return Visibility::kNone;
  if (!params.mask) {
    if (!crosses_diagonal) return Visibility::kAll;
    fill_causal_bias(at, bias);
    return Visibility::kMixed;
  }
  const Array& mask = params.mask;
  bool any_visible = false, any_term = false;
  for (int64_t r = 0; r < at.rows; ++r) {
    T* row = bias + r * kPanel;
    if (r == 0 || mask.stride[2] != 0) {
      load_mask_row(mask,
                    at.b * mask.stride[0] + at.h * mask.stride[1] + (at.i0 + r) * mask.stride[2] +
                        at.j0 * mask.stride[3],
                    columns, row);
    } else {
      for (int64_t c = 0; c < columns; ++c) row[c] = bias[c];
    }
    for (int64_t c = columns; c < kPanel; ++c) row[c] = -infinity<T>();
  }
  for (int64_t r = 0; r < at.rows; ++r) {
    T* row = bias + r * kPanel;
    if (crosses_diagonal) {
      for (int64_t c = max_of(0, at.i0 + r - at.j0 + 1); c < columns; ++c) row[c] = -infinity<T>();
    }
    for (int64_t c = 0; c < columns && params.key_bias; ++c) {
      if (logits[c] == -infinity<T>()) row[c] = -infinity<T>();
    }
    for (int64_t c = 0; c < columns; ++c) {
      any_visible |= row[c] != -infinity<T>();
      any_term |= row[c] != 0;
    }
  }
  if (!any_visible) return Visibility::kNone;
  return any_term ? Visibility::kMixed : Visibility::kAll;
}

// Returns the factor of the weights that dropout does not drop.
template <typename T>
inline T kept_factor(const AttentionParams& params) {
  return static_cast<T>(dropout_rescale(params.dropout_threshold));
}

// Fills keep [rows][64] with 0 where a weight is dropped, otherwise with `kept`. i0 is a multiple
// of 16.
template <typename T>
void fill_keep(const AttentionParams& params, const TilePosition& at, T kept, T* keep) {
  const int64_t batch_head = at.b * params.H + at.h;
  for (int64_t r0 = 0; r0 < at.rows; r0 += 16) {
    for (int64_t c0 = 0; c0 < kPanel; c0 += 16) {
      for (int group = 0; group < 16; ++group) {
        const int a = group / 4, b = group % 4;
        const PhiloxBlock random = dropout_group(
            params.dropout, batch_head, (at.i0 + r0) / 16 * 4 + a, (at.j0 + c0) / 16 * 4 + b);
        for (int index = 0; index < 16; ++index) {
          const int64_t r = r0 + dropout_group_member(a, index / 4);
          const int64_t c = c0 + dropout_group_member(b, index % 4);
          const uint32_t byte = (random.word[index / 4] >> (8 * (index % 4))) & 0xff;
          if (r < at.rows) keep[r * kPanel + c] = byte < params.dropout_threshold ? T(0) : kept;
        }
      }
    }
  }
}

// Writes the mask of dropout for all pairs, keep [B, H, L, S]: 1, or 0 where a weight is dropped.
inline void dropout_keep_mask(const AttentionParams& params, uint8_t* keep,
                              const Executor& executor) {
  constexpr int64_t kRows = 16;
  const int64_t blocks = ceil_div(params.L, kRows);
  parallel(executor, params.B * params.H * blocks, [&](int64_t index, int) {
    const int64_t head = index / blocks, i0 = index % blocks * kRows;
    uint8_t tile[kRows * kPanel];
    for (int64_t j0 = 0; j0 < params.S; j0 += kPanel) {
      const int64_t rows = min_of(kRows, params.L - i0), columns = min_of(kPanel, params.S - j0);
      fill_keep<uint8_t>(params, {head / params.H, head % params.H, i0, rows, j0}, 1, tile);
      for (int64_t r = 0; r < rows; ++r) {
        __builtin_memcpy(keep + (head * params.L + i0 + r) * params.S + j0, tile + r * kPanel,
                         static_cast<size_t>(columns));
      }
    }
  });
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
