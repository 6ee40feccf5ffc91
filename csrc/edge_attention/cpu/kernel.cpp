// The kernels of one instruction set, which IKATTN_ISA names; compiled once for each. No torch
// header.
#include "edge_attention/cpu/kernel.h"

#include "edge_attention/cpu/backward.h"
#include "edge_attention/cpu/forward.h"

namespace ikattn::IKATTN_ISA {

extern const EdgeAttentionKernels edge_attention_kernels;
const EdgeAttentionKernels edge_attention_kernels = {
    {edge_forward<float>, edge_query_gradients<float>, edge_key_gradients<float>},
    {edge_forward<double>, edge_query_gradients<double>, edge_key_gradients<double>},
};

}  // namespace ikattn::IKATTN_ISA
