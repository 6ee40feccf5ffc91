// Numbers that are not finite, or of any size, in tokens of the tensor-core kernels: they stay
// where they are seen, and hidden tokens may hold anything.
#include <cmath>
#include <utility>

#include "kernels/half_cases.h"

namespace ikattn {
namespace {

TEST(HalfAttentionWithNan, NanStaysWhereItIsSeen) {
  size_t turn = 0;
  for (const auto& [causal, d_v] : {std::pair{true, 8}, {false, 8}, {true, 136}, {false, 136}}) {
    for (const ElementType type : types_in_turn(turn++)) {
      Case c = one_head({.name = "nan", .L = 70, .S = 70, .d_v = d_v});
      c.causal = causal;
      expect_nan_stays_where_it_is_seen(of_type(c, type), 0.575);
    }
  }
}

// Padding: what a key that key_bias hides holds, nobody sees. Large numbers must not make the
// scales coarse either.
void expect_that_hidden_keys_may_hold_anything(size_t turn, Masking masking, int64_t d_v = 8) {
  for (const ElementType type : types_in_turn(turn)) {
    const float largest = type == ElementType::kFloat16 ? 6e4f : 3e38f;
    for (const auto& [causal, garbage] :
         {std::pair{true, NAN}, {false, INFINITY}, {true, largest}, {false, largest}}) {
      Case c = one_head({.name = "hidden", .L = 70, .S = 70, .d_v = d_v});
      c.causal = causal;
      c.bias = true;
      c.masking = masking;
      c = of_type(c, type);
      Call clean(c), call(c);
      for (const int64_t j : {int64_t{3}, int64_t{40}}) {
        write(clean.bias.array, j, -INFINITY);
        write(call.bias.array, j, -INFINITY);
        write(call.key.array, j * c.d, garbage);
        for (int64_t column = 0; column < c.d_v; ++column) {
          const bool spoiled = !std::isfinite(garbage) && column % 2 == 0;
          write(call.value.array, j * c.d_v + column, spoiled ? NAN : garbage);
        }
      }
      const Results got = device_results(call, c), expected = device_results(clean, c);
      for (int64_t i = 0; i < got.output.count; ++i) {
        EXPECT_EQ(read(got.output.array, i), read(expected.output.array, i)) << i;
      }
      compare_gradients(got, expected, c, 0);
    }
  }
}

TEST(HalfAttentionWithNan, HiddenKeysMayHoldAnything) {
  size_t turn = 0;
  for (const Masking masking : {Masking::kNone, Masking::kBool, Masking::kFloat}) {
    expect_that_hidden_keys_may_hold_anything(turn++, masking);
    expect_that_hidden_keys_may_hold_anything(turn, masking, 136);
  }
  interpreter::set_warpgroups(true);
  expect_that_hidden_keys_may_hold_anything(turn, Masking::kNone);
}

// Keys that only padding of the queries could see are not seen either.
TEST(HalfAttentionWithNan, NanThatNoQuerySeesStaysAlone) {
  for (const bool warpgroups : {false, true}) {
    interpreter::set_warpgroups(warpgroups);
    for (const Masking masking : {Masking::kNone, Masking::kBool, Masking::kFloat}) {
      Case c = one_head({.name = "unseen", .L = 70, .S = 120, .d_v = 8});
      c.causal = c.bias = true;
      c.masking = masking;
      c = of_type(c, ElementType::kBFloat16);
      Call call(c);
      write(call.key.array, 80 * c.d, NAN);
      compare_gradients(device_results(call, c), truth_of(call, c), c, 6 * roundoff_of(c.type));
    }
  }
}

// Padding on the left, hidden by key_bias, under causality: its queries see nothing, and may hold
// anything, too.
void expect_that_blind_queries_may_hold_anything(ElementType type, bool causal, int64_t d_v) {
  constexpr int64_t kPadding = 66;
  Case c = one_head({.name = "blind", .L = 150, .S = 150, .d_v = d_v});
  c.causal = causal;
  c.bias = true;
  c = of_type(c, type);
  Call call(c), clean(c);
  for (Call* each : {&call, &clean}) {
    for (int64_t j = 0; j < (causal ? kPadding : c.S); ++j) {
      write(each->bias.array, j, -INFINITY);
    }
  }
  for (int64_t index = 0; index < kPadding * c.d; ++index) {
    write(call.query.array, index, NAN);
    write(call.key.array, index, NAN);
  }
  const Results got = device_results(call, c), expected = device_results(clean, c);
  compare_gradients(got, expected, c, 1e-7);
  expect_close(got.output, expected.output, 0, "output");
  for (int64_t i = 0; i < (causal ? kPadding : c.L); ++i) {
    ASSERT_EQ(read(got.log_normalizer.array, i), -INFINITY) << i;
    ASSERT_EQ(read(got.output.array, i * d_v), 0) << i;
  }
}
TEST(HalfAttentionWithNan, QueriesThatSeeNoKeyMayHoldAnything) {
  for (const bool causal : {false, true}) {
    for (const ElementType type : types_in_turn(causal)) {
      expect_that_blind_queries_may_hold_anything(type, causal, 8);
    }
    expect_that_blind_queries_may_hold_anything(ElementType::kBFloat16, causal, 136);
    interpreter::set_warpgroups(true);
    expect_that_blind_queries_may_hold_anything(ElementType::kBFloat16, causal, 8);
    interpreter::set_warpgroups(false);
  }
}

}  // namespace
}  // namespace ikattn
