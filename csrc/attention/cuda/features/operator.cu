// Tokens of 16 bits to features in their own type, on tensor cores: spectral_features.
#include "attention/cuda/features/angle_products.h"
#include "attention/cuda/features/operator.h"
#include "attention/cuda/features/split_frequencies.h"

namespace ikattn::cuda {
namespace {

// Stores four neighbours of a row at `to`, of which there are `count`.
template <typename T>
__device__ __forceinline__ void store_four(T* to, bool is_together, int count,
                                           const float (&x)[4]) {
  if (is_together && count >= 4) {
    store_vector(to, make_uint2(pack<T>(x[0], x[1]), pack<T>(x[2], x[3])));
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) to[i] = from_float<T>(x[i]);
  }
}

// Rows in which a thread stores features: four of a warp's 32 tokens.
template <typename T, int kSets>
class OwnFeatures {
 public:
  // Takes phi [B, heads, N, 2M], whose columns are neighbours; the warp's tokens begin at `first`.
  __device__ __forceinline__ OwnFeatures(const Array& phi, int64_t b, int64_t head, int64_t first,
                                         int64_t N, int64_t M)
      : M_(static_cast<int>(M)), stride_(phi.stride[2]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    row_ = lane / 4;
    tokens_ = static_cast<int>(min(N - first, int64_t{32}));
    rows_ = static_cast<T*>(phi.data) + b * phi.stride[0] + head * phi.stride[1] +
            (first + row_) * stride_ + lane % 4 * 4;
    const int64_t strides = phi.stride[0] | phi.stride[1] | phi.stride[2] | M;
    is_together_ = strides % 4 == 0 && reinterpret_cast<uintptr_t>(phi.data) % 8 == 0;
  }

  // Stores the features of 16 frequencies from m0 on. angles[set][m][j][i], in units of `unit` of a
  // cycle: of tile m of tokens and j of 8 frequencies.
  __device__ __forceinline__ void store(int m0, float unit,
                                        const float (&angles)[kSets][2][2][4]) const {
    const int remaining = M_ - m0 - static_cast<int>(threadIdx.x) % 4 * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float cosines[4] = {}, sines[4] = {};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
          float sine, cosine;
          fast_sincos_of_fraction(
              remainder_in_cycles(angles[set][i / 2][k / 2][2 * (i % 2) + k % 2], unit), &sine,
              &cosine);
          cosines[k] += kSets == 1 ? 2 * cosine : cosine;
          sines[k] += kSets == 1 ? 2 * sine : sine;
        }
      }
      if (row_ + 8 * i >= tokens_) continue;
      T* to = rows_ + 8 * i * stride_ + m0;
      store_four(to, is_together_, remaining, cosines);
      store_four(to + M_, is_together_, remaining, sines);
    }
    __syncwarp();  // lanes of no token come to the next product with the others
  }

 private:
  int M_, row_, tokens_;
  int64_t stride_;
  T* rows_;
  bool is_together_;
};

// A block has 256 tokens of a head at a time, tiles_each times.
template <typename T, int kSets>
__global__ void __launch_bounds__(kSplitThreads, 2)
    own_feature_kernel(FeatureSource source, SplitFrequencies frequencies, Array phi,
                       int tiles_each) {
  const int tiles = static_cast<int>((source.N + kSplitTokens - 1) / kSplitTokens);
  const unsigned ranges = static_cast<unsigned>((tiles + tiles_each - 1) / tiles_each);
  const int64_t bh = blockIdx.x / ranges, b = bh / source.heads, head = bh % source.heads;
  const int first_tile = static_cast<int>(blockIdx.x % ranges) * tiles_each;
  const int end = min(first_tile + tiles_each, tiles);
  SplitTile<T, kSets> tile(source, frequencies, bh, end, dynamic_shared<unsigned char>());
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  for (int index = first_tile; index < end; ++index) {
    const int64_t first = int64_t{index} * kSplitTokens + warp * 32;
    const bool has_tokens = first < source.N;  // the whole warp
    const OwnFeatures<T, kSets> features(phi, b, head, has_tokens ? first : int64_t{0}, source.N,
                                         source.M);
    for (int m0 = 0; m0 < source.M; m0 += 16) {
      float angles[kSets][2][2][4] = {};
      tile.make_angles(index, m0, has_tokens, angles);
      if (has_tokens) features.store(m0, tile.unit(), angles);
    }
  }
}

// The operands of a call of attention whose queries are the tokens, and which has no keys.
AttentionParams queries_of(const FeaturesParams& params) {
  AttentionParams queries;
  queries.B = params.B;
  queries.H = queries.G = queries.key_heads = queries.frequency_heads = params.H;
  queries.frequency_batches = params.frequency_batches;
  queries.L = params.N;
  queries.d = params.d;
  queries.M = params.M;
  queries.query = queries.key = params.x;
  queries.w1 = params.w1;
  queries.w2 = params.w2;
  return queries;
}

}  // namespace

bool goes_to_tensor_cores(const FeaturesParams& params) {
  const ElementType type = params.x.type;
  return (type == ElementType::kBFloat16 || type == ElementType::kFloat16) &&
         params.features.stride[3] == 1 && is_on(Family::kWeights);
}

const char* features_on_tensor_cores(const FeaturesParams& params, const DeviceExecutor& executor) {
  AngleOperands operands;
  if (const char* error = prepare_angles(queries_of(params), executor, false, operands)) {
    return error;
  }
  const FeatureSource& source = operands.queries;
  return launch_angles(source, [&]<typename T, int kSets>() -> const char* {
    if constexpr (sizeof(T) == 4) {
      return "tokens of float32 have no kernel here";
    } else {
      const int64_t heads = source.B * source.heads, tiles = ceil_div(source.N, kSplitTokens);
      const int tiles_each = feature_tiles_each(heads * tiles);
      return launch(own_feature_kernel<T, kSets>,
                    dim3(static_cast<unsigned>(heads * ceil_div(tiles, tiles_each))),
                    dim3(kSplitThreads), SplitTile<T, kSets>::kBytes, executor.stream, source,
                    operands.split, params.features, tiles_each);
    }
  });
}

}  // namespace ikattn::cuda
