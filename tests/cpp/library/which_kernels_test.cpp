// Calls that the tensor cores take, and calls that take linear time on the CPU.
#include <gtest/gtest.h>

#include <string>

#include "attention/calls/linear_time.h"
#include "attention/calls/tensor_core_calls.h"

namespace ikattn {
namespace {

AttentionParams good_call() {
  AttentionParams params;
  params.M = 64;
  params.d_v = 64;
  params.value.type = ElementType::kBFloat16;
  params.value.data = reinterpret_cast<void*>(uintptr_t{64});
  params.value.stride[0] = 4096;
  params.value.stride[1] = 1024;
  params.value.stride[2] = 64;
  params.value.stride[3] = 1;
  return params;
}

template <typename Change>
std::string reason(const Change& change) {
  AttentionParams params = good_call();
  change(params);
  const char* found = why_no_tensor_cores(params);
  return found == nullptr ? "" : found;
}

TEST(FastPath, TakesWhatItIsMadeFor) {
  EXPECT_EQ(why_no_tensor_cores(good_call()), nullptr);
  EXPECT_EQ(reason([](auto& call) { call.mask.type = ElementType::kBool; }), "");
  EXPECT_EQ(reason([](auto& call) { call.mask.type = ElementType::kFloat32; }), "");
  EXPECT_EQ(reason([](auto& call) { call.eps = 0; }), "");
  EXPECT_EQ(reason([](auto& call) { call.eps = 100; }), "");
  EXPECT_EQ(reason([](auto& call) { call.is_causal = true; }), "");
  EXPECT_EQ(reason([](auto& call) { call.value.type = ElementType::kFloat16; }), "");
  EXPECT_EQ(reason([](auto& call) { call.M = 65; }), "");
  EXPECT_EQ(reason([](auto& call) { call.d_v = 129; }), "");
}

TEST(FastPath, NamesWhatIsInTheWay) {
  const auto names = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(names(reason([](auto& call) { call.value.type = ElementType::kFloat32; }), "TF32"));
  EXPECT_TRUE(names(reason([](auto& call) { call.value.type = ElementType::kFloat64; }), "query"));
  EXPECT_TRUE(names(reason([](auto& call) {
                      call.is_causal = true;
                      call.eps = 0;
                    }),
                    "eps"));
  EXPECT_TRUE(names(reason([](auto& call) {
                      call.value.type = ElementType::kFloat16;
                      call.eps = 1;
                    }),
                    "bfloat16"));
  EXPECT_TRUE(names(reason([](auto& call) { call.d_v = 0; }), "head size of value"));
}

TEST(FastPath, CopiesAValueThatDoesNotLieReady) {
  EXPECT_TRUE(lies_ready_for_tensor_cores(good_call()));
  for (int axis = 0; axis < 4; ++axis) {
    AttentionParams call = good_call();
    call.value.stride[axis] += 4;
    EXPECT_FALSE(lies_ready_for_tensor_cores(call));
    EXPECT_EQ(why_no_tensor_cores(call), nullptr);
  }
  AttentionParams call = good_call();
  call.d_v = 12;
  EXPECT_FALSE(lies_ready_for_tensor_cores(call));
  call = good_call();
  call.value.data = reinterpret_cast<void*>(uintptr_t{8});
  EXPECT_FALSE(lies_ready_for_tensor_cores(call));
  call = good_call();
  call.value.type = ElementType::kFloat32;
  call.allow_tf32 = true;
  EXPECT_FALSE(lies_ready_for_tensor_cores(call));
  EXPECT_EQ(why_no_tensor_cores(call), nullptr);
}

AttentionParams call_of(int64_t L, int64_t S, int64_t M, int64_t d_v) {
  AttentionParams params;
  params.B = params.H = params.G = 1;
  params.L = L;
  params.S = S;
  params.M = M;
  params.d_v = d_v;
  return params;
}

TEST(LinearTime, IsTakenFromALengthOn) {
  for (const bool backward : {false, true}) {
    EXPECT_TRUE(takes_linear_time(call_of(8192, 8192, 64, 64), backward));
    EXPECT_TRUE(takes_linear_time(call_of(4096, 4096, 32, 64), backward));
    EXPECT_TRUE(takes_linear_time(call_of(1024, 1024, 8, 8), backward));
    EXPECT_FALSE(takes_linear_time(call_of(4096, 4096, 64, 64), backward));
    EXPECT_FALSE(takes_linear_time(call_of(2048, 2048, 32, 64), backward));
    EXPECT_FALSE(takes_linear_time(call_of(256, 256, 8, 8), backward));
    EXPECT_FALSE(takes_linear_time(call_of(128, 128, 4, 8), backward));
    // Both sides have to be long: the shorter one counts, less than twice.
    EXPECT_FALSE(takes_linear_time(call_of(100, 1000000, 64, 64), backward));
    // Products of 16 bits make pairs faster.
    EXPECT_FALSE(takes_linear_time(call_of(8192, 8192, 64, 64), backward, 2));
    EXPECT_TRUE(takes_linear_time(call_of(16384, 16384, 64, 64), backward, 2));
  }
}

TEST(LinearTime, IsTakenEarlierWhereHeadsShareKeys) {
  for (const bool is_causal : {false, true}) {
    AttentionParams params = call_of(is_causal ? 1400 : 600, is_causal ? 1400 : 600, 16, 64);
    params.is_causal = is_causal;
    params.H = params.key_heads = 8;
    EXPECT_FALSE(takes_linear_time(params, false));
    params.key_heads = 1;
    EXPECT_TRUE(takes_linear_time(params, false));
  }
}

TEST(LinearTime, IsTakenBySomewhatLongerCausalCalls) {
  const auto taken = [](int64_t L, int64_t S, int64_t M, int64_t d_v, bool backward) {
    AttentionParams params = call_of(L, S, M, d_v);
    params.is_causal = true;
    return takes_linear_time(params, backward);
  };
  for (const bool backward : {false, true}) {
    EXPECT_TRUE(taken(16384, 16384, 64, 64, backward));
    EXPECT_TRUE(taken(8192, 8192, 32, 64, backward));
    EXPECT_TRUE(taken(1536, 1536, 8, 8, backward));
    EXPECT_FALSE(taken(8192, 8192, 64, 64, backward));
    EXPECT_FALSE(taken(4096, 4096, 32, 64, backward));
    EXPECT_FALSE(taken(512, 512, 8, 8, backward));
    // Keys that no query sees cost nothing.
    EXPECT_FALSE(taken(512, 65536, 8, 8, backward));
    EXPECT_TRUE(taken(1536, 65536, 8, 8, backward));
  }
}

TEST(LinearTime, IsNotForWhatIsAboutPairs) {
  const auto taken = [](const auto& change, LinearTime setting) {
    AttentionParams params = call_of(65536, 65536, 8, 8);
    params.linear_time = setting;
    change(params);
    return takes_linear_time(params, false);
  };
  for (const LinearTime setting : {LinearTime::kAuto, LinearTime::kAlways}) {
    EXPECT_TRUE(taken([](auto&) {}, setting));
    EXPECT_TRUE(taken([](auto& call) { call.key_bias.type = ElementType::kFloat32; }, setting));
    EXPECT_FALSE(taken([](auto& call) { call.mask.type = ElementType::kBool; }, setting));
    EXPECT_TRUE(taken([](auto& call) { call.is_causal = true; }, setting));
    EXPECT_FALSE(taken(
        [](auto& call) {
          call.is_causal = true;
          call.L = kCausalChunk;
        },
        setting));
    EXPECT_FALSE(taken([](auto& call) { call.dropout_threshold = 1; }, setting));
    EXPECT_FALSE(taken([](auto& call) { call.d_v = 0; }, setting));
    EXPECT_FALSE(taken([](auto& call) { call.S = 7; }, setting));
  }
  EXPECT_FALSE(taken([](auto&) {}, LinearTime::kNever));
}

}  // namespace
}  // namespace ikattn
