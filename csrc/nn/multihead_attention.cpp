// ikattn::nn::MultiheadAttention.
//
// A call goes the way of torch_ext/ikattn/nn/multihead_attention.py: check and project -> append
// learned and zero keys -> attention of the chosen kernel on [N, H, L, d] -> out_proj.
#include "ikattn/multihead_attention.h"

#include <torch/nn/init.h>

#include <cmath>
#include <limits>
#include <vector>

#include "nn/attend.h"
#include "support/checks.h"

namespace ikattn::nn {
namespace {

using at::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

const char* name_of(Kernel kernel) {
  switch (kernel) {
    case Kernel::kDot:
      return "dot";
    case Kernel::kRbf:
      return "rbf";
    case Kernel::kImplicit:
      return "implicit";
  }
  return "unknown";
}

// --- Checks

void check_options(const MultiheadAttentionOptions& options) {
  TORCH_CHECK_VALUE(options.embed_dim() > 0 && options.num_heads() > 0,
                    "MultiheadAttention: embed_dim and num_heads must be positive, got ",
                    options.embed_dim(), " and ", options.num_heads());
  TORCH_CHECK_VALUE(options.embed_dim() % options.num_heads() == 0,
                    "MultiheadAttention: embed_dim must be divisible by num_heads, got ",
                    options.embed_dim(), " and ", options.num_heads());
  TORCH_CHECK_VALUE(options.kdim() > 0 && options.vdim() > 0,
                    "MultiheadAttention: kdim and vdim must be positive, got ", options.kdim(),
                    " and ", options.vdim());
  const auto p = options.p();
  TORCH_CHECK_VALUE(!p.has_value() || (*p >= 1 && *p < kInfinity),
                    "MultiheadAttention: p must be a real number >= 1, or nullopt for no "
                    "magnitude, got ",
                    p.value_or(0));
}

void check_mask_type(const char* name, const Tensor& mask) {
  TORCH_CHECK_TYPE(!mask.defined() || mask.scalar_type() == at::kBool || mask.is_floating_point(),
                   "MultiheadAttention: ", name, " must be bool or floating point, got ",
                   mask.scalar_type());
}

struct Inputs {
  Tensor query, key, value;   // batched, in the module's order of axes
  Tensor padding, attention;  // key_padding_mask [N, S] and attn_mask as it came, or undefined
  bool is_batched;
};

// Checks axes, sizes and mask types; sizes of the masks are checked later, where N, L and S are
// known.
Inputs check_inputs(const MultiheadAttentionOptions& options, const Tensor& query,
                    const Tensor& key, const Tensor& value, const Tensor& key_padding_mask,
                    const Tensor& attn_mask) {
  TORCH_CHECK(query.defined() && key.defined() && value.defined(),
              "MultiheadAttention: query, key and value must be defined tensors");
  TORCH_CHECK(query.dim() == 2 || query.dim() == 3,
              "MultiheadAttention: query must have 2 axes (unbatched) or 3, got ", query.sizes());
  const bool is_batched = query.dim() == 3;
  const struct {
    const char* name;
    const Tensor& tensor;
    int64_t size;
  } sized[] = {{"query", query, options.embed_dim()},
               {"key", key, options.kdim()},
               {"value", value, options.vdim()}};
  for (const auto& [name, tensor, size] : sized) {
    TORCH_CHECK(tensor.dim() == query.dim(), "MultiheadAttention: ", name, " must have ",
                query.dim(), " axes, as query, got ", tensor.sizes());
    TORCH_CHECK(tensor.size(-1) == size, "MultiheadAttention: the last axis of ", name,
                " must have size ", size, ", got ", tensor.sizes());
  }
  const auto tokens = key.sizes().slice(0, key.dim() - 1);
  TORCH_CHECK(value.sizes().slice(0, value.dim() - 1) == tokens, "MultiheadAttention: value must ",
              "have the tokens of key, ", tokens, ", got ", value.sizes());
  const int64_t batch_axis = options.batch_first() ? 0 : 1;
  TORCH_CHECK(!is_batched || key.size(batch_axis) == query.size(batch_axis),
              "MultiheadAttention: key must have the batch size of query, ", query.size(batch_axis),
              ", got ", key.sizes());
  check_mask_type("key_padding_mask", key_padding_mask);
  check_mask_type("attn_mask", attn_mask);
  if (is_batched) return {query, key, value, key_padding_mask, attn_mask, true};
  return {query.unsqueeze(batch_axis),
          key.unsqueeze(batch_axis),
          value.unsqueeze(batch_axis),
          key_padding_mask.defined() ? key_padding_mask.unsqueeze(0) : Tensor(),
          attn_mask,
          false};
}

Masks check_masks(const Tensor& padding, const Tensor& attention, const Tensor& q,
                  const Tensor& k) {
  const int64_t N = q.size(0), H = q.size(1), L = q.size(2), S = k.size(2);
  TORCH_CHECK(!padding.defined() || padding.sizes() == at::IntArrayRef({N, S}),
              "MultiheadAttention: key_padding_mask must have shape [N, S] = [", N, ", ", S,
              "], or [S] with unbatched input, got ", padding.sizes());
  if (!attention.defined()) return {padding, attention, false};
  const bool per_head = attention.dim() == 3;
  TORCH_CHECK(
      attention.sizes() == (per_head ? at::IntArrayRef({N * H, L, S}) : at::IntArrayRef({L, S})),
      "MultiheadAttention: attn_mask must have shape [L, S] = [", L, ", ", S,
      "] or [N * H, L, S] = [", N * H, ", ", L, ", ", S, "], got ", attention.sizes());
  return {padding, attention.view({per_head ? N : 1, per_head ? H : 1, L, S}), false};
}

// --- Projections

// Splits [N, S, E] or [S, N, E] into heads [N, H, S, d].
Tensor split_heads(const Tensor& x, int64_t num_heads, bool batch_first) {
  const auto heads = x.unflatten(-1, {num_heads, x.size(-1) / num_heads});
  return batch_first ? heads.permute({0, 2, 1, 3}) : heads.permute({1, 2, 0, 3});
}

Tensor merge_heads(const Tensor& x, bool batch_first) {
  return (batch_first ? x.permute({0, 2, 1, 3}) : x.permute({2, 0, 1, 3})).flatten(2);
}

Heads project(const MultiheadAttentionImpl& module, const Inputs& in) {
  const auto& options = module.options;
  std::vector<Tensor> weights{module.q_proj_weight, module.k_proj_weight, module.v_proj_weight};
  std::vector<Tensor> biases(3);
  if (module._qkv_same_embed_dim) weights = module.in_proj_weight.chunk(3);
  if (module.in_proj_bias.defined()) biases = module.in_proj_bias.chunk(3);

  std::vector<Tensor> projected;
  if (module._qkv_same_embed_dim && in.query.is_same(in.key) && in.key.is_same(in.value)) {
    // self-attention: one product in place of three
    projected =
        at::linear(in.query, module.in_proj_weight, or_none(module.in_proj_bias)).chunk(3, -1);
  } else {
    const Tensor* inputs[] = {&in.query, &in.key, &in.value};
    for (int i = 0; i < 3; ++i) {
      projected.push_back(at::linear(*inputs[i], weights[i], or_none(biases[i])));
    }
  }
  for (auto& x : projected) x = split_heads(x, options.num_heads(), options.batch_first());
  return {projected[0], projected[1], projected[2]};
}

// Appends bias_k and bias_v, then zeros, to keys and values; every query sees them.
void append_keys(const MultiheadAttentionImpl& module, Heads& heads, Masks& masks) {
  const int64_t before = heads.key.size(2);
  if (module.bias_k.defined()) {
    const auto append = [&](const Tensor& x, const Tensor& bias) {
      const auto token = bias.view({1, x.size(1), 1, x.size(3)}).expand({x.size(0), -1, -1, -1});
      return at::cat({x, token}, 2);
    };
    heads.key = append(heads.key, module.bias_k);
    heads.value = append(heads.value, module.bias_v);
  }
  if (module.options.add_zero_attn()) {
    heads.key = at::constant_pad_nd(heads.key, {0, 0, 0, 1});
    heads.value = at::constant_pad_nd(heads.value, {0, 0, 0, 1});
  }
  const int64_t count = heads.key.size(2) - before;
  if (count == 0) return;
  if (masks.padding.defined()) masks.padding = at::constant_pad_nd(masks.padding, {0, count});
  if (masks.attention.defined()) masks.attention = at::constant_pad_nd(masks.attention, {0, count});
}

// Tells whether is_causal can replace attn_mask, so that the mask need not be read.
bool can_use_causal_hint(const MultiheadAttentionImpl& module, const Tensor& padding,
                         bool need_weights) {
  const auto& options = module.options;
  if (options.kernel() == Kernel::kImplicit) {
    // appended keys come last, where causality would hide them
    return !options.add_bias_kv() && !options.add_zero_attn();
  }
  // scaled_dot_product_attention takes no bias together with is_causal
  if (options.kernel() == Kernel::kRbf && options.p() != 2.0) return false;
  return !padding.defined() && !need_weights;
}

}  // namespace

// --- Options and frequencies

MultiheadAttentionOptions::MultiheadAttentionOptions(int64_t embed_dim, int64_t num_heads)
    : embed_dim_(embed_dim), num_heads_(num_heads), kdim_(embed_dim), vdim_(embed_dim) {}

DirectSpectralImpl::DirectSpectralImpl(int64_t num_heads, int64_t head_dim, int64_t num_frequencies,
                                       bool stationary)
    : num_heads(num_heads),
      head_dim(head_dim),
      num_frequencies(num_frequencies),
      stationary(stationary) {
  TORCH_CHECK_VALUE(num_frequencies >= 1,
                    "MultiheadAttention: num_frequencies must be at least 1, got ",
                    num_frequencies);
  reset();
}

void DirectSpectralImpl::reset() {
  const int64_t size = num_heads * head_dim * num_frequencies;
  w1 = register_parameter("w1", at::empty(size));
  w2 = register_parameter("w2", stationary ? Tensor() : at::empty(size), !stationary);
  reset_parameters();
}

void DirectSpectralImpl::reset_parameters() {
  const torch::NoGradGuard no_grad;
  const double bound = 1 / std::sqrt(static_cast<double>(num_heads * num_frequencies));
  w1.uniform_(-bound, bound);
  if (w2.defined()) w2.uniform_(-bound, bound);
}

std::pair<Tensor, std::optional<Tensor>> DirectSpectralImpl::frequencies() const {
  const auto shaped = [this](const Tensor& w) {
    return w.view({num_heads, head_dim, num_frequencies});
  };
  return {shaped(w1), w2.defined() ? std::optional(shaped(w2)) : std::nullopt};
}

// --- The module

MultiheadAttentionImpl::MultiheadAttentionImpl(const MultiheadAttentionOptions& options)
    : Cloneable("ikattn::nn::MultiheadAttention"), options(options) {
  reset();
}

void MultiheadAttentionImpl::reset() {
  check_options(options);
  const int64_t E = options.embed_dim();
  head_dim = E / options.num_heads();
  _qkv_same_embed_dim = options.kdim() == E && options.vdim() == E;
  const auto parameter = [this](const char* name, bool present, at::IntArrayRef sizes) {
    return register_parameter(name, present ? at::empty(sizes) : Tensor(), present);
  };
  in_proj_weight = parameter("in_proj_weight", _qkv_same_embed_dim, {3 * E, E});
  q_proj_weight = parameter("q_proj_weight", !_qkv_same_embed_dim, {E, E});
  k_proj_weight = parameter("k_proj_weight", !_qkv_same_embed_dim, {E, options.kdim()});
  v_proj_weight = parameter("v_proj_weight", !_qkv_same_embed_dim, {E, options.vdim()});
  in_proj_bias = parameter("in_proj_bias", options.bias(), {3 * E});
  out_proj = register_module(
      "out_proj", torch::nn::Linear(torch::nn::LinearOptions(E, E).bias(options.bias())));
  bias_k = parameter("bias_k", options.add_bias_kv(), {1, 1, E});
  bias_v = parameter("bias_v", options.add_bias_kv(), {1, 1, E});
  spectral = nullptr;
  _reset_parameters();
  // Frequencies are drawn last, so that the same seed gives all other parameters the values of
  // upstream.
  if (options.kernel() == Kernel::kImplicit) {
    spectral = register_module(
        "spectral", DirectSpectral(options.num_heads(), head_dim, options.num_frequencies(),
                                   options.stationary()));
  }
}

void MultiheadAttentionImpl::reset_parameters() {
  out_proj->reset_parameters();
  _reset_parameters();
}

void MultiheadAttentionImpl::_reset_parameters() {
  for (auto* weight : {&in_proj_weight, &q_proj_weight, &k_proj_weight, &v_proj_weight}) {
    if (weight->defined()) torch::nn::init::xavier_uniform_(*weight);
  }
  if (in_proj_bias.defined()) {
    torch::nn::init::constant_(in_proj_bias, 0);
    torch::nn::init::constant_(out_proj->bias, 0);
  }
  if (bias_k.defined()) {
    torch::nn::init::xavier_normal_(bias_k);
    torch::nn::init::xavier_normal_(bias_v);
  }
  if (spectral) spectral->reset_parameters();
}

void MultiheadAttentionImpl::pretty_print(std::ostream& stream) const {
  stream << "ikattn::nn::MultiheadAttention(embed_dim=" << options.embed_dim()
         << ", num_heads=" << options.num_heads() << ", kernel=" << name_of(options.kernel())
         << ')';
}

std::tuple<Tensor, Tensor> MultiheadAttentionImpl::forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_padding_mask,
    bool need_weights, const Tensor& attn_mask, bool average_attn_weights, bool is_causal) {
  const auto in = check_inputs(options, query, key, value, key_padding_mask, attn_mask);
  TORCH_CHECK(!is_causal || attn_mask.defined(),
              "MultiheadAttention: is_causal is a hint about attn_mask, which must be given too");

  auto heads = project(*this, in);
  auto masks = check_masks(in.padding, in.attention, heads.query, heads.key);
  if (is_causal && can_use_causal_hint(*this, in.padding, need_weights)) {
    masks.attention = Tensor();
    masks.is_causal = true;
  }
  append_keys(*this, heads, masks);

  const Wanted wanted{need_weights, average_attn_weights, is_training() ? options.dropout() : 0.0};
  auto [output, weights] = options.kernel() == Kernel::kImplicit
                               ? attend_implicit(*this, heads, masks, query.scalar_type(), wanted)
                               : attend_softmax(options, heads, masks, query.scalar_type(), wanted);
  output = out_proj(merge_heads(output, options.batch_first()));

  if (!in.is_batched) {
    output = output.squeeze(options.batch_first() ? 0 : 1);
    if (weights.defined()) weights = weights.squeeze(0);
  }
  return {output, weights};
}

}  // namespace ikattn::nn
