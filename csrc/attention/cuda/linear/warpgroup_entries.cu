// Entries times moments on Hopper: as entries.cu has it, with products by wgmma. Moments are copied
// by TMA and stay in shared memory; entries are made in the registers that wgmma reads. While one
// warpgroup makes its own the tensor cores are at the other's.
//
// Compiled for sm_90a alone.
#include "attention/cuda/hopper/pipeline.h"
#include "attention/cuda/linear/entry_rows.h"

namespace ikattn::cuda {
namespace {

constexpr int kStageRows = kPairEntries / 2;  // entries in a stage: those of eight a's
constexpr int kMomentStages = 6;
static_assert(kEntryWarps == kProductThreads / 32);

template <int F>
struct EntryLayout {
  using Tokens = Boxes<kEntryTokens, F>;
  using Barriers = TileBarriers<1, kMomentStages>;
  static constexpr uint32_t kStage = kStageRows * kMomentBytes;
  static constexpr uint32_t kTokens = kMomentStages * kStage;
  static constexpr uint32_t kBarriers = kTokens + Tokens::kBytes;
  static constexpr int64_t kBytes = kBarriers + Barriers::kBytes;
};
struct EntryMaps {
  RowMap tokens, moments;
};

// By one thread: the block's tokens, and all moments that they meet.
template <int F>
__device__ __forceinline__ void copy_block(const typename EntryLayout<F>::Barriers& barriers,
                                           uint32_t base, const EntryMaps& maps,
                                           const EntryBlock& at, int64_t sums, int rows) {
  using L = EntryLayout<F>;
  barrier_arrive(barriers.item_full(0), L::Tokens::kBytes);
  L::Tokens::copy(base + L::kTokens, maps.tokens, 0, at.bh, at.first, barriers.item_full(0));
  TileStageOf<kMomentStages> stage;
#pragma unroll 1
  for (int row = 0; row < rows; row += kStageRows, stage.next()) {
    barrier_wait(barriers.read(stage.index), stage.parity ^ 1);
    barrier_arrive(barriers.full(stage.index), L::kStage);
    begin_box(base + stage.index * L::kStage, maps.moments, 0, static_cast<int>(sums), row, 0,
              barriers.full(stage.index));
  }
}

#if IKATTN_WARPGROUP_CODE

constexpr int kTogether = 4;  // a's whose entries are made, and multiplied, together

// What the 16 b's of a token are multiplied with, [a][m][half]: of the eight features in `a` the
// four-th four, each twice. Another lane of the same tokens has two of them in one register.
__device__ __forceinline__ void spread(uint32_t (&scales)[kTogether][2][2], const uint32_t (&a)[4],
                                       int four) {
  const int first = static_cast<int>(threadIdx.x) % 32 & ~3;
#pragma unroll
  for (int index = 0; index < kTogether; index += 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t both = __shfl_sync(0xffffffffu, a[i], first | (2 * four + index / 2));
      scales[index][i / 2][i % 2] = unknown_to_compiler(twice(both, false));
      scales[index + 1][i / 2][i % 2] = unknown_to_compiler(twice(both, true));
    }
  }
}
// Entries, [a][m]. They are made here, and not between the products that read them: ptxas would
// serialise these.
__device__ __forceinline__ void make_entries(uint32_t (&entries)[kTogether][2][4],
                                             const uint32_t (&scales)[kTogether][2][2],
                                             const Fragment (&b)[2]) {
#pragma unroll
  for (int index = 0; index < kTogether; ++index) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        entries[index][m][i] =
            unknown_to_compiler(multiply_f16x2(b[m].registers[i], scales[index][m][i % 2]));
      }
    }
  }
}
// Begins sums += entries times the moments that they meet.
__device__ __forceinline__ void begin_products(float (&sums)[2][32],
                                               const uint32_t (&entries)[kTogether][2][4],
                                               uint64_t moments) {
  wgmma_fence();
#pragma unroll
  for (int index = 0; index < kTogether; ++index) {
    const uint64_t right = wgmma_operand_after(moments, index * (kChunk * kMomentBytes));
#pragma unroll
    for (int m = 0; m < 2; ++m) wgmma_by_rows<Half>(sums[m], entries[index][m], right, true);
  }
  wgmma_commit();
}

#endif

// 256 tokens and 64 columns; a warp has 32 tokens, as in entry_kernel.
template <int F>
__global__ void __launch_bounds__(kWarpgroupThreads, 1)
    warpgroup_entry_kernel(EntryProducts products, FeatureChunks chunks, int slices,
                           uint32_t entry_scale, const __grid_constant__ EntryMaps maps) {
#if IKATTN_WARPGROUP_CODE
  using L = EntryLayout<F>;
  static_assert(kLiesInSharedMemory<L, L::kStage, L::kTokens, L::Tokens::kBox>);
  const LinearTokens& tokens = products.tokens;
  const EntryBlock at(tokens, blockIdx.x / slices);
  const Prefixes& prefixes = products.sums.prefixes;
  if (is_idle(tokens, prefixes, products.quadratic_blocks, at)) return;  // the whole block
  const uint32_t base = shared_address(dynamic_shared<unsigned char>());
  const typename L::Barriers barriers(base + L::kBarriers);
  // 1. The third warpgroup copies.
  if (threadIdx.x >= kProductThreads) {
    give_registers<kCopyRegisters>();
    if (threadIdx.x != kProductThreads) return;
    const int64_t sums = place_of_sums(tokens, prefixes, at) * slices + blockIdx.x % slices;
    copy_block<F>(barriers, base, maps, at, sums, chunks.pairs() * kPairEntries);
    return;
  }
  take_registers<kProductRegisters>();

  // 2. Stage by stage, the entries of eight a's and 16 b's times their moments.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t own_rows = base + L::kTokens + warp * 32 * 128;
  const auto row_piece = [&](int row, int column, int piece) {
    return own_rows + column / kBoxColumns * L::Tokens::kBox +
           swizzled(row, column % kBoxColumns / 8 + piece, 128);
  };
  float sums[2][32] = {};
  TileStageOf<kMomentStages> stage;
  int before = -1;  // the stage of the eight before
  barrier_wait(barriers.item_full(0), 0);
  for (int chunk_b = 0; chunk_b < chunks.count; ++chunk_b) {
    Fragment b[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      b[m] = load_fragment(row_piece(m * 16 + lane % 16, chunks.column(chunk_b), lane / 16));
    }
    for (int eight = 0; eight < 2 * (chunk_b + 1); ++eight) {
      uint32_t a[4];  // features 2t and 2t + 1 of the lane's four tokens
      ldmatrix_x4(a, row_piece(lane, chunks.column(eight / 2), eight % 2));
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = multiply_f16x2(a[i], entry_scale);
      const uint64_t moments = wgmma_operand(base + stage.index * L::kStage);
#pragma unroll
      for (int four = 0; four < 2; ++four) {
        uint32_t scales[kTogether][2][2], entries[kTogether][2][4];
        spread(scales, a, four);
        wgmma_wait<0>();  // for those before: the other warpgroup's go on
        if (four == 0 && before >= 0) barriers.release(before);
        make_entries(entries, scales, b);
        if (four == 0) barriers.wait(stage);
        begin_products(sums, entries,
                       wgmma_operand_after(moments, four * kTogether * kChunk * kMomentBytes));
      }
      before = stage.index;
      stage.next();
    }
  }
  wgmma_wait<0>();
  sums_are_there(sums);
  store_entries(products, slices, [&](int m, int n, int i) { return sums[m][4 * n + i]; });
#else
  trap_without_warpgroups(products, chunks, slices, entry_scale, maps);
#endif
}

template <int F>
const char* queue_entries(const AttentionParams& params, const EntryProducts& products,
                          const FeatureChunks& chunks, Stream stream) {
  const LinearTokens& tokens = products.tokens;
  const int slices = moment_slices(params);
  const int64_t heads = params.B * tokens.heads, rows = chunks.pairs() * int64_t{kPairEntries};
  const int64_t sums = params.B * params.key_heads * products.sums.prefixes.count * slices;
  const int64_t blocks = heads * ceil_div(tokens.N, kEntryTokens) * slices;
  if (blocks == 0) return nullptr;
  EntryMaps maps;
  const char* error = map_features<F, kEntryTokens>(maps.tokens, tokens.phi, heads, tokens.N);
  if (error == nullptr) {
    error =
        map_features<kMomentColumns, kStageRows>(maps.moments, products.sums.moments, sums, rows);
  }
  if (error != nullptr) return error;
  return launch(warpgroup_entry_kernel<F>, dim3(static_cast<unsigned>(blocks)),
                dim3(kWarpgroupThreads), EntryLayout<F>::kBytes, stream, products, chunks, slices,
                twice_half(tokens.entry_scale), maps);
}

}  // namespace

const char* warpgroup_entry_products(const AttentionParams& params, const EntryProducts& products,
                                     Stream stream) {
  const FeatureChunks chunks(params);
  return chunks.columns() == 64 ? queue_entries<64>(params, products, chunks, stream)
                                : queue_entries<128>(params, products, chunks, stream);
}

}  // namespace ikattn::cuda
