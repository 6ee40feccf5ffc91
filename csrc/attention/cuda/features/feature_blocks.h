// What the blocks of the kernels of features do beside these, for tokens of 16 bits.
#pragma once

#include "attention/cuda/features/feature_shares.h"
#include "attention/cuda/features/key_logits.h"
#include "attention/cuda/features/split_frequencies.h"
#include "attention/cuda/features/warp_features.h"

namespace ikattn::cuda {

// Of tokens of 16 bits: a launch, and the kernel of Hopper's that may take it.
struct FeatureWork {
  FeatureSides both;
  SplitFrequencies frequencies;
  int tiles_each;  // of a block's range
  FeatureOrder order;
  AttentionParams params;
  KeyForms forms;
};
const char* features_by_warpgroups(const FeatureWork& work, FeatureForm form, Stream stream);

namespace {

// A range of tiles of a block, and of a warp's 32 tokens of each.
struct TileRange {
  int first, end;

  __device__ __forceinline__ TileRange(int64_t N, unsigned range, int each) {
    const int tiles = static_cast<int>((N + kSplitTokens - 1) / kSplitTokens);
    first = static_cast<int>(range) * each;
    end = min(first + each, tiles);
  }
  template <typename Visit>
  __device__ __forceinline__ void visit_warps(int warp, const Visit& visit) const {
#pragma unroll 1
    for (int tile = first; tile < end; ++tile) {
      visit(int64_t{tile} * kSplitTokens + warp * 32);
    }
  }
};

// The logits of a warp's 32 keys from `first` on, and what their head needs to know of them.
template <typename T, bool kNorms>
__device__ __forceinline__ void make_logits_of_warp(const AttentionParams& params,
                                                    const KeyForms& forms, unsigned bh,
                                                    int64_t first) {
  constexpr int kStep = 32 / kTokenLanes, kRows = kStep * kRowsAtOnce<T>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (first >= params.S) return;  // the whole warp
#pragma unroll 1
  for (int row = lane / kTokenLanes; row < 32; row += kRows) {
    make_logits<float, T, kStep, kNorms, false>(params, forms.logits, bh, first + row,
                                                lane % kTokenLanes);
  }
  __syncwarp();
  add_logits_of_warp(params, forms, bh, first);
}

// What a block does for its keys before their features. Returns whether it goes on to these.
template <typename T, FeatureForm kForm>
__device__ __forceinline__ bool prepare_share(const FeatureWork& work, const FeatureShare& share,
                                              const FeatureRows& rows, const TileRange& range,
                                              int warp) {
  const FeatureOrder& order = work.order;
  const KeyForms& forms = work.forms;
  if (order.taken == nullptr) return !rows.leaves<kForm>(int64_t{share.bh});
  if (share.makes_logits) {
    range.visit_warps(warp, [&](int64_t first) {
      make_logits_of_warp<T, kForm != FeatureForm::kInt8>(work.params, forms, share.bh, first);
    });
    report_logits(forms, share.bh);
  }
  const bool waits = share.folds || (share.makes_features && rows.state != nullptr);
  if (!waits) return share.makes_features;
  const unsigned key_head = share.is_key ? share.bh : share.bh / order.group;
  wait_for_logits(forms, key_head, order.ranges.of_keys);
  if (share.folds) {
    range.visit_warps(
        warp, [&](int64_t first) { fold_keys_of_warp(work.params, forms, share.bh, first); });
    finish_keys(forms, share.bh, order.ranges.of_keys);
  }
  return share.makes_features &&
         !rows.leaves<kForm>(form_that_was_found(forms, key_head).is_general);
}

}  // namespace
}  // namespace ikattn::cuda
