#include "moments/reference.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "support/autograd.h"
#include "support/checks.h"
#include "support/exact_arithmetic.h"
#include "support/memory.h"

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

// Sums each group of heads, so that there are K.
at::Tensor sum_heads(const at::Tensor& tensor, int64_t K) {
  return tensor.unflatten(1, {K, static_size(tensor, 1) / K}).sum(2);
}

// Joins query heads of a group as more queries of one head: [B, H, L, ..] to [B, K, H / K L, ..].
at::Tensor by_key_head(const at::Tensor& tensor, int64_t K) {
  return tensor.unflatten(1, {K, static_size(tensor, 1) / K}).flatten(2, 3);
}

at::Tensor or_zero(const at::Tensor& tensor, const at::Tensor& where_not) {
  return at::where(where_not, at::zeros({}, tensor.options()), tensor);
}

at::Tensor finite_or_zero(const at::Tensor& reference) {
  return or_zero(reference, reference == -INFINITY);
}

at::Tensor nothing_like(const at::Tensor& like) { return at::empty({0}, like.options()); }

// Returns a gradient in the type and layout of what it belongs to.
at::Tensor laid_out(const at::Tensor& gradient, const at::Tensor& like) {
  return at::empty_like(like).copy_(gradient);
}

// Calls function(first, count) for blocks of `size` tokens; once where there are none.
template <typename Function>
void for_blocks(int64_t tokens, int64_t size, const Function& function) {
  int64_t first = 0;
  do {
    function(first, std::min(size, tokens - first));
  } while ((first += size) < tokens);
}

// The products psi_e of two of F features, and sums over them.
struct Products {
  int64_t F;
  int64_t tokens;     // whose products exist at a time
  at::Tensor square;  // [F F], the entry of every two features
  at::Tensor
      counts;  // [E], how often a query counts an entry, times (2 F)^-2; of the last one: eps

  // units is the number of heads whose products exist at a time; 0: all tokens at once, as a graph
  // needs them.
  Products(const at::Tensor& like, int64_t units, double eps = 0) : F(static_size(like, -1)) {
    const auto index = like.options().dtype(at::kLong);
    const int64_t M = F / 2, count = F * M + M;
    tokens = units == 0 ? INT64_MAX : std::max<int64_t>(16, (int64_t{1} << 24) / (units * count));
    const at::Tensor e = at::arange(count, index);
    const at::Tensor a = at::arange(F, index).unsqueeze(1), b = at::arange(F, index);
    const at::Tensor shift = (b - a).remainder(F);
    const at::Tensor is_own =
        at::logical_or(shift < M, at::logical_and(shift == M, a < M));  // of b, or of a
    square = at::where(is_own, shift * F + a, (shift.neg() + F) * F + b).flatten();
    counts = (1 + (e >= F).to(at::kDouble)) / static_cast<double>(4 * F * F);
    counts = at::constant_pad_nd(counts, {0, 1}, eps).to(like.scalar_type());
  }

  // Returns psi(x), [.., E]: products with the features 0, 1, .. M places further, and last a 1.
  at::Tensor entries(const at::Tensor& x) const {
    const int64_t M = F / 2;
    const at::Tensor further = at::cat({x, x}, -1).unfold(-1, F, 1).narrow(-2, 0, M);
    const at::Tensor opposite = x.narrow(-1, 0, M) * x.narrow(-1, M, M);
    return at::cat(
        {(x.unsqueeze(-2) * further).flatten(-2), opposite, at::ones_like(x.narrow(-1, 0, 1))}, -1);
  }

  // Returns function(block) for blocks of the tokens of x [B, H, L, ..], together.
  template <typename Function>
  at::Tensor by_blocks(const at::Tensor& x, const Function& function) const {
    std::vector<at::Tensor> blocks;
    for_blocks(static_size(x, 2), tokens, [&](int64_t first, int64_t count) {
      blocks.push_back(
          function([&](const at::Tensor& all) { return all.narrow(2, first, count); }));
    });
    return blocks.size() == 1 ? blocks[0] : at::cat(blocks, 2);
  }

  // Returns sum_e psi_e(x) table_e, [B, H, L, columns]; the heads of a group share a table
  // [B, K, E, columns].
  at::Tensor read(const at::Tensor& x, const at::Tensor& table) const {
    const int64_t H = static_size(x, 1), K = static_size(table, 1);
    return by_blocks(x, [&](const auto& block) {
      const at::Tensor rows = at::matmul(entries(by_key_head(block(x), K)), table);
      return rows.unflatten(2, {H / K, static_size(block(x), 2)}).flatten(1, 2);
    });
  }

  // Returns sum_i psi(x_i) rows_i over tokens and the heads of a group, [B, K, E, columns].
  at::Tensor sum(const at::Tensor& x, const at::Tensor& rows, int64_t K) const {
    at::Tensor total;
    for_blocks(static_size(x, 2), tokens, [&](int64_t first, int64_t count) {
      const auto block = [&](const at::Tensor& all) {
        return by_key_head(all.narrow(2, first, count), K);
      };
      const at::Tensor part = at::matmul(entries(block(x)).mT(), block(rows));
      total = total.defined() ? total + part : part;
    });
    return total;
  }

  // Returns the gradient of x by sum_ie psi_e(x_i) (table_e . rows_i).
  at::Tensor gradient(const at::Tensor& x, const at::Tensor& rows, const at::Tensor& table) const {
    const int64_t H = static_size(x, 1), K = static_size(table, 1);
    const at::Tensor diagonal = at::eye(F, x.options()) + 1;
    return by_blocks(x, [&](const auto& block) {
      const at::Tensor of_entries = at::matmul(by_key_head(block(rows), K), table.mT());
      const at::Tensor of_pairs = of_entries.index_select(-1, square).unflatten(-1, {F, F});
      return at::matmul(of_pairs * diagonal, by_key_head(block(x), K).unsqueeze(-1))
          .squeeze(-1)
          .unflatten(2, {H / K, static_size(block(x), 2)})
          .flatten(1, 2);
    });
  }
};

// Returns logits in float64, -inf where they are not finite; without a gradient.
at::Tensor finite_logits(const at::Tensor& logits) {
  const at::Tensor wide = logits.detach().to(at::kDouble);
  return at::where(at::isfinite(wide), wide, at::full({}, -INFINITY, wide.options()));
}

// Throws under autocast: torch.func leaves out ExactArithmetic, and sums would be made in 16 bits.
void refuse_autocast(const char* function, const at::Tensor& features) {
  TORCH_CHECK(!at::autocast::is_autocast_enabled(features.device().type()) ||
                  !(is_batched(features) || is_transformed(features)),
              function,
              ": torch.func and torch.vmap do not work under autocast, where sums would "
              "be made in 16 bits; leave it with torch.autocast(..., enabled=False)");
}

// --- Moments of keys

// Keys in the arithmetic type: features and values, zero where hidden, and weights.
struct Keys {
  at::Tensor x;        // [B, K, S, F]
  at::Tensor rows;     // [B, K, S, d_v + 1]   [v_j, 1]
  at::Tensor weights;  // [B, K, S, 1]   exp(logit_j - reference)

  Keys(const at::Tensor& features, const at::Tensor& logits, const at::Tensor& value,
       const at::Tensor& reference) {
    const at::ScalarType type = compute_type(features.scalar_type());
    const at::Tensor exponents = logits.to(at::kDouble) - finite_or_zero(reference).unsqueeze(-1);
    weights = at::exp(exponents.to(type)).unsqueeze(-1);
    const at::Tensor values = to_heads(value.to(type), static_size(features, 1));
    x = or_zero(features.to(type), weights == 0);
    rows = at::constant_pad_nd(or_zero(values, weights == 0), {0, 1}, 1);
  }
};

TwoTensors moments_of(const Products& products, const at::Tensor& key_features,
                      const at::Tensor& logits, const at::Tensor& value) {
  const at::Tensor reference =
      at::amax(at::constant_pad_nd(finite_logits(logits), {0, 1}, -INFINITY), {-1});
  const Keys keys(key_features, logits, value, reference);
  return {products.sum(keys.x, keys.rows * keys.weights, static_size(keys.x, 1)), reference};
}

// --- Queries that read moments

// Returns output and log Z of sums [.., d_v + 1] over values and weights, relative to exp(base).
TwoTensors normalised(const at::Tensor& sums, const at::Tensor& base) {
  const int64_t d_v = static_size(sums, -1) - 1;
  const at::Tensor sum = sums.narrow(-1, d_v, 1);
  const at::Tensor safe = at::where(sum == 0, at::ones({}, sum.options()), sum);
  const at::Tensor log_sum = at::log(sum.detach().squeeze(-1).to(at::kDouble));
  return {sums.narrow(-1, 0, d_v) / safe, log_sum + base};
}

// Returns the sums of x [B, H, L, F] over the keys in moments, [B, H, L, d_v + 1]. Those of weights
// are at least eps times the keys' own weights, whatever rounding leaves.
at::Tensor sums_over_moments(const Products& products, const at::Tensor& x,
                             const at::Tensor& moments, double eps) {
  const int64_t H = static_size(x, 1), d_v = static_size(moments, -1) - 1;
  const at::Tensor sums = products.read(x, moments * products.counts.unsqueeze(-1));
  const at::Tensor least =
      to_heads(moments.select(-2, -1).narrow(-1, d_v, 1), H).unsqueeze(-1) * eps;
  return at::cat({sums.narrow(-1, 0, d_v), at::maximum(sums.narrow(-1, d_v, 1), least)}, -1);
}

TwoTensors read_moments(const Products& products, const at::Tensor& query_features,
                        const at::Tensor& moments, const at::Tensor& reference, double eps) {
  const at::Tensor x = query_features.to(moments.scalar_type());
  const at::Tensor base = to_heads(finite_or_zero(reference.detach()), static_size(x, 1));
  const auto [output, log_normalizer] =
      normalised(sums_over_moments(products, x, moments, eps), base.unsqueeze(-1));
  return {output.to(query_features.scalar_type()), log_normalizer};
}

// --- Causal calls

// Keys of a causal call as its pairs see them, for each query head: features and values are zero
// where hidden, and where they are not finite, which makes the logit NaN.
struct PairKeys {
  at::Tensor x;       // [B, H, L, F]
  at::Tensor values;  // [B, H, L, d_v]
  at::Tensor logits;  // [B, K, L], float64

  PairKeys(const at::Tensor& features, const at::Tensor& given, const at::Tensor& value, int64_t H,
           at::ScalarType type) {
    const at::Tensor wide = to_heads(value.to(type), static_size(features, 1));
    logits = given.to(at::kDouble);
    const at::Tensor is_finite = at::isfinite(logits)
                                     .logical_and(at::isfinite(features.to(type)).all(-1))
                                     .logical_and(at::isfinite(wide).all(-1));
    logits = at::where(at::logical_or(logits == -INFINITY, is_finite), logits,
                       at::full({}, NAN, logits.options()));
    const at::Tensor is_left_out = is_finite.logical_not().unsqueeze(-1);
    x = to_heads(or_zero(features.to(type), is_left_out), H);
    values = to_heads(or_zero(wide, is_left_out), H);
  }

  // Returns exp(logit_j - base_i) of the keys that query i sees, otherwise 0; base [B, H or K, L].
  at::Tensor weights(const at::Tensor& base) const {
    const int64_t L = static_size(x, 2);
    const at::Tensor own = to_heads(logits, static_size(base, 1)).unsqueeze(-2);
    const at::Tensor is_visible =
        at::ones({L, L}, logits.options().dtype(at::kBool)).tril().logical_and(own != -INFINITY);
    const at::Tensor exponents = own - base.unsqueeze(-1);
    const at::Tensor lowest = at::full({}, -INFINITY, exponents.options());
    return to_heads(at::exp(at::where(is_visible, exponents, lowest).to(x.scalar_type())),
                    static_size(x, 1));
  }
  at::Tensor scores(const at::Tensor& queries) const {
    return at::matmul(queries, x.mT()) / static_cast<double>(2 * static_size(x, -1));
  }
};

// Returns the largest finite logit that each query of a causal call sees, [B, K, L].
at::Tensor largest_seen(const at::Tensor& logits, const at::Tensor& reference) {
  return at::maximum(std::get<0>(at::cummax(finite_logits(logits), -1)),
                     reference.detach().unsqueeze(-1));
}

// Returns output, log Z, and the moments of all keys with their reference.
FourTensors attend_causally(const Products& products, const at::Tensor& query_features,
                            const at::Tensor& key_features, const at::Tensor& logits,
                            const at::Tensor& value, const at::Tensor& moments,
                            const at::Tensor& reference, double eps) {
  const at::Tensor x = query_features.to(moments.scalar_type());
  const int64_t H = static_size(x, 1);
  const PairKeys keys(key_features, logits, value, H, moments.scalar_type());
  const at::Tensor base = finite_or_zero(largest_seen(logits, reference));
  const at::Tensor factor = at::exp(reference.detach().unsqueeze(-1) - base).to(x.scalar_type());
  const at::Tensor weights = (keys.scores(x).square() + eps) * keys.weights(base);
  const at::Tensor sums =
      sums_over_moments(products, x, moments, eps) * to_heads(factor, H).unsqueeze(-1) +
      at::matmul(weights, at::constant_pad_nd(keys.values, {0, 1}, 1));
  const auto [output, log_normalizer] = normalised(sums, to_heads(base, H));
  const auto [own, own_reference] = moments_of(products, key_features, logits, value);
  const auto [all, all_reference] = reference_merged(moments, reference, own, own_reference);
  return {output.to(query_features.scalar_type()), log_normalizer, all, all_reference};
}

// Returns the gradients of queries, keys, logits and values from the pairs of a block, whose output
// and log Z are of more keys; those of keys for each query head.
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

// Returns the tokens of a block of a causal call, whose pairs are at most 2^24 numbers.
int64_t causal_block(const FromMomentsSizes& sizes) {
  const double heads = static_cast<double>(std::max<int64_t>(1, sizes.B * sizes.H));
  return std::clamp<int64_t>(static_cast<int64_t>(4096 / std::sqrt(heads)), 64, 512);
}

Products products_of(const at::Tensor& moments, int64_t units, int64_t F, double eps = 0) {
  return {at::empty({F}, moments.options()), std::max<int64_t>(1, units), eps};
}

}  // namespace

// --- The references: everything at once, for graphs

TwoTensors reference_key_moments(const at::Tensor& key_features, const at::Tensor& logits,
                                 const at::Tensor& value) {
  refuse_autocast("key_moments", key_features);
  const ExactArithmetic exact;
  const Products products(key_features.to(compute_type(key_features.scalar_type())), 0);
  return moments_of(products, key_features, logits, value);
}

TwoTensors reference_from_moments(const at::Tensor& query_features, const at::Tensor& moments,
                                  const at::Tensor& reference, double eps) {
  refuse_autocast("attention_from_moments", query_features);
  const ExactArithmetic exact;
  const Products products(query_features.to(moments.scalar_type()), 0, eps);
  return read_moments(products, query_features, moments, reference, eps);
}

FourTensors reference_causal(const at::Tensor& query_features, const at::Tensor& key_features,
                             const at::Tensor& logits, const at::Tensor& value,
                             const at::Tensor& moments, const at::Tensor& reference, double eps) {
  refuse_autocast("causal_attention_from_moments", query_features);
  const ExactArithmetic exact;
  const Products products(query_features.to(moments.scalar_type()), 0, eps);
  return attend_causally(products, query_features, key_features, logits, value, moments, reference,
                         eps);
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

// --- The operators on devices without kernels: in blocks, without a graph

namespace {

TwoTensors composed_key_moments(const at::Tensor& key_features, const at::Tensor& logits,
                                const at::Tensor& value) {
  const ExactArithmetic exact;
  const KeyMomentsSizes sizes = check_key_moments(key_features, logits, value);
  const at::Tensor like = key_features.new_empty({0}, compute_type(key_features.scalar_type()));
  return moments_of(products_of(like, sizes.B * sizes.K, sizes.F), key_features, logits, value);
}

void composed_add_key_moments(at::Tensor& moments, at::Tensor& reference,
                              const at::Tensor& key_features, const at::Tensor& logits,
                              const at::Tensor& value) {
  check_add_key_moments(moments, reference, key_features, logits, value);
  const auto [own, own_reference] = composed_key_moments(key_features, logits, value);
  const auto [sums, largest] = reference_merged(moments, reference, own, own_reference);
  moments.copy_(sums);
  reference.copy_(largest);
}

ThreeTensors composed_key_moments_backward(const at::Tensor& grad_moments,
                                           const at::Tensor& key_features, const at::Tensor& logits,
                                           const at::Tensor& value, const at::Tensor& reference,
                                           std::array<bool, 3> wanted) {
  const ExactArithmetic exact;
  const KeyMomentsSizes sizes =
      check_key_moments_backward(grad_moments, key_features, logits, value, reference);
  const Products products = products_of(grad_moments, sizes.B * sizes.K, sizes.F);
  const Keys keys(key_features, logits, value, reference);
  const at::Tensor weighs_nothing = keys.weights == 0;
  ThreeTensors result = {nothing_like(key_features), nothing_like(logits), nothing_like(value)};
  if (wanted[0]) {
    const at::Tensor grad = products.gradient(keys.x, keys.rows * keys.weights, grad_moments);
    std::get<0>(result) = laid_out(or_zero(grad, weighs_nothing), key_features);
  }
  if (!wanted[1] && !wanted[2]) return result;
  const at::Tensor read =
      or_zero(products.read(keys.x, grad_moments) * keys.weights, weighs_nothing);
  if (wanted[1]) std::get<1>(result) = laid_out((read * keys.rows).sum(-1), logits);
  if (wanted[2]) {
    std::get<2>(result) = laid_out(sum_heads(read.narrow(-1, 0, sizes.d_v), sizes.G), value);
  }
  return result;
}

TwoTensors composed_from_moments(const at::Tensor& query_features, const at::Tensor& moments,
                                 const at::Tensor& reference, double eps) {
  const ExactArithmetic exact;
  const FromMomentsSizes sizes = check_from_moments(query_features, moments, reference, eps);
  const auto [output, log_normalizer] =
      read_moments(products_of(moments, sizes.B * sizes.H, sizes.F, eps), query_features, moments,
                   reference, eps);
  // Laid out like the kernel's output, as the projection after it reads it.
  return {output.transpose(1, 2).contiguous().transpose(1, 2), log_normalizer.contiguous()};
}

TwoTensors composed_from_moments_backward(const at::Tensor& grad_output,
                                          const at::Tensor& query_features,
                                          const at::Tensor& moments, const at::Tensor& reference,
                                          const at::Tensor& output,
                                          const at::Tensor& log_normalizer, double eps,
                                          std::array<bool, 2> wanted) {
  const ExactArithmetic exact;
  const FromMomentsSizes sizes = check_from_moments_backward(
      grad_output, query_features, moments, reference, output, log_normalizer, eps);
  const at::ScalarType type = moments.scalar_type();
  const Products products = products_of(moments, sizes.B * sizes.H, sizes.F, eps);
  const at::Tensor references = to_heads(reference, sizes.H).unsqueeze(-1);
  const at::Tensor sees_none = at::logical_or(log_normalizer == -INFINITY, references == -INFINITY);
  const at::Tensor share =
      or_zero(at::exp(references - log_normalizer), sees_none).to(type).unsqueeze(-1);
  const at::Tensor weighs_nothing = share == 0;
  const at::Tensor g = or_zero(grad_output.to(type) * share, weighs_nothing);
  const at::Tensor delta = or_zero((g * output.to(type)).sum(-1, true), weighs_nothing);
  const at::Tensor rows = at::cat({g, -delta}, -1);
  const at::Tensor x = or_zero(query_features.to(type), weighs_nothing);
  const at::Tensor counts = products.counts.unsqueeze(-1);
  return {wanted[0] ? laid_out(products.gradient(x, rows, moments * counts), query_features)
                    : nothing_like(query_features),
          wanted[1] ? products.sum(x, rows, sizes.K) * counts : nothing_like(moments)};
}

FourTensors composed_causal(const at::Tensor& query_features, const at::Tensor& key_features,
                            const at::Tensor& logits, const at::Tensor& value,
                            const at::Tensor& moments, const at::Tensor& reference, double eps) {
  const ExactArithmetic exact;
  const FromMomentsSizes sizes =
      check_causal(query_features, key_features, logits, value, moments, reference, eps).queries;
  const auto [B, H, K, L, F, d_v] = sizes;
  const auto options = query_features.options();
  const at::Tensor output = at::empty({B, L, H, d_v}, options).transpose(1, 2);
  const at::Tensor log_normalizer = at::empty({B, H, L}, options.dtype(at::kDouble));
  const Products products = products_of(moments, B * H, F, eps);
  at::Tensor all = moments, all_reference = reference;
  for_blocks(L, causal_block(sizes), [&](int64_t first, int64_t count) {
    const auto block = [&](const at::Tensor& tensor) { return tensor.narrow(2, first, count); };
    const auto [rows, logs, later, later_reference] =
        attend_causally(products, block(query_features), block(key_features), block(logits),
                        block(value), all, all_reference, eps);
    block(output).copy_(rows);
    block(log_normalizer).copy_(logs);
    all = later;
    all_reference = later_reference;
  });
  return {output, log_normalizer, all, all_reference};
}

// Computes the gradients of queries and of pairs from the first block to the last, and the
// gradients of keys by later queries, through moments, from the last to the first. It holds one
// table.
FiveTensors composed_causal_backward(const at::Tensor& grad_output,
                                     const std::optional<at::Tensor>& grad_all_moments,
                                     const at::Tensor& query_features,
                                     const at::Tensor& key_features, const at::Tensor& logits,
                                     const at::Tensor& value, const at::Tensor& moments,
                                     const at::Tensor& reference, const at::Tensor& output,
                                     const at::Tensor& log_normalizer, double eps,
                                     std::array<bool, 5> wanted) {
  const ExactArithmetic exact;
  const CausalSizes sizes =
      check_causal_backward(grad_output, grad_all_moments, query_features, key_features, logits,
                            value, moments, reference, output, log_normalizer, eps);
  const auto [B, H, K, L, F, d_v] = sizes.queries;
  const at::ScalarType type = moments.scalar_type();
  // Sums of two parts, which are rounded to 16 bits once.
  const std::array<at::Tensor, 4> inputs = {query_features, key_features, logits, value};
  std::array<at::Tensor, 4> sums;
  for (size_t i = 0; i < sums.size(); ++i) {
    const auto options = inputs[i].options().dtype(type);
    sums[i] = wanted[i] ? at::empty_like(inputs[i], options) : at::empty({0}, options);
  }
  const int64_t size = causal_block(sizes.queries);
  std::vector<int64_t> begins;
  at::Tensor all = moments, largest = reference;
  for_blocks(L, size, [&](int64_t first, int64_t count) {
    begins.push_back(first);
    const auto block = [&](const at::Tensor& tensor) { return tensor.narrow(2, first, count); };
    const at::Tensor g = block(grad_output).to(type), x = block(query_features).to(type);
    const at::Tensor o = block(output).to(type), log_z = block(log_normalizer);
    const PairKeys keys(block(key_features), block(logits), block(value), H, type);
    const auto [of_query, of_key, of_logits, of_value] = pair_gradients(g, x, keys, o, log_z, eps);
    if (wanted[0]) {
      const at::Tensor earlier = std::get<0>(
          composed_from_moments_backward(g, x, all, largest, o, log_z, eps, {true, false}));
      block(sums[0]).copy_(of_query + earlier);
      const auto [own, own_reference] =
          composed_key_moments(block(key_features), block(logits), block(value));
      std::tie(all, largest) = reference_merged(all, largest, own, own_reference);
    }
    if (wanted[1]) block(sums[1]).copy_(sum_heads(of_key, K));
    if (wanted[2]) block(sums[2]).copy_(sum_heads(of_logits, K));
    if (wanted[3]) block(sums[3]).copy_(sum_heads(of_value, sizes.keys.G));
  });
  // [B, K, L + 1]: the largest logit before each token, and of all.
  const at::Tensor seen = at::cat({reference.unsqueeze(-1), largest_seen(logits, reference)}, -1);
  at::Tensor grad = grad_all_moments ? *grad_all_moments : at::zeros_like(moments);
  const bool wants_keys = wanted[1] || wanted[2] || wanted[3];
  for (size_t i = begins.size(); i-- > 0 && (wants_keys || wanted[4]);) {
    const int64_t first = begins[i], count = std::min(size, L - first);
    const auto block = [&](const at::Tensor& tensor) { return tensor.narrow(2, first, count); };
    const at::Tensor before = seen.select(2, first), after = seen.select(2, first + count);
    const auto [of_key, of_logits, of_value] = composed_key_moments_backward(
        grad, block(key_features).to(type), block(logits), block(value).to(type), after,
        {wanted[1], wanted[2], wanted[3]});
    if (wanted[1]) block(sums[1]).add_(of_key);
    if (wanted[2]) block(sums[2]).add_(of_logits);
    if (wanted[3]) block(sums[3]).add_(of_value);
    const at::Tensor of_queries = std::get<1>(
        composed_from_moments_backward(block(grad_output), block(query_features), moments, before,
                                       block(output), block(log_normalizer), eps, {false, true}));
    const at::Tensor factor = at::exp(before - finite_or_zero(after)).to(type);
    grad = grad * factor.unsqueeze(-1).unsqueeze(-1) + of_queries;
  }
  const at::Tensor is_empty = (reference == -INFINITY).unsqueeze(-1).unsqueeze(-1);
  for (size_t i = 0; i < sums.size(); ++i) sums[i] = sums[i].to(inputs[i].scalar_type());
  return {sums[0], sums[1], sums[2], sums[3],
          wanted[4] ? or_zero(grad, is_empty).contiguous() : nothing_like(moments)};
}

TORCH_LIBRARY_IMPL(ikattn, CompositeExplicitAutograd, m) {
  implement<"key_moments", composed_key_moments>(m);
  implement<"add_key_moments_", composed_add_key_moments>(m);
  implement<"key_moments_backward", composed_key_moments_backward>(m);
  implement<"attention_from_moments", composed_from_moments>(m);
  implement<"attention_from_moments_backward", composed_from_moments_backward>(m);
  implement<"causal_attention_from_moments", composed_causal>(m);
  implement<"causal_attention_from_moments_backward", composed_causal_backward>(m);
}

}  // namespace
}  // namespace ikattn
