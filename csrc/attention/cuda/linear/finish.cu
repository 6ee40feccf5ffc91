// The sums of all parts of a head: its numbers, and moments and Gram matrix as Half.
#include "attention/cuda/linear/parts.h"
#include "attention/cuda/operands/math.h"

namespace ikattn::cuda {
namespace {

constexpr int kHeadThreads = 1024;  // threads of kernels whose blocks have a key head each
constexpr int kFinishThreads = 256;

// Returns the largest x of kHeadThreads threads; `maxima` has room for a number of every warp.
__device__ __forceinline__ float max_of_block(float x, Shared<float> maxima) {
  x = max_of_lanes(x);
  if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = x;
  __syncthreads();
  const float other = maxima[threadIdx.x % 32];
  return max_of_lanes(other);
}

// Makes a prefix's center and numbers from its sums, kTokenSums and sums of rows; all threads of
// the block call it.
__device__ __forceinline__ void finish_prefix(const AttentionParams& params,
                                              const LinearTokens& tokens, int64_t bk, int64_t at,
                                              int rows, Shared<const float> totals,
                                              const LinearSums& sums) {
  const float terms = totals[0], squares = totals[1], fourths = totals[2];
  const int column = static_cast<int>(threadIdx.x);
  if (column < rows) {
    const float sum = totals[kTokenSums + column];
    sums.centers[at * rows + column] = !tokens.has_means ? sum : terms > 0 ? sum / terms : 0.0f;
  }
  if (column != 0) return;
  LinearHead head;
  head.terms = terms;
  const float of_one = squares > 0 ? fourths / squares : 0.0f;
  head.squares = squares + 32 * of_one;
  // Few keys with weight allow no query to go without pairs. Where all keys count, kFew tells it.
  if (tokens.prefixes.tokens > 0 && squares <= kFewKeys * of_one) head.squares = INFINITY;
  head.row_unit = 1 / row_scale_of(params, tokens, bk);
  head.gram_unit = head.moment_unit = 0;  // set by kernels that round
  sums.heads[at] = head;
}

// The Gram matrix of each prefix, an element a thread; grid: key heads, F F / kHeadThreads. The
// first blocks of the heads make their centers and numbers, too.
__global__ void __launch_bounds__(kHeadThreads, 1)
    finish_head_kernel(AttentionParams params, LinearTokens tokens, int F, TokenParts parts,
                       LinearSums sums) {
  constexpr int kMostSums = kTokenSums + 128;
  IKATTN_SHARED(float, totals, kMostSums);
  const int64_t bk = blockIdx.x;
  if (leaves_out(tokens, bk)) return;  // the whole block
  const float unit = tokens.gram_scales == nullptr ? 1.0f : 1 / tokens.gram_scales[bk];
  float* gram = parts.gram + bk * (F * F);
  const int index = static_cast<int>(blockIdx.y * kHeadThreads + threadIdx.x);
  if (index < F * F) {
    const int64_t of_part = parts.heads * (F * F);
    float sum = 0;
    for (int p = 0, part = 0; p < parts.prefixes; ++p) {
      for (; part < parts.of_gram.end_of(p); ++part) sum += gram[part * of_part + index];
      gram[p * of_part + index] = sum * unit;
    }
  }
  if (blockIdx.y != 0) return;  // the whole block
  const int columns = parts.sum_columns(), column = static_cast<int>(threadIdx.x);
  const float* from = parts.sums + bk * parts.of_sums.count * columns + column;
  float sum = 0;
  for (int p = 0, part = 0; p < parts.prefixes; ++p) {
    for (; column < columns && part < parts.of_sums.end_of(p); ++part) {
      sum += from[int64_t{part} * columns];
    }
    if (column < columns) totals[column] = sum;
    __syncthreads();
    finish_prefix(params, tokens, bk, bk * parts.prefixes + p, columns - kTokenSums, totals, sums);
    __syncthreads();
  }
}

// Entry of a thread, and two columns of its moments; a warp has an entry.
struct EntryPlace {
  int64_t index, bk;  // index of the two columns; key head
  int c, a, b, slice, pair;
  bool is_twice;  // a and b are of different chunks

  __device__ __forceinline__ EntryPlace(const FeatureChunks& chunks, const TokenParts& parts)
      : index(int64_t{blockIdx.x} * kFinishThreads + threadIdx.x) {
    constexpr int kPairColumns = kMomentColumns / 2;
    static_assert(kPairColumns == 32);
    const int pairs = chunks.pairs();
    const int64_t of_head = int64_t{parts.slices} * pairs * (kPairEntries * kPairColumns);
    bk = index / of_head;
    const int in_head = static_cast<int>(index % of_head);
    const int entry = in_head / kPairColumns % kPairEntries;
    c = in_head % kPairColumns * 2;
    pair = in_head / (kPairColumns * kPairEntries) % pairs;
    slice = in_head / (kPairColumns * kPairEntries) / pairs;
    const ChunkPair at(pair);
    a = at.a * kChunk + entry / kChunk;
    b = at.b * kChunk + entry % kChunk;
    is_twice = at.a != at.b;
  }
};

// The sums of each prefix, less the center's share, in place of the first parts'; and the largest.
__global__ void __launch_bounds__(kFinishThreads, 2)
    add_moments_kernel(LinearTokens tokens, FeatureChunks chunks, int F, TokenParts parts,
                       LinearSums sums) {
  const EntryPlace at(chunks, parts);
  if (at.bk >= parts.heads || leaves_out(tokens, at.bk)) return;  // the whole warp
  const int64_t of_part =
      parts.heads * parts.slices * chunks.pairs() * int64_t{kPairEntries * kMomentColumns};
  float* moments = parts.moments + at.index * 2;
  float2 sum = make_float2(0, 0);
  for (int p = 0, part = 0; p < parts.prefixes; ++p) {
    for (; part < parts.of_moments.end_of(p); ++part) {
      const float2 own = load_vector<float2>(moments + part * of_part);
      sum.x += own.x;
      sum.y += own.y;
    }
    const int64_t prefix = at.bk * parts.prefixes + p;
    float2 rest = sum;
    if (tokens.has_means) {
      const float* gram = parts.gram + (p * parts.heads + at.bk) * (F * F);
      const float weight = gram[at.a * F + at.b] * tokens.entry_scale;
      const float2 center = load_vector<float2>(
          sums.centers + (prefix * parts.slices + at.slice) * kMomentColumns + at.c);
      rest.x -= center.x * weight;
      rest.y -= center.y * weight;
    }
    store_vector(moments + p * of_part, rest);
    const float size = fmaxf(fabsf(rest.x), fabsf(rest.y));
    const float most = max_of_lanes(is_finite(size) ? size : 0.0f);
    uint32_t* bound = parts.moment_bounds + prefix;
    // Most are smaller than the bound of another warp.
    if (threadIdx.x % 32 == 0 && most > __uint_as_float(*bound)) raise(bound, most);
  }
}

// Moments as Half; blockIdx.y: a prefix. key_centers, of queries: of their keys.
__global__ void __launch_bounds__(kFinishThreads, 2)
    round_moments_kernel(LinearTokens tokens, FeatureChunks chunks, int F, TokenParts parts,
                         LinearSums sums, const float* key_centers) {
  const EntryPlace at(chunks, parts);
  if (at.bk >= parts.heads || leaves_out(tokens, at.bk)) return;  // the whole warp
  const int64_t p = blockIdx.y, prefix = at.bk * parts.prefixes + p;
  // The factor 2.002 allows for entries that count twice, and 2^-10 for rounding.
  const float fit = fitting_power(2.002f * __uint_as_float(parts.moment_bounds[prefix]));
  const float moment_unit = 1 / fit / tokens.entry_scale;
  const bool is_first = at.pair == 0 && at.slice == 0 && at.a == 0 && at.b == 0;
  if (is_first && at.c == 0) sums.heads[prefix].moment_unit = moment_unit;
  const int64_t of_head = int64_t{parts.slices} * chunks.pairs() * (kPairEntries * kMomentColumns);
  const float2 sum = load_vector<float2>(parts.moments + p * parts.heads * of_head + at.index * 2);
  if (sums.moments != nullptr) {
    const float own = fit * (at.is_twice ? 2 : 1);
    store_vector(sums.moments + (prefix - at.bk) * of_head + 2 * at.index,
                 pack_f16x2(sum.x * own, sum.y * own));
  }
  if (sums.squares == nullptr) return;
  const uint32_t rounded = pack_f16x2(sum.x * fit, sum.y * fit);
  const int64_t n = chunks.count * kChunk, base = prefix * n * n;
  store_vector(sums.squares + (base + at.a * n + at.b) * kMomentColumns + at.c, rounded);
  if (at.is_twice) {
    store_vector(sums.squares + (base + at.b * n + at.a) * kMomentColumns + at.c, rounded);
  }
  if (key_centers == nullptr) return;
  // Rounded numbers make the center, so that their rounding cancels where it is subtracted.
  const float2 two = unpack<Half>(rounded);
  const float2 center = load_vector<float2>(key_centers + at.bk * kMomentColumns + at.c);
  const float share =
      sum_of_lanes(center.x * two.x + center.y * two.y) * moment_unit * sums.heads[prefix].row_unit;
  if (threadIdx.x % 32 != 0) return;
  float* gram = parts.gram + (p * parts.heads + at.bk) * (F * F);
  gram[at.a * F + at.b] += share;
  if (at.is_twice) gram[at.b * F + at.a] += share;
}

// Splits the Gram matrix into two operands of Half; a block takes a prefix of a key head.
__global__ void __launch_bounds__(kHeadThreads, 1)
    round_gram_kernel(LinearTokens tokens, int F, TokenParts parts, LinearSums sums) {
  IKATTN_SHARED(float, maxima, kHeadThreads / 32);
  const int64_t prefix = blockIdx.x, bk = prefix / parts.prefixes, p = prefix % parts.prefixes;
  if (leaves_out(tokens, bk)) return;  // the whole block
  const float* gram = parts.gram + (p * parts.heads + bk) * (F * F);
  float most = 0;
  for (int index = threadIdx.x; index < F * F; index += kHeadThreads) {
    most = fmaxf(most, fabsf(gram[index]));
  }
  const float fit = fitting_power(max_of_block(most, maxima));
  if (threadIdx.x == 0) sums.heads[prefix].gram_unit = 1 / fit;
  Half* high = sums.gram + prefix * 2 * (F * F);
  for (int index = threadIdx.x; index < F * F; index += kHeadThreads) {
    const float scaled = gram[index] * fit;
    const Half rounded = to_half(scaled);
    high[index] = rounded;
    high[F * F + index] = to_half(scaled - to_float(rounded));
  }
}

}  // namespace

const char* finish_sums(const AttentionParams& params, const LinearTokens& tokens,
                        const TokenParts& parts, const LinearSums& sums, const float* key_centers,
                        Stream stream) {
  const FeatureChunks chunks(params);
  const int F = chunks.columns();
  const unsigned heads = static_cast<unsigned>(parts.heads);
  const unsigned prefixes = static_cast<unsigned>(parts.prefixes);
  const int64_t pairs = parts.heads * parts.slices * chunks.pairs() *
                        (kPairEntries * kMomentColumns / 2);  // pairs of moments
  const dim3 of_gram(heads, static_cast<unsigned>(ceil_div(F * F, kHeadThreads)));
  if (const char* error = launch(finish_head_kernel, of_gram, dim3(kHeadThreads), 0, stream, params,
                                 tokens, F, parts, sums)) {
    return error;
  }
  if (sums.moments != nullptr || sums.squares != nullptr) {
    const dim3 blocks(static_cast<unsigned>(ceil_div(pairs, kFinishThreads)));
    if (const char* error =
            clear_bounds(parts.moment_bounds, parts.heads * parts.prefixes, stream)) {
      return error;
    }
    if (const char* error = launch(add_moments_kernel, blocks, dim3(kFinishThreads), 0, stream,
                                   tokens, chunks, F, parts, sums)) {
      return error;
    }
    const dim3 of_prefixes(blocks.x, prefixes);
    if (const char* error = launch(round_moments_kernel, of_prefixes, dim3(kFinishThreads), 0,
                                   stream, tokens, chunks, F, parts, sums, key_centers)) {
      return error;
    }
  }
  return launch(round_gram_kernel, dim3(heads * prefixes), dim3(kHeadThreads), 0, stream, tokens, F,
                parts, sums);
}

}  // namespace ikattn::cuda
