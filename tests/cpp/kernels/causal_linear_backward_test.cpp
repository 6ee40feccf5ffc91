// The backward of causal calls in linear time, in the interpreter, against the CPU kernels in
// float64: as far off as pairs may be, and by pairs where it would be further. Chunks are the
// shortest, 256 tokens.
#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "attention/cuda/kernels.h"
#include "attention/cuda/linear/linear.h"
#include "kernels/half_cases.h"

namespace ikattn {
namespace {

Case causal(Case c) {
  c.causal = true;
  c.linear_time = LinearTime::kAlways;
  return c;
}

// Returns the largest magnitude from the first-th number on.
double largest_of(const Tensor& tensor, int64_t first) {
  double largest = 0;
  for (int64_t i = first; i < tensor.count; ++i) {
    largest = std::fmax(largest, std::fabs(read(tensor.array, i)));
  }
  return largest;
}

// Bounds errors by those of pairs, which are largest in rows that see few keys, and by those of
// sums. Looks at gradients of queries after the first chunk by themselves, too.
void expect_gradients_near(const Results& got, const Results& pairs, const Results& truth,
                           const Case& c) {
  const double bound = 2 * roundoff_of(c.type) + 0x1p-9;
  const auto compare_from = [&](const Tensor Results::* gradient, int64_t first) {
    const Tensor& expected = truth.*gradient;
    EXPECT_LE(largest_difference(got.*gradient, expected, first),
              1.2 * largest_difference(pairs.*gradient, expected, first) +
                  bound * largest_of(expected, first));
  };
  compare_from(&Results::grad_query, 0);
  compare_from(&Results::grad_query, ((c.B * c.H - 1) * c.L + 256) * c.d);  // rows of the last head
  compare_from(&Results::grad_key, 0);
  compare_from(&Results::grad_value, 0);
  compare_from(&Results::grad_w1, 0);
  if (!c.stationary) compare_from(&Results::grad_w2, 0);
  if (c.bias) compare_from(&Results::grad_bias, 0);
}

const std::vector<Case> kCases = cases_of(R"(
  three_chunks one_head L=530 S=530 d_v=8 M=16 magnitude=0.1 causal
  fewer_keys one_head L=700 S=300 d_v=8 M=16 magnitude=0.1 causal
  keys_of_one_chunk one_head L=800 S=200 d_v=8 M=16 magnitude=0.1 causal
  more_keys one_head L=300 S=520 d_v=7 M=9 causal
* eight_feature_chunks one_head L=270 S=270 d=8 d_v=16 M=64 causal
* grouped one_key_head L=537 S=537 d_v=12 M=16 bias magnitude=0.1 causal
  batch H=1 G=1 L=270 S=270 d_v=8 M=16 w_heads=1 magnitude=0.1 causal
  stationary one_head L=270 S=270 d_v=8 M=16 stationary causal
  no_magnitude one_head L=270 S=270 d_v=8 M=16 p=0 causal
  larger_eps one_head L=270 S=270 d_v=8 M=16 eps=1e-1 causal
# chunks of 768 tokens, no multiple of 512
  longer_chunks one_head L=1700 S=1700 d_v=8 M=16 eps=1e-1 causal
)");

class CausalLinearBackwardOnDevice : public ::testing::TestWithParam<Case> {};

TEST_P(CausalLinearBackwardOnDevice, ErrsByTheRoundingsOfPairs) {
  for (const ElementType type : types_in_turn(GetParam())) {
    const Case c = of_type(causal(GetParam()), type);
    Call call(c);
    const Results truth = truth_of(call, c);
    const int before = interpreter::launches_of("entry_kernel");
    const Results got = device_gradients(call, c, truth);
    EXPECT_EQ(interpreter::launches_of("entry_kernel"), before + 1);
    const Results pairs = device_gradients(call.by(LinearTime::kNever), c, truth);
    expect_gradients_near(got, pairs, truth, c);
    // In 11 bits the blocks of some cases all have a query of small scores.
    if (type != ElementType::kBFloat16) continue;
    // Rows of the first head: queries after the first chunk, and keys before the last.
    EXPECT_EQ(rows_that_differ(got.grad_query, pairs.grad_query, c.d, 0, 256), 0);
    EXPECT_GT(rows_that_differ(got.grad_query, pairs.grad_query, c.d, 256, c.L), 0);
    const int64_t keys = std::min<int64_t>(256, c.S);
    EXPECT_GT(rows_that_differ(got.grad_key, pairs.grad_key, c.d, 0, keys), 0);
    EXPECT_GT(rows_that_differ(got.grad_value, pairs.grad_value, c.d_v, 0, keys), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Interpreter, CausalLinearBackwardOnDevice,
                         ::testing::ValuesIn(cases_of_tier(kCases)),
                         [](const auto& info) { return info.param.name; });

TEST(CausalLinearBackwardOnDevice, EveryOrderGivesTheSameBits) {
  const Case c =
      of_type(causal(case_of("order one_head L=300 S=300 d_v=8 M=8")), ElementType::kBFloat16);
  Call call(c);
  const Results truth = truth_of(call, c), first = device_gradients(call, c, truth);
  for (const auto order : {interpreter::Order::kReversed, interpreter::Order::kShuffled}) {
    interpreter::set_order(order);
    compare_gradients(device_gradients(call, c, truth), first, c, 0);
  }
}

// Keys of one direction, and a query of the second chunk to which they are nearly orthogonal. Its
// block of queries goes by pairs, and the keys of the first chunk do.
TEST(CausalLinearBackwardOnDevice, QueriesOfSmallScoresGoByPairs) {
  Case c{.name = "small", .B = 1, .H = 2, .L = 600, .S = 600, .d = 1, .d_v = 8, .M = 1};
  c.stationary = true;
  c = of_type(causal(c), ElementType::kBFloat16);
  Call call(c);
  for (int64_t h = 0; h < c.H; ++h) write(call.w1.array, h, 1);
  for (int64_t j = 0; j < c.H * c.S; ++j) write(call.key.array, j, j % 2 == 0 ? 0.25 : 0.2500001);
  for (int64_t i = 0; i < c.H * c.L; ++i) {
    write(call.query.array, i, i == 300 ? 0.001 : 0.2 + 1e-4 * static_cast<double>(i % c.L));
  }
  const Results truth = truth_of(call, c), got = device_gradients(call, c, truth);
  const Results pairs = device_gradients(call.by(LinearTime::kNever), c, truth);
  EXPECT_EQ(rows_that_differ(got.grad_query, pairs.grad_query, c.d, 0, 384), 0);
  EXPECT_GT(rows_that_differ(got.grad_query, pairs.grad_query, c.d, 384, c.L), 0);
  EXPECT_EQ(rows_that_differ(got.grad_key, pairs.grad_key, c.d, 0, 256), 0);
  EXPECT_EQ(rows_that_differ(got.grad_value, pairs.grad_value, c.d_v, 0, 256), 0);
  EXPECT_GT(rows_that_differ(got.grad_value, pairs.grad_value, c.d_v, 256, 512), 0);
  // The other head has no such query.
  EXPECT_GT(rows_that_differ(got.grad_query, pairs.grad_query, c.d, c.L + 256, c.L + 384), 0);
  EXPECT_GT(rows_that_differ(got.grad_value, pairs.grad_value, c.d_v, c.S, c.S + 256), 0);
}

// Few keys with weight, keys that are not finite, and magnitudes that would leave Half.
TEST(CausalLinearBackwardOnDevice, HeadsThatMomentsCannotHoldGoByPairs) {
  for (const double bias : {static_cast<double>(-INFINITY), static_cast<double>(NAN), 24.0}) {
    const Case c =
        of_type(causal(case_of("far one_head L=300 S=300 d_v=8 M=8 bias")), ElementType::kBFloat16);
    Call call(c);
    for (int64_t j = 0; j < c.S; ++j) {
      if (std::isinf(bias) ? j > 10 : j == 270) write(call.bias.array, j, bias);
    }
    const Results truth = truth_of(call, c), got = device_gradients(call, c, truth);
    if (bias == 24.0) {  // pairs of all kinds give these another form
      compare_gradients(got, truth, c, 5 * (2 * roundoff_of(c.type) + 0x1p-9));
      continue;
    }
    compare_gradients(got, device_gradients(call.by(LinearTime::kNever), c, truth), c, 0);
  }
}

// Hidden keys may hold anything, in every chunk. A query, or an incoming gradient, that is NaN
// spoils the keys that it sees, and no others.
TEST(CausalLinearBackwardOnDevice, HiddenKeysAndSpoiledQueries) {
  const Case c = of_type(causal(case_of("nan B=1 L=530 S=530 d_v=8 M=16 bias magnitude=0.1")),
                         ElementType::kBFloat16);
  Call call(c);
  for (const int64_t j : {3, 320, 520}) {
    for (int64_t h = 0; h < c.H; ++h) {
      write(call.bias.array, h * c.S + j, -INFINITY);
      write(call.key.array, (h * c.S + j) * c.d, 60000.0);
      write(call.value.array, (h * c.S + j) * c.d_v, 60000.0);
    }
  }
  write(call.query.array, 300 * c.d, NAN);
  write(call.grad_output.array, (c.L + 300) * c.d_v, NAN);
  const Results truth = truth_of(call, c), got = device_gradients(call, c, truth);
  compare_token_gradients(got, truth, 2 * (2 * roundoff_of(c.type) + 0x1p-9));
  for (int64_t h = 0; h < c.H; ++h) {
    EXPECT_TRUE(std::isnan(read(got.grad_value.array, (h * c.S + 299) * c.d_v)));
    EXPECT_FALSE(std::isnan(read(got.grad_value.array, (h * c.S + 301) * c.d_v)));
  }
}

// Early queries meet keys of small weight alone: their sums of weights are far smaller than others.
TEST(CausalLinearBackwardOnDevice, EarlyKeysOfSmallWeight) {
  const Case c =
      of_type(causal(case_of("early one_head L=530 S=530 d_v=8 M=16 bias magnitude=0.1")),
              ElementType::kFloat16);
  Call call(c);
  for (int64_t j = 0; j < c.S; ++j) write(call.bias.array, j, j < 512 ? -6 : 0);
  const Results truth = truth_of(call, c), got = device_gradients(call, c, truth);
  const Results pairs = device_gradients(call.by(LinearTime::kNever), c, truth);
  expect_gradients_near(got, pairs, truth, c);
  EXPECT_GT(rows_that_differ(got.grad_value, pairs.grad_value, c.d_v, 0, 256), 0);
}

// Values and gradients of any size, and values far from zero.
TEST(CausalLinearBackwardOnDevice, NumbersOfAnySize) {
  for (const auto& [type, size, mean, of_gradients] :
       {std::tuple{ElementType::kBFloat16, 1e20, 0.0, 1e-20},
        {ElementType::kFloat32, 1.0, 20.0, 1e-28}}) {
    const Case c = of_type(causal(case_of("size one_head L=300 S=300 d_v=8 M=16")), type);
    Call call(c);
    for (int64_t i = 0; i < call.value.count; ++i) {
      write(call.value.array, i, size * (mean + read(call.value.array, i)));
    }
    for (int64_t i = 0; i < call.grad_output.count; ++i) {
      write(call.grad_output.array, i, of_gradients * read(call.grad_output.array, i));
    }
    if (c.tf32) round_to_11_bits(call.value);
    const Results truth = truth_of(call, c), got = device_gradients(call, c, truth);
    const Results pairs = device_gradients(call.by(LinearTime::kNever), c, truth);
    expect_gradients_near(got, pairs, truth, c);
    EXPECT_GT(rows_that_differ(got.grad_value, pairs.grad_value, c.d_v, 0, 256), 0);
  }
}

// Calls take linear time by themselves where it has fewer products; tables of both sides are of a
// bounded size.
TEST(CausalLinearBackwardOnDevice, ChoosesByCounting) {
  AttentionParams params;
  params.is_causal = true;
  params.B = params.H = params.G = params.key_heads = 1;
  params.d = params.d_v = 64;
  params.eps = 1e-5;
  params.value.type = ElementType::kFloat16;
  const auto goes = [&](int64_t L, int64_t M) {
    params.L = params.S = L;
    params.M = M;
    return cuda::route_of(params, false, cuda::Pass::kBackward).algorithm ==
           cuda::Algorithm::kLinear;
  };
  for (const auto& [M, length] : {std::pair{16, 6300}, {32, 12000}, {64, 20800}}) {
    EXPECT_FALSE(goes(length - 300, M)) << M;
    EXPECT_TRUE(goes(length + 300, M)) << M;
  }
  params.d_v = 65;
  EXPECT_FALSE(goes(100000, 16));
  params.d_v = 64;
  // Scores of the forward are integers where those of the backward are.
  interpreter::set_warpgroups(true);
  params.query.type = params.value.type = ElementType::kBFloat16;
  for (const auto& [length, expected] : {std::pair{30000, true}, {40000, false}}) {
    EXPECT_EQ(goes(length, 64), !expected);
    const cuda::Route forward = cuda::route_of(params, false, cuda::Pass::kForward);
    EXPECT_EQ(forward.unit, expected ? cuda::Unit::kHopper : cuda::Unit::kTensorCores);
    EXPECT_EQ(forward.int8_scores, expected);
  }
  interpreter::set_warpgroups(false);
  for (const int64_t heads : {16, 64}) {
    params.H = params.G = params.key_heads = heads;
    params.L = params.S = 65536;
    params.M = 64;
    const cuda::Prefixes prefixes = cuda::prefixes_of(params, cuda::Pass::kBackward);
    ASSERT_GT(prefixes.count, 0);
    // Sums of one side, float32, and both forms as Half.
    const double bytes = 64 * 256 * (36 * 6.0 + 64 * 2);
    EXPECT_LE(bytes * static_cast<double>(heads * prefixes.count), 0x1p30);
    // Heads that share keys make longer sums than tensor cores hold digits of.
    params.G = params.key_heads = heads / 8;
    const cuda::Prefixes grouped = cuda::prefixes_of(params, cuda::Pass::kBackward);
    EXPECT_LE(int64_t{8} * grouped.tokens * (grouped.count > 0), 1 << 16);
  }
}

}  // namespace
}  // namespace ikattn
