// Masks of pairs and dropout on Hopper's own kernels in the interpreter, against the CPU kernels in
// float64, which drop the same pairs.
#include <cmath>
#include <utility>

#include "kernels/half_cases.h"
#include "tier.h"

namespace ikattn {
namespace {

class WarpgroupMasksOnDevice : public ::testing::Test {
 protected:
  void SetUp() override { interpreter::set_warpgroups(true); }
  void TearDown() override { interpreter::set_warpgroups(false); }
};

// By Hopper's kernels, forward and backward.
Results hopper_results(Call& call, const Case& c) {
  const int before = interpreter::launches_of("warpgroup_");
  Results got = device_results(call, c);
  EXPECT_EQ(interpreter::launches_of("warpgroup_"), before + kWarpgroupLaunches);
  return got;
}

TEST_F(WarpgroupMasksOnDevice, ErrByTheirRoundings) {
  const Case cases[] = {
      one_head({.name = "dropout", .L = 40, .S = 200, .d_v = 8, .dropout = 0.3}),
      one_head({.name = "causal_dropout",
                .L = 130,
                .S = 130,
                .d_v = 16,
                .M = 9,
                .causal = true,
                .eps = 0.1,
                .dropout = 0.7}),
      one_head({.name = "mask", .L = 140, .S = 70, .d_v = 8, .masking = Masking::kBool}),
      {.name = "grouped",
       .B = 1,
       .H = 4,
       .G = 2,
       .L = 70,
       .S = 140,
       .d_v = 8,
       .M = 9,
       .causal = true,
       .masking = Masking::kBool,
       .eps = 0.1,
       .dropout = 0.3},
      one_head({.name = "wide",
                .L = 20,
                .S = 140,
                .d_v = 128,
                .M = 64,
                .masking = Masking::kBool,
                .dropout = 0.3}),
      one_head({.name = "wide_and_causal",
                .L = 70,
                .S = 70,
                .d_v = 64,
                .M = 33,
                .causal = true,
                .masking = Masking::kBool,
                .eps = 0.1}),
      {.name = "sides_of_16_bits",
       .B = 1,
       .L = 20,
       .S = 70,
       .d_v = 8,
       .bias = true,
       .half_sides = true,
       .dropout = 0.3},
      {.name = "general",
       .B = 1,
       .L = 40,
       .S = 70,
       .d_v = 8,
       .M = 32,
       .masking = Masking::kBool,
       .dropout = 0.3,
       .magnitude = 40},
      {.name = "general_and_causal",
       .B = 1,
       .L = 70,
       .S = 70,
       .d_v = 8,
       .causal = true,
       .dropout = 0.3,
       .magnitude = 40},
  };
  const auto chosen =
      cases_of_tier(cases, {"dropout", "causal_dropout", "mask", "grouped", "wide", "general"});
  for (Case c : chosen) {
    SCOPED_TRACE(c.name);
    for (const ElementType type : types_in_turn(c)) {
      Call call(c = of_type(c, type));
      const double roundoff = roundoff_of(type);
      const Results truth = truth_of(call, c), got = hopper_results(call, c);
      compare_gradients(device_gradients(call, c, truth), truth, c,
                        amplification_of(c) * (2 * roundoff + 0x1p-9));
      expect_forward_within(call, c, got, truth, kLargestFeatureRoundoff);
    }
  }
}

TEST_F(WarpgroupMasksOnDevice, ErrByTheRoundingsOfInt8) {
  const Case cases[] = {
      one_head({.name = "int8_dropout", .L = 20, .S = 200, .d_v = 64, .M = 64, .dropout = 0.3}),
      one_head({.name = "int8_causal_dropout",
                .L = 130,
                .S = 130,
                .d_v = 16,
                .M = 64,
                .causal = true,
                .dropout = 0.3}),
      {.name = "int8_all",
       .B = 1,
       .H = 4,
       .G = 2,
       .L = 20,
       .S = 140,
       .d_v = 72,
       .M = 33,
       .causal = true,
       .masking = Masking::kBool,
       .eps = 0.1,
       .dropout = 0.3},
  };
  for (Case c : cases) {
    SCOPED_TRACE(c.name);
    Call call(c = of_type(c, ElementType::kBFloat16));
    const Results truth = truth_of(call, c), got = hopper_results(call, c);
    expect_forward_within(call, c, got, truth, kInt8Roundoff);
    compare_gradients(got, truth, c, c.causal ? 0x1p-3 : 0x1p-4);
  }
}

// Masks may lie in any order, and be the same for all batches, or heads, alone.
TEST_F(WarpgroupMasksOnDevice, TakeMasksOfAnyStrides) {
  Case c{.name = "strides", .L = 40, .S = 70, .d_v = 8, .M = 9, .masking = Masking::kBool};
  c = of_type(c, ElementType::kBFloat16);
  Call call(c);
  const Array of_batches = call.mask.array;
  for (const bool turned : {false, true}) {
    Array& mask = call.mask.array;
    mask = of_batches;
    std::swap(mask.stride[0], mask.stride[1]);  // [1, heads, L, S]
    if (turned) {
      mask.stride[2] = 1;
      mask.stride[3] = c.L;
    }
    const Results truth = truth_of(call, c), got = hopper_results(call, c);
    // bounds_of() would ask for the case's own mask
    expect_close(got.output, truth.output, 6 * roundoff_of(c.type), "output");
    compare_gradients(got, truth, c, 6 * roundoff_of(c.type));
  }
}

// A row's value where it sees one key, whatever its weight; its gradients vanish.
TEST_F(WarpgroupMasksOnDevice, ALoneKeysRowIsItsValue) {
  for (const int64_t M : {9, 64}) {  // the latter with scores of integers
    Case c = one_head({.name = "lone", .L = 70, .S = 70, .d_v = 8, .M = M});
    c.masking = Masking::kBool;
    c = of_type(c, ElementType::kBFloat16);
    Call call(c);
    for (int64_t i = 0; i < c.L; ++i) {
      for (int64_t j = 0; j < c.S; ++j) write(call.mask.array, i * c.S + j, j == (7 * i) % c.S);
    }
    const Results got = hopper_results(call, c);
    for (int64_t i = 0; i < c.L; ++i) {
      for (int64_t column = 0; column < c.d_v; ++column) {
        EXPECT_EQ(read(got.output.array, i * c.d_v + column),
                  read(call.value.array, (7 * i) % c.S * c.d_v + column));
      }
    }
    const double largest = 0x1p-8;
    for (int64_t i = 0; i < got.grad_query.count; ++i) {
      EXPECT_LE(std::abs(read(got.grad_query.array, i)), largest);
    }
  }
}

TEST_F(WarpgroupMasksOnDevice, NanStaysWhereItIsSeen) {
  for (const int64_t M : {9, 64}) {
    Case c = one_head({.name = "nan", .L = 70, .S = 70, .d_v = 8, .M = M});
    c.masking = Masking::kBool;
    c = of_type(c, ElementType::kBFloat16);
    for (Tensor Call::* spoiled : {&Call::query, &Call::key, &Call::value, &Call::grad_output}) {
      if (M == 64 && spoiled != &Call::key) continue;
      Call call(c);
      for (int64_t i = 0; i < c.L; ++i) write(call.mask.array, i * c.S + 30, i % 3 == 0);
      const Tensor& tensor = call.*spoiled;
      write(tensor.array, 30 * (tensor.count / 70), NAN);
      const Results got = hopper_results(call, c), truth = truth_of(call, c);
      const double close = M > 32 ? 0x1p-4 : 6 * roundoff_of(c.type);
      expect_close(got.output, truth.output, close, "output");
      expect_close(got.grad_query, truth.grad_query, close, "grad_query");
      expect_close(got.grad_key, truth.grad_key, close, "grad_key");
      expect_close(got.grad_value, truth.grad_value, close, "grad_value");
    }
  }
}

TEST_F(WarpgroupMasksOnDevice, GiveTheSameInEveryOrder) {
  interpreter::set_multiprocessors(2);
  Case c{.name = "orders", .B = 1, .H = 2, .G = 1, .L = 130, .S = 30, .d_v = 8};
  c.frequency_heads = 1;
  c.masking = Masking::kBool;
  c.dropout = 0.3;
  Call call(c = of_type(c, ElementType::kBFloat16));
  expect_the_same_in_every_order(call, c);
  interpreter::set_multiprocessors(1);
}

}  // namespace
}  // namespace ikattn
