// Attention over edges: a warp for every target and head.
#include "edge_attention/cuda/rows.h"
#include "edge_attention/cuda/scores.h"

namespace ikattn::cuda {
namespace {

template <typename T, int kWidth>
struct Forward {
  EdgeForwardParams<T> p;
  Rows rows;
  int64_t H;
  // The weight of a hidden edge, until weights are scaled: others have no sign.
  static constexpr T kHidden = T(-0.0);

  __device__ __forceinline__ Values<T> values_of(int64_t i, int64_t h) const {
    return {p.output + (i * H + h) * p.d_v, nullptr};
  }
  __device__ __forceinline__ Values<T> values_at(T* memory) const { return {memory, nullptr}; }

  // Sets numbers: the largest logit, and the sum of weights relative to it.
  __device__ __forceinline__ void sum(const Piece& piece, double (&numbers)[2],
                                      const Values<T>& values, int lane) const {
    const auto [i, h, begin, end] = piece;
    // 1. Products, kept where the weights will be, and the largest logit.
    T largest = -INFINITY;
    const EdgeLane at(lane, kWidth);
    visit_products<kWidth>(p, i, h, begin, end, at, [&](int64_t first, const T(&products)[kTurns]) {
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int64_t e = first + turn * kEdgesAtOnce;
        if (e >= end) continue;
        const T bias = bias_of(p, e, h);
        if (at.first == 0) p.weights[e * H + h] = products[turn];
        T logit = bias;
        if (p.exponential && bias != -INFINITY) logit = logit_of(p, bias + products[turn]);
        largest = logit > largest ? logit : largest;
      }
      __syncwarp();
    });
    largest = max_of_lanes(largest);
    __syncwarp();
    // 2. Weights, an edge a lane.
    double total = 0;
#pragma unroll 1
    for (int64_t e = begin + lane; e < end; e += 32) {
      const T bias = bias_of(p, e, h);
      const T weight = weight_of(p, p.weights[e * H + h], bias, static_cast<double>(largest));
      total += static_cast<double>(weight);
      p.weights[e * H + h] = bias == -INFINITY ? kHidden : weight;
    }
    numbers[0] = static_cast<double>(largest);
    numbers[1] = sum_of_lanes(total);
    __syncwarp();
    // 3. Values. What is hidden may be NaN.
    add_rows<kWidth>(begin, end, p.d_v, values.first, lane, [&](int64_t e) {
      const T weight = p.weights[e * H + h];
      const bool is_hidden = weight == 0 && signbit(weight);
      return ScaledRow<T>{is_hidden ? nullptr : value_of(p, e, h), dropped(p, e * H + h, weight)};
    });
    __syncwarp();
  }

  __device__ __forceinline__ void scale_weights(int64_t begin, int64_t end, int64_t h, T factor,
                                                int lane) const {
#pragma unroll 1
    for (int64_t e = begin + lane; e < end; e += 32) {
      const int64_t at = e * H + h;
      const T weight = dropped(p, at, p.weights[at]);
      p.weights[at] = weight == 0 ? T(0) : weight * factor;  // hidden, where the factor is NaN
    }
  }

  __device__ __forceinline__ void finish(int64_t i, int64_t h, const double (&numbers)[2],
                                         int lane) const {
    const double sum = numbers[1];
    if (lane == 0) p.log_normalizer[i * H + h] = sum == 0 ? -INFINITY : log(sum) + numbers[0];
    const T factor = static_cast<T>(sum == 0 ? 1.0 : 1 / sum);
    T* output = values_of(i, h).first;
    for (int64_t c = lane; c < p.d_v; c += 32) output[c] *= factor;
    scale_weights(p.rowptr[i], p.rowptr[i + 1], h, factor, lane);
  }

  __device__ __forceinline__ void merge(int64_t i, int64_t h, const Parts<T>& parts,
                                        int lane) const {
    double largest = -INFINITY, sum = 0;
#pragma unroll 1
    for (int64_t k = 0; k < parts.pieces.count; ++k) {
      const double own = parts.numbers_of(k)[0];
      largest = own > largest ? own : largest;
    }
    const auto factor_of = [&](int64_t k) {
      return largest == -INFINITY ? 1.0 : exp(parts.numbers_of(k)[0] - largest);
    };
#pragma unroll 1
    for (int64_t k = 0; k < parts.pieces.count; ++k) sum += factor_of(k) * parts.numbers_of(k)[1];
    const double scale = sum == 0 ? 1.0 : 1 / sum;
    if (lane == 0) p.log_normalizer[i * H + h] = sum == 0 ? -INFINITY : log(sum) + largest;
    for (int64_t c = lane; c < p.d_v; c += 32) {
      T value = 0;
#pragma unroll 1
      for (int64_t k = 0; k < parts.pieces.count; ++k) {
        value += static_cast<T>(factor_of(k)) * parts.values_of(k)[c];
      }
      values_of(i, h).first[c] = value * static_cast<T>(scale);
    }
    const int64_t begin = p.rowptr[i], end = p.rowptr[i + 1];
#pragma unroll 1
    for (int64_t k = 0; k < parts.pieces.count; ++k) {
      const int64_t cut = (parts.pieces.first + k) * kPieceEdges;
      scale_weights(max(begin, cut), min(end, cut + kPieceEdges), h,
                    static_cast<T>(factor_of(k) * scale), lane);
    }
  }
};

template <typename T, int kWidth>
const char* forward(const EdgeForwardParams<T>& p, double* numbers, T* values, Stream stream) {
  const Forward<T, kWidth> op{p, Rows{p.rowptr, p.N_q, p.E}, p.H};
  return sum_rows(op, numbers, values, p.d_v, stream);
}
template <typename T>
const char* forward_of(const EdgeForwardParams<T>& p, double* numbers, T* values, Stream stream) {
  return reads_fours(p) ? forward<T, 4>(p, numbers, values, stream)
                        : forward<T, 1>(p, numbers, values, stream);
}

}  // namespace

const char* edge_forward(const EdgeForwardParams<float>& p, double* numbers, float* values,
                         Stream stream) {
  return forward_of(p, numbers, values, stream);
}
const char* edge_forward(const EdgeForwardParams<double>& p, double* numbers, double* values,
                         Stream stream) {
  return forward_of(p, numbers, values, stream);
}

EdgeScratch edge_scratch(int64_t E, int64_t H, int64_t width) {
  const int64_t parts = E <= kPieceEdges ? 0 : 2 * cuts(E) * H;
  return {2 * parts, width * parts};
}

}  // namespace ikattn::cuda
