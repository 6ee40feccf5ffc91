// Norms of pairs whose weights are given, in the interpreter.
#include "kernels/contribution_cases.h"

namespace ikattn {
namespace {

// Weights may be narrower than the maps.
TEST(GivenWeightsOnDevice, WeightsMayBeOf16Bits) {
  for (const ElementType type : {ElementType::kBFloat16, ElementType::kFloat16}) {
    for (const int64_t heads : {3, 17, 50}) {
      const Case c{.name = "narrow", .B = 1, .H = heads, .L = 9, .S = 19, .D = 12, .padding = true};
      Call<float> call(c), rounded(c);
      std::vector<uint16_t> narrow;
      for (float& weight : rounded.weights) {
        const bool is_half = type == ElementType::kFloat16;
        narrow.push_back(is_half ? to_half(weight).bits : to_bfloat16(weight).bits);
        weight = is_half ? to_float(Half{narrow.back()}) : to_float(BFloat16{narrow.back()});
      }
      for (Call<float>* each : {&call, &rounded}) {
        ASSERT_STREQ(each->make_factors(each->of_vectors()), nullptr);
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

// Weights under dropout, or given by the caller, may be of any size: a pair's digits are those of
// its own heads.
TEST(GivenWeightsOnDevice, WeightsMayBeOfAnySizeAndSign) {
  for (const int64_t heads : {5, 40}) {
    const Case c{.name = "sizes", .B = 1, .H = heads, .L = 18, .S = 5, .D = 50};
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
    ASSERT_STREQ(call.make_factors(call.of_vectors()), nullptr);
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

TEST(GivenWeightsOnDevice, WeightsThatAreNotFiniteShowInTheirPairAlone) {
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
  call.factors[1][20] = NAN;  // a factor of key 20
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

// Weights and norms that lie in larger arrays.
TEST(GivenWeightsOnDevice, StridesAreKept) {
  const Case c{.name = "strides", .B = 2, .H = 3, .L = 37, .S = 35, .D = 6};
  const Call<float> whole = on_device<float>(c);
  Call<float> call(c);
  ASSERT_STREQ(call.make_factors(call.of_vectors()), nullptr);
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

}  // namespace
}  // namespace ikattn
