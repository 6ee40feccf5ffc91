// The instructions that C++ has no words for: all inline PTX is in this file and, of Hopper's own,
// in warpgroups.h and bulk_copies.h.
//
// Fragments, by lane: g = lane / 4, t = lane % 4. A register of 16-bit elements holds two, the
// first in its low half.
//   A 16x16, 16-bit  a0 (g, 2t..2t+1)  a1 (g+8, 2t..)  a2 (g, 2t+8..)  a3 (g+8, 2t+8..)
//   B 16x8  (k, n)   b0 (2t..2t+1, g)  b1 (2t+8..2t+9, g)
//   C 16x8, fp32     c0, c1 (g, 2t..2t+1)   c2, c3 (g+8, 2t..2t+1)
//   TF32             A 16x8: a0 (g, t)  a1 (g+8, t)  a2 (g, t+4)  a3 (g+8, t+4)
//                    B 8x8:  b0 (t, g)  b1 (t+4, g)
// Two C tiles side by side, packed, are one A: a0, a1 = pack(c0, c1), pack(c2, c3) of the first,
// a2, a3 of the second.
//
// Row of a 16x16 tile of 16-bit elements, and its chunk of 8 columns, that a lane names to
// ldmatrix_x4:
//   A, and with _trans B stored [k][n]   row lane % 16, chunk lane / 16
//   B stored [n][k]                      row lane % 8 + 8 * (lane / 16), chunk lane / 8 % 2
// Both give b0, b1 of columns 0..7 in registers 0, 1 and of columns 8..15 in registers 2, 3.
//
// In the interpreter (csrc/interpreter/intrinsics.h) products are exact and fp32 sums run
// in order of k; a GPU may sum in another order, so compare with a tolerance. A copy's destination
// holds NaNs until its thread has waited for it; other threads see it after the barrier behind that
// wait.
#pragma once

#include "support/cuda/float16.h"
#include "support/cuda/launch.h"

#if defined(IKATTN_INTERPRETER)
#include "interpreter/intrinsics.h"
#else

namespace ikattn {

// Returns the bytes from the start of the block's shared memory: their sums stay one 32-bit
// addition.
__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Returns x; but a loop computes anew all that depends on it.
__device__ __forceinline__ unsigned unknown_to_compiler(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Adds a b to d for a 16x16 and a 16x8 tile of T, Half or BFloat16.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1);
template <>
__device__ __forceinline__ void mma_m16n8k16<Half>(float (&d)[4], const uint32_t (&a)[4],
                                                   uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<BFloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                       uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Adds a b to d for a 16x8 and an 8x8 tile; registers hold floats, of which the low 13 bits are
// ignored.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Adds a b to d for an 8x4 and a 4x8 tile: a is (g, t), b (t, g), d (g, 2t..2t+1). A lane's part of
// rows is thus a, and b of the transposed.
__device__ __forceinline__ void mma_m8n8k4_f64(double (&d)[2], double a, double b) {
  asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+d"(d[0]), "+d"(d[1])
      : "d"(a), "d"(b));
}

// Loads four 8x8 matrices of 16-bit elements. Lane l names the address (multiple of 16) of row l %
// 8 of matrix l / 8. Register i of a lane: matrix i, row g, columns 2t and 2t+1.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&registers)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(row_address));
}

// Loads the transposed matrices: register i holds matrix i, rows 2t and 2t+1, column g.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&registers)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(row_address));
}

// Begins to copy `bytes` (0..16) from `source`, a multiple of 16, and zeros up to 16 bytes, to
// shared memory. With 0 bytes nothing is read.
__device__ __forceinline__ void cp_async_16(uint32_t shared_address, const void* source,
                                            int bytes = 16) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :
               : "r"(shared_address), "l"(__cvta_generic_to_global(source)), "r"(bytes)
               : "memory");
}

// Makes one group of the copies that this thread has begun since the last commit.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;"); }

// Waits until at most kPending of this thread's latest groups are under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kPending) : "memory");
}

// Packs two numbers, rounded to nearest, `low` in the low half.
__device__ __forceinline__ uint32_t pack_f16x2(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ uint32_t pack_bf16x2(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Computes x y + z of two numbers of BFloat16 each, rounded to nearest.
__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t x, uint32_t y, uint32_t z) {
  uint32_t sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(y), "r"(z));
  return sum;
}

// Multiplies two numbers of Half each, rounded to nearest.
__device__ __forceinline__ uint32_t multiply_f16x2(uint32_t x, uint32_t y) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
  return product;
}

// Compute with an error of two units in the last place; results below the normal range are zero.
__device__ __forceinline__ float fast_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float fast_sqrt(float x) {
  float result;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float fast_rsqrt(float x) {
  float result;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Rounds to nearest, ties away from zero.
__device__ __forceinline__ float tf32_rounded(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits);
}

// Computes sine and cosine: an absolute error of 2^-21, and of 2^-23 of the angle.
__device__ __forceinline__ void fast_sincos(float angle, float* sine, float* cosine) {
  __sincosf(angle, sine, cosine);
}

// Computes sine and cosine of 2 pi cycles, at most half a cycle: absolute error about 5e-7, for
// __sincosf is that good near zero only.
__device__ __forceinline__ void fast_sincos_of_fraction(float fraction, float* sine,
                                                        float* cosine) {
  fast_sincos(6.2831853f * fraction, sine, cosine);
}

}  // namespace ikattn

#endif  // IKATTN_INTERPRETER

namespace ikattn {

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<Half>(float low, float high) {
  return pack_f16x2(low, high);
}
template <>
__device__ __forceinline__ uint32_t pack<BFloat16>(float low, float high) {
  return pack_bf16x2(low, high);
}

template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t packed) {
  return make_float2(to_float(T{static_cast<uint16_t>(packed)}),
                     to_float(T{static_cast<uint16_t>(packed >> 16)}));
}

// Returns x unit less the nearest whole number of cycles. It is rounded by an addition: an
// instruction that rounds takes the place of a sine. Beyond 2^22 the whole number is not the
// nearest.
__device__ __forceinline__ float remainder_in_cycles(float x, float unit = 1.0f) {
  constexpr float kLastBitIsOne = 12582912.0f;  // 1.5 2^23
  const float whole = fmaf(x, unit, kLastBitIsOne) - kLastBitIsOne;
  return fmaf(x, unit, -whole);
}
__device__ __forceinline__ void fast_sincos_cycles(float cycles, float* sine, float* cosine) {
  fast_sincos_of_fraction(remainder_in_cycles(cycles), sine, cosine);
}

// Returns the leading part of x that TF32 holds exactly; x minus it is the next part.
__device__ __forceinline__ float tf32_part(float x) {
  return __uint_as_float(__float_as_uint(x) & 0xffffe000u);
}

}  // namespace ikattn
