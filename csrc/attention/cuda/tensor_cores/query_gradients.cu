// The tensor-core backward's query side: grad_phi_q. A block owns queries and passes along the
// keys; no pair leaves the registers.
#include "attention/cuda/tensor_cores/backward_pairs.h"
#include "attention/cuda/tensor_cores/epilogue_backward.h"
#include "attention/cuda/tensor_cores/initial_sums.h"
#include "attention/cuda/tensor_cores/tiles.h"

namespace ikattn::cuda {
namespace {

template <int F, int V, Pairs kPairs>
struct QueryLayout {
  static constexpr int kRowTiles = kPairs == Pairs::kGeneral ? 1 : kRowTilesFor<V>;
  static constexpr int kQueries = kWarps * kRowTiles * 16;
  static constexpr uint32_t kGradients = kQueries * 2 * F;  // behind phi_q
  static constexpr uint32_t kStages0 = kGradients + kQueries * 2 * V;
  static constexpr uint32_t kValues = kStep * 2 * F;  // behind the keys
  static constexpr uint32_t kTerms = kValues + kStep * 2 * V;
  static constexpr uint32_t kStage = kTerms + (kPairs == Pairs::kGeneral ? 2 * kStep * 4 : 0);
  static constexpr int64_t kBytes = kStages0 + kStages * int64_t{kStage};
};

// Begins to copy a block's queries and their incoming gradients.
template <typename T, int F, int V, typename L>
__device__ __forceinline__ void begin_queries(const AttentionParams& params,
                                              const FoldedTokens& tokens, const FoldedRows& rows,
                                              const QueryBlock& at, uint32_t base) {
  const RowCopy<F> feature_rows(F, F);
  const RowCopy<V> gradient_rows(V, V);
  const int64_t first = at.bh * params.L + at.i0;
  const int count = remaining_of(params.L, at.i0);
  feature_rows.template begin<L::kQueries>(base, feature_rows.source(tokens.phi_q + first * F),
                                           count);
  gradient_rows.template begin<L::kQueries>(
      base + L::kGradients, gradient_rows.source(static_cast<const T*>(rows.gradients) + first * V),
      count);
}

// Returns the units of the sums for the queries of a block.
__device__ __forceinline__ float units_of(const AttentionParams& params, const FoldedTokens& tokens,
                                          const FoldedRows& rows, const QueryBlock& at) {
  return gradient_scale_of(rows, at.bk) * value_scale_of(tokens, value_head_of(params, at.b, at.h));
}

// Loads the sums with which a warp's queries begin.
template <int F, Pairs kPairs, int kRowTiles>
__device__ __forceinline__ void load_initial_sums(
    const AttentionParams& params, const FoldedTokens& tokens, const FoldedRows& rows,
    const FeatureGradients& so_far, const QueryBlock& at,
    const QueryRows<kPairs> (&queries)[kRowTiles], float (&sums)[kRowTiles][F / 8][4]) {
  const float units = units_of(params, tokens, rows, at);
  for_own_rows<kRowTiles>(at.i0, threadIdx.x, [&](int m, int half, int64_t i) {
    const float scale = query_scale<false>(params, normalizer_of<false>(params, rows, at, i),
                                           queries[m].fit[half], units);
    for_initial_features<F>(so_far, params.B * params.H, at.bh, params.L, i, scale,
                            [&](int n, int c, float x) { sums[m][n][2 * half + c] = x; });
  });
}

template <typename T, int F, int V, Pairs kPairs>
__global__ void __launch_bounds__(kFoldedThreads, 2)
    folded_query_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows,
                        FeatureGradients grad_phi_q, InitialGradients initial) {
  using L = QueryLayout<F, V, kPairs>;
  constexpr int kRowTiles = L::kRowTiles;
  constexpr bool kIsGeneral = kPairs == Pairs::kGeneral;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  const QueryBlock at(params, L::kQueries, blockIdx.x);
  const uint32_t state = tokens.forms.state[at.bk];
  if (is_of_other_form<kPairs>(state)) return;  // the whole block
  if (kPairs == Pairs::kAll && is_without_pairs(tokens, at.bk)) return;

  // 1. The block's queries and their gradients, and the first tile of keys, are on their way.
  TileRange tiles(params, at, L::kQueries);
  const bool goes_on = kGoesOn<V, kPairs> && initial.chunk > 0 && !is_quadratic(params, tokens, at);
  if (goes_on) tiles.first = initial.first_key(at) / kStep;
  Shared<unsigned char> shared = dynamic_shared<unsigned char>(), stages = shared + L::kStages0;
  KeyCopy<L, T, F, V, kIsGeneral ? 2 : 0> copy(params, tokens, at, tiles.first);
  if (tiles.first < tiles.end) {
    begin_queries<T, F, V, L>(params, tokens, rows, at, shared_address(shared));
    copy(shared_address(stages + tiles.first % kStages * L::kStage),
         remaining_of(params.S, tiles.first * int64_t{kStep}));
  }
  const uint32_t warp_base = shared_address(shared) + warp * kRowTiles * 16 * (2 * F);
  const uint32_t warp_gradients =
      shared_address(shared + L::kGradients) + warp * kRowTiles * 16 * (2 * V);
  const FragmentAddresses query_places = FragmentAddresses::of_rows(warp_base, 2 * F);
  const FragmentAddresses gradient_places = FragmentAddresses::of_rows(warp_gradients, 2 * V);
  const FragmentAddresses score_places = FragmentAddresses::of_columns(0, 2 * F);
  const FragmentAddresses value_places = FragmentAddresses::of_columns(L::kValues, 2 * V);
  const FragmentAddresses key_places = FragmentAddresses::of_rows(0, 2 * F);

  // 2. Numbers of each of the warp's queries, and its initial sums.
  const float dropout_scale = static_cast<float>(dropout_rescale(params.dropout_threshold));
  QueryRows<kPairs> queries[kRowTiles];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    queries[m].load(params, rows, at.bh, at.i0 + (warp * kRowTiles + m) * 16 + g);
  }
  float sums[kRowTiles][F / 8][4] = {};
  if (goes_on) load_initial_sums<F>(params, tokens, rows, grad_phi_q, at, queries, sums);

  // 3. Tile by tile: scores s and products x = dO V^T, from both dS, sums += dS phi_k.
  for (int tile = tiles.first; tile < tiles.end; ++tile) {
    Shared<unsigned char> stage =
        arrive_at<L, T, kStep, V>(tile, tiles.end, params.S, state, stages, copy);
    const uint32_t base = shared_address(stage);
    const int64_t j0 = tile * int64_t{kStep};
    const TileVisibility<kPairs> visible(params, at.b, at.h, at.i0, j0);
#pragma unroll 1
    for (int chunk = 0; chunk < kStep / 16; ++chunk) {
      float s[kRowTiles][2][4] = {}, x[kRowTiles][2][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) queries[m].begin(x[m]);
      multiply_by_columns<Half, F / 16>(
          s, [&](int m, int k) { return load_fragment(query_places.at<2 * F>(m, k)); },
          [&](int k) { return base + score_places.at<2 * F>(0, k) + chunk * (16 * 2 * F); });
      multiply_by_columns<T, V / 16>(
          x, [&](int m, int k) { return load_fragment(gradient_places.at<2 * V>(m, k)); },
          [&](int k) { return base + value_places.at<2 * V>(0, k) + chunk * (16 * 2 * V); });
      KeyColumns keys;
      if constexpr (kIsGeneral) {
        keys = load_keys<kPairs>(shared_cast<float>(stage + L::kTerms), chunk);
      }
      Fragment products[kRowTiles];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const FragmentPairs<kPairs> pairs(params, visible, at.bh, at.i0, j0,
                                          (warp * kRowTiles + m) * 16, chunk * 16);
        products[m] = queries[m].products_of(s[m], x[m], pairs, keys, dropout_scale);
      }
      rejoin_after<kPairs>();
      multiply_by_rows<Half>(sums, products, [&](int n) {
        return base + key_places.at<2 * F>(0, n) + chunk * (16 * 2 * F);
      });
    }
  }

  // 4. Rows of the result.
  const float units = units_of(params, tokens, rows, at);
  for_own_rows<kRowTiles>(at.i0, threadIdx.x, [&](int m, int half, int64_t i) {
    store_query_gradients<F, kIsGeneral>(
        params, normalizer_of<kIsGeneral>(params, rows, at, i), at, i, 0, queries[m].fit[half],
        units, [&](int n, int c) { return sums[m][n][2 * half + c]; }, grad_phi_q);
  });
}

}  // namespace

const char* folded_query_gradients(const AttentionBackwardParams& params, Stream stream,
                                   const FoldedTokens& tokens, const FoldedRows& rows,
                                   const FeatureGradients& grad_phi_q,
                                   const InitialGradients& initial, bool general_alone) {
  return launch_sizes(params, [&]<typename T, int F, int V>() {
    return launch_forms(params, [&]<Pairs kPairs>() -> const char* {
      if (kPairs != Pairs::kGeneral && general_alone) return nullptr;
      using L = QueryLayout<F, V, kPairs>;
      const auto blocks =
          static_cast<unsigned>(params.B * params.H * ceil_div(params.L, L::kQueries));
      return launch(folded_query_kernel<T, F, V, kPairs>, dim3(blocks), dim3(kFoldedThreads),
                    L::kBytes, stream, params, tokens, rows, grad_phi_q, initial);
    });
  });
}

}  // namespace ikattn::cuda
