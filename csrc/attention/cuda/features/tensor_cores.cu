// Tokens to features, on tensor cores.
#include <utility>

#include "attention/cuda/features/feature_blocks.h"

namespace ikattn::cuda {
namespace {

// Of float32: a block has 128 tokens.
template <int kSets, FeatureForm kForm>
__global__ void __launch_bounds__(kProductThreads, 3)
    tf32_feature_kernel(FeatureSides both, FrequencyRows frequencies) {
  const unsigned of_keys = both.sides[0].blocks;
  const bool is_key = blockIdx.x < of_keys;
  const FeatureSource& source = both.sides[is_key ? 0 : 1].source;
  const FeatureRows& rows = both.sides[is_key ? 0 : 1].rows;
  const TokenTile<float, kSets> tile(source, frequencies, dynamic_shared<unsigned char>(),
                                     blockIdx.x - (is_key ? 0 : of_keys));
  if (rows.leaves<kForm>(tile.bh)) return;  // the whole block
  WarpFeatures<kSets, false, 0, kForm> features(rows, tile.bh, tile.first + threadIdx.x / 32 * 32,
                                                source.N);
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

// Of 16 bits: a block has 256 tokens at a time, of a range of tiles.
template <typename T, int kSets, int kWidth, FeatureForm kForm>
__global__ void __launch_bounds__(kSplitThreads, 2) split_feature_kernel(FeatureWork work) {
  const FeatureShare share = FeatureShare::take<kForm == FeatureForm::kInt8>(
      work.order, shared_cast<unsigned>(dynamic_shared<unsigned char>()));
  const FeatureSource& source = work.both.sides[share.is_key ? 0 : 1].source;
  const FeatureRows& rows = work.both.sides[share.is_key ? 0 : 1].rows;
  const TileRange range(source.N, share.range, work.tiles_each);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (!prepare_share<T, kForm>(work, share, rows, range, warp)) return;
  SplitTile<T, kSets> tile(source, work.frequencies, share.bh, range.end,
                           dynamic_shared<unsigned char>());
  for (int index = range.first; index < range.end; ++index) {
    const int64_t first = int64_t{index} * kSplitTokens + warp * 32;
    const bool has_tokens = first < source.N;  // the whole warp
    WarpFeatures<kSets, true, kWidth, kForm> features(rows, share.bh,
                                                      has_tokens ? first : int64_t{0}, source.N);
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
template <int kSets, FeatureForm kForm>
const char* queue_of_float32(FeatureSides both, const AngleOperands& operands, Stream stream) {
  for (FeatureSide& side : both.sides) {
    const FeatureSource& source = side.source;
    side.blocks = static_cast<unsigned>(source.B * source.heads * ceil_div(source.N, kAngleTokens));
  }
  return launch(tf32_feature_kernel<kSets, kForm>,
                dim3(both.sides[0].blocks + both.sides[1].blocks), dim3(kProductThreads),
                TokenTile<float, kSets>::kBytes, stream, both, operands.frequencies);
}
// forms: nullptr: of keys whose logits and forms there are.
template <typename T, int kSets, int kWidth, FeatureForm kForm>
const char* queue_of_16_bits(const FeatureSides& both, const AngleOperands& operands,
                             const AttentionParams& params, const KeyForms* forms, Stream stream) {
  const auto tiles = [&](int side) { return ceil_div(both.sides[side].source.N, kSplitTokens); };
  const int tiles_each =
      feature_tiles_each(params.B * params.key_heads * tiles(0) + params.B * params.H * tiles(1));
  const auto ranges = [&](int side) {
    return static_cast<unsigned>(ceil_div(tiles(side), tiles_each));
  };
  const FeatureOrder order = order_of_features(
      params, {ranges(0), ranges(1)}, forms == nullptr ? nullptr : operands.shares_taken());
  const FeatureWork work = {both,  operands.split, tiles_each,
                            order, params,         forms == nullptr ? KeyForms() : *forms};
  if (goes_to_warpgroups(operands)) return features_by_warpgroups(work, kForm, stream);
  return launch(split_feature_kernel<T, kSets, kWidth, kForm>, dim3(order.blocks()),
                dim3(kSplitThreads), SplitTile<T, kSets>::kBytes, stream, work);
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
  return launch_turns(operands.keys, [&]<typename T, int kSets>() {
    const KeyForms* forms = to.forms;  // which the first launch makes
    const auto queue = [&]<int kWidth, FeatureForm kForm>() {
      if constexpr (sizeof(T) == 4) {
        return queue_of_float32<kSets, kForm>(both, operands, stream);
      } else {
        return queue_of_16_bits<T, kSets, kWidth, kForm>(both, operands, params,
                                                         std::exchange(forms, nullptr), stream);
      }
    };
    using enum FeatureForm;
    const bool has_int8 = to.int8_k != nullptr;
    if constexpr (!std::is_same_v<T, Half>) {
      if (has_int8 && to.phi_k == nullptr) return queue.template operator()<128, kInt8>();
      if (has_int8) {
        if (const char* error = queue.template operator()<128, kBoth>()) return error;
      }
    }
    if (has_int8 && every_row_sees_all(params)) return static_cast<const char*>(nullptr);
    if (sizeof(T) == 4 || keys.width == 64) return queue.template operator()<64, kHalf>();
    return keys.width == 128 ? queue.template operator()<128, kHalf>()
                             : queue.template operator()<0, kHalf>();
  });
}

}  // namespace ikattn::cuda
