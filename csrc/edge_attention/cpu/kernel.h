// The table through which glue.cpp reaches the kernels of one instruction set.
#pragma once

#include "edge_attention/params.h"
#include "support/executor.h"

namespace ikattn {

struct EdgeAttentionKernels {
  void (*forward_float)(const EdgeForwardParams<float>&, const Executor&);
  void (*forward_double)(const EdgeForwardParams<double>&, const Executor&);
  void (*backward_float)(const EdgeBackwardParams<float>&, const Executor&);
  void (*backward_double)(const EdgeBackwardParams<double>&, const Executor&);
};

// Those of instruction sets that were not built (cmake/ikattnKernel.cmake) are defined nowhere.
namespace baseline {
extern const EdgeAttentionKernels edge_attention_kernels;
}
namespace avx2 {
extern const EdgeAttentionKernels edge_attention_kernels;
}
namespace avx512 {
extern const EdgeAttentionKernels edge_attention_kernels;
}

}  // namespace ikattn
