// The triangular factors of tokens in float32: Cholesky's, of their Gram matrices in float64.
//
// |R a| has the accuracy of the direct sum, also where the heads cancel, while a^T G a with the
// Gram matrix G would lose all digits there. Cholesky's R loses the digits of float64 by which a
// pivot is below its head's square; tokens whose heads depend on each other to seven digits take
// modified Gram-Schmidt (factors.h). Vectors exist for some tokens and 64 elements at a time. A
// lane is a token, from the products to the factors.
#pragma once

#include "contributions/cpu/factors.h"
#include "support/cpu/vector_math.h"

namespace ikattn::IKATTN_ISA {
namespace {

constexpr int kGramTile = kRegisters >= 32 ? 4 : 3;  // heads, whose products are in registers
constexpr int64_t kGramDepth = 32;                   // elements, widened at a time

// Loads float32 as float64.
inline Vec<double> widened(const float* source) {
  typedef float Half __attribute__((vector_size(kVectorBytes / 2)));
  Half half;
  __builtin_memcpy(&half, source, sizeof(half));
  return __builtin_convertvector(half, Vec<double>);
}

// Returns the place of entry (h, k), h <= k, in the triangle.
inline int64_t entry_of(int64_t H, int64_t h, int64_t k) { return h * H - h * (h - 1) / 2 + k - h; }

class GramFactors {
 public:
  GramFactors(Workspace& workspace, const FactorsOfTokens& params)
      : params_(params),
        transform_(workspace, params.d_v, params.G),
        vectors_(workspace.take<float>(params.H * kPanelSize)),
        product_(workspace.take<float>(kPanelSize)),
        wide_(workspace.take<double>(params.H * kGramDepth * kLanes<double>)),
        exact_(workspace, params) {
    for (int v = 0; v < 3; ++v) {
      const int64_t entries = params.factors[v] || (v == 0 && params.value_norms);
      grams_[v] = workspace.take<double>(entries * triangle(params.H) * kPanel);
      is_wanted_[v] = entries != 0;
      if (v > 0) means_[v - 1] = workspace.take<double>(params.H * kPanel);
    }
    last_ = is_wanted_[2] ? 2 : is_wanted_[1] ? 1 : 0;
  }

  // Computes factors and value norms of the tokens [first, first + count) of all batch items.
  void operator()(int64_t first, int64_t count) {
    const int64_t H = params_.H, D = params_.D;
    for (int64_t g = 0; g < params_.G; ++g) transform_.load_values(params_, g, first, count, g);
    for (int v = 0; v < 3; ++v) {
      for (int64_t i = 0; is_wanted_[v] && i < triangle(H) * kPanel; ++i) grams_[v][i] = 0;
    }
    for (int64_t h = 0; last_ > 0 && h < H; ++h) load_means(h, count);
    for (int64_t c = 0; c < D; c += kPanel) {
      for (int64_t h = 0; h < H; ++h) {
        transform_.multiply(params_.projection, D, params_.d_v, h, c, count,
                            vectors_ + h * kPanelSize, h / (H / params_.G));
      }
      const int64_t end = min_of(kPanel, D - c);
      for (int64_t t = 0; t < count; t += kLanes<double>) {
        for (int64_t row = 0; row < end; row += kGramDepth) {
          add_products(c, row, min_of(kGramDepth, end - row), t);
        }
      }
    }
    for (int64_t t = 0; t < count; t += kLanes<double>) finish(first, count, t);
    for (int64_t t = 0; t < count; t += kExact) {
      const bool* depends = depends_ + t;
      const int64_t here = min_of(kExact, count - t);
      bool any = false;
      for (int64_t i = 0; i < here; ++i) any |= depends[i];
      if (any) exact_(first + t, here, [&](int64_t i) { return depends[i]; });
    }
  }

 private:
  // Computes the means that norms take off head h's vectors, [64].
  void load_means(int64_t h, int64_t count) const {
    transform_.multiply(params_.means, 2, params_.d_v, h, 0, count, product_,
                        h / (params_.H / params_.G));
    for (int n = 0; n < 2; ++n) {
      for (int64_t t = 0; t < count; ++t) {
        means_[n][h * kPanel + t] = params_.norms[n].centered ? product_[n * kPanel + t] : 0.0;
      }
    }
  }

  // Adds the products of the elements [c + row, c + row + depth) of a vector of tokens.
  void add_products(int64_t c, int64_t row, int64_t depth, int64_t t) const {
    const int64_t H = params_.H;
    for (int64_t h = 0; h < H; ++h) {
      const float* vector = vectors_ + h * kPanelSize + row * kPanel + t;
      double* wide = wide_ + h * kGramDepth * kLanes<double>;
      for (int64_t k = 0; k < depth; ++k) {
        store(wide + k * kLanes<double>, widened(vector + k * kPanel));
      }
    }
    for (int v = 0; v <= last_; ++v) {
      if (v > 0) apply_norm(v - 1, c + row, depth, t);
      if (!is_wanted_[v]) continue;
      for (int64_t i = 0; i < H; i += kGramTile) {
        for (int64_t j = i; j < H; j += kGramTile) add_tile(i, j, depth, grams_[v] + t);
      }
    }
  }

  void apply_norm(int n, int64_t c, int64_t depth, int64_t t) const {
    const float* weight = static_cast<const float*>(params_.norms[n].weight) + c;
    for (int64_t h = 0; h < params_.H; ++h) {
      double* wide = wide_ + h * kGramDepth * kLanes<double>;
      const Vec<double> mean = load(means_[n] + h * kPanel + t);
      for (int64_t k = 0; k < depth; ++k, wide += kLanes<double>) {
        store(wide, (load(wide) - mean) * static_cast<double>(weight[k]));
      }
    }
  }

  // Adds the products of at most kGramTile heads from i on with those from j on.
  void add_tile(int64_t i, int64_t j, int64_t depth, double* grams) const {
    const int64_t H = params_.H;
    const double *left[kGramTile], *right[kGramTile];  // beyond H the last one again
    for (int r = 0; r < kGramTile; ++r) {
      left[r] = wide_ + min_of(i + r, H - 1) * kGramDepth * kLanes<double>;
      right[r] = wide_ + min_of(j + r, H - 1) * kGramDepth * kLanes<double>;
    }
    Vec<double> sums[kGramTile][kGramTile] = {};
    for (int64_t k = 0; k < depth * kLanes<double>; k += kLanes<double>) {
      Vec<double> y[kGramTile];
#pragma GCC unroll 4
      for (int s = 0; s < kGramTile; ++s) y[s] = load(right[s] + k);
#pragma GCC unroll 4
      for (int r = 0; r < kGramTile; ++r) {
        const Vec<double> x = load(left[r] + k);
#pragma GCC unroll 4
        for (int s = 0; s < kGramTile; ++s) sums[r][s] += x * y[s];
      }
    }
    for (int r = 0; r < min_of(kGramTile, H - i); ++r) {
      for (int s = 0; s < min_of(kGramTile, H - j); ++s) {
        if (i + r > j + s) continue;
        double* gram = grams + entry_of(H, i + r, j + s) * kPanel;
        store(gram, load(gram) + sums[r][s]);
      }
    }
  }

  // Stores the value norms and factors of a vector of tokens.
  void finish(int64_t first, int64_t count, int64_t t) {
    Bits<double> depends{};
    const int64_t H = params_.H, S = params_.S, blocks = ceil_div(S, kFactorBlock);
    for (int64_t h = 0; params_.value_norms && h < H; ++h) {
      const double* squares = grams_[0] + entry_of(H, h, h) * kPanel;
      for (int64_t lane = t; lane < min_of(count, t + kLanes<double>); ++lane) {
        const int64_t b = (first + lane) / S, j = (first + lane) % S;
        static_cast<float*>(params_.value_norms)[(b * H + h) * S + j] =
            static_cast<float>(__builtin_sqrt(squares[lane]));
      }
    }
    for (int v = 0; v < 3; ++v) {
      if (!params_.factors[v]) continue;
      depends |= factorize(grams_[v] + t);
      for (int64_t lane = t; lane < min_of(count, t + kLanes<double>); ++lane) {
        const int64_t b = (first + lane) / S, j = (first + lane) % S;
        float* factors = static_cast<float*>(params_.factors[v]) +
                         (b * blocks + j / kFactorBlock) * triangle(H) * kFactorBlock +
                         j % kFactorBlock;
        for (int64_t p = 0; p < triangle(H); ++p) {
          factors[p * kFactorBlock] = static_cast<float>(grams_[v][p * kPanel + lane]);
        }
      }
    }
    for (int64_t lane = 0; lane < kLanes<double>; ++lane) depends_[t + lane] = depends[lane] != 0;
  }

  // Turns Gram matrices, [triangle(H)][64], into their factors, for a vector of tokens. Returns
  // which tokens have a head that depends on those before it.
  Bits<double> factorize(double* grams) const {
    constexpr double kDependent = 1e-7;
    Bits<double> depends{};
    const int64_t H = params_.H;
    const auto row_of = [&](int64_t h) { return grams + entry_of(H, h, h) * kPanel; };
    for (int64_t h = 0; h < H; ++h) {
      double* row = row_of(h);
      const Vec<double> whole = load(row);
      for (int64_t m = 0; m < h; ++m) {
        const double* before = row_of(m) + (h - m) * kPanel;
        const Vec<double> factor = load(before);
        for (int64_t k = 0; k < (H - h) * kPanel; k += kPanel) {
          store(row + k, load(row + k) - factor * load(before + k));
        }
      }
      const Vec<double> square = load(row);
      const Bits<double> vanishes = whole == 0.0;
      depends |= (square <= kDependent * whole) & ~vanishes;  // false for NaN
      const Vec<double> norm = square_root<double>(square);
      const Vec<double> inverse = vanishes ? Vec<double>{} : 1.0 / norm;
      store(row, norm);
      for (int64_t k = kPanel; k < (H - h) * kPanel; k += kPanel) {
        store(row + k, load(row + k) * inverse);
      }
    }
    return depends;
  }

  static constexpr int64_t kExact = TokenFactors<float>::kTokens;
  const FactorsOfTokens& params_;
  HeadProducts<float> transform_;
  float *vectors_, *product_;  // [H][64][64], [64][64]: elements by tokens
  double* wide_;               // [H][kGramDepth][tokens of a vector]
  double *grams_[3], *means_[2];
  TokenFactors<float> exact_;
  bool is_wanted_[3], depends_[kPanel];
  int last_;
};

inline void gram_factors(const FactorsOfTokens& params, const Executor& all) {
  const int64_t count = params.B * params.S;
  const int64_t together = tokens_together(count, max_of(1, all.threads));
  const int64_t groups = ceil_div(count, together);
  Executor executor = all;  // no scratch for threads that would find nothing to do
  executor.threads = static_cast<int>(max_of(1, min_of(all.threads, groups)));
  Workspace measure;
  static_cast<void>(GramFactors(measure, params));
  char* memory =
      static_cast<char*>(executor.allocate(executor.owner, measure.bytes() * executor.threads));
  parallel(executor, groups, [&](int64_t group, int thread) {
    Workspace workspace(memory + thread * measure.bytes());
    GramFactors factors(workspace, params);
    const int64_t first = group * together;
    factors(first, min_of(together, count - first));
  });
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
