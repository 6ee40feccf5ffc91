// Kernels that a pass of a call takes, decided once, from types, sizes, options and the GPU. The
// drivers (forward.cu, backward.cu) act by this decision, and which_kernels tells it.
#pragma once

#include <vector>

#include "attention/calls/params.h"
#include "support/exported.h"
#include "support/proven.h"

namespace ikattn::cuda {

enum class Pass { kForward, kBackward };

// Time proportional to L S, or to L + S (attention/calls/linear_time.h).
enum class Algorithm { kQuadratic, kLinear };

// CUDA cores in float32 or float64; tensor cores by mma.sync; pairs by Hopper's own wgmma.
enum class Unit { kCudaCores, kTensorCores, kHopper };

struct Route {
  // kLinear: but for queries, or heads, that it would not be exact for. These are found on the
  // device, and take quadratic time in the same call, by mma.sync.
  Algorithm algorithm = Algorithm::kQuadratic;
  Unit unit = Unit::kCudaCores;
  bool is_wide = false;  // tensor cores: more than 64 frequencies, or 128 columns of the value
  int parts = 1;         // tensor cores, forward: blocks that share the keys of a query
  // Tensor cores and Hopper: the forward's scores are products of integers of 8 bits, and the
  // backward makes the same scores.
  bool int8_scores = false;
  // Tensor cores: split products of float32, two operands of Half for each number, in the place of
  // CUDA cores.
  bool split_products = false;
  const char* reason = nullptr;  // why nothing faster, where there is something faster
};

IKATTN_EXPORTED Route route_of(const AttentionParams& params, bool in_double, Pass pass);

// Returns the families of kernels that a route takes; none for CUDA cores.
IKATTN_EXPORTED std::vector<Family> families_of(const AttentionParams& params, const Route& route);

}  // namespace ikattn::cuda
