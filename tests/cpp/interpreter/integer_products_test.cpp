// Products of integers of 8 bits, through ldmatrix, against plain loops.
#include "support/cuda/integer_products.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace ikattn {
namespace {

// 16 rows of `a` times 8 rows of `b`, of 32 columns each, and what there was before.
__global__ void int8_kernel(const int8_t* a, const int8_t* b, int32_t* out) {
  Shared<uint4> tile = dynamic_shared<uint4>();
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  tile[lane] = load_vector<uint4>(a + lane * 16);
  if (lane < 16) tile[32 + lane] = load_vector<uint4>(b + lane * 16);
  __syncwarp();
  uint32_t left[4], right[4];
  // As fragments of 16-bit elements, 16 columns of them.
  ldmatrix_x4(left, shared_address(tile + lane % 16 * 2 + lane / 16));
  ldmatrix_x4(right, shared_address(tile + 32 + lane % 8 * 2 + lane / 8 % 2));
  int32_t sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = out[(g + i / 2 * 8) * 8 + 2 * t + i % 2];
  mma_m16n8k32_int8(sums, left, right[0], right[1]);
  for (int i = 0; i < 4; ++i) out[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[i];
}

TEST(IntegerProducts, AreThePlainLoop) {
  std::mt19937 generator(3);
  std::uniform_int_distribution<int> bytes(-128, 127);
  const auto random_bytes = [&](size_t count) {
    std::vector<int8_t> values(count);
    for (int8_t& value : values) value = static_cast<int8_t>(bytes(generator));
    return values;
  };
  const std::vector<int8_t> a = random_bytes(16 * 32), b = random_bytes(8 * 32);
  std::vector<int32_t> out(16 * 8, 0x4b400000), expected = out;
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 8; ++j) {
      for (int k = 0; k < 32; ++k) expected[i * 8 + j] += a[i * 32 + k] * b[j * 32 + k];
    }
  }
  ASSERT_STREQ(launch(int8_kernel, 1, 32, 1024, nullptr, a.data(), b.data(), out.data()), nullptr);
  EXPECT_EQ(out, expected);
}

}  // namespace
}  // namespace ikattn
