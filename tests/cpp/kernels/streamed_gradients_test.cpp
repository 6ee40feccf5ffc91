// The gradients of streamed maps by CUDA kernels in the interpreter, against their definition in
// float64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "interpreter/interpreter.h"
#include "kernels/agreement.h"
#include "kernels/streamed_call.h"

namespace ikattn {
namespace {

// Incoming gradients at the norms of one variant, and the results of the kernels.
struct Gradients {
  explicit Gradients(const Case& c, int64_t strip = 1 << 20) : call(c), strip(strip) {
    std::mt19937 generator(11);
    std::normal_distribution<float> normal;
    incoming.resize(c.B * c.L * c.S);
    for (float& x : incoming) x = normal(generator);
    const int64_t heads = padded();
    outer.assign(c.B * c.S * heads * heads, 0.0f);
    weights.assign(c.B * c.H * c.L * c.S, -1.0f);
    scores = weights;
    logits.assign(c.B * c.H * c.S, 0.0);
  }

  int64_t padded() const { return 16 * cuda::head_tiles(call.c.H); }

  void run() {
    const Case& c = call.c;
    const auto& kernels = cuda::streamed_kernels;
    call.run();
    std::vector<uint32_t> reversed(call.fragments[0].size());
    std::vector<float> units = call.units[0];
    const cuda::FragmentParams fragment_params{
        c.B, c.H, c.S, c.is_split, call.factors[0].data(), reversed.data(), units.data(), true};
    ASSERT_STREQ(kernels.factor_fragments(fragment_params, nullptr), nullptr);
    cuda::StreamedGradientParams params;
    static_cast<cuda::StreamedParams&>(params) = call.params;
    params.variants = 1;
    params.reversed = reversed.data();
    params.outer = outer.data();
    for (int64_t i0 = 0; i0 < c.L; i0 += strip) {
      params.i0 = i0;
      params.queries = std::min(strip, c.L - i0);
      params.keys = c.is_causal ? std::min(c.S, i0 + params.queries) : c.S;
      const int64_t tiles = (params.queries + cuda::kStripRows - 1) / cuda::kStripRows;
      std::vector<float> grad(c.B * c.H * params.queries * params.keys, -1.0f);
      std::vector<float> grad_logits(c.B * c.H * tiles * params.keys);
      params.grad_norms =
          Array{incoming.data() + i0 * c.S, ElementType::kFloat32, {c.L * c.S, c.S, 1, 0}};
      params.grad = grad.data();
      params.grad_logits = grad_logits.data();
      ASSERT_STREQ(kernels.pair_gradients(params, nullptr), nullptr);
      keep(params, grad, weights);
      ASSERT_STREQ(kernels.score_gradients(params, nullptr), nullptr);
      keep(params, grad, scores);
      for (size_t index = 0; index < grad_logits.size(); ++index) {
        const int64_t j = index % params.keys, head = index / (tiles * params.keys);
        logits[head * c.S + j] += grad_logits[index];
      }
    }
  }

  Call call;
  int64_t strip;
  std::vector<float> incoming, outer, weights, scores;  // [B, L, S]; [B, S, H, H]; [B, H, L, S]
  std::vector<double> logits;                           // [B, H, S]

 private:
  // Keeps a strip's gradients where they belong; zero behind its keys.
  void keep(const cuda::StreamedGradientParams& params, const std::vector<float>& grad,
            std::vector<float>& to) const {
    const Case& c = call.c;
    for (int64_t head = 0; head < c.B * c.H; ++head) {
      for (int64_t i = 0; i < params.queries; ++i) {
        for (int64_t j = 0; j < c.S; ++j) {
          to[(head * c.L + params.i0 + i) * c.S + j] =
              j < params.keys ? grad[(head * params.queries + i) * params.keys + j] : 0.0f;
        }
      }
    }
  }
};

// Gradients by their definition.
struct Truth {
  explicit Truth(const Gradients& from)
      : outer(from.outer.size()),
        weights(from.weights.size()),
        scores(from.weights.size()),
        logits(from.logits.size()) {
    for (int64_t b = 0; b < from.call.c.B; ++b) {
      for (int64_t i = 0; i < from.call.c.L; ++i) add_row(from, b, i);
    }
  }

  std::vector<double> outer, weights, scores, logits;

 private:
  void add_row(const Gradients& from, int64_t b, int64_t i) {
    const Call& call = from.call;
    const Case& c = call.c;
    std::vector<std::vector<double>> a;
    for (int64_t h = 0; h < c.H; ++h) a.push_back(call.weights(b, h, i));
    const auto at = [&](int64_t h, int64_t j) { return ((b * c.H + h) * c.L + i) * c.S + j; };
    for (int64_t j = 0; j < c.S; ++j) {
      if (call.query_padding[b * c.L + i] != 0 || call.key_padding[b * c.S + j] != 0) continue;
      std::vector<double> sums(c.H);
      double square = 0;
      int64_t entry = 0;
      for (int64_t h = 0; h < c.H; ++h) {
        for (int64_t k = h; k < c.H; ++k) sums[h] += call.factor(0, b, j, entry++) * a[k][j];
        square += sums[h] * sums[h];
      }
      if (square == 0) continue;
      const double slope = from.incoming[(b * c.L + i) * c.S + j] / std::sqrt(square);
      entry = 0;
      for (int64_t h = 0; h < c.H; ++h) {
        for (int64_t k = h; k < c.H; ++k) {
          weights[at(k, j)] += slope * call.factor(0, b, j, entry++) * sums[h];
        }
        for (int64_t k = 0; k < c.H; ++k) {
          outer[((b * c.S + j) * from.padded() + h) * from.padded() + k] +=
              slope * a[h][j] * a[k][j];
        }
      }
    }
    for (int64_t h = 0; h < c.H; ++h) {
      double delta = 0;
      for (int64_t j = 0; j < c.S; ++j) delta += a[h][j] * weights[at(h, j)];
      for (int64_t j = 0; j < c.S; ++j) {
        const double rest = weights[at(h, j)] - delta;
        logits[(b * c.H + h) * c.S + j] += a[h][j] * rest;
        scores[at(h, j)] = a[h][j] * rest * change(call, b, h, i, j);
      }
    }
  }

  // Returns the derivative of the logarithm of a pair's magnitude by its score.
  static double change(const Call& call, int64_t b, int64_t h, int64_t i, int64_t j) {
    const Case& c = call.c;
    if (!c.is_implicit) return 1;
    double x = 0;
    for (int64_t column = 0; column < c.width; ++column) {
      x += call.operand(call.query, ((b * c.H + h) * c.L + i) * c.width + column) *
           call.operand(call.key, ((b * c.G + h / (c.H / c.G)) * c.S + j) * c.width + column);
    }
    x *= double{0.2f} * call.key_numbers[((b * c.H + h) * c.S + j) * 4];
    return 2 * x / (x * x + double{1e-3f});
  }
};

const Case kCases[] = {
    {.name = "plain"},
    {.name = "causal", .B = 2, .L = 70, .S = 70, .is_causal = true},
    {.name = "masked", .B = 2, .is_bfloat16 = true, .masked = true},
    {.name = "padding", .B = 2, .padding = true},
    {.name = "implicit", .is_implicit = true, .is_causal = true},
    {.name = "one_head", .H = 1, .G = 1, .L = 3, .S = 2},
    {.name = "thirty_two_heads", .H = 32, .G = 8, .L = 34, .S = 19, .is_bfloat16 = true},
    {.name = "split", .L = 40, .is_split = true, .is_causal = true},
    {.name = "split_implicit", .is_split = true, .is_implicit = true, .masked = true},
    {.name = "split_with_seventeen_heads",
     .H = 17,
     .G = 1,
     .L = 35,
     .S = 17,
     .is_split = true,
     .masked = true},
};

class StreamedGradientsOnDevice : public ::testing::TestWithParam<Case> {};

TEST_P(StreamedGradientsOnDevice, TheyErrByTheRoundingsOfTheirNumbers) {
  Gradients got(GetParam(), 32);
  got.run();
  const Truth expected(got);
  const double tolerance = got.call.c.is_split ? 4e-6 : 0x1p-9;
  expect_close(got.weights, expected.weights, tolerance, "weights");
  expect_close(got.outer, expected.outer, tolerance, "outer products");
  expect_close(got.scores, expected.scores, tolerance, "scores");
  expect_close(got.logits, expected.logits, tolerance, "logits");
}

INSTANTIATE_TEST_SUITE_P(Interpreter, StreamedGradientsOnDevice, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

TEST(StreamedGradientsOnDevice, NeitherStripsNorTheOrderOfBlocksMatter) {
  const Case c{.name = "order", .H = 5, .G = 5, .L = 70, .S = 40, .is_causal = true};
  Gradients first(c);
  first.run();
  for (const interpreter::Order order :
       {interpreter::Order::kReversed, interpreter::Order::kShuffled}) {
    interpreter::set_order(order);
    Gradients other(c, 32);
    other.run();
    EXPECT_EQ(other.weights, first.weights);
    EXPECT_EQ(other.scores, first.scores);
    EXPECT_EQ(other.outer, first.outer);
  }
}

TEST(StreamedGradientsOnDevice, MostHeadsFitTheSharedMemoryOfEveryGpu) {
  interpreter::set_shared_limit(99 * 1024);
  Gradients most({.name = "most", .H = cuda::kMostStreamedHeads, .L = 2, .S = 2, .is_split = true});
  most.run();
  interpreter::set_shared_limit(227 * 1024);
}

TEST(StreamedGradientsOnDevice, FactorsAndIncomingGradientsMayBeOfAnySize) {
  for (const float size : {1e-15f, 1e15f}) {
    Gradients got({.name = "sizes", .L = 9, .S = 9, .is_split = true}), ordinary = got;
    for (float& x : got.call.factors[0]) x *= size;
    for (float& x : got.incoming) x /= size;
    got.run();
    ordinary.run();
    for (size_t i = 0; i < got.weights.size(); ++i) {
      EXPECT_NEAR(got.weights[i], ordinary.weights[i], 1e-5);
    }
    for (size_t i = 0; i < got.outer.size(); ++i) {
      EXPECT_NEAR(double{got.outer[i]} * double{size} * double{size}, ordinary.outer[i], 1e-5);
    }
  }
}

TEST(StreamedGradientsOnDevice, WhoWeighsABrokenKeyIsBrokenAndNoOthers) {
  const Case c{.name = "broken", .L = 20, .S = 20, .is_causal = true};
  for (const float broken : {NAN, INFINITY}) {
    Gradients got(c), sound(c);
    got.call.factors[0][4] = broken;  // key 4
    got.run();
    sound.run();
    for (int64_t i = 0; i < c.L; ++i) {
      for (int64_t j = 0; j < c.S; ++j) {
        EXPECT_EQ(std::isnan(got.weights[i * c.S + j]), j == 4 && i >= 4) << i << ", " << j;
        EXPECT_EQ(std::isnan(got.scores[i * c.S + j]), j <= i && i >= 4) << i << ", " << j;
      }
    }
    const int64_t each = got.padded() * got.padded();
    EXPECT_TRUE(std::isnan(got.outer[4 * each]));
    EXPECT_EQ(got.outer[3 * each], sound.outer[3 * each]);
  }
}

TEST(StreamedGradientsOnDevice, WhatComesInAtHiddenPairsAndPaddingDoesNotCount) {
  const Case c{.name = "hidden", .L = 20, .S = 20, .is_causal = true, .padding = true};
  Gradients got(c), sound(c);
  for (int64_t i = 0; i < c.L; ++i) {
    for (int64_t j = 0; j < c.S; ++j) {
      if (j > i || i == c.L - 1 || j == c.S - 1) got.incoming[i * c.S + j] = NAN;
    }
  }
  got.run();
  sound.run();
  EXPECT_EQ(got.weights, sound.weights);
  EXPECT_EQ(got.scores, sound.scores);
  EXPECT_EQ(got.outer, sound.outer);
}

}  // namespace
}  // namespace ikattn
