// The tensor-core backward's query side: grad_phi_q. A block owns queries and passes along the
// keys; no pair leaves the registers.
#include "attention/cuda/tensor_cores/backward_pairs.h"
#include "attention/cuda/tensor_cores/begins.h"
#include "attention/cuda/tensor_cores/epilogue_backward.h"

namespace ikattn::cuda {
namespace {

template <int F, int V, Pairs kPairs>
struct QueryLayout {
  static constexpr int kRowTiles = kPairs == Pairs::kGeneral ? 1 : kRowTilesFor<V>;
  static constexpr int kQueries = kWarps * kRowTiles * 16;
  static constexpr uint32_t kGradients = kQueries * 2 * F;  // behind phi_q
  static constexpr uint32_t kStages0 = kGradients + kQueries * 2 * V;
  static constexpr uint32_t kValueTile = kStep * 2 * F;  // behind the keys
  static constexpr uint32_t kTerms = kValueTile + kStep * 2 * V, kLows = kTerms + kStep * 4;
  static constexpr uint32_t kStage = kPairs == Pairs::kGeneral ? kLows + kStep * 4 : kTerms;
  static constexpr int64_t kBytes = kStages0 + kStages * int64_t{kStage};
};

template <typename T, int F, int V, Pairs kPairs>
__global__ void __launch_bounds__(kFoldedThreads, 2)
    folded_query_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows,
                        FeatureGradients grad_phi_q, GradientBegins begins) {
  using L = QueryLayout<F, V, kPairs>;
  constexpr int kRowTiles = L::kRowTiles, kQueries = L::kQueries;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
  const QueryBlock at(params, kQueries, blockIdx.x);
  const int64_t bh = at.bh, i0 = at.i0, b = at.b, h = at.h, bk = at.bk;
  const uint32_t state = tokens.state[bk];
  if (is_of_other_form<kPairs>(state)) return;  // the whole block
  if (kPairs == Pairs::kAll && is_without_pairs(tokens, bk)) return;

  // 1. The block's queries and their gradients, and the first tile of keys, are on their way.
  TileRange tiles(params, at, kQueries);
  const bool goes_on = kGoesOn<V, kPairs> && begins.chunk > 0 && !is_quadratic(params, tokens, at);
  if (goes_on) tiles.first = begins.first_key(at) / kStep;
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const RowCopy<F> feature_rows(F, F);
  const RowCopy<V> gradient_rows(V, V);
  const RowCopy<V> value_rows(tokens.value.stride[2], tokens.value_columns);
  const int64_t first_key = tiles.first * int64_t{kStep};
  const Half* phi_k = feature_rows.source(tokens.phi_k + (bk * params.S + first_key) * F);
  const T* value = value_rows.source(::ikattn::cuda::value_rows<T>(params, tokens, b, h) +
                                     first_key * value_rows.stride);
  const auto copy = [&](int tile) {
    const uint32_t base = shared_address(shared + L::kStages0 + tile % kStages * L::kStage);
    const int count = remaining_of(params.S, tile * int64_t{kStep});
    feature_rows.template begin<kStep>(base, phi_k, count);
    value_rows.template begin<kStep>(base + L::kValueTile, value, count);
    if constexpr (kPairs == Pairs::kGeneral) {
      if (threadIdx.x < kStep / 2) {
        const float* from = threadIdx.x < kStep / 4 ? tokens.terms : tokens.lows;
        cp_async_16(base + L::kTerms + threadIdx.x * 16, from + bk * padded_tokens(params.S) +
                                                             tile * int64_t{kStep} +
                                                             threadIdx.x % (kStep / 4) * 4);
      }
    }
    cp_async_commit();
    phi_k += kStep * F;
    value += kStep * value_rows.stride;
  };
  if (tiles.first < tiles.end) {
    const int count = remaining_of(params.L, i0);
    feature_rows.template begin<kQueries>(
        shared_address(shared), feature_rows.source(tokens.phi_q + (bh * params.L + i0) * F),
        count);
    gradient_rows.template begin<kQueries>(
        shared_address(shared + L::kGradients),
        gradient_rows.source(static_cast<const T*>(rows.gradients) + (bh * params.L + i0) * V),
        count);
    copy(tiles.first);
  }
  const uint32_t warp_base = shared_address(shared) + warp * kRowTiles * 16 * (2 * F);
  const uint32_t warp_gradients =
      shared_address(shared + L::kGradients) + warp * kRowTiles * 16 * (2 * V);
  const FragmentPlaces query_places = FragmentPlaces::of_rows(warp_base, 2 * F);
  const FragmentPlaces gradient_places = FragmentPlaces::of_rows(warp_gradients, 2 * V);
  const FragmentPlaces score_places = FragmentPlaces::of_columns(0, 2 * F);
  const FragmentPlaces value_places = FragmentPlaces::of_columns(L::kValueTile, 2 * V);
  const FragmentPlaces key_places = FragmentPlaces::of_rows(0, 2 * F);

  // 2. Tile by tile: scores s and products x = dO V^T, from both dS, sums += dS phi_k.
  const int64_t warp_row = i0 + warp * kRowTiles * 16;
  const float kept = static_cast<float>(dropout_rescale(params.dropout_threshold));
  QueryRows<kPairs> queries[kRowTiles];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) queries[m].load(params, rows, bh, warp_row + m * 16 + g);
  float sums[kRowTiles][F / 8][4] = {};
  if (goes_on) {
    const float units =
        gradient_scale_of(rows, bk) * value_scale_of(tokens, value_head_of(params, b, h));
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t i = warp_row + m * 16 + g + 8 * half;
        const float scale = query_scale<false>(params, normalizer_of<false>(params, rows, at, i),
                                               queries[m].fit[half], units);
        for_feature_begins<F>(grad_phi_q, params.B * params.H, bh, params.L, i, scale,
                              [&](int n, int c, float x) { sums[m][n][2 * half + c] = x; });
      }
    }
  }

  for (int tile = tiles.first; tile < tiles.end; ++tile) {
    Shared<unsigned char> stage = shared + L::kStages0 + tile % kStages * L::kStage;
    cp_async_wait<0>();
    __syncthreads();  // the tile is here, and nobody reads the other stage
    if (tile + 1 < tiles.end) copy(tile + 1);
    if ((state & kUnclean) != 0) {
      clean_values<T, kStep * V>(stage + L::kValueTile);
      __syncthreads();
    }
    const uint32_t base = shared_address(stage);
    const int64_t j0 = tile * int64_t{kStep};
    const TileVisibility<kPairs> visible(params, b, h, i0, j0);
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
      if constexpr (kPairs == Pairs::kGeneral) {
        load_columns(shared_cast<float>(stage + L::kTerms), chunk, keys.terms);
        load_columns(shared_cast<float>(stage + L::kLows), chunk, keys.lows);
      }
      Fragment products[kRowTiles];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const PairPlaces<kPairs> pairs(params, visible, bh, i0, j0, (warp * kRowTiles + m) * 16,
                                       chunk * 16);
        products[m] = queries[m].products_of(s[m], x[m], pairs, keys, kept);
      }
      rejoin_after<kPairs>();
      multiply_by_rows<Half>(sums, products, [&](int n) {
        return base + key_places.at<2 * F>(0, n) + chunk * (16 * 2 * F);
      });
    }
  }

  // 3. Rows of the result.
  const float units =
      gradient_scale_of(rows, bk) * value_scale_of(tokens, value_head_of(params, b, h));
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t i = warp_row + m * 16 + g + 8 * half;
      store_query_gradients<F, kPairs == Pairs::kGeneral>(
          params, normalizer_of<kPairs == Pairs::kGeneral>(params, rows, at, i), at, i, 0,
          queries[m].fit[half], units, [&](int n, int c) { return sums[m][n][2 * half + c]; },
          grad_phi_q);
    }
  }
}

}  // namespace

const char* folded_query_gradients(const AttentionBackwardParams& params, Stream stream,
                                   const FoldedTokens& tokens, const FoldedRows& rows,
                                   const FeatureGradients& grad_phi_q, const GradientBegins& begins,
                                   bool general_alone) {
  return launch_sizes(params, [&]<typename T, int F, int V>() {
    return launch_forms(params, [&]<Pairs kPairs>() -> const char* {
      if (kPairs != Pairs::kGeneral && general_alone) return nullptr;
      using L = QueryLayout<F, V, kPairs>;
      const auto blocks =
          static_cast<unsigned>(params.B * params.H * ceil_div(params.L, L::kQueries));
      return launch(folded_query_kernel<T, F, V, kPairs>, dim3(blocks), dim3(kFoldedThreads),
                    L::kBytes, stream, params, tokens, rows, grad_phi_q, begins);
    });
  });
}

}  // namespace ikattn::cuda
