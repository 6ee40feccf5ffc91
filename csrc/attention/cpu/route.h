// The way that the CPU computes a pass of a call: route_of decides it once; the glue, both passes
// and which_kernels read it.
#pragma once

#include "attention/calls/params.h"
#include "support/executor.h"

namespace ikattn {

struct SixteenBitKernels;

struct Route {
  bool is_linear = false;  // sums over products of features take the place of pairs
  const SixteenBitKernels* sixteen_bits = nullptr;  // kernels of products of 16 bits; null: none
};

// Passes over the pairs for bfloat16 inputs, and for float32 that may be rounded to it.
struct SixteenBitKernels {
  void (*forward)(const AttentionParams&, const Route&, const Executor&);
  void (*backward)(const AttentionBackwardParams&, const Route&, const Executor&);
};

// Tells whether a call takes products of 16 bits where the processor has them. Their error averages
// out in gradients of frequencies over some columns of a head.
inline bool takes_16_bits(const AttentionParams& params) {
  return params.takes_16_bits() && params.d >= 8;
}

Route route_of(const AttentionParams& params, bool backward);

}  // namespace ikattn
