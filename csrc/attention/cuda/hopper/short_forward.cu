// The forward pass of short calls on Hopper, of heads in the folded form, features included: a
// block has the keys of a head, and a share of the queries that see them. Two warpgroups share out
// the keys, whose features stay in shared memory beside the values. Then each takes 64 queries
// after the other, without waiting for the other warpgroup: where one makes features, by the unit
// of sines, the other multiplies. Angles are products of wgmma, too.
//
// Compiled for sm_90a alone.
#include <algorithm>
#include <cmath>

#include "attention/cuda/hopper/short.h"
#include "attention/cuda/hopper/short_tiles.h"
#include "attention/cuda/tensor_cores/epilogue_forward.h"

namespace ikattn::cuda {
namespace {

// Sums of a thread for two queries.
template <int V>
struct ShortRows {
  float output[V / kBoxColumns][32] = {};  // sum of w V
  float sums[2] = {};                      // sums of weights
  Roundings roundings;  // errors of the weights, where these are not the rounded ones
};

// Keys of a head in shared memory, which 64 queries of a warpgroup pass.
//   tiles: that the queries see. row0: the first of the queries
template <typename T, bool kInt8, int F, int V, bool kCausal>
struct ShortKeys {
  static constexpr int kSteps = F / (kInt8 ? 32 : 16);
  using Keys = Boxes<kKeys, 16 * kSteps>;
  using Values = ShortValues<T, V, kCausal>;
  Shared<unsigned char> shared;
  const ShortLayout& layout;
  uint32_t base;

  // Stores features of the thread's rows of a warpgroup's 64 keys from j0 on.
  __device__ __forceinline__ void store(int j0, const uint32_t (&phi)[kSteps][4]) const {
    const unsigned thread = unknown_to_compiler(threadIdx.x);
    const int row = j0 % kKeys + row_of_group();
    Shared<unsigned char> tile = shared + (layout.keys + j0 / kKeys * Keys::kBytes);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t to = k / 4 * Keys::kBox + thread % 4 * 4 +
                            swizzled(row + i % 2 * 8, (2 * k + i / 2) % 8, 128);
        store_vector(shared_cast<uint32_t>(tile + to), phi[k][i]);
      }
    }
  }

  // Passes tile by tile: scores, weights, output += weights x values. While a warpgroup makes
  // weights the other one multiplies: fewer registers hold what goes on.
  __device__ __forceinline__ void pass(const uint32_t (&phi_q)[kSteps][4], int tiles, int row0,
                                       uint32_t state, uint32_t eps, Values& values,
                                       ShortRows<V>& rows) const {
    float sums[4] = {};  // sums of integers' weights of the thread's rows, in [0] and [2]
    uint32_t weights[kKeys / 16][4];
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      Score scores[kKeys / 2];
      const uint32_t place = base + layout.keys + tile * Keys::kBytes;
      wgmma_fence();
      if constexpr (kInt8) {
        begin_int8<kKeys, 16 * kSteps>(scores, phi_q, place);
      } else {
        begin_by_columns<Half, kKeys, F>(scores, phi_q, place);
      }
      wgmma_commit();
      wgmma_wait<0>();
      sums_are_there(scores);
      if (tile > 0) values.release();
      make_weights(scores, tile, tiles, row0 - tile * kKeys, state, eps, weights, rows);
      const uint32_t of_values = values.next();
      wgmma_fence();
      begin_by_rows<T, kKeys, V>(rows.output, weights, of_values);
      if constexpr (kInt8) {
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k) {
          wgmma_by_columns<T>(sums, weights[k], wgmma_operand(base + layout.ones), true);
        }
      }
      wgmma_commit();
    }
    wgmma_wait<0>();
    values.release();
    values.end_item();
    sums_are_there(rows.output);
    sums_are_there(sums);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.sums[half] = kInt8 ? sums[2 * half] : sum_of_lanes<4>(rows.sums[half]);
    }
  }

 private:
  using Score = std::conditional_t<kInt8, int32_t, float>;

  // Makes weights of scores, as A. diagonal: the last of the tile's keys that the first of the
  // queries sees.
  __device__ __forceinline__ void make_weights(Score (&scores)[kKeys / 2], int tile, int tiles,
                                               int diagonal, uint32_t state, uint32_t eps,
                                               uint32_t (&weights)[kKeys / 16][4],
                                               ShortRows<V>& rows) const {
    const bool crosses = kCausal && tile == tiles - 1;
    const int own = diagonal + row_of_group();
    if constexpr (kInt8) {
      to_int8_weights(scores,
                      shared_cast<const uint32_t>(shared + (layout.columns + tile * kKeys * 2)),
                      eps, weights);
      if (crosses) hide_beyond(own, weights);
    } else {
      Shared<const float> terms =
          shared_cast<const float>(shared + (layout.columns + tile * kKeys * 4));
      if (crosses || (state & kFew) != 0) {
        to_weights<T, true>(scores, terms, PairsUpTo{crosses ? own : kKeys + 8}, rows.sums,
                            rows.roundings);
      } else {
        to_weights<T, false>(scores, terms, AllPairs(), rows.sums, rows.roundings);
      }
      pack_left<T, kKeys / 8>(scores, weights);
    }
  }
};

// Copies the columns beside the keys' features: e_j or terms, and ones. All threads of the block
// call it.
template <bool kInt8>
__device__ __forceinline__ void copy_columns(const AttentionParams& params,
                                             const FoldedTokens& tokens, const ShortLayout& layout,
                                             int bk, Shared<unsigned char> shared) {
  for (int i = threadIdx.x; i < layout.tiles * kKeys; i += kProductThreads) {
    const int64_t from = bk * padded_tokens(params.S) + i;
    if constexpr (kInt8) {
      shared_cast<uint16_t>(shared + layout.columns)[i] = tokens.int8.magnitudes[from].bits;
    } else {
      shared_cast<float>(shared + layout.columns)[i] = tokens.forms.terms[from];
    }
  }
  if (threadIdx.x < 64) {
    const uint32_t to = swizzled(threadIdx.x / 8, threadIdx.x / 4 % 2, 128) + threadIdx.x % 4 * 4;
    store_vector(shared_cast<uint32_t>(shared + (layout.ones + to)), 0x3f803f80u);
  }
}

// Makes zeros of the features of queries that are not finite, and NaN of their poison: such a query
// spoils its row, if it sees a key.
template <int kSteps>
__device__ __forceinline__ void clear_poisoned(float (&poison)[2], uint32_t (&phi)[kSteps][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    poison[half] = sum_of_lanes<4>(poison[half]);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      phi[k][half] = poison[half] == 0 ? phi[k][half] : 0u;
      phi[k][half + 2] = poison[half] == 0 ? phi[k][half + 2] : 0u;
    }
  }
}

// Stores the results of a warpgroup's queries of an item.
template <int V>
__device__ __forceinline__ void store_short(const AttentionParams& params,
                                            const FoldedTokens& tokens, int shares, int item,
                                            int group, float log_scale, const float (&poison)[2],
                                            const ShortRows<V>& rows) {
  // Found anew: no register holds it over the tiles.
  const ShortHead of(params, shares);
  const ShortItem at(params, item);
  QueryBlock block(params, kWarpgroupRows, 0);
  block.b = of.b;
  block.h = of.first + at.head;
  block.bh = of.b * static_cast<int>(params.H) + block.h;
  const double reference = tokens.forms.largest[of.bk] - static_cast<double>(log_scale);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = rows.sums[half], rounding = sum_of_lanes<4>(rows.roundings[half]);
    const int i = at.i0 + group * kGroupRows + row_of_group() + 8 * half;
    if (i >= params.L) continue;
    store_result<V>(params, block, i, 0, sum == 0 ? sum : sum + poison[half], rounding, reference,
                    1, [&](int column, int c) { return sum_at(rows.output, half, column, c); });
  }
  __syncwarp();  // lanes of no query come to the next products with the others
}

template <typename T, bool kInt8, int F, int V, bool kCausal>
__global__ void __launch_bounds__(kProductThreads, 1)
    short_forward_kernel(AttentionParams params, FoldedTokens tokens, AngleOperands operands,
                         int shares, const __grid_constant__ ShortLayout layout,
                         const __grid_constant__ RowMap map) {
#if IKATTN_WARPGROUP_CODE
  using Keys = ShortKeys<T, kInt8, F, V, kCausal>;
  const ShortHead own_head(params, shares);
  const int bk = own_head.bk, b = own_head.b, key_head = own_head.key_head;
  const uint32_t state = tokens.forms.state[bk];
  if (is_of_other_form<Pairs::kAll>(state)) return;  // the whole block
  // A shuffle tells the compiler that all warps of a warpgroup have the same index.
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  const int slices = operands.split.slices, M = static_cast<int>(params.M);
  const int tiles = layout.tiles;
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared), keys_made = base + layout.keys_made();
  const Keys keys{shared, layout, base};
  const int heads = static_cast<int>(params.H) / static_cast<int>(params.key_heads);
  const int end = heads * static_cast<int>(ShortItem::count(params));
  int item = static_cast<int>(blockIdx.x) - bk * shares;
  typename Keys::Values values(params, layout, shared, map, (state & kUnclean) != 0, item, shares,
                               end);

  // 1. Values, frequencies, and the first tokens are on their way.
  if (threadIdx.x == 0) values.begin();
  const FeatureSource& of_keys = operands.keys;
  const int64_t which =
      of_keys.frequency_batch(b) * of_keys.frequency_heads + of_keys.frequency_head(key_head);
  begin_frequencies<T, F, 2, kAngleFrequencies, kProductThreads>(
      operands.split, which, of_keys.stationary() ? 1 : 2, base + layout.frequencies);
  const float unit = operands.split.units[2 * which];
  // The second warpgroup makes the features of more keys: then it begins its queries later, and
  // the two do not want the same at the same time.
  const int first_keys = group == 0 ? 0 : (tiles - 1) * kGroupRows;
  const int end_keys = (group == 0 ? tiles - 1 : 2 * tiles) * kGroupRows;
  const WarpTokens<T> own(base + layout.tokens, slices);
  if (first_keys < end_keys) own.begin(of_keys, b, of_keys.x_head(key_head), first_keys);
  copy_columns<kInt8>(params, tokens, layout, bk, shared);
  cp_async_wait<0>();
  fence_async();
  __syncthreads();

  // 2. The keys' features.
#pragma unroll 1
  for (int j0 = first_keys; j0 < end_keys; j0 += kGroupRows) {
    float scales[2], angles[F / 2], not_finite[2] = {};
    load_scales(params, tokens, bk, j0, scales);
    make_angles<F>(own, slices, base + layout.frequencies, angles);
    if (j0 + kGroupRows < end_keys) {
      own.begin(of_keys, b, of_keys.x_head(key_head), j0 + kGroupRows);
    }
    uint32_t phi[Keys::kSteps][4];
    make_features<kInt8, F>(angles, M, unit, scales, phi, not_finite);
    keys.store(j0, phi);
  }
  if ((state & kUnclean) != 0 && !layout.is_ring()) values.clean_all();
  fence_async();
  barrier_arrive(keys_made);

  // 3. Queries: their features, and their pairs.
  const auto begin_queries = [&](int index) {
    const ShortItem at(params, index);
    const ShortHead of(params, shares);
    own.begin(operands.queries, of.b, of.first + at.head, at.i0 + group * kGroupRows);
  };
  const uint32_t eps = kInt8 ? pack<BFloat16>(tokens.int8.eps, tokens.int8.eps) : 0u;
  begin_queries(item);
#pragma unroll 1
  for (; item < end; item += shares) {
    uint32_t phi_q[Keys::kSteps][4];
    float poison[2] = {};
    {
      const float scales[2] = {1, 1};
      float angles[F / 2];
      make_angles<F>(own, slices, base + layout.frequencies, angles);
      if (item + shares < end) begin_queries(item + shares);
      make_features<kInt8, F>(angles, M, unit, scales, phi_q, poison);
    }
    clear_poisoned(poison, phi_q);
    barrier_wait(keys_made, 0);
    const ShortItem at(params, item);
    const int row0 = at.i0 + group * kGroupRows;
    // Copies want both warpgroups to pass the tiles, of queries or not.
    if (row0 >= params.L && !layout.is_ring()) continue;
    ShortRows<V> rows;
    keys.pass(phi_q, tiles_met<kKeys>(params, kCausal, at.i0), row0, state, eps, values, rows);
    store_short<V>(params, tokens, shares, item, group, tokens.forms.log_scale, poison, rows);
  }
  values.finish();
#else
  trap_without_warpgroups(params, tokens, operands, shares, layout, map);
#endif
}

int padded_values(const AttentionParams& params) { return params.d_v <= 64 ? 64 : 128; }

ShortLayout layout_of(const AttentionParams& params, bool int8_scores) {
  return ShortLayout(int8_scores, static_cast<int>(padded_columns(2 * params.M)),
                     padded_values(params), static_cast<int>(ceil_div(params.d, kBoxColumns)),
                     static_cast<int>(ceil_div(params.S, kKeys)));
}

// Returns how many blocks share the queries of a head. Each makes the features of all keys. It
// counts cycles: of a block's begin, of the features of a token, and of the pairs of a query.
int shares_of(const AttentionParams& params) {
  constexpr double kBegin = 3000, kToken = 16, kPair = 0.085;
  const int64_t key_heads = params.B * params.key_heads;
  const double S = static_cast<double>(params.S);
  const int64_t items = params.H / params.key_heads * ceil_div(params.L, kWarpgroupRows);
  const int64_t most = std::min(items, std::max<int64_t>(64, multiprocessors()));
  int best = 1;
  double least = INFINITY;
  for (int shares = 1; shares <= most; ++shares) {
    const double queries = static_cast<double>(ceil_div(items, shares) * kWarpgroupRows);
    const double waves =
        static_cast<double>(ceil_div(key_heads * shares, int64_t{multiprocessors()}));
    const double cycles = waves * (kBegin + kToken * (S + queries) + kPair * S * queries);
    if (cycles < least) {
      least = cycles;
      best = shares;
    }
  }
  return best;
}

template <typename T, bool kInt8, int F, int V>
const char* queue_short(const AttentionParams& params, Stream stream, const AngleOperands& operands,
                        const FoldedTokens& tokens) {
  RowMap map;
  if (const char* error = map_values<kKeys>(map, params, tokens)) return error;
  const int shares = shares_of(params);
  const ShortLayout layout = layout_of(params, kInt8);
  const auto queue = [&](auto kernel) {
    return launch(kernel, dim3(static_cast<unsigned>(params.B * params.key_heads * shares)),
                  dim3(kProductThreads), layout.bytes, stream, params, tokens, operands, shares,
                  layout, map);
  };
  return params.is_causal ? queue(short_forward_kernel<T, kInt8, F, V, true>)
                          : queue(short_forward_kernel<T, kInt8, F, V, false>);
}

}  // namespace

bool fits_short_forward(const AttentionParams& params, bool int8_scores) {
  const bool is_half =
      params.query.type == ElementType::kFloat16 || params.query.type == ElementType::kBFloat16;
  const bool hides_pairs = params.mask.type != ElementType::kNone || params.dropout_threshold != 0;
  return is_half && !hides_pairs && params.query.type == params.value.type &&
         params.d <= 2 * kBoxColumns && (2 * params.M <= 64 || params.d_v <= 64) &&
         params.S <= 1024 && layout_of(params, int8_scores).fits();
}

const char* warpgroup_short_forward(const AttentionParams& params, Stream stream,
                                    const AngleOperands& operands, const FoldedTokens& tokens,
                                    bool int8_scores) {
  return launch_sizes(params, [&]<typename T, int F, int V>() -> const char* {
    if constexpr (F == 128 && V == 128) {  // registers are too few for both
      return "short calls take at most 32 frequencies, or 64 columns of value";
    } else {
      if constexpr (F == 128 && std::is_same_v<T, BFloat16>) {
        if (int8_scores) return queue_short<T, true, F, V>(params, stream, operands, tokens);
      }
      return queue_short<T, false, F, V>(params, stream, operands, tokens);
    }
  });
}

}  // namespace ikattn::cuda
