// Which of the compiled CPU kernels this process uses.
#pragma once

#include <ATen/Version.h>

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
