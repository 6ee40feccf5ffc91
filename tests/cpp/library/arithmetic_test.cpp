// The arithmetic of the contributions, against torch's in float64.
#include "contributions/arithmetic.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace ikattn {
namespace {

using torch::Tensor;

double error(const Tensor& got, const Tensor& expected) {
  if (expected.numel() == 0) return got.sizes() == expected.sizes() ? 0 : INFINITY;
  return (got.to(at::kDouble) - expected).abs().max().item<double>();
}

TEST(Products, HaveTheSameBitsForEveryNumberOfThreads) {
  const int before = at::get_num_threads();
  torch::manual_seed(3);
  for (const auto& [rows, depth, columns] :
       {std::array<int64_t, 3>{64, 300, 768}, {513, 90, 70}, {12, 12, 770}, {9, 5000, 40}}) {
    const Tensor a = torch::randn({5, rows, depth}), b = torch::randn({5, depth, columns});
    at::set_num_threads(1);
    const Tensor expected = kArithmetic.product(a, b), shared = kArithmetic.product(a, b[0]);
    for (const int threads : {2, 3, 7, 16}) {
      at::set_num_threads(threads);
      EXPECT_TRUE(torch::equal(kArithmetic.product(a, b), expected))
          << rows << ", " << threads << " threads";
      EXPECT_TRUE(torch::equal(kArithmetic.product(a, b[0]), shared))
          << rows << ", " << threads << " threads";
    }
  }
  at::set_num_threads(before);
}

TEST(Products, KeepWhatIsNoNumberInItsRowsAndColumns) {
  Tensor a = torch::ones({70, 80}), b = torch::ones({80, 90});
  a[3][5] = NAN;
  b[7][66] = INFINITY;
  EXPECT_TRUE(
      torch::allclose(kArithmetic.product(a, b), torch::matmul(a, b), 0, 0, /*equal_nan=*/true));
}

// The gradients of a loss by both.
template <typename Loss>
void expect_derivatives_of_torch(const Loss& loss, const std::vector<Tensor>& leaves) {
  const auto derivatives = [&](const Arithmetic& arithmetic) {
    return torch::autograd::grad({loss(arithmetic)}, leaves);
  };
  const auto got = derivatives(kGraphArithmetic), expected = derivatives(kTorchArithmetic);
  for (size_t i = 0; i < got.size(); ++i) {
    const Tensor largest = expected[i].abs().max();
    EXPECT_LE(error(got[i], expected[i]), 1e-12 * largest.item().toDouble()) << i;
  }
}

Tensor leaf(at::IntArrayRef sizes) { return torch::randn(sizes, at::kDouble).requires_grad_(); }

TEST(Graph, HasTheDerivativesOfTorch) {
  torch::manual_seed(4);
  const Tensor a = leaf({2, 3, 4}), b = leaf({2, 4, 5}), one = leaf({4, 5});
  for (const Tensor& right : {b, one}) {
    expect_derivatives_of_torch(
        [&](const Arithmetic& arithmetic) { return arithmetic.product(a, right).pow(3).sum(); },
        {a, right});
  }
  expect_derivatives_of_torch(
      [&](const Arithmetic& arithmetic) { return arithmetic.softmax(a).pow(3).sum(); }, {a});
  for (const Tensor& small : {leaf({4}), leaf({3, 1}), leaf({2, 1, 1}), leaf({})}) {
    expect_derivatives_of_torch(
        [&](const Arithmetic& arithmetic) {
          return (arithmetic.broadcast(small, a.sizes()) * a).pow(3).sum();
        },
        {a, small});
  }
  const Tensor product = kGraphArithmetic.product(a, b.detach());
  EXPECT_TRUE(torch::autograd::grad({product.sum()}, {a})[0].defined());
  const Tensor again = kGraphArithmetic.product(a, b).square().sum();
  EXPECT_THROW(torch::autograd::grad({again}, {a}, {}, true, /*create_graph=*/true), c10::Error);
  const at::NoGradGuard no_gradients;
  EXPECT_FALSE(kGraphArithmetic.product(a, b).requires_grad());
}

}  // namespace
}  // namespace ikattn
