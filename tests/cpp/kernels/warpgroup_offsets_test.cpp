// Float masks of pairs, and heads in the general form, on Hopper's own kernels in the interpreter,
// against the CPU kernels in float64.
#include <cmath>
#include <cstdlib>

#include "kernels/half_cases.h"
#include "tier.h"

namespace ikattn {
namespace {

class WarpgroupOffsetsOnDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    interpreter::set_warpgroups(true);
    setenv("IKATTN_SHORT", "0", 1);
  }
  void TearDown() override {
    unsetenv("IKATTN_SHORT");
    interpreter::set_warpgroups(false);
  }
};

// Both passes by Hopper's kernels of the general form.
Results general_results(Call& call, const Case& c) {
  const int before = interpreter::launches_of("warpgroup_");
  Results got = device_results(call, c);
  EXPECT_EQ(interpreter::launches_of("warpgroup_"), before + (c.d_v > 64 && c.M > 32 ? 1 : 3));
  return got;
}

TEST_F(WarpgroupOffsetsOnDevice, ErrByTheirRoundings) {
  const Case cases[] = {
      {.name = "mask", .B = 1, .L = 140, .S = 72, .d_v = 8, .masking = Masking::kFloat},
      {.name = "pairs", .L = 20, .S = 136, .d_v = 8, .M = 9, .masking = Masking::kFloatPerPair},
      one_head({.name = "wide", .L = 20, .S = 132, .d_v = 128, .M = 64}),
      one_head({.name = "odd", .L = 65, .S = 68, .d_v = 72, .M = 33, .causal = true, .eps = 0.1}),
      {.name = "causal_dropout",
       .B = 1,
       .H = 4,
       .G = 2,
       .L = 70,
       .S = 132,
       .d_v = 8,
       .M = 9,
       .causal = true,
       .masking = Masking::kFloat,
       .eps = 0.1,
       .dropout = 0.3},
      {.name = "sides_of_16_bits",
       .B = 1,
       .L = 140,
       .S = 72,
       .d_v = 8,
       .bias = true,
       .half_sides = true,
       .masking = Masking::kFloatPerPair},
      {.name = "large",
       .B = 1,
       .L = 40,
       .S = 72,
       .d_v = 8,
       .masking = Masking::kFloat,
       .magnitude = 40},
      {.name = "lowest",
       .B = 1,
       .L = 20,
       .S = 136,
       .d_v = 8,
       .bias = true,
       .lowest = true,
       .masking = Masking::kFloat},
      {.name = "largest_eps", .B = 1, .L = 20, .S = 72, .masking = Masking::kFloat, .eps = 0.9},
  };
  const auto chosen =
      cases_of_tier(cases, {"mask", "wide", "odd", "causal_dropout", "sides_of_16_bits", "lowest"});
  for (Case c : chosen) {
    SCOPED_TRACE(c.name);
    if (c.masking == Masking::kNone) c.masking = Masking::kFloat;
    for (const ElementType type : types_in_turn(c)) {
      Call call(c = of_type(c, type));
      const Results truth = truth_of(call, c), got = general_results(call, c);
      expect_forward_within(call, c, got, truth, kLargestFeatureRoundoff);
      compare_gradients(device_gradients(call, c, truth), truth, c,
                        amplification_of(c) * (2 * roundoff_of(type) + 0x1p-9));
    }
  }
}

// Exponents that rise and fall along the keys, beyond where their second parts count and back.
TEST_F(WarpgroupOffsetsOnDevice, FollowTheLargestExponent) {
  for (const double size : {3.0, 300.0, 3e5}) {
    Case c = one_head({.name = "rising", .L = 20, .S = 200, .d_v = 8, .M = 9});
    c.masking = Masking::kFloat;
    c = of_type(c, ElementType::kFloat16);
    Call call(c);
    for (int64_t i = 0; i < c.L; ++i) {
      for (int64_t j = 0; j < c.S; ++j) {
        const double rising = i % 2 == 0 ? j / 64 : 3 - j / 64;
        write(call.mask.array, i * c.S + j, i == 3 && j < 130 ? -INFINITY : size * rising);
      }
    }
    const Results truth = truth_of(call, c), got = general_results(call, c);
    expect_forward_within(call, c, got, truth, kLargestFeatureRoundoff);
    compare_gradients(device_gradients(call, c, truth), truth, c,
                      amplification_of(c) * (2 * roundoff_of(c.type) + 0x1p-9));
  }
}

// A row's value where it sees one key, zeros where it sees none.
TEST_F(WarpgroupOffsetsOnDevice, ALoneKeysRowIsItsValue) {
  Case c = one_head({.name = "lone", .L = 70, .S = 72, .d_v = 8, .M = 9});
  c.masking = Masking::kFloat;
  c = of_type(c, ElementType::kBFloat16);
  Call call(c);
  const auto seen = [&](int64_t i) { return (7 * i) % c.S; };
  for (int64_t i = 0; i < c.L; ++i) {
    for (int64_t j = 0; j < c.S; ++j) {
      write(call.mask.array, i * c.S + j, i > 0 && j == seen(i) ? 0.3 * i : -INFINITY);
    }
  }
  const Results got = general_results(call, c);
  for (int64_t i = 0; i < c.L; ++i) {
    for (int64_t column = 0; column < c.d_v; ++column) {
      EXPECT_EQ(read(got.output.array, i * c.d_v + column),
                i == 0 ? 0 : read(call.value.array, seen(i) * c.d_v + column));
    }
  }
  EXPECT_EQ(read(got.log_normalizer.array, 0), -INFINITY);
}

TEST_F(WarpgroupOffsetsOnDevice, NanStaysWhereItIsSeen) {
  Case c = one_head({.name = "nan", .L = 70, .S = 72, .d_v = 8, .M = 9});
  c.masking = Masking::kFloat;
  c = of_type(c, ElementType::kBFloat16);
  for (Tensor Call::* spoiled :
       {&Call::query, &Call::key, &Call::value, &Call::mask, &Call::grad_output}) {
    Call call(c);
    for (int64_t i = 0; i < c.L; ++i) {
      write(call.mask.array, i * c.S + 30, i % 3 == 0 ? 0.5 : -INFINITY);
    }
    const int64_t rows = spoiled == &Call::key || spoiled == &Call::value ? c.S : c.L;
    const Tensor& tensor = call.*spoiled;
    write(tensor.array, 30 * (tensor.count / rows), NAN);
    const Results got = general_results(call, c), truth = truth_of(call, c);
    const double close = 6 * roundoff_of(c.type);
    expect_close(got.output, truth.output, close, "output");
    expect_close(got.grad_query, truth.grad_query, close, "grad_query");
    expect_close(got.grad_key, truth.grad_key, close, "grad_key");
    expect_close(got.grad_value, truth.grad_value, close, "grad_value");
  }
}

// What the mask has for a key that is hidden changes nothing.
TEST_F(WarpgroupOffsetsOnDevice, LetHiddenKeysHoldAnything) {
  Case c = one_head({.name = "hidden", .L = 20, .S = 72, .d_v = 8, .M = 9, .bias = true});
  c.masking = Masking::kFloat;
  c = of_type(c, ElementType::kBFloat16);
  Call call(c);
  write(call.bias.array, 5, -INFINITY);
  const Results expected = general_results(call, c);
  for (int64_t i = 0; i < c.L; ++i) write(call.mask.array, i * c.S + 5, i % 2 ? NAN : INFINITY);
  const Results got = general_results(call, c);
  expect_close(got.output, expected.output, 0, "output");
  expect_close(got.grad_query, expected.grad_query, 0, "grad_query");
  expect_close(got.grad_key, expected.grad_key, 0, "grad_key");
  expect_close(got.grad_value, expected.grad_value, 0, "grad_value");
}

// Heads in either form in one call: those in the general one take its kernel.
TEST_F(WarpgroupOffsetsOnDevice, TakeHeadsWhoseMagnitudesDiffer) {
  Case c{.name = "mixed", .B = 1, .L = 70, .S = 140, .d_v = 8, .M = 9, .causal = true};
  c.bias = true;
  c = of_type(c, ElementType::kBFloat16);
  Call call(c);
  for (int64_t j = 0; j < c.S; ++j) write(call.bias.array, j, j % 2 == 0 ? 0 : -50);
  const int before = interpreter::launches_of("warpgroup_");
  const Results truth = truth_of(call, c), got = device_results(call, c);
  EXPECT_EQ(interpreter::launches_of("warpgroup_"), before + warpgroup_launches(c));
  expect_forward_within(call, c, got, truth, kLargestFeatureRoundoff);
  compare_gradients(device_gradients(call, c, truth), truth, c,
                    amplification_of(c) * (2 * roundoff_of(c.type) + 0x1p-9));
}

// Rows that TMA cannot copy go to mma.sync.
TEST_F(WarpgroupOffsetsOnDevice, TakeNoRowsBetweenMultiplesOf16Bytes) {
  Case c = one_head({.name = "unaligned", .L = 20, .S = 70, .d_v = 8});
  c.masking = Masking::kFloat;
  c = of_type(c, ElementType::kBFloat16);
  Call call(c);
  const int before = interpreter::launches_of("warpgroup_");
  const Results truth = truth_of(call, c), got = device_results(call, c);
  EXPECT_EQ(interpreter::launches_of("warpgroup_"), before);
  expect_forward_within(call, c, got, truth, kLargestFeatureRoundoff);
}

TEST_F(WarpgroupOffsetsOnDevice, GiveTheSameInEveryOrder) {
  interpreter::set_multiprocessors(2);
  Case c{.name = "orders", .B = 1, .H = 2, .G = 1, .L = 20, .S = 136, .d_v = 8};
  c.frequency_heads = 1;
  c.masking = Masking::kFloat;
  c.dropout = 0.3;
  Call call(c = of_type(c, ElementType::kBFloat16));
  expect_the_same_in_every_order(call, c);
  interpreter::set_multiprocessors(1);
}

}  // namespace
}  // namespace ikattn
