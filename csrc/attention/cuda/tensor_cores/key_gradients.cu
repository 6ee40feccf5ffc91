// The tensor-core backward's key side: grad_phi_k, grad_value and the gradients of the logits. A
// block owns keys and passes along the queries of all heads that share them.
#include "attention/cuda/tensor_cores/initial_sums.h"
#include "attention/cuda/tensor_cores/own_keys.h"

namespace ikattn::cuda {
namespace {

template <int F, int V, Pairs kPairs>
struct KeyLayout {
  static constexpr uint32_t kFeatures = 0, kGradients = kStep * 2 * F;
  static constexpr uint32_t kNumbers = kGradients + kStep * 2 * V;
  static constexpr uint32_t kStage = kNumbers + kStep * 4 * (kPairs == Pairs::kGeneral ? 3 : 2);
  // The block's own values, and keys, lie behind the stages where the registers do not hold them.
  static constexpr bool kHoldsValue = F + V < 192;
  static constexpr bool kHoldsKeys = kHoldsValue || (F + V == 192 && !kDrops<kPairs>);
  static constexpr uint32_t kValue = kStages * kStage;
  static constexpr uint32_t kKeys = kValue + (kHoldsValue ? 0 : kStep * 2 * V);
  static constexpr int64_t kBytes = kKeys + (kHoldsKeys ? 0 : kStep * 2 * F);
};

// Loads the sums with which a thread's two keys, j0 and 8 further on, begin.
template <typename T, int F, int V, Pairs kPairs>
__device__ __forceinline__ void load_initial_sums(const AttentionBackwardParams& params,
                                                  const FoldedGradients& gradients,
                                                  const InitialGradients& initial,
                                                  const KeyScales& scales, int64_t bk, int64_t j0,
                                                  KeySums<T, F, V, kPairs>& sums) {
  for_keys(params, j0, [&](int half, int64_t j) {
    const int64_t key = bk * params.S + j;
    // Lanes are added up.
    if (threadIdx.x % 4 == 0) sums.keys.logit_sums[half] = gradients.logits[key] / scales.logit;
    for_initial_features<F>(gradients.phi_k, params.B * params.key_heads, bk, params.S, j,
                            scales.features,
                            [&](int n, int c, float x) { sums.features[0][n][2 * half + c] = x; });
    if (initial.value == nullptr) return;
    for_pairs<V>([&](int column, int n) {
      const float2 two = load_vector<float2>(initial.value + key * V + column);
      sums.values[0][n][2 * half] = two.x / scales.value;
      sums.values[0][n][2 * half + 1] = two.y / scales.value;
    });
  });
}

// A warp owns 16 keys, rows of S^T = phi_k' phi_q^T and dP^T = V dO^T, so that both are A fragments
// of the sums without a transposition.
template <typename T, int F, int V, Pairs kPairs>
__global__ void __launch_bounds__(kFoldedThreads, 2)
    folded_key_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows,
                      const float* logits, FoldedGradients gradients, InitialGradients initial) {
  using L = KeyLayout<F, V, kPairs>;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  const KeyBlock at(params, kStep, params.is_causal, blockIdx.x);
  const int64_t bk = at.bk, j0 = at.j0, b = at.b, j = j0 + warp * 16 + g;
  if (is_of_other_form<kPairs>(tokens.forms.state[bk])) return;  // the whole block
  if (kPairs == Pairs::kAll && is_without_pairs(tokens, bk)) return;

  // 1. The block's keys and values, where registers do not hold them, and the first tile of queries
  //    are on their way.
  QueryTiles<kStep> tiles(params, at);
  const bool goes_on = kGoesOn<V, kPairs> && initial.has_keys(tokens, at);
  if (goes_on) tiles.count = min(tiles.count, initial.end_of_queries(at) / kStep - tiles.first);
  const int steps = tiles.steps();
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const QueryCopy<L, T, F, V, kPairs, kStep> copy(params, tokens, rows, tiles, b);
  const int64_t value_stride = tokens.value.stride[2];
  OwnRows<Half, F, L::kHoldsKeys> own_keys(tokens.phi_k + (bk * params.S + j0) * F, F, F,
                                           remaining_of(params.S, j0),
                                           shared_address(shared) + L::kKeys);
  OwnRows<T, V, L::kHoldsValue> own_values(
      value_rows<T>(params, tokens, b, tiles.first_head) + j0 * value_stride, value_stride,
      tokens.value_columns, remaining_of(params.S, j0), shared_address(shared) + L::kValue);
  if (steps > 0) {
    own_keys.begin();
    own_values.begin();
    copy(shared_address(shared), 0);
  }
  const FragmentAddresses score_places = FragmentAddresses::of_columns(0, 2 * F);

  // 2. The warp's keys, all their features and values, as A fragments, and what sums begin with.
  const int64_t value_head = b * params.G + at.value_head;
  const float dropout_scale = static_cast<float>(dropout_rescale(params.dropout_threshold));
  const float norm = 1 / static_cast<float>(4 * params.M), eps = static_cast<float>(params.eps);
  KeySums<T, F, V, kPairs> sums(L::kFeatures, L::kGradients);
  sums.keys.load(params, tokens, bk, j, key_scales_of<T>(params, tokens, rows, bk, value_head).fit);
  own_keys.load();
  own_values.load();
  if (goes_on) {
    load_initial_sums(params, gradients, initial,
                      key_scales_of<T>(params, tokens, rows, bk, value_head), bk, j, sums);
  }

  // 3. Tile by tile: scores and V dO^T, from both w and dS; dV += w^T dO, dphi_k += dS^T phi_q.
  for (int step = 0; step < steps; ++step) {
    Shared<unsigned char> stage = shared + step % kStages * L::kStage;
    cp_async_wait<0>();
    __syncthreads();  // the tile is here, and nobody reads the other stage
    if (step + 1 < steps) copy(shared_address(shared + (step + 1) % kStages * L::kStage), step + 1);
    const uint32_t base = shared_address(stage);
    Shared<const float> numbers = shared_cast<float>(stage + L::kNumbers);
    const int64_t h = tiles.head(step), i0 = tiles.first_query(step);
    const TileVisibility<kPairs> visible(params, b, h, i0, j0);
#pragma unroll 1
    for (int chunk = 0; chunk < kStep / 16; ++chunk) {
      float s[1][2][4] = {}, x[1][2][4];
      const QueryColumns queries = load_queries<kPairs, kStep>(numbers, chunk);
      sums.keys.begin(x[0], queries);
      multiply_by_columns<Half, F / 16>(s, own_keys, [&](int k) {
        return base + score_places.at<2 * F>(0, k) + chunk * (16 * 2 * F);
      });
      sums.multiply_values(x, own_values, base, chunk);
      const FragmentPairs<kPairs, true> pairs(params, visible, b * params.H + h, i0, j0, chunk * 16,
                                              warp * 16);
      sums.add(s[0], x[0], pairs, queries, norm, eps, dropout_scale, base, chunk);
    }
  }

  // 4. Rows of the results.
  sums.store(params, logits, gradients, key_scales_of<T>(params, tokens, rows, bk, value_head), at);
}

}  // namespace

const char* folded_key_gradients(const AttentionBackwardParams& params, Stream stream,
                                 const FoldedTokens& tokens, const FoldedRows& rows,
                                 const float* logits, const FoldedGradients& gradients,
                                 const InitialGradients& initial, bool general_alone) {
  return launch_sizes(params, [&]<typename T, int F, int V>() {
    return launch_forms(params, [&]<Pairs kPairs>() -> const char* {
      if (kPairs != Pairs::kGeneral && general_alone) return nullptr;
      const auto blocks =
          static_cast<unsigned>(params.B * params.key_heads * ceil_div(params.S, kStep));
      return launch(folded_key_kernel<T, F, V, kPairs>, dim3(blocks), dim3(kFoldedThreads),
                    KeyLayout<F, V, kPairs>::kBytes, stream, params, tokens, rows, logits,
                    gradients, initial);
    });
  });
}

}  // namespace ikattn::cuda
