// Kernels that a pass on CUDA takes, and what it is told to lack for faster ones.
#include "attention/cuda/operands/route.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "attention/calls/determinism.h"
#include "interpreter/interpreter.h"
#include "kernels/families.h"
#include "support/cuda/families.h"
#include "support/settings.h"

namespace ikattn::cuda {
namespace {

AttentionParams call_of(int64_t length, int64_t M = 32) {
  AttentionParams params;
  params.B = params.H = params.G = params.key_heads = 16;
  params.L = params.S = length;
  params.d = params.d_v = 64;
  params.M = M;
  params.eps = 1e-5;
  params.value.type = ElementType::kBFloat16;
  return params;
}

std::string reason_of(const AttentionParams& params, Pass pass = Pass::kForward) {
  const char* reason = route_of(params, false, pass).reason;
  return reason == nullptr ? "" : reason;
}

TEST(Route, TheFastestHasNoReason) {
  interpreter::set_warpgroups(true);
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    const Route usual = route_of(call_of(512), false, pass);
    EXPECT_EQ(usual.unit, Unit::kHopper);
    EXPECT_EQ(usual.algorithm, Algorithm::kQuadratic);
    EXPECT_EQ(usual.reason, nullptr);
    const Route linear = route_of(call_of(65536), false, pass);
    EXPECT_EQ(linear.algorithm, Algorithm::kLinear);
    EXPECT_EQ(reason_of(call_of(65536), pass), "");
  }
  interpreter::set_warpgroups(false);
  EXPECT_EQ(route_of(call_of(512), false, Pass::kForward).unit, Unit::kTensorCores);
  EXPECT_EQ(reason_of(call_of(512)), "");  // on another GPU there is nothing faster
  EXPECT_EQ(route_of(call_of(65536), false, Pass::kForward).unit, Unit::kTensorCores);
}

TEST(Route, ScoresInInt8) {
  interpreter::set_warpgroups(true);
  const auto is_int8 = [](const AttentionParams& params, Pass pass = Pass::kForward) {
    return route_of(params, false, pass).int8_scores;
  };
  AttentionParams params = call_of(512, 64);
  params.query.type = params.key.type = ElementType::kBFloat16;
  EXPECT_TRUE(is_int8(params));
  EXPECT_TRUE(is_int8(params, Pass::kBackward));
  params.is_causal = true;
  EXPECT_TRUE(is_int8(params));
  AttentionParams other = params;
  other.S = 64;
  EXPECT_FALSE(is_int8(other));
  other = params;
  other.M = 32;
  EXPECT_FALSE(is_int8(other));
  other = params;
  other.eps = 0.95;
  EXPECT_FALSE(is_int8(other));
  other = params;
  other.value.type = ElementType::kFloat16;
  EXPECT_FALSE(is_int8(other));
  set_families("+unproven,-int8");
  EXPECT_FALSE(is_int8(params));
  set_families("+unproven");
  // A backward in linear time has scores of its own.
  params = call_of(16384, 64);
  params.query.type = params.key.type = ElementType::kBFloat16;
  EXPECT_TRUE(is_int8(params));
  EXPECT_EQ(route_of(params, false, Pass::kBackward).algorithm, Algorithm::kLinear);
  EXPECT_FALSE(is_int8(params, Pass::kBackward));
}

TEST(Route, OfABatchInvariantCallFollowsNoSize) {
  interpreter::set_warpgroups(true);
  interpreter::set_multiprocessors(132);
  for (const int64_t length : {1, 20, 512, 65536}) {
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      AttentionParams params = call_of(length, 64);
      params.B = length == 1 ? 1 : 16;
      params.L = length;
      params.query.type = params.key.type = ElementType::kBFloat16;
      params.batch_invariant = true;
      params.linear_time = length == 20 ? LinearTime::kAlways : LinearTime::kAuto;
      const Route route = route_of(params, false, pass);
      EXPECT_EQ(route.unit, Unit::kTensorCores);
      EXPECT_EQ(route.algorithm, Algorithm::kQuadratic);
      EXPECT_EQ(route.parts, 1);
      EXPECT_FALSE(route.int8_scores);
      EXPECT_STREQ(route.reason, kBatchInvariantReason);
      params.value.type = ElementType::kFloat32;  // values would share a scale
      params.allow_tf32 = true;
      EXPECT_TRUE(route_of(params, false, pass).split_products);
      EXPECT_EQ(route_of(params, false, pass).parts, 1);
    }
  }
}

TEST(Route, Float32WithoutTf32TakesSplitProducts) {
  AttentionParams params = call_of(512);
  params.value.type = ElementType::kFloat32;
  params.eps = 1e-12;
  params.is_causal = true;
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    const auto takes = [&](const AttentionParams& call) {
      const Route route = route_of(call, false, pass);
      EXPECT_EQ(route.unit, route.split_products ? Unit::kTensorCores : Unit::kCudaCores);
      EXPECT_NE(route.reason, nullptr);
      return route.split_products;
    };
    EXPECT_TRUE(takes(params));
    AttentionParams other = params;
    other.allow_tf32 = true;  // not exact enough for TF32
    EXPECT_TRUE(takes(other));
    other.eps = 1e-5;
    EXPECT_FALSE(route_of(other, false, pass).split_products);
    for (int64_t AttentionParams::* size : {&AttentionParams::M, &AttentionParams::d_v}) {
      other = params;
      other.*size = 129;
      EXPECT_FALSE(takes(other));
      EXPECT_NE(reason_of(other, pass).find("64 frequencies"), std::string::npos);
    }
    other = params;
    other.d_v = 0;
    EXPECT_FALSE(takes(other));
    other = params;
    other.value.type = ElementType::kFloat16;
    EXPECT_FALSE(takes(other));
    set_families("");  // no GPU has run it
    EXPECT_FALSE(takes(params));
    EXPECT_NE(reason_of(params, pass).find("IKATTN_KERNELS=+split"), std::string::npos);
    set_families("+unproven");
  }
}

TEST(Route, SaysWhatHoldsACallBack) {
  interpreter::set_warpgroups(true);
  AttentionParams params = call_of(512);
  params.dropout_threshold = 10;
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    EXPECT_EQ(route_of(params, false, pass).unit, Unit::kTensorCores);
    EXPECT_EQ(reason_of(params, pass), "Hopper's own kernels take no dropout");
  }
  params.mask.type = ElementType::kBool;
  EXPECT_NE(reason_of(params).find("take no attn_mask"), std::string::npos);
  params = call_of(65536);
  params.dropout_threshold = 10;
  EXPECT_EQ(reason_of(params), "linear time takes no dropout");
  params = call_of(65536);
  params.is_causal = true;
  EXPECT_EQ(route_of(params, false, Pass::kForward).algorithm, Algorithm::kLinear);
  const Route backward = route_of(params, false, Pass::kBackward);
  EXPECT_EQ(backward.algorithm, Algorithm::kLinear);
  EXPECT_FALSE(backward.int8_scores);
  // With a backward in linear time there are no scores in int8, which would hold the forward back.
  AttentionParams one_head = call_of(45000, 64);
  one_head.H = one_head.B = one_head.G = one_head.key_heads = 1;
  one_head.query.type = one_head.key.type = ElementType::kBFloat16;
  one_head.is_causal = true;
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    EXPECT_EQ(route_of(one_head, false, pass).algorithm, Algorithm::kLinear);
  }
  params.linear_time = LinearTime::kAlways;
  params.L = params.S = 256;  // one chunk
  EXPECT_EQ(route_of(params, false, Pass::kForward).algorithm, Algorithm::kQuadratic);
  params.linear_time = LinearTime::kNever;
  EXPECT_EQ(reason_of(params), "");  // that was the user's own wish
  EXPECT_EQ(reason_of(call_of(512, 100)),
            "Hopper's own kernels take at most 64 frequencies and 128 columns of value");
  interpreter::set_warpgroups(false);
  EXPECT_EQ(std::string(route_of(call_of(512), true, Pass::kForward).reason), "float64");
}

// Names the families that a pass takes.
std::string taken(const AttentionParams& params, Pass pass) {
  std::string names;
  for (const Family family : families_of(params, route_of(params, false, pass))) {
    names += (names.empty() ? "" : " ") + std::string(proof_of(family).name);
  }
  return names;
}

TEST(Route, TakesProvenFamiliesAlone) {
  set_families("");
  interpreter::set_warpgroups(true);
  std::vector<AttentionParams> calls;
  for (const int64_t length : {100, 512, 4096, 65536}) {
    for (const int64_t M : {16, 64, 100}) {
      for (const ElementType type : {ElementType::kBFloat16, ElementType::kFloat32}) {
        for (const bool causal : {false, true}) {
          for (const ElementType mask : {ElementType::kNone, ElementType::kBool}) {
            AttentionParams params = call_of(length, M);
            params.query.type = params.key.type = params.value.type = type;
            params.is_causal = causal;
            params.mask.type = mask;
            params.dropout_threshold = mask == ElementType::kBool && causal ? 10 : 0;
            calls.push_back(params);
          }
        }
      }
    }
  }
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    for (const AttentionParams& params : calls) {
      for (const Family family : families_of(params, route_of(params, false, pass))) {
        EXPECT_TRUE(is_proven(family)) << proof_of(family).name;
      }
    }
    AttentionParams params = call_of(512, 64);
    params.query.type = params.key.type = ElementType::kBFloat16;
    EXPECT_EQ(taken(params, pass), "hopper int8");
    params.is_causal = true;
    EXPECT_EQ(taken(params, pass), "mma hopper int8");
    params.dropout_threshold = 10;
    EXPECT_EQ(taken(params, pass), "mma");
    EXPECT_EQ(taken(call_of(65536), pass), "mma linear");
    params = call_of(65536);
    params.is_causal = true;
    EXPECT_EQ(taken(params, pass), "mma hopper");
  }
  set_families("-hopper");
  EXPECT_EQ(taken(call_of(512), Pass::kForward), "mma");
  set_families("-mma");
  EXPECT_EQ(reason_of(call_of(512)), "IKATTN_KERNELS turns the family mma off");
}

TEST(Route, ListsOfKernelsAreReadFromLeftToRight) {
  const auto wish = [](const char* text, Family family) {
    return KernelList::parsed(text).of(family);
  };
  using enum KernelList::Wish;
  EXPECT_EQ(wish("", Family::kWeights), kNone);
  EXPECT_EQ(wish("weights", Family::kWeights), kOn);
  EXPECT_EQ(wish("+unproven,-weights", Family::kWeights), kOff);
  EXPECT_EQ(wish("-weights, +unproven", Family::kWeights), kOn);
  EXPECT_EQ(wish("+unproven", Family::kHopper), kNone);
  EXPECT_EQ(wish("-hopper -int8", Family::kInt8), kOff);
  try {
    KernelList::parsed("+wieghts");
    ADD_FAILURE();
  } catch (const std::runtime_error& error) {
    const std::string said = error.what();
    EXPECT_NE(said.find("\"wieghts\""), std::string::npos) << said;
    for (const Proof& proof : kLedger) EXPECT_NE(said.find(proof.name), std::string::npos) << said;
  }
}

// A proof that `python -m ikattn selftest --enable` writes holds for this build, GPU and driver
// alone.
TEST(Route, AMachineMayProveFamilies) {
  const std::string folder = testing::TempDir() + "ikattn_cache";
  mkdir(folder.c_str(), 0700);
  mkdir((folder + "/ikattn").c_str(), 0700);
  std::ofstream(folder + "/ikattn/proven")
      << machine_key() << "\tweights\t2026-11-28\nanother build\tGPU\t0\tsplit\t2026-11-28\n";
  setenv("XDG_CACHE_HOME", folder.c_str(), 1);
  set_families("");
  forget_proofs();
  EXPECT_EQ(proven_here(Family::kWeights), "2026-11-28");
  EXPECT_TRUE(is_on(Family::kWeights));
  EXPECT_EQ(proven_by(Family::kWeights), "this machine, on 2026-11-28");
  EXPECT_FALSE(is_on(Family::kSplit));
  EXPECT_EQ(proven_by(Family::kSplit), "");
  set_families("-weights");
  EXPECT_FALSE(is_on(Family::kWeights));
  set_families("+unproven");
  unsetenv("XDG_CACHE_HOME");
  forget_proofs();
  EXPECT_EQ(proven_here(Family::kWeights), "");
}

}  // namespace
}  // namespace ikattn::cuda
