// The streamed maps' CUDA kernels in the interpreter, against their definition in float64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "interpreter/interpreter.h"
#include "kernels/streamed_call.h"

namespace ikattn {
namespace {

// Every norm within `rounding` of the product of the absolute values.
void expect_norms(const Call& call, double rounding) {
  const Case& c = call.c;
  int64_t wrong = 0;
  double worst = 0;
  for (int64_t b = 0; b < c.B; ++b) {
    for (int64_t i = 0; i < c.L; ++i) {
      std::vector<std::vector<double>> weights;
      for (int64_t h = 0; h < c.H; ++h) {
        weights.push_back(call.weights(b, h, i));
        const int64_t j = i + c.diagonal;
        if (j >= c.S) continue;
        EXPECT_NEAR(call.own[(b * c.H + h) * c.L + i], weights[h][j], 1e-5);
      }
      for (int64_t j = 0; j < c.S; ++j) {
        const bool is_padding =
            call.query_padding[b * c.L + i] != 0 || call.key_padding[b * c.S + j] != 0;
        for (int variant = 0; variant < c.variants; ++variant) {
          double square = 0, bound = 0;
          int64_t entry = 0;
          for (int64_t h = 0; h < c.H; ++h) {
            double sum = 0, size = 0;
            for (int64_t k = h; k < c.H; ++k, ++entry) {
              const double term = call.factor(variant, b, j, entry) * weights[k][j];
              sum += term;
              size += std::fabs(term);
            }
            square += sum * sum;
            bound += size * size;
          }
          const double expected = is_padding ? 0 : std::sqrt(square);
          const double got = call.norms[variant][(b * c.L + i) * c.S + j];
          const double error = std::fabs(got - expected) / (rounding * std::sqrt(bound) + 1e-10);
          worst = std::max(worst, error);
          wrong += !(error <= 1);
        }
      }
    }
  }
  EXPECT_EQ(wrong, 0) << "the largest error is " << worst << " times what is allowed";
}

// Every sum over the values of other keys within `rounding` of the sum of absolute values.
void expect_sums(const Call& call, double rounding) {
  const Case& c = call.c;
  for (int64_t row = 0; row < c.B * c.H * c.L; ++row) {
    const int64_t b = row / (c.H * c.L), h = row / c.L % c.H, i = row % c.L;
    const std::vector<double> weights = call.weights(b, h, i);
    for (int64_t column = 0; column < c.d_v; ++column) {
      double sum = 0, size = 0;
      for (int64_t j = 0; j < c.S; ++j) {
        if (j == i + c.diagonal || call.key_padding[b * c.S + j] != 0) continue;
        const int64_t token = (b * c.G + h / (c.H / c.G)) * c.S + j;
        const double term = weights[j] * static_cast<double>(call.values[token * c.d_v + column]);
        sum += term;
        size += std::fabs(term);
      }
      EXPECT_NEAR(call.sums[row * c.d_v + column], sum, rounding * size + 1e-10);
    }
  }
}

const Case kCases[] = {
    {.name = "plain"},
    {.name = "causal", .B = 2, .is_causal = true},
    {.name = "masked", .B = 2, .is_bfloat16 = true, .masked = true},
    {.name = "causal_and_masked", .L = 20, .S = 70, .is_causal = true, .masked = true},
    {.name = "masked_by_head",
     .B = 2,
     .L = 70,
     .is_causal = true,
     .masked = true,
     .masked_by_head = true},
    {.name = "offsets", .B = 2, .is_causal = true, .has_offsets = true},
    {.name = "offsets_and_mask", .L = 20, .is_split = true, .masked = true, .has_offsets = true},
    {.name = "implicit_offsets", .is_implicit = true, .has_offsets = true},
    {.name = "padding", .B = 2, .padding = true},
    {.name = "implicit", .is_implicit = true, .is_causal = true},
    {.name = "one_head", .H = 1, .G = 1, .L = 3, .S = 2},
    {.name = "seventeen_heads", .H = 17, .G = 17, .L = 18, .S = 17, .width = 64},
    {.name = "thirty_two_heads", .H = 32, .G = 8, .L = 66, .S = 19, .is_bfloat16 = true},
    {.name = "forty_heads", .H = 40, .G = 20, .L = 34, .S = 17, .is_causal = true},
    {.name = "sixty_four_heads", .H = 64, .G = 1, .L = 9, .S = 18, .is_bfloat16 = true},
    {.name = "split_with_forty_heads", .H = 40, .G = 8, .L = 18, .S = 17, .is_split = true},
    {.name = "split_with_sixty_four_heads",
     .H = 64,
     .G = 1,
     .L = 17,
     .S = 5,
     .is_split = true,
     .masked = true,
     .masked_by_head = true,
     .variants = 2},
    {.name = "values_of_two_blocks", .L = 40, .S = 150, .is_causal = true, .d_v = 70},
    {.name = "three_variants", .H = 3, .G = 1, .L = 9, .S = 18, .variants = 3},
    {.name = "queries_after_cached_keys", .L = 10, .S = 37, .diagonal = 20},
    {.name = "split", .L = 66, .is_split = true, .is_causal = true},
    {.name = "split_with_seventeen_heads",
     .H = 17,
     .G = 1,
     .L = 35,
     .S = 17,
     .is_split = true,
     .masked = true,
     .variants = 2},
    {.name = "no_queries", .L = 0},
    {.name = "no_keys", .S = 0, .is_split = true},
};

class StreamedKernelsOnDevice : public ::testing::TestWithParam<Case> {};

TEST_P(StreamedKernelsOnDevice, NormsErrByTheRoundingsOfTheirNumbers) {
  Call call(GetParam());
  call.run();
  // Weight and factor are of 11 bits each, or of 22, where the logit's rounding is what remains.
  expect_norms(call, call.c.is_split ? 4e-6 : 0x1p-10);
  expect_sums(call, 4e-6);
}

INSTANTIATE_TEST_SUITE_P(Interpreter, StreamedKernelsOnDevice, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

TEST(StreamedKernelsOnDevice, MostHeadsFitTheSharedMemoryOfEveryGpu) {
  interpreter::set_shared_limit(99 * 1024);
  for (const bool is_split : {false, true}) {
    Call call({.name = "most",
               .H = cuda::kMostNormHeads,
               .L = 2,
               .S = 2,
               .is_split = is_split,
               .variants = 3});
    call.run();
  }
  interpreter::set_shared_limit(227 * 1024);
}

TEST(StreamedKernelsOnDevice, FactorsMayBeOfAnySize) {
  for (const float size : {1e-30f, 1e25f}) {
    Call call({.name = "sizes", .L = 9, .S = 9, .is_split = true}), ordinary = call;
    for (float& x : call.factors[0]) x *= size;
    call.run();
    ordinary.run();
    for (size_t i = 0; i < call.norms[0].size(); ++i) {
      EXPECT_NEAR(call.norms[0][i] / size, ordinary.norms[0][i], 1e-5);
    }
  }
}

TEST(StreamedKernelsOnDevice, WhoWeighsABrokenKeyIsBroken) {
  for (const float broken : {NAN, INFINITY}) {
    Call call({.name = "broken", .L = 20, .S = 20, .is_causal = true, .variants = 2});
    Call sound = call;
    call.factors[1][4] = broken;  // key 4, of the second variant alone
    for (int64_t j = 5; j < 20; ++j) call.key_numbers[j * 4 + 1] = 40;  // small weights of key 4
    sound.key_numbers = call.key_numbers;
    call.run();
    sound.run();
    for (int64_t i = 0; i < 20; ++i) {
      for (int64_t j = 0; j < 20; ++j) {
        const float got = call.norms[1][i * 20 + j];
        if (j != 4 || i < 4) {
          EXPECT_EQ(got, sound.norms[1][i * 20 + j]);
        } else if (std::isnan(broken)) {
          EXPECT_TRUE(std::isnan(got));
        } else {
          EXPECT_EQ(got, INFINITY);
        }
        EXPECT_NEAR(call.norms[0][i * 20 + j], sound.norms[0][i * 20 + j], 1e-10);
      }
    }
  }
}

TEST(StreamedKernelsOnDevice, RowsThatSeeNaNAreNaNAndNoOthers) {
  const Case c{.name = "nan", .G = 4, .L = 80, .S = 80, .is_causal = true};
  Call call(c), sound(c);
  call.query[3 * c.width] = 0x7fff;                // head 0, query 3
  call.key[(c.S + 40) * c.width] = 0x7fff;         // head 1, key 40
  call.key_numbers[(2 * c.S + 70) * 4 + 1] = NAN;  // head 2, key 70
  call.run();
  sound.run();
  for (int64_t i = 0; i < c.L; ++i) {
    for (int64_t j = 0; j < c.S; ++j) {
      const float got = call.norms[0][i * c.S + j];
      if (i == 3 || i >= 40) {
        EXPECT_TRUE(std::isnan(got)) << i << ", " << j;
      } else {
        EXPECT_EQ(got, sound.norms[0][i * c.S + j]) << i << ", " << j;
      }
    }
  }
}

TEST(StreamedKernelsOnDevice, WhoWeighsABrokenValueIsNaN) {
  const Case c{.name = "broken_value", .L = 70, .S = 70, .is_causal = true};
  Call call(c);
  call.broken[40] = 1;  // key 40 of the first value head
  call.run();
  for (int64_t h = 0; h < c.H; ++h) {
    for (int64_t i = 0; i < c.L; ++i) {
      const float sum = call.sums[(h * c.L + i) * c.d_v];
      EXPECT_EQ(std::isnan(sum), h < c.H / c.G && i > 40) << h << ", " << i;
    }
  }
}

TEST(StreamedKernelsOnDevice, WhatHiddenKeysHoldDoesNotCount) {
  const Case c{.name = "hidden", .G = 4, .L = 20, .S = 20};
  Call call(c), sound(c);
  for (Call* each : {&call, &sound}) {
    for (int64_t h = 0; h < c.H; ++h) each->key_numbers[(h * c.S + 7) * 4 + 1] = -INFINITY;
  }
  for (int64_t h = 0; h < c.H; ++h) call.key[(h * c.S + 7) * c.width] = 0x7fff;
  call.factors[0][7] = NAN;
  call.run();
  sound.run();
  EXPECT_EQ(call.norms[0], sound.norms[0]);
}

TEST(StreamedKernelsOnDevice, TheOrderOfBlocksDoesNotMatter) {
  const Case c{.name = "order", .H = 5, .G = 5, .L = 70, .S = 40, .is_causal = true};
  Call first(c);
  first.run();
  for (const interpreter::Order order :
       {interpreter::Order::kReversed, interpreter::Order::kShuffled}) {
    interpreter::set_order(order);
    Call other(c);
    other.run();
    EXPECT_EQ(other.norms[0], first.norms[0]);
    EXPECT_EQ(other.own, first.own);
  }
}

}  // namespace
}  // namespace ikattn
