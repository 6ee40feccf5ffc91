// Functions that make features from angles: sums of cosines and of sines, in Half or 8 bits.
#pragma once

#include "attention/cuda/operands/operands.h"
#include "support/cuda/intrinsics.h"

namespace ikattn::cuda {

// Half; integers of 8 bits; or these, and the same as Half, multiplied as others are.
enum class FeatureForm { kHalf, kInt8, kBoth };

namespace {

// Floats near this one are integers, and their last bits those of what was added to it.
constexpr float kInteger = 0x1.8p23f;
constexpr float kInt8OfOne = Int8Features::kLargest / 2.0f;

// Rounds four numbers times `scale` to integers of 8 bits.
__device__ __forceinline__ uint32_t pack_int8(const float (&x)[4], float scale) {
  uint32_t packed = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    packed |= (__float_as_uint(fmaf(x[i], scale, kInteger)) & 0xffu) << (8 * i);
  }
  return packed;
}
// Returns a mask of four bytes, all ones for each of the `remaining` frequencies that there are.
__device__ __forceinline__ uint32_t int8_present(int remaining) {
  return remaining >= 4 ? 0xffffffffu : remaining <= 0 ? 0u : (1u << (8 * remaining)) - 1;
}
// Returns a mask of two numbers of Half, all ones for each of the `remaining` frequencies that
// there are.
__device__ __forceinline__ uint32_t half_present(int remaining) {
  return remaining > 1 ? 0xffffffffu : remaining > 0 ? 0x0000ffffu : 0u;
}

// Computes sine and cosine. For integers the angle is not reduced to a cycle: it is rounded in
// float32 all the same, and an instruction that needs it reduced would show only beyond some 2^13
// cycles.
template <FeatureForm kForm>
__device__ __forceinline__ void sine_and_cosine(float angle, float unit, float& sine,
                                                float& cosine) {
  if constexpr (kForm == FeatureForm::kHalf) {
    fast_sincos_of_fraction(remainder_in_cycles(angle, unit), &sine, &cosine);
  } else {
    fast_sincos(angle * (6.2831853f * unit), &sine, &cosine);
  }
}

// Computes the sums of two cosines and of two sines, without a scale.
template <FeatureForm kForm>
__device__ __forceinline__ void half_sums(float a, float b, float unit, float& sine,
                                          float& cosine) {
  float other_sine, other_cosine;
  sine_and_cosine<kForm>(a, unit, sine, cosine);
  sine_and_cosine<kForm>(b, unit, other_sine, other_cosine);
  sine = 0.5f * (sine + other_sine);
  cosine = 0.5f * (cosine + other_cosine);
}

}  // namespace
}  // namespace ikattn::cuda
