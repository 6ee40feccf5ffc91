// The triangular factor of a token's transformed vectors in float64, by modified Gram-Schmidt,
// whose R is as accurate as Householder's, for vectors that depend on each other too (Bjorck 1967).
#pragma once

#include <array>

#include "contributions/cpu/vectors.h"

namespace ikattn::IKATTN_ISA {
namespace {

// Returns the length of a row of D elements, padded with zeros to whole panels.
inline int64_t padded_size(int64_t D) { return round_up(D, kPanel); }

inline double dot_product(int64_t size, const double* a, const double* b) {
  Vec<double> sums[4] = {};
  for (int64_t c = 0; c < size; c += 4 * kLanes<double>) {
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) {
      sums[u] += load(a + c + u * kLanes<double>) * load(b + c + u * kLanes<double>);
    }
  }
  return sum_of_lanes<double>((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Computes a . b[k] for kCount rows b + k * size.
template <int kCount>
inline void dot_products(int64_t size, const double* a, const double* b, double* result) {
  Vec<double> sums[kCount] = {};
  for (int64_t c = 0; c < size; c += kLanes<double>) {
    const Vec<double> x = load(a + c);
#pragma GCC unroll 4
    for (int k = 0; k < kCount; ++k) sums[k] += x * load(b + k * size + c);
  }
  for (int k = 0; k < kCount; ++k) result[k] = sum_of_lanes<double>(sums[k]);
}

// Subtracts factor[k] a from kCount rows b[k], and computes their products with the next row, in
// one pass.
template <int kCount>
inline void subtract_multiples(int64_t size, const double* a, const double* next,
                               const double* factor, double* b, double* products) {
  Vec<double> f[kCount], sums[kCount] = {};
  for (int k = 0; k < kCount; ++k) f[k] = broadcast(factor[k]);
  for (int64_t c = 0; c < size; c += kLanes<double>) {
    const Vec<double> x = load(a + c), y = load(next + c);
#pragma GCC unroll 4
    for (int k = 0; k < kCount; ++k) {
      const Vec<double> rest = load(b + k * size + c) - f[k] * x;
      store(b + k * size + c, rest);
      sums[k] += rest * y;
    }
  }
  for (int k = 0; k < kCount; ++k) products[k] = sum_of_lanes<double>(sums[k]);
}

// Subtracts factor a from b; returns |b|^2.
inline double subtract_multiple(int64_t size, const double* a, double factor, double* b) {
  const Vec<double> f = broadcast(factor);
  Vec<double> sums[4] = {};
  for (int64_t c = 0; c < size; c += 4 * kLanes<double>) {
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) {
      const int64_t at = c + u * kLanes<double>;
      const Vec<double> rest = load(b + at) - f * load(a + at);
      store(b + at, rest);
      sums[u] += rest * rest;
    }
  }
  return sum_of_lanes<double>((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Computes R of vectors [H][size], which it overwrites, in the lane of its key: factors[p * 64], p
// running over the triangle. products [H] is scratch. Each step removes the part along row h from
// the rows after it and, while they are in registers, multiplies them with the next row: one pass
// per step.
inline void factorize(int64_t H, int64_t size, double* vectors, double* products, double* factors) {
  constexpr double kSmallest = 1e-300;
  double square = dot_product(size, vectors, vectors);
  int64_t k = 1;
  for (; k + 4 <= H; k += 4) dot_products<4>(size, vectors, vectors + k * size, products + k);
  for (; k < H; ++k) dot_products<1>(size, vectors, vectors + k * size, products + k);
  for (int64_t h = 0; h < H; ++h) {
    const double* row = vectors + h * size;
    const bool vanishes = square < kSmallest;  // false for NaN
    const double norm = vanishes ? 0.0 : __builtin_sqrt(square);
    const double inverse = vanishes ? 0.0 : 1.0 / norm;
    *factors = norm;
    factors += kFactorBlock;
    for (k = h + 1; k < H; ++k, factors += kFactorBlock) {
      *factors = products[k] * inverse;
      products[k] = *factors * inverse;
    }
    if (h + 1 == H) break;
    double* next = vectors + (h + 1) * size;
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
inline void apply_norm(const NormLayer& norm, int64_t H, int64_t D, int64_t size, double* vectors) {
  const double* weight = static_cast<const double*>(norm.weight);
  for (int64_t h = 0; h < H; ++h) {
    double* row = vectors + h * size;
    double mean = 0;
    if (norm.centered) {
      Vec<double> sums{};
      for (int64_t c = 0; c < size; c += kLanes<double>) sums += load(row + c);
      mean = sum_of_lanes<double>(sums) / static_cast<double>(D);
    }
    for (int64_t c = 0; c < D; ++c) row[c] = (row[c] - mean) * weight[c];
  }
}

// Returns a power of two near the largest magnitude of a token's vectors where squares could leave
// the range, else 1.
inline double scale_of(int64_t count, const double* vectors) {
  constexpr double kLarge = 0x1p400;
  Vec<double> largest{};
  for (int64_t c = 0; c < count; c += kLanes<double>) {
    const Vec<double> x = load(vectors + c), size = x < 0.0 ? -x : x;
    largest = size > largest ? size : largest;  // leaves NaN out
  }
  const double most = max_of_lanes<double>(largest);
  const bool ordinary = most == 0 || (most > 1 / kLarge && most < kLarge);
  if (ordinary || most - most != 0) return 1;
  return __builtin_ldexp(1.0, __builtin_ilogb(most));
}

// Computes the factors and value norms of token j of batch item b from its vectors [H][size], which
// it overwrites.
//   work [H][size] and products [H]: scratch
inline void factors_of_token(const FactorParams& params, int64_t b, int64_t j, double* vectors,
                             double* work, double* products) {
  const int64_t H = params.H, D = params.D, size = padded_size(D), entries = triangle(H);
  const int64_t blocks = ceil_div(params.S, kFactorBlock);
  const int last = params.factors[2] ? 2 : params.factors[1] ? 1 : 0;
  const double scale = scale_of(H * size, vectors);
  if (scale != 1) {
    for (int64_t c = 0; c < H * size; ++c) vectors[c] /= scale;
  }
  for (int64_t h = 0; params.value_norms && h < H; ++h) {
    const double* row = vectors + h * size;
    static_cast<double*>(params.value_norms)[(b * H + h) * params.S + j] =
        scale * __builtin_sqrt(dot_product(size, row, row));
  }
  for (int v = 0; v <= last; ++v) {
    if (v > 0) apply_norm(params.norms[v - 1], H, D, size, vectors);
    if (!params.factors[v]) continue;
    double* taken = v == last ? vectors : work;
    if (v != last) __builtin_memcpy(work, vectors, H * size * sizeof(double));
    double* factors = static_cast<double*>(params.factors[v]) +
                      (b * blocks + j / kFactorBlock) * entries * kFactorBlock + j % kFactorBlock;
    factorize(H, size, taken, products, factors);
    if (scale != 1) {
      for (int64_t p = 0; p < entries; ++p) factors[p * kFactorBlock] *= scale;
    }
  }
}

inline void token_factors(const FactorsOfTokens& params, const Executor& all) {
  const int64_t count = params.B * params.S, H = params.H, size = padded_size(params.D);
  const int64_t together = 16, groups = ceil_div(count, together);
  Executor executor = all;  // no scratch for threads that would find nothing to do
  executor.threads = static_cast<int>(max_of(1, min_of(all.threads, groups)));
  const auto scratch = [&](Workspace& workspace) {
    return std::array{workspace.take<double>(together * H * size), workspace.take<double>(H * size),
                      workspace.take<double>(H), workspace.take<double>(kPanelSize)};
  };
  Workspace measure;
  scratch(measure);
  static_cast<void>(HeadProducts<double>(measure, params.d_v));
  char* memory =
      static_cast<char*>(executor.allocate(executor.owner, measure.bytes() * executor.threads));

  parallel(executor, groups, [&](int64_t group, int thread) {
    Workspace workspace(memory + thread * measure.bytes());
    const auto [vectors, work, products, product] = scratch(workspace);
    const HeadProducts<double> transform(workspace, params.d_v);
    const int64_t first = group * together, here = min_of(together, count - first);
    for (int64_t h = 0; h < H; ++h) {
      transform.load_values(params, h / (H / params.G), first, here);
      for (int64_t c = 0; c < size; c += kPanel) {
        transform.multiply(params.projection, params.D, params.d_v, h, c, here, product);
        for (int64_t i = (params.D - c) * kPanel; i < kPanelSize; ++i) product[i] = 0;
        for (int64_t t = 0; t < here; t += kLanes<double>) {
          for (int64_t row = 0; row < kPanel; row += kLanes<double>) {
            transpose_block(product + row * kPanel + t, kPanel,
                            vectors + (t * H + h) * size + c + row, H * size);
          }
        }
      }
    }
    for (int64_t t = 0; t < here; ++t) {
      factors_of_token(params, (first + t) / params.S, (first + t) % params.S,
                       vectors + t * H * size, work, products);
    }
  });
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
