// The products, logits and weights of a row's edges, and the arithmetic on short rows of numbers.
#pragma once

#include <cmath>

#include "edge_attention/params.h"
#include "support/cpu/schedule.h"
#include "support/cpu/vector_math.h"

namespace ikattn::IKATTN_ISA {
namespace {

// The number of edges ahead for which nodes are prefetched, by the latency of memory.
constexpr int64_t kAhead = 4;

// Rows are short, often 8 numbers: vectors of eight on every instruction set.
constexpr int64_t kEight = 8;
template <typename T>
struct EightOf;
template <>
struct EightOf<float> {
  typedef float type __attribute__((vector_size(kEight * sizeof(float))));
};
template <>
struct EightOf<double> {
  typedef double type __attribute__((vector_size(kEight * sizeof(double))));
};
template <typename T>
using Eight = typename EightOf<T>::type;

template <typename T>
inline void load_eight(Eight<T>& to, const T* source) {
  __builtin_memcpy(&to, source, sizeof(to));
}

// Computes the rest of a row after its eights, apart so that the loop over eights stays short.
template <typename T>
[[gnu::noinline]] T dot_of_rest(const T* a, const T* b, int64_t count) {
  T sum = 0;
  for (int64_t k = 0; k < count; ++k) sum += a[k] * b[k];
  return sum;
}
template <typename T>
[[gnu::noinline]] void add_rest(T* y, T factor, const T* x, int64_t count) {
  for (int64_t k = 0; k < count; ++k) y[k] += factor * x[k];
}

template <typename T>
inline T sum_of_eight(Eight<T> sums) {
  sums += __builtin_shufflevector(sums, sums, 4, 5, 6, 7, 0, 1, 2, 3);
  sums += __builtin_shufflevector(sums, sums, 2, 3, 0, 1, 6, 7, 4, 5);
  return sums[0] + sums[1];
}

template <typename T>
inline T dot(const T* a, const T* b, int64_t count) {
  if (count == 1) return *a * *b;  // GAT's logits
  int64_t k = 0;
  T sum = 0;
  if (kLanes<T> > kEight && count >= kLanes<T>) {  // rows of features
    Vec<T> sums{};
    for (; k + kLanes<T> <= count; k += kLanes<T>) sums += load(a + k) * load(b + k);
    sum = sum_of_lanes<T>(sums);
    if (k == count) return sum;
  }
  Eight<T> sums{}, x, y;
  for (; k + kEight <= count; k += kEight) {
    load_eight(x, a + k);
    load_eight(y, b + k);
    sums += x * y;
  }
  sum += sum_of_eight<T>(sums);
  return k == count ? sum : sum + dot_of_rest(a + k, b + k, count - k);
}

// Adds factor x to y.
template <typename T>
inline void add_multiple(T* y, T factor, const T* x, int64_t count) {
  if (count == 1) *y += factor * *x;
  if (count <= 1) return;
  int64_t k = 0;
  if (kLanes<T> > kEight) {
    for (; k + kLanes<T> <= count; k += kLanes<T>) store(y + k, load(y + k) + factor * load(x + k));
  }
  Eight<T> of_x, of_y;
  for (; k + kEight <= count; k += kEight) {
    load_eight(of_x, x + k);
    load_eight(of_y, y + k);
    of_y += factor * of_x;
    __builtin_memcpy(y + k, &of_y, sizeof(of_y));
  }
  if (k < count) add_rest(y + k, factor, x + k, count - k);
}

// Prefetches the cache lines of a node that is read soon into the second-level cache. The first
// level has room for some 20 misses at once, the lines of one node; more would wait. Always
// inlined, for GCC drops a call of a function that only prefetches.
template <typename T>
[[gnu::always_inline]] inline void prefetch(const T* values, int64_t count) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t k = 0; k < count; k += kLine)
    __builtin_prefetch(values + k, /*is written*/ 0, /*to L2*/ 2);
}

template <typename T>
[[gnu::always_inline]] inline void prefetch_source(const EdgeParams<T>& p, int64_t e) {
  if (e >= p.E) return;
  const int64_t j = p.source[e], H = p.H;
  prefetch(p.key_features + j * H * p.F, H * p.F);
  prefetch(p.value + j * H * p.d_v, H * p.d_v);
  prefetch(p.key_logits + j * H, H);
}

// The scratch of a thread for some edges, head by head within an edge.
template <typename T>
struct EdgeScratch {
  // [edges, H]: s, 0 where the edge is hidden; for exponential scores the LeakyReLU's slope
  T* products;
  T* logits;  // [edges, H]: what is added to the logarithm of the score; then the weights
};

template <typename T>
class EdgeScratches {
 public:
  EdgeScratches(Workspace& workspace, int threads, int64_t edges, int64_t H)
      : size_(round_up(edges * H, kLanes<T>)),  // whole vectors are computed
        numbers_(workspace.take<T>(2 * threads * size_)) {}
  EdgeScratch<T> operator[](int thread) const {
    T* products = numbers_ + 2 * thread * size_;
    return {products, products + size_};
  }

 private:
  int64_t size_;
  T* numbers_;
};

inline bool is_hidden(double logit) { return logit == -INFINITY; }

// The weight of an edge that is hidden or dropped. That of one which is far below the others is 0.
constexpr double kNoWeight = -0.0;
inline bool is_no_weight(double weight) { return weight == 0 && std::signbit(weight); }

// Fills the scratch for edges [begin, end) of query i.
template <typename T>
inline void take_scores(const EdgeParams<T>& p, int64_t i, int64_t begin, int64_t end,
                        const EdgeScratch<T>& scratch) {
  const int64_t H = p.H;
  const T* query = p.query_features + i * H * p.F;
  for (int64_t e = begin; e < end; ++e) {
    prefetch_source(p, e + kAhead);
    const T* key = p.key_features + p.source[e] * H * p.F;
    T* products = scratch.products + (e - begin) * H;
    for (int64_t h = 0; h < H; ++h) products[h] = dot(query + h * p.F, key + h * p.F, p.F);
  }
  bool hides = false;
  for (int64_t e = begin; e < end; ++e) {
    const T* of_key = p.key_logits + p.source[e] * H;
    T *products = scratch.products + (e - begin) * H, *logits = scratch.logits + (e - begin) * H;
    for (int64_t h = 0; h < H; ++h) logits[h] = of_key[h];
    if (p.edge_logits != nullptr) {
      const T* of_edge = p.edge_logits + (p.edge_heads == 1 ? e : e * H);
      for (int64_t h = 0; h < H; ++h) {
        const T bias = of_edge[p.edge_heads == 1 ? 0 : h];
        const bool hidden = is_hidden(bias) || is_hidden(logits[h]);  // the other may be NaN
        logits[h] = hidden ? -std::numeric_limits<T>::infinity() : logits[h] + bias;
      }
    }
    for (int64_t h = 0; h < H; ++h) hides |= is_hidden(logits[h]);
    if (!p.exponential) continue;
    for (int64_t h = 0; h < H; ++h) {
      const bool is_seen = !is_hidden(logits[h]);
      const T sum = is_seen ? logits[h] + products[h] : logits[h];
      products[h] = is_seen && !(sum > 0) ? p.negative_slope : T(1);
      logits[h] = sum * products[h];
    }
  }
  if (hides) {
    for (int64_t k = 0; k < (end - begin) * H; ++k) {
      if (is_hidden(scratch.logits[k])) scratch.products[k] = 0;
    }
  }
  if (!p.exponential) {
    const T factor = T(1) / static_cast<T>(2 * p.F);
    for (int64_t k = 0; k < (end - begin) * H; ++k) scratch.products[k] *= factor;
  }
}

// Computes weights score * exp(logit - shift[h]) in place of logits. A shift of -inf: the head sees
// no edge.
template <typename T>
inline void take_weights(const EdgeParams<T>& p, int64_t edges, const double* shift,
                         const EdgeScratch<T>& scratch) {
  const int64_t H = p.H, count = edges * H;
  T* weights = scratch.logits;
  for (int64_t e = 0; e < edges; ++e) {
    for (int64_t h = 0; h < H; ++h) {
      const double logit = static_cast<double>(weights[e * H + h]);
      const double finite = is_hidden(shift[h]) ? 0.0 : shift[h];
      weights[e * H + h] = static_cast<T>(is_hidden(logit) ? logit : logit - finite);
    }
  }
  for (int64_t k = count; k < round_up(count, kLanes<T>); ++k) weights[k] = scratch.products[k] = 0;
  for (int64_t k = 0; k < count; k += kLanes<T>) {
    const Vec<T> logit = load(weights + k), s = load(scratch.products + k);
    Vec<T> weight = exp_bounded<T>(logit);
    if (!p.exponential) weight *= s * s + p.eps;
    store<T>(weights + k, logit == broadcast(-std::numeric_limits<T>::infinity())
                              ? broadcast(T(kNoWeight))
                              : weight);
  }
}

template <typename T>
inline T dropped(const EdgeParams<T>& p, int64_t edge_head, T weight) {
  if (p.keep == nullptr) return weight;
  return p.keep[edge_head] ? weight * p.rescale : T(kNoWeight);
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
