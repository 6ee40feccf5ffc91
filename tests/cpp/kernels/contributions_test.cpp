// The contribution operators' CUDA kernels in the interpreter, against the CPU kernels in float64.
#include "kernels/contribution_cases.h"

namespace ikattn {
namespace {

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
    {.name = "as_many_heads_as_a_gram_matrix_takes", .B = 1, .H = 64, .L = 2, .S = 2, .D = 40},
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
    ASSERT_STREQ(call.make_factors(call.of_vectors()), nullptr);
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

// The glue makes as many tokens at a time as there is memory for.
TEST(ContributionKernelsOnDevice, TokensMayComeInRounds) {
  const Case c{.name = "rounds", .S = 131, .D = 9};
  const Call<float> whole = on_device<float>(c);
  Call<float> parts(c);
  constexpr int64_t kStep = 50;
  FactorsOfVectors params = parts.of_vectors();
  for (params.j0 = 0; params.j0 < c.S; params.j0 += kStep) {
    params.tokens = std::min(kStep, c.S - params.j0);
    ASSERT_STREQ(parts.make_factors(params), nullptr);
  }
  EXPECT_EQ(parts.value_norms, whole.value_norms);
  for (int variant = 0; variant < 3; ++variant) {
    EXPECT_EQ(parts.factors[variant], whole.factors[variant]);
  }
}

TEST(ContributionKernelsOnDevice, VectorsMayComeInRounds) {
  const Case c{.name = "rounds", .S = 131, .D = 9};
  const Call<double> whole = on_device<double>(c);
  Call<double> parts(c);
  constexpr int64_t kStep = 50;
  std::vector<double> vectors;
  FactorsOfVectors params = parts.of_vectors();
  for (params.j0 = 0; params.j0 < c.S; params.j0 += kStep) {
    params.tokens = std::min(kStep, c.S - params.j0);
    vectors.clear();
    for (int64_t head = 0; head < c.H * c.B; ++head) {
      const auto first = parts.vectors.begin() + (head * c.S + params.j0) * c.D;
      vectors.insert(vectors.end(), first, first + params.tokens * c.D);
    }
    params.vectors = vectors.data();
    ASSERT_STREQ(parts.make_factors(params), nullptr);
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
    ASSERT_STREQ(call.make_factors(factors), nullptr);
    ASSERT_STREQ(norms_of(pairs), nullptr);
    for (int variant = 0; variant < 3; ++variant) {
      const bool is_made = variant == wanted;
      EXPECT_EQ(call.factors[variant] == whole.factors[variant], is_made);
      EXPECT_EQ(call.norms[variant] == whole.norms[variant], is_made);
    }
    EXPECT_EQ(call.value_norms, std::vector<float>(call.value_norms.size(), 0.0f));
    // Gradients of one variant come in here, and there are no outer products.
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
    EXPECT_EQ(gradients.outer[0], all.outer[0]);  // unchanged
  }
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
  ASSERT_STREQ(call.make_factors(call.of_vectors()), nullptr);
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