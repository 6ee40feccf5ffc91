// The attention operators' CUDA kernels on CUDA cores and in split products, in the interpreter,
// against the CPU kernels in float64 on the same numbers: every argument, every tile edge.
#include "kernels/attention_cases.h"
#include "tier.h"

namespace ikattn {
namespace {

const std::vector<Case> kCases = cases_of(R"(
plain
causal L=9 S=9 causal
bias bias
key_mask L=20 S=35 bias key_mask
bool_mask mask=bool
float_mask mask=float
float_mask_per_key mask=per_key
float_mask_per_row mask=per_row
float_mask_per_head mask=per_head
causal_and_float_mask L=7 causal mask=float
causal_and_more_queries L=70 S=9 causal
causal_and_more_keys L=9 S=70 causal
bool_mask_and_dropout L=20 S=35 mask=bool dropout=0.4
stationary stationary
small_magnitudes magnitude=0.3
negative_magnitudes magnitude=-1
no_magnitude p=0
p_1 p=1
p_3 p=3
p_1_5 p=1.5
small_eps eps=1e-9
large_eps eps=2
mask_of_all_pairs mask=per_pair
grouped grouped
grouped_own_frequencies grouped w_heads=4 bias
frequencies_per_sample w_batches=2
grouped_frequencies_per_sample grouped w_batches=2
dropout L=20 S=35 dropout=0.4
dropout_and_causal L=40 S=40 causal dropout=0.2
one_of_everything one_head L=1 S=1 d=1 d_v=1 M=1
no_keys S=0
no_queries L=0
no_columns d_v=0
tile one_head L=64 S=64 M=16
tile_minus_1 one_head L=63 S=63 M=15
tile_plus_1 one_head L=65 S=65 M=17
slices one_head L=3 S=70 d=18 d_v=67 M=35
tiles_with_everything one_key_head L=130 S=130 d_v=5 causal bias mask=per_key dropout=0.1
)");

class AttentionKernelsOnDevice : public ::testing::TestWithParam<Case> {};

// Returns whether a case runs in this one of the two types, when a tier does not run everything.
bool has_turn(const Case& c, size_t turn) { return runs_everything() || turn_of(c) % 2 == turn; }

TEST_P(AttentionKernelsOnDevice, Float64EqualsTheCpu) {
  Case c = GetParam();
  if (!has_turn(c, 0)) return;
  c.type = ElementType::kFloat64;
  Call call(c);
  const Results truth = truth_of(call, c);
  compare(device_results(call, c), truth, c, 1e-12, 1e-11);
}

TEST_P(AttentionKernelsOnDevice, Float32ErrsByRounding) {
  const Case c = GetParam();
  if (!has_turn(c, 1)) return;
  Call call(c);
  const Results truth = truth_of(call, c);
  for (const bool splits : {true, false}) {
    SCOPED_TRACE(splits ? "split products" : "CUDA cores");
    const SplitSetting setting(splits);
    compare(device_results(call, c), truth, c, 3e-6, 2e-5);
  }
}

TEST_P(AttentionKernelsOnDevice, GradientsOfWeightsEqualTheCpu) {
  for (const auto& [type, tolerance] :
       {std::pair{ElementType::kFloat64, 1e-11}, {ElementType::kFloat32, 2e-5}}) {
    Case c = GetParam();
    if (!has_turn(c, type == ElementType::kFloat64 ? 1 : 0)) continue;
    c.type = type;
    Call call(c);
    const Results truth = truth_of_weights_gradients(call, c);
    Results got = device_weights_gradients(call, c);
    got.grad_value = truth.grad_value;  // there is none
    compare_gradients(got, truth, c, tolerance);
  }
}

// The frequencies' gradients, of more than a tile of them and of more tokens than a share. In
// float32 that many rows hold some that follow from scores near zero.
TEST(AttentionKernelsOnDevice, FrequenciesOfManyTokens) {
  for (Case c : {Case{.name = "tiles", .B = 3, .L = 90, .S = 2, .d = 66, .M = 65},
                 Case{.name = "shares", .B = 2, .L = 2049, .S = 2}}) {
    c.H = c.G = c.frequency_heads = 1;
    c.type = ElementType::kFloat64;
    Call call(c);
    const Results truth = truth_of(call, c);
    compare(device_results(call, c), truth, c, 1e-12, 1e-11);
  }
}

INSTANTIATE_TEST_SUITE_P(Interpreter, AttentionKernelsOnDevice, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

// Rows that see nothing but the lowest numbers; log Z keeps 1e-6 of them.
TEST(AttentionKernelsOnDevice, LargeOffsets) {
  for (const auto& [type, tolerance] :
       {std::pair{ElementType::kFloat64, 1e-5}, {ElementType::kFloat32, 2e-4}}) {
    for (const bool causal : {false, true}) {
      Case c{.name = "lowest", .B = 1, .L = 70, .S = 140, .causal = causal, .bias = true};
      c.lowest = true;
      c.masking = Masking::kFloatPerPair;
      c.magnitude = 4;
      c.type = type;
      Call call(c);
      compare(device_results(call, c), truth_of(call, c), c, tolerance, tolerance);
      const Results got = device_weights_gradients(call, c);
      compare_gradients(got, truth_of_weights_gradients(call, c), c, tolerance);
    }
  }
}

// Blocks, warps and lanes in any order give the same bits: nothing adds up by chance.
TEST(AttentionKernelsOnDevice, TheOrderOfBlocksDoesNotMatter) {
  const Case c{.name = "order",
               .L = 70,
               .S = 70,
               .bias = true,
               .masking = Masking::kFloatPerKey,
               .dropout = 0.2};
  Call call(c);
  expect_the_same_in_every_order(call, c);
}

// NaN behind a mask never shows; a visible one makes exactly the rows that see it NaN.
TEST(AttentionKernelsOnDevice, NanStaysWhereItIsSeen) {
  const Case c{
      .name = "nan", .B = 1, .H = 1, .G = 1, .L = 6, .S = 6, .frequency_heads = 1, .causal = true};
  for (Tensor Call::* spoiled : {&Call::key, &Call::value, &Call::query}) {
    Call call(c);
    const Tensor& tensor = call.*spoiled;
    const int64_t width = tensor.count / 6;
    write(tensor.array, 4 * width, NAN);
    const Results got = device_results(call, c), truth = truth_of(call, c);
    for (int64_t i = 0; i < 6; ++i) {
      const bool sees = spoiled == &Call::query ? i == 4 : i >= 4;
      for (int64_t column = 0; column < c.d_v; ++column) {
        EXPECT_EQ(std::isnan(read(got.output.array, i * c.d_v + column)), sees);
      }
    }
    // Keys after a poisoned query, and queries before a poisoned key, keep clean gradients.
    expect_close(got.grad_query, truth.grad_query, 2e-5, "grad_query");
    expect_close(got.grad_value, truth.grad_value, 2e-5, "grad_value");
  }
}

// With p = 1 an element's slope does not depend on it, however small it is beside the norm.
TEST(AttentionKernelsOnDevice, ElementsThatVanishBesideTheirNorm) {
  for (const bool tf32 : {false, true}) {
    Case c{.name = "vanish", .B = 1, .L = 20, .S = 20, .p = 1, .magnitude = 0.01};
    c.tf32 = tf32;
    Call call(c);
    write(call.key.array, 0, 10);
    write(call.key.array, 1, 1e-45);
    expect_close(device_results(call, c).grad_key, truth_of(call, c).grad_key, tf32 ? 4e-3 : 2e-5,
                 "grad_key");
  }
}

// Padding: what a key that key_bias hides holds, nobody sees.
TEST(AttentionKernelsOnDevice, HiddenKeysMayHoldAnything) {
  for (const ElementType type : {ElementType::kFloat32, ElementType::kFloat64}) {
    for (const Masking masking : {Masking::kNone, Masking::kBool, Masking::kFloat}) {
      for (const double garbage : {double{NAN}, double{INFINITY}, 3e38}) {
        Case c{.name = "hidden", .B = 1, .L = 20, .S = 20, .bias = true, .masking = masking};
        c.type = type;
        Call clean(c), call(c);
        for (int64_t head = 0; head < c.key_heads(); ++head) {
          for (const int64_t j : {int64_t{3}, int64_t{14}}) {
            write(clean.bias.array, head * c.S + j, -INFINITY);
            write(call.bias.array, head * c.S + j, -INFINITY);
            for (int64_t column = 0; column < c.d; ++column) {
              write(call.key.array, (head * c.S + j) * c.d + column, garbage);
            }
            for (int64_t column = 0; column < c.d_v; ++column) {
              write(call.value.array, (head * c.S + j) * c.d_v + column, garbage);
            }
          }
        }
        compare(device_results(call, c), device_results(clean, c), c, 0, 0);
      }
    }
  }
}

}  // namespace
}  // namespace ikattn
