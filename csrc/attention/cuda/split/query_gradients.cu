// The query side of the backward in split products: grad_phi_q. A block owns 64 queries and passes
// along the keys, as in the forward; no pair leaves the registers.
#include "attention/cuda/split/key_tiles.h"

namespace ikattn::cuda {
namespace {

// Bytes behind the tiles: the block's own features and rows of grad_output.
template <int F, int V>
struct QueryLayout {
  static constexpr uint32_t kQuery = kStages * KeyTileLayout<F, V>::kStage;
  static constexpr uint32_t kGradient = kQuery + kSplitRows * 4 * F;
  static constexpr int64_t kBytes = kGradient + kSplitRows * int64_t{4} * V;
};

// Numbers of a thread's two queries that their pairs need.
struct QueryPair {
  PairQuery queries[2];
  float feature_units[2], gradient_units[2];

  __device__ __forceinline__ QueryPair(const SplitTokens& tokens, const SplitQueries& rows,
                                       int64_t place) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t at = place + 8 * half;
      queries[half] = {{rows.high[at], rows.low[at]}, rows.delta[at]};
      feature_units[half] = tokens.query.units[at];
      gradient_units[half] = rows.gradient.units[at];
    }
  }
};

template <int F, int V, Pairs kPairs>
__global__ void __launch_bounds__(kFoldedThreads, 2)
    split_query_kernel(AttentionBackwardParams params, SplitTokens tokens, SplitQueries rows,
                       PairConstants constants, float* grad_phi_q) {
  using L = KeyTileLayout<F, V>;
  using Own = QueryLayout<F, V>;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  const QueryBlock at(params, kSplitRows, blockIdx.x);
  const int64_t warp_row = at.i0 + warp * 16, first_query = at.bh * params.L;

  // 1. The block's queries and their gradients, and the first tile of keys are on their way.
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const KeyTiles<F, V> tiles(params, tokens, at);
  if (tiles.count > 0) {
    const int there = remaining_of(params.L, at.i0);
    copy_split<kSplitRows, F>(shared_address(shared + Own::kQuery), tokens.query.high,
                              tokens.query.low, first_query + at.i0, there);
    copy_split<kSplitRows, V>(shared_address(shared + Own::kGradient), rows.gradient.high,
                              rows.gradient.low, first_query + at.i0, there);
    tiles.copy(0, shared_address(shared));
  }
  const QueryPair own(tokens, rows, at.bh * padded_tokens(params.L) + warp_row + g);
  const SplitAddresses score_places = SplitAddresses::of_columns(0, 2 * F);
  const SplitAddresses value_places = SplitAddresses::of_columns(L::kValue, 2 * V);
  const SplitAddresses key_places = SplitAddresses::of_rows(0, 2 * F);

  // 2. Tile by tile: scores s and products x = dO V^T, from both ds, sums += ds phi_k.
  float sums[F / 8][4] = {};
  RowFits fits;
  for (int tile = 0; tile < tiles.count; ++tile) {
    Shared<unsigned char> stage = shared + tile % kStages * L::kStage;
    cp_async_wait<0>();
    __syncthreads();  // the tile is here, and nobody reads the other stage
    if (tile + 1 < tiles.count) {
      tiles.copy(tile + 1, shared_address(shared + (tile + 1) % kStages * L::kStage));
    }
    const uint32_t base = shared_address(stage);
    const int64_t j0 = int64_t{tile} * L::kTokens;
    const TileVisibility<kPairs> visible(params, at.b, at.h, at.i0, j0);
#pragma unroll 1
    for (int chunk = 0; chunk < L::kTokens / 16; ++chunk) {
      float s[2][4], x[2][4];
      multiply_split_columns<F / 16>(s, SharedRows::of<F>(shared_address(shared + Own::kQuery)),
                                     score_places.behind(base + chunk * (16 * 2 * F)), L::kKeyLow);
      multiply_split_columns<V / 16>(x, SharedRows::of<V>(shared_address(shared + Own::kGradient)),
                                     value_places.behind(base + chunk * (16 * 2 * V)),
                                     L::kValueLow);
      const SplitKeyColumns keys = KeyTiles<F, V>::columns_of(stage, chunk);
      const FragmentPairs<kPairs> pairs(params, visible, at.bh, at.i0, j0, warp * 16, chunk * 16);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float key_unit = keys.key_units[n][c % 2];
          const float similarity = s[n][c] * (constants.norm * own.feature_units[c / 2] * key_unit);
          const float incoming = x[n][c] * own.gradient_units[c / 2] * keys.value_units[n][c % 2];
          const float gradient = pair_gradient(pairs, n, c, keys.logits.logit(n, c),
                                               own.queries[c / 2], similarity, incoming, constants)
                                     .similarity;
          // A hidden key's unit may be anything.
          s[n][c] = gradient == 0 ? 0.0f : gradient * key_unit;
        }
      }
      float ratios[2] = {1, 1};
      const SplitFragment products = fits.put(s, ratios);
      add_split_rows(sums, ratios, products, key_places.behind(base + chunk * (16 * 2 * F)),
                     L::kKeyLow);
    }
  }

  // 3. Rows of the result.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t i = warp_row + g + 8 * half;
    const float unit = fits.unit(half);
    if (i >= params.L) continue;
    store_features<F>(params, grad_phi_q + (first_query + i) * 2 * params.M, [&](int n) {
      return make_float2(sums[n][2 * half] * unit, sums[n][2 * half + 1] * unit);
    });
  }
}

}  // namespace

const char* split_query_gradients(const AttentionBackwardParams& params, Stream stream,
                                  const SplitTokens& tokens, const SplitQueries& queries,
                                  float* grad_phi_q) {
  return launch_split(params, [&]<int F, int V, Pairs kPairs>() {
    const auto blocks = static_cast<unsigned>(params.B * params.H * ceil_div(params.L, kSplitRows));
    return launch(split_query_kernel<F, V, kPairs>, dim3(blocks), dim3(kFoldedThreads),
                  QueryLayout<F, V>::kBytes, stream, params, tokens, queries, PairConstants(params),
                  grad_phi_q);
  });
}

}  // namespace ikattn::cuda
