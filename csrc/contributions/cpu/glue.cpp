// CPU: threads and the choice of instruction set.
#include "contributions/cpu/kernel.h"
#include "contributions/gradients.h"
#include "support/cpu_glue.h"

namespace ikattn {
namespace {

const ContributionKernels& kernels() { return IKATTN_KERNELS(contribution_kernels); }

struct Cpu {
  static void factors(const FactorParams& common, const Keys& keys,
                      const ContributionSizes& sizes) {
    const at::Tensor projection = keys.projection.contiguous();  // read by rows
    FactorsOfTokens params{common};
    params.G = sizes.G;
    params.d_v = sizes.d_v;
    params.value = array_of(keys.value);
    params.projection = array_of(projection);
    const double work = static_cast<double>(sizes.B * sizes.S * sizes.H) *
                        static_cast<double>((sizes.H + sizes.d_v) * sizes.D);
    kernels().factors[compute_index(keys.value)](params, TorchExecutor(work));
  }
  static void pair_norms(const PairParams& params, const at::Tensor& like, double work) {
    kernels().pair_norms[compute_index(like)](params, TorchExecutor(work));
  }
  static void pair_gradients(const PairGradientParams& params, const at::Tensor&, double work) {
    kernels().pair_gradients(params, TorchExecutor(work));
  }
};

TORCH_LIBRARY_IMPL(ikattn, CPU, m) {
  register_contribution_maps<contribution_maps_of<Cpu>>(m);
  m.impl("contribution_maps_backward", maps_backward<contribution_gradients_of<Cpu>>);
}

}  // namespace
}  // namespace ikattn
