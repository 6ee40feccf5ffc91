// The devices that the library has kernels for, and the errors on the others.
#include "support/devices.h"

#include <ATen/ATen.h>
#include <torch/library.h>

namespace ikattn {

std::string why_no_kernels(const c10::Device& device) {
  if (device.is_cpu()) return "";
  if (!device.is_cuda()) {
    return "there are kernels for CPU and CUDA only, not for " +
           c10::DeviceTypeName(device.type(), true);
  }
#if defined(IKATTN_HAVE_CUDA)
  return cuda::why_no_kernels(device.index());
#else
  return "this library was built without CUDA kernels (" IKATTN_NO_CUDA_REASON
         "), and a call on a GPU raises an error; docs/guide/building.md says how to build them";
#endif
}

std::string cuda::why_not_on_this_gpu(const std::string& error) {
  // CUDA's errors of a launch, and of a query about a kernel.
  for (const char* no_code :
       {"no kernel image", "invalid device function", "unsupported toolchain"}) {
    if (error.find(no_code) == std::string::npos) continue;
    return error +
           " (ikattn was built for other architectures than this GPU's, or by a newer CUDA than "
           "its driver's. python -m ikattn info names what it was built for: from compute "
           "capability 8.0 on, set TORCH_CUDA_ARCH_LIST and build again; before, there are no "
           "kernels)";
  }
  return error;
}

namespace {

TORCH_LIBRARY_FRAGMENT(ikattn, m) {
  m.def("why_no_kernels(Device device) -> str",
        [](c10::Device device) { return why_no_kernels(device); });
}

constexpr const char* kOperators[] = {
    "implicit_kernel_attention",  "implicit_kernel_attention_backward",
    "implicit_kernel_weights",    "implicit_kernel_weights_backward",
    "spectral_features",          "spectral_features_backward",
    "dropout_keep_mask",          "contribution_maps",
    "streamed_contribution_maps", "contribution_maps_backward"};

// The operators that are composed of torch's where there are no kernels.
constexpr const char* kComposed[] = {"attention_from_features",
                                     "key_moments",
                                     "add_key_moments_",
                                     "key_moments_backward",
                                     "attention_from_moments",
                                     "attention_from_moments_backward",
                                     "causal_attention_from_moments",
                                     "causal_attention_from_moments_backward"};

// Refuses a call with tensors that are not dense, which is checked before except in inference mode
// and in a backward; the check names the argument.
void refuse_layout(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const std::string& name = op.operator_name().name;
  const std::string own = name.substr(name.rfind(':') + 1);
  c10::Dispatcher::singleton()
      .findSchemaOrThrow(("ikattn::check_" + own).c_str(), "")
      .callBoxed(stack);
  TORCH_CHECK(false, own, ": every tensor must be dense (strided)");
}

void refuse_layouts(torch::Library& m) {
  for (const char* name : kComposed) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<refuse_layout>());
  }
  for (const char* name : kOperators) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<refuse_layout>());
  }
}

TORCH_LIBRARY_IMPL(ikattn, SparseCPU, m) { refuse_layouts(m); }
TORCH_LIBRARY_IMPL(ikattn, SparseCUDA, m) { refuse_layouts(m); }
TORCH_LIBRARY_IMPL(ikattn, SparseCsrCPU, m) { refuse_layouts(m); }
TORCH_LIBRARY_IMPL(ikattn, SparseCsrCUDA, m) { refuse_layouts(m); }

#if !defined(IKATTN_HAVE_CUDA)

// Refuses a call with CUDA tensors; torch alone would answer with a list of its backends.
void refuse(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op.operator_name().name,
      ": there are no kernels for tensors on CUDA, for this library was built without them "
      "(" IKATTN_NO_CUDA_REASON
      "). Build it where torch has CUDA and nvcc is found (docs/guide/building.md), or call "
      "ikattn.reference, which runs on any device");
}

TORCH_LIBRARY_IMPL(ikattn, CUDA, m) {
  for (const char* name : kOperators) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<refuse>());
  }
}

#endif

}  // namespace
}  // namespace ikattn
