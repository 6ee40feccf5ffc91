// Which calls the tensor cores take.
#include "attention/fast_path.h"

#include <gtest/gtest.h>

#include <string>

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
  EXPECT_EQ(reason([](auto& call) { call.is_causal = true; }), "");
  EXPECT_EQ(reason([](auto& call) { call.value.type = ElementType::kFloat16; }), "");
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
  EXPECT_TRUE(names(reason([](auto& call) { call.M = 65; }), "64 frequencies"));
  for (const int64_t d_v : {0, 129}) {
    EXPECT_TRUE(names(reason([=](auto& call) { call.d_v = d_v; }), "head size of value"));
  }
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

}  // namespace
}  // namespace ikattn
