// The triangular factor of a token's transformed vectors by modified Gram-Schmidt in float64, whose
// R is as accurate as Householder's, for vectors that depend on each other too (Bjorck 1967).
#pragma once

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
template <typename T>
void factorize(int64_t H, int64_t size, double* vectors, double* products, T* factors) {
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
    *factors = static_cast<T>(norm);
    factors += kFactorBlock;
    for (k = h + 1; k < H; ++k, factors += kFactorBlock) {
      products[k] *= inverse;
      *factors = static_cast<T>(products[k]);
      products[k] *= inverse;
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
template <typename T>
void apply_norm(const NormLayer& norm, int64_t H, int64_t D, int64_t size, double* vectors) {
  const T* weight = static_cast<const T*>(norm.weight);
  for (int64_t h = 0; h < H; ++h) {
    double* row = vectors + h * size;
    double mean = 0;
    if (norm.centered) {
      Vec<double> sums{};
      for (int64_t c = 0; c < size; c += kLanes<double>) sums += load(row + c);
      mean = sum_of_lanes<double>(sums) / static_cast<double>(D);
    }
    for (int64_t c = 0; c < D; ++c) row[c] = (row[c] - mean) * static_cast<double>(weight[c]);
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

// Computes factors and value norms of some tokens; T: their type.
template <typename T>
class TokenFactors {
 public:
  static constexpr int64_t kTokens = 16;  // at a time

  TokenFactors(Workspace& workspace, const FactorsOfTokens& params)
      : params_(params),
        size_(padded_size(params.D)),
        transform_(workspace, params.d_v),
        product_(workspace.take<double>(kPanelSize)),
        vectors_(workspace.take<double>(kTokens * params.H * size_)),
        work_(workspace.take<double>(params.H * size_)),
        products_(workspace.take<double>(params.H)) {}

  // Computes those of the tokens [first, first + count) of all batch items for which is_wanted(t),
  // t from 0 on, is true; at most kTokens.
  template <typename Wanted>
  void operator()(int64_t first, int64_t count, const Wanted& is_wanted) const {
    const int64_t H = params_.H, S = params_.S;
    for (int64_t h = 0; h < H; ++h) {
      transform_.load_values(params_, h / (H / params_.G), first, count);
      for (int64_t c = 0; c < size_; c += kPanel) {
        transform_.multiply(params_.projection, params_.D, params_.d_v, h, c, count, product_);
        for (int64_t i = (params_.D - c) * kPanel; i < kPanelSize; ++i) product_[i] = 0;
        for (int64_t t = 0; t < count; t += kLanes<double>) {
          for (int64_t row = 0; row < kPanel; row += kLanes<double>) {
            transpose_block(product_ + row * kPanel + t, kPanel,
                            vectors_ + (t * H + h) * size_ + c + row, H * size_);
          }
        }
      }
    }
    for (int64_t t = 0; t < count; ++t) {
      if (is_wanted(t)) of_token((first + t) / S, (first + t) % S, vectors_ + t * H * size_);
    }
  }

 private:
  // Overwrites the token's vectors [H][size].
  void of_token(int64_t b, int64_t j, double* vectors) const {
    const int64_t H = params_.H, entries = triangle(H), blocks = ceil_div(params_.S, kFactorBlock);
    const int last = params_.factors[2] ? 2 : params_.factors[1] ? 1 : 0;
    const double scale = scale_of(H * size_, vectors);
    if (scale != 1) {
      for (int64_t c = 0; c < H * size_; ++c) vectors[c] /= scale;
    }
    for (int64_t h = 0; params_.value_norms && h < H; ++h) {
      const double* row = vectors + h * size_;
      static_cast<T*>(params_.value_norms)[(b * H + h) * params_.S + j] =
          static_cast<T>(scale * __builtin_sqrt(dot_product(size_, row, row)));
    }
    for (int v = 0; v <= last; ++v) {
      if (v > 0) apply_norm<T>(params_.norms[v - 1], H, params_.D, size_, vectors);
      if (!params_.factors[v]) continue;
      double* taken = v == last ? vectors : work_;
      if (v != last) __builtin_memcpy(work_, vectors, H * size_ * sizeof(double));
      T* factors = static_cast<T*>(params_.factors[v]) +
                   (b * blocks + j / kFactorBlock) * entries * kFactorBlock + j % kFactorBlock;
      factorize(H, size_, taken, products_, factors);
      if (scale != 1) {
        for (int64_t p = 0; p < entries; ++p) factors[p * kFactorBlock] *= static_cast<T>(scale);
      }
    }
  }

  const FactorsOfTokens& params_;
  int64_t size_;
  HeadProducts<double> transform_;
  double* product_;                      // [64][64]
  double *vectors_, *work_, *products_;  // [kTokens][H][size], [H][size], [H]
};

inline void token_factors(const FactorsOfTokens& params, const Executor& all) {
  constexpr int64_t kTokens = TokenFactors<double>::kTokens;
  const int64_t count = params.B * params.S, groups = ceil_div(count, kTokens);
  Executor executor = all;  // no scratch for threads that would find nothing to do
  executor.threads = static_cast<int>(max_of(1, min_of(all.threads, groups)));
  Workspace measure;
  static_cast<void>(TokenFactors<double>(measure, params));
  char* memory =
      static_cast<char*>(executor.allocate(executor.owner, measure.bytes() * executor.threads));
  parallel(executor, groups, [&](int64_t group, int thread) {
    Workspace workspace(memory + thread * measure.bytes());
    const TokenFactors<double> factors(workspace, params);
    const int64_t first = group * kTokens;
    factors(first, min_of(kTokens, count - first), [](int64_t) { return true; });
  });
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
