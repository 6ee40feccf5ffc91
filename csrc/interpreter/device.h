// The words of CUDA C++ for g++, so that kernels compile as plain C++ and run in the interpreter.
// support/cuda/launch.h lists them.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <bit>
#include <string>
#include <tuple>
#include <type_traits>

#include "interpreter/interpreter.h"
#include "interpreter/shared.h"
#include "support/cuda/families.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))

// --- Vector types
// -----------------------------------------------------------------------------------

#define IKATTN_INTERPRETER_VECTORS(T, name)                                          \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                 \
  struct name##3 { T x, y, z; };                                                     \
  struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; }; \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                         \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                 \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
IKATTN_INTERPRETER_VECTORS(float, float)
IKATTN_INTERPRETER_VECTORS(double, double)
IKATTN_INTERPRETER_VECTORS(int, int)
IKATTN_INTERPRETER_VECTORS(unsigned, uint)
IKATTN_INTERPRETER_VECTORS(unsigned short, ushort)
IKATTN_INTERPRETER_VECTORS(unsigned char, uchar)
#undef IKATTN_INTERPRETER_VECTORS

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// Macros, as the interpreter keeps them in one place.
#define threadIdx (::ikattn::interpreter::built_ins.thread)
#define blockIdx (::ikattn::interpreter::built_ins.block)
#define blockDim (::ikattn::interpreter::built_ins.block_size)
#define gridDim (::ikattn::interpreter::built_ins.grid_size)
inline constexpr int warpSize = 32;

// --- Barriers, shuffles, votes
// ----------------------------------------------------------------------

inline void __syncthreads(
    ikattn::interpreter::Place place = ikattn::interpreter::Place::current()) {
  ikattn::interpreter::block_barrier(false, "__syncthreads", place);
}
inline int __syncthreads_count(
    int predicate, ikattn::interpreter::Place place = ikattn::interpreter::Place::current()) {
  return ikattn::interpreter::block_barrier(predicate != 0, "__syncthreads_count", place);
}
inline int __syncthreads_or(
    int predicate, ikattn::interpreter::Place place = ikattn::interpreter::Place::current()) {
  return ikattn::interpreter::block_barrier(predicate != 0, "__syncthreads_or", place) > 0;
}
inline int __syncthreads_and(
    int predicate, ikattn::interpreter::Place place = ikattn::interpreter::Place::current()) {
  return ikattn::interpreter::block_barrier(predicate == 0, "__syncthreads_and", place) == 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffu,
                       ikattn::interpreter::Place place = ikattn::interpreter::Place::current()) {
  ikattn::interpreter::warp_operation(nullptr, nullptr, mask, "__syncwarp", place);
}
inline void __threadfence() {}

namespace ikattn::interpreter {

struct Shuffle {
  uint64_t bits;
  int source;
  uint64_t result;
};
void shuffle(void* const* arguments, Place place);

struct Vote {
  bool predicate;
  unsigned ballot;
};
void vote(void* const* arguments, Place place);

// The value of lane `source`, the lane's own where there is none.
template <typename T>
T shuffle_from(int source, T value, unsigned mask, const char* name, Place place) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
  Shuffle argument{0, source >= 0 && source < warpSize ? source : lane_of_thread(), 0};
  memcpy(&argument.bits, &value, sizeof(T));
  warp_operation(shuffle, &argument, mask, name, place);
  memcpy(&value, &argument.result, sizeof(T));
  return value;
}

inline unsigned ballot(bool predicate, unsigned mask, const char* name, Place place) {
  Vote argument{predicate, 0};
  warp_operation(vote, &argument, mask, name, place);
  return argument.ballot;
}

}  // namespace ikattn::interpreter

template <typename T>
T __shfl_sync(unsigned mask, T value, int source,
              ikattn::interpreter::Place place = ikattn::interpreter::Place::current()) {
  return ikattn::interpreter::shuffle_from(source % warpSize, value, mask, "__shfl_sync", place);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask,
                  ikattn::interpreter::Place place = ikattn::interpreter::Place::current()) {
  return ikattn::interpreter::shuffle_from(ikattn::interpreter::lane_of_thread() ^ lane_mask, value,
                                           mask, "__shfl_xor_sync", place);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta,
                   ikattn::interpreter::Place place = ikattn::interpreter::Place::current()) {
  return ikattn::interpreter::shuffle_from(
      ikattn::interpreter::lane_of_thread() + static_cast<int>(delta), value, mask,
      "__shfl_down_sync", place);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta,
                 ikattn::interpreter::Place place = ikattn::interpreter::Place::current()) {
  return ikattn::interpreter::shuffle_from(
      ikattn::interpreter::lane_of_thread() - static_cast<int>(delta), value, mask,
      "__shfl_up_sync", place);
}
inline unsigned __ballot_sync(
    unsigned mask, int predicate,
    ikattn::interpreter::Place place = ikattn::interpreter::Place::current()) {
  return ikattn::interpreter::ballot(predicate != 0, mask, "__ballot_sync", place);
}
inline int __any_sync(unsigned mask, int predicate,
                      ikattn::interpreter::Place place = ikattn::interpreter::Place::current()) {
  return ikattn::interpreter::ballot(predicate != 0, mask, "__any_sync", place) != 0;
}
inline int __all_sync(unsigned mask, int predicate,
                      ikattn::interpreter::Place place = ikattn::interpreter::Place::current()) {
  return ikattn::interpreter::ballot(predicate != 0, mask, "__all_sync", place) == 0xffffffffu;
}

// --- Atomics: one thread runs at a time
// -------------------------------------------------------------

template <typename T>
concept AtomicInteger =
    std::is_same_v<T, int> || std::is_same_v<T, unsigned> || std::is_same_v<T, unsigned long long>;

#define IKATTN_INTERPRETER_ATOMIC(name, updated)                                      \
  template <AtomicInteger T>                                                          \
  T name(T* target, std::type_identity_t<T> value) {                                  \
    const T old = *target;                                                            \
    *target = updated;                                                                \
    return old;                                                                       \
  }                                                                                   \
  template <AtomicInteger T>                                                          \
  T name(ikattn::Shared<T> target, std::type_identity_t<T> value,                     \
         ikattn::interpreter::Place place = ikattn::interpreter::Place::current()) {  \
    using ikattn::interpreter::Access;                                                \
    return name(reinterpret_cast<T*>(ikattn::interpreter::access_shared(              \
                    Access::kAtomic, target.address(), sizeof(T), sizeof(T), place)), \
                value);                                                               \
  }
IKATTN_INTERPRETER_ATOMIC(atomicAdd, old + value)
IKATTN_INTERPRETER_ATOMIC(atomicMax, std::max(old, value))
IKATTN_INTERPRETER_ATOMIC(atomicMin, std::min(old, value))
IKATTN_INTERPRETER_ATOMIC(atomicOr, old | value)
#undef IKATTN_INTERPRETER_ATOMIC

// --- Arithmetic
// -------------------------------------------------------------------------------------

template <typename T>
T __ldg(const T* from) {
  return *from;
}

#define IKATTN_INTERPRETER_MIN_MAX(T)               \
  inline T min(T a, T b) { return std::min(a, b); } \
  inline T max(T a, T b) { return std::max(a, b); }
IKATTN_INTERPRETER_MIN_MAX(int)
IKATTN_INTERPRETER_MIN_MAX(unsigned)
IKATTN_INTERPRETER_MIN_MAX(long)
IKATTN_INTERPRETER_MIN_MAX(unsigned long)
IKATTN_INTERPRETER_MIN_MAX(long long)
IKATTN_INTERPRETER_MIN_MAX(unsigned long long)
#undef IKATTN_INTERPRETER_MIN_MAX
// Returns the other operand where one is NaN, as a GPU does.
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
// Computes sine and cosine of pi x. The angle is reduced in cycles before pi, a rounded number,
// comes in.
inline void sincospi(double x, double* sine, double* cosine) {
  const double angle = M_PI * (x - 2.0 * rint(0.5 * x));
  *sine = sin(angle);
  *cosine = cos(angle);
}
inline void sincospif(float x, float* sine, float* cosine) {
  double wide_sine, wide_cosine;
  sincospi(x, &wide_sine, &wide_cosine);
  *sine = static_cast<float>(wide_sine);
  *cosine = static_cast<float>(wide_cosine);
}

// --- Launch
// -----------------------------------------------------------------------------------------

struct CUstream_st;  // declared in CUDA's headers, too

namespace ikattn {

using Stream = CUstream_st*;

inline int multiprocessors() { return interpreter::multiprocessors(); }
inline int current_device() { return 0; }
inline std::string gpu_and_driver() { return "interpreter\t0"; }
inline bool has_warpgroups() {
  return interpreter::has_warpgroups() && cuda::is_on(Family::kHopper);
}
inline int64_t most_shared_memory() { return static_cast<int64_t>(interpreter::shared_limit()); }

template <typename... Parameters>
const char* why_not_here(void (*)(Parameters...)) {
  return nullptr;
}

template <typename... Parameters, typename... Arguments>
const char* launch(void (*kernel)(Parameters...), dim3 grid, dim3 block,
                   size_t dynamic_shared_bytes, Stream /*stream*/, Arguments&&... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return nullptr;
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<std::remove_cv_t<Parameters>...> arguments;
  };
  Call call{kernel, {static_cast<Arguments&&>(arguments)...}};
  interpreter::Launch launch;
  launch.grid = {grid.x, grid.y, grid.z};
  launch.block = {block.x, block.y, block.z};
  launch.dynamic_shared_bytes = dynamic_shared_bytes;
  launch.kernel = reinterpret_cast<const void*>(kernel);
  launch.context = &call;
  launch.run_thread = [](void* context) {
    const Call& call = *static_cast<Call*>(context);
    std::apply(call.kernel, call.arguments);
  };
  return interpreter::run(launch);
}

}  // namespace ikattn
