// Norm-aware contributions from LibTorch alone, against their definition.
#include <gtest/gtest.h>
#include <ikattn/contributions.h>
#include <torch/torch.h>

#include "device.h"

namespace {

using torch::Tensor;

struct Inputs {
  Tensor weights, value, projection, residual;
  ikattn::NormStats norm, second_norm;

  explicit Inputs(at::ScalarType type = at::kDouble, int64_t L = 9) {
    torch::manual_seed(L);
    const int64_t B = 2, H = 4, G = 2, d_v = 5, D = 12;
    weights = torch::randn({B, H, L, L}, on_device(at::kDouble)).softmax(-1).to(type);
    value = torch::randn({B, G, L, d_v}, on_device(at::kDouble)).to(type);
    projection = torch::randn({D, H * d_v}, on_device(at::kDouble)).to(type);
    residual = torch::randn({B, L, D}, on_device(at::kDouble)).to(type);
    norm = {torch::randn({D}, on_device(at::kDouble)).to(type),
            (torch::rand({B, L}, on_device(at::kDouble)) + 0.5).to(type)};
    second_norm = {torch::randn({D}, on_device(at::kDouble)).to(type),
                   (torch::rand({B, L}, on_device(at::kDouble)) + 0.5).to(type), false};
  }

  ikattn::ContributionOptions options() const {
    ikattn::ContributionOptions options;
    options.residual = residual;
    options.norm = norm;
    options.second_norm = second_norm;
    return options;
  }

  // f_h(x_j) [B, H, S, D]
  Tensor transformed() const {
    const int64_t H = weights.size(1);
    return torch::einsum("bhsv,dhv->bhsd", {value.to(at::kDouble).repeat_interleave(H / 2, 1),
                                            projection.to(at::kDouble).unflatten(1, {H, -1})});
  }

  // y_ij as vectors [B, L, L, D]: summed, with the residual, through the first and both norms.
  std::array<Tensor, 4> vectors() const {
    const Tensor summed =
        torch::einsum("bhts,bhsd->btsd", {weights.to(at::kDouble), transformed()});
    const Tensor own =
        torch::eye(weights.size(2), on_device(at::kDouble)).unsqueeze(0).unsqueeze(-1);
    const Tensor with_residual = summed + own * residual.to(at::kDouble).unsqueeze(2);
    const auto through = [](const Tensor& y, const ikattn::NormStats& stats) {
      const Tensor centered = stats.centered ? y - y.mean(-1, true) : y;
      return centered * stats.weight.to(at::kDouble) /
             stats.scale.to(at::kDouble).unsqueeze(-1).unsqueeze(-1);
    };
    const Tensor with_norm = through(with_residual, norm);
    return {summed, with_residual, with_norm, through(with_norm, second_norm)};
  }
};

double error(const Tensor& got, const Tensor& expected) {
  return ((got.to(at::kDouble) - expected).abs().max() / expected.abs().max()).item<double>();
}

TEST(Contributions, AreTheNormsOfTheirVectors) {
  for (const auto& [type, tolerance] : {std::pair{at::kDouble, 1e-13}, {at::kFloat, 2e-6}}) {
    const Inputs in(type);
    const auto maps = ikattn::contributions(in.weights, in.value, in.projection, in.options());
    const auto vectors = in.vectors();
    const Tensor got[4] = {maps.summed, maps.with_residual, maps.with_norm, maps.encoder};
    for (int map = 0; map < 4; ++map) {
      EXPECT_EQ(got[map].scalar_type(), type);
      EXPECT_LT(error(got[map], vectors[map].norm(2, -1)), tolerance);
      const Tensor own = vectors[map].diagonal(0, 1, 2).transpose(1, 2);
      const Tensor others = (vectors[map].sum(2) - own).norm(2, -1);
      EXPECT_LT(error(maps.mixing_ratios[map], others / (others + own.norm(2, -1))), tolerance);
    }
  }
}

TEST(Contributions, GradientsAreThoseOfTheDefinition) {
  Inputs in;
  const std::vector<Tensor> leaves = {in.weights,  in.value,       in.projection,
                                      in.residual, in.norm.weight, in.norm.scale};
  for (Tensor leaf : leaves) leaf.requires_grad_();
  const auto maps = ikattn::contributions(in.weights, in.value, in.projection, in.options());
  const auto got = torch::autograd::grad({maps.encoder.sum() + maps.summed.square().sum()}, leaves);
  const auto vectors = in.vectors();
  const auto expected =
      torch::autograd::grad({vectors[3].norm(2, -1).sum() + vectors[0].square().sum()}, leaves);
  for (size_t i = 0; i < leaves.size(); ++i) EXPECT_LT(error(got[i], expected[i]), 1e-11);
}

TEST(Contributions, StreamedEqualsGiven) {
  const Inputs in;
  torch::manual_seed(3);
  const Tensor query = torch::randn({2, 4, 9, 6}, on_device(at::kDouble));
  const Tensor key = torch::randn({2, 2, 9, 6}, on_device(at::kDouble));
  ikattn::AttentionSource source;
  source.options.enable_gqa = true;
  source.options.is_causal = true;
  source.w1 = 0.2 * torch::randn({4, 6, 8}, on_device(at::kDouble));
  const Tensor weights =
      ikattn::implicit_kernel_weights(query, key, *source.w1, std::nullopt, source.options);
  const auto given = ikattn::contributions(weights, in.value, in.projection, in.options());
  const auto streamed =
      ikattn::streamed_contributions(query, key, in.value, in.projection, source, in.options());
  EXPECT_LT(error(streamed.encoder, given.encoder), 1e-13);
  EXPECT_LT(error(streamed.mixing_ratios, given.mixing_ratios), 1e-13);
}

TEST(Contributions, OnlyWhatIsDefinedAndWantedIsThere) {
  const Inputs in;
  ikattn::ContributionOptions options;
  options.value_norms = false;
  const auto maps = ikattn::contributions(in.weights, in.value, in.projection, options);
  EXPECT_TRUE(maps.summed.defined());
  EXPECT_FALSE(maps.value_norms.defined());
  EXPECT_FALSE(maps.with_residual.defined());
  EXPECT_FALSE(maps.mixing_ratios.defined());
}

// In float32 the CPU does without the vectors, for there are many tokens, in float64.
TEST(Contributions, ValueNormsAloneAreThoseOfTheVectors) {
  const double of_floats = test_device().is_cpu() ? 2e-7 : 2e-6;
  for (const auto& [type, tolerance] : {std::pair{at::kDouble, 1e-13}, {at::kFloat, of_floats}}) {
    const Inputs in(type, 140);
    ikattn::ContributionOptions options;
    options.summed = false;
    const auto maps = ikattn::contributions(in.weights, in.value, in.projection, options);
    EXPECT_FALSE(maps.summed.defined());
    EXPECT_LT(error(maps.value_norms, in.transformed().norm(2, -1)), tolerance);
  }
}

TEST(Contributions, NamesTheWrongArgument) {
  const Inputs in;
  try {
    ikattn::contributions(in.weights, in.value, in.projection.narrow(1, 0, 19));
    FAIL() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("out_proj_weight must have shape [D, H d_v]"),
              std::string::npos);
  }
}

}  // namespace
