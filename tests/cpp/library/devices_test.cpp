// Advice about a GPU that the library has no code for. No GPU is asked.
#include "support/devices.h"

#include <gtest/gtest.h>

namespace {

using ikattn::cuda::why_not_on_this_gpu;

TEST(Devices, SaysWhatToDoWhereThereIsNoCode) {
  // CUDA words it in several ways: of a launch, of a question about a kernel, of code newer than
  // the driver.
  for (const std::string error :
       {"no kernel image is available for execution on the device", "invalid device function",
        "the provided PTX was compiled with an unsupported toolchain."}) {
    const std::string said = why_not_on_this_gpu(error);
    EXPECT_EQ(said.rfind(error, 0), 0) << said;
    for (const char* part : {"other architectures than this GPU's", "python -m ikattn info",
                             "TORCH_CUDA_ARCH_LIST", "from compute capability 8.0 on"}) {
      EXPECT_NE(said.find(part), std::string::npos) << part << " is not in: " << said;
    }
  }
}

TEST(Devices, LeavesOtherErrorsAsTheyAre) {
  for (const char* error : {"out of memory", "an illegal memory access was encountered"}) {
    EXPECT_EQ(why_not_on_this_gpu(error), error);
  }
}

TEST(Devices, NamesTheDeviceWithoutKernels) {
  EXPECT_EQ(ikattn::why_no_kernels(c10::Device("cpu")), "");
  EXPECT_EQ(ikattn::why_no_kernels(c10::Device("xpu")),
            "there are kernels for CPU and CUDA only, not for xpu");
}

}  // namespace
