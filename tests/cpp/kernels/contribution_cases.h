// Calls of the contribution kernels in one arithmetic type, and what the CPU makes of them in
// float64.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "contributions/cpu/kernel.h"
#include "contributions/cuda/given_pairs.h"
#include "contributions/cuda/kernels.h"
#include "interpreter/interpreter.h"
#include "kernels/agreement.h"
#include "kernels/memory.h"
#include "support/cuda/float16.h"

namespace ikattn::truth {
extern const ContributionKernels contribution_kernels;
}

namespace ikattn {
namespace {

struct Case {
  std::string name;
  int64_t B = 2, H = 4, L = 5, S = 7, D = 20;
  bool padding = false;
  double size = 1;  // size of the vectors
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }
};

// Everything of one call in one arithmetic type.
template <typename T>
struct Call {
  explicit Call(const Case& c) : case_(c) {
    std::mt19937 generator(5);
    std::normal_distribution<double> normal;
    const auto fill = [&](std::vector<T>& values, int64_t count) {
      values.resize(count + 1);
      for (T& value : values) value = static_cast<T>(static_cast<float>(normal(generator)));
    };
    fill(vectors, c.H * c.B * c.S * c.D);
    for (T& value : vectors) value *= static_cast<T>(static_cast<float>(c.size));
    fill(norm_weights[0], c.D);
    fill(norm_weights[1], c.D);
    fill(weights, c.B * c.H * c.L * c.S);
    for (int64_t j = 0; j < c.S && c.L > 0; ++j)
      weights[j] = 0;  // one head and query have no weights
    const int64_t blocks = (c.S + kFactorBlock - 1) / kFactorBlock;
    for (int variant = 0; variant < 3; ++variant) {
      factors[variant].resize(c.B * blocks * triangle(c.H) * kFactorBlock + 1);
      norms[variant].resize(c.B * c.L * c.S + 1);
    }
    value_norms.resize(c.B * c.H * c.S + 1);
    query_padding.resize(c.B * c.L + 1);
    key_padding.resize(c.B * c.S + 1);
    if (c.padding) {
      query_padding[c.L - 1] = 1;
      key_padding[c.S - 1] = key_padding[c.B * c.S - 2] = 1;
    }
  }

  FactorsOfVectors of_vectors() {
    FactorsOfVectors params{factor_params()};
    params.tokens = case_.S;
    params.vectors = vectors.data();
    return params;
  }

  // Values that are the vectors, which a projection of unit matrices leaves as they are.
  FactorsOfTokens of_tokens() {
    const int64_t H = case_.H, B = case_.B, S = case_.S, D = case_.D;
    units.assign(D * H * D + 1, 0);
    for (int64_t c = 0; c < D; ++c) {
      for (int64_t h = 0; h < H; ++h) units[c * H * D + h * D + c] = 1;
    }
    FactorsOfTokens params{factor_params()};
    params.G = H;
    params.d_v = D;
    params.value = Array{vectors.data(), kType, {S * D, B * S * D, D, 1}};
    params.projection = Array{units.data(), kType, {H * D, 1, 0, 0}};
    return params;
  }

  FactorParams factor_params() {
    FactorParams params;
    params.B = case_.B;
    params.H = case_.H;
    params.S = case_.S;
    params.D = case_.D;
    params.norms[0] = {norm_weights[0].data(), true};
    params.norms[1] = {norm_weights[1].data(), false};
    for (int variant = 0; variant < 3; ++variant) params.factors[variant] = factors[variant].data();
    params.value_norms = value_norms.data();
    return params;
  }

  PairParams pair_params() {
    PairParams params;
    params.B = case_.B;
    params.H = case_.H;
    params.rows = case_.L;
    params.S = case_.S;
    const int64_t H = case_.H, rows = case_.L, S = case_.S;
    params.weights = Array{weights.data(), kType, {H * rows * S, rows * S, S, 1}};
    if (case_.padding) {
      params.query_padding = Array{query_padding.data(), ElementType::kBool, {rows, 1, 0, 0}};
      params.key_padding = Array{key_padding.data(), ElementType::kBool, {S, 1, 0, 0}};
    }
    params.variants = 3;
    for (int variant = 0; variant < 3; ++variant) {
      params.factors[variant] = factors[variant].data();
      params.norms[variant] = Array{norms[variant].data(), kType, {rows * S, S, 1, 0}};
    }
    return params;
  }

  // The factors and value norms that `wanted` names, of its tokens, as the glue has them made.
  const char* make_factors(const FactorsOfVectors& wanted) {
    if constexpr (sizeof(T) == 4) {
      if (cuda::takes_gram_matrices(case_.H, false)) return make_grams(wanted);
    }
    std::vector<T> scratch(vectors.size());
    return cuda::contribution_kernels.factors[sizeof(T) / 8](wanted, scratch.data(), nullptr);
  }

  std::vector<T> vectors, units, weights, norm_weights[2], factors[3], norms[3], value_norms;
  std::vector<uint8_t> query_padding, key_padding;
  std::vector<uint32_t> fragments[3];  // in float32, of make_factors()

 private:
  // Makes Gram matrices of values that are the vectors, and unit matrices through the norms.
  const char* make_grams(const FactorsOfVectors& wanted) {
    const int64_t B = case_.B, H = case_.H, S = case_.S, D = case_.D;
    const int64_t width = (D + cuda::kGramWidth - 1) / cuda::kGramWidth * cuda::kGramWidth;
    std::vector<T> values(H * B * S * width + 1);
    for (int64_t row = 0; row < H * B * S; ++row) {
      std::copy_n(vectors.begin() + row * D, D, values.begin() + row * width);
    }
    cuda::TokenGramParams params;
    params.B = B;
    params.H = params.G = H;
    params.S = S;
    params.D = D;
    params.width = width;
    params.j0 = wanted.j0;
    params.tokens = wanted.tokens;
    params.value = Array{values.data(), kType, {S * width, B * S * width, width, 1}};
    std::vector<double> parts(cuda::gram_parts(D) * B * wanted.tokens * triangle(H) + 1);
    params.parts = parts.data();
    std::vector<double> unit(D * D + 1);
    for (int64_t c = 0; c < D; ++c) unit[c * D + c] = 1;
    for (int variant = 0; variant < 3; ++variant) {
      if (variant > 0) apply_norm(wanted.norms[variant - 1], D, unit);
      params.factors = static_cast<float*>(wanted.factors[variant]);
      params.value_norms = variant == 0 ? static_cast<float*>(wanted.value_norms) : nullptr;
      if (params.factors == nullptr && params.value_norms == nullptr) continue;
      std::vector<T> projection(D * H * width + 1);
      for (int64_t row = 0; row < D * H; ++row) {
        std::copy_n(unit.begin() + row / H * D, D, projection.begin() + row * width);
      }
      params.projection = projection.data();
      fragments[variant].assign(cuda::factor_fragment_words(B, H, S) + 1, 0);
      params.fragments = params.factors == nullptr ? nullptr : fragments[variant].data();
      const char* error = cuda::contribution_kernels.gram_factors(params, nullptr);
      if (error != nullptr) return error;
    }
    return nullptr;
  }
  static void apply_norm(const NormLayer& norm, int64_t D, std::vector<double>& matrix) {
    const T* weight = static_cast<const T*>(norm.weight);
    for (int64_t column = 0; column < D; ++column) {
      double mean = 0;
      for (int64_t c = 0; norm.centered && c < D; ++c) {
        mean += matrix[c * D + column] / static_cast<double>(D);
      }
      for (int64_t c = 0; c < D; ++c) {
        double& x = matrix[c * D + column];
        x = (x - mean) * static_cast<double>(weight[c]);
      }
    }
  }

  static constexpr ElementType kType =
      sizeof(T) == 8 ? ElementType::kFloat64 : ElementType::kFloat32;
  Case case_;
};

// A variant's fragments, by the kernel that makes them of factors alone.
inline std::vector<uint32_t> fragments_of(int64_t B, int64_t H, int64_t S, const float* factors) {
  std::vector<uint32_t> fragments(cuda::factor_fragment_words(B, H, S) + 1);
  const cuda::FragmentParams params{
      B, H, S, true, factors, fragments.data(), cuda::units_of(fragments.data(), B * S, H)};
  EXPECT_STREQ(cuda::streamed_kernels.factor_fragments(params, nullptr), nullptr);
  return fragments;
}

inline Call<double> truth_of(const Case& c) {
  Call<double> call(c);
  Memory memory;
  const auto& kernels = truth::contribution_kernels;
  kernels.factors[1](call.of_tokens(), cpu_executor(memory));
  kernels.pair_norms[1](call.pair_params(), cpu_executor(memory));
  return call;
}

// Computes norms from factors as they are: in float32 as fragments, too.
inline const char* norms_of(const PairParams& given, int index = 0) {
  PairParams params = given;
  std::vector<uint32_t> fragments[3];
  for (int variant = 0; cuda::takes_given_pairs(params, index == 1) && variant < params.variants;
       ++variant) {
    fragments[variant] = fragments_of(params.B, params.H, params.S,
                                      static_cast<const float*>(params.factors[variant]));
    params.fragments[variant] = fragments[variant].data();
  }
  return cuda::contribution_kernels.pair_norms[index](params, nullptr);
}

template <typename T>
Call<T> on_device(const Case& c) {
  Call<T> call(c);
  EXPECT_STREQ(call.make_factors(call.of_vectors()), nullptr);
  EXPECT_STREQ(norms_of(call.pair_params(), sizeof(T) / 8), nullptr);
  return call;
}

template <typename T>
void compare(const Case& c, double tolerance) {
  const Call<double> truth = truth_of(c);
  const Call<T> got = on_device<T>(c);
  expect_close(got.value_norms, truth.value_norms, tolerance, "value norms");
  for (int variant = 0; variant < 3; ++variant) {
    const std::string name = "variant " + std::to_string(variant);
    expect_close(got.norms[variant], truth.norms[variant], tolerance, name);
  }
}

}  // namespace
}  // namespace ikattn
