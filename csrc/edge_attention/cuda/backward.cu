// Gradients: a warp for every target and head, with what every edge gives its source; then a warp
// for every source and head.
#include "edge_attention/cuda/rows.h"
#include "edge_attention/cuda/scores.h"

namespace ikattn::cuda {
namespace {

// sum_e weight_e grad_weights_e of a target and head; one warp's, whatever the length of the row.
template <typename T>
__global__ void __launch_bounds__(kRowWarps * 32, kRowBlocks)
    mean_kernel(EdgeQueryGradientParams<T> p, double* mean) {
  const int64_t index = warp_number(), i = index / p.H, h = index % p.H;
  if (i >= p.N_q) return;
  const int lane = threadIdx.x % 32;
  const EdgeLane at(lane, 1);
  const int64_t end = p.rowptr[i + 1];
  double sum = 0;
  visit_products<1>(p, i, h, p.rowptr[i], end, at, [&](int64_t first, const T(&products)[kTurns]) {
    for (int turn = 0; turn < kTurns; ++turn) {
      const int64_t e = first + turn * kEdgesAtOnce, place = e * p.H + h;
      if (e >= end || at.first != 0) continue;
      const T weight =
          weight_of(p, products[turn], bias_of(p, e, h), p.log_normalizer[i * p.H + h]);
      sum += static_cast<double>(dropped(p, place, weight)) *
             static_cast<double>(p.grad_weights[place]);
    }
    __syncwarp();
  });
  sum = sum_of_lanes(sum);
  if (lane == 0) mean[i * p.H + h] = sum;
}

template <typename T, int kWidth>
struct QueryGradients {
  EdgeQueryGradientParams<T> p;
  const double* mean;  // [N_q, H]; null: zeros
  Rows rows;
  int64_t H;

  __device__ __forceinline__ Values<T> values_of(int64_t i, int64_t h) const {
    return {p.grad_query_features + (i * H + h) * p.F, nullptr};
  }
  __device__ __forceinline__ Values<T> values_at(T* memory) const { return {memory, nullptr}; }

  __device__ __forceinline__ void sum(const Piece& piece, double (&numbers)[2],
                                      const Values<T>& values, int lane) const {
    const auto [i, h, begin, end] = piece;
    numbers[0] = numbers[1] = 0;
    const int64_t row = (i * H + h) * p.d_v;
    // The gradient of the head's weights, by weight.
    double of_head =
        static_cast<double>(warp_dot(p.output + row, p.grad_output + row, p.d_v, lane));
    if (mean != nullptr) of_head += mean[i * H + h];
    // 1. Gradients of every edge.
    const double normalizer = p.log_normalizer[i * H + h];
    const EdgeLane at(lane, kWidth);
    visit_products<kWidth>(p, i, h, begin, end, at, [&](int64_t first, const T(&products)[kTurns]) {
      const T* of_values[kTurns];
      T gradients[kTurns];
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int64_t e = first + turn * kEdgesAtOnce;
        of_values[turn] = e < end ? value_of(p, e, h) : nullptr;
      }
      edge_products<kWidth>(gradients, p.grad_output + row, of_values, p.d_v, at);
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int64_t e = first + turn * kEdgesAtOnce;
        if (e >= end || at.first != 0) continue;
        store_edge(e, h, products[turn], gradients[turn], normalizer, static_cast<T>(of_head));
      }
      __syncwarp();
    });
    // 2. The gradient of the query's features.
    add_rows<kWidth>(begin, end, p.F, values.first, lane, [&](int64_t e) {
      const T factor = p.of_edges[(3 * e + 1) * H + h];
      return ScaledRow<T>{factor == 0 ? nullptr : key_features_of(p, e, h), factor};
    });
  }

  // Stores an edge's gradients. s: the product of its features; gradient: of its weight, but for
  // grad_weights.
  __device__ __forceinline__ void store_edge(int64_t e, int64_t h, T s, T gradient,
                                             double normalizer, T of_head) const {
    const int64_t at = e * H + h;
    const T bias = bias_of(p, e, h);
    if (p.grad_weights != nullptr) gradient += p.grad_weights[at];
    const T weight = weight_of(p, s, bias, normalizer);
    T grad_logit = weight * (dropped(p, at, gradient) - of_head);
    if (p.exponential) grad_logit *= slope_at(p, bias + s);
    const T slope = p.exponential ? T(1) : s / ((s * s + p.eps) * static_cast<T>(p.F));
    T grad_product = grad_logit * slope;
    if (bias == -INFINITY) grad_logit = grad_product = 0;  // hidden keys may hold NaN
    T* of_edge = p.of_edges + 3 * e * H + h;
    of_edge[0] = grad_logit;
    of_edge[H] = grad_product;
    of_edge[2 * H] = dropped(p, at, weight);
  }

  __device__ __forceinline__ void finish(int64_t, int64_t, const double (&)[2], int) const {}

  __device__ __forceinline__ void merge(int64_t i, int64_t h, const Parts<T>& parts,
                                        int lane) const {
    for (int64_t f = lane; f < p.F; f += 32) {
      T total = 0;
#pragma unroll 1
      for (int64_t k = 0; k < parts.pieces.count; ++k) total += parts.values_of(k)[f];
      values_of(i, h).first[f] = total;
    }
  }
};

template <typename T>
const char* query_gradients(const EdgeQueryGradientParams<T>& p, double* mean, double* numbers,
                            T* values, Stream stream) {
  if (p.grad_weights == nullptr) {
    mean = nullptr;
  } else if (const char* error = launch(mean_kernel<T>, blocks_of(p.N_q * p.H),
                                        dim3(kRowWarps * 32), 0, stream, p, mean)) {
    return error;
  }
  const Rows rows{p.rowptr, p.N_q, p.E};
  if (reads_fours(p) && has_fours(p.grad_output, p.d_v)) {
    const QueryGradients<T, 4> op{p, mean, rows, p.H};
    return sum_rows(op, numbers, values, p.F, stream);
  }
  const QueryGradients<T, 1> op{p, mean, rows, p.H};
  return sum_rows(op, numbers, values, p.F, stream);
}

// Values of a row: [F], the gradient of the key's features, and [d_v], that of the value.
template <typename T, int kWidth>
struct KeyGradients {
  EdgeKeyGradientParams<T> p;
  Rows rows;
  int64_t H;

  __device__ __forceinline__ Values<T> values_of(int64_t j, int64_t h) const {
    return {p.grad_key_features + (j * H + h) * p.F, p.grad_value + (j * H + h) * p.d_v};
  }
  __device__ __forceinline__ Values<T> values_at(T* memory) const { return {memory, memory + p.F}; }

  // Adds up, over the edges, their number `which` of three times rows of targets.
  __device__ __forceinline__ void spread(const Piece& piece, int which, const T* of_targets,
                                         int64_t width, T* to, int lane) const {
    const int64_t h = piece.h;
    add_rows<kWidth>(piece.begin, piece.end, width, to, lane, [&](int64_t k) {
      const T factor = p.of_edges[(3 * p.by_source[k] + which) * H + h];
      const T* row = of_targets + (p.target[k] * H + h) * width;
      return ScaledRow<T>{factor == 0 ? nullptr : row, factor};  // hidden: may be NaN
    });
  }

  __device__ __forceinline__ void sum(const Piece& piece, double (&numbers)[2],
                                      const Values<T>& values, int lane) const {
    double logits = 0;
    for (int64_t k = piece.begin + lane; k < piece.end; k += 32) {
      logits += static_cast<double>(p.of_edges[3 * p.by_source[k] * H + piece.h]);
    }
    numbers[0] = sum_of_lanes(logits);
    numbers[1] = 0;
    spread(piece, 1, p.query_features, p.F, values.first, lane);
    spread(piece, 2, p.grad_output, p.d_v, values.second, lane);
  }

  __device__ __forceinline__ void finish(int64_t j, int64_t h, const double (&numbers)[2],
                                         int lane) const {
    if (lane == 0) p.grad_key_logits[j * H + h] = static_cast<T>(numbers[0]);
  }

  __device__ __forceinline__ void merge(int64_t j, int64_t h, const Parts<T>& parts,
                                        int lane) const {
    double numbers[2] = {};
    for (int64_t k = 0; k < parts.pieces.count; ++k) numbers[0] += parts.numbers_of(k)[0];
    finish(j, h, numbers, lane);
    const Values<T> to = values_of(j, h);
    for (int64_t column = lane; column < parts.width; column += 32) {
      T total = 0;
      for (int64_t k = 0; k < parts.pieces.count; ++k) total += parts.values_of(k)[column];
      if (column < p.F) {
        to.first[column] = total;
      } else {
        to.second[column - p.F] = total;
      }
    }
  }
};

template <typename T>
const char* key_gradients(const EdgeKeyGradientParams<T>& p, double* numbers, T* values,
                          Stream stream) {
  const Rows rows{p.colptr, p.N_k, p.E};
  if (has_fours(p.query_features, p.F) && has_fours(p.grad_output, p.d_v)) {
    const KeyGradients<T, 4> op{p, rows, p.H};
    return sum_rows(op, numbers, values, p.F + p.d_v, stream);
  }
  const KeyGradients<T, 1> op{p, rows, p.H};
  return sum_rows(op, numbers, values, p.F + p.d_v, stream);
}

}  // namespace

const char* edge_forward(const EdgeForwardParams<float>&, double*, float*, Stream);
const char* edge_forward(const EdgeForwardParams<double>&, double*, double*, Stream);

const EdgeKernelsOf<float> edge_kernels_of_float = {edge_forward, query_gradients<float>,
                                                    key_gradients<float>};
const EdgeKernelsOf<double> edge_kernels_of_double = {edge_forward, query_gradients<double>,
                                                      key_gradients<double>};

}  // namespace ikattn::cuda
