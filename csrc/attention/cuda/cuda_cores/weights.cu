// The attention weights themselves, per head or averaged over heads: a pass for the normalisers,
// then one block per 64 x 64 weights. The average never holds those of every head.
#include "attention/cuda/cuda_cores/cuda_cores.h"
#include "attention/cuda/cuda_cores/tile_product.h"

namespace ikattn::cuda {
namespace {

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    weights_kernel(WeightsParams params, PreparedTokens<T> tokens, const double* log_normalizers) {
  Shared<T> operands = dynamic_shared<T>();
  const ThreadTile at;
  const int64_t row_blocks = (params.L + kTile - 1) / kTile, F = 2 * params.M;
  const int64_t key_blocks = (params.S + kTile - 1) / kTile;
  int64_t index = blockIdx.x;
  const int64_t j0 = index % key_blocks * kTile;
  index /= key_blocks;
  const int64_t i0 = index % row_blocks * kTile;
  index /= row_blocks;
  const int64_t own_heads = params.average_heads ? 1 : params.H;
  const int64_t b = index / own_heads, own_head = index % own_heads;
  const T norm = T(1) / static_cast<T>(4 * params.M), eps = static_cast<T>(params.eps);
  const T share = params.average_heads ? T(1) / static_cast<T>(params.H) : T(1);
  const T dropout_scale = share * static_cast<T>(dropout_rescale(params.dropout_threshold));
  T sums[kPerThread][kPerThread] = {};
  for (int64_t h = own_head; h < (params.average_heads ? params.H : own_head + 1); ++h) {
    const int64_t bh = b * params.H + h;
    const int64_t key_base = (b * params.key_heads + h * params.key_heads / params.H) * params.S;
    const T* phi_q = tokens.phi_q + (bh * params.L + i0) * F;
    const T* phi_k = tokens.phi_k + key_base * F;
    T s[kPerThread][kPerThread];
    dot_tile<T>(
        at, F, [&](int row, int64_t f) { return i0 + row < params.L ? phi_q[row * F + f] : T(0); },
        [&](int key, int64_t f) { return j0 + key < params.S ? phi_k[(j0 + key) * F + f] : T(0); },
        operands, s);
    const Dropout dropout(params, bh, i0 + at.row_lane / 4 * 16, j0 + at.column_lane / 4 * 16,
                          at.row_lane % 4, at.column_lane % 4, true);
#pragma unroll
    for (int r = 0; r < kPerThread; ++r) {
#pragma unroll
      for (int c = 0; c < kPerThread; ++c) {
        const int64_t i = i0 + at.row(r), j = j0 + at.column(c);
        T mask;
        if (!is_visible(params, b, h, i, j, mask)) continue;
        const T high = tokens.keys.high[key_base + j];
        if (high == minus_infinity<T>()) continue;
        const double log_normalizer = log_normalizers[bh * params.L + i];
        TwoParts<T> reference;
        reference.high = static_cast<T>(log_normalizer);
        reference.low = static_cast<T>(log_normalizer - static_cast<double>(reference.high));
        const T score = s[r][c] * norm;
        const T logit = relative_logit({high, tokens.keys.low[key_base + j]}, mask, reference);
        const T weight = (score * score + eps) * exponential(logit);
        if (dropout.keeps(r, c)) sums[r][c] += weight * dropout_scale;
      }
    }
  }
  const Tokens out(params.weights, b, own_head);
#pragma unroll
  for (int r = 0; r < kPerThread; ++r) {
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) {
      const int64_t i = i0 + at.row(r), j = j0 + at.column(c);
      if (i < params.L && j < params.S) out.store<T>(i, j, sums[r][c]);
    }
  }
}

}  // namespace

template <typename T>
const char* weights_on_cuda_cores(const WeightsParams& given, const DeviceExecutor& executor) {
  WeightsParams params = given;
  const int64_t queries = params.B * params.H * params.L;
  double* log_normalizers = executor.take<double>(queries);
  params.log_normalizer = Array{log_normalizers, ElementType::kFloat64, {0, 0, 0, 0}};
  PreparedTokens<T> tokens;
  if (const char* error = prepare_tokens<T>(params, executor, tokens)) return error;
  if (const char* error = forward_on_cuda_cores<T>(params, executor.stream, tokens)) return error;
  const int64_t tiles = params.B * (params.average_heads ? 1 : params.H) *
                        ceil_div(params.L, kTile) * ceil_div(params.S, kTile);
  const double* read = log_normalizers;
  return launch(weights_kernel<T>, dim3(static_cast<unsigned>(tiles)), dim3(kThreads),
                2 * kDepth * kPitch * int64_t{sizeof(T)}, executor.stream, params, tokens, read);
}

template const char* weights_on_cuda_cores<float>(const WeightsParams&, const DeviceExecutor&);
template const char* weights_on_cuda_cores<double>(const WeightsParams&, const DeviceExecutor&);

}  // namespace ikattn::cuda
