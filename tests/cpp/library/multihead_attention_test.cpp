// ikattn::nn::MultiheadAttention against torch::nn::MultiheadAttention and against the formulas.
#include <gtest/gtest.h>
#include <ikattn/attention.h>
#include <ikattn/multihead_attention.h>
#include <torch/torch.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "device.h"

namespace {

using ikattn::nn::Kernel;
using ikattn::nn::MultiheadAttention;
using ikattn::nn::MultiheadAttentionOptions;
using torch::Tensor;

constexpr int64_t N = 3, L = 5, S = 7, E = 12, H = 3, d = E / H, M = 6;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr Kernel kKernels[] = {Kernel::kDot, Kernel::kRbf, Kernel::kImplicit};

// float64 and in eval mode, for numbers that can be compared.
MultiheadAttention make(const MultiheadAttentionOptions& options) {
  torch::manual_seed(0);
  MultiheadAttention module(options);
  module->to(test_device(), torch::kDouble);
  module->eval();
  return module;
}

MultiheadAttentionOptions small(Kernel kernel = Kernel::kImplicit) {
  return MultiheadAttentionOptions(E, H).kernel(kernel).num_frequencies(M);
}

struct Tokens {
  Tensor query, key, value;

  explicit Tokens(int64_t kdim = E, int64_t vdim = E) {
    torch::manual_seed(1);
    query = torch::randn({L, N, E}, torch::kDouble).to(test_device());
    key = torch::randn({S, N, kdim}, torch::kDouble).to(test_device());
    value = torch::randn({S, N, vdim}, torch::kDouble).to(test_device());
  }
};

Tensor some_padding() {
  const Tensor lengths = torch::tensor({S, 4L, 1L}).unsqueeze(1);
  return torch::arange(S).ge(lengths).to(test_device());  // [N, S]
}

Tensor causal_mask() { return torch::ones({L, S}, on_device(torch::kBool)).triu(1); }

void expect_close(const Tensor& got, const Tensor& expected) {
  ASSERT_EQ(got.sizes(), expected.sizes());
  EXPECT_TRUE(torch::allclose(got, expected, 1e-9, 1e-11))
      << "largest difference " << (got - expected).abs().max().item<double>();
}

using Results = std::tuple<Tensor, Tensor>;

void expect_same(const Results& got, const Results& expected) {
  expect_close(std::get<0>(got), std::get<0>(expected));
  expect_close(std::get<1>(got), std::get<1>(expected));
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "nothing was thrown";
}

#define EXPECT_MESSAGE(call, text)                                   \
  EXPECT_NE(message_of([&] { call; }).find(text), std::string::npos) \
      << "expected an error with: " << text << "\ngot: " << message_of([&] { call; })

// --- The dot kernel and upstream's module

struct Variant {
  bool bias = true, bias_kv = false, zero_attn = false;
  int64_t kdim = E, vdim = E;
};

template <class Options>
Options options_of(const Variant& variant) {
  return Options(E, H)
      .bias(variant.bias)
      .add_bias_kv(variant.bias_kv)
      .add_zero_attn(variant.zero_attn)
      .kdim(variant.kdim)
      .vdim(variant.vdim);
}

class LikeUpstream : public ::testing::TestWithParam<Variant> {};

TEST_P(LikeUpstream, ValuesWeightsGradientsAndInitialValues) {
  auto ours = make(options_of<MultiheadAttentionOptions>(GetParam()).kernel(Kernel::kDot));
  torch::manual_seed(0);
  torch::nn::MultiheadAttention stock(options_of<torch::nn::MultiheadAttentionOptions>(GetParam()));
  stock->to(test_device(), torch::kDouble);
  stock->eval();
  const auto names = ours->named_parameters();
  ASSERT_EQ(names.keys(), stock->named_parameters().keys());

  const Tokens x(GetParam().kdim, GetParam().vdim);
  // upstream's C++ module adds a bool attn_mask as ones
  const auto mask =
      torch::zeros({L, S}, on_device(torch::kDouble)).masked_fill(causal_mask(), -kInfinity);
  const auto loss_of = [&](auto& module) {
    auto [output, weights] =
        module->forward(x.query, x.key, x.value, some_padding(), true, mask, true);
    (output.sin().sum() + weights.square().sum()).backward();
    return Results(output, weights);
  };
  if (GetParam().kdim == GetParam().vdim) {  // upstream's C++ module asserts equal sizes
    expect_same(loss_of(ours), loss_of(stock));
    for (const auto& entry : stock->named_parameters()) {
      expect_close(names[entry.key()].grad(), entry.value().grad());
    }
  }
  for (const auto& entry : stock->named_parameters()) {
    expect_close(names[entry.key()], entry.value());
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, LikeUpstream,
                         ::testing::Values(Variant{}, Variant{.bias = false},
                                           Variant{.bias_kv = true}, Variant{.zero_attn = true},
                                           Variant{.bias_kv = true, .zero_attn = true},
                                           Variant{.kdim = 5, .vdim = 5},
                                           Variant{.kdim = 5, .vdim = 9}));

TEST(MultiheadAttention, FrequenciesLeaveUpstreamsInitialValuesAlone) {
  torch::manual_seed(3);
  const torch::nn::MultiheadAttention stock(E, H);
  torch::manual_seed(3);
  const MultiheadAttention ours(small());
  for (const auto& entry : stock->named_parameters()) {
    EXPECT_TRUE(torch::equal(ours->named_parameters()[entry.key()], entry.value()));
  }
  EXPECT_EQ(ours->spectral->w1.numel(), E * M);
  EXPECT_LE(ours->spectral->w1.abs().max().item<double>(), 1 / std::sqrt(H * M));
}

// --- Every kernel and its formula

// Per-head weights from projected queries and keys [N, H, ., d].
Tensor explicit_weights(MultiheadAttention module, const Tensor& q, const Tensor& k,
                        const Tensor& bias) {
  const auto& options = module->options;
  const auto magnitude = [&]() -> Tensor {
    if (!options.p()) return torch::zeros({1}, on_device(torch::kDouble));
    return k.norm(*options.p(), -1).square().unsqueeze(-2) / (2 * std::sqrt(d));
  };
  if (options.kernel() == Kernel::kImplicit) {
    const auto [w1, w2] = module->spectral->frequencies();
    const auto second = w2.value_or(w1);
    const auto phi = [&, first = w1](const Tensor& x) {
      const auto a = 2 * M_PI * x.matmul(first), b = 2 * M_PI * x.matmul(second);
      return torch::cat({a.cos() + b.cos(), a.sin() + b.sin()}, -1);
    };
    const auto s = phi(q).matmul(phi(k).transpose(-2, -1)) / (4 * M);
    return ((s.square() + 1e-5).log() + magnitude() + bias).softmax(-1);
  }
  const auto distance = (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1);
  const auto bump = -distance / (2 * std::sqrt(d));
  const bool dot = options.kernel() == Kernel::kDot;
  const auto g = dot ? k.square().sum(-1).unsqueeze(-2) / (2 * std::sqrt(d)) : magnitude();
  return (bump + g + bias).softmax(-1);
}

Results explicit_attention(MultiheadAttention module, const Tokens& x, const Tensor& bias) {
  const auto weights = module->in_proj_weight.chunk(3), biases = module->in_proj_bias.chunk(3);
  const auto heads = [&](const Tensor& tokens, int i) {
    return torch::linear(tokens, weights[i], biases[i]).unflatten(-1, {H, d}).permute({1, 2, 0, 3});
  };
  const auto a = explicit_weights(module, heads(x.query, 0), heads(x.key, 1), bias);
  const auto merged = a.matmul(heads(x.value, 2)).permute({2, 0, 1, 3}).flatten(2);
  return {module->out_proj(merged), a};
}

TEST(MultiheadAttention, EveryKernelAndNormEqualsItsFormula) {
  const Tokens x;
  const auto padding = some_padding(), mask = causal_mask();
  const auto bias = torch::zeros({N, H, L, S}, on_device(torch::kDouble))
                        .masked_fill(padding.view({N, 1, 1, S}).logical_or(mask), -kInfinity);
  for (const auto kernel : kKernels) {
    for (const std::optional<double> p : {std::optional<double>(), {1.0}, {1.5}, {2.0}, {4.0}}) {
      for (const bool stationary : {false, true}) {
        auto module = make(small(kernel).p(p).stationary(stationary));
        const auto expected = explicit_attention(module, x, bias);
        expect_same(module->forward(x.query, x.key, x.value, padding, true, mask, false), expected);
        const auto [output, none] = module->forward(x.query, x.key, x.value, padding, false, mask);
        expect_close(output, std::get<0>(expected));
        EXPECT_FALSE(none.defined());
        const auto averaged = module->forward(x.query, x.key, x.value, padding, true, mask);
        expect_close(std::get<1>(averaged), std::get<1>(expected).mean(1));
      }
    }
  }
}

TEST(MultiheadAttention, WeightsReturnedUnderDropoutAreTheOnesUsed) {
  const Tokens x;
  for (const auto kernel : kKernels) {
    auto module = make(small(kernel).dropout(0.5));
    module->train();
    const torch::NoGradGuard no_grad;
    module->out_proj->weight.copy_(torch::eye(E, on_device(torch::kDouble)));
    module->in_proj_weight.slice(0, 2 * E).copy_(torch::eye(E, on_device(torch::kDouble)));
    const auto [output, weights] = module(x.query, x.key, x.value, Tensor(), true, Tensor(), false);
    const auto value = x.value.unflatten(-1, {H, d}).permute({1, 2, 0, 3});
    expect_close(output, weights.matmul(value).permute({2, 0, 1, 3}).flatten(2));
    const auto dropped = weights.eq(0).to(torch::kDouble).mean().item<double>();
    EXPECT_GT(dropped, 0.3);
    EXPECT_LT(dropped, 0.7);
  }
}

// --- As a module

TEST(MultiheadAttention, GradientsReachEveryParameter) {
  const Tokens x;
  auto module = make(small().add_bias_kv(true));
  const auto [output, weights] = module(x.query, x.key, x.value);
  (output.sum() + weights.square().sum()).backward();
  for (const auto& entry : module->named_parameters()) {
    ASSERT_TRUE(entry.value().grad().defined()) << entry.key();
    EXPECT_GT(entry.value().grad().abs().max().item<double>(), 0) << entry.key();
  }
}

TEST(MultiheadAttention, ClonesHoldWeightsOfTheirOwn) {
  const Tokens x;
  for (const auto kernel : kKernels) {
    auto module = make(small(kernel).add_bias_kv(true));
    MultiheadAttention copy(
        std::dynamic_pointer_cast<ikattn::nn::MultiheadAttentionImpl>(module->clone()));
    copy->eval();
    expect_same(copy(x.query, x.key, x.value), module(x.query, x.key, x.value));
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : copy->parameters()) parameter.zero_();
    }
    EXPECT_GT(module->out_proj->weight.abs().max().item<double>(), 0);
    if (kernel == Kernel::kImplicit) {
      EXPECT_GT(module->spectral->w1.abs().max().item<double>(), 0);
    }
  }
}

TEST(MultiheadAttention, ResetDrawsEveryParameterAnew) {
  auto module = make(small().add_bias_kv(true));
  torch::manual_seed(0);
  const auto fresh = MultiheadAttention(small().add_bias_kv(true));
  const auto changed = [&](const std::string& name) {
    return !torch::equal(module->named_parameters()[name],
                         fresh->named_parameters()[name].to(test_device(), torch::kDouble));
  };
  ASSERT_FALSE(changed("spectral.w1"));
  module->reset_parameters();
  for (const auto* name : {"in_proj_weight", "bias_k", "out_proj.weight", "spectral.w2"}) {
    EXPECT_TRUE(changed(name)) << name;
  }
}

TEST(MultiheadAttention, RunsInAnyModuleWithDefaultArguments) {
  const Tokens x;
  auto module = make(small());
  torch::nn::AnyModule any(module);
  expect_same(any.forward<Results>(x.query, x.key, x.value), module(x.query, x.key, x.value));
}

TEST(MultiheadAttention, SavesAndLoadsThroughLibTorchsArchives) {
  const Tokens x;
  auto module = make(small()), other = make(small());
  other->reset_parameters();
  std::stringstream stream;
  torch::save(module, stream);
  torch::load(other, stream);
  expect_same(other(x.query, x.key, x.value), module(x.query, x.key, x.value));
}

// --- Checkpoints. Those that Python wrote are read in tests/python/packaging/test_cpp_programs.py.

torch::OrderedDict<std::string, Tensor> state_of(const torch::nn::Module& module) {
  torch::OrderedDict<std::string, Tensor> state;
  for (const auto& entry : module.named_parameters()) {
    state.insert(entry.key(), entry.value().detach().clone());
  }
  return state;
}

TEST(StateDict, LoadsWithAndWithoutFrequencies) {
  auto module = make(small()), other = make(small());
  other->reset_parameters();
  ikattn::nn::load_state_dict(*other, state_of(*module));
  EXPECT_TRUE(torch::equal(other->spectral->w1, module->spectral->w1));

  const auto stock = make(small(Kernel::kDot));
  other->reset_parameters();
  const auto before = other->spectral->w1.clone();
  ikattn::nn::load_state_dict(*other, state_of(*stock));
  EXPECT_TRUE(torch::equal(other->in_proj_weight, stock->in_proj_weight));
  EXPECT_TRUE(torch::equal(other->spectral->w1, before));
}

TEST(StateDict, RefusesOthersAndChangesNothing) {
  auto module = make(small());
  const auto before = module->in_proj_weight.clone();
  auto state = state_of(*make(small(Kernel::kDot)));
  state.insert("spectral.w1", module->spectral->w1);
  EXPECT_MESSAGE(ikattn::nn::load_state_dict(*module, state), "missing: spectral.w2");
  state.insert("spectral.w2", torch::zeros(3));
  EXPECT_MESSAGE(ikattn::nn::load_state_dict(*module, state),
                 "spectral.w2 must have shape [72], as in the module, got [3]");
  state.erase("spectral.w2");
  state.insert("spectral.w2", module->spectral->w2);
  state.insert("bias_k", torch::zeros({1, 1, E}));
  EXPECT_MESSAGE(ikattn::nn::load_state_dict(*module, state), "unexpected: bias_k");
  EXPECT_TRUE(torch::equal(module->in_proj_weight, before));
}

TEST(StateDict, SaysWhatAFileHoldsInstead) {
  const auto path = std::filesystem::temp_directory_path() / "ikattn_state_dict_test.pt";
  const auto bytes = torch::pickle_save(torch::zeros(3));
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<int64_t>(bytes.size()));
  EXPECT_MESSAGE(ikattn::nn::read_state_dict(path.string()), "must hold a dict");
  std::filesystem::remove(path);
  EXPECT_MESSAGE(ikattn::nn::read_state_dict(path.string()), path.string());
}

// --- Errors

TEST(MultiheadAttention, ErrorsNameTheArgumentWhatWasExpectedAndWhatCame) {
  EXPECT_MESSAGE(make(MultiheadAttentionOptions(10, 3)), "divisible by num_heads, got 10 and 3");
  EXPECT_MESSAGE(make(MultiheadAttentionOptions(0, 3)), "must be positive, got 0 and 3");
  EXPECT_MESSAGE(make(small().p(0.5)), "p must be a real number >= 1");
  EXPECT_MESSAGE(make(small().num_frequencies(0)), "num_frequencies must be at least 1, got 0");

  const Tokens x;
  auto module = make(small());
  EXPECT_MESSAGE(module(x.query[0][0], x.key, x.value), "query must have 2 axes");
  EXPECT_MESSAGE(module(x.query[0], x.key, x.value), "key must have 2 axes, as query");
  EXPECT_MESSAGE(module(x.query.slice(2, 1), x.key, x.value),
                 "the last axis of query must have size 12, got [5, 3, 11]");
  EXPECT_MESSAGE(module(x.query, x.key, x.value.slice(0, 1)),
                 "value must have the tokens of key, [7, 3], got [6, 3, 12]");
  EXPECT_MESSAGE(module(x.query.slice(1, 1), x.key, x.value),
                 "key must have the batch size of query, 2");
  EXPECT_MESSAGE(module(x.query, x.key, x.value, some_padding().t()),
                 "key_padding_mask must have shape [N, S] = [3, 7]");
  EXPECT_MESSAGE(module(x.query, x.key, x.value, some_padding().to(torch::kLong)),
                 "key_padding_mask must be bool or floating point, got Long");
  EXPECT_MESSAGE(module(x.query, x.key, x.value, Tensor(), true, causal_mask().t()),
                 "attn_mask must have shape [L, S] = [5, 7] or [N * H, L, S] = [9, 5, 7]");
  EXPECT_MESSAGE(module(x.query, x.key, x.value, Tensor(), true, Tensor(), true, true),
                 "is_causal is a hint about attn_mask");
}

}  // namespace
