// The pieces the CPU kernels are made of, each by itself. The file compiles them for the baseline
// instruction set; the same sources serve the others, which the Python tests force through
// ATEN_CPU_CAPABILITY.
#define IKATTN_ISA baseline_test

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "attention/cpu/backward/backward.h"
#include "attention/cpu/features/operator.h"
#include "attention/cpu/forward/weights.h"

namespace ikattn::baseline_test {
namespace {

template <typename T>
std::vector<T> random_values(int64_t count, double low = -1, double high = 1) {
  static std::mt19937 generator(7);
  std::uniform_real_distribution<double> uniform(low, high);
  std::vector<T> values(count);
  for (T& value : values) value = static_cast<T>(uniform(generator));
  return values;
}

template <typename T>
class Precision : public ::testing::Test {
 protected:
  static constexpr double kEpsilon = std::numeric_limits<T>::epsilon();
};
using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(Precision, Types);

TYPED_TEST(Precision, SineAndCosineOfCyclesAreGoodToTheLastBits) {
  using T = TypeParam;
  for (const double range : {0.5, 8.0, 1e6}) {
    std::vector<T> cycles = random_values<T>(4096, -range, range);
    for (int quarter = -8; quarter <= 8; ++quarter)
      cycles.push_back(static_cast<T>(quarter * 0.25));
    while (cycles.size() % kLanes<T>) cycles.push_back(0);
    for (size_t i = 0; i < cycles.size(); i += kLanes<T>) {
      Vec<T> sine, cosine;
      sincos_cycles<T>(load(cycles.data() + i), sine, cosine);
      for (int lane = 0; lane < kLanes<T>; ++lane) {
        // The fraction of a cycle is exact in long double, whatever the range.
        const long double t = cycles[i + lane];
        const long double angle = 2 * 3.14159265358979323846264338327950288L * (t - std::rint(t));
        EXPECT_NEAR(sine[lane], std::sin(angle), 2 * this->kEpsilon) << cycles[i + lane];
        EXPECT_NEAR(cosine[lane], std::cos(angle), 2 * this->kEpsilon) << cycles[i + lane];
      }
    }
  }
}

TYPED_TEST(Precision, SineOfAnythingNotFiniteIsNaN) {
  using T = TypeParam;
  for (const T bad : {std::numeric_limits<T>::infinity(), std::numeric_limits<T>::quiet_NaN()}) {
    Vec<T> sine, cosine;
    sincos_cycles<T>(broadcast(bad), sine, cosine);
    EXPECT_TRUE(std::isnan(sine[0]) && std::isnan(cosine[0]));
  }
  // one whose bits are the largest integer
  Vec<T> sine, cosine;
  sincos_cycles<T>((Vec<T>)((Bits<T>{} - 1) & ~((Bits<T>{} + 1) << (8 * sizeof(T) - 1))), sine,
                   cosine);
  EXPECT_TRUE(std::isnan(sine[0]) && std::isnan(cosine[0]));
}

TYPED_TEST(Precision, ExponentialIsGoodToTheLastBits) {
  using T = TypeParam;
  const double lowest = sizeof(T) == 4 ? -86 : -700;
  std::vector<T> x = random_values<T>(4096, lowest, 30);
  for (size_t i = 0; i < x.size(); i += kLanes<T>) {
    const Vec<T> result = exp_bounded<T>(load(x.data() + i));
    for (int lane = 0; lane < kLanes<T>; ++lane) {
      const long double expected = std::exp(static_cast<long double>(x[i + lane]));
      EXPECT_NEAR(result[lane] / expected, 1, 3 * this->kEpsilon) << x[i + lane];
    }
  }
  EXPECT_EQ(exp_bounded<T>(broadcast(-std::numeric_limits<T>::infinity()))[0], 0);
  EXPECT_EQ(exp_bounded<T>(broadcast(T(-1000)))[0], 0);
  EXPECT_TRUE(std::isnan(exp_bounded<T>(broadcast(std::numeric_limits<T>::quiet_NaN()))[0]));
}

TYPED_TEST(Precision, TransposedPanelHasRowsForColumns) {
  using T = TypeParam;
  const std::vector<T> source = random_values<T>(kPanel * kPanel);
  std::vector<T> target(kPanel * kPanel);
  transpose_panel(kPanel, kPanel, source.data(), target.data());
  for (int64_t r = 0; r < kPanel; ++r) {
    for (int64_t c = 0; c < kPanel; ++c) {
      ASSERT_EQ(target[c * kPanel + r], source[r * kPanel + c]);
    }
  }
}

TYPED_TEST(Precision, PanelsHoldRowsOfEveryWidthAndZeros) {
  using T = TypeParam;
  constexpr int64_t kRows = 3;
  for (int64_t columns = 1; columns <= 2 * kPanel; ++columns) {
    const std::vector<T> source = random_values<T>(kRows * columns);  // nothing lies behind it
    const int64_t size = ceil_div(columns, kPanel) * kRows * kPanel;
    std::vector<T> panels(size, T(7));
    Array array;
    array.data = const_cast<T*>(source.data());
    array.type = kTypeOf<T>;
    load_panels(array, 0, columns, 1, kRows, columns, panels.data(), kRows);
    for (int64_t i = 0; i < size; ++i) {
      const int64_t r = i / kPanel % kRows, c = i / (kRows * kPanel) * kPanel + i % kPanel;
      ASSERT_EQ(panels[i], c < columns ? source[r * columns + c] : T(0)) << columns << ": " << i;
    }
    std::vector<T> back(kRows * columns);
    array.data = back.data();
    store_panels(array, 0, columns, 1, kRows, columns, panels.data(), kRows);
    ASSERT_EQ(back, source);
  }
}

template <typename T, Left kLeft>
void check_panel_gemm(int64_t rows, int64_t columns, int64_t depth) {
  const std::vector<T> a = random_values<T>(std::max(rows, depth) * kPanel);
  const std::vector<T> b = random_values<T>(depth * kPanel);
  for (const bool accumulate : {false, true}) {
    const std::vector<T> before = random_values<T>(rows * kPanel);
    std::vector<T> c = before;
    panel_gemm<T, kLeft>(rows, columns, depth, a.data(), b.data(), c.data(), accumulate);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t j = 0; j < columns; ++j) {
        double expected = accumulate ? before[r * kPanel + j] : T(0);
        for (int64_t k = 0; k < depth; ++k) {
          const T left = kLeft == Left::kRows ? a[r * kPanel + k] : a[k * kPanel + r];
          expected += static_cast<double>(left) * b[k * kPanel + j];
        }
        ASSERT_NEAR(c[r * kPanel + j], expected, 64 * std::numeric_limits<T>::epsilon() * 4)
            << rows << " x " << columns << " x " << depth;
      }
      for (int64_t j = round_up(columns, kLanes<T>); j < kPanel; ++j) {
        ASSERT_EQ(c[r * kPanel + j], before[r * kPanel + j]) << "wrote beyond its columns";
      }
    }
  }
}

TYPED_TEST(Precision, PanelProductsAreRightAtEveryEdge) {
  for (const int64_t rows : {1, 5, 6, 7, 13, 64}) {
    for (const int64_t columns : {1, 3, 8, 17, 33, 48, 63, 64}) {
      for (const int64_t depth : {1, 2, 31, 64}) {
        check_panel_gemm<TypeParam, Left::kRows>(rows, columns, depth);
        check_panel_gemm<TypeParam, Left::kColumns>(rows, columns, depth);
      }
    }
  }
}

TEST(RowPairs, HalfVectorsAreMultipliedTwoRowsAtATime) {
  for (const int64_t rows : {1, 5, 6, 7, 13, 64}) {
    for (const int64_t pairs : {0, 1, 3, 32}) {
      const std::vector<float> a = random_values<float>(rows * kPanel);
      const std::vector<float> source = random_values<float>(2 * pairs * kPanel);
      const std::vector<float> before = random_values<float>(rows * kPanel);
      std::vector<float> b(2 * pairs * kPanel), c = before;
      pair_rows(2 * pairs, source.data(), b.data());
      multiply_row_pairs(rows, pairs, a.data(), b.data(), c.data());
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t column = 0; column < kLanes<float> / 2; ++column) {
          double expected = before[r * kPanel + column];
          for (int64_t k = 0; k < 2 * pairs; ++k) {
            expected += static_cast<double>(a[r * kPanel + k]) * source[k * kPanel + column];
          }
          ASSERT_NEAR(c[r * kPanel + column], expected, 3e-5) << rows << " x " << pairs;
        }
        for (int64_t column = kLanes<float> / 2; column < kPanel; ++column) {
          ASSERT_EQ(c[r * kPanel + column], before[r * kPanel + column]) << "not its columns";
        }
      }
    }
  }
}

TYPED_TEST(Precision, MagnitudeIsTheSquaredNormForAnyOrder) {
  using T = TypeParam;
  const std::vector<T> x = random_values<T>(19);
  for (const double p : {1.0, 1.5, 1.8, 2.0, 3.0, 7.0, 40.0}) {
    double sum = 0;
    for (const T value : x) sum += std::pow(std::abs(static_cast<double>(value)), p);
    const double expected = std::pow(sum, 2 / p);
    EXPECT_NEAR(squared_norm(x.data(), 19, p) / expected, 1, 20 * this->kEpsilon) << p;
    // Neither overflow nor loss where the powers alone would.
    for (const double scale : {1e-15, 1e15}) {
      std::vector<T> scaled = x;
      for (T& value : scaled) value = static_cast<T>(value * scale);
      EXPECT_NEAR(squared_norm(scaled.data(), 19, p) / (expected * scale * scale), 1,
                  40 * this->kEpsilon);
    }
  }
}

TYPED_TEST(Precision, MagnitudeGradientIsZeroAtZero) {
  using T = TypeParam;
  const std::vector<T> zero(5, T(0));
  for (const double p : {1.0, 1.5, 2.0, 3.0}) {
    std::vector<T> gradient(5, T(0));
    add_squared_norm_gradient(zero.data(), 5, p, T(1), gradient.data());
    for (const T value : gradient) EXPECT_EQ(value, 0);
  }
}

TEST(BFloat16, RoundsToNearestEven) {
  EXPECT_EQ(to_bfloat16(1.0f), 0x3f80);
  EXPECT_EQ(to_bfloat16(1.0f + 0x1p-8f), 0x3f80);             // a tie, to even
  EXPECT_EQ(to_bfloat16(1.0f + 3 * 0x1p-8f), 0x3f82);         // a tie, to even
  EXPECT_EQ(to_bfloat16(1.0f + 0x1p-8f + 0x1p-20f), 0x3f81);  // above a tie
  EXPECT_EQ(to_bfloat16(std::numeric_limits<float>::infinity()), 0x7f80);
  EXPECT_EQ(to_bfloat16(std::numeric_limits<float>::quiet_NaN()), 0x7fc0);
  EXPECT_EQ(from_bfloat16(0xc040), -3.0f);
}

TEST(Philox, GivesThePublishedNumbers) {
  // Random123's known answers for philox4x32 with 7 rounds.
  const PhiloxBlock zero = philox4x32_7({{0, 0, 0, 0}}, 0);
  EXPECT_EQ(zero.word[0], 0x5f6fb709u);
  EXPECT_EQ(zero.word[1], 0x0d893f64u);
  EXPECT_EQ(zero.word[2], 0x4f121f81u);
  EXPECT_EQ(zero.word[3], 0x4f730a48u);
  const uint32_t f = 0xffffffffu;
  const PhiloxBlock ones = philox4x32_7({{f, f, f, f}}, 0xffffffffffffffffull);
  EXPECT_EQ(ones.word[0], 0x5207ddc2u);
  EXPECT_EQ(ones.word[1], 0x45165e59u);
  EXPECT_EQ(ones.word[2], 0x4d8ee751u);
  EXPECT_EQ(ones.word[3], 0x8c52f662u);
}

TEST(Dropout, GroupMembersCoverEachBlockOnce) {
  std::vector<int> seen(16, 0);
  for (int group = 0; group < 4; ++group) {
    for (int index = 0; index < 4; ++index) ++seen[dropout_group_member(group, index)];
  }
  for (const int count : seen) EXPECT_EQ(count, 1);
}

TEST(Workspace, ArraysAreAlignedAndApart) {
  alignas(64) static char memory[1 << 16];
  const auto lay_out = [](void* base) {
    Workspace workspace(base);
    float* a = workspace.take<float>(3);
    double* b = workspace.take<double>(1000);
    uint8_t* c = workspace.take<uint8_t>(1);
    return std::tuple(workspace.bytes(), a, b, c);
  };
  const auto [bytes, none, a, b] = lay_out(nullptr);
  EXPECT_EQ(none, nullptr);
  const auto [same_bytes, x, y, z] = lay_out(memory);
  EXPECT_EQ(bytes, same_bytes);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(y) % 64, 0u);
  EXPECT_GE(reinterpret_cast<char*>(y), reinterpret_cast<char*>(x + 3));
  EXPECT_GE(reinterpret_cast<char*>(z), reinterpret_cast<char*>(y + 1000));
  EXPECT_LE(z + 1, reinterpret_cast<uint8_t*>(memory) + bytes);
}

// Features of `tokens` tokens with M frequencies, as panels and as rows.
template <typename T>
struct ProductSample {
  FeatureLayout<T> features;
  ProductLayout products;
  std::vector<T> phi, rows;

  ProductSample(int64_t M, int64_t tokens) : features{8, M}, products{M} {
    phi.assign(features.panels() * tokens * kPanel, 0);
    for (int64_t panel = 0; panel < features.panels(); ++panel) {
      for (int64_t r = 0; r < tokens; ++r) {
        T* row = phi.data() + (panel * tokens + r) * kPanel;
        const std::vector<T> x = random_values<T>(2 * features.frequencies(panel));
        std::copy_n(x.begin(), features.frequencies(panel), row);
        std::copy_n(x.begin() + features.frequencies(panel), features.frequencies(panel),
                    row + features.half(panel));
      }
    }
    rows.assign(tokens * products.template row_size<T>(), T(99));
    gather_features(features, tokens, phi.data(), tokens, rows.data());
  }
  const T* row(int64_t r) const { return rows.data() + r * products.template row_size<T>(); }
  double dot(int64_t one, int64_t other) const {
    double sum = 0;
    for (int64_t b = 0; b < products.features(); ++b) sum += double{row(one)[b]} * row(other)[b];
    return sum;
  }
};

constexpr int64_t kSomeFrequencies[] = {1, 2, 3, 5, 8, 15, 16, 17, 32, 33, 64, 70};

TYPED_TEST(Precision, ProductsOfFeaturesAddUpToTheSquareOfTheScore) {
  using T = TypeParam;
  for (const int64_t M : kSomeFrequencies) {
    const ProductSample<T> sample(M, 2);
    const ProductLayout& layout = sample.products;
    std::vector<T> psi(2 * kPanel + kLanes<T>);
    std::vector<T> weighted(2 * kPanel + kLanes<T>, std::numeric_limits<T>::quiet_NaN());
    std::vector<T> sums(kLanes<T>, T(0));
    double sum = 0;
    int64_t entries = 0;
    for (int64_t panel = 0; panel < layout.panels(); ++panel) {
      const auto runs = layout.runs(panel);
      feature_products(layout, runs, 2, sample.rows.data(), psi.data());
      feature_products<true>(layout, runs, 2, sample.rows.data(), weighted.data());
      for (const ShiftRun& run : runs) {
        for (int64_t e = run.column; e < run.column + run.count; ++e) {
          EXPECT_EQ(weighted[kPanel + e], layout.multiplicity<T>(run) * psi[kPanel + e]);
          sum += double{weighted[kPanel + e]} * psi[e];
          ++entries;
        }
      }
      add_sums_of_products(layout.entries(panel), 1, psi.data(), weighted.data() + kPanel,
                           sums.data());
    }
    const double exact = sample.dot(0, 1) * sample.dot(0, 1);
    const double bound = 8 * this->kEpsilon * sample.dot(0, 0) * sample.dot(1, 1);
    EXPECT_EQ(entries, 2 * M * (M + 1));
    EXPECT_NEAR(sum, exact, bound) << M;
    EXPECT_NEAR(sum_of_lanes<T>(load(sums.data())), exact, bound) << M;
  }
}

TYPED_TEST(Precision, FeaturesComeBackFromTheirRows) {
  using T = TypeParam;
  for (const int64_t M : kSomeFrequencies) {
    const ProductSample<T> sample(M, 3);
    std::vector<T> back(sample.phi.size(), T(0));
    add_features(sample.features, 3, sample.rows.data(), back.data(), 3);
    EXPECT_EQ(back, sample.phi) << M;
  }
}

// The gradient of psi(x) . (moments + totals) must be that of the score's square: with moments made
// of one other token it is 2 s x', half of which is what comes out.
TYPED_TEST(Precision, GradientsOfProductsAreThoseOfTheSquare) {
  using T = TypeParam;
  for (const int64_t M : kSomeFrequencies) {
    const ProductSample<T> sample(M, 2);
    const ProductLayout& layout = sample.products;
    for (const int64_t d_v : {1, 5, 64, 70}) {
      Workspace measure;
      ProductScratch<T> scratch;
      scratch.take(measure, layout, d_v, true);
      Moments<T>::take(measure, layout.panels(), d_v, false, true);
      std::vector<char> memory(measure.bytes() + 64);
      Workspace workspace(memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64));
      scratch.take(workspace, layout, d_v, true);
      const auto by_value = Moments<T>::take(workspace, layout.panels(), d_v, false, true);
      const std::vector<T> values = random_values<T>(ceil_div(d_v, kPanel) * kPanel);
      sum_moments(
          layout, Panels{0, layout.panels()}, 1,
          [&](int64_t, int64_t) {
            std::copy_n(sample.row(1), layout.template row_size<T>(), scratch.x);
            for (int64_t first = 0; first < d_v; first += kPanel) {
              std::copy_n(values.data() + first, kPanel, scratch.values + first * kMomentTokens);
            }
            scratch.factors[0] = T(0.5);
            return true;
          },
          scratch, by_value);
      std::copy_n(sample.row(0), layout.template row_size<T>(), scratch.x);
      const T factor = 3;
      product_gradients(layout, Panels{0, layout.panels()}, by_value, 1, values.data(), 1, &factor,
                        scratch);
      double squares = 1.5;
      for (int64_t c = 0; c < d_v; ++c) squares += double{values[c]} * values[c];
      const double score = sample.dot(0, 1);
      for (int64_t b = 0; b < layout.features(); ++b) {
        EXPECT_NEAR(
            scratch.own[b], squares * score * sample.row(1)[b],
            16 * this->kEpsilon * squares * sample.dot(1, 1) * std::sqrt(sample.dot(0, 0) + 1))
            << M << ' ' << d_v << ' ' << b;
      }
    }
  }
}

}  // namespace
}  // namespace ikattn::baseline_test
