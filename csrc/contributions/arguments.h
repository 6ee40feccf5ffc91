// The arguments of the contribution operators inside the library, and their checks.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

#include "attention/operator/arguments.h"
#include "ikattn/contributions.h"
#include "support/checks.h"

// struct Block, spelled out for the dispatcher, in the order of the schema.
#define IKATTN_BLOCK_PARAMETERS                                                                   \
  const std::optional<at::Tensor>&residual, const std::optional<at::Tensor>&norm_weight,          \
      const std::optional<at::Tensor>&norm_scale, bool norm_centered,                             \
      const std::optional<at::Tensor>&second_norm_weight,                                         \
      const std::optional<at::Tensor>&second_norm_scale, bool second_norm_centered,               \
      const std::optional<at::Tensor>&query_padding, const std::optional<at::Tensor>&key_padding, \
      int64_t diagonal, std::array<bool, 6> maps
#define IKATTN_BLOCK_VALUES                                                              \
  or_undefined(residual), {or_undefined(norm_weight), or_undefined(second_norm_weight)}, \
      {or_undefined(norm_scale), or_undefined(second_norm_scale)},                       \
      {norm_centered, second_norm_centered}, or_undefined(query_padding),                \
      or_undefined(key_padding), diagonal, maps
#define IKATTN_BLOCK_FIELDS(block)                                                            \
  or_none((block).residual), or_none((block).norm_weight[0]), or_none((block).norm_scale[0]), \
      (block).centered[0], or_none((block).norm_weight[1]), or_none((block).norm_scale[1]),   \
      (block).centered[1], or_none((block).query_padding), or_none((block).key_padding),      \
      (block).diagonal, (block).maps

namespace ikattn {

// The results of the operators, in order.
enum Map { kValueNorms, kSummed, kWithResidual, kWithNorm, kEncoder, kMixingRatios };
constexpr int kMaps = 6;
using MapTensors = std::array<at::Tensor, kMaps>;
using MapTuple = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// The block around the attention. Absent tensors are undefined.
struct Block {
  at::Tensor residual;                    // [B, L, D]
  std::array<at::Tensor, 2> norm_weight;  // [D], of the first and the second norm
  std::array<at::Tensor, 2> norm_scale;   // [B, L]
  std::array<bool, 2> centered = {true, true};
  at::Tensor query_padding, key_padding;  // bool [B, L], [B, S]
  int64_t diagonal = 0;
  std::array<bool, kMaps> maps{};  // which are wanted
};

// Tells whether a map treats a query's own pair apart from the others.
inline bool needs_own_pairs(const Block& block) {
  return block.residual.defined() || block.maps[kMixingRatios];
}

// The source of the weights: given, or from query and key.
struct WeightsSource {
  at::Tensor attn_weights;  // [B, H, L, S]; undefined: from the rest
  at::Tensor query, key, w1, w2;
  AttentionOptions options;
  std::optional<double> scale;
  int64_t first_row = 0;  // where query is some rows of a longer one
};

struct ContributionCall {
  WeightsSource source;
  at::Tensor value;            // [B, G, S, d_v]
  at::Tensor out_proj_weight;  // [D, H d_v]
  Block block;
};

// The differentiable inputs of a call, in the order of its gradients: attn_weights; query, key, w1,
// w2, key_bias, attn_mask; value, out_proj_weight; residual, weight and scale of both norms.
constexpr size_t kContributionInputs = 14;
std::array<at::Tensor*, kContributionInputs> differentiable_inputs(ContributionCall& call);

struct ContributionSizes {
  int64_t B, H, G, L, S, d_v, D;
};

// Returns the name of the public function of such a call.
const char* name_of(const ContributionCall& call);

// Checks a call. Errors name the argument, what was expected and what was given.
ContributionSizes check_contributions(const ContributionCall& call);
constexpr const char* kMapsBackward = "contribution_maps_backward";
// Checks a call of the backward operator by a user; calls by autograd are valid.
ContributionSizes check_contributions_backward(const MapTensors& grad_maps,
                                               const ContributionCall& call);
// Checks layout and device only; see support/checks.h.
void check_placement(const ContributionCall& call);

using ContributionMapsSignature = MapTuple(const at::Tensor& attn_weights, const at::Tensor& value,
                                           const at::Tensor& out_proj_weight,
                                           IKATTN_BLOCK_PARAMETERS);
using StreamedMapsSignature = MapTuple(const at::Tensor& query, const at::Tensor& key,
                                       const at::Tensor& value, const at::Tensor& out_proj_weight,
                                       const std::optional<at::Tensor>& w1,
                                       const std::optional<at::Tensor>& w2,
                                       IKATTN_OPTION_PARAMETERS, std::optional<double> scale,
                                       IKATTN_BLOCK_PARAMETERS);
using MapsBackwardSignature = std::vector<at::Tensor>(
    const c10::List<std::optional<at::Tensor>>& grad_maps,
    const c10::List<std::optional<at::Tensor>>& inputs, std::optional<double> p, bool is_causal,
    bool enable_gqa, double eps, std::optional<double> magnitude_scale, std::optional<double> scale,
    bool norm_centered, bool second_norm_centered, int64_t diagonal, std::array<bool, kMaps> maps,
    std::array<bool, kContributionInputs> wanted);

// Call the operators through the dispatcher.
MapTensors call_contribution_maps(const ContributionCall& call);
std::array<at::Tensor, kContributionInputs> call_contribution_maps_backward(
    const MapTensors& grad_maps, const ContributionCall& call,
    std::array<bool, kContributionInputs> wanted);

}  // namespace ikattn
