// The attention operators' tensor-core kernels in the interpreter, against the CPU kernels in
// float64 on the same numbers: as far off as the roundings of their operands allow.
#include <tuple>

#include "simt/half_cases.h"

namespace ikattn {
namespace {

// What goes to the tensor cores, and what of it comes back because magnitudes differ too much.
const Case kHalfCases[] = {
    // Of three frequencies scores come near zero, and gradients err by up to 10 roundings.
    {.name = "plain", .L = 20, .S = 30, .d_v = 8, .M = 8},
    {.name = "not_a_multiple_of_8", .L = 20, .S = 30, .d_v = 12, .bias = true},
    one_head({.name = "tiles", .L = 130, .S = 130, .d = 8, .d_v = 64, .M = 64}),
    one_head({.name = "narrow_features_wide_value", .L = 33, .S = 65, .d = 8, .d_v = 72, .M = 20}),
    one_head({.name = "tokens_of_three_slices",
              .L = 20,
              .S = 70,
              .d = 136,
              .d_v = 8,
              .M = 66,
              .stationary = true,
              .p = 1.5}),
    // several of 256 tokens for each block that makes features, of two pieces of frequencies
    {.name = "tiles_of_a_block",
     .B = 1,
     .H = 6,
     .G = 6,
     .L = 700,
     .S = 30,
     .d_v = 8,
     .M = 40,
     .frequency_heads = 6},
    one_head({.name = "shares_of_tokens", .L = 530, .S = 20, .d = 8, .d_v = 8}),
    one_head(
        {.name = "wide_heads_and_odd_frequencies", .L = 70, .S = 65, .d = 70, .d_v = 8, .M = 33}),
    {.name = "causal", .B = 1, .L = 150, .S = 150, .d_v = 16, .M = 9, .causal = true},
    {.name = "bool_mask", .L = 40, .S = 70, .d_v = 8, .masking = Masking::kBool},
    {.name = "dropout", .L = 40, .S = 70, .d_v = 8, .dropout = 0.3},
    {.name = "dropout_and_causal", .L = 70, .S = 70, .d_v = 8, .causal = true, .dropout = 0.3},
    {.name = "grouped", .H = 4, .G = 2, .L = 20, .S = 70, .d_v = 8, .bias = true},
    one_head({.name = "wide_features_and_value",
              .L = 70,
              .S = 65,
              .d = 8,
              .d_v = 128,
              .M = 64,
              .causal = true}),
    {.name = "grouped_own_frequencies",
     .H = 4,
     .G = 2,
     .L = 20,
     .S = 30,
     .d_v = 8,
     .frequency_heads = 4,
     .bias = true},
    {.name = "grouped_frequencies_per_sample",
     .H = 4,
     .G = 2,
     .L = 20,
     .S = 30,
     .d_v = 8,
     .frequency_heads = 4,
     .frequency_batches = 2,
     .bias = true},
    {.name = "frequencies_per_sample", .L = 20, .S = 30, .d_v = 8, .frequency_batches = 2},
    {.name = "stationary", .L = 20, .S = 30, .d_v = 8, .stationary = true},
    {.name = "uneven_magnitudes_and_causal",
     .L = 70,
     .S = 70,
     .d_v = 8,
     .causal = true,
     .magnitude = 4},
    {.name = "float_mask", .L = 70, .S = 40, .d_v = 8, .masking = Masking::kFloat},
    {.name = "float_mask_per_key", .L = 20, .S = 30, .d_v = 8, .masking = Masking::kFloatPerKey},
    {.name = "float_mask_per_row", .L = 20, .S = 30, .d_v = 8, .masking = Masking::kFloatPerRow},
    {.name = "float_mask_per_head", .L = 20, .S = 30, .d_v = 8, .masking = Masking::kFloatPerHead},
    {.name = "float_mask_and_everything",
     .H = 4,
     .G = 2,
     .L = 70,
     .S = 70,
     .d_v = 72,
     .M = 40,
     .causal = true,
     .bias = true,
     .masking = Masking::kFloat,
     .dropout = 0.3},
    // Wide rows, by slices of 128.
    {.name = "features_of_two_slices",
     .B = 1,
     .H = 2,
     .G = 1,
     .L = 70,
     .S = 130,
     .d = 8,
     .d_v = 8,
     .M = 100,
     .frequency_heads = 1},
    {.name = "value_of_two_slices", .L = 20, .S = 70, .d_v = 136, .bias = true},
    one_head({.name = "many_slices_and_causal",
              .L = 130,
              .S = 100,
              .d = 8,
              .d_v = 300,
              .M = 200,
              .causal = true}),
    {.name = "slices_and_uneven_magnitudes",
     .B = 1,
     .H = 2,
     .G = 1,
     .L = 70,
     .S = 70,
     .d_v = 130,
     .M = 65,
     .frequency_heads = 1,
     .causal = true,
     .magnitude = 4},
    {.name = "slices_and_dropout",
     .B = 1,
     .L = 40,
     .S = 70,
     .d_v = 8,
     .M = 80,
     .masking = Masking::kBool,
     .dropout = 0.3},
    {.name = "slices_and_float_mask",
     .H = 4,
     .G = 2,
     .L = 70,
     .S = 70,
     .d_v = 129,
     .M = 70,
     .bias = true,
     .masking = Masking::kFloat,
     .dropout = 0.3},
    {.name = "slices_float_mask_and_causal",
     .B = 1,
     .L = 70,
     .S = 70,
     .d_v = 129,
     .M = 70,
     .causal = true,
     .bias = true,
     .masking = Masking::kFloat,
     .magnitude = 2},
    {.name = "slices_without_keys", .S = 0, .d_v = 8, .M = 70},
    {.name = "slices_without_queries", .L = 0, .d_v = 136},
    {.name = "mask_of_all_pairs", .L = 20, .S = 70, .d_v = 8, .masking = Masking::kFloatPerPair},
    {.name = "sides_of_16_bits",
     .L = 20,
     .S = 70,
     .d_v = 8,
     .bias = true,
     .half_sides = true,
     .masking = Masking::kFloat},
    {.name = "no_magnitude", .L = 20, .S = 70, .d_v = 8, .p = 0},
    // |k|_1^2 is up to three times |k|_2^2 here.
    {.name = "p_1", .L = 20, .S = 70, .d_v = 8, .p = 1, .magnitude = 0.3},
    {.name = "p_1_5", .L = 20, .S = 70, .d_v = 8, .p = 1.5},
    {.name = "p_3_and_slices", .L = 20, .S = 70, .d_v = 136, .p = 3},
    {.name = "larger_eps", .L = 20, .S = 70, .d_v = 8, .eps = 1e-2},
    {.name = "largest_eps", .L = 70, .S = 70, .d_v = 8, .causal = true, .eps = 0.9},
    {.name = "no_keys", .S = 0, .d_v = 8},
    {.name = "no_queries", .L = 0, .d_v = 8},
    {.name = "large_magnitudes", .L = 20, .S = 70, .d_v = 8, .M = 32, .magnitude = 40},
    {.name = "large_magnitudes_and_causal",
     .L = 70,
     .S = 70,
     .d_v = 8,
     .causal = true,
     .magnitude = 40},
    {.name = "large_magnitudes_and_dropout",
     .L = 20,
     .S = 70,
     .d_v = 8,
     .dropout = 0.3,
     .magnitude = 40},
};

class HalfAttentionOnDevice : public ::testing::TestWithParam<Case> {};

TEST_P(HalfAttentionOnDevice, ErrsByItsRoundings) {
  for (const ElementType type : kTypes) {
    const Case c = of_type(GetParam(), type);
    Call call(c);
    const Results truth = truth_of(call, c), got = device_results(call, c);
    const double roundoff = roundoff_of(type);
    const Bounds bounds = bounds_of(call, c, truth, roundoff);
    expect_within(got.output, truth.output, bounds.output, "output");
    expect_within(got.log_normalizer, truth.log_normalizer, bounds.log_normalizer,
                  "log_normalizer");
    // delta comes from the rounded output, which tells where single keys dominate.
    // float32's results are not rounded themselves, which takes from those of float16 some of it.
    if (c.magnitude == 1) compare_gradients(got, truth, c, (c.tf32 ? 8 : 6) * roundoff);
  }
}

TEST(HalfAttentionOnDevice, FormsGiveTheSameInEveryOrder) {
  simt::set_multiprocessors(6);  // blocks share their keys
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
  simt::set_multiprocessors(1);
}

TEST(HalfAttentionOnDevice, SlicesGiveTheSameInEveryOrder) {
  Case c{.name = "orders", .B = 1, .H = 2, .G = 1, .L = 70, .S = 140, .d_v = 136, .M = 70};
  c.frequency_heads = 1;
  Call call(c = of_type(c, ElementType::kBFloat16));
  const int before = simt::launches_of("wide_");
  device_results(call, c);
  EXPECT_EQ(simt::launches_of("wide_"), before + 4);
  expect_the_same_in_every_order(call, c);
}

// Frequencies of any size as sums of 16-bit numbers: turns are as exact as in float32.
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
      const Bounds bounds = bounds_of(call, c, truth, roundoff_of(type));
      expect_within(got.output, truth.output, bounds.output, "output");
    }
  }
}

// Tokens around the edges of blocks and tiles of every kernel.
TEST(HalfAttentionOnDevice, EdgesOfTiles) {
  for (const bool warpgroups : {false, true}) {
    simt::set_warpgroups(warpgroups);
    for (const bool causal : {false, true}) {
      for (const auto& [L, S] : {std::pair{63, 129},
                                 {64, 128},
                                 {65, 127},
                                 {127, 65},
                                 {128, 64},
                                 {129, 63},
                                 {128, 129},
                                 {129, 128}}) {
        SCOPED_TRACE(std::to_string(L) + " x " + std::to_string(S));
        Case c = one_head({.name = "edges", .L = L, .S = S, .d_v = 8, .M = 9});
        c.causal = causal;
        Call call(c = of_type(c, ElementType::kBFloat16));
        const Results truth = truth_of(call, c), got = device_results(call, c);
        const Bounds bounds = bounds_of(call, c, truth, roundoff_of(c.type));
        expect_within(got.output, truth.output, bounds.output, "output");
        compare_gradients(got, truth, c, 6 * roundoff_of(c.type));
      }
    }
  }
  simt::set_warpgroups(false);
}

// Few queries: blocks share their keys, and what each found is combined.
TEST(HalfAttentionOnDevice, SharedKeysErrByTheirRoundings) {
  simt::set_multiprocessors(6);
  for (const auto& [masking, causal, magnitude, dropout, d_v] :
       {std::tuple{Masking::kNone, false, 1.0, 0.0, 40},
        {Masking::kNone, true, 40.0, 0.0, 40},
        {Masking::kFloat, false, 1.0, 0.3, 40},
        {Masking::kBool, false, 1.0, 0.0, 40},
        {Masking::kNone, false, 1.0, 0.0, 200},
        {Masking::kFloat, false, 1.0, 0.3, 200}}) {
    for (const ElementType type : kTypes) {
      Case c{.name = "few", .B = 1, .H = 2, .G = 1, .L = 3, .S = 1100, .d_v = d_v};
      c.frequency_heads = 1;
      c.masking = masking;
      c.causal = causal;
      c.magnitude = magnitude;
      c.dropout = dropout;
      Call call(c = of_type(c, type));
      const Results truth = truth_of(call, c), got = device_results(call, c);
      const Bounds bounds = bounds_of(call, c, truth, roundoff_of(type));
      expect_within(got.output, truth.output, bounds.output, "output");
      expect_within(got.log_normalizer, truth.log_normalizer, bounds.log_normalizer,
                    "log_normalizer");
    }
  }
  simt::set_multiprocessors(1);
}

// sm_86, sm_89 and sm_120 have the least shared memory; the widest kernels of each form fit.
TEST(HalfAttentionOnDevice, FitsTheLeastSharedMemory) {
  simt::set_shared_limit(99 * 1024);
  for (const int64_t d_v : {64, 128, 256}) {
    for (const auto& [type, masking, causal] :
         {std::tuple{ElementType::kBFloat16, Masking::kNone, false},
          {ElementType::kFloat16, Masking::kNone, true},
          {ElementType::kFloat32, Masking::kNone, false},
          {ElementType::kBFloat16, Masking::kBool, false},
          {ElementType::kFloat32, Masking::kFloat, false}}) {
      Case c = one_head({.name = "wide", .L = 2, .S = 3, .d = d_v, .d_v = d_v, .M = 64});
      c.masking = masking;
      c.causal = causal;
      Call call(c = of_type(c, type));
      device_results(call, c);  // expects that nothing is refused
    }
  }
  simt::set_shared_limit(227 * 1024);
}

// Alone, what the backward pass adds: the features' rounding in Half and that of its results.
TEST_P(HalfAttentionOnDevice, BackwardErrsByItsRoundings) {
  for (const ElementType type : kTypes) {
    const Case c = of_type(GetParam(), type);
    Call call(c);
    const Results truth = truth_of(call, c);
    const double roundoff = roundoff_of(type);
    compare_gradients(device_gradients(call, c, truth), truth, c,
                      amplification_of(c) * (2 * roundoff + 0x1p-10));
  }
}

INSTANTIATE_TEST_SUITE_P(Simt, HalfAttentionOnDevice, ::testing::ValuesIn(kHalfCases),
                         [](const auto& info) { return info.param.name; });

// Of float32's own numbers value and grad_output are rounded to 11 bits, as TF32 rounds them. They
// may be of any size, and differ by 2^25 within a head.
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

// The frequencies' gradients, of more tokens than a share. Of two keys many rows have a score near
// zero, and its gradient errs by its rounding over it.
TEST(HalfAttentionOnDevice, FrequenciesOfManyTokens) {
  Case c{.name = "shares", .B = 2, .H = 1, .G = 1, .L = 2049, .S = 2, .d_v = 8};
  c.frequency_heads = 1;
  c = of_type(c, ElementType::kBFloat16);
  Call call(c);
  const Results truth = truth_of(call, c), got = device_gradients(call, c, truth);
  expect_close(got.grad_w1, truth.grad_w1, 5 * (2 * 0x1p-9 + 0x1p-10), "grad_w1");
  expect_close(got.grad_w2, truth.grad_w2, 5 * (2 * 0x1p-9 + 0x1p-10), "grad_w2");
}

// Rows that see only keys up to 12 nats below the largest, whose scores vanish: weights of eps
// alone.
TEST(HalfAttentionOnDevice, WeightsOfEpsAreNotLost) {
  for (const bool warpgroups : {false, true}) {
    simt::set_warpgroups(warpgroups);
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
  simt::set_warpgroups(false);
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
