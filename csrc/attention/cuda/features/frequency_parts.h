// The frequencies' gradients are sums over all tokens that share them. Blocks add up shares of the
// tokens, and another kernel the shares, always in the same order.
#pragma once

#include "attention/cuda/cuda_cores/tile_product.h"
#include "attention/cuda/operands/feature_source.h"

namespace ikattn::cuda {

// Division of the tokens that share frequencies: in shares of whole heads, and heads in ranges of
// tokens.
struct TokenShares {
  int64_t tokens_each;  // tokens of a range, at most
  int64_t heads;        // heads of all batches that share one set of frequencies
  int64_t heads_each;   // heads of a share
  int64_t ranges;       // ranges of a head
  int64_t count;        // number of shares

  TokenShares(const FeatureSource& source, int64_t tokens) : tokens_each(tokens) {
    heads = source.heads / source.frequency_heads *
            (source.frequency_batches == 1 ? source.B : int64_t{1});
    ranges = (source.N + tokens - 1) / tokens;
    heads_each = source.N > 0 && source.N < tokens ? tokens / source.N : 1;
    count = (heads + heads_each - 1) / heads_each * ranges;
  }
};

// Partial sums of the shares, [share][frequency batch, head][w1, w2][d][M].
template <typename T>
struct FrequencyParts {
  TokenShares shares;
  T* sums;

  // No executor: no sums are wanted.
  FrequencyParts(const FeatureSource& source, int64_t tokens_each, const DeviceExecutor* executor)
      : shares(source, tokens_each), sums(nullptr) {
    if (executor == nullptr) return;
    sums = executor->take<T>(shares.count * 2 * source.frequency_batches * source.frequency_heads *
                             source.d * source.M);
  }
  // Returns the grid of the kernel that writes the parts.
  dim3 blocks(const FeatureSource& source) const {
    return dim3(static_cast<unsigned>(shares.count * source.frequency_batches *
                                      source.frequency_heads * ceil_div(source.d, kTile) *
                                      ceil_div(source.M, kTile)));
  }
};

// grad_w1 and grad_w2, those that are there, += the parts.
template <typename T>
const char* add_frequency_parts(const FeatureSource& source, const FrequencyParts<T>& parts,
                                T* grad_w1, T* grad_w2, Stream stream);

namespace {

// Sums of a block: 64 dimensions and 64 frequencies over one share.
template <typename T>
struct FrequencyBlock {
  // The grid's size is of 32 bits, and so is what it is made of.
  unsigned c0, m0, frequency_batch, frequency_head, group;
  int64_t first_head, end_head, first, end;  // heads of the share, and tokens of each
  T* part;                                   // part of w1
  int64_t size;                              // to that of w2

  __device__ FrequencyBlock(const FeatureSource& source, const FrequencyParts<T>& parts,
                            unsigned index = blockIdx.x) {
    const TokenShares& shares = parts.shares;
    const unsigned tiles_m = (static_cast<unsigned>(source.M) + kTile - 1) / kTile;
    const unsigned tiles_c = (static_cast<unsigned>(source.d) + kTile - 1) / kTile;
    const unsigned heads = static_cast<unsigned>(source.frequency_heads);
    const unsigned sets = static_cast<unsigned>(source.frequency_batches) * heads;
    const unsigned ranges = static_cast<unsigned>(shares.ranges);
    m0 = index % tiles_m * kTile;
    index /= tiles_m;
    c0 = index % tiles_c * kTile;
    index /= tiles_c;
    const unsigned which = index % sets, share = index / sets;
    frequency_batch = which / heads;
    frequency_head = which % heads;
    group = static_cast<unsigned>(source.heads) / heads;
    first_head = share / ranges * shares.heads_each;
    end_head = min(first_head + shares.heads_each, shares.heads);
    first = share % ranges * shares.tokens_each;
    end = min(first + shares.tokens_each, source.N);
    size = source.d * source.M;
    part = parts.sums + int64_t{index} * 2 * size;
  }
  // Return the batch and the head of the share's unit-th head.
  __device__ int64_t batch(int64_t unit) const {
    return frequency_batch + static_cast<unsigned>(unit) / group;
  }
  __device__ int64_t head(int64_t unit) const {
    return frequency_head * group + static_cast<unsigned>(unit) % group;
  }
};

}  // namespace
}  // namespace ikattn::cuda
