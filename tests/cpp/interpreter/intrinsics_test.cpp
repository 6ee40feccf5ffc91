// Matrix products through ldmatrix and mma against plain loops, and the number formats.
#include "support/cuda/intrinsics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "interpreter/sample_kernels.h"

namespace ikattn {
namespace {

std::vector<float> random_values(int count) {
  static std::mt19937 generator(11);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

template <typename T>
std::vector<T> rounded(const std::vector<float>& values) {
  std::vector<T> result;
  for (float value : values) result.push_back(from_float<T>(value));
  return result;
}

template <typename T>
class Products : public ::testing::Test {};
using Formats = ::testing::Types<Half, BFloat16>;
TYPED_TEST_SUITE(Products, Formats);

TYPED_TEST(Products, LinearAttentionIsThePlainLoop) {
  using T = TypeParam;
  for (const auto& [L, S] : {std::pair{128, 64}, {1, 1}, {127, 65}, {130, 200}, {7, 63}}) {
    const auto query = rounded<T>(random_values(L * 64));
    const auto key = rounded<T>(random_values(S * 64));
    const auto value = rounded<T>(random_values(S * 64));
    std::vector<float> expected(L * 64);
    for (int i = 0; i < L; ++i) {
      for (int j = 0; j < S; ++j) {
        float score = 0;
        for (int k = 0; k < 64; ++k)
          score += to_float(query[i * 64 + k]) * to_float(key[j * 64 + k]);
        score = to_float(from_float<T>(score));
        for (int d = 0; d < 64; ++d) expected[i * 64 + d] += score * to_float(value[j * 64 + d]);
      }
    }
    for (const interpreter::Order order : interpreter::kEveryOrder) {
      interpreter::set_order(order);
      std::vector<float> out(L * 64, NAN);
      ASSERT_STREQ(sample::linear_attention(query.data(), key.data(), value.data(), out.data(), L,
                                            S, nullptr),
                   nullptr);
      // The emulated sums run in the loop's order: no tolerance.
      EXPECT_EQ(out, expected) << L << " x " << S;
    }
    interpreter::set_order(interpreter::Order::kForward);
  }
}

TEST(Intrinsics, Tf32ScoresAreThePlainLoop) {
  std::vector<float> a = random_values(16 * 32), b = random_values(8 * 32), out(16 * 8);
  ASSERT_STREQ(sample::tf32_scores(a.data(), b.data(), out.data(), nullptr), nullptr);
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 8; ++j) {
      float expected = 0;
      for (int k = 0; k < 32; ++k) expected += tf32_part(a[i * 32 + k]) * tf32_part(b[j * 32 + k]);
      EXPECT_EQ(out[i * 8 + j], expected);
    }
  }
}

__global__ void gram_kernel(const double* rows, double* out) {
  const double own = rows[threadIdx.x / 4 * 4 + threadIdx.x % 4];
  double sums[2] = {1, 1};
  mma_m8n8k4_f64(sums, own, own);
  for (int i = 0; i < 2; ++i) out[threadIdx.x / 4 * 8 + threadIdx.x % 4 * 2 + i] = sums[i];
}

TEST(Intrinsics, RowsInFloat64TimesThemselvesAreThePlainLoop) {
  const std::vector<float> values = random_values(8 * 4);
  const std::vector<double> rows(values.begin(), values.end());
  std::vector<double> out(8 * 8);
  ASSERT_STREQ(launch(gram_kernel, 1, 32, 0, nullptr, rows.data(), out.data()), nullptr);
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 8; ++j) {
      double expected = 1;
      for (int k = 0; k < 4; ++k) expected += rows[i * 4 + k] * rows[j * 4 + k];
      EXPECT_EQ(out[i * 8 + j], expected);
    }
  }
}

template <bool kTransposed>
__global__ void load_tile(uint32_t* out) {
  Shared<uint16_t> tile = dynamic_shared<uint16_t>();
  for (int i = threadIdx.x; i < 256; i += 32) tile[i] = static_cast<uint16_t>(i);
  __syncwarp();
  const uint32_t address = shared_address(tile + threadIdx.x * 8);  // matrices one after the other
  uint32_t registers[4];
  if constexpr (kTransposed) {
    ldmatrix_x4_trans(registers, address);
  } else {
    ldmatrix_x4(registers, address);
  }
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = registers[i];
}

TEST(Intrinsics, LdmatrixGivesTheDocumentedElements) {
  std::vector<uint32_t> out(128);
  const auto pair = [](int low, int high) { return static_cast<uint32_t>(low | high << 16); };
  ASSERT_STREQ(launch(load_tile<false>, 1, 32, 512, nullptr, out.data()), nullptr);
  for (int i = 0; i < 128; ++i) {
    const int matrix = i % 4 * 64, g = i / 16, t = i / 4 % 4;
    EXPECT_EQ(out[i], pair(matrix + g * 8 + 2 * t, matrix + g * 8 + 2 * t + 1));
  }
  ASSERT_STREQ(launch(load_tile<true>, 1, 32, 512, nullptr, out.data()), nullptr);
  for (int i = 0; i < 128; ++i) {
    const int matrix = i % 4 * 64, g = i / 16, t = i / 4 % 4;
    EXPECT_EQ(out[i], pair(matrix + 2 * t * 8 + g, matrix + (2 * t + 1) * 8 + g));
  }
}

// Rows written by one lane are read by others.
__global__ void load_without_syncwarp() {
  Shared<uint16_t> tile = dynamic_shared<uint16_t>();
  for (int i = 0; i < 8; ++i) tile[threadIdx.x * 8 + i] = 0;
  uint32_t registers[4];
  ldmatrix_x4(registers, shared_address(tile + threadIdx.x * 8));
}

__global__ void load_out_of_bounds() {
  uint32_t registers[4];
  ldmatrix_x4(registers, threadIdx.x * 16 + 16);
}

TEST(Intrinsics, LdmatrixIsWatched) {
  EXPECT_NE(launch(load_without_syncwarp, 1, 32, 512, nullptr), nullptr);
  EXPECT_NE(launch(load_out_of_bounds, 1, 32, 512, nullptr), nullptr);
}

TEST(Intrinsics, EveryHalfSurvivesTheWayToFloatAndBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Half half{static_cast<uint16_t>(bits)};
    const float value = to_float(half);
    if (std::isnan(value)) {
      EXPECT_GT(bits & 0x7fff, 0x7c00u);
    } else {
      EXPECT_EQ(to_half(value).bits, bits);
    }
    const BFloat16 wide{static_cast<uint16_t>(bits)};
    if (!std::isnan(to_float(wide))) {
      EXPECT_EQ(to_bfloat16(to_float(wide)).bits, bits);
    }
  }
}

TEST(Intrinsics, RoundingIsToNearestEven) {
  EXPECT_EQ(to_float(to_half(1.0f + 0x1p-11f)), 1.0f);
  EXPECT_EQ(to_float(to_half(1.0f + 0x3p-11f)), 1.0f + 0x1p-9f);
  EXPECT_EQ(to_float(to_half(65520.0f)), std::numeric_limits<float>::infinity());
  EXPECT_EQ(to_float(to_bfloat16(1.0f + 0x1p-8f)), 1.0f);
  EXPECT_EQ(to_float(to_bfloat16(1.0f + 0x3p-8f)), 1.0f + 0x1p-6f);
  EXPECT_TRUE(std::isnan(to_float(to_bfloat16(NAN))));
  EXPECT_EQ(pack<Half>(1.0f, -2.0f), 0xc0003c00u);
  EXPECT_EQ(pack<BFloat16>(1.0f, -2.0f), 0xc0003f80u);
  EXPECT_EQ(unpack<Half>(0xc0003c00u).y, -2.0f);
}

TEST(Intrinsics, ApproximationsFlushWhatTheGpuFlushes) {
  EXPECT_EQ(fast_exp2(-127.0f), 0.0f);
  EXPECT_EQ(fast_exp2(3.0f), 8.0f);
  float sine, cosine;
  fast_sincos_cycles(12.25f, &sine, &cosine);
  EXPECT_NEAR(sine, 1.0f, 1e-6f);
  EXPECT_NEAR(cosine, 0.0f, 1e-6f);
}

}  // namespace
}  // namespace ikattn
