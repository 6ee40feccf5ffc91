// Masks of pairs as bits, as the kernels of warpgroups read them (PairMask).
#include "attention/cuda/hopper/pairs.h"

namespace ikattn::cuda {
namespace {

// Where a mask [batches, heads, rows, columns] lies, and its blocks of 16 rows.
struct MaskPlace {
  const uint8_t* data;
  int64_t batch, head, row, column;  // strides
  int64_t rows, columns, row_blocks;
  int heads;  // that differ
};

// A warp has a block of 16 rows and 64 columns, a thread its 32 pairs.
__global__ void __launch_bounds__(256, 2)
    pair_mask_kernel(MaskPlace mask, int column_blocks, int64_t blocks, uint32_t* words) {
  const int64_t index = int64_t{blockIdx.x} * 8 + threadIdx.x / 32;
  if (index >= blocks) return;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t of_rows = index / column_blocks, head = of_rows / mask.row_blocks;
  const int64_t row = of_rows % mask.row_blocks * 16 + g;
  const int64_t column = index % column_blocks * 64 + 2 * t;
  const uint8_t* const from =
      mask.data + head / mask.heads * mask.batch + head % mask.heads * mask.head;
  uint32_t word = 0;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int64_t i = row + 8 * (c / 2), j = column + n * 8 + c % 2;
      const bool sees =
          i < mask.rows && j < mask.columns && from[i * mask.row + j * mask.column] != 0;
      word |= static_cast<uint32_t>(sees) << bit_of(n, c);
    }
  }
  words[index * 32 + lane] = word;
}

}  // namespace

const char* make_pair_mask(const AttentionParams& params, const DeviceExecutor& executor,
                           bool turned, PairMask& mask) {
  mask = {};
  mask.kept = static_cast<float>(dropout_rescale(params.dropout_threshold));
  if (params.mask.type != ElementType::kBool) return nullptr;
  const int64_t* stride = params.mask.stride;
  const int64_t batches = stride[0] == 0 ? 1 : params.B, heads = stride[1] == 0 ? 1 : params.H;
  MaskPlace place = {static_cast<const uint8_t*>(params.mask.data),
                     stride[0],
                     stride[1],
                     stride[2],
                     stride[3],
                     params.L,
                     params.S,
                     0,
                     static_cast<int>(heads)};
  if (turned) {
    std::swap(place.row, place.column);
    std::swap(place.rows, place.columns);
  }
  place.row_blocks = padded_tokens(place.rows) / 16;
  mask.column_blocks = static_cast<int>(padded_tokens(place.columns) / 64);
  const int64_t of_head = place.row_blocks * mask.column_blocks;
  uint32_t* words = executor.take<uint32_t>(batches * heads * of_head * 32);
  mask.words = words;
  mask.batch = batches == 1 ? 0 : heads * of_head * 32;
  mask.head = heads == 1 ? 0 : of_head * 32;
  const int64_t blocks = batches * heads * of_head;
  return launch(pair_mask_kernel, dim3(static_cast<unsigned>(ceil_div(blocks, 8))), dim3(256), 0,
                executor.stream, place, mask.column_blocks, blocks, words);
}

}  // namespace ikattn::cuda
