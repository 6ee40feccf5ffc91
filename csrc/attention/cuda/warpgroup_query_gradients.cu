// The query side of the folded form's backward on Hopper: grad_phi_q. A block owns 128 queries, two
// warpgroups of 64, and passes along the keys, 64 at a time. While the products of a tile are made,
// the tensor cores multiply those of the tile before with its keys.
//
// Compiled for sm_90a alone.
#include "attention/cuda/folded_gradients.h"
#include "attention/cuda/warpgroup_tiles.h"

namespace ikattn::cuda {
namespace {

// Scores of a thread's two rows become factors of grad_phi_q; those of pairs beyond `diagonal`: 0.
template <bool kCrosses>
__device__ __forceinline__ void to_products(float (&s)[kStep / 2], const float (&x)[kStep / 2],
                                            const float (&fit)[2], const float (&fitting_delta)[2],
                                            int diagonal) {
#pragma unroll
  for (int i = 0; i < kStep / 2; ++i) {
    const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2, half = i % 4 / 2;
    // A hidden key's score is 0, and its value may be anything.
    s[i] = s[i] == 0 ? 0 : s[i] * (x[i] * fit[half] - fitting_delta[half]);
    if (kCrosses && column - 8 * half > diagonal) s[i] = 0;
  }
}

template <typename T, int F, int V>
struct QueryLayout {
  using Tiles = KeyTiles<T, F, V, kStep>;
  static constexpr uint32_t kBarriers = kTilesInFlight * Tiles::kStage;
  static constexpr int64_t kBytes = kBarriers + TileBarriers::kBytes;
};

template <typename T, int F, int V, bool kCausal>
__global__ void __launch_bounds__(kWarpgroupThreads, 1)
    warpgroup_query_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows,
                           float* grad_phi_q, const __grid_constant__ KeyMaps maps) {
#if IKATTN_WARPGROUP_CODE
  using L = QueryLayout<T, F, V>;
  using Tiles = typename L::Tiles;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
  const QueryBlock at(params, kWarpgroupRows, blockIdx.x);
  const uint32_t state = tokens.state[at.bk];
  if (is_of_other_form<Pairs::kAll>(state)) return;  // the whole block

  const int64_t end = kCausal ? min(params.S, int64_t{at.i0} + kWarpgroupRows) : params.S;
  const int tiles = static_cast<int>((end + kStep - 1) / kStep);
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  const TileBarriers barriers(base + L::kBarriers, kProductThreads);
  if (threadIdx.x >= kProductThreads) {
    copy_tiles(barriers, tiles, Tiles::kStage, [&](int tile, int stage, uint32_t barrier) {
      Tiles::copy(base + stage * Tiles::kStage, maps, at, tile, barrier);
    });
    return;
  }
  take_registers<kProductRegisters>();

  const int row0 = at.i0 + warp * 16 + g;
  const int64_t row_base = at.bh * padded_tokens(params.L);
  const bool there[2] = {row0 < params.L, row0 + 8 < params.L};
  uint32_t phi_q[F / 16][4], gradients[V / 16][4];
  load_left<F>(phi_q, tokens.phi_q + (at.bh * params.L + row0) * F, F, there, F);
  load_left<V>(gradients, static_cast<const T*>(rows.gradients) + (at.bh * params.L + row0) * V, V,
               there, V);
  float fit[2], fitting_delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    fit[half] = there[half] ? rows.fit[row_base + row0 + 8 * half] : 0.0f;
    fitting_delta[half] = there[half] ? rows.delta[row_base + row0 + 8 * half] * fit[half] : 0.0f;
  }
  float s[kStep / 2], x[kStep / 2];
  uint32_t products[kStep / 16][4];  // of the tile before
  float sums[F / kBoxColumns][32] = {};
  const auto begin_sums = [&](int stage) {
    wgmma_fence();
    begin_by_rows<Half, kStep, F>(sums, products, base + stage * Tiles::kStage);
    wgmma_commit();
  };

  TileStage stage;
  int before = 0;  // the stage of the tile before
  for (int tile = 0; tile < tiles; ++tile) {
    barriers.wait(stage);
    const uint32_t place = stage.index * Tiles::kStage;
    if ((state & kUnclean) != 0) Tiles::clean(shared + place, barriers, tile);
    wgmma_fence();
    begin_by_columns<Half, kStep, F>(s, phi_q, base + place);
    begin_by_columns<T, kStep, V>(x, gradients, base + place + Tiles::kValues);
    wgmma_commit();
    if (tile > 0) {
      begin_sums(before);
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    const int diagonal = row0 - tile * kStep;
    if (kCausal && diagonal - g < kStep - 1) {
      to_products<true>(s, x, fit, fitting_delta, diagonal);
    } else if (is_passing(params, tile * int64_t{kStep})) {
      to_products<false>(s, x, fit, fitting_delta, 0);
    }
    wgmma_wait<0>();
    if (tile > 0) barriers.release(before);
    pack_left<Half, kStep / 8>(s, products);
    before = stage.index;
    stage.next();
  }
  if (tiles > 0) {
    begin_sums(before);
    wgmma_wait<0>();
  }

  const float units =
      gradient_scale_of(rows, at.bk) * value_scale_of(tokens, at.b * params.G + at.value_head);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!there[half]) continue;
    store_query_gradients<F, false>(
        params, rows, at, row0 + 8 * half, 0, fit[half], units,
        [&](int n, int c) { return sum_at(sums, half, n, c); }, grad_phi_q);
  }
#else
  (void)params;
  (void)tokens;
  (void)rows;
  (void)grad_phi_q;
  (void)maps;
  __trap();
#endif
}

}  // namespace

const char* warpgroup_query_gradients(const AttentionBackwardParams& params, Stream stream,
                                      const FoldedTokens& tokens, const FoldedRows& rows,
                                      float* grad_phi_q) {
  return launch_sizes(params, [&]<typename T, int F, int V>() {
    const int64_t blocks = params.B * params.H * ceil_div(params.L, kWarpgroupRows);
    KeyMaps maps;
    if (const char* error = map_keys<F, kStep>(maps, params, tokens)) return error;
    const auto queue = [&](auto kernel) {
      return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kWarpgroupThreads),
                    QueryLayout<T, F, V>::kBytes, stream, params, tokens, rows, grad_phi_q, maps);
    };
    return params.is_causal ? queue(warpgroup_query_kernel<T, F, V, true>)
                            : queue(warpgroup_query_kernel<T, F, V, false>);
  });
}

}  // namespace ikattn::cuda
