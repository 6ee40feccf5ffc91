// Moments on Hopper: as sums.cu has them, with products by wgmma. Features and values are copied by
// TMA, 64 tokens at a time; entries are made in the registers that wgmma reads. While one warpgroup
// makes its own the tensor cores are at the other's.
//
// Compiled for sm_90a alone.
#include "attention/cuda/hopper/pipeline.h"
#include "attention/cuda/linear/part_blocks.h"

namespace ikattn::cuda {
namespace {

constexpr int kMomentStages = 6;
static_assert(kMomentWarps == kProductThreads / 32 && kPairsTogether == kWarpgroups);

template <int F>
struct MomentLayout {
  using Features = Boxes<kStep, F>;
  using Values = Boxes<kStep, kMomentColumns>;
  using Barriers = TileBarriers<1, kMomentStages>;
  static constexpr uint32_t kValues = Features::kBytes, kStage = kValues + Values::kBytes;
  static constexpr uint32_t kBarriers = kMomentStages * kStage;
  static constexpr int64_t kBytes = kBarriers + Barriers::kBytes;
};
struct MomentMaps {
  RowMap features, values;
};

// The columns of a pair's chunks, in rows of features.
struct PairColumns {
  int a, b;

  __device__ __forceinline__ PairColumns(const FeatureChunks& chunks, int pair) {
    const ChunkPair own(pair);
    a = chunks.column(own.a);
    b = chunks.column(own.b);
  }
};

#if IKATTN_WARPGROUP_CODE

// The pairs that a block's warpgroups have: beyond the last there is none, and the last is
// multiplied again.
__device__ __forceinline__ int pair_of(const FeatureChunks& chunks, int group, int warpgroup) {
  return min(group * kPairsTogether + warpgroup, chunks.pairs() - 1);
}

// By one thread: the tokens of a part, those boxes of their features in which a pair has columns.
template <int F>
__device__ __forceinline__ void copy_part(const typename MomentLayout<F>::Barriers& barriers,
                                          uint32_t base, const MomentMaps& maps,
                                          const LinearTokens& tokens, const FeatureChunks& chunks,
                                          const PartBlock& at, int group, int slice) {
  using L = MomentLayout<F>;
  const PairColumns one(chunks, pair_of(chunks, group, 0));
  const PairColumns other(chunks, pair_of(chunks, group, 1));
  const int first = min(min(one.a, one.b), min(other.a, other.b)) / kBoxColumns;
  const int last = max(max(one.a, one.b), max(other.a, other.b)) / kBoxColumns;
  const uint32_t bytes = (last - first + 1) * L::Features::kBox + L::Values::kBytes;
  const int bk = static_cast<int>(at.bk), heads = static_cast<int>(tokens.heads);
  const int batch = bk / heads;
  const int row_head = static_cast<int>(bk % heads * tokens.row_heads / tokens.heads);
  TileStageOf<kMomentStages> stage;
#pragma unroll 1
  for (int row = static_cast<int>(at.first); row < at.end; row += kStep, stage.next()) {
    const uint32_t place = base + stage.index * L::kStage, barrier = barriers.full(stage.index);
    barrier_wait(barriers.read(stage.index), stage.parity ^ 1);
    barrier_arrive(barrier, bytes);
    for (int box = first; box <= last; ++box) {
      begin_box(place + box * L::Features::kBox, maps.features, 0, bk, row, box * kBoxColumns,
                barrier);
    }
    begin_box(place + L::kValues, maps.values, batch, row_head, row, slice * kMomentColumns,
              barrier);
  }
}

constexpr int kSteps = 2;  // of 16 tokens, whose entries are made, and multiplied, together

// What the 16 b's of four tokens are multiplied with, [step][r][early or late eight tokens]: the
// a's from the a0-th on. `a` holds two tokens of each eight, of the lane's own of eight a's.
__device__ __forceinline__ void spread(uint32_t (&scales)[kSteps][kEntryRows][2],
                                       const uint32_t (&a)[2 * kSteps], int a0) {
#pragma unroll
  for (int r = 0; r < kEntryRows; ++r) {
    const int from = (a0 + r) % 8 * 4 + static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      scales[i / 2][r][i % 2] = unknown_to_compiler(__shfl_sync(0xffffffffu, a[i], from));
    }
  }
}
// Entries, [step][r], of the b's of each step. They are made here, and not between the products
// that read them: ptxas would serialise these.
__device__ __forceinline__ void make_entries(uint32_t (&entries)[kSteps][kEntryRows][4],
                                             const uint32_t (&scales)[kSteps][kEntryRows][2],
                                             const uint32_t (&b)[kSteps][4]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int r = 0; r < kEntryRows; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        entries[step][r][i] =
            unknown_to_compiler(multiply_f16x2(b[step][i], scales[step][r][i / 2]));
      }
    }
  }
}
// Begins sums += entries times values.
template <typename Values>
__device__ __forceinline__ void begin_products(float (&sums)[kEntryRows][32],
                                               const uint32_t (&entries)[kSteps][kEntryRows][4],
                                               uint64_t values) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int r = 0; r < kEntryRows; ++r) {
      wgmma_by_rows<Half>(sums[r], entries[step][r], Values::by_rows(values, 0, step), true);
    }
  }
  wgmma_commit();
}

#endif

// The moments of kPairsTogether pairs of chunks, a warpgroup's each, and 64 columns, of a part of
// the tokens. A warp has four a's of a pair and its 16 b's, as in moment_kernel.
template <int F>
__global__ void __launch_bounds__(kWarpgroupThreads, 1)
    warpgroup_moment_kernel(LinearTokens tokens, FeatureChunks chunks, TokenParts parts,
                            uint32_t entry_scale, const __grid_constant__ MomentMaps maps) {
#if IKATTN_WARPGROUP_CODE
  using L = MomentLayout<F>;
  static_assert(kLiesInSharedMemory<L, L::kStage, L::kValues, L::Features::kBox>);
  const int groups = (chunks.pairs() + kPairsTogether - 1) / kPairsTogether;
  const unsigned index = blockIdx.x / groups;
  const PartBlock at(tokens, parts.of_moments, index / parts.slices);
  if (leaves_out(tokens, at.bk)) return;  // the whole block
  const int group = static_cast<int>(blockIdx.x % groups);
  const int slice = static_cast<int>(index % parts.slices);
  const uint32_t base = shared_address(dynamic_shared<unsigned char>());
  const typename L::Barriers barriers(base + L::kBarriers);
  // 1. The third warpgroup copies.
  if (threadIdx.x >= kProductThreads) {
    give_registers<kCopyRegisters>();
    if (threadIdx.x != kProductThreads) return;
    copy_part<F>(barriers, base, maps, tokens, chunks, at, group, slice);
    return;
  }
  take_registers<kProductRegisters>();

  // 2. Tile by tile of 64 tokens: entries in registers, times values.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int own = warp / 4, a0 = warp % 4 * kEntryRows;
  const PairColumns columns(chunks, pair_of(chunks, group, own));
  // Where a lane reads the transposed: eight a's of 32 tokens, and 16 b's of 16.
  const auto place_of = [](int row, int column) {
    return column / kBoxColumns * L::Features::kBox +
           swizzled(row, column % kBoxColumns / 8, kMomentColumns * 2);
  };
  const uint32_t place_a = base + place_of(lane, columns.a + a0 / 8 * 8);
  const uint32_t place_b = base + place_of(lane % 8 + lane / 16 * 8, columns.b + lane / 8 % 2 * 8);
  float sums[kEntryRows][32] = {};
  TileStageOf<kMomentStages> stage;
  int before = -1;  // the stage of the tile before
  for (int tile = 0; tile < at.tiles(); ++tile) {
    const uint32_t down = stage.index * L::kStage;
    const uint64_t values = wgmma_operand(base + down + L::kValues);
    barriers.wait(stage);
#pragma unroll
    for (int first = 0; first < kStep; first += kSteps * 16) {
      uint32_t a[2 * kSteps], b[kSteps][4], scales[kSteps][kEntryRows][2];
      ldmatrix_x4_trans(a, place_a + down + first * 128);
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) a[i] = multiply_f16x2(a[i], entry_scale);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        ldmatrix_x4_trans(b[step], place_b + down + (first + step * 16) * 128);
      }
      spread(scales, a, a0);
      if (first + kSteps * 16 == kStep) fence_async();
      wgmma_wait<0>();  // for those before: the other warpgroup's go on
      if (first == 0 && before >= 0) barriers.release(before);
      uint32_t entries[kSteps][kEntryRows][4];
      make_entries(entries, scales, b);
      begin_products<typename L::Values>(sums, entries, L::Values::by_rows(values, 0, first / 16));
    }
    before = stage.index;
    stage.next();
  }
  wgmma_wait<0>();
  sums_are_there(sums);

  // 3. The moments of the part.
  store_moments(parts, chunks, at, slice, group * kPairsTogether + own, a0,
                [&](int r, int n, int i) { return sums[r][4 * n + i]; });
#else
  trap_without_warpgroups(tokens, chunks, parts, entry_scale, maps);
#endif
}

template <int F>
const char* queue_moments(const AttentionParams& params, const LinearTokens& tokens,
                          const TokenParts& parts, unsigned blocks, Stream stream) {
  if (blocks == 0) return nullptr;
  MomentMaps maps;
  const char* error =
      map_features<F, kStep>(maps.features, tokens.phi, params.B * tokens.heads, tokens.N);
  if (error == nullptr) {
    error = map_rows(maps.values, tokens.rows.data,
                     {params.B, tokens.row_heads, tokens.N, int64_t{tokens.row_columns}},
                     tokens.rows.stride, kStep);
  }
  if (error != nullptr) return error;
  return launch(warpgroup_moment_kernel<F>, dim3(blocks), dim3(kWarpgroupThreads),
                MomentLayout<F>::kBytes, stream, tokens, FeatureChunks(params), parts,
                twice_half(tokens.entry_scale), maps);
}

}  // namespace

const char* warpgroup_moments(const AttentionParams& params, const LinearTokens& tokens,
                              const TokenParts& parts, unsigned blocks, Stream stream) {
  return FeatureChunks(params).columns() == 64
             ? queue_moments<64>(params, tokens, parts, blocks, stream)
             : queue_moments<128>(params, tokens, parts, blocks, stream);
}

}  // namespace ikattn::cuda
