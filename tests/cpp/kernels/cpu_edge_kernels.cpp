// The CPU kernels of edge attention, which CUDA's are compared with, in float64.
#define IKATTN_ISA truth
#include "edge_attention/cpu/kernel.cpp"
