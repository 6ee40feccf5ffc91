// why_not_fast: what a call would run on, asked beforehand.
#include "attention/fast_path.h"

#include "attention/glue.h"
#include "attention/linear_time_setting.h"
#include "support/devices.h"
#include "support/instruction_set.h"

namespace ikattn {
namespace {

std::string why_not_fast(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const at::Tensor& w1, const std::optional<at::Tensor>& w2,
                         IKATTN_OPTION_PARAMETERS, const std::string& device) {
  const AttentionOptions options{IKATTN_OPTION_VALUES};
  [[maybe_unused]] const AttentionSizes sizes =
      check_attention("why_not_fast", query, key, value, w1, w2, options);
  const c10::Device where = device.empty() ? query.device() : c10::Device(device);
  if (where.is_cpu()) {
    return instruction_set() == InstructionSet::kBaseline
               ? "the CPU kernels use neither AVX2 with FMA nor AVX-512: the processor has them "
                 "not, or ATEN_CPU_CAPABILITY forbids them"
               : "";
  }
  if (const std::string reason = why_no_kernels(where); !reason.empty()) return reason;
  AttentionParams params;
  set_sizes(params, sizes);
  params.value = array_of(value);
  params.eps = eps;
  params.is_causal = is_causal;
  params.allow_tf32 = torch_allows_tf32();
  if (is_present(attn_mask)) {
    params.mask = array_of(*attn_mask, {sizes.B, sizes.H, sizes.L, sizes.S});
  }
  const char* reason = why_no_tensor_cores(params);
  if (reason != nullptr) return std::string("not on tensor cores: ") + reason;
  if (is_present(attn_mask) && attn_mask->requires_grad()) {
    return "the gradient of attn_mask is not computed on tensor cores";
  }
  return "";
}

TORCH_LIBRARY_FRAGMENT(ikattn, m) {
  m.def(
      "why_not_fast(Tensor query, Tensor key, Tensor value, Tensor w1, Tensor? "
      "w2=None, " IKATTN_OPTION_SCHEMA ", str device=\"\") -> str",
      why_not_fast);
  m.def("linear_time() -> str", [] { return std::string(name_of(linear_time_setting())); });
}

}  // namespace
}  // namespace ikattn
