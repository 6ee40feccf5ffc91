// CPU: threads and the choice of instruction set.
#include "contributions/cpu/kernel.h"
#include "contributions/gradients.h"
#include "support/cpu_glue.h"

namespace ikattn {
namespace {

const ContributionKernels& kernels() { return IKATTN_KERNELS(contribution_kernels); }

// Tells whether norms of vectors that are not needed otherwise cost less through Gram matrices. One
// multiply-add in float64 costs two in float32.
bool goes_through_grams(const FactorParams& params, const Keys& keys,
                        const ContributionSizes& sizes) {
  const bool alone = !params.factors[0] && !params.factors[1] && !params.factors[2];
  const double tokens = static_cast<double>(sizes.B * sizes.S), D = static_cast<double>(sizes.D);
  return alone && compute_index(keys.value) == 0 &&
         2 * static_cast<double>(sizes.d_v) * (tokens + D) < tokens * D;
}

// Returns W_h^T W_h of all heads, [d_v, H d_v].
at::Tensor grams_of(const at::Tensor& projection, const ContributionSizes& sizes) {
  const int64_t H = sizes.H, d_v = sizes.d_v;
  const at::Tensor heads = projection.view({sizes.D, H, d_v}).permute({1, 2, 0});
  at::Tensor grams = at::empty({d_v, H, d_v}, projection.options().dtype(at::kDouble));
  at::Tensor by_head = grams.transpose(0, 1);
  multiply_into(by_head, heads, heads.mT(), /*accumulate=*/false);
  return grams.view({d_v, H * d_v});
}

struct Cpu {
  static void factors(const FactorParams& common, const Keys& keys,
                      const ContributionSizes& sizes) {
    const at::Tensor projection = keys.projection.contiguous();  // read by rows
    FactorsOfTokens params{common};
    params.G = sizes.G;
    params.d_v = sizes.d_v;
    params.value = array_of(keys.value);
    params.projection = array_of(projection);
    if (goes_through_grams(common, keys, sizes)) {
      const at::Tensor grams = grams_of(projection, sizes);
      const double work = 2.0 * static_cast<double>(sizes.B * sizes.S) *
                          static_cast<double>(sizes.H * sizes.d_v * sizes.d_v);
      kernels().value_norms(params, array_of(grams), TorchExecutor("contributions", work));
      return;
    }
    const double work = static_cast<double>(sizes.B * sizes.S * sizes.H) *
                        static_cast<double>((sizes.H + sizes.d_v) * sizes.D);
    kernels().factors[compute_index(keys.value)](params, TorchExecutor("contributions", work));
  }
  static void pair_norms(const PairParams& params, const at::Tensor& like, double work) {
    kernels().pair_norms[compute_index(like)](params, TorchExecutor("contributions", work));
  }
  static void pair_gradients(const PairGradientParams& params, const at::Tensor&, double work) {
    kernels().pair_gradients(params, TorchExecutor(kMapsBackward, work));
  }
};

// Computes the distances [B, L, S] of tensors of one type, float32 or float64.
at::Tensor alti_distances(const at::Tensor& weights, const at::Tensor& heads,
                          const at::Tensor& output, const at::Tensor& residual, int64_t diagonal,
                          bool is_squared) {
  const auto fits = [&](const at::Tensor& tensor, at::IntArrayRef sizes) {
    return tensor.sizes() == sizes && tensor.scalar_type() == output.scalar_type() &&
           tensor.device() == output.device();
  };
  TORCH_CHECK(weights.dim() == 4 && output.dim() == 3 &&
                  (output.scalar_type() == at::kFloat || output.scalar_type() == at::kDouble),
              "alti_distances: weights must be [B, H, L, S] and output [B, L, D], float32 or "
              "float64, got ",
              weights.sizes(), " and ", output.sizes(), " in ", output.scalar_type());
  const int64_t B = weights.size(0), H = weights.size(1), L = weights.size(2);
  const int64_t S = weights.size(3), D = output.size(2);
  TORCH_CHECK(fits(weights, {B, H, L, S}) && fits(heads, {B, S, H, D}) && fits(output, {B, L, D}) &&
                  fits(residual, {B, L, D}),
              "alti_distances: heads must be ", at::IntArrayRef({B, S, H, D}),
              ", output and residual ", at::IntArrayRef({B, L, D}), " in the type of weights, got ",
              heads.sizes(), ", ", output.sizes(), " and ", residual.sizes());
  const at::Tensor contiguous[] = {weights.contiguous(), heads.contiguous(), output.contiguous(),
                                   residual.contiguous()};
  at::Tensor distances = at::empty({B, L, S}, output.options());
  DistanceParams params;
  params.B = B;
  params.H = H;
  params.L = L;
  params.S = S;
  params.D = D;
  params.diagonal = diagonal;
  params.is_squared = is_squared;
  params.weights = contiguous[0].const_data_ptr();
  params.heads = contiguous[1].const_data_ptr();
  params.output = contiguous[2].const_data_ptr();
  params.residual = contiguous[3].const_data_ptr();
  params.distances = distances.data_ptr();
  if (distances.numel() == 0) return distances;
  const double work = static_cast<double>(B * L * S) * static_cast<double>(D * (H + 2));
  kernels().distances[compute_index(output)](params, TorchExecutor("alti", work));
  return distances;
}

TORCH_LIBRARY_IMPL(ikattn, CPU, m) {
  implement<"alti_distances", alti_distances>(m);
  register_contribution_maps<contribution_maps_of<Cpu>>(m);
  implement<"contribution_maps_backward", maps_backward<contribution_gradients_of<Cpu>>>(m);
}

}  // namespace
}  // namespace ikattn
