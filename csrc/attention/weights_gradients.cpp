#include "attention/weights_gradients.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

#include "attention/reference.h"

namespace ikattn {
namespace {

// The part of a tensor that serves query head h of H, head axis kept; axis counted from the end.
at::Tensor head_slice(const at::Tensor& tensor, int64_t axis, int64_t h, int64_t H) {
  if (tensor.dim() < -axis || tensor.size(axis) == 1) return tensor;
  return tensor.narrow(axis, h * tensor.size(axis) / H, 1);
}

// The part that serves some queries, of a tensor with an axis for them, before the last one.
at::Tensor row_slice(const at::Tensor& tensor, int64_t first, int64_t count) {
  if (tensor.dim() < 2 || tensor.size(-2) == 1) return tensor;
  return tensor.narrow(-2, first, count);
}

// Queries whose weights are made together: of about 2^19 pairs, and worth the features of the keys.
int64_t rows_together(int64_t B, int64_t S) {
  return std::max<int64_t>(64, (int64_t{1} << 19) / std::max<int64_t>(1, B * S));
}

using WeightsTensors = std::array<at::Tensor, kWeightsGradients>;

// Some queries of one of H heads.
struct WeightsPart {
  int64_t h, H, first, count;

  // What serves it of the input with this number, or of its gradient.
  at::Tensor of(const at::Tensor& tensor, int input) const {
    constexpr std::array<int64_t, kWeightsGradients> kHeadAxis = {-3, -3, -3, -3, -2, -3};
    const at::Tensor of_head = head_slice(tensor, kHeadAxis[input], h, H);
    const bool has_rows = input == 0 || input == 5;  // query, attn_mask
    return has_rows ? row_slice(of_head, first, count) : of_head;
  }
  // The same of weights, [B, 1 or H, L, S] or undefined.
  at::Tensor of_weights(const at::Tensor& weights) const {
    if (!weights.defined()) return weights;
    return head_slice(weights, -3, h, H).narrow(2, first, count);
  }
};

// grad [B, 1, count, S] is that of the part's weights; keep is undefined without dropout.
void add_part_gradients(const WeightsPart& part, const WeightsTensors& inputs,
                        const AttentionOptions& options, const at::Tensor& keep,
                        const at::Tensor& grad, const std::array<bool, kWeightsGradients>& wanted,
                        const WeightsTensors& gradients) {
  // Autograd on, also where this is called from below it.
  const c10::InferenceMode ordinary_mode(false);
  WeightsTensors own;
  std::vector<at::Tensor> sources;
  for (int i = 0; i < kWeightsGradients; ++i) {
    if (!inputs[i].defined()) continue;
    own[i] = part.of(inputs[i].detach(), i);
    if (own[i].is_floating_point()) {
      own[i] = own[i].to(compute_type(own[i].scalar_type()));  // what is summed over parts
    }
    if (wanted[i]) sources.push_back(own[i] = own[i].clone().requires_grad_());
  }
  AttentionOptions part_options = options;
  if (own[4].defined()) part_options.key_bias = own[4];
  if (own[5].defined()) part_options.attn_mask = own[5];
  const at::Tensor weights = reference_weights(own[0], own[1], own[2], or_none(own[3]),
                                               part_options, false, keep, part.first);
  // What comes in where nothing is seen may be anything.
  const at::Tensor counted = grad.to(weights.dtype()).masked_fill(weights == 0, 0);
  const auto found = torch::autograd::grad({weights}, sources, {counted});
  size_t next = 0;
  for (int i = 0; i < kWeightsGradients; ++i) {
    if (wanted[i]) part.of(gradients[i], i).add_(found[next++].detach());
  }
}

}  // namespace

WeightsGradients weights_gradients_by_part(const at::Tensor& grad_weights, const at::Tensor& query,
                                           const at::Tensor& key, const at::Tensor& w1,
                                           const std::optional<at::Tensor>& w2,
                                           const AttentionOptions& options, bool average_heads,
                                           std::array<bool, kWeightsGradients> wanted) {
  const int64_t H = query.size(1), L = query.size(2);
  const WeightsTensors inputs = {query,
                                 key,
                                 w1,
                                 or_undefined(w2),
                                 or_undefined(options.key_bias),
                                 or_undefined(options.attn_mask)};
  WeightsTensors gradients;
  for (int i = 0; i < kWeightsGradients; ++i) {
    gradients[i] = at::empty({0}, query.options());
    if (!wanted[i]) continue;
    // query and key keep their layout, the others are contiguous, as in the attention's backward
    const auto layout = i < 2 ? at::MemoryFormat::Preserve : at::MemoryFormat::Contiguous;
    const auto type = compute_type(inputs[i].scalar_type());
    gradients[i] = at::zeros_like(inputs[i], inputs[i].options().dtype(type).memory_format(layout));
  }
  at::Tensor keep;
  const bool any = std::any_of(wanted.begin(), wanted.end(), [](bool want) { return want; });
  if (any && options.dropout_p > 0) {
    keep = call_dropout_keep_mask(*options.dropout_seed, query.size(0), H, L, key.size(2),
                                  options.dropout_p);
  }
  const at::Tensor grad =
      average_heads ? (grad_weights * (1.0 / static_cast<double>(H))).unsqueeze(1) : grad_weights;

  const int64_t together = rows_together(query.size(0), key.size(2));
  for (int64_t h = 0; any && h < H; ++h) {
    for (int64_t first = 0; first < L; first += together) {
      const WeightsPart part{h, H, first, std::min(together, L - first)};
      add_part_gradients(part, inputs, options, part.of_weights(keep), part.of_weights(grad),
                         wanted, gradients);
    }
  }
  for (int i = 0; i < kWeightsGradients; ++i) {
    if (wanted[i]) gradients[i] = gradients[i].to(inputs[i].scalar_type());
  }
  return {gradients[0], gradients[1], gradients[2], gradients[3], gradients[4], gradients[5]};
}

}  // namespace ikattn
