// The passes over the pairs for bfloat16 inputs, where the processor multiplies numbers of 16 bits
// faster than float32. Compiled like kernel.cpp, once per set of such instructions.
#include "attention/cpu/backward/backward.h"
#include "attention/cpu/kernel.h"

namespace ikattn::IKATTN_ISA {

extern const SixteenBitKernels sixteen_bit_kernels;
const SixteenBitKernels sixteen_bit_kernels = {attention_forward<float>, attention_backward<float>};

}  // namespace ikattn::IKATTN_ISA
