// Which of the compiled CPU kernels this process uses.
#pragma once

#include <ATen/Version.h>
#include <ATen/cpu/Utils.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <string>

namespace ikattn {

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };

// The best the processor has, unless the environment variable ATEN_CPU_CAPABILITY (default, avx2,
// avx512), which torch honours too, asks for less.
inline InstructionSet instruction_set() {
  static const InstructionSet chosen = [] {
#if defined(IKATTN_HAVE_X86_ISAS)
    const std::string allowed = at::get_cpu_capability();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 =
        __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (has_avx512 && allowed == "AVX512") return InstructionSet::kAvx512;
    if (has_avx2 && allowed != "DEFAULT" && allowed != "NO AVX") return InstructionSet::kAvx2;
#endif
    return InstructionSet::kBaseline;
  }();
  return chosen;
}

// What multiplies numbers of 16 bits faster than float32, beside AVX-512: nothing, fixed point
// (VNNI), fixed point and bfloat16, or tiles of bfloat16.
enum class SixteenBits { kNone, kVnni, kBFloat16, kAmx };

// The best the processor has, unless the environment variable IKATTN_SIXTEEN_BITS (none,
// avx512_vnni, avx512_bf16, amx) asks for less. Intel's processors multiply bfloat16 in AVX-512 no
// faster than float32; AMD's do. Every processor with AMX has its tiles of bfloat16 so far.
inline SixteenBits sixteen_bits() {
  static const SixteenBits chosen = [] {
#if defined(IKATTN_HAVE_X86_ISAS)
    const char* variable = std::getenv("IKATTN_SIXTEEN_BITS");
    const std::string allowed = variable && *variable ? variable : "amx";
    TORCH_CHECK(allowed == "none" || allowed == "avx512_vnni" || allowed == "avx512_bf16" ||
                    allowed == "amx",
                "the environment variable IKATTN_SIXTEEN_BITS must be none, avx512_vnni, "
                "avx512_bf16 or amx, got ",
                allowed);
    if (instruction_set() != InstructionSet::kAvx512 || allowed == "none" ||
        !__builtin_cpu_supports("avx512vnni")) {
      return SixteenBits::kNone;
    }
    if (__builtin_cpu_supports("avx512bf16") && allowed != "avx512_vnni") {
      // Asks the system for the tiles, which it keeps for each thread.
      if (allowed == "amx" && at::cpu::init_amx()) return SixteenBits::kAmx;
      if (__builtin_cpu_is("amd")) return SixteenBits::kBFloat16;
    }
    return SixteenBits::kVnni;
#else
    return SixteenBits::kNone;
#endif
  }();
  return chosen;
}

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

}  // namespace ikattn
