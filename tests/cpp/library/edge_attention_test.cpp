// Attention over edges from LibTorch alone.
#include <gtest/gtest.h>
#include <ikattn/attention.h>
#include <ikattn/edge_attention.h>
#include <torch/torch.h>

#include "device.h"

namespace {

using torch::Tensor;

struct Graph {
  Tensor query, key, value, w1, w2;

  Graph() {
    torch::manual_seed(1);
    const auto make = [](at::IntArrayRef sizes, double scale) {
      return (scale * torch::randn(sizes, at::kDouble)).to(on_device(at::kDouble));
    };
    query = make({3, 2, 4}, 1).requires_grad_();
    key = make({4, 2, 4}, 1).requires_grad_();
    value = make({4, 2, 5}, 1).requires_grad_();
    w1 = make({2, 4, 6}, 0.2);
    w2 = make({2, 4, 6}, 0.2);
  }
};

Tensor nodes(at::ArrayRef<int64_t> numbers) { return torch::tensor(numbers, on_device(at::kLong)); }

TEST(EdgeAttention, OfEveryPairIsAttention) {
  const Graph graph;
  const auto [output, weights] = ikattn::implicit_kernel_edge_attention(
      graph.query, graph.key, graph.value, nodes({0, 4, 8, 12}),
      nodes({0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3}), graph.w1, graph.w2);
  const auto heads = [](const Tensor& x) { return x.transpose(0, 1).unsqueeze(0); };
  const Tensor expected = ikattn::implicit_kernel_attention(heads(graph.query), heads(graph.key),
                                                            heads(graph.value), graph.w1, graph.w2);
  EXPECT_TRUE(torch::allclose(heads(output), expected, 1e-10, 1e-12));
  const std::vector<Tensor> inputs = {graph.query, graph.key, graph.value};
  const auto found = torch::autograd::grad({output.square().sum()}, inputs);
  const auto gradients = torch::autograd::grad({expected.square().sum()}, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_TRUE(torch::allclose(found[i], gradients[i], 1e-9, 1e-12)) << i;
  }
}

TEST(EdgeAttention, ALeakyReluTakesTheLogitOfBothEnds) {
  const Graph graph;
  const Tensor rowptr = nodes({0, 4, 8, 12}), col = nodes({0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3});
  const Tensor vector = torch::cat({graph.w1.select(2, 0), graph.w2.select(2, 0)}, -1) * 10;
  ikattn::EdgeAttentionOptions options;
  options.negative_slope = 0.2;
  const auto [output, weights] = ikattn::gat_edge_attention(
      vector, graph.query, graph.key, graph.value, rowptr, col, {}, {}, options);
  const Tensor of_target = (graph.query * vector.narrow(1, 0, 4)).sum(-1).unsqueeze(1);
  const Tensor of_source = (graph.key * vector.narrow(1, 4, 4)).sum(-1).unsqueeze(0);
  const Tensor logits = torch::leaky_relu((of_target + of_source) / std::sqrt(8.0), 0.2);
  EXPECT_TRUE(torch::allclose(weights, logits.softmax(1).reshape({12, 2}), 1e-10, 1e-12));
  EXPECT_THROW(ikattn::implicit_kernel_edge_attention(graph.query, graph.key, graph.value, rowptr,
                                                      col, graph.w1, graph.w2, options),
               c10::Error);
}

// Under AddressSanitizer (make asan) whatever is read or written out of bounds ends the test.
TEST(EdgeAttention, RandomIndicesAreComputedOrRefused) {
  const Graph graph;
  const at::TensorOptions options = on_device(at::kLong);
  int refused = 0;
  for (int round = 0; round < 400; ++round) {
    const auto draw = [](int64_t low, int64_t high) {
      return torch::randint(low, high, {1}, at::kLong).item<int64_t>();
    };
    const int64_t E = draw(0, 9);
    Tensor rowptr = std::get<0>(torch::randint(0, E + 1, {4}, at::kLong).sort());
    rowptr[0] = 0;
    rowptr[3] = E;
    Tensor col = torch::randint(0, 4, {E}, at::kLong);
    for (Tensor* index : {&rowptr, &col}) {
      if (index->numel() > 0 && draw(0, 3) == 0) {
        (*index)[draw(0, index->numel())] = draw(-(int64_t{1} << 40), int64_t{1} << 40);
      }
    }
    try {
      const auto [output, weights] = ikattn::softmax_edge_attention(
          graph.query, graph.key, graph.value, rowptr.to(options), col.to(options));
      torch::autograd::grad({output.square().sum() + weights.sum()},
                            {graph.query, graph.key, graph.value});
    } catch (const c10::Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 20);
  EXPECT_LT(refused, 380);
}

TEST(EdgeAttention, DrawsASeedForDropout) {
  const Graph graph;
  ikattn::EdgeAttentionOptions options;
  options.dropout_p = 0.5;
  const auto [output, weights] = ikattn::implicit_kernel_edge_attention(
      graph.query, graph.key, graph.value, nodes({0, 0, 1, 1}), nodes({3}), graph.w1, graph.w2,
      options);
  EXPECT_TRUE(((weights == 0) | (weights == 2)).all().item<bool>());
}

}  // namespace
