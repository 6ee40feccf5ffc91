// The triangular factor of a token's transformed vectors, by modified Gram-Schmidt.
//
// It takes the factor and not the Gram matrix: |R a| has the accuracy of the direct sum, also where
// the heads cancel, while a^T G a would lose all digits in float32. The R of modified Gram-Schmidt
// is as accurate as Householder's, for vectors that depend on each other too (Bjorck 1967).
#pragma once

#include "contributions/cpu/vectors.h"

namespace ikattn::IKATTN_ISA {
namespace {

template <typename T>
inline T dot_product(int64_t size, const T* a, const T* b) {
  Vec<T> sums[4] = {};
  for (int64_t c = 0; c < size; c += 4 * kLanes<T>) {
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) {
      sums[u] += load(a + c + u * kLanes<T>) * load(b + c + u * kLanes<T>);
    }
  }
  return sum_of_lanes<T>((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Computes a . b[k] for kCount rows b + k * size.
template <int kCount, typename T>
inline void dot_products(int64_t size, const T* a, const T* b, T* result) {
  Vec<T> sums[kCount] = {};
  for (int64_t c = 0; c < size; c += kLanes<T>) {
    const Vec<T> x = load(a + c);
#pragma GCC unroll 4
    for (int k = 0; k < kCount; ++k) sums[k] += x * load(b + k * size + c);
  }
  for (int k = 0; k < kCount; ++k) result[k] = sum_of_lanes<T>(sums[k]);
}

// Subtracts factor[k] a from kCount rows b[k], and computes their products with the next row, in
// one pass.
template <int kCount, typename T>
inline void subtract_multiples(int64_t size, const T* a, const T* next, const T* factor, T* b,
                               T* products) {
  Vec<T> f[kCount], sums[kCount] = {};
  for (int k = 0; k < kCount; ++k) f[k] = broadcast(factor[k]);
  for (int64_t c = 0; c < size; c += kLanes<T>) {
    const Vec<T> x = load(a + c), y = load(next + c);
#pragma GCC unroll 4
    for (int k = 0; k < kCount; ++k) {
      const Vec<T> rest = load(b + k * size + c) - f[k] * x;
      store(b + k * size + c, rest);
      sums[k] += rest * y;
    }
  }
  for (int k = 0; k < kCount; ++k) products[k] = sum_of_lanes<T>(sums[k]);
}

// Subtracts factor a from b; returns |b|^2.
template <typename T>
inline T subtract_multiple(int64_t size, const T* a, T factor, T* b) {
  const Vec<T> f = broadcast(factor);
  Vec<T> sums[4] = {};
  for (int64_t c = 0; c < size; c += 4 * kLanes<T>) {
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) {
      const int64_t at = c + u * kLanes<T>;
      const Vec<T> rest = load(b + at) - f * load(a + at);
      store(b + at, rest);
      sums[u] += rest * rest;
    }
  }
  return sum_of_lanes<T>((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Computes R of vectors [H][size], which it overwrites, in the lane of its key: factors[p * 64], p
// running over the triangle. products [H] is scratch. Each step removes the part along row h from
// the rows after it and, while they are in registers, multiplies them with the next row: one pass
// per step.
template <typename T>
void factorize(int64_t H, int64_t size, T* vectors, T* products, T* factors) {
  constexpr T kSmallest = sizeof(T) == 8 ? T(1e-300) : T(1e-37);
  T square = dot_product(size, vectors, vectors);
  int64_t k = 1;
  for (; k + 4 <= H; k += 4) dot_products<4>(size, vectors, vectors + k * size, products + k);
  for (; k < H; ++k) dot_products<1>(size, vectors, vectors + k * size, products + k);
  for (int64_t h = 0; h < H; ++h) {
    const T* row = vectors + h * size;
    const bool vanishes = square < kSmallest;  // false for NaN
    const T norm = vanishes ? T(0) : static_cast<T>(__builtin_sqrt(square));
    const T inverse = vanishes ? T(0) : T(1) / norm;
    *factors = norm;
    factors += kFactorBlock;
    for (k = h + 1; k < H; ++k, factors += kFactorBlock) {
      *factors = products[k] * inverse;
      products[k] = *factors * inverse;
    }
    if (h + 1 == H) break;
    T* next = vectors + (h + 1) * size;
    square = subtract_multiple(size, row, products[h + 1], next);
    for (k = h + 2; k + 4 <= H; k += 4) {
      subtract_multiples<4>(size, row, next, products + k, vectors + k * size, products + k);
    }
    for (; k < H; ++k) {
      subtract_multiples<1>(size, row, next, products + k, vectors + k * size, products + k);
    }
  }
}

// Applies the linear part of a norm in place to rows [H][size] of D elements.
template <typename T>
void apply_norm(const NormLayer& norm, int64_t H, int64_t D, int64_t size, T* vectors) {
  const T* weight = static_cast<const T*>(norm.weight);
  for (int64_t h = 0; h < H; ++h) {
    T* row = vectors + h * size;
    T mean = 0;
    if (norm.centered) {
      Vec<T> sums{};
      for (int64_t c = 0; c < size; c += kLanes<T>) sums += load(row + c);
      mean = sum_of_lanes<T>(sums) / static_cast<T>(D);
    }
    for (int64_t c = 0; c < D; ++c) row[c] = (row[c] - mean) * weight[c];
  }
}

// Returns a power of two near the largest magnitude of a token's vectors where squares could leave
// the range of T, else 1.
template <typename T>
inline T scale_of(int64_t count, const T* vectors) {
  constexpr T kLarge = sizeof(T) == 8 ? T(0x1p400) : T(0x1p40);
  Vec<T> largest{};
  for (int64_t c = 0; c < count; c += kLanes<T>) {
    const Vec<T> x = load(vectors + c), size = x < T(0) ? -x : x;
    largest = size > largest ? size : largest;  // leaves NaN out
  }
  const T most = max_of_lanes<T>(largest);
  const bool ordinary = most == T(0) || (most > T(1) / kLarge && most < kLarge);
  if (ordinary || most - most != T(0)) return T(1);
  return static_cast<T>(__builtin_ldexp(1.0, __builtin_ilogb(most)));
}

// The scratch of a thread.
template <typename T>
struct FactorScratch {
  T *vectors, *work, *products;  // [tokens][H][size], [H][size], [H]
  VectorProducts<T> transform;

  FactorScratch(Workspace& workspace, const FactorParams& params, int64_t d_v, int64_t tokens)
      : vectors(workspace.take<T>(tokens * params.H * padded_size(params.D))),
        work(workspace.take<T>(params.H * padded_size(params.D))),
        products(workspace.take<T>(params.H)),
        transform(workspace, d_v) {}
};

// Computes the factors and value norms of token j of batch item b from its vectors [H][size], which
// it overwrites.
template <typename T>
void factors_of_token(const FactorParams& params, int64_t b, int64_t j, T* vectors,
                      const FactorScratch<T>& scratch) {
  const int64_t H = params.H, D = params.D, size = padded_size(D), entries = triangle(H);
  const int64_t blocks = ceil_div(params.S, kFactorBlock);
  const int last = params.factors[2] ? 2 : params.factors[1] ? 1 : 0;
  const T scale = scale_of(H * size, vectors);
  if (scale != T(1)) {
    for (int64_t c = 0; c < H * size; ++c) vectors[c] /= scale;
  }
  for (int64_t h = 0; params.value_norms && h < H; ++h) {
    const T* row = vectors + h * size;
    static_cast<T*>(params.value_norms)[(b * H + h) * params.S + j] =
        scale * static_cast<T>(__builtin_sqrt(dot_product(size, row, row)));
  }
  for (int v = 0; v <= last; ++v) {
    if (v > 0) apply_norm(params.norms[v - 1], H, D, size, vectors);
    if (!params.factors[v]) continue;
    T* work = v == last ? vectors : scratch.work;
    if (v != last) __builtin_memcpy(work, vectors, H * size * sizeof(T));
    T* factors = static_cast<T*>(params.factors[v]) +
                 (b * blocks + j / kFactorBlock) * entries * kFactorBlock + j % kFactorBlock;
    factorize(H, size, work, scratch.products, factors);
    if (scale != T(1)) {
      for (int64_t p = 0; p < entries; ++p) factors[p * kFactorBlock] *= scale;
    }
  }
}

template <typename T>
void token_factors(const FactorsOfTokens& params, const Executor& all) {
  const int64_t count = params.B * params.S;
  const int64_t together = tokens_together<T>(params, max_of(1, all.threads));
  const int64_t groups = ceil_div(count, together);
  Executor executor = all;  // no scratch for threads that would find nothing to do
  executor.threads = static_cast<int>(max_of(1, min_of(all.threads, groups)));
  Workspace measure;
  static_cast<void>(FactorScratch<T>(measure, params, params.d_v, together));
  char* memory =
      static_cast<char*>(executor.allocate(executor.owner, measure.bytes() * executor.threads));

  parallel(executor, groups, [&](int64_t group, int thread) {
    Workspace workspace(memory + thread * measure.bytes());
    const FactorScratch<T> scratch(workspace, params, params.d_v, together);
    const int64_t first = group * together, end = min_of(first + together, count);
    scratch.transform(params, first, end - first, scratch.vectors);
    const int64_t per_token = params.H * padded_size(params.D);
    for (int64_t t = first; t < end; ++t) {
      T* vectors = scratch.vectors + (t - first) * per_token;
      factors_of_token(params, t / params.S, t % params.S, vectors, scratch);
    }
  });
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
