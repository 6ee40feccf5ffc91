// The tensor-core backward's key side for wide rows: a block owns 64 keys and either 128 features
// of grad_phi_k or 128 columns of grad_value, and passes along the queries of all heads that share
// the keys. Rows are keys.
#include "attention/cuda/tensor_cores/own_keys.h"
#include "attention/cuda/tensor_cores/wide_tiles.h"

namespace ikattn::cuda {
namespace {

// Copies of a block, slice by slice: slices of values and gradients, then of features, the block's
// own last; for grad_value, slices of features and then the block's own of the gradients.
template <typename T, bool kOfValues>
struct WideKeyCopy {
  const AttentionBackwardParams& params;
  const FoldedTokens& tokens;
  const FoldedRows& rows;
  const KeyBlock& at;
  QueryTiles<kStep> tiles;
  uint32_t base;  // begin of shared memory
  int own_slice;
  // Columns of rows of features and of grad_output, and slices of these.
  int width, features, columns, of_values;
  const Half* phi_k;  // features of the block's keys
  const T* values;

  __device__ __forceinline__ WideKeyCopy(const AttentionBackwardParams& params,
                                         const FoldedTokens& tokens, const FoldedRows& rows,
                                         const KeyBlock& at, uint32_t base, int own_slice)
      : params(params),
        tokens(tokens),
        rows(rows),
        at(at),
        tiles(params, at),
        base(base),
        own_slice(own_slice),
        width(static_cast<int>(padded_columns(2 * params.M))),
        features(slices_of(width)),
        columns(static_cast<int>(padded_columns(params.d_v))),
        of_values(slices_of(columns)),
        phi_k(tokens.phi_k + (at.bk * params.S + at.j0) * width),
        values(value_rows<T>(params, tokens, at.b, at.key_head * at.group) +
               at.j0 * tokens.value.stride[2]) {}

  // Returns how many slices come before the features.
  __device__ __forceinline__ int before() const { return kOfValues ? 0 : of_values; }
  __device__ __forceinline__ int slices() const {
    return kOfValues ? features + 1 : of_values + features;
  }
  // Begins to copy a slice of a tile, with the first one its queries' numbers, too.
  __device__ __forceinline__ void operator()(int tile, int slice, uint32_t stage) const {
    const int64_t bh = int64_t{at.b} * params.H + tiles.head(tile);
    const int64_t i0 = tiles.first_query(tile);
    const int keys_left = remaining_of(params.S, at.j0), count = remaining_of(params.L, i0);
    const bool of_gradients = kOfValues ? slice == features : slice < before();
    if (of_gradients) {
      const T* from = static_cast<const T*>(rows.gradients) + (bh * params.L + i0) * columns;
      if constexpr (!kOfValues) {
        copy_slice(stage, values, tokens.value.stride[2], tokens.value_columns, slice, keys_left);
      }
      copy_slice(stage + WideLayout::kRight, from, columns, columns, kOfValues ? own_slice : slice,
                 count);
    } else {
      const int feature_slice = kOfValues ? slice : (slice - before() + own_slice + 1) % features;
      copy_slice(stage, phi_k, width, width, feature_slice, keys_left);
      copy_slice(stage + WideLayout::kRight, tokens.phi_q + (bh * params.L + i0) * width, width,
                 width, feature_slice, count);
    }
    if (slice > 0) return;
    const int64_t first = bh * padded_tokens(params.L) + i0;
    copy_numbers(base + WideLayout::numbers_of(tile),
                 {rows.normalizer + first, rows.delta + first, rows.low + first});
  }
};

// blockIdx.y: the slice of the features, or of the values; the first of the features makes the
// gradients of the logits, too.
template <typename T, Pairs kPairs, bool kOfValues>
__global__ void __launch_bounds__(kFoldedThreads, 2)
    wide_key_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows,
                    const float* logits, FoldedGradients gradients) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
  const KeyBlock at(params, kStep, params.is_causal, blockIdx.x);
  const int64_t bk = at.bk, j0 = at.j0;
  if (is_of_other_form<kPairs>(tokens.forms.state[bk])) return;  // the whole block

  // 1. Copies, and the numbers of the warp's keys.
  const int own_slice = static_cast<int>(blockIdx.y);
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  const WideKeyCopy<T, kOfValues> copy(params, tokens, rows, at, base, own_slice);
  const int64_t value_head = int64_t{at.b} * params.G + at.value_head, warp_key = j0 + warp * 16;
  const KeyScales scales = key_scales_of<T>(params, tokens, rows, bk, value_head);
  const float dropout_scale = static_cast<float>(dropout_rescale(params.dropout_threshold));
  const float norm = 1 / static_cast<float>(4 * params.M), eps = static_cast<float>(params.eps);
  KeyRows<T, kPairs> keys;
  keys.load(params, tokens, bk, warp_key + g, scales.fit);

  // 2. Tile by tile, slice by slice: scores and V dO^T; with the last slice their weights or dS,
  //    times the block's own slice.
  constexpr bool kRolls = !kOfValues || kDrops<kPairs>;
  const SliceProducts products;
  TileSums s, x;
  float sums[1][kSlice / 8][4] = {};
  const int slices = copy.slices();
  pass_along(base, TileRange(0, copy.tiles.steps()), slices, copy,
             [&](int tile, int slice, uint32_t stage) {
               Shared<const float> numbers =
                   shared_cast<float>(shared + WideLayout::numbers_of(tile));
               if (slice == 0) {
                 clear(s);  // x, of which grad_value has no use, the compiler leaves out there
#pragma unroll
                 for (int chunk = 0; chunk < kStep / 16; ++chunk) {
                   keys.begin(x[chunk], load_queries<kPairs, kStep>(numbers, chunk));
                 }
               }
               if (!kOfValues && slice < copy.before()) {
                 products.add_slice<T>(x, stage);
                 return;
               }
               if (!kOfValues || slice < copy.features) products.add_slice<Half>(s, stage);
               if (slice + 1 < slices) return;
               const int64_t h = copy.tiles.head(tile), i0 = copy.tiles.first_query(tile);
               const TileVisibility<kPairs> visible(params, at.b, h, i0, j0);
#pragma unroll(kRolls ? 1 : 4)
               for (int chunk = 0; chunk < kStep / 16; ++chunk) {
                 const int held = held_at<kRolls>(chunk);
                 const QueryColumns queries = load_queries<kPairs, kStep>(numbers, chunk);
                 const FragmentPairs<kPairs, true> pairs(params, visible, at.b * params.H + h, i0,
                                                         j0, chunk * 16, warp * 16);
                 Fragment weights[1], factors[1];
                 keys.meet(s[held], x[held], pairs, queries, norm, eps, dropout_scale, weights[0],
                           factors[0]);
                 rejoin_after<kPairs>();
                 if constexpr (kOfValues) {
                   products.add_pairs<T>(sums, weights, stage, chunk);
                 } else {
                   products.add_pairs<Half>(sums, factors, stage, chunk);
                 }
                 pass_by<kRolls>(s);
                 pass_by<kRolls>(x);
               }
             });

  // 3. Rows of the result.
  const int64_t j = warp_key + g;
  const HiddenKeys hidden = hidden_keys(params, logits, bk, j);
  const auto sum = [&](int half, int n, int c) { return sums[0][n][2 * half + c]; };
  if constexpr (kOfValues) {
    store_value_gradients<kSlice>(params, hidden, scales, at.b, at.key_head, j, own_slice * kSlice,
                                  sum);
  } else {
    store_feature_gradients<kSlice>(params, hidden, gradients, scales, bk, j, own_slice * kSlice,
                                    sum);
    const float sums_of_lanes[2] = {sum_of_lanes<4>(keys.logit_sums[0]),
                                    sum_of_lanes<4>(keys.logit_sums[1])};
    if (own_slice == 0) {
      store_logit_gradients(params, hidden, gradients, scales, bk, j, sums_of_lanes);
    }
  }
}

}  // namespace

const char* wide_key_gradients(const AttentionBackwardParams& params, Stream stream,
                               const FoldedTokens& tokens, const FoldedRows& rows,
                               const float* logits, const FoldedGradients& gradients) {
  return launch_type(params, [&]<typename T>() {
    return launch_forms(params, [&]<Pairs kPairs>() {
      const auto blocks =
          static_cast<unsigned>(params.B * params.key_heads * ceil_div(params.S, kStep));
      const auto queue = [&](auto kernel, int slices) {
        return launch(kernel, dim3(blocks, static_cast<unsigned>(slices)), dim3(kFoldedThreads),
                      WideLayout::kBytes, stream, params, tokens, rows, logits, gradients);
      };
      const char* error = queue(wide_key_kernel<T, kPairs, false>, slices_of(2 * params.M));
      if (error != nullptr || params.grad_value.type == ElementType::kNone) return error;
      return queue(wide_key_kernel<T, kPairs, true>, slices_of(params.d_v));
    });
  });
}

}  // namespace ikattn::cuda
