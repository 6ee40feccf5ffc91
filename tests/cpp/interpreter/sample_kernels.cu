#include "interpreter/sample_kernels.h"
#include "support/cuda/intrinsics.h"

namespace ikattn::sample {
namespace {

__global__ void __launch_bounds__(256) sum_kernel(const float* values, float* out) {
  IKATTN_SHARED(float, sums, 8);
  float sum = values[int64_t{blockIdx.x} * 256 + threadIdx.x];
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float total = 0;
  for (int warp = 0; warp < 8; ++warp) total += sums[warp];
  out[blockIdx.x] = total;
}

constexpr int kQueries = 128, kKeys = 64, kWidth = 64, kStages = 2;
constexpr int kRowBytes = kWidth * 2;
constexpr int kTileBytes = kKeys * kRowBytes;
constexpr size_t kSharedBytes = kQueries * kRowBytes + kStages * 2 * kTileBytes;

// Rows of 128 bytes whose 16-byte chunks are permuted, so that eight rows of one column of chunks
// lie in different banks.
__device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
  return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
}

// Rows beyond `rows` are zero.
template <typename T>
__device__ __forceinline__ void copy_tile(uint32_t tile, const T* source, int first, int count,
                                          int rows) {
  for (int i = threadIdx.x; i < count * 8; i += 128) {
    const int row = i / 8, chunk = i % 8;
    const bool inside = first + row < rows;
    cp_async_16(tile + chunk_offset(row, chunk),
                source + int64_t{inside ? first + row : 0} * kWidth + chunk * 8, inside ? 16 : 0);
  }
}

template <typename T>
__global__ void __launch_bounds__(128, 2)
    linear_attention_kernel(const T* query, const T* key, const T* value, float* out, int L,
                            int S) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;
  const int first_query = blockIdx.x * kQueries;
  const uint32_t query_tile = shared_address(dynamic_shared<T>());
  const uint32_t stages = query_tile + kQueries * kRowBytes;

  const int tiles = (S + kKeys - 1) / kKeys;
  const auto issue = [&](int tile) {
    if (tile < tiles) {
      const uint32_t stage = stages + tile % kStages * 2 * kTileBytes;
      copy_tile(stage, key, tile * kKeys, kKeys, S);
      copy_tile(stage + kTileBytes, value, tile * kKeys, kKeys, S);
    }
    cp_async_commit();
  };
  copy_tile(query_tile, query, first_query, kQueries, L);
  issue(0);

  float sums[2][8][4] = {};
  for (int tile = 0; tile < tiles; ++tile) {
    cp_async_wait<kStages - 2>();
    __syncthreads();
    issue(tile + 1);
    const uint32_t keys = stages + tile % kStages * 2 * kTileBytes;
    const uint32_t values = keys + kTileBytes;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int n = 0; n < kKeys; n += 16) {
        float scores[2][4] = {};
#pragma unroll
        for (int k = 0; k < kWidth / 16; ++k) {
          uint32_t a[4], b[4];
          ldmatrix_x4(
              a, query_tile + chunk_offset(warp * 32 + row * 16 + lane % 16, 2 * k + lane / 16));
          ldmatrix_x4(b, keys + chunk_offset(n + lane % 8 + 8 * (lane / 16), 2 * k + lane / 8 % 2));
          mma_m16n8k16<T>(scores[0], a, b[0], b[1]);
          mma_m16n8k16<T>(scores[1], a, b[2], b[3]);
        }
        const uint32_t weights[4] = {
            pack<T>(scores[0][0], scores[0][1]), pack<T>(scores[0][2], scores[0][3]),
            pack<T>(scores[1][0], scores[1][1]), pack<T>(scores[1][2], scores[1][3])};
#pragma unroll
        for (int d = 0; d < kWidth / 16; ++d) {
          uint32_t v[4];
          ldmatrix_x4_trans(v, values + chunk_offset(n + lane % 16, 2 * d + lane / 16));
          mma_m16n8k16<T>(sums[row][2 * d], weights, v[0], v[1]);
          mma_m16n8k16<T>(sums[row][2 * d + 1], weights, v[2], v[3]);
        }
      }
    }
  }

#pragma unroll
  for (int row = 0; row < 2; ++row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = first_query + warp * 32 + row * 16 + half * 8 + g;
      if (i >= L) continue;
#pragma unroll
      for (int d = 0; d < 8; ++d) {
        store_vector(out + int64_t{i} * kWidth + d * 8 + 2 * t,
                     make_float2(sums[row][d][2 * half], sums[row][d][2 * half + 1]));
      }
    }
  }
}

__global__ void __launch_bounds__(32) tf32_kernel(const float* a, const float* b, float* out) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  Shared<float> a_tile = dynamic_shared<float>();
  Shared<float> b_tile = a_tile + 16 * 32;
  for (int i = threadIdx.x * 4; i < 16 * 32; i += 128) {
    store_vector(a_tile + i, load_vector<float4>(a + i));
  }
  for (int i = threadIdx.x * 4; i < 8 * 32; i += 128) {
    store_vector(b_tile + i, load_vector<float4>(b + i));
  }
  __syncwarp();
  float sums[4] = {};
  for (int k = 0; k < 32; k += 8) {
    const Shared<const float> rows = a_tile + k, columns = b_tile + k;
    const uint32_t a_registers[4] = {
        __float_as_uint(rows[g * 32 + t]), __float_as_uint(rows[(g + 8) * 32 + t]),
        __float_as_uint(rows[g * 32 + t + 4]), __float_as_uint(rows[(g + 8) * 32 + t + 4])};
    mma_m16n8k8_tf32(sums, a_registers, __float_as_uint(columns[g * 32 + t]),
                     __float_as_uint(columns[g * 32 + t + 4]));
  }
  store_vector(out + g * 8 + 2 * t, make_float2(sums[0], sums[1]));
  store_vector(out + (g + 8) * 8 + 2 * t, make_float2(sums[2], sums[3]));
}

}  // namespace

const char* sum_of_blocks(const float* values, float* out, int blocks, Stream stream) {
  return launch(sum_kernel, blocks, 256, 0, stream, values, out);
}

template <typename T>
const char* linear_attention(const T* query, const T* key, const T* value, float* out, int L, int S,
                             Stream stream) {
  return launch(linear_attention_kernel<T>, (L + kQueries - 1) / kQueries, 128, kSharedBytes,
                stream, query, key, value, out, L, S);
}
template const char* linear_attention(const Half*, const Half*, const Half*, float*, int, int,
                                      Stream);
template const char* linear_attention(const BFloat16*, const BFloat16*, const BFloat16*, float*,
                                      int, int, Stream);

const char* tf32_scores(const float* a, const float* b, float* out, Stream stream) {
  return launch(tf32_kernel, 1, 32, (16 + 8) * 32 * sizeof(float), stream, a, b, out);
}

}  // namespace ikattn::sample
