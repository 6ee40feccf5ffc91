// The gradients of streamed maps: strips of queries, whose gradients of weights are there at a
// time. Kernels make those and the sums over pairs, torch's products the gradients of queries and
// keys, and its graph what is made of each token.
#pragma once

#include "contributions/cuda/streamed/glue.h"
#include "contributions/gradients.h"

namespace ikattn::cuda {
namespace {

// Returns why gradients go through weights in blocks of rows; nullptr: by kernels.
inline const char* why_gradients_in_blocks(const ContributionCall& call,
                                           const ContributionSizes& sizes, const Wanted& wanted) {
  if (const char* reason = why_in_blocks(call, sizes)) return reason;
  if (wanted[kNormScale] || wanted[kNormScale + 2])
    return "the gradient of a norm's scale is wanted";
  return nullptr;
}

// Graph of the scores' operands over the call's inputs, in float32, and of logits of keys in
// float64; shapes as in StreamedPairs.
struct SourceGraph {
  SourceLeaves leaves;
  at::Tensor queries, keys, logits;
};

inline SourceGraph source_graph(ContributionCall call, const ContributionSizes& sizes,
                                const Wanted& wanted) {
  const at::AutoGradMode gradients_on(true);
  SourceGraph graph;
  graph.leaves = source_leaves(call, at::kFloat, wanted);
  const WeightsSource& source = call.source;
  graph.queries = source.query;
  graph.keys = source.key;
  if (source.w1.defined()) {
    std::tie(graph.queries, graph.keys) = features_of(source, sizes.H, /*is_split=*/true);
  }
  graph.logits = key_logits(source, sizes);
  return graph;
}

// Gradients of scores [batch, rows, keys], as left operands of products in the type of their right
// ones. Those of Half may be of any size: each matrix is over a power of two.
class ScoreGradients {
 public:
  ScoreGradients(const at::Tensor& scores, at::ScalarType type) : scores_(scores) {
    if (type == at::kHalf) {
      const at::Tensor largest = scores.abs().nan_to_num_(0, 0, 0).amax({1, 2}, true);
      unit_ = at::exp2(std::get<1>(at::frexp(largest)).to(at::kFloat).clamp_min(-100) - 15);
      scores_ = scores / unit_;
    }
    scores_ = scores_.to(type);
  }

  // [batch, rows or, transposed, keys, *], float32.
  at::Tensor times(const at::Tensor& right, bool is_transposed) const {
    const at::Tensor left = is_transposed ? scores_.transpose(1, 2) : scores_;
    at::Tensor result;
    if (left.scalar_type() != at::kFloat && left.is_cuda()) {
      result =
          at::empty({left.size(0), left.size(1), right.size(2)}, left.options().dtype(at::kFloat));
      at::bmm_out(result, left, right, at::kFloat);
    } else {  // the interpreter's device has no products of 16 bits into float32
      result = at::bmm(left.to(at::kFloat), right.to(at::kFloat));
    }
    return unit_.defined() ? result.mul_(unit_) : result;
  }

 private:
  at::Tensor scores_, unit_;
};

// One call.
class StreamedGradients : StreamedPairs {
 public:
  // query: zero where it is padding, and nothing comes in
  StreamedGradients(const ContributionCall& call, const ContributionSizes& sizes,
                    const Wanted& wanted)
      : StreamedPairs(call, sizes),
        given_(call),
        wanted_(wanted),
        graph_(source_graph(call, sizes, wanted)) {
    const auto zeros_for = [&](const at::Tensor& made) {
      return made.requires_grad() ? at::zeros(made.sizes(), made.options().requires_grad(false))
                                  : at::Tensor();
    };
    grad_queries_ = zeros_for(graph_.queries);
    grad_keys_ = zeros_for(graph_.keys);
    grad_logits_ = zeros_for(graph_.logits);
    // A key that no row sees may hold anything, and is not multiplied.
    const at::Tensor hidden = graph_.logits.detach() == -INFINITY;
    const at::Tensor by_key =
        hidden.view({sizes.B, params_.G, sizes.H / params_.G, sizes.S}).all(2);
    keys_ = keys_.masked_fill(by_key.unsqueeze(-1), 0);
  }

  // Adds to `totals`; the outer products of the keys by variant, [B, S, H, H].
  std::array<at::Tensor, 3> run(const MapTensors& grad_maps, const Keys& keys, Totals& totals) {
    const auto [B, H, G, L, S, d_v, D] = sizes_;
    const Block& block = given_.block;
    const int64_t padded = 16 * head_tiles(H);
    std::array<at::Tensor, 3> matrices;
    params_.variants = 1;
    for (int variant = 0; variant < 3; ++variant) {
      if (!keys.factors[variant].defined()) continue;
      units_[variant] = kept(at::empty({B, S}, options(at::kFloat)));
      fragments_[variant] = fragments_of(keys.factors[variant], units_[variant], false);
      reversed_[variant] = fragments_of(keys.factors[variant], units_[variant], true);
      if (!wants_keys(wanted_)) continue;
      outer_[variant] = at::zeros({B, S, padded, padded}, options(at::kFloat));
      matrices[variant] = outer_[variant].narrow(2, 0, H).narrow(3, 0, H);
    }
    if (needs_own_gradients(block)) {
      own_ = at::zeros({B, H, L}, options(at::kFloat));
      params_.own = own_.mutable_data_ptr<float>();
      params_.diagonal = block.diagonal;
    }
    call_.check(streamed_kernels.row_sums(params_, call_.stream()));
    const int64_t step =
        std::max(kStripRows, rows_at_a_time(sizes_, rows_.device()) / kStripRows * kStripRows);
    for (int64_t i0 = 0; i0 < L; i0 += step) {
      add_strip(i0, std::min(step, L - i0), grad_maps, keys, totals);
    }
    finish(totals);
    return matrices;
  }

 private:
  // Adds the gradients of the queries [i0, i0 + count).
  void add_strip(int64_t i0, int64_t count, const MapTensors& grad_maps, const Keys& keys,
                 Totals& totals) {
    const auto [B, H, G, L, S, d_v, D] = sizes_;
    const ContributionCall round = rows_of(given_, i0, count);
    const MapTensors grads = rows_of(grad_maps, given_.block, i0, count);
    const NormGradients incoming = norm_gradients_of(grads, round.block, at::kFloat);
    StreamedGradientParams params;
    static_cast<StreamedParams&>(params) = params_;
    params.i0 = i0;
    params.queries = count;
    // A query's own pair may lie behind those that it sees.
    params.keys = params_.is_causal ? std::min(S, i0 + count + given_.block.diagonal) : S;
    at::Tensor grad;
    if (grad_queries_.defined() || grad_keys_.defined() || grad_logits_.defined()) {
      grad = at::empty({B, H, count, params.keys}, options(at::kFloat));
      params.grad = grad.mutable_data_ptr<float>();
    }
    for (int variant = 0; variant < 3; ++variant) {
      if (!incoming[variant].defined()) continue;
      params.units[0] = units_[variant].const_data_ptr<float>();
      params.fragments[0] = fragments_[variant];
      params.reversed = reversed_[variant];
      params.grad_norms = array_of(incoming[variant]);
      params.outer =
          outer_[variant].defined() ? outer_[variant].mutable_data_ptr<float>() : nullptr;
      call_.check(streamed_kernels.pair_gradients(params, call_.stream()));
      params.is_first = false;
    }
    if (params.is_first && grad.defined()) grad.zero_();  // no norm of a pair has a gradient
    if (own_.defined()) add_own(round.block, i0, grads, keys, grad, totals);
    if (grad.defined()) add_score_gradients(params, grad);
  }

  void add_own(const Block& block, int64_t i0, const MapTensors& grads, const Keys& keys,
               const at::Tensor& grad, Totals& totals) {
    const int64_t count = block.residual.size(1);
    at::Tensor own = own_.narrow(2, i0, count);
    // In dot attention hidden own pairs have no weight, but NaN in rows that are NaN.
    if (!params_.is_implicit) own = own + rows_.select(-1, 2).narrow(2, i0, count) * 0;
    const at::Tensor grad_own = grad.defined() ? at::zeros_like(own) : at::Tensor();
    add_own_gradients(own, keys, block, grads, i0, wanted_, grad_own, totals);
    if (!grad.defined()) return;
    grad.diagonal(block.diagonal, 2, 3).add_(grad_own.masked_fill_(own == 0, 0));
  }

  void add_score_gradients(StreamedGradientParams& params, const at::Tensor& grad) {
    const auto [B, H, G, L, S, d_v, D] = sizes_;
    const int64_t i0 = params.i0, count = params.queries, heads = params_.G;
    const int64_t tiles = (count + kStripRows - 1) / kStripRows;
    at::Tensor grad_logits;
    if (grad_logits_.defined()) {
      grad_logits = at::zeros({B, H, tiles, params.keys}, options(at::kFloat));
      params.grad_logits = grad_logits.mutable_data_ptr<float>();
    }
    call_.check(streamed_kernels.score_gradients(params, call_.stream()));
    if (grad_logits.defined()) {
      grad_logits_.narrow(2, 0, params.keys)
          .add_(grad_logits.sum(at::IntArrayRef{2}, false, at::kDouble));
    }
    // The heads that share a key one after the other.
    const int64_t rows = H / heads * count, width = keys_.size(3);
    const ScoreGradients scores(grad.view({B * heads, rows, params.keys}), keys_.scalar_type());
    if (grad_queries_.defined()) {
      const at::Tensor keys =
          keys_.narrow(2, 0, params.keys).reshape({B * heads, params.keys, width});
      grad_queries_.narrow(2, i0, count)
          .add_(scores.times(keys, false).view({B, H, count, width}), scale_);
    }
    if (grad_keys_.defined()) {
      const at::Tensor queries = queries_.narrow(2, i0, count).reshape({B * heads, rows, width});
      grad_keys_.narrow(2, 0, params.keys)
          .add_(scores.times(queries, true).view({B, heads, params.keys, width}), scale_);
    }
  }

  // Passes gradients from the scores' operands on to the call's inputs.
  void finish(Totals& totals) {
    torch::autograd::variable_list made, gradients;
    const auto add = [&](const at::Tensor& of_graph, const at::Tensor& gradient) {
      if (!gradient.defined()) return;
      made.push_back(of_graph);
      gradients.push_back(gradient);
    };
    add(graph_.queries, grad_queries_);
    add(graph_.keys, grad_keys_);
    add(graph_.logits, grad_logits_);
    if (!made.empty()) add_source_gradients(made, gradients, graph_.leaves, 0, totals);
  }

  const ContributionCall given_;
  const Wanted wanted_;
  const SourceGraph graph_;
  at::Tensor grad_queries_, grad_keys_, grad_logits_;  // undefined where nothing wants them
  at::Tensor own_;                                     // [B, H, L], weights of own pairs
  std::array<at::Tensor, 3> units_, outer_;            // [variant], see StreamedGradientParams
  std::array<const uint32_t*, 3> fragments_{}, reversed_{};
};

// Returns the outer products of the keys; adds all other gradients to `totals`.
inline std::array<at::Tensor, 3> streamed_gradients(const ContributionCall& given,
                                                    const MapTensors& grad_maps, const Keys& keys,
                                                    const ContributionSizes& sizes,
                                                    const Wanted& wanted, Totals& totals) {
  ContributionCall call = given;
  if (call.block.query_padding.defined()) {
    at::Tensor& query = call.source.query;
    query = query.masked_fill(call.block.query_padding.unsqueeze(1).unsqueeze(-1), 0);
  }
  const auto matrices = with_memory_for(
      kMapsBackward, "the gradients of some queries' weights",
      [&] { return StreamedGradients(call, sizes, wanted).run(grad_maps, keys, totals); });
  if (wanted[kSources] && call.block.query_padding.defined()) {
    totals.inputs[kSources].masked_fill_(call.block.query_padding.unsqueeze(1).unsqueeze(-1), 0);
  }
  return matrices;
}

}  // namespace
}  // namespace ikattn::cuda
