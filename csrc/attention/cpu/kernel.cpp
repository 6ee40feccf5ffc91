// The kernels of one instruction set, which IKATTN_ISA names; compiled once for each. No torch
// header.
#include "attention/cpu/kernel.h"

#include "attention/cpu/backward/backward.h"
#include "attention/cpu/decoding/from_features.h"
#include "attention/cpu/features/operator.h"
#include "attention/cpu/forward/weights.h"

namespace ikattn::IKATTN_ISA {

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {
    {attention_forward<float>, attention_forward<double>},
    {attention_backward<float>, attention_backward<double>},
    {attention_weights<float>, attention_weights<double>},
    {spectral_features<float>, spectral_features<double>},
    {attention_from_features<float>, attention_from_features<double>},
    dropout_keep_mask,
};

}  // namespace ikattn::IKATTN_ISA
