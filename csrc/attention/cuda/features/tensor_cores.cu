// Tokens to features, on tensor cores.
#include "attention/cuda/features/split_frequencies.h"
#include "attention/cuda/features/warp_features.h"

namespace ikattn::cuda {
namespace {

// The side of a launch that a block works on, and its number among those.
struct BlockOfSide {
  int side;
  unsigned block;
};
__device__ __forceinline__ BlockOfSide side_of_block(const FeatureSides& both) {
  const unsigned of_keys = both.sides[0].blocks;
  if (blockIdx.x < of_keys) return {0, blockIdx.x};
  return {1, blockIdx.x - of_keys};
}

// Makes features of float32; a block has 128 tokens.
template <int kSets>
__global__ void __launch_bounds__(kProductThreads, 3)
    tf32_feature_kernel(FeatureSides both, FrequencyRows frequencies) {
  const auto [which, block] = side_of_block(both);
  const FeatureSource& source = both.sides[which].source;
  const FeatureRows& rows = both.sides[which].rows;
  const TokenTile<float, kSets> tile(source, frequencies, dynamic_shared<unsigned char>(), block);
  WarpFeatures<kSets, false, 0, FeatureForm::kHalf> features(
      rows, tile.bh, tile.first + threadIdx.x / 32 * 32, source.N);
  for (int64_t m0 = 0; m0 < rows.width / 2; m0 += kAngleFrequencies) {
    float angles[2][2 * kSets][2][4] = {};
    tile.make_angles(m0, 0, angles, [] {});
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      features.store(static_cast<int>(m0) + 16 * n, static_cast<int>(source.M), 1,
                     [&](int m, int set, int j, int i) { return angles[m][2 * set + n][j][i]; });
    }
  }
  features.finish();
}

// Makes features of 16 bits; a block has 256 tokens at a time, tiles_each times.
template <typename T, int kSets, int kWidth, FeatureForm kForm>
__global__ void __launch_bounds__(kSplitThreads, 2)
    split_feature_kernel(FeatureSides both, SplitFrequencies frequencies, int tiles_each) {
  const auto [which, block] = side_of_block(both);
  const FeatureSource& source = both.sides[which].source;
  const FeatureRows& rows = both.sides[which].rows;
  const int tiles = static_cast<int>((source.N + kSplitTokens - 1) / kSplitTokens);
  const unsigned ranges = static_cast<unsigned>((tiles + tiles_each - 1) / tiles_each);
  const int64_t bh = block / ranges;
  if (rows.leaves<kForm>(bh)) return;  // the whole block
  const int first_tile = static_cast<int>(block % ranges) * tiles_each;
  const int end = min(first_tile + tiles_each, tiles);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  SplitTile<T, kSets> tile(source, frequencies, bh, end, dynamic_shared<unsigned char>());
  for (int index = first_tile; index < end; ++index) {
    const int64_t first = int64_t{index} * kSplitTokens + warp * 32;
    const bool has_tokens = first < source.N;  // the whole warp
    WarpFeatures<kSets, true, kWidth, kForm> features(rows, bh, has_tokens ? first : int64_t{0},
                                                      source.N);
    for (int m0 = 0; m0 < (kWidth == 0 ? rows.width : kWidth) / 2; m0 += 16) {
      float angles[kSets][2][2][4] = {};
      tile.make_angles(index, m0, has_tokens, angles);
      if (!has_tokens) continue;
      features.store(m0, static_cast<int>(source.M), tile.unit(),
                     [&](int m, int set, int j, int i) { return angles[set][m][j][i]; });
    }
    if (has_tokens) features.finish();
  }
}

// Queues kernels of one form, for tokens of float32, and of 16 bits.
template <int kSets>
const char* queue_of_float32(FeatureSides both, const AngleOperands& operands, Stream stream) {
  for (FeatureSide& side : both.sides) {
    const FeatureSource& source = side.source;
    side.blocks = static_cast<unsigned>(source.B * source.heads * ceil_div(source.N, kAngleTokens));
  }
  return launch(tf32_feature_kernel<kSets>, dim3(both.sides[0].blocks + both.sides[1].blocks),
                dim3(kProductThreads), TokenTile<float, kSets>::kBytes, stream, both,
                operands.frequencies);
}
template <typename T, int kSets, int kWidth, FeatureForm kForm>
const char* queue_of_16_bits(FeatureSides both, const AngleOperands& operands, Stream stream) {
  int64_t all_tiles = 0;
  const auto tiles_of = [](const FeatureSource& source) {
    return ceil_div(source.N, kSplitTokens);
  };
  for (const FeatureSide& side : both.sides) {
    all_tiles += side.source.B * side.source.heads * tiles_of(side.source);
  }
  const int tiles_each = feature_tiles_each(all_tiles);
  for (FeatureSide& side : both.sides) {
    const FeatureSource& source = side.source;
    side.blocks =
        static_cast<unsigned>(source.B * source.heads * ceil_div(tiles_of(source), tiles_each));
  }
  return launch(split_feature_kernel<T, kSets, kWidth, kForm>,
                dim3(both.sides[0].blocks + both.sides[1].blocks), dim3(kSplitThreads),
                SplitTile<T, kSets>::kBytes, stream, both, operands.split, tiles_each);
}

}  // namespace

const char* write_features_on_tensor_cores(const AttentionParams& params,
                                           const AngleOperands& operands,
                                           const FeatureDestination& to, Stream stream) {
  FeatureSides both = {};
  both.sides[0].source = operands.keys;
  both.sides[1].source = operands.queries;
  FeatureRows& keys = both.sides[0].rows;
  FeatureRows& queries = both.sides[1].rows;
  keys.width = queries.width = static_cast<int>(padded_columns(2 * params.M));
  keys.state = queries.state = to.state;
  keys.phi = to.phi_k;
  keys.logits = to.logits.high;
  keys.scales = to.scales;
  keys.group = 1;
  keys.int8 = to.int8_k;
  queries.phi = to.phi_q;
  queries.poison = to.poison;
  queries.group = static_cast<int>(params.H / params.key_heads);
  queries.int8 = to.int8_q;
  return launch_angles(operands.keys, [&]<typename T, int kSets>() {
    const auto queue = [&]<int kWidth, FeatureForm kForm>() {
      if constexpr (sizeof(T) == 4) {
        return queue_of_float32<kSets>(both, operands, stream);
      } else {
        return queue_of_16_bits<T, kSets, kWidth, kForm>(both, operands, stream);
      }
    };
    using enum FeatureForm;
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (to.are_integers && to.phi_k == nullptr) return queue.template operator()<128, kInt8>();
      if (to.are_integers) {
        const char* error = queue.template operator()<128, kBoth>();
        if (error != nullptr || every_row_sees_all(params)) return error;
      }
    }
    if (sizeof(T) == 4 || keys.width == 64) return queue.template operator()<64, kHalf>();
    return keys.width == 128 ? queue.template operator()<128, kHalf>()
                             : queue.template operator()<0, kHalf>();
  });
}

}  // namespace ikattn::cuda
