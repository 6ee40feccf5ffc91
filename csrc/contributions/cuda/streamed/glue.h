// Tensors to the streamed maps' kernels: which calls they take, operands in 16 bits, what keys and
// rows bring to their pairs.
#pragma once

#include <ATen/ATen.h>

#include <limits>

#include "attention/operator/reference.h"
#include "contributions/cuda/streamed/streamed.h"
#include "contributions/maps.h"
#include "support/cuda/glue.h"

namespace ikattn::cuda {
namespace {

// Returns whether a mask, which the keys' logits do not hold, is one of bits.
inline bool is_bool(const at::Tensor& mask) { return mask.scalar_type() == at::kBool; }
inline bool differs_by_query(const at::Tensor& mask) {
  return mask.dim() >= 2 && mask.size(-2) != 1;
}
inline int64_t heads_of(const at::Tensor& mask) { return mask.dim() >= 3 ? mask.size(-3) : 1; }

// Returns why the norms of a call's pairs, and sums of other keys' values, are made in blocks of
// rows by torch's operators; nullptr: by kernels.
inline const char* why_norms_in_blocks(const ContributionCall& call,
                                       const ContributionSizes& sizes) {
  const WeightsSource& source = call.source;
  if (!is_on(Family::kStreamedMaps)) return "the family streamed_maps is off";
  if (source.attn_weights.defined()) return "the weights are given";
  if (arithmetic_type(call) == at::kDouble) return "it is computed in float64";
  if (sizes.H > kMostNormHeads) return "there are more than 64 heads";
  if (sizes.B * sizes.L * sizes.S == 0 || source.query.size(3) == 0) return "there are no pairs";
  const at::Tensor mask = or_undefined(source.options.attn_mask);
  const int64_t masks = mask.defined() && is_bool(mask) ? heads_of(mask) : 1;
  if (sizes.B * masks * sizes.L * ((sizes.S + kMaskKeys - 1) / kMaskKeys) >= int64_t{1} << 31) {
    return "there are more pairs than a grid has blocks for";
  }
  return nullptr;
}

// Returns why not by kernels that know neither many heads, masks of pairs that are floats or differ
// by head, nor mixing ratios.
inline const char* why_in_blocks(const ContributionCall& call, const ContributionSizes& sizes) {
  if (const char* reason = why_norms_in_blocks(call, sizes)) return reason;
  if (sizes.H > kMostStreamedHeads) return "there are more than 32 heads";
  if (call.block.maps[kMixingRatios]) return "mixing ratios need the sum of other pairs";
  const at::Tensor mask = or_undefined(call.source.options.attn_mask);
  if (!mask.defined()) return nullptr;
  if (!is_bool(mask)) return differs_by_query(mask) ? "a float mask differs by query" : nullptr;
  return heads_of(mask) != 1 ? "the mask differs by head" : nullptr;
}

// [B, heads, N, width] of 16 bits, and what a row is over; undefined: as it is.
struct StreamedOperand {
  at::Tensor rows, factor;  // factor [B, heads, N]
};

// Pads rows with zeros to a multiple of kOperandColumns, at multiples of 16 bytes.
inline at::Tensor operand_rows(at::Tensor rows) {
  const int64_t beyond = rows.size(3) % kOperandColumns;
  if (beyond != 0) rows = at::constant_pad_nd(rows, {0, kOperandColumns - beyond});
  bool is_aligned =
      rows.stride(3) == 1 && reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % 16 == 0;
  for (int axis = 0; axis < 3; ++axis) is_aligned = is_aligned && rows.stride(axis) % 8 == 0;
  return is_aligned ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

// Splits rows of float32 into two operands of Half, over a power of two that makes the largest of a
// row Half's largest. Products leave out what is small times small.
inline StreamedOperand split_operand(const at::Tensor& x, bool is_key) {
  const at::Tensor largest = x.abs().amax({-1}, true);
  const at::Tensor exponent = std::get<1>(at::frexp(largest)).to(at::kFloat).clamp_min(-100);
  const at::Tensor factor = at::where(at::logical_and(largest.isfinite(), largest > 0),
                                      at::exp2(exponent - 15), at::ones({}, x.options()));
  const at::Tensor scaled = x / factor, high = scaled.to(at::kHalf);
  const at::Tensor low = (scaled - high.to(at::kFloat)).to(at::kHalf);
  const at::Tensor rows = is_key ? at::cat({high, high, low}, -1) : at::cat({high, low, high}, -1);
  return {operand_rows(rows), factor.squeeze(-1)};
}

inline StreamedOperand operand_of(const at::Tensor& x, bool is_split, bool is_key) {
  return is_split ? split_operand(x, is_key) : StreamedOperand{operand_rows(x), {}};
}

// Repeats each head along the axis of heads, third from the end, which then has `heads`.
inline at::Tensor repeated_heads(const at::Tensor& x, int64_t heads, int64_t axis = -3) {
  return x.size(axis) == heads ? x : x.repeat_interleave(heads / x.size(axis), axis);
}

// Computes features of the query's and the key's tokens, in Half or float32.
inline std::pair<at::Tensor, at::Tensor> features_of(const WeightsSource& source, int64_t H,
                                                     bool is_split) {
  const auto wide = [](const at::Tensor& x) { return x.defined() ? x.to(at::kFloat) : x; };
  const at::Tensor w1 = wide(source.w1), w2 = wide(source.w2);
  const auto features = [&](const at::Tensor& x, int64_t heads) {
    const at::Tensor second = w2.defined() ? repeated_heads(w2, heads) : w2;
    return spectral_features(wide(repeated_heads(x, heads)), repeated_heads(w1, heads),
                             or_none(second))
        .to(is_split ? at::kFloat : at::kHalf);
  };
  return {features(source.query, H), features(source.key, w1.size(-3))};
}

// Computes the part of a key's logit that all rows share, [B, H, S] in float64, -inf where it is
// hidden. For the implicit kernel it has the magnitude, relative to the largest of a head, which no
// weight sees.
inline at::Tensor key_logits(const WeightsSource& source, const ContributionSizes& sizes) {
  const auto [B, H, G, L, S, d_v, D] = sizes;
  at::Tensor mask = or_undefined(source.options.attn_mask), hidden;
  if (mask.defined() && (is_bool(mask) || differs_by_query(mask))) {
    // Keys that no row sees: the largest logit is that of others.
    const at::Tensor shown = is_bool(mask) ? mask : mask != -INFINITY;
    hidden = (shown.dim() >= 2 ? shown.any(-2, true) : shown)
                 .logical_not()
                 .expand({B, H, 1, S})
                 .squeeze(2);
    mask = at::Tensor();
  }
  at::Tensor logits = at::zeros({B, H, S}, source.query.options().dtype(at::kDouble));
  const bool has_magnitude = source.w1.defined() && source.options.p.has_value();
  if (has_magnitude) {
    const double scale =
        magnitude_scale_or_default(source.options.magnitude_scale, source.key.size(3));
    const at::Tensor norms = reference_squared_norm(source.key.to(at::kDouble), *source.options.p);
    logits = logits + repeated_heads(norms * scale, H, -2);
  }
  for (const at::Tensor& term : logit_terms(source, mask, at::kDouble)) {
    // Finite offsets of the implicit kernel are bounded, as in its attention.
    const at::Tensor own = source.w1.defined() ? bounded_offsets(term) : term;
    const at::Tensor by_key = own.expand({B, H, 1, S}).squeeze(2);
    const at::Tensor hides = by_key == -INFINITY;
    hidden = hidden.defined() ? at::logical_or(hidden, hides) : hides;
    logits = logits + by_key;
  }
  if (hidden.defined()) logits = logits.masked_fill(hidden, -INFINITY);
  if (has_magnitude) {
    const at::Tensor known =
        logits.detach().masked_fill(logits.isfinite().logical_not(), -INFINITY);
    const at::Tensor largest = known.amax({-1}, true);
    logits = logits - largest.masked_fill(largest == -INFINITY, 0);
  }
  return logits;
}

// One call: its tensors live until its kernels are queued.
class StreamedPairs {
 public:
  StreamedPairs(const ContributionCall& call, const ContributionSizes& sizes)
      : sizes_(sizes), call_(name_of(call), call.value) {
    const WeightsSource& source = call.source;
    params_.is_implicit = source.w1.defined();
    // Where two features are almost orthogonal a weight changes by more than what their rounding to
    // 11 bits leaves.
    params_.is_split = params_.is_implicit || source.query.scalar_type() == at::kFloat;
    params_.eps = static_cast<float>(source.options.eps);
    params_.is_causal = source.options.is_causal;
    params_.B = sizes.B;
    params_.H = sizes.H;
    params_.L = sizes.L;
    params_.S = sizes.S;
    set_operands(source);
    if (is_present(source.options.attn_mask)) set_mask(*source.options.attn_mask);
    const Block& block = call.block;
    if (block.query_padding.defined()) params_.query_padding = array_of(block.query_padding);
    if (block.key_padding.defined()) params_.key_padding = array_of(block.key_padding);
  }

  // Sets norms[variant] [B, L, S], float32, of every variant that is there.
  void set_variants(const Keys& keys, const std::array<at::Tensor, 3>& norms) {
    for (int variant = 0; variant < 3; ++variant) {
      if (!norms[variant].defined()) continue;
      const at::Tensor units = kept(at::empty({sizes_.B, sizes_.S}, options(at::kFloat)));
      params_.units[params_.variants] = units.const_data_ptr<float>();
      params_.fragments[params_.variants] = fragments_of(keys.factors[variant], units, false);
      params_.norms[params_.variants++] = array_of(norms[variant]);
    }
  }

  // Fills the norms; what the maps need of rows beside them.
  StreamedRows run(const Keys& keys, const Block& block) {
    const auto [B, H, G, L, S, d_v, D] = sizes_;
    StreamedRows result;
    if (needs_own_pairs(block)) {
      result.own = at::zeros({B, H, L}, options(at::kFloat));
      params_.own = result.own.mutable_data_ptr<float>();
      params_.diagonal = block.diagonal;
    }
    call_.check(streamed_kernels.row_sums(params_, call_.stream()));
    if (params_.variants > 0) {
      call_.check(streamed_kernels.pair_norms(params_, call_.stream()));
    }
    if (block.maps[kMixingRatios]) result.others = sum_others(keys.summands);
    // In dot attention hidden own pairs have no weight, but NaN in rows that are NaN.
    if (result.own.defined() && !params_.is_implicit) result.own.add_(rows_.select(-1, 2) * 0);
    return result;
  }

 protected:
  at::TensorOptions options(at::ScalarType type) const { return rows_options_.dtype(type); }
  at::Tensor kept(at::Tensor tensor) {
    tensors_.push_back(tensor);
    return tensor;
  }
  // Makes fragments of factors as FactorParams has them; fills the units [B, S], too.
  const uint32_t* fragments_of(const at::Tensor& factors, const at::Tensor& units,
                               bool is_reversed) {
    const int64_t words = fragment_words(sizes_.H, params_.is_split);
    const at::Tensor fragments = kept(at::empty({sizes_.B, sizes_.S, words}, options(at::kInt)));
    FragmentParams params;
    params.B = sizes_.B;
    params.H = sizes_.H;
    params.S = sizes_.S;
    params.is_split = params_.is_split;
    params.factors = factors.const_data_ptr<float>();
    params.fragments = static_cast<uint32_t*>(fragments.mutable_data_ptr());
    params.units = units.mutable_data_ptr<float>();
    params.is_reversed = is_reversed;
    call_.check(streamed_kernels.factor_fragments(params, call_.stream()));
    return params.fragments;
  }

  ContributionSizes sizes_;
  Call call_;
  StreamedParams params_;
  at::Tensor rows_;            // [B, H, L, kRowNumbers]
  at::Tensor queries_, keys_;  // [B, H, L, *], [B, G, S, *], what scores are products of
  double scale_ = 1;           // scale of scores

 private:
  void set_operands(const WeightsSource& source) {
    const auto [B, H, G, L, S, d_v, D] = sizes_;
    rows_options_ = source.query.options();
    queries_ = source.query;
    keys_ = source.key;
    const auto d = static_cast<double>(source.query.size(3));
    scale_ = source.scale.value_or(1 / std::sqrt(d));
    if (params_.is_implicit) {
      scale_ = 1 / (4 * static_cast<double>(source.w1.size(-1)));
      std::tie(queries_, keys_) = features_of(source, H, params_.is_split);
    }
    const StreamedOperand query = operand_of(queries_, params_.is_split, false);
    const StreamedOperand key = operand_of(keys_, params_.is_split, true);
    params_.G = keys_.size(1);
    params_.width = query.rows.size(3);
    params_.query = array_of(kept(query.rows));
    params_.key = array_of(kept(key.rows));
    rows_ = at::empty({B, H, L, kRowNumbers}, options(at::kFloat));
    rows_.select(-1, 0).fill_(scale_);
    if (query.factor.defined()) rows_.select(-1, 0).mul_(query.factor);
    params_.rows = rows_.mutable_data_ptr<float>();
    const at::Tensor logits = key_logits(source, sizes_), high = logits.to(at::kFloat);
    const at::Tensor low = (logits - high.to(at::kDouble)).to(at::kFloat);
    const at::Tensor rest = at::where(high.isfinite(), low, at::zeros({}, low.options()));
    const at::Tensor factors =
        key.factor.defined() ? repeated_heads(key.factor, H, -2) : at::ones({}, high.options());
    params_.key_numbers =
        kept(at::stack({factors.expand_as(high), high, rest, at::zeros_like(high)}, -1))
            .const_data_ptr<float>();
  }

  at::Tensor sum_others(const Summands& summands) {
    const auto [B, H, G, L, S, d_v, D] = sizes_;
    const at::Tensor others = at::empty({B, H, L, d_v}, options(at::kFloat));
    WeighedValueParams params{params_};
    params.value_heads = G;
    params.d_v = d_v;
    params.values = array_of(summands.value);
    params.broken = kept(summands.broken.contiguous()).const_data_ptr<float>();
    params.sums = others.mutable_data_ptr<float>();
    call_.check(streamed_kernels.weighed_values(params, call_.stream()));
    return others;
  }

  void set_mask(const at::Tensor& mask) {
    const auto [B, H, G, L, S, d_v, D] = sizes_;
    if (!is_bool(mask)) {
      if (!differs_by_query(mask)) return;  // the keys' logits have it
      params_.offsets = array_of(kept(mask.expand({B, H, L, S})));
      if (params_.is_implicit) {
        const at::Tensor lowest =
            at::scalar_tensor(std::numeric_limits<double>::max(), at::kDouble);
        params_.farthest_offset = static_cast<float>(bounded_offsets(lowest).item<double>());
      }
      return;
    }
    const int64_t heads = params_.mask_heads = heads_of(mask);
    const at::Tensor shown = mask.expand({B, heads, L, S}).permute({0, 2, 3, 1});
    const int64_t words = (S + kMaskKeys - 1) / kMaskKeys;
    const at::Tensor bits = kept(at::empty({B, heads, L, words}, options(at::kInt)));
    const MaskParams params{
        B, L, S, array_of(shown), static_cast<uint32_t*>(bits.mutable_data_ptr()), heads};
    call_.check(streamed_kernels.mask_words(params, call_.stream()));
    params_.mask = params.words;
  }

  at::TensorOptions rows_options_;
  std::vector<at::Tensor> tensors_;
};

}  // namespace
}  // namespace ikattn::cuda
