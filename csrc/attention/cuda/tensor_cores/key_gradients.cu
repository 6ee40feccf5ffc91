// The tensor-core backward's key side: grad_phi_k, grad_value and the gradients of the logits. A
// block owns keys and passes along the queries of all heads that share them.
#include "attention/cuda/tensor_cores/backward_pairs.h"
#include "attention/cuda/tensor_cores/begins.h"
#include "attention/cuda/tensor_cores/epilogue_backward.h"

namespace ikattn::cuda {
namespace {

template <int F, int V, Pairs kPairs>
struct KeyLayout {
  static constexpr uint32_t kGradients = kStep * 2 * F;  // behind phi_q
  static constexpr uint32_t kNormalizer = kGradients + kStep * 2 * V;
  static constexpr uint32_t kDelta = kNormalizer + kStep * 4, kLow = kDelta + kStep * 4;
  static constexpr uint32_t kStage = kLow + (kPairs == Pairs::kGeneral ? kStep * 4 : 0);
  // The block's own values, and keys, lie behind the stages where the registers do not hold them.
  static constexpr bool kHoldsValue = F + V < 192;
  static constexpr bool kHoldsKeys = kHoldsValue || (F + V == 192 && !kDrops<kPairs>);
  static constexpr uint32_t kValue = kStages * kStage;
  static constexpr uint32_t kKeys = kValue + (kHoldsValue ? 0 : kStep * 2 * V);
  static constexpr int64_t kBytes = kKeys + (kHoldsKeys ? 0 : kStep * 2 * F);
};

// What the sums of a thread's two keys, j0 and 8 further on, begin with.
template <int F, int V>
__device__ __forceinline__ void load_begins(const AttentionBackwardParams& params,
                                            const FoldedGradients& gradients,
                                            const GradientBegins& begins, const KeyScales& scales,
                                            int64_t bk, int64_t j0, float (&logit_sums)[2],
                                            float (&key_sums)[F / 8][4],
                                            float (&value_sums)[V / 8][4]) {
  for_keys(params, j0, [&](int half, int64_t j) {
    const int64_t key = bk * params.S + j;
    // Lanes are added up.
    if (threadIdx.x % 4 == 0) logit_sums[half] = gradients.logits[key] / scales.logit;
    for_feature_begins<F>(gradients.phi_k, params.B * params.key_heads, bk, params.S, j,
                          scales.features,
                          [&](int n, int c, float x) { key_sums[n][2 * half + c] = x; });
    if (begins.value == nullptr) return;
    for_pairs<V>([&](int column, int n) {
      const float2 two = load_vector<float2>(begins.value + key * V + column);
      value_sums[n][2 * half] = two.x / scales.value;
      value_sums[n][2 * half + 1] = two.y / scales.value;
    });
  });
}

// A warp owns 16 keys, rows of S^T = phi_k' phi_q^T and dP^T = V dO^T, so that both are A fragments
// of what is summed without being turned.
template <typename T, int F, int V, Pairs kPairs>
__global__ void __launch_bounds__(kFoldedThreads, 2)
    folded_key_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows,
                      const float* logits, FoldedGradients gradients, GradientBegins begins) {
  using L = KeyLayout<F, V, kPairs>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const KeyBlock at(params, kStep, params.is_causal, blockIdx.x);
  const int64_t bk = at.bk, j0 = at.j0, b = at.b, key_head = at.key_head, group = at.group;
  if (is_of_other_form<kPairs>(tokens.state[bk])) return;  // the whole block
  if (kPairs == Pairs::kAll && is_without_pairs(tokens, bk)) return;

  // 1. The block's keys and values, where registers do not hold them, and the first tile of queries
  //    are on their way.
  const int64_t padded = padded_tokens(params.L);
  const bool goes_on = kGoesOn<V, kPairs> && begins.has_keys(tokens, at);
  const int first_tile = at.first_tile, end_tile = goes_on ? begins.end_of_queries(at) / kStep : 0;
  const int tiles = goes_on ? min(at.tiles, end_tile - first_tile) : at.tiles;
  const int steps = tiles * at.group;
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const RowCopy<F> feature_rows(F, F);
  const RowCopy<V> gradient_rows(V, V);
  const auto copy = [&](int step) {
    const uint32_t base = shared_address(shared + step % kStages * L::kStage);
    const int64_t bh = b * params.H + key_head * group + step / tiles;
    const int64_t i0 = int64_t{first_tile + step % tiles} * kStep;
    const int count = remaining_of(params.L, i0);
    feature_rows.template begin<kStep>(
        base, feature_rows.source(tokens.phi_q + (bh * params.L + i0) * F), count);
    gradient_rows.template begin<kStep>(
        base + L::kGradients,
        gradient_rows.source(static_cast<const T*>(rows.gradients) + (bh * params.L + i0) * V),
        count);
    constexpr int kNumbers = kPairs == Pairs::kGeneral ? 3 : 2;
    if (threadIdx.x < kNumbers * kStep / 4) {
      const int which = threadIdx.x / (kStep / 4);
      const float* from = which == 0 ? rows.normalizer : which == 1 ? rows.delta : rows.low;
      cp_async_16(base + L::kNormalizer + threadIdx.x * 16,
                  from + bh * padded + i0 + threadIdx.x % (kStep / 4) * 4);
    }
    cp_async_commit();
  };
  if (steps > 0) {
    if constexpr (!L::kHoldsKeys) {
      const Half* keys = tokens.phi_k + (bk * params.S + j0) * F;
      feature_rows.template begin<kStep>(shared_address(shared + L::kKeys),
                                         feature_rows.source(keys), remaining_of(params.S, j0));
    }
    if constexpr (!L::kHoldsValue) {
      const RowCopy<V> rows_of_value(tokens.value.stride[2], tokens.value_columns);
      const T* from =
          value_rows<T>(params, tokens, b, key_head * group) + j0 * rows_of_value.stride;
      rows_of_value.template begin<kStep>(shared_address(shared + L::kValue),
                                          rows_of_value.source(from), remaining_of(params.S, j0));
    }
    copy(0);
  }
  const FragmentPlaces own_key_places =
      FragmentPlaces::of_rows(shared_address(shared) + L::kKeys + warp * 16 * (2 * F), 2 * F);
  const FragmentPlaces own_value_places =
      FragmentPlaces::of_rows(shared_address(shared) + L::kValue + warp * 16 * (2 * V), 2 * V);
  const FragmentPlaces score_places = FragmentPlaces::of_columns(0, 2 * F);
  const FragmentPlaces gradient_places = FragmentPlaces::of_columns(L::kGradients, 2 * V);
  const FragmentPlaces query_places = FragmentPlaces::of_rows(0, 2 * F);
  const FragmentPlaces output_places = FragmentPlaces::of_rows(L::kGradients, 2 * V);

  const int64_t value_head = b * params.G + at.value_head;
  const float fit = key_scales_of<T>(params, tokens, rows, bk, value_head).fit;
  const float kept = static_cast<float>(dropout_rescale(params.dropout_threshold));
  const float norm = 1 / static_cast<float>(4 * params.M), eps = static_cast<float>(params.eps);
  // 2. The warp's keys, all their features and values, as A fragments.
  const int64_t warp_key = j0 + warp * 16;
  constexpr int kHeldKeys = L::kHoldsKeys ? F / 16 : 0, kHeldValues = L::kHoldsValue ? V / 16 : 0;
  [[maybe_unused]] Fragment phi_k[kHeldKeys + 1], value[kHeldValues + 1];
  KeyRows<T, kPairs> keys;
  keys.load(params, tokens, bk, warp_key + g, fit);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t j = warp_key + g + 8 * half;
    const bool there = j < params.S;
    const Half* features = tokens.phi_k + (bk * params.S + j) * F + 2 * t;
    const T* values =
        value_rows<T>(params, tokens, b, key_head * group) + j * tokens.value.stride[2];
#pragma unroll
    for (int k = 0; k < kHeldKeys; ++k) {
      uint32_t (&registers)[4] = phi_k[k].registers;
      registers[half] = there ? load_vector<uint32_t>(features + 16 * k) : 0;
      registers[half + 2] = there ? load_vector<uint32_t>(features + 16 * k + 8) : 0;
    }
#pragma unroll
    for (int k = 0; k < kHeldValues; ++k) {
#pragma unroll
      for (int right = 0; right < 2; ++right) {
        const int column = 16 * k + 8 * right + 2 * t;
        value[k].registers[half + 2 * right] =
            there && column < tokens.value_columns ? load_vector<uint32_t>(values + column) : 0;
      }
    }
  }
  // 3. Tile by tile: scores and V dO^T, from both w and dS; dV += w^T dO, dphi_k += dS^T phi_q.
  float key_sums[1][F / 8][4] = {}, value_sums[1][V / 8][4] = {};
  if (goes_on) {
    load_begins<F, V>(params, gradients, begins,
                      key_scales_of<T>(params, tokens, rows, bk, value_head), bk, warp_key + g,
                      keys.logit_sums, key_sums[0], value_sums[0]);
  }

  for (int step = 0; step < steps; ++step) {
    Shared<unsigned char> stage = shared + step % kStages * L::kStage;
    cp_async_wait<0>();
    __syncthreads();  // the tile is here, and nobody reads the other stage
    if (step + 1 < steps) copy(step + 1);
    const uint32_t base = shared_address(stage);
    Shared<const float> normalizers = shared_cast<float>(stage + L::kNormalizer);
    Shared<const float> deltas = shared_cast<float>(stage + L::kDelta);
    const int64_t h = key_head * group + step / tiles;
    const int64_t i0 = int64_t{first_tile + step % tiles} * kStep;
    const TileVisibility<kPairs> visible(params, b, h, i0, j0);
#pragma unroll 1
    for (int chunk = 0; chunk < kStep / 16; ++chunk) {
      float s[1][2][4] = {}, x[1][2][4];
      QueryColumns queries;
      load_columns(normalizers, chunk, queries.normalizer);
      load_columns(deltas, chunk, queries.delta);
      if constexpr (kPairs == Pairs::kGeneral) {
        load_columns(shared_cast<float>(stage + L::kLow), chunk, queries.low);
      }
      keys.begin(x[0], queries);
      multiply_by_columns<Half, F / 16>(
          s,
          [&](int, int k) {
            if constexpr (L::kHoldsKeys) return phi_k[k];
            return load_fragment(own_key_places.at<2 * F>(0, k));
          },
          [&](int k) { return base + score_places.at<2 * F>(0, k) + chunk * (16 * 2 * F); });
      multiply_by_columns<T, V / 16>(
          x,
          [&](int, int k) {
            if constexpr (L::kHoldsValue) return value[k];
            return load_fragment(own_value_places.at<2 * V>(0, k));
          },
          [&](int k) { return base + gradient_places.at<2 * V>(0, k) + chunk * (16 * 2 * V); });
      const PairPlaces<kPairs, true> pairs(params, visible, b * params.H + h, i0, j0, chunk * 16,
                                           warp * 16);
      Fragment weights[1], products[1];
      keys.meet(s[0], x[0], pairs, queries, norm, eps, kept, weights[0], products[0]);
      rejoin_after<kPairs>();
      multiply_by_rows<T>(value_sums, weights, [&](int n) {
        return base + output_places.at<2 * V>(0, n) + chunk * (16 * 2 * V);
      });
      multiply_by_rows<Half>(key_sums, products, [&](int n) {
        return base + query_places.at<2 * F>(0, n) + chunk * (16 * 2 * F);
      });
    }
  }

  // 4. Rows of the results.
  store_key_gradients<F, V>(
      params, hidden_keys(params, logits, bk, warp_key + g), gradients,
      key_scales_of<T>(params, tokens, rows, bk, value_head), b, key_head, warp_key + g,
      keys.logit_sums, [&](int half, int n, int c) { return key_sums[0][n][2 * half + c]; },
      [&](int half, int n, int c) { return value_sums[0][n][2 * half + c]; });
}

}  // namespace

const char* folded_key_gradients(const AttentionBackwardParams& params, Stream stream,
                                 const FoldedTokens& tokens, const FoldedRows& rows,
                                 const float* logits, const FoldedGradients& gradients,
                                 const GradientBegins& begins, bool general_alone) {
  return launch_sizes(params, [&]<typename T, int F, int V>() {
    return launch_forms(params, [&]<Pairs kPairs>() -> const char* {
      if (kPairs != Pairs::kGeneral && general_alone) return nullptr;
      const auto blocks =
          static_cast<unsigned>(params.B * params.key_heads * ceil_div(params.S, kStep));
      return launch(folded_key_kernel<T, F, V, kPairs>, dim3(blocks), dim3(kFoldedThreads),
                    KeyLayout<F, V, kPairs>::kBytes, stream, params, tokens, rows, logits,
                    gradients, begins);
    });
  });
}

}  // namespace ikattn::cuda
