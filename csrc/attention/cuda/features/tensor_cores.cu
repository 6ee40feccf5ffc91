// Tokens to features, on tensor cores.
#include <utility>

#include "attention/cuda/features/angle_products.h"
#include "attention/cuda/features/feature_shares.h"
#include "attention/cuda/features/feature_values.h"
#include "attention/cuda/features/key_logits.h"
#include "attention/cuda/features/split_frequencies.h"

namespace ikattn::cuda {
namespace {

// Where the features of one side go.
struct FeatureRows {
  Half* phi;  // [B, heads, N, width]
  int width;
  // Of keys: where the logit is NaN or -inf, features are zero, others are multiplied with their
  // scale. nullptr: of queries; of integers alone
  const float* logits;  // [B, heads, N]
  const float* scales;  // [B, heads, N]
  // Of queries, whose features become zero where they are not finite: NaN there, else 0; nullptr:
  // not wanted
  float* poison;  // [B, heads, N]
  // Where heads in the folded form have integers: what tells the form, of every `group` heads.
  const uint32_t* state;
  int group;
  int8_t* int8;  // [B, heads, N, Int8Features::kColumns]

  // Whether another kernel makes the features of a head; or where its form is known.
  template <FeatureForm kForm>
  __device__ __forceinline__ bool leaves(int64_t bh) const {
    if (state == nullptr) return false;
    return leaves<kForm>(
        (state[static_cast<unsigned>(bh) / static_cast<unsigned>(group)] & kGeneral) != 0);
  }
  template <FeatureForm kForm>
  __device__ __forceinline__ bool leaves(bool is_general) const {
    return state != nullptr && is_general != (kForm == FeatureForm::kHalf);
  }

  // Of a token's sums of two cosines, or sines.
  __device__ __forceinline__ float scale_of(int64_t index) const {
    if (logits == nullptr) return 1;
    const float logit = logits[index];
    // A hidden key may hold anything, and is multiplied with weights of 0.
    if (logit != logit || logit == minus_infinity<float>()) return 0;
    return scales == nullptr ? 1.0f : scales[index];
  }
};

// The features of a warp's 32 tokens, 16 frequencies at a time, of their angles as products leave
// them: rows g and g + 8 of two tiles of 16. kNumbers: of SplitFrequencies, where a lane has four
// neighbours. kWidth: of a row, or 0.
template <int kSets, bool kNumbers, int kWidth, FeatureForm kForm = FeatureForm::kHalf>
class WarpFeatures {
  static constexpr bool kInt8 = kForm != FeatureForm::kHalf, kHalf = kForm != FeatureForm::kInt8;

 public:
  // Of the tokens from `first` of the head `bh`, of N.
  __device__ __forceinline__ WarpFeatures(const FeatureRows& rows, int64_t bh, int64_t first,
                                          int64_t N)
      : rows_(rows),
        first_row_(bh * N + first),
        tokens_(static_cast<int>(min(N - first, int64_t{32}))) {
    phi_ = rows_.phi + (first_row_ + row(0)) * width() + threadIdx.x % 4 * (kNumbers ? 4 : 0);
    if constexpr (kInt8)
      int8_ = rows_.int8 + (first_row_ + row(0)) * Int8Features::kColumns + threadIdx.x % 4 * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scales_[i] = 0;
      if (row(i) < tokens_) scales_[i] = rows.scale_of(first_row_ + row(i));
    }
  }

  // Those of 16 frequencies from m0 on, of M. angle(m, set, j, i), in units of `unit` of a cycle:
  // of tile m of tokens and j of 8 frequencies.
  template <typename Angle>
  __device__ __forceinline__ void store(int m0, int M, float unit, const Angle& angle) {
    const int sine_at = sine_step(width()), t = static_cast<int>(threadIdx.x) % 4;
    // Bits of pairs of features, ones where there is a frequency.
    uint32_t present[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      present[j] = half_present(M - m0 - (kNumbers ? 4 * t + 2 * j : 2 * t + 8 * j));
    }
    Half* phi = phi_ + cosine_column(m0, width());
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = i / 2, half = i % 2;
      // Integers have one scale for all. Half of each sum is made.
      const float scale = kInt8 ? scales_[i] * (1 / kInt8OfOne) : 2 * scales_[i];
      // By bits: what a hidden key holds may be NaN.
      const uint32_t counts = scales_[i] == 0 ? 0u : 0xffffffffu;
      uint32_t cosines[2], sines[2];
      float four_cosines[4], four_sines[4];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float cosine[2], sine[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float first = angle(m, 0, j, 2 * half + c);
          if constexpr (kSets == 2) {
            half_sums<kForm>(first, angle(m, 1, j, 2 * half + c), unit, sine[c], cosine[c]);
          } else {
            sine_and_cosine<kForm>(first, unit, sine[c], cosine[c]);
          }
          not_finite_[i] = fmaf(cosine[c], 0.0f, not_finite_[i]);
          four_cosines[2 * j + c] = cosine[c];
          four_sines[2 * j + c] = sine[c];
          if constexpr (kForm == FeatureForm::kBoth) {
            cosine[c] = fmaf(cosine[c], 2 * kInt8OfOne, kInteger) - kInteger;
            sine[c] = fmaf(sine[c], 2 * kInt8OfOne, kInteger) - kInteger;
          }
          cosine[c] *= scale;
          sine[c] *= scale;
        }
        if constexpr (!kHalf) continue;
        cosines[j] = pack_f16x2(cosine[0], cosine[1]) & present[j] & counts;
        sines[j] = pack_f16x2(sine[0], sine[1]) & present[j] & counts;
      }
      Half* to = phi + 8 * i * width();
      if constexpr (kInt8) {
        const uint32_t mask = counts & four_present(M - m0);
        if (row(i) < tokens_) {
          store_vector(int8_ + 8 * i * Int8Features::kColumns + 2 * m0,
                       make_uint2(pack_int8(four_cosines, 2 * kInt8OfOne) & mask,
                                  pack_int8(four_sines, 2 * kInt8OfOne) & mask));
        }
      }
      if constexpr (!kHalf) continue;
      if constexpr (kNumbers) {
        if (row(i) < tokens_) {
          store_vector(to, make_uint2(cosines[0], cosines[1]));
          store_vector(to + sine_at, make_uint2(sines[0], sines[1]));
        }
      } else {
        const bool there = row(i) < tokens_;
        store_tiles(to, there, cosines[0], cosines[1]);
        store_tiles(to + sine_at, there, sines[0], sines[1]);
      }
    }
    __syncwarp();  // lanes of no token come to the next product with the others
  }

  // After all frequencies, of queries: what is not finite.
  __device__ __forceinline__ void finish() {
    if (rows_.logits != nullptr) return;
    __syncwarp();  // rows are stored
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float poison = sum_of_lanes<4>(not_finite_[i]);
      if (row(i) >= tokens_) continue;
      if (rows_.poison != nullptr && t == 0) rows_.poison[first_row_ + row(i)] = poison;
      if (poison == poison) continue;
      if constexpr (kInt8) {
        int8_t* to = rows_.int8 + (first_row_ + row(i)) * Int8Features::kColumns;
#pragma unroll
        for (int column = 0; column < Int8Features::kColumns; column += 64) {
          store_vector(to + column + 16 * t, make_uint4(0, 0, 0, 0));
        }
      }
      if constexpr (!kHalf) continue;
      Half* to = rows_.phi + (first_row_ + row(i)) * width();
#pragma unroll 1
      for (int column = 8 * t; column < width(); column += 32) {
        store_vector(to + column, make_uint4(0, 0, 0, 0));
      }
    }
  }

 private:
  // Ones where there is a frequency, of the thread's four of so many.
  __device__ __forceinline__ static uint32_t four_present(int remaining) {
    const int t = static_cast<int>(threadIdx.x) % 4;
    if constexpr (kNumbers) return int8_present(remaining - 4 * t);
    return int8_present(min(remaining - 2 * t, 2)) | int8_present(min(remaining - 8 - 2 * t, 2))
                                                         << 16;
  }
  // Of a thread's four, eight apart.
  __device__ __forceinline__ static int row(int i) {
    return 8 * i + static_cast<int>(threadIdx.x) % 32 / 4;
  }
  __device__ __forceinline__ int width() const { return kWidth == 0 ? rows_.width : kWidth; }

  const FeatureRows& rows_;
  int64_t first_row_;
  int tokens_;
  Half* phi_;  // of the thread's first row, where it begins
  int8_t* int8_ = nullptr;
  float scales_[4];
  float not_finite_[4] = {};  // 0, or NaN
};

struct FeatureSide {
  FeatureSource source;
  FeatureRows rows;
  unsigned blocks;  // of float32
};
// What a launch makes: features of the keys, and of the queries, whose blocks come behind.
struct FeatureSides {
  FeatureSide sides[2];
};

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

// A range of tiles of a block, and of a warp's 32 tokens of each.
struct TileRange {
  int first, end;

  __device__ __forceinline__ TileRange(int64_t N, unsigned range, int each) {
    const int tiles = static_cast<int>((N + kSplitTokens - 1) / kSplitTokens);
    first = static_cast<int>(range) * each;
    end = min(first + each, tiles);
  }
  template <typename Visit>
  __device__ __forceinline__ void visit_warps(int warp, const Visit& visit) const {
#pragma unroll 1
    for (int tile = first; tile < end; ++tile) {
      visit(int64_t{tile} * kSplitTokens + warp * 32);
    }
  }
};

// The logits of a warp's 32 keys from `first` on, and what their head needs to know of them.
template <typename T, bool kNorms>
__device__ __forceinline__ void make_logits_of_warp(const AttentionParams& params,
                                                    const KeyForms& forms, unsigned bh,
                                                    int64_t first) {
  constexpr int kStep = 32 / kTokenLanes, kRows = kStep * kRowsAtOnce<T>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (first >= params.S) return;  // the whole warp
#pragma unroll 1
  for (int row = lane / kTokenLanes; row < 32; row += kRows) {
    make_logits<float, T, kStep, kNorms, false>(params, forms.logits, bh, first + row,
                                                lane % kTokenLanes);
  }
  __syncwarp();
  add_logits_of_warp(params, forms, bh, first);
}

// What a block does for its keys before their features. Returns whether it goes on to these.
template <typename T, FeatureForm kForm>
__device__ __forceinline__ bool prepare_share(const FeatureShare& share, const FeatureOrder& order,
                                              const FeatureRows& rows, const TileRange& range,
                                              int warp, const AttentionParams& params,
                                              const KeyForms& forms) {
  if (order.taken == nullptr) return !rows.leaves<kForm>(int64_t{share.bh});
  if (share.makes_logits) {
    range.visit_warps(warp, [&](int64_t first) {
      make_logits_of_warp<T, kForm != FeatureForm::kInt8>(params, forms, share.bh, first);
    });
    report_logits(forms, share.bh);
  }
  const bool waits = share.folds || (share.makes_features && rows.state != nullptr);
  if (!waits) return share.makes_features;
  const unsigned key_head = share.is_key ? share.bh : share.bh / order.group;
  wait_for_logits(forms, key_head, order.ranges.of_keys);
  if (share.folds) {
    range.visit_warps(warp,
                      [&](int64_t first) { fold_keys_of_warp(params, forms, share.bh, first); });
    finish_keys(forms, share.bh, order.ranges.of_keys);
  }
  return share.makes_features &&
         !rows.leaves<kForm>(form_that_was_found(forms, key_head).is_general);
}

// Of 16 bits: a block has 256 tokens at a time, of a range of tiles.
template <typename T, int kSets, int kWidth, FeatureForm kForm>
__global__ void __launch_bounds__(kSplitThreads, 2)
    split_feature_kernel(FeatureSides both, SplitFrequencies frequencies, int tiles_each,
                         FeatureOrder order, AttentionParams params, KeyForms forms) {
  const FeatureShare share = FeatureShare::take<kForm == FeatureForm::kInt8>(
      order, shared_cast<unsigned>(dynamic_shared<unsigned char>()));
  const FeatureSource& source = both.sides[share.is_key ? 0 : 1].source;
  const FeatureRows& rows = both.sides[share.is_key ? 0 : 1].rows;
  const TileRange range(source.N, share.range, tiles_each);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (!prepare_share<T, kForm>(share, order, rows, range, warp, params, forms)) return;
  SplitTile<T, kSets> tile(source, frequencies, share.bh, range.end,
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
  return launch(split_feature_kernel<T, kSets, kWidth, kForm>, dim3(order.blocks()),
                dim3(kSplitThreads), SplitTile<T, kSets>::kBytes, stream, both, operands.split,
                tiles_each, order, params, forms == nullptr ? KeyForms() : *forms);
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
