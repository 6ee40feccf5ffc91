// Sine, cosine and exponential of the CPU kernels, each by itself. The file compiles them
// for the baseline instruction set; the fuzzer's calls go through all else, on every set.
#define IKATTN_ISA baseline_test

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "support/cpu/vector_math.h"

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

}  // namespace
}  // namespace ikattn::baseline_test
