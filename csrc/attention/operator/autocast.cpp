// The autocast keys of the attention operators: query, key and value in the lower precision;
// frequencies, bias and mask as they are, for angles and logits are formed in float32 whatever the
// storage type.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "attention/operator/arguments.h"
#include "support/memory.h"

namespace ikattn {
namespace {

template <c10::DeviceType kDevice>
struct Autocast {
  static constexpr c10::DispatchKey key() {
    return kDevice == c10::DeviceType::CUDA ? c10::DispatchKey::Autocast
                                            : c10::DispatchKey::AutocastCPU;
  }
  static at::Tensor lower(const at::Tensor& tensor) {
    return at::autocast::cached_cast(at::autocast::get_lower_precision_fp_from_device_type(kDevice),
                                     tensor, kDevice);
  }

  static std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& query,
                                                      const at::Tensor& key_,
                                                      const at::Tensor& value, const at::Tensor& w1,
                                                      const std::optional<at::Tensor>& w2,
                                                      IKATTN_OPTION_PARAMETERS) {
    c10::impl::ExcludeDispatchKeyGuard guard(key());
    return call_attention(lower(query), lower(key_), lower(value), w1, w2, IKATTN_OPTION_VALUES);
  }
  static at::Tensor weights(const at::Tensor& query, const at::Tensor& key_, const at::Tensor& w1,
                            const std::optional<at::Tensor>& w2, IKATTN_OPTION_PARAMETERS,
                            bool average_heads) {
    c10::impl::ExcludeDispatchKeyGuard guard(key());
    return call_weights(lower(query), lower(key_), w1, w2, IKATTN_OPTION_VALUES, average_heads);
  }
  static at::Tensor features(const at::Tensor& x, const at::Tensor& w1,
                             const std::optional<at::Tensor>& w2, bool tokens_first) {
    c10::impl::ExcludeDispatchKeyGuard guard(key());
    return call_features(lower(x), w1, w2, tokens_first);
  }
  static at::Tensor from_features(const at::Tensor& query_features, const at::Tensor& key_features,
                                  const at::Tensor& logits, const at::Tensor& value, double eps) {
    c10::impl::ExcludeDispatchKeyGuard guard(key());
    const auto wide = [](const at::Tensor& tensor) {  // features come lowered under autocast
      return tensor.to(compute_type(tensor.scalar_type()));
    };
    return call_from_features(wide(query_features), wide(key_features), wide(logits), value, eps);
  }
  static void register_in(torch::Library& m) {
    implement<"implicit_kernel_attention", attention>(m);
    implement<"implicit_kernel_weights", weights>(m);
    implement<"spectral_features", features>(m);
    implement<"attention_from_features", from_features>(m);
  }
};

TORCH_LIBRARY_IMPL(ikattn, AutocastCPU, m) { Autocast<c10::DeviceType::CPU>::register_in(m); }
TORCH_LIBRARY_IMPL(ikattn, Autocast, m) { Autocast<c10::DeviceType::CUDA>::register_in(m); }

}  // namespace
}  // namespace ikattn
