// The key side of the backward with scores of integers of 8 bits (Int8Features), by mma.sync:
// grad_phi_k, grad_value and the gradients of the logits, of heads in the folded form. As
// key_gradients.cu, but that a tile has its queries' features twice, as integers, which scores are
// made of, and in Half, of which grad_phi_k is a sum. So tiles are of 32 queries: two of them, and
// with 64 columns of the value two blocks, fit the shared memory of small GPUs.
#include "attention/cuda/tensor_cores/int8_pairs.h"
#include "attention/cuda/tensor_cores/own_keys.h"

namespace ikattn::cuda {
namespace {

template <int V>
struct Int8KeyLayout {
  static constexpr uint32_t kFeatures = kInt8Step * kInt8RowBytes;  // behind the integers
  static constexpr uint32_t kGradients = kFeatures + kInt8Step * 2 * Int8Features::kColumns;
  static constexpr uint32_t kNumbers = kGradients + kInt8Step * 2 * V;
  static constexpr uint32_t kStage = kNumbers + 2 * kInt8Step * 4;
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
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  const KeyBlock at(params, kStep, params.is_causal, blockIdx.x);
  const int64_t bk = at.bk, j0 = at.j0, b = at.b, j = j0 + warp * 16 + g;
  if (is_of_other_form<kPairs>(tokens.state[bk])) return;  // the whole block

  // 1. The block's values, where registers do not hold them, and the first tile of queries are on
  //    their way.
  const QueryTiles<kInt8Step> tiles(params, at);
  const int steps = tiles.steps();
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const QueryCopy<L, BFloat16, F, V, kPairs, kInt8Step> copy(params, tokens, rows, tiles, b);
  const RowCopy<kInt8Words> integer_rows(kInt8Words, kInt8Words);
  const auto begin = [&](int step) {
    const uint32_t base = shared_address(shared + step % kStages * L::kStage);
    integer_rows.template begin<kInt8Step>(
        base, integer_rows.source(int8_row(tokens.int8.phi_q, copy.row(step))),
        remaining_of(params.L, tiles.first_query(step)));
    copy(base, step);
  };
  const int64_t value_stride = tokens.value.stride[2];
  OwnRows<BFloat16, V, L::kHoldsValue> own_values(
      value_rows<BFloat16>(params, tokens, b, tiles.first_head) + j0 * value_stride, value_stride,
      tokens.value_columns, remaining_of(params.S, j0), shared_address(shared) + L::kValue);
  if (steps > 0) {
    own_values.begin();
    begin(0);
  }
  const FragmentPlaces score_places = FragmentPlaces::of_columns(0, kInt8RowBytes);

  // 2. The warp's keys, all their features and values, as A fragments.
  const int64_t value_head = b * params.G + at.value_head;
  const float kept = static_cast<float>(dropout_rescale(params.dropout_threshold));
  Fragment phi_k[1][kInt8Fragments];
  load_rows<kInt8Fragments>(phi_k[0], int8_row(tokens.int8.phi_k, bk * params.S), kInt8Words,
                            kInt8Words, j0 + warp * 16, params.S);
  own_values.load();
  KeySums<BFloat16, F, V, kPairs> sums(L::kFeatures, L::kGradients);
  sums.keys.load(params, tokens, bk, j,
                 key_scales_of<BFloat16>(params, tokens, rows, bk, value_head).fit);
  float of_integers[2] = {};
  for_keys(params, j, [&](int half, int64_t key) {
    of_integers[half] = tokens.scales[bk * params.S + key] * kScoreOfIntegers;
  });

  // 3. Tile by tile: scores and V dO^T, from both w and dS; dV += w^T dO, dphi_k += dS^T phi_q.
  for (int step = 0; step < steps; ++step) {
    Shared<unsigned char> stage = shared + step % kStages * L::kStage;
    cp_async_wait<0>();
    __syncthreads();  // the tile is here, and nobody reads the other stage
    if (step + 1 < steps) begin(step + 1);
    const uint32_t base = shared_address(stage);
    Shared<const float> numbers = shared_cast<float>(stage + L::kNumbers);
    const int64_t h = tiles.head(step), i0 = tiles.first_query(step);
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
      const QueryColumns queries = load_queries<kPairs, kInt8Step>(numbers, chunk);
      sums.keys.begin(x[0], queries);
      sums.multiply_values(x, own_values, base, chunk);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        s[i / 4][i % 4] = integer_of(scores[0][i / 4][i % 4]) * of_integers[i % 4 / 2];
      }
      const PairPlaces<kPairs, true> pairs(params, visible, b * params.H + h, i0, j0, chunk * 16,
                                           warp * 16);
      sums.add(s, x[0], pairs, queries, 0, 0, kept, base, chunk);
    }
  }

  // 4. Rows of the results.
  sums.store(params, logits, gradients,
             key_scales_of<BFloat16>(params, tokens, rows, bk, value_head), at);
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
