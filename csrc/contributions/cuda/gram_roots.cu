// The triangular factor of a token's transformed vectors in float32, as the root of their Gram
// matrix in float64: that has twice the digits which the square of a norm needs, so that |R a| is
// nearly as accurate as a sum of the vectors in float32, also where the heads cancel. Pairs'
// kernels multiply with a factor as fragments, which are written here, too.
#include "contributions/cuda/gram_factors.h"
#include "contributions/cuda/row_scale.h"
#include "contributions/cuda/streamed/fragments.h"

namespace ikattn::cuda {
namespace {

constexpr int kRootThreads = 128, kRootWarps = kRootThreads / 32;

// Writes the row and the column, 64 times the first and the second, of every entry; all threads of
// the block call it.
__device__ __forceinline__ void number_entries(int H, Shared<uint16_t> places) {
  for (int index = threadIdx.x; index < H * H; index += kRootThreads) {
    const int h = index / H, k = index % H;
    if (h <= k) places[factor_entry(H, h, k)] = static_cast<uint16_t>(64 * h + k);
  }
}

// Replaces gram by its root R, and stores it in `factors`, every kFactorBlock-th; one warp calls
// it.
//   sizes [H]: the diagonal of gram
//   places [triangle(H)]: of number_entries()
__device__ __forceinline__ void make_root(int H, Shared<double> gram, Shared<const double> sizes,
                                          Shared<const uint16_t> places, float* factors) {
  const int lane = threadIdx.x % 32, entries = factor_entry(H, H - 1, H - 1) + 1;
  for (int h = 0; h < H; ++h) {
    const double pivot = gram[factor_entry(H, h, h)], size = sizes[h];
    // Rounding is all that remains of a vector that depends on others before it. NaN stays.
    const bool vanishes = pivot <= size * (4 * H * 0x1p-53);
    const double inverse = vanishes ? 0.0 : rsqrt(pivot), norm = pivot * inverse;
    float* row = factors + int64_t{factor_entry(H, h, h)} * kFactorBlock;
    if (lane == 0) row[0] = static_cast<float>(norm);
    for (int k = h + 1 + lane; k < H; k += 32) {
      const double product = gram[factor_entry(H, h, k)];
      gram[factor_entry(H, h, k)] = product * inverse;
      row[(k - h) * kFactorBlock] = static_cast<float>(product * inverse);
    }
    __syncwarp();
    if (lane == 0) gram[factor_entry(H, h, h)] = norm;
    // The rows that are left follow this one, all of their entries side by side.
    for (int entry = factor_entry(H, h, H - 1) + 1 + lane; entry < entries; entry += 32) {
      const uint16_t place = places[entry];
      const double left = gram[factor_entry(H, h, place / 64)], rest = gram[entry];
      const double right = gram[factor_entry(H, h, place % 64)];
      gram[entry] = rest - left * right;
    }
    __syncwarp();
  }
}

// Splits a factor in shared memory into two fragments, [2][tiles][32][2], and tells its unit; by
// one warp.
__device__ __forceinline__ void store_fragments(int H, Shared<const double> root,
                                                uint32_t* fragments, float* unit) {
  const int lane = threadIdx.x % 32, tiles = static_cast<int>(head_tiles(H));
  const int count = static_cast<int>(fragment_tiles(tiles)) * 64;
  const auto factor = [&](int entry) -> float {
    const double element = root[entry];
    return static_cast<float>(element);
  };
  uint32_t largest = 0;
  for (int entry = lane; entry < static_cast<int>(triangle(H)); entry += 32) {
    largest = max(largest, magnitude_bits(factor(entry)));
  }
  const FactorScale scale(__uint_as_float(max_of_lanes(largest)));
  if (lane == 0) *unit = scale.unit;
  uint32_t* own = fragments + 2 * lane;
  for (int n = 0; n < 2 * tiles; ++n) {
    for (int k = n / 2; k < tiles; ++k, own += 64) {
      const uint2 low = fragment_register(scale, H, false, n, k, lane, 0, factor);
      const uint2 high = fragment_register(scale, H, false, n, k, lane, 1, factor);
      store_vector(own, make_uint2(low.x, high.x));
      store_vector(own + count, make_uint2(low.y, high.y));
    }
  }
}

// Adds up the parts of a Gram matrix and computes its root, a token in each warp. Dynamic shared
// memory: for each warp gram [triangle(H)] and sizes [H]; places [triangle(H)].
__global__ void __launch_bounds__(kRootThreads) gram_root_kernel(TokenGramParams params) {
  const int H = static_cast<int>(params.H), entries = static_cast<int>(triangle(H));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Shared<double> gram = dynamic_shared<double>() + warp * (entries + H);
  Shared<double> sizes = gram + entries;
  Shared<uint16_t> places =
      shared_cast<uint16_t>(dynamic_shared<double>() + kRootWarps * (entries + H));
  number_entries(H, places);
  __syncthreads();
  const int64_t token = int64_t{blockIdx.x} * kRootWarps + warp, count = params.B * params.tokens;
  if (token >= count) return;
  const int64_t b = token / params.tokens, j = params.j0 + token % params.tokens;
  const int64_t parts = gram_parts(params.D), blocks = (params.S + kFactorBlock - 1) / kFactorBlock;
  for (int entry = lane; entry < entries; entry += 32) {
    double sum = 0;
    for (int64_t part = 0; part < parts; ++part) {
      sum += params.parts[(part * count + token) * entries + entry];
    }
    gram[entry] = sum;
  }
  __syncwarp();
  for (int h = lane; h < H; h += 32) {
    const double square = gram[factor_entry(H, h, h)];
    sizes[h] = square;
    if (params.value_norms == nullptr) continue;
    params.value_norms[(b * H + h) * params.S + j] = static_cast<float>(sqrt(square));
  }
  __syncwarp();
  if (params.factors == nullptr) return;
  make_root(
      H, gram, sizes, places,
      params.factors + (b * blocks + j / kFactorBlock) * entries * kFactorBlock + j % kFactorBlock);
  if (params.fragments == nullptr) return;
  const int64_t key = b * params.S + j, words = fragment_words(H, true);
  store_fragments(H, gram, params.fragments + key * words,
                  units_of(params.fragments, params.B * params.S, H) + key);
}

}  // namespace

const char* gram_roots(const TokenGramParams& params, Stream stream) {
  const int64_t of_warp = (triangle(params.H) + params.H) * int64_t{sizeof(double)};
  const int64_t bytes = kRootWarps * of_warp + triangle(params.H) * int64_t{sizeof(uint16_t)};
  const int64_t blocks = (params.B * params.tokens + kRootWarps - 1) / kRootWarps;
  return launch(gram_root_kernel, dim3(static_cast<unsigned>(blocks)), dim3(kRootThreads), bytes,
                stream, params);
}

}  // namespace ikattn::cuda
