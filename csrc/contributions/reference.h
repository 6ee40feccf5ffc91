// The maps in differentiable ATen and float64: the oracle of the tests, the backward of own pairs,
// double backward, torch.func, forward-mode duals. Time and memory are O(B H L S).
#pragma once

#include "contributions/arguments.h"
#include "contributions/arithmetic.h"
#include "support/exact_arithmetic.h"

namespace ikattn {

// The inputs of the maps from the keys, once for all queries.
struct ReferenceKeys {
  at::Tensor value;                 // [B, G, S, d_v], zero where padding
  at::Tensor projection;            // [D, H d_v]
  std::array<at::Tensor, 3> grams;  // [B, S, H, H]: of f as it is, through the first norm, both
  at::Tensor value_norms;           // [B, H, S]
};
// Prepares the keys of a call; weights are 0 where hidden.
ReferenceKeys reference_keys(const ContributionCall& call, const at::Tensor& weights);

// Returns the call for the queries [i0, i0 + rows) alone.
ContributionCall rows_of(const ContributionCall& call, int64_t i0, int64_t rows);

// Returns the weights of a call, [B, H, L, S]: the given ones, or from query and key.
at::Tensor weights_of(const ContributionCall& call,
                      const Arithmetic& arithmetic = kTorchArithmetic);

// Returns the terms of the logits of weights from query and key, each broadcast to [B, H, rows, S];
// -inf hides.
std::vector<at::Tensor> logit_terms(const WeightsSource& source, const at::Tensor& mask,
                                    at::ScalarType type);

// Returns [B, rows], true on the rows whose own pair does not count; undefined: none.
at::Tensor own_padding(const Block& block, int64_t rows);

// Values in a weighted sum. A key without weight does not count, even if it holds NaN; a sum with
// weight for such a key is NaN.
struct Summands {
  at::Tensor value;   // [.., S, d_v], zero where it is no number
  at::Tensor broken;  // [.., S, 1], 1 where the key's vector holds such a one; undefined: nowhere
};

Summands summands_of(const at::Tensor& value);
// Returns the summands of the keys [first, first + count), [B, G, count, *], for every head that
// shares them.
Summands part_of(const Summands& summands, int64_t first, int64_t count, int64_t heads);
// Multiplies weights [B, H, S] by the values: [B, H, S, d_v].
at::Tensor weighed(const at::Tensor& weights, const Summands& summands);
// Sums the values by weights [.., rows, S]: [.., rows, d_v].
at::Tensor sum_of_weighed(const at::Tensor& weights, const Summands& summands,
                          const Arithmetic& arithmetic);

// Projects [B, H, rows, d_v] to [B, rows, D].
at::Tensor project(const at::Tensor& heads, const at::Tensor& projection,
                   const Arithmetic& arithmetic);

// Returns the divisors of the rows for each norm, [B, rows], 1 where a query is padding.
std::array<at::Tensor, 2> norm_scales(const Block& block, at::ScalarType type);
// Returns the divisors of the pairs for each variant of the factors, [B, rows]; undefined: none.
std::array<at::Tensor, 3> pair_scales(const Block& block, at::ScalarType type);

// Returns the own pairs [B, rows] of the maps from with_residual on, and mixing_ratios, from the
// keys' value and projection.
//   own_weights [B, H, rows], of each query for itself
//   weights [B, H, rows, S], read for mixing_ratios only
MapTensors reference_own_pairs(const at::Tensor& own_weights, const at::Tensor& weights,
                               const ReferenceKeys& keys, const Block& block,
                               const Arithmetic& arithmetic = kTorchArithmetic);

// Returns all maps, in the arithmetic type of the call.
MapTensors reference_maps(const ContributionCall& call);
// Checks the arguments, and returns all maps.
MapTensors checked_reference_maps(const ContributionCall& call);

// Returns the arithmetic type of a call: float64 if an input is, otherwise float32.
at::ScalarType arithmetic_type(const ContributionCall& call);

// Returns the number of queries at a time where their weights must be in memory.
int64_t rows_at_a_time(const ContributionSizes& sizes, const at::Device& device);

}  // namespace ikattn
