// The pairs of the backward of short calls on Hopper, in the interpreter, against the CPU kernels
// in float64.
#include "attention/cuda/operands/route.h"
#include "kernels/half_cases.h"
#include "tier.h"

namespace ikattn {
namespace {

using ShortBackwardOnDevice = OnHopper;

// Gradients of a call, of the output that float64 has.
Results gradients_of(Call& call, const Case& c, const Results& truth) {
  const int before = interpreter::launches_of("short_backward");
  Results results = device_gradients(call, c, truth);
  EXPECT_EQ(interpreter::launches_of("short_backward"), before + 1);
  return results;
}

TEST_F(ShortBackwardOnDevice, ErrsByItsRoundings) {
  // Rows that see few keys err by their scores' roundings over these, unless eps is larger.
  const std::vector<Case> cases = cases_of(R"(
less_than_a_tile L=20 S=30 d_v=8 bias
tiles one_head L=256 S=128 d_v=64 M=64
two_units one_head L=300 S=130 d_v=44 M=33
wide_value one_head L=130 S=70 d_v=128 M=20
one one_head L=1 S=1 d_v=5
causal one_head L=330 S=330 d_v=16 causal
more_keys one_head L=65 S=260 d_v=8 causal
fewer_keys one_head L=300 S=70 d_v=8 causal
padding one_head L=80 S=150 d_v=8 causal bias key_mask eps=0.1
grouped grouped L=70 S=140 d_v=8 causal eps=0.1
grouped_units grouped L=260 S=70 d_v=8
own_frequencies grouped L=20 S=40 w_heads=4
stationary L=20 S=40 d_v=8 stationary
no_magnitude L=20 S=40 d_v=8 M=8 p=0
lowest_bias L=20 S=40 d_v=8 M=8 bias lowest
largest_eps L=20 S=40 d_v=8 eps=0.9
general L=70 S=70 d_v=8 causal magnitude=40
)");
  for (Case c : cases) {
    SCOPED_TRACE(c.name);
    for (const ElementType type : types_in_turn(c)) {
      Call call(c = of_type(c, type));
      const Results truth = truth_of(call, c);
      const bool is_int8 = type == ElementType::kBFloat16 && c.M > 32 && c.S > 64;
      const double roundoff = is_int8 ? 0x1p-5 : 2 * roundoff_of(type) + 0x1p-9;
      compare_gradients(gradients_of(call, c, truth), truth, c, amplification_of(c) * roundoff);
    }
  }
}

// Errors are as large as those of the two kernels that take other calls.
TEST_F(ShortBackwardOnDevice, AgreesWithTheOtherKernels) {
  for (const int64_t M : {20, 64}) {
    Case c = one_head({.name = "agrees", .L = 270, .S = 140, .d_v = 40, .M = M});
    c.causal = c.bias = M == 20;
    Call call(c = of_type(c, ElementType::kBFloat16));
    const Results truth = truth_of(call, c), got = gradients_of(call, c, truth);
    const Families others("-short");
    const Results other = device_gradients(call, c, truth);
    compare_gradients(got, other, c, 2 * roundoff_of(c.type) + (M == 64 ? 0x1p-8 : 0x1p-10));
  }
}

// Gradients of one side are those of that side's kernel.
TEST_F(ShortBackwardOnDevice, LeavesOneSideToOthers) {
  Case c = one_head({.name = "queries_alone", .L = 70, .S = 70, .d_v = 8, .M = 9});
  Call call(c = of_type(c, ElementType::kFloat16));
  const Results truth = truth_of(call, c), expected = gradients_of(call, c, truth);
  const Tensor got = make(call.memory, c.type, {c.B, c.H, c.L, c.d});
  AttentionBackwardParams params;
  call.set(params);
  params.output = truth.output.array;
  params.log_normalizer = truth.log_normalizer.array;
  params.grad_output = call.grad_output.array;
  params.grad_query = got.array;
  const auto launches = [] {
    return std::array{interpreter::launches_of("short_backward"),
                      interpreter::launches_of("warpgroup_query"),
                      interpreter::launches_of("warpgroup_key")};
  };
  const auto before = launches();
  EXPECT_STREQ(cuda::attention_kernels.backward[0](params, device_executor(call.memory)), nullptr);
  EXPECT_EQ(launches(), (std::array{before[0], before[1] + 1, before[2]}));
  expect_close(got, expected.grad_query, roundoff_of(c.type), "grad_query");
}

TEST_F(ShortBackwardOnDevice, GivesTheSameInEveryOrder) {
  interpreter::set_multiprocessors(2);
  for (const bool causal : {true, false}) {
    Case c{.name = "orders", .B = 1, .H = 4, .G = 2, .L = 70, .S = 140, .d_v = 8, .M = 9};
    c.causal = causal;
    Call call(c = of_type(c, ElementType::kFloat16));
    const Results truth = truth_of(call, c);
    Results first;
    for (const interpreter::Order order : interpreter::kEveryOrder) {
      interpreter::set_order(order);
      const Results got = gradients_of(call, c, truth);
      if (order == interpreter::Order::kForward) first = got;
      compare_gradients(got, first, c, 0);
    }
  }
}

// A query, key or value that is not finite spoils what it meets, and nothing else.
TEST_F(ShortBackwardOnDevice, NanStaysWhereItIsSeen) {
  for (const bool causal : {true, false}) {
    Case c = one_head({.name = "nan", .L = 80, .S = 80, .d_v = 8, .M = 9, .eps = 0.1});
    c.causal = causal;
    c = of_type(c, causal ? ElementType::kBFloat16 : ElementType::kFloat16);
    for (Tensor Call::* spoiled : {&Call::query, &Call::key, &Call::value}) {
      Call call(c);
      const Tensor& tensor = call.*spoiled;
      write(tensor.array, 70 * (tensor.count / 80), spoiled == &Call::key ? INFINITY : NAN);
      const Results truth = truth_of(call, c);
      compare_gradients(gradients_of(call, c, truth), truth, c,
                        amplification_of(c) * (2 * roundoff_of(c.type) + 0x1p-8));
    }
  }
}

// Padding: what a hidden key holds changes no bit.
TEST_F(ShortBackwardOnDevice, HiddenKeysMayHoldAnything) {
  for (const float garbage : {NAN, INFINITY, 3e38f}) {
    Case c = one_head({.name = "hidden", .L = 70, .S = 70, .d_v = 8, .M = 9});
    if (garbage == INFINITY) c.M = 64;
    c.causal = c.bias = true;
    Call clean(c = of_type(c, ElementType::kBFloat16)), call(c);
    for (const int64_t j : {int64_t{1}, int64_t{40}}) {
      write(clean.bias.array, j, -INFINITY);
      write(call.bias.array, j, -INFINITY);
      write(call.key.array, j * c.d, garbage);
      write(call.value.array, j * c.d_v, garbage);
    }
    const Results truth = truth_of(clean, c), expected = gradients_of(clean, c, truth);
    compare_gradients(gradients_of(call, c, truth), expected, c, 0);
  }
}

TEST_F(ShortBackwardOnDevice, IsTakenWhereHeadsAreMany) {
  AttentionParams params;
  params.B = params.H = params.G = params.key_heads = 16;
  params.L = params.S = 512;
  params.d = params.d_v = params.M = 64;
  params.value.type = params.query.type = params.key.type = ElementType::kBFloat16;
  const auto takes = [](const AttentionParams& call) {
    return cuda::route_of(call, false, cuda::Pass::kBackward).is_short;
  };
  interpreter::set_multiprocessors(132);
  EXPECT_TRUE(takes(params));
  AttentionParams other = params;
  other.B = 5;  // 80 blocks
  EXPECT_FALSE(takes(other));
  other.B = 10;  // 160, of which 28 are a round of their own
  EXPECT_FALSE(takes(other));
  other = params;
  other.S = 513;
  EXPECT_FALSE(takes(other));
  other = params;
  other.key_heads = other.G = 8;  // sums of keys wait seven times
  EXPECT_FALSE(takes(other));
  other.L = other.S = 256;
  other.B = 32;
  EXPECT_TRUE(takes(other));
  other = params;
  other.d_v = 65;
  EXPECT_FALSE(takes(other));
  other.M = 32;
  EXPECT_TRUE(takes(other));
  other = params;
  other.dropout_threshold = 10;
  EXPECT_FALSE(takes(other));
  const Families others("-short");
  EXPECT_FALSE(takes(params));
}

}  // namespace
}  // namespace ikattn
