// Decoding in constant memory: a state of one size that holds any number of keys and values.
//
// As ikattn.RecurrentState in Python, whose documentation says when it pays and what it cannot do:
// forget a key, or see one through a mask that differs by query. Letters as in ikattn/moments.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "ikattn/moments.h"

namespace ikattn {

struct RecurrentStateOptions {
  std::optional<double> p = 2.0;                         // order of the norm; nullopt: no magnitude
  std::optional<double> magnitude_scale = std::nullopt;  // nullopt: 1 / (2 sqrt d)
  at::ScalarType dtype = at::kDouble;                    // of the sums, or at::kFloat
};

// Nothing has a gradient. Calls throw c10::Error on wrong arguments; nothing has changed then.
class RecurrentState {
 public:
  // w1, w2 [K, d, M], K the heads of queries or of keys; they must stay as they are. w2 absent:
  // stationary kernel.
  explicit RecurrentState(at::Tensor w1, std::optional<at::Tensor> w2 = std::nullopt,
                          const RecurrentStateOptions& options = {});

  // A copy has sums of its own, so that several states may go on from one prompt.
  RecurrentState(const RecurrentState& other);
  RecurrentState& operator=(const RecurrentState& other);
  RecurrentState(RecurrentState&&) = default;
  RecurrentState& operator=(RecurrentState&&) = default;
  ~RecurrentState() = default;

  // Adds key [B, G, new, d] and value [B, G, new, d_v], G a divisor of K. key_bias [B, K, new], or
  // what broadcasts to it, is added to logits; -inf hides a key.
  void update(const at::Tensor& key, const at::Tensor& value,
              const std::optional<at::Tensor>& key_bias = std::nullopt);

  // Attention of query [B, H, L, d], K a divisor of H, to all keys that came: [B, H, L, d_v] in the
  // type of query. eps: at least 1e-6 for sums in float32.
  at::Tensor attend(const at::Tensor& query, double eps = 1e-5) const;

  // Makes the batch items `indices`, int64 [new B], the batch.
  void reorder(const at::Tensor& indices);
  // Adds the keys of a state of the same kernel.
  void merge(const RecurrentState& other);
  void to(const at::Device& device);

  int64_t size() const { return size_; }  // keys that came
  int64_t nbytes() const;                 // of the sums
  // The sums; undefined tensors before the first key.
  const KeyMoments& keys() const { return keys_; }

  // All that is known of the keys, copied, for torch::save: moments, reference and size, or nothing
  // before the first key.
  std::vector<at::Tensor> state() const;
  void load(const std::vector<at::Tensor>& state);

 private:
  at::Tensor features(const at::Tensor& x, int64_t heads) const;

  at::Tensor w1_;
  std::optional<at::Tensor> w2_;
  RecurrentStateOptions options_;
  KeyMoments keys_;
  int64_t size_ = 0;
};

}  // namespace ikattn
