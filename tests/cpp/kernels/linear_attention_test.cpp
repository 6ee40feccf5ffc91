// Calls that take linear time, in the interpreter, against the CPU kernels in float64: as far off
// as quadratic time may be, and in quadratic time where they would be further.
#include <cmath>
#include <tuple>
#include <utility>

#include "attention/cuda/kernels.h"
#include "attention/cuda/linear/linear.h"
#include "kernels/half_cases.h"

namespace ikattn {
namespace {

Case linear(Case c) {
  c.linear_time = LinearTime::kAlways;
  return c;
}

// Three frequencies let scores come near zero, and the gradients of some draws have errors beyond
// the bound in quadratic time, too: those cases have eight.
const std::vector<Case> kLinearCases = cases_of(R"(
* two_chunks one_head L=20 S=70 d_v=8
* four_chunks one_head L=20 S=130 d_v=64 M=20
* six_chunks one_head L=70 S=130 d_v=20 M=33
* eight_chunks one_head L=20 S=129 d=8 d_v=16 M=64
* two_slices one_head L=20 S=128 d=8 d_v=100 M=9
* blocks_of_queries one_head L=300 S=70 d_v=8
* grouped grouped B=1 L=20 S=127 d_v=8 bias
  grouped_own_frequencies grouped L=20 S=130 d_v=12 M=8 w_heads=4 bias
* stationary L=20 S=70 d_v=8 stationary
* no_magnitude L=20 S=70 d_v=8 p=0
* larger_eps L=20 S=70 d_v=8 eps=1e-1
  no_eps L=20 S=70 d_v=8 M=8 eps=0
  uneven_magnitudes L=20 S=500 d_v=8 magnitude=2
  p_1 L=20 S=130 d_v=8 M=8 p=1 magnitude=0.3
  p_3 L=20 S=130 d_v=8 M=8 p=3
  negative_magnitudes L=20 S=130 d_v=8 M=16 magnitude=-1
  frequencies_per_sample L=20 S=130 d_v=8 M=8 w_batches=2
  sides_of_16_bits L=20 S=130 d_v=8 M=8 bias half_sides
# the fewest queries and keys that take linear time
* lowest_bias L=20 S=130 d_v=8 M=8 bias lowest
* p_1_5 L=20 S=130 d_v=8 M=8 p=1.5
* least one_head L=8 S=65 d_v=8 M=8
* edges one_head L=257 S=255 d_v=63 M=15
  one_frequency_in_a_chunk one_head L=129 S=257 d_v=1 M=17
)");

class LinearAttentionOnDevice : public ::testing::TestWithParam<Case> {};

TEST_P(LinearAttentionOnDevice, ErrsByTheRoundingsOfPairs) {
  for (const ElementType type : types_in_turn(GetParam())) {
    const Case c = linear(of_type(GetParam(), type));
    Call call(c);
    const int before = interpreter::launches_of("entry_kernel");
    const Results truth = truth_of(call, c), got = device_results(call, c);
    // of the output, and of the gradients of values up to 64 wide
    EXPECT_EQ(interpreter::launches_of("entry_kernel"), before + (c.d_v <= 64 ? 2 : 1));
    expect_forward_within(call, c, got, truth);
    if (c.magnitude == 1) compare_gradients(got, truth, c, (c.tf32 ? 8 : 7) * roundoff_of(type));
    // Not what pairs give: rows do go without. In 11 bits the blocks of some cases all have a query
    // that does not, for scores of three frequencies with few keys.
    if (type != ElementType::kBFloat16) continue;
    const Results others = device_results(call.by(LinearTime::kNever), c);
    // Log Z of the lowest numbers is rounded to 2e-6, which most differences are less than.
    const int64_t a_quarter = c.B * c.H * c.L / 4;
    EXPECT_GT(rows_that_differ(got.log_normalizer, others.log_normalizer, 1),
              c.lowest ? 0 : a_quarter);
  }
}

// Alone, what the backward adds.
TEST_P(LinearAttentionOnDevice, BackwardErrsByTheRoundingsOfPairs) {
  for (const ElementType type : types_in_turn(GetParam())) {
    const Case c = linear(of_type(GetParam(), type));
    Call call(c);
    const Results truth = truth_of(call, c), got = device_gradients(call, c, truth);
    compare_gradients(got, truth, c, amplification_of(c) * (2 * roundoff_of(type) + 0x1p-9));
    if (type != ElementType::kBFloat16) continue;
    const Results others = device_gradients(call.by(LinearTime::kNever), c, truth);
    const bool expected = c.d_v <= 64;
    EXPECT_EQ(rows_that_differ(got.grad_query, others.grad_query, c.d) > 0, expected);
    EXPECT_EQ(rows_that_differ(got.grad_value, others.grad_value, c.d_v) > 0, expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Interpreter, LinearAttentionOnDevice,
                         ::testing::ValuesIn(cases_of_tier(kLinearCases)),
                         [](const auto& info) { return info.param.name; });

TEST(LinearAttentionOnDevice, SharesOfKeysAreAddedInEveryOrder) {
  interpreter::set_multiprocessors(6);
  Case c = one_head({.name = "shares", .L = 20, .S = 2100, .d_v = 8});
  Call call(c = linear(of_type(c, ElementType::kBFloat16)));
  const Results truth = truth_of(call, c), got = device_results(call, c);
  expect_forward_within(call, c, got, truth);
  compare_gradients(got, truth, c, 6 * roundoff_of(c.type));
  expect_the_same_in_every_order(call, c);
}

// A mean far from zero: what is left of it must keep its digits.
TEST(LinearAttentionOnDevice, ValuesFarFromZero) {
  for (const ElementType type : kTypes) {
    Case c = linear(of_type(one_head({.name = "mean", .L = 20, .S = 130, .d_v = 8}), type));
    Call call(c);
    for (int64_t i = 0; i < call.value.count; ++i) {
      write(call.value.array, i, 20 + read(call.value.array, i));
    }
    if (c.tf32) round_to_11_bits(call.value);
    const Results truth = truth_of(call, c), got = device_results(call, c);
    const Results by_pairs = device_results(call.by(LinearTime::kNever), c);
    EXPECT_LE(largest_difference(got.output, truth.output),
              1.1 * largest_difference(by_pairs.output, truth.output));
  }
}

// Values of any size, and some of them far smaller than the others.
TEST(LinearAttentionOnDevice, ValuesOfAnySize) {
  for (const auto& [type, size] : {std::pair{ElementType::kBFloat16, 1e30},
                                   {ElementType::kBFloat16, 1e-30},
                                   {ElementType::kFloat32, 1e36},
                                   {ElementType::kFloat16, 2e3},
                                   {ElementType::kFloat16, 1e-3},
                                   {ElementType::kFloat32, 1e30},
                                   {ElementType::kFloat32, 1e-30}}) {
    Case c = linear(of_type(one_head({.name = "size", .L = 20, .S = 130, .d_v = 8}), type));
    Call call(c);
    for (int64_t i = 0; i < call.value.count; ++i) {
      write(call.value.array, i, size * read(call.value.array, i));
    }
    const Results truth = truth_of(call, c), got = device_results(call, c);
    expect_close(got.output, truth.output, 6 * roundoff_of(type), "output", size * 1e-3);
    compare_gradients(got, truth, c, 7 * roundoff_of(type));
  }
}

// Gradients of any size.
TEST(LinearAttentionOnDevice, GradientsOfAnySize) {
  for (const auto& [type, size] : {std::pair{ElementType::kBFloat16, 1e28},
                                   {ElementType::kBFloat16, 1e-30},
                                   {ElementType::kFloat32, 1e28},
                                   {ElementType::kFloat32, 1e-28}}) {
    Case c = one_head({.name = "size", .L = 70, .S = 130, .d_v = 8, .M = 8});
    Call call(c = linear(of_type(c, type)));
    for (int64_t i = 0; i < call.grad_output.count; ++i) {
      write(call.grad_output.array, i, size * read(call.grad_output.array, i));
    }
    const Results truth = truth_of(call, c), got = device_gradients(call, c, truth);
    const double bound = 2 * roundoff_of(type) + 0x1p-10;
    compare_token_gradients(got, truth, bound, size * 1e-3);
  }
}

// Keys of no weight, whose values are far larger than all others, do not make these coarse.
TEST(LinearAttentionOnDevice, ValuesWithoutWeight) {
  for (const auto& [below, large] :
       {std::pair{-1e4, 1e30}, {-60.0, 1e9}, {-30.0, 1e7}, {-10.0, 1e3}}) {
    for (const ElementType type : kTypes) {
      if (type == ElementType::kFloat16 && large > 6e4) continue;
      // Scales of float32 are those of pairs, which hold 2^29.
      if (type == ElementType::kFloat32 && large > 1e8) continue;
      Case c = one_head({.name = "none", .L = 20, .S = 130, .d_v = 8, .M = 8, .bias = true});
      Call call(c = linear(of_type(c, type)));
      write(call.bias.array, 77, below);
      for (int64_t column = 0; column < c.d_v; ++column) {
        write(call.value.array, 77 * c.d_v + column, large);
      }
      const Results truth = truth_of(call, c), got = device_results(call, c);
      const Results pairs = device_results(call.by(LinearTime::kNever), c);
      EXPECT_LE(largest_difference(got.output, truth.output),
                2 * largest_difference(pairs.output, truth.output))
          << below;
    }
  }
}

// Rows [first, end) of two results, all heads: whether all bits are the same.
void expect_same_rows(const Case& c, const Results& got, const Results& expected, int64_t first,
                      int64_t end) {
  for (int64_t row = first; row < end; ++row) {
    EXPECT_EQ(read(got.log_normalizer.array, row), read(expected.log_normalizer.array, row)) << row;
    for (int64_t i = row * c.d_v; i < (row + 1) * c.d_v; ++i) {
      EXPECT_EQ(read(got.output.array, i), read(expected.output.array, i)) << row;
    }
  }
}

// Keys of one direction, and a query to which they are nearly orthogonal: of its sum of weights
// moments would leave nothing. Its block takes quadratic time, the others do not; in the backward
// its head.
TEST(LinearAttentionOnDevice, QueriesOfSmallScoresGoByPairs) {
  for (const ElementType type : types_in_turn(0)) {
    Case c{.name = "small", .B = 1, .H = 2, .L = 300, .S = 130, .d = 1, .d_v = 8, .M = 1};
    c.stationary = true;
    c = of_type(c, type);
    Call call(c);
    for (int64_t h = 0; h < c.H; ++h) write(call.w1.array, h, 1);
    for (int64_t j = 0; j < c.H * c.S; ++j) {
      write(call.key.array, j, j % 2 == 0 ? 0.25 : 0.2500001);
    }
    for (int64_t i = 0; i < c.H * c.L; ++i) {
      write(call.query.array, i, i == 140 ? 0.01 : 0.2 + 1e-4 * static_cast<double>(i % c.L));
    }
    const Results truth = truth_of(call, c);
    const Results pairs = device_results(call.by(LinearTime::kNever), c);
    const Results of_pairs = device_gradients(call, c, truth);
    const Results got = device_results(call.by(LinearTime::kAlways), c);
    const Results gradients = device_gradients(call, c, truth);
    expect_same_rows(c, got, pairs, 128, 256);
    EXPECT_GT(rows_that_differ(got.log_normalizer, pairs.log_normalizer, 1), 0);
    expect_close(got.output, truth.output, 6 * roundoff_of(type), "output");
    for (const auto& [one, other, columns] :
         {std::tuple{&gradients.grad_query, &of_pairs.grad_query, c.L * c.d},
          {&gradients.grad_key, &of_pairs.grad_key, c.S * c.d},
          {&gradients.grad_value, &of_pairs.grad_value, c.S * c.d_v}}) {
      EXPECT_EQ(rows_that_differ(*one, *other, columns), 1);  // the head without that query
      for (int64_t i = 0; i < columns; ++i) EXPECT_EQ(read(one->array, i), read(other->array, i));
    }
  }
}

// Few keys with weight: rows may be those of one, and are so bit by bit.
TEST(LinearAttentionOnDevice, HeadsOfFewKeysGoByPairs) {
  for (const ElementType type : kTypes) {
    Case c = of_type(one_head({.name = "few", .L = 20, .S = 130, .d_v = 8, .bias = true}), type);
    Call call(c);
    for (int64_t j = 0; j < c.S; ++j) write(call.bias.array, j, j == 77 ? 0 : -INFINITY);
    const Results pairs = device_results(call.by(LinearTime::kNever), c);
    const Results got = device_results(call.by(LinearTime::kAlways), c);
    expect_same_rows(c, got, pairs, 0, c.L);
    compare_gradients(got, pairs, c, 0);
  }
}

// Numbers that are not finite spoil rows that see them, and no others; hidden ones may be anything.
TEST(LinearAttentionOnDevice, NanStaysWhereItIsSeen) {
  for (const ElementType type : types_in_turn(1)) {
    Case c =
        of_type(one_head({.name = "nan", .L = 20, .S = 130, .d_v = 8, .M = 8, .bias = true}), type);
    c = linear(c);
    expect_nan_stays_where_it_is_seen(c, 1);
    Call clean(c), call(c);
    for (const double garbage : {60000.0, static_cast<double>(NAN)}) {
      for (const int64_t j : {int64_t{3}, int64_t{40}}) {
        write(clean.bias.array, j, -INFINITY);
        write(call.bias.array, j, -INFINITY);
        write(call.key.array, j * c.d, garbage);
        write(call.value.array, j * c.d_v, garbage);
      }
      const Results got = device_results(call, c), expected = truth_of(clean, c);
      expect_close(got.output, expected.output, 6 * roundoff_of(type), "output");
      compare_gradients(got, expected, c, 6 * roundoff_of(type));
    }
  }
}

// Long calls of few frequencies, without masks, take linear time by themselves.
TEST(LinearAttentionOnDevice, ChoosesByCounting) {
  AttentionParams params;
  params.B = 2;
  params.H = params.G = params.key_heads = 4;
  params.d = params.d_v = 64;
  params.eps = 1e-5;
  params.value.type = ElementType::kFloat16;
  const auto goes = [&](int64_t L, int64_t S, int64_t M) {
    params.L = L;
    params.S = S;
    params.M = M;
    return cuda::route_of(params, false, cuda::Pass::kForward).algorithm ==
           cuda::Algorithm::kLinear;
  };
  for (const auto& [M, length] : {std::pair{16, 3400}, {32, 5700}, {64, 9600}}) {
    EXPECT_FALSE(goes(length - 100, length - 100, M)) << M;
    EXPECT_TRUE(goes(length + 100, length + 100, M)) << M;
    EXPECT_FALSE(goes(1, 100 * length, M)) << M;
  }
  EXPECT_FALSE(goes(100000, 100000, 65));
  params.is_causal = true;
  for (const auto& [M, length] : {std::pair{16, 9300}, {32, 15500}, {64, 24800}}) {
    EXPECT_FALSE(goes(length - 300, length - 300, M)) << M;
    EXPECT_TRUE(goes(length + 300, length + 300, M)) << M;
  }
  params.is_causal = false;
  params.dropout_threshold = 1;
  EXPECT_FALSE(goes(100000, 100000, 16));
  params.dropout_threshold = 0;
  params.linear_time = LinearTime::kNever;
  EXPECT_FALSE(goes(100000, 100000, 16));
}

// A GPU of 132 multiprocessors takes the kernels that which_kernels tells.
TEST(RouteOnDevice, IsDecidedBeforehand) {
  using cuda::Unit;
  AttentionParams params;
  params.B = 1;
  params.H = params.G = params.key_heads = 32;
  params.L = params.S = 4096;
  params.d = params.d_v = params.M = 64;
  params.eps = 1e-5;
  params.value.type = ElementType::kFloat16;
  const auto route = [&](cuda::Pass pass) { return cuda::route_of(params, false, pass); };
  const auto units = [&] {
    return std::pair{route(cuda::Pass::kForward).unit, route(cuda::Pass::kBackward).unit};
  };
  const auto algorithms = [&] {
    return std::pair{route(cuda::Pass::kForward).algorithm, route(cuda::Pass::kBackward).algorithm};
  };
  interpreter::set_multiprocessors(132);
  EXPECT_EQ(units(), std::pair(Unit::kTensorCores, Unit::kTensorCores));
  const cuda::Route in_double = cuda::route_of(params, true, cuda::Pass::kForward);
  EXPECT_EQ(in_double.unit, Unit::kCudaCores);
  EXPECT_STREQ(in_double.reason, "float64");
  interpreter::set_warpgroups(true);
  EXPECT_EQ(units(), std::pair(Unit::kHopper, Unit::kHopper));
  params.L = 128;  // the forward's blocks share their keys
  EXPECT_EQ(units(), std::pair(Unit::kTensorCores, Unit::kHopper));
  EXPECT_GT(route(cuda::Pass::kForward).parts, 1);
  params.L = 4096;
  params.dropout_threshold = 1;
  EXPECT_EQ(units(), std::pair(Unit::kTensorCores, Unit::kTensorCores));
  interpreter::set_warpgroups(false);
  params.dropout_threshold = 0;
  params.L = params.S = 16384;
  EXPECT_EQ(algorithms(), std::pair(cuda::Algorithm::kLinear, cuda::Algorithm::kLinear));
  EXPECT_EQ(units(), std::pair(Unit::kTensorCores, Unit::kTensorCores));
  params.d_v = 100;
  EXPECT_EQ(route(cuda::Pass::kBackward).algorithm, cuda::Algorithm::kQuadratic);
  params.M = 65;
  EXPECT_TRUE(route(cuda::Pass::kForward).is_wide);
  EXPECT_EQ(algorithms(), std::pair(cuda::Algorithm::kQuadratic, cuda::Algorithm::kQuadratic));
  params.value.type = ElementType::kFloat32;
  EXPECT_EQ(units(), std::pair(Unit::kCudaCores, Unit::kCudaCores));
}

}  // namespace
}  // namespace ikattn
