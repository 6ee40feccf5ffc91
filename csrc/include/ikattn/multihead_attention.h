// The LibTorch module: torch::nn::MultiheadAttention with a choice of kernel.
//
//   ikattn::nn::MultiheadAttention attention(
//       ikattn::nn::MultiheadAttentionOptions(64, 8).batch_first(true).num_frequencies(32));
//   ikattn::nn::load_state_dict(*attention, "attention.pt");
//   auto [output, weights] = attention(x, x, x, key_padding_mask);
//
// Counterpart of ikattn.MultiheadAttention in Python, with the same state names and numbers.
// Sizes: N batch, L queries, S keys, E model size, H heads, d = E / H head size, M frequencies.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/container/any_value.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

namespace ikattn::nn {

// How a query and a key make a weight.
enum class Kernel {
  kDot,      // softmax attention, equal to torch::nn::MultiheadAttention
  kRbf,      // the same with the 2-norm in a key's magnitude exchanged for the p-norm
  kImplicit  // learned through its spectral density
};

// The options of torch::nn::MultiheadAttentionOptions, then those of Python's constructor.
struct MultiheadAttentionOptions {
  MultiheadAttentionOptions(int64_t embed_dim, int64_t num_heads);

  // E, the model size.
  TORCH_ARG(int64_t, embed_dim);
  // H.
  TORCH_ARG(int64_t, num_heads);
  // Probability on the normalised attention weights, in training.
  TORCH_ARG(double, dropout) = 0.0;
  // Whether the projections have biases.
  TORCH_ARG(bool, bias) = true;
  // Append a learned key and value to every sequence.
  TORCH_ARG(bool, add_bias_kv) = false;
  // Append a zero key and value to every sequence.
  TORCH_ARG(bool, add_zero_attn) = false;
  // Size of the keys; E by default.
  TORCH_ARG(int64_t, kdim);
  // Size of the values; E by default.
  TORCH_ARG(int64_t, vdim);
  // Tensors are [N, L, E] rather than [L, N, E].
  TORCH_ARG(bool, batch_first) = false;
  TORCH_ARG(Kernel, kernel) = Kernel::kImplicit;
  // Order of the norm in a key's magnitude, any real >= 1; nullopt: no magnitude.
  TORCH_ARG(std::optional<double>, p) = 2.0;
  // M, per head; this and the next for kImplicit.
  TORCH_ARG(int64_t, num_frequencies) = 32;
  // One set of frequencies per head in place of two.
  TORCH_ARG(bool, stationary) = false;
};

// Frequencies that are parameters, as ikattn.spectral.Direct: `w1` and `w2`, flat, [H d M].
class DirectSpectralImpl : public torch::nn::Cloneable<DirectSpectralImpl> {
 public:
  DirectSpectralImpl(int64_t num_heads, int64_t head_dim, int64_t num_frequencies,
                     bool stationary = false);

  void reset() override;
  // Draws from U(-1/sqrt(H M), 1/sqrt(H M)).
  void reset_parameters();
  // w1 and w2 (nullopt if stationary) as views [H, d, M].
  std::pair<at::Tensor, std::optional<at::Tensor>> frequencies() const;

  int64_t num_heads, head_dim, num_frequencies;
  bool stationary;
  at::Tensor w1, w2;  // w2 undefined if stationary
};
TORCH_MODULE(DirectSpectral);

class MultiheadAttentionImpl : public torch::nn::Cloneable<MultiheadAttentionImpl> {
 public:
  MultiheadAttentionImpl(int64_t embed_dim, int64_t num_heads)
      : MultiheadAttentionImpl(MultiheadAttentionOptions(embed_dim, num_heads)) {}
  explicit MultiheadAttentionImpl(const MultiheadAttentionOptions& options);

  //   query [L, N, E]; with batch_first [N, L, E]; unbatched [L, E]
  //   key   [S, N, kdim], [N, S, kdim] or [S, kdim]   value the same with vdim
  //   key_padding_mask  [N, S], unbatched [S]. Bool: true = ignore the key. Floating point: added
  //                     to the logits.
  //   attn_mask         [L, S] or [N H, L, S], likewise
  //   is_causal         a promise that attn_mask, which must be given, is the causal mask
  // Returns the output, shaped like query, and the weights used, after dropout: [N, L, S] or per
  // head [N, H, L, S], without N for unbatched input; undefined without need_weights. A query that
  // sees no key has weights 0 and the output of a zero vector. Throws c10::Error.
  std::tuple<at::Tensor, at::Tensor> forward(
      const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
      const at::Tensor& key_padding_mask = {}, bool need_weights = true,
      const at::Tensor& attn_mask = {}, bool average_attn_weights = true, bool is_causal = false);

 protected:
  FORWARD_HAS_DEFAULT_ARGS({3, torch::nn::AnyValue(at::Tensor())}, {4, torch::nn::AnyValue(true)},
                           {5, torch::nn::AnyValue(at::Tensor())}, {6, torch::nn::AnyValue(true)},
                           {7, torch::nn::AnyValue(false)})

 public:
  void reset() override;
  // Draws every parameter anew, in the order and from the distributions of construction.
  void reset_parameters();
  void _reset_parameters();  // the same but for out_proj's weight, as upstream's
  void pretty_print(std::ostream& stream) const override;

  MultiheadAttentionOptions options;

  // State, by upstream's names. Undefined where the options leave it out.
  bool _qkv_same_embed_dim{};
  at::Tensor in_proj_weight, in_proj_bias;
  at::Tensor bias_k, bias_v;
  torch::nn::Linear out_proj = nullptr;
  at::Tensor q_proj_weight, k_proj_weight, v_proj_weight;
  DirectSpectral spectral = nullptr;  // empty unless kImplicit
  int64_t head_dim{};
};
TORCH_MODULE(MultiheadAttention);

// Reads what torch.save(dict(module.state_dict()), path) wrote in Python: a dict from names to
// tensors, which come to the CPU. Throws c10::Error.
torch::OrderedDict<std::string, at::Tensor> read_state_dict(const std::string& path);

// Copies a state_dict into a module's parameters and buffers, strictly: every entry must exist on
// both sides and have the same shape. The one exception, as in Python: a MultiheadAttention whose
// frequencies the checkpoint lacks altogether, such as one of upstream, keeps them as they are.
// Nothing has changed when it throws c10::Error.
void load_state_dict(torch::nn::Module& module,
                     const torch::OrderedDict<std::string, at::Tensor>& state);
void load_state_dict(torch::nn::Module& module, const std::string& path);

}  // namespace ikattn::nn
