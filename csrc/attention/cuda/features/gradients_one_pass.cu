// Gradients of tokens of 16 bits, and of their frequencies, from one pass over the angles: of at
// most 64 frequencies and 128 dimensions. With t the angles of a token by w1 and w2,
//   E = cos(2 pi t) grad_sin - sin(2 pi t) grad_cos
//   grad_x = 2 pi sum over frequencies of E w,  grad_w = 2 pi sum over tokens of E x
// E is Half in the first sum, and of the tokens' type in the second, where it takes the place of
// what it was made of.
#include "attention/cuda/features/chained_products.h"
#include "attention/cuda/features/frequency_parts.h"
#include "attention/cuda/features/split_frequencies.h"
#include "attention/cuda/mma/row_lanes.h"

namespace ikattn::cuda {
namespace {

// Number of blocks that registers must leave room for, each of one slice: 99 KiB of shared memory
// hold one.
#if defined(__CUDA_ARCH__) && \
    (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int kBlocksAtOnce = 1;
#else
constexpr int kBlocksAtOnce = 2;
#endif

// kPieces of 32 frequencies, kSlices of 64 dimensions.
template <typename T, int kSets, int kPieces, int kSlices>
struct OnePassLayout {
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kTokens = 16 * kWarps;  // tokens of a tile
  static constexpr int kFrequencies = kPieces * kAngleFrequencies;
  static constexpr uint32_t kRowBytes = kSliceColumns * 2;
  // Cosines, then sines, of a token; these become what w1 and w2 are multiplied with.
  static constexpr uint32_t kGradientBytes = 2 * kFrequencies * 2;
  // Returns where a chunk of eight of them is: swizzled so that neither the rows of a half warp,
  // two chunks each, nor eight rows meet in a bank.
  __device__ __forceinline__ static uint32_t gradient_place(uint32_t row, uint32_t chunk) {
    const uint32_t angle = row % 4 * 2 + row / 4 % 2;
    return kGradients + row * kGradientBytes + ((chunk & ~7u) | ((chunk ^ angle) & 7u)) * 16;
  }
  static constexpr uint32_t kPlane = kSets * kAngleFrequencies * kRowBytes;
  static constexpr uint32_t kPiece = kSplitsOfFrequency<T> * kPlane;  // its numbers, of one slice
  static constexpr bool kHasHalves = kHalfPlane<T> != 0;              // beside the numbers
  static constexpr uint32_t kHalves = kSlices * kPieces * kPiece;
  static constexpr uint32_t kTokensAt = kHalves + (kHasHalves ? kPieces * kPlane : 0);
  static constexpr uint32_t kScales = kTokensAt + kSlices * kTokens * kRowBytes;
  static constexpr uint32_t kGradients = kScales + kTokens * 4 + 128;  // and two factors
  // The tokens' gradients take the place of the features' gradients.
  static constexpr uint32_t kResultBytes = kSliceColumns * 4;
  static constexpr int64_t kBytes = kGradients + int64_t{kTokens} * kResultBytes;
  // The products for the frequencies: rows are frequencies of w1, then of w2.
  static constexpr int kRows = kSets * kFrequencies;
  static constexpr int kRowTiles = kRows >= 64 ? 2 : 1;
  static constexpr int kRowGroups = kRows / (16 * kRowTiles), kColumnGroups = kWarps / kRowGroups;
  static constexpr int kColumns = kSliceColumns / kColumnGroups;  // columns of a warp
};

// Gradients that a call asks for.
struct OnePassGradients {
  Array grad_x;  // [B, heads, N, d]
  Magnitude<float> magnitude;
  bool wants_tokens, wants_frequencies;
};

// Work of a block: 64 dimensions of a share of the tokens, of which it takes a tile at a time.
template <typename T, int kSets, int kPieces, int kSlices>
class OnePassBlock {
 public:
  using L = OnePassLayout<T, kSets, kPieces, kSlices>;

  __device__ __forceinline__ OnePassBlock(const FeatureSource& source,
                                          const SplitFrequencies& frequencies,
                                          const FeatureGradients& grad_phi,
                                          const OnePassGradients& wanted,
                                          const FrequencyBlock<float>& block,
                                          Shared<unsigned char> shared)
      : source_(source),
        grad_phi_(grad_phi),
        wanted_(wanted),
        block_(block),
        shared_(shared),
        base_(shared_address(shared)),
        own_slice_(kSlices == 1 ? 0 : static_cast<int>(block.c0 / kSliceColumns)) {
    begin_frequencies(frequencies);
    first_four_ = L::gradient_place(row_of(0), threadIdx.x % 4 / 2) + threadIdx.x % 2 * 8;
  }

  // Passes tokens of the share's unit-th head, from `first` on, of which `remaining` are there. All
  // threads of the block call it, and it synchronises them.
  __device__ __forceinline__ void pass(int unit, int first, int remaining) {
    copy_tile(unit, first, remaining);
    float to_sum[2];
    scale_rows(remaining, to_sum);
    float sums[4][2][4] = {}, spoilt = 0;  // spoilt: NaN once a token is not finite
#pragma unroll 1
    for (int m0 = 0; m0 < L::kFrequencies; m0 += 16) {
      float angles[kSets][1][2][4] = {};
      make_gradients(m0, to_sum, angles, spoilt);
      if (wanted_.wants_tokens) add_tokens(m0, angles, sums);
    }
    const bool is_spoilt = __syncthreads_or(spoilt != spoilt) != 0;  // E is stored, too
    if (wanted_.wants_frequencies) add_frequencies(is_spoilt);
    if (wanted_.wants_tokens) store_tokens(unit, first, remaining, sums);
  }

  // Stores the share's part of the frequencies' gradients.
  __device__ __forceinline__ void store_frequencies(const FrequencyParts<float>& parts) const {
    // Found anew: no register holds it over the tiles.
    const FrequencyBlock<float> block(source_, parts, unknown_to_compiler(blockIdx.x));
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const float units = static_cast<float>(angle_units(kSets == 1));
    const float of_sums = kIsHalf ? units * sum_unit_ : units;
#pragma unroll
    for (int m = 0; m < L::kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < L::kColumns / 16; ++n) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int row = (row_group() * L::kRowTiles + m) * 16 + g + 8 * (i % 4 / 2);
          const int set = row / L::kFrequencies, frequency = row % L::kFrequencies;
          const int64_t c = own_slice_ * kSliceColumns + column_group() * L::kColumns + 16 * n +
                            8 * (i / 4) + 2 * t + i % 2;
          if (frequency < source_.M && c < source_.d) {
            block.part[set * block.size + c * source_.M + frequency] =
                of_sums * frequency_sums_[m][n][i / 4][i % 4];
          }
        }
      }
    }
  }

 private:
  static constexpr int kWidth = 2 * L::kFrequencies, kRowStep = L::kThreads / 8;
  static constexpr bool kIsHalf = std::is_same_v<T, Half>;

  // Returns the thread's rows of a tile.
  __device__ __forceinline__ static int row_of(int half) {
    return threadIdx.x / 32 * 16 + 8 * half + threadIdx.x % 32 / 4;
  }
  // Return the groups of the warp, which divide the frequencies' sums.
  __device__ __forceinline__ static int row_group() { return threadIdx.x / 32 % L::kRowGroups; }
  __device__ __forceinline__ static int column_group() { return threadIdx.x / 32 / L::kRowGroups; }
  __device__ __forceinline__ Shared<float> scales() const {  // [kTokens]
    return shared_cast<float>(shared_ + L::kScales);
  }
  // Returns the factors of angles, and of products of E and Half, which are in shared memory
  // because registers are few.
  __device__ __forceinline__ Shared<float> factors() const { return scales() + L::kTokens; }

  // Loads the frequencies, which stay for all tiles.
  __device__ __forceinline__ void begin_frequencies(const SplitFrequencies& frequencies) {
    const int64_t which =
        int64_t{block_.frequency_batch} * source_.frequency_heads + block_.frequency_head;
    const T* w = static_cast<const T*>(frequencies.data) +
                 which * kPieces * kSlices * kPlanesOf<T> * (L::kPlane / 2) + threadIdx.x * 8;
    const uint32_t place = base_ + swizzled(threadIdx.x / 8, threadIdx.x % 8, L::kRowBytes);
    const auto begin_rows = [&](uint32_t to, const T* from, int rows) {
      for (int row = 0; row < rows; row += kRowStep) {
        cp_async_16(to + row * L::kRowBytes, from + row * kSliceColumns);
      }
    };
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        const T* from = w + (piece * kSlices + slice) * kPlanesOf<T> * (L::kPlane / 2);
        begin_rows(place + (slice * kPieces + piece) * L::kPiece, from,
                   kSplitsOfFrequency<T> * kSets * kAngleFrequencies);
        if (L::kHasHalves && slice == own_slice_) {
          begin_rows(place + L::kHalves + piece * L::kPlane, from + kHalfPlane<T> * (L::kPlane / 2),
                     kSets * kAngleFrequencies);
        }
      }
    }
    if (threadIdx.x == 0) {
      factors()[0] = frequencies.units[2 * which];
      factors()[1] = static_cast<float>(angle_units(kSets == 1)) * frequencies.units[2 * which + 1];
    }
  }

  // Copies a tile's tokens, gradients and scales.
  __device__ __forceinline__ void copy_tile(int unit, int first, int remaining) {
    __syncthreads();  // nobody reads what was there
    // Unknown to the compiler, the thread's addresses are computed anew, and leave registers to
    // products.
    const int thread = static_cast<int>(unknown_to_compiler(threadIdx.x));
    const int64_t b = block_.batch(unknown_to_compiler(unit));
    const int64_t head = block_.head(unknown_to_compiler(unit)), bh = b * source_.heads + head;
    const T* x = static_cast<const T*>(source_.x.data) + b * source_.x.stride[0] +
                 source_.x_head(head) * source_.x.stride[1];
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const int own_row = thread / 8, own_chunk = thread % 8;
      const int64_t column = slice * kSliceColumns + own_chunk * 8, columns = source_.d - column;
      const int bytes = columns <= 0 ? 0 : columns < 8 ? static_cast<int>(columns) * 2 : 16;
      const T* from = x + (first + own_row) * source_.x.stride[2] + column;
      const uint32_t to = base_ + L::kTokensAt + slice * (L::kTokens * L::kRowBytes) +
                          swizzled(own_row, own_chunk, L::kRowBytes);
#pragma unroll 2
      for (int row = 0; row < L::kTokens; row += kRowStep) {
        const bool there = bytes > 0 && own_row + row < remaining;
        cp_async_16(to + row * L::kRowBytes, there ? from + row * source_.x.stride[2] : x,
                    there ? bytes : 0);
      }
    }
    constexpr int kChunks = L::kGradientBytes / 16, kStepRows = L::kThreads / kChunks;
    const int own_chunk = thread % kChunks, own_row = thread / kChunks;
    const Half* from = grad_phi_.rows + (bh * source_.N + first) * kWidth + own_chunk * 8;
#pragma unroll 2
    for (int row = own_row; row < L::kTokens; row += kStepRows) {
      const bool there = row < remaining;
      cp_async_16(base_ + L::gradient_place(row, own_chunk),
                  there ? from + row * int64_t{kWidth} : from, there ? 16 : 0);
    }
    if (threadIdx.x < L::kTokens / 4) {
      const int64_t row = first + threadIdx.x * 4;
      const bool there = row < padded_tokens(source_.N);
      cp_async_16(shared_address(scales() + threadIdx.x * 4),
                  grad_phi_.scales + scale_place(0, source_.B * source_.heads, bh, source_.N) +
                      (there ? row : 0),
                  there ? 16 : 0);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
  }

  // Scales E of the thread's rows to the unit of the frequencies' sums: by a row's scale, in Half
  // over the largest so far.
  __device__ __forceinline__ void scale_rows(int remaining, float (&to_sum)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float scale = scales()[row_of(half)];
      to_sum[half] = row_of(half) < remaining ? scale : 0.0f;
    }
    if constexpr (kIsHalf) {
      float most = 0;
      for (int row = threadIdx.x % 32; row < remaining; row += 32) {
        const float scale = scales()[row];
        most = scale > most ? scale : most;
      }
      most = max_of_lanes(most);
      if (most > sum_unit_) {
        const float factor = sum_unit_ / most;
#pragma unroll
        for (int m = 0; m < L::kRowTiles; ++m) {
#pragma unroll
          for (int n = 0; n < L::kColumns / 16; ++n) {
#pragma unroll
            for (int i = 0; i < 8; ++i) frequency_sums_[m][n][i / 4][i % 4] *= factor;
          }
        }
        sum_unit_ = most;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        to_sum[half] = sum_unit_ > 0 ? to_sum[half] / sum_unit_ : 0.0f;
      }
    }
  }

  // Makes E of the warp's 16 tokens and 16 frequencies from m0 on, in place of angles; scaled it
  // takes the place of the gradients that it is made of.
  __device__ __forceinline__ void make_gradients(int m0, const float (&to_sum)[2],
                                                 float (&angles)[kSets][1][2][4],
                                                 float& spoilt) const {
    const int piece = m0 / kAngleFrequencies, row0 = m0 % kAngleFrequencies;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      multiply_parts<T, kSets, 1>(
          angles,
          base_ + L::kTokensAt + (slice * L::kTokens + threadIdx.x / 32 * 16) * L::kRowBytes,
          base_ + (slice * kPieces + piece) * L::kPiece + row0 * L::kRowBytes);
    }
    const float angle_unit = kIsHalf ? float{factors()[0]} : 1.0f;
    // Others than the first four are where these bits differ.
    const uint32_t of_cosines = first_four_ ^ (m0 * 2);
    const uint32_t of_sines = kPieces == 1 ? of_cosines ^ 64 : of_cosines + 128;
    Shared<uint32_t> cosines = shared_cast<uint32_t>(shared_ + of_cosines);
    Shared<uint32_t> sines = shared_cast<uint32_t>(shared_ + of_sines);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      constexpr int kRows = L::kGradientBytes / 4 * 8;
      const uint2 cosine_bits = load_vector<uint2>(cosines + half * kRows);
      const uint2 sine_bits = load_vector<uint2>(sines + half * kRows);
      uint32_t packed[kSets][2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 grad_cos = unpack<Half>(j == 0 ? cosine_bits.x : cosine_bits.y);
        const float2 grad_sin = unpack<Half>(j == 0 ? sine_bits.x : sine_bits.y);
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
          float (&two)[4] = angles[set][0][j];
          float& one = two[2 * half];
          float& other = two[2 * half + 1];
          spoilt = fmaf(one, 0.0f, spoilt);
          spoilt = fmaf(other, 0.0f, spoilt);
          to_gradient(one, 1, grad_sin.x, grad_cos.x, angle_unit);
          to_gradient(other, 1, grad_sin.y, grad_cos.y, angle_unit);
          packed[set][j] = pack<T>(one * to_sum[half], other * to_sum[half]);
        }
      }
      store_vector(cosines + half * kRows, make_uint2(packed[0][0], packed[0][1]));
      if constexpr (kSets == 2) {
        store_vector(sines + half * kRows, make_uint2(packed[1][0], packed[1][1]));
      }
    }
  }

  // Adds E w to the sums.
  __device__ __forceinline__ void add_tokens(int m0, const float (&gradients)[kSets][1][2][4],
                                             float (&sums)[4][2][4]) const {
    constexpr uint32_t kPieceStep = L::kHasHalves ? L::kPlane : L::kPiece;
    const int piece = m0 / kAngleFrequencies, row0 = m0 % kAngleFrequencies;
    // Operand B is made of the frequencies in Half; its address is computed anew, for registers are
    // few.
    const unsigned lane = unknown_to_compiler(threadIdx.x) % 32;
    const uint32_t place = base_ + (L::kHasHalves ? L::kHalves : own_slice_ * kPieces * L::kPiece) +
                           swizzled(lane % 16, lane / 16, L::kRowBytes) + piece * kPieceStep;
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      Fragment left;
#pragma unroll
      for (int j = 0; j < 2; ++j) left.template put<Half>(j, gradients[set][0][j]);
      const uint32_t from = place + (set * kAngleFrequencies + row0) * L::kRowBytes;
      // In float16 the second split operand is Half, too.
#pragma unroll
      for (int number = kIsHalf ? 1 : 0; number >= 0; --number) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          uint32_t right[4];
          ldmatrix_x4_trans(right, (from + number * L::kPlane) ^ (n * 32));
          mma_m16n8k16<Half>(sums[n][0], left.registers, right[0], right[1]);
          mma_m16n8k16<Half>(sums[n][1], left.registers, right[2], right[3]);
        }
      }
    }
  }

  // Adds E^T x to the frequencies' sums.
  __device__ __forceinline__ void add_frequencies(bool is_spoilt) {
    if (is_spoilt) {
      // A token without gradient has none, whatever it holds; with one, E is NaN.
      clean_values<T, L::kTokens * kSliceColumns, L::kThreads>(shared_ + own_tokens());
      __syncthreads();
    }
    const int lane = threadIdx.x % 32;
    // Rows k and on of both, whose chunks lie as those of the first eight rows do.
    const int row = lane % 8 + 8 * (lane / 16), chunk = row_group() * L::kRowTiles * 2;
    const uint32_t left_place = base_ + L::gradient_place(row, chunk + lane / 8 % 2);
    const uint32_t right_place =
        base_ + own_tokens() +
        swizzled(lane % 16, column_group() * (L::kColumns / 8) + lane / 16, L::kRowBytes);
#pragma unroll 1
    for (int k = 0; k < L::kTokens; k += 16) {
      Fragment left[L::kRowTiles];
#pragma unroll
      for (int m = 0; m < L::kRowTiles; ++m) {
        ldmatrix_x4_trans(left[m].registers, (left_place + k * L::kGradientBytes) ^ (m * 32));
      }
#pragma unroll
      for (int n = 0; n < L::kColumns / 16; ++n) {
        uint32_t right[4];
        ldmatrix_x4_trans(right, (right_place + k * L::kRowBytes) ^ (n * 32));
#pragma unroll
        for (int m = 0; m < L::kRowTiles; ++m) {
          float (&sums)[2][4] = frequency_sums_[m][n];
          mma_m16n8k16<T>(sums[0], left[m].registers, right[0], right[1]);
          mma_m16n8k16<T>(sums[1], left[m].registers, right[2], right[3]);
        }
      }
    }
  }

  // Stores the sums in their rows in shared memory, and from there, eight columns at a time, with
  // the gradients of magnitudes, in the result.
  __device__ __forceinline__ void store_tokens(int unit, int first, int remaining,
                                               const float (&sums)[4][2][4]) const {
    __syncthreads();  // nobody reads E
    Shared<unsigned char> results = shared_ + L::kGradients;
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t row = row_of(half);
      const float unit_of_row = factors()[1], of_row = scales()[row];
      const float scale = unit_of_row * of_row;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float (&two)[4] = sums[n / 2][n % 2];
        const uint32_t place = swizzled(row, 2 * n + t / 2, L::kResultBytes) + t % 2 * 8;
        store_vector(shared_cast<float>(results + place),
                     make_float2(scale * two[2 * half], scale * two[2 * half + 1]));
      }
    }
    __syncwarp();  // a warp stores its own rows
    const Slice<T> tokens{shared_ + own_tokens()};
    const Array& out = wanted_.grad_x;
    const int thread = static_cast<int>(unknown_to_compiler(threadIdx.x));
    const int64_t b = block_.batch(unknown_to_compiler(unit));
    const int64_t head = block_.head(unknown_to_compiler(unit));
    const int first_row = thread / 32 * 16, own_chunk = thread % 8;
#pragma unroll 1
    for (int row = first_row + thread % 32 / 8; row < min(remaining, first_row + 16); row += 4) {
      const KeyMagnitude<float> own(wanted_.magnitude,
                                    (b * source_.heads + head) * source_.N + first + row);
      const uint32_t places[2] = {swizzled(row, 2 * own_chunk, L::kResultBytes),
                                  swizzled(row, 2 * own_chunk + 1, L::kResultBytes)};
      const bool has_square = own.factor != 0 && wanted_.magnitude.p == 2;
      if (own.factor != 0 && !has_square) {
#pragma unroll 1  // powers are long code
        for (int i = 0; i < 8; ++i) {
          Shared<float> one =
              shared_cast<float>(results + ((i < 4 ? places[0] : places[1]) + i % 4 * 4));
          const float2 two = tokens.pair(row, own_chunk * 8 + i / 2 * 2);
          one[0] += own.slope(i % 2 == 0 ? two.x : two.y, wanted_.magnitude.p);
        }
      }
      const float4 low = load_vector<float4>(shared_cast<float>(results + places[0]));
      const float4 high = load_vector<float4>(shared_cast<float>(results + places[1]));
      float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      if (has_square) {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          const float2 two = tokens.pair(row, own_chunk * 8 + i);
          x[i] = fmaf(own.factor, two.x, x[i]);
          x[i + 1] = fmaf(own.factor, two.y, x[i + 1]);
        }
      }
      store_eight(out, b * out.stride[0] + head * out.stride[1] + (first + row) * out.stride[2],
                  own_slice_ * kSliceColumns + own_chunk * 8, source_.d, x);
    }
  }
  // Returns where the tile's tokens lie, of the block's dimensions.
  __device__ __forceinline__ uint32_t own_tokens() const {
    return L::kTokensAt + own_slice_ * (L::kTokens * L::kRowBytes);
  }

  const FeatureSource& source_;
  const FeatureGradients& grad_phi_;
  const OnePassGradients& wanted_;
  const FrequencyBlock<float>& block_;
  Shared<unsigned char> shared_;
  uint32_t base_;
  int own_slice_;
  uint32_t
      first_four_;  // mask of the thread's first four frequencies, in the first of its two rows
  float frequency_sums_[L::kRowTiles][L::kColumns / 16][2][4] = {};
  float sum_unit_ = 0;  // unit of the sums in Half: the largest scale of a row so far
};

template <typename T, int kSets, int kPieces, int kSlices>
__global__ void __launch_bounds__(OnePassLayout<T, kSets, kPieces, kSlices>::kThreads,
                                  kSlices == 1 ? kBlocksAtOnce : 1)
    one_pass_gradient_kernel(FeatureSource source, SplitFrequencies frequencies,
                             FeatureGradients grad_phi, FrequencyParts<float> parts,
                             OnePassGradients wanted) {
  using Block = OnePassBlock<T, kSets, kPieces, kSlices>;
  const FrequencyBlock<float> share(source, parts);
  Block block(source, frequencies, grad_phi, wanted, share, dynamic_shared<unsigned char>());
  const int end_head = static_cast<int>(share.end_head), end = static_cast<int>(share.end);
  for (int unit = static_cast<int>(share.first_head); unit < end_head; ++unit) {
    for (int first = static_cast<int>(share.first); first < end; first += Block::L::kTokens) {
      block.pass(unit, first, min(end - first, Block::L::kTokens));
    }
  }
  if (wanted.wants_frequencies) block.store_frequencies(parts);
}

}  // namespace

bool goes_in_one_pass(const FeatureSource& source) {
  if (source.x.type == ElementType::kFloat32 || source.M > 64 || source.d > 128) return false;
  const int64_t bytes = source.d <= 64 ? OnePassLayout<BFloat16, 2, 2, 1>::kBytes
                                       : OnePassLayout<BFloat16, 2, 2, 2>::kBytes;
  return bytes <= most_shared_memory();
}

const char* gradients_in_one_pass(const FeatureSource& source, const SplitFrequencies& frequencies,
                                  const FeatureGradients& grad_phi, const Array& grad_x,
                                  const Magnitude<float>& magnitude, float* grad_w1, float* grad_w2,
                                  const DeviceExecutor& executor) {
  const bool wants_frequencies = grad_w1 != nullptr || grad_w2 != nullptr;
  // Shares are large where there are many: each leaves its part of the sums.
  const bool is_much = source.B * source.heads * source.N >= int64_t{1} << 18;
  const FrequencyParts<float> parts(source, is_much ? 1024 : 256,
                                    wants_frequencies ? &executor : nullptr);
  const char* error = launch_angles(source, [&]<typename T, int kSets>() -> const char* {
    if constexpr (sizeof(T) == 4) {
      return "these kernels take 16 bits";  // goes_in_one_pass()
    } else {
      const auto queue = [&]<int kPieces, int kSlices>() {
        using L = OnePassLayout<T, kSets, kPieces, kSlices>;
        return launch(
            one_pass_gradient_kernel<T, kSets, kPieces, kSlices>, parts.blocks(source),
            dim3(L::kThreads), L::kBytes, executor.stream, source, frequencies, grad_phi, parts,
            OnePassGradients{grad_x, magnitude, static_cast<bool>(grad_x), wants_frequencies});
      };
      const bool is_one_slice = frequencies.slices == 1;
      if (frequencies.pieces == 1) {
        return is_one_slice ? queue.template operator()<1, 1>() : queue.template operator()<1, 2>();
      }
      return is_one_slice ? queue.template operator()<2, 1>() : queue.template operator()<2, 2>();
    }
  });
  if (error != nullptr || !wants_frequencies) return error;
  return add_frequency_parts(source, parts, grad_w1, grad_w2, executor.stream);
}

}  // namespace ikattn::cuda
