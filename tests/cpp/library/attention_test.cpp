// The C++ functions from LibTorch alone: values and gradients against the differentiable
// reference.
#include <gtest/gtest.h>
#include <ikattn/attention.h>
#include <torch/torch.h>

#include "device.h"

namespace {

using torch::Tensor;

struct Inputs {
  Tensor query, key, value, w1, w2;

  explicit Inputs(int64_t L, int64_t S, int64_t d = 16, int64_t d_v = 24, int64_t M = 33,
                  at::ScalarType type = at::kDouble) {
    torch::manual_seed(L * 1000 + S);
    const auto make = [&](at::IntArrayRef sizes, double scale) {
      return (scale * torch::randn(sizes, at::kDouble)).to(on_device(type)).requires_grad_();
    };
    query = make({2, 3, L, d}, 1);
    key = make({2, 3, S, d}, 1);
    value = make({2, 3, S, d_v}, 1);
    w1 = make({3, d, M}, 0.1);
    w2 = make({3, d, M}, 0.1);
  }
  std::vector<Tensor> all() const { return {query, key, value, w1, w2}; }
};

// The differentiable composition, reached as a C++ user can reach any operator.
Tensor reference(const Inputs& in, const ikattn::AttentionOptions& options) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
      "ikattn::implicit_kernel_attention_reference", "");
  torch::jit::Stack stack;
  torch::jit::push(stack, in.query, in.key, in.value, in.w1, std::optional<Tensor>(in.w2),
                   options.p, options.key_bias, options.attn_mask, options.dropout_p,
                   options.is_causal, options.enable_gqa, options.eps, options.magnitude_scale,
                   options.dropout_seed, 0.0);
  op.callBoxed(stack);
  return stack[0].toTensor();
}

void expect_close(const Tensor& got, const Tensor& expected, double tolerance) {
  ASSERT_EQ(got.sizes(), expected.sizes());
  if (got.numel() == 0) return;
  // A single key's weight is 1 whatever it is: the gradients of its logit are zero but for
  // rounding.
  const double scale = std::max(1e-2, expected.abs().max().item<double>());
  EXPECT_LT((got - expected).abs().max().item<double>() / scale, tolerance);
}

// Values and gradients, in float64.
void expect_equal_to_reference(const Inputs& in, const ikattn::AttentionOptions& options) {
  const Tensor got =
      ikattn::implicit_kernel_attention(in.query, in.key, in.value, in.w1, in.w2, options);
  const Tensor expected = reference(in, options);
  expect_close(got, expected, 1e-12);
  const Tensor direction = torch::randn_like(got);
  const auto gradients = torch::autograd::grad({got}, in.all(), {direction});
  const auto expected_gradients = torch::autograd::grad({expected}, in.all(), {direction});
  for (size_t i = 0; i < gradients.size(); ++i) {
    expect_close(gradients[i], expected_gradients[i], 1e-11);
  }
}

class AttentionSizes : public ::testing::TestWithParam<std::pair<int64_t, int64_t>> {};

TEST_P(AttentionSizes, ValuesAndGradientsEqualTheReference) {
  const auto [L, S] = GetParam();
  const Inputs in(L, S);
  ikattn::AttentionOptions options;
  options.is_causal = L == S;
  options.p = 3.0;
  expect_equal_to_reference(in, options);
}

INSTANTIATE_TEST_SUITE_P(TileEdges, AttentionSizes,
                         ::testing::Values(std::pair{1, 1}, std::pair{2, 5}, std::pair{63, 63},
                                           std::pair{64, 65}, std::pair{65, 64},
                                           std::pair{127, 129}, std::pair{193, 193},
                                           std::pair{0, 3}, std::pair{3, 0}));

// Long enough to take linear time (attention/calls/linear_time.h); three query heads share a key
// head.
class LongAttention : public ::testing::TestWithParam<std::pair<int64_t, int64_t>> {};

TEST_P(LongAttention, ValuesAndGradientsEqualTheReference) {
  const auto [L, S] = GetParam();
  for (const bool is_causal : {false, true}) {
    for (const int64_t d_v : {3, 70}) {
      Inputs in(L, S, 5, d_v, 3);
      for (Tensor* tensor : {&in.key, &in.value}) {
        *tensor = tensor->detach().narrow(1, 0, 1).requires_grad_();
      }
      for (Tensor* tensor : {&in.w1, &in.w2}) {
        *tensor = tensor->detach().narrow(0, 0, 1).requires_grad_();
      }
      ikattn::AttentionOptions options;
      options.enable_gqa = true;
      options.is_causal = is_causal;
      expect_equal_to_reference(in, options);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(ChunkEdges, LongAttention,
                         ::testing::Values(std::pair{384, 384}, std::pair{385, 383},
                                           std::pair{500, 300}, std::pair{300, 500}));

// Parts of 1024 keys, groups of eight queries, features and values that fill no vector.
class FromFeatures : public ::testing::TestWithParam<std::pair<int64_t, int64_t>> {};

TEST_P(FromFeatures, EqualsTheCallThatMakesThem) {
  const auto [L, S] = GetParam();
  const c10::NoGradGuard no_gradients;
  for (const auto type : {at::kDouble, at::kFloat}) {
    for (const int64_t size : {1, 33, 64}) {
      const Inputs in(L, S, 16, size, size, type);
      ikattn::AttentionOptions options;
      options.attn_mask = torch::rand({2, 1, L, S}, test_device()) > 0.3;
      const Tensor expected =
          ikattn::implicit_kernel_attention(in.query, in.key, in.value, in.w1, in.w2, options);
      const Tensor magnitudes = in.key.square().sum(-1).unsqueeze(-2) / 8;
      const Tensor logits = magnitudes.masked_fill(~*options.attn_mask, -INFINITY);
      // every second token: what the kernel must not read lies between
      const Tensor features = ikattn::spectral_features(in.key, in.w1, in.w2);
      const Tensor spread = torch::full({2, 3, 2 * S, features.size(3)}, NAN, features.options())
                                .slice(2, 0, 2 * S, 2);
      spread.copy_(features);
      const Tensor got = ikattn::attention_from_features(
          ikattn::spectral_features(in.query, in.w1, in.w2), spread, logits, in.value);
      expect_close(got, expected, type == at::kDouble ? 1e-12 : 1e-4);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(PartEdges, FromFeatures,
                         ::testing::Values(std::pair{1, 1}, std::pair{1, 63}, std::pair{8, 65},
                                           std::pair{9, 1023}, std::pair{2, 1025},
                                           std::pair{17, 2050}, std::pair{0, 3}, std::pair{3, 0}));

class AttentionTypes : public ::testing::TestWithParam<std::pair<at::ScalarType, double>> {};

TEST_P(AttentionTypes, ValuesAndGradientsEqualTheReferenceWithEveryOption) {
  const auto [type, tolerance] = GetParam();
  for (const bool is_causal : {false, true}) {
    Inputs in(70, 130, 65, 72, 37, type);
    in.key = in.key.detach().narrow(1, 0, 1).requires_grad_();
    in.value = in.value.detach().narrow(1, 0, 1).requires_grad_();
    ikattn::AttentionOptions options;
    options.enable_gqa = true;
    options.is_causal = is_causal;
    options.attn_mask = torch::rand({1, 3, 70, 130}, test_device()) > 0.3;
    options.key_bias = torch::randn({2, 1, 130}).to(on_device(type));
    options.dropout_p = 0.25;
    options.dropout_seed = torch::tensor({5, 6}, on_device(at::kLong));
    Inputs exact = in;
    for (Tensor* tensor : {&exact.query, &exact.key, &exact.value, &exact.w1, &exact.w2}) {
      *tensor = tensor->detach().to(at::kDouble).requires_grad_();
    }
    const Tensor got =
        ikattn::implicit_kernel_attention(in.query, in.key, in.value, in.w1, in.w2, options);
    const auto gradients = torch::autograd::grad({got.sum()}, in.all());
    options.key_bias = options.key_bias->to(at::kDouble);
    const Tensor expected = reference(exact, options);
    expect_close(got.to(at::kDouble), expected, tolerance);
    const auto expected_gradients = torch::autograd::grad({expected.sum()}, exact.all());
    for (size_t i = 0; i < gradients.size(); ++i) {
      expect_close(gradients[i].to(at::kDouble), expected_gradients[i], 5 * tolerance);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, AttentionTypes,
                         ::testing::Values(std::pair{at::kDouble, 1e-12},
                                           std::pair{at::kFloat, 1e-5},
                                           std::pair{at::kBFloat16, 3e-2},
                                           std::pair{at::kHalf, 3e-3}));

TEST(Attention, DrawsADropoutSeedFromTheDefaultGenerator) {
  const Inputs in(20, 20);
  ikattn::AttentionOptions options;
  options.dropout_p = 0.5;
  const auto run = [&] {
    return ikattn::implicit_kernel_attention(in.query, in.key, in.value, in.w1, in.w2, options);
  };
  torch::manual_seed(5);
  const Tensor first = run();
  EXPECT_FALSE(torch::equal(first, run()));
  torch::manual_seed(5);
  EXPECT_TRUE(torch::equal(first, run()));
}

// Gradients of the output reach the weights as dO V^T.
TEST(Weights, GradientsAreThoseOfTheOutput) {
  for (const auto [L, S] : {std::pair{37, 70}, {64, 64}, {130, 200}, {5, 1100}}) {
    for (const bool is_causal : {false, true}) {
      for (const double dropout_p : {0.0, 0.25}) {
        const Inputs in(L, S);
        ikattn::AttentionOptions options;
        options.is_causal = is_causal;
        options.dropout_p = dropout_p;
        options.dropout_seed = torch::tensor({7, 0}, on_device(at::kLong));
        options.attn_mask = torch::randn({2, 1, 1, S}, on_device(at::kDouble)).requires_grad_();
        const Tensor output =
            ikattn::implicit_kernel_attention(in.query, in.key, in.value, in.w1, in.w2, options);
        const Tensor weights =
            ikattn::implicit_kernel_weights(in.query, in.key, in.w1, in.w2, options);
        const std::vector<Tensor> sources = {in.query, in.key, in.w1, in.w2, *options.attn_mask};
        const Tensor incoming = torch::randn_like(output);
        const auto expected = torch::autograd::grad({output}, sources, {incoming});
        const auto found = torch::autograd::grad(
            {weights}, sources, {incoming.matmul(in.value.detach().transpose(-2, -1))});
        for (size_t i = 0; i < sources.size(); ++i) expect_close(found[i], expected[i], 1e-12);
      }
    }
  }
}

TEST(Errors, NameArgumentExpectedAndGot) {
  const Inputs in(4, 5);
  const Tensor wrong = torch::randn({3, 15, 33}, on_device(at::kDouble));
  try {
    ikattn::implicit_kernel_attention(in.query, in.key, in.value, wrong, in.w2);
    FAIL() << "a head size of 15 beside 16 was accepted";
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    EXPECT_NE(message.find("w1 must have shape [H, d, M] with d = 16"), std::string::npos)
        << message;
    EXPECT_NE(message.find("[3, 15, 33]"), std::string::npos) << message;
  }
}

}  // namespace
