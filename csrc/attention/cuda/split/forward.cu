// The forward pass in split products: a block is 64 queries, four warps of 16, and passes along the
// keys, 32 at a time and two tiles in flight. Scores become weights, and weights the operand of the
// product with the value, in registers.
#include "attention/cuda/split/key_tiles.h"
#include "attention/cuda/tensor_cores/epilogue_forward.h"

namespace ikattn::cuda {
namespace {

// Where registers do not hold the queries, they lie behind the tiles.
template <int F, int V>
struct ForwardLayout {
  static constexpr bool kHoldsQueries = F + V <= 192;
  static constexpr uint32_t kQuery = kStages * KeyTileLayout<F, V>::kStage;
  static constexpr int64_t kBytes = kQuery + (kHoldsQueries ? 0 : kSplitRows * int64_t{4} * F);
};

template <int F, int V, Pairs kPairs>
__global__ void __launch_bounds__(kFoldedThreads, 2)
    split_forward_kernel(AttentionParams params, SplitTokens tokens) {
  using L = KeyTileLayout<F, V>;
  using Own = ForwardLayout<F, V>;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  const QueryBlock at(params, kSplitRows, blockIdx.x);
  const int64_t warp_row = at.i0 + warp * 16;

  // 1. The first tile of keys and values is on its way, and the queries are.
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const KeyTiles<F, V> tiles(params, tokens, at);
  if (tiles.count > 0) {
    if constexpr (!Own::kHoldsQueries) {
      copy_split<kSplitRows, F>(shared_address(shared + Own::kQuery), tokens.query.high,
                                tokens.query.low, at.bh * params.L + at.i0,
                                remaining_of(params.L, at.i0));
    }
    tiles.copy(0, shared_address(shared));
  }
  const HeldQueries<Own::kHoldsQueries ? F : 0> held(params, tokens.query, at.bh, warp_row);
  const float norm = 1 / static_cast<float>(4 * params.M), eps = static_cast<float>(params.eps);
  float row_units[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    row_units[half] =
        norm * tokens.query.units[at.bh * padded_tokens(params.L) + warp_row + g + 8 * half];
  }
  const SplitAddresses key_places = SplitAddresses::of_columns(0, 2 * F);
  const SplitAddresses value_places = SplitAddresses::of_rows(L::kValue, 2 * V);

  // 2. Tile by tile: scores, weights, output += weights x values.
  float output[V / 8][4] = {};
  WeightRows rows;
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
      float s[2][4];
      const SplitAddresses keys_at = key_places.behind(base + chunk * (16 * 2 * F));
      if constexpr (Own::kHoldsQueries) {
        multiply_split_columns<F / 16>(s, held, keys_at, L::kKeyLow);
      } else {
        multiply_split_columns<F / 16>(s, SharedRows::of<F>(shared_address(shared + Own::kQuery)),
                                       keys_at, L::kKeyLow);
      }
      const SplitKeyColumns keys = KeyTiles<F, V>::columns_of(stage, chunk);
      const FragmentPairs<kPairs> pairs(params, visible, at.bh, at.i0, j0, warp * 16, chunk * 16);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) s[n][c] *= row_units[c / 2] * keys.key_units[n][c % 2];
      }
      float ratios[2];
      rows.weigh(s, pairs, keys.logits, eps, ratios);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          // Hidden pairs may have a value that is not finite.
          const bool meets = s[n][c] != 0 && !pairs.drops(n, c);
          s[n][c] = meets ? s[n][c] * keys.value_units[n][c % 2] : 0.0f;
        }
      }
      const SplitFragment weights = fits.put(s, ratios);
      add_split_rows(output, ratios, weights, value_places.behind(base + chunk * (16 * 2 * V)),
                     L::kValueLow);
    }
  }

  // 3. Rows of the result.
  const float output_scale = static_cast<float>(dropout_rescale(params.dropout_threshold));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = sum_of_lanes<4>(rows.sums[half]), unit = fits.unit(half);
    const int64_t i = warp_row + g + 8 * half;
    if (i >= params.L) continue;
    store_result<V>(params, at, i, 0, sum, 0, rows.reference(half), output_scale,
                    [&](int n, int c) { return output[n][2 * half + c] * unit; });
  }
}

}  // namespace

const char* split_forward(const AttentionParams& params, const DeviceExecutor& executor,
                          const PreparedTokens<float>& prepared) {
  SplitTokens tokens;
  if (const char* error = split_tokens(params, executor, prepared, tokens)) return error;
  return launch_split(params, [&]<int F, int V, Pairs kPairs>() {
    const auto blocks = static_cast<unsigned>(params.B * params.H * ceil_div(params.L, kSplitRows));
    return launch(split_forward_kernel<F, V, kPairs>, dim3(blocks), dim3(kFoldedThreads),
                  ForwardLayout<F, V>::kBytes, executor.stream, params, tokens);
  });
}

}  // namespace ikattn::cuda
