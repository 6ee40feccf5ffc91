// The key side of the backward with scores of integers of 8 bits (Int8Features), by mma.sync:
// grad_phi_k, grad_value and the gradients of the logits, of heads in the folded form. As
// key_gradients.cu, but that a tile has its queries' features twice, as integers, which scores are
// made of, and in Half, of which grad_phi_k is a sum. So tiles are of 32 queries: two of them, and
// with 64 columns of the value two blocks, fit the shared memory of small GPUs.
#include "attention/cuda/tensor_cores/backward_pairs.h"
#include "attention/cuda/tensor_cores/epilogue_backward.h"
#include "attention/cuda/tensor_cores/int8_pairs.h"

namespace ikattn::cuda {
namespace {

template <int V>
struct Int8KeyLayout {
  static constexpr uint32_t kHalves = kInt8Step * kInt8RowBytes;  // behind the integers
  static constexpr uint32_t kGradients = kHalves + kInt8Step * 2 * Int8Features::kColumns;
  static constexpr uint32_t kNormalizer = kGradients + kInt8Step * 2 * V;
  static constexpr uint32_t kDelta = kNormalizer + kInt8Step * 4;
  static constexpr uint32_t kStage = kDelta + kInt8Step * 4;
  // The block's own values lie behind the stages where the registers do not hold them.
  static constexpr bool kHoldsValue = V <= 64;
  static constexpr uint32_t kValue = kStages * kStage;
  static constexpr int64_t kBytes = kValue + (kHoldsValue ? 0 : kStep * 2 * V);
};

// A warp owns 16 keys, rows of S^T = phi_k phi_q^T and dP^T = V dO^T, so that both are A fragments
// of what is summed without being turned.
template <int V, Pairs kPairs>
__global__ void __launch_bounds__(kFoldedThreads, 2)
    int8_key_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows,
                    const float* logits, FoldedGradients gradients) {
  using L = Int8KeyLayout<V>;
  constexpr int F = Int8Features::kColumns;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const KeyBlock at(params, kStep, params.is_causal, blockIdx.x);
  const int64_t bk = at.bk, j0 = at.j0, b = at.b, key_head = at.key_head, group = at.group;
  if (is_of_other_form<kPairs>(tokens.state[bk])) return;  // the whole block

  // 1. The block's values, where registers do not hold them, and the first tile of queries are on
  //    their way.
  const int64_t padded = padded_tokens(params.L), first_query = int64_t{at.first_tile} * kStep;
  const int tiles = static_cast<int>((params.L - first_query + kInt8Step - 1) / kInt8Step);
  const int steps = at.tiles > 0 ? tiles * at.group : 0;
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const RowCopy<kInt8Words> integer_rows(kInt8Words, kInt8Words);
  const RowCopy<F> feature_rows(F, F);
  const RowCopy<V> gradient_rows(V, V);
  const auto copy = [&](int step) {
    const uint32_t base = shared_address(shared + step % kStages * L::kStage);
    const int64_t bh = b * params.H + key_head * group + step / tiles;
    const int64_t i0 = first_query + int64_t{step % tiles} * kInt8Step;
    const int64_t row = bh * params.L + i0;
    const int count = remaining_of(params.L, i0);
    integer_rows.template begin<kInt8Step>(
        base, integer_rows.source(int8_row(tokens.int8.phi_q, row)), count);
    feature_rows.template begin<kInt8Step>(base + L::kHalves,
                                           feature_rows.source(tokens.phi_q + row * F), count);
    gradient_rows.template begin<kInt8Step>(
        base + L::kGradients,
        gradient_rows.source(static_cast<const BFloat16*>(rows.gradients) + row * V), count);
    if (threadIdx.x < 2 * kInt8Step / 4) {
      const float* from = threadIdx.x < kInt8Step / 4 ? rows.normalizer : rows.delta;
      cp_async_16(base + L::kNormalizer + threadIdx.x * 16,
                  from + bh * padded + i0 + threadIdx.x % (kInt8Step / 4) * 4);
    }
    cp_async_commit();
  };
  const BFloat16* own_values = value_rows<BFloat16>(params, tokens, b, key_head * group);
  if (steps > 0) {
    if constexpr (!L::kHoldsValue) {
      const RowCopy<V> rows_of_value(tokens.value.stride[2], tokens.value_columns);
      rows_of_value.template begin<kStep>(
          shared_address(shared + L::kValue),
          rows_of_value.source(own_values + j0 * rows_of_value.stride), remaining_of(params.S, j0));
    }
    copy(0);
  }
  const FragmentPlaces own_value_places =
      FragmentPlaces::of_rows(shared_address(shared) + L::kValue + warp * 16 * (2 * V), 2 * V);
  const FragmentPlaces score_places = FragmentPlaces::of_columns(0, kInt8RowBytes);
  const FragmentPlaces gradient_places = FragmentPlaces::of_columns(L::kGradients, 2 * V);
  const FragmentPlaces query_places = FragmentPlaces::of_rows(L::kHalves, 2 * F);
  const FragmentPlaces output_places = FragmentPlaces::of_rows(L::kGradients, 2 * V);

  // 2. The warp's keys, all their features and values, as A fragments.
  const int64_t warp_key = j0 + warp * 16, value_head = b * params.G + at.value_head;
  const KeyScales key_scales = key_scales_of<BFloat16>(params, tokens, rows, bk, value_head);
  const float kept = static_cast<float>(dropout_rescale(params.dropout_threshold));
  Fragment phi_k[1][kInt8Fragments];
  load_int8_rows(phi_k[0], tokens.int8.phi_k + bk * params.S * F, warp_key, params.S);
  constexpr int kHeldValues = L::kHoldsValue ? V / 16 : 0;
  [[maybe_unused]] Fragment value[kHeldValues + 1];
  KeyRows<BFloat16, kPairs> keys;
  keys.load(params, tokens, bk, warp_key + g, key_scales.fit);
  float of_integers[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t j = warp_key + g + 8 * half;
    const bool there = j < params.S;
    of_integers[half] = there ? tokens.scales[bk * params.S + j] * kScoreOfIntegers : 0.0f;
#pragma unroll
    for (int k = 0; k < kHeldValues; ++k) {
#pragma unroll
      for (int right = 0; right < 2; ++right) {
        const int column = 16 * k + 8 * right + 2 * t;
        value[k].registers[half + 2 * right] =
            there && column < tokens.value_columns
                ? load_vector<uint32_t>(own_values + j * tokens.value.stride[2] + column)
                : 0;
      }
    }
  }
  // 3. Tile by tile: scores and V dO^T, from both w and dS; dV += w^T dO, dphi_k += dS^T phi_q.
  float key_sums[1][F / 8][4] = {}, value_sums[1][V / 8][4] = {};

  for (int step = 0; step < steps; ++step) {
    Shared<unsigned char> stage = shared + step % kStages * L::kStage;
    cp_async_wait<0>();
    __syncthreads();  // the tile is here, and nobody reads the other stage
    if (step + 1 < steps) copy(step + 1);
    const uint32_t base = shared_address(stage);
    Shared<const float> normalizers = shared_cast<float>(stage + L::kNormalizer);
    Shared<const float> deltas = shared_cast<float>(stage + L::kDelta);
    const int64_t h = key_head * group + step / tiles;
    const int64_t i0 = first_query + int64_t{step % tiles} * kInt8Step;
    const TileVisibility<kPairs> visible(params, b, h, i0, j0);
#pragma unroll 1
    for (int chunk = 0; chunk < kInt8Step / 16; ++chunk) {
      int32_t scores[1][2][4];
      multiply_int8(
          scores, [&](int m, int k) -> const Fragment& { return phi_k[m][k]; },
          [&](int k) {
            return base + score_places.at<kInt8RowBytes>(0, k) + chunk * (16 * kInt8RowBytes);
          });
      float s[2][4], x[1][2][4];
      QueryColumns queries;
      load_columns(normalizers, chunk, queries.normalizer);
      load_columns(deltas, chunk, queries.delta);
      keys.begin(x[0], queries);
      multiply_by_columns<BFloat16, V / 16>(
          x,
          [&](int, int k) {
            if constexpr (L::kHoldsValue) return value[k];
            return load_fragment(own_value_places.at<2 * V>(0, k));
          },
          [&](int k) { return base + gradient_places.at<2 * V>(0, k) + chunk * (16 * 2 * V); });
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        s[i / 4][i % 4] = integer_of(scores[0][i / 4][i % 4]) * of_integers[i % 4 / 2];
      }
      const PairPlaces<kPairs, true> pairs(params, visible, b * params.H + h, i0, j0, chunk * 16,
                                           warp * 16);
      Fragment weights[1], products[1];
      keys.meet(s, x[0], pairs, queries, 0, 0, kept, weights[0], products[0]);
      rejoin_after<kPairs>();
      multiply_by_rows<BFloat16>(value_sums, weights, [&](int n) {
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
      key_scales_of<BFloat16>(params, tokens, rows, bk, value_head), b, key_head, warp_key + g,
      keys.logit_sums, [&](int half, int n, int c) { return key_sums[0][n][2 * half + c]; },
      [&](int half, int n, int c) { return value_sums[0][n][2 * half + c]; });
}

}  // namespace

const char* int8_key_gradients(const AttentionBackwardParams& params, Stream stream,
                               const FoldedTokens& tokens, const FoldedRows& rows,
                               const float* logits, const FoldedGradients& gradients) {
  return launch_int8(params, [&]<int V, Pairs kPairs>() {
    const auto blocks =
        static_cast<unsigned>(params.B * params.key_heads * ceil_div(params.S, kStep));
    return launch(int8_key_kernel<V, kPairs>, dim3(blocks), dim3(kFoldedThreads),
                  Int8KeyLayout<V>::kBytes, stream, params, tokens, rows, logits, gradients);
  });
}

}  // namespace ikattn::cuda
