// Steps of blocks that pass along tiles of the other side: a warp's own rows as fragments, the
// tiles of keys as they come, and which rows a thread has.
#pragma once

#include "attention/cuda/tensor_cores/blocks.h"

namespace ikattn::cuda {
namespace {

// Loads rows g and g + 8 of the 16 from `first` on, kCount fragments of A each; zeros beyond
// `count` rows and `columns` columns.
//   rows [count][stride], of 16 bits
template <int kCount, int kRoom, typename T>
__device__ __forceinline__ void load_rows(Fragment (&fragments)[kRoom], const T* rows,
                                          int64_t stride, int columns, int64_t first,
                                          int64_t count) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t i = first + g + 8 * half;
    const T* row = rows + i * stride;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
#pragma unroll
      for (int right = 0; right < 2; ++right) {
        const int column = 16 * k + 8 * right + 2 * t;
        fragments[k].registers[half + 2 * right] =
            i < count && column < columns ? load_vector<uint32_t>(row + column) : 0;
      }
    }
  }
}

// The 16 rows of each warp of a block that owns kStep rows, as fragments of A: in registers, or,
// where these do not hold them, in shared memory.
template <typename T, int kColumns, bool kHolds>
class OwnRows {
 public:
  //   rows [count][stride]: the block's, of which `columns` are not zero; place: the address of
  //   [kStep][kColumns] in shared memory
  __device__ __forceinline__ OwnRows(const T* rows, int64_t stride, int columns, int count,
                                     uint32_t place)
      : rows_(rows),
        stride_(stride),
        columns_(columns),
        count_(count),
        place_(place),
        places_(FragmentAddresses::of_rows(place + threadIdx.x / 32 * (16 * 2 * kColumns),
                                           2 * kColumns)) {}

  // Begins to copy the rows to shared memory.
  __device__ __forceinline__ void begin() const {
    if constexpr (!kHolds) {
      const RowCopy<kColumns> copy(stride_, columns_);
      copy.template begin<kStep>(place_, copy.source(rows_), count_);
    }
  }
  // Loads them into registers.
  __device__ __forceinline__ void load() {
    if constexpr (kHolds) {
      load_rows<kColumns / 16>(held_, rows_, stride_, columns_, threadIdx.x / 32 * 16, count_);
    }
  }
  // Returns fragment k, for multiply_by_columns().
  __device__ __forceinline__ Fragment operator()(int, int k) const {
    if constexpr (kHolds) return held_[k];
    return load_fragment(places_.at<2 * kColumns>(0, k));
  }

 private:
  const T* rows_;
  int64_t stride_;
  int columns_, count_;
  uint32_t place_;
  FragmentAddresses places_;
  Fragment held_[kHolds ? kColumns / 16 : 1];
};

// Copies of every tile of kStep keys, a thread's share, and where the next one comes from. In a
// stage their features lie first, then from L::kValues on values, and from L::kTerms as many arrays
// of numbers as kArrays says: terms, and lows.
template <typename L, typename T, int F, int V, int kArrays>
struct KeyCopy {
  RowCopy<F> key_rows;
  RowCopy<V> value_rows;
  const Half* phi_k;
  const T* value;
  const float* terms;
  const FoldedTokens& tokens;

  __device__ __forceinline__ KeyCopy(const AttentionParams& params, const FoldedTokens& tokens,
                                     const QueryBlock& at, int first_tile)
      : key_rows(F, F),
        value_rows(tokens.value.stride[2], tokens.value_columns),
        phi_k(key_rows.source(tokens.phi_k + (at.bk * params.S + first_tile * int64_t{kStep}) * F)),
        value(value_rows.source(::ikattn::cuda::value_rows<T>(params, tokens, at.b, at.h) +
                                first_tile * kStep * value_rows.stride)),
        terms(tokens.forms.terms + at.bk * padded_tokens(params.S) + first_tile * int64_t{kStep} +
              threadIdx.x * 4),
        tokens(tokens) {}

  // Begins to copy the next tile into the stage at `base`; `count` keys are left from its
  // first on.
  __device__ __forceinline__ void operator()(uint32_t base, int count) {
    key_rows.template begin<kStep>(base, phi_k, count);
    value_rows.template begin<kStep>(base + L::kValues, value, count);
    if (kArrays > 0 && threadIdx.x < kStep / 4) {
      const uint32_t place = base + L::kTerms + threadIdx.x * 16;
      cp_async_16(place, terms);
      // No register for where they are.
      if (kArrays > 1)
        cp_async_16(place + kStep * 4, terms + (tokens.forms.lows - tokens.forms.terms));
    }
    cp_async_commit();
    phi_k += kStep * F;
    value += kStep * value_rows.stride;
    terms += kStep;
  }
};

// Waits for a tile of kKeys keys, and returns its stage: the next tile is on its way, and the
// values of a head that may hold anything are finite.
//   copy(place, count): begins to copy the next tile; `count` keys are left from its first on
template <typename L, typename T, int kKeys, int kColumns, typename Copy>
__device__ __forceinline__ Shared<unsigned char> arrive_at(int tile, int end, int64_t S,
                                                           uint32_t state,
                                                           Shared<unsigned char> stages,
                                                           Copy& copy) {
  Shared<unsigned char> stage = stages + tile % kStages * L::kStage;
  cp_async_wait<0>();
  __syncthreads();  // the tile is here, and nobody reads the other stage
  if (tile + 1 < end) {
    copy(shared_address(stages + (tile + 1) % kStages * L::kStage),
         remaining_of(S, (tile + 1) * int64_t{kKeys}));
  }
  if ((state & kUnclean) != 0) {
    clean_values<T, kKeys * kColumns>(stage + L::kValues);
    __syncthreads();
  }
  return stage;
}

// Calls visit(m, half, i) for the rows i that a thread has, two of each of its warp's tiles of 16,
// of a block's from i0 on. Where no register shall hold them, `thread` is unknown_to_compiler().
template <int kRowTiles, typename Visit>
__device__ __forceinline__ void for_own_rows(int i0, unsigned thread, const Visit& visit) {
  const int first = i0 + static_cast<int>(thread / 32 * kRowTiles * 16 + thread % 32 / 4);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) visit(m, half, int64_t{first + m * 16 + 8 * half});
  }
}

}  // namespace
}  // namespace ikattn::cuda
