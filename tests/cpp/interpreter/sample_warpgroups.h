// Products of a warpgroup, for the interpreter's own tests; on a GPU, for sm_90a alone.
#pragma once

#include "support/cuda/float16.h"

namespace ikattn::sample {

enum class Misuse { kNone, kNoFence, kNoBarrier, kChangedA, kEarlySums };

// out [64][128] = a [64][64] b, b [128][64].
const char* product_by_columns(const Half* a, const Half* b, float* out, Misuse misuse);
// out [64][64] = a [64][64] b, b [64][64].
template <typename T>
const char* product_by_rows(const T* a, const T* b, float* out);

}  // namespace ikattn::sample
