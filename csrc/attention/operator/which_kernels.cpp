// why_not_fast and which_kernels: what a call would run on, asked beforehand.
#include "attention/operator/which_kernels.h"

#include "attention/calls/determinism.h"
#include "attention/calls/linear_time_setting.h"
#include "attention/operator/glue.h"
#include "support/devices.h"
#include "support/instruction_set.h"

namespace ikattn {
namespace {

// A call that is asked about: it need not lie where it would run.
struct Asked {
  AttentionParams params;
  Kept kept;
  c10::Device where;
  at::ScalarType type;
  bool wants_mask_gradient;  // of pairs

  Asked(const char* function, const at::Tensor& query, const at::Tensor& key,
        const at::Tensor& value, const at::Tensor& w1, const std::optional<at::Tensor>& w2,
        const AttentionOptions& options, const std::string& device)
      : where(device.empty() ? query.device() : c10::Device(device)), type(query.scalar_type()) {
    const AttentionSizes sizes = check_attention(function, query, key, value, w1, w2, options);
    set_common(params, sizes, query, key, w1, w2, options, kept);
    wants_mask_gradient = params.mask && options.attn_mask->requires_grad();
    leave_out_unseen_keys(params);
    params.value = array_of(value);
    params.allow_tf32 = torch_allows_tf32();
    params.linear_time = linear_time_setting();
    params.batch_invariant = is_batch_invariant();
  }
};

constexpr const char* kMaskGradient = "the gradient of attn_mask is computed on CUDA cores";

KernelChoice kernels_of(const Asked& asked, bool backward) {
  if (asked.where.is_cpu()) {
    KernelChoice choice = cpu_kernels(asked.params, asked.type, backward);
    choice.proven = "the CPU";
    return choice;
  }
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

std::string why_not_fast(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const at::Tensor& w1, const std::optional<at::Tensor>& w2,
                         IKATTN_OPTION_PARAMETERS, const std::string& device) {
  const AttentionOptions options{IKATTN_OPTION_VALUES};
  const Asked asked("why_not_fast", query, key, value, w1, w2, options, device);
  if (asked.where.is_cpu()) return why_no_vectors();
  if (const std::string reason = why_no_kernels(asked.where); !reason.empty()) return reason;
  const KernelChoice choice = kernels_of(asked, false);
  if (choice.unit == "cuda_cores") return "not on tensor cores: " + choice.reason;
  return asked.wants_mask_gradient ? kMaskGradient : "";
}

// Algorithm, unit, reason and scores of the forward, then of the backward; then what has proven
// both.
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
      "why_not_fast(Tensor query, Tensor key, Tensor value, Tensor w1, Tensor? "
      "w2=None, " IKATTN_OPTION_SCHEMA ", str device=\"\") -> str",
      why_not_fast);
  m.def(
      "which_kernels(Tensor query, Tensor key, Tensor value, Tensor w1, Tensor? "
      "w2=None, " IKATTN_OPTION_SCHEMA ", str device=\"\") -> str[]",
      which_kernels);
  m.def("linear_time() -> str", [] { return std::string(name_of(linear_time_setting())); });
}

}  // namespace
}  // namespace ikattn
