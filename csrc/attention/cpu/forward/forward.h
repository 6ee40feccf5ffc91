// Forward pass: out_i = sum_j w_ij v_j / Z_i over blocks of queries and panels of 64 keys, or
// in linear time (../linear/forward.h).
//
//   pack frequencies -> key logits g -> key panels, per unit (-> their moments) -> query blocks
#pragma once

#include "attention/cpu/forward/block.h"
#include "attention/cpu/route.h"

namespace ikattn::IKATTN_ISA {
namespace {

// Returns the rows of a query block: a multiple of 16 (the dropout group), small enough that all
// threads have work.
inline int64_t query_block_rows(int64_t L, int64_t heads, int threads, int64_t largest) {
  const int64_t wanted = ceil_div(2 * threads, max_of(heads, 1));
  const int64_t blocks = max_of(ceil_div(L, largest), min_of(wanted, ceil_div(L, 48)));
  return max_of(16, round_up(ceil_div(L, max_of(blocks, 1)), 16));
}

// The last stages: blocks of queries, or partial sums over parts of their keys and then their
// totals.
template <typename T, typename Memory>
struct ForwardStages {
  const AttentionParams& params;
  const AttentionLayout<T>& layout;
  const Memory& memory;
  int64_t rows;    // of a block of queries
  int64_t blocks;  // of a unit
  int64_t parts;   // that the keys of a block are shared out in

  QueryBlock block_at(const Unit& unit, int64_t index) const {
    const int64_t of_head = ceil_div(params.L, rows), i0 = index % of_head * rows;
    return {unit.b, unit.first_query_head + index / of_head, i0, min_of(rows, params.L - i0)};
  }
  // Returns the scratch of a thread with the sums of one part of the keys.
  ForwardScratch<T> scratch_of(const Place& at, int64_t part, int thread) const {
    ForwardScratch<T> scratch = memory.scratch[thread];
    scratch.sums = memory.slots[at.slot].parts[part];
    scratch.poisoned = memory.slots[at.slot].poisoned + part * rows;
    return scratch;
  }
  auto queries() const {
    return Stage{blocks * parts, [this](const Place& at, int64_t index, int thread) {
                   const Unit unit = unit_at(params, layout, at.unit);
                   const QueryBlock block = block_at(unit, index / parts);
                   const T* packed = memory.frequencies.of(unit, layout.feature);
                   const auto& state = memory.slots[at.slot];
                   if (parts == 1) {
                     forward_block(params, layout, block, block.h - unit.first_query_head, packed,
                                   state, memory.scratch[thread]);
                   } else {
                     ForwardScratch<T> scratch = scratch_of(at, index, thread);
                     forward_part(params, layout, block, index % parts, packed, state.keys,
                                  scratch);
                   }
                 }};
  }
  auto sums_of_parts() const {
    return Stage{parts == 1 ? 0 : blocks, [this](const Place& at, int64_t index, int thread) {
                   const QueryBlock block = block_at(unit_at(params, layout, at.unit), index);
                   const auto& state = memory.slots[at.slot];
                   const int64_t last = (index + 1) * parts - 1;
                   for (int64_t part = index * parts; part < last; ++part) {
                     add_earlier(layout, block.rows, state.parts[part], state.parts[part + 1]);
                   }
                   finish_rows(params, state.keys.form, block, scratch_of(at, last, thread));
                 }};
  }
};

template <typename T, typename Memory>
ForwardStages(const AttentionParams&, const AttentionLayout<T>&, const Memory&, int64_t, int64_t,
              int64_t) -> ForwardStages<T, Memory>;

template <typename T>
void attention_forward(const AttentionParams& params, const Route& route,
                       const Executor& executor) {
  const AttentionLayout<T> layout(params);
  const bool is_linear = !kTakes16Bits<T> && route.is_linear;
  // A block is within one chunk.
  const int64_t rows = is_linear && params.is_causal
                           ? kCausalRows
                           : query_block_rows(params.L, params.B * params.H, executor.threads,
                                              params.is_causal ? kCausalRows : kForwardRows);
  const int64_t blocks = ceil_div(params.L, rows) * layout.heads_per_unit;
  const bool whole = Schedule::has_whole_units(executor, layout.units);
  const bool shares_keys = !whole && !is_linear && params.L <= kFewQueries &&
                           layout.units * blocks < 2 * executor.threads;
  const int64_t parts = shares_keys ? max_of(1, ceil_div(layout.key_blocks, kPartBlocks)) : 1;
  PassMemory<T, ForwardUnit<T>, ForwardScratch<T>> memory;
  memory.allocate(
      executor, params, layout, 0, Schedule::slots(executor, layout.units, whole),
      [&](ForwardUnit<T>& unit, Workspace& workspace) {
        unit.take(workspace, params, layout, is_linear);
        if (parts > 1) unit.take_parts(workspace, layout, blocks * parts, rows);
      },
      [&](ForwardScratch<T>& own, Workspace& workspace) {
        own.take(workspace, params, layout, rows, is_linear);
      });

  pack_all_frequencies(params, layout.feature, memory.frequencies, executor);
  const KeyStages keys{params, layout, memory, is_linear};
  const LinearForwardStages linear{
      params, layout, memory, is_linear,
      PanelGroups::of_call(params, layout.products(), executor.threads, whole)};
  const ForwardStages forward{params, layout, memory, rows, blocks, parts};
  run_stages(executor, Schedule{0, layout.units, whole}, keys.logits(), keys.form(), keys.blocks(),
             linear.description(), linear.moments(), linear.chunk_queries(),
             linear.earlier_chunks(), forward.queries(), forward.sums_of_parts());
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
