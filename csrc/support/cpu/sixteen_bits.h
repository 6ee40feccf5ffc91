// Numbers of 16 bits, two to a lane, for instructions that multiply both and add the products to
// the lane's sum: twice the multiply-adds of float32. A panel of them, 64 lanes wide, holds 128
// numbers of a row, neighbours in one lane; along the depth of a product pairs are multiplied, so
// its depth is counted in pairs.
#pragma once

#include "support/cpu/amx.h"
#include "support/cpu/panel_gemm.h"
#include "support/cpu/vector_math.h"

namespace ikattn::IKATTN_ISA {
namespace {

// Whether the processor multiplies each kind at that rate.
#if defined(__AVX512VNNI__)
constexpr bool kHasInt16 = true;
#else
constexpr bool kHasInt16 = false;
#endif
#if defined(__AVX512BF16__)
constexpr bool kHasBFloat16 = true;
#else
constexpr bool kHasBFloat16 = false;
#endif

struct TwoToALane : OneToALane {
  using Storage = int32_t;
  using Result = float;
  static constexpr bool kHasFactors = true;
  static constexpr int64_t kPerLane = 2;
  static Vec<int32_t> left(const int32_t* a) { return broadcast(*a); }
};

// Fixed point; the sum must stay within 32 bits.
struct Int16x2 {};
template <>
struct Numbers<Int16x2> : TwoToALane {
  using Sum = Vec<int32_t>;
  static void multiply_add(Vec<int32_t> left, Vec<int32_t> right, Sum& sum) {
#if defined(__AVX512VNNI__)
    sum = (Sum)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)left, (__m512i)right);
#else
    sum += (left << 16 >> 16) * (right << 16 >> 16) + (left >> 16) * (right >> 16);
#endif
  }
  static Vec<float> result(Sum sum) { return __builtin_convertvector(sum, Vec<float>); }
};

struct BFloat16x2 {};
template <>
struct Numbers<BFloat16x2> : TwoToALane {
  using Sum = Vec<float>;
  static void multiply_add(Vec<int32_t> left, Vec<int32_t> right, Sum& sum) {
#if defined(__AVX512BF16__)
    sum = (Sum)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
#else
    constexpr int32_t kHigh = -65536;
    sum += (Sum)(left << 16) * (Sum)(right << 16) + (Sum)(left & kHigh) * (Sum)(right & kHigh);
#endif
  }
  static Vec<float> result(Sum sum) { return sum; }
};

#if defined(__AMX_BF16__)
template <>
inline void panel_gemm<BFloat16x2, Left::kRows>(int64_t rows, int64_t columns, int64_t depth,
                                                const int32_t* a, const int32_t* b, float* c,
                                                bool accumulate, Factors<float> factors) {
  amx_gemm<Left::kRows>(rows, columns, depth, {{a, b}}, c, accumulate, factors);
}
template <>
inline void panel_gemm<BFloat16x2, Left::kColumns>(int64_t rows, int64_t columns, int64_t depth,
                                                   const int32_t* a, const int32_t* b, float* c,
                                                   bool accumulate, Factors<float> factors) {
  amx_gemm<Left::kColumns>(rows, columns, depth, {{a, b}}, c, accumulate, factors);
}
#endif

constexpr int32_t kBFloat16Ones = 0x3f803f80;

// Returns the nearest bfloat16 of every lane, in its lower half.
inline Vec<int32_t> bfloat16_bits(Vec<float> x) {
#if defined(__AVX512BF16__)
  // "maskz": GCC 12 warns of the other form's undefined operand.
  return (Vec<int32_t>)_mm512_maskz_cvtepu16_epi32(static_cast<__mmask16>(-1),
                                                   (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
  const auto bits = (Vec<int32_t>)x;
  const Vec<int32_t> rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16 & 0xffff;
  return x == x ? rounded : broadcast(int32_t{0x7fc0});
#endif
}

inline Vec<float> as_bfloat16(Vec<float> x) { return (Vec<float>)(bfloat16_bits(x) << 16); }

// Lane i: low[i] and high[i].
inline Vec<int32_t> stacked_bfloat16(Vec<float> low, Vec<float> high) {
  return bfloat16_bits(high) << 16 | bfloat16_bits(low);
}

// Lane i: elements 2i and 2i + 1 of both in sequence.
inline Vec<int32_t> joined_bfloat16(Vec<float> first, Vec<float> second) {
#if defined(__AVX512BF16__)
  return (Vec<int32_t>)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#else
  int32_t bits[2 * kLanes<float>];
  store(bits, bfloat16_bits(first));
  store(bits + kLanes<float>, bfloat16_bits(second));
  Vec<int32_t> joined{};
  for (int i = 0; i < kLanes<float>; ++i) joined[i] = bits[2 * i] | bits[2 * i + 1] << 16;
  return joined;
#endif
}

// Lane i: low[i] and high[i] in fixed point, of numbers times `scale` below 2^15.
inline Vec<int32_t> stacked_int16(Vec<float> low, Vec<float> high, float scale) {
  constexpr float kShift = Polynomials<float>::kRoundingShift;
  return (Vec<int32_t>)(high * scale + kShift) << 16 |
         ((Vec<int32_t>)(low * scale + kShift) & 0xffff);
}

// Packs consecutive rows in one lane: out [(rows + 1) / 2][64] from source [rows][64] times
// factor[row], less weight[row] centre (null: 1; no centre: 0), which makes rounding errors smaller
// where rows are about multiples of `centre` [columns]. An odd last row is paired with zeros.
inline void stack_rows(int64_t rows, int64_t columns, const float* source, const float* factor,
                       int32_t* out, const float* centre = nullptr, const float* weight = nullptr) {
  const auto numbers = [&](int64_t r, int64_t c) {
    Vec<float> x = load(source + r * kPanel + c);
    if (factor) x *= factor[r];
    if (!centre) return x;
    return weight ? x - weight[r] * load(centre + c) : x - load(centre + c);
  };
  for (int64_t r = 0; r < rows; r += 2) {
    for (int64_t c = 0; c < columns; c += kLanes<float>) {
      const Vec<float> second = r + 1 < rows ? numbers(r + 1, c) : Vec<float>{};
      store(out + r / 2 * kPanel + c, stacked_bfloat16(numbers(r, c), second));
    }
  }
}

// Rounds rows of panels of `panel_rows` rows to bfloat16; finite numbers stay finite.
template <typename T>
inline void round_to_bfloat16(int64_t rows, int64_t columns, int64_t panel_rows, T* panels) {
  if constexpr (sizeof(T) == 4) {
    for (int64_t first = 0; first < columns; first += kPanel) {
      T* panel = panels + first * panel_rows;
      for (int64_t i = 0; i < rows * kPanel; i += kLanes<T>) {
        constexpr float kLargest = 3.3895314e38f;
        Vec<T> x = load(panel + i);
        x = x > kLargest && x < __builtin_inff() ? broadcast(kLargest) : x;
        x = x < -kLargest && x > -__builtin_inff() ? broadcast(-kLargest) : x;
        store(panel + i, as_bfloat16(x));
      }
    }
  }
}

// Replaces the rows [rows][64] by their rounding errors in bfloat16.
inline void subtract_bfloat16(int64_t rows, int64_t columns, float* tile) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = r * kPanel; c < r * kPanel + columns; c += kLanes<float>) {
      const Vec<float> x = load(tile + c);
      store(tile + c, x - as_bfloat16(x));
    }
  }
}

// Packs consecutive columns in one lane: out [rows][64] from source, panels of `source_rows` rows.
// columns <= 128.
inline void join_columns(int64_t rows, int64_t columns, const float* source, int64_t source_rows,
                         int32_t* out) {
  constexpr int64_t kStep = 2 * kLanes<float>;
  for (int64_t c = 0; c < columns; c += kStep) {
    const float* panel = source + c / kPanel * source_rows * kPanel + c % kPanel;
    for (int64_t r = 0; r < rows; ++r) {
      const float* x = panel + r * kPanel;
      store(out + r * kPanel + c / 2, joined_bfloat16(load(x), load(x + kLanes<float>)));
    }
  }
}

// Adds the bfloat16 of the first `columns` columns of packed [rows][64] to sums [rows][lanes].
inline void add_row_sums(int64_t rows, int64_t columns, const int32_t* packed, float* sums) {
  constexpr int kLanesOfRow = kLanes<float>;
  const Vec<int32_t> ones = broadcast(kBFloat16Ones);
  const int64_t lanes = (columns + 1) / 2, whole = lanes / kLanesOfRow * kLanesOfRow;
  Vec<int32_t> rest{};  // ones of the lanes past the last whole vector
  for (int64_t i = 0; i < lanes - whole; ++i) rest[i] = ones[i];
  for (int64_t r = 0; r < rows; ++r) {
    Vec<float> sum = load(sums + r * kLanesOfRow);
    const int32_t* row = packed + r * kPanel;
    for (int64_t c = 0; c < whole; c += kLanesOfRow) {
      Numbers<BFloat16x2>::multiply_add(load(row + c), ones, sum);
    }
    if (lanes > whole) {
      // Lanes beyond `rest` may hold anything, infinity included.
      const Vec<int32_t> last = rest == 0 ? Vec<int32_t>{} : load(row + whole);
      Numbers<BFloat16x2>::multiply_add(last, rest, sum);
    }
    store(sums + r * kLanesOfRow, sum);
  }
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
