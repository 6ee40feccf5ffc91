// CUDA: the stream and scratch memory. Built where torch has CUDA.
#include "support/cuda/glue.h"

#include "contributions/cuda/kernels.h"
#include "contributions/cuda/streamed/gradients.h"

namespace ikattn {
namespace {

struct Cuda {
  // The vectors are torch's products, of all heads at once. Those of numbers of 16 bits are exact,
  // and added up in float32: tensor cores make them, whatever float32 may be rounded to.
  static void factors(const FactorParams& common, const Keys& keys,
                      const ContributionSizes& sizes) {
    const auto [B, H, G, L, S, d_v, D] = sizes;
    const int64_t step = std::min(tokens_at_a_time(sizes, keys.value.device()), S);
    const at::Tensor buffer = with_memory_for("contributions", "vectors of every head", [&] {
      return at::empty({H * B * step * D}, keys.value.options());
    });
    cuda::Call call("contributions", buffer);
    void* scratch = cuda::takes_gram_matrices(common, buffer.scalar_type() == at::kDouble)
                        ? nullptr
                        : call.allocate(buffer.numel() * buffer.element_size());
    const auto kernel = cuda::contribution_kernels.factors[compute_index(buffer)];
    FactorsOfVectors params{common};
    params.vectors = buffer.const_data_ptr();
    const bool is_narrow = keys.narrow_value.defined() && buffer.scalar_type() == at::kFloat;
    const at::Tensor& value = is_narrow ? keys.narrow_value : keys.value;
    const at::Tensor projections = (is_narrow ? keys.narrow_projection : keys.projection)
                                       .reshape({D, H, d_v})
                                       .permute({1, 2, 0});
    for (params.j0 = 0; params.j0 < S; params.j0 += step) {
      params.tokens = std::min(step, S - params.j0);
      at::Tensor vectors =
          buffer.narrow(0, 0, H * B * params.tokens * D).view({H, B * params.tokens, D});
      const at::Tensor heads = values_by_head(value, sizes, params.j0, params.tokens);
      if (is_narrow) {
        at::bmm_out(vectors, heads, projections, at::kFloat);
      } else {
        at::bmm_out(vectors, heads, projections);
      }
      call.check(kernel(params, scratch, call.stream()));
    }
  }
  // [H, B * tokens, d_v], of the tokens [j0, j0 + tokens).
  static at::Tensor values_by_head(const at::Tensor& value, const ContributionSizes& sizes,
                                   int64_t j0, int64_t tokens) {
    at::Tensor heads = value.narrow(2, j0, tokens).transpose(0, 1);
    if (sizes.G != sizes.H) heads = heads.repeat_interleave(sizes.H / sizes.G, 0);
    return heads.reshape({sizes.H, sizes.B * tokens, sizes.d_v});
  }
  static void pair_norms(const PairParams& params, const at::Tensor& like, double) {
    cuda::Call call("contributions", like);
    void* scratch =
        call.allocate(cuda::pair_norm_scratch(params, like.scalar_type() == at::kDouble));
    const auto kernel = cuda::contribution_kernels.pair_norms[compute_index(like)];
    call.check(kernel(params, scratch, call.stream()));
  }
  static const char* why_in_blocks(const ContributionCall& call, const ContributionSizes& sizes) {
    return cuda::why_norms_in_blocks(call, sizes);
  }
  static StreamedRows streamed_norms(const ContributionCall& call, const Keys& keys,
                                     const ContributionSizes& sizes,
                                     const std::array<at::Tensor, 3>& norms) {
    return with_memory_for(name_of(call), "the numbers that weights are made of", [&] {
      cuda::StreamedPairs pairs(call, sizes);
      pairs.set_variants(keys, norms);
      return pairs.run(keys, call.block);
    });
  }
  static const char* why_gradients_in_blocks(const ContributionCall& call,
                                             const ContributionSizes& sizes, const Wanted& wanted) {
    return cuda::why_gradients_in_blocks(call, sizes, wanted);
  }
  static std::array<at::Tensor, 3> streamed_gradients(const ContributionCall& call,
                                                      const MapTensors& grad_maps, const Keys& keys,
                                                      const ContributionSizes& sizes,
                                                      const Wanted& wanted, Totals& totals) {
    return cuda::streamed_gradients(call, grad_maps, keys, sizes, wanted, totals);
  }
  static void pair_gradients(const PairGradientParams& params, const at::Tensor& like, double) {
    cuda::Call call(kMapsBackward, like);
    const int64_t bytes = cuda::pair_gradient_scratch(params) * int64_t{sizeof(double)};
    auto* scratch = static_cast<double*>(call.allocate(bytes));
    call.check(cuda::contribution_kernels.pair_gradients(params, scratch, call.stream()));
  }
};

TORCH_LIBRARY_IMPL(ikattn, IKATTN_CUDA_KEY, m) {
  register_contribution_maps<contribution_maps_of<Cuda>>(m);
  implement<"contribution_maps_backward", maps_backward<contribution_gradients_of<Cuda>>>(m);
}

}  // namespace
}  // namespace ikattn
