// The forward pass on tensor cores: a block is 128 queries, four warps of 32, and passes along the
// keys, 64 at a time and two tiles in flight. Scores become weights, and weights the operand of the
// product with the value, in registers; no maximum, no exponential.
#include "attention/cuda/folded.h"
#include "attention/cuda/tiles.h"
#include "support/cuda/intrinsics.h"

namespace ikattn::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kKeys = 64;
constexpr int kStages = 2;

// Rows of 128 n bytes; the 16-byte chunk is turned by the row, so that eight rows of one chunk lie
// in different banks.
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t chunk, uint32_t row_bytes) {
  return row * row_bytes + ((chunk & ~7u) | ((chunk ^ row) & 7u)) * 16;
}

template <int F, int V>
struct Layout {
  static constexpr uint32_t kFeatureBytes = 2 * F, kValueBytes = 2 * V;
  static constexpr uint32_t kKeyTile = kKeys * kFeatureBytes;
  static constexpr uint32_t kValueTile = kKeys * kValueBytes;
  static constexpr uint32_t kEps = kKeyTile + kValueTile;
  static constexpr uint32_t kStage = kEps + kKeys * 4;
  static constexpr int64_t kBytes = kStages * int64_t{kStage};
};

// What a thread copies of every tile: one 16-byte column of each operand, every kStep-th row of it.
// The rows' places differ by constants: kStep is a multiple of 8, the period of the swizzle.
template <typename T, int F, int V>
struct TileCopy {
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kKeyStep = kThreads / (F / 8), kValueStep = kThreads / (V / 8);
  static_assert(kKeyStep % 8 == 0 && kValueStep % 8 == 0);

  const Half* phi_k;  // this thread's place in the next tile
  const T* value;
  const float* eps;
  int64_t value_stride;
  uint32_t key_place, value_place;  // in a stage
  int key_row, value_row;           // of a tile
  bool value_inside;

  // Begins to copy the next tile into the stage at `base`; `count` keys are left from its first on.
  __device__ __forceinline__ void operator()(uint32_t base, int count) {
#pragma unroll
    for (int step = 0; step < kKeys / kKeyStep; ++step) {
      const bool inside = key_row + step * kKeyStep < count;
      cp_async_16(base + key_place + step * (kKeyStep * 2 * F),
                  inside ? phi_k + step * (kKeyStep * F) : phi_k, inside ? 16 : 0);
    }
#pragma unroll
    for (int step = 0; step < kKeys / kValueStep; ++step) {
      const bool inside = value_inside && value_row + step * kValueStep < count;
      cp_async_16(base + value_place + step * (kValueStep * 2 * V),
                  inside ? static_cast<const void*>(value + step * kValueStep * value_stride)
                         : static_cast<const void*>(phi_k),
                  inside ? 16 : 0);
    }
    if (threadIdx.x < kKeys / 4) {
      cp_async_16(base + Layout<F, V>::kEps + threadIdx.x * 16, eps);
    }
    cp_async_commit();
    phi_k += kKeys * F;
    value += kKeys * value_stride;
    eps += kKeys;
  }
};

template <typename T, int F, int V>
__device__ __forceinline__ TileCopy<T, F, V> make_copy(const AttentionParams& params,
                                                       const FoldedTokens& tokens, int64_t b,
                                                       int64_t h, int64_t bk) {
  TileCopy<T, F, V> copy;
  const int key_chunk = threadIdx.x % (F / 8), value_chunk = threadIdx.x % (V / 8);
  copy.key_row = threadIdx.x / (F / 8);
  copy.value_row = threadIdx.x / (V / 8);
  copy.phi_k = tokens.phi_k + (bk * params.S + copy.key_row) * F + key_chunk * 8;
  copy.value_stride = params.value.stride[2];
  copy.value = static_cast<const T*>(params.value.data) + b * params.value.stride[0] +
               h * params.G / params.H * params.value.stride[1] +
               copy.value_row * copy.value_stride + value_chunk * 8;
  copy.eps = tokens.eps + bk * ((params.S + kKeys - 1) / kKeys * kKeys) + threadIdx.x * 4;
  copy.key_place = swizzled(copy.key_row, key_chunk, 2 * F);
  copy.value_place = Layout<F, V>::kKeyTile + swizzled(copy.value_row, value_chunk, 2 * V);
  copy.value_inside = value_chunk * 8 < params.d_v;
  return copy;
}

// Where a lane reads fragments of a 16-row chunk: column fragment k (32 bytes) of chunk c is at
// place[k % 4] + k / 4 * 128 + c * 16 rows, the latter two known when compiling.
struct FragmentPlaces {
  uint32_t place[4];

  __device__ FragmentPlaces(uint32_t start, int row, int half, uint32_t row_bytes) {
#pragma unroll
    for (int k = 0; k < 4; ++k) place[k] = start + swizzled(row, 2 * k + half, row_bytes);
  }
  template <int kRowBytes>
  __device__ __forceinline__ uint32_t at(int chunk, int k) const {
    return place[k % 4] + k / 4 * 128 + chunk * 16 * kRowBytes;
  }
};

// The value rows of poisoned keys become zero: what such a key does is in its eps.
template <typename T, int F, int V>
__device__ __forceinline__ void clean_values(Shared<unsigned char> stage) {
  using L = Layout<F, V>;
  Shared<uint16_t> values = shared_cast<uint16_t>(stage + L::kKeyTile);
  for (int index = threadIdx.x; index < kKeys * V; index += kWarps * 32) {
    const uint16_t bits = values[index];
    if (!is_finite(to_float(T{bits}))) values[index] = 0;
  }
  __syncthreads();
}

// Tiles of 16 queries per warp: as many as the registers hold.
template <int V>
constexpr int kRowTilesFor = V <= 64 ? 2 : 1;

// kSelect: pairs may be hidden or dropped.
template <typename T, int F, int V, bool kSelect>
__global__ void __launch_bounds__(kWarps * 32, 2)
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
  const bool may_miss_the_largest = params.is_causal || params.mask.type != ElementType::kNone;
  if (kSelect && may_miss_the_largest && (state & kSpread) != 0) return;  // the whole block

  TileCopy<T, F, V> copy = make_copy<T, F, V>(params, tokens, b, h, bk);
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const int64_t end = params.is_causal ? min(params.S, i0 + kQueries) : params.S;
  const int tiles = static_cast<int>((end + kKeys - 1) / kKeys);
  // Keys from the next tile on; beyond 2^31 a tile is full all the same.
  const auto left = [&](int tile) {
    return static_cast<int>(min(params.S - tile * int64_t{kKeys}, int64_t{kKeys}));
  };
  if (tiles > 0) copy(shared_address(shared), left(0));
  const FragmentPlaces key_places(0, lane % 8 + 8 * (lane / 16), lane / 8 % 2, L::kFeatureBytes);
  const FragmentPlaces value_places(L::kKeyTile, lane % 16, lane / 16, L::kValueBytes);

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
      copy(shared_address(shared + (tile + 1) % kStages * L::kStage), left(tile + 1));
    }
    if ((state & kPoisoned) != 0) clean_values<T, F, V>(stage);
    const uint32_t base = shared_address(stage);
    Shared<const float> eps = shared_cast<float>(stage + L::kEps);
    const int64_t j0 = tile * int64_t{kKeys};
#pragma unroll 2  // all four would spill
    for (int chunk = 0; chunk < kKeys / 16; ++chunk) {
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
        PhiloxBlock bytes;
        if (kSelect && params.dropout_threshold != 0) {
          bytes =
              dropout_group(static_cast<uint64_t>(params.dropout_state[0]),
                            static_cast<uint64_t>(params.dropout_state[1]), bh,
                            (warp_row + m * 16) / 16 * 4 + g / 2, (j0 + chunk * 16) / 16 * 4 + t);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const float score = s[m][n][c];
            float weight = score * score + key_eps[n][c % 2];
            if (kSelect) {
              const int64_t i = warp_row + m * 16 + g + 8 * (c / 2);
              const int64_t j = j0 + chunk * 16 + n * 8 + 2 * t + c % 2;
              float mask;
              if (!is_visible(params, b, h, i, j, mask)) weight = 0;
            }
            sums[m][c / 2] += weight;
            if (kSelect && params.dropout_threshold != 0) {
              const uint32_t word = bytes.word[(g & 1) + 2 * (c / 2)];
              const uint32_t byte = word >> (8 * (c % 2 + 2 * n)) & 0xff;
              if (byte < params.dropout_threshold) weight = 0;
            }
            s[m][n][c] = weight;
          }
          weights[m][2 * n] = pack<T>(s[m][n][0], s[m][n][1]);
          weights[m][2 * n + 1] = pack<T>(s[m][n][2], s[m][n][3]);
        }
      }
#pragma unroll
      for (int n = 0; n < V / 16; ++n) {
        uint32_t values[4];
        ldmatrix_x4_trans(values,
                          base + L::kKeyTile +
                              swizzled(chunk * 16 + lane % 16, 2 * n + lane / 16, L::kValueBytes));
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
  const bool plain = every_row_sees_all(params) && params.dropout_threshold == 0;
  return launch(
      plain ? folded_forward_kernel<T, F, V, false> : folded_forward_kernel<T, F, V, true>,
      dim3(blocks), dim3(kWarps * 32), Layout<F, V>::kBytes, executor.stream, params, tokens);
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
