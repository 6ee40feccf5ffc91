// Hopper's own kernels of the attention operators in the interpreter, against the CPU kernels in
// float64.
#include "kernels/half_cases.h"
#include "tier.h"

namespace ikattn {
namespace {

// Hopper's own kernels but that of short calls, as long as it lives.
struct WithoutShort : Families {
  WithoutShort() : Families("-short") { interpreter::set_warpgroups(true); }
  ~WithoutShort() { interpreter::set_warpgroups(false); }
};

// Hopper's own kernels, of heads in either form.
TEST(WarpgroupAttentionOnDevice, ErrsByItsRoundings) {
  const WithoutShort setting;
  const Case cases[] = {
      {.name = "less_than_a_tile", .L = 20, .S = 30, .d_v = 8, .bias = true},
      one_head({.name = "tiles", .L = 256, .S = 384, .d_v = 64, .M = 64}),
      one_head({.name = "wide", .L = 130, .S = 515, .d_v = 128, .M = 64}),
      one_head({.name = "odd", .L = 65, .S = 129, .d_v = 72, .M = 33}),
      one_head({.name = "one", .L = 1, .S = 1, .d_v = 5}),
      one_head({.name = "causal", .L = 300, .S = 300, .d_v = 16, .causal = true}),
      one_head({.name = "more_keys", .L = 129, .S = 300, .d_v = 8, .causal = true}),
      one_head({.name = "fewer_keys", .L = 300, .S = 70, .d_v = 8, .causal = true}),
      {.name = "one_set_of_frequencies",
       .H = 4,
       .G = 2,
       .L = 20,
       .S = 140,
       .d_v = 8,
       .frequency_heads = 1,
       .causal = true},
      // each key head passes the tiles of its query heads one after the other
      {.name = "grouped_tiles", .H = 4, .G = 2, .L = 140, .S = 140, .d_v = 8},
      {.name = "grouped_tiles_and_causal",
       .H = 4,
       .G = 2,
       .L = 140,
       .S = 140,
       .d_v = 8,
       .causal = true},
      {.name = "own_frequencies", .H = 4, .G = 2, .L = 20, .S = 140, .frequency_heads = 4},
      {.name = "frequencies_per_sample", .L = 20, .S = 140, .d_v = 8, .frequency_batches = 2},
      {.name = "stationary", .L = 20, .S = 140, .d_v = 8, .stationary = true},
      {.name = "p_3", .L = 20, .S = 140, .d_v = 8, .p = 3},
      {.name = "p_1", .L = 20, .S = 140, .d_v = 8, .p = 1, .magnitude = 0.3},
      {.name = "no_magnitude", .L = 20, .S = 140, .d_v = 8, .M = 8, .p = 0},
      {.name = "negative_magnitudes", .L = 20, .S = 140, .d_v = 8, .magnitude = -1},
      {.name = "sides_of_16_bits", .L = 20, .S = 140, .d_v = 8, .bias = true, .half_sides = true},
      {.name = "lowest_bias", .L = 20, .S = 140, .d_v = 8, .M = 8, .bias = true, .lowest = true},
      {.name = "p_1_5", .L = 20, .S = 140, .d_v = 8, .M = 8, .p = 1.5},
      {.name = "largest_eps", .L = 20, .S = 140, .d_v = 8, .eps = 0.9},
      {.name = "general", .L = 70, .S = 140, .d_v = 8, .causal = true, .magnitude = 40},
  };
  const auto chosen =
      cases_of_tier(cases, {"less_than_a_tile", "tiles", "wide", "odd", "one", "causal",
                            "fewer_keys", "one_set_of_frequencies", "grouped_tiles", "stationary",
                            "no_magnitude", "sides_of_16_bits", "lowest_bias", "general"});
  for (Case c : chosen) {
    SCOPED_TRACE(c.name);
    for (const ElementType type : types_in_turn(c)) {
      Call call(c = of_type(c, type));
      const int before = interpreter::launches_of("warpgroup_");
      const double roundoff = roundoff_of(type);
      const Results truth = truth_of(call, c), got = device_results(call, c);
      EXPECT_EQ(interpreter::launches_of("warpgroup_"), before + kWarpgroupLaunches);
      compare_gradients(device_gradients(call, c, truth), truth, c,
                        amplification_of(c) * (2 * roundoff + 0x1p-9));
      expect_forward_within(call, c, got, truth, kLargestFeatureRoundoff);
    }
  }
}

// Scores of integers of 8 bits: bfloat16, 33 to 64 frequencies.
TEST(WarpgroupAttentionOnDevice, ErrsByTheRoundingsOfInt8) {
  const WithoutShort setting;
  const Case cases[] = {
      one_head({.name = "int8", .L = 130, .S = 300, .d_v = 64, .M = 64}),
      one_head({.name = "int8_odd", .L = 65, .S = 129, .d_v = 72, .M = 33}),
      one_head({.name = "int8_41", .L = 20, .S = 129, .d_v = 8, .M = 41}),
      one_head({.name = "int8_one", .L = 1, .S = 65, .d_v = 5, .M = 64}),
      one_head({.name = "int8_causal", .L = 150, .S = 150, .d_v = 16, .M = 64, .causal = true}),
      {.name = "int8_bias", .L = 20, .S = 70, .d_v = 8, .M = 64, .bias = true},
      one_head({.name = "int8_padding",
                .L = 80,
                .S = 150,
                .d_v = 8,
                .M = 64,
                .causal = true,
                .bias = true,
                .key_mask = true}),
      {.name = "int8_grouped",
       .H = 4,
       .G = 2,
       .L = 20,
       .S = 140,
       .d_v = 8,
       .M = 64,
       .frequency_heads = 1,
       .causal = true},
      {.name = "int8_stationary", .L = 20, .S = 140, .d_v = 8, .M = 64, .stationary = true},
      {.name = "int8_no_magnitude", .L = 20, .S = 140, .d_v = 8, .M = 64, .p = 0},
      {.name = "int8_largest_eps", .L = 20, .S = 140, .d_v = 8, .M = 64, .eps = 0.9},
      {.name = "int8_general",
       .L = 70,
       .S = 140,
       .d_v = 8,
       .M = 64,
       .causal = true,
       .magnitude = 40},
  };
  for (Case c : cases) {
    SCOPED_TRACE(c.name);
    // The gradients of keys take integers, or the same numbers in float16.
    const Families others(turn_of(c) % 2 == 0 ? "-short" : "-short,-int8_gradients");
    Call call(c = of_type(c, ElementType::kBFloat16));
    const int before = interpreter::launches_of("warpgroup_");
    const Results truth = truth_of(call, c), got = device_results(call, c);
    EXPECT_EQ(interpreter::launches_of("warpgroup_"), before + kWarpgroupLaunches);
    const bool has_few_errors = c.S < 100;
    expect_forward_within(call, c, got, truth,
                          has_few_errors ? kLargestInt8Roundoff : kInt8Roundoff);
    // Rows of few keys follow from few scores; test_cuda_int8.py has closer bounds.
    compare_gradients(got, truth, c, amplification_of(c) * (c.causal ? 0x1p-3 : 0x1p-4));
  }
}

// Several blocks, each of which takes several items.
TEST(WarpgroupAttentionOnDevice, ItemsOfSeveralBlocks) {
  const WithoutShort setting;
  interpreter::set_multiprocessors(2);
  for (const bool causal : {true, false}) {
    if (!causal && !runs_everything()) continue;
    Case c{.name = "items", .B = 1, .H = 4, .G = 2, .L = 140, .S = 270, .d_v = 8, .M = 9};
    c.causal = causal;
    Call call(c = of_type(c, ElementType::kBFloat16));
    const int before = interpreter::launches_of("warpgroup_");
    const Results truth = truth_of(call, c), got = device_results(call, c);
    EXPECT_EQ(interpreter::launches_of("warpgroup_"), before + kWarpgroupLaunches);
    expect_forward_within(call, c, got, truth, kLargestFeatureRoundoff);
    compare_gradients(got, truth, c, 6 * roundoff_of(c.type));
    expect_the_same_in_every_order(call, c);
  }
  interpreter::set_multiprocessors(1);
}

TEST(WarpgroupAttentionOnDevice, GivesTheSameInEveryOrder) {
  const WithoutShort setting;
  Case c{.name = "orders", .B = 1, .H = 2, .G = 1, .L = 140, .S = 400, .d_v = 8, .causal = true};
  c.frequency_heads = 1;
  Call call(c = of_type(c, ElementType::kBFloat16));
  expect_the_same_in_every_order(call, c);
}

TEST(WarpgroupAttentionOnDevice, NanStaysWhereItIsSeen) {
  const WithoutShort setting;
  for (const bool causal : {true, false}) {
    Case c = one_head({.name = "nan", .L = 200, .S = 200, .d_v = 8});
    c.causal = causal;
    c = of_type(c, ElementType::kBFloat16);
    for (Tensor Call::* spoiled : {&Call::query, &Call::key, &Call::value, &Call::grad_output}) {
      Call call(c);
      const Tensor& tensor = call.*spoiled;
      write(tensor.array, 140 * (tensor.count / 200), NAN);
      const Results got = device_results(call, c), truth = truth_of(call, c);
      const double roundoff = roundoff_of(c.type);
      expect_close(got.output, truth.output, 6 * roundoff, "output");
      expect_close(got.grad_query, truth.grad_query, 6 * roundoff, "grad_query");
      expect_close(got.grad_key, truth.grad_key, 6 * roundoff, "grad_key");
      expect_close(got.grad_value, truth.grad_value, 6 * roundoff, "grad_value");
    }
  }
}

// A block of warpgroups fills a multiprocessor.
TEST(WarpgroupAttentionOnDevice, TakesAllKeysOfEnoughRows) {
  const WithoutShort setting;
  const auto taken = [](int multiprocessors, bool causal) {
    interpreter::set_multiprocessors(multiprocessors);
    Case c = one_head({.name = "rows", .L = 129, .S = 600, .d_v = 8});
    c.causal = causal;
    c = of_type(c, ElementType::kBFloat16);
    Call call(c);
    const int before = interpreter::launches_of("warpgroup_forward");
    device_results(call, c);
    return interpreter::launches_of("warpgroup_forward") - before;
  };
  EXPECT_EQ(taken(2, false), 1);
  EXPECT_EQ(taken(3, false), 0);
  EXPECT_EQ(taken(2, true), 0);  // a head may turn out to need the general form
  interpreter::set_multiprocessors(1);
}

// There are no tensor maps of nothing.
TEST(WarpgroupAttentionOnDevice, TakesNoEmptyBatch) {
  const WithoutShort setting;
  Case c{.name = "empty", .B = 0, .H = 1, .G = 1, .L = 20, .S = 30, .d_v = 8};
  c.frequency_heads = 1;
  Call call(c = of_type(c, ElementType::kBFloat16));
  const int before = interpreter::launches_of("warpgroup_");
  device_results(call, c);
  EXPECT_EQ(interpreter::launches_of("warpgroup_"), before);
}

}  // namespace
}  // namespace ikattn
