// The kernel of the features, which makes the keys' logits and chooses the forms of heads, too:
// against the kernels that do so where rows of keys lie at other places, to the bit.
#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/half_cases.h"
#include "support/interpreter/integer_products.h"
#include "tier.h"

namespace ikattn {
namespace {

class FeatureSharesOnDevice : public testing::Test {
 protected:
  void SetUp() override { interpreter::set_integer_products(true); }
  void TearDown() override {
    interpreter::set_integer_products(false);
    interpreter::set_multiprocessors(1);
    interpreter::set_order(interpreter::Order::kForward);
  }
  static std::array<int, 2> launches() {
    return {interpreter::launches_of("logit_kernel"), interpreter::launches_of("fold_kernel")};
  }
};

// A hidden key, one that is poisoned, and a value that is not finite.
void spoil(Call& call, const Case& c) {
  if (!c.bias) return;
  write(call.bias.array, 3, -INFINITY);
  write(call.key.array, 3 * c.d, NAN);
  write(call.key.array, (c.S - 2) * c.d + 1, NAN);
  write(call.value.array, call.value.count - 1, INFINITY);
}

// The same numbers in rows that begin at no multiple of 16 bytes.
void move_keys(Call& call, const Case& c) {
  const Tensor key = call.key;
  call.key = make(call.memory, c.type, {key.count + 1});
  call.key.array.data = static_cast<uint16_t*>(call.key.array.data) + 1;
  std::copy_n(key.array.stride, 4, call.key.array.stride);
  for (int64_t i = 0; i < key.count; ++i) write(call.key.array, i, read(key.array, i));
}

void expect_the_same(const Results& got, const Results& expected, const Case& c) {
  expect_close(got.log_normalizer, expected.log_normalizer, 0, "log_normalizer");
  expect_close(got.output, expected.output, 0, "output");
  expect_close(got.weights, expected.weights, 0, "weights");
  compare_gradients(got, expected, c, 0);
}

TEST_F(FeatureSharesOnDevice, MakeWhatKernelsOfTheirOwnMake) {
  constexpr ElementType kHalf = ElementType::kFloat16, kBFloat = ElementType::kBFloat16;
  const Case cases[] = {
      {.name = "int8",
       .B = 1,
       .L = 4,
       .S = 270,
       .d = 40,
       .d_v = 8,
       .M = 64,
       .bias = true,
       .type = kBFloat},
      {.name = "int8_general",
       .B = 1,
       .L = 4,
       .S = 270,
       .d = 8,
       .d_v = 8,
       .M = 40,
       .causal = true,
       .bias = true,
       .magnitude = 400,
       .type = kBFloat},
      {.name = "int8_causal",
       .B = 1,
       .L = 4,
       .S = 270,
       .d = 8,
       .d_v = 8,
       .M = 40,
       .causal = true,
       .type = kBFloat},
      {.name = "half",
       .B = 1,
       .H = 4,
       .L = 4,
       .S = 270,
       .d = 8,
       .d_v = 16,
       .M = 9,
       .bias = true,
       .magnitude = 3,
       .type = kHalf},
      {.name = "masked",
       .L = 4,
       .S = 40,
       .d = 8,
       .d_v = 8,
       .M = 9,
       .causal = true,
       .masking = Masking::kBool,
       .dropout = 0.3,
       .type = kHalf},
      {.name = "linear",
       .B = 1,
       .L = 130,
       .S = 270,
       .d = 8,
       .d_v = 8,
       .M = 8,
       .magnitude = 9,
       .linear_time = LinearTime::kAlways,
       .type = kBFloat},
      {.name = "no_magnitude",
       .B = 1,
       .L = 4,
       .S = 70,
       .d = 8,
       .d_v = 8,
       .M = 9,
       .stationary = true,
       .p = 0,
       .type = kBFloat},
      {.name = "float_mask",
       .B = 1,
       .L = 4,
       .S = 70,
       .d = 8,
       .d_v = 8,
       .M = 9,
       .bias = true,
       .masking = Masking::kFloat,
       .type = kBFloat},
  };
  for (const Case& c : cases_of_tier(cases, {"int8", "int8_general", "half", "masked", "linear"})) {
    SCOPED_TRACE(c.name);
    interpreter::set_multiprocessors(6);  // several ranges of keys
    Call call(c);
    spoil(call, c);
    const auto before = launches();
    const Results got = device_results(call, c);
    EXPECT_EQ(launches(), before);
    move_keys(call, c);
    const Results expected = device_results(call, c);
    EXPECT_EQ(launches(), (std::array{before[0] + 4, before[1] + 4}));  // twice weights
    expect_the_same(got, expected, c);
    const double last = read(got.output.array, got.output.count - 1);
    EXPECT_EQ(std::isnan(last), c.bias && !c.causal);  // of a value that is not finite, if seen
  }
}

// Blocks take shares in turn, whatever their own order is, and however far logits go ahead.
TEST_F(FeatureSharesOnDevice, GiveTheSameInEveryOrder) {
  Case c{.name = "orders", .L = 3, .S = 270, .d = 8, .d_v = 8, .M = 9, .causal = true};
  Call call(c = of_type(c, ElementType::kBFloat16));
  const Results expected = device_results(call, c);
  // The logits of keys go one head ahead, or all four.
  for (const int multiprocessors : {6, 60}) {
    interpreter::set_multiprocessors(multiprocessors);
    for (const interpreter::Order order : interpreter::kEveryOrder) {
      if (order == interpreter::Order::kForward && multiprocessors > 6) continue;
      interpreter::set_order(order);
      expect_the_same(device_results(call, c), expected, c);
    }
  }
}

TEST_F(FeatureSharesOnDevice, LeaveSomethingOfHeadsWithoutQueriesOrKeys) {
  for (const auto& [L, S] : {std::array<int64_t, 2>{0, 40}, {5, 0}}) {
    Case c{.name = "none", .L = L, .S = S, .d = 8, .d_v = 8, .M = 9};
    Call call(c = of_type(c, ElementType::kBFloat16));
    compare(device_results(call, c), truth_of(call, c), c, 1e-2, 1e-2);
  }
}

}  // namespace
}  // namespace ikattn
