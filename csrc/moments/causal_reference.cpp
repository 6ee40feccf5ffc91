// Causal attention that goes on from moments, in ATen.
#include <vector>

#include "moments/composition.h"
#include "moments/reference.h"

namespace ikattn {
namespace {

// Keys of a causal call as its pairs see them, for each query head: what is hidden is zero, and so
// is what is not finite, whose logit is NaN.
struct PairKeys {
  at::Tensor x;           // [B, H, L, F]
  at::Tensor values;      // [B, H, L, d_v]
  at::Tensor logits;      // [B, K, L], float64
  at::Tensor is_visible;  // [B, K, L, L], of a query

  PairKeys(const at::Tensor& features, const at::Tensor& given, const at::Tensor& value, int64_t H,
           at::ScalarType type) {
    const int64_t K = static_size(features, 1), L = static_size(features, 2);
    const at::Tensor wide = to_heads(value.to(type), K), own = features.to(type);
    logits = given.to(at::kDouble);
    const at::Tensor is_hidden = logits == -INFINITY;
    const at::Tensor is_finite =
        at::logical_and(at::isfinite(own).all(-1), at::isfinite(wide).all(-1));
    const at::Tensor counts = at::logical_and(at::isfinite(logits), is_finite);
    logits =
        at::where(at::logical_or(is_hidden, counts), logits, at::full({}, NAN, logits.options()));
    const at::Tensor leaves_out = counts.logical_not().unsqueeze(-1);
    x = to_heads(or_zero(own, leaves_out), H);
    values = to_heads(or_zero(wide, leaves_out), H);
    const at::Tensor causal = at::ones({L, L}, logits.options().dtype(at::kBool)).tril();
    is_visible = at::logical_and(causal, is_hidden.logical_not().unsqueeze(-2));
  }

  // exp(logit_j - base_i) of the keys that query i sees, otherwise 0. base [B, H or K, L]; in the
  // type of the values.
  at::Tensor weights(const at::Tensor& base) const {
    const int64_t H = static_size(x, 1), heads = static_size(base, 1);
    const at::Tensor visible = to_heads(is_visible, heads);
    const at::Tensor exponents = to_heads(logits, heads).unsqueeze(-2) - base.unsqueeze(-1);
    const at::Tensor lowest = at::full({}, -INFINITY, exponents.options());
    return to_heads(at::exp(at::where(visible, exponents, lowest).to(x.scalar_type())), H);
  }
  // Scores of queries [B, H, L, F].
  at::Tensor scores(const at::Tensor& queries) const {
    return at::matmul(queries, x.mT()) / static_cast<double>(2 * static_size(x, -1));
  }
};

// The largest finite logit that each query of a causal call sees, [B, K, L].
at::Tensor largest_seen(const at::Tensor& logits, const at::Tensor& reference) {
  return at::maximum(std::get<0>(at::cummax(finite_logits(logits), -1)),
                     reference.detach().unsqueeze(-1));
}

// Of a causal call: its pairs are computed block by block.
int64_t causal_block_size(int64_t units, int64_t F) {
  return std::min<int64_t>(block_size(units, F), 512);
}

// Gradients of queries, keys, logits and values from the pairs of tokens among themselves, whose
// output and log Z are of more keys; those of keys for each query head.
FourTensors pair_gradients(const at::Tensor& grad_output, const at::Tensor& queries,
                           const PairKeys& keys, const at::Tensor& output,
                           const at::Tensor& log_normalizer, double eps) {
  const at::Tensor delta = (grad_output * output).sum(-1, true);
  const at::Tensor scores = keys.scores(queries), share = keys.weights(log_normalizer);
  const at::Tensor incoming = at::matmul(grad_output, keys.values.mT()) - delta;
  const at::Tensor weights = (scores.square() + eps) * share;
  const at::Tensor of_scores =
      scores * share * incoming / static_cast<double>(static_size(keys.x, -1));
  return {at::matmul(of_scores, keys.x), at::matmul(of_scores.mT(), queries),
          (weights * incoming).sum(-2), at::matmul(weights.mT(), grad_output)};
}

// Each group of heads as one, as it is with `heads` heads.
at::Tensor sum_heads(const at::Tensor& tensor, int64_t heads) {
  return tensor.unflatten(1, {heads, static_size(tensor, 1) / heads}).sum(2);
}

}  // namespace

FourTensors reference_causal(const at::Tensor& query_features, const at::Tensor& key_features,
                             const at::Tensor& logits, const at::Tensor& value,
                             const at::Tensor& moments, const at::Tensor& reference, double eps) {
  refuse_autocast("causal_attention_from_moments", query_features);
  const ExactArithmetic exact;
  const at::ScalarType type = moments.scalar_type();
  const int64_t H = static_size(query_features, 1), d_v = static_size(moments, -1) - 1;
  const at::Tensor x = query_features.to(type), held = to_heads(moments, H);
  const at::Tensor base = finite_or_zero(largest_seen(logits, reference));
  const Products products(x, eps);
  const at::Tensor before = at::matmul(products.entries(x) * products.counts, held);
  const at::Tensor least = held.select(-2, -1).narrow(-1, d_v, 1).unsqueeze(-1) * eps;
  const at::Tensor sums =
      at::cat({before.narrow(-1, 0, d_v), at::maximum(before.narrow(-1, d_v, 1), least)}, -1);
  const at::Tensor factor = at::exp(reference.detach().unsqueeze(-1) - base).to(type);
  const PairKeys keys(key_features, logits, value, H, type);
  const at::Tensor weights = (keys.scores(x).square() + eps) * keys.weights(base);
  const at::Tensor both = sums * to_heads(factor, H).unsqueeze(-1) +
                          at::matmul(weights, at::constant_pad_nd(keys.values, {0, 1}, 1));
  const at::Tensor sum = both.narrow(-1, d_v, 1);
  const at::Tensor safe = at::where(sum == 0, at::ones({}, sum.options()), sum);
  const at::Tensor log_sum = at::log(sum.detach().squeeze(-1).to(at::kDouble));
  const auto [own, own_reference] = reference_key_moments(key_features, logits, value);
  const auto [all, all_reference] = reference_merged(moments, reference, own, own_reference);
  return {(both.narrow(-1, 0, d_v) / safe).to(query_features.scalar_type()),
          log_sum + to_heads(base, H), all, all_reference};
}

FourTensors causal_in_blocks(const at::Tensor& query_features, const at::Tensor& key_features,
                             const at::Tensor& logits, const at::Tensor& value,
                             const at::Tensor& moments, const at::Tensor& reference, double eps) {
  const auto [B, H, K, L, F, d_v] =
      check_causal(query_features, key_features, logits, value, moments, reference, eps).queries;
  const auto options = query_features.options();
  const at::Tensor output = at::empty({B, L, H, d_v}, options).transpose(1, 2);
  const at::Tensor log_normalizer = at::empty({B, H, L}, options.dtype(at::kDouble));
  at::Tensor sums = moments.clone(at::MemoryFormat::Contiguous), largest = reference.clone();
  for_blocks(L, causal_block_size(B * H, F), [&](int64_t first, int64_t count) {
    const auto block = [&](const at::Tensor& tensor) { return tensor.narrow(2, first, count); };
    auto [rows, logs, all, all_reference] =
        reference_causal(block(query_features), block(key_features), block(logits), block(value),
                         sums, largest, eps);
    block(output).copy_(rows);
    block(log_normalizer).copy_(logs);
    sums = all;
    largest = all_reference;
  });
  return {output, log_normalizer, sums, largest};
}

FiveTensors causal_backward_in_blocks(const at::Tensor& grad_output,
                                      const std::optional<at::Tensor>& grad_all_moments,
                                      const at::Tensor& query_features,
                                      const at::Tensor& key_features, const at::Tensor& logits,
                                      const at::Tensor& value, const at::Tensor& moments,
                                      const at::Tensor& reference, const at::Tensor& output,
                                      const at::Tensor& log_normalizer, double eps,
                                      const std::array<bool, 5>& wanted) {
  const ExactArithmetic exact;
  const CausalSizes sizes =
      check_causal_backward(grad_output, grad_all_moments, query_features, key_features, logits,
                            value, moments, reference, output, log_normalizer, eps);
  const auto [B, H, K, L, F, d_v] = sizes.queries;
  const at::ScalarType type = moments.scalar_type();
  const FiveTensors result = {empty_or(wanted[0], query_features),
                              empty_or(wanted[1], key_features), empty_or(wanted[2], logits),
                              empty_or(wanted[3], value), at::Tensor()};
  const auto& [of_query, of_key, of_logits, of_value, none] = result;
  std::vector<TwoTensors> states = {{moments, reference}};
  std::vector<int64_t> begins;
  for_blocks(L, causal_block_size(B * H, F), [&](int64_t first, int64_t count) {
    const auto block = [&](const at::Tensor& tensor) { return tensor.narrow(2, first, count); };
    const auto [own, largest] =
        key_moments_in_blocks(block(key_features), block(logits), block(value));
    const auto& [sums, before] = states.back();
    begins.push_back(first);
    states.push_back(reference_merged(sums, before, own, largest));
  });
  const at::Tensor is_empty = (reference == -INFINITY).unsqueeze(-1).unsqueeze(-1);
  at::Tensor grad = grad_all_moments ? *grad_all_moments : at::zeros_like(moments);
  for (size_t place = begins.size(); place-- > 0;) {
    const int64_t first = begins[place], end = place + 1 < begins.size() ? begins[place + 1] : L;
    const auto block = [&](const at::Tensor& tensor) {
      return tensor.narrow(2, first, end - first);
    };
    const auto& [sums, before] = states[place];
    const at::Tensor& after = std::get<1>(states[place + 1]);
    const auto [key_sums, logit_sums, value_sums] = key_moments_backward_in_blocks(
        grad, block(key_features), block(logits), block(value), after, {true, true, true});
    const auto [query_sums, of_moments] =
        from_moments_backward_in_blocks(block(grad_output), block(query_features), sums, before,
                                        block(output), block(log_normalizer), eps, {true, true});
    const auto [query_pairs, key_pairs, logit_pairs, value_pairs] =
        pair_gradients(block(grad_output).to(type), block(query_features).to(type),
                       PairKeys(block(key_features), block(logits), block(value), H, type),
                       block(output).to(type), block(log_normalizer), eps);
    if (wanted[0]) block(of_query).copy_(query_sums + query_pairs);
    if (wanted[1]) block(of_key).copy_(key_sums + sum_heads(key_pairs, K));
    if (wanted[2]) block(of_logits).copy_(logit_sums + sum_heads(logit_pairs, K));
    if (wanted[3]) block(of_value).copy_(value_sums + sum_heads(value_pairs, sizes.keys.G));
    const at::Tensor factor = at::exp(before - finite_or_zero(after));
    grad = grad * factor.to(type).unsqueeze(-1).unsqueeze(-1) + of_moments;
  }
  return {of_query, of_key, of_logits, of_value,
          wanted[4] ? at::where(is_empty, at::zeros({}, grad.options()), grad).contiguous()
                    : at::empty({0}, moments.options())};
}

}  // namespace ikattn
