// The forward of causal calls in linear time, in the interpreter, against the CPU kernels in
// float64: as far off as pairs may be, and by pairs where it would be further. Chunks are the
// shortest, 256 tokens.
#include <cmath>
#include <utility>

#include "attention/cuda/kernels.h"
#include "attention/cuda/linear/linear.h"
#include "kernels/half_cases.h"

namespace ikattn {
namespace {

Case causal(Case c) {
  c.causal = true;
  return c;
}

// Output and log Z alone.
Results forward_by(Call& call, const Case& c, LinearTime setting) {
  AttentionParams params;
  call.by(setting).set(params);
  Results results;
  results.output = make(call.memory, c.type, {c.B, c.H, c.L, c.d_v});
  results.log_normalizer = make(call.memory, ElementType::kFloat64, {c.B, c.H, c.L});
  params.output = results.output.array;
  params.log_normalizer = results.log_normalizer.array;
  EXPECT_STREQ(cuda::attention_kernels.forward[0](params, device_executor(call.memory)), nullptr);
  return results;
}

// The first rows of blocks of 128 queries of which a log Z is another.
std::vector<int64_t> blocks_that_differ(const Case& c, const Results& one, const Results& other) {
  std::vector<int64_t> blocks;
  for (int64_t row = 0; row < c.B * c.H * c.L; ++row) {
    const double x = read(one.log_normalizer.array, row);
    const double y = read(other.log_normalizer.array, row);
    if (x == y || (std::isnan(x) && std::isnan(y))) continue;
    const int64_t first = row - row % c.L % cuda::kLinearQueries;
    if (blocks.empty() || blocks.back() != first) blocks.push_back(first);
  }
  return blocks;
}

const Case kCausalCases[] = {
    one_head(causal({.name = "three_chunks", .L = 530, .S = 530, .d_v = 8, .M = 8})),
    one_head(causal({.name = "fewer_keys", .L = 700, .S = 300, .d_v = 8, .M = 8})),
    one_head(causal({.name = "more_keys", .L = 300, .S = 520, .d_v = 8, .M = 9})),
    one_head(
        causal({.name = "eight_feature_chunks", .L = 270, .S = 270, .d = 8, .d_v = 16, .M = 64})),
    one_head(causal({.name = "two_slices", .L = 270, .S = 270, .d = 8, .d_v = 100, .M = 9})),
    causal({.name = "grouped",
            .B = 1,
            .H = 2,
            .G = 1,
            .L = 400,
            .S = 400,
            .d_v = 12,
            .M = 16,
            .frequency_heads = 1,
            .bias = true,
            .magnitude = 0.1}),
    causal({.name = "batch",
            .H = 1,
            .G = 1,
            .L = 270,
            .S = 270,
            .d_v = 8,
            .M = 8,
            .frequency_heads = 1}),
    one_head(
        causal({.name = "stationary", .L = 270, .S = 270, .d_v = 8, .M = 8, .stationary = true})),
    one_head(causal({.name = "no_magnitude", .L = 270, .S = 270, .d_v = 8, .M = 8, .p = 0})),
    one_head(causal({.name = "larger_eps", .L = 270, .S = 270, .d_v = 8, .M = 8, .eps = 1e-1})),
    // chunks of 768 tokens, no multiple of 512
    one_head(
        causal({.name = "longer_chunks", .L = 1700, .S = 1700, .d_v = 8, .M = 8, .eps = 1e-1})),
};

class CausalLinearOnDevice : public ::testing::TestWithParam<Case> {};

TEST_P(CausalLinearOnDevice, ErrsByTheRoundingsOfPairs) {
  for (const ElementType type : types_in_turn(GetParam())) {
    const Case c = of_type(GetParam(), type);
    Call call(c);
    const Results truth = truth_of(call, c);
    const int before = interpreter::launches_of("entry_kernel");
    const Results got = forward_by(call, c, LinearTime::kAlways);
    EXPECT_EQ(interpreter::launches_of("entry_kernel"), before + 1);
    expect_forward_within(call, c, got, truth);
    const Results pairs = forward_by(call, c, LinearTime::kNever);
    const auto blocks = blocks_that_differ(c, got, pairs);
    EXPECT_FALSE(blocks.empty());
    for (const int64_t row : blocks) EXPECT_GE(row % c.L, 256);  // the first chunk is pairs
  }
}

INSTANTIATE_TEST_SUITE_P(
    Interpreter, CausalLinearOnDevice,
    ::testing::ValuesIn(cases_of_tier(kCausalCases, {"three_chunks", "fewer_keys", "more_keys",
                                                     "eight_feature_chunks", "two_slices",
                                                     "grouped", "longer_chunks"})),
    [](const auto& info) { return info.param.name; });

TEST(CausalLinearOnDevice, EveryOrderGivesTheSameBits) {
  const Case c = of_type(one_head(causal({.name = "order", .L = 530, .S = 530, .d_v = 8, .M = 8})),
                         ElementType::kBFloat16);
  Call call(c);
  const Results first = forward_by(call, c, LinearTime::kAlways);
  for (const auto order : {interpreter::Order::kReversed, interpreter::Order::kShuffled}) {
    interpreter::set_order(order);
    const Results got = forward_by(call, c, LinearTime::kAlways);
    expect_close(got.output, first.output, 0, "output");
    expect_close(got.log_normalizer, first.log_normalizer, 0, "log_normalizer");
  }
  interpreter::set_order(interpreter::Order::kForward);
}

// One of 256 keys has nearly all weight: rows equal those of pairs, bit by bit.
TEST(CausalLinearOnDevice, PrefixesOfFewKeysGoByPairs) {
  const Case c =
      of_type(one_head(causal({.name = "few", .L = 600, .S = 600, .d_v = 8, .M = 8, .bias = true})),
              ElementType::kBFloat16);
  Call call(c);
  for (int64_t j = 0; j < c.S; ++j) write(call.bias.array, j, j == 7 || j >= 256 ? 0 : -8);
  const Results got = forward_by(call, c, LinearTime::kAlways);
  const Results pairs = forward_by(call, c, LinearTime::kNever);
  const auto blocks = blocks_that_differ(c, got, pairs);
  EXPECT_FALSE(blocks.empty());
  for (const int64_t row : blocks) EXPECT_GE(row, 512);
}

// Early queries meet keys of small weight alone, whose sums have a scale of their own.
TEST(CausalLinearOnDevice, EarlyKeysOfSmallWeight) {
  for (const auto& [type, below] :
       {std::pair{ElementType::kBFloat16, -12.0}, {ElementType::kFloat16, -6.0}}) {
    const Case c = of_type(one_head(causal({.name = "early",
                                            .L = 600,
                                            .S = 600,
                                            .d_v = 8,
                                            .M = 8,
                                            .bias = true,
                                            .magnitude = 0.1})),
                           type);
    Call call(c);
    for (int64_t j = 0; j < c.S; ++j) write(call.bias.array, j, j < 512 ? below : 0);
    const Results truth = truth_of(call, c), got = forward_by(call, c, LinearTime::kAlways);
    expect_forward_within(call, c, got, truth);
    const auto blocks = blocks_that_differ(c, got, forward_by(call, c, LinearTime::kNever));
    ASSERT_FALSE(blocks.empty());
    EXPECT_LT(blocks.front(), 512);
  }
}

// Magnitudes that would leave Half go by pairs, as do keys that are not finite.
TEST(CausalLinearOnDevice, HeadsThatMomentsCannotHoldGoByPairs) {
  for (const bool is_nan : {false, true}) {
    const Case c = of_type(
        one_head(causal({.name = "far", .L = 300, .S = 300, .d_v = 8, .M = 8, .bias = true})),
        ElementType::kBFloat16);
    Call call(c);
    write(call.bias.array, 270, is_nan ? NAN : 24);
    const Results truth = truth_of(call, c);
    const Results got = forward_by(call, c, LinearTime::kAlways);
    expect_close(got.output, truth.output, 6 * roundoff_of(c.type), "output");
    // Pairs of all kinds give the first case another form.
    if (!is_nan) continue;
    EXPECT_TRUE(blocks_that_differ(c, got, forward_by(call, c, LinearTime::kNever)).empty());
  }
}

// Hidden keys may hold anything, in every chunk; a query that is NaN spoils its row alone.
TEST(CausalLinearOnDevice, HiddenKeysAndSpoiledQueries) {
  const Case c = of_type(
      one_head(causal(
          {.name = "nan", .L = 530, .S = 530, .d_v = 8, .M = 8, .bias = true, .magnitude = 0.1})),
      ElementType::kBFloat16);
  Call call(c);
  for (const int64_t j : {3, 300, 520}) {
    write(call.bias.array, j, -INFINITY);
    write(call.key.array, j * c.d, 60000.0);
    write(call.value.array, j * c.d_v, 60000.0);
  }
  write(call.query.array, 400 * c.d, NAN);
  const Results truth = truth_of(call, c), got = forward_by(call, c, LinearTime::kAlways);
  expect_close(got.output, truth.output, 6 * roundoff_of(c.type), "output");
  EXPECT_FALSE(blocks_that_differ(c, got, forward_by(call, c, LinearTime::kNever)).empty());
}

// Values of any size, and far from zero.
TEST(CausalLinearOnDevice, ValuesOfAnySize) {
  for (const auto& [type, size, mean] : {std::tuple{ElementType::kBFloat16, 1e28, 0.0},
                                         {ElementType::kBFloat16, 1e-28, 0.0},
                                         {ElementType::kFloat32, 1e28, 0.0},
                                         {ElementType::kFloat32, 1.0, 20.0}}) {
    const Case c =
        of_type(one_head(causal({.name = "size", .L = 300, .S = 300, .d_v = 8, .M = 8})), type);
    Call call(c);
    for (int64_t i = 0; i < call.value.count; ++i) {
      write(call.value.array, i, size * (mean + read(call.value.array, i)));
    }
    if (c.tf32) round_to_11_bits(call.value);
    const Results truth = truth_of(call, c), got = forward_by(call, c, LinearTime::kAlways);
    expect_close(got.output, truth.output, 6 * roundoff_of(type), "output", size * 1e-3);
    EXPECT_FALSE(blocks_that_differ(c, got, forward_by(call, c, LinearTime::kNever)).empty());
  }
}

// Chunks are as long as tables of all prefixes allow, and so long that pairs outweigh these.
TEST(CausalLinearOnDevice, TablesAreAGigabyteAtMost) {
  AttentionParams params;
  params.is_causal = true;
  params.B = 1;
  params.d = params.d_v = 64;
  for (const int64_t heads : {1, 16, 256}) {
    for (const int64_t M : {16, 32, 64}) {
      for (const int64_t L : {4096, 16384, 1 << 20}) {
        params.H = params.G = params.key_heads = heads;
        params.L = params.S = L;
        params.M = M;
        const cuda::Prefixes prefixes = cuda::prefixes_of(params, cuda::Pass::kForward);
        if (heads == 256 && L == 1 << 20) {
          EXPECT_EQ(prefixes.count, 0);  // of chunks that long sums would err
          continue;
        }
        const double entries = cuda::FeatureChunks(params).pairs() * 256.0;
        EXPECT_LE(static_cast<double>(heads * prefixes.count) * entries * 64 * 6, 0x1p30);
        EXPECT_EQ(prefixes.tokens % cuda::kEntryTokens, 0);
        EXPECT_LT(int64_t{prefixes.tokens} * prefixes.count, L);
        EXPECT_GE(int64_t{prefixes.tokens} * (prefixes.count + 1), L);
      }
    }
  }
}

}  // namespace
}  // namespace ikattn
