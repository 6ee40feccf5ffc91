// CPU: threads and the choice of instruction set.
#include <cmath>

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

// Returns the mean of the rows that each norm takes off, [2, H d_v] in float32: of the projection,
// and of what the first norm makes of it.
at::Tensor means_of(const FactorParams& params, const Keys& keys, const ContributionSizes& sizes) {
  const auto mean = [&](const at::Tensor& rows) {
    return summed_to(rows, {1, rows.size(1)}) / static_cast<double>(sizes.D);
  };
  const at::Tensor rows = keys.projection.to(at::kDouble), first = mean(rows);
  at::Tensor second = at::zeros_like(first);
  if (keys.weights[1].defined()) {
    const at::Tensor base = params.norms[0].centered ? rows - first : rows;
    second = mean(base * keys.weights[0].to(at::kDouble).unsqueeze(1));
  }
  return at::cat({first, second}).to(at::kFloat);
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
    at::Tensor means;
    if ((common.factors[1] || common.factors[2]) && compute_index(keys.value) == 0) {
      means = means_of(common, keys, sizes);
      params.means = array_of(means);
    }
    kernels().factors[compute_index(keys.value)](params, TorchExecutor("contributions", work));
  }
  static void pair_norms(const PairParams& params, const at::Tensor& like, double work) {
    kernels().pair_norms[compute_index(like)](params, TorchExecutor("contributions", work));
  }
  // Returns why the weights of a call's pairs are made in blocks of rows by other operators;
  // nullptr: with the norms.
  static const char* why_in_blocks(const ContributionCall& call, const ContributionSizes& sizes) {
    if (call.source.attn_weights.defined()) return "the weights are given";
    if (call.source.w1.defined()) return "the kernel is implicit";
    if (sizes.B * sizes.H * sizes.L * sizes.S == 0) return "there are no pairs";
    return nullptr;
  }
  static StreamedRows streamed_norms(const ContributionCall& call, const Keys& keys,
                                     const ContributionSizes& sizes,
                                     const std::array<at::Tensor, 3>& norms) {
    const auto [B, H, G, L, S, d_v, D] = sizes;
    const WeightsSource& source = call.source;
    const at::TensorOptions options = keys.value.options();
    StreamedPairParams params;
    params.B = B;
    params.H = H;
    params.rows = L;
    params.S = S;
    set_variants(params, keys, call.block, norms);
    params.G = source.key.size(1);
    params.d = source.key.size(3);
    params.query = array_of(source.query);
    params.key = array_of(source.key);
    params.scale = source.scale.value_or(1 / std::sqrt(static_cast<double>(params.d)));
    params.is_causal = source.options.is_causal;
    params.diagonal = call.block.diagonal;
    const at::Tensor mask = or_undefined(source.options.attn_mask);
    if (mask.defined()) params.mask = array_of(mask, {B, H, L, S});
    const auto biases = logit_terms(source, at::Tensor(), keys.value.scalar_type());
    if (!biases.empty()) params.key_bias = array_of(biases[0], {B, H, 1, S});
    StreamedRows rows;
    if (needs_own_pairs(call.block)) {
      rows.own = at::empty({B, H, L}, options);
      params.own = rows.own.mutable_data_ptr();
    }
    if (call.block.maps[kMixingRatios]) {
      rows.others = at::empty({B, H, L, d_v}, options);
      params.others = array_of(rows.others);
      params.value = array_of(keys.summands.value);
      if (keys.summands.broken.defined()) params.broken = array_of(keys.summands.broken);
      params.value_heads = G;
      params.d_v = d_v;
    }
    const double work = static_cast<double>(B * H * L * S) *
                        static_cast<double>(params.d + params.d_v + H * params.variants / 2 + 16);
    kernels().streamed_norms[compute_index(keys.value)](params,
                                                        TorchExecutor("contributions", work));
    return rows;
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
