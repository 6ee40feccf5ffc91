// The operators that describe the library.
#include <ATen/ATen.h>
#include <torch/library.h>
#include <torch/version.h>

#include "ikattn/version.h"
#include "support/instruction_set.h"

namespace ikattn {
namespace {

std::string build_info() {
  std::string isas;
  for (const InstructionSet set :
       {InstructionSet::kBaseline, InstructionSet::kAvx2, InstructionSet::kAvx512}) {
    if (is_built(set)) isas += std::string(isas.empty() ? "\"" : ", \"") + name_of(set) + "\"";
  }
#if defined(IKATTN_HAVE_CUDA)
  const char* cuda = "\"cuda_architectures\": \"" IKATTN_CUDA_ARCHITECTURES "\"";
#else
  const char* cuda = "\"no_cuda_reason\": \"" IKATTN_NO_CUDA_REASON "\"";
#endif
#if IKATTN_HAVE_WARPGROUPS
  const char* warpgroups = "true";
#else
  const char* warpgroups = "false";
#endif
  return std::string("{\"version\": \"") + IKATTN_VERSION + "\", \"torch\": \"" + TORCH_VERSION +
         "\", \"compiler\": \"" + __VERSION__ + "\", \"isas\": [" + isas + "], " + cuda +
         ", \"warpgroups\": " + warpgroups + "}";
}

TORCH_LIBRARY_FRAGMENT(ikattn, m) {
  m.def("build_info() -> str", build_info);
  m.def("instruction_set() -> str", [] { return std::string(name_of(instruction_set())); });
  m.def("sixteen_bit_instructions() -> str", [] { return std::string(name_of(sixteen_bits())); });
}

}  // namespace
}  // namespace ikattn
