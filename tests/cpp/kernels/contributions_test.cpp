// The contribution operators' CUDA kernels in the interpreter, against the CPU kernels in float64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "contributions/cpu/kernel.h"
#include "contributions/cuda/kernels.h"
#include "kernels/memory.h"
#include "support/cuda/float16.h"
#include "support/interpreter/interpreter.h"

namespace ikattn::truth {
extern const ContributionKernels contribution_kernels;
}

namespace ikattn {
namespace {

struct Case {
  std::string name;
  int64_t B = 2, H = 4, L = 5, S = 7, D = 20;
  bool padding = false;
  double size = 1;  // of the vectors
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
    for (int64_t j = 0; j < c.S && c.L > 0; ++j) weights[j] = 0;  // of one head and query
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

  std::vector<T> vectors, units, weights, norm_weights[2], factors[3], norms[3], value_norms;
  std::vector<uint8_t> query_padding, key_padding;

 private:
  static constexpr ElementType kType =
      sizeof(T) == 8 ? ElementType::kFloat64 : ElementType::kFloat32;
  Case case_;
};

Call<double> truth_of(const Case& c) {
  Call<double> call(c);
  Memory memory;
  const auto& kernels = truth::contribution_kernels;
  kernels.factors[1](call.of_tokens(), cpu_executor(memory));
  kernels.pair_norms[1](call.pair_params(), cpu_executor(memory));
  return call;
}

const char* norms_of(const PairParams& params, int index = 0) {
  std::vector<uint8_t> scratch(cuda::pair_norm_scratch(params, index == 1) + 1);
  return cuda::contribution_kernels.pair_norms[index](params, scratch.data(), nullptr);
}

template <typename T>
Call<T> on_device(const Case& c) {
  Call<T> call(c);
  std::vector<T> scratch(call.vectors.size());
  const auto& kernels = cuda::contribution_kernels;
  constexpr int kIndex = sizeof(T) == 8 ? 1 : 0;
  EXPECT_STREQ(kernels.factors[kIndex](call.of_vectors(), scratch.data(), nullptr), nullptr);
  EXPECT_STREQ(norms_of(call.pair_params(), kIndex), nullptr);
  return call;
}

template <typename T>
void expect_close(const std::vector<T>& got, const std::vector<double>& expected, double tolerance,
                  const std::string& what) {
  ASSERT_EQ(got.size(), expected.size());
  double largest = 1e-30, error = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    largest = std::max(largest, std::fabs(expected[i]));
    const double difference = std::fabs(static_cast<double>(got[i]) - expected[i]);
    if (!(difference <= error)) error = difference;  // NaN stays
    if (std::isnan(error)) break;
  }
  EXPECT_LE(error, tolerance * largest) << what;
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

// Gradients of some numbers in the place of the norms, and what outer products are added to.
struct PairGradients {
  explicit PairGradients(const Case& c) : call(truth_of(c)) {
    std::mt19937 generator(7);
    std::normal_distribution<double> normal;
    grad_weights.resize(call.weights.size());
    for (int variant = 0; variant < 3; ++variant) {
      for (double& gradient : call.norms[variant]) gradient = normal(generator);
      outer[variant].resize(call.factors[variant].size(), 0.5);
    }
  }

  PairGradientParams params() {
    PairGradientParams params;
    static_cast<PairParams&>(params) = call.pair_params();
    params.grad_weights = params.weights;
    params.grad_weights.data = grad_weights.data();
    for (int variant = 0; variant < 3; ++variant) params.outer[variant] = outer[variant].data();
    return params;
  }

  void by_device() {
    const PairGradientParams given = params();
    std::vector<double> scratch(cuda::pair_gradient_scratch(given) + 1);
    EXPECT_STREQ(cuda::contribution_kernels.pair_gradients(given, scratch.data(), nullptr),
                 nullptr);
  }

  Call<double> call;
  std::vector<double> grad_weights, outer[3];
};

const Case kCases[] = {
    {.name = "plain"},
    {.name = "padding", .padding = true},
    {.name = "one_head", .H = 1},
    {.name = "twelve_heads", .B = 1, .H = 12, .L = 9, .S = 33, .D = 40},
    {.name = "thirteen_heads", .B = 1, .H = 13, .L = 6, .S = 3, .D = 70},
    {.name = "two_groups_of_heads", .B = 1, .H = 20, .L = 6, .S = 3, .D = 68},
    {.name = "as_many_heads_as_a_gram_matrix_takes", .B = 1, .H = 64, .L = 2, .S = 2, .D = 130},
    {.name = "fewer_dimensions_than_heads", .H = 7, .D = 3},
    {.name = "many_heads_of_few_dimensions", .B = 1, .H = 40, .L = 5, .S = 3, .D = 6},
    {.name = "pieces_of_copies", .B = 1, .H = 5, .L = 70, .S = 36},
    {.name = "blocks", .B = 1, .H = 3, .L = 67, .S = 65, .D = 33, .padding = true},
    {.name = "shares", .B = 2, .H = 2, .L = 150, .S = 5, .D = 4},
    {.name = "a_query_at_a_time", .B = 1, .H = 100, .L = 6, .S = 3, .D = 5},
    {.name = "no_queries", .L = 0},
    {.name = "no_keys", .S = 0},
};

class ContributionKernelsOnDevice : public ::testing::TestWithParam<Case> {};

TEST_P(ContributionKernelsOnDevice, Float64EqualsTheCpu) { compare<double>(GetParam(), 1e-13); }

TEST_P(ContributionKernelsOnDevice, Float32ErrsByRounding) { compare<float>(GetParam(), 2e-6); }

TEST_P(ContributionKernelsOnDevice, GradientsEqualTheCpu) {
  PairGradients truth(GetParam()), got(GetParam());
  Memory memory;
  truth::contribution_kernels.pair_gradients(truth.params(), cpu_executor(memory));
  got.by_device();
  expect_close(got.grad_weights, truth.grad_weights, 1e-13, "grad_weights");
  for (int variant = 0; variant < 3; ++variant) {
    expect_close(got.outer[variant], truth.outer[variant], 1e-13, "outer products");
  }
}

INSTANTIATE_TEST_SUITE_P(Interpreter, ContributionKernelsOnDevice, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

// Weights may be narrower than the maps.
TEST(ContributionKernelsOnDevice, WeightsMayBeOf16Bits) {
  for (const ElementType type : {ElementType::kBFloat16, ElementType::kFloat16}) {
    for (const int64_t heads : {3, 16, 17, 50}) {
      const Case c{.name = "narrow", .H = heads, .L = 9, .S = 35, .D = 12, .padding = true};
      Call<float> call(c), rounded(c);
      std::vector<uint16_t> narrow;
      for (float& weight : rounded.weights) {
        const bool is_half = type == ElementType::kFloat16;
        narrow.push_back(is_half ? to_half(weight).bits : to_bfloat16(weight).bits);
        weight = is_half ? to_float(Half{narrow.back()}) : to_float(BFloat16{narrow.back()});
      }
      std::vector<float> scratch(call.vectors.size());
      const auto& kernels = cuda::contribution_kernels;
      for (Call<float>* each : {&call, &rounded}) {
        ASSERT_STREQ(kernels.factors[0](each->of_vectors(), scratch.data(), nullptr), nullptr);
        PairParams pairs = each->pair_params();
        if (each == &call) {
          pairs.weights.data = narrow.data();
          pairs.weights.type = type;
        }
        ASSERT_STREQ(norms_of(pairs), nullptr);
      }
      for (int variant = 0; variant < 3; ++variant) {
        EXPECT_EQ(call.norms[variant], rounded.norms[variant]);
      }
    }
  }
}

// What dropout, or whoever gives weights, makes of them: a pair's digits are those of its own
// heads.
TEST(ContributionKernelsOnDevice, WeightsMayBeOfAnySizeAndSign) {
  for (const int64_t heads : {5, 16, 40}) {
    const Case c{.name = "sizes", .B = 1, .H = heads, .L = 18, .S = 11, .D = 50};
    Call<float> call(c);
    Call<double> truth(c);
    for (int64_t h = 0; h < c.H; ++h) {
      for (int64_t i = 0; i < c.L; ++i) {
        for (int64_t j = 0; j < c.S; ++j) {
          const int64_t at = (h * c.L + i) * c.S + j;
          call.weights[at] *=
              static_cast<float>(std::ldexp(1.0, static_cast<int>(i * 11 + j) % 200 - 100));
          truth.weights[at] = static_cast<double>(call.weights[at]);
        }
      }
    }
    std::vector<float> scratch(call.vectors.size());
    const auto& kernels = cuda::contribution_kernels;
    ASSERT_STREQ(kernels.factors[0](call.of_vectors(), scratch.data(), nullptr), nullptr);
    ASSERT_STREQ(norms_of(call.pair_params()), nullptr);
    Memory memory;
    truth::contribution_kernels.factors[1](truth.of_tokens(), cpu_executor(memory));
    truth::contribution_kernels.pair_norms[1](truth.pair_params(), cpu_executor(memory));
    for (int variant = 0; variant < 3; ++variant) {
      for (int64_t pair = 0; pair < c.L * c.S; ++pair) {
        const double expected = truth.norms[variant][pair];
        EXPECT_NEAR(call.norms[variant][pair] / expected, 1, 4e-6) << variant << ", " << pair;
      }
    }
  }
}

TEST(ContributionKernelsOnDevice, WeightsThatAreNotFiniteShowInTheirPairAlone) {
  const Case c{.name = "not_finite", .B = 1, .H = 6, .L = 20, .S = 37};
  const Call<float> sound = on_device<float>(c);
  Call<float> call(c);
  call.factors[0] = sound.factors[0];
  call.factors[1] = sound.factors[1];
  call.factors[2] = sound.factors[2];
  const auto weight = [&](int64_t h, int64_t i, int64_t j) -> float& {
    return call.weights[(h * c.L + i) * c.S + j];
  };
  weight(1, 3, 5) = NAN;
  weight(2, 4, 5) = INFINITY;
  weight(3, 17, 36) = -INFINITY;
  call.factors[1][20] = NAN;  // of key 20
  for (int64_t h = 0; h < c.H; ++h) weight(h, 9, 20) = 0;
  ASSERT_STREQ(norms_of(call.pair_params()), nullptr);
  for (int64_t i = 0; i < c.L; ++i) {
    for (int64_t j = 0; j < c.S; ++j) {
      for (int variant = 0; variant < 2; ++variant) {
        const float got = call.norms[variant][i * c.S + j];
        const bool is_nan = (i == 3 && j == 5) || (variant == 1 && j == 20 && i != 9);
        const bool is_infinite = (i == 4 && j == 5) || (i == 17 && j == 36);
        if (is_nan) {
          EXPECT_TRUE(std::isnan(got)) << i << ", " << j;
        } else if (is_infinite) {
          EXPECT_EQ(got, INFINITY) << i << ", " << j;
        } else if (i == 9 && j == 20) {
          EXPECT_EQ(got, 0.0f);
        } else {
          EXPECT_EQ(got, sound.norms[variant][i * c.S + j]) << i << ", " << j;
        }
      }
    }
  }
}

// Vectors whose squares leave the range of float32, and one that is the sum of two others.
TEST(ContributionKernelsOnDevice, VectorsMayBeLargeOrDependOnOthers) {
  const Case c{.name = "extreme", .B = 1, .H = 5, .L = 3, .S = 4, .D = 24};
  for (const double size : {1e-25, 1.0, 1e25}) {
    Call<float> call(c);
    const int64_t pitch = c.S * c.D;
    for (int64_t i = 0; i < c.H * pitch; ++i) call.vectors[i] *= static_cast<float>(size);
    for (int64_t i = 0; i < pitch; ++i) {
      call.vectors[2 * pitch + i] = call.vectors[i] + call.vectors[pitch + i];
    }
    std::vector<float> scratch(call.vectors.size());
    const auto& kernels = cuda::contribution_kernels;
    ASSERT_STREQ(kernels.factors[0](call.of_vectors(), scratch.data(), nullptr), nullptr);
    for (int64_t j = 0; j < c.S; ++j) {
      for (int64_t i = 0; i < c.L; ++i) {
        // |R a| against the sum itself, in float64
        double square = 0, of_root = 0;
        for (int64_t column = 0; column < c.D; ++column) {
          double sum = 0;
          for (int64_t h = 0; h < c.H; ++h) {
            sum += static_cast<double>(call.weights[(h * c.L + i) * c.S + j]) *
                   static_cast<double>(call.vectors[h * pitch + j * c.D + column]);
          }
          square += sum / size * (sum / size);
        }
        int64_t entry = 0;
        for (int64_t h = 0; h < c.H; ++h) {
          double sum = 0;
          for (int64_t k = h; k < c.H; ++k, ++entry) {
            sum += static_cast<double>(call.factors[0][entry * kFactorBlock + j]) *
                   static_cast<double>(call.weights[(k * c.L + i) * c.S + j]);
          }
          of_root += sum / size * (sum / size);
        }
        EXPECT_NEAR(std::sqrt(of_root), std::sqrt(square), 1e-6 * std::sqrt(square)) << size;
      }
    }
  }
}

// The glue makes as many vectors at a time as there is memory for.
TEST(ContributionKernelsOnDevice, TokensMayComeInRounds) {
  const Case c{.name = "rounds", .S = 131, .D = 9};
  const Call<float> whole = on_device<float>(c);
  Call<float> parts(c);
  constexpr int64_t kStep = 50;
  std::vector<float> vectors, scratch(c.H * c.B * kStep * c.D);
  FactorsOfVectors params = parts.of_vectors();
  for (params.j0 = 0; params.j0 < c.S; params.j0 += kStep) {
    params.tokens = std::min(kStep, c.S - params.j0);
    vectors.clear();
    for (int64_t head = 0; head < c.H * c.B; ++head) {
      const auto first = parts.vectors.begin() + (head * c.S + params.j0) * c.D;
      vectors.insert(vectors.end(), first, first + params.tokens * c.D);
    }
    params.vectors = vectors.data();
    ASSERT_STREQ(cuda::contribution_kernels.factors[0](params, scratch.data(), nullptr), nullptr);
  }
  EXPECT_EQ(parts.value_norms, whole.value_norms);
  for (int variant = 0; variant < 3; ++variant) {
    EXPECT_EQ(parts.factors[variant], whole.factors[variant]);
  }
}

TEST(ContributionKernelsOnDevice, WhatIsNotWantedIsNotMade) {
  const Case c{.name = "one_variant", .L = 6, .S = 70};
  const Call<float> whole = on_device<float>(c);
  PairGradients all(c);
  for (int wanted = 0; wanted < 3; ++wanted) {
    Call<float> call(c);
    std::vector<float> scratch(call.vectors.size());
    FactorsOfVectors factors = call.of_vectors();
    PairParams pairs = call.pair_params();
    factors.value_norms = nullptr;
    for (int variant = 0; variant < 3; ++variant) {
      if (variant != wanted) factors.factors[variant] = nullptr;
    }
    pairs.variants = 1;
    pairs.factors[0] = pairs.factors[wanted];
    pairs.norms[0] = pairs.norms[wanted];
    const auto& kernels = cuda::contribution_kernels;
    ASSERT_STREQ(kernels.factors[0](factors, scratch.data(), nullptr), nullptr);
    ASSERT_STREQ(norms_of(pairs), nullptr);
    for (int variant = 0; variant < 3; ++variant) {
      const bool is_made = variant == wanted;
      EXPECT_EQ(call.factors[variant] == whole.factors[variant], is_made);
      EXPECT_EQ(call.norms[variant] == whole.norms[variant], is_made);
    }
    EXPECT_EQ(call.value_norms, std::vector<float>(call.value_norms.size(), 0.0f));
    // And on the way back: gradients of one variant, and no outer products.
    PairGradients gradients(c), truth(c);
    for (PairGradients* each : {&gradients, &truth}) {
      PairGradientParams params = each->params();
      params.variants = 1;
      params.factors[0] = params.factors[wanted];
      params.norms[0] = params.norms[wanted];
      for (double*& outer : params.outer) outer = nullptr;
      if (each == &gradients) {
        std::vector<double> room(cuda::pair_gradient_scratch(params) + 1);
        ASSERT_STREQ(kernels.pair_gradients(params, room.data(), nullptr), nullptr);
      } else {
        Memory memory;
        truth::contribution_kernels.pair_gradients(params, cpu_executor(memory));
      }
    }
    expect_close(gradients.grad_weights, truth.grad_weights, 1e-13, "grad_weights");
    EXPECT_EQ(gradients.outer[0], all.outer[0]);  // as they were
  }
}

// Weights and norms that lie in larger arrays.
TEST(ContributionKernelsOnDevice, StridesAreKept) {
  const Case c{.name = "strides", .B = 2, .H = 3, .L = 37, .S = 35, .D = 6};
  const Call<float> whole = on_device<float>(c);
  Call<float> call(c);
  std::vector<float> scratch(call.vectors.size());
  const auto& kernels = cuda::contribution_kernels;
  ASSERT_STREQ(kernels.factors[0](call.of_vectors(), scratch.data(), nullptr), nullptr);
  PairParams params = call.pair_params();
  // [L, B, S, H] with gaps of one element
  std::vector<float> weights(c.L * c.B * c.S * c.H * 2), norms(c.L * c.B * c.S * 2, -1);
  const int64_t of_weights[4] = {c.S * c.H * 2, 2, c.B * c.S * c.H * 2, c.H * 2};
  const int64_t of_norms[3] = {c.S * 2, c.B * c.S * 2, 2};
  for (int64_t b = 0; b < c.B; ++b) {
    for (int64_t h = 0; h < c.H; ++h) {
      for (int64_t i = 0; i < c.L; ++i) {
        for (int64_t j = 0; j < c.S; ++j) {
          weights[b * of_weights[0] + h * of_weights[1] + i * of_weights[2] + j * of_weights[3]] =
              call.weights[((b * c.H + h) * c.L + i) * c.S + j];
        }
      }
    }
  }
  params.weights.data = weights.data();
  std::copy(of_weights, of_weights + 4, params.weights.stride);
  params.variants = 1;
  params.norms[0].data = norms.data();
  std::copy(of_norms, of_norms + 3, params.norms[0].stride);
  ASSERT_STREQ(norms_of(params), nullptr);
  int64_t wrong = 0;
  for (int64_t b = 0; b < c.B; ++b) {
    for (int64_t i = 0; i < c.L; ++i) {
      for (int64_t j = 0; j < c.S; ++j) {
        const int64_t at = b * of_norms[0] + i * of_norms[1] + j * of_norms[2];
        wrong += norms[at] != whole.norms[0][(b * c.L + i) * c.S + j];
        wrong += norms[at + 1] != -1;
      }
    }
  }
  EXPECT_EQ(wrong, 0);
}

TEST(ContributionKernelsOnDevice, HeadsBeyondFourQueriesInFloat32) {
  compare<float>({.name = "heads", .B = 1, .H = 200, .L = 6, .S = 2, .D = 4}, 2e-6);
}

TEST(ContributionKernelsOnDevice, NormsMayHaveSquaresBeyondFloat32) {
  compare<float>({.name = "large", .size = 3e19}, 2e-6);
  compare<float>({.name = "large", .B = 1, .H = 20, .L = 6, .S = 3, .D = 68, .size = 3e19}, 2e-6);
}

TEST(ContributionKernelsOnDevice, TooManyHeadsAreNamed) {
  PairGradients gradients({.name = "heads", .B = 1, .H = 193, .L = 1, .S = 1, .D = 1});
  EXPECT_STREQ(cuda::contribution_kernels.pair_gradients(gradients.params(), nullptr, nullptr),
               "there must be at most 192 heads for gradients");
  Call<double> call({.name = "heads", .B = 1, .H = 385, .L = 1, .S = 1, .D = 1});
  EXPECT_STREQ(norms_of(call.pair_params(), 1), "there must be at most 384 heads in float64");
}

TEST(ContributionKernelsOnDevice, TheOrderOfBlocksDoesNotMatter) {
  const Case c{.name = "order", .H = 5, .L = 70, .S = 40};
  const Call<float> first = on_device<float>(c);
  PairGradients first_gradients(c);
  first_gradients.by_device();
  for (const interpreter::Order order :
       {interpreter::Order::kReversed, interpreter::Order::kShuffled}) {
    interpreter::set_order(order);
    const Call<float> other = on_device<float>(c);
    for (int variant = 0; variant < 3; ++variant) {
      EXPECT_EQ(other.norms[variant], first.norms[variant]);
    }
    PairGradients gradients(c);
    gradients.by_device();
    EXPECT_EQ(gradients.grad_weights, first_gradients.grad_weights);
    EXPECT_EQ(gradients.outer[0], first_gradients.outer[0]);
  }
  interpreter::set_order(interpreter::Order::kForward);
}

TEST(ContributionKernelsOnDevice, HeadsThatCancelKeepTheirAccuracy) {
  const Case c{.name = "cancel", .B = 1, .H = 6, .L = 1, .S = 4, .D = 32};
  Call<float> call(c);
  const int64_t pitch = c.S * c.D;  // between heads
  for (int64_t i = 0; i < pitch; ++i) {
    double sum = 0;
    for (int64_t h = 0; h + 1 < c.H; ++h) sum += call.vectors[h * pitch + i];
    float& last = call.vectors[(c.H - 1) * pitch + i];
    last = static_cast<float>(1e-3 * last - sum);
  }
  std::fill(call.weights.begin(), call.weights.end(), 1.0f);
  std::vector<float> scratch(call.vectors.size());
  const auto& kernels = cuda::contribution_kernels;
  ASSERT_STREQ(kernels.factors[0](call.of_vectors(), scratch.data(), nullptr), nullptr);
  ASSERT_STREQ(norms_of(call.pair_params()), nullptr);
  for (int64_t j = 0; j < c.S; ++j) {
    double square = 0;
    for (int64_t column = 0; column < c.D; ++column) {
      double sum = 0;
      for (int64_t h = 0; h < c.H; ++h) sum += call.vectors[h * pitch + j * c.D + column];
      square += sum * sum;
    }
    EXPECT_NEAR(call.norms[0][j] / std::sqrt(square), 1, 1e-3);
  }
}

}  // namespace
}  // namespace ikattn
