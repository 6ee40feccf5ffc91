// What the glue of every CPU kernel needs: tensors as arrays, torch's threads and memory, the
// choice of instruction set.
#pragma once

#include <ATen/ATen.h>

#include "support/array.h"
#include "support/executor.h"
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

// Where a table has one entry per arithmetic type: 0 float32, 1 float64.
inline int compute_index(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? 1 : 0;
}

// A view of `tensor` whose axes are those of `sizes`; broadcast axes get stride 0.
Array array_of(const at::Tensor& tensor, at::IntArrayRef sizes);
inline Array array_of(const at::Tensor& tensor) { return array_of(tensor, tensor.sizes()); }

// Runs on torch's threads, on one where `work` multiply-adds are too few to wake others. Its memory
// is a tensor: counted, and out of memory reported, as torch does.
class TorchExecutor : public Executor {
 public:
  explicit TorchExecutor(double work);

 private:
  at::Tensor memory_;
};

}  // namespace ikattn
