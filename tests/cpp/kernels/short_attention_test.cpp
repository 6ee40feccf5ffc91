// The forward of short calls on Hopper, features included, in the interpreter, against the CPU
// kernels in float64.
#include "attention/cuda/operands/route.h"
#include "kernels/half_cases.h"
#include "tier.h"

namespace ikattn {
namespace {

using ShortAttentionOnDevice = OnHopper;

// Output and log Z of a call alone.
Results forward_of(Call& call, const Case& c) {
  const int before = interpreter::launches_of("short_forward");
  const Results results = device_forward(call, c);
  EXPECT_EQ(interpreter::launches_of("short_forward"), before + 1);
  return results;
}

TEST_F(ShortAttentionOnDevice, ErrsByItsRoundings) {
  const std::vector<Case> cases = cases_of(R"(
less_than_a_tile L=20 S=30 d_v=8 bias
tiles one_head L=140 S=256 d_v=64 M=32
two_slices one_head L=70 S=130 d=72 d_v=128 M=20
odd one_head L=65 S=129 d_v=44 M=33
one one_head L=1 S=1 d_v=5
causal one_head L=200 S=200 d_v=16 causal
more_keys one_head L=65 S=260 d_v=8 causal
fewer_keys one_head L=200 S=70 d_v=8 causal
padding one_head L=80 S=150 d_v=8 causal bias key_mask
grouped grouped L=70 S=140 d_v=8 causal
own_frequencies grouped L=20 S=40 w_heads=4
frequencies_per_sample L=20 S=40 d_v=8 w_batches=2
stationary L=20 S=40 d_v=8 stationary
p_3 L=20 S=40 d_v=8 p=3
no_magnitude L=20 S=40 d_v=8 M=8 p=0
lowest_bias L=20 S=40 d_v=8 M=8 bias lowest
largest_eps L=20 S=40 d_v=8 eps=0.9
general L=70 S=70 d_v=8 causal magnitude=40
)");
  for (const Case& each : cases) {
    SCOPED_TRACE(each.name);
    for (const ElementType type : {ElementType::kBFloat16, ElementType::kFloat16}) {
      const bool takes_turns = turn_of(each) % 2 == (type == ElementType::kFloat16 ? 1 : 0);
      if (!runs_everything() && takes_turns) continue;
      const Case c = of_type(each, type);
      Call call(c);
      const Results truth = truth_of(call, c), got = forward_of(call, c);
      const bool is_int8 = type == ElementType::kBFloat16 && c.M > 32 && c.S > 64;
      expect_forward_within(call, c, got, truth, is_int8 ? kInt8Roundoff : kLargestFeatureRoundoff);
    }
  }
}

// Scores of integers of 8 bits: bfloat16, 33 to 64 frequencies.
TEST_F(ShortAttentionOnDevice, ErrsByTheRoundingsOfInt8) {
  const std::vector<Case> cases = cases_of(R"(
int8 one_head L=130 S=270 d_v=64 M=64
int8_odd one_head L=65 S=129 d=72 d_v=44 M=33
int8_one one_head L=1 S=65 d_v=5 M=64
int8_causal one_head L=150 S=150 d_v=16 M=64 causal bias key_mask
int8_grouped grouped L=20 S=70 d_v=8 M=41 w_heads=1 causal
int8_stationary L=20 S=70 d_v=8 M=64 stationary
int8_general L=70 S=70 d_v=8 M=64 causal magnitude=40
)");
  for (Case c : cases) {
    SCOPED_TRACE(c.name);
    Call call(c = of_type(c, ElementType::kBFloat16));
    const Results truth = truth_of(call, c), got = forward_of(call, c);
    expect_forward_within(call, c, got, truth, c.S < 100 ? kLargestInt8Roundoff : kInt8Roundoff);
  }
}

// Where shared memory does not hold all values of a head they go through stages.
TEST_F(ShortAttentionOnDevice, ValuesGoThroughStages) {
  const std::vector<Case> cases = cases_of(R"(
int8 one_head L=70 S=1024 d_v=8 M=64
half_of_five one_head L=140 S=700 d_v=8 M=9
half_of_three one_head L=390 S=400 d_v=8 M=64 causal
)");
  for (Case c : cases) {
    SCOPED_TRACE(c.name);
    const bool is_int8 = c.name.starts_with("int8");
    c = of_type(c, is_int8 ? ElementType::kBFloat16 : ElementType::kFloat16);
    Call call(c);
    const Results truth = truth_of(call, c), got = forward_of(call, c);
    expect_forward_within(call, c, got, truth, is_int8 ? kInt8Roundoff : kLargestFeatureRoundoff);
    if (c.causal) {
      write(call.value.array, 350 * c.d_v, NAN);
      const Results spoiled = forward_of(call, c), expected = truth_of(call, c);
      expect_close(spoiled.output, expected.output, 6 * roundoff_of(c.type), "output");
    }
  }
}

// The backward makes the same features by kernels of its own.
TEST_F(ShortAttentionOnDevice, AgreesWithTheBackward) {
  for (const int64_t M : {16, 64}) {
    Case c = one_head({.name = "backward", .L = 70, .S = 140, .d_v = 8, .M = M});
    Call call(c = of_type(c, ElementType::kBFloat16));
    const Results truth = truth_of(call, c), got = device_results(call, c);
    compare_gradients(got, truth, c, M == 64 ? 0x1p-4 : 7 * roundoff_of(c.type));
  }
}

// Whoever computes a query, its bits are the same: on one multiprocessor a block has all queries of
// a head, on many it has few.
TEST_F(ShortAttentionOnDevice, SharesOfQueriesGiveTheSameBits) {
  for (const int64_t M : {9, 64}) {
    Case c{.name = "shares", .B = 1, .H = 4, .G = 2, .L = 140, .S = 70, .d_v = 8, .M = M};
    c.causal = M == 9;
    Call call(c = of_type(c, ElementType::kBFloat16));
    const Results alone = forward_of(call, c);
    // Multiprocessors are as many as blocks of 128 queries, and the keys are not shared out.
    interpreter::set_multiprocessors(c.causal ? 4 : 8);
    const Results shared = forward_of(call, c);
    expect_close(shared.output, alone.output, 0, "output");
    expect_close(shared.log_normalizer, alone.log_normalizer, 0, "log_normalizer");
  }
}

TEST_F(ShortAttentionOnDevice, GivesTheSameInEveryOrder) {
  interpreter::set_multiprocessors(2);
  for (const int64_t M : {9, 64}) {
    Case c{.name = "orders", .B = 1, .H = 2, .G = 1, .L = 80, .S = 140, .d_v = 8, .M = M};
    c.frequency_heads = 1;
    c.causal = true;
    Call call(c = of_type(c, ElementType::kBFloat16));
    Results first;
    for (const interpreter::Order order : interpreter::kEveryOrder) {
      interpreter::set_order(order);
      const Results got = forward_of(call, c);
      if (order == interpreter::Order::kForward) first = got;
      expect_close(got.output, first.output, 0, "output");
      expect_close(got.log_normalizer, first.log_normalizer, 0, "log_normalizer");
    }
  }
}

TEST_F(ShortAttentionOnDevice, NanStaysWhereItIsSeen) {
  for (const bool causal : {true, false}) {
    for (const int64_t M : {9, 64}) {
      Case c = one_head({.name = "nan", .L = 80, .S = 80, .d_v = 8, .M = M});
      c.causal = causal;
      c = of_type(c, M == 64 ? ElementType::kBFloat16 : ElementType::kFloat16);
      for (Tensor Call::* spoiled : {&Call::query, &Call::key, &Call::value}) {
        Call call(c);
        const Tensor& tensor = call.*spoiled;
        write(tensor.array, 70 * (tensor.count / 80), spoiled == &Call::key ? INFINITY : NAN);
        const Results got = forward_of(call, c), truth = truth_of(call, c);
        expect_close(got.output, truth.output, M == 64 ? 0x1p-5 : 6 * roundoff_of(c.type),
                     "output");
      }
    }
  }
}

// Padding: what a hidden key holds, and a query that sees no key, changes no bit.
TEST_F(ShortAttentionOnDevice, HiddenTokensMayHoldAnything) {
  for (const int64_t M : {9, 64}) {
    for (const float garbage : {NAN, INFINITY, 3e38f}) {
      Case c = one_head({.name = "hidden", .L = 70, .S = 70, .d_v = 8, .M = M});
      c.causal = c.bias = true;
      c = of_type(c, ElementType::kBFloat16);
      Call clean(c), call(c);
      for (const int64_t j : {int64_t{0}, int64_t{40}}) {
        write(clean.bias.array, j, -INFINITY);
        write(call.bias.array, j, -INFINITY);
        write(call.key.array, j * c.d, garbage);
        write(call.value.array, j * c.d_v, garbage);
      }
      write(call.query.array, 0, NAN);
      const Results got = forward_of(call, c), expected = forward_of(clean, c);
      expect_close(got.output, expected.output, 0, "output");
      EXPECT_EQ(read(got.log_normalizer.array, 0), -INFINITY);
    }
  }
}

TEST_F(ShortAttentionOnDevice, IsTakenAsFarAsSharedMemoryGoes) {
  AttentionParams params;
  params.B = params.H = params.G = params.key_heads = 16;
  params.L = params.S = 512;
  params.d = params.d_v = params.M = 64;
  params.value.type = params.query.type = params.key.type = ElementType::kBFloat16;
  const auto takes = [](const AttentionParams& call, cuda::Pass pass = cuda::Pass::kForward) {
    return cuda::route_of(call, false, pass).is_short;
  };
  EXPECT_TRUE(takes(params));
  EXPECT_TRUE(takes(params, cuda::Pass::kBackward));
  AttentionParams other = params;
  other.S = 2048;
  EXPECT_FALSE(takes(other));
  other = params;
  other.d_v = 65;
  EXPECT_FALSE(takes(other));
  other.M = 32;
  EXPECT_TRUE(takes(other));
  other = params;
  other.d = 130;
  EXPECT_FALSE(takes(other));
  other = params;
  other.dropout_threshold = 10;
  EXPECT_FALSE(takes(other));
  other = params;
  other.value.type = other.query.type = other.key.type = ElementType::kFloat32;
  other.allow_tf32 = true;
  EXPECT_FALSE(takes(other));
  const Families others("-short");
  EXPECT_FALSE(takes(params));
}

}  // namespace
}  // namespace ikattn
