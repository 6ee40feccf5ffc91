// CUDA: the stream and scratch memory. Built where torch has CUDA.
#include "contributions/glue.h"

#include "contributions/cuda/kernels.h"
#include "support/cuda/glue.h"

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
};

TORCH_LIBRARY_IMPL(ikattn, CUDA, m) { register_contribution_maps<contribution_maps_of<Cuda>>(m); }

}  // namespace
}  // namespace ikattn
