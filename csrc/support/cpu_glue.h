// What the glue of every CPU kernel needs: tensors as arrays, torch's threads and memory, the
// choice of instruction set.
#pragma once

#include <ATen/ATen.h>

#include "support/executor.h"
#include "support/glue.h"
#include "support/instruction_set.h"

// The table `name` of the instruction set in use; each is declared in its own namespace.
#if defined(IKATTN_HAVE_X86_ISAS)
#define IKATTN_KERNELS(name)                                   \
  (instruction_set() == InstructionSet::kAvx512 ? avx512::name \
   : instruction_set() == InstructionSet::kAvx2 ? avx2::name   \
                                                : baseline::name)
#else
#define IKATTN_KERNELS(name) baseline::name
#endif

namespace ikattn {

// Runs on torch's threads, on one where `work` multiply-adds are too few to wake others. Its memory
// is torch's: counted, and out of memory reported, as that of a tensor.
class TorchExecutor : public Executor {
 public:
  TorchExecutor(const char* function, double work);

 private:
  const char* function_;  // whose memory it is
  c10::DataPtr memory_;
};

}  // namespace ikattn
