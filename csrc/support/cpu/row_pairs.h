// Products of at most half a vector of columns, whose other half would be wasted: rows 2i and 2i +
// 1 of the right operand share a vector, the numbers of a column side by side, and are multiplied
// by two numbers of the left operand at once.
#pragma once

#include "support/cpu/panel_gemm.h"

namespace ikattn::IKATTN_ISA {
namespace {

struct RowPairs {};
template <>
struct Numbers<RowPairs> : OneToALane {
  using Storage = float;
  using Result = float;
  using Sum = Vec<float>;
  static constexpr int64_t kPerVector = 2;
  static Vec<float> left(const float* a) {
    int64_t both;
    __builtin_memcpy(&both, a, sizeof(both));
    return (Vec<float>)(both - Bits<double>{});
  }
  static void multiply_add(Vec<float> left, Vec<float> right, Sum& sum) { sum += left * right; }
  static Vec<float> result(const Sum& sum) {
    return sums_of_pairs(sum, std::make_integer_sequence<int, kLanes<float>>());
  }

 private:
  template <int... kLane>
  static Vec<float> sums_of_pairs(Vec<float> x, std::integer_sequence<int, kLane...> lanes) {
    constexpr int kCount = sizeof...(kLane);
    const Vec<float> twice = x + exchange_lanes<float, 1>(x, lanes);
    return __builtin_shufflevector(twice, Vec<float>{},
                                   (kLane < kCount / 2 ? 2 * kLane : kCount)...);
  }
};

template <int... kLane>
inline void pair_rows(int64_t rows, const float* source, float* target,
                      std::integer_sequence<int, kLane...>) {
  for (int64_t r = 0; r < rows * kPanel; r += 2 * kPanel) {
    store<float>(target + r,
                 __builtin_shufflevector(load(source + r), load(source + r + kPanel),
                                         (kLane / 2 + (kLane % 2 ? sizeof...(kLane) : 0))...));
  }
}
// Packs the right operand, a vector at row 2i of target, from an even number of rows of source
// [rows][64].
inline void pair_rows(int64_t rows, const float* source, float* target) {
  pair_rows(rows, source, target, std::make_integer_sequence<int, kLanes<float>>());
}

// Adds a[rows][2 pairs] b to c[rows][half a vector]; the other half of each vector does not change.
inline void multiply_row_pairs(int64_t rows, int64_t pairs, const float* a, const float* b,
                               float* c) {
  strip_gemm<RowPairs, 1, Left::kRows>(rows, pairs, a, b, c, true, {});
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
