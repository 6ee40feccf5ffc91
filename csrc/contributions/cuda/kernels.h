// The entry points of maps on CUDA: what glue.cpp calls, with the parameters that the CPU kernels
// take.
#pragma once

#include "contributions/params.h"
#include "support/cuda/launch.h"
#include "support/exported.h"

namespace ikattn::cuda {

// The factors of the tokens [j0, j0 + tokens) in float32, through the norms that the projection
// holds: these are linear.
struct TokenGramParams {
  int64_t B = 0, H = 0, G = 0, S = 0, D = 0;
  int64_t width = 0;  // d_v, or zeros to a multiple of kGramWidth
  int64_t j0 = 0, tokens = 0;
  Array value{};  // [B, G, S, width], float32; rows whole, at multiples of 16 bytes
  const float* projection = nullptr;  // [D, H, width], at a multiple of 16 bytes
  // Whether they are numbers of 16 bits in float32.
  bool value_is_short = false, projection_is_short = false;
  double* parts = nullptr;        // scratch [gram_parts(D), B, tokens, triangle(H)]
  int64_t parts_of_block = 1;     // parts that a block makes; set behind the entry point
  float* factors = nullptr;       // [B, blocks, triangle(H), 64]; nullptr: not wanted
  uint32_t* fragments = nullptr;  // fragments as PairParams has them; nullptr: not wanted
  float* value_norms = nullptr;   // [B, H, S]; nullptr: not wanted
};

constexpr int kGramWidth = 16;

// The dimensions whose products a block adds up, and how many such parts there are. They are the
// same in every call, and so are its bits.
IKATTN_HOST_DEVICE constexpr int64_t columns_of_gram_part(int64_t D) {
  return (D + 255) / 256 * 32;
}
IKATTN_HOST_DEVICE constexpr int64_t gram_parts(int64_t D) {
  return D == 0 ? 0 : (D + columns_of_gram_part(D) - 1) / columns_of_gram_part(D);
}

// Each queues its work and returns nullptr, or why it could not. Index 0: compute in float32; 1: in
// float64.
struct ContributionKernels {
  // Kernels of calls for which takes_gram_matrices() is true.
  const char* (*gram_factors)(const TokenGramParams&, Stream);
  // scratch: as large as params.vectors
  const char* (*factors[2])(const FactorsOfVectors&, void* scratch, Stream);
  // In float32, where takes_gram_matrices() has it, with fragments.
  const char* (*pair_norms[2])(const PairParams&, Stream);
  // scratch: pair_gradient_scratch() elements
  const char* (*pair_gradients)(const PairGradientParams&, double* scratch, Stream);
};

extern IKATTN_EXPORTED const ContributionKernels contribution_kernels;

// Returns whether factors come of Gram matrices: in float32, of so many heads as have room beside
// others.
inline bool takes_gram_matrices(int64_t H, bool in_float64) {
  return !in_float64 && H <= 64 && is_on(Family::kGivenMaps);
}

// Returns the words of the fragments of one variant.
IKATTN_EXPORTED int64_t factor_fragment_words(int64_t B, int64_t H, int64_t S);
IKATTN_EXPORTED int64_t pair_gradient_scratch(const PairGradientParams& params);

}  // namespace ikattn::cuda
