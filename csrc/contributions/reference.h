// The same mathematics in differentiable ATen, in float64: the oracle of the tests, the
// own pairs' backward, double backward, torch.func, forward-mode duals. Time and memory O(B H L S).
#pragma once

#include "contributions/arguments.h"
#include "contributions/arithmetic.h"
#include "support/exact_arithmetic.h"

namespace ikattn {

// What the maps need of the keys, once for all queries.
struct ReferenceKeys {
  at::Tensor value;                 // [B, G, S, d_v], zero where padding
  at::Tensor projection;            // [D, H d_v]
  std::array<at::Tensor, 3> grams;  // [B, S, H, H]: of f as it is, through the first norm, both
  at::Tensor value_norms;           // [B, H, S]
};
// weights: those of the call, 0 where hidden.
ReferenceKeys reference_keys(const ContributionCall& call, const at::Tensor& weights);

// The call for the queries [i0, i0 + rows) alone.
ContributionCall rows_of(const ContributionCall& call, int64_t i0, int64_t rows);

// The weights of a call, [B, H, L, S]: the given ones, or from query and key.
at::Tensor weights_of(const ContributionCall& call,
                      const Arithmetic& arithmetic = kTorchArithmetic);

// What is added to the logits of weights from query and key, each broadcast to [B, H, rows, S];
// -inf hides.
std::vector<at::Tensor> logit_terms(const WeightsSource& source, const at::Tensor& mask,
                                    at::ScalarType type);

// [B, rows] true on the rows whose own pair counts for nothing; undefined: none.
at::Tensor own_padding(const Block& block, int64_t rows);

// Values to be weighed: what a key without weight holds does not count, NaN neither; what weighs a
// broken one is NaN.
struct Summands {
  at::Tensor value;   // [.., S, d_v], zero where it is no number
  at::Tensor broken;  // [.., S, 1], 1 where the key's vector holds such a one; undefined: nowhere
};

Summands summands_of(const at::Tensor& value);
// Those of the keys [first, first + count), [B, G, count, *], to every head that shares them.
Summands part_of(const Summands& summands, int64_t first, int64_t count, int64_t heads);
// weights [B, H, S] -> [B, H, S, d_v]
at::Tensor weighed(const at::Tensor& weights, const Summands& summands);
// weights [.., rows, S] -> [.., rows, d_v]
at::Tensor sum_of_weighed(const at::Tensor& weights, const Summands& summands,
                          const Arithmetic& arithmetic);

// [B, H, rows, d_v] -> [B, rows, D]
at::Tensor project(const at::Tensor& heads, const at::Tensor& projection,
                   const Arithmetic& arithmetic);

// What each norm divides the rows by, [B, rows], 1 where a query is padding.
std::array<at::Tensor, 2> norm_scales(const Block& block, at::ScalarType type);
// What the pairs of each variant of the factors are divided by, [B, rows]; undefined: nothing.
std::array<at::Tensor, 3> pair_scales(const Block& block, at::ScalarType type);

// The own pairs [B, rows] of the maps from with_residual on, and mixing_ratios, of which the keys'
// value and projection are read.
//   own_weights [B, H, rows], of each query for itself
//   weights [B, H, rows, S], read for mixing_ratios only
MapTensors reference_own_pairs(const at::Tensor& own_weights, const at::Tensor& weights,
                               const ReferenceKeys& keys, const Block& block,
                               const Arithmetic& arithmetic = kTorchArithmetic);

// All maps, in the arithmetic type of the call.
MapTensors reference_maps(const ContributionCall& call);
// The same of arguments that are looked at first.
MapTensors checked_reference_maps(const ContributionCall& call);

// The arithmetic type of a call: float64 if an input is, otherwise float32.
at::ScalarType arithmetic_type(const ContributionCall& call);

// Queries to take at a time where their weights must be held.
int64_t rows_at_a_time(const ContributionSizes& sizes, const at::Device& device);

}  // namespace ikattn
