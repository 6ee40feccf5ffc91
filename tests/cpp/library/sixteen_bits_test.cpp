// Products of numbers of 16 bits, two to a lane, and features in fixed point: their layouts,
// roundings and edges. Compiled for the baseline, where the instructions are imitated; what the
// processor makes of them, the operators' tests in bfloat16 and float16 show.
#define IKATTN_ISA sixteen_bits_test

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "attention/cpu/features/score_features.h"

namespace ikattn::sixteen_bits_test {
namespace {

std::mt19937& generator() {
  static std::mt19937 numbers(11);
  return numbers;
}

int32_t lane(int16_t low, int16_t high) {
  return static_cast<int32_t>(static_cast<uint32_t>(static_cast<uint16_t>(high)) << 16 |
                              static_cast<uint16_t>(low));
}

int16_t half_of(int32_t lane, int which) {
  return static_cast<int16_t>(static_cast<uint32_t>(lane) >> (16 * which));
}

float bfloat16_of(int32_t lane, int which) {
  return from_bfloat16(static_cast<uint16_t>(half_of(lane, which)));
}

// Whole numbers that both types hold exactly, and their value in a lane.
template <typename N>
struct Whole;
template <>
struct Whole<Int16x2> {
  static int16_t bits(int x) { return static_cast<int16_t>(x); }
  static double value(int32_t lane, int which) { return half_of(lane, which); }
};
template <>
struct Whole<BFloat16x2> {
  static int16_t bits(int x) { return static_cast<int16_t>(to_bfloat16(static_cast<float>(x))); }
  static double value(int32_t lane, int which) { return bfloat16_of(lane, which); }
};

template <typename N>
std::vector<int32_t> random_lanes(int64_t count) {
  std::uniform_int_distribution<int> numbers(-100, 100);
  std::vector<int32_t> lanes(count);
  for (int32_t& x : lanes) {
    x = lane(Whole<N>::bits(numbers(generator())), Whole<N>::bits(numbers(generator())));
  }
  return lanes;
}

template <typename N, Left kLeft>
void check_products(int64_t rows, int64_t columns, int64_t depth, bool accumulate) {
  const std::vector<int32_t> a = random_lanes<N>(kPanel * kPanel), b = random_lanes<N>(depth * 64);
  std::vector<float> of_rows(kPanel), of_columns(kPanel);
  for (int64_t i = 0; i < kPanel; ++i) {
    of_rows[i] = static_cast<float>(1 << i % 3);
    of_columns[i] = 0.5f * static_cast<float>(1 + i % 2);
  }
  const std::vector<float> before(kPanel * kPanel, 3);
  std::vector<float> c = before;
  panel_gemm<N, kLeft>(rows, columns, depth, a.data(), b.data(), c.data(), accumulate,
                       {of_rows.data(), of_columns.data()});
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < columns; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < depth; ++k) {
        const int32_t left = kLeft == Left::kRows ? a[r * kPanel + k] : a[k * kPanel + r];
        for (const int which : {0, 1}) {
          sum += Whole<N>::value(left, which) * Whole<N>::value(b[k * kPanel + j], which);
        }
      }
      const double expected = sum * of_rows[r] * of_columns[j] + (accumulate ? 3 : 0);
      ASSERT_EQ(c[r * kPanel + j], expected) << rows << " x " << columns << " x " << depth;
    }
    for (int64_t j = round_up(columns, kLanes<float>); j < kPanel; ++j) {
      ASSERT_EQ(c[r * kPanel + j], 3) << "wrote beyond its columns";
    }
  }
}

template <typename N>
class SixteenBitProducts : public ::testing::Test {};
using Types = ::testing::Types<Int16x2, BFloat16x2>;
TYPED_TEST_SUITE(SixteenBitProducts, Types);

TYPED_TEST(SixteenBitProducts, AreExactForWholeNumbersAtEveryEdge) {
  for (const int64_t rows : {1, 5, 6, 7, 64}) {
    for (const int64_t columns : {1, 17, 48, 64}) {
      for (const int64_t depth : {1, 2, 31}) {
        for (const bool accumulate : {false, true}) {
          check_products<TypeParam, Left::kRows>(rows, columns, depth, accumulate);
          check_products<TypeParam, Left::kColumns>(rows, columns, depth, accumulate);
        }
      }
    }
  }
}

TEST(Int16, SumsOfTheLargestNumbersStayInTheLane) {
  // Two rows of the largest norm, once in one number, once spread over a panel.
  const std::vector<int32_t> one = {lane(32767, 0)}, zero(kPanel, 0);
  std::vector<int32_t> b(kPanel, lane(32767, 0));
  std::vector<float> c(kPanel);
  panel_gemm<Int16x2, Left::kRows>(1, 64, 1, one.data(), b.data(), c.data(), false);
  EXPECT_EQ(c[0], 32767.0f * 32767.0f);
  const std::vector<int32_t> spread(kPanel, lane(4096, -4096));
  std::vector<int32_t> panel(kPanel * kPanel, lane(4095, -4095));
  panel_gemm<Int16x2, Left::kRows>(1, 64, 64, spread.data(), panel.data(), c.data(), false);
  EXPECT_EQ(c[63], 128.0f * 4096.0f * 4095.0f);
}

std::vector<float> special_numbers() {
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> x = {0,       -0.0f,    1,        1.00390625f, 1.01171875f, -1.00390625f,
                          3.4e38f, infinity, -infinity};
  std::uniform_real_distribution<float> uniform(-2, 2);
  while (x.size() < 128 * 7) x.push_back(uniform(generator()));
  return x;
}

TEST(BFloat16x2, RoundsAsOneNumberDoes) {
  const std::vector<float> x = special_numbers();
  constexpr int64_t kStep = kLanes<float>;
  for (size_t i = 0; i + 2 * kStep <= x.size(); i += kStep) {
    const Vec<float> low = load(x.data() + i), high = load(x.data() + i + kStep);
    int32_t stacked[kStep], joined[kStep];
    store(stacked, stacked_bfloat16(low, high));
    store(joined, joined_bfloat16(low, high));
    for (int64_t k = 0; k < kStep; ++k) {
      for (const int which : {0, 1}) {
        const auto bits = [](int16_t half) { return static_cast<uint16_t>(half); };
        ASSERT_EQ(bits(half_of(stacked[k], which)), to_bfloat16(x[i + k + which * kStep]));
        ASSERT_EQ(bits(half_of(joined[k], which)), to_bfloat16(x[i + 2 * k + which]));
      }
    }
  }
  const Vec<float> nan = broadcast(std::numeric_limits<float>::quiet_NaN());
  EXPECT_TRUE(std::isnan(bfloat16_of(stacked_bfloat16(nan, nan)[0], 0)));
  EXPECT_TRUE(std::isnan(bfloat16_of(joined_bfloat16(nan, nan)[0], 1)));
}

TEST(BFloat16x2, AnOddLastRowHasAZeroBesideIt) {
  const std::vector<float> x = special_numbers(), factors = {2, 0.5f, 4, 1, 8};
  for (const int64_t rows : {1, 2, 5}) {
    std::vector<int32_t> out(3 * kPanel);
    stack_rows(rows, kPanel, x.data() + kPanel, factors.data(), out.data());
    for (int64_t r = 0; r < round_up(rows, 2); ++r) {
      for (int64_t c = 0; c < kPanel; ++c) {
        const float expected = r < rows ? x[(1 + r) * kPanel + c] * factors[r] : 0;
        const float got = bfloat16_of(out[r / 2 * kPanel + c], static_cast<int>(r % 2));
        ASSERT_EQ(got, from_bfloat16(to_bfloat16(expected))) << r << ", " << c;
      }
    }
  }
}

TEST(BFloat16x2, JoinedColumnsFollowEachOtherOverPanels) {
  const std::vector<float> x = special_numbers();  // two panels of three rows
  std::vector<int32_t> out(3 * kPanel);
  join_columns(3, 100, x.data(), 3, out.data());
  for (int64_t r = 0; r < 3; ++r) {
    for (int64_t c = 0; c < 100; ++c) {
      const float expected = x[(c / kPanel * 3 + r) * kPanel + c % kPanel];
      ASSERT_EQ(bfloat16_of(out[r * kPanel + c / 2], static_cast<int>(c % 2)),
                from_bfloat16(to_bfloat16(expected)));
    }
  }
}

TEST(BFloat16x2, RowSumsLeaveOutWhatLiesBeyond) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int64_t columns = 2; columns <= kPanel; columns += 2) {
    std::vector<float> x(2 * kPanel, nan), sums(2 * kLanes<float>, 0);
    for (int64_t r = 0; r < 2; ++r) {
      for (int64_t c = 0; c < columns; ++c) x[r * kPanel + c] = static_cast<float>(r + c);
    }
    std::vector<int32_t> packed(2 * kPanel);
    join_columns(2, kPanel, x.data(), 2, packed.data());
    add_row_sums(2, columns, packed.data(), sums.data());
    for (int64_t r = 0; r < 2; ++r) {
      const auto expected = static_cast<float>(columns * (columns - 1) / 2 + r * columns);
      EXPECT_EQ(sum_of_lanes<float>(load(sums.data() + r * kLanes<float>)), expected) << columns;
    }
  }
}

// Features of some tokens: of usual size, of one frequency only, tiny, and zero.
std::vector<float> features_of_rows(const FeatureLayout<float>& layout, int64_t rows) {
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> phi(layout.panels() * rows * kPanel, 0);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t m = 0; m < layout.M; ++m) {
      const int64_t panel = m / kPanelFrequencies, c = m % kPanelFrequencies;
      float* row = phi.data() + (panel * rows + r) * kPanel;
      const float turn = 6.2831853f * uniform(generator());
      float size = r % 4 == 1 ? (m == 0 ? 1.0f : 0.0f) : uniform(generator());
      if (r % 4 == 2) size *= 1e-12f;
      if (r % 4 == 3) size = 0;
      row[c] = size * std::cos(turn);
      row[layout.half(panel) + c] = size * std::sin(turn);
    }
  }
  return phi;
}

TEST(FixedFeatures, GiveTheScoresUpToRounding) {
  for (const int64_t M : {1, 7, 32, 33, 64, 100}) {
    const FeatureLayout<float> layout{8, M, false};
    const ScoreLayout scores{M};
    constexpr int64_t kRows = 64;
    const std::vector<float> phi = features_of_rows(layout, kRows);
    std::vector<float> steps(kRows), s(kRows * kPanel);
    choose_steps(layout, kRows, phi.data(), kRows, steps.data());
    for (int64_t panel = 0; panel < scores.panels(); ++panel) {
      std::vector<int32_t> rows(kRows * kPanel), columns(kPanel * kPanel);
      narrow_features(layout, panel, kRows, phi.data(), kRows, steps.data(), rows.data());
      transpose_panel(kRows, scores.lanes(panel), rows.data(), columns.data());
      panel_gemm<Int16x2, Left::kRows>(kRows, kPanel, scores.lanes(panel), rows.data(),
                                       columns.data(), s.data(), panel > 0,
                                       {steps.data(), steps.data()});
    }
    for (int64_t i = 0; i < kRows; ++i) {
      for (int64_t j = 0; j < kRows; ++j) {
        double expected = 0, sizes[2] = {0, 0};
        for (int64_t panel = 0; panel < layout.panels(); ++panel) {
          for (int64_t c = 0; c < layout.columns(panel); ++c) {
            const double x = phi[(panel * kRows + i) * kPanel + c];
            const double y = phi[(panel * kRows + j) * kPanel + c];
            expected += x * y;
            sizes[0] += std::abs(x) * steps[j];
            sizes[1] += std::abs(y) * steps[i];
          }
        }
        // Each feature is off by half a step at most.
        const double bound = 0.51 * (sizes[0] + sizes[1]) + 1e-6 * std::abs(expected);
        ASSERT_LE(std::abs(s[i * kPanel + j] - expected), bound) << M << ": " << i << ", " << j;
      }
    }
  }
}

TEST(FixedFeatures, StepsAreAsSmallAsTheLaneAllows) {
  const FeatureLayout<float> layout{8, 64, false};
  const std::vector<float> phi = features_of_rows(layout, 8);
  std::vector<float> steps(8);
  choose_steps(layout, 8, phi.data(), 8, steps.data());
  for (int64_t r = 0; r < 8; ++r) {
    double squares = 0, largest = 0;
    for (int64_t i = 0; i < 2 * kPanel; ++i) {
      const double x = phi[(i / kPanel * 8 + r) * kPanel + i % kPanel];
      squares += x * x;
      largest = std::max(largest, std::abs(x));
    }
    EXPECT_NEAR(steps[r], std::max(std::sqrt(squares) / 46300, largest / 32766), 1e-6 * steps[r]);
    EXPECT_EQ(steps[r] == 0, r % 4 == 3);
  }
}

}  // namespace
}  // namespace ikattn::sixteen_bits_test
