// The glue of every CPU kernel: tensors as arrays, torch's threads and memory, the choice of
// instruction set.
#pragma once

#include <ATen/ATen.h>

#include "support/executor.h"
#include "support/glue.h"
#include "support/instruction_set.h"

// The address of a table of kernels, or null where its instruction set was not built, which
// instruction_set() never returns.
#if IKATTN_HAVE_BASELINE
#define IKATTN_IN_BASELINE(name) &baseline::name
#else
#define IKATTN_IN_BASELINE(name) nullptr
#endif
#if IKATTN_HAVE_AVX2
#define IKATTN_IN_AVX2(name) &avx2::name
#else
#define IKATTN_IN_AVX2(name) nullptr
#endif
#if IKATTN_HAVE_AVX512
#define IKATTN_IN_AVX512(name) &avx512::name
#else
#define IKATTN_IN_AVX512(name) nullptr
#endif

// The table `name` of the instruction set in use; each is declared in its own namespace.
#define IKATTN_KERNELS(name)                                               \
  (*(instruction_set() == InstructionSet::kAvx512 ? IKATTN_IN_AVX512(name) \
     : instruction_set() == InstructionSet::kAvx2 ? IKATTN_IN_AVX2(name)   \
                                                  : IKATTN_IN_BASELINE(name)))

namespace ikattn {

// An executor on torch's threads, on one where `work` multiply-adds are too few to wake others. Its
// memory is torch's, counted and reported like that of a tensor.
class TorchExecutor : public Executor {
 public:
  TorchExecutor(const char* function, double work);

 private:
  const char* function_;  // whose memory it is
  c10::DataPtr memory_;
};

}  // namespace ikattn
