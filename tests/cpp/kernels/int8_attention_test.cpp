// Scores of integers of 8 bits by mma.sync, in the interpreter: bfloat16, 33 to 64 frequencies.
#include <array>
#include <cmath>
#include <tuple>

#include "kernels/half_cases.h"
#include "support/interpreter/integer_products.h"
#include "tier.h"

namespace ikattn {
namespace {

// The GPU has them; the kernels that ran, by their names.
class Int8AttentionOnDevice : public testing::Test {
 protected:
  void SetUp() override { interpreter::set_integer_products(true); }
  void TearDown() override {
    interpreter::set_integer_products(false);
    interpreter::set_warpgroups(false);
    interpreter::set_multiprocessors(1);
  }
  static int launches() {
    return interpreter::launches_of("int8_forward") + interpreter::launches_of("int8_query") +
           interpreter::launches_of("int8_key");
  }
};

TEST_F(Int8AttentionOnDevice, ErrsByTheRoundingsOfInt8) {
  const Case cases[] = {
      one_head({.name = "int8", .L = 130, .S = 110, .d_v = 64, .M = 64}),
      one_head({.name = "wide_value", .L = 65, .S = 129, .d_v = 72, .M = 33}),
      one_head({.name = "one", .L = 1, .S = 65, .d_v = 5, .M = 41}),
      one_head({.name = "causal", .L = 130, .S = 130, .d_v = 16, .M = 64, .causal = true}),
      one_head({.name = "more_keys", .L = 70, .S = 150, .d_v = 8, .M = 40, .causal = true}),
      one_head({.name = "fewer_keys", .L = 150, .S = 70, .d_v = 8, .M = 64, .causal = true}),
      {.name = "padding", .L = 20, .S = 70, .d_v = 8, .M = 64, .bias = true, .key_mask = true},
      {.name = "bool_mask", .L = 40, .S = 90, .d_v = 8, .M = 64, .masking = Masking::kBool},
      {.name = "dropout", .L = 40, .S = 90, .d_v = 8, .M = 64, .dropout = 0.3},
      one_head({.name = "dropout_and_causal",
                .L = 70,
                .S = 90,
                .d_v = 72,
                .M = 64,
                .causal = true,
                .masking = Masking::kBool,
                .dropout = 0.3}),
      {.name = "grouped",
       .H = 4,
       .G = 2,
       .L = 20,
       .S = 140,
       .d_v = 8,
       .M = 64,
       .frequency_heads = 1,
       .causal = true},
      {.name = "stationary", .L = 20, .S = 140, .d_v = 8, .M = 64, .stationary = true},
      {.name = "no_magnitude", .L = 20, .S = 140, .d_v = 8, .M = 64, .p = 0},
      {.name = "largest_eps", .L = 20, .S = 140, .d_v = 8, .M = 64, .eps = 0.9},
      {.name = "general", .L = 70, .S = 140, .d_v = 8, .M = 64, .causal = true, .magnitude = 40},
  };
  const auto chosen =
      cases_of_tier(cases, {"int8", "wide_value", "one", "causal", "padding", "bool_mask",
                            "dropout_and_causal", "grouped", "general"});
  for (Case c : chosen) {
    SCOPED_TRACE(c.name);
    Call call(c = of_type(c, ElementType::kBFloat16));
    const int before = launches();
    const Results truth = truth_of(call, c), got = device_results(call, c);
    EXPECT_EQ(launches(), before + 3);
    expect_forward_within(call, c, got, truth, c.S < 100 ? kLargestInt8Roundoff : kInt8Roundoff);
    // Rows of few keys follow from few scores; test_cuda_int8.py has closer bounds.
    compare_gradients(got, truth, c, amplification_of(c) * (c.causal ? 0x1p-3 : 0x1p-4));
  }
}

// Where Hopper's own kernels and these take a call, they make weights by one rule.
TEST_F(Int8AttentionOnDevice, WeighsAsHoppersKernelsDo) {
  for (const bool causal : {true, false}) {
    if (!causal && !runs_everything()) continue;
    Case c = one_head({.name = "hopper", .L = 140, .S = 150, .d_v = 8, .M = 64});
    c.causal = causal;
    Call call(c = of_type(c, ElementType::kBFloat16));
    const Results own = device_results(call, c);
    interpreter::set_warpgroups(true);
    setenv("IKATTN_SHORT", "0", 1);
    const int before = interpreter::launches_of("warpgroup_int8");
    const Results theirs = device_results(call, c);
    EXPECT_EQ(interpreter::launches_of("warpgroup_int8"), before + 1);
    unsetenv("IKATTN_SHORT");
    interpreter::set_warpgroups(false);
    // Sums of the same weights, in another order of keys.
    expect_close(own.log_normalizer, theirs.log_normalizer, 0x1p-20, "log_normalizer");
    expect_close(own.output, theirs.output, roundoff_of(c.type) * 1.01, "output");
    compare_gradients(own, theirs, c, 0x1p-7);
  }
}

// Few queries: blocks share their keys.
TEST_F(Int8AttentionOnDevice, GivesTheSameInEveryOrder) {
  interpreter::set_multiprocessors(6);
  for (const auto& [masking, causal, dropout] :
       {std::tuple{Masking::kBool, false, 0.3}, {Masking::kNone, true, 0.0}}) {
    if (causal && !runs_everything()) continue;
    Case c = one_head({.name = "orders", .L = 20, .S = 520, .d_v = 8, .M = 64});
    c.masking = masking;
    c.causal = causal;
    c.dropout = dropout;
    Call call(c = of_type(c, ElementType::kBFloat16));
    const Results truth = truth_of(call, c), got = device_results(call, c);
    expect_forward_within(call, c, got, truth, kInt8Roundoff);
    expect_the_same_in_every_order(call, c);
  }
}

// On a Hopper few queries share out their keys by mma.sync, and the backward is its own kernels':
// both have the same scores.
TEST_F(Int8AttentionOnDevice, MeetsHoppersBackward) {
  interpreter::set_warpgroups(true);
  interpreter::set_multiprocessors(6);
  Case c{.name = "few", .B = 1, .H = 1, .G = 1, .L = 20, .S = 550, .d_v = 8, .M = 64};
  c.frequency_heads = 1;
  Call call(c = of_type(c, ElementType::kBFloat16));
  const auto launches = [] {
    return std::array{interpreter::launches_of("int8_forward_kernel"),
                      interpreter::launches_of("warpgroup_int8"),
                      interpreter::launches_of("warpgroup_key")};
  };
  const auto before = launches();
  const Results truth = truth_of(call, c), got = device_results(call, c);
  EXPECT_EQ(launches(), (std::array{before[0] + 1, before[1], before[2] + 1}));
  expect_forward_within(call, c, got, truth, kInt8Roundoff);
  compare_gradients(got, truth, c, 0x1p-4);
}

// Pairs are then those of bfloat16: by mma.sync, and on a Hopper.
TEST_F(Int8AttentionOnDevice, TakesFloat32WhereItIsAskedFor) {
  setenv("IKATTN_INT8", "float32", 1);
  for (const auto& [hopper, causal, M] :
       {std::tuple{false, true, 64}, {true, false, 33}, {false, false, 41}, {true, true, 64}}) {
    if (hopper == causal && !runs_everything()) continue;
    interpreter::set_warpgroups(hopper);
    Case c = one_head({.name = "float32", .L = 70, .S = 150, .d_v = 12});
    c.causal = causal;
    c.M = M;
    Call call(c = of_type(c, ElementType::kFloat32));
    const int before = interpreter::launches_of("int8_forward_kernel");
    const Results truth = truth_of(call, c), got = device_results(call, c);
    EXPECT_EQ(interpreter::launches_of("int8_forward_kernel"), before + 1);
    const Bounds bounds =
        bounds_of(call, c, truth, roundoff_of(ElementType::kBFloat16), kInt8Roundoff);
    expect_within(got.output, truth.output, bounds.output, "output");
    expect_within(got.log_normalizer, truth.log_normalizer, bounds.log_normalizer, "log Z");
    compare_gradients(got, truth, c, causal ? 0x1p-3 : 0x1p-4);
  }
  unsetenv("IKATTN_INT8");
}

TEST_F(Int8AttentionOnDevice, NanStaysWhereItIsSeen) {
  for (const bool causal : {true, false}) {
    Case c = one_head({.name = "nan", .L = 70, .S = 70, .d_v = 8, .M = 64});
    c.causal = causal;
    c = of_type(c, ElementType::kBFloat16);
    for (Tensor Call::* spoiled : {&Call::query, &Call::key, &Call::value, &Call::grad_output}) {
      Call call(c);
      const Tensor& tensor = call.*spoiled;
      write(tensor.array, 40 * (tensor.count / 70), causal ? NAN : INFINITY);
      const Results got = device_results(call, c), truth = truth_of(call, c);
      expect_close(got.output, truth.output, 0x1p-5, "output");
      expect_close(got.grad_query, truth.grad_query, 0x1p-4, "grad_query");
      expect_close(got.grad_key, truth.grad_key, 0x1p-4, "grad_key");
      expect_close(got.grad_value, truth.grad_value, 0x1p-4, "grad_value");
    }
  }
}

TEST_F(Int8AttentionOnDevice, HiddenKeysMayHoldAnything) {
  for (const Masking masking : {Masking::kNone, Masking::kBool}) {
    Case c = one_head({.name = "hidden", .L = 70, .S = 70, .d_v = 8, .M = 64, .bias = true});
    c.masking = masking;
    Call clean(c = of_type(c, ElementType::kBFloat16)), call(c);
    for (const int64_t j : {int64_t{3}, int64_t{40}}) {
      write(clean.bias.array, j, -INFINITY);
      write(call.bias.array, j, -INFINITY);
      write(call.key.array, j * c.d, NAN);
      write(call.value.array, j * c.d_v, INFINITY);
    }
    const Results got = device_results(call, c), expected = device_results(clean, c);
    for (int64_t i = 0; i < got.output.count; ++i) {
      EXPECT_EQ(read(got.output.array, i), read(expected.output.array, i)) << i;
    }
    compare_gradients(got, expected, c, 0);
  }
}

}  // namespace
}  // namespace ikattn
