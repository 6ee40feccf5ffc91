// Angles of tokens. On the ordinary units a block takes 16 tokens of one head and passes along the
// frequencies; on tensor cores it takes 64 tokens and 64 frequencies.
#pragma once

#include "attention/cuda/feature_source.h"
#include "attention/cuda/tensor_products.h"
#include "attention/cuda/tiles.h"

namespace ikattn::cuda {
namespace {

constexpr int kTokens = 16;  // of one block
constexpr int kTokenThreads = 128;

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
  // To an absolute error of 1e-6.
  __device__ __forceinline__ void set_fast(T u, T v, bool stationary) {
    fast_sincos_turns(u, &sin_u, &cos_u);
    sin_v = 0;
    cos_v = 1;
    if (!stationary) fast_sincos_turns(v, &sin_v, &cos_v);
  }
};

// W+ and W-, half the sum and half the difference of both frequencies, of one head.
template <typename T>
struct HalfFrequencies {
  const FeatureSource& source;
  int64_t base1, base2;
  bool stationary;

  __device__ HalfFrequencies(const FeatureSource& s, int64_t b, int64_t head)
      : source(s),
        base1(s.frequency_base(s.w1, b, head)),
        base2(s.frequency_base(s.w2, b, head)),
        stationary(s.w2.type == ElementType::kNone) {}
  __device__ __forceinline__ void load(int64_t c, int64_t m, T& plus, T& minus) const {
    const int64_t *stride1 = source.w1.stride, *stride2 = source.w2.stride;
    const T w1 = load_element<T>(source.w1, base1 + c * stride1[2] + m * stride1[3]);
    const T w2 =
        stationary ? w1 : load_element<T>(source.w2, base2 + c * stride2[2] + m * stride2[3]);
    plus = (w1 + w2) / 2;
    minus = (w1 - w2) / 2;
  }
  __device__ __forceinline__ T operator()(int64_t c, int64_t m, bool is_plus) const {
    T plus, minus;
    load(c, m, plus, minus);
    return is_plus ? plus : minus;
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
  const HalfFrequencies<T> frequencies(source, b, head);
  const int64_t pitch = token_pitch(source.d);
#pragma unroll
  for (int t = 0; t < kTokens; ++t) u[t] = v[t] = 0;
  for (int64_t first = 0; first < source.d; first += 4) {
    T plus[4] = {}, minus[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i < source.d) frequencies.load(first + i, m, plus[i], minus[i]);
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const Four<T> values = load_vector<Four<T>>(x + t * pitch + first);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u[t] += values.at[i] * plus[i];
        v[t] += values.at[i] * minus[i];
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

// visit_angles() on tensor cores; of the block's 64 frequencies.
template <int kTokenParts, typename Visit>
__device__ __forceinline__ void visit_product_angles(const FeatureSource& source,
                                                     const Visit& visit) {
  const int64_t token_blocks = (source.N + kTile - 1) / kTile;
  const int64_t bh = blockIdx.x / token_blocks, first = blockIdx.x % token_blocks * kTile;
  const int64_t b = bh / source.heads, head = bh % source.heads, m0 = int64_t{blockIdx.y} * kTile;
  const Tokens tokens(source.x, b, head * source.x_heads / source.heads);
  const HalfFrequencies<float> frequencies(source, b, head);
  const auto x = [&](int row, int64_t c) {
    return first + row < source.N ? tokens.load<float>(first + row, c) : 0.0f;
  };
  ProductSums u = {}, v = {};
  const auto add = [&](bool is_plus, ProductSums& sums) {
    const auto w = [&](int column, int64_t c) {
      return m0 + column < source.M ? frequencies(c, m0 + column, is_plus) : 0.0f;
    };
    add_product<kTokenParts, Contiguous::kDepth, 2, Contiguous::kRows>(
        source.d, x, w, dynamic_shared<float>(), sums);
  };
  add(true, u);
  if (!frequencies.stationary) add(false, v);
  const ProductTile at;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int64_t token = first + at.row(r, c), m = m0 + at.column(n, c);
        if (token >= source.N || m >= source.M) continue;
        Angle<float> angle;
        angle.set_fast(u[r][n][c], v[r][n][c], frequencies.stationary);
        visit(b, head, bh * source.N + token, token, m, angle);
      }
    }
  }
}

// By the ordinary units where kTokenParts is 0, in T; else float32 by tensor cores.
template <typename T, int kTokenParts, typename Visit>
__device__ __forceinline__ void visit_angles_by(const FeatureSource& source, const Visit& visit) {
  if constexpr (kTokenParts == 0) {
    visit_angles<T>(source, visit);
  } else {
    visit_product_angles<kTokenParts>(source, visit);
  }
}
template <typename... Parameters, typename... Arguments>
const char* launch_product_angles(void (*kernel)(FeatureSource, Parameters...),
                                  const FeatureSource& source, Stream stream,
                                  Arguments&&... arguments) {
  const auto blocks = static_cast<unsigned>(source.B * source.heads * ceil_div(source.N, kTile));
  return launch(kernel, dim3(blocks, static_cast<unsigned>(ceil_div(source.M, kTile))),
                dim3(kProductThreads), kProductShared, stream, source,
                static_cast<Arguments&&>(arguments)...);
}

// Launches a kernel that visits the angles of `source` by the ordinary units.
template <typename T, typename... Parameters, typename... Arguments>
const char* launch_angles(void (*kernel)(FeatureSource, Parameters...), const FeatureSource& source,
                          Stream stream, Arguments&&... arguments) {
  const auto blocks = static_cast<unsigned>(source.B * source.heads * ceil_div(source.N, kTokens));
  return launch(kernel, dim3(blocks), dim3(kTokenThreads),
                kTokens * token_pitch(source.d) * int64_t{sizeof(T)}, stream, source,
                static_cast<Arguments&&>(arguments)...);
}

}  // namespace
}  // namespace ikattn::cuda
