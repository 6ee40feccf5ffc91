// The entry points of edge attention on CUDA: what glue.cpp calls, with the parameters that the CPU
// kernels take.
#pragma once

#include "edge_attention/params.h"
#include "support/cuda/launch.h"
#include "support/exported.h"

namespace ikattn::cuda {

// Partial sums of long rows, of so many edges: numbers and values, of T, for each piece.
struct EdgeScratch {
  int64_t numbers, values;
};

// Each queues its work and returns nullptr, or why it could not.
template <typename T>
struct EdgeKernelsOf {
  const char* (*forward)(const EdgeForwardParams<T>&, double* numbers, T* values, Stream);
  // mean: [N_q, H], working memory
  const char* (*query_gradients)(const EdgeQueryGradientParams<T>&, double* mean, double* numbers,
                                 T* values, Stream);
  const char* (*key_gradients)(const EdgeKeyGradientParams<T>&, double* numbers, T* values, Stream);
};

extern IKATTN_EXPORTED const EdgeKernelsOf<float> edge_kernels_of_float;
extern IKATTN_EXPORTED const EdgeKernelsOf<double> edge_kernels_of_double;

// Elements that `numbers` and `values` need for E edges, H heads and rows of `width` values.
IKATTN_EXPORTED EdgeScratch edge_scratch(int64_t E, int64_t H, int64_t width);

}  // namespace ikattn::cuda
