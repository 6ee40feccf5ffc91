// Hopper's own kernels of the attention operators in the interpreter, against the CPU kernels in
// float64.
#include "kernels/half_cases.h"
#include "tier.h"

namespace ikattn {
namespace {

class WarpgroupAttentionOnDevice : public OnHopper {};

// Hopper's own kernels, of heads in either form.
TEST_F(WarpgroupAttentionOnDevice, ErrsByItsRoundings) {
  const std::vector<Case> cases = cases_of(R"(
* less_than_a_tile L=20 S=30 d_v=8 bias
* tiles one_head L=256 S=384 d_v=64 M=64
* wide one_head L=130 S=515 d_v=128 M=64
* odd one_head L=65 S=129 d_v=72 M=33
* one one_head L=1 S=1 d_v=5
* causal one_head L=300 S=300 d_v=16 causal
  more_keys one_head L=129 S=300 d_v=8 causal
* fewer_keys one_head L=300 S=70 d_v=8 causal
* one_set_of_frequencies grouped L=20 S=140 d_v=8 w_heads=1 causal
# each key head passes the tiles of its query heads one after the other
* grouped_tiles grouped L=140 S=140 d_v=8
  grouped_tiles_and_causal grouped L=140 S=140 d_v=8 causal
  own_frequencies grouped L=20 S=140 w_heads=4
  frequencies_per_sample L=20 S=140 d_v=8 w_batches=2
* stationary L=20 S=140 d_v=8 stationary
  p_3 L=20 S=140 d_v=8 p=3
  p_1 L=20 S=140 d_v=8 p=1 magnitude=0.3
* no_magnitude L=20 S=140 d_v=8 M=8 p=0
  negative_magnitudes L=20 S=140 d_v=8 magnitude=-1
* sides_of_16_bits L=20 S=140 d_v=8 bias half_sides
* lowest_bias L=20 S=140 d_v=8 M=8 bias lowest
  p_1_5 L=20 S=140 d_v=8 M=8 p=1.5
  largest_eps L=20 S=140 d_v=8 eps=0.9
* general L=70 S=140 d_v=8 causal magnitude=40
)");
  const auto chosen = cases_of_tier(cases);
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
TEST_F(WarpgroupAttentionOnDevice, ErrsByTheRoundingsOfInt8) {
  const std::vector<Case> cases = cases_of(R"(
int8 one_head L=130 S=300 d_v=64 M=64
int8_odd one_head L=65 S=129 d_v=72 M=33
int8_41 one_head L=20 S=129 d_v=8 M=41
int8_one one_head L=1 S=65 d_v=5 M=64
int8_causal one_head L=150 S=150 d_v=16 M=64 causal
int8_bias L=20 S=70 d_v=8 M=64 bias
int8_padding one_head L=80 S=150 d_v=8 M=64 causal bias key_mask
int8_grouped grouped L=20 S=140 d_v=8 M=64 w_heads=1 causal
int8_stationary L=20 S=140 d_v=8 M=64 stationary
int8_no_magnitude L=20 S=140 d_v=8 M=64 p=0
int8_largest_eps L=20 S=140 d_v=8 M=64 eps=0.9
int8_general L=70 S=140 d_v=8 M=64 causal magnitude=40
)");
  for (Case c : cases) {
    SCOPED_TRACE(c.name);
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
TEST_F(WarpgroupAttentionOnDevice, ItemsOfSeveralBlocks) {
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
}

TEST_F(WarpgroupAttentionOnDevice, GivesTheSameInEveryOrder) {
  Case c = case_of("orders one_key_head L=140 S=400 d_v=8 causal");
  Call call(c = of_type(c, ElementType::kBFloat16));
  expect_the_same_in_every_order(call, c);
}

TEST_F(WarpgroupAttentionOnDevice, NanStaysWhereItIsSeen) {
  for (const bool causal : {true, false}) {
    Case c = one_head({.name = "nan", .L = 200, .S = 200, .d_v = 8});
    c.causal = causal;
    expect_nan_stays_where_it_is_seen(of_type(c, ElementType::kBFloat16), 0.7);
  }
}

// A block of warpgroups fills a multiprocessor.
TEST_F(WarpgroupAttentionOnDevice, TakesAllKeysOfEnoughRows) {
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
}

// There are no tensor maps of nothing.
TEST_F(WarpgroupAttentionOnDevice, TakesNoEmptyBatch) {
  Case c = case_of("empty one_head B=0 L=20 S=30 d_v=8");
  Call call(c = of_type(c, ElementType::kBFloat16));
  const int before = interpreter::launches_of("warpgroup_");
  device_results(call, c);
  EXPECT_EQ(interpreter::launches_of("warpgroup_"), before);
}

}  // namespace
}  // namespace ikattn
