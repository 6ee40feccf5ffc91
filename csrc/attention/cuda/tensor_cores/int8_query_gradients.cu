// The query side of the backward with scores of integers of 8 bits (Int8Features), by mma.sync:
// grad_phi_q of heads in the folded form. As query_gradients.cu, but that a tile has its keys'
// features twice, as integers, which scores are made of, and in Half, of which grad_phi_q is a sum.
// So tiles are of 32 keys.
#include "attention/cuda/tensor_cores/backward_pairs.h"
#include "attention/cuda/tensor_cores/epilogue_backward.h"
#include "attention/cuda/tensor_cores/int8_pairs.h"
#include "attention/cuda/tensor_cores/tiles.h"

namespace ikattn::cuda {
namespace {

template <int V, Pairs kPairs>
struct Int8QueryLayout {
  // Dropout leaves registers for one.
  static constexpr int kRowTiles = kDrops<kPairs> ? 1 : kRowTilesFor<V>;
  static constexpr int kQueries = kWarps * kRowTiles * 16;
  static constexpr uint32_t kIntegers = kQueries * 2 * V;  // behind the gradients
  static constexpr uint32_t kStages0 = kIntegers + kQueries * kInt8RowBytes;
  static constexpr uint32_t kHalves = kInt8Step * kInt8RowBytes;
  static constexpr uint32_t kValues = kHalves + kInt8Step * 2 * Int8Features::kColumns;
  static constexpr uint32_t kScales = kValues + kInt8Step * 2 * V;
  static constexpr uint32_t kStage = kScales + kInt8Step * 4;
  static constexpr int64_t kBytes = kStages0 + kStages * int64_t{kStage};
};

// What a thread copies of every tile of keys, and from where the next one comes.
template <int V, Pairs kPairs>
struct Int8KeyCopy {
  using L = Int8QueryLayout<V, kPairs>;
  static constexpr int F = Int8Features::kColumns;
  RowCopy<kInt8Words> integer_rows;
  RowCopy<F> feature_rows;
  RowCopy<V> value_rows;
  const uint16_t* integers;
  const Half* phi_k;
  const BFloat16* value;
  const float* scales;

  __device__ __forceinline__ Int8KeyCopy(const AttentionParams& params, const FoldedTokens& tokens,
                                         const QueryBlock& at)
      : integer_rows(kInt8Words, kInt8Words),
        feature_rows(F, F),
        value_rows(tokens.value.stride[2], tokens.value_columns),
        integers(integer_rows.source(int8_row(tokens.int8.phi_k, at.bk * params.S))),
        phi_k(feature_rows.source(tokens.phi_k + at.bk * params.S * F)),
        value(value_rows.source(::ikattn::cuda::value_rows<BFloat16>(params, tokens, at.b, at.h))),
        scales(tokens.lows + at.bk * padded_tokens(params.S) + threadIdx.x * 4) {}

  // Begins to copy the next tile into the stage at `base`; `count` keys are left from its first on.
  __device__ __forceinline__ void operator()(uint32_t base, int count) {
    integer_rows.template begin<kInt8Step>(base, integers, count);
    feature_rows.template begin<kInt8Step>(base + L::kHalves, phi_k, count);
    value_rows.template begin<kInt8Step>(base + L::kValues, value, count);
    if (threadIdx.x < kInt8Step / 4) cp_async_16(base + L::kScales + threadIdx.x * 16, scales);
    cp_async_commit();
    integers += kInt8Step * kInt8Words;
    phi_k += kInt8Step * F;
    value += kInt8Step * value_rows.stride;
    scales += kInt8Step;
  }
};

// Begins to copy a block's queries and what comes in for them.
template <int V, typename L>
__device__ __forceinline__ void begin_int8_queries(const AttentionParams& params,
                                                   const FoldedTokens& tokens,
                                                   const FoldedRows& rows, const QueryBlock& at,
                                                   uint32_t base) {
  const RowCopy<kInt8Words> integer_rows(kInt8Words, kInt8Words);
  const RowCopy<V> gradient_rows(V, V);
  const int64_t first = at.bh * params.L + at.i0;
  const int count = remaining_of(params.L, at.i0);
  integer_rows.template begin<L::kQueries>(
      base + L::kIntegers, integer_rows.source(int8_row(tokens.int8.phi_q, first)), count);
  gradient_rows.template begin<L::kQueries>(
      base, gradient_rows.source(static_cast<const BFloat16*>(rows.gradients) + first * V), count);
}

template <int V, Pairs kPairs>
__global__ void __launch_bounds__(kFoldedThreads, 2)
    int8_query_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows,
                      FeatureGradients grad_phi_q) {
  using L = Int8QueryLayout<V, kPairs>;
  constexpr int F = Int8Features::kColumns, kRowTiles = L::kRowTiles;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  const QueryBlock at(params, L::kQueries, blockIdx.x);
  const uint32_t state = tokens.state[at.bk];
  if (is_of_other_form<kPairs>(state)) return;  // the whole block

  // 1. The block's queries and their gradients, and the first tile of keys, are on their way.
  Shared<unsigned char> shared = dynamic_shared<unsigned char>(), stages = shared + L::kStages0;
  Int8KeyCopy<V, kPairs> copy(params, tokens, at);
  const int64_t seen = params.is_causal ? min(params.S, int64_t{at.i0} + L::kQueries) : params.S;
  const int tiles = static_cast<int>((seen + kInt8Step - 1) / kInt8Step);
  if (tiles > 0) {
    begin_int8_queries<V, L>(params, tokens, rows, at, shared_address(shared));
    copy(shared_address(stages), remaining_of(params.S, 0));
  }
  // Where a lane's first fragments lie.
  const uint32_t own_gradients =
      FragmentPlaces::of_rows(shared_address(shared) + warp * kRowTiles * 16 * (2 * V), 2 * V)
          .place[0];
  const uint32_t own_integers = FragmentPlaces::of_rows(shared_address(shared) + L::kIntegers +
                                                            warp * kRowTiles * 16 * kInt8RowBytes,
                                                        kInt8RowBytes)
                                    .place[0];
  const uint32_t integer_place = FragmentPlaces::of_columns(0, kInt8RowBytes).place[0];
  const uint32_t value_place = FragmentPlaces::of_columns(L::kValues, 2 * V).place[0];
  const uint32_t key_place = FragmentPlaces::of_rows(L::kHalves, 2 * F).place[0];
  static_assert(L::kStages0 % 128 == 0 && L::kStage % 128 == 0 && L::kValues % 128 == 0);

  // 2. What each of the warp's queries brings to its pairs.
  const float kept = static_cast<float>(dropout_rescale(params.dropout_threshold));
  QueryRows<kPairs> queries[kRowTiles];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    queries[m].load(params, rows, at.bh, at.i0 + (warp * kRowTiles + m) * 16 + g);
    for (float& fit : queries[m].fit) fit *= kScoreOfIntegers;  // scores are so much larger
  }
  float sums[kRowTiles][F / 8][4] = {};

  // 3. Tile by tile: scores s and products x = dO V^T, from both dS, sums += dS phi_k.
  for (int tile = 0; tile < tiles; ++tile) {
    Shared<unsigned char> stage =
        arrive_at<L, BFloat16, kInt8Step, V>(tile, tiles, params.S, state, stages, copy);
    const uint32_t base = shared_address(stage);
    Shared<const float> scales = shared_cast<float>(stage + L::kScales);
    const int64_t j0 = tile * int64_t{kInt8Step};
    const TileVisibility<kPairs> visible(params, at.b, at.h, at.i0, j0);
#pragma unroll 1
    for (int chunk = 0; chunk < kInt8Step / 16; ++chunk) {
      int32_t scores[kRowTiles][2][4];
      const uint32_t integers_at = base + integer_place + chunk * (16 * kInt8RowBytes);
      multiply_int8(
          scores,
          [&](int m, int k) {
            return load_fragment(fragment_at(own_integers + m * (16 * kInt8RowBytes), k));
          },
          [&](int k) { return fragment_at(integers_at, k); });
      float x[kRowTiles][2][4], of_keys[2][2];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) queries[m].begin(x[m]);
      const uint32_t values_at = base + value_place + chunk * (16 * 2 * V);
      multiply_by_columns<BFloat16, V / 16>(
          x,
          [&](int m, int k) {
            return load_fragment(fragment_at(own_gradients + m * (16 * 2 * V), k));
          },
          [&](int k) { return fragment_at(values_at, k); });
      load_columns(scales, chunk, of_keys);
      Fragment products[kRowTiles];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        float s[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          s[i / 4][i % 4] = integer_of(scores[m][i / 4][i % 4]) * of_keys[i / 4][i % 2];
        }
        const PairPlaces<kPairs> pairs(params, visible, at.bh, at.i0, j0,
                                       (warp * kRowTiles + m) * 16, chunk * 16);
        products[m] = queries[m].products_of(s, x[m], pairs, KeyColumns(), kept);
      }
      rejoin_after<kPairs>();
      const uint32_t keys_at = base + key_place + chunk * (16 * 2 * F);
      multiply_by_rows<Half>(sums, products, [&](int n) { return fragment_at(keys_at, n); });
    }
  }

  // 4. Rows of the result, found anew: no register holds them over the tiles.
  for_own_rows<kRowTiles>(at.i0, unknown_to_compiler(threadIdx.x), [&](int m, int half, int64_t i) {
    store_query_gradients<F, false>(
        params, normalizer_of<false>(params, rows, at, i), at, i, 0,
        queries[m].fit[half] / kScoreOfIntegers, gradient_scale_of(rows, at.bk),
        [&](int n, int c) { return sums[m][n][2 * half + c]; }, grad_phi_q);
  });
}

}  // namespace

const char* int8_query_gradients(const AttentionBackwardParams& params, Stream stream,
                                 const FoldedTokens& tokens, const FoldedRows& rows,
                                 const FeatureGradients& grad_phi_q) {
  return launch_int8(params, [&]<int V, Pairs kPairs>() {
    using L = Int8QueryLayout<V, kPairs>;
    const auto blocks =
        static_cast<unsigned>(params.B * params.H * ceil_div(params.L, L::kQueries));
    return launch(int8_query_kernel<V, kPairs>, dim3(blocks), dim3(kFoldedThreads), L::kBytes,
                  stream, params, tokens, rows, grad_phi_q);
  });
}

}  // namespace ikattn::cuda
