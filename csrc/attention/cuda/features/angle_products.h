// Angles of tokens, x . w1 and x . w2, on tensor cores: what the kernels that make features of
// them, and those that take gradients back, share.
//
// Frequencies are rows here, as tokens are. A block owns 128 tokens and passes along the
// frequencies, 32 at a time, or owns 64 frequencies and passes along the tokens; either way by
// slices of 64 columns, so that nothing it holds depends on sizes. Sines and cosines of an angle
// are good to 1e-6.
#pragma once

#include "attention/cuda/features/angle_operands.h"
#include "attention/cuda/mma/tf32.h"
#include "attention/cuda/operands/operands.h"

namespace ikattn::cuda {

// Destination of features, as rows of Half, and the scales of keys' features.
struct FeatureDestination {
  Half* phi_q = nullptr;           // [B, H, L, padded F]  what is not finite becomes zero
  float* poison = nullptr;         // [B, H, L]  NaN where that was so, else 0; nullptr: not wanted
  Half* phi_k = nullptr;           // [B, key_heads, S, padded F]
  SplitLogits<float> logits = {};  // [B, key_heads, S]  where it is NaN or -inf, features are zero
  // [B, key_heads]  nullptr: of integers alone
  const float* scales = nullptr;
  // [B, key_heads]  where heads in the folded form have integers of 8 bits (Int8Features), and the
  // same in Half, or where another kernel makes their features; nullptr: all heads have the same
  const uint32_t* state = nullptr;
  // The features of heads in the folded form are multiples of what an integer of 8 bits counts,
  // and lie here as integers, too. Without phi_q and phi_k there are integers alone.
  bool are_integers = false;
  int8_t* int8_q = nullptr;  // nullptr, of both: not wanted
  int8_t* int8_k = nullptr;
};
const char* write_features_on_tensor_cores(const AttentionParams& params,
                                           const AngleOperands& operands,
                                           const FeatureDestination& to, Stream stream);

// token_gradients() of what the pairs on tensor cores leave.
const char* feature_gradients_on_tensor_cores(const AttentionBackwardParams& params,
                                              const DeviceExecutor& executor,
                                              const AngleOperands& operands,
                                              const SplitLogits<float>& keys,
                                              const FoldedGradients& gradients);
// Returns whether one kernel makes both of them, gradients_in_one_pass(): tokens of 16 bits, of at
// most 64 frequencies and 128 dimensions, and 64 where a block's shared memory holds no more.
bool goes_in_one_pass(const FeatureSource& source);
template <typename T>
struct Magnitude;
// Computes the gradients of one side's tokens and its share of the frequencies': writes grad_x, and
// adds to grad_w1 and grad_w2; absent ones are left out.
const char* gradients_in_one_pass(const FeatureSource& source, const SplitFrequencies& frequencies,
                                  const FeatureGradients& grad_phi, const Array& grad_x,
                                  const Magnitude<float>& magnitude, float* grad_w1, float* grad_w2,
                                  const DeviceExecutor& executor);
// Adds one side's share to the gradients of the frequencies, grad_w1 and grad_w2; absent ones are
// left out.
const char* frequency_gradients_on_tensor_cores(const FeatureSource& source,
                                                const FrequencyRows& frequencies,
                                                const FeatureGradients& grad_phi, float* grad_w1,
                                                float* grad_w2, const DeviceExecutor& executor);

namespace {

constexpr int kAngleTokens = 128;

// Adds left(m) right(n)^T to sums[m][n]: 16 rows from left_row(m) and from right_row(n) on, along
// 64 columns.
template <typename LeftT, typename RightT, int kRows, int kColumns, typename LeftRow,
          typename RightRow>
__device__ __forceinline__ void multiply_slices(float (&sums)[kRows][kColumns][2][4],
                                                const Slice<LeftT>& left, const LeftRow& left_row,
                                                const Slice<RightT>& right,
                                                const RightRow& right_row) {
#pragma unroll 1
  for (int k = 0; k < kSliceColumns; k += 16) {
    Tf32Block<kTf32Splits<LeftT>> a[kRows];
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      a[m] = Tf32Block<kTf32Splits<LeftT>>(left.block(left_row(m), k));
    }
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const Tf32Block<kTf32Splits<RightT>> b(right.block(right_row(n), k));
#pragma unroll
      for (int m = 0; m < kRows; ++m) multiply(sums[m][n], a[m], b);
    }
  }
}

// Passes along the slices of rows, that of index `last` at the end, which stays: begin(slice)
// begins to copy what visit() finds. Between two visits it synchronises the block.
template <typename Begin, typename Visit>
__device__ __forceinline__ void pass_slices(const FrequencyRows& frequencies, int last,
                                            const Begin& begin, const Visit& visit) {
  const int slices = static_cast<int>(frequencies.columns / kSliceColumns);
  for (int step = 1; step <= slices; ++step) {
    __syncthreads();  // nobody reads what was there
    begin((last + step) % slices);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    visit();
  }
}
// Begins to copy a slice of kRows frequencies, of w1 and then of w2.
template <int kRows, int kSets>
__device__ __forceinline__ void begin_frequencies(const Slice<float>& to, const float* rows,
                                                  const FrequencyRows& frequencies, int64_t m0,
                                                  int slice) {
#pragma unroll
  for (int set = 0; set < kSets; ++set) {
    to.begin<kRows>(set * kRows,
                    rows + set * frequencies.set_size() + m0 * frequencies.columns +
                        int64_t{slice} * kSliceColumns,
                    frequencies.columns, kSliceColumns, kRows);
  }
}

// One side's tokens of one head, and its frequencies.
template <typename T>
struct AngleRows {
  const T* x;
  const float* w;
  int64_t x_stride;  // stride of tokens

  __device__ AngleRows(const FeatureSource& source, const FrequencyRows& frequencies, int sets,
                       int64_t b, int64_t head)
      : x(static_cast<const T*>(source.x.data) + b * source.x.stride[0] +
          source.x_head(head) * source.x.stride[1]),
        w(frequencies.data +
          (source.frequency_batch(b) * source.frequency_heads + source.frequency_head(head)) *
              sets * frequencies.set_size()),
        x_stride(source.x.stride[2]) {}

  // Begins to copy a slice of kRows tokens from the first-th on; zeros from `end` on.
  template <int kRows>
  __device__ __forceinline__ void begin(const Slice<T>& to, int64_t first, int64_t end, int64_t d,
                                        int slice) const {
    const int64_t column = int64_t{slice} * kSliceColumns;
    to.template begin<kRows>(0, x + first * x_stride + column, x_stride, d - column, end - first);
  }
};

// A block's 128 tokens of one head, a warp's 32 of these, and 32 frequencies at a time.
template <typename T, int kSets>
struct TokenTile {
  static constexpr uint32_t kFrequencyBytes = kSets * kAngleFrequencies * Slice<float>::kRowBytes;
  static constexpr uint32_t kBytes = kAngleTokens * Slice<T>::kRowBytes + kFrequencyBytes;

  const FeatureSource& source;
  const FrequencyRows& frequencies;
  int64_t bh, first;  // the head among all batches', the first token
  int64_t b, head;
  AngleRows<T> rows;
  Slice<float> w;  // frequencies of w1, then of w2
  Slice<T> x;

  __device__ TokenTile(const FeatureSource& s, const FrequencyRows& f, Shared<unsigned char> shared,
                       unsigned block = blockIdx.x)
      : source(s),
        frequencies(f),
        bh(block / ((s.N + kAngleTokens - 1) / kAngleTokens)),
        first(block % ((s.N + kAngleTokens - 1) / kAngleTokens) * kAngleTokens),
        b(bh / s.heads),
        head(bh % s.heads),
        rows(s, f, kSets, b, head),
        w{shared},
        x{shared + kFrequencyBytes} {}

  // Returns the thread's token in rows m of the warp's two tiles of 16.
  __device__ __forceinline__ int row(int m, int half) const {
    return threadIdx.x / 32 * 32 + 16 * m + 8 * half + threadIdx.x % 32 / 4;
  }
  // Computes angles[m][set * 2 + n] of the warp's tokens and the frequencies from m0 + 16 n on. The
  // slice of columns `last` comes last, and stays; begin_more() begins to copy more with it.
  template <typename BeginMore>
  __device__ __forceinline__ void make_angles(int64_t m0, int last,
                                              float (&angles)[2][2 * kSets][2][4],
                                              const BeginMore& begin_more) const {
    const bool is_whole = frequencies.columns == kSliceColumns;
    pass_slices(
        frequencies, last,
        [&](int slice) {
          if (!is_whole || m0 == 0) {
            rows.template begin<kAngleTokens>(x, first, source.N, source.d, slice);
          }
          begin_frequencies<kAngleFrequencies, kSets>(w, rows.w, frequencies, m0, slice);
          if (slice == last) begin_more();
        },
        [&] {
          multiply_slices(
              angles, x, [&](int m) { return static_cast<int>(threadIdx.x) / 32 * 32 + 16 * m; }, w,
              [](int n) { return 16 * n; });
        });
  }
};

// Returns where cosines of frequencies m0, a multiple of 32, and on stand in rows of `width`
// features; their sines are 32 or 64 columns further on.
__host__ __device__ inline int64_t cosine_column(int64_t m0, int64_t width) {
  return width == 64 ? m0 : m0 / 64 * 128 + m0 % 64;
}
__host__ __device__ inline int sine_step(int64_t width) { return width == 64 ? 32 : 64; }

// Calls launch.operator()<T, kSets>() for the tokens' type, and one or two sets of frequencies.
template <typename Launch>
const char* launch_angles(const FeatureSource& source, const Launch& launch) {
  const auto of_type = [&]<typename T>() {
    return source.stationary() ? launch.template operator()<T, 1>()
                               : launch.template operator()<T, 2>();
  };
  switch (source.x.type) {
    case ElementType::kFloat32:
      return of_type.template operator()<float>();
    case ElementType::kBFloat16:
      return of_type.template operator()<BFloat16>();
    default:
      return of_type.template operator()<Half>();
  }
}

}  // namespace
}  // namespace ikattn::cuda
