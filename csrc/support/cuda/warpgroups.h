// Products of warpgroups, four warps each: what only sm_90a has.
//
// wgmma: a warpgroup multiplies 64 rows, 16 of them each of its warps; a thread's registers of A
// are those of its warp's 16x16 tile (intrinsics.h), its sums those of 16x8 tiles side by side. The
// other operand lies in shared memory (wgmma_operand). Products go on while the threads do
// something else.
#pragma once

#include "support/cuda/float16.h"
#include "support/cuda/launch.h"

// Whether wgmma can be compiled. For a kernel that uses it, code for other processors is
// compiled beside it (by some nvcc even for sm_90a alone), and never launched.
#if defined(IKATTN_INTERPRETER) || defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define IKATTN_WARPGROUP_CODE 1
#else
#define IKATTN_WARPGROUP_CODE 0

namespace ikattn {

// Stands for a kernel of warpgroups in code for other processors: does nothing, with all of its
// parameters.
template <typename... Parameters>
__device__ __forceinline__ void trap_without_warpgroups(const Parameters&...) {
  __trap();
}

}  // namespace ikattn
#endif

#if defined(IKATTN_INTERPRETER)
#include "interpreter/warpgroups.h"
#else

namespace ikattn {

// Changes how many registers each thread of this warpgroup has, a multiple of 8: first some give
// theirs away, then others take them.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Registers that the next products read or write have their values.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Makes one group of the products begun since the last commit.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kPending of the latest groups are under way; until then neither their sums
// nor their A may be touched. ptxas sees to it, and says so where it must serialise (C75xx).
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from reading sums before they have been waited for, which it might, as no
// instruction of the wait names them.
template <int kCount>
__device__ __forceinline__ void sums_are_there(float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void sums_are_there(int32_t (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(sums[i])::"memory");
}
template <int kBoxes, int kCount>
__device__ __forceinline__ void sums_are_there(float (&sums)[kBoxes][kCount]) {
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) sums_are_there(sums[box]);
}
// Orders what this thread does with shared memory: after a barrier, products and copies by TMA see
// what it wrote, and copies may go where it read.
__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#define IKATTN_8(x, i) x(i), x(i + 1), x(i + 2), x(i + 3), x(i + 4), x(i + 5), x(i + 6), x(i + 7)
#define IKATTN_32(x, i) IKATTN_8(x, i), IKATTN_8(x, i + 8), IKATTN_8(x, i + 16), IKATTN_8(x, i + 24)
#define IKATTN_SUM(i) "+f"(d[i])
#define IKATTN_SUMS_32                                                                     \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define IKATTN_SUMS_64                                                                      \
  IKATTN_SUMS_32                                                                            \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
  "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// Begins d (+)= a b; accumulate false: d is overwritten. a is [64][16]. By columns: b [16][128, 64
// or 8] lies [column][inner]. By rows: b [16][64] lies [inner][column]. Where a lies in shared
// memory, too, it lies [row][inner].
template <typename T>
__device__ __forceinline__ void wgmma_by_columns(float (&d)[64], const uint32_t (&a)[4], uint64_t b,
                                                 bool accumulate);
template <typename T>
__device__ __forceinline__ void wgmma_by_columns(float (&d)[32], const uint32_t (&a)[4], uint64_t b,
                                                 bool accumulate);
template <typename T>
__device__ __forceinline__ void wgmma_by_columns(float (&d)[4], const uint32_t (&a)[4], uint64_t b,
                                                 bool accumulate);
template <typename T>
__device__ __forceinline__ void wgmma_by_columns(float (&d)[32], uint64_t a, uint64_t b,
                                                 bool accumulate);
template <typename T>
__device__ __forceinline__ void wgmma_by_rows(float (&d)[32], const uint32_t (&a)[4], uint64_t b,
                                              bool accumulate);
#define IKATTN_WGMMA_64(name, T, type, is_by_rows)                                            \
  template <>                                                                                 \
  __device__ __forceinline__ void name<T>(float (&d)[32], const uint32_t (&a)[4], uint64_t b, \
                                          bool accumulate) {                                  \
    asm volatile(                                                                             \
        "{.reg .pred p; setp.ne.b32 p, %37, 0;"                                               \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " IKATTN_SUMS_32        \
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, " is_by_rows ";}"                             \
        : IKATTN_32(IKATTN_SUM, 0)                                                            \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}));          \
  }
#define IKATTN_WGMMA_SHARED(T, type)                                                          \
  template <>                                                                                 \
  __device__ __forceinline__ void wgmma_by_columns<T>(float (&d)[32], uint64_t a, uint64_t b, \
                                                      bool accumulate) {                      \
    asm volatile(                                                                             \
        "{.reg .pred p; setp.ne.b32 p, %34, 0;"                                               \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " IKATTN_SUMS_32        \
        "}, %32, %33, p, 1, 1, 0, 0;}"                                                        \
        : IKATTN_32(IKATTN_SUM, 0)                                                            \
        : "l"(a), "l"(b), "r"(int{accumulate}));                                              \
  }
#define IKATTN_WGMMA_8(T, type)                                                              \
  template <>                                                                                \
  __device__ __forceinline__ void wgmma_by_columns<T>(float (&d)[4], const uint32_t (&a)[4], \
                                                      uint64_t b, bool accumulate) {         \
    asm volatile(                                                                            \
        "{.reg .pred p; setp.ne.b32 p, %9, 0;"                                               \
        "wgmma.mma_async.sync.aligned.m64n8k16.f32." type "." type                           \
        " {%0, %1, %2, %3}"                                                                  \
        ", {%4, %5, %6, %7}, %8, p, 1, 1, 0;}"                                               \
        : IKATTN_SUM(0), IKATTN_SUM(1), IKATTN_SUM(2), IKATTN_SUM(3)                         \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}));         \
  }
#define IKATTN_WGMMA_128(T, type)                                                             \
  template <>                                                                                 \
  __device__ __forceinline__ void wgmma_by_columns<T>(float (&d)[64], const uint32_t (&a)[4], \
                                                      uint64_t b, bool accumulate) {          \
    asm volatile(                                                                             \
        "{.reg .pred p; setp.ne.b32 p, %69, 0;"                                               \
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " " IKATTN_SUMS_64       \
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;}"                                          \
        : IKATTN_32(IKATTN_SUM, 0), IKATTN_32(IKATTN_SUM, 32)                                 \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}));          \
  }
IKATTN_WGMMA_64(wgmma_by_columns, Half, "f16", "0")
IKATTN_WGMMA_64(wgmma_by_columns, BFloat16, "bf16", "0")
IKATTN_WGMMA_64(wgmma_by_rows, Half, "f16", "1")
IKATTN_WGMMA_64(wgmma_by_rows, BFloat16, "bf16", "1")
IKATTN_WGMMA_SHARED(Half, "f16")
IKATTN_WGMMA_SHARED(BFloat16, "bf16")
IKATTN_WGMMA_8(BFloat16, "bf16")
IKATTN_WGMMA_128(Half, "f16")
IKATTN_WGMMA_128(BFloat16, "bf16")

// Products of integers of 8 bits: a is [64][32], b [32][128] lies [column][inner]. Sums are exact.
#undef IKATTN_SUM
#define IKATTN_SUM(i) "+r"(d[i])
__device__ __forceinline__ void wgmma_int8(int32_t (&d)[64], const uint32_t (&a)[4], uint64_t b,
                                           bool accumulate) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %69, 0;"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 " IKATTN_SUMS_64
      "}, {%64, %65, %66, %67}, %68, p;}"
      : IKATTN_32(IKATTN_SUM, 0), IKATTN_32(IKATTN_SUM, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}));
}
#undef IKATTN_WGMMA_128
#undef IKATTN_WGMMA_8
#undef IKATTN_WGMMA_SHARED
#undef IKATTN_WGMMA_64
#undef IKATTN_SUMS_64
#undef IKATTN_SUMS_32
#undef IKATTN_SUM
#undef IKATTN_32
#undef IKATTN_8

}  // namespace ikattn

#endif  // IKATTN_INTERPRETER

namespace ikattn {

// Describes an operand in shared memory to wgmma: rows of 128 bytes, eight of them an atom of 1024
// bytes that begins at a multiple of 1024, in which the 16-byte chunk is swizzled by the row. Its
// first row begins at `address`: 32 bytes on for the next 16 of the inner axis where it lies
// [column][inner] or [row][inner], 2048 where it lies [inner][column].
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t address) {
  constexpr uint64_t kSwizzled128 = 1, kAtom = 1024;
  return kSwizzled128 << 62 | kAtom >> 4 << 32 | uint64_t{1} << 16 |
         static_cast<uint64_t>((address & 0x3ffff) >> 4);
}
// Returns the operand some bytes further on: shared memory ends before 2^18, and nothing is
// carried.
__device__ __forceinline__ uint64_t wgmma_operand_after(uint64_t operand, uint32_t bytes) {
  return operand + (bytes >> 4);
}

}  // namespace ikattn
