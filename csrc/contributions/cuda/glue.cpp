// CUDA: the stream and scratch memory. Built where torch has CUDA.
#include "support/cuda/glue.h"

#include "contributions/cuda/kernels.h"
#include "contributions/cuda/streamed/gradients.h"

namespace ikattn {
namespace {

struct Cuda {
  static void factors(const FactorParams& common, Keys& keys, const ContributionSizes& sizes) {
    if (cuda::takes_gram_matrices(sizes.H, keys.value.scalar_type() == at::kDouble)) {
      factors_by_grams(common, keys, sizes);
    } else {
      factors_of_vectors(common, keys, sizes);
    }
  }
  // The last axis in whole pieces of what the kernel reads, one at least, with zeros behind it.
  static at::Tensor in_pieces(const at::Tensor& rows) {
    const int64_t width = rows.size(-1);
    const int64_t missing = width == 0 ? cuda::kGramWidth : -width & (cuda::kGramWidth - 1);
    if (missing > 0) return at::constant_pad_nd(rows, {0, missing});
    constexpr int64_t kPiece = 16;  // bytes
    bool fits =
        rows.stride(-1) == 1 && reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % kPiece == 0;
    for (int64_t axis = 0; axis + 1 < rows.dim(); ++axis) {
      fits = fits && rows.stride(axis) * rows.element_size() % kPiece == 0;
    }
    return fits ? rows : rows.clone(at::MemoryFormat::Contiguous);
  }
  // Norms act on vectors linearly, and the projection has passed through them.
  static void factors_by_grams(const FactorParams& common, Keys& keys,
                               const ContributionSizes& sizes) {
    const auto [B, H, G, L, S, d_v, D] = sizes;
    const at::Tensor value = in_pieces(keys.value);
    cuda::TokenGramParams params;
    params.B = B;
    params.H = H;
    params.G = G;
    params.S = S;
    params.D = D;
    params.value = array_of(value);
    params.width = value.size(-1);
    const int64_t per_token = std::max<int64_t>(1, cuda::gram_parts(D) * B * triangle(H));
    const int64_t step =
        std::clamp<int64_t>((int64_t{1} << 24) / per_token, 32, std::max<int64_t>(S, 32));
    cuda::Call call("contributions", value);
    params.parts = static_cast<double*>(
        call.allocate(per_token * std::min(step, S) * int64_t{sizeof(double)}));
    at::Tensor normed = keys.projection;
    for (int variant = 0; variant < 3; ++variant) {
      if (variant > 0 && common.norms[variant - 1].weight == nullptr) break;
      if (variant > 0) normed = through_norm(normed, keys, common, variant - 1);
      params.factors = static_cast<float*>(common.factors[variant]);
      params.value_norms = variant == 0 ? static_cast<float*>(common.value_norms) : nullptr;
      if (params.factors == nullptr && params.value_norms == nullptr) continue;
      params.fragments = nullptr;
      if (params.factors != nullptr && keys.wants_fragments) {
        keys.fragments[variant] = with_memory_for("contributions", "factors in Half", [&] {
          return at::empty({cuda::factor_fragment_words(B, H, S)}, value.options().dtype(at::kInt));
        });
        params.fragments = static_cast<uint32_t*>(keys.fragments[variant].mutable_data_ptr());
      }
      const at::Tensor projection =
          in_pieces(normed.to(at::kFloat).reshape({D, H, d_v})).contiguous();
      params.projection = projection.const_data_ptr<float>();
      params.value_is_short = keys.value_is_short;
      params.projection_is_short = keys.projection_is_short && variant == 0;
      for (params.j0 = 0; params.j0 < S; params.j0 += step) {
        params.tokens = std::min(step, S - params.j0);
        call.check(cuda::contribution_kernels.gram_factors(params, call.stream()));
      }
    }
  }
  // [D, H d_v] in float64: it may be rounded once.
  static at::Tensor through_norm(const at::Tensor& projection, const Keys& keys,
                                 const FactorParams& common, int norm) {
    at::Tensor normed = projection.to(at::kDouble);
    if (common.norms[norm].centered) normed = normed - normed.mean(0, true);
    return normed * keys.weights[norm].unsqueeze(1);
  }
  // In float64, and of many heads. The vectors are torch's products, of all heads at once.
  static void factors_of_vectors(const FactorParams& common, const Keys& keys,
                                 const ContributionSizes& sizes) {
    const auto [B, H, G, L, S, d_v, D] = sizes;
    const int64_t step = std::min(tokens_at_a_time(sizes, keys.value.device()), S);
    const at::Tensor buffer = with_memory_for("contributions", "vectors of every head", [&] {
      return at::empty({H * B * step * D}, keys.value.options());
    });
    cuda::Call call("contributions", buffer);
    void* scratch = call.allocate(buffer.numel() * buffer.element_size());
    const auto kernel = cuda::contribution_kernels.factors[compute_index(buffer)];
    FactorsOfVectors params{common};
    params.vectors = buffer.const_data_ptr();
    const at::Tensor projections = keys.projection.reshape({D, H, d_v}).permute({1, 2, 0});
    for (params.j0 = 0; params.j0 < S; params.j0 += step) {
      params.tokens = std::min(step, S - params.j0);
      at::Tensor vectors =
          buffer.narrow(0, 0, H * B * params.tokens * D).view({H, B * params.tokens, D});
      at::bmm_out(vectors, values_by_head(keys.value, sizes, params.j0, params.tokens),
                  projections);
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
    const auto kernel = cuda::contribution_kernels.pair_norms[compute_index(like)];
    call.check(kernel(params, call.stream()));
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
