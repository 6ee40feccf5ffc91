// Families of kernels that calls on the current GPU take.
#pragma once

#include <string>

#include "support/exported.h"
#include "support/proven.h"

namespace ikattn::cuda {

// Returns what IKATTN_KERNELS says; else whether the ledger has proven the family, or this machine
// has.
IKATTN_EXPORTED bool is_on(Family family);

// Returns the day on which this machine proved a family, by `python -m ikattn selftest --enable`;
// "": it has not.
IKATTN_EXPORTED std::string proven_here(Family family);

// Reads the file of this machine's proofs again when it is asked for next.
IKATTN_EXPORTED void forget_proofs();

// Returns "H200 at c2071f5" or "this machine, on 2026-11-28"; "": nobody has proven it.
IKATTN_EXPORTED std::string proven_by(Family family);

// Names the library's build, the GPU and its driver, for which a proof of this machine holds.
IKATTN_EXPORTED std::string machine_key();

}  // namespace ikattn::cuda
