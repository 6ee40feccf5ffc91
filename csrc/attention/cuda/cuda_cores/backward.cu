// The backward pass: one kernel whose blocks own queries, one whose blocks own keys, so that no sum
// depends on the order in which blocks run.
//
//   P_ij = (s_ij^2 + eps) E_ij,  E_ij = exp(logit_ij - log Z_i),  x_ij = dP_ij - delta_i
//   dlog_ij = P_ij x_ij,  ds_ij = 2 s_ij E_ij x_ij
// with dP and P under dropout as factors of the value. For weights, dP is their incoming gradient.
#include "attention/cuda/cuda_cores/cuda_cores.h"
#include "attention/cuda/cuda_cores/tile_product.h"

namespace ikattn::cuda {
namespace {

template <typename T>
__global__ void __launch_bounds__(128, 2)
    row_state_kernel(AttentionBackwardParams params, const T* phi_q, RowState<T> rows) {
  const int lane = threadIdx.x % 32;
  const int64_t index = int64_t{blockIdx.x} * 4 + threadIdx.x / 32;
  if (index >= params.B * params.H * params.L) return;  // the whole warp
  const int64_t i = index % params.L, bh = index / params.L, F = 2 * params.M;
  const Tokens output(params.output, bh / params.H, bh % params.H);
  const Tokens gradient(params.grad_output, bh / params.H, bh % params.H);
  double delta = 0;
  bool finite = true;
  for (int64_t c = lane; c < params.d_v; c += 32) {
    const double incoming = gradient.load<double>(i, c);
    finite = finite && is_finite(incoming);
    delta += output.load<double>(i, c) * incoming;
  }
  for (int64_t f = lane; f < F; f += 32) finite = finite && is_finite(phi_q[index * F + f]);
  delta = is_of_weights(params) ? output.load<double>(i, 0) : sum_of_lanes(delta);
  finite = finite && is_finite(delta);
  finite = __all_sync(0xffffffffu, finite);
  if (lane != 0) return;
  const double log_normalizer = static_cast<const double*>(params.log_normalizer.data)[index];
  store_split(rows.log_normalizer, index, finite ? log_normalizer : static_cast<double>(NAN));
  rows.delta[index] = finite ? static_cast<T>(delta) : T(0);
}

// One tile of pairs. Rows are queries or keys.
template <typename T>
struct PairTile {
  T weights[kPerThread][kPerThread];      // P under dropout: factors of the value
  T grad_logits[kPerThread][kPerThread];  // dlog
  T grad_scores[kPerThread][kPerThread];  // ds
};

template <typename T, bool kQueriesInRows>
__device__ __forceinline__ void pair_tile(const AttentionBackwardParams& params,
                                          const PreparedTokens<T>& tokens, const RowState<T>& rows,
                                          const ThreadTile& at, int64_t b, int64_t h, int64_t i0,
                                          int64_t j0, Shared<T> operands, PairTile<T>& tile) {
  const int64_t F = 2 * params.M, bh = b * params.H + h;
  const int64_t key_base = (b * params.key_heads + h * params.key_heads / params.H) * params.S;
  const T* phi_q = tokens.phi_q + bh * params.L * F;
  const T* phi_k = tokens.phi_k + key_base * F;
  const Tokens value(params.value, b, h * params.G / params.H);
  const Tokens gradient(params.grad_output, b, h);
  const auto zero_unless_finite = [](T x) { return is_finite(x) ? x : T(0); };
  const auto query_features = [&](int row, int64_t f) {
    return i0 + row < params.L ? zero_unless_finite(phi_q[(i0 + row) * F + f]) : T(0);
  };
  const auto key_features = [&](int key, int64_t f) {
    return j0 + key < params.S ? phi_k[(j0 + key) * F + f] : T(0);
  };
  const auto gradients = [&](int row, int64_t c) {
    return i0 + row < params.L ? zero_unless_finite(gradient.load<T>(i0 + row, c)) : T(0);
  };
  const auto values = [&](int key, int64_t c) {
    return j0 + key < params.S ? zero_unless_finite(value.load<T>(j0 + key, c)) : T(0);
  };
  T scores[kPerThread][kPerThread], grad_weights[kPerThread][kPerThread];
  if constexpr (kQueriesInRows) {
    dot_tile<T>(at, F, query_features, key_features, operands, scores);
    dot_tile<T>(at, params.d_v, gradients, values, operands, grad_weights);
  } else {
    dot_tile<T>(at, F, key_features, query_features, operands, scores);
    dot_tile<T>(at, params.d_v, values, gradients, operands, grad_weights);
  }
  const int query_lane = kQueriesInRows ? at.row_lane : at.column_lane;
  const int key_lane = kQueriesInRows ? at.column_lane : at.row_lane;
  const Dropout dropout(params, bh, i0 + query_lane / 4 * 16, j0 + key_lane / 4 * 16,
                        query_lane % 4, key_lane % 4, kQueriesInRows);
  const T dropout_scale = static_cast<T>(dropout_rescale(params.dropout_threshold));
  const T norm = T(1) / static_cast<T>(4 * params.M), eps = static_cast<T>(params.eps);
#pragma unroll
  for (int r = 0; r < kPerThread; ++r) {
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) {
      const int64_t i = i0 + (kQueriesInRows ? at.row(r) : at.column(c));
      const int64_t j = j0 + (kQueriesInRows ? at.column(c) : at.row(r));
      tile.weights[r][c] = tile.grad_logits[r][c] = tile.grad_scores[r][c] = 0;
      T mask;
      if (!is_visible(params, b, h, i, j, mask)) continue;
      const T high = tokens.keys.high[key_base + j];
      if (high == minus_infinity<T>()) continue;
      const int64_t row = bh * params.L + i;
      const T similarity_weight = exponential(
          relative_logit<T>({high, tokens.keys.low[key_base + j]}, mask,
                            {rows.log_normalizer.high[row], rows.log_normalizer.low[row]}));
      const T score = scores[r][c] * norm;
      const T weight = (score * score + eps) * similarity_weight;
      const T survives = dropout.keeps(r, c) ? dropout_scale : T(0);
      const T incoming = !is_of_weights(params) ? grad_weights[r][c]
                         : survives == T(0)     ? T(0)
                                                : weight_gradient<T>(params, b, h, i, j);
      const T x = incoming * survives - rows.delta[row];
      tile.weights[r][c] = weight * survives;
      tile.grad_logits[r][c] = weight * x;
      tile.grad_scores[r][c] = 2 * norm * score * similarity_weight * x;
    }
  }
}

template <typename T>
constexpr int64_t backward_shared() {
  return (2 * kDepth * kPitch + 2 * kTile * kPitch) * int64_t{sizeof(T)};
}

// grad_phi_q [B, H, L, F]: a block owns 64 queries and 64 features.
template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    query_gradient_kernel(AttentionBackwardParams params, PreparedTokens<T> tokens,
                          RowState<T> rows, T* grad_phi_q) {
  Shared<T> operands = dynamic_shared<T>();
  Shared<T> grad_scores = operands + 2 * kDepth * kPitch;  // [64 queries][64 keys]
  Shared<T> features = grad_scores + kTile * kPitch;       // [64 keys][64 features]
  const ThreadTile at;
  const int64_t row_blocks = (params.L + kTile - 1) / kTile, F = 2 * params.M;
  const int64_t bh = blockIdx.x / row_blocks, i0 = blockIdx.x % row_blocks * kTile;
  const int64_t b = bh / params.H, h = bh % params.H;
  const int64_t feature0 = int64_t{blockIdx.y} * kTile;
  const T* phi_k = tokens.phi_k + key_head_of(params, bh) * params.S * F;
  T sums[kPerThread][kPerThread] = {};
  const int64_t end = visible_keys(params, i0);
  for (int64_t j0 = 0; j0 < end; j0 += kTile) {
    PairTile<T> tile;
    pair_tile<T, true>(params, tokens, rows, at, b, h, i0, j0, operands, tile);
#pragma unroll
    for (int r = 0; r < kPerThread; ++r) {
#pragma unroll
      for (int c = 0; c < kPerThread; ++c) {
        grad_scores[at.row(r) * kPitch + at.column(c)] = tile.grad_scores[r][c];
      }
    }
    fill_tile<T>(features, [&](int key, int f) {
      return j0 + key < params.S && feature0 + f < F ? phi_k[(j0 + key) * F + feature0 + f] : T(0);
    });
    __syncthreads();
    accumulate_tile<T>(at, grad_scores, features, sums);
  }
#pragma unroll
  for (int r = 0; r < kPerThread; ++r) {
    const int64_t i = i0 + at.row(r);
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) {
      const int64_t f = feature0 + slice_column(at, c);
      if (i < params.L && f < F) grad_phi_q[(bh * params.L + i) * F + f] = sums[r][c];
    }
  }
}

// grad_phi_k [B, key_heads, S, F], grad_value and the gradients of the keys' logits: a block owns
// 64 keys and 64 features, or 64 columns of the value. The first one does the logits too.
template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    key_gradient_kernel(AttentionBackwardParams params, PreparedTokens<T> tokens, RowState<T> rows,
                        PairGradients<T> gradients, int feature_slices) {
  Shared<T> operands = dynamic_shared<T>();
  Shared<T> left = operands + 2 * kDepth * kPitch;  // [64 keys][64 queries]
  Shared<T> right = left + kTile * kPitch;          // [64 queries][64 features or columns]
  const ThreadTile at;
  const int64_t key_blocks = (params.S + kTile - 1) / kTile, F = 2 * params.M;
  const int64_t bk = blockIdx.x / key_blocks, j0 = blockIdx.x % key_blocks * kTile;
  const int64_t b = bk / params.key_heads, key_head = bk % params.key_heads;
  const bool of_value = static_cast<int>(blockIdx.y) >= feature_slices;
  const int64_t column0 = (int64_t{blockIdx.y} - (of_value ? feature_slices : 0)) * kTile;
  const int64_t group = params.H / params.key_heads;
  T sums[kPerThread][kPerThread] = {};
  T logit_sums[kPerThread] = {};
  for (int64_t h = key_head * group; h < (key_head + 1) * group; ++h) {
    const int64_t bh = b * params.H + h;
    const T* phi_q = tokens.phi_q + bh * params.L * F;
    const Tokens gradient(params.grad_output, b, h);
    for (int64_t i0 = params.is_causal ? j0 : 0; i0 < params.L; i0 += kTile) {
      PairTile<T> tile;
      pair_tile<T, false>(params, tokens, rows, at, b, h, i0, j0, operands, tile);
#pragma unroll
      for (int r = 0; r < kPerThread; ++r) {
#pragma unroll
        for (int c = 0; c < kPerThread; ++c) {
          left[at.row(r) * kPitch + at.column(c)] =
              of_value ? tile.weights[r][c] : tile.grad_scores[r][c];
          logit_sums[r] += tile.grad_logits[r][c];
        }
      }
      fill_tile<T>(right, [&](int query, int column) {
        const int64_t i = i0 + query, at_column = column0 + column;
        if (i >= params.L || at_column >= (of_value ? params.d_v : F)) return T(0);
        const T x = of_value ? gradient.load<T>(i, at_column) : phi_q[i * F + at_column];
        return is_finite(x) ? x : T(0);  // its row is poisoned
      });
      __syncthreads();
      accumulate_tile<T>(at, left, right, sums);
    }
  }
  const Tokens grad_value(params.grad_value, b, key_head);
#pragma unroll
  for (int r = 0; r < kPerThread; ++r) {
    const int64_t j = j0 + at.row(r);
    const T logit_sum = sum_of_lanes<kRowLanes>(logit_sums[r]);
    if (j >= params.S) continue;
    if (blockIdx.y == 0 && at.column_lane == 0) gradients.logits[bk * params.S + j] = logit_sum;
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) {
      const int64_t column = column0 + slice_column(at, c);
      if (!of_value) {
        if (column < F) gradients.phi_k[(bk * params.S + j) * F + column] = sums[r][c];
      } else if (column < params.d_v && params.grad_value.type != ElementType::kNone) {
        grad_value.store<T>(j, column, sums[r][c]);
      }
    }
  }
}

// grad_mask: a block owns a tile of the mask, or of what it is broadcast from, and passes over all
// that is summed into it, always in the same order.
template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    mask_gradient_kernel(AttentionBackwardParams params, PreparedTokens<T> tokens,
                         RowState<T> rows) {
  Shared<T> operands = dynamic_shared<T>();
  // [64][64], in the room of two tiles of T
  Shared<double> sums = shared_cast<double>(operands + 2 * kDepth * kPitch);
  const ThreadTile at;
  const int64_t* stride = params.grad_mask.stride;
  const bool over_b = stride[0] == 0, over_h = stride[1] == 0;
  const bool over_i = stride[2] == 0, over_j = stride[3] == 0;
  const int64_t row_blocks = (params.L + kTile - 1) / kTile;
  const int64_t key_blocks = (params.S + kTile - 1) / kTile;
  const int64_t own_rows = over_i ? 1 : row_blocks, own_keys = over_j ? 1 : key_blocks;
  int64_t index = blockIdx.x;
  const int64_t key_block = index % own_keys;
  index /= own_keys;
  const int64_t row_block = index % own_rows;
  index /= own_rows;
  const int64_t own_heads = over_h ? 1 : params.H;
  const int64_t head = index % own_heads, batch = index / own_heads;

  double total[kPerThread][kPerThread] = {};  // a sum of many terms
  for (int64_t b = over_b ? 0 : batch; b < (over_b ? params.B : batch + 1); ++b) {
    for (int64_t h = over_h ? 0 : head; h < (over_h ? params.H : head + 1); ++h) {
      for (int64_t y = over_i ? 0 : row_block; y < (over_i ? row_blocks : row_block + 1); ++y) {
        for (int64_t x = over_j ? 0 : key_block; x < (over_j ? key_blocks : key_block + 1); ++x) {
          if (params.is_causal && x > y) continue;
          PairTile<T> tile;
          pair_tile<T, true>(params, tokens, rows, at, b, h, y * kTile, x * kTile, operands, tile);
#pragma unroll
          for (int r = 0; r < kPerThread; ++r) {
#pragma unroll
            for (int c = 0; c < kPerThread; ++c) {
              total[r][c] += static_cast<double>(tile.grad_logits[r][c]);
            }
          }
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kPerThread; ++r) {
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) {
      sums[at.row(r) * kPitch + at.column(c)] = total[r][c];
    }
  }
  __syncthreads();
  for (int cell = threadIdx.x; cell < kTile * kTile; cell += kThreads) {
    const int row = cell / kTile, column = cell % kTile;
    if ((over_i && row > 0) || (over_j && column > 0)) continue;
    const int64_t i = row_block * kTile + row, j = key_block * kTile + column;
    if ((!over_i && i >= params.L) || (!over_j && j >= params.S)) continue;
    double sum = 0;
    for (int y = row; y < (over_i ? kTile : row + 1); ++y) {
      for (int x = column; x < (over_j ? kTile : column + 1); ++x) sum += sums[y * kPitch + x];
    }
    store_element<double>(params.grad_mask,
                          batch * stride[0] + head * stride[1] + i * stride[2] + j * stride[3],
                          sum);
  }
}

// The gradients of the keys' logits as those of key_bias.
template <typename T>
__global__ void __launch_bounds__(128, 2)
    bias_gradient_kernel(AttentionBackwardParams params, const T* grad_logits) {
  const int64_t index = int64_t{blockIdx.x} * 128 + threadIdx.x;
  if (index >= params.B * params.key_heads * params.S) return;
  const int64_t j = index % params.S, bk = index / params.S;
  const int64_t* stride = params.grad_key_bias.stride;
  store_element<T>(
      params.grad_key_bias,
      bk / params.key_heads * stride[0] + bk % params.key_heads * stride[1] + j * stride[2],
      grad_logits[index]);
}

}  // namespace

template <typename T>
const char* prepare_rows(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                         const PreparedTokens<T>& tokens, RowState<T>& rows) {
  const int64_t queries = params.B * params.H * params.L;
  rows = {{executor.take<T>(queries), executor.take<T>(queries)}, executor.take<T>(queries)};
  return launch(row_state_kernel<T>, dim3(static_cast<unsigned>(ceil_div(queries, 4))), dim3(128),
                0, executor.stream, params, tokens.phi_q, rows);
}

template <typename T>
const char* pair_gradients(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                           const PreparedTokens<T>& tokens, const RowState<T>& rows,
                           const PairGradients<T>& gradients) {
  const auto feature_slices = static_cast<unsigned>(ceil_div(2 * params.M, kTile));
  if (wants_queries(params)) {
    const auto blocks = static_cast<unsigned>(params.B * params.H * ceil_div(params.L, kTile));
    if (const char* error =
            launch(query_gradient_kernel<T>, dim3(blocks, feature_slices), dim3(kThreads),
                   backward_shared<T>(), executor.stream, params, tokens, rows, gradients.phi_q)) {
      return error;
    }
  }
  if (!wants_keys(params)) return nullptr;
  const auto blocks =
      static_cast<unsigned>(params.B * params.key_heads * ceil_div(params.S, kTile));
  const auto value_slices =
      static_cast<unsigned>(params.grad_value ? ceil_div(params.d_v, kTile) : 0);
  return launch(key_gradient_kernel<T>, dim3(blocks, feature_slices + value_slices), dim3(kThreads),
                backward_shared<T>(), executor.stream, params, tokens, rows, gradients,
                static_cast<int>(feature_slices));
}

template <typename T>
const char* mask_gradient(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                          const PreparedTokens<T>& tokens, const RowState<T>& rows) {
  const int64_t* stride = params.grad_mask.stride;
  const int64_t tiles = (stride[0] == 0 ? 1 : params.B) * (stride[1] == 0 ? 1 : params.H) *
                        (stride[2] == 0 ? 1 : ceil_div(params.L, kTile)) *
                        (stride[3] == 0 ? 1 : ceil_div(params.S, kTile));
  return launch(mask_gradient_kernel<T>, dim3(static_cast<unsigned>(tiles)), dim3(kThreads),
                backward_shared<T>(), executor.stream, params, tokens, rows);
}

template <typename T>
const char* bias_gradient(const AttentionBackwardParams& params, Stream stream,
                          const T* grad_logits) {
  const int64_t keys = params.B * params.key_heads * params.S;
  return launch(bias_gradient_kernel<T>, dim3(static_cast<unsigned>(ceil_div(keys, 128))),
                dim3(128), 0, stream, params, grad_logits);
}

#define IKATTN_INSTANTIATE(T)                                                                   \
  template const char* prepare_rows<T>(const AttentionBackwardParams&, const DeviceExecutor&,   \
                                       const PreparedTokens<T>&, RowState<T>&);                 \
  template const char* pair_gradients<T>(const AttentionBackwardParams&, const DeviceExecutor&, \
                                         const PreparedTokens<T>&, const RowState<T>&,          \
                                         const PairGradients<T>&);                              \
  template const char* mask_gradient<T>(const AttentionBackwardParams&, const DeviceExecutor&,  \
                                        const PreparedTokens<T>&, const RowState<T>&);          \
  template const char* bias_gradient<T>(const AttentionBackwardParams&, Stream, const T*);
IKATTN_INSTANTIATE(float)
IKATTN_INSTANTIATE(double)
#undef IKATTN_INSTANTIATE

}  // namespace ikattn::cuda
