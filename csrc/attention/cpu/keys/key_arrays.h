// Prepared keys in memory, and the scores of queries with them: in the compute type, or, with
// narrow scores, two numbers of 16 bits to a lane.
#pragma once

#include "attention/cpu/keys/unit.h"
#include "support/cpu/row_pairs.h"

namespace ikattn::IKATTN_ISA {
namespace {

// The features of some queries.
template <typename T>
struct QueryFeatures {
  const T* phi = nullptr;           // [feature panels][rows][64]
  const int32_t* narrow = nullptr;  // [score panels][rows][64]
  const float* steps = nullptr;     // [rows]
  int64_t rows = 0;                 // of a panel

  QueryFeatures from(int64_t row) const {
    const bool is_narrow = narrow != nullptr;
    return {phi + row * kPanel, is_narrow ? narrow + row * kPanel : nullptr,
            is_narrow ? steps + row : nullptr, rows};
  }
};

// The features of blocks of 64 keys, by column: the right operand of the scores.
template <typename T>
struct KeyFeatures {
  T* phi = nullptr;           // [blocks][feature panels][64][64]; or
  int32_t* narrow = nullptr;  // [blocks][score panels][64][64]
  float* steps = nullptr;     // [blocks][64]

  void take(Workspace& workspace, const AttentionLayout<T>& layout, int64_t blocks) {
    const int64_t size = blocks * kPanel * kPanel;
    if (layout.narrow_scores) {
      narrow = workspace.take<int32_t>(layout.scores().panels() * size);
      steps = workspace.take<float>(blocks * kPanel);
    } else {
      phi = workspace.take<T>(layout.feature_panels() * size);
    }
  }

  // Computes s [rows][64] = phi_q . phi_k with the first `columns` keys of one block.
  void multiply(const AttentionLayout<T>& layout, int64_t block, int64_t rows,
                const QueryFeatures<T>& queries, int64_t columns, T* s) const {
    if constexpr (kTakes16Bits<T>) {
      const int64_t panels = layout.narrow_scores ? layout.scores().panels() : 0;
      for (int64_t panel = 0; panel < panels; panel += kScoreParts) {
        multiply_scores(rows, columns, layout.scores().lanes(panel),
                        queries.narrow + panel * queries.rows * kPanel, queries.rows,
                        narrow + (block * panels + panel) * kPanel * kPanel, s, panel > 0,
                        {queries.steps, steps + block * kPanel});
      }
      if (panels > 0) return;
    }
    const int64_t panels = layout.feature_panels();
    for (int64_t panel = 0; panel < panels; ++panel) {
      panel_gemm<T, Left::kRows>(rows, columns, layout.feature.columns(panel),
                                 queries.phi + panel * queries.rows * kPanel,
                                 phi + (block * panels + panel) * kPanel * kPanel, s, panel > 0);
    }
  }

  // Stores one block, from `rows` rows of source [feature panels][source_rows][64]; lanes [64][64]
  // is scratch.
  void fill(const AttentionLayout<T>& layout, int64_t block, int64_t rows, const T* source,
            int64_t source_rows, int32_t* lanes) const {
    if constexpr (kTakes16Bits<T>) {
      if (layout.narrow_scores) {
        const ScoreLayout of_scores = layout.scores();
        float* own_steps = steps + block * kPanel;
        choose_steps(layout.feature, rows, source, source_rows, own_steps);
        for (int64_t panel = 0; panel < of_scores.panels(); ++panel) {
          narrow_features(layout.feature, panel, rows, source, source_rows, own_steps, lanes);
          transpose_panel(rows, of_scores.lanes(panel), lanes,
                          narrow + (block * of_scores.panels() + panel) * kPanel * kPanel);
        }
        return;
      }
    }
    for (int64_t panel = 0; panel < layout.feature_panels(); ++panel) {
      transpose_panel(rows, layout.feature.columns(panel), source + panel * source_rows * kPanel,
                      phi + (block * layout.feature_panels() + panel) * kPanel * kPanel);
    }
  }
};

// The prepared keys of one unit. Padded, hidden and poisoned keys have zero features and a zero
// value row; a poisoned key has a NaN weight term, so that exactly the rows that see it become NaN.
template <typename T>
struct PreparedKeys {
  KeyForm form;
  T* logits = nullptr;           // [padded_keys]       g_j - reference
  T* weight_terms = nullptr;     // [padded_keys]       folded: eps e_j
  T* feature_scales = nullptr;   // [padded_keys]       folded: sqrt(e_j); 0 where phi is zero
  uint8_t* is_hidden = nullptr;  // [key_blocks]       of all its keys: the block counts for nothing
  // Used by the forward:
  KeyFeatures<T> by_column;          // of all blocks
  T* values = nullptr;               // [value panels][padded_keys][64]; or
  int32_t* narrow_values = nullptr;  // [value panels][padded_keys / 2][64], keys by two in a lane
  // Used by the backward:
  T* features = nullptr;  // [feature panels][padded_keys][64]
  Tangents<T> tangents;   // [feature panels][padded_keys][32]

  // Returns the values of the keys from j0 on, two keys to a vector, in columns that values do not
  // fill.
  T* row_pairs(int64_t j0) const { return values + j0 * kPanel + kLanes<T>; }
  // Tells whether all blocks of the keys [first, first + count) are hidden.
  bool are_hidden(int64_t first, int64_t count) const {
    for (int64_t block = first / kPanel; block * kPanel < first + count; ++block) {
      if (!is_hidden[block]) return false;
    }
    return true;
  }
  void take(Workspace& workspace, const AttentionLayout<T>& layout, bool backward) {
    const int64_t keys = layout.padded_keys;
    logits = workspace.take<T>(keys);
    weight_terms = workspace.take<T>(keys);
    feature_scales = workspace.take<T>(keys);
    is_hidden = workspace.take<uint8_t>(layout.key_blocks);
    if (backward) {
      features = workspace.take<T>(layout.feature_panels() * keys * kPanel);
      tangents = {workspace.take<T>(Tangents<T>::size(layout.feature, keys)), keys};
      return;
    }
    by_column.take(workspace, layout, layout.key_blocks);
    const int64_t value_size = layout.value_panels() * keys * kPanel;
    if (layout.weight_parts > 0) {
      narrow_values = workspace.take<int32_t>(value_size / 2);
    } else {
      values = workspace.take<T>(value_size);
    }
  }
};

// The scratch of one block of 64 keys.
template <typename T>
struct KeyScratch {
  T* tokens = nullptr;       // [token panels][64][64]
  T* features = nullptr;     // [feature panels][64][64]   forward only
  T* values = nullptr;       // [value panels][64][64]
  int32_t* lanes = nullptr;  // [64][64]   two numbers each

  void take(Workspace& workspace, const AttentionLayout<T>& layout, bool backward = false) {
    if (layout.narrow_scores) lanes = workspace.take<int32_t>(kPanel * kPanel);
    tokens = workspace.take<T>(layout.feature.token_panels() * kPanel * kPanel);
    if (!backward) features = workspace.take<T>(layout.feature_panels() * kPanel * kPanel);
    values = workspace.take<T>(layout.value_panels() * kPanel * kPanel);
  }
};

}  // namespace
}  // namespace ikattn::IKATTN_ISA
