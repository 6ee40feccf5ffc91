// The arithmetic of the contributions, against torch's in float64.
#include "contributions/arithmetic.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace ikattn {
namespace {

using torch::Tensor;

// Edges of the registers, the panels and the tiles, of each axis by itself and of all.
std::vector<std::array<int64_t, 3>> sizes() {
  std::vector<std::array<int64_t, 3>> result = {{1, 1, 1}, {65, 129, 67}, {193, 257, 70}};
  for (const int64_t edge : {0, 1, 7, 16, 63, 64, 65, 191, 192, 193, 260, 770}) {
    result.push_back({edge, 9, 10});
    result.push_back({9, edge, 10});
    result.push_back({9, 10, edge});
  }
  return result;
}

// Returns the same numbers in other places: by rows, by columns, with gaps.
std::vector<Tensor> layouts(const Tensor& x) {
  const Tensor spread = torch::zeros({x.size(0), 2 * x.size(1), 3 * x.size(2)}, x.options());
  const Tensor part = spread.slice(1, 0, std::nullopt, 2).slice(2, 0, std::nullopt, 3);
  part.copy_(x);
  return {x, x.mT().contiguous().mT(), x.transpose(0, 1).contiguous().transpose(0, 1), part};
}

double error(const Tensor& got, const Tensor& expected) {
  if (expected.numel() == 0) return got.sizes() == expected.sizes() ? 0 : INFINITY;
  return (got.to(at::kDouble) - expected).abs().max().item<double>();
}

TEST(Products, OfEverySizeAndLayout) {
  for (const auto& [type, tolerance] : {std::pair{at::kDouble, 1e-15}, {at::kFloat, 1e-6}}) {
    torch::manual_seed(0);
    for (const auto& [rows, depth, columns] : sizes()) {
      const Tensor a = torch::randn({3, rows, depth}).to(type);
      const Tensor b = torch::randn({3, depth, columns}).to(type);
      const Tensor expected = torch::matmul(a.to(at::kDouble), b.to(at::kDouble));
      const double allowed = tolerance * (4 + static_cast<double>(depth));
      for (const Tensor& left : layouts(a)) {
        for (const Tensor& right : layouts(b)) {
          EXPECT_LE(error(kArithmetic.product(left, right), expected), allowed)
              << rows << " x " << depth << " x " << columns << left.strides() << right.strides();
        }
      }
    }
  }
}

TEST(Products, OfSharedMatricesAndTwoLeadingAxes) {
  torch::manual_seed(1);
  const Tensor a = torch::randn({2, 3, 5, 70}, at::kDouble);
  const Tensor b = torch::randn({2, 3, 70, 9}, at::kDouble),
               one = torch::randn({70, 9}, at::kDouble);
  EXPECT_LE(error(kArithmetic.product(a, b), torch::matmul(a, b)), 1e-13);
  EXPECT_LE(error(kArithmetic.product(a, one), torch::matmul(a, one)), 1e-13);
  EXPECT_LE(
      error(kArithmetic.product(a.transpose(1, 2), one), torch::matmul(a.transpose(1, 2), one)),
      1e-13);
  EXPECT_LE(error(kArithmetic.product(a, b[1][2].expand({2, 3, 70, 9})), torch::matmul(a, b[1][2])),
            1e-13);
}

TEST(Products, IntoOneThatIsThere) {
  torch::manual_seed(2);
  const Tensor a = torch::randn({130, 70}, at::kDouble), b = torch::randn({70, 90}, at::kDouble);
  const Tensor before = torch::randn({130, 200}, at::kDouble);
  for (const bool accumulate : {false, true}) {
    const Tensor whole = before.clone();
    Tensor part = whole.narrow(1, 60, 90);
    multiply_into(part, a, b, accumulate);
    const Tensor expected = before.clone();
    expected.narrow(1, 60, 90).mul_(accumulate ? 1 : 0).add_(torch::matmul(a, b));
    EXPECT_LE(error(whole, expected), 1e-13);
    Tensor turned = before.narrow(1, 0, 90).t().contiguous().t();
    multiply_into(turned, a, b, accumulate);
    EXPECT_EQ(turned.stride(0), 1);
    EXPECT_LE(error(turned, torch::matmul(a, b) + (accumulate ? 1 : 0) * before.narrow(1, 0, 90)),
              1e-13);
  }
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

TEST(Sums, OverEverySetOfAxes) {
  torch::manual_seed(5);
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{3, 4, 65, 70}, {1, 1, 9, 1}}) {
    const Tensor x = torch::randn(sizes, at::kDouble).transpose(-1, -2).contiguous().mT();
    for (int kept = 0; kept < 16; ++kept) {
      std::vector<int64_t> target = sizes;
      for (int axis = 0; axis < 4; ++axis) {
        if (!(kept >> axis & 1)) target[axis] = 1;
      }
      const Tensor expected = at::sum_to(x, target);
      EXPECT_EQ(summed_to(x, target).sizes(), expected.sizes());
      EXPECT_LE(error(summed_to(x, target), expected), 1e-11);
    }
    EXPECT_LE(error(summed_to(x, {sizes[3]}), x.sum(at::IntArrayRef{0, 1, 2})), 1e-11);
    EXPECT_LE(error(summed_to(x, {}), x.sum()), 1e-11);
  }
  EXPECT_TRUE(torch::equal(summed_to(torch::zeros({0, 3}), {1, 3}), torch::zeros({1, 3})));
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
