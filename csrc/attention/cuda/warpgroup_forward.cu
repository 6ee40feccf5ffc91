// The forward pass of the folded form on Hopper: a block is 128 queries, two warpgroups of 64, and
// passes along the keys, 128 at a time. While a tile's weights are made, the tensor cores multiply
// those of the tile before with its values:
//
//   tile t is here, the copy of t + 1 begins   S(t) begins   O += w(t - 1) V(t - 1) begins
//   S(t) is there: w(t) in its place, and sums   O is there: w(t) become the next product's A
//
// Three stages of tiles, for the values of t - 1 are read while t + 1 is copied. A tile lies in
// boxes of 64 columns, rows of 128 bytes, as wgmma wants it. Compiled for sm_90a alone.
#include "attention/cuda/folded_forward.h"

namespace ikattn::cuda {
namespace {

constexpr int kWarpgroups = 2;
constexpr int kWarpgroupThreads = kWarpgroups * 128;
constexpr int kQueries = kWarpgroups * 64;
constexpr int kKeys = 128;  // of a tile
constexpr int kTilesInFlight = 3;
constexpr int kBoxColumns = 64;  // 128 bytes
constexpr uint32_t kBox = kKeys * 128;

template <int F, int V>
struct WarpgroupLayout {
  static constexpr int kKeyBoxes = F / kBoxColumns, kValueBoxes = V / kBoxColumns;
  static constexpr uint32_t kValues = kKeyBoxes * kBox, kStage = kValues + kValueBoxes * kBox;
  static constexpr uint32_t kTerms = kTilesInFlight * kStage;  // [stage][kKeys]
  static constexpr int64_t kBytes = kTerms + kTilesInFlight * kKeys * int64_t{4};
};

// What a thread copies of every tile.
template <typename T, int F, int V>
struct WarpgroupCopy {
  using L = WarpgroupLayout<F, V>;
  using Rows = RowCopy<kBoxColumns, kWarpgroupThreads>;
  const AttentionParams& params;
  Rows key_rows;
  const Half* phi_k;
  const T* value;
  int64_t value_stride;
  int value_columns;
  const float* terms;  // of the key head

  __device__ __forceinline__ WarpgroupCopy(const AttentionParams& params,
                                           const FoldedTokens& tokens, int64_t b, int64_t h,
                                           int64_t bk)
      : params(params),
        key_rows(F, kBoxColumns),
        phi_k(key_rows.source(tokens.phi_k + bk * params.S * F)),
        value(value_rows<T>(params, tokens, b, h)),
        value_stride(tokens.value.stride[2]),
        value_columns(tokens.value_columns),
        terms(tokens.terms + bk * padded_tokens(params.S)) {}

  // Begins to copy a tile into the stage at `base`, its terms to `base_terms`.
  __device__ __forceinline__ void operator()(int tile, uint32_t base, uint32_t base_terms) const {
    const int64_t j0 = tile * int64_t{kKeys};
    const int count = left_of(params.S, j0);
#pragma unroll
    for (int box = 0; box < L::kKeyBoxes; ++box) {
      key_rows.template begin<kKeys>(base + box * kBox, phi_k + j0 * F + box * kBoxColumns, count);
    }
#pragma unroll
    for (int box = 0; box < L::kValueBoxes; ++box) {
      const Rows rows(value_stride, value_columns - box * kBoxColumns);
      rows.template begin<kKeys>(base + L::kValues + box * kBox,
                                 rows.source(value + j0 * value_stride + box * kBoxColumns), count);
    }
    if (threadIdx.x < kKeys / 4) {
      const int64_t first = j0 + threadIdx.x * 4;
      const bool there = first < padded_tokens(params.S);
      cp_async_16(base_terms + threadIdx.x * 16, terms + (there ? first : 0), there ? 16 : 0);
    }
    cp_async_commit();
  }
};

// s [16][kKeys / 4] of a warp's fragment become weights; pairs beyond `diagonal`: 0.
template <bool kCrosses>
__device__ __forceinline__ void to_weights(float (&s)[kKeys / 2], Shared<const float> terms,
                                           int diagonal, float (&sums)[2]) {
  const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
    const float2 pair = load_vector<float2>(terms + n * 8 + 2 * t);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float score = s[4 * n + c];
      float weight = score * score + (c % 2 == 0 ? pair.x : pair.y);
      if (kCrosses && n * 8 + 2 * t + c % 2 - 8 * (c / 2) > diagonal) weight = 0;
      sums[c / 2] += weight;
      s[4 * n + c] = weight;
    }
  }
}

template <typename T, int F, int V, bool kCausal>
__global__ void __launch_bounds__(kWarpgroupThreads, 1)
    warpgroup_forward_kernel(AttentionParams params, FoldedTokens tokens) {
#if IKATTN_WARPGROUP_CODE
  using L = WarpgroupLayout<F, V>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int64_t row_blocks = (params.L + kQueries - 1) / kQueries;
  const int64_t bh = blockIdx.x / row_blocks;
  // The last rows first: under causality they have the most to do.
  const int64_t i0 = (row_blocks - 1 - blockIdx.x % row_blocks) * kQueries;
  const int64_t b = bh / params.H, h = bh % params.H;
  const int64_t bk = b * params.key_heads + h * params.key_heads / params.H;
  const uint32_t state = tokens.state[bk];
  if (is_of_other_form<Pairs::kCausal>(state)) return;  // the whole block

  const int64_t end = kCausal ? min(params.S, i0 + kQueries) : params.S;
  const int tiles = static_cast<int>((end + kKeys - 1) / kKeys);
  const WarpgroupCopy<T, F, V> copy(params, tokens, b, h, bk);
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  const auto begin_copy = [&](int tile) {
    const int stage = tile % kTilesInFlight;
    copy(tile, base + stage * L::kStage, base + L::kTerms + stage * kKeys * 4);
  };
  if (tiles > 0) begin_copy(0);

  const int64_t row0 = i0 + warp * 16 + g;
  uint32_t phi_q[F / 16][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t i = row0 + 8 * half;
    const Half* row = tokens.phi_q + (bh * params.L + i) * F + 2 * t;
#pragma unroll
    for (int k = 0; k < F / 16; ++k) {
      phi_q[k][half] = i < params.L ? load_vector<uint32_t>(row + 16 * k) : 0;
      phi_q[k][half + 2] = i < params.L ? load_vector<uint32_t>(row + 16 * k + 8) : 0;
    }
  }
  float s[kKeys / 2];
  uint32_t weights[kKeys / 16][4];  // of the tile before, as A
  float output[V / kBoxColumns][kBoxColumns / 2] = {};
  float sums[2] = {};
  const auto begin_output = [&](int tile) {
    const uint32_t values = base + tile % kTilesInFlight * L::kStage + L::kValues;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int box = 0; box < L::kValueBoxes; ++box) {
        wgmma_by_rows<T>(output[box], weights[k], wgmma_operand(values + box * kBox + k * 2048));
      }
    }
    wgmma_commit();
  };

  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % kTilesInFlight;
    cp_async_wait<0>();
    fence_products();
    __syncthreads();  // the tile is here, and nobody reads the one of two before
    if (tile + 1 < tiles) begin_copy(tile + 1);
    if ((state & kUnclean) != 0) {
      clean_values<T, kKeys * V, kWarpgroupThreads>(shared + (stage * L::kStage + L::kValues));
      fence_products();
      __syncthreads();
    }
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < F / 16; ++k) {
      wgmma_by_columns<Half>(
          s, phi_q[k], wgmma_operand(base + stage * L::kStage + k / 4 * kBox + k % 4 * 32), k > 0);
    }
    wgmma_commit();
    if (tile > 0) {
      begin_output(tile - 1);
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    Shared<const float> terms = shared_cast<float>(shared + (L::kTerms + stage * kKeys * 4));
    const int64_t diagonal = row0 - tile * int64_t{kKeys};
    if (kCausal && diagonal - g < kKeys - 1) {
      to_weights<true>(s, terms, static_cast<int>(diagonal), sums);
    } else {
      to_weights<false>(s, terms, 0, sums);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[k][i] = pack<T>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
    }
  }
  if (tiles > 0) {
    begin_output(tiles - 1);
    wgmma_wait<0>();
  }

  const float kept = 1 / value_scale_of(tokens, value_head_of(params, b, h));
  const Tokens out(params.output, b, h);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = sum_of_lanes<4>(sums[half]);
    const int64_t i = row0 + 8 * half;
    if (i >= params.L) continue;
    if (t == 0) {
      static_cast<double*>(params.log_normalizer.data)[bh * params.L + i] =
          log_normalizer_of(sum, reference_of<T, false>(tokens, bk, 0));
    }
#pragma unroll
    for (int box = 0; box < L::kValueBoxes; ++box) {
#pragma unroll
      for (int n = 0; n < kBoxColumns / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int64_t column = box * kBoxColumns + n * 8 + 2 * t + c;
          if (column >= params.d_v) continue;
          out.store<float>(i, column, attended(output[box][4 * n + 2 * half + c], sum, kept));
        }
      }
    }
  }
#else
  (void)params;
  (void)tokens;
  __trap();
#endif
}

}  // namespace

bool goes_to_warpgroups(const AttentionParams& params) {
  return params.mask.type == ElementType::kNone && params.dropout_threshold == 0 &&
         has_warpgroups();
}

const char* warpgroup_forward(const AttentionParams& params, const DeviceExecutor& executor,
                              const FoldedTokens& tokens) {
  return launch_sizes(params, [&]<typename T, int F, int V>() {
    const int64_t blocks = params.B * params.H * ceil_div(params.L, kQueries);
    const auto queue = [&](auto kernel) {
      return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kWarpgroupThreads),
                    WarpgroupLayout<F, V>::kBytes, executor.stream, params, tokens);
    };
    return params.is_causal ? queue(warpgroup_forward_kernel<T, F, V, true>)
                            : queue(warpgroup_forward_kernel<T, F, V, false>);
  });
}

}  // namespace ikattn::cuda
