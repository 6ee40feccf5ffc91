// The forward pass on tensor cores: a block is 128 queries, four warps of 32, and passes along the
// keys, 64 at a time and two tiles in flight. Scores become weights, and weights the operand of the
// product with the value, in registers; no maximum, no exponential.
#include "attention/cuda/folded_tiles.h"

namespace ikattn::cuda {
namespace {

template <int F, int V>
struct Layout {
  static constexpr uint32_t kKeyTile = kStep * 2 * F, kValueTile = kStep * 2 * V;
  static constexpr uint32_t kEps = kKeyTile + kValueTile;
  static constexpr uint32_t kStage = kEps + kStep * 4;
  static constexpr int64_t kBytes = kStages * int64_t{kStage};
};

// What a thread copies of every tile, and from where the next one comes.
template <typename T, int F, int V>
struct TileCopy {
  RowCopy<F> key_rows;
  RowCopy<V> value_rows;
  const Half* phi_k;
  const T* value;
  const float* eps;

  __device__ __forceinline__ TileCopy(const AttentionParams& params, const FoldedTokens& tokens,
                                      int64_t b, int64_t h, int64_t bk)
      : key_rows(F, F),
        value_rows(params.value.stride[2], static_cast<int>(params.d_v)),
        phi_k(key_rows.source(tokens.phi_k + bk * params.S * F)),
        value(value_rows.source(::ikattn::cuda::value_rows<T>(params, b, h))),
        eps(tokens.eps + bk * padded_tokens(params.S) + threadIdx.x * 4) {}

  // Begins to copy the next tile into the stage at `base`; `count` keys are left from its first on.
  __device__ __forceinline__ void operator()(uint32_t base, int count) {
    key_rows.template begin<kStep>(base, phi_k, count);
    value_rows.template begin<kStep>(base + Layout<F, V>::kKeyTile, value, count);
    if (threadIdx.x < kStep / 4) {
      cp_async_16(base + Layout<F, V>::kEps + threadIdx.x * 16, eps);
    }
    cp_async_commit();
    phi_k += kStep * F;
    value += kStep * value_rows.stride;
    eps += kStep;
  }
};

template <typename T, int F, int V, Pairs kPairs>
__global__ void __launch_bounds__(kFoldedThreads, 2)
    folded_forward_kernel(AttentionParams params, FoldedTokens tokens) {
  using L = Layout<F, V>;
  constexpr int kRowTiles = kRowTilesFor<V>, kQueries = kWarps * kRowTiles * 16;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int64_t row_blocks = (params.L + kQueries - 1) / kQueries;
  const int64_t bh = blockIdx.x / row_blocks;
  // The last rows first: under causality they have the most to do.
  const int64_t i0 = (row_blocks - 1 - blockIdx.x % row_blocks) * kQueries;
  const int64_t b = bh / params.H, h = bh % params.H;
  const int64_t bk = b * params.key_heads + h * params.key_heads / params.H;
  const uint32_t state = tokens.state[bk];
  if (kPairs != Pairs::kAll && is_spread(params, state)) return;  // the whole block

  TileCopy<T, F, V> copy(params, tokens, b, h, bk);
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const int64_t end = params.is_causal ? min(params.S, i0 + kQueries) : params.S;
  const int tiles = static_cast<int>((end + kStep - 1) / kStep);
  if (tiles > 0) copy(shared_address(shared), left_of(params.S, 0));
  const FragmentPlaces key_places = FragmentPlaces::of_columns(0, 2 * F);

  // The warp's queries, all their features, as A fragments.
  const int64_t warp_row = i0 + warp * kRowTiles * 16;
  uint32_t phi_q[kRowTiles][F / 16][4];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t i = warp_row + m * 16 + g + 8 * half;
      const Half* row = tokens.phi_q + (bh * params.L + i) * F + 2 * t;
#pragma unroll
      for (int k = 0; k < F / 16; ++k) {
        phi_q[m][k][half] = i < params.L ? load_vector<uint32_t>(row + 16 * k) : 0;
        phi_q[m][k][half + 2] = i < params.L ? load_vector<uint32_t>(row + 16 * k + 8) : 0;
      }
    }
  }
  float output[kRowTiles][V / 8][4] = {};
  float sums[kRowTiles][2] = {};

  for (int tile = 0; tile < tiles; ++tile) {
    Shared<unsigned char> stage = shared + tile % kStages * L::kStage;
    cp_async_wait<0>();
    __syncthreads();  // the tile is here, and nobody reads the other stage
    if (tile + 1 < tiles) {
      copy(shared_address(shared + (tile + 1) % kStages * L::kStage),
           left_of(params.S, (tile + 1) * int64_t{kStep}));
    }
    if ((state & kUnclean) != 0) clean_values<T, V>(stage + L::kKeyTile);
    const uint32_t base = shared_address(stage);
    Shared<const float> eps = shared_cast<float>(stage + L::kEps);
    const int64_t j0 = tile * int64_t{kStep};
    const TileVisibility<kPairs> visible(params, b, h, i0, j0);
#pragma unroll(kPairs == Pairs::kAny ? 1 : 2)  // all four would spill
    for (int chunk = 0; chunk < kStep / 16; ++chunk) {
      float s[kRowTiles][2][4] = {};
#pragma unroll
      for (int k = 0; k < F / 16; ++k) {
        uint32_t keys[4];
        ldmatrix_x4(keys, base + key_places.at<2 * F>(chunk, k));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma_m16n8k16<Half>(s[m][0], phi_q[m][k], keys[0], keys[1]);
          mma_m16n8k16<Half>(s[m][1], phi_q[m][k], keys[2], keys[3]);
        }
      }
      float key_eps[2][2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float2 pair = load_vector<float2>(eps + chunk * 16 + n * 8 + 2 * t);
        key_eps[n][0] = pair.x;
        key_eps[n][1] = pair.y;
      }
      uint32_t weights[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        [[maybe_unused]] FragmentDropout dropout;
        if constexpr (kPairs == Pairs::kAny) {
          dropout = FragmentDropout(params, bh, warp_row + m * 16, j0 + chunk * 16, false);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const float score = s[m][n][c];
            float weight = score * score + key_eps[n][c % 2];
            if (kPairs != Pairs::kAll && !visible(warp * kRowTiles * 16 + m * 16 + g + 8 * (c / 2),
                                                  chunk * 16 + n * 8 + 2 * t + c % 2)) {
              weight = 0;
            }
            sums[m][c / 2] += weight;
            if (kPairs == Pairs::kAny && dropout.drops(n, c)) weight = 0;
            s[m][n][c] = weight;
          }
          weights[m][2 * n] = pack<T>(s[m][n][0], s[m][n][1]);
          weights[m][2 * n + 1] = pack<T>(s[m][n][2], s[m][n][3]);
        }
      }
#pragma unroll
      for (int n = 0; n < V / 16; ++n) {
        uint32_t values[4];
        ldmatrix_x4_trans(values, base + L::kKeyTile +
                                      swizzled(chunk * 16 + lane % 16, 2 * n + lane / 16, 2 * V));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma_m16n8k16<T>(output[m][2 * n], weights[m], values[0], values[1]);
          mma_m16n8k16<T>(output[m][2 * n + 1], weights[m], values[2], values[3]);
        }
      }
    }
  }

  const float kept = static_cast<float>(dropout_rescale(params.dropout_threshold));
  const Tokens out(params.output, b, h);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sums[m][half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int64_t i = warp_row + m * 16 + g + 8 * half;
      if (i >= params.L) continue;
      if (t == 0) {
        static_cast<double*>(params.log_normalizer.data)[bh * params.L + i] =
            sum == 0 ? minus_infinity<double>()
                     : log(static_cast<double>(sum)) - static_cast<double>(tokens.log_scale) +
                           static_cast<double>(tokens.largest[bk]);
      }
      const float scale = sum == 0 ? 0 : kept / sum;
#pragma unroll
      for (int n = 0; n < V / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int64_t column = n * 8 + 2 * t + c;
          if (column >= params.d_v) continue;
          const float x = output[m][n][2 * half + c];
          out.store<float>(i, column, sum == 0 ? 0 : sum != sum ? sum : x * scale);
        }
      }
    }
  }
}

template <typename T, int F, int V>
const char* launch_forward(const AttentionParams& params, const DeviceExecutor& executor,
                           const FoldedTokens& tokens) {
  constexpr int kQueries = kWarps * kRowTilesFor<V> * 16;
  const auto blocks = static_cast<unsigned>(params.B * params.H * ceil_div(params.L, kQueries));
  const Pairs pairs = pairs_of(params);
  const auto kernel = pairs == Pairs::kAll      ? folded_forward_kernel<T, F, V, Pairs::kAll>
                      : pairs == Pairs::kCausal ? folded_forward_kernel<T, F, V, Pairs::kCausal>
                                                : folded_forward_kernel<T, F, V, Pairs::kAny>;
  return launch(kernel, dim3(blocks), dim3(kFoldedThreads), Layout<F, V>::kBytes, executor.stream,
                params, tokens);
}

template <typename T, int F>
const char* forward_of_width(const AttentionParams& params, const DeviceExecutor& executor,
                             const FoldedTokens& tokens) {
  return params.d_v <= 64 ? launch_forward<T, F, 64>(params, executor, tokens)
                          : launch_forward<T, F, 128>(params, executor, tokens);
}

template <typename T>
const char* forward_of_type(const AttentionParams& params, const DeviceExecutor& executor,
                            const FoldedTokens& tokens) {
  switch (padded_features(2 * params.M)) {
    case 64:
      return forward_of_width<T, 64>(params, executor, tokens);
    default:
      return forward_of_width<T, 128>(params, executor, tokens);
  }
}

}  // namespace

const char* folded_forward(const AttentionParams& params, const DeviceExecutor& executor,
                           const FoldedTokens& tokens) {
  return params.value.type == ElementType::kFloat16
             ? forward_of_type<Half>(params, executor, tokens)
             : forward_of_type<BFloat16>(params, executor, tokens);
}

}  // namespace ikattn::cuda
