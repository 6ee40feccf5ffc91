// Sums over the edges of every node and head, a warp for each. Rows of many edges are cut at fixed
// places, so that the bits depend on nothing else, and nothing is added by atomics.
//
// An Op has
//   Rows rows; int64_t H;
//   Values<T> values_of(row, h)                         where a row's values go, in global memory
//   Values<T> values_at(T*)                             the same in the memory of a piece
//   sum(const Piece&, double (&numbers)[2], Values<T>, lane)   what the edges of a piece add up to;
//                                                       numbers are the same in every lane
//   finish(row, h, numbers, lane)                       a short row, summed
//   merge(row, h, Parts<T>, lane)                       a long row from its pieces
#pragma once

#include "edge_attention/cuda/kernels.h"
#include "support/cuda/launch.h"

namespace ikattn::cuda {
namespace {

constexpr int kRowWarps = 4;
constexpr int kRowBlocks = 7;  // blocks of a multiprocessor, at least
// A row of more edges is cut at the multiples of this, in the order of all edges.
constexpr int64_t kPieceEdges = 1024;

struct Rows {
  const int64_t* ends;  // [count + 1]
  int64_t count, E;
};

template <typename T>
struct Values {
  T *first, *second;  // the second where there are two kinds
};

struct Piece {
  int64_t row, h, begin, end;
};

// Between two cuts lie at most two long rows: that of the first edge, and that of the last.
struct Pieces {
  int64_t first;  // index of the cut within or before the row
  int64_t count;
};

__device__ __forceinline__ Pieces pieces_of(int64_t begin, int64_t end) {
  const int64_t first = begin / kPieceEdges;
  return {first, (end - 1) / kPieceEdges - first + 1};
}

// The partial sums of a long row in one head.
template <typename T>
struct Parts {
  double* numbers;
  T* values;
  int64_t H, h, width, begin;
  Pieces pieces;

  // Returns the place of piece k, between cuts first + k and the next; the row has the first edge
  // there, or not.
  __device__ __forceinline__ int64_t place(int64_t k) const {
    const int64_t cut = pieces.first + k;
    const int64_t which = begin <= cut * kPieceEdges ? 0 : 1;
    return ((2 * cut + which) * H + h);
  }
  __device__ __forceinline__ double* numbers_of(int64_t k) const { return numbers + 2 * place(k); }
  __device__ __forceinline__ T* values_of(int64_t k) const { return values + place(k) * width; }
};

inline int64_t cuts(int64_t E) { return (E + kPieceEdges - 1) / kPieceEdges; }

// Returns the warp's number, the same in all its lanes.
__device__ __forceinline__ int64_t warp_number() {
  return static_cast<int64_t>(blockIdx.x) * kRowWarps + threadIdx.x / 32;
}

template <typename T, typename Op>
__global__ void __launch_bounds__(kRowWarps * 32, kRowBlocks) short_rows_kernel(Op op) {
  const int64_t index = warp_number(), row = index / op.H, h = index % op.H;
  if (row >= op.rows.count) return;
  const int64_t begin = op.rows.ends[row], end = op.rows.ends[row + 1];
  if (end - begin > kPieceEdges) return;
  const int lane = threadIdx.x % 32;
  double numbers[2];
  op.sum(Piece{row, h, begin, end}, numbers, op.values_of(row, h), lane);
  op.finish(row, h, numbers, lane);
}

// Returns the row that edge e belongs to.
__device__ __forceinline__ int64_t row_of(const Rows& rows, int64_t e) {
  int64_t low = 0, high = rows.count;  // ends[low] <= e < ends[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (rows.ends[middle] <= e) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <typename T, typename Op>
__global__ void __launch_bounds__(kRowWarps * 32, kRowBlocks)
    pieces_kernel(Op op, double* numbers, T* values, int64_t width) {
  const int64_t index = warp_number(), h = index % op.H, which = index / op.H % 2;
  const int64_t first = index / op.H / 2 * kPieceEdges;
  if (first >= op.rows.E) return;
  const int64_t last = min(first + kPieceEdges, op.rows.E);
  const int64_t row = row_of(op.rows, which == 0 ? first : last - 1);
  const int64_t begin = op.rows.ends[row], end = op.rows.ends[row + 1];
  if (end - begin <= kPieceEdges || (which == 1 && begin <= first)) return;
  const int lane = threadIdx.x % 32;
  const int64_t place = (2 * (first / kPieceEdges) + which) * op.H + h;
  double sums[2];
  op.sum(Piece{row, h, max(begin, first), min(end, last)}, sums,
         op.values_at(values + place * width), lane);
  if (lane < 2) numbers[2 * place + lane] = lane == 0 ? sums[0] : sums[1];
}

// A long row is merged by the warp of the first cut in it.
template <typename T, typename Op>
__global__ void __launch_bounds__(kRowWarps * 32, kRowBlocks)
    long_rows_kernel(Op op, double* numbers, T* values, int64_t width) {
  const int64_t index = warp_number(), h = index % op.H, cut = index / op.H * kPieceEdges;
  if (cut >= op.rows.E) return;
  const int64_t row = row_of(op.rows, cut);
  const int64_t begin = op.rows.ends[row], end = op.rows.ends[row + 1];
  if (end - begin <= kPieceEdges || begin <= cut - kPieceEdges) return;
  op.merge(row, h, Parts<T>{numbers, values, op.H, h, width, begin, pieces_of(begin, end)},
           static_cast<int>(threadIdx.x % 32));
}

inline dim3 blocks_of(int64_t warps) {
  return dim3(static_cast<unsigned>((warps + kRowWarps - 1) / kRowWarps));
}

template <typename T, typename Op>
const char* sum_rows(const Op& op, double* numbers, T* values, int64_t width, Stream stream) {
  const dim3 block(kRowWarps * 32);
  const char* error =
      launch(short_rows_kernel<T, Op>, blocks_of(op.rows.count * op.H), block, 0, stream, op);
  if (error != nullptr || op.rows.E <= kPieceEdges) return error;
  error = launch(pieces_kernel<T, Op>, blocks_of(2 * cuts(op.rows.E) * op.H), block, 0, stream, op,
                 numbers, values, width);
  if (error != nullptr) return error;
  return launch(long_rows_kernel<T, Op>, blocks_of(cuts(op.rows.E) * op.H), block, 0, stream, op,
                numbers, values, width);
}

}  // namespace
}  // namespace ikattn::cuda
