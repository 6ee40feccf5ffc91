// The forward pass of the folded form with scores of integers of 8 bits (Int8Features), by
// mma.sync. A block is 128 queries (64 where the value is wider than 64), four warps, and passes
// along the keys, 64 at a time and two tiles in flight. It computes what hopper/forward_int8.cu
// does, and what that does not take: masks, dropout and shares of keys.
//
// w = (s s + eps) e_j, two at a time in bfloat16 and rounded at each step. A row's sum is a product
// with ones: of the weights as they are multiplied, but before dropout.
#include "attention/cuda/tensor_cores/epilogue_forward.h"
#include "attention/cuda/tensor_cores/int8_pairs.h"

namespace ikattn::cuda {
namespace {

template <int V>
struct Int8Layout {
  static constexpr uint32_t kValues = kStep * kInt8RowBytes;  // behind the keys
  static constexpr uint32_t kMagnitudes = kValues + kStep * 2 * V;
  static constexpr uint32_t kStage = kMagnitudes + kStep * 2;
  static constexpr int64_t kBytes = kStages * int64_t{kStage};
};

// What a thread copies of every tile, and from where the next one comes.
template <int V>
struct Int8TileCopy {
  using L = Int8Layout<V>;
  RowCopy<kInt8Words> key_rows;
  RowCopy<V> value_rows;
  const uint16_t* phi_k;
  const BFloat16* value;
  const BFloat16* magnitudes;

  __device__ __forceinline__ Int8TileCopy(const AttentionParams& params, const FoldedTokens& tokens,
                                          const QueryBlock& at, int first_tile)
      : key_rows(kInt8Words, kInt8Words),
        value_rows(tokens.value.stride[2], tokens.value_columns),
        phi_k(key_rows.source(
            int8_row(tokens.int8.phi_k, at.bk * params.S + first_tile * int64_t{kStep}))),
        value(value_rows.source(::ikattn::cuda::value_rows<BFloat16>(params, tokens, at.b, at.h) +
                                first_tile * kStep * value_rows.stride)),
        magnitudes(tokens.int8.magnitudes + at.bk * padded_tokens(params.S) +
                   first_tile * int64_t{kStep} + threadIdx.x * 8) {}

  // Begins to copy the next tile into the stage at `base`; `count` keys are left from its first on.
  __device__ __forceinline__ void operator()(uint32_t base, int count) {
    key_rows.template begin<kStep>(base, phi_k, count);
    value_rows.template begin<kStep>(base + L::kValues, value, count);
    if (threadIdx.x < kStep / 8) cp_async_16(base + L::kMagnitudes + threadIdx.x * 16, magnitudes);
    cp_async_commit();
    phi_k += kStep * kInt8Words;
    value += kStep * value_rows.stride;
    magnitudes += kStep;
  }
};

// Ones in the halves of a register that are not for pairs to be left out: registers 2 half and
// 2 half + 1 of tile n.
template <typename Keeps>
__device__ __forceinline__ uint32_t halves_of(int half, const Keeps& keeps) {
  return (keeps(2 * half) ? 0x0000ffffu : 0u) | (keeps(2 * half + 1) ? 0xffff0000u : 0u);
}

// Scores of 16 rows and 16 keys become weights, those of pairs that are not seen 0.
template <Pairs kPairs>
__device__ __forceinline__ Fragment int8_weights(const int32_t (&scores)[2][4],
                                                 const uint32_t (&magnitudes)[2], uint32_t eps,
                                                 const PairPlaces<kPairs>& at) {
  constexpr uint32_t kMinusZeros = 0x80008000u;  // added, they change nothing
  Fragment weights;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t pair =
          pack<BFloat16>(integer_of(scores[n][2 * half]), integer_of(scores[n][2 * half + 1]));
      uint32_t weight = fma_bf16x2(fma_bf16x2(pair, pair, eps), magnitudes[n], kMinusZeros);
      if constexpr (kPairs != Pairs::kAll) {
        if (kPairs != Pairs::kCausal || at.visible.diagonal < kStep) {
          weight &= halves_of(half, [&](int c) { return at.sees(n, c); });
        }
      }
      weights.registers[2 * n + half] = weight;
    }
  }
  return weights;
}
// Those of dropped pairs become 0.
template <Pairs kPairs>
__device__ __forceinline__ void drop(Fragment& weights, const PairPlaces<kPairs>& at) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weights.registers[2 * n + half] &= halves_of(half, [&](int c) { return !at.drops(n, c); });
    }
  }
}

template <int V, Pairs kPairs>
__global__ void __launch_bounds__(kFoldedThreads, kDrops<kPairs> ? 2 : 3)
    int8_forward_kernel(AttentionParams params, FoldedTokens tokens, Parts parts) {
  using L = Int8Layout<V>;
  constexpr int kRowTiles = kRowTilesFor<V>, kQueries = kWarps * kRowTiles * 16;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
  const int blocks = static_cast<int>(gridDim.x) / parts.count;
  const int part = static_cast<int>(blockIdx.x) / blocks;
  const QueryBlock at(params, kQueries, blockIdx.x % blocks);
  const int i0 = at.i0;
  const uint32_t state = tokens.state[at.bk];
  if (is_of_other_form<kPairs>(state)) return;  // the whole block

  // 1. The first tile of keys and values is on its way.
  const TileRange tiles(params, at, kQueries, part, parts.count);
  Int8TileCopy<V> copy(params, tokens, at, tiles.first);
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  if (tiles.first < tiles.end) {
    copy(shared_address(shared + tiles.first % kStages * L::kStage),
         remaining_of(params.S, tiles.first * int64_t{kStep}));
  }
  const FragmentPlaces key_places = FragmentPlaces::of_columns(0, kInt8RowBytes);

  // 2. The warp's queries, all their features, as A fragments.
  Fragment phi_q[kRowTiles][kInt8Fragments];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    load_int8_rows(phi_q[m], tokens.int8.phi_q + at.bh * params.L * Int8Features::kColumns,
                   i0 + (warp * kRowTiles + m) * 16, params.L);
  }
  // 3. Tile by tile: scores, weights, output += weights x values, and the sums of weights.
  constexpr uint32_t kOnes = 0x3f803f80u;
  const uint32_t eps = pack<BFloat16>(tokens.int8.eps, tokens.int8.eps);
  float output[kRowTiles][V / 8][4] = {};
  float sums[kRowTiles][4] = {};  // of the thread's rows, in [0] and [2]

  for (int tile = tiles.first; tile < tiles.end; ++tile) {
    Shared<unsigned char> stage = shared + tile % kStages * L::kStage;
    cp_async_wait<0>();
    __syncthreads();  // the tile is here, and nobody reads the other stage
    if (tile + 1 < tiles.end) {
      copy(shared_address(shared + (tile + 1) % kStages * L::kStage),
           remaining_of(params.S, (tile + 1) * int64_t{kStep}));
    }
    if ((state & kUnclean) != 0) {
      clean_values<BFloat16, kStep * V>(stage + L::kValues);
      __syncthreads();
    }
    const uint32_t base = shared_address(stage);
    Shared<const uint32_t> magnitudes = shared_cast<const uint32_t>(stage + L::kMagnitudes);
    const int64_t j0 = tile * int64_t{kStep};
    const TileVisibility<kPairs> visible(params, at.b, at.h, i0, j0);
#pragma unroll 1
    for (int chunk = 0; chunk < kStep / 16; ++chunk) {
      int32_t scores[kRowTiles][2][4];
      multiply_int8(
          scores, [&](int m, int k) -> const Fragment& { return phi_q[m][k]; },
          [&](int k) { return base + key_places.at<kInt8RowBytes>(chunk, k); });
      const uint32_t of_keys[2] = {magnitudes[chunk * 8 + t], magnitudes[chunk * 8 + 4 + t]};
      Fragment weights[kRowTiles];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const PairPlaces<kPairs> pairs(params, visible, at.bh, i0, j0, (warp * kRowTiles + m) * 16,
                                       chunk * 16);
        weights[m] = int8_weights(scores[m], of_keys, eps, pairs);
        rejoin_after<kPairs>();
        mma_m16n8k16<BFloat16>(sums[m], weights[m].registers, kOnes, kOnes);
        if constexpr (kDrops<kPairs>) drop(weights[m], pairs);
      }
      rejoin_after<kPairs>();
      multiply_by_rows<BFloat16>(output, weights, [&](int n) {
        return base + L::kValues + swizzled(chunk * 16 + lane % 16, 2 * n + lane / 16, 2 * V);
      });
    }
  }

  // 4. Rows of the result, or of its part.
  const float kept = static_cast<float>(dropout_rescale(params.dropout_threshold));
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Found anew: no register holds it over the tiles.
      const int thread = static_cast<int>(unknown_to_compiler(threadIdx.x));
      const int64_t i = at.i0 + (thread / 32 * kRowTiles + m) * 16 + thread % 32 / 4 + 8 * half;
      if (i >= params.L) continue;
      store_row<BFloat16, V, false>(params, tokens, parts, part, at, i, 0, sums[m][2 * half], 0, 0,
                                    kept, [&](int n, int c) { return output[m][n][2 * half + c]; });
    }
  }
}

}  // namespace

const char* int8_forward(const AttentionParams& params, Stream stream, const FoldedTokens& tokens,
                         const Parts& parts) {
  return launch_int8(params, [&]<int V, Pairs kPairs>() {
    const int64_t blocks =
        params.B * params.H * ceil_div(params.L, int64_t{kWarps} * kRowTilesFor<V> * 16);
    return launch(int8_forward_kernel<V, kPairs>, dim3(static_cast<unsigned>(blocks * parts.count)),
                  dim3(kFoldedThreads), Int8Layout<V>::kBytes, stream, params, tokens, parts);
  });
}

}  // namespace ikattn::cuda
