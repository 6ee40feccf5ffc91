// The backward pass on tensor cores: one kernel whose blocks own queries, one whose blocks own
// keys, so that no sum depends on the order in which blocks run, and no pair leaves the registers.
//
// With S = phi_q . phi_k' of the folded form and Z' = sum_j w:
//   x = (dP - delta) / Z',  dphi_q = 2 sum_j S x phi_k',  dphi_k = 2 c sqrt(e_j) sum_i S x phi_q
//   dV = sum_i (w / Z') dO,  dlog = sum_i w x
// S x is a factor of products, in Half. What it is multiplied with to fit there follows from
// w / Z' <= 1, so that neither magnitudes nor eps can make it overflow:
//   by query: |S| <= sqrt(Z')
//   by key:   sqrt(K e_j) |S| / Z' <= min(1 / (2 sqrt(eps)), sqrt(K / Z'))
// and |dP - delta| <= 2 |dO_i| max_j |V_j|. In the general form, with E = exp(logit) / Z,
//   dphi_q = 2 / (4 M) sum_j s E (dP - delta) phi_k,  |s| E <= 1 / (2 sqrt(eps)), by key likewise.
#include <type_traits>

#include "attention/cuda/folded_tiles.h"

namespace ikattn::cuda {
namespace {

constexpr float kLargestHalf = 32768;  // what bounds are scaled to: rounding may pass a bound

// What a query brings to its pairs.
struct FoldedRows {
  // [B, H, padded L]  folded: 1 / Z', 0: sees nothing, or is none; general: log Z, likewise
  // infinity. NaN: poisoned
  float* normalizer;
  float* low;       // [B, H, padded L]  general: the rest of log Z
  float* delta;     // [B, H, padded L]  sum over d_v of output grad_output
  float* fit;       // [B, H, padded L]  makes S (dP - delta), or s E (dP - delta), fit, by query
  void* gradients;  // [B, H, L, V], T: grad_output; rows that are not finite are zero
  uint32_t* value_bound;  // [B, key_heads]  bits of max |V_j|
  uint32_t* row_bound;    // [B, key_heads]  bits of max |dO_i| min(1 / (2 sqrt(eps)), sqrt(K / Z'))
};

// Bounds that nothing reaches must not make scales of infinity.
__device__ __forceinline__ float fit_of(float bound) {
  return bound > 1e-25f && bound < 1e25f ? kLargestHalf / bound : 1.0f;
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// Not negative: floats of which the order is that of their bits.
__device__ __forceinline__ void raise(uint32_t* bound, float x) {
  if (is_finite(x)) atomicMax(bound, __float_as_uint(x));
}

__global__ void __launch_bounds__(256, 2) clear_bounds_kernel(FoldedRows rows, int64_t key_heads) {
  const int64_t index = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (index < key_heads) rows.value_bound[index] = rows.row_bound[index] = 0;
}

// A warp per key.
__global__ void __launch_bounds__(kFoldedThreads, 2)
    value_bound_kernel(AttentionBackwardParams params, FoldedRows rows) {
  const int lane = threadIdx.x % 32;
  const int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (index >= params.B * params.key_heads * params.S) return;  // the whole warp
  const int64_t bk = index / params.S;
  const Tokens value(params.value, bk / params.key_heads,
                     bk % params.key_heads * params.G / params.key_heads);
  float square = 0;
  for (int64_t c = lane; c < params.d_v; c += 32) {
    const float x = value.load<float>(index % params.S, c);
    square += x * x;
  }
  square = sum_of_warp(square);
  if (lane == 0) raise(rows.value_bound + bk, sqrtf(square));
}

// A warp per query, those of the padding included.
template <typename T, int V>
__global__ void __launch_bounds__(kFoldedThreads, 2)
    folded_row_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows) {
  const int lane = threadIdx.x % 32;
  const int64_t padded = padded_tokens(params.L);
  const int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (index >= params.B * params.H * padded) return;  // the whole warp
  const int64_t bh = index / padded, i = index % padded, bk = key_head_of(params, bh);
  const bool general = (tokens.state[bk] & kGeneral) != 0;
  float normalizer = general ? INFINITY : 0.0f, low = 0, fit = 1;
  double delta = 0;
  if (i < params.L) {  // the whole warp
    const Tokens output(params.output, bh / params.H, bh % params.H);
    const Tokens gradient(params.grad_output, bh / params.H, bh % params.H);
    double square = 0;
    bool finite = true;
    for (int64_t c = lane; c < params.d_v; c += 32) {
      const double incoming = gradient.load<double>(i, c);
      finite = finite && is_finite(incoming);
      delta += output.load<double>(i, c) * incoming;
      square += incoming * incoming;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      delta += __shfl_xor_sync(0xffffffffu, delta, step);
      square += __shfl_xor_sync(0xffffffffu, square, step);
    }
    finite = __all_sync(0xffffffffu, finite);
    T* row = static_cast<T*>(rows.gradients) + (bh * params.L + i) * V;
    for (int c = lane; c < V; c += 32) {
      const bool there = finite && c < params.d_v;
      row[c] = from_float<T>(there ? gradient.load<float>(i, c) : 0.0f);
    }
    const double log_normalizer =
        static_cast<const double*>(params.log_normalizer.data)[bh * params.L + i];
    const float kept = static_cast<float>(dropout_rescale(params.dropout_threshold));
    const float size = static_cast<float>(sqrt(square)) * kept;
    const float limit = 0.5f / sqrtf(static_cast<float>(params.eps));
    float by_query = limit, by_key = limit;  // what bounds the score's factor
    if (log_normalizer != minus_infinity<double>()) {
      if (!finite) {
        normalizer = NAN;
      } else if (general) {
        normalizer = static_cast<float>(log_normalizer);
        if (is_finite(log_normalizer)) {
          low = static_cast<float>(log_normalizer - static_cast<double>(normalizer));
        }
      } else {
        normalizer =
            static_cast<float>(exp(static_cast<double>(tokens.largest[bk]) -
                                   static_cast<double>(tokens.log_scale) - log_normalizer));
        const float root = sqrtf(normalizer), scaled_root = tokens.root_scale * root;
        by_query = root > 0 ? 1 / root : 0.0f;
        by_key = scaled_root < limit ? scaled_root : limit;
      }
      if (lane == 0 && normalizer == normalizer) raise(rows.row_bound + bk, size * by_key);
    }
    if (!finite) delta = 0;
    fit = fit_of(2 * size * __uint_as_float(rows.value_bound[bk]) * by_query);
  }
  if (lane != 0) return;
  rows.normalizer[index] = normalizer;
  rows.low[index] = low;
  rows.delta[index] = static_cast<float>(delta);
  rows.fit[index] = fit;
}

// --- Queries: grad_phi_q

template <int F, int V, Pairs kPairs>
struct QueryLayout {
  static constexpr int kRowTiles = kPairs == Pairs::kGeneral ? 1 : kRowTilesFor<V>;
  static constexpr int kQueries = kWarps * kRowTiles * 16;
  static constexpr uint32_t kGradients = kQueries * 2 * F;  // behind phi_q
  static constexpr uint32_t kStages0 = kGradients + kQueries * 2 * V;
  static constexpr uint32_t kValueTile = kStep * 2 * F;  // behind the keys
  static constexpr uint32_t kTerms = kValueTile + kStep * 2 * V, kLows = kTerms + kStep * 4;
  static constexpr uint32_t kStage = kPairs == Pairs::kGeneral ? kLows + kStep * 4 : kTerms;
  static constexpr int64_t kBytes = kStages0 + kStages * int64_t{kStage};
};

template <typename T, int F, int V, Pairs kPairs>
__global__ void __launch_bounds__(kFoldedThreads, 2)
    folded_query_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows,
                        float* grad_phi_q) {
  using L = QueryLayout<F, V, kPairs>;
  constexpr int kRowTiles = L::kRowTiles, kQueries = L::kQueries;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int64_t row_blocks = (params.L + kQueries - 1) / kQueries;
  const int64_t bh = blockIdx.x / row_blocks;
  // The last rows first: under causality they have the most to do.
  const int64_t i0 = (row_blocks - 1 - blockIdx.x % row_blocks) * kQueries;
  const int64_t b = bh / params.H, h = bh % params.H, bk = key_head_of(params, bh);
  const uint32_t state = tokens.state[bk];
  if (is_of_other_form<kPairs>(state)) return;  // the whole block

  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const RowCopy<F> feature_rows(F, F);
  const RowCopy<V> gradient_rows(V, V);
  const RowCopy<V> value_rows(params.value.stride[2], static_cast<int>(params.d_v));
  const Half* phi_k = feature_rows.source(tokens.phi_k + bk * params.S * F);
  const T* value = value_rows.source(::ikattn::cuda::value_rows<T>(params, b, h));
  const auto copy = [&](int tile) {
    const uint32_t base = shared_address(shared + L::kStages0 + tile % kStages * L::kStage);
    const int count = left_of(params.S, tile * int64_t{kStep});
    feature_rows.template begin<kStep>(base, phi_k, count);
    value_rows.template begin<kStep>(base + L::kValueTile, value, count);
    if constexpr (kPairs == Pairs::kGeneral) {
      if (threadIdx.x < kStep / 2) {
        const float* from = threadIdx.x < kStep / 4 ? tokens.terms : tokens.lows;
        cp_async_16(base + L::kTerms + threadIdx.x * 16, from + bk * padded_tokens(params.S) +
                                                             tile * int64_t{kStep} +
                                                             threadIdx.x % (kStep / 4) * 4);
      }
    }
    cp_async_commit();
    phi_k += kStep * F;
    value += kStep * value_rows.stride;
  };
  const int64_t end = params.is_causal ? min(params.S, i0 + kQueries) : params.S;
  const int tiles = static_cast<int>((end + kStep - 1) / kStep);
  if (tiles > 0) {
    const int count = left_of(params.L, i0);
    feature_rows.template begin<kQueries>(
        shared_address(shared), feature_rows.source(tokens.phi_q + (bh * params.L + i0) * F),
        count);
    gradient_rows.template begin<kQueries>(
        shared_address(shared + L::kGradients),
        gradient_rows.source(static_cast<const T*>(rows.gradients) + (bh * params.L + i0) * V),
        count);
    copy(0);
  }
  const uint32_t warp_base = shared_address(shared) + warp * kRowTiles * 16 * (2 * F);
  const uint32_t warp_gradients =
      shared_address(shared + L::kGradients) + warp * kRowTiles * 16 * (2 * V);
  const FragmentPlaces query_places = FragmentPlaces::of_rows(warp_base, 2 * F);
  const FragmentPlaces gradient_places = FragmentPlaces::of_rows(warp_gradients, 2 * V);
  const FragmentPlaces score_places = FragmentPlaces::of_columns(0, 2 * F);
  const FragmentPlaces value_places = FragmentPlaces::of_columns(L::kValueTile, 2 * V);
  const FragmentPlaces key_places = FragmentPlaces::of_rows(0, 2 * F);

  const int64_t warp_row = i0 + warp * kRowTiles * 16;
  const int64_t row_base = bh * padded_tokens(params.L);
  const float kept = static_cast<float>(dropout_rescale(params.dropout_threshold));
  const float norm = 1 / static_cast<float>(4 * params.M);
  float delta[kRowTiles][2], fit[kRowTiles][2];
  [[maybe_unused]] float normalizer[kRowTiles][2], low[kRowTiles][2];
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t i = warp_row + m * 16 + g + 8 * half;
      delta[m][half] = i < params.L ? rows.delta[row_base + i] : 0.0f;
      fit[m][half] = i < params.L ? rows.fit[row_base + i] : 0.0f;
      if constexpr (kPairs == Pairs::kGeneral) {
        fit[m][half] *= norm;
        normalizer[m][half] = i < params.L ? rows.normalizer[row_base + i] : INFINITY;
        low[m][half] = i < params.L ? rows.low[row_base + i] : 0.0f;
      }
    }
  }
  float sums[kRowTiles][F / 8][4] = {};

  for (int tile = 0; tile < tiles; ++tile) {
    Shared<unsigned char> stage = shared + L::kStages0 + tile % kStages * L::kStage;
    cp_async_wait<0>();
    __syncthreads();  // the tile is here, and nobody reads the other stage
    if (tile + 1 < tiles) copy(tile + 1);
    if ((state & kUnclean) != 0) clean_values<T, V>(stage + L::kValueTile);
    const uint32_t base = shared_address(stage);
    const int64_t j0 = tile * int64_t{kStep};
    const TileVisibility<kPairs> visible(params, b, h, i0, j0);
#pragma unroll 1
    for (int chunk = 0; chunk < kStep / 16; ++chunk) {
      float s[kRowTiles][2][4] = {}, x[kRowTiles][2][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            x[m][n][c] = kDrops<kPairs> ? 0 : -delta[m][c / 2];
          }
        }
      }
#pragma unroll
      for (int k = 0; k < F / 16; ++k) {
        uint32_t keys[4];
        ldmatrix_x4(keys, base + score_places.at<2 * F>(0, k) + chunk * (16 * 2 * F));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          uint32_t queries[4];
          ldmatrix_x4(queries, query_places.at<2 * F>(m, k));
          mma_m16n8k16<Half>(s[m][0], queries, keys[0], keys[1]);
          mma_m16n8k16<Half>(s[m][1], queries, keys[2], keys[3]);
        }
      }
#pragma unroll
      for (int k = 0; k < V / 16; ++k) {
        uint32_t values[4];
        ldmatrix_x4(values, base + value_places.at<2 * V>(0, k) + chunk * (16 * 2 * V));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          uint32_t gradients[4];
          ldmatrix_x4(gradients, gradient_places.at<2 * V>(m, k));
          mma_m16n8k16<T>(x[m][0], gradients, values[0], values[1]);
          mma_m16n8k16<T>(x[m][1], gradients, values[2], values[3]);
        }
      }
      [[maybe_unused]] float key_terms[2][2], key_lows[2][2];
      if constexpr (kPairs == Pairs::kGeneral) {
        load_columns(shared_cast<float>(stage + L::kTerms), chunk, key_terms);
        load_columns(shared_cast<float>(stage + L::kLows), chunk, key_lows);
      }
      uint32_t products[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        [[maybe_unused]] FragmentDropout dropout;
        if constexpr (kDrops<kPairs>) {
          dropout = FragmentDropout(params, bh, warp_row + m * 16, j0 + chunk * 16, false);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            float product = x[m][n][c];
            if constexpr (kDrops<kPairs>) {
              product = (dropout.drops(n, c) ? 0 : product * kept) - delta[m][c / 2];
            }
            product *= s[m][n][c] * fit[m][c / 2];
            const int row = (warp * kRowTiles + m) * 16 + g + 8 * (c / 2);
            const int column = chunk * 16 + n * 8 + 2 * t + c % 2;
            if (!visible(row, column)) product = 0;
            if constexpr (kPairs == Pairs::kGeneral) {
              const float high = key_terms[n][c % 2];
              const float mask = product == 0 ? 0 : visible.logit(row, column);
              const float rest = mask + (key_lows[n][c % 2] - low[m][c / 2]);
              const bool hidden =
                  high == minus_infinity<float>() || mask == minus_infinity<float>();
              product = hidden || product == 0
                            ? 0
                            : product * exponential_of(high - normalizer[m][c / 2], rest);
            }
            s[m][n][c] = product;
          }
          products[m][2 * n] = pack<Half>(s[m][n][0], s[m][n][1]);
          products[m][2 * n + 1] = pack<Half>(s[m][n][2], s[m][n][3]);
        }
      }
#pragma unroll
      for (int n = 0; n < F / 16; ++n) {
        uint32_t keys[4];
        ldmatrix_x4_trans(keys, base + key_places.at<2 * F>(0, n) + chunk * (16 * 2 * F));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma_m16n8k16<Half>(sums[m][2 * n], products[m], keys[0], keys[1]);
          mma_m16n8k16<Half>(sums[m][2 * n + 1], products[m], keys[2], keys[3]);
        }
      }
    }
  }

  const int width = static_cast<int>(2 * params.M);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t i = warp_row + m * 16 + g + 8 * half;
      if (i >= params.L) continue;
      const float normalizer_here = rows.normalizer[row_base + i];
      const bool general = kPairs == Pairs::kGeneral;
      const bool blind = normalizer_here == (general ? INFINITY : 0.0f);
      const float scale = 2 * (general ? norm * norm : normalizer_here) / fit[m][half];
      float* row = grad_phi_q + (bh * params.L + i) * width;
#pragma unroll
      for (int n = 0; n < F / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int f = n * 8 + 2 * t + c;
          if (f < width) row[f] = blind ? 0 : sums[m][n][2 * half + c] * scale;
        }
      }
    }
  }
}

// --- Keys: grad_phi_k, grad_value and the gradients of the logits

template <int F, int V, Pairs kPairs>
struct KeyLayout {
  static constexpr uint32_t kGradients = kStep * 2 * F;  // behind phi_q
  static constexpr uint32_t kNormalizer = kGradients + kStep * 2 * V;
  static constexpr uint32_t kDelta = kNormalizer + kStep * 4, kLow = kDelta + kStep * 4;
  static constexpr uint32_t kStage = kLow + (kPairs == Pairs::kGeneral ? kStep * 4 : 0);
  // The block's own values, and keys, lie behind the stages where the registers do not hold them.
  static constexpr bool kHoldsValue = F + V < 192;
  static constexpr bool kHoldsKeys = kHoldsValue || (F + V == 192 && !kDrops<kPairs>);
  static constexpr uint32_t kValue = kStages * kStage;
  static constexpr uint32_t kKeys = kValue + (kHoldsValue ? 0 : kStep * 2 * V);
  static constexpr int64_t kBytes = kKeys + (kHoldsKeys ? 0 : kStep * 2 * F);
};

// A warp owns 16 keys, rows of S^T = phi_k' phi_q^T and dP^T = V dO^T, so that both are A fragments
// of what is summed without being turned.
template <typename T, int F, int V, Pairs kPairs>
__global__ void __launch_bounds__(kFoldedThreads, 2)
    folded_key_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows,
                      const float* logits, PairGradients<float> gradients) {
  using L = KeyLayout<F, V, kPairs>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int64_t key_blocks = (params.S + kStep - 1) / kStep;
  // The first keys first: under causality they have the most to do.
  const int64_t bk = blockIdx.x / key_blocks, j0 = blockIdx.x % key_blocks * kStep;
  const int64_t b = bk / params.key_heads, key_head = bk % params.key_heads;
  const int64_t group = params.H / params.key_heads;
  if (is_of_other_form<kPairs>(tokens.state[bk])) return;  // the whole block

  // The queries of all heads of the group, one tile after the other.
  const int64_t padded = padded_tokens(params.L);
  const int first_tile = params.is_causal ? static_cast<int>(min(j0, padded) / kStep) : 0;
  const int tiles = static_cast<int>(padded / kStep) - first_tile;
  const int steps = tiles * static_cast<int>(group);
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const RowCopy<F> feature_rows(F, F);
  const RowCopy<V> gradient_rows(V, V);
  const auto copy = [&](int step) {
    const uint32_t base = shared_address(shared + step % kStages * L::kStage);
    const int64_t bh = b * params.H + key_head * group + step / tiles;
    const int64_t i0 = int64_t{first_tile + step % tiles} * kStep;
    const int count = left_of(params.L, i0);
    feature_rows.template begin<kStep>(
        base, feature_rows.source(tokens.phi_q + (bh * params.L + i0) * F), count);
    gradient_rows.template begin<kStep>(
        base + L::kGradients,
        gradient_rows.source(static_cast<const T*>(rows.gradients) + (bh * params.L + i0) * V),
        count);
    constexpr int kNumbers = kPairs == Pairs::kGeneral ? 3 : 2;
    if (threadIdx.x < kNumbers * kStep / 4) {
      const int which = threadIdx.x / (kStep / 4);
      const float* from = which == 0 ? rows.normalizer : which == 1 ? rows.delta : rows.low;
      cp_async_16(base + L::kNormalizer + threadIdx.x * 16,
                  from + bh * padded + i0 + threadIdx.x % (kStep / 4) * 4);
    }
    cp_async_commit();
  };
  if (steps > 0) {
    if constexpr (!L::kHoldsKeys) {
      const Half* keys = tokens.phi_k + (bk * params.S + j0) * F;
      feature_rows.template begin<kStep>(shared_address(shared + L::kKeys),
                                         feature_rows.source(keys), left_of(params.S, j0));
    }
    if constexpr (!L::kHoldsValue) {
      const RowCopy<V> rows_of_value(params.value.stride[2], static_cast<int>(params.d_v));
      const T* from = value_rows<T>(params, b, key_head * group) + j0 * rows_of_value.stride;
      rows_of_value.template begin<kStep>(shared_address(shared + L::kValue),
                                          rows_of_value.source(from), left_of(params.S, j0));
    }
    copy(0);
  }
  const FragmentPlaces own_key_places =
      FragmentPlaces::of_rows(shared_address(shared) + L::kKeys + warp * 16 * (2 * F), 2 * F);
  const FragmentPlaces own_value_places =
      FragmentPlaces::of_rows(shared_address(shared) + L::kValue + warp * 16 * (2 * V), 2 * V);
  const FragmentPlaces score_places = FragmentPlaces::of_columns(0, 2 * F);
  const FragmentPlaces gradient_places = FragmentPlaces::of_columns(L::kGradients, 2 * V);
  const FragmentPlaces query_places = FragmentPlaces::of_rows(0, 2 * F);
  const FragmentPlaces output_places = FragmentPlaces::of_rows(L::kGradients, 2 * V);

  const float fit =
      fit_of(2 * __uint_as_float(rows.row_bound[bk]) * __uint_as_float(rows.value_bound[bk]));
  const float kept = static_cast<float>(dropout_rescale(params.dropout_threshold));
  const float four_m = static_cast<float>(4 * params.M);
  [[maybe_unused]] const float norm = 1 / four_m, eps = static_cast<float>(params.eps);
  // The warp's keys, all their features and values, as A fragments.
  const int64_t warp_key = j0 + warp * 16;
  constexpr int kHeldKeys = L::kHoldsKeys ? F / 16 : 0, kHeldValues = L::kHoldsValue ? V / 16 : 0;
  uint32_t phi_k[kHeldKeys + 1][4], value[kHeldValues + 1][4];  // the last is read where it is used
  float key_fit[2], key_terms[2];
  [[maybe_unused]] float key_lows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t j = warp_key + g + 8 * half;
    const bool there = j < params.S;
    const Half* features = tokens.phi_k + (bk * params.S + j) * F + 2 * t;
    const T* values = value_rows<T>(params, b, key_head * group) + j * params.value.stride[2];
#pragma unroll
    for (int k = 0; k < kHeldKeys; ++k) {
      phi_k[k][half] = there ? load_vector<uint32_t>(features + 16 * k) : 0;
      phi_k[k][half + 2] = there ? load_vector<uint32_t>(features + 16 * k + 8) : 0;
    }
#pragma unroll
    for (int k = 0; k < kHeldValues; ++k) {
#pragma unroll
      for (int right = 0; right < 2; ++right) {
        const int column = 16 * k + 8 * right + 2 * t;
        value[k][half + 2 * right] =
            there && column < params.d_v ? load_vector<uint32_t>(values + column) : 0;
      }
    }
    // Folded: sqrt(K e_j), with which the score is bounded. There is nothing to fold in the other.
    const float scale = kPairs == Pairs::kGeneral ? 1.0f
                        : there                   ? tokens.scales[bk * params.S + j] * four_m
                                                  : 0.0f;
    key_fit[half] = scale * fit * (1 / kWeightScale<T>);
    const int64_t padded_j = bk * padded_tokens(params.S) + min(j, params.S - 1);
    key_terms[half] = tokens.terms[padded_j];
    key_lows[half] = tokens.lows[padded_j];
  }
  float key_sums[F / 8][4] = {}, value_sums[V / 8][4] = {}, logit_sums[2] = {};

  for (int step = 0; step < steps; ++step) {
    Shared<unsigned char> stage = shared + step % kStages * L::kStage;
    cp_async_wait<0>();
    __syncthreads();  // the tile is here, and nobody reads the other stage
    if (step + 1 < steps) copy(step + 1);
    const uint32_t base = shared_address(stage);
    Shared<const float> normalizers = shared_cast<float>(stage + L::kNormalizer);
    Shared<const float> deltas = shared_cast<float>(stage + L::kDelta);
    const int64_t h = key_head * group + step / tiles;
    const int64_t i0 = int64_t{first_tile + step % tiles} * kStep;
    const TileVisibility<kPairs> visible(params, b, h, i0, j0);
#pragma unroll 1
    for (int chunk = 0; chunk < kStep / 16; ++chunk) {
      float s[2][4] = {}, x[2][4], normalizer[2][2], delta[2][2];
      load_columns(normalizers, chunk, normalizer);
      load_columns(deltas, chunk, delta);
      [[maybe_unused]] float low[2][2];
      if constexpr (kPairs == Pairs::kGeneral) {
        load_columns(shared_cast<float>(stage + L::kLow), chunk, low);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) x[n][c] = kDrops<kPairs> ? 0 : -delta[n][c % 2];
      }
#pragma unroll
      for (int k = 0; k < F / 16; ++k) {
        uint32_t queries[4];
        ldmatrix_x4(queries, base + score_places.at<2 * F>(0, k) + chunk * (16 * 2 * F));
        uint32_t (&own)[4] = phi_k[min(k, kHeldKeys)];
        if constexpr (!L::kHoldsKeys) ldmatrix_x4(own, own_key_places.at<2 * F>(0, k));
        mma_m16n8k16<Half>(s[0], own, queries[0], queries[1]);
        mma_m16n8k16<Half>(s[1], own, queries[2], queries[3]);
      }
#pragma unroll
      for (int k = 0; k < V / 16; ++k) {
        uint32_t incoming[4];
        ldmatrix_x4(incoming, base + gradient_places.at<2 * V>(0, k) + chunk * (16 * 2 * V));
        uint32_t (&own)[4] = value[min(k, kHeldValues)];
        if constexpr (!L::kHoldsValue) ldmatrix_x4(own, own_value_places.at<2 * V>(0, k));
        mma_m16n8k16<T>(x[0], own, incoming[0], incoming[1]);
        mma_m16n8k16<T>(x[1], own, incoming[2], incoming[3]);
      }
      [[maybe_unused]] FragmentDropout dropout;
      if constexpr (kDrops<kPairs>) {
        dropout = FragmentDropout(params, b * params.H + h, i0 + chunk * 16, warp_key, true);
      }
      uint32_t products[4], weights[4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float weight[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          float score = s[n][c];
          bool dropped = false;
          if constexpr (kDrops<kPairs>) {
            dropped = dropout.drops(n, c);
            x[n][c] = (dropped ? 0 : x[n][c] * kept) - delta[n][c % 2];
          }
          const int row = chunk * 16 + n * 8 + 2 * t + c % 2;
          const int column = warp * 16 + g + 8 * (c / 2);
          bool sees = visible(row, column);
          float similarity, inverse;  // the weight is their product
          if constexpr (kPairs == Pairs::kGeneral) {
            const float high = key_terms[c / 2], mask = sees ? visible.logit(row, column) : 0;
            sees = sees && high != minus_infinity<float>() && mask != minus_infinity<float>();
            const float rest = mask + (key_lows[c / 2] - low[n][c % 2]);
            inverse = kWeightScale<T> * exponential_of(high - normalizer[n][c % 2], rest);
            score *= norm;
            similarity = score * score + eps;
          } else {
            similarity = score * score + key_terms[c / 2];
            inverse = normalizer[n][c % 2] * kWeightScale<T>;
          }
          const float scaled = inverse * x[n][c];
          float product = score * key_fit[c / 2] * scaled;
          float logit = similarity * scaled;
          weight[c] = dropped ? 0 : similarity * inverse;
          if (!sees) product = logit = weight[c] = 0;
          s[n][c] = product;
          logit_sums[c / 2] += logit;
        }
        products[2 * n] = pack<Half>(s[n][0], s[n][1]);
        products[2 * n + 1] = pack<Half>(s[n][2], s[n][3]);
        weights[2 * n] = pack<T>(weight[0], weight[1]);
        weights[2 * n + 1] = pack<T>(weight[2], weight[3]);
      }
#pragma unroll
      for (int n = 0; n < V / 16; ++n) {
        uint32_t incoming[4];
        ldmatrix_x4_trans(incoming, base + output_places.at<2 * V>(0, n) + chunk * (16 * 2 * V));
        mma_m16n8k16<T>(value_sums[2 * n], weights, incoming[0], incoming[1]);
        mma_m16n8k16<T>(value_sums[2 * n + 1], weights, incoming[2], incoming[3]);
      }
#pragma unroll
      for (int n = 0; n < F / 16; ++n) {
        uint32_t queries[4];
        ldmatrix_x4_trans(queries, base + query_places.at<2 * F>(0, n) + chunk * (16 * 2 * F));
        mma_m16n8k16<Half>(key_sums[2 * n], products, queries[0], queries[1]);
        mma_m16n8k16<Half>(key_sums[2 * n + 1], products, queries[2], queries[3]);
      }
    }
  }

  const int width = static_cast<int>(2 * params.M);
  const float key_scale = 2 / (four_m * fit), value_scale = kept / kWeightScale<T>;
  const Tokens grad_value(params.grad_value, b, key_head);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t j = warp_key + g + 8 * half;
    float logit = logit_sums[half];
    logit += __shfl_xor_sync(0xffffffffu, logit, 1);
    logit += __shfl_xor_sync(0xffffffffu, logit, 2);
    if (j >= params.S) continue;
    // A hidden key's numbers may be anything.
    const bool hidden = logits[bk * params.S + j] == minus_infinity<float>();
    if (t == 0) gradients.logits[bk * params.S + j] = hidden ? 0 : logit * (1 / kWeightScale<T>);
    float* row = gradients.phi_k + (bk * params.S + j) * width;
#pragma unroll
    for (int n = 0; n < F / 8; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int f = n * 8 + 2 * t + c;
        if (f < width) row[f] = hidden ? 0 : key_sums[n][2 * half + c] * key_scale;
      }
    }
    if (params.grad_value.type == ElementType::kNone) continue;
#pragma unroll
    for (int n = 0; n < V / 8; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = n * 8 + 2 * t + c;
        if (column >= params.d_v) continue;
        grad_value.store<float>(j, column, hidden ? 0 : value_sums[n][2 * half + c] * value_scale);
      }
    }
  }
}

// --- Launches

template <typename T, int F, int V, Pairs kPairs>
const char* launch_pairs(const AttentionBackwardParams& params, Stream stream,
                         const SplitLogits<float>& logits, const FoldedTokens& tokens,
                         const FoldedRows& rows, const PairGradients<float>& gradients) {
  if (wants_queries(params)) {
    using L = QueryLayout<F, V, kPairs>;
    const auto blocks =
        static_cast<unsigned>(params.B * params.H * ceil_div(params.L, L::kQueries));
    if (const char* error =
            launch(folded_query_kernel<T, F, V, kPairs>, dim3(blocks), dim3(kFoldedThreads),
                   L::kBytes, stream, params, tokens, rows, gradients.phi_q)) {
      return error;
    }
  }
  if (!wants_keys(params)) return nullptr;
  const float* high = logits.high;
  const auto blocks =
      static_cast<unsigned>(params.B * params.key_heads * ceil_div(params.S, kStep));
  return launch(folded_key_kernel<T, F, V, kPairs>, dim3(blocks), dim3(kFoldedThreads),
                KeyLayout<F, V, kPairs>::kBytes, stream, params, tokens, rows, high, gradients);
}

template <typename T, int F, int V>
const char* backward_of(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                        const SplitLogits<float>& logits, const FoldedTokens& tokens,
                        const PairGradients<float>& gradients) {
  const int64_t heads = params.B * params.H, key_heads = params.B * params.key_heads;
  const int64_t padded = heads * padded_tokens(params.L);
  const auto blocks = [](int64_t count) { return dim3(static_cast<unsigned>(count)); };
  const Stream stream = executor.stream;
  const FoldedRows rows = {
      executor.take<float>(padded),           executor.take<float>(padded),
      executor.take<float>(padded),           executor.take<float>(padded),
      executor.take<T>(heads * params.L * V), executor.take<uint32_t>(key_heads),
      executor.take<uint32_t>(key_heads)};
  if (const char* error = launch(clear_bounds_kernel, blocks(ceil_div(key_heads, 256)), dim3(256),
                                 0, stream, rows, key_heads)) {
    return error;
  }
  if (const char* error = launch(value_bound_kernel, blocks(ceil_div(key_heads * params.S, kWarps)),
                                 dim3(kFoldedThreads), 0, stream, params, rows)) {
    return error;
  }
  if (const char* error = launch(folded_row_kernel<T, V>, blocks(ceil_div(padded, kWarps)),
                                 dim3(kFoldedThreads), 0, stream, params, tokens, rows)) {
    return error;
  }
  return launch_forms(params, [&]<Pairs kPairs>() {
    return launch_pairs<T, F, V, kPairs>(params, stream, logits, tokens, rows, gradients);
  });
}

template <typename T, int F>
const char* backward_of_width(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                              const SplitLogits<float>& logits, const FoldedTokens& tokens,
                              const PairGradients<float>& gradients) {
  return params.d_v <= 64 ? backward_of<T, F, 64>(params, executor, logits, tokens, gradients)
                          : backward_of<T, F, 128>(params, executor, logits, tokens, gradients);
}

template <typename T>
const char* backward_of_type(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                             const SplitLogits<float>& logits, const FoldedTokens& tokens,
                             const PairGradients<float>& gradients) {
  return padded_features(2 * params.M) == 64
             ? backward_of_width<T, 64>(params, executor, logits, tokens, gradients)
             : backward_of_width<T, 128>(params, executor, logits, tokens, gradients);
}

}  // namespace

const char* folded_backward(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                            const SplitLogits<float>& logits, const FoldedTokens& tokens,
                            const PairGradients<float>& gradients) {
  return params.value.type == ElementType::kFloat16
             ? backward_of_type<Half>(params, executor, logits, tokens, gradients)
             : backward_of_type<BFloat16>(params, executor, logits, tokens, gradients);
}

}  // namespace ikattn::cuda
