// How far equal numbers give equal bits, as the process has it.
//
//   "run"    in every run, and on the CPU for every number of threads
//   "batch"  and a row's whatever else is in its batch: batch-invariant calls, whose kernels, forms
//            and orders of sums follow from nothing but types, M and d_v
#pragma once

namespace ikattn {

// Set by IKATTN_DETERMINISTIC, and by the operator set_deterministic.
bool is_batch_invariant();

// Why a call does not take faster kernels.
inline constexpr const char* kBatchInvariantReason =
    "deterministic = \"batch\" keeps a row's bits from depending on its batch";

}  // namespace ikattn
