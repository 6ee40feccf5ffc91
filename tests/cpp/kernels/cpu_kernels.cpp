// The CPU kernels, which the CUDA kernels are compared with, in float64.
#define IKATTN_ISA truth
#include "attention/cpu/kernel.cpp"
