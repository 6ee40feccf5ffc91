// What a block of the kernel of features does, and in which order.
#pragma once

#include "attention/cuda/features/key_forms.h"
#include "attention/cuda/operands/feature_source.h"

namespace ikattn::cuda {

// Ranges of tokens, of each head; a block's share of the work is one of them.
struct FeatureRanges {
  unsigned of_keys, of_queries;
};

// Where the launch makes logits, too, shares are taken in an order of which every share of a key
// head's logits comes before those that wait for them, by a counter: whoever has taken one before
// is running, and does not wait. Shares of a key head and its queries go by rounds: the logits of
// one, and the features of that which was `lead` rounds ago, whose keys are in the L2 still.
struct FeatureOrder {
  unsigned* taken;  // 0 at first; nullptr: features alone, of all keys and then of all queries
  FeatureRanges ranges;
  unsigned key_heads, group;  // of all batches'; heads of queries, of each
  unsigned lead;

  // Of a round.
  __host__ __device__ unsigned shares() const {
    return 2 * ranges.of_keys + group * ranges.of_queries;
  }
  // Of the launch.
  __host__ unsigned blocks() const {
    if (taken != nullptr) return (key_heads + lead) * shares();
    return key_heads * (ranges.of_keys + group * ranges.of_queries);
  }
};

// As many rounds ahead as shares are under way, half of them: then few have to wait.
inline FeatureOrder order_of_features(const AttentionParams& params, FeatureRanges ranges,
                                      unsigned* taken) {
  FeatureOrder order = {taken, ranges, static_cast<unsigned>(params.B * params.key_heads),
                        static_cast<unsigned>(params.H / params.key_heads), 1};
  // Of a head without keys something is left, too.
  if (taken != nullptr && ranges.of_keys == 0) order.ranges.of_keys = 1;
  const int64_t shares = order.shares();
  const int64_t lead = shares == 0 ? 1 : (multiprocessors() + shares - 1) / shares;
  order.lead = static_cast<unsigned>(lead < order.key_heads ? lead : order.key_heads);
  if (order.lead == 0) order.lead = 1;
  return order;
}

namespace {

// A range of tokens of a head, of all batches', and what is made of it.
struct FeatureShare {
  unsigned bh = 0, range = 0;
  bool is_key = false;
  // Of keys: their logits; what the form of their head needs of them. Of either: features.
  bool makes_logits = false, folds = false, makes_features = false;

  // kTogether: logits and features of keys are one share, for neither waits.
  template <bool kTogether>
  __device__ __forceinline__ static FeatureShare take(const FeatureOrder& order,
                                                      Shared<unsigned> taken) {
    FeatureShare share;
    const unsigned of_keys = order.ranges.of_keys, of_queries = order.ranges.of_queries;
    if (order.taken == nullptr) {
      share.is_key = blockIdx.x < order.key_heads * of_keys;
      const unsigned block = blockIdx.x - (share.is_key ? 0 : order.key_heads * of_keys);
      share.bh = block / (share.is_key ? of_keys : of_queries);
      share.range = block % (share.is_key ? of_keys : of_queries);
      share.makes_features = true;
      return share;
    }
    if (threadIdx.x == 0) taken[0] = atomicAdd(order.taken, 1u);
    __syncthreads();
    const unsigned number = taken[0];
    __syncthreads();  // it lies where tokens will
    const unsigned round = number / order.shares(), at = number % order.shares();
    const unsigned before = of_keys + order.group * of_queries;  // shares of keys' features
    const bool is_late = at >= of_keys;
    share.is_key = !is_late || at >= before;
    share.bh = is_late ? round - order.lead : round;
    if (share.bh >= order.key_heads) return share;  // in the first rounds below 0, too
    share.range = at < of_keys ? at : at - (share.is_key ? before : of_keys);
    if (!share.is_key) {
      share.bh = share.bh * order.group + share.range / of_queries;
      share.range = share.range % of_queries;
    }
    share.makes_logits = !is_late;
    share.folds = is_late && share.is_key;
    share.makes_features = !share.is_key || is_late != kTogether;
    return share;
  }
};

}  // namespace
}  // namespace ikattn::cuda
