// CUDA: tensors to params, the stream. Built where torch has CUDA.
#include "attention/operator/glue.h"

#include "attention/calls/determinism.h"
#include "attention/cuda/decoding/decoding.h"
#include "attention/cuda/kernels.h"
#include "support/cuda/glue.h"

namespace ikattn {
namespace {

struct Cuda {
  static void forward(const AttentionParams& params, const at::Tensor& query, double) {
    run("implicit_kernel_attention", query, cuda::attention_kernels.forward, params);
  }
  static void backward(const AttentionBackwardParams& params, const at::Tensor& query, double) {
    run("implicit_kernel_attention_backward", query, cuda::attention_kernels.backward, params);
  }
  static void weights(const WeightsParams& params, const at::Tensor& query, double) {
    run("implicit_kernel_weights", query, cuda::attention_kernels.weights, params);
  }
  static void features(const FeaturesParams& params, bool backward, const at::Tensor& x, double) {
    cuda::Call call(backward ? "spectral_features_backward" : "spectral_features", x);
    call.check(
        cuda::attention_kernels.features[compute_index(x)](params, backward, executor_of(call)));
  }
  // Products of torch would give a row other bits among others.
  static bool has_decoding() {
    const bool is_on = cuda::is_on(Family::kDecoding);
    TORCH_CHECK(is_on || !is_batch_invariant(),
                "attention_from_features: on a GPU deterministic = \"batch\" needs the kernels of "
                "the family decoding, which no GPU has proven; IKATTN_KERNELS=+decoding turns them "
                "on");
    return is_on;
  }
  static void from_features(const FromFeaturesParams& params, const at::Tensor& features, double) {
    cuda::Call call("attention_from_features", features);
    const auto kernel = compute_index(features) == 1 ? cuda::attention_from_features<double>
                                                     : cuda::attention_from_features<float>;
    call.check(kernel(params, executor_of(call)));
  }
  static void keep_mask(const AttentionParams& params, const at::Tensor& keep) {
    const cuda::Call call("dropout_keep_mask", keep);
    call.check(cuda::dropout_keep_mask(
        params, reinterpret_cast<uint8_t*>(keep.mutable_data_ptr<bool>()), call.stream()));
  }

 private:
  static cuda::DeviceExecutor executor_of(cuda::Call& call) {
    cuda::DeviceExecutor executor;
    executor.stream = call.stream();
    executor.allocate = [](void* owner, int64_t bytes) {
      return static_cast<cuda::Call*>(owner)->allocate(bytes);
    };
    executor.owner = &call;
    return executor;
  }

  template <typename Params>
  static void run(const char* function, const at::Tensor& query,
                  const char* (*const (&kernels)[2])(const Params&, const cuda::DeviceExecutor&),
                  const Params& params) {
    cuda::Call call(function, query);
    call.check(kernels[compute_index(query)](params, executor_of(call)));
  }
};

TORCH_LIBRARY_IMPL(ikattn, IKATTN_CUDA_KEY, m) { AttentionOperators<Cuda>::register_in(m); }

}  // namespace
}  // namespace ikattn
