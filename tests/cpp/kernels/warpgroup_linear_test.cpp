// Linear time on Hopper, in the interpreter: the bits that mma.sync gives, which
// linear_attention_test.cpp and causal_linear_test.cpp hold to float64. A GPU's two units may add
// up in other orders.
#include "attention/cuda/kernels.h"
#include "attention/cuda/linear/linear.h"
#include "kernels/half_cases.h"
#include "tier.h"

namespace ikattn {
namespace {

Results results_by(Call& call, const Case& c, bool warpgroups, bool backward) {
  interpreter::set_warpgroups(warpgroups);
  Results results;
  if (backward) {
    results = device_results(call, c);
  } else {
    AttentionParams params;
    call.set(params);
    results.output = make(call.memory, c.type, {c.B, c.H, c.L, c.d_v});
    results.log_normalizer = make(call.memory, ElementType::kFloat64, {c.B, c.H, c.L});
    params.output = results.output.array;
    params.log_normalizer = results.log_normalizer.array;
    EXPECT_STREQ(cuda::attention_kernels.forward[0](params, device_executor(call.memory)), nullptr);
  }
  interpreter::set_warpgroups(false);
  return results;
}

void expect_the_same_bits(Call& call, const Case& c, bool backward) {
  const int before = interpreter::launches_of("warpgroup_");
  const Results by_mma = results_by(call, c, false, backward);
  EXPECT_EQ(interpreter::launches_of("warpgroup_"), before);
  const Results got = results_by(call, c, true, backward);
  // Moments and entries; of the backward moments of both sides, entries, and gradients of both.
  EXPECT_EQ(interpreter::launches_of("warpgroup_"), before + (backward ? 7 : 2));
  expect_close(got.output, by_mma.output, 0, "output");
  expect_close(got.log_normalizer, by_mma.log_normalizer, 0, "log_normalizer");
  if (backward) compare_gradients(got, by_mma, c, 0);
}

Case linear(Case c) {
  c.linear_time = LinearTime::kAlways;
  return c;
}

const Case kLinearCases[] = {
    linear(one_head({.name = "two_chunks", .L = 20, .S = 70, .d_v = 8})),
    linear(one_head({.name = "four_chunks", .L = 20, .S = 66, .d_v = 64, .M = 20})),
    linear(one_head({.name = "six_chunks", .L = 70, .S = 130, .d_v = 20, .M = 33})),
    linear(one_head({.name = "eight_chunks", .L = 20, .S = 66, .d = 8, .d_v = 16, .M = 64})),
    linear(one_head({.name = "edges", .L = 257, .S = 255, .d_v = 63, .M = 15})),
    linear({.name = "grouped",
            .B = 1,
            .G = 1,
            .L = 20,
            .S = 70,
            .d_v = 8,
            .frequency_heads = 1,
            .bias = true}),
    linear({.name = "batch", .H = 4, .G = 2, .L = 20, .S = 127, .d_v = 8, .bias = true}),
    linear({.name = "own_frequencies",
            .B = 1,
            .H = 4,
            .G = 2,
            .L = 20,
            .S = 70,
            .d_v = 12,
            .M = 8,
            .frequency_heads = 4}),
};
// Of which the forward alone is in linear time, or looked at.
const Case kForwardCases[] = {
    // more tiles than stages
    linear({.name = "tiles", .H = 1, .G = 1, .L = 8, .S = 450, .d_v = 8, .frequency_heads = 1}),
    linear(one_head({.name = "two_slices", .L = 20, .S = 128, .d = 8, .d_v = 100, .M = 9})),
    linear(one_head({.name = "two_boxes", .L = 20, .S = 66, .d = 8, .d_v = 8, .M = 33})),
    linear(one_head({.name = "causal", .L = 530, .S = 530, .d_v = 8, .M = 8, .causal = true})),
    linear(one_head({.name = "wide_causal",
                     .L = 270,
                     .S = 300,
                     .d = 8,
                     .d_v = 100,
                     .M = 33,
                     .causal = true,
                     .bias = true})),
};

void expect_the_same_bits(const Case& one, bool backward) {
  for (const ElementType type : types_in_turn(one)) {
    const Case c = of_type(one, type);
    Call call(c);
    expect_the_same_bits(call, c, backward);
  }
}

class WarpgroupLinearOnDevice : public ::testing::TestWithParam<Case> {};
class WarpgroupLinearForwardOnDevice : public ::testing::TestWithParam<Case> {};

TEST_P(WarpgroupLinearOnDevice, GivesTheBitsOfMmaSync) { expect_the_same_bits(GetParam(), true); }
TEST_P(WarpgroupLinearForwardOnDevice, GivesTheBitsOfMmaSync) {
  expect_the_same_bits(GetParam(), false);
}

INSTANTIATE_TEST_SUITE_P(Interpreter, WarpgroupLinearOnDevice,
                         ::testing::ValuesIn(cases_of_tier(kLinearCases, {"grouped"})),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Interpreter, WarpgroupLinearForwardOnDevice,
                         ::testing::ValuesIn(cases_of_tier(kForwardCases, {"tiles", "two_slices",
                                                                           "two_boxes", "causal"})),
                         [](const auto& info) { return info.param.name; });

// Parts of the tokens, each of more tiles than stages, of which the last is no whole tile.
TEST(WarpgroupLinearOnDevice, SharesOfKeys) {
  if (!runs_everything()) return;
  interpreter::set_multiprocessors(6);
  const Case c = of_type(linear(one_head({.name = "shares", .L = 20, .S = 2100, .d_v = 8})),
                         ElementType::kBFloat16);
  Call call(c);
  expect_the_same_bits(call, c, false);
  interpreter::set_multiprocessors(1);
}

TEST(WarpgroupLinearOnDevice, EveryOrderGivesTheSameBits) {
  const Case c = of_type(linear(one_head({.name = "order", .L = 8, .S = 66, .d_v = 8})),
                         ElementType::kBFloat16);
  Call call(c);
  interpreter::set_warpgroups(true);
  expect_the_same_in_every_order(call, c);
  interpreter::set_warpgroups(false);
}

// What is not finite, seen and hidden: a block of queries, and a head, that go by pairs.
TEST(WarpgroupLinearOnDevice, WhatGoesByPairsIsTheSame) {
  for (const ElementType type : types_in_turn(0)) {
    Case c = linear({.name = "nan", .B = 1, .H = 2, .G = 2, .L = 140, .S = 66, .d_v = 8});
    c.bias = true;
    Call call(c = of_type(c, type));
    write(call.query.array, 130 * c.d, NAN);
    write(call.value.array, (c.S + 7) * c.d_v, NAN);  // of the second head
    write(call.bias.array, 3, -INFINITY);
    write(call.value.array, 3 * c.d_v, 60000.0);
    expect_the_same_bits(call, c, false);
  }
}

}  // namespace
}  // namespace ikattn
