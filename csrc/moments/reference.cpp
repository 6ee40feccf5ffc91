#include "moments/reference.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

#include <algorithm>

#include "support/autograd.h"
#include "support/checks.h"
#include "support/exact_arithmetic.h"

namespace ikattn {
namespace {

int64_t static_size(const at::Tensor& tensor, int64_t axis) {
  return tensor.sym_size(axis).guard_int(__FILE__, __LINE__);
}

// Repeats each head so that there are K.
at::Tensor to_heads(const at::Tensor& tensor, int64_t K) {
  const int64_t heads = static_size(tensor, 1);
  return heads == K ? tensor : tensor.repeat_interleave(K / heads, 1);
}

// Query heads that share moments as more queries: [B, H, L, ..] becomes [B, K, H / K L, ..].
at::Tensor by_key_head(const at::Tensor& tensor, int64_t K) {
  return tensor.unflatten(1, {K, static_size(tensor, 1) / K}).flatten(2, 3);
}

at::Tensor or_zero(const at::Tensor& tensor, const at::Tensor& where_not) {
  return at::where(where_not, at::zeros({}, tensor.options()), tensor);
}

// The products of two of F features.
struct Products {
  int64_t F;
  at::Tensor left, right;  // [E - 1], features of each
  at::Tensor square;       // [F F], the product of every two
  at::Tensor counts;       // [E], how often a query counts it, times (2 F)^-2; for 1: eps

  Products(const at::Tensor& like, double eps = 0) : F(static_size(like, -1)) {
    const auto index = like.options().dtype(at::kLong);
    const int64_t M = F / 2, count = F * M + M;
    const at::Tensor e = at::arange(count, index);
    left = e.remainder(F);
    right = (left + e.div(F, "floor")).remainder(F);
    const at::Tensor a = at::arange(F, index).unsqueeze(1), b = at::arange(F, index);
    const at::Tensor shift = (b - a).remainder(F);
    const at::Tensor is_own =
        at::logical_or(shift < M, at::logical_and(shift == M, a < M));  // of b, or of a
    square = at::where(is_own, shift * F + a, (shift.neg() + F) * F + b).flatten();
    counts = (1 + (e >= F).to(at::kDouble)) / static_cast<double>(4 * F * F);
    counts = at::constant_pad_nd(counts, {0, 1}, eps).to(like.scalar_type());
  }

  // [.., E], the constant 1 last.
  at::Tensor entries(const at::Tensor& x) const {
    const at::Tensor psi = x.index_select(-1, left) * x.index_select(-1, right);
    return at::constant_pad_nd(psi, {0, 1}, 1);
  }

  // The gradient of x from that of its entries.
  at::Tensor gradient(const at::Tensor& x, const at::Tensor& grad) const {
    const at::Tensor of_pairs = grad.index_select(-1, square).unflatten(-1, {F, F});
    const at::Tensor diagonal = at::eye(F, x.options()) + 1;
    return at::matmul(of_pairs * diagonal, x.unsqueeze(-1)).squeeze(-1);
  }
};

// Keys in the arithmetic type: features and values, zero where hidden, and weights.
struct Keys {
  at::Tensor x;        // [B, K, S, F]
  at::Tensor rows;     // [B, K, S, d_v + 1]   [v_j, 1]
  at::Tensor weights;  // [B, K, S, 1]   exp(logit_j - reference)
};

at::Tensor finite_or_zero(const at::Tensor& reference) {
  return at::where(reference == -INFINITY, at::zeros({}, reference.options()), reference);
}

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
  const at::Tensor wide = logits.detach().to(at::kDouble);
  const at::Tensor finite =
      at::where(at::isfinite(wide), wide, at::full({}, -INFINITY, wide.options()));
  return at::amax(at::constant_pad_nd(finite, {0, 1}, -INFINITY), {-1});
}

at::Tensor moments_of(const Products& products, const Keys& keys) {
  return at::matmul(products.entries(keys.x).transpose(-2, -1), keys.rows * keys.weights);
}

// Values and Z' of queries [B, K, rows, F], in two: what moments leave of them, and log Z.
TwoTensors read(const Products& products, const at::Tensor& x, const at::Tensor& moments,
                const at::Tensor& reference, double eps) {
  const at::Tensor both = at::matmul(products.entries(x) * products.counts, moments);
  const int64_t d_v = static_size(moments, -1) - 1;
  const at::Tensor least = moments.select(-2, -1).narrow(-1, d_v, 1).unsqueeze(-1) * eps;
  const at::Tensor sum = at::maximum(both.narrow(-1, d_v, 1), least);
  const at::Tensor safe = at::where(sum == 0, at::ones({}, sum.options()), sum);
  const at::Tensor log_sum = at::log(sum.detach().squeeze(-1).to(at::kDouble));
  return {both.narrow(-1, 0, d_v) / safe, log_sum + finite_or_zero(reference).unsqueeze(-1)};
}

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
  const at::Tensor wide = logits.detach().to(at::kDouble);
  const at::Tensor finite =
      at::where(at::isfinite(wide), wide, at::full({}, -INFINITY, wide.options()));
  return at::maximum(std::get<0>(at::cummax(finite, -1)), reference.detach().unsqueeze(-1));
}

// Tokens of a block.
int64_t block_size(int64_t units, int64_t F) {
  const int64_t numbers = int64_t{1} << 24;
  return std::max<int64_t>(16, numbers / std::max<int64_t>(1, units * (F * (F + 1) / 2 + 1)));
}

template <typename Function>
void for_blocks(int64_t tokens, int64_t size, const Function& function) {
  for (int64_t first = 0; first < tokens; first += size) {
    function(first, std::min(size, tokens - first));
  }
}

at::Tensor empty_or(bool wanted, const at::Tensor& like) {
  return wanted ? at::empty_like(like) : at::empty({0}, like.options());
}

// torch.func leaves out what keeps autocast away, and sums would be made in 16 bits.
void refuse_autocast(const char* function, const at::Tensor& features) {
  TORCH_CHECK(!at::autocast::is_autocast_enabled(features.device().type()) ||
                  !(is_batched(features) || is_transformed(features)),
              function,
              ": torch.func and torch.vmap do not work under autocast, where sums would "
              "be made in 16 bits; leave it with torch.autocast(..., enabled=False)");
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

namespace {

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
          wanted[4] ? at::where(is_empty, at::zeros({}, grad.options()), grad).contiguous() : at::empty({0}, moments.options())};
}

}  // namespace ikattn
