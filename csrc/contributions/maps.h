// The maps on any device, over a Device that has
//   factors(params, keys, sizes), pair_norms(params, like, work)
// where `work` is the number of multiply-adds, and maybe, for weights from query and key,
//   why_in_blocks(call, sizes), streamed_norms(call, keys, sizes, norms)
// which make the norms of all pairs, and StreamedRows, where why_in_blocks() is nullptr.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "contributions/arguments.h"
#include "contributions/operators.h"
#include "contributions/params.h"
#include "contributions/reference.h"
#include "support/glue.h"
#include "support/memory.h"

namespace ikattn {
namespace {

// The inputs of the maps from the keys, once for all queries, in the arithmetic type.
struct Keys {
  at::Tensor value;       // [B, G, S, d_v], zero where padding
  Summands summands;      // of the values, where own pairs are made
  at::Tensor projection;  // [D, H d_v]
  bool value_is_short = false, projection_is_short = false;  // given in 16 bits
  std::array<at::Tensor, 2> weights;                         // [D], of the norms
  // [B, blocks, triangle(H), 64]; variants as in FactorParams, undefined where no map needs them
  std::array<at::Tensor, 3> factors;
  // Whether pairs of given weights follow; on CUDA `fragments` then has the operands of PairParams
  // by variant.
  bool wants_fragments = false;
  std::array<at::Tensor, 3> fragments;
  at::Tensor value_norms;  // [B, H, S]
};

inline bool needs_variant(const Block& block, int variant) {
  switch (variant) {
    case 0:
      return block.maps[kSummed] || block.maps[kWithResidual];
    case 1:
      return block.maps[kWithNorm];
    default:
      return block.maps[kEncoder];
  }
}

// Returns the number of tokens whose vectors f_h(x_j) torch computes at a time: on the CPU about 2
// MiB, read while in cache; on a GPU, where each product is a launch, 128 MiB.
inline int64_t tokens_at_a_time(const ContributionSizes& sizes, const at::Device& device) {
  const int64_t elements = int64_t{1} << (device.is_cpu() ? 19 : 25);
  const int64_t per_token = std::max<int64_t>(1, sizes.B * sizes.H * sizes.D);
  return std::clamp<int64_t>(elements / per_token, 16, std::max<int64_t>(16, sizes.S));
}

// Returns the values of head h and the tokens [j0, j0 + tokens), [B * tokens, d_v].
inline at::Tensor tokens_of(const Keys& keys, const ContributionSizes& sizes, int64_t h, int64_t j0,
                            int64_t tokens) {
  const at::Tensor of_head = keys.value.select(1, h / (sizes.H / sizes.G)).narrow(1, j0, tokens);
  return of_head.reshape({sizes.B * tokens, sizes.d_v});
}

// Computes vectors [B * tokens, D], f_h of the tokens [j0, j0 + tokens).
inline void transform(const Keys& keys, const ContributionSizes& sizes, int64_t h, int64_t j0,
                      int64_t tokens, at::Tensor& vectors) {
  multiply_into(vectors, tokens_of(keys, sizes, h, j0, tokens),
                keys.projection.narrow(1, h * sizes.d_v, sizes.d_v).t(), /*accumulate=*/false);
}

// Returns the keys without factors, value norms and summands.
inline Keys stored_keys(const ContributionCall& call, at::ScalarType type) {
  const Block& block = call.block;
  Keys keys;
  keys.value = call.value.to(type);
  if (block.key_padding.defined()) {
    keys.value = keys.value.masked_fill(block.key_padding.unsqueeze(1).unsqueeze(-1), 0);
  }
  keys.projection = call.out_proj_weight.to(type);
  keys.value_is_short = at::isReducedFloatingType(call.value.scalar_type());
  keys.projection_is_short = at::isReducedFloatingType(call.out_proj_weight.scalar_type());
  for (int n = 0; n < 2 && block.norm_weight[n].defined(); ++n) {
    keys.weights[n] = block.norm_weight[n].to(type).contiguous();
  }
  return keys;
}

template <typename Device>
Keys prepare_keys(const ContributionCall& call, const ContributionSizes& sizes, at::ScalarType type,
                  bool wants_fragments = false) {
  const auto [B, H, G, L, S, d_v, D] = sizes;
  const Block& block = call.block;
  const auto options = call.value.options().dtype(type);
  Keys keys = stored_keys(call, type);
  keys.wants_fragments = wants_fragments;
  FactorParams params;
  params.B = B;
  params.H = H;
  params.S = S;
  params.D = D;
  for (int n = 0; n < 2 && block.norm_weight[n].defined(); ++n) {
    params.norms[n] = {keys.weights[n].const_data_ptr(), block.centered[n]};
  }
  bool needed = block.maps[kValueNorms];
  with_memory_for(name_of(call), "the value norms and factors of the keys", [&] {
    if (needed) {
      keys.value_norms = at::empty({B, H, S}, options);
      params.value_norms = keys.value_norms.mutable_data_ptr();
    }
    const int64_t blocks = (S + kFactorBlock - 1) / kFactorBlock;
    for (int variant = 0; variant < 3; ++variant) {
      if (!needs_variant(block, variant)) continue;
      needed = true;
      const std::array<int64_t, 4> shape = {B, blocks, triangle(H), kFactorBlock};
      keys.factors[variant] =
          S % kFactorBlock == 0 ? at::empty(shape, options) : at::zeros(shape, options);
      params.factors[variant] = keys.factors[variant].mutable_data_ptr();
    }
  });
  if (needed) Device::factors(params, keys, sizes);
  return keys;
}

// Sets the padding, and factors and norms[variant] [B, rows, S] of every variant that is defined.
inline void set_variants(PairParams& params, const Keys& keys, const Block& block,
                         const std::array<at::Tensor, 3>& norms) {
  if (block.query_padding.defined()) params.query_padding = array_of(block.query_padding);
  if (block.key_padding.defined()) params.key_padding = array_of(block.key_padding);
  for (int variant = 0; variant < 3; ++variant) {
    if (!norms[variant].defined()) continue;
    params.factors[params.variants] = keys.factors[variant].const_data_ptr();
    if (keys.fragments[variant].defined()) {
      params.fragments[params.variants] = keys.fragments[variant].const_data_ptr();
    }
    params.norms[params.variants++] = array_of(norms[variant]);
  }
}

inline void set_pairs(PairParams& params, const at::Tensor& weights, const Keys& keys,
                      const Block& block, const std::array<at::Tensor, 3>& norms) {
  params.B = weights.size(0);
  params.H = weights.size(1);
  params.rows = weights.size(2);
  params.S = weights.size(3);
  params.weights = array_of(weights);
  set_variants(params, keys, block, norms);
}

// Returns the multiply-adds of the norms.
inline double pair_work(const PairParams& params) {
  return static_cast<double>(params.B * params.rows) *
         static_cast<double>(params.S * triangle(params.H) * params.variants);
}

template <typename Device>
void pair_norms(const at::Tensor& weights, const Keys& keys, const Block& block,
                const std::array<at::Tensor, 3>& norms) {
  PairParams params;
  set_pairs(params, weights, keys, block, norms);
  if (params.variants > 0) Device::pair_norms(params, keys.value, pair_work(params));
}

// --- A query's own pair, and the sum over the others: vectors [B, rows, D]

// Returns [B, H, rows, *] as [B, G, H / G * rows, *], with the rows of the same value head
// together.
inline at::Tensor by_value_head(const at::Tensor& heads, int64_t G) {
  return heads.reshape({heads.size(0), G, heads.size(1) / G * heads.size(2), heads.size(3)});
}

inline Summands values_to_weigh(const Keys& keys) {
  // Reading the numbers on the CPU costs less than always handling rare NaN.
  const bool sound = keys.value.is_cpu() && std::isfinite(keys.value.sum().item<double>());
  return sound ? Summands{keys.value, {}} : summands_of(keys.value);
}

// own_weights [B, H, rows]
inline at::Tensor own_vectors(const at::Tensor& own_weights, const Keys& keys, const Block& block) {
  const at::Tensor own = own_weights.to(keys.value.scalar_type());
  const Summands values = part_of(keys.summands, block.diagonal, own.size(2), own.size(1));
  return project(weighed(own, values), keys.projection, kArithmetic);
}

inline at::Tensor other_vectors(const at::Tensor& weights, const Keys& keys, const Block& block) {
  const int64_t G = keys.value.size(1), H = weights.size(1), rows = weights.size(2);
  at::Tensor others = at::empty(weights.sizes(), keys.value.options()).copy_(weights);
  others.diagonal(block.diagonal, 2, 3).zero_();
  if (block.key_padding.defined()) {
    others.masked_fill_(block.key_padding.unsqueeze(1).unsqueeze(1), 0);
  }
  const at::Tensor heads = sum_of_weighed(by_value_head(others, G), keys.summands, kArithmetic);
  return project(heads.view({weights.size(0), H, rows, keys.value.size(3)}), keys.projection,
                 kArithmetic);
}

inline void apply_norm_(at::Tensor& vectors, const at::Tensor& weight, bool centered) {
  if (centered) vectors.sub_(vectors.mean(-1, true));
  vectors.mul_(weight);
}

inline at::Tensor ratio_of(const at::Tensor& own, const at::Tensor& others) {
  const at::Tensor sum = own + others;
  return (others / sum).masked_fill_(sum == 0, 0);
}

// Returns norms in float64, for squares may leave the range of float32.
inline at::Tensor norms_of(const at::Tensor& vectors, const at::Tensor& padding) {
  at::Tensor norms = at::linalg_vector_norm(vectors, 2, at::IntArrayRef{-1}, false, at::kDouble);
  if (padding.defined()) norms.masked_fill_(padding, 0);
  return norms;
}

// Computes the maps' own pairs and the mixing ratios of some rows. maps: [B, rows, S], ratios [4,
// B, rows].
//   own_weights [B, H, rows]
//   others [B, rows, D], overwritten: sums over the other pairs; undefined without mixing ratios
inline void own_pairs(const at::Tensor& own_weights, at::Tensor others, const Keys& keys,
                      const Block& block, const MapTensors& maps) {
  const at::Tensor padding = own_padding(block, own_weights.size(2));
  const std::array<at::Tensor, 3> scales = pair_scales(block, keys.value.scalar_type());
  at::Tensor own = own_vectors(own_weights, keys, block);
  const auto finish = [&](Map map, int variant) {
    at::Tensor norms = norms_of(own, padding);
    if (others.defined()) {
      maps[kMixingRatios]
          .select(0, map - kSummed)
          .copy_(ratio_of(norms, norms_of(others, block.query_padding)));
    }
    if (map == kSummed || !block.maps[map]) return;
    if (const at::Tensor& scale = scales[variant]; scale.defined()) {
      maps[map].div_(scale.unsqueeze(-1));
      norms.div_(scale);
    }
    maps[map].diagonal(block.diagonal, 1, 2).copy_(norms);
  };
  finish(kSummed, 0);
  if (!block.residual.defined()) return;
  own.add_(block.residual);
  finish(kWithResidual, 0);
  for (int n = 0; n < 2 && block.norm_weight[n].defined(); ++n) {
    apply_norm_(own, keys.weights[n], block.centered[n]);
    if (others.defined()) apply_norm_(others, keys.weights[n], block.centered[n]);
    finish(n == 0 ? kWithNorm : kEncoder, n + 1);
  }
}

// The inputs of maps from streamed weights beside norms; undefined where not needed.
struct StreamedRows {
  at::Tensor own;     // [B, H, L], weights of each query for its own key
  at::Tensor others;  // [B, H, L, d_v], sums over the values of all other keys
};

template <typename Device>
concept StreamsPairs = requires(const ContributionCall& call, const ContributionSizes& sizes) {
  Device::why_in_blocks(call, sizes);
};

// Returns the norms of every variant that the maps want; a map through no norm has those of the
// first.
inline std::array<at::Tensor, 3> norms_in(const MapTensors& maps) {
  const at::Tensor& first = maps[kSummed].defined() ? maps[kSummed] : maps[kWithResidual];
  return {first, maps[kWithNorm], maps[kEncoder]};
}

// Copies norms to the maps that share them.
inline void copy_norms(const MapTensors& maps) {
  if (maps[kSummed].defined() && maps[kWithResidual].defined()) {
    maps[kWithResidual].copy_(maps[kSummed]);
  }
}

template <typename Device>
MapTensors contribution_maps_of(const ContributionCall& call) {
  const ExactArithmetic exact;
  const ContributionSizes sizes = check_contributions(call);
  const Block& block = call.block;
  const bool needs_own = needs_own_pairs(block);
  bool is_streamed = false;
  if constexpr (StreamsPairs<Device>) is_streamed = Device::why_in_blocks(call, sizes) == nullptr;
  Keys keys = prepare_keys<Device>(call, sizes, arithmetic_type(call), !is_streamed);
  MapTensors maps;
  maps[kValueNorms] = keys.value_norms;
  if (std::none_of(block.maps.begin() + kSummed, block.maps.end(), std::identity())) return maps;
  if (needs_own) keys.summands = values_to_weigh(keys);
  const auto options = call.value.options().dtype(arithmetic_type(call));
  with_memory_for(name_of(call), "the maps", [&] {
    for (int map = kSummed; map < kMixingRatios; ++map) {
      if (block.maps[map]) maps[map] = at::empty({sizes.B, sizes.L, sizes.S}, options);
    }
    if (block.maps[kMixingRatios]) maps[kMixingRatios] = at::zeros({4, sizes.B, sizes.L}, options);
  });

  if constexpr (StreamsPairs<Device>) {
    if (is_streamed) {
      const StreamedRows rows = Device::streamed_norms(call, keys, sizes, norms_in(maps));
      copy_norms(maps);
      at::Tensor others = rows.others;
      if (others.defined()) others = project(others, keys.projection, kArithmetic);
      if (needs_own) own_pairs(rows.own, others, keys, block, maps);
      return maps;
    }
  }
  const bool at_once = call.source.attn_weights.defined() && !needs_own;
  const int64_t step =
      at_once ? std::max<int64_t>(1, sizes.L) : rows_at_a_time(sizes, call.value.device());
  for (int64_t i0 = 0; i0 < sizes.L; i0 += step) {
    const int64_t rows = std::min(step, sizes.L - i0);
    const ContributionCall round = rows_of(call, i0, rows);
    const at::Tensor weights = weights_of(round, kArithmetic);
    MapTensors part = maps;
    for (int map = kSummed; map < kMaps; ++map) {
      if (part[map].defined()) part[map] = part[map].narrow(map == kMixingRatios ? 2 : 1, i0, rows);
    }
    pair_norms<Device>(weights, keys, round.block, norms_in(part));
    copy_norms(part);
    if (!needs_own) continue;
    own_pairs(weights.diagonal(round.block.diagonal, 2, 3),
              block.maps[kMixingRatios] ? other_vectors(weights, keys, round.block) : at::Tensor(),
              keys, round.block, part);
  }
  return maps;
}

}  // namespace
}  // namespace ikattn
