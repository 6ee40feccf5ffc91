// Sine, cosine, exponential and square root of whole vectors. tools/fit_polynomials.py prints
// the coefficients, which stand with the lowest power first.
#pragma once

#include "support/cpu/vector.h"

namespace ikattn::IKATTN_ISA {
namespace {

inline float power(float x, float y) { return __builtin_powf(x, y); }
inline double power(double x, double y) { return __builtin_pow(x, y); }
inline float square_root(float x) { return __builtin_sqrtf(x); }
inline double square_root(double x) { return __builtin_sqrt(x); }
inline float exponential(float x) { return __builtin_expf(x); }
inline double exponential(double x) { return __builtin_exp(x); }
inline float logarithm(float x) { return __builtin_logf(x); }
inline double logarithm(double x) { return __builtin_log(x); }

template <typename T>
struct Polynomials;

template <>
struct Polynomials<float> {
  // sin(2 pi r) / r and cos(2 pi r) in r^2, |r| <= 1/8: errors 1.2e-9 (relative), 2.7e-8
  static constexpr float kSin[] = {6.283185e+00f, -4.134163e+01f, 8.158814e+01f, -7.5240685e+01f};
  static constexpr float kCos[] = {1.0f, -1.9739153e+01f, 6.4921234e+01f, -8.359255e+01f};
  // cos(2 pi r) in r^2, |r| <= 1/4: error 2.2e-10
  static constexpr float kWideCos[] = {1.0f,           -1.9739208e+01f, 6.493935e+01f,
                                       -8.545357e+01f, 6.014398e+01f,   -2.4982166e+01f};
  // e^r, |r| <= ln 2 / 2: error 1.9e-9
  static constexpr float kExp[] = {1.0f,          1.0f,          5.0e-01f,      1.6666417e-01f,
                                   4.166611e-02f, 8.375051e-03f, 1.3954758e-03f};
  static constexpr float kRoundingShift = 12582912.0f;  // 1.5 * 2^23: low mantissa bits = integer
  static constexpr int kMantissaBits = 23;
  static constexpr float kLn2High = 6.93145752e-01f;
  static constexpr float kLn2Low = 1.42860677e-06f;
  static constexpr float kExpUnderflow = -87.0f;
};

template <>
struct Polynomials<double> {
  static constexpr double kSin[] = {6.283185307179586e+00,  -4.134170224039976e+01,
                                    8.160524927607479e+01,  -7.670585975295583e+01,
                                    4.2058693922374026e+01, -1.5094639849746901e+01,
                                    3.819764477470273e+00,  -7.112323192691278e-01};
  static constexpr double kCos[] = {1.0,
                                    -1.9739208802178716e+01,
                                    6.493939402266795e+01,
                                    -8.545681720652243e+01,
                                    6.0244641328836465e+01,
                                    -2.6426250907341746e+01,
                                    7.903091690437811e+00,
                                    -1.6968504838026126e+00};
  static constexpr double kWideCos[] = {1.0,
                                        -1.9739208802178716e+01,
                                        6.49393940226683e+01,
                                        -8.545681720669373e+01,
                                        6.0244641371875986e+01,
                                        -2.642625678332383e+01,
                                        7.903536368964168e+00,
                                        -1.7143906406716443e+00,
                                        2.820046147524151e-01,
                                        -3.6366666046301815e-02,
                                        3.670353477535485e-03};
  static constexpr double kExp[] = {1.0,
                                    1.0,
                                    0.5,
                                    1.6666666666666702e-01,
                                    4.166666666666675e-02,
                                    8.333333333309628e-03,
                                    1.388888888885275e-03,
                                    1.9841269909022497e-04,
                                    2.4801587381063678e-05,
                                    2.755722512209523e-06,
                                    2.755722885865964e-07,
                                    2.5114819550748957e-08,
                                    2.0928008010885547e-09};
  static constexpr double kRoundingShift = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr int kMantissaBits = 52;
  static constexpr double kLn2High = 6.93147180369123816490e-01;
  static constexpr double kLn2Low = 1.90821492927058770002e-10;
  static constexpr double kExpUnderflow = -708.0;
};

template <typename T, int kTerms>
inline Vec<T> horner(const T (&coefficients)[kTerms], Vec<T> x) {
  Vec<T> result = broadcast(coefficients[kTerms - 1]);
#pragma GCC unroll 16
  for (int k = kTerms - 2; k >= 0; --k) result = result * x + coefficients[k];
  return result;
}

// Computes sine and cosine of an angle in cycles. The reduction t - rint(t) is exact, so that the
// error is that of t itself; computing 2 pi t first would cost a factor of 15.
template <typename T>
inline void sincos_cycles(Vec<T> cycles, Vec<T>& sine, Vec<T>& cosine) {
  using P = Polynomials<T>;
  const Vec<T> fraction = cycles - round_nearest(cycles);
  const Vec<T> shifted = fraction * T(4) + P::kRoundingShift;  // low bits: the quarter, -2..2
  const Vec<T> r = fraction - (shifted - P::kRoundingShift) * T(0.25);
  const Bits<T> quarter = (Bits<T>)shifted;
  const Vec<T> square = r * r;
  const Vec<T> s = horner(P::kSin, square) * r;
  const Vec<T> c = horner(P::kCos, square);
  constexpr int kSignShift = 8 * sizeof(T) - 2;  // moves bit 1 of the quarter into the sign
  const Bits<T> swap = -(quarter & 1);
  const Bits<T> sign_bit = ((Bits<T>{} + 1) << (kSignShift + 1));
  const Bits<T> sine_sign = (quarter << kSignShift) & sign_bit;
  const Bits<T> next = (Bits<T>)((Words<T>)quarter + 1);  // of a NaN any bits, also the largest
  const Bits<T> cosine_sign = (next << kSignShift) & sign_bit;
  sine = (Vec<T>)((Bits<T>)(swap ? c : s) ^ sine_sign);
  cosine = (Vec<T>)((Bits<T>)(swap ? s : c) ^ cosine_sign);
}

// Computes the cosine alone: half cycles are enough, and nothing is exchanged.
template <typename T>
inline Vec<T> cos_cycles(Vec<T> cycles) {
  using P = Polynomials<T>;
  const Vec<T> fraction = cycles - round_nearest(cycles);
  const Vec<T> shifted = fraction * T(2) + P::kRoundingShift;  // low bit: odd half cycles
  const Vec<T> r = fraction - (shifted - P::kRoundingShift) * T(0.5);
  const Bits<T> sign = (Bits<T>)shifted << (8 * sizeof(T) - 1);
  return (Vec<T>)((Bits<T>)horner(P::kWideCos, r * r) ^ sign);
}

template <typename T>
inline Vec<T> square_root(Vec<T> x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    return (Vec<T>)_mm512_maskz_sqrt_ps(static_cast<__mmask16>(-1), (__m512)x);
  } else {
    return (Vec<T>)_mm512_maskz_sqrt_pd(static_cast<__mmask8>(-1), (__m512d)x);
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) {
    return (Vec<T>)_mm256_sqrt_ps((__m256)x);
  } else {
    return (Vec<T>)_mm256_sqrt_pd((__m256d)x);
  }
#else
  Vec<T> root = x;
  for (int lane = 0; lane < kLanes<T>; ++lane) {
    root[lane] = static_cast<T>(__builtin_sqrt(x[lane]));
  }
  return root;
#endif
}

// Returns e^x for x below the overflow threshold, zero below the smallest normal number, NaN for
// NaN.
template <typename T>
inline Vec<T> exp_bounded(Vec<T> x) {
  using P = Polynomials<T>;
  const Vec<T> shifted = x * T(1.44269504088896340736) + P::kRoundingShift;
  const Vec<T> n = shifted - P::kRoundingShift;
  const Vec<T> r = (x - n * P::kLn2High) - n * P::kLn2Low;
  const Vec<T> mantissa = horner(P::kExp, r);
  const Vec<T> scaled = (Vec<T>)((Words<T>)mantissa + ((Words<T>)shifted << P::kMantissaBits));
  const Vec<T> finite = x < P::kExpUnderflow ? Vec<T>{} : scaled;
  return x == x ? finite : x;
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
