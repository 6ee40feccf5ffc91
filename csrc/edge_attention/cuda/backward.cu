// Gradients: a warp for every target and head, with what every edge gives its source; then a warp
// for every source and head.
#include "edge_attention/cuda/rows.h"
#include "edge_attention/cuda/scores.h"

namespace ikattn::cuda {
namespace {

// The gradient of a head's weights, by weight. Of a row it is one warp's, whatever its length.
template <typename T>
__global__ void __launch_bounds__(kRowWarps * 32)
    mean_kernel(EdgeQueryGradientParams<T> p, double* mean) {
  const int64_t index = warp_number(), i = index / p.H, h = index % p.H;
  if (i >= p.N_q) return;
  const int lane = threadIdx.x % 32;
  const int64_t row = (i * p.H + h) * p.d_v;
  double sum = 0;
  const T product = warp_dot(p.output + row, p.grad_output + row, p.d_v, lane);
  if (p.grad_weights != nullptr) {
#pragma unroll 1
    for (int64_t e = p.rowptr[i]; e < p.rowptr[i + 1]; ++e) {
      const T s = product_of(p, i, e, h, lane);
      const T weight = weight_of(p, s, bias_of(p, e, h), p.log_normalizer[i * p.H + h]);
      const int64_t at = e * p.H + h;
      sum += static_cast<double>(dropped(p, at, weight)) * static_cast<double>(p.grad_weights[at]);
    }
  }
  if (lane == 0) mean[i * p.H + h] = sum + static_cast<double>(product);
}

template <typename T>
struct QueryGradients {
  EdgeQueryGradientParams<T> p;
  const double* mean;  // [N_q, H]
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
    const T* grad_output = p.grad_output + (i * H + h) * p.d_v;
    const T of_head = static_cast<T>(mean[i * H + h]);
    // 1. What every edge gives.
#pragma unroll 1
    for (int64_t e = begin; e < end; ++e) {
      const int64_t at = e * H + h;
      const T bias = bias_of(p, e, h), s = product_of(p, i, e, h, lane);
      const T* value = p.value + (p.source[e] * H + h) * p.d_v;
      T gradient = warp_dot(grad_output, value, p.d_v, lane);
      if (p.grad_weights != nullptr) gradient += p.grad_weights[at];
      const T weight = weight_of(p, s, bias, p.log_normalizer[i * H + h]);
      T grad_logit = weight * (dropped(p, at, gradient) - of_head);
      const T slope = p.exponential ? T(1) : s / ((s * s + p.eps) * static_cast<T>(p.F));
      T grad_product = grad_logit * slope;
      if (bias == -INFINITY) grad_logit = grad_product = 0;  // what is hidden may be NaN
      if (lane == 0) {
        T* of_edge = p.of_edges + 3 * e * H + h;
        of_edge[0] = grad_logit;
        of_edge[H] = grad_product;
        of_edge[2 * H] = dropped(p, at, weight);
      }
    }
    __syncwarp();
    // 2. The gradient of the query's features, a feature a lane.
    for (int64_t f = lane; f < p.F; f += 32) {
      T total = 0;
#pragma unroll 1
      for (int64_t e = begin; e < end; ++e) {
        const T grad_product = p.of_edges[(3 * e + 1) * H + h];
        if (grad_product == 0) continue;
        total += grad_product * p.key_features[(p.source[e] * H + h) * p.F + f];
      }
      values.first[f] = total;
    }
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
  const char* error =
      launch(mean_kernel<T>, blocks_of(p.N_q * p.H), dim3(kRowWarps * 32), 0, stream, p, mean);
  if (error != nullptr) return error;
  const QueryGradients<T> op{p, mean, Rows{p.rowptr, p.N_q, p.E}, p.H};
  return sum_rows(op, numbers, values, p.F, stream);
}

// Values of a row: [F], the gradient of the key's features, and [d_v], that of the value.
template <typename T>
struct KeyGradients {
  EdgeKeyGradientParams<T> p;
  Rows rows;
  int64_t H;

  __device__ __forceinline__ Values<T> values_of(int64_t j, int64_t h) const {
    return {p.grad_key_features + (j * H + h) * p.F, p.grad_value + (j * H + h) * p.d_v};
  }
  __device__ __forceinline__ Values<T> values_at(T* memory) const { return {memory, memory + p.F}; }

  // sum over the edges of what they give, which is number `which` of three, times rows of targets
  __device__ __forceinline__ void spread(const Piece& piece, int which, const T* of_targets,
                                         int64_t width, T* to, int lane) const {
    const auto [j, h, begin, end] = piece;
    for (int64_t c = lane; c < width; c += 32) {
      T total = 0;
      for (int64_t k = begin; k < end; ++k) {
        const T factor = p.of_edges[(3 * p.by_source[k] + which) * H + h];
        if (factor == 0) continue;  // hidden: may be NaN
        total += factor * of_targets[(p.target[k] * H + h) * width + c];
      }
      to[c] = total;
    }
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
  const KeyGradients<T> op{p, Rows{p.colptr, p.N_k, p.E}, p.H};
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
