// A kernel that does nothing: whether a GPU runs it, it runs the others, which are compiled for the
// same architectures.
#include "support/cuda/probe.h"

namespace ikattn::cuda {
namespace {

__global__ void probe_kernel() {}

}  // namespace

const char* why_no_kernels() { return why_not_here(probe_kernel); }

}  // namespace ikattn::cuda
