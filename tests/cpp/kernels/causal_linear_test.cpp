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

const std::vector<Case> kCausalCases = cases_of(R"(
* three_chunks one_head L=530 S=530 d_v=8 M=8 causal
* fewer_keys one_head L=700 S=300 d_v=8 M=8 causal
* more_keys one_head L=300 S=520 d_v=8 M=9 causal
* eight_feature_chunks one_head L=270 S=270 d=8 d_v=16 M=64 causal
* two_slices one_head L=270 S=270 d=8 d_v=100 M=9 causal
* grouped one_key_head L=400 S=400 d_v=12 M=16 bias magnitude=0.1 causal
  batch H=1 G=1 L=270 S=270 d_v=8 M=8 w_heads=1 causal
  stationary one_head L=270 S=270 d_v=8 M=8 stationary causal
  no_magnitude one_head L=270 S=270 d_v=8 M=8 p=0 causal
  larger_eps one_head L=270 S=270 d_v=8 M=8 eps=1e-1 causal
# chunks of 768 tokens, no multiple of 512
* longer_chunks one_head L=1700 S=1700 d_v=8 M=8 eps=1e-1 causal
)");

class CausalLinearOnDevice : public ::testing::TestWithParam<Case> {};

TEST_P(CausalLinearOnDevice, ErrsByTheRoundingsOfPairs) {
  for (const ElementType type : types_in_turn(GetParam())) {
    const Case c = of_type(GetParam(), type);
    Call call(c);
    const Results truth = truth_of(call, c);
    const int before = interpreter::launches_of("entry_kernel");
    const Results got = device_forward(call.by(LinearTime::kAlways), c);
    EXPECT_EQ(interpreter::launches_of("entry_kernel"), before + 1);
    expect_forward_within(call, c, got, truth);
    const Results pairs = device_forward(call.by(LinearTime::kNever), c);
    const auto blocks = blocks_that_differ(c, got, pairs);
    EXPECT_FALSE(blocks.empty());
    for (const int64_t row : blocks) EXPECT_GE(row % c.L, 256);  // the first chunk is pairs
  }
}

INSTANTIATE_TEST_SUITE_P(Interpreter, CausalLinearOnDevice,
                         ::testing::ValuesIn(cases_of_tier(kCausalCases)),
                         [](const auto& info) { return info.param.name; });

TEST(CausalLinearOnDevice, EveryOrderGivesTheSameBits) {
  const Case c =
      of_type(case_of("order one_head L=530 S=530 d_v=8 M=8 causal"), ElementType::kBFloat16);
  Call call(c);
  const Results first = device_forward(call.by(LinearTime::kAlways), c);
  for (const auto order : {interpreter::Order::kReversed, interpreter::Order::kShuffled}) {
    interpreter::set_order(order);
    const Results got = device_forward(call.by(LinearTime::kAlways), c);
    expect_close(got.output, first.output, 0, "output");
    expect_close(got.log_normalizer, first.log_normalizer, 0, "log_normalizer");
  }
}

// One of 256 keys has nearly all weight: rows equal those of pairs, bit by bit.
TEST(CausalLinearOnDevice, PrefixesOfFewKeysGoByPairs) {
  const Case c =
      of_type(case_of("few one_head L=600 S=600 d_v=8 M=8 bias causal"), ElementType::kBFloat16);
  Call call(c);
  for (int64_t j = 0; j < c.S; ++j) write(call.bias.array, j, j == 7 || j >= 256 ? 0 : -8);
  const Results got = device_forward(call.by(LinearTime::kAlways), c);
  const Results pairs = device_forward(call.by(LinearTime::kNever), c);
  const auto blocks = blocks_that_differ(c, got, pairs);
  EXPECT_FALSE(blocks.empty());
  for (const int64_t row : blocks) EXPECT_GE(row, 512);
}

// Early queries meet keys of small weight alone, whose sums have a scale of their own.
TEST(CausalLinearOnDevice, EarlyKeysOfSmallWeight) {
  for (const auto& [type, below] :
       {std::pair{ElementType::kBFloat16, -12.0}, {ElementType::kFloat16, -6.0}}) {
    const Case c =
        of_type(case_of("early one_head L=600 S=600 d_v=8 M=8 bias magnitude=0.1 causal"), type);
    Call call(c);
    for (int64_t j = 0; j < c.S; ++j) write(call.bias.array, j, j < 512 ? below : 0);
    const Results truth = truth_of(call, c), got = device_forward(call.by(LinearTime::kAlways), c);
    expect_forward_within(call, c, got, truth);
    const auto blocks = blocks_that_differ(c, got, device_forward(call.by(LinearTime::kNever), c));
    ASSERT_FALSE(blocks.empty());
    EXPECT_LT(blocks.front(), 512);
  }
}

// Magnitudes that would leave Half go by pairs, as do keys that are not finite.
TEST(CausalLinearOnDevice, HeadsThatMomentsCannotHoldGoByPairs) {
  for (const bool is_nan : {false, true}) {
    const Case c =
        of_type(case_of("far one_head L=300 S=300 d_v=8 M=8 bias causal"), ElementType::kBFloat16);
    Call call(c);
    write(call.bias.array, 270, is_nan ? NAN : 24);
    const Results truth = truth_of(call, c);
    const Results got = device_forward(call.by(LinearTime::kAlways), c);
    expect_close(got.output, truth.output, 6 * roundoff_of(c.type), "output");
    // Pairs of all kinds give the first case another form.
    if (!is_nan) continue;
    EXPECT_TRUE(blocks_that_differ(c, got, device_forward(call.by(LinearTime::kNever), c)).empty());
  }
}

// Hidden keys may hold anything, in every chunk; a query that is NaN spoils its row alone.
TEST(CausalLinearOnDevice, HiddenKeysAndSpoiledQueries) {
  const Case c = of_type(case_of("nan one_head L=530 S=530 d_v=8 M=8 bias magnitude=0.1 causal"),
                         ElementType::kBFloat16);
  Call call(c);
  for (const int64_t j : {3, 300, 520}) {
    write(call.bias.array, j, -INFINITY);
    write(call.key.array, j * c.d, 60000.0);
    write(call.value.array, j * c.d_v, 60000.0);
  }
  write(call.query.array, 400 * c.d, NAN);
  const Results truth = truth_of(call, c), got = device_forward(call.by(LinearTime::kAlways), c);
  expect_close(got.output, truth.output, 6 * roundoff_of(c.type), "output");
  EXPECT_FALSE(blocks_that_differ(c, got, device_forward(call.by(LinearTime::kNever), c)).empty());
}

// Values of any size, and far from zero.
TEST(CausalLinearOnDevice, ValuesOfAnySize) {
  for (const auto& [type, size, mean] : {std::tuple{ElementType::kBFloat16, 1e28, 0.0},
                                         {ElementType::kBFloat16, 1e-28, 0.0},
                                         {ElementType::kFloat32, 1e28, 0.0},
                                         {ElementType::kFloat32, 1.0, 20.0}}) {
    const Case c = of_type(case_of("size one_head L=300 S=300 d_v=8 M=8 causal"), type);
    Call call(c);
    for (int64_t i = 0; i < call.value.count; ++i) {
      write(call.value.array, i, size * (mean + read(call.value.array, i)));
    }
    if (c.tf32) round_to_11_bits(call.value);
    const Results truth = truth_of(call, c), got = device_forward(call.by(LinearTime::kAlways), c);
    expect_close(got.output, truth.output, 6 * roundoff_of(type), "output", size * 1e-3);
    EXPECT_FALSE(
        blocks_that_differ(c, got, device_forward(call.by(LinearTime::kNever), c)).empty());
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
          EXPECT_EQ(prefixes.count, 0);  // long sums of chunks would have large errors
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
