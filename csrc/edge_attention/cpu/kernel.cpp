// Compiled once per instruction set, with IKATTN_ISA naming it. Includes no torch header.
#include "edge_attention/cpu/kernel.h"

#include "edge_attention/cpu/edges.h"

namespace ikattn::IKATTN_ISA {

extern const EdgeAttentionKernels edge_attention_kernels;
const EdgeAttentionKernels edge_attention_kernels = {
    edge_forward<float>,
    edge_forward<double>,
    edge_backward<float>,
    edge_backward<double>,
};

}  // namespace ikattn::IKATTN_ISA
