// The streamed maps' CUDA kernels in the interpreter, against their definition in float64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "contributions/cuda/streamed/streamed.h"
#include "support/cuda/float16.h"
#include "support/interpreter/interpreter.h"

namespace ikattn {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Case {
  std::string name;
  int64_t B = 1, H = 4, G = 2, L = 37, S = 37, width = 32;
  bool is_split = false, is_bfloat16 = false, is_implicit = false, is_causal = false;
  bool masked = false, padding = false;
  bool masked_by_head = false, has_offsets = false;
  int64_t d_v = 9;
  int variants = 1;
  int64_t diagonal = 0;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }
};

// Operands of a call, and what the kernels make of them.
struct Call {
  explicit Call(const Case& c) : c(c), factors(c.variants), fragments(c.variants) {
    std::mt19937 generator(5);
    std::normal_distribution<float> normal;
    const auto numbers = [&](int64_t count) {
      std::vector<float> result(count);
      for (float& x : result) x = normal(generator);
      return result;
    };
    const auto operand = [&](int64_t rows) {
      std::vector<uint16_t> result;
      for (const float x : numbers(rows * c.width)) {
        result.push_back(c.is_bfloat16 ? to_bfloat16(x).bits : to_half(x).bits);
      }
      return result;
    };
    query = operand(c.B * c.H * c.L);
    key = operand(c.B * c.G * c.S);
    key_numbers = numbers(c.B * c.H * c.S * 4);
    for (size_t i = 0; i < key_numbers.size(); i += 4) {
      key_numbers[i] = i % 8 == 0 ? 0.5f : 2.0f;
      key_numbers[i + 2] = 1e-8f * key_numbers[i + 1];  // what float32 leaves
    }
    if (c.masked && c.S > 3) key_numbers[3 * 4 + 1] = -INFINITY;  // one head's key 3
    rows.resize(c.B * c.H * c.L * cuda::kRowNumbers);
    for (size_t i = 0; i < rows.size(); i += cuda::kRowNumbers) rows[i] = 0.2f;
    mask_heads = c.masked_by_head ? c.H : 1;
    mask.resize(c.B * mask_heads * c.L * c.S);
    for (uint8_t& seen : mask) seen = generator() % 4 != 0;
    for (int64_t j = 0; j < c.S && c.L > 5; ++j) mask[5 * c.S + j] = 0;  // a row that sees nothing
    if (c.has_offsets) offsets = numbers(c.B * c.H * c.L * c.S);
    for (size_t i = 0; i < offsets.size(); i += 7) offsets[i] = i % 3 == 0 ? -INFINITY : -3e38f;
    query_padding.resize(c.B * c.L);
    key_padding.resize(c.B * c.S);
    if (c.padding) query_padding[c.L - 1] = key_padding[c.S - 1] = 1;
    const int64_t blocks = (c.S + kFactorBlock - 1) / kFactorBlock;
    for (std::vector<float>& of_variant : factors) {
      of_variant = numbers(c.B * blocks * triangle(c.H) * kFactorBlock);
    }
    units.resize(c.variants, std::vector<float>(c.B * c.S));
    norms.resize(c.variants, std::vector<float>(c.B * c.L * c.S, -1.0f));
    own.assign(c.B * c.H * c.L, 0.0f);
    values = numbers(c.B * c.G * c.S * c.d_v);
    broken.assign(c.B * c.G * c.S, 0.0f);
    sums.assign(c.B * c.H * c.L * c.d_v, -1.0f);
  }

  double operand(const std::vector<uint16_t>& from, int64_t at) const {
    return c.is_bfloat16 ? to_float(BFloat16{from[at]}) : to_float(Half{from[at]});
  }
  float factor(int variant, int64_t b, int64_t j, int64_t entry) const {
    const int64_t blocks = (c.S + kFactorBlock - 1) / kFactorBlock;
    return factors[variant]
                  [((b * blocks + j / kFactorBlock) * triangle(c.H) + entry) * kFactorBlock +
                   j % kFactorBlock];
  }

  void run() {
    const auto& kernels = cuda::streamed_kernels;
    const int64_t words = (c.S + cuda::kMaskKeys - 1) / cuda::kMaskKeys;
    std::vector<uint32_t> bits(c.B * mask_heads * c.L * words);
    const int64_t pairs = c.L * c.S;
    const cuda::MaskParams mask_params{
        c.B,         c.L,
        c.S,         Array{mask.data(), ElementType::kBool, {mask_heads * pairs, c.S, 1, pairs}},
        bits.data(), mask_heads};
    ASSERT_STREQ(kernels.mask_words(mask_params, nullptr), nullptr);
    cuda::StreamedParams params;
    params.B = c.B;
    params.H = c.H;
    params.G = c.G;
    params.L = c.L;
    params.S = c.S;
    params.width = c.width;
    const ElementType type = c.is_bfloat16 ? ElementType::kBFloat16 : ElementType::kFloat16;
    const int64_t L = c.L * c.width, S = c.S * c.width;
    params.query = Array{query.data(), type, {c.H * L, L, c.width, 1}};
    params.key = Array{key.data(), type, {c.G * S, S, c.width, 1}};
    params.key_numbers = key_numbers.data();
    params.rows = rows.data();
    params.is_implicit = c.is_implicit;
    params.eps = 1e-3f;
    params.is_causal = c.is_causal;
    if (c.masked) params.mask = bits.data();
    params.mask_heads = mask_heads;
    if (c.has_offsets) {
      params.offsets = Array{offsets.data(), ElementType::kFloat32, {c.H * pairs, pairs, c.S, 1}};
    }
    if (c.is_implicit) params.farthest_offset = 100;
    params.is_split = c.is_split;
    params.variants = c.variants;
    for (int variant = 0; variant < c.variants; ++variant) {
      fragments[variant].resize(c.B * c.S * cuda::fragment_words(c.H, c.is_split));
      const cuda::FragmentParams fragment_params{c.B,
                                                 c.H,
                                                 c.S,
                                                 c.is_split,
                                                 factors[variant].data(),
                                                 fragments[variant].data(),
                                                 units[variant].data()};
      ASSERT_STREQ(kernels.factor_fragments(fragment_params, nullptr), nullptr);
      params.fragments[variant] = fragments[variant].data();
      params.units[variant] = units[variant].data();
      params.norms[variant] =
          Array{norms[variant].data(), ElementType::kFloat32, {c.L * c.S, c.S, 1, 0}};
    }
    params.query_padding = Array{query_padding.data(), ElementType::kBool, {c.L, 1, 0, 0}};
    params.key_padding = Array{key_padding.data(), ElementType::kBool, {c.S, 1, 0, 0}};
    params.own = own.data();
    params.diagonal = c.diagonal;
    ASSERT_STREQ(kernels.row_sums(params, nullptr), nullptr);
    ASSERT_STREQ(kernels.pair_norms(params, nullptr), nullptr);
    cuda::WeighedValueParams weighed{params};
    std::vector<float> own_again(own.size(), 0.0f);
    weighed.own = own_again.data();
    weighed.value_heads = c.G;
    weighed.d_v = c.d_v;
    const int64_t of_head = c.S * c.d_v;
    weighed.values =
        Array{values.data(), ElementType::kFloat32, {c.G * of_head, of_head, c.d_v, 1}};
    weighed.broken = broken.data();
    weighed.sums = sums.data();
    ASSERT_STREQ(kernels.weighed_values(weighed, nullptr), nullptr);
    for (size_t row = 0; row < own.size(); ++row) {
      EXPECT_TRUE(own_again[row] == own[row] || std::isnan(own[row]));
    }
  }

  double offset(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (!c.has_offsets) return 0;
    const double given = offsets[((b * c.H + h) * c.L + i) * c.S + j];
    return c.is_implicit && given < -100 && given != -kInfinity ? -100 : given;
  }

  bool sees(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (c.is_causal && j > i) return false;
    if (key_numbers[((b * c.H + h) * c.S + j) * 4 + 1] == -INFINITY) return false;
    if (c.has_offsets && offset(b, h, i, j) == -kInfinity) return false;
    const int64_t of_mask = b * mask_heads + (c.masked_by_head ? h : 0);
    return !c.masked || mask[(of_mask * c.L + i) * c.S + j] != 0;
  }

  // Weights of a head's query, by their definition.
  std::vector<double> weights(int64_t b, int64_t h, int64_t i) const {
    std::vector<double> magnitude(c.S), logit(c.S, -kInfinity);
    double largest = -kInfinity, sum = 0;
    for (int64_t j = 0; j < c.S; ++j) {
      if (!sees(b, h, i, j)) continue;
      double x = 0;
      for (int64_t column = 0; column < c.width; ++column) {
        x += operand(query, ((b * c.H + h) * c.L + i) * c.width + column) *
             operand(key, ((b * c.G + h / (c.H / c.G)) * c.S + j) * c.width + column);
      }
      const int64_t token = (b * c.H + h) * c.S + j;
      x *= double{0.2f} * key_numbers[token * 4];
      magnitude[j] = c.is_implicit ? x * x + double{1e-3f} : 1;
      logit[j] = key_numbers[token * 4 + 1] + double{key_numbers[token * 4 + 2]} +
                 (c.is_implicit ? 0 : x) + offset(b, h, i, j);
      largest = std::max(largest, logit[j]);
    }
    std::vector<double> result(c.S);
    for (int64_t j = 0; j < c.S; ++j) {
      if (logit[j] == -kInfinity) continue;
      sum += result[j] = magnitude[j] * std::exp(logit[j] - largest);
    }
    for (double& weight : result) weight = sum > 0 ? weight / sum : 0;
    return result;
  }

  Case c;
  std::vector<uint16_t> query, key;
  int64_t mask_heads = 1;
  std::vector<float> key_numbers, rows, own, offsets, values, broken, sums;
  std::vector<uint8_t> mask, query_padding, key_padding;
  std::vector<std::vector<float>> factors, units, norms;
  std::vector<std::vector<uint32_t>> fragments;
};

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
  interpreter::set_order(interpreter::Order::kForward);
}

}  // namespace
}  // namespace ikattn
