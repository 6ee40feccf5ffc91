// The table of kernels of one instruction set, which glue.cpp calls.
#pragma once

#include "edge_attention/params.h"
#include "support/executor.h"

namespace ikattn {

template <typename T>
struct EdgeAttentionKernelsOf {
  void (*forward)(const EdgeForwardParams<T>&, const Executor&);
  void (*query_gradients)(const EdgeQueryGradientParams<T>&, const Executor&);
  void (*key_gradients)(const EdgeKeyGradientParams<T>&, const Executor&);
};

struct EdgeAttentionKernels {
  EdgeAttentionKernelsOf<float> of_float;
  EdgeAttentionKernelsOf<double> of_double;
};

IKATTN_DECLARE_KERNELS(EdgeAttentionKernels, edge_attention_kernels)

}  // namespace ikattn
