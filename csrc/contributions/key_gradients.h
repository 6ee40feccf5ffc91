// The sums of gradients, and the gradients through the keys: from their outer products, once for
// all queries, to value, projection and norm weights.
#pragma once

#include "contributions/maps.h"

namespace ikattn {
namespace {

using Gradients = std::array<at::Tensor, kContributionInputs>;
using Wanted = std::array<bool, kContributionInputs>;

// The indices of differentiable_inputs().
enum Input {
  kWeights = 0,
  kSources = 1,  // of streamed weights: query, key, w1, w2, key_bias, attn_mask
  kMask = 6,     // the last of these
  kValue = 7,
  kProjection = 8,
  kResidual = 9,
  kNormWeight = 10,  // the second norm's weight and scale are 2 behind the first one's
  kNormScale = 11,
};

// Returns the axis of an input over the queries; -1 where it has none.
inline int64_t query_axis(size_t input, const at::Tensor& tensor) {
  if (input == kWeights || input == kSources) return 2;
  if (input == kMask) return tensor.dim() >= 2 && tensor.size(-2) != 1 ? tensor.dim() - 2 : -1;
  return input == kResidual || input == kNormScale || input == kNormScale + 2 ? 1 : -1;
}

inline bool wants_keys(const Wanted& wanted) {
  return wanted[kValue] || wanted[kProjection] || wanted[kNormWeight] || wanted[kNormWeight + 2];
}
// Tells whether a map with an incoming gradient treats own pairs apart.
inline bool needs_own_gradients(const Block& block) {
  return std::any_of(block.maps.begin() + kWithResidual, block.maps.end(), std::identity());
}

// The sums over all queries.
struct Totals {
  Gradients inputs;                 // those wanted, in the type of their sums
  std::array<at::Tensor, 3> outer;  // as in PairGradientParams

  // Adds the gradient of some queries.
  void add(size_t input, const at::Tensor& part, int64_t i0) {
    if (!part.defined()) return;
    at::Tensor& total = inputs[input];
    const int64_t axis = query_axis(input, total);
    (axis < 0 ? total : total.narrow(axis, i0, part.size(axis))).add_(part);
  }
};

// Unpacks symmetric matrices [B, blocks, triangle(H), 64] to [B, S, H, H].
inline at::Tensor unpacked(const at::Tensor& outer, int64_t H, int64_t S) {
  // The index is made on the device: a copy from the host would wait, and could not be captured in
  // a graph.
  const at::Tensor heads = at::arange(H, outer.options().dtype(at::kLong));
  const at::Tensor h = at::minimum(heads.unsqueeze(1), heads);
  const at::Tensor k = at::maximum(heads.unsqueeze(1), heads);
  const at::Tensor index = (h * H - (h * (h - 1)).div_(2, "floor") + (k - h)).flatten();
  const at::Tensor matrices = outer.index_select(2, index).transpose(2, 3);
  return matrices.reshape({outer.size(0), outer.size(1) * kFactorBlock, H, H}).narrow(1, 0, S);
}

// Returns the values of keys with an incoming gradient; the others, which may hold NaN, are zero.
inline Keys seen_keys(const Keys& keys, const std::array<at::Tensor, 3>& matrices,
                      const at::Tensor& grad_value_norms) {
  const int64_t B = keys.value.size(0), S = keys.value.size(2);
  at::Tensor unseen = at::ones({B, S}, keys.value.options().dtype(at::kBool));
  for (const at::Tensor& matrix : matrices) {
    if (matrix.defined()) unseen.logical_and_((matrix == 0).flatten(2).all(-1));
  }
  if (grad_value_norms.defined()) unseen.logical_and_((grad_value_norms == 0).all(1));
  Keys result = keys;
  result.value = keys.value.masked_fill(unseen.unsqueeze(1).unsqueeze(-1), 0);
  return result;
}

// Adds the gradients of value, projection and norm weights, from the outer products [B, S, H, H]
// and the gradient of value norms: the gradient of f_h(x_j) is sum_k outer_hk f_k(x_j).
inline void add_key_gradients(const Keys& keys, const std::array<at::Tensor, 3>& matrices,
                              const Block& block, const ContributionSizes& sizes,
                              const at::Tensor& grad_value_norms, const Wanted& wanted,
                              Totals& totals) {
  const auto [B, H, G, L, S, d_v, D] = sizes;
  bool any = grad_value_norms.defined();
  for (const at::Tensor& matrix : matrices) any = any || matrix.defined();
  if (!any) return;
  const Keys seen = seen_keys(keys, matrices, grad_value_norms);
  const int64_t step = tokens_at_a_time(sizes, keys.value.device());
  for (int64_t j0 = 0; j0 < S; j0 += step) {
    const int64_t tokens = std::min(step, S - j0), count = B * tokens;
    at::Tensor vectors = at::empty({count, H, D}, keys.value.options());
    for (int64_t h = 0; h < H; ++h) {
      at::Tensor target = vectors.select(1, h);
      transform(seen, sizes, h, j0, tokens, target);
    }
    // Forward through the norms, then back, adding each variant's part.
    std::array<at::Tensor, 3> variants = {vectors};
    std::array<at::Tensor, 2> centered;
    const int last = matrices[2].defined() ? 2 : matrices[1].defined() ? 1 : 0;
    for (int n = 0; n < last; ++n) {
      centered[n] = variants[n];
      if (block.centered[n]) centered[n] = centered[n] - centered[n].mean(-1, true);
      variants[n + 1] = centered[n] * keys.weights[n];
    }
    at::Tensor gradient;
    for (int variant = last; variant >= 0; --variant) {
      if (matrices[variant].defined()) {
        const at::Tensor own = matrices[variant].narrow(1, j0, tokens).reshape({count, H, H});
        const at::Tensor part = kArithmetic.product(own, variants[variant]);
        gradient = gradient.defined() ? gradient.add_(part) : part;
      }
      if (variant == 0) break;
      const int n = variant - 1;
      if (wanted[kNormWeight + 2 * n]) {
        totals.add(kNormWeight + 2 * n, summed_to(gradient * centered[n], {D}), 0);
      }
      gradient.mul_(keys.weights[n]);
      if (block.centered[n]) gradient.sub_(gradient.mean(-1, true));
    }
    if (grad_value_norms.defined()) {
      // The sum is float64, for squares may leave the range of float32.
      const at::Tensor norms =
          at::linalg_vector_norm(vectors, 2, at::IntArrayRef{-1}, false, at::kDouble);
      const at::Tensor incoming =
          grad_value_norms.narrow(2, j0, tokens).transpose(1, 2).reshape({count, H});
      const at::Tensor slope = (incoming / norms).masked_fill_(norms == 0, 0);
      const at::Tensor part = vectors * slope.to(vectors.scalar_type()).unsqueeze(-1);
      gradient = gradient.defined() ? gradient.add_(part) : part;
    }
    for (int64_t h = 0; h < H; ++h) {
      const at::Tensor of_head = gradient.select(1, h);
      if (wanted[kValue]) {
        const at::Tensor part =
            kArithmetic.product(of_head, keys.projection.narrow(1, h * d_v, d_v));
        totals.inputs[kValue]
            .select(1, h / (H / G))
            .narrow(1, j0, tokens)
            .add_(part.view({B, tokens, d_v}));
      }
      if (wanted[kProjection]) {
        at::Tensor total = totals.inputs[kProjection].narrow(1, h * d_v, d_v);
        multiply_into(total, of_head.t(), tokens_of(seen, sizes, h, j0, tokens),
                      /*accumulate=*/true);
      }
    }
  }
}

}  // namespace
}  // namespace ikattn
