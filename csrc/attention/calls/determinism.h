// The setting of the process for how far equal numbers give equal bits.
//
//   "run"    in every run, and on the CPU for every number of threads
//   "batch"  and a row's whatever else is in its batch: batch-invariant calls, whose kernels, forms
//            and orders of sums follow from nothing but types, M and d_v
#pragma once

namespace ikattn {

// Returns whether calls are batch-invariant, which IKATTN_DETERMINISTIC and the operator
// set_deterministic set.
bool is_batch_invariant();

// The reason of calls that do not take faster kernels.
inline constexpr const char* kBatchInvariantReason =
    "deterministic = \"batch\" keeps a row's bits from depending on its batch";

}  // namespace ikattn
