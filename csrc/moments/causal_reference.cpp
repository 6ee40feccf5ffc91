// Causal attention that goes on from moments, in ATen.
#include <cmath>
#include <vector>

#include "moments/composition.h"
#include "moments/reference.h"

namespace ikattn {
namespace {

// Keys of a causal call as its pairs see them, for each query head: what is hidden is zero, and so
// is what is not finite, whose logit is NaN.
struct PairKeys {
  at::Tensor x;       // [B, H, L, F]
  at::Tensor values;  // [B, H, L, d_v]
  at::Tensor logits;  // [B, K, L], float64

  PairKeys(const at::Tensor& features, const at::Tensor& given, const at::Tensor& value, int64_t H,
           at::ScalarType type) {
    const int64_t K = static_size(features, 1);
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
  }

  // The first ones.
  PairKeys first(int64_t count) const {
    PairKeys keys = *this;
    for (at::Tensor* tensor : {&keys.x, &keys.values, &keys.logits}) {
      *tensor = tensor->narrow(2, 0, count);
    }
    return keys;
  }
  // exp(logit_j - base_i) of the keys that query i sees, otherwise 0: those of the last queries,
  // base [B, H or K, rows]; in the type of the values.
  at::Tensor weights(const at::Tensor& base) const {
    const int64_t H = static_size(x, 1), L = static_size(x, 2), heads = static_size(base, 1);
    const int64_t rows = static_size(base, 2);
    const at::Tensor is_causal =
        at::ones({rows, L}, logits.options().dtype(at::kBool)).tril(L - rows);
    const at::Tensor own = to_heads(logits, heads).unsqueeze(-2);
    const at::Tensor exponents = own - base.unsqueeze(-1);
    const at::Tensor lowest = at::full({}, -INFINITY, exponents.options());
    const at::Tensor is_visible = at::logical_and(is_causal, own != -INFINITY);
    return to_heads(at::exp(at::where(is_visible, exponents, lowest).to(x.scalar_type())), H);
  }
  // Scores of queries [B, H, rows, F].
  at::Tensor scores(const at::Tensor& queries) const {
    return at::matmul(queries, x.mT()) / static_cast<double>(2 * static_size(x, -1));
  }
};

// The largest finite logit that each query of a causal call sees, [B, K, L].
at::Tensor largest_seen(const at::Tensor& logits, const at::Tensor& reference) {
  return at::maximum(std::get<0>(at::cummax(finite_logits(logits), -1)),
                     reference.detach().unsqueeze(-1));
}

// Output and log Z of the last queries of `keys`, x [B, H, rows, F], with the keys before these.
// base [B, K, rows]: the largest logit that each sees, or 0.
TwoTensors causal_rows(const Products& products, const at::Tensor& x, const PairKeys& keys,
                       const at::Tensor& base, const at::Tensor& moments,
                       const at::Tensor& reference, double eps) {
  const int64_t H = static_size(x, 1), d_v = static_size(moments, -1) - 1;
  const at::Tensor held = to_heads(moments, H);
  const at::Tensor before = at::matmul(products.entries(x), held * products.counts.unsqueeze(-1));
  const at::Tensor least = held.select(-2, -1).narrow(-1, d_v, 1).unsqueeze(-1) * eps;
  const at::Tensor sums =
      at::cat({before.narrow(-1, 0, d_v), at::maximum(before.narrow(-1, d_v, 1), least)}, -1);
  const at::Tensor factor = at::exp(reference.detach().unsqueeze(-1) - base).to(x.scalar_type());
  const at::Tensor weights = (keys.scores(x).square() + eps) * keys.weights(base);
  const at::Tensor both = sums * to_heads(factor, H).unsqueeze(-1) +
                          at::matmul(weights, at::constant_pad_nd(keys.values, {0, 1}, 1));
  const at::Tensor sum = both.narrow(-1, d_v, 1);
  const at::Tensor safe = at::where(sum == 0, at::ones({}, sum.options()), sum);
  const at::Tensor log_sum = at::log(sum.detach().squeeze(-1).to(at::kDouble));
  return {both.narrow(-1, 0, d_v) / safe, log_sum + to_heads(base, H)};
}

// Gradients of queries, keys, logits and values from the pairs of the last queries of `keys`, whose
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

// Blocks of a causal call that are computed together, each as if it were an item of the batch.
struct CausalBlocks {
  int64_t first, count, tokens;  // the first token; blocks, and tokens of each

  // A view of [B, heads, L, ..], as [B, count, heads, tokens, ..].
  at::Tensor apart(const at::Tensor& tensor) const {
    return tensor.narrow(2, first, count * tokens).unflatten(2, {count, tokens}).movedim(2, 1);
  }
  at::Tensor of(const at::Tensor& tensor) const { return apart(tensor).flatten(0, 1); }
  // [B count, ..] to [B, count, ..].
  at::Tensor by_item(const at::Tensor& tensor) const {
    return tensor.unflatten(0, {static_size(tensor, 0) / count, count});
  }
};

// Blocks so long that the weights of their pairs are as many numbers as a table of moments, which
// is read and written once a block; and as many together as have a block of numbers of entries.
std::vector<CausalBlocks> causal_blocks(const FromMomentsSizes& sizes) {
  const int64_t E = sizes.F * (sizes.F + 1) / 2 + 1, step = 64;
  const auto root = static_cast<int64_t>(std::sqrt(static_cast<double>(E * (sizes.d_v + 1))));
  const int64_t tokens = (root + step - 1) / step * step;
  const int64_t together = std::max<int64_t>(1, block_size(sizes.B * sizes.H, sizes.F) / tokens);
  std::vector<CausalBlocks> result;
  for (int64_t first = 0; first < sizes.L;) {
    const int64_t whole = std::min(together, (sizes.L - first) / tokens);
    result.push_back(whole > 0 ? CausalBlocks{first, whole, tokens}
                               : CausalBlocks{first, 1, sizes.L - first});
    first += result.back().count * result.back().tokens;
  }
  return result;
}

// What is before each of the blocks: `state`, and what the blocks before it add, `own`, each with
// its reference. `state` becomes what is after the last.
TwoTensors befores(const CausalBlocks& blocks, const TwoTensors& own, TwoTensors& state) {
  const at::Tensor tables = blocks.by_item(std::get<0>(own));
  const at::Tensor references = blocks.by_item(std::get<1>(own));
  std::vector<at::Tensor> sums, largest;
  for (int64_t i = 0; i < blocks.count; ++i) {
    sums.push_back(std::get<0>(state));
    largest.push_back(std::get<1>(state));
    state = reference_merged(sums[i], largest[i], tables.select(1, i), references.select(1, i));
  }
  return {at::stack(sums, 1).flatten(0, 1), at::stack(largest, 1).flatten(0, 1)};
}

// The rows of blocks, as many at a time as have a block of numbers of entries.
template <typename Function>
void for_rows(const CausalBlocks& blocks, const FromMomentsSizes& sizes, const Function& function) {
  for_blocks(blocks.tokens, block_size(blocks.count * sizes.B * sizes.H, sizes.F), function);
}

}  // namespace

FourTensors reference_causal(const at::Tensor& query_features, const at::Tensor& key_features,
                             const at::Tensor& logits, const at::Tensor& value,
                             const at::Tensor& moments, const at::Tensor& reference, double eps) {
  refuse_autocast("causal_attention_from_moments", query_features);
  const ExactArithmetic exact;
  const at::ScalarType type = moments.scalar_type();
  const at::Tensor x = query_features.to(type);
  const PairKeys keys(key_features, logits, value, static_size(x, 1), type);
  const auto [output, log_normalizer] =
      causal_rows(Products(x, eps), x, keys, finite_or_zero(largest_seen(logits, reference)),
                  moments, reference, eps);
  const auto [own, own_reference] = reference_key_moments(key_features, logits, value);
  const auto [all, all_reference] = reference_merged(moments, reference, own, own_reference);
  return {output.to(query_features.scalar_type()), log_normalizer, all, all_reference};
}

FourTensors causal_in_blocks(const at::Tensor& query_features, const at::Tensor& key_features,
                             const at::Tensor& logits, const at::Tensor& value,
                             const at::Tensor& moments, const at::Tensor& reference, double eps) {
  const ExactArithmetic exact;
  const FromMomentsSizes sizes =
      check_causal(query_features, key_features, logits, value, moments, reference, eps).queries;
  const auto [B, H, K, L, F, d_v] = sizes;
  const at::ScalarType type = moments.scalar_type();
  const auto options = query_features.options();
  const at::Tensor output = at::empty({B, L, H, d_v}, options).transpose(1, 2);
  const at::Tensor log_normalizer = at::empty({B, H, L}, options.dtype(at::kDouble));
  TwoTensors state = {moments.clone(at::MemoryFormat::Contiguous), reference.clone()};
  const Products products(at::empty({F}, moments.options()), eps);
  for (const CausalBlocks& blocks : causal_blocks(sizes)) {
    const at::Tensor of_keys = blocks.of(key_features), own_logits = blocks.of(logits);
    const at::Tensor values = blocks.of(value);
    const auto [sums, largest] =
        befores(blocks, key_moments_in_blocks(of_keys, own_logits, values), state);
    const at::Tensor base = finite_or_zero(largest_seen(own_logits, largest));
    const PairKeys keys(of_keys, own_logits, values, H, type);
    const at::Tensor queries = blocks.of(query_features);
    const at::Tensor to = blocks.apart(output), to_logs = blocks.apart(log_normalizer);
    for_rows(blocks, sizes, [&, sums = sums, largest = largest](int64_t first, int64_t count) {
      const auto [rows, logs] =
          causal_rows(products, queries.narrow(2, first, count).to(type), keys.first(first + count),
                      base.narrow(2, first, count), sums, largest, eps);
      to.narrow(3, first, count).copy_(blocks.by_item(rows));
      to_logs.narrow(3, first, count).copy_(blocks.by_item(logs));
    });
  }
  return {output, log_normalizer, std::get<0>(state), std::get<1>(state)};
}

namespace {

// The backward of a causal call, whose queries go from the first block to the last, and whose keys
// from the last to the first: no more than the tables of blocks that are computed together are
// held.
struct CausalBackward {
  const at::Tensor &grad_output, &queries, &keys, &logits, &value, &output, &log_normalizer;
  CausalSizes sizes;
  double eps;
  std::vector<CausalBlocks> all_blocks;
  at::Tensor seen;  // [B, K, L + 1]  the largest logit before each token, and that of all

  at::Tensor reference_before(const CausalBlocks& blocks) const {
    return blocks.of(seen.narrow(2, 0, sizes.queries.L)).select(2, 0);
  }
  at::Tensor reference_after(const CausalBlocks& blocks) const {
    return blocks.of(seen.narrow(2, 1, sizes.queries.L)).select(2, -1);
  }

  // What queries have of the moments before their blocks.
  void add_query_sums(const at::Tensor& moments, const at::Tensor& to) const {
    TwoTensors state = {moments, seen.select(2, 0)};
    for (const CausalBlocks& blocks : all_blocks) {
      const auto own = key_moments_in_blocks(blocks.of(keys), blocks.of(logits), blocks.of(value));
      const auto [sums, largest] = befores(blocks, own, state);
      const auto [grad, none] = from_moments_backward_in_blocks(
          blocks.of(grad_output), blocks.of(queries), sums, largest, blocks.of(output),
          blocks.of(log_normalizer), eps, {true, false});
      blocks.apart(to).copy_(blocks.by_item(grad));
    }
  }

  // What the moments after each block have to be added for the queries of later ones: `grad`, which
  // becomes the gradient of those before the first.
  at::Tensor grads_after(const CausalBlocks& blocks, const at::Tensor& like,
                         at::Tensor& grad) const {
    const at::Tensor before = reference_before(blocks), after = reference_after(blocks);
    const at::Tensor shape =
        like.new_empty({1}).expand({before.size(0), like.size(1), like.size(2), like.size(3)});
    const auto own = from_moments_backward_in_blocks(blocks.of(grad_output), blocks.of(queries),
                                                     shape, before, blocks.of(output),
                                                     blocks.of(log_normalizer), eps, {false, true});
    const at::Tensor of_moments = blocks.by_item(std::get<1>(own));
    const at::Tensor factor = at::exp(before - finite_or_zero(after)).to(like.scalar_type());
    const at::Tensor factors = blocks.by_item(factor.unsqueeze(-1).unsqueeze(-1));
    std::vector<at::Tensor> result(static_cast<size_t>(blocks.count));
    for (int64_t i = blocks.count; i-- > 0;) {
      result[static_cast<size_t>(i)] = grad;
      grad = grad * factors.select(1, i) + of_moments.select(1, i);
    }
    return at::stack(result, 1).flatten(0, 1);
  }

  // Adds what the pairs of blocks give, to all that is wanted.
  void add_pairs(const CausalBlocks& blocks, at::ScalarType type, const FiveTensors& to,
                 const std::array<bool, 5>& wanted) const {
    const auto& [of_query, of_key, of_logits, of_value, none] = to;
    const int64_t K = sizes.queries.K, G = sizes.keys.G;
    const PairKeys own(blocks.of(keys), blocks.of(logits), blocks.of(value), sizes.queries.H, type);
    at::Tensor key_sums = at::zeros_like(own.x), value_sums = at::zeros_like(own.values);
    at::Tensor logit_sums = key_sums.new_zeros(key_sums.sizes().slice(0, 3));
    for_rows(blocks, sizes.queries, [&](int64_t first, int64_t count) {
      const auto rows = [&](const at::Tensor& tensor) {
        return blocks.of(tensor).narrow(2, first, count);
      };
      const auto [of_rows, key_pairs, logit_pairs, value_pairs] = pair_gradients(
          rows(grad_output).to(type), rows(queries).to(type), own.first(first + count),
          rows(output).to(type), rows(log_normalizer), eps);
      if (wanted[0]) {
        blocks.apart(of_query).narrow(3, first, count).add_(blocks.by_item(of_rows));
      }
      key_sums.narrow(2, 0, first + count).add_(key_pairs);
      logit_sums.narrow(2, 0, first + count).add_(logit_pairs);
      value_sums.narrow(2, 0, first + count).add_(value_pairs);
    });
    const auto add = [&](const at::Tensor& result, const at::Tensor& sums, int64_t heads) {
      blocks.apart(result).add_(blocks.by_item(sum_heads(sums, heads)));
    };
    if (wanted[1]) add(of_key, key_sums, K);
    if (wanted[2]) add(of_logits, logit_sums, K);
    if (wanted[3]) add(of_value, value_sums, G);
  }
};

}  // namespace

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
  // Sums of two parts, which are rounded to 16 bits once.
  const auto wide = [&](bool is_wanted, const at::Tensor& like) {
    return at::empty(is_wanted ? like.sizes() : at::IntArrayRef{0},
                     like.options().dtype(moments.scalar_type()));
  };
  const FiveTensors result = {wide(wanted[0], query_features), wide(wanted[1], key_features),
                              empty_or(wanted[2], logits), wide(wanted[3], value), at::Tensor()};
  const auto& [of_query, of_key, of_logits, of_value, none] = result;
  const at::Tensor seen = at::cat({reference.unsqueeze(-1), largest_seen(logits, reference)}, -1);
  const CausalBackward backward = {
      grad_output, query_features, key_features, logits, value,
      output,      log_normalizer, sizes,        eps,    causal_blocks(sizes.queries),
      seen};
  if (wanted[0]) backward.add_query_sums(moments, of_query);
  at::Tensor grad = grad_all_moments ? *grad_all_moments : at::zeros_like(moments);
  const std::array<bool, 3> of_keys = {wanted[1], wanted[2], wanted[3]};
  for (size_t place = backward.all_blocks.size(); place-- > 0;) {
    const CausalBlocks& blocks = backward.all_blocks[place];
    if (of_keys[0] || of_keys[1] || of_keys[2] || wanted[4]) {
      const at::Tensor after = backward.grads_after(blocks, moments, grad);
      const auto [key_sums, logit_sums, value_sums] = key_moments_backward_in_blocks(
          after, blocks.of(key_features), blocks.of(logits), blocks.of(value),
          backward.reference_after(blocks), of_keys);
      if (wanted[1]) blocks.apart(of_key).copy_(blocks.by_item(key_sums));
      if (wanted[2]) blocks.apart(of_logits).copy_(blocks.by_item(logit_sums));
      if (wanted[3]) blocks.apart(of_value).copy_(blocks.by_item(value_sums));
    }
    backward.add_pairs(blocks, moments.scalar_type(), result, wanted);
  }
  const at::Tensor is_empty = (reference == -INFINITY).unsqueeze(-1).unsqueeze(-1);
  return {of_query.to(query_features.scalar_type()), of_key.to(key_features.scalar_type()),
          of_logits, of_value.to(value.scalar_type()),
          wanted[4] ? at::where(is_empty, at::zeros({}, grad.options()), grad).contiguous()
                    : at::empty({0}, moments.options())};
}

}  // namespace ikattn
