// The vector type of the CPU kernels: one source on GCC/Clang vector extensions, whose width is
// decided by the instruction set a file is compiled for.
//
// Everything here lives in an anonymous namespace inside namespace IKATTN_ISA: a function emitted
// from an AVX-512 file must never be the copy the linker keeps for a machine without AVX-512.
#pragma once

#include <stdint.h>

#include <utility>

#include "support/cpu/sizes.h"

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace ikattn::IKATTN_ISA {
namespace {

template <typename T>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float type __attribute__((vector_size(kVectorBytes)));
  typedef int32_t bits __attribute__((vector_size(kVectorBytes)));
  typedef uint32_t words __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VectorOf<int32_t> {
  typedef int32_t type __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VectorOf<double> {
  typedef double type __attribute__((vector_size(kVectorBytes)));
  typedef int64_t bits __attribute__((vector_size(kVectorBytes)));
  typedef uint64_t words __attribute__((vector_size(kVectorBytes)));
};

template <typename T>
using Vec = typename VectorOf<T>::type;
template <typename T>
using Bits = typename VectorOf<T>::bits;
template <typename T>
using Words = typename VectorOf<T>::words;  // whose sums may wrap around
template <typename T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <typename T>
inline Vec<T> load(const T* source) {
  Vec<T> result;
  __builtin_memcpy(&result, source, sizeof(result));
  return result;
}

template <typename T>
inline void store(T* target, Vec<T> value) {
  __builtin_memcpy(target, &value, sizeof(value));
}

template <typename T>
inline Vec<T> broadcast(T value) {
  return value - Vec<T>{};
}

// Returns the lanes before `count`, and zeros.
template <typename T>
inline Vec<T> first_lanes(Vec<T> value, int64_t count) {
  Bits<T> lane;
  for (int i = 0; i < kLanes<T>; ++i) lane[i] = i;
  return lane < static_cast<decltype(+lane[0])>(count) ? value : Vec<T>{};
}

// Exchanges lanes i and i ^ kDistance.
template <typename T, int kDistance, int... kLane>
inline Vec<T> exchange_lanes(Vec<T> value, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(value, value, (kLane ^ kDistance)...);
}

// Returns combine() of all lanes, in halves, for a chain would wait for every addition.
template <typename T, int kDistance = kLanes<T> / 2, typename Combine>
inline T over_lanes(Vec<T> value, Combine combine) {
  if constexpr (kDistance == 0) {
    return value[0];
  } else {
    const auto lanes = std::make_integer_sequence<int, kLanes<T>>();
    return over_lanes<T, kDistance / 2>(combine(value, exchange_lanes<T, kDistance>(value, lanes)),
                                        combine);
  }
}

template <typename T>
inline T sum_of_lanes(Vec<T> value) {
  return over_lanes<T>(value, [](Vec<T> a, Vec<T> b) { return a + b; });
}

template <typename T>
inline T max_of_lanes(Vec<T> value) {
  return over_lanes<T>(value, [](Vec<T> a, Vec<T> b) { return b > a ? b : a; });
}

#if defined(__AVX__)
constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
#endif

// Returns the nearest integer, ties to even, exact for every finite input.
inline Vec<float> round_nearest(Vec<float> x) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_maskz_roundscale_ps(static_cast<__mmask16>(-1), (__m512)x, kNearest);
#elif defined(__AVX__)
  return (Vec<float>)_mm256_round_ps((__m256)x, kNearest);
#else
  Vec<float> rounded = x;
  for (int lane = 0; lane < kLanes<float>; ++lane) rounded[lane] = __builtin_rintf(x[lane]);
  return rounded;
#endif
}

inline Vec<double> round_nearest(Vec<double> x) {
#if defined(__AVX512F__)
  return (Vec<double>)_mm512_maskz_roundscale_pd(static_cast<__mmask8>(-1), (__m512d)x, kNearest);
#elif defined(__AVX__)
  return (Vec<double>)_mm256_round_pd((__m256d)x, kNearest);
#else
  Vec<double> rounded = x;
  for (int lane = 0; lane < kLanes<double>; ++lane) rounded[lane] = __builtin_rint(x[lane]);
  return rounded;
#endif
}

template <typename T, int kHalf, int... kLane>
inline void exchange_pair(Vec<T>& a, Vec<T>& b, std::integer_sequence<int, kLane...>) {
  constexpr int kCount = kLanes<T>;
  const Vec<T> low =
      __builtin_shufflevector(a, b, (kLane & kHalf ? kCount + kLane - kHalf : kLane)...);
  b = __builtin_shufflevector(a, b, (kLane & kHalf ? kCount + kLane : kLane + kHalf)...);
  a = low;
}

// Does one stage of the transposition of a kLanes x kLanes block: rows i and i + kHalf exchange
// halves.
template <typename T, int kHalf>
inline void exchange_halves(Vec<T> (&rows)[kLanes<T>]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<T>; ++i) {
    if (i & kHalf) continue;
    exchange_pair<T, kHalf>(rows[i], rows[i + kHalf], std::make_integer_sequence<int, kLanes<T>>());
  }
}

// Transposes a kLanes x kLanes block.
template <typename T>
inline void transpose_block(const T* source, int64_t source_stride, T* target,
                            int64_t target_stride) {
  Vec<T> rows[kLanes<T>];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<T>; ++i) rows[i] = load(source + i * source_stride);
  if constexpr (kLanes<T> > 1) exchange_halves<T, 1>(rows);
  if constexpr (kLanes<T> > 2) exchange_halves<T, 2>(rows);
  if constexpr (kLanes<T> > 4) exchange_halves<T, 4>(rows);
  if constexpr (kLanes<T> > 8) exchange_halves<T, 8>(rows);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<T>; ++i) store(target + i * target_stride, rows[i]);
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
