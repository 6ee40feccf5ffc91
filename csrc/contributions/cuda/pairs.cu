// Norms of the summed contributions of every pair, |R_j a_ij|: in float64, and of more heads than
// tensor cores take, here.
#include "contributions/cuda/given_pairs.h"
#include "contributions/cuda/pairs.h"

namespace ikattn::cuda {
namespace {

constexpr int kRowsPerBlock = 64;

// The block's place: a lane is key j, of the rows [first, end) of batch b.
struct PairBlock {
  int64_t j, first, end, b;

  __device__ __forceinline__ explicit PairBlock(const PairParams& params) {
    const int64_t key_blocks = (params.S + 31) / 32;
    const int64_t row_blocks = (params.rows + kRowsPerBlock - 1) / kRowsPerBlock;
    int64_t index = blockIdx.x;
    j = index % key_blocks * 32 + threadIdx.x % 32;
    index /= key_blocks;
    first = index % row_blocks * kRowsPerBlock;
    b = index / row_blocks;
    end = min(params.rows, first + kRowsPerBlock);
  }
  static dim3 count(const PairParams& params) {
    return dim3(static_cast<unsigned>(params.B * ((params.S + 31) / 32) *
                                      ((params.rows + kRowsPerBlock - 1) / kRowsPerBlock)));
  }
};
// Shared memory holds every thread's own weights, [warps][H][kRows][32]: no thread reads another's.
template <typename T, int kRows>
__global__ void __launch_bounds__(128, 2) pair_kernel(PairParams params) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int64_t H = params.H;
  const PairBlock at(params);
  const int64_t j = at.j, first = at.first, b = at.b, end = at.end;
  Shared<T> own = dynamic_shared<T>() + (warp * H * kRows * 32 + lane);
  const bool key_visible = j < params.S && !is_padding(params.key_padding, b, j);
  for (int64_t i0 = first + warp * kRows; i0 < end; i0 += warps * kRows) {
    bool weighed[kRows];
    load_own_weights<kRows>(params, b, i0, end, j, key_visible, own, weighed);
    for (int variant = 0; variant < params.variants; ++variant) {
      const T* factors = factors_of<T>(params, params.factors[variant], b, j);
      T squares[kRows] = {};
      for (int64_t h = 0; h < H && j < params.S; ++h) {
        T sums[kRows] = {};
        for (int64_t k = h; k < H; ++k, factors += kFactorBlock) {
          const T factor = *factors;
#pragma unroll
          for (int m = 0; m < kRows; ++m) {
            const T weight = own[(k * kRows + m) * 32];
            sums[m] += factor * weight;
          }
        }
#pragma unroll
        for (int m = 0; m < kRows; ++m) squares[m] += sums[m] * sums[m];
      }
      const Array& out = params.norms[variant];
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        if (j >= params.S || i0 + m >= end) continue;
        // A key without weight is selected away: what it holds may be NaN.
        T norm = weighed[m] ? sqrt(squares[m]) : T(0);
        if (sizeof(T) == 4 && norm == INFINITY) {
          norm = norm_in_double<T>(params, b, i0 + m, j, params.factors[variant]);
        }
        store_element<T>(out, b * out.stride[0] + (i0 + m) * out.stride[1] + j * out.stride[2],
                         norm);
      }
    }
  }
}

template <typename T, int kRows>
const char* launch_pairs(const PairParams& params, Stream stream) {
  const int64_t bytes_per_warp = shared_of_warp<T>(params.H, kRows, 1);
  const int warps = bytes_per_warp * 4 <= kMostShared   ? 4
                    : bytes_per_warp * 2 <= kMostShared ? 2
                                                        : 1;
  return launch(pair_kernel<T, kRows>, PairBlock::count(params),
                dim3(static_cast<unsigned>(32 * warps)), warps * bytes_per_warp, stream, params);
}

}  // namespace

template <typename T>
const char* pair_norms(const PairParams& params, Stream stream) {
  constexpr bool kInFloat64 = sizeof(T) == 8;
  if (takes_given_pairs(params, kInFloat64)) return given_pair_norms(params, stream);
  if (shared_of_warp<T>(params.H, 4, 1) <= kMostShared) return launch_pairs<T, 4>(params, stream);
  if (shared_of_warp<T>(params.H, 1, 1) <= kMostShared) return launch_pairs<T, 1>(params, stream);
  return kInFloat64 ? "there must be at most 384 heads in float64"
                    : "there must be at most 768 heads";
}

template const char* pair_norms<float>(const PairParams&, Stream);
template const char* pair_norms<double>(const PairParams&, Stream);

}  // namespace ikattn::cuda
