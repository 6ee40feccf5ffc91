#include "ikattn/recurrent_state.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include "attention/operator/arguments.h"
#include "attention/operator/reference.h"
#include "ikattn/attention.h"

namespace ikattn {
namespace {

constexpr double kLeastEps = 1e-6;  // whose share of a sum float32 still holds to some per cent

// Repeats each head for every one of `heads` that it serves.
at::Tensor to_heads(const at::Tensor& tensor, int64_t axis, int64_t heads) {
  const int64_t own = tensor.size(axis);
  return own == heads ? tensor : tensor.repeat_interleave(heads / own, axis);
}

at::ScalarType wider(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : type;
}

}  // namespace

RecurrentState::RecurrentState(at::Tensor w1, std::optional<at::Tensor> w2,
                               const RecurrentStateOptions& options)
    : w1_(std::move(w1)), w2_(std::move(w2)), options_(options) {
  const char* function = "RecurrentState";
  TORCH_CHECK(w1_.dim() == 3, function, ": w1 must have shape [K, d, M], got ", w1_.sizes());
  TORCH_CHECK(!w2_ || w2_->sizes() == w1_.sizes(), function, ": w2 must have the shape of w1, ",
              w1_.sizes(), ", got ", w2_ ? w2_->sizes() : at::IntArrayRef());
  TORCH_CHECK(options.dtype == at::kDouble || options.dtype == at::kFloat, function,
              ": dtype must be Float or Double, got ", options.dtype);
  check_numbers(function, options.p, 1, options.magnitude_scale);
}

RecurrentState::RecurrentState(const RecurrentState& other)
    : w1_(other.w1_), w2_(other.w2_), options_(other.options_) {
  load(other.state());
}

RecurrentState& RecurrentState::operator=(const RecurrentState& other) {
  return *this = RecurrentState(other);
}

at::Tensor RecurrentState::features(const at::Tensor& x, int64_t heads) const {
  const auto frequencies = [&](const at::Tensor& w) {
    return to_heads(w.detach().to(x.options()), 0, heads);
  };
  std::optional<at::Tensor> w2;
  if (w2_) w2 = frequencies(*w2_);
  return spectral_features(x, frequencies(w1_), w2);
}

void RecurrentState::update(const at::Tensor& key, const at::Tensor& value,
                            const std::optional<at::Tensor>& key_bias) {
  const c10::InferenceMode ordinary(false);
  const at::NoGradGuard no_gradients;
  const int64_t K = w1_.size(0);
  TORCH_CHECK(key.dim() == 4 && key.size(1) >= 1 && K % key.size(1) == 0,
              "RecurrentState: key must have shape [B, G, new, d] with G a divisor of ", K,
              ", got ", key.sizes());
  const at::Tensor phi = features(to_heads(key, 1, K).to(wider(key, options_.dtype)), K);
  at::Tensor logits =
      at::zeros({key.size(0), key.size(1), key.size(2)}, key.options().dtype(at::kDouble));
  if (options_.p) {
    logits = reference_squared_norm(key.to(at::kDouble), *options_.p) *
             magnitude_scale_or_default(options_.magnitude_scale, key.size(3));
  }
  logits = to_heads(logits, 1, K);
  if (key_bias) {
    const at::Tensor bias = key_bias->to(at::kDouble).expand_as(logits);
    logits = at::where(bias == -INFINITY, bias, logits + bias);
  }
  if (keys_.moments.defined()) {
    add_key_moments(keys_, phi, logits, value);
  } else {
    keys_ = key_moments(phi, logits, value);
  }
  size_ += key.size(2);
}

at::Tensor RecurrentState::attend(const at::Tensor& query, double eps) const {
  const at::NoGradGuard no_gradients;
  TORCH_CHECK(keys_.moments.defined(), "RecurrentState: no key came yet");
  const int64_t K = w1_.size(0);
  TORCH_CHECK(query.dim() == 4 && query.size(1) % K == 0,
              "RecurrentState: query must have shape [B, H, L, d] with H a multiple of ", K,
              ", got ", query.sizes());
  const at::ScalarType type = keys_.moments.scalar_type();
  TORCH_CHECK_VALUE(type == at::kDouble || eps >= kLeastEps,
                    "RecurrentState: eps must be at least ", kLeastEps,
                    " for sums in float32, whose rounding is larger, got ", eps);
  const at::Tensor phi = features(query.to(type), query.size(1));
  return std::get<0>(attention_from_moments(phi, keys_, eps)).to(query.scalar_type());
}

void RecurrentState::reorder(const at::Tensor& indices) {
  if (!keys_.moments.defined()) return;
  const c10::InferenceMode ordinary(false);
  const auto chosen = [&](const at::Tensor& tensor) {
    return tensor.index_select(0, indices.to(tensor.device()));
  };
  keys_ = {chosen(keys_.moments), chosen(keys_.reference)};
}

void RecurrentState::merge(const RecurrentState& other) {
  const c10::InferenceMode ordinary(false);
  const at::NoGradGuard no_gradients;
  const auto is_same = [](const std::optional<at::Tensor>& one,
                          const std::optional<at::Tensor>& two) {
    if (!one || !two) return one.has_value() == two.has_value();
    return one->sizes() == two->sizes() && at::equal(*one, two->to(one->options()));
  };
  TORCH_CHECK_VALUE(options_.p == other.options_.p &&
                        options_.magnitude_scale == other.options_.magnitude_scale &&
                        is_same(w1_, other.w1_) && is_same(w2_, other.w2_),
                    "RecurrentState: other must have the same frequencies, p and magnitude_scale");
  if (!other.keys_.moments.defined()) return;
  if (!keys_.moments.defined()) return load(other.state());
  keys_ = merge_moments(keys_, other.keys_);
  size_ += other.size_;
}

void RecurrentState::to(const at::Device& device) {
  const c10::InferenceMode ordinary(false);
  w1_ = w1_.to(device);
  if (w2_) w2_ = w2_->to(device);
  if (!keys_.moments.defined()) return;
  keys_ = {keys_.moments.to(device), keys_.reference.to(device)};
}

int64_t RecurrentState::nbytes() const {
  if (!keys_.moments.defined()) return 0;
  return static_cast<int64_t>(keys_.moments.nbytes() + keys_.reference.nbytes());
}

std::vector<at::Tensor> RecurrentState::state() const {
  if (!keys_.moments.defined()) return {};
  return {keys_.moments.clone(), keys_.reference.clone(), at::scalar_tensor(size_, at::kLong)};
}

void RecurrentState::load(const std::vector<at::Tensor>& state) {
  const c10::InferenceMode ordinary(false);
  if (state.empty()) {
    keys_ = {};
    size_ = 0;
    return;
  }
  TORCH_CHECK(state.size() == 3, "RecurrentState: a state must be three tensors, got ",
              state.size());
  const int64_t K = w1_.size(0), M = w1_.size(2), entries = M * (2 * M + 1) + 1;
  const at::Tensor& moments = state[0];
  TORCH_CHECK(moments.dim() == 4 && moments.size(1) == K && moments.size(2) == entries &&
                  state[1].sizes() == moments.sizes().slice(0, 2),
              "RecurrentState: a state must have moments [B, K, E, d_v + 1] with K = ", K,
              " and E = ", entries, ", and reference [B, K], got ", moments.sizes(), " and ",
              state[1].sizes());
  keys_ = {moments.clone(), state[1].clone()};
  size_ = state[2].item<int64_t>();
}

}  // namespace ikattn
