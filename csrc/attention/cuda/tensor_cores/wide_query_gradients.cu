// The tensor-core backward's query side for wide rows: a block owns 64 queries and 128 features of
// grad_phi_q.
#include "attention/cuda/tensor_cores/backward_pairs.h"
#include "attention/cuda/tensor_cores/epilogue_backward.h"
#include "attention/cuda/tensor_cores/wide_tiles.h"

namespace ikattn::cuda {
namespace {

// blockIdx.y: the slice of the features.
template <typename T, Pairs kPairs>
__global__ void __launch_bounds__(kFoldedThreads, 2)
    wide_query_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows,
                      FeatureGradients grad_phi_q) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
  const QueryBlock at(params, kStep, blockIdx.x);
  const int64_t bh = at.bh, i0 = at.i0, bk = at.bk;
  const uint32_t state = tokens.forms.state[bk];
  if (is_of_other_form<kPairs>(state)) return;  // the whole block

  const int width = static_cast<int>(padded_columns(2 * params.M)), features = slices_of(width);
  const int columns = static_cast<int>(padded_columns(params.d_v)), of_values = slices_of(columns);
  const int own_slice = static_cast<int>(blockIdx.y);
  const Half* phi_q = tokens.phi_q + (bh * params.L + i0) * width;
  const T* gradients = static_cast<const T*>(rows.gradients) + (bh * params.L + i0) * columns;
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  // Slices of gradients and values, then those of features, the block's own last.
  const auto begin = [&](int tile, int slice, uint32_t stage) {
    const int64_t j0 = tile * int64_t{kStep};
    const int rows_left = remaining_of(params.L, i0), count = remaining_of(params.S, j0);
    if (slice < of_values) {
      const int64_t stride = tokens.value.stride[2];
      const T* values = value_rows<T>(params, tokens, at.b, at.h);
      copy_slice(stage, gradients, columns, columns, slice, rows_left);
      copy_slice(stage + WideLayout::kRight, values + j0 * stride, stride, tokens.value_columns,
                 slice, count);
    } else {
      const int feature_slice = (slice - of_values + own_slice + 1) % features;
      copy_slice(stage, phi_q, width, width, feature_slice, rows_left);
      copy_slice(stage + WideLayout::kRight, tokens.phi_k + (bk * params.S + j0) * width, width,
                 width, feature_slice, count);
    }
    if (kPairs != Pairs::kGeneral || slice > 0) return;
    const int64_t first = bk * padded_tokens(params.S) + j0;
    copy_numbers(base + WideLayout::numbers_of(tile),
                 {tokens.forms.terms + first, tokens.forms.lows + first});
  };

  constexpr bool kRolls = kDrops<kPairs>;
  const SliceProducts products;
  const int64_t warp_row = i0 + warp * 16;
  const float dropout_scale = static_cast<float>(dropout_rescale(params.dropout_threshold));
  QueryRows<kPairs> queries;
  queries.load(params, rows, bh, warp_row + g);
  TileSums s, x;
  float sums[1][kSlice / 8][4] = {};
  const int slices = of_values + features;
  pass_along(
      base, TileRange(params, at, kStep), slices, begin, [&](int tile, int slice, uint32_t stage) {
        if (slice == 0) {
          clear(s);
#pragma unroll
          for (int chunk = 0; chunk < kStep / 16; ++chunk) queries.begin(x[chunk]);
        }
        if (slice < of_values) {
          if ((state & kUnclean) != 0) {
            clean_values<T, kStep * kSlice>(shared + (stage - base + WideLayout::kRight));
            __syncthreads();
          }
          products.add_slice<T>(x, stage);
          return;
        }
        products.add_slice<Half>(s, stage);
        if (slice + 1 < slices) return;
        Shared<const float> terms = shared_cast<float>(shared + WideLayout::numbers_of(tile));
        const int64_t j0 = tile * int64_t{kStep};
        const TileVisibility<kPairs> visible(params, at.b, at.h, i0, j0);
#pragma unroll(kRolls ? 1 : 4)
        for (int chunk = 0; chunk < kStep / 16; ++chunk) {
          const int held = held_at<kRolls>(chunk);
          const FragmentPairs<kPairs> pairs(params, visible, bh, i0, j0, warp * 16, chunk * 16);
          KeyColumns keys;
          if constexpr (kPairs == Pairs::kGeneral) keys = load_keys<kPairs>(terms, chunk);
          const Fragment factors[1] = {
              queries.products_of(s[held], x[held], pairs, keys, dropout_scale)};
          rejoin_after<kPairs>();
          products.add_pairs<Half>(sums, factors, stage, chunk);
          pass_by<kRolls>(s);
          pass_by<kRolls>(x);
        }
      });

  const float units =
      gradient_scale_of(rows, bk) * value_scale_of(tokens, value_head_of(params, at.b, at.h));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Computed anew: no register holds it over the tiles.
    const int thread = static_cast<int>(unknown_to_compiler(threadIdx.x));
    const int64_t i = at.i0 + thread / 32 * 16 + thread % 32 / 4 + 8 * half;
    store_query_gradients<kSlice, kPairs == Pairs::kGeneral>(
        params, normalizer_of<kPairs == Pairs::kGeneral>(params, rows, at, i), at, i,
        own_slice * kSlice, queries.fit[half], units,
        [&](int n, int c) { return sums[0][n][2 * half + c]; }, grad_phi_q);
  }
}

}  // namespace

const char* wide_query_gradients(const AttentionBackwardParams& params, Stream stream,
                                 const FoldedTokens& tokens, const FoldedRows& rows,
                                 const FeatureGradients& grad_phi_q) {
  return launch_type(params, [&]<typename T>() {
    const dim3 blocks(static_cast<unsigned>(params.B * params.H * ceil_div(params.L, kStep)),
                      static_cast<unsigned>(slices_of(2 * params.M)));
    return launch_forms(params, [&]<Pairs kPairs>() {
      return launch(wide_query_kernel<T, kPairs>, blocks, dim3(kFoldedThreads), WideLayout::kBytes,
                    stream, params, tokens, rows, grad_phi_q);
    });
  });
}

}  // namespace ikattn::cuda
