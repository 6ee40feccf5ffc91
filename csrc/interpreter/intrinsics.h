// The instructions of support/cuda/intrinsics.h, emulated.
#pragma once

#include "interpreter/interpreter.h"
#include "support/cuda/float16.h"

namespace ikattn {
namespace interpreter {

// Arguments of one lane.
struct Mma {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};
void mma_f16(void* const* arguments, Place place);
void mma_bf16(void* const* arguments, Place place);
void mma_tf32(void* const* arguments, Place place);

struct MmaF64 {
  double* d;
  double a, b;
};
void mma_f64(void* const* arguments, Place place);

struct LoadMatrices {
  uint32_t row_address;
  uint32_t* registers;
};
void load_matrices(void* const* arguments, Place place);
void load_matrices_transposed(void* const* arguments, Place place);

}  // namespace interpreter

template <typename T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                  interpreter::Place place = interpreter::Place::current()) {
  static_assert(std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>);
  interpreter::Mma argument{d, a, {b0, b1}};
  interpreter::warp_operation(
      std::is_same_v<T, Half> ? interpreter::mma_f16 : interpreter::mma_bf16, &argument,
      0xffffffffu, "mma_m16n8k16", place);
}

inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                             interpreter::Place place = interpreter::Place::current()) {
  interpreter::Mma argument{d, a, {b0, b1}};
  interpreter::warp_operation(interpreter::mma_tf32, &argument, 0xffffffffu, "mma_m16n8k8_tf32",
                              place);
}

inline void mma_m8n8k4_f64(double (&d)[2], double a, double b,
                           interpreter::Place place = interpreter::Place::current()) {
  interpreter::MmaF64 argument{d, a, b};
  interpreter::warp_operation(interpreter::mma_f64, &argument, 0xffffffffu, "mma_m8n8k4_f64",
                              place);
}

inline void ldmatrix_x4(uint32_t (&registers)[4], uint32_t row_address,
                        interpreter::Place place = interpreter::Place::current()) {
  interpreter::LoadMatrices argument{row_address, registers};
  interpreter::warp_operation(interpreter::load_matrices, &argument, 0xffffffffu, "ldmatrix_x4",
                              place);
}

inline void ldmatrix_x4_trans(uint32_t (&registers)[4], uint32_t row_address,
                              interpreter::Place place = interpreter::Place::current()) {
  interpreter::LoadMatrices argument{row_address, registers};
  interpreter::warp_operation(interpreter::load_matrices_transposed, &argument, 0xffffffffu,
                              "ldmatrix_x4_trans", place);
}

inline void cp_async_16(uint32_t shared_address, const void* source, int bytes = 16,
                        interpreter::Place place = interpreter::Place::current()) {
  if (bytes < 0 || bytes > 16 || reinterpret_cast<uintptr_t>(source) % 16 != 0) {
    interpreter::fail("cp_async_16 of " + std::to_string(bytes) +
                          " bytes, or from an address that is no multiple of 16",
                      place);
  }
  unsigned char value[16] = {};
  memcpy(value, source, static_cast<size_t>(bytes));  // here, where AddressSanitizer looks
  interpreter::begin_copy(shared_address, value, place);
}

inline unsigned unknown_to_compiler(unsigned x) { return x; }
inline void cp_async_commit() { interpreter::commit_copies(); }

template <int kPending>
void cp_async_wait() {
  interpreter::wait_for_copies(kPending);
}

inline uint32_t pack_f16x2(float low, float high) {
  return to_half(low).bits | uint32_t{to_half(high).bits} << 16;
}
inline uint32_t pack_bf16x2(float low, float high) {
  return to_bfloat16(low).bits | uint32_t{to_bfloat16(high).bits} << 16;
}

// Computes x y + z: in double the product is exact, and the sum rounded once more only by float.
inline uint32_t fma_bf16x2(uint32_t x, uint32_t y, uint32_t z) {
  const auto number = [](uint32_t bits) {
    return static_cast<double>(to_float(BFloat16{static_cast<uint16_t>(bits)}));
  };
  const double low = number(x) * number(y) + number(z);
  const double high = number(x >> 16) * number(y >> 16) + number(z >> 16);
  return pack_bf16x2(static_cast<float>(low), static_cast<float>(high));
}

// Multiplies numbers of Half, whose product is one of float.
inline uint32_t multiply_f16x2(uint32_t x, uint32_t y) {
  const auto half = [](uint32_t bits) { return to_float(Half{static_cast<uint16_t>(bits)}); };
  return pack_f16x2(half(x) * half(y), half(x >> 16) * half(y >> 16));
}

namespace interpreter {
inline float flush(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
}  // namespace interpreter

inline float fast_exp2(float x) { return interpreter::flush(exp2f(x)); }
inline float fast_sqrt(float x) { return sqrtf(interpreter::flush(x)); }
inline float fast_rsqrt(float x) { return 1.0f / sqrtf(interpreter::flush(x)); }

inline float tf32_rounded(float x) {
  const uint32_t bits = __float_as_uint(x);
  return x - x == 0 ? __uint_as_float((bits + 0x1000u) & 0xffffe000u) : x;
}

inline void fast_sincos(float angle, float* sine, float* cosine) {
  *sine = sinf(angle);
  *cosine = cosf(angle);
}
inline void fast_sincos_of_fraction(float fraction, float* sine, float* cosine) {
  sincospif(2.0f * fraction, sine, cosine);
}

}  // namespace ikattn
