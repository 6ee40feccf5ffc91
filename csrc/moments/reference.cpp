#include "moments/reference.h"

#include "moments/composition.h"

namespace ikattn {
namespace {

// Query heads that share moments as more queries: [B, H, L, ..] becomes [B, K, H / K L, ..].
at::Tensor by_key_head(const at::Tensor& tensor, int64_t K) {
  return tensor.unflatten(1, {K, static_size(tensor, 1) / K}).flatten(2, 3);
}

// Keys in the arithmetic type: features and values, zero where hidden, and weights.
struct Keys {
  at::Tensor x;        // [B, K, S, F]
  at::Tensor rows;     // [B, K, S, d_v + 1]   [v_j, 1]
  at::Tensor weights;  // [B, K, S, 1]   exp(logit_j - reference)
};

Keys weighted_keys(const at::Tensor& features, const at::Tensor& logits, const at::Tensor& value,
                   const at::Tensor& reference) {
  const at::ScalarType type = compute_type(features.scalar_type());
  const at::Tensor exponents = logits.to(at::kDouble) - finite_or_zero(reference).unsqueeze(-1);
  const at::Tensor weights = at::exp(exponents.to(type)).unsqueeze(-1);
  const at::Tensor weighs_nothing = weights == 0;
  const at::Tensor values = to_heads(value.to(type), static_size(features, 1));
  return {or_zero(features.to(type), weighs_nothing),
          at::constant_pad_nd(or_zero(values, weighs_nothing), {0, 1}, 1), weights};
}

at::Tensor largest_finite(const at::Tensor& logits) {
  return at::amax(at::constant_pad_nd(finite_logits(logits), {0, 1}, -INFINITY), {-1});
}

at::Tensor moments_of(const Products& products, const Keys& keys) {
  return at::matmul(products.entries(keys.x).transpose(-2, -1), keys.rows * keys.weights);
}

// Values and Z' of queries [B, K, rows, F], in two: what moments leave of them, and log Z.
TwoTensors read(const Products& products, const at::Tensor& x, const at::Tensor& moments,
                const at::Tensor& reference, double eps) {
  const at::Tensor both = at::matmul(products.entries(x), moments * products.counts.unsqueeze(-1));
  const int64_t d_v = static_size(moments, -1) - 1;
  const at::Tensor least = moments.select(-2, -1).narrow(-1, d_v, 1).unsqueeze(-1) * eps;
  const at::Tensor sum = at::maximum(both.narrow(-1, d_v, 1), least);
  const at::Tensor safe = at::where(sum == 0, at::ones({}, sum.options()), sum);
  const at::Tensor log_sum = at::log(sum.detach().squeeze(-1).to(at::kDouble));
  return {both.narrow(-1, 0, d_v) / safe, log_sum + finite_or_zero(reference).unsqueeze(-1)};
}

}  // namespace

TwoTensors reference_key_moments(const at::Tensor& key_features, const at::Tensor& logits,
                                 const at::Tensor& value) {
  refuse_autocast("key_moments", key_features);
  const ExactArithmetic exact;
  const at::Tensor reference = largest_finite(logits);
  const Keys keys = weighted_keys(key_features, logits, value, reference);
  return {moments_of(Products(keys.x), keys), reference};
}

TwoTensors reference_from_moments(const at::Tensor& query_features, const at::Tensor& moments,
                                  const at::Tensor& reference, double eps) {
  refuse_autocast("attention_from_moments", query_features);
  const ExactArithmetic exact;
  const int64_t K = static_size(moments, 1), H = static_size(query_features, 1);
  const at::Tensor x = by_key_head(query_features.to(moments.scalar_type()), K);
  const auto [output, log_normalizer] = read(Products(x, eps), x, moments, reference.detach(), eps);
  const auto by_head = [&](const at::Tensor& tensor) {
    return tensor.unflatten(2, {H / K, -1}).flatten(1, 2);
  };
  return {by_head(output).to(query_features.scalar_type()), by_head(log_normalizer)};
}

TwoTensors reference_merged(const at::Tensor& moments, const at::Tensor& reference,
                            const at::Tensor& other_moments, const at::Tensor& other_reference) {
  const at::Tensor largest = at::maximum(reference, other_reference).detach();
  const at::Tensor base = finite_or_zero(largest);
  const auto rescaled = [&](const at::Tensor& own, const at::Tensor& from) {
    const at::Tensor factor = at::exp(from.detach() - base).to(own.scalar_type());
    return own * factor.unsqueeze(-1).unsqueeze(-1);
  };
  return {rescaled(moments, reference) + rescaled(other_moments, other_reference), largest};
}

TwoTensors key_moments_in_blocks(const at::Tensor& key_features, const at::Tensor& logits,
                                 const at::Tensor& value) {
  const ExactArithmetic exact;
  const KeyMomentsSizes sizes = check_key_moments(key_features, logits, value);
  const at::Tensor reference = largest_finite(logits);
  const auto options = key_features.options().dtype(compute_type(key_features.scalar_type()));
  const at::Tensor moments = at::zeros({sizes.B, sizes.K, sizes.entries(), sizes.d_v + 1}, options);
  const Products products(at::empty({sizes.F}, options));
  for_blocks(sizes.S, block_size(sizes.B * sizes.K, sizes.F), [&](int64_t first, int64_t count) {
    moments.add_(moments_of(products, weighted_keys(key_features.narrow(2, first, count),
                                                    logits.narrow(2, first, count),
                                                    value.narrow(2, first, count), reference)));
  });
  return {moments, reference};
}

ThreeTensors key_moments_backward_in_blocks(const at::Tensor& grad_moments,
                                            const at::Tensor& key_features,
                                            const at::Tensor& logits, const at::Tensor& value,
                                            const at::Tensor& reference,
                                            const std::array<bool, 3>& wanted) {
  const ExactArithmetic exact;
  const KeyMomentsSizes sizes =
      check_key_moments_backward(grad_moments, key_features, logits, value, reference);
  const at::Tensor grad_features = empty_or(wanted[0], key_features);
  const at::Tensor grad_logits = empty_or(wanted[1], logits);
  const at::Tensor grad_value = empty_or(wanted[2], value);
  const Products products(at::empty({sizes.F}, grad_moments.options()));
  for_blocks(sizes.S, block_size(sizes.B * sizes.K, sizes.F), [&](int64_t first, int64_t count) {
    const auto block = [&](const at::Tensor& tensor) { return tensor.narrow(2, first, count); };
    const Keys keys = weighted_keys(block(key_features), block(logits), block(value), reference);
    const at::Tensor weighs_nothing = keys.weights == 0;
    const at::Tensor read =
        or_zero(at::matmul(products.entries(keys.x), grad_moments) * keys.weights, weighs_nothing);
    if (wanted[0]) {
      const at::Tensor rows = keys.rows * keys.weights;
      const at::Tensor grad = products.gradient(
          keys.x, at::matmul(rows, grad_moments.narrow(2, 0, sizes.entries() - 1).mT()));
      block(grad_features).copy_(or_zero(grad, weighs_nothing));
    }
    if (wanted[1]) block(grad_logits).copy_((read * keys.rows).sum(-1));
    if (wanted[2]) {
      block(grad_value).copy_(read.narrow(-1, 0, sizes.d_v).unflatten(1, {sizes.G, -1}).sum(2));
    }
  });
  return {grad_features, grad_logits, grad_value};
}

TwoTensors from_moments_in_blocks(const at::Tensor& query_features, const at::Tensor& moments,
                                  const at::Tensor& reference, double eps) {
  const ExactArithmetic exact;
  const FromMomentsSizes sizes = check_from_moments(query_features, moments, reference, eps);
  // laid out as the kernel's, which the projection after it reads
  const at::Tensor output =
      at::empty({sizes.B, sizes.L, sizes.H, sizes.d_v}, query_features.options()).transpose(1, 2);
  const at::Tensor log_normalizer =
      at::empty({sizes.B, sizes.H, sizes.L}, query_features.options().dtype(at::kDouble));
  for_blocks(sizes.L, block_size(sizes.B * sizes.H, sizes.F), [&](int64_t first, int64_t count) {
    const auto block = [&](const at::Tensor& tensor) { return tensor.narrow(2, first, count); };
    const auto [rows, logs] =
        reference_from_moments(block(query_features), moments, reference, eps);
    block(output).copy_(rows);
    block(log_normalizer).copy_(logs);
  });
  return {output, log_normalizer};
}

TwoTensors from_moments_backward_in_blocks(const at::Tensor& grad_output,
                                           const at::Tensor& query_features,
                                           const at::Tensor& moments, const at::Tensor& reference,
                                           const at::Tensor& output,
                                           const at::Tensor& log_normalizer, double eps,
                                           const std::array<bool, 2>& wanted) {
  const ExactArithmetic exact;
  const FromMomentsSizes sizes = check_from_moments_backward(
      grad_output, query_features, moments, reference, output, log_normalizer, eps);
  const at::ScalarType type = moments.scalar_type();
  const at::Tensor grad_features = empty_or(wanted[0], query_features);
  const at::Tensor grad_moments = wanted[1] ? at::zeros_like(moments, at::MemoryFormat::Contiguous)
                                            : at::empty({0}, moments.options());
  const Products products(at::empty({sizes.F}, moments.options()), eps);
  const at::Tensor references = to_heads(reference, sizes.H).unsqueeze(-1);
  for_blocks(sizes.L, block_size(sizes.B * sizes.H, sizes.F), [&](int64_t first, int64_t count) {
    const auto block = [&](const at::Tensor& tensor) { return tensor.narrow(2, first, count); };
    const at::Tensor logs = block(log_normalizer);
    const at::Tensor sees_none = at::logical_or(logs == -INFINITY, references == -INFINITY);
    const at::Tensor share = or_zero(at::exp(references - logs), sees_none).to(type).unsqueeze(-1);
    const at::Tensor weighs_nothing = share == 0;
    const at::Tensor g = or_zero(block(grad_output).to(type) * share, weighs_nothing);
    const at::Tensor delta = or_zero((g * block(output).to(type)).sum(-1, true), weighs_nothing);
    const at::Tensor rows = by_key_head(at::cat({g, -delta}, -1), sizes.K);
    const at::Tensor x =
        by_key_head(or_zero(block(query_features).to(type), weighs_nothing), sizes.K);
    if (wanted[0]) {
      const at::Tensor of_entries = at::matmul(rows, moments.mT()) * products.counts;
      block(grad_features)
          .copy_(
              products.gradient(x, of_entries).unflatten(2, {sizes.H / sizes.K, -1}).flatten(1, 2));
    }
    if (wanted[1]) {
      grad_moments.add_(at::matmul((products.entries(x) * products.counts).mT(), rows));
    }
  });
  return {grad_features, grad_moments};
}

}  // namespace ikattn
