// The choice of calls that take time linear in their length.
//
// A score is a sum over F = 2M features, so its square is one over products of two of them, and
//   sum_j s_ij^2 v_j = sum_e c_e psi_e(q_i) (sum_j psi_e(k_j) v_j),   e = 1 .. E = F (F/2 + 1).
// The sums in brackets are made once for all queries, and each query reads them once: (L + S) E
// numbers are multiplied with a row of values where pairs would be L S scores of F. In a causal
// call they grow from chunk to chunk. The result is exact, but not for every query
// (cpu/linear/linear_time.h). Dropout and masks concern pairs, so that calls with them cannot take
// linear time; key masks can (key_offsets.h). The costs here are measured on the CPU; cuda/route.cu
// has those of a GPU.
#pragma once

#include "attention/calls/params.h"

namespace ikattn {

constexpr int64_t kCausalChunk = 128;  // tokens; their pairs among themselves are computed as pairs

struct LinearTimeCost {
  double quadratic, linear;  // in multiply-adds

  // Measured costs in multiply-adds. kEntry is the cost of an entry e beside its products with
  // values: forming it, and in the backward the way from its gradient to features. kToken is the
  // cost of a token beside its entries.
  static constexpr double kEntry[] = {12, 30}, kToken[] = {1700, 4500};  // forward, backward

  LinearTimeCost(const AttentionParams& params, bool backward) {
    const double F = 2.0 * static_cast<double>(params.M), entries = F * (F / 2 + 1);
    // Pairs multiply whole vectors of a narrow row, or half ones with the weights: lanes of
    // AVX-512, where it was measured. Linear time fills its vectors with entries and tokens.
    const double features = F < 16 ? 16.0 : F, d_v = static_cast<double>(params.d_v);
    const double values = d_v <= 8 ? 8.0 : d_v < 16 ? 16.0 : d_v;
    const double L = static_cast<double>(params.L), S = static_cast<double>(params.S);
    const double seen = params.is_causal && L < S ? L : S;  // keys
    // Query heads that share a key head share its sums.
    const int64_t heads = params.key_heads > 0 ? params.H / params.key_heads : 1;
    const double queries = static_cast<double>(heads) * L;
    const double pair = backward ? 3 * features + 2 * values : features + values;
    const double token =
        entries * ((backward ? 2.5 * d_v : d_v) + kEntry[backward]) + kToken[backward];
    quadratic = pair * (params.is_causal ? queries * (seen - seen * seen / L / 2) : queries * S);
    linear = (queries + seen) * token;
    if (params.is_causal) {
      linear += pair * static_cast<double>(heads) * seen * kCausalChunk / 2;
    }
  }
};

// Returns nullptr, or why a call cannot take linear time.
inline const char* why_no_linear_time(const AttentionParams& params) {
  if (params.mask) return "linear time takes no attn_mask that differs between queries";
  if (params.dropout_threshold != 0) return "linear time takes no dropout";
  return params.grad_weights ? "weights are about pairs" : nullptr;
}

// Tells whether a call is faster in linear time, or is asked to take it wherever it can.
// rate_of_pairs is the speed of products over pairs relative to those that replace them.
inline bool wants_linear_time(const AttentionParams& params, bool backward,
                              double rate_of_pairs = 1) {
  if (params.d_v == 0) return false;
  // Padding may change the length, which therefore must not decide.
  if (params.batch_invariant) return params.linear_time == LinearTime::kAlways;
  const bool has_few = params.L < 8 || params.S < 8;  // their sums are small differences
  const bool is_one_chunk = params.is_causal && params.L <= kCausalChunk;
  if (has_few || is_one_chunk) return false;
  if (params.linear_time != LinearTime::kAuto) return params.linear_time == LinearTime::kAlways;
  const LinearTimeCost cost(params, backward);
  return cost.linear * rate_of_pairs < cost.quadratic;
}

inline bool takes_linear_time(const AttentionParams& params, bool backward,
                              double rate_of_pairs = 1) {
  return why_no_linear_time(params) == nullptr &&
         wants_linear_time(params, backward, rate_of_pairs);
}

}  // namespace ikattn
