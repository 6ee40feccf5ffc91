// Writes the mask of dropout as a tensor; the other kernels form it where they need it.
#include "attention/cuda/cuda_cores/tile_product.h"
#include "support/exported.h"

namespace ikattn::cuda {
namespace {

// keep [BH, L, S]; a block owns 64 x 64 of one head.
__global__ void __launch_bounds__(kThreads, 1)
    keep_mask_kernel(AttentionParams params, uint8_t* keep) {
  const ThreadTile at;
  const int64_t row_blocks = (params.L + kTile - 1) / kTile;
  const int64_t key_blocks = (params.S + kTile - 1) / kTile;
  int64_t index = blockIdx.x;
  const int64_t j0 = index % key_blocks * kTile;
  index /= key_blocks;
  const int64_t i0 = index % row_blocks * kTile, bh = index / row_blocks;
  const Dropout dropout(params, bh, i0 + at.row_lane / 4 * 16, j0 + at.column_lane / 4 * 16,
                        at.row_lane % 4, at.column_lane % 4, true);
#pragma unroll
  for (int r = 0; r < kPerThread; ++r) {
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) {
      const int64_t i = i0 + at.row(r), j = j0 + at.column(c);
      if (i < params.L && j < params.S)
        keep[(bh * params.L + i) * params.S + j] = dropout.keeps(r, c);
    }
  }
}

}  // namespace

IKATTN_EXPORTED const char* dropout_keep_mask(const AttentionParams& params, uint8_t* keep,
                                              Stream stream) {
  const int64_t tiles = params.B * params.H * ceil_div(params.L, kTile) * ceil_div(params.S, kTile);
  return launch(keep_mask_kernel, dim3(static_cast<unsigned>(tiles)), dim3(kThreads), 0, stream,
                params, keep);
}

}  // namespace ikattn::cuda
