// The triangular factor of a token's transformed vectors in float32, as the root of their Gram
// matrix in float64: that has twice the digits which the square of a norm needs, so that |R a| is
// as accurate as a sum of the vectors in float32, also where the heads cancel. Products of two
// numbers of float32 are exact there, and the tensor cores add them up. A block per token; its
// warps share the dimensions, and their sums are added in order.
#include "contributions/cuda/kernels.h"
#include "support/cuda/intrinsics.h"
#include "support/cuda/warps.h"

namespace ikattn::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kGroup = 16;    // heads whose products with as many others a warp holds
constexpr int kColumns = 16;  // dimensions at a time

// Of the matrix, row by row.
__device__ __forceinline__ int entry_of(int H, int h, int k) {
  return h * H - h * (h - 1) / 2 + k - h;
}

// A token's vectors, through as many norms as `variant` says.
struct TokenVectors {
  const FactorsOfVectors& params;
  const float* rows;
  int64_t pitch;        // between heads
  Shared<float> means;  // [2][H]
  int variant = 0;

  __device__ __forceinline__ float normed(float x, int h, int64_t c) const {
    const int H = static_cast<int>(params.H);
#pragma unroll
    for (int norm = 0; norm < 2; ++norm) {
      if (norm >= variant) continue;
      const float mean = means[norm * H + h];
      x = (x - mean) * static_cast<const float*>(params.norms[norm].weight)[c];
    }
    return x;
  }
  __device__ __forceinline__ float load(int h, int64_t c) const {
    return normed(rows[h * pitch + c], h, c);
  }
  // Four from c, a multiple of 4, on; zeros where there is none.
  __device__ __forceinline__ void load(float (&x)[4], int h, int64_t c) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = 0;
    if (h >= params.H || c >= params.D) return;
    if (params.D % 4 == 0) {
      const float4 four = load_vector<float4>(rows + h * pitch + c);
      x[0] = four.x;
      x[1] = four.y;
      x[2] = four.z;
      x[3] = four.w;
      if (variant == 0) return;
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = normed(x[i], h, c + i);
      return;
    }
    for (int i = 0; i < 4; ++i) {
      if (c + i < params.D) x[i] = load(h, c + i);
    }
  }
  // What the variant's last norm takes off every element of a head.
  __device__ __forceinline__ void make_means() {
    const int norm = variant - 1, H = static_cast<int>(params.H);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // An index that is known at run time only would take local memory.
    const bool centered = norm == 0 ? params.norms[0].centered : params.norms[1].centered;
    variant = norm;  // the vectors that the norm sees
    for (int h = warp; h < H; h += kWarps) {
      double sum = 0;
      for (int64_t c = lane; centered && c < params.D; c += 32) {
        sum += static_cast<double>(load(h, c));
      }
      sum = sum_of_lanes(sum);
      if (lane == 0) means[norm * H + h] = static_cast<float>(sum / static_cast<double>(params.D));
    }
    variant = norm + 1;
    __syncthreads();
  }
};

// gram [triangle(H)] of the products of heads, by the whole block.
__device__ __forceinline__ void make_gram(const TokenVectors& vectors, Shared<double> gram,
                                          Shared<double> parts) {
  const int H = static_cast<int>(vectors.params.H);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int h0 = 0; h0 < H; h0 += kGroup) {
    for (int k0 = h0; k0 < H; k0 += kGroup) {
      const bool is_diagonal = h0 == k0;
      double sums[2][2][2] = {};
      for (int64_t c = warp * kColumns + lane % 4 * 4; c - lane % 4 * 4 < vectors.params.D;
           c += kWarps * kColumns) {
        float a[2][4], b[2][4];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          vectors.load(a[r], h0 + 8 * r + lane / 4, c);
          if (!is_diagonal) vectors.load(b[r], k0 + 8 * r + lane / 4, c);
        }
        __syncwarp();  // lanes of no head or column come to the products with the others
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          double left[2], right[2];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            left[r] = static_cast<double>(a[r][i]);
            right[r] = is_diagonal ? left[r] : static_cast<double>(b[r][i]);
          }
          mma_m8n8k4_f64(sums[0][0], left[0], right[0]);
          mma_m8n8k4_f64(sums[0][1], left[0], right[1]);
          mma_m8n8k4_f64(sums[1][1], left[1], right[1]);
          if (!is_diagonal) mma_m8n8k4_f64(sums[1][0], left[1], right[0]);
        }
      }
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          parts[(warp * 4 + tile) * 64 + lane * 2 + i] = sums[tile / 2][tile % 2][i];
        }
      }
      __syncthreads();
      for (int index = threadIdx.x; index < 4 * 64; index += kThreads) {
        const int tile = index / 64, of_lane = index % 64 / 2;
        const int h = h0 + tile / 2 * 8 + of_lane / 4;
        const int k = k0 + tile % 2 * 8 + of_lane % 4 * 2 + index % 2;
        if (h > k || k >= H) continue;
        double sum = 0;
        for (int part = 0; part < kWarps; ++part) {
          const double of_part = parts[part * 4 * 64 + index];
          sum += of_part;
        }
        gram[entry_of(H, h, k)] = sum;
      }
      __syncthreads();
    }
  }
}

// The row and the column, 64 times the first and the second, of every entry; by the whole block.
__device__ __forceinline__ void number_entries(int H, Shared<uint16_t> places) {
  for (int index = threadIdx.x; index < H * H; index += kThreads) {
    const int h = index / H, k = index % H;
    if (h <= k) places[entry_of(H, h, k)] = static_cast<uint16_t>(64 * h + k);
  }
}

// gram becomes its root R, and goes to `factors`, every kFactorBlock-th; by one warp.
//   sizes [H]: the diagonal of gram
//   places [triangle(H)]: of number_entries()
__device__ __forceinline__ void make_root(int H, Shared<double> gram, Shared<const double> sizes,
                                          Shared<const uint16_t> places, float* factors) {
  const int lane = threadIdx.x % 32, entries = entry_of(H, H - 1, H - 1) + 1;
  for (int h = 0; h < H; ++h) {
    const double pivot = gram[entry_of(H, h, h)], size = sizes[h];
    // What is left of a vector that depends on those before it is rounding. NaN stays.
    const bool vanishes = pivot <= size * (4 * H * 0x1p-53);
    const double norm = vanishes ? 0.0 : sqrt(pivot), inverse = vanishes ? 0.0 : 1 / norm;
    float* row = factors + int64_t{entry_of(H, h, h)} * kFactorBlock;
    if (lane == 0) row[0] = static_cast<float>(norm);
    for (int k = h + 1 + lane; k < H; k += 32) {
      const double product = gram[entry_of(H, h, k)];
      gram[entry_of(H, h, k)] = product * inverse;
      row[(k - h) * kFactorBlock] = static_cast<float>(product * inverse);
    }
    __syncwarp();
    // The rows that are left follow this one, all of their entries side by side.
    for (int entry = entry_of(H, h, H - 1) + 1 + lane; entry < entries; entry += 32) {
      const uint16_t place = places[entry];
      const double left = gram[entry_of(H, h, place / 64)], rest = gram[entry];
      const double right = gram[entry_of(H, h, place % 64)];
      gram[entry] = rest - left * right;
    }
    __syncwarp();
  }
}

// Dynamic shared memory: gram [triangle(H)], sizes [H], means [2][H], places [triangle(H)].
__global__ void __launch_bounds__(kThreads, 4) gram_factor_kernel(FactorsOfVectors params) {
  IKATTN_SHARED(double, parts, kWarps * 4 * 64);
  const int H = static_cast<int>(params.H), entries = static_cast<int>(triangle(H));
  Shared<double> gram = dynamic_shared<double>();
  Shared<double> sizes = gram + entries;
  const int64_t token = blockIdx.x, b = token / params.tokens;
  const int64_t j = params.j0 + token % params.tokens;
  const int64_t blocks = (params.S + kFactorBlock - 1) / kFactorBlock;
  TokenVectors vectors{params, static_cast<const float*>(params.vectors) + token * params.D,
                       params.B * params.tokens * params.D, shared_cast<float>(sizes + H)};
  Shared<uint16_t> places = shared_cast<uint16_t>(sizes + 2 * H);
  number_entries(H, places);
#pragma unroll 1
  for (int variant = 0; variant < 3; ++variant) {
    vectors.variant = variant;
    void* factors = variant == 0   ? params.factors[0]
                    : variant == 1 ? params.factors[1]
                                   : params.factors[2];
    const bool later = (variant < 1 && params.factors[1] != nullptr) ||
                       (variant < 2 && params.factors[2] != nullptr);
    const bool wants_norms = variant == 0 && params.value_norms != nullptr;
    if (factors == nullptr && !wants_norms && !later) break;
    if (variant > 0) vectors.make_means();
    if (factors == nullptr && !wants_norms) continue;
    make_gram(vectors, gram, parts);
    for (int h = threadIdx.x; h < H; h += kThreads) {
      const double square = gram[entry_of(H, h, h)];
      sizes[h] = square;
      if (!wants_norms) continue;
      static_cast<float*>(params.value_norms)[(b * H + h) * params.S + j] =
          static_cast<float>(sqrt(square));
    }
    __syncthreads();
    if (factors != nullptr && threadIdx.x < 32) {
      make_root(H, gram, sizes, places,
                static_cast<float*>(factors) +
                    (b * blocks + j / kFactorBlock) * entries * kFactorBlock + j % kFactorBlock);
    }
    __syncthreads();
  }
}

}  // namespace

const char* gram_factors(const FactorsOfVectors& params, Stream stream) {
  const int64_t bytes = (triangle(params.H) + 2 * params.H) * int64_t{sizeof(double)} +
                        triangle(params.H) * int64_t{sizeof(uint16_t)};
  return launch(gram_factor_kernel, dim3(static_cast<unsigned>(params.B * params.tokens)),
                dim3(kThreads), bytes, stream, params);
}

}  // namespace ikattn::cuda
