// The attention weights of calls in 16 bits, per head or averaged over heads: a block has 64 x 64
// of them. Scores are products by mma.sync of the features that the normalizers were made of, so
// that a row adds up to 1; the rest is in float32, and a weight is rounded once.
#include "attention/cuda/tensor_cores/pairs.h"
#include "attention/cuda/tensor_cores/weights.h"

namespace ikattn::cuda {
namespace {

constexpr int kChunks = kStep / 16;  // chunks of 16 keys in a tile
constexpr int64_t kZeros = 8;        // columns of the value, which is nothing but zeros

// Loads a lane's 16 bytes of a row of features, zeros of a row that is not there.
__device__ __forceinline__ uint4 load_piece(const Half* rows, int64_t row, int64_t count, int width,
                                            int column) {
  return row < count ? load_vector<uint4>(rows + row * width + column) : make_uint4(0, 0, 0, 0);
}

// Computes the scores of a warp's 16 queries and the 64 keys of a tile. A lane has eight
// neighbouring columns of a row at once, which stand at its inner places of two products: which
// column stands where is of no account, as both operands agree.
//   queries [L][width], keys [S][width]
__device__ __forceinline__ void make_scores(const Half* queries, int64_t i, int64_t L,
                                            const Half* keys, int64_t j, int64_t S, int width,
                                            float (&scores)[kChunks][2][4]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll 1
  for (int column = 8 * t; column < width; column += 32) {
    const uint4 low = load_piece(queries, i + g, L, width, column);
    const uint4 high = load_piece(queries, i + g + 8, L, width, column);
    const uint32_t first[4] = {low.x, high.x, low.y, high.y};
    const uint32_t second[4] = {low.z, high.z, low.w, high.w};
    uint4 pieces[kChunks][2];  // all under way before one is looked at
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        pieces[chunk][n] = load_piece(keys, j + 16 * chunk + 8 * n + g, S, width, column);
      }
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const uint4 piece = pieces[chunk][n];
        mma_m16n8k16<Half>(scores[chunk][n], first, piece.x, piece.y);
        mma_m16n8k16<Half>(scores[chunk][n], second, piece.z, piece.w);
      }
    }
  }
}

// Normalizers of a thread's two rows: their log Z in two parts.
struct RowNormalizers {
  float high[2], low[2];

  __device__ __forceinline__ RowNormalizers(const double* normalizers, int64_t i, int64_t L) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const double of_row = i + 8 * half < L ? normalizers[i + 8 * half] : 0;
      high[half] = static_cast<float>(of_row);
      low[half] =
          is_finite(of_row) ? static_cast<float>(of_row - static_cast<double>(high[half])) : 0.0f;
    }
  }
};

// Adds dropout_scale times the weights of a chunk of 16 keys, from its scores.
//   scales: similarity = score score square + eps
__device__ __forceinline__ void add_weights(const FragmentPairs<Pairs::kGeneral>& at,
                                            const RowNormalizers& rows, const float* terms,
                                            const float* lows, int64_t S_left,
                                            const GeneralScales& scales, float dropout_scale,
                                            const float (&scores)[2][4], float (&sums)[2][4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int column = at.column_of(n, c);
      if (column >= S_left) continue;
      const float exponential = at.visible.exponential(
          at.row_of(n, c), column, terms[column], lows[column], rows.high[c / 2], rows.low[c / 2]);
      if (exponential == 0 || at.drops(n, c)) continue;  // whatever the key holds
      const float score = scores[n][c];
      sums[n][c] += (score * score * scales.square + scales.eps) * exponential * dropout_scale;
    }
  }
}

__global__ void __launch_bounds__(kFoldedThreads, 2)
    weight_kernel(WeightsParams params, const Half* phi_q, const Half* phi_k, const float* terms,
                  const float* lows, const double* normalizers, int width) {
  const int64_t row_blocks = (params.L + kStep - 1) / kStep;
  const int64_t key_blocks = (params.S + kStep - 1) / kStep;
  int64_t index = blockIdx.x;
  const int64_t j0 = index % key_blocks * kStep;
  index /= key_blocks;
  const int64_t i0 = index % row_blocks * kStep;
  index /= row_blocks;
  const int64_t own_heads = params.average_heads ? 1 : params.H;
  const int64_t b = index / own_heads, own_head = index % own_heads;
  const int row0 = static_cast<int>(threadIdx.x) / 32 * 16, g = threadIdx.x % 32 / 4;
  const float norm = 1.0f / static_cast<float>(4 * params.M);
  const GeneralScales scales = {norm * norm, static_cast<float>(params.eps)};
  const float share = params.average_heads ? 1.0f / static_cast<float>(params.H) : 1.0f;
  const float dropout_scale = share * static_cast<float>(dropout_rescale(params.dropout_threshold));
  float sums[kChunks][2][4] = {};
  const bool has_pairs = !params.is_causal || j0 < i0 + kStep;
  const int64_t end = has_pairs ? (params.average_heads ? params.H : own_head + 1) : own_head;
#pragma unroll 1
  for (int64_t h = own_head; h < end; ++h) {
    const int64_t bh = b * params.H + h, bk = key_head_of(params, bh);
    float scores[kChunks][2][4] = {};
    make_scores(phi_q + bh * params.L * width, i0 + row0, params.L, phi_k + bk * params.S * width,
                j0, params.S, width, scores);
    const RowNormalizers rows(normalizers + bh * params.L, i0 + row0 + g, params.L);
    const TileVisibility<Pairs::kGeneral> visible(params, b, h, i0, j0);
    const int64_t first = bk * padded_tokens(params.S) + j0;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const FragmentPairs<Pairs::kGeneral> at(params, visible, bh, i0, j0, row0, 16 * chunk);
      add_weights(at, rows, terms + first, lows + first, params.S - j0, scales, dropout_scale,
                  scores[chunk], sums[chunk]);
    }
    __syncwarp();  // lanes that pairs have sent different ways come together for the next product
  }
  const RowPairs out(params.weights);
  const int64_t* stride = params.weights.stride;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t i = i0 + row0 + g + 8 * half;
    if (i >= params.L) continue;
    out.store<kStep>(b * stride[0] + own_head * stride[1] + i * stride[2], j0, params.S,
                     [&](int n) {
                       const float (&tile)[4] = sums[n / 2][n % 2];
                       return make_float2(tile[2 * half], tile[2 * half + 1]);
                     });
  }
}

}  // namespace

bool has_weights_on_tensor_cores(const WeightsParams& params) {
  AttentionParams call = params;
  call.value = params.query;  // any tensor of the same type
  call.d_v = kZeros;
  call.batch_invariant = true;
  const ElementType type = params.query.type;
  const bool is_half = type == ElementType::kBFloat16 || type == ElementType::kFloat16;
  return is_half && why_no_tensor_cores(call) == nullptr && is_on(Family::kMma) &&
         is_on(Family::kWeights);
}

const char* normalizer_call(const WeightsParams& params, const DeviceExecutor& executor,
                            AttentionParams& call) {
  call = params;
  call.dropout_threshold = 0;
  call.batch_invariant = true;  // the general form
  call.d_v = kZeros;
  // Rows that all heads share.
  uint32_t* zeros = executor.take<uint32_t>(params.S * kZeros / 2);
  call.value = Array{zeros, params.query.type, {0, 0, kZeros, 1}};
  const int64_t rows = params.B * params.H * params.L;
  call.output = Array{executor.take<uint16_t>(rows * kZeros),
                      params.query.type,
                      {params.H * params.L * kZeros, params.L * kZeros, kZeros, 1}};
  call.log_normalizer = Array{
      executor.take<double>(rows), ElementType::kFloat64, {params.H * params.L, params.L, 1, 0}};
  return clear_bounds(zeros, params.S * kZeros / 2, executor.stream);
}

const char* weights_on_tensor_cores(const WeightsParams& params, const AttentionParams& call,
                                    const FoldedTokens& tokens, Stream stream) {
  const int64_t tiles = params.B * (params.average_heads ? 1 : params.H) *
                        ceil_div(params.L, kStep) * ceil_div(params.S, kStep);
  return launch(weight_kernel, dim3(static_cast<unsigned>(tiles)), dim3(kFoldedThreads), 0, stream,
                params, tokens.phi_q, tokens.phi_k, tokens.forms.terms, tokens.forms.lows,
                static_cast<const double*>(call.log_normalizer.data),
                static_cast<int>(padded_columns(2 * params.M)));
}

}  // namespace ikattn::cuda
