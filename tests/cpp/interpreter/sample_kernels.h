// Small kernels in the manner of the real ones, for the interpreter's tests and for cuda-check.
#pragma once

#include <stdint.h>

#include "support/cuda/float16.h"
#include "support/cuda/launch.h"

namespace ikattn::sample {

// out[b] = sum of block b's 256 values.
//   values  [256 blocks]   out  [blocks]
const char* sum_of_blocks(const float* values, float* out, int blocks, Stream stream);

// out = round(query key^T) value, the scores rounded to T.
//   query [L, 64]  key, value [S, 64]  out [L, 64]: T, out float, rows contiguous, 16-byte aligned
template <typename T>
const char* linear_attention(const T* query, const T* key, const T* value, float* out, int L, int S,
                             Stream stream);

// out = a b^T of one tile, in TF32.   a [16, 32]  b [8, 32]  out [16, 8]
const char* tf32_scores(const float* a, const float* b, float* out, Stream stream);

}  // namespace ikattn::sample
