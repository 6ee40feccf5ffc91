// Tokens to features and logits, and the way back of their gradients.
#include <cmath>

#include "attention/cuda/folded.h"
#include "attention/cuda/tiles.h"

namespace ikattn::cuda {
namespace {

constexpr int kTokens = 16;  // of one block
constexpr int kTokenThreads = 128;
constexpr double kTwoPi = 6.283185307179586476925;

// Where the features of one side come from. heads: of the features; a head of x serves several.
struct FeatureSource {
  Array x;       // [B, x_heads, N, d]
  Array w1, w2;  // [frequency_batches, frequency_heads, d, M]; w2 none: stationary
  int64_t B, heads, x_heads, N, d, M, frequency_heads, frequency_batches;

  __device__ int64_t frequency_base(const Array& w, int64_t b, int64_t head) const {
    return (frequency_batches == 1 ? 0 : b) * w.stride[0] +
           head * frequency_heads / heads * w.stride[1];
  }
};

__device__ __forceinline__ void sincos_turns(float turns, float& sine, float& cosine) {
  sincospif(2 * (turns - rintf(turns)), &sine, &cosine);
}
__device__ __forceinline__ void sincos_turns(double turns, double& sine, double& cosine) {
  sincospi(2 * (turns - rint(turns)), &sine, &cosine);
}

// cos t1 + cos t2 = 2 cos u cos v, sin t1 + sin t2 = 2 sin u cos v, u and v the half sum and half
// difference.
template <typename T>
struct Angle {
  T sin_u, cos_u, sin_v, cos_v;

  __device__ __forceinline__ void set(T u, T v, bool stationary) {
    sincos_turns(u, sin_u, cos_u);
    sin_v = 0;
    cos_v = 1;
    if (!stationary) sincos_turns(v, sin_v, cos_v);
  }
};

template <typename T>
struct alignas(16) Four {
  T at[4];
};

// Elements from row to row of the tokens in shared memory: they are read four at a time.
__host__ __device__ inline int64_t token_pitch(int64_t d) { return (d + 3) / 4 * 4; }

// u and v of `kTokens` tokens for frequency m, in turns.
//   x [kTokens][token_pitch(d)] in shared memory
template <typename T>
__device__ __forceinline__ void half_angles(const FeatureSource& source, int64_t b, int64_t head,
                                            int64_t m, Shared<T> x, T (&u)[kTokens],
                                            T (&v)[kTokens]) {
  const bool stationary = source.w2.type == ElementType::kNone;
  const int64_t base1 = source.frequency_base(source.w1, b, head) + m * source.w1.stride[3];
  const int64_t base2 = source.frequency_base(source.w2, b, head) + m * source.w2.stride[3];
  const int64_t pitch = token_pitch(source.d);
#pragma unroll
  for (int t = 0; t < kTokens; ++t) u[t] = v[t] = 0;
  for (int64_t first = 0; first < source.d; first += 4) {
    T sum[4] = {}, difference[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t c = first + i;
      if (c >= source.d) continue;
      const T w1 = load_element<T>(source.w1, base1 + c * source.w1.stride[2]);
      const T w2 = stationary ? w1 : load_element<T>(source.w2, base2 + c * source.w2.stride[2]);
      sum[i] = (w1 + w2) / 2;
      difference[i] = (w1 - w2) / 2;
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const Four<T> values = load_vector<Four<T>>(x + t * pitch + first);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u[t] += values.at[i] * sum[i];
        v[t] += values.at[i] * difference[i];
      }
    }
  }
}

template <typename T>
__device__ __forceinline__ void load_tokens(const FeatureSource& source, int64_t b, int64_t head,
                                            int64_t first, Shared<T> x) {
  const Tokens tokens(source.x, b, head * source.x_heads / source.heads);
  const int64_t pitch = token_pitch(source.d);
  for (int64_t index = threadIdx.x; index < kTokens * pitch; index += kTokenThreads) {
    const int64_t token = first + index / pitch, c = index % pitch;
    x[index] = token < source.N && c < source.d ? tokens.load<T>(token, c) : T(0);
  }
  __syncthreads();
}

// visit(b, head, index of the token among all heads, token, m, angle) for the block's tokens and
// all frequencies.
template <typename T, typename Visit>
__device__ __forceinline__ void visit_angles(const FeatureSource& source, const Visit& visit) {
  Shared<T> x = dynamic_shared<T>();
  const int64_t token_blocks = (source.N + kTokens - 1) / kTokens;
  const int64_t bh = blockIdx.x / token_blocks, first = blockIdx.x % token_blocks * kTokens;
  const int64_t b = bh / source.heads, head = bh % source.heads;
  load_tokens(source, b, head, first, x);
  const bool stationary = source.w2.type == ElementType::kNone;
  for (int64_t m = threadIdx.x; m < source.M; m += kTokenThreads) {
    T u[kTokens], v[kTokens];
    half_angles(source, b, head, m, x, u, v);
    for (int t = 0; t < kTokens && first + t < source.N; ++t) {
      Angle<T> angle;
      angle.set(u[t], v[t], stationary);
      visit(b, head, bh * source.N + first + t, first + t, m, angle);
    }
  }
}

// How features are written.
template <typename T>
struct FeatureOptions {
  int64_t width = 0;          // of a row, >= 2M: zeros beyond
  const T* logits = nullptr;  // [B, heads, N]  where it is NaN, features are zero
  const T* scales = nullptr;  // [B, heads, N]  multiply the features
  bool clean = false;         // features that are not finite become zero
};

// phi [B, heads, N, width], cosines first.
template <typename T>
__global__ void __launch_bounds__(kTokenThreads, 2)
    feature_kernel(FeatureSource source, Array phi, FeatureOptions<T> options) {
  visit_angles<T>(source, [&](int64_t b, int64_t head, int64_t index, int64_t token, int64_t m,
                              const Angle<T>& angle) {
    const T logit = options.logits == nullptr ? T(0) : options.logits[index];
    const T factor = options.scales == nullptr ? T(2) : 2 * options.scales[index];
    const T scale = logit != logit || factor == T(0) ? T(0) : factor * angle.cos_v;
    T cosine = scale == T(0) ? T(0) : scale * angle.cos_u;
    T sine = scale == T(0) ? T(0) : scale * angle.sin_u;
    if (options.clean && !is_finite(cosine + sine)) cosine = sine = 0;
    const Tokens out(phi, b, head);
    out.store<T>(token, m, cosine);
    out.store<T>(token, source.M + m, sine);
    for (int64_t f = 2 * source.M + m; f < options.width; f += source.M) {
      out.store<T>(token, f, T(0));
    }
  });
}

// --- The keys' logits: one warp per key

__device__ __forceinline__ double sum_of_warp(double x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
__device__ __forceinline__ double max_of_warp(double x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmax(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// |k|_p of a row of a warp's own. Scaled by the largest element, so that powers neither overflow
// nor vanish.
__device__ __forceinline__ double p_norm(const Tokens& key, int64_t j, int64_t d, double p,
                                         int lane) {
  double largest = 0;
  for (int64_t c = lane; c < d; c += 32) largest = fmax(largest, fabs(key.load<double>(j, c)));
  largest = max_of_warp(largest);
  double sum = 0;
  for (int64_t c = lane; c < d && largest > 0; c += 32) {
    const double x = fabs(key.load<double>(j, c)) / largest;
    sum += p == 2 ? x * x : p == 1 ? x : pow(x, p);
  }
  sum = sum_of_warp(sum);
  return largest == 0 ? 0 : largest * (p == 2 ? sqrt(sum) : p == 1 ? sum : pow(sum, 1 / p));
}

template <typename T>
__global__ void __launch_bounds__(kTokenThreads, 2)
    logit_kernel(AttentionParams params, SplitLogits<T> logits) {
  constexpr int kWarps = kTokenThreads / 32;
  const int lane = threadIdx.x % 32;
  const int64_t keys = params.B * params.key_heads * params.S;
  const int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (index >= keys) return;  // the whole warp
  const int64_t j = index % params.S, bh = index / params.S;
  const int64_t b = bh / params.key_heads, head = bh % params.key_heads;
  const int64_t group = head * params.G / params.key_heads;
  const Tokens key(params.key, b, group), value(params.value, b, group);
  double logit = 0;
  if (params.key_bias.type != ElementType::kNone) {
    const int64_t* stride = params.key_bias.stride;
    logit = load_element<double>(params.key_bias, b * stride[0] + head * stride[1] + j * stride[2]);
  }
  bool finite = true;
  for (int64_t c = lane; c < params.d; c += 32) {
    finite = finite && is_finite(key.load<double>(j, c));
  }
  if (params.value.type != ElementType::kNone) {
    for (int64_t c = lane; c < params.d_v; c += 32) {
      finite = finite && is_finite(value.load<double>(j, c));
    }
  }
  finite = __all_sync(0xffffffffu, finite);
  if (logit != minus_infinity<double>()) {
    if (params.p > 0 && finite) {
      const double norm = p_norm(key, j, params.d, params.p, lane);
      logit += params.magnitude_scale * norm * norm;
    }
    if (!finite || !is_finite(logit)) logit = NAN;
  }
  if (lane != 0) return;
  store_split(logits, index, logit);
  if (!finite && logit == minus_infinity<double>()) logits.low[index] = static_cast<T>(NAN);
}

// --- The way back

// Gradients of u and v, in units of x.w: [B, heads, N, M] each.
template <typename T>
__global__ void __launch_bounds__(kTokenThreads, 2)
    angle_gradient_kernel(FeatureSource source, Array grad_phi, T* grad_u, T* grad_v) {
  visit_angles<T>(source, [&](int64_t b, int64_t head, int64_t index, int64_t token, int64_t m,
                              const Angle<T>& angle) {
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
template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    token_gradient_kernel(FeatureSource source, Array out, const T* grad_u, const T* grad_v,
                          const T* grad_logits, const T* logits, double p, double magnitude_scale) {
  IKATTN_SHARED(double, norms, kTile);
  IKATTN_SHARED(T, factors, kTile);
  const ThreadTile at;
  const int64_t token_blocks = (source.N + kTile - 1) / kTile;
  const int64_t bh = blockIdx.x / token_blocks, first = blockIdx.x % token_blocks * kTile;
  const int64_t b = bh / source.heads, head = bh % source.heads, c0 = int64_t{blockIdx.y} * kTile;
  const bool stationary = source.w2.type == ElementType::kNone;
  const int64_t base1 = source.frequency_base(source.w1, b, head);
  const int64_t base2 = source.frequency_base(source.w2, b, head);
  const Tokens x(source.x, b, head * source.x_heads / source.heads), gradient(out, b, head);
  const bool has_magnitude = grad_logits != nullptr && p > 0;
  if (has_magnitude) {
    for (int row = threadIdx.x / 32; row < kTile; row += kThreads / 32) {
      const int64_t token = first + row;
      if (token >= source.N) break;  // the whole warp
      const T logit = logits[bh * source.N + token];
      const double norm = p_norm(x, token, source.d, p, threadIdx.x % 32);
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
    if (c >= source.d) return T(0);
    const T w1 =
        load_element<T>(source.w1, base1 + c * source.w1.stride[2] + m * source.w1.stride[3]);
    if (stationary) return w1;
    const T w2 =
        load_element<T>(source.w2, base2 + c * source.w2.stride[2] + m * source.w2.stride[3]);
    return (k < source.M ? w1 + w2 : w1 - w2) / 2;
  };
  T sums[kPerThread][kPerThread];
  dot_tile<T>(at, stationary ? source.M : 2 * source.M, angle_gradients, frequencies,
              dynamic_shared<T>(), sums);
#pragma unroll
  for (int r = 0; r < kPerThread; ++r) {
    const int64_t token = first + at.row(r);
    if (token >= source.N) continue;
    const T factor = has_magnitude ? factors[at.row(r)] : T(0);
    const double norm = has_magnitude ? norms[at.row(r)] : 0.0;
#pragma unroll
    for (int column = 0; column < kPerThread; ++column) {
      const int64_t c = c0 + at.column(column);
      if (c >= source.d) continue;
      T sum = sums[r][column];
      if (factor != T(0)) {
        const T value = x.load<T>(token, c);
        if (p == 2) {
          sum += factor * value;
        } else if (value != T(0)) {
          const double slope = norm * pow(fabs(static_cast<double>(value)) / norm, p - 1);
          sum += factor * static_cast<T>(value < T(0) ? -slope : slope);
        }
      }
      gradient.store<T>(token, c, sum);
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

// parts [share][frequency batch, head][u, v][d][M] = sum over the share's tokens of x grad_u and
// x grad_v. A block: 64 dimensions and 64 frequencies.
template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    frequency_part_kernel(FeatureSource source, TokenShares shares, const T* grad_u,
                          const T* grad_v, T* parts) {
  Shared<T> values = dynamic_shared<T>();  // each [kDepth tokens][64]
  Shared<T> u = values + kDepth * kPitch;
  Shared<T> v = u + kDepth * kPitch;
  const ThreadTile at;
  const int64_t tiles_m = (source.M + kTile - 1) / kTile, tiles_c = (source.d + kTile - 1) / kTile;
  const int64_t m0 = blockIdx.x % tiles_m * kTile, c0 = blockIdx.x / tiles_m % tiles_c * kTile;
  const int64_t sets = source.frequency_batches * source.frequency_heads;
  const int64_t which = blockIdx.x / (tiles_m * tiles_c) % sets;
  const int64_t share = blockIdx.x / (tiles_m * tiles_c) / sets;
  const int64_t frequency_batch = which / source.frequency_heads;
  const int64_t frequency_head = which % source.frequency_heads;
  const int64_t group = source.heads / source.frequency_heads;
  const int64_t first_head = share / shares.ranges * shares.heads_each;
  const int64_t end_head = min(first_head + shares.heads_each, shares.heads);
  const int64_t first = share % shares.ranges * TokenShares::kTokensEach;
  const int64_t end = min(first + TokenShares::kTokensEach, source.N);
  T sums_u[kPerThread][kPerThread] = {}, sums_v[kPerThread][kPerThread] = {};
  for (int64_t unit = first_head; unit < end_head; ++unit) {
    const int64_t b = frequency_batch + unit / group;
    const int64_t head = frequency_head * group + unit % group;
    const Tokens x(source.x, b, head * source.x_heads / source.heads);
    const int64_t base = (b * source.heads + head) * source.N;
    for (int64_t token0 = first; token0 < end; token0 += kDepth) {
      __syncthreads();
      for (int index = threadIdx.x; index < kDepth * kTile; index += kThreads) {
        const int k = index / kTile, column = index % kTile;
        const int64_t token = token0 + k, m = m0 + column;
        const bool there = token < end;
        const T value = there && c0 + column < source.d ? x.load<T>(token, c0 + column) : T(0);
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
  const int64_t size = source.d * source.M;
  T* part = parts + (share * sets + which) * 2 * size;
#pragma unroll
  for (int r = 0; r < kPerThread; ++r) {
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) {
      const int64_t row = c0 + at.row(r), column = m0 + at.column(c);
      if (row >= source.d || column >= source.M) continue;
      part[row * source.M + column] = sums_u[r][c];
      part[size + row * source.M + column] = sums_v[r][c];
    }
  }
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
  T plus = 0, minus = 0;
  for (int64_t share = 0; share < shares.count; ++share) {
    const T* part = parts + (share * sets + which) * 2 * size + element;
    plus += part[0];
    minus += part[size];
  }
  const bool stationary = source.w2.type == ElementType::kNone;
  if (grad_w1 != nullptr) grad_w1[index] += stationary ? plus : (plus + minus) / 2;
  if (grad_w2 != nullptr) grad_w2[index] += (plus - minus) / 2;
}

FeatureSource source_of(const AttentionParams& params, bool keys) {
  FeatureSource source;
  source.x = keys ? params.key : params.query;
  source.w1 = params.w1;
  source.w2 = params.w2;
  source.B = params.B;
  source.heads = keys ? params.key_heads : params.H;
  source.x_heads = keys ? params.G : params.H;
  source.N = keys ? params.S : params.L;
  source.d = params.d;
  source.M = params.M;
  source.frequency_heads = params.frequency_heads;
  source.frequency_batches = params.frequency_batches;
  return source;
}

FeatureSource source_of(const FeaturesParams& params) {
  FeatureSource source;
  source.x = params.x;
  source.w1 = params.w1;
  source.w2 = params.w2;
  source.B = params.B;
  source.heads = source.x_heads = source.frequency_heads = params.H;
  source.N = params.N;
  source.d = params.d;
  source.M = params.M;
  source.frequency_batches = params.frequency_batches;
  return source;
}

template <typename T>
Array contiguous(T* data, int64_t heads, int64_t N, int64_t width) {
  Array array;
  array.data = const_cast<void*>(static_cast<const void*>(data));
  array.type = sizeof(T) == 8 ? ElementType::kFloat64 : ElementType::kFloat32;
  array.stride[0] = heads * N * width;
  array.stride[1] = N * width;
  array.stride[2] = width;
  array.stride[3] = 1;
  return array;
}

template <typename T>
const char* launch_features(const FeatureSource& source, const Array& phi,
                            const FeatureOptions<T>& options, Stream stream) {
  const auto blocks = static_cast<unsigned>(source.B * source.heads * ceil_div(source.N, kTokens));
  return launch(feature_kernel<T>, dim3(blocks), dim3(kTokenThreads),
                kTokens * token_pitch(source.d) * int64_t{sizeof(T)}, stream, source, phi, options);
}

// The gradients of one side's features, back to its tokens and (+=) to the frequencies.
template <typename T>
const char* side_gradients(const FeatureSource& source, const Array& grad_phi, const Array& grad_x,
                           T* grad_w1, T* grad_w2, const T* grad_logits, const T* logits, double p,
                           double magnitude_scale, const DeviceExecutor& executor) {
  const int64_t count = source.B * source.heads * source.N * source.M;
  T* grad_u = executor.take<T>(count);
  T* grad_v = executor.take<T>(count);
  const auto token_blocks =
      static_cast<unsigned>(source.B * source.heads * ceil_div(source.N, kTokens));
  if (const char* error = launch(angle_gradient_kernel<T>, dim3(token_blocks), dim3(kTokenThreads),
                                 kTokens * token_pitch(source.d) * int64_t{sizeof(T)},
                                 executor.stream, source, grad_phi, grad_u, grad_v)) {
    return error;
  }
  const T *read_u = grad_u, *read_v = grad_v;
  if (grad_x.type != ElementType::kNone) {
    const auto blocks = static_cast<unsigned>(source.B * source.heads * ceil_div(source.N, kTile));
    if (const char* error =
            launch(token_gradient_kernel<T>,
                   dim3(blocks, static_cast<unsigned>(ceil_div(source.d, kTile))), dim3(kThreads),
                   2 * kDepth * kPitch * int64_t{sizeof(T)}, executor.stream, source, grad_x,
                   read_u, read_v, grad_logits, logits, p, magnitude_scale)) {
      return error;
    }
  }
  if (grad_w1 == nullptr && grad_w2 == nullptr) return nullptr;
  const TokenShares shares(source);
  const int64_t sets = source.frequency_batches * source.frequency_heads;
  const int64_t elements = sets * source.d * source.M;
  T* parts = executor.take<T>(shares.count * 2 * elements);
  const auto blocks = static_cast<unsigned>(shares.count * sets * ceil_div(source.d, kTile) *
                                            ceil_div(source.M, kTile));
  if (const char* error = launch(frequency_part_kernel<T>, dim3(blocks), dim3(kThreads),
                                 3 * kDepth * kPitch * int64_t{sizeof(T)}, executor.stream, source,
                                 shares, read_u, read_v, parts)) {
    return error;
  }
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
const char* prepare_logits(const AttentionParams& params, const DeviceExecutor& executor,
                           SplitLogits<T>& logits) {
  const int64_t keys = params.B * params.key_heads * params.S;
  logits = {executor.take<T>(keys), executor.take<T>(keys)};
  constexpr int kWarps = kTokenThreads / 32;
  return launch(logit_kernel<T>, dim3(static_cast<unsigned>(ceil_div(keys, kWarps))),
                dim3(kTokenThreads), 0, executor.stream, params, logits);
}

template <typename T>
const char* prepare_features(const AttentionParams& params, const DeviceExecutor& executor,
                             PreparedTokens<T>& prepared) {
  const int64_t F = 2 * params.M, keys = params.B * params.key_heads * params.S;
  T* phi_q = executor.take<T>(params.B * params.H * params.L * F);
  T* phi_k = executor.take<T>(keys * F);
  prepared.phi_q = phi_q;
  prepared.phi_k = phi_k;
  FeatureOptions<T> options;
  const Array queries = contiguous(phi_q, params.H, params.L, F);
  if (const char* error =
          launch_features<T>(source_of(params, false), queries, options, executor.stream)) {
    return error;
  }
  options.logits = prepared.keys.high;
  return launch_features<T>(source_of(params, true),
                            contiguous(phi_k, params.key_heads, params.S, F), options,
                            executor.stream);
}

template <typename T>
const char* prepare_tokens(const AttentionParams& params, const DeviceExecutor& executor,
                           PreparedTokens<T>& prepared) {
  if (const char* error = prepare_logits(params, executor, prepared.keys)) return error;
  return prepare_features(params, executor, prepared);
}

// --- The folded form

namespace {

// Over one key head, a block: max and spread of the logits, what is hidden and poisoned left out,
// and thus the form; then what the form needs of every key.
//   c, scaled_eps: of the folded form; most_spread: in nats, what it bears
__global__ void __launch_bounds__(256, 2)
    fold_kernel(AttentionParams params, SplitLogits<float> logits, float c, float scaled_eps,
                float most_spread, float* scales, float* terms, float* lows, float* largest,
                uint32_t* state) {
  IKATTN_SHARED(float, maxima, 8);
  IKATTN_SHARED(float, minima, 8);
  const int64_t S = params.S, padded = padded_tokens(S);
  const float* high = logits.high + blockIdx.x * S;
  const float* low = logits.low + blockIdx.x * S;
  float most = -INFINITY, least = INFINITY;
  bool unclean = false;
  for (int64_t j = threadIdx.x; j < S; j += 256) {
    const float logit = high[j];
    unclean = unclean || logit != logit || low[j] != low[j];
    if (!is_finite(logit)) continue;
    most = logit > most ? logit : most;
    least = logit < least ? logit : least;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
    least = fminf(least, __shfl_xor_sync(0xffffffffu, least, step));
  }
  if (threadIdx.x % 32 == 0) {
    maxima[threadIdx.x / 32] = most;
    minima[threadIdx.x / 32] = least;
  }
  const bool any_unclean = __syncthreads_or(unclean) != 0;
  for (int warp = 0; warp < 8; ++warp) {
    const float a = maxima[warp], z = minima[warp];
    most = a > most ? a : most;
    least = z < least ? z : least;
  }
  const float reference = most == -INFINITY ? 0.0f : most;
  const bool general = most_spread < 0 || most - least > most_spread;
  if (threadIdx.x == 0) {
    largest[blockIdx.x] = reference;
    state[blockIdx.x] = (general ? kGeneral : 0u) | (any_unclean ? kUnclean : 0u);
  }
  for (int64_t j = threadIdx.x; j < padded; j += 256) {
    const float logit = j < S ? high[j] : -INFINITY;
    const bool hidden = logit == -INFINITY;
    const float e = hidden ? 0.0f : expf((logit - reference) + low[j]);
    terms[blockIdx.x * padded + j] = general ? logit : scaled_eps * e;
    lows[blockIdx.x * padded + j] = hidden ? 0.0f : low[j];
    if (j >= S) continue;
    const float scale = general ? (hidden ? 0.0f : 1.0f) : c * sqrtf(e);
    scales[blockIdx.x * S + j] = logit == logit ? scale : 0.0f;
  }
}

}  // namespace

const char* fold_tokens(const AttentionParams& params, const DeviceExecutor& executor,
                        const SplitLogits<float>& logits, bool clean_queries,
                        FoldedTokens& folded) {
  const int64_t key_heads = params.B * params.key_heads, keys = key_heads * params.S;
  const int64_t F = padded_features(2 * params.M);
  const bool is_half = params.value.type == ElementType::kFloat16;
  // Weights of Half stay below 2^15; those of bfloat16 have the exponents of float32.
  const double four_m = 4.0 * static_cast<double>(params.M);
  const double c = is_half ? std::sqrt(32768.0) / four_m : 4096.0;
  const double root = four_m * c, K = root * root;
  Half* phi_q = executor.take<Half>(params.B * params.H * params.L * F);
  Half* phi_k = executor.take<Half>(keys * F);
  float* scales = executor.take<float>(keys);
  float* terms = executor.take<float>(key_heads * padded_tokens(params.S));
  float* lows = executor.take<float>(key_heads * padded_tokens(params.S));
  float* largest = executor.take<float>(key_heads);
  uint32_t* state = executor.take<uint32_t>(key_heads);
  folded = {phi_q,
            phi_k,
            scales,
            terms,
            lows,
            largest,
            state,
            static_cast<float>(root),
            static_cast<float>(std::log(K))};
  const float most_spread = has_float_mask(params)       ? -1.0f
                            : every_row_sees_all(params) ? static_cast<float>(INFINITY)
                            : is_half                    ? 12.0f
                                                         : 36.0f;
  if (const char* error =
          launch(fold_kernel, dim3(static_cast<unsigned>(key_heads)), dim3(256), 0, executor.stream,
                 params, logits, static_cast<float>(c), static_cast<float>(K * params.eps),
                 most_spread, scales, terms, lows, largest, state)) {
    return error;
  }
  const auto rows_of_half = [&](Half* data, int64_t heads, int64_t N) {
    Array array = contiguous(data, heads, N, F);
    array.type = ElementType::kFloat16;
    return array;
  };
  FeatureOptions<float> options;
  options.width = F;
  options.clean = clean_queries;
  if (const char* error =
          launch_features<float>(source_of(params, false), rows_of_half(phi_q, params.H, params.L),
                                 options, executor.stream)) {
    return error;
  }
  options.clean = false;
  options.logits = logits.high;
  options.scales = scales;
  return launch_features<float>(source_of(params, true),
                                rows_of_half(phi_k, params.key_heads, params.S), options,
                                executor.stream);
}

template <typename T>
const char* token_gradients(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                            const SplitLogits<T>& keys, const PairGradients<T>& gradients) {
  const int64_t F = 2 * params.M;
  T* grad_w1 = data_of<T>(params.grad_w1);
  T* grad_w2 = data_of<T>(params.grad_w2);
  const bool frequencies = grad_w1 != nullptr || grad_w2 != nullptr;
  if (params.grad_query || frequencies) {
    if (const char* error = side_gradients<T>(
            source_of(params, false), contiguous(gradients.phi_q, params.H, params.L, F),
            params.grad_query, grad_w1, grad_w2, nullptr, nullptr, 0, 0, executor)) {
      return error;
    }
  }
  if (!params.grad_key && !frequencies) return nullptr;
  return side_gradients<T>(source_of(params, true),
                           contiguous(gradients.phi_k, params.key_heads, params.S, F),
                           params.grad_key, grad_w1, grad_w2, gradients.logits, keys.high, params.p,
                           params.magnitude_scale, executor);
}

template <typename T>
const char* features(const FeaturesParams& params, bool backward, const DeviceExecutor& executor) {
  const FeatureSource source = source_of(params);
  if (!backward) return launch_features<T>(source, params.features, {}, executor.stream);
  return side_gradients<T>(source, params.features, params.grad_x, data_of<T>(params.grad_w1),
                           data_of<T>(params.grad_w2), nullptr, nullptr, 0, 0, executor);
}

#define IKATTN_INSTANTIATE(T)                                                                    \
  template const char* prepare_logits<T>(const AttentionParams&, const DeviceExecutor&,          \
                                         SplitLogits<T>&);                                       \
  template const char* prepare_features<T>(const AttentionParams&, const DeviceExecutor&,        \
                                           PreparedTokens<T>&);                                  \
  template const char* prepare_tokens<T>(const AttentionParams&, const DeviceExecutor&,          \
                                         PreparedTokens<T>&);                                    \
  template const char* token_gradients<T>(const AttentionBackwardParams&, const DeviceExecutor&, \
                                          const SplitLogits<T>&, const PairGradients<T>&);       \
  template const char* features<T>(const FeaturesParams&, bool, const DeviceExecutor&);
IKATTN_INSTANTIATE(float)
IKATTN_INSTANTIATE(double)
#undef IKATTN_INSTANTIATE

}  // namespace ikattn::cuda
