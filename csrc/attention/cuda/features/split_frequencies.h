// Angles of tokens of 16 bits, x . w1 and x . w2, as products of their own type: a frequency is the
// sum of two split operands of that type, and no element of x is changed. On tensor cores that is
// half the work of TF32, and operands go from shared memory to products as they lie.
#pragma once

#include "attention/cuda/features/angle_products.h"
#include "attention/cuda/mma/tile_copy.h"

namespace ikattn::cuda {
namespace {

constexpr int kSplitThreads = 256;
constexpr int kSplitTokens = kSplitThreads;  // tokens of a block's tile, 32 for each warp

// Returns how many of all tiles a block passes. Frequencies are copied once for all tiles of a
// block, and the next tile's tokens while one is multiplied; a multiprocessor should have two times
// the two blocks that it has room for.
inline int feature_tiles_each(int64_t tiles) {
  const int64_t each = ceil_div(tiles, int64_t{4} * multiprocessors());
  return static_cast<int>(each < 1 ? 1 : each < 8 ? each : 8);
}

// Adds to angles[set][m] the products of tile m of 16 tokens and 16 frequencies, along a slice of
// 64 columns. x: where the tokens' rows begin in shared memory; w: the frequencies' of w1 and the
// first number, others being kAngleFrequencies rows apart. Both are multiples of 128.
template <typename T, int kSets, int kTiles>
__device__ __forceinline__ void multiply_parts(float (&angles)[kSets][kTiles][2][4], uint32_t x,
                                               uint32_t w) {
  constexpr uint32_t kRowBytes = kSliceColumns * 2, kTileBytes = 16 * kRowBytes;
  x = FragmentAddresses::of_rows(x, kRowBytes).place[0];
  w = FragmentAddresses::of_columns(w, kRowBytes).place[0];
#pragma unroll(kTiles == 1 ? 2 : 4)
  for (uint32_t k = 0; k < 4; ++k) {
    // The next chunks of a row differ by these bits, whatever its swizzle was.
    const uint32_t x_place = x ^ (k * 32), w_place = w ^ (k * 32);
    Fragment tokens[kTiles];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) tokens[m] = load_fragment(x_place + m * kTileBytes);
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      // The small numbers first.
#pragma unroll
      for (int number = kSplitsOfFrequency<T> - 1; number >= 0; --number) {
        const Fragment b = load_fragment(w_place + (number * kSets + set) * (2 * kTileBytes));
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          float (&sums)[2][4] = angles[set][m];
          mma_m16n8k16<T>(sums[0], tokens[m].registers, b.registers[0], b.registers[1]);
          mma_m16n8k16<T>(sums[1], tokens[m].registers, b.registers[2], b.registers[3]);
        }
      }
    }
  }
}

// A block's tile of tokens of one head, by slices of 64 columns, and 32 frequencies at a time: two
// pieces, or slices, of these stay where they are until others are needed. A warp copies its own
// tokens, of a single slice the next tile's while it multiplies, and waits for no other: where one
// makes sines, another multiplies.
template <typename T, int kSets>
class SplitTile {
 public:
  static constexpr int kFrequencyRows = kSets * kSplitsOfFrequency<T> * kAngleFrequencies;
  static constexpr uint32_t kRowBytes = kSliceColumns * 2;
  static constexpr uint32_t kFrequencyBytes = kFrequencyRows * kRowBytes;
  static constexpr uint32_t kTokenBytes = kSplitTokens * kRowBytes;
  static constexpr int64_t kBytes = 2 * kFrequencyBytes + 2 * kTokenBytes;

  // Takes the block's tiles; end: of these.
  __device__ __forceinline__ SplitTile(const FeatureSource& source,
                                       const SplitFrequencies& frequencies, int64_t bh, int end,
                                       Shared<unsigned char> shared)
      : source_(source),
        frequencies_(frequencies),
        head_(static_cast<unsigned>(bh)),
        end_(end),
        base_(shared_address(shared)) {
    unit_ = frequencies.units[2 * set_of(head_)];
  }

  // Returns the factor that turns sums of products into angles.
  __device__ __forceinline__ float unit() const { return unit_; }

  // Adds to angles[set][m] the products of tile m of the warp's tokens, of the index-th tile, by 16
  // frequencies from m0 on. All threads of the block call it, also in a warp without tokens.
  __device__ __forceinline__ void make_angles(int index, int m0, bool has_tokens,
                                              float (&angles)[kSets][2][2][4]) {
    const int piece = m0 / kAngleFrequencies, slices = frequencies_.slices;
    for (int slice = 0; slice < slices; ++slice) {
      const int frequencies = piece * slices + slice, tokens = index * slices + slice;
      const bool is_even = frequencies % 2 == 0;
      const uint32_t w = base_ + (is_even ? 0 : kFrequencyBytes);
      if (frequencies != (is_even ? held_even_ : held_odd_)) {  // all warps agree
        __syncthreads();                                        // nobody reads what was there
        begin_frequencies(w, frequencies);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        held_even_ = is_even ? frequencies : held_even_;
        held_odd_ = is_even ? held_odd_ : frequencies;
      }
      const bool is_first = (slices > 1 ? slice : index) % 2 == 0;
      if (tokens != (is_first ? held_first_ : held_second_)) {
        if (tokens != coming_) {
          __syncwarp();  // no lane reads what was there
          begin_tokens(index, slice);
          cp_async_commit();
        }
        cp_async_wait<0>();
        __syncwarp();
        held_first_ = is_first ? tokens : held_first_;
        held_second_ = is_first ? held_second_ : tokens;
        if (slices == 1 && index + 1 < end_) {
          begin_tokens(index + 1, slice);
          cp_async_commit();
          coming_ = tokens + 1;
        }
      }
      if (has_tokens) {
        multiply_parts<T, kSets, 2>(angles,
                                    token_place(index, slice) + threadIdx.x / 32 * (32 * kRowBytes),
                                    w + m0 % kAngleFrequencies * kRowBytes);
      }
    }
  }

 private:
  static constexpr int kChunks = kRowBytes / 16, kRowStep = kSplitThreads / kChunks;
  static constexpr int kPieceSize = kSets * kPlanesOf<T> * kAngleFrequencies * kSliceColumns;
  static_assert(kRowStep % 8 == 0 && kFrequencyRows % kRowStep == 0);

  // Returns a place of tokens, in which tiles, or slices, take turns.
  __device__ __forceinline__ uint32_t token_place(int index, int slice) const {
    return base_ + 2 * kFrequencyBytes +
           (frequencies_.slices > 1 ? slice : index) % 2 * kTokenBytes;
  }

  // Returns the set of frequencies that serves a head of all batches'.
  __device__ __forceinline__ int64_t set_of(unsigned head) const {
    const unsigned heads = static_cast<unsigned>(source_.heads);
    return source_.frequency_batch(head / heads) * source_.frequency_heads +
           source_.frequency_head(head % heads);
  }

  // Begins to copy frequencies. The rows' begin is computed anew each time: registers are few.
  __device__ __forceinline__ void begin_frequencies(uint32_t to, int frequencies) const {
    const int64_t which = set_of(unknown_to_compiler(head_));
    const int64_t first = which * frequencies_.pieces * frequencies_.slices + frequencies;
    const T* from = static_cast<const T*>(frequencies_.data) + first * kPieceSize + threadIdx.x * 8;
    to += swizzled(threadIdx.x / kChunks, threadIdx.x % kChunks, kRowBytes);
#pragma unroll
    for (int step = 0; step < kFrequencyRows / kRowStep; ++step) {
      cp_async_16(to + step * (kRowStep * kRowBytes), from + step * (kRowStep * kSliceColumns));
    }
  }
  // Begins to copy the warp's tokens, four rows at a time.
  __device__ __forceinline__ void begin_tokens(int index, int slice) const {
    const int lane = threadIdx.x % 32, chunk = lane % kChunks;
    const int row = threadIdx.x / 32 * 32 + lane / kChunks;
    const int64_t column = int64_t{slice} * kSliceColumns + chunk * 8;
    const int64_t first = int64_t{index} * kSplitTokens + row, remaining = source_.d - column;
    const int bytes = remaining <= 0 ? 0 : remaining < 8 ? static_cast<int>(remaining) * 2 : 16;
    const int rows = bytes == 0 ? 0 : static_cast<int>(min(source_.N - first, int64_t{32}));
    const unsigned bh = unknown_to_compiler(head_), heads = static_cast<unsigned>(source_.heads);
    const T* x = static_cast<const T*>(source_.x.data) + bh / heads * source_.x.stride[0] +
                 source_.x_head(bh % heads) * source_.x.stride[1];
    const T* from = x + first * source_.x.stride[2] + column;
    const uint32_t to = token_place(index, slice) + swizzled(row, chunk, kRowBytes);
#pragma unroll
    for (int step = 0; step < 32; step += 4) {
      // Four rows further on, the chunk is swizzled by another bit.
      const uint32_t place = (to + step * kRowBytes) ^ (step % 8 == 0 ? 0 : 64);
      cp_async_16(place, step < rows ? from : x, step < rows ? bytes : 0);
      from += 4 * source_.x.stride[2];
    }
  }

  const FeatureSource& source_;
  const SplitFrequencies& frequencies_;
  unsigned head_;  // head among all batches'
  float unit_;
  int end_;
  uint32_t base_;
  int held_even_ = -1, held_odd_ = -1;                    // frequencies
  int held_first_ = -1, held_second_ = -1, coming_ = -1;  // tokens
};

}  // namespace
}  // namespace ikattn::cuda
