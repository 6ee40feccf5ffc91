// The triangular factor of a token's transformed vectors in float32, as the root of their Gram
// matrix in float64: that has twice the digits which the square of a norm needs, so that |R a| is
// nearly as accurate as a sum of the vectors in float32, also where the heads cancel.
//
// Vectors never leave the chip. A block makes those of 32 tokens, 16 or 32 dimensions at a time, as
// products of TF32 on tensor cores: both sides are two numbers, which hold 23 of 24 bits, or one
// where they were given in 16 bits. What is small times small is left out. Their Gram matrices are
// sums of products in float64, exact but for the sum. Blocks share the dimensions, and a second
// kernel adds up what they leave, in order, and makes the roots.
#include "contributions/cuda/kernels.h"
#include "support/cuda/intrinsics.h"

namespace ikattn::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kTokens = 32, kOfWarp = kTokens / kWarps;
constexpr int kGroup = 16;  // heads whose products with as many a block makes
constexpr int kRootThreads = 128, kRootWarps = kRootThreads / 32;

// Of the matrix, row by row.
__device__ __forceinline__ int entry_of(int H, int h, int k) {
  return h * H - h * (h - 1) / 2 + k - h;
}

// Where vectors of kColumns dimensions, 16 or 32, lie in shared memory: [slot of a head][token],
// columns by eights in another order in every 32 elements. Neither lanes that store tokens nor
// those that load heads meet in a bank.
template <int kColumns>
struct Places {
  static constexpr int kHeadPitch = kTokens * kColumns + 16;
  static __device__ __forceinline__ int of(int slot, int token, int column) {
    const int order = token * kColumns / 32 % (kColumns / 8) * 8;
    return slot * kHeadPitch + token * kColumns + (column ^ order);
  }
};

// The tokens and heads of a block: products of the heads from h0 with those from k0 on.
struct GramBlock {
  const TokenGramParams& params;
  int h0 = 0, k0 = 0;
  int64_t b, first;  // token, of the round

  __device__ __forceinline__ explicit GramBlock(const TokenGramParams& params) : params(params) {
    const int64_t blocks = (params.tokens + kTokens - 1) / kTokens;
    b = blockIdx.x / blocks;
    first = blockIdx.x % blocks * kTokens;
    // The pairs of groups row by row.
    int pair = blockIdx.z, groups = static_cast<int>((params.H + kGroup - 1) / kGroup);
    for (; pair >= groups; --groups) {
      pair -= groups;
      h0 += kGroup;
    }
    k0 = h0 + pair * kGroup;
  }
  __device__ __forceinline__ bool is_diagonal() const { return h0 == k0; }
  // Heads from h0 on, and behind the first group those from k0 on.
  __device__ __forceinline__ int heads() const {
    const int last = min(kGroup, static_cast<int>(params.H) - k0);
    return is_diagonal() ? last : kGroup + last;
  }
  __device__ __forceinline__ int head(int slot) const {
    return slot < kGroup ? h0 + slot : k0 + slot - kGroup;
  }
  // nullptr: there is no such token, or dimension
  __device__ __forceinline__ const float* value(int h, int token) const {
    if (first + token >= params.tokens) return nullptr;
    const int64_t g = h / (params.H / params.G), j = params.j0 + first + token;
    const int64_t* stride = params.value.stride;
    return static_cast<const float*>(params.value.data) + b * stride[0] + g * stride[1] +
           j * stride[2];
  }
  __device__ __forceinline__ const float* projection(int h, int64_t c) const {
    return c < params.D ? params.projection + (c * params.H + h) * params.width : nullptr;
  }
};

// Four elements of a row from r on.
__device__ __forceinline__ float4 load_four(const float* row, int64_t r) {
  return row != nullptr ? load_vector<float4>(row + r) : make_float4(0, 0, 0, 0);
}

// The next number of TF32, or below the largest ones, from which one rounds to infinity, the last.
__device__ __forceinline__ float first_number(float x) {
  const float rounded = tf32_rounded(x);
  return fabsf(rounded) < INFINITY ? rounded : __uint_as_float(__float_as_uint(x) & 0xffffe000u);
}

// Four elements as one number or two, of which the second is what the first leaves: the inner
// places t and t + 4 of two products.
template <int kNumbers>
struct FourNumbers {
  uint32_t number[2][4];

  __device__ __forceinline__ FourNumbers(const float4& four) {
    const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float first = kNumbers == 1 ? x[i] : first_number(x[i]);
      number[0][i] = __float_as_uint(first);
      number[1][i] = kNumbers == 1 ? 0 : __float_as_uint(tf32_rounded(x[i] - first));
    }
  }
};

// The vectors of the dimensions from c0 on. A warp makes those of a head, 16 tokens and 16
// dimensions at a time.
template <int kColumns, int kValueNumbers, int kProjectionNumbers>
__device__ __forceinline__ void make_vectors(const GramBlock& block, int64_t c0,
                                             Shared<float> vectors) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int items = block.heads() * 2 * (kColumns / 16);
  const int width = static_cast<int>(block.params.width), last = width - kGramWidth + 4 * t;
#pragma unroll 1
  for (int item = warp; item < items; item += kWarps) {
    const int slot = item / 2 / (kColumns / 16), h = block.head(slot);
    const int token = item % 2 * 16 + g, column = item / 2 % (kColumns / 16) * 16;
    const float* values[2] = {block.value(h, token), block.value(h, token + 8)};
    const float* columns[2] = {block.projection(h, c0 + column + g),
                               block.projection(h, c0 + column + 8 + g)};
    float sums[2][4] = {};
    float4 next[2] = {load_four(columns[0], 4 * t), load_four(columns[1], 4 * t)};
#pragma unroll 1
    for (int r = 4 * t; r < width; r += kGramWidth) {
      const FourNumbers<kProjectionNumbers> sides[2] = {{next[0]}, {next[1]}};
      const FourNumbers<kValueNumbers> rows[2] = {{load_four(values[0], r)},
                                                  {load_four(values[1], r)}};
      // From further away than values, which a block reads again and again.
      next[0] = load_four(columns[0], min(r + kGramWidth, last));
      next[1] = load_four(columns[1], min(r + kGramWidth, last));
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        uint32_t a[2][4];
#pragma unroll
        for (int number = 0; number < kValueNumbers; ++number) {
#pragma unroll
          for (int place = 0; place < 4; ++place) {
            a[number][place] = rows[place % 2].number[number][i + place / 2];
          }
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const uint32_t (&b)[2][4] = sides[n].number;
          if (kValueNumbers == 2) mma_m16n8k8_tf32(sums[n], a[1], b[0][i], b[0][i + 1]);
          if (kProjectionNumbers == 2) mma_m16n8k8_tf32(sums[n], a[0], b[1][i], b[1][i + 1]);
          mma_m16n8k8_tf32(sums[n], a[0], b[0][i], b[0][i + 1]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int place = Places<kColumns>::of(slot, token + 8 * row, column + 8 * n + 2 * t);
        store_vector(vectors + place, make_float2(sums[n][2 * row], sums[n][2 * row + 1]));
      }
    }
  }
}

// The products of a token's heads, four tiles of 8 by 8, by a warp.
struct TokenGram {
  double sums[2][2][2] = {};

  // Of 16 dimensions from `column` on.
  template <int kColumns>
  __device__ __forceinline__ void add(const GramBlock& block, Shared<const float> vectors,
                                      int token, int column) {
    const int lane = threadIdx.x % 32, heads = block.heads();
    const bool is_diagonal = block.is_diagonal();
    float4 of_tile[4];
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      const int slot = 8 * tile + lane / 4;
      of_tile[tile] = make_float4(0, 0, 0, 0);
      if (slot >= heads) continue;
      const int place = Places<kColumns>::of(slot, token, column + lane % 4 * 4);
      of_tile[tile] = load_vector<float4>(vectors + place);
    }
    __syncwarp();  // lanes of no head come to the products with the others
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      double left[2], right[2];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        left[tile] = element(of_tile[tile], i);
        right[tile] = is_diagonal ? left[tile] : element(of_tile[2 + tile], i);
      }
      mma_m8n8k4_f64(sums[0][0], left[0], right[0]);
      mma_m8n8k4_f64(sums[0][1], left[0], right[1]);
      mma_m8n8k4_f64(sums[1][1], left[1], right[1]);
      if (!is_diagonal) mma_m8n8k4_f64(sums[1][0], left[1], right[0]);
    }
  }
  static __device__ __forceinline__ double element(const float4& four, int i) {
    return static_cast<double>(i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w);
  }
  // To entries [triangle(H)] of the token.
  __device__ __forceinline__ void store(const GramBlock& block, double* entries) const {
    const int lane = threadIdx.x % 32, H = static_cast<int>(block.params.H);
#pragma unroll
    for (int index = 0; index < 8; ++index) {
      const int row = index / 4, column = index / 2 % 2, i = index % 2;
      const int h = block.h0 + 8 * row + lane / 4, k = block.k0 + 8 * column + lane % 4 * 2 + i;
      if (h <= k && k < H) entries[entry_of(H, h, k)] = sums[row][column][i];
    }
  }
};

// params.parts, of blocks (tokens, parts, pairs of groups of heads).
template <int kColumns, int kValueNumbers, int kProjectionNumbers>
__global__ void __launch_bounds__(kThreads, 1) token_gram_kernel(TokenGramParams params) {
  Shared<float> vectors = dynamic_shared<float>();
  const GramBlock block(params);
  const int64_t part = blockIdx.y, step = columns_of_gram_part(params.D);
  const int64_t end = min((part + 1) * step, params.D);
  const int first = threadIdx.x / 32 * kOfWarp;  // token of the warp
  TokenGram grams[kOfWarp];
#pragma unroll 1
  for (int64_t c0 = part * step; c0 < end; c0 += kColumns) {
    make_vectors<kColumns, kValueNumbers, kProjectionNumbers>(block, c0, vectors);
    __syncthreads();
#pragma unroll 1
    for (int column = 0; column < kColumns; column += 16) {
#pragma unroll
      for (int n = 0; n < kOfWarp; ++n) {
        grams[n].add<kColumns>(block, vectors, first + n, column);
      }
    }
    __syncthreads();
  }
  double* of_part = params.parts + part * params.B * params.tokens * triangle(params.H);
#pragma unroll
  for (int n = 0; n < kOfWarp; ++n) {
    const int64_t token = block.first + first + n;
    if (token >= params.tokens) break;
    grams[n].store(block, of_part + (block.b * params.tokens + token) * triangle(params.H));
  }
}

// The row and the column, 64 times the first and the second, of every entry; by the whole block.
__device__ __forceinline__ void number_entries(int H, Shared<uint16_t> places) {
  for (int index = threadIdx.x; index < H * H; index += kRootThreads) {
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

// What the parts of a Gram matrix leave, and its root, by a warp for each token. Dynamic shared
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
    const double square = gram[entry_of(H, h, h)];
    sizes[h] = square;
    if (params.value_norms == nullptr) continue;
    params.value_norms[(b * H + h) * params.S + j] = static_cast<float>(sqrt(square));
  }
  __syncwarp();
  if (params.factors == nullptr) return;
  make_root(
      H, gram, sizes, places,
      params.factors + (b * blocks + j / kFactorBlock) * entries * kFactorBlock + j % kFactorBlock);
}

template <int kColumns, int kValueNumbers, int kProjectionNumbers>
const char* launch_grams(const TokenGramParams& params, Stream stream) {
  const int64_t groups = (params.H + kGroup - 1) / kGroup;
  const int64_t blocks = params.B * ((params.tokens + kTokens - 1) / kTokens);
  const int64_t heads = groups > 1 ? 2 * kGroup : params.H;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(gram_parts(params.D)),
                  static_cast<unsigned>(triangle(groups)));
  return launch(token_gram_kernel<kColumns, kValueNumbers, kProjectionNumbers>, grid,
                dim3(kThreads), heads * Places<kColumns>::kHeadPitch * int64_t{sizeof(float)},
                stream, params);
}

// Of one group of heads more dimensions have room than of two.
template <int kValueNumbers, int kProjectionNumbers>
const char* token_grams(const TokenGramParams& params, Stream stream) {
  return params.H <= kGroup ? launch_grams<32, kValueNumbers, kProjectionNumbers>(params, stream)
                            : launch_grams<16, kValueNumbers, kProjectionNumbers>(params, stream);
}

}  // namespace

const char* gram_factors(const TokenGramParams& params, Stream stream) {
  const char* error = !params.value_is_short       ? token_grams<2, 2>(params, stream)
                      : params.projection_is_short ? token_grams<1, 1>(params, stream)
                                                   : token_grams<1, 2>(params, stream);
  if (error != nullptr) return error;
  const int64_t of_warp = (triangle(params.H) + params.H) * int64_t{sizeof(double)};
  const int64_t bytes = kRootWarps * of_warp + triangle(params.H) * int64_t{sizeof(uint16_t)};
  const int64_t blocks = (params.B * params.tokens + kRootWarps - 1) / kRootWarps;
  return launch(gram_root_kernel, dim3(static_cast<unsigned>(blocks)), dim3(kRootThreads), bytes,
                stream, params);
}

}  // namespace ikattn::cuda
