// The key side of the backward in split products: grad_phi_k, grad_value and the gradients of the
// logits. A block owns 64 keys and passes along the queries of all heads that share them.
#include "attention/cuda/split/key_tiles.h"

namespace ikattn::cuda {
namespace {

// Stages of queries and their gradients; behind them the block's own features and values.
template <int F, int V>
struct KeyLayout {
  static constexpr int kTokens = F + V > 192 ? 16 : 32;  // or GPUs of 99 KiB would not hold them
  static constexpr uint32_t kQueryLow = kTokens * 2 * F, kGradient = 2 * kQueryLow;
  static constexpr uint32_t kGradientLow = kTokens * 2 * V;  // behind kGradient
  static constexpr uint32_t kNumbers = kGradient + 2 * kGradientLow;
  static constexpr uint32_t kStage = kNumbers + (5 * kTokens * 4 + 127) / 128 * 128;
  static constexpr uint32_t kKey = kStages * kStage, kValue = kKey + kSplitRows * 4 * F;
  static constexpr int64_t kBytes = kValue + kSplitRows * int64_t{4} * V;
};

// Sums of a block: registers hold both sides' where there is neither mask nor dropout, and 64
// columns of the value at most; else each side has blocks of its own.
enum class KeySums { kAll, kFeatures, kValue };
template <int V, Pairs kPairs>
constexpr bool kHoldsAll = V == 64 && kPairs == Pairs::kCausal;

// The tiles of queries that a block of keys passes along, one head after the other.
template <int F, int V>
struct QueryTiles {
  using L = KeyLayout<F, V>;
  const SplitTokens& tokens;
  const SplitQueries& rows;
  int64_t first_head, length;
  int first, of_head, count;  // tiles: the first of a head, of a head, and all

  __device__ __forceinline__ QueryTiles(const AttentionParams& params, const SplitTokens& which,
                                        const SplitQueries& queries, const KeyBlock& at)
      : tokens(which), rows(queries), length(params.L) {
    first_head = at.b * params.H + int64_t{at.key_head} * at.group;
    const int all = static_cast<int>((length + L::kTokens - 1) / L::kTokens);
    first = params.is_causal ? min(at.j0 / L::kTokens, all) : 0;
    of_head = all - first;
    count = of_head * at.group;
  }
  __device__ __forceinline__ int64_t head(int step) const { return first_head + step / of_head; }
  __device__ __forceinline__ int64_t query(int step) const {
    return int64_t{first + step % of_head} * L::kTokens;
  }
  __device__ __forceinline__ void copy(int step, uint32_t base) const {
    const int64_t i0 = query(step), row = head(step) * length + i0;
    const int64_t padded = head(step) * padded_tokens(length) + i0;
    const int there = remaining_of(length, i0);
    copy_split<L::kTokens, F>(base, tokens.query.high, tokens.query.low, row, there);
    copy_split<L::kTokens, V>(base + L::kGradient, rows.gradient.high, rows.gradient.low, row,
                              there);
    copy_token_numbers<L::kTokens, 5>(base + L::kNumbers,
                                      {rows.high + padded, rows.low + padded, rows.delta + padded,
                                       tokens.query.units + padded, rows.gradient.units + padded});
    cp_async_commit();
  }
};

// Numbers of the 16 queries of a chunk.
struct SplitQueryColumns {
  float high[2][2], low[2][2], delta[2][2], feature_units[2][2], gradient_units[2][2];

  template <int kTokens>
  __device__ __forceinline__ void load(Shared<const float> numbers, int chunk) {
    load_columns(numbers, chunk, high);
    load_columns(numbers + kTokens, chunk, low);
    load_columns(numbers + 2 * kTokens, chunk, delta);
    load_columns(numbers + 3 * kTokens, chunk, feature_units);
    load_columns(numbers + 4 * kTokens, chunk, gradient_units);
  }
  __device__ __forceinline__ PairQuery query(int n, int c) const {
    return {{high[n][c % 2], low[n][c % 2]}, delta[n][c % 2]};
  }
};

// Numbers of a thread's two keys that their pairs need, and the gradients of their logits so far.
struct SplitKeyRows {
  TwoParts<float> logits[2];
  float feature_units[2], value_units[2];
  float logit_sums[2] = {};

  __device__ __forceinline__ SplitKeyRows(const SplitTokens& tokens, int64_t key, int64_t value) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      logits[half] = {tokens.high[key + 8 * half], tokens.low[key + 8 * half]};
      feature_units[half] = tokens.key.units[key + 8 * half];
      value_units[half] = tokens.value.units[value + 8 * half];
    }
  }
  // Makes operands of the products of features and of gradients: weights, for grad_value, and
  // gradients of similarities, for grad_phi_k.
  template <Pairs kPairs>
  __device__ __forceinline__ void meet(float (&s)[2][4], float (&x)[2][4],
                                       const FragmentPairs<kPairs, true>& at,
                                       const SplitQueryColumns& queries,
                                       const PairConstants& constants) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float unit = queries.feature_units[n][c % 2];
        const float gradient_unit = queries.gradient_units[n][c % 2];
        const float similarity = s[n][c] * (constants.norm * feature_units[c / 2] * unit);
        const float incoming = x[n][c] * value_units[c / 2] * gradient_unit;
        const PairGradient gradient = pair_gradient(at, n, c, logits[c / 2], queries.query(n, c),
                                                    similarity, incoming, constants);
        logit_sums[c / 2] += gradient.logit;
        // Hidden pairs may have units of anything.
        x[n][c] = gradient.weight == 0 ? 0.0f : gradient.weight * gradient_unit;
        s[n][c] = gradient.similarity == 0 ? 0.0f : gradient.similarity * unit;
      }
    }
  }
};

// A warp owns 16 keys, rows of S^T = phi_k phi_q^T and of V dO^T, so that both are left operands of
// the sums without a transposition.
template <int F, int V, Pairs kPairs, KeySums kSums>
__global__ void __launch_bounds__(kFoldedThreads, 2)
    split_key_kernel(AttentionBackwardParams params, SplitTokens tokens, SplitQueries rows,
                     PairConstants constants, PairGradients<float> gradients) {
  using L = KeyLayout<F, V>;
  constexpr bool kOfFeatures = kSums != KeySums::kValue, kOfValue = kSums != KeySums::kFeatures;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  const KeyBlock at(params, kSplitRows, params.is_causal, blockIdx.x);
  const int64_t value_head = at.b * params.G + at.value_head, padded = padded_tokens(params.S);
  const int64_t warp_key = at.j0 + warp * 16;

  // 1. The block's keys and values, and the first tile of queries, are on their way.
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const QueryTiles<F, V> tiles(params, tokens, rows, at);
  if (tiles.count > 0) {
    const int there = remaining_of(params.S, at.j0);
    copy_split<kSplitRows, F>(shared_address(shared + L::kKey), tokens.key.high, tokens.key.low,
                              at.bk * params.S + at.j0, there);
    if constexpr (kOfFeatures) {
      copy_split<kSplitRows, V>(shared_address(shared + L::kValue), tokens.value.high,
                                tokens.value.low, value_head * params.S + at.j0, there);
    }
    tiles.copy(0, shared_address(shared));
  }
  const SplitAddresses score_places = SplitAddresses::of_columns(0, 2 * F);
  const SplitAddresses incoming_places = SplitAddresses::of_columns(L::kGradient, 2 * V);
  const SplitAddresses query_places = SplitAddresses::of_rows(0, 2 * F);
  const SplitAddresses gradient_places = SplitAddresses::of_rows(L::kGradient, 2 * V);
  SplitKeyRows keys(tokens, at.bk * padded + warp_key + g, value_head * padded + warp_key + g);

  // 2. Tile by tile: scores and V dO^T, from both w and ds; dV += w^T dO, dphi_k += ds^T phi_q.
  float key_sums[F / 8][4] = {}, value_sums[V / 8][4] = {};
  RowFits key_fits, value_fits;
  for (int step = 0; step < tiles.count; ++step) {
    Shared<unsigned char> stage = shared + step % kStages * L::kStage;
    cp_async_wait<0>();
    __syncthreads();  // the tile is here, and nobody reads the other stage
    if (step + 1 < tiles.count) {
      tiles.copy(step + 1, shared_address(shared + (step + 1) % kStages * L::kStage));
    }
    const uint32_t base = shared_address(stage);
    const int64_t bh = tiles.head(step), i0 = tiles.query(step);
    const TileVisibility<kPairs> visible(params, at.b, bh % params.H, i0, at.j0);
#pragma unroll 1
    for (int chunk = 0; chunk < L::kTokens / 16; ++chunk) {
      float s[2][4], x[2][4] = {};
      multiply_split_columns<F / 16>(s, SharedRows::of<F>(shared_address(shared + L::kKey)),
                                     score_places.behind(base + chunk * (16 * 2 * F)),
                                     L::kQueryLow);
      if constexpr (kOfFeatures) {
        multiply_split_columns<V / 16>(x, SharedRows::of<V>(shared_address(shared + L::kValue)),
                                       incoming_places.behind(base + chunk * (16 * 2 * V)),
                                       L::kGradientLow);
      }
      SplitQueryColumns queries;
      queries.load<L::kTokens>(shared_cast<float>(stage + L::kNumbers), chunk);
      const FragmentPairs<kPairs, true> pairs(params, visible, bh, i0, at.j0, chunk * 16,
                                              warp * 16);
      keys.meet(s, x, pairs, queries, constants);
      if constexpr (kOfValue) {
        float ratios[2] = {1, 1};
        const SplitFragment weights = value_fits.put(x, ratios);
        add_split_rows(value_sums, ratios, weights,
                       gradient_places.behind(base + chunk * (16 * 2 * V)), L::kGradientLow);
      }
      if constexpr (kOfFeatures) {
        float ratios[2] = {1, 1};
        const SplitFragment products = key_fits.put(s, ratios);
        add_split_rows(key_sums, ratios, products, query_places.behind(base + chunk * (16 * 2 * F)),
                       L::kQueryLow);
      }
    }
  }

  // 3. Rows of the results.
  const RowPairs values(params.grad_value);
  const int64_t* stride = params.grad_value.stride;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float logit_sum = sum_of_lanes<4>(keys.logit_sums[half]);
    const int64_t j = warp_key + g + 8 * half, row = at.bk * params.S + j;
    if (j >= params.S) continue;
    if constexpr (kOfFeatures) {
      const float unit = key_fits.unit(half);
      if (threadIdx.x % 4 == 0) gradients.logits[row] = logit_sum;
      store_features<F>(params, gradients.phi_k + row * 2 * params.M, [&](int n) {
        return make_float2(key_sums[n][2 * half] * unit, key_sums[n][2 * half + 1] * unit);
      });
    }
    if constexpr (kOfValue) {
      if (params.grad_value.type == ElementType::kNone) continue;
      const float unit = value_fits.unit(half);
      values.store<V>(
          at.b * stride[0] + at.key_head * stride[1] + j * stride[2], 0, params.d_v, [&](int n) {
            return make_float2(value_sums[n][2 * half] * unit, value_sums[n][2 * half + 1] * unit);
          });
    }
  }
}

}  // namespace

const char* split_key_gradients(const AttentionBackwardParams& params, Stream stream,
                                const SplitTokens& tokens, const SplitQueries& queries,
                                const PairGradients<float>& gradients) {
  return launch_split(params, [&]<int F, int V, Pairs kPairs>() -> const char* {
    const auto blocks =
        static_cast<unsigned>(params.B * params.key_heads * ceil_div(params.S, kSplitRows));
    const auto queue = [&]<KeySums kSums>() {
      return launch(split_key_kernel<F, V, kPairs, kSums>, dim3(blocks), dim3(kFoldedThreads),
                    KeyLayout<F, V>::kBytes, stream, params, tokens, queries, PairConstants(params),
                    gradients);
    };
    if constexpr (kHoldsAll<V, kPairs>) {
      return queue.template operator()<KeySums::kAll>();
    } else {
      if (const char* error = queue.template operator()<KeySums::kFeatures>()) return error;
      return params.grad_value ? queue.template operator()<KeySums::kValue>() : nullptr;
    }
  });
}

const char* split_pair_gradients(const AttentionBackwardParams& params,
                                 const DeviceExecutor& executor,
                                 const PreparedTokens<float>& prepared, const RowState<float>& rows,
                                 const PairGradients<float>& gradients) {
  SplitTokens tokens;
  SplitQueries queries;
  if (const char* error = split_tokens(params, executor, prepared, tokens)) return error;
  if (const char* error = split_queries(params, executor, rows, queries)) return error;
  if (wants_queries(params)) {
    if (const char* error =
            split_query_gradients(params, executor.stream, tokens, queries, gradients.phi_q)) {
      return error;
    }
  }
  if (!wants_keys(params)) return nullptr;
  return split_key_gradients(params, executor.stream, tokens, queries, gradients);
}

}  // namespace ikattn::cuda
