// Parts that the kernels on CUDA cores share: 64 x 64 tiles of scores, 256 threads of 4 x 4 pairs
// each.
//
// These kernels take every argument and any size, in float32 or float64. Rows are the axis that a
// block owns, columns the one it passes along: queries and keys in the forward, either way round in
// the backward.
//
// A thread's rows and columns are those of one dropout group, {2a, 2a+1, 2a+8, 2a+9} of a block of
// 16, so that one Philox call serves its sixteen pairs.
#pragma once

#include "attention/calls/offsets.h"
#include "attention/cuda/operands/math.h"
#include "support/cuda/warps.h"
#include "support/philox.h"

namespace ikattn::cuda {
namespace {

constexpr int kTile = 64;
constexpr int kThreads = 256;
constexpr int kPerThread = 4;
constexpr int kDepth = 16;         // inner columns of the products, at a time
constexpr int kPitch = kTile + 1;  // row pitch of tiles in shared memory
constexpr int kRowLanes = 16;      // threads of a row, neighbours

// The place of a thread in its tile.
struct ThreadTile {
  int row_lane, column_lane;  // 0..15

  __device__ ThreadTile() : row_lane(threadIdx.x / 16), column_lane(threadIdx.x % 16) {}
  __device__ __forceinline__ int row(int r) const { return member(row_lane, r); }
  __device__ __forceinline__ int column(int c) const { return member(column_lane, c); }
  __device__ static __forceinline__ int member(int lane, int index) {
    return lane / 4 * 16 + dropout_group_member(lane % 4, index);
  }
};

// Computes sums[r][c] = sum_k left(row, k) right(column, k) over `depth`, by tiles in shared memory
// of 2 * kDepth * kPitch elements. left and right give 0 beyond their tokens.
template <typename T, typename Left, typename Right>
__device__ __forceinline__ void dot_tile(const ThreadTile& at, int64_t depth, const Left& left,
                                         const Right& right, Shared<T> shared,
                                         T (&sums)[kPerThread][kPerThread]) {
#pragma unroll
  for (int r = 0; r < kPerThread; ++r) {
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) sums[r][c] = 0;
  }
  Shared<T> a = shared;
  Shared<T> b = shared + kDepth * kPitch;
  for (int64_t first = 0; first < depth; first += kDepth) {
    __syncthreads();
    for (int index = threadIdx.x; index < kTile * kDepth; index += kThreads) {
      const int token = index / kDepth, k = index % kDepth;
      const bool inside = first + k < depth;
      a[k * kPitch + token] = inside ? left(token, first + k) : T(0);
      b[k * kPitch + token] = inside ? right(token, first + k) : T(0);
    }
    __syncthreads();
#pragma unroll 4
    for (int k = 0; k < kDepth; ++k) {
      T x[kPerThread], y[kPerThread];
#pragma unroll
      for (int r = 0; r < kPerThread; ++r) x[r] = a[k * kPitch + at.row(r)];
#pragma unroll
      for (int c = 0; c < kPerThread; ++c) y[c] = b[k * kPitch + at.column(c)];
#pragma unroll
      for (int r = 0; r < kPerThread; ++r) {
#pragma unroll
        for (int c = 0; c < kPerThread; ++c) sums[r][c] += x[r] * y[c];
      }
    }
  }
}

// Adds to sums[r][c] the sum over the 64 inner tokens of left[row(r)][inner] right[inner][4 lane +
// c]; both tiles in shared memory with pitch kPitch.
template <typename T>
__device__ __forceinline__ void accumulate_tile(const ThreadTile& at, Shared<T> left,
                                                Shared<T> right,
                                                T (&sums)[kPerThread][kPerThread]) {
#pragma unroll 4
  for (int inner = 0; inner < kTile; ++inner) {
    T x[kPerThread], y[kPerThread];
#pragma unroll
    for (int r = 0; r < kPerThread; ++r) x[r] = left[at.row(r) * kPitch + inner];
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) {
      y[c] = right[inner * kPitch + at.column_lane + 16 * c];
    }
#pragma unroll
    for (int r = 0; r < kPerThread; ++r) {
#pragma unroll
      for (int c = 0; c < kPerThread; ++c) sums[r][c] += x[r] * y[c];
    }
  }
}

// Returns the column of a slice of 64 that accumulate_tile's sums[.][c] belongs to.
__device__ __forceinline__ int slice_column(const ThreadTile& at, int c) {
  return at.column_lane + 16 * c;
}

// Fills a tile [64 tokens][64 columns] with load(token, column).
template <typename T, typename Load>
__device__ __forceinline__ void fill_tile(Shared<T> tile, const Load& load) {
  for (int index = threadIdx.x; index < kTile * kTile; index += kThreads) {
    const int token = index / kTile, column = index % kTile;
    tile[token * kPitch + column] = load(token, column);
  }
}

// Returns whether query i of (b, h) may attend to key j, and the float mask there.
template <typename T>
__device__ __forceinline__ bool is_visible(const AttentionParams& params, int64_t b, int64_t h,
                                           int64_t i, int64_t j, T& mask) {
  mask = 0;
  if (i >= params.L || j >= params.S || (params.is_causal && j > i)) return false;
  if (params.mask.type == ElementType::kNone) return true;
  const int64_t* stride = params.mask.stride;
  const int64_t offset = b * stride[0] + h * stride[1] + i * stride[2] + j * stride[3];
  if (params.mask.type == ElementType::kBool) {
    return static_cast<const uint8_t*>(params.mask.data)[offset] != 0;
  }
  mask = bounded_offset(load_element<T>(params.mask, offset));
  return mask != minus_infinity<T>();
}

// Returns whether the backward is that of weights, into whose pairs gradients come.
__device__ __forceinline__ bool is_of_weights(const AttentionParams& params) {
  return params.grad_weights.type != ElementType::kNone;
}
template <typename T>
__device__ __forceinline__ T weight_gradient(const AttentionParams& params, int64_t b, int64_t h,
                                             int64_t i, int64_t j) {
  const int64_t* stride = params.grad_weights.stride;
  return load_element<T>(params.grad_weights,
                         b * stride[0] + h * stride[1] + i * stride[2] + j * stride[3]) *
         static_cast<T>(params.weights_share);
}

// The dropout bytes of a thread's pairs; the query is the row where rows_are_queries.
struct Dropout {
  uint32_t threshold;
  PhiloxBlock bytes;
  bool rows_are_queries;

  __device__ Dropout(const AttentionParams& params, int64_t batch_head, int64_t i0, int64_t j0,
                     int query_lane, int key_lane, bool queries_in_rows)
      : threshold(params.dropout_threshold), rows_are_queries(queries_in_rows) {
    if (threshold == 0) return;
    bytes =
        dropout_group(params.dropout, batch_head, i0 / 16 * 4 + query_lane, j0 / 16 * 4 + key_lane);
  }
  __device__ __forceinline__ bool keeps(int r, int c) const {
    if (threshold == 0) return true;
    const int query = rows_are_queries ? r : c, key = rows_are_queries ? c : r;
    return ((bytes.word[query] >> (8 * key)) & 0xff) >= threshold;
  }
};

// Returns the first row beyond the last that a causal tile of queries up to i0 + 63 can see.
__device__ __forceinline__ int64_t visible_keys(const AttentionParams& params, int64_t i0) {
  return params.is_causal ? min(params.S, i0 + kTile) : params.S;
}

}  // namespace

}  // namespace ikattn::cuda
