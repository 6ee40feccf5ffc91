// Gradients of features, back to tokens and frequencies, on CUDA cores, in one pass over the
// angles: of at most 32 dimensions (float64: 16) and 64 frequencies, as nodes of graphs have.
#include "attention/cuda/features/angles.h"
#include "attention/cuda/features/frequency_parts.h"
#include "attention/cuda/features/gradients.h"
#include "attention/cuda/features/gradients_narrow.h"

namespace ikattn::cuda {
namespace {

constexpr int kNarrowTokens = 8;  // tokens of a thread, at a time

// Places in a block's shared memory, of `columns` threads of one token: tokens, both frequencies
// and gradients of both angles. Rows of an odd pitch lie in different banks.
template <typename T, int kD>
struct NarrowLayout {
  int columns, tokens;  // size of a tile

  __host__ __device__ explicit NarrowLayout(int64_t M)
      : columns(M <= 16   ? 16
                : M <= 32 ? 32
                          : 64),
        tokens(kTokenThreads / columns * kNarrowTokens) {}
  __host__ __device__ int frequency_pitch() const { return columns + 1; }
  __host__ __device__ int gradient_pitch() const { return 2 * columns + 1; }
  __host__ __device__ int frequencies() const { return tokens * kD; }
  __host__ __device__ int gradients() const { return frequencies() + 2 * kD * frequency_pitch(); }
  __host__ __device__ int sums() const { return gradients() + tokens * gradient_pitch(); }
  __host__ __device__ int count() const { return sums() + 2 * kTokenThreads; }
};

template <typename T, int kD>
__device__ __forceinline__ void narrow_angles(Shared<T> x, int own, Shared<T> w, int pitch, int m,
                                              T (&angles1)[kNarrowTokens],
                                              T (&angles2)[kNarrowTokens]) {
#pragma unroll
  for (int c = 0; c < kD; c += 4) {
    T by1[4], by2[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      by1[i] = w[(c + i) * pitch + m];
      by2[i] = w[(kD + c + i) * pitch + m];
    }
#pragma unroll
    for (int t = 0; t < kNarrowTokens; ++t) {
      const Four<T> values = load_vector<Four<T>>(x + (own + t) * kD + c);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        angles1[t] += values.at[i] * by1[i];
        angles2[t] += values.at[i] * by2[i];
      }
    }
  }
}

template <typename T, int kD>
__device__ __forceinline__ void add_narrow_tokens(Shared<T> x, int own,
                                                  const T (&gradients1)[kNarrowTokens],
                                                  const T (&gradients2)[kNarrowTokens],
                                                  T (&sums1)[kD], T (&sums2)[kD]) {
#pragma unroll
  for (int c = 0; c < kD; c += 4) {
#pragma unroll
    for (int t = 0; t < kNarrowTokens; ++t) {
      const Four<T> values = load_vector<Four<T>>(x + (own + t) * kD + c);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const T value = is_finite(values.at[i]) ? values.at[i] : T(0);
        sums1[c + i] += value * gradients1[t];
        sums2[c + i] += value * gradients2[t];
      }
    }
  }
}

template <typename T, int kD>
__device__ __forceinline__ void store_narrow_frequencies(const FeatureSource& source,
                                                         const FrequencyBlock<T>& block,
                                                         int columns, int m, int own,
                                                         Shared<T> of_threads, const T (&sums1)[kD],
                                                         const T (&sums2)[kD]) {
#pragma unroll
  for (int c = 0; c < kD; ++c) {
    __syncthreads();
    of_threads[threadIdx.x] = sums1[c];
    of_threads[kTokenThreads + threadIdx.x] = sums2[c];
    __syncthreads();
    if (own != 0 || m >= source.M || c >= source.d) continue;
    T sum1 = 0, sum2 = 0;
    for (int thread = m; thread < kTokenThreads; thread += columns) {
      sum1 += of_threads[thread];
      sum2 += of_threads[kTokenThreads + thread];
    }
    block.part[c * source.M + m] = sum1;
    block.part[block.size + c * source.M + m] = sum2;
  }
}

// Loads tokens from `first` on into x [count][kD], zeros from `end` on and beyond the last
// dimension. All threads of the block call it, and it synchronises them.
template <typename T, int kD>
__device__ __forceinline__ void load_narrow_tokens(const FeatureSource& source,
                                                   const Tokens& tokens, int64_t first, int64_t end,
                                                   int count, Shared<T> x) {
  __syncthreads();  // nobody reads what was there
  for (int index = static_cast<int>(threadIdx.x); index < count * kD; index += kTokenThreads) {
    const int64_t token = first + index / kD, c = index % kD;
    x[index] = token < end && c < source.d ? tokens.load<T>(token, c) : T(0);
  }
  __syncthreads();
}

// Loads both frequencies of all the share's heads, zeros beyond the last.
//   w [2][kD][pitch]
template <typename T, int kD>
__device__ __forceinline__ void load_narrow_frequencies(const FeatureSource& source,
                                                        const FrequencyBlock<T>& block, int columns,
                                                        int pitch, Shared<T> w) {
  const int64_t b = block.batch(block.first_head), head = block.head(block.first_head);
  const Frequencies w1(source, source.w1, b, head), w2(source, source.w2, b, head);
  for (int index = static_cast<int>(threadIdx.x); index < kD * columns; index += kTokenThreads) {
    const int c = index / columns, k = index % columns;
    const bool there = c < source.d && k < source.M;
    w[c * pitch + k] = there ? w1.template load<T>(c, k) : T(0);
    w[(kD + c) * pitch + k] = there && !source.stationary() ? w2.template load<T>(c, k) : T(0);
  }
}

// Adds up a share of the tokens in a block. kD: dimensions, or more.
//   out [B, heads, N, d], or absent; parts without memory: frequencies' gradients are not wanted
template <typename T, int kD>
__global__ void __launch_bounds__(kTokenThreads, 2)
    narrow_gradient_kernel(FeatureSource source, Array grad_phi, Array out, FrequencyParts<T> parts,
                           Magnitude<T> magnitude) {
  const NarrowLayout<T, kD> layout(source.M);
  const FrequencyBlock<T> block(source, parts);
  Shared<T> x = dynamic_shared<T>();
  Shared<T> w = x + layout.frequencies(), gradients = x + layout.gradients();
  const int columns = layout.columns, pitch = layout.frequency_pitch();
  const int m = static_cast<int>(threadIdx.x) % columns;
  const int own = static_cast<int>(threadIdx.x) / columns * kNarrowTokens;
  const bool is_stationary = source.stationary();
  const T units = static_cast<T>(angle_units(is_stationary));
  // 1. Both frequencies of all the share's heads, zeros beyond the last.
  load_narrow_frequencies<T, kD>(source, block, columns, pitch, w);
  T sums1[kD] = {}, sums2[kD] = {};
#pragma unroll 1
  for (int64_t unit = block.first_head; unit < block.end_head; ++unit) {
    const int64_t b = block.batch(unit), head = block.head(unit);
    const Tokens tokens(source.x, b, source.x_head(head)), incoming(grad_phi, b, head);
    const int64_t base = (b * source.heads + head) * source.N;
#pragma unroll 1
    for (int64_t first = block.first; first < block.end; first += layout.tokens) {
      load_narrow_tokens<T, kD>(source, tokens, first, block.end, layout.tokens, x);
      // 2. The gradients of a frequency's angles.
      T angles1[kNarrowTokens] = {}, angles2[kNarrowTokens] = {};
      narrow_angles<T, kD>(x, own, w, pitch, m, angles1, angles2);
#pragma unroll
      for (int t = 0; t < kNarrowTokens; ++t) {
        const int64_t token = first + own + t;
        T gradient1 = 0, gradient2 = 0;
        if (token < block.end && m < source.M) {
          Angle<T> angle;
          angle.set(angles1[t], angles2[t], is_stationary);
          const T grad_cos = incoming.load<T>(token, m);
          const T grad_sin = incoming.load<T>(token, source.M + m);
          gradient1 = angle_gradient(units, angle.sin1, angle.cos1, grad_sin, grad_cos);
          if (!is_stationary) {
            gradient2 = angle_gradient(units, angle.sin2, angle.cos2, grad_sin, grad_cos);
          }
        }
        angles1[t] = gradient1;
        angles2[t] = gradient2;
        Shared<T> row = gradients + (own + t) * layout.gradient_pitch();
        row[m] = gradient1;
        row[columns + m] = gradient2;
      }
      // 3. Those of frequencies. A token without gradient has none, whatever it holds; with one, it
      // is NaN there, too.
      if (parts.sums != nullptr) add_narrow_tokens<T, kD>(x, own, angles1, angles2, sums1, sums2);
      __syncthreads();
      // 4. Those of tokens: a thread has one dimension of every few.
      if (out.type == ElementType::kNone) continue;
      const Tokens to(out, b, head);
      constexpr int kRows = 4, kRowStep = kTokenThreads / kD;
      const int c = static_cast<int>(threadIdx.x) % kD;
      for (int row0 = static_cast<int>(threadIdx.x) / kD; row0 < layout.tokens;
           row0 += kRows * kRowStep) {
        T sums[kRows] = {};
        for (int k = 0; k < columns; ++k) {
          const T by1 = w[c * pitch + k], by2 = w[(kD + c) * pitch + k];
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            const int row = min(row0 + r * kRowStep, layout.tokens - 1);
            Shared<T> of_row = gradients + row * layout.gradient_pitch();
            sums[r] += of_row[k] * by1 + of_row[columns + k] * by2;
          }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const int row = row0 + r * kRowStep;
          const int64_t token = first + row;
          if (row >= layout.tokens || token >= block.end || c >= source.d) continue;
          const KeyMagnitude<T> of_key(magnitude, base + token);
          T sum = sums[r];
          if (of_key.factor != T(0)) sum += of_key.slope(x[row * kD + c], magnitude.p);
          to.store<T>(token, c, sum);
        }
      }
    }
  }
  // 5. The share's part.
  if (parts.sums == nullptr) return;
  store_narrow_frequencies<T, kD>(source, block, columns, m, own, x + layout.sums(), sums1, sums2);
}

template <typename T, int kD>
const char* queue_narrow(const FeatureSource& source, const Array& grad_phi, const Array& grad_x,
                         const FrequencyParts<T>& parts, const Magnitude<T>& magnitude,
                         Stream stream) {
  return launch(narrow_gradient_kernel<T, kD>, parts.blocks(source), dim3(kTokenThreads),
                NarrowLayout<T, kD>(source.M).count() * int64_t{sizeof(T)}, stream, source,
                grad_phi, grad_x, parts, magnitude);
}

}  // namespace

template <typename T>
bool is_narrow(const FeatureSource& source) {
  constexpr int64_t kMost = sizeof(T) == 8 ? 16 : 32;  // a thread holds two sums of each
  return source.d <= kMost && source.M <= 64;
}

template <typename T>
const char* narrow_gradients(const FeatureSource& source, const Array& grad_phi,
                             const Array& grad_x, T* grad_w1, T* grad_w2,
                             const Magnitude<T>& magnitude, const DeviceExecutor& executor) {
  const bool wants_frequencies = grad_w1 != nullptr || grad_w2 != nullptr;
  const FrequencyParts<T> parts(source, 1024, wants_frequencies ? &executor : nullptr);
  constexpr int kMost = sizeof(T) == 8 ? 16 : 32;
  const auto queue = source.d <= 8    ? queue_narrow<T, 8>
                     : source.d <= 16 ? queue_narrow<T, 16>
                                      : queue_narrow<T, kMost>;
  const char* error = queue(source, grad_phi, grad_x, parts, magnitude, executor.stream);
  if (error != nullptr || !wants_frequencies) return error;
  return add_frequency_parts(source, parts, grad_w1, grad_w2, executor.stream);
}

#define IKATTN_INSTANTIATE(T)                                                                    \
  template bool is_narrow<T>(const FeatureSource&);                                              \
  template const char* narrow_gradients<T>(const FeatureSource&, const Array&, const Array&, T*, \
                                           T*, const Magnitude<T>&, const DeviceExecutor&);
IKATTN_INSTANTIATE(float)
IKATTN_INSTANTIATE(double)
#undef IKATTN_INSTANTIATE

}  // namespace ikattn::cuda
