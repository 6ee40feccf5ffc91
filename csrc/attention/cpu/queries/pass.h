// The start of every pass over the pairs: packed frequencies, memory, and the first stages.
#pragma once

#include "attention/cpu/keys/keys.h"

namespace ikattn::IKATTN_ISA {
namespace {

// The frequencies of all heads, packed once per call.
template <typename T>
struct PackedFrequencies {
  T* packed = nullptr;
  T* transposed = nullptr;

  void take(Workspace& workspace, const AttentionParams& params, const FeatureLayout<T>& layout,
            bool backward) {
    const int64_t sets = params.frequency_batches * params.frequency_heads;
    packed = workspace.take<T>(sets * layout.packed_size());
    if (backward) transposed = workspace.take<T>(sets * layout.transposed_size());
  }
  const T* of(const Unit& unit, const FeatureLayout<T>& layout) const {
    return packed + unit.frequency_set * layout.packed_size();
  }
  const T* transposed_of(const Unit& unit, const FeatureLayout<T>& layout) const {
    return transposed + unit.frequency_set * layout.transposed_size();
  }
};

template <typename T>
void pack_all_frequencies(const AttentionParams& params, const FeatureLayout<T>& layout,
                          const PackedFrequencies<T>& out, const Executor& executor) {
  const int64_t sets = params.frequency_batches * params.frequency_heads;
  parallel(for_elements(executor, sets * layout.packed_size()), sets, [&](int64_t set, int) {
    const int64_t b = set / params.frequency_heads, head = set % params.frequency_heads;
    pack_frequencies(layout, params.w1, params.w2,
                     b * params.w1.stride[0] + head * params.w1.stride[1],
                     b * params.w2.stride[0] + head * params.w2.stride[1],
                     out.packed + set * layout.packed_size(),
                     out.transposed ? out.transposed + set * layout.transposed_size() : nullptr);
  });
}

// The memory of a pass: Slots for the units in flight, one Scratch per thread, both with a member
// `keys`.
template <typename T, typename Slot, typename Scratch>
struct PassMemory {
  PackedFrequencies<T> frequencies;
  double* logits = nullptr;  // [slots][S]
  // Backward only: frequency gradients of each unit of a group, and of each set of frequencies.
  T* unit_sums = nullptr;  // [group][packed frequencies], where sets are shared by units
  T* totals = nullptr;     // [frequency sets][packed frequencies]
  Slot* slots = nullptr;
  Scratch* scratch = nullptr;

  // Allocates all memory. group is the number of units whose frequency gradients are held at once;
  // 0: a forward pass. take_slot(slot, workspace) and take_scratch(scratch, workspace) allocate the
  // arrays of one of them.
  template <typename TakeSlot, typename TakeScratch>
  void allocate(const Executor& executor, const AttentionParams& params,
                const AttentionLayout<T>& layout, int64_t group, int64_t slot_count,
                const TakeSlot& take_slot, const TakeScratch& take_scratch) {
    const auto lay_out = [&](void* base) {
      Workspace workspace(base);
      frequencies.take(workspace, params, layout.feature, group > 0);
      logits = workspace.take<double>(slot_count * params.S);
      if (group > 0) {
        const int64_t sets = params.frequency_batches * params.frequency_heads;
        if (sets != layout.units) {
          unit_sums = workspace.take<T>(group * layout.feature.packed_size());
        }
        totals = workspace.take<T>(sets * layout.feature.packed_size());
      }
      slots = workspace.take<Slot>(slot_count);
      scratch = workspace.take<Scratch>(executor.threads);
      for (int64_t i = 0; i < slot_count; ++i) {
        Slot slot;
        take_slot(slot, workspace);
        if (base) slots[i] = slot;
      }
      for (int thread = 0; thread < executor.threads; ++thread) {
        Scratch own;
        take_scratch(own, workspace);
        if (base) scratch[thread] = own;
      }
      return workspace.bytes();
    };
    lay_out(executor.allocate(executor.owner, lay_out(nullptr)));
  }
};

// The first stages of every pass: logits g, the form of the weights, prepared keys.
template <typename T, typename Slot, typename Scratch>
struct KeyStages {
  const AttentionParams& params;
  const AttentionLayout<T>& layout;
  const PassMemory<T, Slot, Scratch>& memory;
  bool is_linear;

  static constexpr int64_t kChunk = 512;
  double* logits_of(int64_t slot) const { return memory.logits + slot * params.S; }

  auto logits() const {
    return Stage{ceil_div(params.S, kChunk), [this](const Place& at, int64_t chunk, int thread) {
                   const Unit unit = unit_at(params, layout, at.unit);
                   const int64_t begin = chunk * kChunk;
                   key_logits(params, unit.b, unit.head, begin, min_of(params.S, begin + kChunk),
                              memory.scratch[thread].keys.tokens, logits_of(at.slot) + begin);
                 }};
  }
  auto form() const {
    return Stage{int64_t{1}, [this](const Place& at, int64_t, int) {
                   auto& keys = memory.slots[at.slot].keys;
                   const bool is_backward = keys.features != nullptr;
                   const bool is_narrow =
                       is_backward ? layout.bfloat16_products : layout.weight_parts > 0;
                   keys.form = choose_form<T>(params, is_narrow, is_linear, logits_of(at.slot));
                 }};
  }
  auto blocks() const {
    return Stage{layout.key_blocks, [this](const Place& at, int64_t block, int thread) {
                   const Unit unit = unit_at(params, layout, at.unit);
                   prepare_keys(params, layout, unit, block, logits_of(at.slot),
                                memory.frequencies.of(unit, layout.feature),
                                memory.scratch[thread].keys, memory.slots[at.slot].keys);
                 }};
  }
};

template <typename T, typename Slot, typename Scratch>
KeyStages(const AttentionParams&, const AttentionLayout<T>&, const PassMemory<T, Slot, Scratch>&,
          bool) -> KeyStages<T, Slot, Scratch>;

}  // namespace
}  // namespace ikattn::IKATTN_ISA
