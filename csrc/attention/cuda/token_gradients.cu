// Gradients of features and logits, back to tokens and frequencies.
#include "attention/cuda/angles.h"
#include "attention/cuda/p_norm.h"

namespace ikattn::cuda {
namespace {

constexpr double kTwoPi = 6.283185307179586476925;

// Gradients of u and v, in units of x.w: [B, heads, N, M] each.
template <typename T, int kTokenParts>
__global__ void __launch_bounds__(kTokenThreads, 2)
    angle_gradient_kernel(FeatureSource source, Array grad_phi, T* grad_u, T* grad_v) {
  visit_angles_by<T, kTokenParts>(source, [&](int64_t b, int64_t head, int64_t index, int64_t token,
                                              int64_t m, const Angle<T>& angle) {
    const Tokens incoming(grad_phi, b, head);
    const T grad_cos = incoming.load<T>(token, m);
    const T grad_sin = incoming.load<T>(token, source.M + m);
    T du = 0, dv = 0;
    if (grad_cos != T(0) || grad_sin != T(0)) {  // a hidden token may hold NaN
      const T scale = static_cast<T>(2 * kTwoPi);
      du = scale * angle.cos_v * (angle.cos_u * grad_sin - angle.sin_u * grad_cos);
      dv = -scale * angle.sin_v * (angle.cos_u * grad_cos + angle.sin_u * grad_sin);
    }
    grad_u[index * source.M + m] = du;
    grad_v[index * source.M + m] = dv;
  });
}

// grad_x[n][c] = sum_m grad_u W+[c][m] + grad_v W-[c][m], and the magnitude's part:
// grad_logits scale d|x|_p^2 / dx_c. A block: 64 tokens and 64 dimensions.
//   out [B, heads, N, d]
template <typename T, bool kTensorCores>
__global__ void __launch_bounds__(kTensorCores ? kProductThreads : kThreads, 1)
    token_gradient_kernel(FeatureSource source, Array out, const T* grad_u, const T* grad_v,
                          const T* grad_logits, const T* logits, double p, double magnitude_scale) {
  IKATTN_SHARED(double, norms, kTile);
  IKATTN_SHARED(T, factors, kTile);
  constexpr int kBlockThreads = kTensorCores ? kProductThreads : kThreads;
  const int64_t token_blocks = (source.N + kTile - 1) / kTile;
  const int64_t bh = blockIdx.x / token_blocks, first = blockIdx.x % token_blocks * kTile;
  const int64_t b = bh / source.heads, head = bh % source.heads, c0 = int64_t{blockIdx.y} * kTile;
  const HalfFrequencies<T> half_frequencies(source, b, head);
  const Tokens x(source.x, b, head * source.x_heads / source.heads), gradient(out, b, head);
  const bool has_magnitude = grad_logits != nullptr && p > 0;
  if (has_magnitude) {
    for (int row = threadIdx.x / 32; row < kTile; row += kBlockThreads / 32) {
      const int64_t token = first + row;
      if (token >= source.N) break;  // the whole warp
      const T logit = logits[bh * source.N + token];
      // The slope of |x|^2 needs no norm, and is 0 where x is.
      const double norm = p == 2 ? 1 : p_norm(x, token, source.d, p, threadIdx.x % 32);
      if (threadIdx.x % 32 != 0) continue;
      const bool counts = logit != minus_infinity<T>() && norm != 0;
      norms[row] = norm;
      factors[row] =
          counts ? grad_logits[bh * source.N + token] * static_cast<T>(2 * magnitude_scale) : T(0);
    }
  }
  const auto angle_gradients = [&](int row, int64_t k) {
    if (first + row >= source.N) return T(0);
    const int64_t index = (bh * source.N + first + row) * source.M;
    return k < source.M ? grad_u[index + k] : grad_v[index + k - source.M];
  };
  const auto frequencies = [&](int column, int64_t k) {
    const int64_t c = c0 + column, m = k < source.M ? k : k - source.M;
    return c < source.d ? half_frequencies(c, m, k < source.M) : T(0);
  };
  const auto finish = [&](int row, int column, T sum) {
    const int64_t token = first + row, c = c0 + column;
    if (token >= source.N || c >= source.d) return;
    const T factor = has_magnitude ? factors[row] : T(0);
    if (factor != T(0)) {
      const T value = x.load<T>(token, c);
      if (p == 2) {
        sum += factor * value;
      } else if (value != T(0)) {
        const double norm = norms[row];
        const double slope = norm * pow(fabs(static_cast<double>(value)) / norm, p - 1);
        sum += factor * static_cast<T>(value < T(0) ? -slope : slope);
      }
    }
    gradient.store<T>(token, c, sum);
  };
  const int64_t depth = half_frequencies.stationary ? source.M : 2 * source.M;
  if constexpr (kTensorCores) {
    ProductSums sums = {};
    add_product<2, Contiguous::kDepth, 2, Contiguous::kDepth>(depth, angle_gradients, frequencies,
                                                              dynamic_shared<T>(), sums);
    visit_product(ProductTile(), sums, finish);
  } else {
    const ThreadTile at;
    T sums[kPerThread][kPerThread];
    dot_tile<T>(at, depth, angle_gradients, frequencies, dynamic_shared<T>(), sums);
#pragma unroll
    for (int r = 0; r < kPerThread; ++r) {
#pragma unroll
      for (int c = 0; c < kPerThread; ++c) finish(at.row(r), at.column(c), sums[r][c]);
    }
  }
}

// How the tokens that share frequencies are dealt out, to be added up in a fixed order: in shares
// of whole heads, and heads in ranges of tokens.
struct TokenShares {
  static constexpr int64_t kTokensEach = 2048;
  int64_t heads;       // of all batches that share one set of frequencies
  int64_t heads_each;  // of a share
  int64_t ranges;      // of a head
  int64_t count;       // of shares

  explicit TokenShares(const FeatureSource& source) {
    heads = source.heads / source.frequency_heads *
            (source.frequency_batches == 1 ? source.B : int64_t{1});
    ranges = ceil_div(source.N, kTokensEach);
    heads_each = source.N > 0 && source.N < kTokensEach ? kTokensEach / source.N : 1;
    count = ceil_div(heads, heads_each) * ranges;
  }
};

// What a block of the next kernel adds up: 64 dimensions and 64 frequencies over one share.
struct FrequencyBlock {
  int64_t c0, m0, frequency_batch, frequency_head, group;
  int64_t first_head, end_head, first, end;  // of the share: heads, and tokens of each
  int64_t size, offset;                      // of a part, and its place

  __device__ FrequencyBlock(const FeatureSource& source, const TokenShares& shares) {
    const int64_t tiles_m = (source.M + kTile - 1) / kTile;
    const int64_t tiles_c = (source.d + kTile - 1) / kTile;
    m0 = blockIdx.x % tiles_m * kTile;
    c0 = blockIdx.x / tiles_m % tiles_c * kTile;
    const int64_t sets = source.frequency_batches * source.frequency_heads;
    const int64_t which = blockIdx.x / (tiles_m * tiles_c) % sets;
    const int64_t share = blockIdx.x / (tiles_m * tiles_c) / sets;
    frequency_batch = which / source.frequency_heads;
    frequency_head = which % source.frequency_heads;
    group = source.heads / source.frequency_heads;
    first_head = share / shares.ranges * shares.heads_each;
    end_head = min(first_head + shares.heads_each, shares.heads);
    first = share % shares.ranges * TokenShares::kTokensEach;
    end = min(first + TokenShares::kTokensEach, source.N);
    size = source.d * source.M;
    offset = (share * sets + which) * 2 * size;
  }
  // The batch and the head of the share's unit-th head.
  __device__ int64_t batch(int64_t unit) const { return frequency_batch + unit / group; }
  __device__ int64_t head(int64_t unit) const { return frequency_head * group + unit % group; }
};

// parts [share][frequency batch, head][u, v][d][M] = sum over the share's tokens of x grad_u and
// x grad_v.
template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    frequency_part_kernel(FeatureSource source, TokenShares shares, const T* grad_u,
                          const T* grad_v, T* parts) {
  Shared<T> values = dynamic_shared<T>();  // each [kDepth tokens][64]
  Shared<T> u = values + kDepth * kPitch;
  Shared<T> v = u + kDepth * kPitch;
  const ThreadTile at;
  const FrequencyBlock block(source, shares);
  T sums_u[kPerThread][kPerThread] = {}, sums_v[kPerThread][kPerThread] = {};
  for (int64_t unit = block.first_head; unit < block.end_head; ++unit) {
    const int64_t b = block.batch(unit), head = block.head(unit);
    const Tokens x(source.x, b, head * source.x_heads / source.heads);
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
        u[k * kPitch + column] = there && m < source.M ? grad_u[from] : T(0);
        v[k * kPitch + column] = there && m < source.M ? grad_v[from] : T(0);
      }
      __syncthreads();
#pragma unroll 4
      for (int k = 0; k < kDepth; ++k) {
        T left[kPerThread];
#pragma unroll
        for (int r = 0; r < kPerThread; ++r) left[r] = values[k * kPitch + at.row(r)];
#pragma unroll
        for (int c = 0; c < kPerThread; ++c) {
          const T right_u = u[k * kPitch + at.column(c)], right_v = v[k * kPitch + at.column(c)];
#pragma unroll
          for (int r = 0; r < kPerThread; ++r) {
            sums_u[r][c] += left[r] * right_u;
            sums_v[r][c] += left[r] * right_v;
          }
        }
      }
    }
  }
  T* part = parts + block.offset;
#pragma unroll
  for (int r = 0; r < kPerThread; ++r) {
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) {
      const int64_t row = block.c0 + at.row(r), column = block.m0 + at.column(c);
      if (row >= source.d || column >= source.M) continue;
      part[row * source.M + column] = sums_u[r][c];
      part[block.size + row * source.M + column] = sums_v[r][c];
    }
  }
}

// The same on tensor cores.
template <int kTokenParts>
__global__ void __launch_bounds__(kProductThreads, 1)
    frequency_product_kernel(FeatureSource source, TokenShares shares, const float* grad_u,
                             const float* grad_v, float* parts) {
  const FrequencyBlock block(source, shares);
  const auto add_up = [&](const float* gradients, float* part) {
    ProductSums sums = {};
    for (int64_t unit = block.first_head; unit < block.end_head; ++unit) {
      const int64_t b = block.batch(unit), head = block.head(unit);
      const Tokens x(source.x, b, head * source.x_heads / source.heads);
      const int64_t base = (b * source.heads + head) * source.N + block.first;
      const auto values = [&](int row, int64_t k) {
        const int64_t c = block.c0 + row;
        const float value = c < source.d ? x.load<float>(block.first + k, c) : 0.0f;
        return is_finite(value) ? value : 0.0f;  // as above
      };
      const auto of_angles = [&](int column, int64_t k) {
        const int64_t m = block.m0 + column;
        return m < source.M ? gradients[(base + k) * source.M + m] : 0.0f;
      };
      add_product<kTokenParts, Contiguous::kRows, 2, Contiguous::kRows>(
          block.end - block.first, values, of_angles, dynamic_shared<float>(), sums);
    }
    visit_product(ProductTile(), sums, [&](int row, int column, float sum) {
      const int64_t c = block.c0 + row, m = block.m0 + column;
      if (c < source.d && m < source.M) part[c * source.M + m] = sum;
    });
  };
  add_up(grad_u, parts + block.offset);
  if (source.w2.type != ElementType::kNone) add_up(grad_v, parts + block.offset + block.size);
}

// grad_w1 and grad_w2 += the parts, share after share.
template <typename T>
__global__ void __launch_bounds__(kTokenThreads, 2)
    frequency_gradient_kernel(FeatureSource source, TokenShares shares, const T* parts, T* grad_w1,
                              T* grad_w2) {
  const int64_t size = source.d * source.M;
  const int64_t sets = source.frequency_batches * source.frequency_heads;
  const int64_t index = int64_t{blockIdx.x} * kTokenThreads + threadIdx.x;
  if (index >= sets * size) return;
  const int64_t which = index / size, element = index % size;
  const bool stationary = source.w2.type == ElementType::kNone;
  T plus = 0, minus = 0;
  for (int64_t share = 0; share < shares.count; ++share) {
    const T* part = parts + (share * sets + which) * 2 * size + element;
    plus += part[0];
    if (!stationary) minus += part[size];
  }
  if (grad_w1 != nullptr) grad_w1[index] += stationary ? plus : (plus + minus) / 2;
  if (grad_w2 != nullptr) grad_w2[index] += (plus - minus) / 2;
}

// The gradients of one side's features, back to its tokens and (+=) to the frequencies.
template <typename T>
const char* side_gradients(const FeatureSource& source, const Array& grad_phi, const Array& grad_x,
                           T* grad_w1, T* grad_w2, const T* grad_logits, const T* logits, double p,
                           double magnitude_scale, bool tensor_cores,
                           const DeviceExecutor& executor) {
  const int64_t count = source.B * source.heads * source.N * source.M;
  T* grad_u = executor.take<T>(count);
  T* grad_v = executor.take<T>(count);
  const char* error = nullptr;
  if constexpr (sizeof(T) == sizeof(float)) {
    if (tensor_cores) {
      error = launch_product_angles(
          tf32_parts_of(source) == 1 ? angle_gradient_kernel<T, 1> : angle_gradient_kernel<T, 2>,
          source, executor.stream, grad_phi, grad_u, grad_v);
    }
  }
  if (!tensor_cores) {
    error = launch_angles<T>(angle_gradient_kernel<T, 0>, source, executor.stream, grad_phi, grad_u,
                             grad_v);
  }
  if (error != nullptr) return error;
  const T *read_u = grad_u, *read_v = grad_v;
  if (grad_x.type != ElementType::kNone) {
    const dim3 blocks(static_cast<unsigned>(source.B * source.heads * ceil_div(source.N, kTile)),
                      static_cast<unsigned>(ceil_div(source.d, kTile)));
    const auto launch_with = [&](auto kernel, int threads, int64_t shared) {
      return launch(kernel, blocks, dim3(static_cast<unsigned>(threads)), shared, executor.stream,
                    source, grad_x, read_u, read_v, grad_logits, logits, p, magnitude_scale);
    };
    if constexpr (sizeof(T) == sizeof(float)) {
      if (tensor_cores) {
        error = launch_with(token_gradient_kernel<T, true>, kProductThreads, kProductShared);
      }
    }
    if (!tensor_cores) {
      error = launch_with(token_gradient_kernel<T, false>, kThreads,
                          2 * kDepth * kPitch * int64_t{sizeof(T)});
    }
    if (error != nullptr) return error;
  }
  if (grad_w1 == nullptr && grad_w2 == nullptr) return nullptr;
  const TokenShares shares(source);
  const int64_t sets = source.frequency_batches * source.frequency_heads;
  const int64_t elements = sets * source.d * source.M;
  T* parts = executor.take<T>(shares.count * 2 * elements);
  const dim3 blocks(static_cast<unsigned>(shares.count * sets * ceil_div(source.d, kTile) *
                                          ceil_div(source.M, kTile)));
  if constexpr (sizeof(T) == sizeof(float)) {
    if (tensor_cores) {
      error = launch(
          tf32_parts_of(source) == 1 ? frequency_product_kernel<1> : frequency_product_kernel<2>,
          blocks, dim3(kProductThreads), kProductShared, executor.stream, source, shares, read_u,
          read_v, parts);
    }
  }
  if (!tensor_cores) {
    error = launch(frequency_part_kernel<T>, blocks, dim3(kThreads),
                   3 * kDepth * kPitch * int64_t{sizeof(T)}, executor.stream, source, shares,
                   read_u, read_v, parts);
  }
  if (error != nullptr) return error;
  const T* read_parts = parts;
  return launch(frequency_gradient_kernel<T>,
                dim3(static_cast<unsigned>(ceil_div(elements, kTokenThreads))), dim3(kTokenThreads),
                0, executor.stream, source, shares, read_parts, grad_w1, grad_w2);
}

template <typename T>
T* data_of(const Array& array) {
  return array.type == ElementType::kNone ? nullptr : static_cast<T*>(array.data);
}

}  // namespace

template <typename T>
const char* token_gradients(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                            const SplitLogits<T>& keys, const PairGradients<T>& gradients,
                            bool tensor_cores) {
  const int64_t F = 2 * params.M;
  T* grad_w1 = data_of<T>(params.grad_w1);
  T* grad_w2 = data_of<T>(params.grad_w2);
  const bool frequencies = grad_w1 != nullptr || grad_w2 != nullptr;
  if (params.grad_query || frequencies) {
    if (const char* error = side_gradients<T>(
            source_of(params, false), contiguous(gradients.phi_q, params.H, params.L, F),
            params.grad_query, grad_w1, grad_w2, nullptr, nullptr, 0, 0, tensor_cores, executor)) {
      return error;
    }
  }
  if (!params.grad_key && !frequencies) return nullptr;
  return side_gradients<T>(source_of(params, true),
                           contiguous(gradients.phi_k, params.key_heads, params.S, F),
                           params.grad_key, grad_w1, grad_w2, gradients.logits, keys.high, params.p,
                           params.magnitude_scale, tensor_cores, executor);
}

template <typename T>
const char* feature_gradients(const FeaturesParams& params, const DeviceExecutor& executor) {
  return side_gradients<T>(source_of(params), params.features, params.grad_x,
                           data_of<T>(params.grad_w1), data_of<T>(params.grad_w2), nullptr, nullptr,
                           0, 0, false, executor);
}

#define IKATTN_INSTANTIATE(T)                                                                    \
  template const char* token_gradients<T>(const AttentionBackwardParams&, const DeviceExecutor&, \
                                          const SplitLogits<T>&, const PairGradients<T>&, bool); \
  template const char* feature_gradients<T>(const FeaturesParams&, const DeviceExecutor&);
IKATTN_INSTANTIATE(float)
IKATTN_INSTANTIATE(double)
#undef IKATTN_INSTANTIATE

}  // namespace ikattn::cuda
