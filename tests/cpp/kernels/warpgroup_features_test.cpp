// Features on Hopper, in the interpreter: the bits that mma.sync gives, in every form, with logits
// and forms of heads beside them. A GPU's two units may add up in other orders.
#include <array>
#include <cmath>
#include <cstring>

#include "attention/cuda/features/angle_products.h"
#include "attention/cuda/features/key_logits.h"
#include "attention/cuda/operands/route.h"
#include "kernels/half_cases.h"
#include "tier.h"

namespace ikattn {
namespace {

using Bytes = std::vector<unsigned char>;

template <typename T>
Bytes bytes_of(const T* data, int64_t count) {
  Bytes bytes(data == nullptr ? 0 : static_cast<size_t>(count) * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), data, bytes.size());
  return bytes;
}

// What the features' kernels leave of both sides.
struct MadeFeatures {
  Bytes phi_q, phi_k, int8_q, int8_k, poison, scales, state;
};

struct FeaturePass {
  Case c;
  bool int8 = false, for_backward = false;
};

MadeFeatures features_of(Call& call, const FeaturePass& pass, bool warpgroups) {
  const Case& c = pass.c;
  interpreter::set_warpgroups(warpgroups);
  const auto launches = [] { return interpreter::launches_of("hopper_feature_kernel"); };
  const auto splits = [] { return interpreter::launches_of("frequency_number_kernel"); };
  const int before = launches(), splits_before = splits();
  AttentionParams params;
  call.set(params);
  cuda::Route route;
  route.unit = cuda::Unit::kTensorCores;
  route.int8_scores = pass.int8;
  const cuda::DeviceExecutor executor = device_executor(call.memory);
  cuda::AngleOperands operands;
  EXPECT_STREQ(cuda::prepare_turns(params, executor,
                                   pass.for_backward ? cuda::NumberReaders::kBackward
                                                     : cuda::NumberReaders::kFeatures,
                                   operands),
               nullptr);
  const bool norms = pass.for_backward || cuda::needs_value_norms(params, route, false);
  cuda::SplitLogits<float> logits;
  if (cuda::features_make_logits(params, route, pass.for_backward)) {
    logits = cuda::take_logits<float>(params, executor, norms);
  } else {
    EXPECT_STREQ(cuda::prepare_logits(params, executor, norms, logits), nullptr);
  }
  cuda::FoldedTokens tokens;
  EXPECT_STREQ(
      cuda::fold_tokens(params, executor, operands, logits, route, pass.for_backward, tokens),
      nullptr);
  interpreter::set_warpgroups(false);
  const bool fits = warpgroups && c.M <= 64 && c.d <= 128;
  EXPECT_EQ(launches() > before, fits);
  // In the forward the kernel of features splits frequencies itself.
  EXPECT_EQ(splits() - splits_before, fits && !pass.for_backward ? 0 : 1);
  const int64_t queries = c.B * c.H * c.L, keys = c.B * c.key_heads() * c.S;
  const int64_t width = cuda::padded_columns(2 * c.M), columns = cuda::Int8Features::kColumns;
  return {bytes_of(tokens.phi_q, queries * width),
          bytes_of(tokens.phi_k, keys * width),
          bytes_of(tokens.int8.phi_q, queries * columns),
          bytes_of(tokens.int8.phi_k, keys * columns),
          bytes_of(tokens.poison, queries),
          bytes_of(tokens.scales, keys),
          bytes_of(tokens.state, c.B * c.key_heads())};
}

void expect_the_same_features(Call& call, const FeaturePass& pass) {
  const MadeFeatures expected = features_of(call, pass, false);
  const MadeFeatures got = features_of(call, pass, true);
  EXPECT_FALSE(expected.phi_q.empty() && expected.int8_q.empty());
  EXPECT_EQ(got.phi_q, expected.phi_q);
  EXPECT_EQ(got.phi_k, expected.phi_k);
  EXPECT_EQ(got.int8_q, expected.int8_q);
  EXPECT_EQ(got.int8_k, expected.int8_k);
  EXPECT_EQ(got.poison, expected.poison);
  EXPECT_EQ(got.scales, expected.scales);
  EXPECT_EQ(got.state, expected.state);
}

// Hidden keys that hold anything; tokens of either side, and a frequency, that are not finite.
void spoil(Call& call, const Case& c) {
  write(call.query.array, (c.L - 1) * c.d, INFINITY);
  write(call.key.array, (c.S - 2) * c.d + 1, NAN);
  if (c.frequency_batches > 1) write(call.w1.array, 1, INFINITY);  // of one head
  if (!c.bias) return;
  write(call.bias.array, 3, -INFINITY);
  write(call.key.array, 3 * c.d, NAN);
}

class WarpgroupFeaturesOnDevice : public testing::Test {
 protected:
  void TearDown() override {
    interpreter::set_warpgroups(false);
    interpreter::set_multiprocessors(1);
    interpreter::set_order(interpreter::Order::kForward);
  }
};

TEST_F(WarpgroupFeaturesOnDevice, AreThoseOfMmaSync) {
  const Case cases[] = {
      {.name = "narrow", .L = 20, .S = 37, .d_v = 8, .M = 9, .bias = true},
      {.name = "wide", .B = 1, .L = 5, .S = 270, .d = 64, .d_v = 8, .M = 64},
      {.name = "two_slices", .B = 1, .L = 130, .S = 64, .d = 72, .d_v = 8, .M = 33},
      {.name = "stationary", .L = 65, .S = 129, .d = 8, .d_v = 8, .M = 40, .stationary = true},
      {.name = "stationary_narrow", .L = 9, .S = 16, .d_v = 8, .M = 32, .stationary = true},
      {.name = "grouped", .H = 4, .G = 2, .L = 17, .S = 40, .d = 8, .d_v = 8, .M = 17},
      {.name = "own_frequencies",
       .H = 4,
       .G = 2,
       .L = 20,
       .S = 40,
       .frequency_heads = 4,
       .frequency_batches = 2,
       .half_sides = true},
      {.name = "tiles", .B = 1, .H = 1, .G = 1, .L = 530, .S = 257, .d = 8, .frequency_heads = 1},
      {.name = "one", .B = 1, .H = 1, .G = 1, .L = 1, .S = 2, .d = 1, .frequency_heads = 1},
      {.name = "p_3", .L = 20, .S = 40, .d = 8, .d_v = 8, .M = 8, .p = 3},
      {.name = "too_wide", .B = 1, .L = 20, .S = 40, .d = 8, .d_v = 8, .M = 65},
      {.name = "too_many_dimensions", .B = 1, .L = 5, .S = 20, .d = 130, .d_v = 8, .M = 8},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(each.name);
    for (const ElementType type : {ElementType::kBFloat16, ElementType::kFloat16}) {
      const bool takes_turns = turn_of(each) % 2 == (type == ElementType::kFloat16 ? 1 : 0);
      if (!runs_everything() && takes_turns) continue;
      Case c = of_type(each, type);
      Call call(c);
      spoil(call, c);
      expect_the_same_features(call, {.c = c, .for_backward = turn_of(each) % 3 == 0});
    }
  }
}

// Integers, and integers beside Half; heads of the general form get these alone.
TEST_F(WarpgroupFeaturesOnDevice, AreTheSameIntegers) {
  const Case cases[] = {
      {.name = "forward", .B = 1, .L = 20, .S = 270, .d = 40, .d_v = 8, .M = 64, .bias = true},
      {.name = "stationary", .B = 1, .L = 70, .S = 80, .d = 72, .M = 33, .stationary = true},
      {.name = "general",
       .B = 1,
       .L = 20,
       .S = 140,
       .d = 8,
       .d_v = 8,
       .M = 40,
       .causal = true,
       .bias = true,
       .magnitude = 400},
      {.name = "causal", .B = 1, .L = 40, .S = 140, .d = 8, .d_v = 8, .M = 50, .causal = true},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(each.name);
    const Case c = of_type(each, ElementType::kBFloat16);
    Call call(c);
    spoil(call, c);
    for (const bool for_backward : {false, true}) {
      expect_the_same_features(call, {.c = c, .int8 = true, .for_backward = for_backward});
    }
  }
}

// Shares of several blocks, taken in any order.
TEST_F(WarpgroupFeaturesOnDevice, AreTheSameInEveryOrder) {
  Case c{.name = "orders", .L = 40, .S = 270, .d = 8, .d_v = 8, .M = 9, .causal = true};
  Call call(c = of_type(c, ElementType::kBFloat16));
  interpreter::set_multiprocessors(6);
  for (const interpreter::Order order : interpreter::kEveryOrder) {
    interpreter::set_order(order);
    expect_the_same_features(call, {.c = c});
  }
}

}  // namespace
}  // namespace ikattn
