// The products, logits and weights of edges. A warp takes kEdgesAtOnce edges at a time, of each of
// which kEdgeLanes neighbouring lanes share the columns: kWidth of them at once, 4 where all rows
// are aligned for it, else 1.
#pragma once

#include "edge_attention/params.h"
#include "support/cuda/warps.h"

namespace ikattn::cuda {
namespace {

constexpr int kEdgeLanes = 8, kEdgesAtOnce = 32 / kEdgeLanes;
// Twice, so that the second loads are under way while the first are waited for.
constexpr int kTurns = 2, kEdgeStep = kTurns * kEdgesAtOnce;

// Edge of a lane, and the first of its columns.
struct EdgeLane {
  int edge, first;

  __device__ __forceinline__ EdgeLane(int lane, int width)
      : edge(lane / kEdgeLanes), first(lane % kEdgeLanes * width) {}
};

// kWidth neighbours of a row in global memory.
template <typename T, int kWidth>
struct Columns {
  T x[kWidth];

  __device__ __forceinline__ explicit Columns(const T* from) {
    if constexpr (kWidth == 4 && sizeof(T) == 4) {
      const float4 four = load_vector<float4>(from);
      x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = from[i];
    }
  }
  __device__ __forceinline__ T dot(const Columns& other) const {
    T sum = 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum += x[i] * other.x[i];
    return sum;
  }
};

// Returns whether rows of so many elements, one after the other from `data` on, can be read by
// fours.
template <typename T>
inline bool has_fours(const T* data, int64_t width) {
  return width % 4 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

// Computes products[turn] = a . rows[turn] of `count` columns, in every lane of the edge; rows that
// are null are not read.
template <int kWidth, typename T>
__device__ __forceinline__ void edge_products(T (&products)[kTurns], const T* a,
                                              const T* const (&rows)[kTurns], int64_t count,
                                              const EdgeLane& at) {
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) products[turn] = 0;
#pragma unroll 1
  for (int64_t c = at.first; c < count; c += kEdgeLanes * kWidth) {
    const Columns<T, kWidth> left(a + c);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (rows[turn] != nullptr) products[turn] += left.dot(Columns<T, kWidth>(rows[turn] + c));
    }
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    products[turn] = sum_of_lanes<kEdgeLanes>(products[turn]);
  }
}

// A row that an edge adds to a sum, and what it is multiplied with; null: nothing.
template <typename T>
struct ScaledRow {
  const T* row;
  T factor;
};

// Computes `to`, the sum of row_of(k) over begin <= k < end, of `count` columns. All lanes of the
// warp call it.
template <int kWidth, typename T, typename RowOf>
__device__ __forceinline__ void add_rows(int64_t begin, int64_t end, int64_t count, T* to, int lane,
                                         const RowOf& row_of) {
  const EdgeLane at(lane, kWidth);
#pragma unroll 1
  for (int64_t base = 0; base < count; base += kEdgeLanes * kWidth) {
    const int64_t c = base + at.first;
    const bool has_columns = c < count;
    T sums[kWidth] = {};
#pragma unroll 1
    for (int64_t first = begin; has_columns && first < end; first += kEdgeStep) {
      ScaledRow<T> scaled[kTurns];
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int64_t k = first + turn * kEdgesAtOnce + at.edge;
        scaled[turn] = k < end ? row_of(k) : ScaledRow<T>{nullptr, 0};
      }
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        if (scaled[turn].row == nullptr) continue;
        const Columns<T, kWidth> row(scaled[turn].row + c);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sums[i] += scaled[turn].factor * row.x[i];
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
#pragma unroll
      for (int step = kEdgeLanes; step < 32; step *= 2) {
        sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], step);
      }
      if (has_columns && at.edge == 0) to[c + i] = sums[i];
    }
  }
}

template <typename T>
inline bool reads_fours(const EdgeParams<T>& p) {
  return has_fours(p.query_features, p.F) && has_fours(p.key_features, p.F) &&
         has_fours(p.value, p.d_v);
}

// Returns a.b of rows in global memory, in every lane.
template <typename T>
__device__ __forceinline__ T warp_dot(const T* a, const T* b, int64_t count, int lane) {
  T sum = 0;
  for (int64_t k = lane; k < count; k += 32) sum += a[k] * b[k];
  return sum_of_lanes(sum);
}

// Returns the term that is added to the logarithm of the score of edge e; for an exponential score,
// to the score.
template <typename T>
__device__ __forceinline__ T bias_of(const EdgeParams<T>& p, int64_t e, int64_t h) {
  const T of_key = p.key_logits[p.source[e] * p.H + h];
  if (p.edge_logits == nullptr) return of_key;
  const T of_edge = p.edge_logits[p.edge_heads == 1 ? e : e * p.H + h];
  const bool is_hidden = of_key == -INFINITY || of_edge == -INFINITY;  // the other may be NaN
  return is_hidden ? -INFINITY : of_key + of_edge;
}

template <typename T>
__device__ __forceinline__ const T* key_features_of(const EdgeParams<T>& p, int64_t e, int64_t h) {
  return p.key_features + (p.source[e] * p.H + h) * p.F;
}
template <typename T>
__device__ __forceinline__ const T* value_of(const EdgeParams<T>& p, int64_t e, int64_t h) {
  return p.value + (p.source[e] * p.H + h) * p.d_v;
}

// Returns the similarity for a product of features.
template <typename T>
__device__ __forceinline__ T scaled(const EdgeParams<T>& p, T product) {
  return p.exponential ? product : product / static_cast<T>(2 * p.F);
}

// Calls use(e, products) along the edges begin to end, of which a lane's are e and kEdgesAtOnce
// after the other, products those of the query's features. All lanes of the warp call it.
template <int kWidth, typename T, typename Use>
__device__ __forceinline__ void visit_products(const EdgeParams<T>& p, int64_t i, int64_t h,
                                               int64_t begin, int64_t end, const EdgeLane& at,
                                               const Use& use) {
  const T* query = p.query_features + (i * p.H + h) * p.F;
#pragma unroll 1
  for (int64_t first = begin; first < end; first += kEdgeStep) {
    const T* rows[kTurns];
    T products[kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int64_t e = first + turn * kEdgesAtOnce + at.edge;
      rows[turn] = e < end ? key_features_of(p, e, h) : nullptr;
    }
    edge_products<kWidth>(products, query, rows, p.F, at);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) products[turn] = scaled(p, products[turn]);
    use(first + at.edge, products);
  }
}

// Returns the slope of the LeakyReLU at a sum of a product and its bias.
template <typename T>
__device__ __forceinline__ T slope_at(const EdgeParams<T>& p, T sum) {
  return sum > 0 ? T(1) : p.negative_slope;
}
// Returns the logit of an exponential score that is not hidden.
template <typename T>
__device__ __forceinline__ T logit_of(const EdgeParams<T>& p, T sum) {
  return sum * slope_at(p, sum);
}

__device__ __forceinline__ float exponential_of(float x) { return expf(x); }
__device__ __forceinline__ double exponential_of(double x) { return exp(x); }

// Returns score * exp(bias - shift); 0 where the edge is hidden. A shift of -inf: none of them is
// seen.
template <typename T>
__device__ __forceinline__ T weight_of(const EdgeParams<T>& p, T product, T bias, double shift) {
  if (bias == -INFINITY) return 0;
  const double finite = shift == -INFINITY ? 0.0 : shift;
  const T logit = p.exponential ? logit_of(p, bias + product) : bias;
  const T weight = exponential_of(static_cast<T>(static_cast<double>(logit) - finite));
  return p.exponential ? weight : weight * (product * product + p.eps);
}

template <typename T>
__device__ __forceinline__ T dropped(const EdgeParams<T>& p, int64_t edge_head, T weight) {
  if (p.keep == nullptr) return weight;
  return p.keep[edge_head] ? weight * p.rescale : T(0);
}

}  // namespace
}  // namespace ikattn::cuda
