// CUDA: the stream and scratch memory. Built where torch has CUDA.
#include "support/cuda/glue.h"

#include "contributions/cuda/kernels.h"
#include "contributions/gradients.h"

namespace ikattn {
namespace {

struct Cuda {
  static void factors(const FactorParams& params, const at::Tensor& vectors, double) {
    cuda::Call call("contributions", vectors);
    void* scratch = call.allocate(vectors.numel() * vectors.element_size());
    call.check(
        cuda::contribution_kernels.factors[compute_index(vectors)](params, scratch, call.stream()));
  }
  static void pair_norms(const PairParams& params, const at::Tensor& like, double) {
    const cuda::Call call("contributions", like);
    call.check(cuda::contribution_kernels.pair_norms[compute_index(like)](params, call.stream()));
  }
  static void pair_gradients(const PairGradientParams& params, const at::Tensor& like, double) {
    cuda::Call call("contributions", like);
    const int64_t bytes = cuda::pair_gradient_scratch(params) * int64_t{sizeof(double)};
    auto* scratch = static_cast<double*>(call.allocate(bytes));
    call.check(cuda::contribution_kernels.pair_gradients(params, scratch, call.stream()));
  }
};

TORCH_LIBRARY_IMPL(ikattn, CUDA, m) {
  register_contribution_maps<contribution_maps_of<Cuda>>(m);
  m.impl("contribution_maps_backward", maps_backward<contribution_gradients_of<Cuda>>);
}

}  // namespace
}  // namespace ikattn
