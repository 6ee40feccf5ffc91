// Attention in float32 by split products, in the interpreter: the widths that kernels are compiled
// for, how far they err beside CUDA cores, and numbers that Half could not hold.
#include <algorithm>

#include "kernels/attention_cases.h"

namespace ikattn {
namespace {

const std::vector<Case> kCases = cases_of(R"(
narrow B=1 L=70 S=100 M=20
wide_value B=1 L=70 S=40 d_v=70 M=20
wide_features B=1 L=66 S=70 d=9 M=35 causal
widest B=1 L=70 S=66 d_v=128 M=64 causal
masked_widest B=1 L=20 S=70 d_v=121 M=64 bias mask=bool dropout=0.3
masked_features B=1 H=4 L=70 S=35 M=64 causal mask=per_key dropout=0.1
)");

class SplitProducts : public ::testing::TestWithParam<Case> {};

// The largest difference, relative to the largest element.
double error_of(const Tensor& got, const Tensor& truth) {
  double error = 0, largest = 0;
  for (int64_t i = 0; i < got.count; ++i) {
    error = std::max(error, std::fabs(read(got.array, i) - read(truth.array, i)));
    largest = std::max(largest, std::fabs(read(truth.array, i)));
  }
  return largest > 0 ? error / largest : error;
}

// One row of a tensor of one head.
Tensor row_of(const Tensor& tensor, int64_t row, int64_t width) {
  Tensor part = tensor;
  part.array.data =
      static_cast<unsigned char*>(part.array.data) + row * width * size_of(part.array.type);
  part.count = width;
  return part;
}

constexpr double kUlp = 0x1p-23;

TEST_P(SplitProducts, ErrAsCudaCoresDo) {
  const Case c = GetParam();
  Call call(c);
  const Results truth = truth_of(call, c), got = device_results(call, c);
  const SplitSetting setting(false);
  const Results plain = device_results(call, c);
  const auto compare = [&](const Tensor Results::* which, double factor, const char* what) {
    const double own = error_of(got.*which, truth.*which);
    EXPECT_LE(own, factor * error_of(plain.*which, truth.*which) + 2 * kUlp) << what;
    RecordProperty(what, std::to_string(own / kUlp));
  };
  compare(&Results::output, 2, "output");
  compare(&Results::log_normalizer, 2, "log_normalizer");
  compare(&Results::grad_query, 2, "grad_query");
  compare(&Results::grad_key, 2, "grad_key");
  compare(&Results::grad_value, 2, "grad_value");
  compare(&Results::grad_w1, 2, "grad_w1");
  compare(&Results::grad_w2, 2, "grad_w2");
}

INSTANTIATE_TEST_SUITE_P(Interpreter, SplitProducts, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

// A row of the value, or of the incoming gradient, that is much larger than the others: what does
// not see it keeps all its digits.
TEST(SplitProducts, RowsThatDifferByManyOrders) {
  for (const double factor : {1e4, 1e12}) {
    const Case c = one_head({.name = "large_row", .L = 40, .S = 40, .M = 8, .causal = true});
    Call call(c);
    for (const auto& [tensor, row] :
         {std::pair{&call.value, int64_t{30}}, {&call.grad_output, int64_t{5}}}) {
      for (int64_t column = 0; column < c.d_v; ++column) {
        const int64_t at = row * c.d_v + column;
        write(tensor->array, at, factor * read(tensor->array, at));
      }
    }
    const Results truth = truth_of(call, c), got = device_results(call, c);
    const SplitSetting setting(false);
    const Results plain = device_results(call, c);
    for (const Tensor Results::* which : {&Results::output, &Results::grad_value}) {
      for (int64_t i = 0; i < 40; ++i) {
        const double own = error_of(row_of(got.*which, i, c.d_v), row_of(truth.*which, i, c.d_v));
        const double other =
            error_of(row_of(plain.*which, i, c.d_v), row_of(truth.*which, i, c.d_v));
        EXPECT_LE(own, 2 * other + 8 * kUlp) << "row " << i << ", " << factor;
      }
    }
  }
}

// Keys of small weight come first, and their values are large, as behind left padding by a finite
// number: what comes later keeps its digits.
TEST(SplitProducts, TermsThatFadeLeaveRoom) {
  for (const double factor : {1e6, 1e12, 1e20}) {
    Case c = one_head({.name = "faded", .L = 8, .S = 64, .M = 8, .bias = true});
    Call call(c);
    for (int64_t j = 0; j < c.S; ++j) write(call.bias.array, j, j < 32 ? -60 : 0);
    for (int64_t i = 0; i < 32 * c.d_v; ++i) {
      write(call.value.array, i, factor * read(call.value.array, i));
    }
    const Results truth = truth_of(call, c), got = device_results(call, c);
    const SplitSetting setting(false);
    const Results plain = device_results(call, c);
    EXPECT_LE(error_of(got.output, truth.output),
              2 * error_of(plain.output, truth.output) + 4 * kUlp)
        << factor;
    EXPECT_LE(error_of(got.grad_query, truth.grad_query),
              2 * error_of(plain.grad_query, truth.grad_query) + 8 * kUlp)
        << factor;
  }
}

// Numbers far from 1, weights of an eps that Half does not hold, and weights above 1.
TEST(SplitProducts, NumbersThatHalfDoesNotHold) {
  struct Sizes {
    double value, gradient, eps;
  };
  for (const Sizes& sizes : {Sizes{1e30, 1e-30, 1e-12}, {1e-30, 1e25, 1e-30}, {1e4, 1e4, 50}}) {
    for (const bool causal : {false, true}) {
      Case c{.name = "numbers", .B = 1, .L = 40, .S = 40, .M = 8, .causal = causal};
      c.eps = sizes.eps;
      Call call(c);
      for (int64_t i = 0; i < call.value.count; ++i) {
        write(call.value.array, i, sizes.value * read(call.value.array, i));
        write(call.grad_output.array, i, sizes.gradient * read(call.grad_output.array, i));
      }
      const Results truth = truth_of(call, c), got = device_results(call, c);
      const SplitSetting setting(false);
      const Results plain = device_results(call, c);
      EXPECT_LE(error_of(got.output, truth.output), 8 * kUlp);
      EXPECT_LE(error_of(got.grad_value, truth.grad_value), 16 * kUlp);
      EXPECT_LE(error_of(got.grad_query, truth.grad_query),
                2 * error_of(plain.grad_query, truth.grad_query) + 8 * kUlp);
      EXPECT_LE(error_of(got.grad_key, truth.grad_key),
                2 * error_of(plain.grad_key, truth.grad_key) + 8 * kUlp);
    }
  }
}

// A row that sees one key is its value, and its gradients vanish, both as far as float32 goes.
TEST(SplitProducts, LoneKeys) {
  Case c = one_head({.name = "lone", .L = 70, .S = 1, .d_v = 60, .M = 30});
  c.eps = 1e-5;
  Call call(c);
  const Results got = device_results(call, c);
  for (int64_t i = 0; i < got.output.count; ++i) {
    const double value = read(call.value.array, i % c.d_v);
    EXPECT_NEAR(read(got.output.array, i), value, 4 * kUlp * std::fabs(value));
  }
  const SplitSetting setting(false);
  const Results plain = device_results(call, c);
  double own = 0, other = 0;
  for (int64_t i = 0; i < got.grad_query.count; ++i) {
    own = std::max(own, std::fabs(read(got.grad_query.array, i)));
    other = std::max(other, std::fabs(read(plain.grad_query.array, i)));
  }
  EXPECT_LE(own, 5 * other + 1e-6);
}

// Blocks, warps and lanes in any order give the same bits.
TEST(SplitProducts, TheOrderOfBlocksDoesNotMatter) {
  const Case c{.name = "order",
               .B = 1,
               .L = 70,
               .S = 40,
               .bias = true,
               .masking = Masking::kFloatPerKey,
               .dropout = 0.2};
  Call call(c);
  expect_the_same_in_every_order(call, c);
}

}  // namespace
}  // namespace ikattn
