// Types that go to the tensor-core kernels, and the errors that the roundings of their operands
// allow.
#pragma once

#include "kernels/attention_cases.h"

namespace ikattn {

// The types that go there: float32 is rounded as float16 is, after scaling, and its results are
// not.
inline constexpr ElementType kTypes[] = {ElementType::kBFloat16, ElementType::kFloat16,
                                         ElementType::kFloat32};

// Returns the types that a test runs with: all where everything runs, otherwise one, by turns.
std::vector<ElementType> types_in_turn(size_t turn);
std::vector<ElementType> types_in_turn(const Case& c);

double roundoff_of(ElementType type);
Case of_type(Case c, ElementType type);

// Half rounds a feature by 2^-11 of it at most. Rounding errors differ in sign and size, and sums
// of products over features stay within half of that each, but for cases made of few features.
struct FeatureRoundoff {
  double relative, absolute = 0;
  double of_weights = 0;  // relative, of what is computed in bfloat16
};
inline constexpr FeatureRoundoff kFeatureRoundoff = {0x1p-12 * 1.01},
                                 kLargestFeatureRoundoff = {0x1p-11};
// Integers up to 127 stand for numbers up to 2.
inline constexpr FeatureRoundoff kInt8Roundoff = {0, 0.5 * 1.01 / 127, 0x1p-7},
                                 kLargestInt8Roundoff = {0, 1.01 / 127, 0x1p-7};

// How far the tensor cores may be off, at most: a weight by its own rounding and by that of both
// features, in Half whatever the type or in 8 bits; the output by those of its weights, and by its
// own.
struct Bounds {
  std::vector<double> output, log_normalizer;
};

Bounds bounds_of(Call& call, const Case& c, const Results& truth, double roundoff,
                 FeatureRoundoff of_features = kFeatureRoundoff);

void expect_within(const Tensor& got, const Tensor& expected, const std::vector<double>& bounds,
                   const std::string& what);

// Output and log Z, as far off as bounds_of() allows.
void expect_forward_within(Call& call, const Case& c, const Results& got, const Results& truth,
                           FeatureRoundoff of_features = kFeatureRoundoff);

// Expects that a NaN in a query, key, value or incoming gradient, at `share` of all tokens, spoils
// the results that depend on it, and no others.
void expect_nan_stays_where_it_is_seen(const Case& c, double share);

// Launches of Hopper's own kernels of pairs, forward and backward.
constexpr int kWarpgroupLaunches = 3;

// Where few keys dominate, rows follow from few scores, and those may be small: the gradient of a
// score s errs by its rounding over s.
double amplification_of(const Case& c);

}  // namespace ikattn
