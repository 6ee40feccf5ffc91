// The parameters that the kernels of moments read: pointers, sizes, strides. No torch header. The
// letters are those of include/ikattn/moments.h.
#pragma once

#include "support/array.h"

namespace ikattn {

// Moments of keys, and their backward, where `moments` holds the incoming gradient. An absent
// gradient is not computed.
struct KeyMomentsParams {
  int64_t B = 0, K = 0, G = 0, S = 0, M = 0, d_v = 0;  // G divides K
  Array features{};                                    // [B, K, S, F]
  Array logits{};                                      // [B, K, S]   -inf: hidden
  Array value{};                                       // [B, G, S, d_v]
  Array moments{};                                     // [B, K, E, d_v + 1]
  Array reference{};                                   // [B, K], float64
  bool grows = false;                                  // both hold those of keys before
  Array grad_features{};                               // [B, K, S, F]
  Array grad_logits{};                                 // [B, K, S]
  Array grad_value{};                                  // [B, K, S, d_v]
};

// Attention from moments, and its backward, where output and log_normalizer are those of all keys
// that the queries see. An absent gradient is not computed.
struct FromMomentsParams {
  int64_t B = 0, H = 0, K = 0, L = 0, M = 0, d_v = 0;  // K divides H
  double eps = 1e-5;
  Array features{};        // [B, H, L, F]
  Array moments{};         // [B, K, E, d_v + 1]
  Array reference{};       // [B, K], float64
  Array output{};          // [B, H, L, d_v]
  Array log_normalizer{};  // [B, H, L], float64
  Array grad_output{};     // [B, H, L, d_v]
  Array grad_features{};   // [B, H, L, F]
  Array grad_moments{};    // [B, K, E, d_v + 1]
};

// Causal attention of tokens to themselves and to the keys before, whose moments `queries` has.
// `keys` has the keys of the tokens, and the moments of all keys; in the backward the gradient of
// these, which may be absent.
struct CausalParams {
  FromMomentsParams queries{};
  KeyMomentsParams keys{};
};

}  // namespace ikattn
