// Operands of the pairs' kernels: masks as bits, and factors as right operands of products.
#include "contributions/cuda/streamed/fragments.h"

namespace ikattn::cuda {
namespace {

constexpr int kMaskWarps = 4;

__global__ void __launch_bounds__(kMaskWarps * 32) mask_word_kernel(MaskParams params) {
  const int lane = threadIdx.x % 32;
  const int64_t words = (params.S + kMaskKeys - 1) / kMaskKeys;
  const int64_t word = int64_t{blockIdx.x} * kMaskWarps + threadIdx.x / 32;
  const int64_t rows = params.B * params.heads * params.L, row = min(word / words, rows - 1);
  const int64_t head = row / params.L, b = head / params.heads, h = head % params.heads;
  const int64_t i = row % params.L, j = word % words * kMaskKeys + lane;
  const int64_t* stride = params.mask.stride;
  const bool seen =
      j < params.S &&
      static_cast<const uint8_t*>(
          params.mask.data)[b * stride[0] + i * stride[1] + j * stride[2] + h * stride[3]] != 0;
  const unsigned bits = __ballot_sync(0xffffffffu, seen);
  if (lane == 0 && word < rows * words) params.words[word] = bits;
}

const char* mask_words(const MaskParams& params, Stream stream) {
  const int64_t words =
      params.B * params.heads * params.L * ((params.S + kMaskKeys - 1) / kMaskKeys);
  return launch(mask_word_kernel,
                dim3(static_cast<unsigned>((words + kMaskWarps - 1) / kMaskWarps)),
                dim3(kMaskWarps * 32), 0, stream, params);
}

constexpr int kParts = 16;  // threads that share a key: each two lanes of a tile

// Returns the larger number; NaN stays.
__device__ __forceinline__ float larger(float largest, float x) {
  return x > largest || x != x ? x : largest;
}

// A thread is a part of a key, whose factor it reads beside its neighbours'.
__global__ void __launch_bounds__(kFactorBlock* kParts) fragment_kernel(FragmentParams params) {
  IKATTN_SHARED(float, parts, kParts* kFactorBlock);
  const int own_key = threadIdx.x % kFactorBlock, part = threadIdx.x / kFactorBlock;
  const int H = static_cast<int>(params.H), entries = static_cast<int>(triangle(H));
  const int64_t blocks = (params.S + kFactorBlock - 1) / kFactorBlock;
  const int64_t b = blockIdx.x / blocks, j = blockIdx.x % blocks * kFactorBlock + own_key;
  const float* factors = params.factors + int64_t{blockIdx.x} * entries * kFactorBlock + own_key;
  float largest = 0;
  for (int entry = part; entry < entries; entry += kParts) {
    largest = larger(largest, fabsf(factors[int64_t{entry} * kFactorBlock]));
  }
  parts[part * kFactorBlock + own_key] = largest;
  __syncthreads();
  for (int other = 0; other < kParts; ++other) {
    largest = larger(largest, parts[other * kFactorBlock + own_key]);
  }
  if (j >= params.S) return;
  const FactorScale scale(largest);
  if (part == 0) params.units[b * params.S + j] = scale.unit;
  const int tiles = static_cast<int>(head_tiles(H)), splits = params.is_split ? 2 : 1;
  const int count = static_cast<int>(fragment_tiles(tiles));
  uint32_t* fragments = params.fragments + (b * params.S + j) * splits * count * 64;
  const auto factor = [&](int entry) { return factors[int64_t{entry} * kFactorBlock]; };
  int tile = 0;
  for (int n = 0; n < 2 * tiles; ++n) {
    const int first = params.is_reversed ? 0 : n / 2, end = params.is_reversed ? n / 2 + 1 : tiles;
    for (int k = first; k < end; ++k, ++tile) {
      uint2 own[4];  // registers of a lane and its right neighbour
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        own[i] =
            fragment_register(scale, H, params.is_reversed, n, k, 2 * part + i / 2, i % 2, factor);
      }
      uint32_t* to = fragments + tile * 64 + 4 * part;
      store_vector(to, make_uint4(own[0].x, own[1].x, own[2].x, own[3].x));
      if (!params.is_split) continue;
      store_vector(to + count * 64, make_uint4(own[0].y, own[1].y, own[2].y, own[3].y));
    }
  }
}

const char* factor_fragments(const FragmentParams& params, Stream stream) {
  const int64_t blocks = (params.S + kFactorBlock - 1) / kFactorBlock;
  return launch(fragment_kernel, dim3(static_cast<unsigned>(params.B * blocks)),
                dim3(kFactorBlock * kParts), 0, stream, params);
}

}  // namespace

const char* streamed_row_sums(const StreamedParams& params, Stream stream);
const char* streamed_pair_norms(const StreamedParams& params, Stream stream);
const char* streamed_weighed_values(const WeighedValueParams& params, Stream stream);
const char* streamed_pair_gradients(const StreamedGradientParams& params, Stream stream);
const char* streamed_score_gradients(const StreamedGradientParams& params, Stream stream);

const StreamedKernels streamed_kernels = {mask_words,
                                          factor_fragments,
                                          streamed_row_sums,
                                          streamed_pair_norms,
                                          streamed_weighed_values,
                                          streamed_pair_gradients,
                                          streamed_score_gradients};

}  // namespace ikattn::cuda
