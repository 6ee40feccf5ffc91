// ikattn::RecurrentState and the functions of moments from C++.
#include "ikattn/recurrent_state.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <sstream>

#include "ikattn/attention.h"

namespace ikattn {
namespace {

struct Tokens {
  at::Tensor query, key, value, w1, w2;
};

Tokens drawn() {
  torch::manual_seed(0);
  const auto wide = at::TensorOptions(at::kDouble);
  return {at::randn({2, 4, 20, 8}, wide), at::randn({2, 2, 20, 8}, wide),
          at::randn({2, 2, 20, 5}, wide), 0.1 * at::randn({4, 8, 3}, wide),
          0.1 * at::randn({4, 8, 3}, wide)};
}

at::Tensor whole(const Tokens& of, bool is_causal) {
  AttentionOptions options;
  options.is_causal = is_causal;
  options.enable_gqa = true;
  return implicit_kernel_attention(of.query, of.key, of.value, of.w1, of.w2, options);
}

TEST(RecurrentState, CopiesGoOnByThemselves) {
  const Tokens of = drawn();
  RecurrentState state(of.w1, of.w2);
  state.update(of.key, of.value);
  const at::Tensor expected = state.attend(of.query);
  RecurrentState copied = state, assigned(of.w1, of.w2);
  assigned = state;
  copied.update(3 * of.key, of.value);
  assigned.update(3 * of.key, of.value);
  EXPECT_TRUE(at::equal(state.attend(of.query), expected));
  EXPECT_EQ(state.size(), 20);
  EXPECT_EQ(copied.size(), 40);
  EXPECT_TRUE(at::equal(copied.attend(of.query), assigned.attend(of.query)));
}

TEST(RecurrentState, TokenByTokenIsCausal) {
  const Tokens of = drawn();
  RecurrentState state(of.w1, of.w2);
  std::vector<at::Tensor> outputs;
  for (int64_t t = 0; t < 20; ++t) {
    state.update(of.key.narrow(2, t, 1), of.value.narrow(2, t, 1));
    outputs.push_back(state.attend(of.query.narrow(2, t, 1)));
  }
  EXPECT_EQ(state.size(), 20);
  EXPECT_EQ(state.nbytes(), 2 * 4 * (22 * 6 + 1) * 8);
  EXPECT_TRUE(at::allclose(at::cat(outputs, 2), whole(of, true), 1e-10, 1e-12));
}

TEST(RecurrentState, IsMergedReorderedSavedAndLoaded) {
  const Tokens of = drawn();
  RecurrentState first(of.w1, of.w2), second(of.w1, of.w2), loaded(of.w1, of.w2);
  first.update(of.key.narrow(2, 0, 7), of.value.narrow(2, 0, 7));
  second.update(of.key.narrow(2, 7, 13), of.value.narrow(2, 7, 13));
  first.merge(second);
  std::stringstream file;
  torch::save(first.state(), file);
  std::vector<at::Tensor> state;
  torch::load(state, file);
  loaded.load(state);
  const at::Tensor order = at::tensor({1, 0, 1}, at::kLong);
  loaded.reorder(order);
  EXPECT_EQ(loaded.size(), 20);
  EXPECT_TRUE(at::allclose(loaded.attend(of.query.index_select(0, order)),
                           whole(of, false).index_select(0, order), 1e-10, 1e-12));
}

TEST(RecurrentState, RefusesWhatItCannotAnswer) {
  const Tokens of = drawn();
  RecurrentState state(of.w1, of.w2), other(of.w1);
  EXPECT_THROW(state.attend(of.query), c10::Error);
  EXPECT_THROW(state.merge(other), c10::Error);
  EXPECT_THROW(state.update(of.key.narrow(3, 0, 4), of.value), c10::Error);
  RecurrentStateOptions options;
  options.dtype = at::kFloat;
  RecurrentState narrow(of.w1.to(at::kFloat), std::nullopt, options);
  narrow.update(of.key.to(at::kFloat), of.value);
  EXPECT_THROW(narrow.attend(of.query.to(at::kFloat), 1e-8), c10::Error);
}

TEST(Moments, GradientsReachFeaturesLogitsAndValues) {
  const Tokens of = drawn();
  const at::Tensor phi_q = spectral_features(of.query, of.w1, of.w2);
  const at::Tensor phi_k = phi_q.detach().clone().requires_grad_();
  const at::Tensor logits = at::randn({2, 4, 20}, at::kDouble).requires_grad_();
  const at::Tensor value = of.value.clone().requires_grad_();
  const auto [output, log_z] = attention_from_moments(phi_q, key_moments(phi_k, logits, value));
  const at::Tensor expected = attention_from_features(phi_q, phi_k, logits.unsqueeze(2), value);
  EXPECT_FALSE(log_z.requires_grad());
  const std::vector<at::Tensor> inputs = {phi_k, logits, value};
  const auto found = torch::autograd::grad({output.sum()}, inputs);
  const auto truth = torch::autograd::grad({expected.sum()}, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_TRUE(at::allclose(found[i], truth[i], 1e-9, 1e-11)) << i;
  }
}

// A sequence in two calls, the second one going on from the moments of the first.
TEST(Moments, CausalAttentionGoesOnFromMoments) {
  const Tokens of = drawn();
  const at::Tensor phi_q = spectral_features(of.query, of.w1, of.w2);
  const at::Tensor key = of.key.repeat_interleave(2, 1);
  const at::Tensor phi_k = spectral_features(key, of.w1, of.w2);
  const at::Tensor logits = key.square().sum(-1) / (2 * std::sqrt(8.0));
  KeyMoments keys{at::zeros({2, 4, 22, 6}, at::kDouble),
                  at::full({2, 4}, -std::numeric_limits<double>::infinity(), at::kDouble)};
  std::vector<at::Tensor> outputs;
  for (const auto& [first, count] : {std::pair{0, 7}, {7, 13}}) {
    const auto part = [first = first, count = count](const at::Tensor& tensor) {
      return tensor.narrow(2, first, count);
    };
    const auto [output, log_normalizer, all] =
        causal_attention_from_moments(part(phi_q), part(phi_k), part(logits), part(of.value), keys);
    EXPECT_EQ(log_normalizer.sizes(), (std::vector<int64_t>{2, 4, count}));
    outputs.push_back(output);
    keys = all;
  }
  EXPECT_TRUE(at::allclose(at::cat(outputs, 2), whole(of, true), 1e-10, 1e-12));
  EXPECT_TRUE(at::allclose(keys.moments, key_moments(phi_k, logits, of.value).moments, 1e-10));
}

}  // namespace
}  // namespace ikattn
