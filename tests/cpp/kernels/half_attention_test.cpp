// The attention operators' tensor-core kernels in the interpreter, against the CPU kernels in
// float64 on the same numbers: as far off as the roundings of their operands allow.
#include "kernels/half_cases.h"

namespace ikattn {
namespace {

// Cases that go to the tensor cores, and some that come back because magnitudes differ too much.
const std::vector<Case> kHalfCases = cases_of(R"(
# Three frequencies let scores come near zero, and gradients have errors of up to 10 roundings.
* plain L=20 S=30 d_v=8 M=8
* not_a_multiple_of_8 L=20 S=30 d_v=12 bias
* tiles one_head L=130 S=130 d=8 d_v=64 M=64
* narrow_features_wide_value one_head L=33 S=65 d=8 d_v=72 M=20
* tokens_of_three_slices one_head L=20 S=70 d=136 d_v=8 M=66 stationary p=1.5
# several of 256 tokens for each block that makes features, of two pieces of frequencies
  tiles_of_a_block B=1 H=6 G=6 L=700 S=30 d_v=8 M=40 w_heads=6
  shares_of_tokens one_head L=530 S=20 d=8 d_v=8
* wide_heads_and_odd_frequencies one_head L=70 S=65 d=70 d_v=8 M=33
* causal B=1 L=150 S=150 d_v=16 M=9 causal
# Rows that see few keys err by their scores' roundings over these, unless eps is larger.
* causal_and_fewer_keys B=1 L=130 S=70 d_v=8 M=9 causal eps=0.1
* bool_mask L=40 S=70 d_v=8 mask=bool
* bool_mask_and_dropout L=40 S=70 d_v=8 mask=bool dropout=0.3
* negative_magnitudes L=20 S=30 d_v=8 M=8 bias magnitude=-1
* dropout L=40 S=70 d_v=8 dropout=0.3
* dropout_and_causal L=70 S=70 d_v=8 causal dropout=0.3
* grouped grouped L=20 S=70 d_v=8 bias
* wide_features_and_value one_head L=70 S=65 d=8 d_v=128 M=64 causal
  grouped_own_frequencies grouped L=20 S=30 d_v=8 w_heads=4 bias
* grouped_frequencies_per_sample grouped L=20 S=30 d_v=8 w_heads=4 w_batches=2 bias
  frequencies_per_sample L=20 S=30 d_v=8 w_batches=2
* stationary L=20 S=30 d_v=8 stationary
* uneven_magnitudes_and_causal L=70 S=70 d_v=8 causal magnitude=4
* float_mask L=70 S=40 d_v=8 mask=float
* float_mask_causal_and_more_keys L=40 S=70 d_v=8 M=9 causal mask=float eps=0.1
  float_mask_causal_and_fewer_keys B=1 L=130 S=70 d_v=8 M=9 causal mask=per_pair eps=0.1
  float_mask_and_stationary L=20 S=70 d_v=8 stationary mask=float
  float_mask_and_no_magnitude L=20 S=70 d_v=8 mask=float p=0
* float_mask_and_p_1 L=20 S=70 d_v=8 mask=float p=1 magnitude=0.3
  float_mask_frequencies_per_sample grouped L=20 S=70 d_v=8 w_heads=4 w_batches=2 bias mask=float
  float_mask_and_larger_eps L=20 S=70 d_v=8 mask=float eps=1e-2
  float_mask_and_negative_magnitudes L=20 S=70 d_v=8 mask=float magnitude=-1
* float_mask_per_key L=20 S=30 d_v=8 mask=per_key
* float_mask_per_row L=20 S=30 d_v=8 mask=per_row
  float_mask_per_head L=20 S=30 d_v=8 mask=per_head
  float_mask_and_everything grouped L=70 S=70 d_v=72 M=40 causal bias mask=float dropout=0.3
# Wide rows, by slices of 128.
* features_of_two_slices one_key_head L=70 S=130 d=8 d_v=8 M=100
* value_of_two_slices L=20 S=70 d_v=136 bias
  many_slices_and_causal one_head L=130 S=100 d=8 d_v=300 M=200 causal
* slices_and_uneven_magnitudes one_key_head L=70 S=70 d_v=130 M=65 causal magnitude=4
* slices_and_dropout B=1 L=40 S=70 d_v=8 M=80 mask=bool dropout=0.3
  slices_and_float_mask grouped L=70 S=70 d_v=129 M=70 bias mask=float dropout=0.3
* slices_float_mask_and_causal B=1 L=70 S=70 d_v=129 M=70 causal bias mask=float magnitude=2
  slices_and_mask_per_row L=20 S=70 d_v=8 M=70 mask=per_row
* slices_and_mask_of_all_pairs L=20 S=70 d_v=136 half_sides mask=per_pair
  slices_and_bool_mask B=1 L=40 S=70 d_v=8 M=80 mask=bool
  slices_frequencies_per_sample grouped L=20 S=70 d_v=8 M=66 w_heads=4 w_batches=2 bias half_sides
  slices_stationary_and_no_magnitude L=20 S=70 d_v=136 stationary p=0
* slices_and_p_1 L=20 S=70 d_v=8 M=66 p=1 magnitude=0.3
  slices_and_larger_eps L=20 S=70 d_v=136 eps=1e-2
  slices_and_negative_magnitudes L=20 S=70 d_v=136 magnitude=-1
* slices_without_keys S=0 d_v=8 M=70
  slices_without_queries L=0 d_v=136
  mask_of_all_pairs L=20 S=70 d_v=8 mask=per_pair
* sides_of_16_bits L=20 S=70 d_v=8 bias half_sides mask=float
* no_magnitude L=20 S=70 d_v=8 p=0
# |k|_1^2 is up to three times |k|_2^2 here.
  p_1 L=20 S=70 d_v=8 p=1 magnitude=0.3
* p_1_5 L=20 S=70 d_v=8 p=1.5
  p_3_and_slices L=20 S=70 d_v=136 p=3
* larger_eps L=20 S=70 d_v=8 eps=1e-2
  largest_eps L=70 S=70 d_v=8 causal eps=0.9
# Small or large eps keep calls from the tensor cores: all types, and all but bfloat16.
* eps_for_ordinary_units L=30 S=30 d_v=8 causal eps=1e-9
* eps_for_bfloat16 L=30 S=70 d_v=8 causal eps=2
* no_keys S=0 d_v=8
* no_queries L=0 d_v=8
  large_magnitudes L=20 S=70 d_v=8 M=32 magnitude=40
  large_magnitudes_and_causal L=70 S=70 d_v=8 causal magnitude=40
  large_magnitudes_and_dropout L=20 S=70 d_v=8 dropout=0.3 magnitude=40
* large_magnitudes_causal_and_more_keys L=40 S=70 d_v=8 causal magnitude=40
* large_magnitudes_and_bool_mask L=40 S=70 d_v=8 M=32 mask=bool magnitude=40
  large_magnitudes_bool_mask_and_dropout L=40 S=70 d_v=8 M=32 mask=bool dropout=0.3 magnitude=40
* slices_large_magnitudes_and_bool_mask B=1 L=40 S=70 d_v=8 M=66 mask=bool magnitude=40
* uneven_magnitudes_causal_and_dropout L=70 S=70 d_v=8 causal dropout=0.3 magnitude=40
  slices_and_dropout_alone B=1 L=40 S=70 d_v=136 dropout=0.3
* slices_dropout_and_causal B=1 L=70 S=70 d_v=8 M=66 causal eps=0.1 dropout=0.3
  slices_bool_mask_and_causal B=1 L=70 S=70 d_v=136 causal mask=bool eps=0.1
  slices_large_mask_dropout B=1 L=40 S=70 d_v=136 M=32 mask=bool dropout=0.3 magnitude=40
  slices_and_mask_per_key L=20 S=70 d_v=136 mask=per_key
  slices_and_mask_per_head L=20 S=70 d_v=8 M=66 mask=per_head
# Rows of offsets so large that logits have two parts.
  lowest_bias L=40 S=70 d_v=8 bias lowest
  lowest_bias_and_uneven L=70 S=70 d_v=8 causal bias lowest dropout=0.3 magnitude=40
* lowest_mask L=40 S=140 d_v=8 lowest mask=float magnitude=4
  lowest_mask_and_bias B=1 L=40 S=140 d_v=8 bias lowest mask=per_pair magnitude=10
  slices_and_lowest_bias B=1 L=40 S=70 d_v=136 causal bias lowest magnitude=40
  slices_lowest_mask_and_bias B=1 L=40 S=140 d_v=8 M=66 bias lowest mask=per_pair magnitude=4
)");

class HalfAttentionOnDevice : public ::testing::TestWithParam<Case> {};

TEST_P(HalfAttentionOnDevice, ErrsByItsRoundings) {
  for (const ElementType type : types_in_turn(GetParam())) {
    const Case c = of_type(GetParam(), type);
    Call call(c);
    const Results truth = truth_of(call, c), got = device_results(call, c);
    const double roundoff = roundoff_of(type);
    expect_forward_within(call, c, got, truth);
    // delta comes from the rounded output, which tells where single keys dominate.
    // float32's results are not rounded themselves, which takes from those of float16 some of it.
    if (c.magnitude == 1) compare_gradients(got, truth, c, (c.tf32 ? 8 : 7) * roundoff);
  }
}

TEST(HalfAttentionOnDevice, FormsGiveTheSameInEveryOrder) {
  interpreter::set_multiprocessors(6);  // blocks share their keys
  for (Case c : cases_of(R"(
orders one_key_head L=70 S=550 d_v=8 causal
orders one_key_head L=70 S=550 d_v=8 mask=bool dropout=0.3
orders one_key_head L=70 S=550 d_v=8 mask=float
)")) {
    Call call(c = of_type(c, ElementType::kFloat32));
    expect_the_same_in_every_order(call, c);
  }
}

TEST(HalfAttentionOnDevice, SlicesGiveTheSameInEveryOrder) {
  Case c = case_of("orders one_key_head L=70 S=140 d_v=136 M=70");
  Call call(c = of_type(c, ElementType::kBFloat16));
  const int before = interpreter::launches_of("wide_");
  device_results(call, c);
  EXPECT_EQ(interpreter::launches_of("wide_"), before + 6);  // two of them for weights
  expect_the_same_in_every_order(call, c);
}

// An eps so small that only the scores' roundings count, where every row sees all keys.
TEST(HalfAttentionOnDevice, SmallestEps) {
  for (const int64_t d_v : {8, 136}) {
    for (const ElementType type : kTypes) {
      Case c{.name = "eps", .L = 40, .S = 140, .d_v = d_v, .M = 16, .eps = 1e-12};
      Call call(c = of_type(c, type));
      const Results truth = truth_of(call, c), got = device_results(call, c);
      expect_forward_within(call, c, got, truth);
      compare_gradients(device_gradients(call, c, truth), truth, c, 2 * roundoff_of(type) + 0x1p-9);
    }
  }
}

// Frequencies of any size are split into two operands of 16 bits.
TEST(HalfAttentionOnDevice, FrequenciesMayBeOfAnySize) {
  for (const double size : {1e-6, 30.0}) {
    for (const ElementType type : {ElementType::kBFloat16, ElementType::kFloat16}) {
      Case c = of_type(one_head({.name = "sizes", .L = 20, .S = 30, .d_v = 8}), type);
      Call call(c);
      for (const Tensor& w : {call.w1, call.w2}) {
        for (int64_t i = 0; i < w.count; ++i) {
          // one of them is so large that the others would vanish beside it in one number
          const double own = i == 4 ? 1 : 1e-3;
          write(w.array, i, size * own * read(w.array, i));
        }
      }
      const Results truth = truth_of(call, c), got = device_results(call, c);
      expect_forward_within(call, c, got, truth);
    }
  }
}

// Gradients of weights are made on CUDA cores, and rounded.
TEST(HalfAttentionOnDevice, GradientsOfWeightsAreRounded) {
  for (const ElementType type : {ElementType::kBFloat16, ElementType::kFloat16}) {
    for (const Masking masking : {Masking::kNone, Masking::kBool, Masking::kFloat}) {
      Case c{.name = "weights", .H = 4, .G = 2, .L = 20, .S = 70, .d_v = 8, .bias = true};
      c.masking = masking;
      c.dropout = masking == Masking::kBool ? 0.3 : 0;
      c.causal = masking == Masking::kFloat;
      Call call(c = of_type(c, type));
      const Results expected = truth_of_weights_gradients(call, c);
      Results gradients = device_weights_gradients(call, c);
      gradients.grad_value = expected.grad_value;  // there is none
      compare_gradients(gradients, expected, c, 2.02 * roundoff_of(type));
    }
  }
}

// Alone, what the backward pass adds: the features' rounding in Half and that of its results.
TEST_P(HalfAttentionOnDevice, BackwardErrsByItsRoundings) {
  for (const ElementType type : types_in_turn(GetParam())) {
    const Case c = of_type(GetParam(), type);
    Call call(c);
    const Results truth = truth_of(call, c);
    const double roundoff = roundoff_of(type);
    compare_gradients(device_gradients(call, c, truth), truth, c,
                      amplification_of(c) * (2 * roundoff + 0x1p-9));
  }
}

// Every form of the kernels, narrow and wide, plain, causal, masked, dropped, and what they share.
INSTANTIATE_TEST_SUITE_P(Interpreter, HalfAttentionOnDevice,
                         ::testing::ValuesIn(cases_of_tier(kHalfCases)),
                         [](const auto& info) { return info.param.name; });

// Value and grad_output in float32 are rounded to 11 bits, as TF32 rounds them. They may be of any
// size, and differ by 2^25 within a head.
TEST(HalfAttentionOnDevice, Float32IsRoundedAsTf32Is) {
  constexpr int64_t kColumns = 9, kSmallColumn = 3;
  const auto small_column = [](Call& call, const Tensor& output) {
    const Tensor part = make(call.memory, ElementType::kFloat64, {output.count / kColumns});
    for (int64_t i = 0; i < part.count; ++i) {
      write(part.array, i, read(output.array, i * kColumns + kSmallColumn));
    }
    return part;
  };
  for (const bool causal : {true, false}) {
    for (const double size : {0.3, 1e20, 1e-20}) {
      Case c{.name = "float32", .B = 1, .H = 4, .G = 2, .L = 70, .S = 70, .d_v = kColumns};
      c.causal = causal;
      c = of_type(c, ElementType::kFloat32);
      Call call(c);
      for (int64_t i = 0; i < call.value.count; ++i) {
        const double column = i % kColumns == kSmallColumn ? 0x1p-25 : 1;
        write(call.value.array, i, size * column * read(call.value.array, i));
      }
      for (int64_t i = 0; i < call.grad_output.count; ++i) {
        const double row = i / kColumns % 7 == 3 ? 0x1p-25 : 1;
        write(call.grad_output.array, i, row / size * read(call.grad_output.array, i));
      }
      const Results got = device_results(call, c);
      round_to_11_bits(call.value);
      round_to_11_bits(call.grad_output);
      const Results truth = truth_of(call, c);
      expect_close(got.output, truth.output, 6 * 0x1p-12, "output", size * 1e-3);
      expect_close(small_column(call, got.output), small_column(call, truth.output), 6 * 0x1p-12,
                   "a small column of the output", size * 1e-12);
      // Early rows follow from few scores: float16 errs by 10.5 roundings of the same numbers.
      compare_gradients(got, truth, c, 12 * 0x1p-12);
      expect_close(got.grad_value, truth.grad_value, 6 * 0x1p-12, "grad_value", 1e-3 / size);
    }
  }
}

// Rows that see only keys up to 12 nats below the largest, whose scores vanish: weights of eps
// alone.
TEST(HalfAttentionOnDevice, WeightsOfEpsAreNotLost) {
  for (const bool warpgroups : {false, true}) {
    interpreter::set_warpgroups(warpgroups);
    for (const ElementType type : kTypes) {
      for (const double below : {8.7, 9.8, 10.9, 11.4, 11.9}) {
        Case c = one_head({.name = "eps", .L = 70, .S = 70, .d = 1, .d_v = 8, .M = 1});
        c.stationary = c.causal = c.bias = true;
        c = of_type(c, type);
        Call call(c);
        write(call.w1.array, 0, 1);
        for (int64_t j = 0; j < c.S; ++j) {
          write(call.query.array, j, 0);
          write(call.key.array, j, 0.25);  // a quarter of a turn: no score
          write(call.bias.array, j, j + 1 < c.S ? -below : 0);
        }
        const Results got = device_results(call, c), truth = truth_of(call, c);
        expect_close(got.output, truth.output, 6 * roundoff_of(type), "output");
      }
    }
  }
}

// Neither the sums of squares nor the scales of gradients leave float32.
TEST(HalfAttentionOnDevice, LargeValuesOfBFloat16) {
  for (const bool causal : {true, false}) {
    Case c = one_head({.name = "large_values", .L = 70, .S = 70, .d_v = 8});
    c.causal = causal;
    c.type = ElementType::kBFloat16;
    Call call(c);
    for (int64_t i = 0; i < call.value.count; ++i) {
      write(call.value.array, i, 1e25 * read(call.value.array, i));
    }
    const Results got = device_results(call, c), truth = truth_of(call, c);
    expect_close(got.output, truth.output, 6 * 0x1p-9, "output");
    compare_gradients(got, truth, c, 6 * 0x1p-9);
  }
}

}  // namespace
}  // namespace ikattn
