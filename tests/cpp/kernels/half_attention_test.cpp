// The attention operators' tensor-core kernels in the interpreter, against the CPU kernels in
// float64 on the same numbers: as far off as the roundings of their operands allow.
#include <tuple>

#include "kernels/half_attention_cases.h"

namespace ikattn {
namespace {

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
  for (const auto& [masking, causal, dropout] : {std::tuple{Masking::kNone, true, 0.0},
                                                 {Masking::kBool, false, 0.3},
                                                 {Masking::kFloat, false, 0.0}}) {
    Case c{.name = "orders", .B = 1, .H = 2, .G = 1, .L = 70, .S = 550, .d_v = 8};
    c.frequency_heads = 1;
    c.masking = masking;
    c.causal = causal;
    c.dropout = dropout;
    Call call(c = of_type(c, ElementType::kFloat32));
    expect_the_same_in_every_order(call, c);
  }
  interpreter::set_multiprocessors(1);
}

TEST(HalfAttentionOnDevice, SlicesGiveTheSameInEveryOrder) {
  Case c{.name = "orders", .B = 1, .H = 2, .G = 1, .L = 70, .S = 140, .d_v = 136, .M = 70};
  c.frequency_heads = 1;
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
                         ::testing::ValuesIn(cases_of_tier(kHalfCases,
                                                           {"plain",
                                                            "not_a_multiple_of_8",
                                                            "tiles",
                                                            "narrow_features_wide_value",
                                                            "tokens_of_three_slices",
                                                            "wide_heads_and_odd_frequencies",
                                                            "causal",
                                                            "causal_and_fewer_keys",
                                                            "bool_mask_and_dropout",
                                                            "dropout",
                                                            "dropout_and_causal",
                                                            "bool_mask",
                                                            "negative_magnitudes",
                                                            "grouped",
                                                            "wide_features_and_value",
                                                            "grouped_frequencies_per_sample",
                                                            "stationary",
                                                            "uneven_magnitudes_and_causal",
                                                            "float_mask",
                                                            "float_mask_causal_and_more_keys",
                                                            "float_mask_and_p_1",
                                                            "float_mask_per_row",
                                                            "float_mask_per_key",
                                                            "features_of_two_slices",
                                                            "value_of_two_slices",
                                                            "slices_and_uneven_magnitudes",
                                                            "slices_and_dropout",
                                                            "slices_float_mask_and_causal",
                                                            "slices_and_mask_of_all_pairs",
                                                            "slices_and_p_1",
                                                            "slices_without_keys",
                                                            "sides_of_16_bits",
                                                            "no_magnitude",
                                                            "p_1_5",
                                                            "larger_eps",
                                                            "eps_for_ordinary_units",
                                                            "eps_for_bfloat16",
                                                            "no_keys",
                                                            "no_queries",
                                                            "large_magnitudes_and_bool_mask",
                                                            "large_magnitudes_causal_and_more_keys",
                                                            "uneven_magnitudes_causal_and_dropout",
                                                            "slices_large_magnitudes_and_bool_mask",
                                                            "slices_dropout_and_causal",
                                                            "lowest_mask"})),
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
  interpreter::set_warpgroups(false);
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
