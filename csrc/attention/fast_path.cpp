// why_not_fast and which_kernels: what a call would run on, asked beforehand.
#include "attention/fast_path.h"

#include "attention/glue.h"
#include "attention/linear_time_setting.h"
#include "attention/which_kernels.h"
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
  bool wants_mask_gradient;

  Asked(const char* function, const at::Tensor& query, const at::Tensor& key,
        const at::Tensor& value, const at::Tensor& w1, const std::optional<at::Tensor>& w2,
        const AttentionOptions& options, const std::string& device)
      : where(device.empty() ? query.device() : c10::Device(device)),
        type(query.scalar_type()),
        wants_mask_gradient(is_present(options.attn_mask) && options.attn_mask->requires_grad()) {
    const AttentionSizes sizes = check_attention(function, query, key, value, w1, w2, options);
    set_common(params, sizes, query, key, w1, w2, options, kept);
    leave_out_unseen_keys(params);
    params.value = array_of(value);
    params.allow_tf32 = torch_allows_tf32();
    params.linear_time = linear_time_setting();
  }
};

std::string why_not_fast(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const at::Tensor& w1, const std::optional<at::Tensor>& w2,
                         IKATTN_OPTION_PARAMETERS, const std::string& device) {
  const AttentionOptions options{IKATTN_OPTION_VALUES};
  const Asked asked("why_not_fast", query, key, value, w1, w2, options, device);
  if (asked.where.is_cpu()) {
    return instruction_set() == InstructionSet::kBaseline
               ? "the CPU kernels use neither AVX2 with FMA nor AVX-512: the processor has them "
                 "not, or ATEN_CPU_CAPABILITY forbids them"
               : "";
  }
  if (const std::string reason = why_no_kernels(asked.where); !reason.empty()) return reason;
  const char* reason = why_no_tensor_cores(asked.params);
  if (reason != nullptr) return std::string("not on tensor cores: ") + reason;
  if (asked.wants_mask_gradient) return "the gradient of attn_mask is not computed on tensor cores";
  return "";
}

std::string kernels_of(const Asked& asked, bool backward) {
  if (asked.where.is_cpu()) return cpu_kernels(asked.params, asked.type, backward);
  if (const std::string reason = why_no_kernels(asked.where); !reason.empty()) {
    return "none: " + reason;
  }
#if defined(IKATTN_HAVE_CUDA)
  const std::string said = cuda::kernels(asked.params, asked.type, asked.where.index(), backward);
  const bool is_mask_apart =
      backward && asked.wants_mask_gradient && why_no_tensor_cores(asked.params) == nullptr;
  return is_mask_apart ? said + "; the gradient of attn_mask on the ordinary units" : said;
#else
  return "none";  // why_no_kernels says why
#endif
}

std::tuple<std::string, std::string> which_kernels(const at::Tensor& query, const at::Tensor& key,
                                                   const at::Tensor& value, const at::Tensor& w1,
                                                   const std::optional<at::Tensor>& w2,
                                                   IKATTN_OPTION_PARAMETERS,
                                                   const std::string& device) {
  const AttentionOptions options{IKATTN_OPTION_VALUES};
  const Asked asked("which_kernels", query, key, value, w1, w2, options, device);
  return {kernels_of(asked, false), kernels_of(asked, true)};
}

TORCH_LIBRARY_FRAGMENT(ikattn, m) {
  m.def(
      "why_not_fast(Tensor query, Tensor key, Tensor value, Tensor w1, Tensor? "
      "w2=None, " IKATTN_OPTION_SCHEMA ", str device=\"\") -> str",
      why_not_fast);
  m.def(
      "which_kernels(Tensor query, Tensor key, Tensor value, Tensor w1, Tensor? "
      "w2=None, " IKATTN_OPTION_SCHEMA ", str device=\"\") -> (str, str)",
      which_kernels);
  m.def("linear_time() -> str", [] { return std::string(name_of(linear_time_setting())); });
}

}  // namespace
}  // namespace ikattn
