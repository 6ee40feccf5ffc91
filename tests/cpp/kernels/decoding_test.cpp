// Attention of few queries to kept features: the CUDA kernels in the interpreter, against the CPU
// kernel in float64.
#include "attention/cuda/decoding/decoding.h"

#include <limits>
#include <random>

#include "kernels/attention_cases.h"

namespace ikattn {
namespace {

struct FeatureCall {
  std::string name;
  int64_t B = 1, H = 2, L = 1, S = 150, F = 64, d_v = 64, key_heads = 2, value_heads = 2;
  ElementType features = ElementType::kFloat32, value = ElementType::kFloat32;
  bool one_logit_a_key = false;  // one for all heads and queries
  bool lower_right = false;      // causal: the queries are those of the last keys
  int64_t hidden = 0;            // number of hidden first keys
  int64_t gap = 0;               // between rows of features and of values
  friend void PrintTo(const FeatureCall& c, std::ostream* out) { *out << c.name; }
};

constexpr ElementType kBFloat = ElementType::kBFloat16, kHalfType = ElementType::kFloat16,
                      kDouble = ElementType::kFloat64;

const FeatureCall kCalls[] = {
    {.name = "one_token", .H = 2, .S = 300, .F = 128, .value = kBFloat, .one_logit_a_key = true},
    {.name = "one_part", .S = 128, .F = 32, .d_v = 16, .value = kHalfType},
    {.name = "heads_of_a_group", .B = 2, .H = 8, .S = 131, .F = 32, .value = kBFloat},
    {.name = "chunk",
     .H = 4,
     .L = 5,
     .S = 140,
     .F = 48,
     .d_v = 80,
     .value = kBFloat,
     .lower_right = true},
    {.name = "features_of_every_head", .H = 4, .L = 2, .S = 20, .F = 36, .d_v = 24, .key_heads = 4},
    {.name = "values_of_every_head",
     .H = 6,
     .S = 20,
     .F = 20,
     .d_v = 8,
     .key_heads = 2,
     .value_heads = 6},
    {.name = "keys_of_two_values_of_three", .H = 6, .S = 9, .key_heads = 2, .value_heads = 3},
    {.name = "many_rows",
     .H = 2,
     .L = 19,
     .S = 33,
     .F = 16,
     .d_v = 12,
     .key_heads = 1,
     .value_heads = 1,
     .value = kHalfType},
    {.name = "odd_sizes",
     .H = 3,
     .L = 2,
     .S = 37,
     .F = 6,
     .d_v = 3,
     .key_heads = 1,
     .value_heads = 3,
     .value = kBFloat},
    {.name = "rows_apart", .S = 40, .F = 10, .d_v = 8, .value = kBFloat, .gap = 3},
    {.name = "hidden_part", .L = 2, .S = 270, .F = 16, .d_v = 8, .hidden = 256},
    {.name = "all_hidden", .S = 130, .F = 16, .d_v = 8, .hidden = 130},
    {.name = "no_keys", .S = 0, .F = 16, .d_v = 8},
    {.name = "wide_features",
     .H = 16,
     .S = 17,
     .F = 900,
     .d_v = 8,
     .key_heads = 1,
     .value_heads = 1},
    {.name = "features_that_fill_shared_memory",
     .H = 2,
     .S = 5,
     .F = 6000,
     .d_v = 8,
     .key_heads = 1,
     .value_heads = 1},
    {.name = "in_double",
     .H = 4,
     .L = 2,
     .S = 140,
     .F = 34,
     .d_v = 20,
     .features = kDouble,
     .value = kDouble},
    {.name = "double_features_of_16_bits", .S = 20, .F = 16, .features = kDouble, .value = kBFloat},
    {.name = "values_in_double", .S = 20, .F = 16, .d_v = 6, .value = kDouble},
};

class Arguments {
 public:
  explicit Arguments(const FeatureCall& c) : call_(c) {
    query_ = drawn(c.features, {c.B, c.H, c.L, c.F});
    key_ = drawn(c.features, {c.B, c.key_heads, c.S, c.F + c.gap});
    value_ = drawn(c.value, {c.B, c.value_heads, c.S, c.d_v + c.gap});
    const std::vector<bool> shared = {false, c.one_logit_a_key, c.one_logit_a_key, false};
    logits_ = drawn(c.features, {c.B, c.H, c.L, c.S}, shared);
    for (int64_t index = 0; index < logits_.count; ++index) {
      const int64_t j = index % c.S, i = c.one_logit_a_key ? 0 : index / c.S % c.L;
      const bool later = c.lower_right && j > c.S - c.L + i;
      if (j < c.hidden || later) write(logits_.array, index, -INFINITY);
    }
  }

  FromFeaturesParams params(const Tensor& output) const {
    FromFeaturesParams p{call_.B, call_.H,   call_.L,         call_.S,
                         call_.F, call_.d_v, call_.key_heads, call_.value_heads};
    p.query = query_.array;
    p.key = key_.array;
    p.logits = logits_.array;
    p.value = value_.array;
    p.output = output.array;
    return p;
  }
  // In float64, of the same numbers.
  Tensor expected() {
    const Tensor output = make(memory, kDouble, {call_.B, call_.H, call_.L, call_.d_v});
    truth::attention_kernels.from_features[1](params(output), cpu_executor(memory));
    return output;
  }
  Tensor got() { return run(params(empty(call_.value))); }
  Tensor empty(ElementType type) {
    return make(memory, type, {call_.B, call_.H, call_.L, call_.d_v});
  }
  Tensor run(const FromFeaturesParams& p) {
    const auto kernel = call_.features == kDouble ? cuda::attention_from_features<double>
                                                  : cuda::attention_from_features<float>;
    EXPECT_STREQ(kernel(p, device_executor(memory)), nullptr);
    Tensor output;
    output.array = p.output;
    output.count = p.B * p.H * p.L * p.d_v;
    return output;
  }

  Memory memory;
  Tensor query_, key_, value_, logits_;

 private:
  Tensor drawn(ElementType type, std::vector<int64_t> sizes, std::vector<bool> broadcast = {}) {
    Tensor tensor = make(memory, type, std::move(sizes), std::move(broadcast));
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < tensor.count; ++i) write(tensor.array, i, normal(generator_));
    return tensor;
  }
  FeatureCall call_;
  std::mt19937 generator_{7};
};

class DecodingOnDevice : public ::testing::TestWithParam<FeatureCall> {};

TEST_P(DecodingOnDevice, ErrsByRoundingInEveryOrder) {
  const FeatureCall c = GetParam();
  Arguments arguments(c);
  const Tensor got = arguments.got(), expected = arguments.expected();
  const double rounding = c.value == kBFloat      ? 0x1p-9
                          : c.value == kHalfType  ? 0x1p-12
                          : c.features == kDouble ? 1e-15
                                                  : 1e-6;
  expect_close(got, expected, 2 * rounding, "output");
  for (const interpreter::Order order :
       {interpreter::Order::kReversed, interpreter::Order::kShuffled}) {
    interpreter::set_order(order);
    expect_close(arguments.got(), got, 0, "in another order");
  }
}

INSTANTIATE_TEST_SUITE_P(Interpreter, DecodingOnDevice, ::testing::ValuesIn(kCalls),
                         [](const auto& info) { return info.param.name; });

// A row alone, of one head or two, and among up to 14.
TEST(DecodingRows, HaveTheSameBitsAloneAndWithOthers) {
  for (const int64_t heads : {2, 4}) {
    FeatureCall c{.name = "", .L = 7, .S = 270, .F = 40, .d_v = 24, .lower_right = true};
    c.H = heads;
    Arguments arguments(c);
    const Tensor together = arguments.got();
    for (const int64_t i : {0, 3, 6}) {
      // The keys up to its own, which are fewer.
      FromFeaturesParams alone = arguments.params(arguments.empty(ElementType::kFloat32));
      const auto from_row = [&](Array& array) {
        array.data = static_cast<float*>(array.data) + i * array.stride[2];
      };
      alone.L = 1;
      alone.S = c.S - c.L + i + 1;
      from_row(alone.query);
      from_row(alone.logits);
      const Tensor row = arguments.run(alone);
      for (int64_t h = 0; h < c.H; ++h) {
        for (int64_t column = 0; column < c.d_v; ++column) {
          const int64_t at = (h * c.L + i) * c.d_v + column, own = h * c.L * c.d_v + column;
          ASSERT_EQ(read(row.array, own), read(together.array, at)) << i << " of " << h;
        }
      }
    }
  }
}

TEST(DecodingRows, HiddenKeysMayHoldAnythingAndVisibleOnesPoisonTheirRows) {
  const FeatureCall c{.name = "",
                      .L = 2,
                      .S = 150,
                      .F = 16,
                      .d_v = 8,
                      .key_heads = 1,
                      .value_heads = 1,
                      .hidden = 3};
  Arguments arguments(c);
  const Tensor clean = arguments.got();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  write(arguments.key_.array, 2 * c.F, nan);
  write(arguments.value_.array, 1 * c.d_v, INFINITY);
  expect_close(arguments.got(), clean, 0, "hidden keys");
  write(arguments.key_.array, 140 * c.F, nan);
  const Tensor poisoned = arguments.got();
  for (int64_t i = 0; i < poisoned.count; ++i) EXPECT_TRUE(std::isnan(read(poisoned.array, i)));
}

TEST(DecodingRows, NaNLogitsReachTheirRowsAlone) {
  const FeatureCall c{.name = "", .H = 2, .L = 2, .S = 150, .F = 16, .d_v = 8};
  Arguments arguments(c);
  for (int64_t j = 0; j < 128; ++j) {  // a part of NaN alone
    write(arguments.logits_.array, c.S + j, std::numeric_limits<double>::quiet_NaN());
  }
  expect_close(arguments.got(), arguments.expected(), 1e-6, "output");
}

}  // namespace
}  // namespace ikattn
