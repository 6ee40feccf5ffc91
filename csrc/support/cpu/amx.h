// Products of bfloat16, two to a lane, on AMX: its tiles hold 16 rows of 16 lanes, and one
// instruction multiplies two of them. Where a product's sizes are not multiples of 16, copies of
// the last tiles are filled up with zeros.
#pragma once

#include "support/cpu/panel_gemm.h"

namespace ikattn::IKATTN_ISA {
namespace {

#if defined(__AMX_BF16__)

constexpr bool kHasAmx = true;
constexpr int64_t kAmxSide = 16;
constexpr int64_t kAmxLanes = kAmxSide * kAmxSide;  // lanes

// The operand of LDTILECFG: palette 1, eight tiles of 16 rows of 64 bytes.
struct alignas(64) AmxShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// A guard while which a thread has tiles. Other users of tiles configure them anew.
class AmxTiles {
 public:
  AmxTiles() {
    static constexpr AmxShapes kShapes;
    asm volatile("ldtilecfg %0" ::"m"(kShapes) : "memory");
  }
  ~AmxTiles() { asm volatile("tilerelease" ::: "memory"); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
};

// These replace GCC's intrinsics, which do not tell the compiler that a tile is loaded from memory.
template <int kTile, typename T>
inline void load_amx(const T* source, int64_t lanes_per_row) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(source), "r"(lanes_per_row * 4)
               : "memory");
}
template <int kTile>
inline void store_amx(float* target, int64_t lanes_per_row) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kTile), "r"(target), "r"(lanes_per_row * 4)
               : "memory");
}
template <int kTile>
inline void clear_amx() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}
template <int kSum, int kLeft, int kRight>
inline void multiply_amx() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
}

// One term of a sum of products, with the arguments of panel_gemm.
struct AmxTerm {
  const int32_t* a;
  const int32_t* b;
};

// Calls function(integral constant) for 0 .. kCount - 1.
template <int kCount, typename Function>
inline void for_constants(const Function& function) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
    (function(std::integral_constant<int, kIndex>()), ...);
  }(std::make_integer_sequence<int, kCount>());
}

// Copies one tile of A(r, k), r < rows, k < lanes, filled up with zeros.
template <Left kLeft>
inline void copy_amx_left(int64_t rows, int64_t lanes, const int32_t* a, int32_t* tile) {
  if constexpr (kLeft == Left::kRows) {
    Vec<int32_t> kept{};
    for (int64_t i = 0; i < lanes && i < kAmxSide; ++i) kept[i] = -1;
    for (int64_t r = 0; r < kAmxSide; ++r) {
      store(tile + r * kAmxSide, r < rows ? load(a + r * kPanel) & kept : Vec<int32_t>{});
    }
  } else if (lanes >= kAmxSide) {
    transpose_block(a, kPanel, tile, kAmxSide);
  } else {
    alignas(64) int32_t whole[kAmxLanes] = {};
    for (int64_t k = 0; k < lanes; ++k) store(whole + k * kAmxSide, load(a + k * kPanel));
    transpose_block(whole, kAmxSide, tile, kAmxSide);
  }
}

// Computes up to two by two tiles of c, like panel_gemm. left has copies [terms][lanes / 16][2] of
// tiles of A, or is null where they can be loaded without a copy.
template <int kRowTiles, int kColumnTiles, int kTerms>
inline void amx_block(int64_t rows, int64_t depth, const AmxTerm (&terms)[kTerms],
                      const int32_t* left, float* c, bool accumulate,
                      const Factors<float>& factors) {
  constexpr int kA = 4, kB = 6;  // after the sums
  const bool has_factors = factors.rows || factors.columns;
  const auto is_direct = [&](int i) { return !has_factors && rows >= (i + 1) * kAmxSide; };
  for_constants<kRowTiles>([&](auto i) {
    for_constants<kColumnTiles>([&](auto j) {
      if (accumulate && is_direct(i)) {
        load_amx<2 * i + j>(c + i * kAmxSide * kPanel + j * kAmxSide, kPanel);
      } else {
        clear_amx<2 * i + j>();
      }
    });
  });
  for (int term = 0; term < kTerms; ++term) {
    for (int64_t k = 0; k < depth; k += kAmxSide) {
      for_constants<kRowTiles>([&](auto i) {
        if (left) {
          load_amx<kA + i>(left + ((term * kPanel + k) / kAmxSide * 2 + i) * kAmxLanes, kAmxSide);
        } else {
          load_amx<kA + i>(terms[term].a + i * kAmxSide * kPanel + k, kPanel);
        }
      });
      for_constants<kColumnTiles>([&](auto j) {
        const int32_t* b = terms[term].b + k * kPanel + j * kAmxSide;
        if (depth - k >= kAmxSide) {
          load_amx<kB + j>(b, kPanel);
        } else {
          alignas(64) int32_t whole[kAmxLanes] = {};
          for (int64_t r = 0; r < depth - k; ++r) store(whole + r * kAmxSide, load(b + r * kPanel));
          load_amx<kB + j>(whole, kAmxSide);
        }
      });
      for_constants<kRowTiles>([&](auto i) {
        for_constants<kColumnTiles>([&](auto j) { multiply_amx<2 * i + j, kA + i, kB + j>(); });
      });
    }
  }
  for_constants<kRowTiles>([&](auto i) {
    for_constants<kColumnTiles>([&](auto j) {
      float* out = c + i * kAmxSide * kPanel + j * kAmxSide;
      if (is_direct(i)) return store_amx<2 * i + j>(out, kPanel);
      alignas(64) float sums[kAmxLanes];
      store_amx<2 * i + j>(sums, kAmxSide);
      for (int64_t r = 0; r < kAmxSide && i * kAmxSide + r < rows; ++r) {
        Vec<float> product = load(sums + r * kAmxSide);
        if (factors.rows) product *= factors.rows[i * kAmxSide + r];
        if (factors.columns) product *= load(factors.columns + j * kAmxSide);
        store(out + r * kPanel, accumulate ? load(out + r * kPanel) + product : product);
      }
    });
  });
}

// Computes panel_gemm of a sum of products of the same sizes: c (+)= factors sum_terms A b.
template <Left kLeft, int kTerms>
inline void amx_gemm(int64_t rows, int64_t columns, int64_t depth, const AmxTerm (&terms)[kTerms],
                     float* c, bool accumulate, const Factors<float>& factors) {
  constexpr int64_t kRowStep = kLeft == Left::kRows ? kPanel : 1;
  constexpr int64_t kDepthStep = kLeft == Left::kRows ? 1 : kPanel;
  alignas(64) int32_t copies[kTerms * kPanel / kAmxSide * 2 * kAmxLanes];
  for (int64_t r0 = 0; r0 < rows; r0 += 2 * kAmxSide) {
    const int64_t count = rows - r0 < 2 * kAmxSide ? rows - r0 : 2 * kAmxSide;
    AmxTerm own[kTerms];
    for (int term = 0; term < kTerms; ++term) own[term].a = terms[term].a + r0 * kRowStep;
    const bool is_copied =
        kLeft == Left::kColumns || count % kAmxSide != 0 || depth % kAmxSide != 0;
    for (int term = 0; is_copied && term < kTerms; ++term) {
      for (int64_t k = 0; k < depth; k += kAmxSide) {
        for (int64_t i = 0; i * kAmxSide < count; ++i) {
          copy_amx_left<kLeft>(count - i * kAmxSide, depth - k,
                               own[term].a + i * kAmxSide * kRowStep + k * kDepthStep,
                               copies + ((term * kPanel + k) / kAmxSide * 2 + i) * kAmxLanes);
        }
      }
    }
    const int32_t* left = is_copied ? copies : nullptr;
    for (int64_t c0 = 0; c0 < columns; c0 += 2 * kAmxSide) {
      for (int term = 0; term < kTerms; ++term) own[term].b = terms[term].b + c0;
      const Factors<float> of_block{factors.rows ? factors.rows + r0 : nullptr,
                                    factors.columns ? factors.columns + c0 : nullptr};
      float* out = c + r0 * kPanel + c0;
      const bool has_two_columns = columns - c0 > kAmxSide;
      if (count > kAmxSide && has_two_columns) {
        amx_block<2, 2>(count, depth, own, left, out, accumulate, of_block);
      } else if (count > kAmxSide) {
        amx_block<2, 1>(count, depth, own, left, out, accumulate, of_block);
      } else if (has_two_columns) {
        amx_block<1, 2>(count, depth, own, left, out, accumulate, of_block);
      } else {
        amx_block<1, 1>(count, depth, own, left, out, accumulate, of_block);
      }
    }
  }
}

#else

constexpr bool kHasAmx = false;
struct AmxTiles {
  AmxTiles() {}
};

#endif

}  // namespace
}  // namespace ikattn::IKATTN_ISA
