// The query side of the folded form's backward on Hopper: grad_phi_q. A block owns 128 queries, two
// warpgroups of 64, and passes along the keys, 64 at a time. While the products of a tile are made,
// the tensor cores multiply those of the tile before with its keys.
//
// Compiled for sm_90a alone.
#include "attention/cuda/folded_backward.h"
#include "attention/cuda/warpgroup_tiles.h"

namespace ikattn::cuda {
namespace {

template <int F, int V>
struct QueryLayout {
  using Keys = Boxes<kStep, F>;
  using Values = Boxes<kStep, V>;
  static constexpr uint32_t kValues = Keys::kBytes, kStage = kValues + Values::kBytes;
  static constexpr int64_t kBytes = kTilesInFlight * int64_t{kStage};
};

// Scores of a thread's two rows become factors of grad_phi_q; those of pairs beyond `diagonal`: 0.
template <bool kCrosses>
__device__ __forceinline__ void to_products(float (&s)[kStep / 2], const float (&x)[kStep / 2],
                                            const float (&fit)[2], const float (&fitting_delta)[2],
                                            int diagonal) {
#pragma unroll
  for (int i = 0; i < kStep / 2; ++i) {
    const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2, half = i % 4 / 2;
    s[i] *= x[i] * fit[half] - fitting_delta[half];
    if (kCrosses && column - 8 * half > diagonal) s[i] = 0;
  }
}

template <typename T, int F, int V, bool kCausal>
__global__ void __launch_bounds__(kWarpgroupThreads, 1)
    warpgroup_query_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows,
                           float* grad_phi_q) {
#if IKATTN_WARPGROUP_CODE
  using L = QueryLayout<F, V>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int64_t row_blocks = (params.L + kWarpgroupRows - 1) / kWarpgroupRows;
  const int64_t bh = blockIdx.x / row_blocks;
  // The last rows first: under causality they have the most to do.
  const int64_t i0 = (row_blocks - 1 - blockIdx.x % row_blocks) * kWarpgroupRows;
  const int64_t b = bh / params.H, h = bh % params.H, bk = key_head_of(params, bh);
  const uint32_t state = tokens.state[bk];
  if (is_of_other_form<Pairs::kAll>(state)) return;  // the whole block

  const int64_t end = kCausal ? min(params.S, i0 + kWarpgroupRows) : params.S;
  const int tiles = static_cast<int>((end + kStep - 1) / kStep);
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  const Half* phi_k = tokens.phi_k + bk * params.S * F;
  const T* value = value_rows<T>(params, tokens, b, h);
  const int64_t stride = tokens.value.stride[2];
  const auto begin_copy = [&](int tile) {
    if (tile >= tiles) return;
    const int64_t j0 = tile * int64_t{kStep};
    const int count = left_of(params.S, j0);
    const uint32_t place = base + tile % kTilesInFlight * L::kStage;
    L::Keys::copy(place, phi_k + j0 * F, F, F, count);
    L::Values::copy(place + L::kValues, value + j0 * stride, stride, tokens.value_columns, count);
    cp_async_commit();
  };
  begin_copy(0);

  const int64_t row0 = i0 + warp * 16 + g, row_base = bh * padded_tokens(params.L);
  const bool there[2] = {row0 < params.L, row0 + 8 < params.L};
  uint32_t phi_q[F / 16][4], gradients[V / 16][4];
  load_left<F>(phi_q, tokens.phi_q + (bh * params.L + row0) * F, F, there, F);
  load_left<V>(gradients, static_cast<const T*>(rows.gradients) + (bh * params.L + row0) * V, V,
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
  const auto begin_sums = [&](int tile) {
    wgmma_fence();
    begin_by_rows<Half, kStep, F>(sums, products, base + tile % kTilesInFlight * L::kStage);
    wgmma_commit();
  };

  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % kTilesInFlight;
    const uint32_t place = base + stage * L::kStage;
    cp_async_wait<0>();
    fence_products();
    __syncthreads();  // the tile is here, and nobody reads the one of two before
    if ((state & kUnclean) != 0) {
      clean_values<T, kStep * V, kWarpgroupThreads>(shared + (stage * L::kStage + L::kValues));
      fence_products();
      __syncthreads();
    }
    wgmma_fence();
    begin_by_columns<Half, kStep, F>(s, phi_q, place);
    begin_by_columns<T, kStep, V>(x, gradients, place + L::kValues);
    wgmma_commit();
    if (tile > 0) {
      begin_sums(tile - 1);
      begin_copy(tile + 1);
      wgmma_wait<1>();
    } else {
      begin_copy(tile + 1);
      wgmma_wait<0>();
    }
    const int64_t diagonal = row0 - tile * int64_t{kStep};
    if (kCausal && diagonal - g < kStep - 1) {
      to_products<true>(s, x, fit, fitting_delta, static_cast<int>(diagonal));
    } else if (is_passing(params, tile * int64_t{kStep})) {
      to_products<false>(s, x, fit, fitting_delta, 0);
    }
    wgmma_wait<0>();
    pack_left<Half, kStep / 8>(s, products);
  }
  if (tiles > 0) {
    begin_sums(tiles - 1);
    wgmma_wait<0>();
  }

  const int width = static_cast<int>(2 * params.M);
  const float units =
      gradient_scale_of(rows, bk) * value_scale_of(tokens, value_head_of(params, b, h));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!there[half]) continue;
    const int64_t i = row0 + 8 * half;
    const float normalizer = rows.normalizer[row_base + i];
    const float scale = 2 * normalizer / fit[half] / units;
    float* row = grad_phi_q + (bh * params.L + i) * width;
#pragma unroll
    for (int n = 0; n < F / 8; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int f = n * 8 + 2 * t + c;
        if (f >= width) continue;
        row[f] = normalizer == 0 ? 0 : sums[n / 8][n % 8 * 4 + 2 * half + c] * scale;
      }
    }
  }
#else
  (void)params;
  (void)tokens;
  (void)rows;
  (void)grad_phi_q;
  __trap();
#endif
}

}  // namespace

const char* warpgroup_query_gradients(const AttentionBackwardParams& params, Stream stream,
                                      const FoldedTokens& tokens, const FoldedRows& rows,
                                      float* grad_phi_q) {
  return launch_sizes(params, [&]<typename T, int F, int V>() {
    const int64_t blocks = params.B * params.H * ceil_div(params.L, kWarpgroupRows);
    const auto queue = [&](auto kernel) {
      return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kWarpgroupThreads),
                    QueryLayout<F, V>::kBytes, stream, params, tokens, rows, grad_phi_q);
    };
    return params.is_causal ? queue(warpgroup_query_kernel<T, F, V, true>)
                            : queue(warpgroup_query_kernel<T, F, V, false>);
  });
}

}  // namespace ikattn::cuda
