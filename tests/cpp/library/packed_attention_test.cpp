// Packed attention from LibTorch alone, and its two ways to group sequences.
#include <gtest/gtest.h>
#include <ikattn/attention.h>
#include <ikattn/packed_attention.h>
#include <torch/torch.h>

#include <algorithm>

#include "device.h"
#include "packed_attention/groups.h"

namespace {

using torch::Tensor;

Tensor numbers(at::IntArrayRef sizes, double scale) {
  return (scale * torch::randn(sizes, at::kDouble)).to(on_device(at::kDouble));
}

ikattn::PackedCall call_of(std::vector<int64_t> of_queries, std::vector<int64_t> of_keys,
                           bool is_causal) {
  torch::manual_seed(1);
  const int64_t H = 2, d = 4, M = 3, T_q = of_queries.back(), T_k = of_keys.back();
  return {.query = numbers({T_q, H, d}, 1),
          .key = numbers({T_k, H, d}, 1),
          .value = numbers({T_k, H, 5}, 1),
          .w1 = numbers({H, d, M}, 0.2),
          .w2 = numbers({H, d, M}, 0.2),
          .cu_seqlens_q = torch::tensor(of_queries),
          .cu_seqlens_k = torch::tensor(of_keys),
          .max_seqlen_q = std::nullopt,
          .max_seqlen_k = std::nullopt,
          .options = {.key_bias = numbers({T_k}, 1), .is_causal = is_causal}};
}

// On a GPU sequences of similar lengths are padded to come together: the same results.
void expect_same_in_padded_groups(const ikattn::PackedCall& call, size_t expected_groups) {
  const ikattn::Boundaries boundaries = ikattn::boundaries_of("test", call);
  const bool is_causal = call.options.is_causal;
  const auto runs = ikattn::groups_of(boundaries, ikattn::Grouping::kRuns, is_causal);
  const auto padded = ikattn::groups_of(boundaries, ikattn::Grouping::kPadded, is_causal);
  EXPECT_EQ(padded.size(), expected_groups);
  const auto results = ikattn::attend_groups(call, boundaries, runs);
  const auto others = ikattn::attend_groups(call, boundaries, padded);
  EXPECT_TRUE(torch::allclose(std::get<0>(results), std::get<0>(others), 1e-12, 1e-12));
  EXPECT_TRUE(torch::allclose(std::get<1>(results), std::get<1>(others), 1e-12, 1e-12));
  ikattn::PackedWanted wanted;
  wanted.fill(true);
  const Tensor grad = torch::randn_like(std::get<0>(results));
  const auto of_runs = ikattn::gradients_of_groups(grad, results, call, boundaries, runs, wanted);
  const auto of_padded =
      ikattn::gradients_of_groups(grad, results, call, boundaries, padded, wanted);
  const auto all = [](const auto&... each) { return std::vector<Tensor>{each...}; };
  const auto left = std::apply(all, of_runs), right = std::apply(all, of_padded);
  for (size_t i = 0; i < left.size(); ++i) {
    EXPECT_TRUE(torch::allclose(left[i], right[i], 1e-11, 1e-12)) << i;
  }
}

TEST(PackedAttention, PaddedGroupsGiveWhatRunsOfEqualLengthsGive) {
  // lengths 5 7 0 6 30 2 6: {30}, {7, 6, 6, 5}, {2}, {0}
  const std::vector<int64_t> ends = {0, 5, 12, 12, 18, 48, 50, 56};
  expect_same_in_padded_groups(call_of(ends, ends, false), 4);
  expect_same_in_padded_groups(call_of(ends, ends, true), 4);
}

TEST(PackedAttention, PaddedGroupsOfQueriesAndKeysOfOtherLengths) {
  // queries 3 4 0 3 1, keys 6 5 5 6 0
  const std::vector<int64_t> of_queries = {0, 3, 7, 7, 10, 11}, of_keys = {0, 6, 11, 16, 22, 22};
  expect_same_in_padded_groups(call_of(of_queries, of_keys, false), 3);
  // causal ones come together only where they are equal: {6, 3} twice
  expect_same_in_padded_groups(call_of(of_queries, of_keys, true), 4);
}

TEST(PackedAttention, EachSequenceIsAttention) {
  ikattn::PackedCall call = call_of({0, 5, 12}, {0, 5, 12}, true);
  const Tensor output = ikattn::implicit_kernel_attention_varlen(
      call.query, call.key, call.value, call.w1, call.w2, {call.cu_seqlens_q, call.cu_seqlens_k},
      {.is_causal = true});
  const auto heads = [](const Tensor& x) { return x.slice(0, 5, 12).transpose(0, 1).unsqueeze(0); };
  const Tensor alone = ikattn::implicit_kernel_attention(
      heads(call.query), heads(call.key), heads(call.value), call.w1, call.w2, {.is_causal = true});
  EXPECT_TRUE(torch::allclose(heads(output), alone, 1e-12, 1e-12));
}

TEST(PackedAttention, DrawsItsSeed) {
  ikattn::PackedCall call = call_of({0, 40}, {0, 40}, false);
  const auto attend = [&] {
    return ikattn::implicit_kernel_attention_varlen(call.query, call.key, call.value, call.w1,
                                                    call.w2, {call.cu_seqlens_q, call.cu_seqlens_k},
                                                    {.dropout_p = 0.5});
  };
  EXPECT_FALSE(torch::equal(attend(), attend()));
}

TEST(PackedAttention, RefusesAMaskOfPairs) {
  const ikattn::PackedCall call = call_of({0, 5}, {0, 5}, false);
  const ikattn::AttentionOptions options{.attn_mask = torch::ones({5, 5}, torch::kBool)};
  EXPECT_THROW(
      ikattn::implicit_kernel_attention_varlen(call.query, call.key, call.value, call.w1, call.w2,
                                               {call.cu_seqlens_q, call.cu_seqlens_k}, options),
      c10::ValueError);
}

}  // namespace
