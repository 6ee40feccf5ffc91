// Gradients of features and logits, back to tokens and frequencies, on CUDA cores.
#include "attention/cuda/features/angles.h"
#include "attention/cuda/features/frequency_parts.h"
#include "attention/cuda/features/gradients.h"
#include "attention/cuda/features/gradients_narrow.h"

namespace ikattn::cuda {
namespace {

// Gradients of both angles, [B, heads, N, M] each; of the first alone where they are one.
template <typename T>
__global__ void __launch_bounds__(kTokenThreads, 2)
    angle_gradient_kernel(FeatureSource source, Array grad_phi, T* grad_angles1, T* grad_angles2) {
  visit_angles<T>(source, [&](int64_t b, int64_t head, int64_t index, int64_t token, int64_t m,
                              const Angle<T>& angle) {
    const Tokens incoming(grad_phi, b, head);
    const T grad_cos = incoming.load<T>(token, m);
    const T grad_sin = incoming.load<T>(token, source.M + m);
    const int64_t at = index * source.M + m;
    const T units = static_cast<T>(angle_units(source.stationary()));
    grad_angles1[at] = angle_gradient(units, angle.sin1, angle.cos1, grad_sin, grad_cos);
    if (source.stationary()) return;
    grad_angles2[at] = angle_gradient(units, angle.sin2, angle.cos2, grad_sin, grad_cos);
  });
}

// grad_x[n][c] = sum_m grad_angles1 w1[c][m] + grad_angles2 w2[c][m], and the magnitude's part. A
// block: 64 tokens and 64 dimensions.
//   out [B, heads, N, d]
template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    token_gradient_kernel(FeatureSource source, Array out, const T* grad_angles1,
                          const T* grad_angles2, Magnitude<T> magnitude) {
  const int64_t token_blocks = (source.N + kTile - 1) / kTile;
  const int64_t bh = blockIdx.x / token_blocks, first = blockIdx.x % token_blocks * kTile;
  const int64_t b = bh / source.heads, head = bh % source.heads, c0 = int64_t{blockIdx.y} * kTile;
  const Frequencies w1(source, source.w1, b, head), w2(source, source.w2, b, head);
  const Tokens x(source.x, b, source.x_head(head)), gradient(out, b, head);
  const auto feature_gradients_on_tensor_cores = [&](int row, int64_t k) {
    if (first + row >= source.N) return T(0);
    const int64_t index = (bh * source.N + first + row) * source.M;
    return k < source.M ? grad_angles1[index + k] : grad_angles2[index + k - source.M];
  };
  const auto frequencies = [&](int column, int64_t k) {
    const int64_t c = c0 + column;
    if (c >= source.d) return T(0);
    return k < source.M ? w1.load<T>(c, k) : w2.load<T>(c, k - source.M);
  };
  const ThreadTile at;
  T sums[kPerThread][kPerThread];
  dot_tile<T>(at, source.stationary() ? source.M : 2 * source.M, feature_gradients_on_tensor_cores,
              frequencies, dynamic_shared<T>(), sums);
#pragma unroll
  for (int r = 0; r < kPerThread; ++r) {
    const int64_t token = first + at.row(r);
    if (token >= source.N) continue;
    const KeyMagnitude<T> own(magnitude, bh * source.N + token);
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) {
      const int64_t column = c0 + at.column(c);
      if (column >= source.d) continue;
      T sum = sums[r][c];
      if (own.factor != T(0)) sum += own.slope(x.load<T>(token, column), magnitude.p);
      gradient.store<T>(token, column, sum);
    }
  }
}

// The shares' parts.
template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    frequency_part_kernel(FeatureSource source, FrequencyParts<T> parts, const T* grad_angles1,
                          const T* grad_angles2) {
  Shared<T> values = dynamic_shared<T>();  // each [kDepth tokens][64]
  Shared<T> angles1 = values + kDepth * kPitch;
  Shared<T> angles2 = angles1 + kDepth * kPitch;
  const ThreadTile at;
  const FrequencyBlock<T> block(source, parts);
  T sums1[kPerThread][kPerThread] = {}, sums2[kPerThread][kPerThread] = {};
  for (int64_t unit = block.first_head; unit < block.end_head; ++unit) {
    const int64_t b = block.batch(unit), head = block.head(unit);
    const Tokens x(source.x, b, source.x_head(head));
    const int64_t base = (b * source.heads + head) * source.N;
    for (int64_t token0 = block.first; token0 < block.end; token0 += kDepth) {
      __syncthreads();
      for (int index = threadIdx.x; index < kDepth * kTile; index += kThreads) {
        const int k = index / kTile, column = index % kTile;
        const int64_t token = token0 + k, m = block.m0 + column, c = block.c0 + column;
        const bool there = token < block.end;
        const T value = there && c < source.d ? x.load<T>(token, c) : T(0);
        // A token without gradient has none, whatever it holds; with one, it is NaN there, too.
        values[k * kPitch + column] = is_finite(value) ? value : T(0);
        const int64_t from = (base + token) * source.M + m;
        angles1[k * kPitch + column] = there && m < source.M ? grad_angles1[from] : T(0);
        angles2[k * kPitch + column] =
            there && m < source.M && !source.stationary() ? grad_angles2[from] : T(0);
      }
      __syncthreads();
#pragma unroll 4
      for (int k = 0; k < kDepth; ++k) {
        T left[kPerThread];
#pragma unroll
        for (int r = 0; r < kPerThread; ++r) left[r] = values[k * kPitch + at.row(r)];
#pragma unroll
        for (int c = 0; c < kPerThread; ++c) {
          const T right1 = angles1[k * kPitch + at.column(c)],
                  right2 = angles2[k * kPitch + at.column(c)];
#pragma unroll
          for (int r = 0; r < kPerThread; ++r) {
            sums1[r][c] += left[r] * right1;
            sums2[r][c] += left[r] * right2;
          }
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kPerThread; ++r) {
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) {
      const int64_t row = block.c0 + at.row(r), column = block.m0 + at.column(c);
      if (row >= source.d || column >= source.M) continue;
      block.part[row * source.M + column] = sums1[r][c];
      block.part[block.size + row * source.M + column] = sums2[r][c];
    }
  }
}

// grad_w1 and grad_w2 += the parts: eight threads for an element, of which each takes every eighth
// share.
constexpr int kElements = 32, kSlots = 8;
template <typename T>
__global__ void __launch_bounds__(kElements* kSlots, 2)
    frequency_gradient_kernel(FeatureSource source, FrequencyParts<T> parts, T* grad_w1,
                              T* grad_w2) {
  IKATTN_SHARED(T, sums, kElements * kSlots);
  const int slot = threadIdx.x / kElements;
  const int64_t size = source.d * source.M;
  const int64_t sets = source.frequency_batches * source.frequency_heads;
  const int64_t index = int64_t{blockIdx.x} * kElements + threadIdx.x % kElements;
  const T* own = parts.sums + index / size * 2 * size + index % size;
  for (int set = 0; set < 2; ++set) {
    T* gradient = set == 0 ? grad_w1 : grad_w2;
    if (gradient == nullptr) continue;  // the whole block
    T sum = 0;
    if (index < sets * size) {
#pragma unroll 4
      for (int64_t share = slot; share < parts.shares.count; share += kSlots) {
        sum += own[(share * sets * 2 + set) * size];
      }
    }
    __syncthreads();
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (slot != 0 || index >= sets * size) continue;
    for (int other = 1; other < kSlots; ++other) sum += sums[other * kElements + threadIdx.x];
    gradient[index] += sum;
  }
}

// The gradients of one side's features, back to its tokens and (+=) to the frequencies.
template <typename T>
const char* side_gradients(const FeatureSource& source, const Array& grad_phi, const Array& grad_x,
                           T* grad_w1, T* grad_w2, const Magnitude<T>& magnitude,
                           const DeviceExecutor& executor) {
  if (is_narrow<T>(source)) {
    return narrow_gradients(source, grad_phi, grad_x, grad_w1, grad_w2, magnitude, executor);
  }
  const int64_t count = source.B * source.heads * source.N * source.M;
  T* grad_angles1 = executor.take<T>(count);
  T* grad_angles2 = executor.take<T>(source.stationary() ? 0 : count);
  if (const char* error = launch_angles<T>(angle_gradient_kernel<T>, source, executor.stream,
                                           grad_phi, grad_angles1, grad_angles2)) {
    return error;
  }
  const T *read1 = grad_angles1, *read2 = grad_angles2;
  if (grad_x) {
    const dim3 blocks(static_cast<unsigned>(source.B * source.heads * ceil_div(source.N, kTile)),
                      static_cast<unsigned>(ceil_div(source.d, kTile)));
    if (const char* error = launch(token_gradient_kernel<T>, blocks, dim3(kThreads),
                                   2 * kDepth * kPitch * int64_t{sizeof(T)}, executor.stream,
                                   source, grad_x, read1, read2, magnitude)) {
      return error;
    }
  }
  if (grad_w1 == nullptr && grad_w2 == nullptr) return nullptr;
  const FrequencyParts<T> parts(source, 2048, &executor);
  if (const char* error = launch(frequency_part_kernel<T>, parts.blocks(source), dim3(kThreads),
                                 3 * kDepth * kPitch * int64_t{sizeof(T)}, executor.stream, source,
                                 parts, read1, read2)) {
    return error;
  }
  return add_frequency_parts(source, parts, grad_w1, grad_w2, executor.stream);
}

}  // namespace

template <typename T>
const char* add_frequency_parts(const FeatureSource& source, const FrequencyParts<T>& parts,
                                T* grad_w1, T* grad_w2, Stream stream) {
  const int64_t elements = source.frequency_batches * source.frequency_heads * source.d * source.M;
  return launch(frequency_gradient_kernel<T>,
                dim3(static_cast<unsigned>(ceil_div(elements, kElements))),
                dim3(kElements * kSlots), 0, stream, source, parts, grad_w1, grad_w2);
}

template <typename T>
const char* token_gradients(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                            const SplitLogits<T>& keys, const PairGradients<T>& gradients) {
  return for_sides(params, keys, gradients,
                   [&](bool of_keys, T* grad_phi, const Array& grad_x, const auto& magnitude) {
                     const FeatureSource source = source_of(params, of_keys);
                     const Array rows = contiguous(grad_phi, source.heads, source.N, 2 * source.M);
                     return side_gradients<T>(source, rows, grad_x, data_of<T>(params.grad_w1),
                                              data_of<T>(params.grad_w2), magnitude, executor);
                   });
}

template <typename T>
const char* feature_gradients(const FeaturesParams& params, const DeviceExecutor& executor) {
  return side_gradients<T>(source_of(params), params.features, params.grad_x,
                           data_of<T>(params.grad_w1), data_of<T>(params.grad_w2), {}, executor);
}

#define IKATTN_INSTANTIATE(T)                                                                     \
  template const char* token_gradients<T>(const AttentionBackwardParams&, const DeviceExecutor&,  \
                                          const SplitLogits<T>&, const PairGradients<T>&);        \
  template const char* feature_gradients<T>(const FeaturesParams&, const DeviceExecutor&);        \
  template const char* add_frequency_parts<T>(const FeatureSource&, const FrequencyParts<T>&, T*, \
                                              T*, Stream);
IKATTN_INSTANTIATE(float)
IKATTN_INSTANTIATE(double)
#undef IKATTN_INSTANTIATE

}  // namespace ikattn::cuda
