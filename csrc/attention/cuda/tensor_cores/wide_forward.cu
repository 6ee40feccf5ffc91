// The forward pass on tensor cores for wide rows: a block owns 64 queries and 128 columns of the
// value.
#include "attention/cuda/tensor_cores/epilogue_forward.h"
#include "attention/cuda/tensor_cores/forward_pairs.h"
#include "attention/cuda/tensor_cores/wide_tiles.h"

namespace ikattn::cuda {
namespace {

// blockIdx.y: the slice of the value.
template <typename T, Pairs kPairs>
__global__ void __launch_bounds__(kFoldedThreads, 2)
    wide_forward_kernel(AttentionParams params, FoldedTokens tokens, Parts parts) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
  const int blocks = static_cast<int>(gridDim.x) / parts.count;
  const int part = static_cast<int>(blockIdx.x) / blocks;
  const QueryBlock at(params, kStep, blockIdx.x % blocks);
  const int64_t bh = at.bh, i0 = at.i0, bk = at.bk;
  const uint32_t state = tokens.forms.state[bk];
  if (is_of_other_form<kPairs>(state)) return;  // the whole block

  const int width = static_cast<int>(padded_columns(2 * params.M)), features = slices_of(width);
  const int own_slice = static_cast<int>(blockIdx.y);
  const Half* phi_q = tokens.phi_q + (bh * params.L + i0) * width;
  const Half* phi_k = tokens.phi_k + bk * params.S * width;
  const T* values = value_rows<T>(params, tokens, at.b, at.h);
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  // The last slice of a tile is that of its values.
  const auto begin = [&](int tile, int slice, uint32_t stage) {
    const int64_t j0 = tile * int64_t{kStep};
    const int count = remaining_of(params.S, j0);
    if (slice == features) {
      const int64_t stride = tokens.value.stride[2];
      copy_slice(stage + WideLayout::kRight, values + j0 * stride, stride, tokens.value_columns,
                 own_slice, count);
      return;
    }
    copy_slice(stage, phi_q, width, width, slice, remaining_of(params.L, i0));
    copy_slice(stage + WideLayout::kRight, phi_k + j0 * width, width, width, slice, count);
    if (slice > 0) return;
    const int64_t first = bk * padded_tokens(params.S) + j0;
    copy_numbers(base + WideLayout::numbers_of(tile),
                 {tokens.forms.terms + first, tokens.forms.lows + first});
  };

  constexpr bool kRolls = kDrops<kPairs>;
  const SliceProducts products;
  TileSums s;
  float output[1][kSlice / 8][4] = {};
  ForwardRows<T, kPairs> rows;
  const int64_t warp_row = i0 + warp * 16;
  const GeneralScales& scales = tokens.forms.general;
  const TileRange tiles(params, at, kStep, part, parts.count);
  pass_along(base, tiles, features + 1, begin, [&](int tile, int slice, uint32_t stage) {
    if (slice < features) {
      if (slice == 0) clear(s);
      products.add_slice<Half>(s, stage);
      return;
    }
    if ((state & kUnclean) != 0) {
      clean_values<T, kStep * kSlice>(shared + (stage - base + WideLayout::kRight));
      __syncthreads();
    }
    Shared<const float> terms = shared_cast<float>(shared + WideLayout::numbers_of(tile));
    const int64_t j0 = tile * int64_t{kStep};
    const TileVisibility<kPairs> visible(params, at.b, at.h, i0, j0);
#pragma unroll(kRolls ? 1 : 4)
    for (int chunk = 0; chunk < kStep / 16; ++chunk) {
      const int held = held_at<kRolls>(chunk);
      const FragmentPairs<kPairs> pairs(params, visible, bh, i0, j0, warp * 16, chunk * 16);
      const Fragment weights[1] = {rows.weigh(s[held], pairs, load_keys<kPairs>(terms, chunk),
                                              scales, (state & kFew) != 0, output[0])};
      rejoin_after<kPairs>();
      products.add_pairs<T>(output, weights, stage, chunk);
      pass_by<kRolls>(s);
    }
  });

  const float output_scale = static_cast<float>(dropout_rescale(params.dropout_threshold)) /
                             value_scale_of(tokens, value_head_of(params, at.b, at.h));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = sum_of_lanes<4>(rows.sums[half]);
    const float rounding = sum_of_lanes<4>(rows.roundings[half]);
    const int64_t i = warp_row + g + 8 * half;
    if (i >= params.L) continue;
    store_row<T, kSlice, kPairs == Pairs::kGeneral>(
        params, tokens, parts, part, at, i, own_slice * kSlice, sum, rounding, rows.reference(half),
        output_scale, [&](int n, int c) { return output[0][n][2 * half + c]; });
  }
}

}  // namespace

const char* wide_forward(const AttentionParams& params, Stream stream, const FoldedTokens& tokens,
                         const Parts& parts) {
  return launch_type(params, [&]<typename T>() {
    const int64_t blocks = params.B * params.H * ceil_div(params.L, kStep);
    const int slices = slices_of(params.d_v);
    return launch_forms(params, [&]<Pairs kPairs>() {
      return launch(
          wide_forward_kernel<T, kPairs>,
          dim3(static_cast<unsigned>(blocks * parts.count), static_cast<unsigned>(slices)),
          dim3(kFoldedThreads), WideLayout::kBytes, stream, params, tokens, parts);
    });
  });
}

}  // namespace ikattn::cuda
