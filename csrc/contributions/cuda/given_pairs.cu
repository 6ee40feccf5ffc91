// The norms |R_j a_ij| of given weights, float32 or of 16 bits, on tensor cores: of each key a
// product of weights, queries by heads, and the transposed factor, heads by rows. A weight of
// float32 is split into two operands of Half, a weight of 16 bits is one, over a power of two of
// its pair; a factor is always two. So weights may be of any size, and a pair's digits are those of
// its own heads.
//
// A block takes the keys of one row of copies, and 64 queries, 16 at a time, which are copied while
// those before are multiplied. A warp takes four keys, of many heads two.
#include "contributions/cuda/given_pairs.h"
#include "contributions/cuda/pairs.h"
#include "contributions/cuda/row_scale.h"

namespace ikattn::cuda {
namespace {

constexpr int kTileQueries = 16, kBlockQueries = 64;
constexpr uint32_t kInfinityBits = 0x7f800000u;
// Weights and factors are scaled to below 2^15, and have 22 bits. The square of a norm that is less
// than 2^-10 of the largest product would have few of them: of a head with small vectors beside one
// with large ones that has no weight.
constexpr float kFaintSquare = 0x1p38f;

// W: of the weights. kHeadTiles: 16 heads each.
template <typename W, int kHeadTiles>
struct GivenTile {
  static constexpr int kKeys = kHeadTiles == 1 ? 32 : kHeadTiles == 2 ? 16 : 8;
  static constexpr int kWarpKeys = kHeadTiles > 2 ? 2 : 4;
  static constexpr int kThreads = kKeys / kWarpKeys * 32;
  static constexpr int kRowBytes = kKeys * int{sizeof(W)}, kPieces = kRowBytes / 16;
  static constexpr int kWords = kWarpKeys * int{sizeof(W)} / 4;  // that hold a row of a warp's keys

  static constexpr int64_t kFactorWords = fragment_words(16 * kHeadTiles, true);

  IKATTN_HOST_DEVICE static int64_t stage_bytes(int64_t H) { return H * kTileQueries * kRowBytes; }
  // Returns the place of a byte of a row of the weights [head][query][key]. Pieces of 16 bytes are
  // rotated, and neighbouring lanes read from different banks.
  __device__ static __forceinline__ uint32_t place(int head, int query, int byte) {
    const int turn = query % 2 * 4 + head / 2 % 4;
    return static_cast<uint32_t>((head * kTileQueries + query) * kRowBytes +
                                 ((byte / 16 ^ turn) & (kPieces - 1)) * 16 + byte % 16);
  }
};

struct GivenPlace {
  int64_t b, i0, j0, end;  // end: of the block's queries
};

template <typename Tile>
__device__ __forceinline__ GivenPlace given_place(const PairParams& params) {
  const int64_t key_blocks = (params.S + Tile::kKeys - 1) / Tile::kKeys;
  const int64_t row_blocks = (params.rows + kBlockQueries - 1) / kBlockQueries;
  const int64_t of_rows = blockIdx.x / key_blocks, i0 = of_rows % row_blocks * kBlockQueries;
  return {of_rows / row_blocks, i0, blockIdx.x % key_blocks * Tile::kKeys,
          min(params.rows, i0 + kBlockQueries)};
}

// Returns whether rows of weights lie in pieces of 16 bytes.
template <typename W>
bool is_in_pieces(const Array& weights) {
  constexpr int64_t kCount = 16 / int64_t{sizeof(W)};
  const int64_t* stride = weights.stride;
  return stride[3] == 1 && reinterpret_cast<uintptr_t>(weights.data) % 16 == 0 &&
         stride[0] % kCount == 0 && stride[1] % kCount == 0 && stride[2] % kCount == 0;
}

// Begins to copy the weights of 16 queries; zeros in the place of pairs that are not there.
template <typename W, typename Tile>
__device__ __forceinline__ void copy_weights(const PairParams& params, const GivenPlace& at,
                                             int64_t i0, bool in_pieces,
                                             Shared<unsigned char> stage) {
  const int64_t* stride = params.weights.stride;
  const W* weights = static_cast<const W*>(params.weights.data) + at.b * stride[0];
  const int H = static_cast<int>(params.H);
  const int step = in_pieces ? 16 / int{sizeof(W)} : 1, columns = Tile::kKeys / step;
  for (int index = threadIdx.x; index < H * kTileQueries * columns; index += Tile::kThreads) {
    const int key = index % columns * step, row = index / columns;
    const int query = row % kTileQueries, head = row / kTileQueries;
    const int64_t i = i0 + query, j = at.j0 + key;
    const bool there = i < at.end && j < params.S;
    const W* from =
        weights + head * stride[1] + (there ? i * stride[2] + j * stride[3] : int64_t{0});
    const uint32_t place = Tile::place(head, query, key * int{sizeof(W)});
    if (in_pieces) {
      const int64_t bytes = there ? min(int64_t{16}, (params.S - j) * int64_t{sizeof(W)}) : 0;
      cp_async_16(shared_address(stage) + place, from, static_cast<int>(bytes));
    } else {
      Shared<W> to = shared_cast<W>(stage + place);
      to[0] = there ? *from : W{};
    }
  }
  cp_async_commit();
}

// The weights of a warp's keys, 16 queries and all heads, as they are: of the queries g and g + 8,
// and the heads that lane t has of a product's left operand.
template <typename W, int kHeadTiles>
struct GivenWeights {
  using Tile = GivenTile<W, kHeadTiles>;
  uint32_t words[2][4 * kHeadTiles][Tile::kWords];

  __device__ __forceinline__ GivenWeights(int64_t H, Shared<const unsigned char> stage) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, warp = threadIdx.x / 32;
#pragma unroll
    for (int m = 0; m < 4 * kHeadTiles; ++m) {
      const int head = 16 * (m / 4) + m / 2 % 2 * 8 + 2 * t + m % 2;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int w = 0; w < Tile::kWords; ++w) words[r][m][w] = 0;
        if (head >= H) continue;
        const auto row =
            stage + Tile::place(head, g + 8 * r, warp * Tile::kWarpKeys * int{sizeof(W)});
        if constexpr (Tile::kWords == 4) {
          const uint4 four = load_vector<uint4>(shared_cast<const uint32_t>(row));
          words[r][m][0] = four.x;
          words[r][m][1] = four.y;
          words[r][m][2] = four.z;
          words[r][m][3] = four.w;
        } else if constexpr (Tile::kWords == 1) {
          words[r][m][0] = *shared_cast<const uint32_t>(row);
        } else {
          const uint2 two = load_vector<uint2>(shared_cast<const uint32_t>(row));
          words[r][m][0] = two.x;
          words[r][m][1] = two.y;
        }
      }
    }
  }
  // Returns the weight of the warp's key c.
  __device__ __forceinline__ float weight(int r, int m, int c) const {
    if constexpr (sizeof(W) == 4) {
      return __uint_as_float(words[r][m][c]);
    } else {
      const float2 two = unpack<W>(words[r][m][c / 2]);
      return c % 2 == 0 ? two.x : two.y;
    }
  }
  // Returns the largest of a pair's weights without their signs, as bits, of which NaN's are the
  // largest.
  __device__ __forceinline__ uint32_t largest(int r, int c) const {
    uint32_t bits = 0;
#pragma unroll
    for (int m = 0; m < 4 * kHeadTiles; ++m) {
      bits = max(bits, magnitude_bits(weight(r, m, c)));
    }
    return max_of_lanes<4>(bits);
  }
};

// Splits the k-th 16 heads of a key's weights into left operands: leading ones of Half, then the
// rest.
template <int kSplits, typename W, int kHeadTiles>
__device__ __forceinline__ void left_operands(const GivenWeights<W, kHeadTiles>& weights, int k,
                                              int c, const RowScale (&scales)[2],
                                              uint32_t (&parts)[kSplits][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int m = 4 * k + 2 * half;
      const float scale = scales[r].scale;
      uint32_t numbers[kSplits];
      split_pair<kSplits>(weights.weight(r, m, c) * scale, weights.weight(r, m + 1, c) * scale,
                          numbers);
#pragma unroll
      for (int part = 0; part < kSplits; ++part) parts[part][2 * half + r] = numbers[part];
    }
  }
}

// Computes |R_j a_ij|^2 over scales, of a warp's key c and the queries g and g + 8. Products of two
// small parts are below float32's digits.
template <typename W, int kHeadTiles>
__device__ __forceinline__ void square_sums(const GivenWeights<W, kHeadTiles>& weights,
                                            const uint32_t* fragments, int c,
                                            const RowScale (&scales)[2], float (&squares)[2]) {
  constexpr int kSplits = sizeof(W) == 4 ? 2 : 1;
  constexpr int kTiles = static_cast<int>(fragment_tiles(kHeadTiles));
  const uint32_t* own = fragments + threadIdx.x % 32 * 2;
  uint32_t a[kHeadTiles][kSplits][4];
#pragma unroll
  for (int k = 0; k < kHeadTiles; ++k) left_operands(weights, k, c, scales, a[k]);
  squares[0] = squares[1] = 0;
  // Many heads are not unrolled all at once: their fragments would be in registers together.
  [[maybe_unused]] constexpr int kUnrolled = kHeadTiles > 2 ? 2 : 2 * kHeadTiles;
#pragma unroll kUnrolled
  for (int n = 0; n < 2 * kHeadTiles; ++n) {  // 8 rows
    float sums[4] = {};
#pragma unroll
    for (int k = 0; k < kHeadTiles; ++k) {  // 16 heads
      if (k < n / 2) continue;
      const uint2 leading = load_vector<uint2>(own);
      const uint2 rest = load_vector<uint2>(own + kTiles * 64);
      own += 64;
      if constexpr (kSplits == 2) mma_m16n8k16<Half>(sums, a[k][1], leading.x, leading.y);
      mma_m16n8k16<Half>(sums, a[k][0], rest.x, rest.y);
      mma_m16n8k16<Half>(sums, a[k][0], leading.x, leading.y);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      squares[r] += sums[2 * r] * sums[2 * r] + sums[2 * r + 1] * sums[2 * r + 1];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) squares[r] = sum_of_lanes<4>(squares[r]);
}

// Stores the norms of a lane's key and the queries from i0 + g on. What is not finite, is faint, or
// left the range of float32 on its way, is made again in float64, of the weights and factors
// themselves.
__device__ __forceinline__ void store_norms(const PairParams& params, const GivenPlace& at,
                                            int variant, int64_t i0, int64_t j,
                                            const float (&norms)[2]) {
  if (j >= params.S) return;
  const int g = threadIdx.x % 32 / 4;
  const Array& out = variant == 0   ? params.norms[0]
                     : variant == 1 ? params.norms[1]
                                    : params.norms[2];
  const bool key_counts = !is_padding(params.key_padding, at.b, j);
#pragma unroll 1
  for (int r = 0; r < 2; ++r) {
    const int64_t i = i0 + g + 8 * r;
    if (i >= at.end) continue;
    float norm = r == 0 ? norms[0] : norms[1];
    if (!key_counts || is_padding(params.query_padding, at.b, i)) {
      norm = 0;
    } else if (!(norm < INFINITY)) {
      const void* factors = variant == 0   ? params.factors[0]
                            : variant == 1 ? params.factors[1]
                                           : params.factors[2];
      norm = norm_in_double<float>(params, at.b, i, j, factors);
    }
    static_cast<float*>(out.data)[at.b * out.stride[0] + i * out.stride[1] + j * out.stride[2]] =
        norm;
  }
}

// Computes the norms of 16 queries and a warp's keys, of all variants.
template <typename W, int kHeadTiles>
__device__ __forceinline__ void make_norms(const PairParams& params, const GivenPlace& at,
                                           int64_t i0, Shared<const unsigned char> stage) {
  constexpr int kWarpKeys = GivenTile<W, kHeadTiles>::kWarpKeys;
  const int t = threadIdx.x % 4;
  const int64_t first = at.j0 + threadIdx.x / 32 * kWarpKeys;
  const GivenWeights<W, kHeadTiles> weights(params.H, stage);
#pragma unroll 1
  for (int variant = 0; variant < params.variants; ++variant) {
    const auto* fragments = static_cast<const uint32_t*>(variant == 0   ? params.fragments[0]
                                                         : variant == 1 ? params.fragments[1]
                                                                        : params.fragments[2]);
    const float* units = units_of(fragments, params.B * params.S, params.H);
    float own[2] = {};  // sums of the lane's key, first + t
#pragma unroll
    for (int c = 0; c < kWarpKeys; ++c) {
      const uint32_t largest[2] = {weights.largest(0, c), weights.largest(1, c)};
      // Keys without weight are nothing, whatever they hold.
      if (!__any_sync(0xffffffffu, (largest[0] | largest[1]) != 0)) continue;
      const RowScale scales[2] = {RowScale(largest[0]), RowScale(largest[1])};
      const int64_t token = at.b * params.S + min(first + c, params.S - 1);
      const float unit = units[token];
      float squares[2];
      square_sums(weights, fragments + token * GivenTile<W, kHeadTiles>::kFactorWords, c, scales,
                  squares);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float norm = sqrtf(squares[r]) * unit * scales[r].inverse();
        const bool is_faint = squares[r] < kFaintSquare;
        if (largest[r] >= kInfinityBits || unit - unit != 0 || is_faint) norm = NAN;
        if (t == c) own[r] = largest[r] == 0 ? 0.0f : norm;
      }
    }
    if (t < kWarpKeys) store_norms(params, at, variant, i0, first + t, own);
  }
}

// Dynamic shared memory: weights [2 stages][head][query][key].
template <typename W, int kHeadTiles>
__global__ void __launch_bounds__(GivenTile<W, kHeadTiles>::kThreads, 2)
    given_pair_kernel(PairParams params, bool in_pieces) {
  using Tile = GivenTile<W, kHeadTiles>;
  Shared<unsigned char> weights = dynamic_shared<unsigned char>();
  const int64_t stage_bytes = Tile::stage_bytes(params.H);
  const GivenPlace at = given_place<Tile>(params);
  copy_weights<W, Tile>(params, at, at.i0, in_pieces, weights);
  int stage = 0;
  for (int64_t i0 = at.i0; i0 < at.end; i0 += kTileQueries, stage = 1 - stage) {
    const bool is_last = i0 + kTileQueries >= at.end;
    if (!is_last) {
      copy_weights<W, Tile>(params, at, i0 + kTileQueries, in_pieces,
                            weights + (1 - stage) * stage_bytes);
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    __syncthreads();
    make_norms<W, kHeadTiles>(params, at, i0, weights + stage * stage_bytes);
    __syncthreads();
  }
}

template <typename W, int kHeadTiles>
const char* launch_given(const PairParams& params, Stream stream) {
  using Tile = GivenTile<W, kHeadTiles>;
  const int64_t key_blocks = (params.S + Tile::kKeys - 1) / Tile::kKeys;
  const int64_t row_blocks = (params.rows + kBlockQueries - 1) / kBlockQueries;
  return launch(given_pair_kernel<W, kHeadTiles>,
                dim3(static_cast<unsigned>(params.B * row_blocks * key_blocks)),
                dim3(Tile::kThreads), 2 * Tile::stage_bytes(params.H), stream, params,
                is_in_pieces<W>(params.weights));
}

template <typename W>
const char* launch_heads(const PairParams& params, Stream stream) {
  return params.H <= 16   ? launch_given<W, 1>(params, stream)
         : params.H <= 32 ? launch_given<W, 2>(params, stream)
         : params.H <= 48 ? launch_given<W, 3>(params, stream)
                          : launch_given<W, 4>(params, stream);
}

}  // namespace

bool takes_given_pairs(const PairParams& params, bool in_float64) {
  return takes_gram_matrices(params.H, in_float64) && params.weights.type != ElementType::kFloat64;
}

int64_t factor_fragment_words(int64_t B, int64_t H, int64_t S) {
  return B * S * (fragment_words(H, true) + 1);
}

const char* given_pair_norms(const PairParams& params, Stream stream) {
  switch (params.weights.type) {
    case ElementType::kFloat32:
      return launch_heads<float>(params, stream);
    case ElementType::kBFloat16:
      return launch_heads<BFloat16>(params, stream);
    default:
      return launch_heads<Half>(params, stream);
  }
}

}  // namespace ikattn::cuda
