// The kernels of one instruction set, which IKATTN_ISA names; compiled once for each. No torch
// header.
#include "moments/cpu/kernel.h"

#include "moments/cpu/causal.h"
#include "moments/cpu/causal_backward.h"
#include "moments/cpu/from_moments.h"
#include "moments/cpu/key_moments.h"

namespace ikattn::IKATTN_ISA {

extern const MomentsKernels moments_kernels;
const MomentsKernels moments_kernels = {
    {key_moments<float>, key_moments<double>},
    {key_moments_backward<float>, key_moments_backward<double>},
    {attention_from_moments<float>, attention_from_moments<double>},
    {attention_from_moments_backward<float>, attention_from_moments_backward<double>},
    {causal_attention<float>, causal_attention<double>},
    {causal_attention_backward<float>, causal_attention_backward<double>},
};

}  // namespace ikattn::IKATTN_ISA
