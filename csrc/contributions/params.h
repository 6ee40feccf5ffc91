// The parameters that the contribution kernels read: pointers, sizes, strides. No tensor, no torch
// header. The letters are those of include/ikattn/contributions.h.
#pragma once

#include "support/array.h"
#include "support/host_device.h"

namespace ikattn {

// The number of keys that are side by side in the packed factors.
constexpr int64_t kFactorBlock = 64;

// Returns the number of entries of an upper triangular H x H matrix.
IKATTN_HOST_DEVICE constexpr int64_t triangle(int64_t H) { return H * (H + 1) / 2; }

// The linear part of a normalisation layer: y -> (y - mean y) * weight, or y * weight.
struct NormLayer {
  const void* weight = nullptr;  // [D], compute type; nullptr: absent
  bool centered = true;
};

// The triangular factors of [f_1(x_j) .. f_H(x_j)] for every token j of every batch item:
// |R_j a| = |sum_h a_h f_h(x_j)|. Three variants: f itself, f through the first norm, f through
// both.
struct FactorParams {
  int64_t B = 0, H = 0, S = 0, D = 0;
  NormLayer norms[2];
  // [B, blocks, triangle(H), 64], compute type, zero beyond S; nullptr: variant not wanted
  void* factors[3] = {nullptr, nullptr, nullptr};
  void* value_norms = nullptr;  // [B, H, S], compute type; nullptr: not wanted
};

// The parameters of factors from values and projection, whose products are the vectors.
struct FactorsOfTokens : FactorParams {
  int64_t G = 0, d_v = 0;
  Array value{};       // [B, G, S, d_v]
  Array projection{};  // [D, H d_v]
  // [2, H d_v], float32: the mean of the rows that each norm takes off, of the projection and of
  // what the first norm makes of it; read in float32 where there are norms
  Array means{};
};

// The parameters of factors from the vectors of the tokens [j0, j0 + tokens).
struct FactorsOfVectors : FactorParams {
  int64_t j0 = 0, tokens = 0;
  const void* vectors = nullptr;  // [H, B, tokens, D], contiguous, compute type
};

// norms[v][b][i][j] = |R^v_j a_ij| for the rows [i0, i0 + rows) of L.
struct PairParams {
  int64_t B = 0, H = 0, rows = 0, S = 0;
  Array weights;        // [B, H, rows, S]
  Array query_padding;  // [B, rows], bool, true = padding
  Array key_padding;    // [B, S]
  int variants = 0;
  const void* factors[3] = {nullptr, nullptr, nullptr};
  // CUDA in float32: the factors again, as products of float16 read them
  const void* fragments[3] = {nullptr, nullptr, nullptr};
  Array norms[3];  // [B, rows, S], compute type
};

// The norms of pairs whose weights are softmax(scale q.k + key_bias + mask) over the keys.
// `weights` is absent, and `rows` is L.
struct StreamedPairParams : PairParams {
  int64_t G = 0, d = 0;  // heads and size of keys
  Array query;           // [B, H, L, d]
  Array key;             // [B, G, S, d]
  double scale = 1;
  bool is_causal = false;  // query i sees keys up to i
  Array mask;              // [B, H, L, S]: bool, true = visible, or what is added
  Array key_bias;          // [B, H, 1, S], compute type
  int64_t diagonal = 0;    // the own key of query i is i + diagonal
  void* own = nullptr;     // [B, H, L], weights of own keys, compute type; nullptr: not wanted
  // Sums over the values of all keys but the own one; absent: not wanted
  int64_t value_heads = 0, d_v = 0;
  Array value;   // [B, value_heads, S, d_v], 0 where they are not finite
  Array broken;  // [B, value_heads, S], whether one was not, in compute type; absent: none was
  Array others;  // [B, H, L, d_v], compute type
};

// The backward, in float64 whatever the type of the maps: where heads cancel, the direction of
// their sum has the relative error of its norm. With n = |R^v_j a_ij| and g its gradient, in
// `norms`, a pair whose n is not 0 gives
//   grad_weights_ij = sum_v g R^v_j^T R^v_j a_ij / n,  outer^v_j += g / n a_ij a_ij^T
struct PairGradientParams : PairParams {
  Array grad_weights;  // [B, H, rows, S], written
  // [B, blocks, triangle(H), 64], float64, added to; nullptr: not wanted
  double* outer[3] = {nullptr, nullptr, nullptr};
};

// distances[b][i][j] = |y_i - y_ij|, or its square in the Euclidean norm, of y_ij = sum_h a_ij^h
// F_h(x_j), and the residual of query i where j is i + diagonal. Contiguous, of the compute type.
struct DistanceParams {
  int64_t B = 0, H = 0, L = 0, S = 0, D = 0, diagonal = 0;
  bool is_squared = false;
  const void* weights = nullptr;   // [B, H, L, S]
  const void* heads = nullptr;     // [B, S, H, D]
  const void* output = nullptr;    // [B, L, D]
  const void* residual = nullptr;  // [B, L, D]
  void* distances = nullptr;       // [B, L, S]
};

// c = a b, or c += a b, of outer x inner matrices. Arrays [outer, inner, rows, columns].
struct ProductParams {
  struct Sizes {
    int64_t outer = 1, inner = 1, rows = 0, columns = 0, depth = 0;
  } sizes;
  Array a;  // [.., rows, depth]
  Array b;  // [.., depth, columns]
  Array c;  // [.., rows, columns]
  bool accumulate = false;
};

}  // namespace ikattn
