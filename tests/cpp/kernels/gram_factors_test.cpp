// Factors of tokens from values and projection, in the interpreter, against sums of vectors in
// float64.
#include <bit>

#include "kernels/contribution_cases.h"

namespace ikattn {
namespace {

// Values and a projection of any numbers, and what the kernels make of them.
struct Tokens {
  int64_t H = 5, G = 5, S = 9, D = 40, width = 16;
  std::vector<float> values{}, projection{}, factors{}, value_norms{};
  std::vector<uint32_t> fragments{};
  bool is_short = false;

  void fill() {
    std::mt19937 generator(3);
    std::normal_distribution<float> normal;
    values.resize(G * S * width);
    projection.resize(D * H * width);
    for (float& x : values) x = rounded(normal(generator));
    for (float& x : projection) x = rounded(normal(generator));
  }
  float rounded(float x) const { return is_short ? to_float(to_bfloat16(x)) : x; }
  float& value(int64_t g, int64_t j, int64_t c) { return values[(g * S + j) * width + c]; }
  double vector(int64_t h, int64_t j, int64_t column) const {
    double sum = 0;
    for (int64_t c = 0; c < width; ++c) {
      sum += double{values[(h / (H / G) * S + j) * width + c]} *
             double{projection[(column * H + h) * width + c]};
    }
    return sum;
  }
  void run() {
    const int64_t blocks = (S + kFactorBlock - 1) / kFactorBlock;
    factors.assign(blocks * triangle(H) * kFactorBlock, 0);
    value_norms.assign(H * S, -1);
    fragments.assign(cuda::factor_fragment_words(1, H, S), 0);
    std::vector<double> parts(cuda::gram_parts(D) * S * triangle(H));
    cuda::TokenGramParams params;
    params.B = 1;
    params.H = H;
    params.G = G;
    params.S = params.tokens = S;
    params.D = D;
    params.width = width;
    params.value =
        Array{values.data(), ElementType::kFloat32, {G * S * width, S * width, width, 1}};
    params.projection = projection.data();
    params.value_is_short = params.projection_is_short = is_short;
    params.parts = parts.data();
    params.factors = factors.data();
    params.value_norms = value_norms.data();
    params.fragments = fragments.data();
    ASSERT_STREQ(cuda::contribution_kernels.gram_factors(params, nullptr), nullptr);
  }
  float factor(int64_t j, int64_t entry) const {
    return factors[(j / kFactorBlock * triangle(H) + entry) * kFactorBlock + j % kFactorBlock];
  }
  // |R a| of token j.
  double norm_of(int64_t j, const std::vector<double>& weights) const {
    double square = 0;
    int64_t entry = 0;
    for (int64_t h = 0; h < H; ++h) {
      double sum = 0;
      for (int64_t k = h; k < H; ++k, ++entry) sum += double{factor(j, entry)} * weights[k];
      square = std::hypot(square, sum);
    }
    return square;
  }
  // |sum_h a_h f_h| of vectors that sum(h, column) makes.
  template <typename Sum>
  double norm_of_sums(const std::vector<double>& weights, const Sum& sum) const {
    double norm = 0;
    for (int64_t column = 0; column < D; ++column) {
      double x = 0;
      for (int64_t h = 0; h < H; ++h) x += weights[h] * sum(h, column);
      norm = std::hypot(norm, x);
    }
    return norm;
  }
  // The largest relative error of a token's norms, for weights of many kinds.
  double error() const {
    double worst = 0;
    for (int64_t j = 0; j < S; ++j) {
      for (int64_t i = 0; i < 4; ++i) {
        std::vector<double> weights(H);
        for (int64_t h = 0; h < H; ++h)
          weights[h] = i == 0 || h % 3 != i - 1 ? 1.0 / (h + i + 1) : 0;
        const double expected =
            norm_of_sums(weights, [&](int64_t h, int64_t column) { return vector(h, j, column); });
        const double error = std::fabs(norm_of(j, weights) / expected - 1);
        if (!(error <= worst)) worst = error;
      }
    }
    return worst;
  }
};

TEST(GramFactorsOnDevice, RowsMayLieAnywhereInFloat32) {
  struct Exponents {
    int projection, lowest, highest;  // exponents of the values
  };
  for (const Exponents of :
       {Exponents{-40, -60, 126}, {60, -145, 60}, {-130, 20, 126}, {120, -120, 0}}) {
    for (const bool is_short : {false, true}) {
      Tokens tokens{.is_short = is_short};
      tokens.fill();
      for (float& x : tokens.projection) {
        x = tokens.rounded(std::ldexp(x / 8, of.projection));
      }
      for (int64_t j = 0; j < tokens.S; ++j) {
        const auto exponent = of.lowest + (of.highest - of.lowest) * j / (tokens.S - 1);
        for (int64_t g = 0; g < tokens.G; ++g) {
          for (int64_t c = 0; c < tokens.width; ++c) {
            float& x = tokens.value(g, j, c);
            x = tokens.rounded(std::ldexp(x / 8, static_cast<int>(exponent - g)));
          }
        }
      }
      tokens.run();
      EXPECT_LE(tokens.error(), 1e-6) << of.projection << ", " << is_short;
    }
  }
}

// An element that meets zeros on the other side leaves the vectors as they are.
TEST(GramFactorsOnDevice, HugeElementsThatCountNowhereHideNoOthers) {
  for (const double size : {1e4, 1e6, 1e8, 1e13, 1e30}) {
    for (const bool is_short : {false, true}) {
      for (const bool in_value : {false, true}) {
        for (const int64_t heads : {5, 20}) {
          Tokens tokens{.H = heads, .G = heads, .is_short = is_short};
          tokens.fill();
          for (int64_t row = 0; row < tokens.D * tokens.H; row += in_value ? 1 : 3) {
            float& x = tokens.projection[row * tokens.width + 3];
            x = in_value ? 0 : tokens.rounded(static_cast<float>(size));
          }
          for (int64_t j = 0; j < tokens.S; ++j) {
            for (int64_t g = 0; g < tokens.G; ++g) {
              if (in_value && (j + g) % 3 != 0) continue;
              tokens.value(g, j, 3) = in_value ? tokens.rounded(static_cast<float>(-size)) : 0;
            }
          }
          tokens.run();
          EXPECT_LE(tokens.error(), 1e-6) << size << is_short << in_value << heads;
        }
      }
    }
  }
}

TEST(GramFactorsOnDevice, BitsOfATokenDoNotDependOnOthersThatAreWide) {
  Tokens sound{};
  sound.fill();
  sound.run();
  Tokens tokens = sound;
  tokens.value(1, 2, 3) = 1e12f;
  tokens.run();
  for (int64_t j = 0; j < tokens.S; ++j) {
    for (int64_t entry = 0; entry < triangle(tokens.H); ++entry) {
      if (j != 2) EXPECT_EQ(tokens.factor(j, entry), sound.factor(j, entry)) << j;
    }
  }
}

TEST(GramFactorsOnDevice, GroupedHeadsAndRowsOfManyColumns) {
  for (const int64_t heads : {8, 24}) {
    Tokens tokens{.H = heads, .G = heads / 4, .S = 35, .D = 30, .width = 80};
    tokens.fill();
    tokens.run();
    EXPECT_LE(tokens.error(), 1e-6) << heads;
  }
}

// Vectors of heads that nearly cancel are compared with a sum of float32 vectors.
TEST(GramFactorsOnDevice, CancellingHeadsErrAsASumOfFloat32) {
  Tokens tokens{.H = 6, .G = 6, .S = 20, .D = 64, .width = 64};
  tokens.fill();
  for (int64_t j = 0; j < tokens.S; ++j) {  // rows of one projection, with values that cancel
    for (int64_t c = 0; c < tokens.width; ++c) {
      float sum = 0;
      for (int64_t g = 0; g + 1 < tokens.G; ++g) sum += tokens.value(g, j, c);
      tokens.value(tokens.G - 1, j, c) = 1e-3f * tokens.value(tokens.G - 1, j, c) - sum;
    }
  }
  for (int64_t row = 0; row < tokens.D * tokens.H; ++row) {
    const int64_t first = row / tokens.H * tokens.H;
    std::copy_n(tokens.projection.begin() + first * tokens.width, tokens.width,
                tokens.projection.begin() + row * tokens.width);
  }
  tokens.run();
  const std::vector<double> weights(tokens.H, 1.0);
  double error = 0, of_sums = 0;
  for (int64_t j = 0; j < tokens.S; ++j) {
    const double expected = tokens.norm_of_sums(
        weights, [&](int64_t h, int64_t column) { return tokens.vector(h, j, column); });
    const double in_float32 = tokens.norm_of_sums(weights, [&](int64_t h, int64_t column) {
      float sum = 0;
      for (int64_t c = 0; c < tokens.width; ++c) {
        sum +=
            tokens.value(h, j, c) * tokens.projection[(column * tokens.H + h) * tokens.width + c];
      }
      return static_cast<double>(sum);
    });
    error += std::pow(tokens.norm_of(j, weights) / expected - 1, 2);
    of_sums += std::pow(in_float32 / expected - 1, 2);
  }
  EXPECT_LE(std::sqrt(error), 2.2 * std::sqrt(of_sums));
}

TEST(GramFactorsOnDevice, TokensThatAreNotFiniteShowInTheirOwnFactorsAlone) {
  for (const int64_t heads : {5, 20}) {
    Tokens sound{.H = heads, .G = heads};
    sound.fill();
    sound.run();
    Tokens tokens = sound;
    tokens.value(1, 2, 3) = NAN;
    tokens.value(4, 7, 0) = INFINITY;
    tokens.run();
    for (int64_t j = 0; j < tokens.S; ++j) {
      bool all_finite = true;
      for (int64_t entry = 0; entry < triangle(tokens.H); ++entry) {
        all_finite = all_finite && std::isfinite(tokens.factor(j, entry));
        if (j == 2 || j == 7) continue;
        EXPECT_EQ(tokens.factor(j, entry), sound.factor(j, entry));
      }
      EXPECT_EQ(all_finite, j != 2 && j != 7) << j;
    }
  }
}

// A factor goes out twice, as it is and as pairs' products read it.
TEST(GramFactorsOnDevice, FragmentsAreThoseOfTheFactors) {
  for (const int64_t heads : {1, 5, 16, 17, 50}) {
    Tokens tokens{.H = heads, .G = heads, .S = 6};
    tokens.fill();
    for (int64_t c = 0; c < tokens.width; ++c) {
      for (int64_t g = 0; g < tokens.G; ++g) tokens.value(g, 1, c) = 0;
      tokens.value(0, 4, c) = INFINITY;
    }
    tokens.run();
    std::vector<uint32_t> expected = fragments_of(1, heads, tokens.S, tokens.factors.data());
    expected.pop_back();
    const auto unit = static_cast<int64_t>(expected.size()) - 2;  // unit of token 4
    EXPECT_FALSE(std::isfinite(std::bit_cast<float>(tokens.fragments[unit])));
    tokens.fragments[unit] = expected[unit];
    EXPECT_EQ(tokens.fragments, expected) << heads;
  }
}

// Blocks take one part or several.
TEST(GramFactorsOnDevice, BitsDoNotDependOnTheNumberOfMultiprocessors) {
  Tokens tokens{.S = 40, .D = 300};
  tokens.fill();
  tokens.run();
  for (const int count : {3, 1000}) {
    Tokens other = tokens;
    interpreter::set_multiprocessors(count);
    other.run();
    interpreter::set_multiprocessors(1);
    EXPECT_EQ(other.factors, tokens.factors);
  }
}

}  // namespace
}  // namespace ikattn
