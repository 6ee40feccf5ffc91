// Numbers that a kernel made beside those of the formula.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

namespace ikattn {

// Expects differences of at most `tolerance` times the largest number, and infinity where it is
// expected. The last `unused` numbers may be any.
template <typename T>
void expect_close(const std::vector<T>& got, const std::vector<double>& expected, double tolerance,
                  const std::string& what, size_t unused = 0) {
  ASSERT_EQ(got.size(), expected.size());
  double largest = 1e-30, error = 0;
  for (size_t i = 0; i + unused < got.size(); ++i) {
    if (std::isinf(expected[i])) {
      EXPECT_EQ(static_cast<double>(got[i]), expected[i]) << what;
      continue;
    }
    largest = std::max(largest, std::fabs(expected[i]));
    const double difference = std::fabs(static_cast<double>(got[i]) - expected[i]);
    if (!(difference <= error)) error = difference;  // NaN stays
    if (std::isnan(error)) break;
  }
  EXPECT_LE(error, tolerance * largest) << what << ", of " << largest;
}

}  // namespace ikattn
