// wgmma against plain loops, and what the interpreter finds of its misuse.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "interpreter/sample_warpgroups.h"

namespace ikattn {
namespace {

template <typename T>
std::vector<T> random_values(int count) {
  static std::mt19937 generator(13);
  std::normal_distribution<float> normal;
  std::vector<T> values;
  for (int i = 0; i < count; ++i) values.push_back(from_float<T>(normal(generator)));
  return values;
}

TEST(Warpgroups, MultiplyByColumns) {
  const auto a = random_values<Half>(64 * 64), b = random_values<Half>(128 * 64);
  std::vector<float> expected(64 * 128), out(64 * 128, NAN);
  for (int i = 0; i < 64; ++i) {
    for (int j = 0; j < 128; ++j) {
      for (int k = 0; k < 64; ++k) {
        expected[i * 128 + j] += to_float(a[i * 64 + k]) * to_float(b[j * 64 + k]);
      }
    }
  }
  ASSERT_STREQ(sample::product_by_columns(a.data(), b.data(), out.data(), sample::Misuse::kNone),
               nullptr);
  EXPECT_EQ(out, expected);  // summed in order of k
}

template <typename T>
class WarpgroupFormats : public ::testing::Test {};
using Formats = ::testing::Types<Half, BFloat16>;
TYPED_TEST_SUITE(WarpgroupFormats, Formats);

TYPED_TEST(WarpgroupFormats, MultiplyByRows) {
  const auto a = random_values<TypeParam>(64 * 64), b = random_values<TypeParam>(64 * 64);
  std::vector<float> expected(64 * 64), out(64 * 64, NAN);
  for (int i = 0; i < 64; ++i) {
    for (int k = 0; k < 64; ++k) {
      for (int j = 0; j < 64; ++j) {
        expected[i * 64 + j] += to_float(a[i * 64 + k]) * to_float(b[k * 64 + j]);
      }
    }
  }
  ASSERT_STREQ(sample::product_by_rows(a.data(), b.data(), out.data()), nullptr);
  EXPECT_EQ(out, expected);
}

std::string error_of(sample::Misuse misuse) {
  const auto a = random_values<Half>(64 * 64), b = random_values<Half>(128 * 64);
  std::vector<float> out(64 * 128);
  const char* error = sample::product_by_columns(a.data(), b.data(), out.data(), misuse);
  return error ? error : std::isnan(out[0]) ? "NaN" : "";
}

TEST(Warpgroups, AreWatched) {
  EXPECT_NE(error_of(sample::Misuse::kNoFence).find("has not fenced"), std::string::npos);
  EXPECT_NE(error_of(sample::Misuse::kNoBarrier).find("no barrier between"), std::string::npos);
  EXPECT_NE(error_of(sample::Misuse::kChangedA).find("A of a wgmma has changed"),
            std::string::npos);
  EXPECT_EQ(error_of(sample::Misuse::kEarlySums), "NaN");
}

}  // namespace
}  // namespace ikattn
