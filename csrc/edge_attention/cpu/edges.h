// Attention over edges: every node's edges in turn, those into it and, for gradients of keys, those
// out of it. No sum is shared between threads: results have the same bits for any number of them.
#pragma once

#include <cmath>

#include "edge_attention/params.h"
#include "support/cpu/schedule.h"

namespace ikattn::IKATTN_ISA {
namespace {

// Nodes in groups of about this many edges are a task of one thread.
constexpr int64_t kEdgesOfTask = 1024;
// So many edges ahead nodes are asked for: what memory takes to answer.
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

template <typename T>
inline T dot(const T* a, const T* b, int64_t count) {
  Eight<T> sums{}, x, y;
  int64_t k = 0;
  for (; k + kEight <= count; k += kEight) {
    load_eight(x, a + k);
    load_eight(y, b + k);
    sums += x * y;
  }
  sums += __builtin_shufflevector(sums, sums, 4, 5, 6, 7, 0, 1, 2, 3);
  sums += __builtin_shufflevector(sums, sums, 2, 3, 0, 1, 6, 7, 4, 5);
  T sum = sums[0] + sums[1];
  for (; k < count; ++k) sum += a[k] * b[k];
  return sum;
}

// y += factor x
template <typename T>
inline void add_multiple(T* __restrict__ y, T factor, const T* __restrict__ x, int64_t count) {
  Eight<T> of_x, of_y;
  int64_t k = 0;
  for (; k + kEight <= count; k += kEight) {
    load_eight(of_x, x + k);
    load_eight(of_y, y + k);
    of_y += factor * of_x;
    __builtin_memcpy(y + k, &of_y, sizeof(of_y));
  }
  for (; k < count; ++k) y[k] += factor * x[k];
}

// Asks for the cache lines of a node that is read soon.
template <typename T>
inline void prefetch(const T* values, int64_t count) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t k = 0; k < count; k += kLine) __builtin_prefetch(values + k);
}

// function(row, thread) of all rows of `ends`, in parallel, about as many edges to a task.
template <typename Function>
inline void for_rows(const int64_t* ends, int64_t rows, const Executor& executor,
                     const Function& function) {
  const int64_t work = ends[rows] + rows;  // a row without edges costs about as much as an edge
  const int64_t tasks = ceil_div(work, kEdgesOfTask);
  // The first row at which edges and rows before it are at least `bound`.
  const auto row_at = [&](int64_t bound) {
    int64_t low = 0, high = rows;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (ends[middle] + middle < bound) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  };
  parallel(executor, tasks, [&](int64_t task, int thread) {
    const int64_t last = task + 1 == tasks ? rows : row_at((task + 1) * kEdgesOfTask);
    for (int64_t row = row_at(task * kEdgesOfTask); row < last; ++row) function(row, thread);
  });
}

// One number a head for every thread, twice.
struct HeadSums {
  double* first;   // [H]
  double* second;  // [H]
};

class HeadWorkspace {
 public:
  HeadWorkspace(const Executor& executor, int64_t H)
      : H_(H),
        sums_(static_cast<double*>(executor.allocate(
            executor.owner,
            executor.threads * 2 * H * static_cast<int64_t>(sizeof(double)) + 64))) {}
  HeadSums of(int thread, double first, double second) const {
    double* sums = sums_ + thread * 2 * H_;
    for (int64_t h = 0; h < H_; ++h) sums[h] = first;
    for (int64_t h = 0; h < H_; ++h) sums[H_ + h] = second;
    return {sums, sums + H_};
  }

 private:
  int64_t H_;
  double* sums_;
};

// What is added to log(s^2 + eps) of edge e in head h.
template <typename T>
inline T logit_of(const EdgeParams<T>& p, int64_t e, int64_t h) {
  const T of_key = p.key_logits[p.source[e] * p.H + h];
  if (p.edge_logits == nullptr) return of_key;
  return of_key + p.edge_logits[p.edge_heads == 1 ? e : e * p.H + h];
}

template <typename T>
inline T similarity(const EdgeParams<T>& p, int64_t i, int64_t j, int64_t h) {
  const T* query = p.query_features + (i * p.H + h) * p.F;
  return dot(query, p.key_features + (j * p.H + h) * p.F, p.F) / static_cast<T>(2 * p.F);
}

template <typename T>
inline T dropped(const EdgeParams<T>& p, int64_t edge_head, T weight) {
  if (p.keep == nullptr) return weight;
  return p.keep[edge_head] ? weight * p.rescale : T(0);
}

template <typename T>
inline void prefetch_source(const EdgeParams<T>& p, int64_t e) {
  if (e >= p.E) return;
  prefetch(p.key_features + p.source[e] * p.H * p.F, p.H * p.F);
  prefetch(p.value + p.source[e] * p.H * p.d_v, p.H * p.d_v);
}

template <typename T>
void attend(const EdgeForwardParams<T>& p, int64_t i, const HeadSums& heads) {
  const int64_t H = p.H, begin = p.rowptr[i], end = p.rowptr[i + 1];
  double *largest = heads.first, *sum = heads.second;
  for (int64_t e = begin; e < end; ++e) {
    for (int64_t h = 0; h < H; ++h) {
      const double logit = static_cast<double>(logit_of(p, e, h));
      if (!(logit <= largest[h])) largest[h] = logit;  // NaN too, and it stays
    }
  }
  T* outputs = p.output + i * H * p.d_v;
  for (int64_t c = 0; c < H * p.d_v; ++c) outputs[c] = 0;
  for (int64_t e = begin; e < end; ++e) {
    prefetch_source(p, e + kAhead);
    const int64_t j = p.source[e];
    for (int64_t h = 0; h < H; ++h) {
      T& weight = p.weights[e * H + h];
      weight = 0;
      const T logit = logit_of(p, e, h);
      if (logit == -INFINITY) continue;
      const T s = similarity(p, i, j, h);
      const T unnormalised = (s * s + p.eps) * std::exp(logit - static_cast<T>(largest[h]));
      sum[h] += static_cast<double>(unnormalised);
      weight = dropped(p, e * H + h, unnormalised);
      add_multiple(outputs + h * p.d_v, weight, p.value + (j * H + h) * p.d_v, p.d_v);
    }
  }
  for (int64_t h = 0; h < H; ++h) {
    p.log_normalizer[i * H + h] = sum[h] == 0 ? -INFINITY : std::log(sum[h]) + largest[h];
    const T divisor = sum[h] == 0 ? T(1) : static_cast<T>(sum[h]);
    for (int64_t c = 0; c < p.d_v; ++c) outputs[h * p.d_v + c] /= divisor;
    for (int64_t e = begin; e < end; ++e) p.weights[e * H + h] /= divisor;
  }
}

template <typename T>
void edge_forward(const EdgeForwardParams<T>& p, const Executor& executor) {
  const HeadWorkspace workspace(executor, p.H);
  for_rows(p.rowptr, p.N_q, executor,
           [&](int64_t i, int thread) { attend(p, i, workspace.of(thread, -INFINITY, 0)); });
}

// Gradients of logits, similarities and query features, by target.
template <typename T>
void query_gradients(const EdgeBackwardParams<T>& p, int64_t i, const HeadSums& heads) {
  const int64_t H = p.H, begin = p.rowptr[i], end = p.rowptr[i + 1];
  const T* grad_output = p.grad_output + i * H * p.d_v;
  const double* log_normalizer = p.log_normalizer + i * H;
  double* mean = heads.first;  // of the gradients of the weights, by weight
  for (int64_t e = begin; e < end; ++e) {
    prefetch_source(p, e + kAhead);
    const int64_t j = p.source[e];
    for (int64_t h = 0; h < H; ++h) {
      const int64_t at = e * H + h;
      const T logit = logit_of(p, e, h);
      p.grad_logits[at] = p.grad_similarity[at] = p.weights[at] = 0;
      if (logit == -INFINITY) continue;
      const T s = similarity(p, i, j, h);
      const T shifted = static_cast<T>(static_cast<double>(logit) - log_normalizer[h]);
      const T weight = (s * s + p.eps) * std::exp(shifted);
      T gradient = dot(grad_output + h * p.d_v, p.value + (j * H + h) * p.d_v, p.d_v);
      if (p.grad_weights != nullptr) gradient += p.grad_weights[at];
      gradient = dropped(p, at, gradient);
      p.weights[at] = weight;
      p.grad_similarity[at] = s;
      p.grad_logits[at] = gradient;
      mean[h] += static_cast<double>(weight) * static_cast<double>(gradient);
    }
  }
  T* grad_query = p.grad_query_features + i * H * p.F;
  for (int64_t c = 0; c < H * p.F; ++c) grad_query[c] = 0;
  for (int64_t e = begin; e < end; ++e) {
    const int64_t j = p.source[e];
    for (int64_t h = 0; h < H; ++h) {
      const int64_t at = e * H + h;
      if (logit_of(p, e, h) == -INFINITY) continue;
      const T weight = p.weights[at], s = p.grad_similarity[at];
      const T gradient = weight * (p.grad_logits[at] - static_cast<T>(mean[h]));
      p.grad_logits[at] = gradient;
      p.grad_similarity[at] = gradient * s / ((s * s + p.eps) * static_cast<T>(p.F));
      p.weights[at] = dropped(p, at, weight);
      add_multiple(grad_query + h * p.F, p.grad_similarity[at], p.key_features + (j * H + h) * p.F,
                   p.F);
    }
  }
}

// Gradients of key features, logits and values, by source.
template <typename T>
void key_gradients(const EdgeBackwardParams<T>& p, int64_t j, const HeadSums& heads) {
  const int64_t H = p.H, last = p.colptr[p.N_k];
  T* grad_key = p.grad_key_features + j * H * p.F;
  T* grad_value = p.grad_value + j * H * p.d_v;
  double* grad_logit = heads.first;
  for (int64_t c = 0; c < H * p.F; ++c) grad_key[c] = 0;
  for (int64_t c = 0; c < H * p.d_v; ++c) grad_value[c] = 0;
  for (int64_t place = p.colptr[j]; place < p.colptr[j + 1]; ++place) {
    if (place + kAhead < last) {
      const int64_t next = p.by_source[place + kAhead], target = p.target[next];
      prefetch(p.query_features + target * H * p.F, H * p.F);
      prefetch(p.grad_output + target * H * p.d_v, H * p.d_v);
      prefetch(p.grad_logits + next * H, H);
      prefetch(p.grad_similarity + next * H, H);
      prefetch(p.weights + next * H, H);
    }
    const int64_t e = p.by_source[place], i = p.target[e];
    for (int64_t h = 0; h < H; ++h) {
      const int64_t at = e * H + h;
      if (logit_of(p, e, h) == -INFINITY) continue;
      grad_logit[h] += static_cast<double>(p.grad_logits[at]);
      add_multiple(grad_key + h * p.F, p.grad_similarity[at], p.query_features + (i * H + h) * p.F,
                   p.F);
      add_multiple(grad_value + h * p.d_v, p.weights[at], p.grad_output + (i * H + h) * p.d_v,
                   p.d_v);
    }
  }
  for (int64_t h = 0; h < H; ++h) p.grad_key_logits[j * H + h] = static_cast<T>(grad_logit[h]);
}

template <typename T>
void edge_backward(const EdgeBackwardParams<T>& p, const Executor& executor) {
  const HeadWorkspace workspace(executor, p.H);
  for_rows(p.rowptr, p.N_q, executor,
           [&](int64_t i, int thread) { query_gradients(p, i, workspace.of(thread, 0, 0)); });
  for_rows(p.colptr, p.N_k, executor,
           [&](int64_t j, int thread) { key_gradients(p, j, workspace.of(thread, 0, 0)); });
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
