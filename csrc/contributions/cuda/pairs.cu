// Norms of the summed contributions of every pair, |R_j a_ij|.
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
// The factors of the lane's key, every kFactorBlock-th.
template <typename T>
__device__ __forceinline__ const T* factors_of(const PairParams& params, const void* factors,
                                               const PairBlock& at) {
  const int64_t blocks = (params.S + kFactorBlock - 1) / kFactorBlock;
  return static_cast<const T*>(factors) +
         (at.b * blocks + at.j / kFactorBlock) * triangle(params.H) * kFactorBlock +
         at.j % kFactorBlock;
}

// The norm of one pair in float64, its weights and factors read again: where the squares overflow
// float32 the norm may not.
template <typename T>
__device__ __forceinline__ T norm_in_double(const PairParams& params, const PairBlock& at,
                                            int64_t i, const void* of_variant) {
  const int64_t* stride = params.weights.stride;
  const int64_t first = at.b * stride[0] + i * stride[2] + at.j * stride[3];
  const T* factors = factors_of<T>(params, of_variant, at);
  double square = 0;
#pragma unroll 1
  for (int64_t h = 0; h < params.H; ++h) {
    double sum = 0;
#pragma unroll 1
    for (int64_t k = h; k < params.H; ++k, factors += kFactorBlock) {
      sum += static_cast<double>(*factors) *
             load_element<double>(params.weights, first + k * stride[1]);
    }
    square += sum * sum;
  }
  return static_cast<T>(sqrt(square));
}

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
      const T* factors = factors_of<T>(params, params.factors[variant], at);
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
          norm = norm_in_double<T>(params, at, i0 + m, params.factors[variant]);
        }
        store_element<T>(out, b * out.stride[0] + (i0 + m) * out.stride[1] + j * out.stride[2],
                         norm);
      }
    }
  }
}

// The same of at most kHeads heads, whose weights registers hold, and factors shared memory.
constexpr int kMostHeads = 16, kPairWarps = 4, kPairRows = 4;

// weights[h][m] of queries i0 + m, 0 where there is none.
template <typename W, int kHeads>
__device__ __forceinline__ void load_weights(const PairParams& params, const PairBlock& at,
                                             int64_t i0, const bool (&visible)[kPairRows],
                                             float (&weights)[kHeads][kPairRows]) {
  const int64_t* stride = params.weights.stride;
  const W* row = static_cast<const W*>(params.weights.data) + at.b * stride[0] + i0 * stride[2] +
                 at.j * stride[3];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const bool there = h < params.H;
#pragma unroll
    for (int m = 0; m < kPairRows; ++m) {
      weights[h][m] = there && visible[m] ? to_float(row[m * stride[2]]) : 0.0f;
    }
    row += stride[1];
  }
}

// In shared memory, between the factors [triangle(kHeads)][32] of two variants.
template <int kHeads>
constexpr int kVariantPitch = static_cast<int>(triangle(kHeads)) * 32;

// An index that is known at run time only would take local memory.
__device__ __forceinline__ const void* factors_of_variant(const PairParams& params, int variant) {
  return variant == 0 ? params.factors[0] : variant == 1 ? params.factors[1] : params.factors[2];
}

__device__ __forceinline__ const Array& norms_of_variant(const PairParams& params, int variant) {
  return variant == 0 ? params.norms[0] : variant == 1 ? params.norms[1] : params.norms[2];
}

// A variant's factors of a block's keys; zeros for heads and keys that are not there.
//   to: from the lane's entry on
template <int kHeads>
__device__ __forceinline__ void load_factors(const PairParams& params, const PairBlock& at,
                                             int variant, bool exists, Shared<float> to) {
  const int warp = threadIdx.x / 32, H = static_cast<int>(params.H);
  const float* from = factors_of<float>(params, factors_of_variant(params, variant), at);
  int entry = 0;
  for (int h = 0; h < kHeads; ++h) {
    for (int k = h; k < kHeads; ++k, ++entry) {
      if (entry % kPairWarps != warp) continue;
      const bool there = exists && k < H;
      const int place = h * H - h * (h - 1) / 2 + k - h;
      to[entry * 32] = there ? from[place * kFactorBlock] : 0.0f;
    }
  }
}

// The weights of a key and the queries from i0 on, of any 32-bit or 16-bit type.
template <int kHeads>
__device__ __forceinline__ void load_weights_of_any_type(const PairParams& params,
                                                         const PairBlock& at, int64_t i0,
                                                         bool key_visible,
                                                         float (&weights)[kHeads][kPairRows]) {
  bool visible[kPairRows];
#pragma unroll
  for (int m = 0; m < kPairRows; ++m) {
    visible[m] = key_visible && i0 + m < at.end && !is_padding(params.query_padding, at.b, i0 + m);
  }
  switch (params.weights.type) {
    case ElementType::kFloat32:
      return load_weights<float>(params, at, i0, visible, weights);
    case ElementType::kBFloat16:
      return load_weights<BFloat16>(params, at, i0, visible, weights);
    default:
      return load_weights<Half>(params, at, i0, visible, weights);
  }
}

// ||factor weights||^2
template <int kHeads>
__device__ __forceinline__ void square_products(Shared<const float> factors,
                                                const float (&weights)[kHeads][kPairRows],
                                                float (&squares)[kPairRows]) {
  int entry = 0;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    float sums[kPairRows] = {};
#pragma unroll
    for (int k = h; k < kHeads; ++k, ++entry) {
      const float factor = factors[entry * 32];
#pragma unroll
      for (int m = 0; m < kPairRows; ++m) sums[m] += factor * weights[k][m];
    }
#pragma unroll
    for (int m = 0; m < kPairRows; ++m) squares[m] += sums[m] * sums[m];
  }
}

// Of the rows that a thread has stored. Not where they are stored, where registers are few.
__device__ __forceinline__ void repair_infinite(const PairParams& params, const PairBlock& at,
                                                int64_t first) {
#pragma unroll 1
  for (int variant = 0; variant < params.variants; ++variant) {
    const Array& out = norms_of_variant(params, variant);
    float* norms = static_cast<float*>(out.data) + at.b * out.stride[0] + at.j * out.stride[2];
#pragma unroll 1
    for (int64_t i0 = first; i0 < at.end; i0 += kPairWarps * kPairRows) {
#pragma unroll 1
      for (int64_t i = i0; i < min(at.end, i0 + kPairRows); ++i) {
        float& norm = norms[i * out.stride[1]];
        if (norm != INFINITY) continue;
        norm = norm_in_double<float>(params, at, i, factors_of_variant(params, variant));
      }
    }
  }
}

// Shared memory: factors of each variant.
template <int kHeads>
__global__ void __launch_bounds__(kPairWarps * 32, kHeads > 12 ? 3 : 4)
    few_heads_kernel(PairParams params) {
  const PairBlock at(params);
  const bool exists = at.j < params.S;
  const bool key_visible = exists && !is_padding(params.key_padding, at.b, at.j);
  Shared<float> factors = dynamic_shared<float>() + threadIdx.x % 32;
  for (int variant = 0; variant < params.variants; ++variant) {
    load_factors<kHeads>(params, at, variant, exists, factors + variant * kVariantPitch<kHeads>);
  }
  __syncthreads();
  const int64_t first = at.first + threadIdx.x / 32 * kPairRows;
  bool any_infinite = false;
  for (int64_t i0 = first; i0 < at.end; i0 += kPairWarps * kPairRows) {
    float weights[kHeads][kPairRows];
    load_weights_of_any_type(params, at, i0, key_visible, weights);
    bool weighed[kPairRows] = {};
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int m = 0; m < kPairRows; ++m) weighed[m] = weighed[m] || weights[h][m] != 0;
    }
#pragma unroll 1
    for (int variant = 0; variant < params.variants; ++variant) {
      float squares[kPairRows] = {};
      square_products(factors + variant * kVariantPitch<kHeads>, weights, squares);
      const Array& out = norms_of_variant(params, variant);
      float* norms = static_cast<float*>(out.data) + at.b * out.stride[0] + i0 * out.stride[1] +
                     at.j * out.stride[2];
#pragma unroll
      for (int m = 0; m < kPairRows; ++m) {
        if (!exists || i0 + m >= at.end) continue;
        // A key without weight is selected away: what it holds may be NaN.
        const float norm = weighed[m] ? sqrtf(squares[m]) : 0.0f;
        any_infinite |= norm == INFINITY;
        norms[m * out.stride[1]] = norm;
      }
    }
  }
  if (any_infinite) repair_infinite(params, at, first);
}

template <int kHeads>
const char* launch_few_heads(const PairParams& params, Stream stream) {
  const int64_t bytes = params.variants * kVariantPitch<kHeads> * int64_t{sizeof(float)};
  return launch(few_heads_kernel<kHeads>, PairBlock::count(params), dim3(kPairWarps * 32), bytes,
                stream, params);
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
  if (sizeof(T) == sizeof(float) && params.H <= kMostHeads &&
      params.weights.type != ElementType::kFloat64) {
    return params.H <= 4    ? launch_few_heads<4>(params, stream)
           : params.H <= 8  ? launch_few_heads<8>(params, stream)
           : params.H <= 12 ? launch_few_heads<12>(params, stream)
                            : launch_few_heads<16>(params, stream);
  }
  if (shared_of_warp<T>(params.H, 4, 1) <= kMostShared) return launch_pairs<T, 4>(params, stream);
  if (shared_of_warp<T>(params.H, 1, 1) <= kMostShared) return launch_pairs<T, 1>(params, stream);
  return sizeof(T) == 8 ? "there must be at most 384 heads in float64"
                        : "there must be at most 768 heads";
}

template const char* pair_norms<float>(const PairParams&, Stream);
template const char* pair_norms<double>(const PairParams&, Stream);

}  // namespace ikattn::cuda
