// The pairs of the backward of short calls on Hopper, of heads in the folded form: grad_phi_q,
// grad_phi_k, grad_value and the gradients of the logits, from scores and products dO V^T that are
// made once.
//
// A block has a key head, and 256 queries at a time, which stay in shared memory: a unit. It
// passes along the keys, 64 at a time. Each of two warpgroups makes the factors of every second 64
// queries, and adds up their grad_phi_q in registers. Factors of the keys' gradients go to shared
// memory, [query][key]; of these one warpgroup makes grad_phi_k of the tile, and the other one
// grad_value, by turns. Where a key head has several units, sums of keys wait in memory for the
// next one. All is added up in a fixed order.
//
// Compiled for sm_90a alone.
#include <algorithm>

#include "attention/cuda/hopper/short.h"
#include "attention/cuda/hopper/short_pairs.h"

namespace ikattn::cuda {
namespace {

struct ShortBackwardMaps {
  RowMap queries, gradients;
  KeyMaps keys;
};

// Copies unit after unit, as the third warpgroup of a block does.
template <typename L>
__device__ __forceinline__ void copy_units(const AttentionBackwardParams& params,
                                           const FoldedTokens& tokens, const FoldedRows& rows,
                                           const ShortBackwardMaps& maps, bool is_causal,
                                           const typename L::Barriers& barriers, uint32_t base,
                                           Shared<int> numbers_of_unit) {
  give_registers<kCopyRegisters>();
  if (threadIdx.x != kProductThreads) return;
  const int heads = static_cast<int>(params.B * params.key_heads);
  TileStageOf<kBackwardStages> stage;
  ItemPlace<1> place;
#pragma unroll 1
  for (int bk = static_cast<int>(blockIdx.x); bk < heads; bk += static_cast<int>(gridDim.x)) {
    if (is_of_other_form<Pairs::kAll>(tokens.forms.state[bk])) continue;
    const ShortKeyHead head(params, bk);
#pragma unroll 1
    for (int unit = 0; unit < ShortUnit::count(params); ++unit) {
      const ShortUnit at(params, is_causal, bk, unit);
      const int bh = at.bh, i0 = at.i0;
      const int64_t row = bh * padded_tokens(params.L) + i0;
      const int64_t numbers = min(int64_t{kChunkRows}, padded_tokens(params.L) - i0);
      const uint32_t bytes = static_cast<uint32_t>(numbers) * 4, there = barriers.item_full(0);
      barrier_wait(barriers.item_read(0), place.parity ^ 1);
      at.tell(numbers_of_unit);
      barrier_arrive(there, L::Queries::kBytes + L::Gradients::kBytes + 3 * bytes);
      L::Queries::copy(base, maps.queries, 0, bh, i0, there);
      L::Gradients::copy(base + L::kGradients, maps.gradients, 0, bh, i0, there);
      begin_bytes(base + L::kRows, rows.normalizer + row, bytes, there);
      begin_bytes(base + L::kRows + L::kRowNumbers, rows.delta + row, bytes, there);
      begin_bytes(base + L::kRows + 2 * L::kRowNumbers, rows.fit + row, bytes, there);
      place.next();
#pragma unroll 1
      for (int tile = 0; tile < at.tiles; ++tile, stage.next()) {
        const uint32_t full = barriers.full(stage.index);
        const uint32_t to = base + L::kKeys + stage.index * 2 * L::kKeyNumbers;
        const int64_t key = bk * padded_tokens(params.S) + tile * kStep;
        barrier_wait(barriers.read(stage.index), stage.parity ^ 1);
        barrier_arrive(full, L::Tiles::kStage + 2 * L::kKeyNumbers);
        L::Tiles::copy(base + L::kTiles + stage.index * L::Tiles::kStage, maps.keys, bk, head.b,
                       head.value_head, tile, full);
        begin_bytes(to, tokens.forms.terms + key, L::kKeyNumbers, full);
        begin_bytes(to + L::kKeyNumbers, tokens.forms.lows + key, L::kKeyNumbers, full);
      }
    }
  }
}

// One of the two warpgroups that multiply.
template <typename T, int F, int V, bool kCausal>
struct ShortBackward {
  using L = ShortBackwardLayout<T, F, V>;
  using Factors = ShortFactors<T, kCausal, L::kWeights - L::kScoreGradients>;
  using Sums = float[F / kBoxColumns][32];
  static constexpr int kBlocks =
      kChunkRows / 64 / kWarpgroups;  // blocks of 64 queries in a warpgroup
  Shared<unsigned char> shared;
  uint32_t base;
  int group;

  __device__ __forceinline__ ShortUnit own_unit() const {
    return ShortUnit(shared_cast<const int>(shared + L::kUnit));
  }
  // Makes factors of a tile's pairs, and adds dS phi_k to sums.
  //   place: of the tile. keys: terms and scales
  __device__ __forceinline__ void pass(int tile, uint32_t place, Shared<const float> keys,
                                       float key_fit, Sums (&sums)[kBlocks]) const {
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      const int block = kWarpgroups * m + group;
      const ShortUnit unit = own_unit();
      if (block < unit.template first_block<kCausal>(tile) || block >= unit.blocks) continue;
      const uint32_t rows_at = static_cast<uint32_t>(block) * (64 * 128);
      float s[kStep / 2], x[kStep / 2];
      uint32_t products[kStep / 16][4];
      wgmma_fence();
      begin_by_columns<Half, typename L::Queries, typename L::Tiles::Keys>(s, base + rows_at,
                                                                           place);
      begin_by_columns<T, typename L::Gradients, typename L::Tiles::Values>(
          x, base + L::kGradients + rows_at, place + L::Tiles::kValues);
      wgmma_commit();
      const int row = block * 64 + row_of_group();
      const Factors factors{ShortRows::load<T>(shared_cast<const float>(shared + L::kRows), row),
                            keys,
                            key_fit,
                            unit.i0 + row - tile * kStep - static_cast<int>(threadIdx.x) % 4 * 2,
                            shared + L::kScoreGradients,
                            row};
      wgmma_wait<0>();
      sums_are_there(s);
      sums_are_there(x);
      const int part = block * 4 + static_cast<int>(unknown_to_compiler(threadIdx.x)) / 32 % 4;
      factors.make(s, x, products, shared_cast<float>(shared + L::kLogits) + part * kStep);
      wgmma_fence();
      begin_by_rows<Half, kStep, F>(sums[m], products, place);
      wgmma_commit();
      wgmma_wait<0>();
      sums_are_there(sums[m]);
    }
  }

  // Adds factors^T rows to the sums of the tile's keys, over the unit's queries. R, kWidth: the
  // rows.
  //   factors, rows: where they are
  template <typename R, int kWidth>
  __device__ __forceinline__ void add(const ShortUnit& unit, int tile, uint32_t factors,
                                      uint32_t rows,
                                      float (&sums)[kWidth / kBoxColumns][32]) const {
    const uint64_t left = wgmma_operand(base + factors), right = wgmma_operand(base + rows);
#pragma unroll 1
    for (int block = unit.template first_block<kCausal>(tile); block < unit.blocks; ++block) {
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int box = 0; box < kWidth / kBoxColumns; ++box) {
          wgmma_transposed<R>(sums[box], L::Factors::by_rows(left, 0, block * 4 + k),
                              Boxes<kChunkRows, kWidth>::by_rows(right, box, block * 4 + k), true);
        }
      }
      wgmma_commit();
      wgmma_wait<0>();
      sums_are_there(sums);
    }
  }

  // Adds up the gradient of the logit of one of a tile's keys; each thread takes one.
  //   scale: what the sum is multiplied with
  __device__ __forceinline__ void add_logits(const AttentionParams& params, const ShortUnit& unit,
                                             int tile, int bk, float scale, const float* logits,
                                             float* to) const {
    const int column = static_cast<int>(unknown_to_compiler(threadIdx.x)) % 128;
    const int j = tile * kStep + column;
    if (column >= kStep || j >= params.S) return;
    Shared<const float> parts = shared_cast<const float>(shared + L::kLogits);
    Shared<float> sums = shared_cast<float>(shared + L::kLogitSums);
    float sum = tile < unit.before ? float{sums[j]} : 0.0f;
#pragma unroll 4
    for (int i = unit.template first_block<kCausal>(tile) * 4; i < unit.blocks * 4; ++i) {
      sum += parts[i * kStep + column];
    }
    sums[j] = sum;
    if (!unit.is_last) return;
    const int64_t key = bk * params.S + j;
    to[key] = logits[key] == minus_infinity<float>() ? 0.0f : sum * scale;
  }

  // Stores grad_phi_q of a unit's queries. numbers: normalizers and fits
  __device__ __forceinline__ void store_queries(const AttentionBackwardParams& params,
                                                const ShortUnit& unit, float units,
                                                const float (&numbers)[kBlocks][2][2],
                                                const Sums (&sums)[kBlocks],
                                                const FeatureGradients& grad_phi_q) const {
    QueryBlock at(params, kWarpgroupRows, 0);
    at.bh = unit.bh;
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      const int block = kWarpgroups * m + group;
      if (block >= unit.blocks) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = unit.i0 + block * 64 + row_of_group() + 8 * half;
        store_query_gradients<F, false>(
            params, numbers[m][half][0], at, i, 0, numbers[m][half][1], units,
            [&](int n, int c) { return sum_at(sums[m], half, n, c); }, grad_phi_q);
      }
    }
  }
  // Loads normalizers and fits of the thread's rows, which stay when others are copied in their
  // place.
  __device__ __forceinline__ void load_numbers(float (&numbers)[kBlocks][2][2]) const {
    Shared<const float> rows = shared_cast<const float>(shared + L::kRows);
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = (kWarpgroups * m + group) * 64 + row_of_group() + 8 * half;
        numbers[m][half][0] = rows[row];
        numbers[m][half][1] = rows[2 * kChunkRows + row];
      }
    }
  }
};

// Operands and results of the gradients of keys.
struct ShortKeys {
  const FoldedTokens& tokens;
  const FoldedRows& rows;
  const float* logits;
  const FoldedGradients& gradients;
  float* between;

  // Adds a tile's grad_phi_k, in one warpgroup, or grad_value and the logits' gradients, in the
  // other.
  //   read: the barrier at which a warp arrives that reads no factor any more
  template <typename T, int F, int V, bool kCausal>
  __device__ __forceinline__ void add(const AttentionBackwardParams& params,
                                      const ShortBackward<T, F, V, kCausal>& block, int tile,
                                      int bk, uint32_t read) const {
    using L = ShortBackwardLayout<T, F, V>;
    const ShortUnit unit = block.own_unit();
    const auto tiles = static_cast<int>((params.S + kStep - 1) / kStep);
    float* kept = between + (int64_t{blockIdx.x} * tiles + tile) * (kStep * (F + V));
    const auto release = [&] {
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(read);
    };
    const auto scales = [&] {
      return key_scales_of<T>(params, tokens, rows, bk, ShortKeyHead(params, bk).of_values);
    };
    if (tile % kWarpgroups == block.group) {
      float sums[F / kBoxColumns][32] = {};
      if (tile < unit.before) load_sums(kept, sums);
      block.template add<Half, F>(unit, tile, L::kScoreGradients, 0, sums);
      release();
      if (!unit.is_last) return save_sums(kept, sums);
      const int j0 = tile * kStep + row_of_group();
      store_feature_gradients<F>(params, hidden_keys(params, logits, bk, j0), gradients, scales(),
                                 bk, j0, 0,
                                 [&](int half, int n, int c) { return sum_at(sums, half, n, c); });
    } else {
      float sums[V / kBoxColumns][32] = {};
      kept += kStep * F;
      if (tile < unit.before) load_sums(kept, sums);
      block.template add<T, V>(unit, tile, L::kWeights, L::kGradients, sums);
      const float of_logits = unit.is_last ? scales().logit : 0.0f;
      block.add_logits(params, unit, tile, bk, of_logits, logits, gradients.logits);
      release();
      if (!unit.is_last) return save_sums(kept, sums);
      if (params.grad_value.type == ElementType::kNone) return;
      const ShortKeyHead head(params, bk);
      const int j0 = tile * kStep + row_of_group();
      store_value_gradients<V>(params, hidden_keys(params, logits, bk, j0), scales(), head.b,
                               head.key_head, j0, 0,
                               [&](int half, int n, int c) { return sum_at(sums, half, n, c); });
    }
  }
};

// Passes the tiles of a unit, in the multiplying threads. sums: of grad_phi_q
//   passed: tiles so far, of all units. cleaned: the parity of the next one
template <typename T, int F, int V, bool kCausal, typename Barriers, typename Sums>
__device__ __forceinline__ void pass_unit(const ShortBackward<T, F, V, kCausal>& block,
                                          const Barriers& barriers, const ShortKeys& of_keys,
                                          const AttentionBackwardParams& params, int bk,
                                          float key_fit, uint32_t& passed, uint32_t& cleaned,
                                          Sums& sums) {
  using L = ShortBackwardLayout<T, F, V>;
  static_assert(kBackwardStages == 2);
  const uint32_t there = block.base + L::kFactorsThere, read = block.base + L::kFactorsRead;
#pragma unroll 1
  for (int tile = 0; tile < block.own_unit().tiles; ++tile, ++passed) {
    const uint32_t stage = passed % 2;
    const uint32_t at = L::kTiles + stage * L::Tiles::kStage;
    barrier_wait(barriers.full(stage), passed / 2 % 2);
    if ((of_keys.tokens.forms.state[bk] & kUnclean) != 0) {
      L::Tiles::clean(block.shared + at, barriers.cleaned(), cleaned);
      cleaned ^= 1;
    }
    barrier_wait(read, stage ^ 1);
    block.pass(tile, block.base + at,
               shared_cast<const float>(block.shared + (L::kKeys + stage * 2 * L::kKeyNumbers)),
               key_fit, sums);
    fence_async();
    barriers.release(stage);
    if (threadIdx.x % 32 == 0) barrier_arrive(there);
    barrier_wait(there, stage);
    of_keys.add(params, block, tile, bk, read);
  }
}

// between: [blocks][tiles][kStep][F + V]  sums of keys, where key heads have several units
template <typename T, int F, int V, bool kCausal>
__global__ void __launch_bounds__(kWarpgroupThreads, 1)
    short_backward_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows,
                          const float* logits, FoldedGradients gradients, float* between,
                          const __grid_constant__ ShortBackwardMaps maps) {
#if IKATTN_WARPGROUP_CODE
  using L = ShortBackwardLayout<T, F, V>;
  using Block = ShortBackward<T, F, V, kCausal>;
  static_assert(kLiesInSharedMemory<L, L::kGradients, L::kScoreGradients, L::kWeights, L::kTiles,
                                    L::Tiles::kStage, L::Tiles::kValues>);
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  if (threadIdx.x == 0) {
    barrier_init(base + L::kFactorsThere, kProductThreads / 32);
    barrier_init(base + L::kFactorsRead, kProductThreads / 32);
  }
  const typename L::Barriers barriers(base + L::kBarriers);
  if (threadIdx.x >= kProductThreads) {
    copy_units<L>(params, tokens, rows, maps, kCausal, barriers, base,
                  shared_cast<int>(shared + L::kUnit));
    return;
  }
  take_registers<kProductRegisters>();

  // A shuffle tells the compiler that all warps of a warpgroup have the same index.
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  const Block block{shared, base, group};
  const ShortKeys of_keys{tokens, rows, logits, gradients, between};
  const int heads = static_cast<int>(params.B * params.key_heads);
  uint32_t passed = 0;                   // tiles
  uint32_t units_done = 0, cleaned = 0;  // parities: of units, and of cleaned tiles
#pragma unroll 1
  for (int bk = static_cast<int>(blockIdx.x); bk < heads; bk += static_cast<int>(gridDim.x)) {
    if (is_of_other_form<Pairs::kAll>(tokens.forms.state[bk])) continue;
    const float key_fit =
        key_scales_of<T>(params, tokens, rows, bk, ShortKeyHead(params, bk).of_values).fit *
        static_cast<float>(4 * params.M) * (1 / kWeightScale<T>);
#pragma unroll 1
    for (int index = 0; index < ShortUnit::count(params); ++index) {
      typename Block::Sums sums[Block::kBlocks] = {};
      barrier_wait(barriers.item_full(0), units_done);
      units_done ^= 1;
      pass_unit(block, barriers, of_keys, params, bk, key_fit, passed, cleaned, sums);
      float numbers[Block::kBlocks][2][2];
      block.load_numbers(numbers);
      const ShortUnit unit = block.own_unit();
      barriers.release_item(0);
      const float units =
          gradient_scale_of(rows, bk) * value_scale_of(tokens, ShortKeyHead(params, bk).of_values);
      block.store_queries(params, unit, units, numbers, sums, gradients.phi_q);
    }
  }
#else
  trap_without_warpgroups(params, tokens, rows, logits, gradients, between, maps);
#endif
}

template <typename T, int F, int V>
const char* queue_short_backward(const AttentionBackwardParams& params,
                                 const DeviceExecutor& executor, const FoldedTokens& tokens,
                                 const FoldedRows& rows, const float* logits,
                                 const FoldedGradients& gradients) {
  using L = ShortBackwardLayout<T, F, V>;
  const int64_t heads = params.B * params.H, key_heads = params.B * params.key_heads;
  ShortBackwardMaps maps;
  const char* error = map_features<F, kChunkRows>(maps.queries, tokens.phi_q, heads, params.L);
  if (error == nullptr) {
    error = map_features<V, kChunkRows>(maps.gradients, rows.gradients, heads, params.L);
  }
  if (error == nullptr) error = map_keys<F, kStep>(maps.keys, params, tokens, tokens.phi_k);
  if (error != nullptr) return error;
  const int64_t blocks = std::min(key_heads, int64_t{multiprocessors()});
  const bool waits = params.L > kChunkRows || params.H > params.key_heads;
  float* between =
      executor.take<float>(waits ? blocks * ceil_div(params.S, kStep) * kStep * (F + V) : 0);
  const auto queue = [&](auto kernel) {
    return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kWarpgroupThreads), L::kBytes,
                  executor.stream, params, tokens, rows, logits, gradients, between, maps);
  };
  return params.is_causal ? queue(short_backward_kernel<T, F, V, true>)
                          : queue(short_backward_kernel<T, F, V, false>);
}

}  // namespace

bool fits_short_backward(const AttentionParams& params) {
  // Sums of keys that wait for several units want room in L2: a block's are at most 384 KiB.
  const bool has_more = params.H > params.key_heads || params.L > 2 * kChunkRows;
  const int64_t most = has_more ? 256 : ShortBackwardLayout<Half, 64, 64>::kMostKeys;
  const bool hides_pairs = params.mask.type != ElementType::kNone || params.dropout_threshold != 0;
  // A block has a key head: of fewer, or of one beyond a round, the other kernels' items leave
  // fewer multiprocessors idle. Both are counted: products of 512 for 704.
  const int64_t heads = params.B * params.key_heads, rounds = ceil_div(heads, multiprocessors());
  const bool fills = heads * 704 >= rounds * multiprocessors() * 512;
  return !hides_pairs && params.S <= most && fills && (2 * params.M <= 64 || params.d_v <= 64);
}

const char* warpgroup_short_backward(const AttentionBackwardParams& params,
                                     const DeviceExecutor& executor, const FoldedTokens& tokens,
                                     const FoldedRows& rows, const float* logits,
                                     const FoldedGradients& gradients) {
  return launch_sizes(params, [&]<typename T, int F, int V>() -> const char* {
    if constexpr (F == 128 && V == 128) {
      return "short calls take at most 32 frequencies, or 64 columns of value";
    } else {
      return queue_short_backward<T, F, V>(params, executor, tokens, rows, logits, gradients);
    }
  });
}

}  // namespace ikattn::cuda
