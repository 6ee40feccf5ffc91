// CUDA: tensors to params, the stream. Built where torch has CUDA.
#include "attention/operator/glue.h"

#include "attention/calls/determinism.h"
#include "attention/calls/linear_time_setting.h"
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
    Params with_context = params;
    with_context.allow_tf32 = torch_allows_tf32();
    with_context.linear_time = linear_time_setting();
    with_context.batch_invariant = is_batch_invariant();
    call.check(kernels[compute_index(query)](with_context, executor_of(call)));
  }
};

at::Tensor dropout_keep_mask_cuda(const at::Tensor& dropout_seed, int64_t B, int64_t H, int64_t L,
                                  int64_t S, double dropout_p) {
  check_dropout("dropout_keep_mask", dropout_p, dropout_seed);
  const at::Tensor keep = whole_keep_mask(dropout_seed, B, H, L, S);
  if (dropout_p == 0) return keep;
  const at::Tensor state = dropout_seed.contiguous();
  AttentionParams params;
  params.B = B;
  params.H = H;
  params.L = L;
  params.S = S;
  params.dropout_threshold = dropout_threshold(dropout_p);
  params.dropout = dropout_state(state, H);
  const cuda::Call call("dropout_keep_mask", keep);
  call.check(cuda::dropout_keep_mask(
      params, reinterpret_cast<uint8_t*>(keep.mutable_data_ptr<bool>()), call.stream()));
  return keep;
}

TORCH_LIBRARY_IMPL(ikattn, IKATTN_CUDA_KEY, m) {
  AttentionOperators<Cuda>::register_in(m);
  implement<"dropout_keep_mask", dropout_keep_mask_cuda>(m);
}

}  // namespace
}  // namespace ikattn
