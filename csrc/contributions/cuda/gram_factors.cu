// The Gram matrices of tokens' transformed vectors, of which gram_roots.cu makes their factors.
//
// Vectors never leave the chip. A block makes those of 32 tokens, 16 dimensions at a time, as
// products of Half on tensor cores. Both sides are split into two operands, over a power of two for
// each row of a head, or one where they were given in 16 bits; what is small times small is left
// out. Rows whose elements differ by more than Half has digits for are multiplied in float32. The
// Gram matrices are sums of products in float64, exact but for the sum. Up to 16 heads half of the
// warps make vectors while the others multiply those before. Blocks share the dimensions.
#include <algorithm>

#include "contributions/cuda/gram_factors.h"
#include "contributions/cuda/row_scale.h"
#include "support/cuda/intrinsics.h"

namespace ikattn::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kTokens = 32, kOfWarp = kTokens / kWarps;
constexpr int kColumns = 16;    // dimensions that are made at a time
constexpr int kHeadGroup = 16;  // heads whose products with as many a block makes

// Layout of vectors in shared memory: [slot of a head][token], columns by eights in another order
// in every 32 elements. Neither lanes that store tokens nor those that load heads meet in a bank.
constexpr int kHeadPitch = kTokens * kColumns + 16;
__device__ __forceinline__ int place_of(int slot, int token, int column) {
  return slot * kHeadPitch + token * kColumns + (column ^ token / 2 % 2 * 8);
}

// The tokens and heads of a block: products of the heads from h0 with those from k0 on.
struct GramBlock {
  const TokenGramParams& params;
  int h0 = 0, k0 = 0;
  int b, first;  // token, of the round

  __device__ __forceinline__ explicit GramBlock(const TokenGramParams& params) : params(params) {
    const unsigned blocks = static_cast<unsigned>((params.tokens + kTokens - 1) / kTokens);
    b = blockIdx.x / blocks;
    first = blockIdx.x % blocks * kTokens;
    // The pairs of groups row by row.
    int pair = blockIdx.z, groups = static_cast<int>((params.H + kHeadGroup - 1) / kHeadGroup);
    for (; pair >= groups; --groups) {
      pair -= groups;
      h0 += kHeadGroup;
    }
    k0 = h0 + pair * kHeadGroup;
  }
  __device__ __forceinline__ bool is_diagonal() const { return h0 == k0; }
  // Returns how many heads there are: from h0 on, and behind the first group from k0 on.
  __device__ __forceinline__ int heads() const {
    const int last = min(kHeadGroup, static_cast<int>(params.H) - k0);
    return is_diagonal() ? last : kHeadGroup + last;
  }
  __device__ __forceinline__ int head(int slot) const {
    return slot < kHeadGroup ? h0 + slot : k0 + slot - kHeadGroup;
  }
  // Returns how many tokens there are to read.
  __device__ __forceinline__ int tokens() const {
    return min(kTokens, static_cast<int>(params.tokens) - first);
  }
  __device__ __forceinline__ const float* value(int h, int token) const {
    const int64_t g = h / (static_cast<int>(params.H) / static_cast<int>(params.G));
    const int64_t j = params.j0 + first + token;
    const int64_t* stride = params.value.stride;
    return static_cast<const float*>(params.value.data) + b * stride[0] + g * stride[1] +
           j * stride[2];
  }
  // Returns a row of the projection; nullptr: there is no such dimension
  __device__ __forceinline__ const float* projection(int h, int c) const {
    return c < params.D ? params.projection + (int64_t{c} * params.H + h) * params.width : nullptr;
  }
};

// Loads four elements of a row from r on.
__device__ __forceinline__ float4 load_four(const float* row, int r) {
  return row != nullptr ? load_vector<float4>(row + r) : make_float4(0, 0, 0, 0);
}

// Returns the scale of a row that the four lanes of a `t` share, for kSplits split operands of
// Half; all lanes come.
template <int kSplits>
__device__ __forceinline__ RowScale scale_of_row(const float* row, int width) {
  RowRange range;
  for (int r = threadIdx.x % 4 * 4; r < width; r += kGramWidth) {
    const float4 four = load_four(row, r);
    range.add(four.x);
    range.add(four.y);
    range.add(four.z);
    range.add(four.w);
  }
  range.combine<4>();
  return RowScale(range.largest, range.is_wide<kSplits>());
}

// Finds the values' scales, [slot][token]; all threads of the block call it.
template <int kSplits>
__device__ __forceinline__ void find_value_scales(const GramBlock& block, Shared<float> scales) {
  const int lane = threadIdx.x % 32, width = static_cast<int>(block.params.width);
#pragma unroll 1
  for (int item = threadIdx.x / 32; item < block.heads() * kTokens / 8; item += kWarps) {
    const int slot = item / (kTokens / 8), token = item % (kTokens / 8) * 8 + lane / 4;
    const float* row = token < block.tokens() ? block.value(block.head(slot), token) : nullptr;
    const RowScale scale = scale_of_row<kSplits>(row, width);
    if (lane % 4 == 0) scales[slot * kTokens + token] = scale.scale;
  }
}

// Splits four elements of a row, times its scale, into kSplits operands of Half: the inner places
// 2t, 2t + 1, 2t + 8 and 2t + 9 of a product.
template <int kSplits>
struct FourSplits {
  uint32_t two[2][kSplits];

  __device__ __forceinline__ FourSplits(const float4& four, float scale) {
    split_pair<kSplits>(four.x * scale, four.y * scale, two[0]);
    split_pair<kSplits>(four.z * scale, four.w * scale, two[1]);
  }
};

// A head's values of a lane's tokens, every eighth of the block.
struct ValueRows {
  const float* first;
  int64_t step;
  int tokens;  // up to the block's last

  __device__ __forceinline__ ValueRows(const GramBlock& block, int h, int g)
      : first(block.value(h, g)),
        step(8 * block.params.value.stride[2]),
        tokens(block.tokens() - g) {}
  __device__ __forceinline__ float4 operator()(int i, int r) const {
    return load_four(8 * i < tokens ? first + i * step : nullptr, r);
  }
};

// The vectors of a head, 32 tokens and 16 dimensions, as sums of products: of tokens
// 16 m + g + 8 r and dimensions 8 n + 2t + i in sums[m][n][2 r + i]. A warp makes them.
template <int kValueSplits, int kProjectionSplits>
struct HeadVectors {
  float sums[2][2][4] = {};
  RowScale of_dimensions[2];      // g + 8 n
  Shared<const float> of_tokens;  // scales, of the lane's tokens every eighth

  __device__ __forceinline__ HeadVectors(const GramBlock& block, int slot, int c0,
                                         Shared<const float> scales)
      : of_tokens(scales + slot * kTokens + threadIdx.x % 32 / 4) {
    // Unknown to the compiler, addresses are computed anew in each step, and take no registers
    // between.
    const int g = unknown_to_compiler(threadIdx.x) % 32 / 4, h = block.head(slot);
    const int width = static_cast<int>(block.params.width);
    const ValueRows values(block, h, g);
    const float* columns[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      columns[n] = block.projection(h, c0 + g + 8 * n);
      // L1 has it when it is read again.
      of_dimensions[n] = scale_of_row<kProjectionSplits>(columns[n], width);
    }
#pragma unroll 1
    for (int r = threadIdx.x % 4 * 4; r < width; r += kGramWidth) {
      const FourSplits<kProjectionSplits> sides[2] = {
          {load_four(columns[0], r), of_dimensions[0].scale},
          {load_four(columns[1], r), of_dimensions[1].scale}};
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        // Read again where they are needed, for registers are few.
        Shared<const float> own = of_tokens + unknown_to_compiler(16 * m);
        const FourSplits<kValueSplits> rows[2] = {{values(2 * m, r), own[0]},
                                                  {values(2 * m + 1, r), own[8]}};
        add(rows, sides, sums[m]);
      }
    }
  }
  __device__ __forceinline__ void store(int slot, Shared<float> vectors) const {
    const int lane = unknown_to_compiler(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float halves[2][2];  // halves of the inverse scales of the dimensions 2t and 2t + 1
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        RowScale own;
        own.scale = __shfl_sync(0xffffffffu, of_dimensions[n].scale, 4 * (2 * t + i));
        halves[i][0] = own.half_of_inverse(0);
        halves[i][1] = own.half_of_inverse(1);
      }
#pragma unroll
      for (int row = 0; row < 4; ++row) {
        RowScale own;
        own.scale = of_tokens[8 * row];
        const float first = own.half_of_inverse(0), second = own.half_of_inverse(1);
        float x[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          x[i] =
              sums[row / 2][n][row % 2 * 2 + i] * (first * halves[i][0]) * (second * halves[i][1]);
        }
        store_vector(vectors + place_of(slot, g + 8 * row, 8 * n + 2 * t), make_float2(x[0], x[1]));
      }
    }
  }

  // Replaces the products of wide rows by sums in float32, after store(). A token's sums do not
  // depend on others.
  __device__ __forceinline__ void mend_wide_rows(const GramBlock& block, int slot, int c0,
                                                 Shared<float> vectors) const {
    bool is_wide = of_dimensions[0].is_wide() || of_dimensions[1].is_wide();
#pragma unroll
    for (int row = 0; row < 4; ++row) is_wide = is_wide || of_tokens[8 * row] < 0;
    if (!__any_sync(0xffffffffu, is_wide)) return;
    const int lane = unknown_to_compiler(threadIdx.x) % 32, g = lane / 4, h = block.head(slot);
    const ValueRows values(block, h, g);
#pragma unroll 1
    for (int index = 0; index < 4; ++index) {
      const int column = index / 2 * 8 + lane % 4 * 2 + index % 2;
      const float scales[2] = {__shfl_sync(0xffffffffu, of_dimensions[0].scale, column % 8 * 4),
                               __shfl_sync(0xffffffffu, of_dimensions[1].scale, column % 8 * 4)};
      const float* side = block.projection(h, c0 + column);
#pragma unroll 1
      for (int row = 0; row < 4; ++row) {
        if (scales[index / 2] > 0 && of_tokens[8 * row] > 0) continue;
        float sum = 0;
#pragma unroll 1
        for (int r = 0; r < static_cast<int>(block.params.width); r += 4) {
          const float4 x = values(row, r), y = load_four(side, r);
          sum = fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum))));
        }
        vectors[place_of(slot, g + 8 * row, column)] = sum;
      }
    }
  }

 private:
  static __device__ __forceinline__ void add(const FourSplits<kValueSplits> (&rows)[2],
                                             const FourSplits<kProjectionSplits> (&sides)[2],
                                             float (&sums)[2][4]) {
    uint32_t a[kValueSplits][4];
#pragma unroll
    for (int number = 0; number < kValueSplits; ++number) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[number][i] = rows[i % 2].two[i / 2][number];
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint32_t (&b)[2][kProjectionSplits] = sides[n].two;
      if constexpr (kValueSplits == 2) mma_m16n8k16<Half>(sums[n], a[1], b[0][0], b[1][0]);
      if constexpr (kProjectionSplits == 2) mma_m16n8k16<Half>(sums[n], a[0], b[0][1], b[1][1]);
      mma_m16n8k16<Half>(sums[n], a[0], b[0][0], b[1][0]);
    }
  }
};

// The products of a token's heads, four tiles of 8 by 8, by a warp.
template <bool kIsOneGroup>
struct TokenGram {
  double sums[2][2][2] = {};

  __device__ __forceinline__ void add(const GramBlock& block, Shared<const float> vectors,
                                      int token) {
    const int lane = unknown_to_compiler(threadIdx.x) % 32, heads = block.heads();
    const bool is_diagonal = kIsOneGroup || block.is_diagonal();
    float4 of_tile[4];
#pragma unroll
    for (int tile = 0; tile < (kIsOneGroup ? 2 : 4); ++tile) {
      const int slot = 8 * tile + lane / 4;
      of_tile[tile] = make_float4(0, 0, 0, 0);
      if (slot >= heads) continue;
      of_tile[tile] = load_vector<float4>(vectors + place_of(slot, token, lane % 4 * 4));
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
  // Stores the entries [triangle(H)] of the token, and begins anew.
  __device__ __forceinline__ void store(const GramBlock& block, double* entries) {
    // Unknown to the compiler, places are computed anew in each part, and take no registers
    // between.
    const int lane = unknown_to_compiler(threadIdx.x) % 32, H = static_cast<int>(block.params.H);
#pragma unroll
    for (int index = 0; index < 8; ++index) {
      const int row = index / 4, column = index / 2 % 2, i = index % 2;
      const int h = block.h0 + 8 * row + lane / 4, k = block.k0 + 8 * column + lane % 4 * 2 + i;
      if (h <= k && k < H) entries[factor_entry(H, h, k)] = sums[row][column][i];
      sums[row][column][i] = 0;
    }
  }
};

// Place of a block's vectors, by step. For one group of heads there is room for two steps: each
// warp makes vectors of the next before or behind the products of this one. Of two there is one.
template <bool kIsOneGroup>
struct Steps {
  static constexpr int kCount = kIsOneGroup ? 2 : 1;
  static constexpr int kSlots = kIsOneGroup ? kHeadGroup : 2 * kHeadGroup;
  static constexpr int kScaleBytes = kSlots * kTokens * int{sizeof(float)};

  static int64_t shared_bytes(int64_t H) {
    const int64_t heads = kIsOneGroup ? H : kSlots;
    return kScaleBytes + kCount * heads * kHeadPitch * int64_t{sizeof(float)};
  }
  __device__ static __forceinline__ Shared<float> vectors(int heads, int c0) {
    const int step = c0 / kColumns % kCount;
    return dynamic_shared<float>(kScaleBytes) + step * heads * kHeadPitch;
  }
  // Returns in which of the turns 0 and 1 a warp makes vectors; on each scheduler there are warps
  // of both.
  __device__ static __forceinline__ int turn_of_making() {
    return kIsOneGroup ? threadIdx.x / 128 % 2 : 1;
  }
};

// params.parts, of blocks (tokens, parts, pairs of groups of heads), of which each takes
// params.parts_of_block parts, one after the other. Dynamic shared memory: scales of values
// [slot][token]; vectors [steps][slot][token][column].
template <bool kIsOneGroup, int kValueSplits, int kProjectionSplits>
__global__ void __launch_bounds__(kThreads, 1) token_gram_kernel(TokenGramParams params) {
  Shared<float> scales = dynamic_shared<float>();
  const GramBlock block(params);
  const int D = static_cast<int>(params.D);
  const int of_part = static_cast<int>(columns_of_gram_part(D));
  const int begin = static_cast<int>(blockIdx.y * params.parts_of_block) * of_part;
  const int end = min(begin + static_cast<int>(params.parts_of_block) * of_part, D);
  const int warp = threadIdx.x / 32, heads = block.heads();
  const int making = Steps<kIsOneGroup>::turn_of_making();
  TokenGram<kIsOneGroup> grams[kOfWarp];
  find_value_scales<kValueSplits>(block, scales);
  __syncthreads();
#pragma unroll 1
  for (int c0 = begin - kColumns; c0 < end; c0 += kColumns) {
    const int next = c0 + kColumns;
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
      if (turn == making) {
#pragma unroll 1
        for (int slot = unknown_to_compiler(warp); slot < heads && next < end; slot += kWarps) {
          const HeadVectors<kValueSplits, kProjectionSplits> own(block, slot, next, scales);
          Shared<float> vectors = Steps<kIsOneGroup>::vectors(heads, next);
          own.store(slot, vectors);
          own.mend_wide_rows(block, slot, next, vectors);
        }
      } else if (c0 >= begin) {
        Shared<const float> vectors = Steps<kIsOneGroup>::vectors(heads, c0);
#pragma unroll
        for (int n = 0; n < kOfWarp; ++n) grams[n].add(block, vectors, warp * kOfWarp + n);
      }
      if (turn == 0 && !kIsOneGroup) __syncthreads();
    }
    __syncthreads();
    if (c0 < begin || (next % of_part != 0 && next < end)) continue;
#pragma unroll
    for (int n = 0; n < kOfWarp; ++n) {
      const int64_t token = block.first + warp * kOfWarp + n;
      if (token >= params.tokens) break;
      const int64_t row = (c0 / of_part * params.B + block.b) * params.tokens + token;
      grams[n].store(block, params.parts + row * triangle(params.H));
    }
  }
}

// Returns how many parts a block has: it reads values once for all of them. They are as many as
// take no longer, where a multiprocessor has one block at a time.
//   blocks: of one part
int64_t parts_of_block(int64_t blocks, int64_t parts) {
  const int64_t room = std::max<int64_t>(1, multiprocessors());
  const auto time = [&](int64_t count) {
    const int64_t all = blocks * ((parts + count - 1) / count);
    return (all + room - 1) / room * count;
  };
  int64_t best = 1;
  for (int64_t count = 2; count <= parts; count *= 2) {
    if (time(count) <= time(1)) best = count;
  }
  return best;
}

template <bool kIsOneGroup, int kValueSplits, int kProjectionSplits>
const char* launch_grams(TokenGramParams params, Stream stream) {
  const int64_t groups = (params.H + kHeadGroup - 1) / kHeadGroup, pairs = triangle(groups);
  const int64_t blocks = params.B * ((params.tokens + kTokens - 1) / kTokens);
  const int64_t parts = gram_parts(params.D);
  params.parts_of_block = parts_of_block(blocks * pairs, parts);
  const int64_t shares = (parts + params.parts_of_block - 1) / params.parts_of_block;
  return launch(token_gram_kernel<kIsOneGroup, kValueSplits, kProjectionSplits>,
                dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(shares),
                     static_cast<unsigned>(pairs)),
                dim3(kThreads), Steps<kIsOneGroup>::shared_bytes(params.H), stream, params);
}

template <int kValueSplits, int kProjectionSplits>
const char* token_grams(const TokenGramParams& params, Stream stream) {
  return params.H <= kHeadGroup
             ? launch_grams<true, kValueSplits, kProjectionSplits>(params, stream)
             : launch_grams<false, kValueSplits, kProjectionSplits>(params, stream);
}

}  // namespace

const char* gram_factors(const TokenGramParams& params, Stream stream) {
  const char* error = !params.value_is_short       ? token_grams<2, 2>(params, stream)
                      : params.projection_is_short ? token_grams<1, 1>(params, stream)
                                                   : token_grams<1, 2>(params, stream);
  return error != nullptr ? error : gram_roots(params, stream);
}

}  // namespace ikattn::cuda
