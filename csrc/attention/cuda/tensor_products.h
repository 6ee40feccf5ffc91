// Products of float32 matrices on tensor cores, nearly as exact as on the ordinary units: a factor
// is one or two numbers of TF32, of 11 bits each.
#pragma once

#include "attention/cuda/tiles.h"
#include "support/cuda/intrinsics.h"

namespace ikattn::cuda {
namespace {

constexpr int kProductThreads = 128;
constexpr int kProductDepth = 32;  // at a time
// Of a row in shared memory: lanes g, t read row g, column t, from 32 different banks.
constexpr int kProductPitch = kProductDepth + 4;
constexpr int64_t kProductShared = 2 * kTile * kProductPitch * int64_t{sizeof(float)};

// Where a thread's elements of a 64 x 64 product are: a warp has 32 x 32 of them.
struct ProductTile {
  int row0, column0;

  __device__ ProductTile() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    row0 = warp / 2 * 32 + lane / 4;
    column0 = warp % 2 * 32 + lane % 4 * 2;
  }
  // Of sums[m][n][c].
  __device__ __forceinline__ int row(int m, int c) const { return row0 + 16 * m + 8 * (c / 2); }
  __device__ __forceinline__ int column(int n, int c) const { return column0 + 8 * n + c % 2; }
};
using ProductSums = float[2][4][4];

// Calls visit(row, column, sum) for the thread's elements.
template <typename Visit>
__device__ __forceinline__ void visit_product(const ProductTile& at, const ProductSums& sums,
                                              const Visit& visit) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) visit(at.row(m, c), at.column(n, c), sums[m][n][c]);
    }
  }
}

// The memory order of an operand, which its copy follows.
enum class Contiguous { kDepth, kRows };

// kTile rows of an operand and kProductDepth columns from `first` on; load(row, k) gives 0 where
// there is nothing, and is not asked beyond `depth`.
template <Contiguous kOrder, typename Load>
__device__ __forceinline__ void fill_operand(Shared<float> operand, int64_t first, int64_t depth,
                                             const Load& load) {
  for (int index = threadIdx.x; index < kTile * kProductDepth; index += kProductThreads) {
    const bool along = kOrder == Contiguous::kDepth;
    const int row = along ? index / kProductDepth : index % kTile;
    const int k = along ? index % kProductDepth : index / kTile;
    operand[row * kProductPitch + k] = first + k < depth ? load(row, first + k) : 0.0f;
  }
}

// kParts TF32 numbers that make up x.
template <int kParts>
struct Tf32Parts {
  uint32_t part[kParts];

  Tf32Parts() = default;
  __device__ __forceinline__ explicit Tf32Parts(float x) {
    const float leading = tf32_part(x);
    part[0] = __float_as_uint(leading);
    if constexpr (kParts > 1) part[1] = __float_as_uint(x - leading);
  }
};

// sums[row][column] += sum_k left(row, k) right(column, k) over `depth`, in shared memory of
// kProductShared bytes.
//   kLeftParts, kRightParts: TF32 numbers that each factor is taken for: 1 where it has 11 bits
template <int kLeftParts, Contiguous kLeftOrder, int kRightParts, Contiguous kRightOrder,
          typename Left, typename Right>
__device__ __forceinline__ void add_product(int64_t depth, const Left& left, const Right& right,
                                            Shared<float> shared, ProductSums& sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  Shared<float> a = shared, b = shared + kTile * kProductPitch;
  Shared<const float> rows = a + ((warp / 2 * 32 + g) * kProductPitch + t);
  Shared<const float> columns = b + ((warp % 2 * 32 + g) * kProductPitch + t);
  for (int64_t first = 0; first < depth; first += kProductDepth) {
    __syncthreads();  // nobody reads what was there
    fill_operand<kLeftOrder>(a, first, depth, left);
    fill_operand<kRightOrder>(b, first, depth, right);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kProductDepth; k += 8) {
      Tf32Parts<kLeftParts> x[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float value = rows[(16 * m + 8 * (i % 2)) * kProductPitch + k + 4 * (i / 2)];
          x[m][i] = Tf32Parts<kLeftParts>(value);
        }
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float low = columns[8 * n * kProductPitch + k];
        const float high = columns[8 * n * kProductPitch + k + 4];
        const Tf32Parts<kRightParts> y[2] = {Tf32Parts<kRightParts>(low),
                                             Tf32Parts<kRightParts>(high)};
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          // The small products first; small times small is below what float32 holds.
#pragma unroll
          for (int p = kLeftParts - 1; p >= 0; --p) {
#pragma unroll
            for (int q = kRightParts - 1; q >= 0; --q) {
              if (p + q > 1) continue;
              const uint32_t parts[4] = {x[m][0].part[p], x[m][1].part[p], x[m][2].part[p],
                                         x[m][3].part[p]};
              mma_m16n8k8_tf32(sums[m][n], parts, y[0].part[q], y[1].part[q]);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace ikattn::cuda
