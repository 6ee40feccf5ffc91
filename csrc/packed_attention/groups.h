// The groups of sequences that one call of attention over a batch computes.
#pragma once

#include "packed_attention/arguments.h"

namespace ikattn {

struct Group {
  std::vector<int64_t> sequences;
  int64_t L = 0, S = 0;  // queries and keys of the longest
};

enum class Grouping {
  // Neighbours of equal lengths: nothing is copied, and nothing is computed twice.
  kRuns,
  // Sequences of similar lengths, wherever they are, the shorter ones padded: few calls, which
  // suits a GPU, of at most twice the pairs.
  kPadded,
};

// Returns the groups; every sequence is in one. In causal calls, sequences with as many keys as
// queries and other sequences only share a group with equal ones.
std::vector<Group> groups_of(const Boundaries& boundaries, Grouping grouping, bool is_causal);

// Compute the operators, by one call of dense attention a group.
PackedResults attend_groups(const PackedCall& call, const Boundaries& boundaries,
                            const std::vector<Group>& groups);
PackedGradients gradients_of_groups(const at::Tensor& grad_output, const PackedResults& results,
                                    const PackedCall& call, const Boundaries& boundaries,
                                    const std::vector<Group>& groups, PackedWanted wanted);

// Computes the operator in differentiable ATen, like attention/operator/reference.h.
PackedResults reference_packed_attention(const PackedCall& call);

}  // namespace ikattn
