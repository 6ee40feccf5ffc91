// Turns of tokens of 16 bits, x . w1 and x . w2, as products of their own type: a frequency is the
// sum of so many numbers of that type as hold what float32 does, and no element of x is changed. On
// tensor cores that is half the work of TF32, and operands go from shared memory to products as
// they lie.
#pragma once

#include "attention/cuda/folded_tiles.h"
#include "attention/cuda/turn_products.h"

namespace ikattn::cuda {
namespace {

constexpr int kNumberThreads = 256;
constexpr int kNumberTokens = kNumberThreads;  // of a block's tile, 32 of each warp

// A block's tile of tokens of one head, by slices of 64 columns, and 32 frequencies at a time: two
// pieces, or slices, of these stay where they are until others are needed.
template <typename T, int kSets>
class NumberTile {
 public:
  static constexpr int kFrequencyRows = kSets * kNumbersOf<T> * kTurnFrequencies;
  static constexpr uint32_t kRowBytes = kSliceColumns * 2;
  static constexpr uint32_t kFrequencyBytes = kFrequencyRows * kRowBytes;
  static constexpr int64_t kBytes = 2 * kFrequencyBytes + kNumberTokens * kRowBytes;

  __device__ __forceinline__ NumberTile(const FeatureSource& source,
                                        const FrequencyNumbers& frequencies, int64_t bh,
                                        Shared<unsigned char> shared)
      : source_(source), slices_(frequencies.slices), base_(shared_address(shared)) {
    const int64_t b = bh / source.heads, head = bh % source.heads;
    x_ = static_cast<const T*>(source.x.data) + b * source.x.stride[0] +
         source.x_head(head) * source.x.stride[1];
    const int64_t which =
        source.frequency_batch(b) * source.frequency_heads + source.frequency_head(head);
    w_ = static_cast<const T*>(frequencies.data) +
         which * frequencies.pieces * slices_ * (kFrequencyRows * kSliceColumns);
    unit_ = frequencies.units[which];
  }

  // What sums of products are multiplied with to be turns.
  __device__ __forceinline__ float unit() const { return unit_; }

  // turns[set][m] += tile m of the warp's tokens, of the index-th tile, by 16 frequencies from m0
  // on. By the whole block; a warp without tokens comes, too.
  __device__ __forceinline__ void make_turns(int index, int m0, bool has_tokens,
                                             float (&turns)[kSets][2][2][4]) {
    const int piece = m0 / kTurnFrequencies;
    for (int slice = 0; slice < slices_; ++slice) {
      const int frequencies = piece * slices_ + slice, tokens = index * slices_ + slice;
      const bool is_even = frequencies % 2 == 0;
      const uint32_t w = base_ + (is_even ? 0 : kFrequencyBytes);
      const bool is_held = frequencies == (is_even ? held_even_ : held_odd_);
      if (!is_held || held_tokens_ != tokens) {
        __syncthreads();  // nobody reads what was there
        if (!is_held) begin_frequencies(w, frequencies);
        if (held_tokens_ != tokens) begin_tokens(index, slice);
        held_even_ = is_even ? frequencies : held_even_;
        held_odd_ = is_even ? held_odd_ : frequencies;
        held_tokens_ = tokens;
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
      }
      if (has_tokens) multiply(w + m0 % kTurnFrequencies * kRowBytes, turns);
    }
  }

 private:
  static constexpr int kChunks = kRowBytes / 16, kRowStep = kNumberThreads / kChunks;
  static_assert(kRowStep % 8 == 0 && kFrequencyRows % kRowStep == 0);

  __device__ __forceinline__ uint32_t x_place() const { return base_ + 2 * kFrequencyBytes; }

  __device__ __forceinline__ void begin_frequencies(uint32_t to, int frequencies) const {
    const T* from = w_ + frequencies * int64_t{kFrequencyRows * kSliceColumns} + threadIdx.x * 8;
    to += swizzled(threadIdx.x / kChunks, threadIdx.x % kChunks, kRowBytes);
#pragma unroll
    for (int step = 0; step < kFrequencyRows / kRowStep; ++step) {
      cp_async_16(to + step * (kRowStep * kRowBytes), from + step * (kRowStep * kSliceColumns));
    }
  }
  __device__ __forceinline__ void begin_tokens(int index, int slice) const {
    const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    const int64_t column = int64_t{slice} * kSliceColumns + chunk * 8;
    const int64_t first = int64_t{index} * kNumberTokens + row, left = source_.d - column;
    const int bytes = left <= 0 ? 0 : left < 8 ? static_cast<int>(left) * 2 : 16;
    const T* from = x_ + first * source_.x.stride[2] + column;
    const uint32_t to = x_place() + swizzled(row, chunk, kRowBytes);
#pragma unroll
    for (int step = 0; step < kNumberTokens / kRowStep; ++step) {
      const bool there = bytes > 0 && first + step * kRowStep < source_.N;
      cp_async_16(to + step * (kRowStep * kRowBytes), there ? from : x_, there ? bytes : 0);
      from += kRowStep * source_.x.stride[2];
    }
  }
  __device__ __forceinline__ void multiply(uint32_t w, float (&turns)[kSets][2][2][4]) const {
    const FragmentPlaces x_places =
        FragmentPlaces::of_rows(x_place() + threadIdx.x / 32 * (32 * kRowBytes), kRowBytes);
    const FragmentPlaces w_places = FragmentPlaces::of_columns(w, kRowBytes);
#pragma unroll
    for (int k = 0; k < kSliceColumns / 16; ++k) {
      Fragment x[2];
#pragma unroll
      for (int m = 0; m < 2; ++m) x[m] = load_fragment(x_places.at<kRowBytes>(m, k));
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        // The small numbers first.
#pragma unroll
        for (int number = kNumbersOf<T> - 1; number >= 0; --number) {
          const Fragment b =
              load_fragment(w_places.at<kRowBytes>((set * kNumbersOf<T> + number) * 2, k));
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            float (&sums)[2][4] = turns[set][m];
            mma_m16n8k16<T>(sums[0], x[m].registers, b.registers[0], b.registers[1]);
            mma_m16n8k16<T>(sums[1], x[m].registers, b.registers[2], b.registers[3]);
          }
        }
      }
    }
  }

  const FeatureSource& source_;
  const T* x_;  // of the head
  const T* w_;
  float unit_;
  int slices_;
  uint32_t base_;
  int held_even_ = -1, held_odd_ = -1, held_tokens_ = -1;
};

}  // namespace
}  // namespace ikattn::cuda
