// What the tensor-core kernels make of pairs: which are seen and which are dropped, and how scores
// become weights, in the forward pass, and factors of gradients, in the backward pass. A thread has
// those of fragments: rows g and g + 8 of 16, columns 2t and 2t + 1 of two tiles of 8.
#pragma once

#include "attention/cuda/tensor_cores/blocks.h"
#include "attention/cuda/tensor_cores/rows.h"
#include "attention/offsets.h"
#include "support/philox.h"

namespace ikattn::cuda {
namespace {

// exp(x)
__device__ __forceinline__ float fast_exponential(float x) { return fast_exp2(x * 1.44269504f); }

// Which keys the queries of a tile see; rows and columns count from the tile's first. Beyond the
// last token there are zeros, which change nothing.
template <Pairs kPairs>
struct TileVisibility {
  int diagonal;  // the key that query 0 sees last
  int rows, columns;
  const Array& mask;
  int64_t base;  // of the tile in the mask

  __device__ __forceinline__ TileVisibility(const AttentionParams& params, int64_t b, int64_t h,
                                            int64_t i0, int64_t j0)
      : mask(params.mask) {
    if constexpr (kPairs == Pairs::kAll) return;
    const int64_t far = 1 << 20;
    diagonal = static_cast<int>(params.is_causal ? max(-far, min(i0 - j0, far)) : far);
    if constexpr (kDrops<kPairs>) {
      rows = remaining_of(params.L, i0);
      columns = remaining_of(params.S, j0);
      base = b * mask.stride[0] + h * mask.stride[1] + i0 * mask.stride[2] + j0 * mask.stride[3];
    }
  }
  __device__ __forceinline__ bool operator()(int row, int column) const {
    if constexpr (kPairs == Pairs::kAll) return true;
    if (column - row > diagonal) return false;
    if constexpr (kPairs == Pairs::kCausal) return true;
    if (row >= rows || column >= columns) return false;
    return mask.type != ElementType::kBool ||
           static_cast<const uint8_t*>(mask.data)[place(row, column)] != 0;
  }
  // Of a visible pair.
  __device__ __forceinline__ float logit(int row, int column) const {
    if (mask.type == ElementType::kNone || mask.type == ElementType::kBool) return 0;
    return bounded_offset(load_element<float>(mask, place(row, column)));
  }
  // Of the general form: exp(logit - log Z) for the logit and its normalizer in two parts each; 0
  // for what is hidden.
  __device__ __forceinline__ float exponential(int row, int column, float high, float low,
                                               float normalizer, float normalizer_low) const {
    if (!(*this)(row, column) || high == minus_infinity<float>()) return 0;
    const float masked = logit(row, column);
    if (masked == minus_infinity<float>()) return 0;
    return fast_exponential(
        relative_logit<float>({high, low}, masked, {normalizer, normalizer_low}));
  }

 private:
  __device__ __forceinline__ int64_t place(int row, int column) const {
    return base + row * mask.stride[2] + column * mask.stride[3];
  }
};

// What dropout drops of a 16 x 16 block's fragment: rows g and g + 8, columns 2t, 2t + 1 of two
// tiles of 8.
struct FragmentDropout {
  uint32_t dropped = 0;  // bit 4n + c: register c of column tile n

  FragmentDropout() = default;
  // turned: rows are keys.
  __device__ __forceinline__ FragmentDropout(const AttentionParams& params, int64_t bh,
                                             int64_t query, int64_t key, bool turned) {
    if (params.dropout_threshold == 0) return;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const PhiloxBlock bytes =
        dropout_group(params.dropout, bh, query / 16 * 4 + (turned ? t : g / 2),
                      key / 16 * 4 + (turned ? g / 2 : t));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int row = (g & 1) + 2 * (c / 2), column = c % 2 + 2 * n;
        // An index that is known at run time only would take local memory.
        const uint32_t word = turned         ? bytes.word[column]
                              : (g & 1) != 0 ? bytes.word[2 * (c / 2) + 1]
                                             : bytes.word[2 * (c / 2)];
        const uint32_t byte = word >> (8 * (turned ? row : column)) & 0xff;
        dropped |= static_cast<uint32_t>(byte < params.dropout_threshold) << (4 * n + c);
      }
    }
  }
  __device__ __forceinline__ bool drops(int n, int c) const {
    return (dropped >> (4 * n + c) & 1) != 0;
  }
};

// Two numbers of a stage for each of the two column tiles of a chunk, those of a thread's columns.
__device__ __forceinline__ void load_columns(Shared<const float> numbers, int chunk,
                                             float (&columns)[2][2]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 pair = load_vector<float2>(numbers + chunk * 16 + n * 8 + threadIdx.x % 4 * 2);
    columns[n][0] = pair.x;
    columns[n][1] = pair.y;
  }
}

// A thread's pairs of 16 queries and 16 keys. Turned: rows are keys.
template <Pairs kPairs, bool kTurned = false>
struct PairPlaces {
  const TileVisibility<kPairs>& visible;
  int row, column;  // of the first pair's query and key, from the tile's first on
  FragmentDropout dropout;

  // Of the 16 rows from row0 and the 16 columns from column0 of the tile of queries from i0 and
  // keys from j0 on.
  __device__ __forceinline__ PairPlaces(const AttentionParams& params,
                                        const TileVisibility<kPairs>& which, int64_t bh, int64_t i0,
                                        int64_t j0, int row0, int column0)
      : visible(which) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    row = row0 + (kTurned ? 2 * t : g);
    column = column0 + (kTurned ? g : 2 * t);
    if constexpr (kDrops<kPairs>) {
      dropout = FragmentDropout(params, bh, i0 + row0, j0 + column0, kTurned);
    }
  }
  __device__ __forceinline__ int row_of(int n, int c) const {
    return row + (kTurned ? n * 8 + c % 2 : 8 * (c / 2));
  }
  __device__ __forceinline__ int column_of(int n, int c) const {
    return column + (kTurned ? 8 * (c / 2) : n * 8 + c % 2);
  }
  __device__ __forceinline__ bool sees(int n, int c) const {
    return visible(row_of(n, c), column_of(n, c));
  }
  __device__ __forceinline__ bool drops(int n, int c) const {
    return kDrops<kPairs> && dropout.drops(n, c);
  }
};

// Lanes that pairs have sent different ways come together for the next product, which wants them
// so.
template <Pairs kPairs>
__device__ __forceinline__ void rejoin_after() {
  if constexpr (kDrops<kPairs>) __syncwarp();
}

// What rounding to T has added to two weights.
template <typename T>
__device__ __forceinline__ float rounding_of(uint32_t rounded, float low, float high) {
  const float2 two = unpack<T>(rounded);
  return (two.x - low) + (two.y - high);
}
// The next number of bfloat16 that is not less.
__device__ __forceinline__ float rounded_up(float x) {
  const uint32_t bits = __float_as_uint(x);
  return __uint_as_float((x > 0 ? bits + 0xffffu : bits) & 0xffff0000u);
}

// A number of each of a thread's two rows, in one register, of which there are no more: 8 bits of
// it are enough.
class RowPair {
 public:
  __device__ __forceinline__ float operator[](int half) const {
    const float2 both = unpack<BFloat16>(both_);
    return half == 0 ? both.x : both.y;
  }
  __device__ __forceinline__ void set(float first, float second) {
    both_ = pack<BFloat16>(first, second);
  }

 private:
  uint32_t both_ = 0;
};
// What rounding has added to their weights: to be told from 0, and to repair a weight's 8 or 11
// bits.
class Roundings : public RowPair {
 public:
  __device__ __forceinline__ void add(float first, float second) {
    set((*this)[0] + first, (*this)[1] + second);
  }
  __device__ __forceinline__ void multiply(const float (&scales)[2]) {
    set((*this)[0] * scales[0], (*this)[1] * scales[1]);
  }
};

// Of 16 keys that a thread's two queries meet.
struct KeyColumns {
  float terms[2][2];
  float lows[2][2];  // general

  // General: the logit of the key of a fragment's register c of tile n.
  __device__ __forceinline__ TwoParts<float> logit(int n, int c) const {
    return {terms[n][c % 2], lows[n][c % 2]};
  }
};

// What the weights of a thread's two rows have added up to, and how they are made.
//
// Weights are rounded where they meet the value. A row that sees one key alone should be its value
// all the same, or its gradients, which vanish, would be what roundings leave, over the score: so
// an output is divided by the sum of rounded weights where rows may see few keys. Others, of many
// keys, are divided by the sum itself, which takes less time.
template <typename T, Pairs kPairs>
struct ForwardRows {
  float sums[2] = {};
  Roundings roundings;  // where they count
  // General: of the logits, what the weights are relative to: the largest, whose second part
  // counts where they are large. It is rounded up, or weights could be too large for Half.
  float largest[2] = {minus_infinity<float>(), minus_infinity<float>()};
  RowPair largest_lows;

  __device__ __forceinline__ double reference(int half) const {
    return static_cast<double>(largest[half]) + static_cast<double>(largest_lows[half]);
  }

  // Scores of 16 keys become weights, those of dropped pairs 0. The rows' `output` follows where
  // what they are relative to changes.
  //   few: of the head, kFew
  template <int kTiles>
  __device__ __forceinline__ Fragment weigh(float (&s)[2][4], const PairPlaces<kPairs>& at,
                                            const KeyColumns& keys, const GeneralScales& scales,
                                            bool few, float (&output)[kTiles][4]) {
    [[maybe_unused]] float masks[2][4];
    [[maybe_unused]] uint32_t seen = 0;  // bit 4n + c; and 8 + row: of large logits
    if constexpr (kPairs == Pairs::kGeneral) {
      float most[2] = {largest[0], largest[1]}, lows[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          masks[n][c] = 0;
          if (!at.sees(n, c) || keys.terms[n][c % 2] == minus_infinity<float>()) continue;
          const float mask = at.visible.logit(at.row_of(n, c), at.column_of(n, c));
          if (mask == minus_infinity<float>()) continue;
          seen |= 1u << (4 * n + c);
          masks[n][c] = mask;
          const float logit = keys.terms[n][c % 2] + mask;
          if (is_large(mask) || is_large(keys.terms[n][c % 2])) seen |= 256u << (c / 2);
          most[c / 2] = logit > most[c / 2] ? logit : most[c / 2];  // passes over NaN
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        most[half] = max_of_lanes<4>(most[half]);
        lows[half] = most[half] == largest[half] ? largest_lows[half] : 0;
      }
      if (__any_sync(0xffffffffu, seen > 255)) find_large(keys, masks, seen, most, lows);
      RowPair most_lows;
      most_lows.set(lows[0], lows[1]);
      float rescale[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float before = largest[half];
        // Nothing but NaN can be there before the first finite logit.
        rescale[half] =
            before == minus_infinity<float>()
                ? 1
                : fast_exponential((before - most[half]) + (largest_lows[half] - most_lows[half]));
        sums[half] *= rescale[half];
        largest[half] = most[half];
      }
      largest_lows = most_lows;
      roundings.multiply(rescale);
      if (__any_sync(0xffffffffu, rescale[0] != 1 || rescale[1] != 1)) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
          for (int c = 0; c < 4; ++c) output[n][c] *= rescale[c / 2];
        }
      }
    }
    Fragment weights;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float score = s[n][c];
        float weight;
        if constexpr (kPairs == Pairs::kGeneral) {
          const float similarity = score * score * scales.square + scales.eps;
          const TwoParts<float> reference = {
              largest[c / 2] == minus_infinity<float>() ? 0 : largest[c / 2], largest_lows[c / 2]};
          const float logit = relative_logit(keys.logit(n, c), masks[n][c], reference);
          const bool sees = (seen >> (4 * n + c) & 1) != 0;
          weight = sees ? similarity * fast_exponential(logit) : 0.0f;
        } else {
          weight = score * score + keys.terms[n][c % 2];
          if (kPairs != Pairs::kAll && !at.sees(n, c)) weight = 0;
        }
        sums[c / 2] += weight;
        s[n][c] = at.drops(n, c) ? 0 : weight;
      }
      weights.template put<T>(n, s[n]);
      if (kDrops<kPairs> || few || (kPairs == Pairs::kCausal && at.visible.diagonal < kStep)) {
        roundings.add(rounding_of<T>(weights.registers[2 * n], s[n][0], s[n][1]),
                      rounding_of<T>(weights.registers[2 * n + 1], s[n][2], s[n][3]));
      }
    }
    return weights;
  }

 private:
  // The largest logits so far, `most`, and their second parts, of rows that meet large ones. All
  // lanes of a warp must come.
  __device__ __forceinline__ void find_large(const KeyColumns& keys, const float (&masks)[2][4],
                                             uint32_t seen, float (&most)[2],
                                             float (&lows)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto for_seen = [&](const auto& function) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          const int n = pair / 2, c = 2 * half + pair % 2;
          if ((seen >> (4 * n + c) & 1) == 0) continue;
          function(masked_logit(keys.logit(n, c), masks[n][c]));
        }
      };
      float high = largest[half];
      for_seen([&](TwoParts<float> logit) { high = logit.high > high ? logit.high : high; });
      high = max_of_lanes<4>(high);
      float low = high == largest[half] ? largest_lows[half] : minus_infinity<float>();
      for_seen([&](TwoParts<float> logit) {
        if (logit.high == high && logit.low > low) low = logit.low;
      });
      low = max_of_lanes<4>(low);
      if (max_of_lanes<4>(seen >> (8 + half) & 1) == 0) continue;
      most[half] = high;
      lows[half] = rounded_up(low);
    }
  }
};

// What a thread's two queries bring to their pairs.
template <Pairs kPairs>
struct QueryRows {
  float delta[2], fit[2];
  float normalizer[2], low[2];  // general

  // Of queries i and i + 8.
  __device__ __forceinline__ void load(const AttentionParams& params, const FoldedRows& rows,
                                       int64_t bh, int64_t i) {
    const int64_t base = bh * padded_tokens(params.L);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t index = base + i + 8 * half;
      const bool there = i + 8 * half < params.L;
      delta[half] = there ? rows.delta[index] : 0.0f;
      fit[half] = there ? rows.fit[index] : 0.0f;
      if constexpr (kPairs == Pairs::kGeneral) {
        fit[half] /= static_cast<float>(4 * params.M);
        normalizer[half] = there ? rows.normalizer[index] : INFINITY;
        low[half] = there ? rows.low[index] : 0.0f;
      }
    }
  }
  // With what products of gradients and values begin: -delta, but under dropout.
  __device__ __forceinline__ void begin(float (&x)[2][4]) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) x[n][c] = kDrops<kPairs> ? 0 : -delta[c / 2];
    }
  }
  // Scores of 16 keys, and x, dP - delta, or dP under dropout, become factors of grad_phi_q.
  //   kept: the rescale of dropout
  __device__ __forceinline__ Fragment products_of(float (&s)[2][4], const float (&x)[2][4],
                                                  const PairPlaces<kPairs>& at,
                                                  const KeyColumns& keys, float kept) const {
    Fragment products;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float product = x[n][c];
        if constexpr (kDrops<kPairs>) {
          product = (at.drops(n, c) ? 0 : product * kept) - delta[c / 2];
        }
        // A hidden key's score is 0 where it is folded, and its value may be anything.
        const float score = s[n][c];
        product = score == 0 ? 0 : product * (score * fit[c / 2]);
        if constexpr (kPairs == Pairs::kGeneral) {
          if (product != 0) {
            const float exponential =
                at.visible.exponential(at.row_of(n, c), at.column_of(n, c), keys.terms[n][c % 2],
                                       keys.lows[n][c % 2], normalizer[c / 2], low[c / 2]);
            product = exponential == 0 ? 0 : product * exponential;
          }
        } else if (!at.sees(n, c)) {
          product = 0;
        }
        s[n][c] = product;
      }
      products.template put<Half>(n, s[n]);
    }
    return products;
  }
};

// Of 16 queries that a thread's two keys meet: columns of the turned pairs.
struct QueryColumns {
  float normalizer[2][2], delta[2][2];
  float low[2][2];  // general
};

// What a thread's two keys bring to their pairs, and the gradients of their logits so far.
template <typename T, Pairs kPairs>
struct KeyRows {
  float fit[2], terms[2], lows[2];
  float logit_sums[2] = {};

  // Of keys j and j + 8.
  //   fit_of_head: KeyScales::fit
  __device__ __forceinline__ void load(const AttentionParams& params, const FoldedTokens& tokens,
                                       int64_t bk, int64_t j, float fit_of_head) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t key = j + 8 * half;
      // Folded: sqrt(K e_j), with which the score is bounded. There is nothing to fold in the
      // other.
      float scale = 1;
      if constexpr (kPairs != Pairs::kGeneral) {
        scale = key < params.S
                    ? tokens.scales[bk * params.S + key] * static_cast<float>(4 * params.M)
                    : 0.0f;
      }
      fit[half] = scale * fit_of_head * (1 / kWeightScale<T>);
      const int64_t padded = bk * padded_tokens(params.S) + min(key, params.S - 1);
      terms[half] = tokens.terms[padded];
      lows[half] = tokens.lows[padded];
    }
  }
  // With what products of values and gradients begin: -delta, but under dropout.
  __device__ __forceinline__ static void begin(float (&x)[2][4], const QueryColumns& queries) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) x[n][c] = kDrops<kPairs> ? 0 : -queries.delta[n][c % 2];
    }
  }
  // Scores of 16 queries, and x, dP - delta, or dP under dropout, become factors of grad_value and
  // of grad_phi_k.
  //   norm: 1 / (4M); kept: the rescale of dropout
  __device__ __forceinline__ void meet(float (&s)[2][4], float (&x)[2][4],
                                       const PairPlaces<kPairs, true>& at,
                                       const QueryColumns& queries, float norm, float eps,
                                       float kept, Fragment& weights, Fragment& products) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float weight[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float score = s[n][c];
        const bool dropped = at.drops(n, c);
        if constexpr (kDrops<kPairs>) {
          x[n][c] = (dropped ? 0 : x[n][c] * kept) - queries.delta[n][c % 2];
        }
        float similarity, inverse;  // the weight is their product
        if constexpr (kPairs == Pairs::kGeneral) {
          inverse = kWeightScale<T> * at.visible.exponential(at.row_of(n, c), at.column_of(n, c),
                                                             terms[c / 2], lows[c / 2],
                                                             queries.normalizer[n][c % 2],
                                                             queries.low[n][c % 2]);
          score *= norm;
          similarity = score * score + eps;
        } else {
          similarity = score * score + terms[c / 2];
          inverse = at.sees(n, c) ? queries.normalizer[n][c % 2] * kWeightScale<T> : 0.0f;
        }
        weight[c] = s[n][c] = 0;
        if (inverse == 0) continue;  // not seen: whatever the key holds
        const float scaled = inverse * x[n][c];
        weight[c] = dropped ? 0 : similarity * inverse;
        logit_sums[c / 2] += similarity * scaled;
        s[n][c] = score * fit[c / 2] * scaled;
      }
      weights.template put<T>(n, weight);
      products.template put<Half>(n, s[n]);
    }
  }
};

}  // namespace
}  // namespace ikattn::cuda
