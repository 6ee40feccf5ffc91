// The triangular factor of a token's transformed vectors, by modified Gram-Schmidt, as on the CPU:
// in float64, and beyond 64 heads. One block per token, a warp per vector at a time.
#include "contributions/cuda/kernels.h"
#include "support/cuda/warps.h"

namespace ikattn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// Returns a norm in float64: squares may leave the range of float32.
template <typename T>
__device__ __forceinline__ double norm_of_warp(const T* a, int64_t D, int lane) {
  double sum = 0;
  for (int64_t c = lane; c < D; c += 32) {
    const auto x = static_cast<double>(a[c]);
    sum += x * x;
  }
  return sqrt(sum_of_lanes(sum));
}

// Replaces row by the linear part of its norm; one warp calls it.
template <typename T>
__device__ __forceinline__ void apply_norm(const NormLayer& norm, T* row, int64_t D, int lane) {
  const T* weight = static_cast<const T*>(norm.weight);
  T mean = 0;
  if (norm.centered) {
    T sum = 0;
    for (int64_t c = lane; c < D; c += 32) sum += row[c];
    mean = sum_of_lanes(sum) / static_cast<T>(D);
  }
  for (int64_t c = lane; c < D; c += 32) row[c] = (row[c] - mean) * weight[c];
}

// scratch [H, B, tokens, D]: the vectors that are being made orthogonal.
template <typename T>
__global__ void __launch_bounds__(kThreads, 2) factor_kernel(FactorsOfVectors params, T* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t H = params.H, D = params.D;
  const int64_t token = blockIdx.x, b = token / params.tokens;
  const int64_t j = params.j0 + token % params.tokens;
  const int64_t pitch = params.B * params.tokens * D;  // between heads
  const T* vectors = static_cast<const T*>(params.vectors) + token * D;
  T* work = scratch + token * D;
  const int64_t blocks = (params.S + kFactorBlock - 1) / kFactorBlock;
  const double smallest = sizeof(T) == 8 ? 1e-150 : 1e-30;
  if (params.value_norms != nullptr) {
    for (int64_t h = warp; h < H; h += kWarps) {
      const double norm = norm_of_warp(vectors + h * pitch, D, lane);
      if (lane == 0) {
        static_cast<T*>(params.value_norms)[(b * H + h) * params.S + j] = static_cast<T>(norm);
      }
    }
  }
  for (int variant = 0; variant < 3; ++variant) {
    if (params.factors[variant] == nullptr) continue;
    T* factors = static_cast<T*>(params.factors[variant]) +
                 (b * blocks + j / kFactorBlock) * triangle(H) * kFactorBlock + j % kFactorBlock;
    __syncthreads();  // the variant before is done with the scratch
    for (int64_t h = warp; h < H; h += kWarps) {
      T* row = work + h * pitch;
      for (int64_t c = lane; c < D; c += 32) row[c] = vectors[h * pitch + c];
      for (int norm = 0; norm < variant; ++norm) apply_norm(params.norms[norm], row, D, lane);
    }
    for (int64_t h = 0; h < H; ++h) {
      __syncthreads();  // row h has lost its parts along the rows before it
      const T* row = work + h * pitch;
      const double norm = norm_of_warp(row, D, lane);
      const bool vanishes = norm < smallest;  // false for NaN
      const T inverse = vanishes ? T(0) : static_cast<T>(1 / norm);
      if (threadIdx.x == 0) factors[0] = vanishes ? T(0) : static_cast<T>(norm);
      for (int64_t k = h + 1 + warp; k < H; k += kWarps) {
        T* rest = work + k * pitch;
        T r = 0;
        for (int64_t c = lane; c < D; c += 32) r += row[c] * inverse * rest[c];
        r = sum_of_lanes(r);
        if (lane == 0) factors[(k - h) * kFactorBlock] = r;
        for (int64_t c = lane; c < D; c += 32) rest[c] -= r * (row[c] * inverse);
      }
      factors += (H - h) * kFactorBlock;
    }
  }
}

}  // namespace

const char* gram_factors(const TokenGramParams& params, Stream stream);

namespace {

template <typename T>
const char* token_factors(const FactorsOfVectors& params, void* scratch, Stream stream) {
  return launch(factor_kernel<T>, dim3(static_cast<unsigned>(params.B * params.tokens)),
                dim3(kThreads), 0, stream, params, static_cast<T*>(scratch));
}

}  // namespace

template <typename T>
const char* pair_norms(const PairParams& params, Stream stream);
const char* pair_gradients(const PairGradientParams& params, double* scratch, Stream stream);

const ContributionKernels contribution_kernels = {
    gram_factors,
    {token_factors<float>, token_factors<double>},
    {pair_norms<float>, pair_norms<double>},
    pair_gradients,
};

}  // namespace ikattn::cuda
