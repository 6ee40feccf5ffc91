// What the compositions of reference.cpp and causal_reference.cpp share.
#pragma once

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

#include <algorithm>

#include "support/autograd.h"
#include "support/checks.h"
#include "support/exact_arithmetic.h"

namespace ikattn {

inline int64_t static_size(const at::Tensor& tensor, int64_t axis) {
  return tensor.sym_size(axis).guard_int(__FILE__, __LINE__);
}

// Repeats each head so that there are K.
inline at::Tensor to_heads(const at::Tensor& tensor, int64_t K) {
  const int64_t heads = static_size(tensor, 1);
  return heads == K ? tensor : tensor.repeat_interleave(K / heads, 1);
}

inline at::Tensor or_zero(const at::Tensor& tensor, const at::Tensor& where_not) {
  return at::where(where_not, at::zeros({}, tensor.options()), tensor);
}

// The products of two of F features.
struct Products {
  int64_t F;
  at::Tensor square;  // [F F], the product of every two
  at::Tensor counts;  // [E], how often a query counts it, times (2 F)^-2; for 1: eps

  Products(const at::Tensor& like, double eps = 0) : F(static_size(like, -1)) {
    const auto index = like.options().dtype(at::kLong);
    const int64_t M = F / 2, count = F * M + M;
    const at::Tensor e = at::arange(count, index);
    const at::Tensor a = at::arange(F, index).unsqueeze(1), b = at::arange(F, index);
    const at::Tensor shift = (b - a).remainder(F);
    const at::Tensor is_own =
        at::logical_or(shift < M, at::logical_and(shift == M, a < M));  // of b, or of a
    square = at::where(is_own, shift * F + a, (shift.neg() + F) * F + b).flatten();
    counts = (1 + (e >= F).to(at::kDouble)) / static_cast<double>(4 * F * F);
    counts = at::constant_pad_nd(counts, {0, 1}, eps).to(like.scalar_type());
  }

  // [.., E]: products with the features 0, 1, .. M places further, and last the constant 1.
  at::Tensor entries(const at::Tensor& x) const {
    const int64_t M = F / 2;
    const at::Tensor further = at::cat({x, x}, -1).unfold(-1, F, 1).narrow(-2, 0, M);
    const at::Tensor opposite = x.narrow(-1, 0, M) * x.narrow(-1, M, M);
    return at::cat(
        {(x.unsqueeze(-2) * further).flatten(-2), opposite, at::ones_like(x.narrow(-1, 0, 1))}, -1);
  }

  // The gradient of x from that of its entries.
  at::Tensor gradient(const at::Tensor& x, const at::Tensor& grad) const {
    const at::Tensor of_pairs = grad.index_select(-1, square).unflatten(-1, {F, F});
    const at::Tensor diagonal = at::eye(F, x.options()) + 1;
    return at::matmul(of_pairs * diagonal, x.unsqueeze(-1)).squeeze(-1);
  }
};

inline at::Tensor finite_or_zero(const at::Tensor& reference) {
  return at::where(reference == -INFINITY, at::zeros({}, reference.options()), reference);
}

// Logits in float64, -inf where they are not finite; without a gradient.
inline at::Tensor finite_logits(const at::Tensor& logits) {
  const at::Tensor wide = logits.detach().to(at::kDouble);
  return at::where(at::isfinite(wide), wide, at::full({}, -INFINITY, wide.options()));
}

// Tokens of a block.
inline int64_t block_size(int64_t units, int64_t F) {
  const int64_t numbers = int64_t{1} << 24;
  return std::max<int64_t>(16, numbers / std::max<int64_t>(1, units * (F * (F + 1) / 2 + 1)));
}

template <typename Function>
inline void for_blocks(int64_t tokens, int64_t size, const Function& function) {
  for (int64_t first = 0; first < tokens; first += size) {
    function(first, std::min(size, tokens - first));
  }
}

inline at::Tensor empty_or(bool wanted, const at::Tensor& like) {
  return wanted ? at::empty_like(like) : at::empty({0}, like.options());
}

// torch.func leaves out what keeps autocast away, and sums would be made in 16 bits.
inline void refuse_autocast(const char* function, const at::Tensor& features) {
  TORCH_CHECK(!at::autocast::is_autocast_enabled(features.device().type()) ||
                  !(is_batched(features) || is_transformed(features)),
              function,
              ": torch.func and torch.vmap do not work under autocast, where sums would "
              "be made in 16 bits; leave it with torch.autocast(..., enabled=False)");
}

}  // namespace ikattn
