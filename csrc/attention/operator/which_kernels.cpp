// which_kernels: tells what a call would run on, beforehand.
#include "attention/operator/which_kernels.h"

#include "attention/calls/linear_time_setting.h"
#include "attention/operator/glue.h"
#include "support/devices.h"

namespace ikattn {
namespace {

// The call in question, whose tensors need not be on the device where it would run.
struct Asked {
  AttentionParams params;
  HeldTensors held;
  c10::Device where;
  at::ScalarType type;
  bool wants_mask_gradient;  // the mask differs between queries

  Asked(const char* function, const at::Tensor& query, const at::Tensor& key,
        const at::Tensor& value, const at::Tensor& w1, const std::optional<at::Tensor>& w2,
        const AttentionOptions& options, const std::string& device)
      : where(device.empty() ? query.device() : c10::Device(device)), type(query.scalar_type()) {
    const AttentionSizes sizes = check_attention(function, query, key, value, w1, w2, options);
    set_common(params, sizes, query, key, w1, w2, options, held);
    wants_mask_gradient = params.mask && options.attn_mask->requires_grad();
    leave_out_unseen_keys(params);
    params.value = array_of(value);
  }
};

constexpr const char* kMaskGradient = "the gradient of attn_mask is computed on CUDA cores";

KernelChoice kernels_of(const Asked& asked, bool backward) {
  if (asked.where.is_cpu()) return cpu_kernels(asked.params, backward);
  if (const std::string reason = why_no_kernels(asked.where); !reason.empty()) {
    return {"none", "none", reason, ""};
  }
#if defined(IKATTN_HAVE_CUDA)
  KernelChoice choice = cuda::kernels(asked.params, asked.type, asked.where.index(), backward);
  if (backward && asked.wants_mask_gradient && choice.unit != "cuda_cores") {
    choice.reason = kMaskGradient;
  }
  return choice;
#else
  return {"none", "none", "", ""};  // why_no_kernels says why
#endif
}

// Returns algorithm, unit, reason and scores of the forward, then of the backward; then the proofs
// of both.
std::vector<std::string> which_kernels(const at::Tensor& query, const at::Tensor& key,
                                       const at::Tensor& value, const at::Tensor& w1,
                                       const std::optional<at::Tensor>& w2,
                                       IKATTN_OPTION_PARAMETERS, const std::string& device) {
  const AttentionOptions options{IKATTN_OPTION_VALUES};
  const Asked asked("which_kernels", query, key, value, w1, w2, options, device);
  const KernelChoice forward = kernels_of(asked, false), backward = kernels_of(asked, true);
  return {forward.algorithm, forward.unit,    forward.reason,  forward.scores, backward.algorithm,
          backward.unit,     backward.reason, backward.scores, forward.proven, backward.proven};
}

TORCH_LIBRARY_FRAGMENT(ikattn, m) {
  m.def(
      "which_kernels(Tensor query, Tensor key, Tensor value, Tensor w1, Tensor? "
      "w2=None, " IKATTN_OPTION_SCHEMA ", str device=\"\") -> str[]",
      which_kernels);
  m.def("linear_time() -> str", [] { return std::string(name_of(linear_time_setting())); });
}

}  // namespace
}  // namespace ikattn
