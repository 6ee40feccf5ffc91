// The choice of compiled CPU kernels for this process.
#pragma once

#include <ATen/Version.h>
#include <ATen/cpu/Utils.h>
#include <c10/util/Exception.h>

#include <string>

#include "support/settings.h"

namespace ikattn {

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };

// Instructions beside AVX-512 that multiply numbers of 16 bits faster than float32: none, fixed
// point (VNNI), fixed point and bfloat16, or tiles of bfloat16.
enum class SixteenBits { kNone, kVnni, kBFloat16, kAmx };

inline const char* name_of(SixteenBits set) {
  switch (set) {
    case SixteenBits::kAmx:
      return "amx";
    case SixteenBits::kBFloat16:
      return "avx512_bf16";
    case SixteenBits::kVnni:
      return "avx512_vnni";
    default:
      return "none";
  }
}

inline const char* name_of(InstructionSet set) {
  switch (set) {
    case InstructionSet::kAvx512:
      return "avx512";
    case InstructionSet::kAvx2:
      return "avx2";
    default:
      return "baseline";
  }
}

// Tells whether this library has the kernels of a set: of all sets, unless it was built with
// IKATTN_ISA=native.
constexpr bool is_built(InstructionSet set) {
  switch (set) {
#if IKATTN_HAVE_AVX512
    case InstructionSet::kAvx512:
      return true;
#endif
#if IKATTN_HAVE_AVX2
    case InstructionSet::kAvx2:
      return true;
#endif
#if IKATTN_HAVE_BASELINE
    case InstructionSet::kBaseline:
      return true;
#endif
    default:
      return false;
  }
}
constexpr bool is_built(SixteenBits set) {
  switch (set) {
#if IKATTN_HAVE_AMX
    case SixteenBits::kAmx:
      return true;
#endif
#if IKATTN_HAVE_AVX512_BF16
    case SixteenBits::kBFloat16:
      return true;
#endif
#if IKATTN_HAVE_AVX512_VNNI
    case SixteenBits::kVnni:
      return true;
#endif
    default:
      return set == SixteenBits::kNone;
  }
}

// Returns `set`, which the processor has, or throws where the library was built without it.
template <typename Set>
Set checked_as_built(Set set) {
  TORCH_CHECK(is_built(set),
              "ikattn was built for another processor or setting alone "
              "(IKATTN_ISA=native), and holds no kernels for ",
              name_of(set), ", which this process would take: build it without IKATTN_ISA=native");
  return set;
}

// Returns the best set of the processor, unless the environment variable ATEN_CPU_CAPABILITY
// (default, avx2, avx512), which torch honours too, asks for less.
inline InstructionSet instruction_set() {
  static const InstructionSet chosen = [] {
#if IKATTN_HAVE_AVX2 || IKATTN_HAVE_AVX512
    const std::string allowed = at::get_cpu_capability();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 =
        __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (has_avx512 && allowed == "AVX512") return checked_as_built(InstructionSet::kAvx512);
    if (has_avx2 && allowed != "DEFAULT" && allowed != "NO AVX") {
      return checked_as_built(InstructionSet::kAvx2);
    }
#endif
    return checked_as_built(InstructionSet::kBaseline);
  }();
  return chosen;
}

// Returns the best set of the processor, unless the environment variable IKATTN_SIXTEEN_BITS (none,
// avx512_vnni, avx512_bf16, amx) asks for less. Intel's processors multiply bfloat16 in AVX-512 no
// faster than float32; AMD's do. Every processor with AMX has its tiles of bfloat16 so far.
inline SixteenBits sixteen_bits() {
  static const SixteenBits chosen = [] {
#if IKATTN_HAVE_AVX512
    const std::string allowed =
        choice_of("IKATTN_SIXTEEN_BITS", "amx", {"none", "avx512_vnni", "avx512_bf16", "amx"});
    if (instruction_set() != InstructionSet::kAvx512 || allowed == "none" ||
        !__builtin_cpu_supports("avx512vnni")) {
      return SixteenBits::kNone;
    }
    if (__builtin_cpu_supports("avx512bf16") && allowed != "avx512_vnni") {
      // Asks the system for the tiles, which it keeps for each thread.
      if (allowed == "amx" && at::cpu::init_amx()) return checked_as_built(SixteenBits::kAmx);
      if (__builtin_cpu_is("amd")) return checked_as_built(SixteenBits::kBFloat16);
    }
    return checked_as_built(SixteenBits::kVnni);
#else
    return SixteenBits::kNone;
#endif
  }();
  return chosen;
}

// Returns "", or why the CPU kernels are not the fastest.
inline const char* why_no_vectors() {
  return instruction_set() == InstructionSet::kBaseline
             ? "the CPU kernels use neither AVX2 with FMA nor AVX-512: the processor has them not, "
               "or ATEN_CPU_CAPABILITY forbids them"
             : "";
}

}  // namespace ikattn
