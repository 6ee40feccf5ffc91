// Implicit-kernel attention from moments: all that queries need to know of any number of keys.
//
// The weight of key j for query i is ((phi(q_i) . phi(k_j) / 2F)^2 + eps) exp(logit_j), so that its
// numerator and denominator are linear in sums over keys of products of two features. They have one
// size for one key and for a million; those of two sets of keys add.
//
//   B batch, H query heads, G value heads, K heads of the moments (G divides K, K divides H),
//   L queries, S keys, d_v head size of value, F = 2 M features, E = F (F + 1) / 2 + 1 entries
//
//   moments[e] = sum_j psi_e(k_j) exp(logit_j - reference) [v_j, 1]
//   psi_{r F + b} = phi_b phi_{(b + r) mod F},  r = 0 .. M, of r = M only b < M;  psi_{E - 1} = 1
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "ikattn/version.h"

namespace ikattn {

struct KeyMoments {
  at::Tensor moments;    // [B, K, E, d_v + 1], float64 for float64 features, otherwise float32
  at::Tensor reference;  // [B, K], float64: the largest finite logit, -inf where there is no key
};

// Moments of keys.
//   key_features [B, K, S, F] of spectral_features   logits [B, K, S], -inf hides a key
//   value [B, G, S, d_v]; all of any floating type
// Gradients reach the first three; the reference counts as a constant. Throws c10::Error on wrong
// arguments.
KeyMoments key_moments(const at::Tensor& key_features, const at::Tensor& logits,
                       const at::Tensor& value);

// Adds more keys to `keys`, whose tensors are overwritten. No gradients.
void add_key_moments(const KeyMoments& keys, const at::Tensor& key_features,
                     const at::Tensor& logits, const at::Tensor& value);

// Attention of queries to the keys that moments are of: output [B, H, L, d_v] in the type of
// query_features [B, H, L, F], and log Z [B, H, L] in float64, which has no gradient. A query
// without keys gets zeros, and log Z = -inf. eps: added to the squared similarity; positive.
//
// A sum over entries keeps what |phi(q)|^2 sum |phi(k)|^2 leaves of the last bits: a query whose
// scores are all near zero errs by up to some 6e-8 / eps of its output in float32.
std::tuple<at::Tensor, at::Tensor> attention_from_moments(const at::Tensor& query_features,
                                                          const KeyMoments& keys,
                                                          double eps = 1e-5);

// Causal attention of tokens that come after the keys of `keys`: a query sees those and the tokens
// up to its own. Arguments as above, with L keys; output and log Z as of attention_from_moments,
// and the moments of all keys, the tokens' own included. Differentiable, in keys.moments too.
//   query_features [B, H, L, F]   key_features [B, K, L, F]   logits [B, K, L]   value [B, G, L,
//   d_v]
std::tuple<at::Tensor, at::Tensor, KeyMoments> causal_attention_from_moments(
    const at::Tensor& query_features, const at::Tensor& key_features, const at::Tensor& logits,
    const at::Tensor& value, const KeyMoments& keys, double eps = 1e-5);

// Moments of the keys of both, relative to the larger reference. Differentiable.
KeyMoments merge_moments(const KeyMoments& keys, const KeyMoments& others);

}  // namespace ikattn
