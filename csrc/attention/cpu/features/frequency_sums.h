// Gradients of frequencies, packed as features.h packs these, and their sums over tokens, heads and
// batch items.
#pragma once

#include "attention/cpu/features/features.h"
#include "support/cpu/schedule.h"

namespace ikattn::IKATTN_ISA {
namespace {

// Returns how many gradients are in memory at once, to be added up.
template <typename T>
inline int64_t gradients_held(const FeatureLayout<T>& layout) {
  constexpr int64_t kBytes = int64_t{8} << 20;
  return kBytes / (max_of(1, layout.packed_size()) * int64_t{sizeof(T)});
}

template <typename T>
inline void add_packed(int64_t size, const T* term, T* sum) {
  for (int64_t i = 0; i < size; i += kLanes<T>) store<T>(sum + i, load(sum + i) + load(term + i));
}

// The set of frequencies that a gradient belongs to: every batch item has `each` consecutive
// gradients per head, and batch items have separate sets or share them.
struct FrequencySets {
  int64_t heads, each;
  bool per_sample;
};

// Adds the gradients [first, first + count) to the totals of their sets, in order.
template <typename T>
void add_to_sets(const FrequencySets& sets, int64_t size, int64_t first, int64_t count,
                 const T* gradients, T* totals, const Executor& executor) {
  const int64_t per_item = sets.heads * sets.each;
  const int64_t begin_b = first / per_item, end_b = ceil_div(first + count, per_item);
  const int64_t touched = sets.heads * (sets.per_sample ? end_b - begin_b : 1);
  parallel(for_elements(executor, count * size), touched, [&](int64_t index, int) {
    const int64_t head = index % sets.heads, own_b = begin_b + index / sets.heads;
    T* total = totals + (sets.per_sample ? own_b * sets.heads + head : head) * size;
    for (int64_t b = own_b; b < (sets.per_sample ? own_b + 1 : end_b); ++b) {
      const int64_t begin = (b * sets.heads + head) * sets.each;
      const int64_t end = min_of(begin + sets.each, first + count);
      for (int64_t i = max_of(begin, first); i < end; ++i) {
        add_packed(size, gradients + (i - first) * size, total);
      }
    }
  });
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
