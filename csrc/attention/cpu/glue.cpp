// CPU: threads and the choice of instruction set.
#include "attention/operator/glue.h"

#include "attention/cpu/kernel.h"
#include "support/cpu_glue.h"

namespace ikattn {
namespace {

const AttentionKernels& kernels() { return IKATTN_KERNELS(attention_kernels); }

struct Cpu {
  static void forward(const AttentionParams& params, const at::Tensor& query, double work) {
    const Route route = route_of(params, /*backward=*/false);
    const auto forward =
        route.sixteen_bits ? route.sixteen_bits->forward : kernels().forward[compute_index(query)];
    forward(params, route, TorchExecutor("implicit_kernel_attention", work));
  }
  static void backward(const AttentionBackwardParams& params, const at::Tensor& query,
                       double work) {
    const Route route = route_of(params, /*backward=*/true);
    const auto backward = route.sixteen_bits ? route.sixteen_bits->backward
                                             : kernels().backward[compute_index(query)];
    backward(params, route, TorchExecutor("implicit_kernel_attention_backward", work));
  }
  static void weights(const WeightsParams& params, const at::Tensor& query, double work) {
    kernels().weights[compute_index(query)](params, TorchExecutor("implicit_kernel_weights", work));
  }
  static void features(const FeaturesParams& params, bool backward, const at::Tensor& x,
                       double work) {
    const char* function = backward ? "spectral_features_backward" : "spectral_features";
    kernels().features[compute_index(x)](params, backward, TorchExecutor(function, work));
  }
  static void from_features(const FromFeaturesParams& params, const at::Tensor& features,
                            double work) {
    kernels().from_features[compute_index(features)](
        params, TorchExecutor("attention_from_features", work));
  }
  static void keep_mask(const AttentionParams& params, const at::Tensor& keep) {
    kernels().keep_mask(params, reinterpret_cast<uint8_t*>(keep.mutable_data_ptr<bool>()),
                        TorchExecutor("dropout_keep_mask", static_cast<double>(keep.numel())));
  }
};

TORCH_LIBRARY_IMPL(ikattn, CPU, m) { AttentionOperators<Cpu>::register_in(m); }

}  // namespace
}  // namespace ikattn
