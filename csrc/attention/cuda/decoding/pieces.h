// Rows in memory, which lanes read in pieces of 16 bytes.
#pragma once

#include "attention/calls/tensor_core_calls.h"
#include "attention/cuda/operands/math.h"

namespace ikattn::cuda {
namespace {

template <typename S>
struct alignas(16) Piece {
  static constexpr int kColumns = 16 / sizeof(S);
  S element[kColumns];
};
template <typename S>
__host__ __device__ inline int64_t whole_pieces(int64_t columns) {
  constexpr int64_t kColumns = Piece<S>::kColumns;
  return (columns + kColumns - 1) / kColumns * kColumns;
}

// The rows of one head of an array [B, heads, N, columns] of S, which lie in whole pieces.
template <typename S>
class PieceRows {
 public:
  __device__ __forceinline__ PieceRows(const Array& array, int64_t b, int64_t head, int64_t columns)
      : first_(static_cast<const S*>(array.data) + b * array.stride[0] + head * array.stride[1]),
        stride_(array.stride[2]),
        columns_(columns) {}

  // Loads the pieces that begin at `column` of kCount rows, `step` apart from `row` on; they are
  // zeros from the end of the columns, and from row `end`, on. All are under way before one is
  // looked at.
  template <int kCount>
  __device__ __forceinline__ void load(Piece<S> (&pieces)[kCount], int64_t row, int step,
                                       int64_t end, int64_t column) const {
    const S* from = first_ + row * stride_ + column;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      pieces[k] = {};
      if (row + k * step < end && column < columns_) pieces[k] = load_vector<Piece<S>>(from);
      from += step * stride_;
    }
  }

 private:
  const S* first_;
  int64_t stride_, columns_;
};

constexpr int kCopyThreads = 256;

// copy [B, heads, N, width] of rows [B, heads, N, columns], zeros beyond these.
template <typename S>
__global__ void __launch_bounds__(kCopyThreads, 2)
    copy_kernel(Array rows, int64_t heads, int64_t N, int64_t columns, int64_t width, int64_t count,
                S* copy) {
  const int64_t index = int64_t{blockIdx.x} * kCopyThreads + threadIdx.x;
  if (index >= count) return;
  const int64_t column = index % width, n = index / width % N, head = index / width / N;
  const int64_t from = head / heads * rows.stride[0] + head % heads * rows.stride[1] +
                       n * rows.stride[2] + column * rows.stride[3];
  copy[index] = column < columns ? static_cast<const S*>(rows.data)[from] : S{};
}

// Makes `rows` [B, heads, N, columns] lie in whole pieces: as they are where they do, or a copy.
template <typename S>
const char* lay_in_pieces(const DeviceExecutor& executor, int64_t B, int64_t heads, int64_t N,
                          int64_t columns, Array& rows) {
  if (lies_in_rows_of_16_bytes(rows, sizeof(S)) && columns % Piece<S>::kColumns == 0) {
    return nullptr;
  }
  const int64_t width = whole_pieces<S>(columns), count = B * heads * N * width;
  S* copy = executor.take<S>(count);
  const Array given = rows;
  rows.data = copy;
  const int64_t strides[4] = {heads * N * width, N * width, width, 1};
  for (int axis = 0; axis < 4; ++axis) rows.stride[axis] = strides[axis];
  return launch(copy_kernel<S>, dim3(static_cast<unsigned>(ceil_div(count, kCopyThreads))),
                dim3(kCopyThreads), 0, executor.stream, given, heads, N, columns, width, count,
                copy);
}

}  // namespace
}  // namespace ikattn::cuda
