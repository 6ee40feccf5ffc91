// The streamed maps' kernels, from query and key to the norms of pairs: what they see of a call,
// and how they are queued. Weights [B, H, L, S] never exist.
#pragma once

#include "contributions/params.h"
#include "support/cuda/launch.h"
#include "support/exported.h"

namespace ikattn::cuda {

// Heads are taken by 16; a block holds the weights of all of them. Of those of norms, and of
// others.
constexpr int64_t kMostNormHeads = 64, kMostStreamedHeads = 32;
// Columns of an operand that a lane's vectors of 16 bytes cover.
constexpr int64_t kOperandColumns = 32;
// Keys whose visibility one word holds, and numbers beside a query's row of operands.
constexpr int64_t kMaskKeys = 32;
constexpr int64_t kRowNumbers = 4;
// Queries that a block of the gradients takes at a time.
constexpr int64_t kStripRows = 32;

// With x_ij = row_i[0] key_numbers_j[0] (query_i . key_j), the weight of a pair is
//   dot attention        exp(x_ij + key_numbers_j[1])               over its row's sum
//   implicit kernel      (x_ij^2 + eps) exp(key_numbers_j[1])       likewise
// and that of a hidden pair is zero. Offsets of pairs are added to key_numbers_j[1].
struct StreamedParams {
  int64_t B = 0, H = 0, G = 0, L = 0, S = 0;
  int64_t width = 0;  // columns of query and key, a multiple of kOperandColumns
  Array query,
      key;  // [B, H, L, width], [B, G, S, width], of 16 bits; rows at multiples of 16 bytes
  // [B, H, S, 4]: factor; logit (-inf: hidden), and what float32 leaves of it
  const float* key_numbers = nullptr;
  float* rows = nullptr;  // [B, H, L, 4]: factor; then what weights are relative to
  bool is_implicit = false;
  float eps = 0;
  bool is_causal = false;
  // [B, mask_heads, L, ceil(S / 32)], bit 1: visible; nullptr: all are
  const uint32_t* mask = nullptr;
  int64_t mask_heads = 1;  // H, or 1: every head has the same
  Array offsets;           // [B, H, L, S], of float masks, -inf hides; absent: none
  // Bound of finite offsets.
  float farthest_offset = INFINITY;

  // Fields of the pairs alone.
  bool is_split = false;  // weights and factors are split into two operands of Half, else one
  int variants = 0;
  const uint32_t* fragments[3] = {};  // made by factor_fragments()
  const float* units[3] = {};         // [B, S]
  Array norms[3];                     // [B, L, S], float32
  Array query_padding, key_padding;   // bool [B, L], [B, S]
  float* own = nullptr;               // [B, H, L], weights of query i for key i + diagonal
  int64_t diagonal = 0;
};

// A mask of bytes, as bits.
struct MaskParams {
  int64_t B = 0, L = 0, S = 0;
  Array mask;  // [B, L, S, heads]
  uint32_t* words = nullptr;
  int64_t heads = 1;
};

// The factors of every key as right operands of products, in Half, over the key's unit.
struct FragmentParams {
  int64_t B = 0, H = 0, S = 0;
  bool is_split = false;
  const float* factors = nullptr;  // see FactorParams
  uint32_t* fragments = nullptr;   // [B, S, 1 or 2, tiles, 32, 2]
  float* units = nullptr;          // [B, S]
  // Whether products are with the factor itself, rows by heads, in place of the transposed one.
  bool is_reversed = false;
};

// The way back through one variant of the norms, of the queries [i0, i0 + queries), whose rows
// row_sums has filled. Of StreamedParams `variants` is 1. With n = |R_j a_ij| and g its gradient,
//   grad_ij = g R_j^T R_j a_ij / n             outer_j += g / n a_ij a_ij^T
// and what comes in at pairs without a norm does not count. Then, with delta_i = sum_j a_ij
// grad_ij,
//   gradient of a pair's logit a_ij (grad_ij - delta_i), of its score x_ij the same, or that of
//   the magnitude, which is 2 x_ij / (x_ij^2 + eps) times as much
struct StreamedGradientParams : StreamedParams {
  int64_t i0 = 0, queries = 0;         // a multiple of kStripRows, but of the last ones
  int64_t keys = 0;                    // no query of these sees another key than the first ones
  Array grad_norms;                    // [B, queries, S], float32
  const uint32_t* reversed = nullptr;  // made by factor_fragments() with is_reversed
  bool is_first = true;                // grad is written, else added to
  float* grad = nullptr;               // [B, H, queries, keys], of weights, then of scores
  float* outer = nullptr;              // [B, S, 16 tiles, 16 tiles], added to
  float* grad_logits = nullptr;        // [B, H, ceil(queries / kStripRows), keys], sums
};

// Returns where a factor's element lies, of the matrix row by row.
IKATTN_HOST_DEVICE constexpr int factor_entry(int H, int row, int head) {
  return row * H - row * (row - 1) / 2 + head - row;
}
IKATTN_HOST_DEVICE constexpr int64_t head_tiles(int64_t H) { return (H + 15) / 16; }
// Tiles of 8 rows and 16 heads of an upper triangular matrix, but for those of zeros.
IKATTN_HOST_DEVICE constexpr int64_t fragment_tiles(int64_t head_tiles) {
  return head_tiles * (head_tiles + 1);
}
// Words of a key's fragments.
IKATTN_HOST_DEVICE constexpr int64_t fragment_words(int64_t H, bool is_split) {
  return (is_split ? 2 : 1) * fragment_tiles(head_tiles(H)) * 64;
}

// Sums over row sums that are there: sum_j a_ij values_j over all keys but a query's own and
// padding. A row with a weight for a key that is broken is NaN.
struct WeighedValueParams : StreamedParams {
  int64_t value_heads = 0, d_v = 0;
  Array values{};                 // [B, value_heads, S, d_v], float32, finite
  const float* broken = nullptr;  // [B, value_heads, S], not 0 where a key's value is not finite
  float* sums = nullptr;          // [B, H, L, d_v]; own is written, too
};

// Each queues its work and returns nullptr, or why it could not.
struct StreamedKernels {
  const char* (*mask_words)(const MaskParams&, Stream);
  const char* (*factor_fragments)(const FragmentParams&, Stream);
  const char* (*row_sums)(const StreamedParams&, Stream);  // fills rows
  const char* (*pair_norms)(const StreamedParams&, Stream);
  const char* (*weighed_values)(const WeighedValueParams&, Stream);
  const char* (*pair_gradients)(const StreamedGradientParams&, Stream);  // grad of weights; outer
  const char* (*score_gradients)(const StreamedGradientParams&,
                                 Stream);  // grad of scores, in place
};
extern IKATTN_EXPORTED const StreamedKernels streamed_kernels;

}  // namespace ikattn::cuda
