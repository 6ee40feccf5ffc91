// The sums of all parts of a head: its numbers, and moments and Gram matrix as Half.
#include "attention/cuda/linear/parts.h"
#include "attention/cuda/operands/math.h"

namespace ikattn::cuda {
namespace {

constexpr int kHeadThreads = 1024;  // of kernels whose blocks have a key head each
constexpr int kFinishThreads = 256;

// Of kHeadThreads threads, with room for a number of every warp.
__device__ __forceinline__ float max_of_block(float x, Shared<float> maxima) {
  x = max_of_lanes(x);
  if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = x;
  __syncthreads();
  const float other = maxima[threadIdx.x % 32];
  return max_of_lanes(other);
}

// The Gram matrix of all parts, an element a thread; grid: key heads, F F / kHeadThreads. The first
// blocks of the heads make their centers and numbers, too.
__global__ void __launch_bounds__(kHeadThreads, 1)
    finish_head_kernel(AttentionParams params, LinearTokens tokens, int F, TokenParts parts,
                       LinearSums sums) {
  IKATTN_SHARED(float, totals, kTokenSums);
  const int64_t bk = blockIdx.x;
  if (leaves_out(tokens, bk)) return;  // the whole block
  const int columns = parts.sum_columns();
  const auto sum_of = [&](int column) {
    const float* from = parts.sums + bk * parts.of_sums.count * columns + column;
    float sum = 0;
    for (int part = 0; part < parts.of_sums.count; ++part) sum += from[int64_t{part} * columns];
    return sum;
  };
  const float unit = tokens.gram_scales == nullptr ? 1.0f : 1 / tokens.gram_scales[bk];
  float* gram = parts.gram + bk * (F * F);
  const int index = static_cast<int>(blockIdx.y * kHeadThreads + threadIdx.x);
  if (index < F * F) {
    float sum = gram[index];
    for (int part = 1; part < parts.of_gram.count; ++part) {
      sum += gram[part * parts.heads * (F * F) + index];
    }
    gram[index] = sum * unit;
  }
  if (blockIdx.y != 0) return;  // the whole block
  if (threadIdx.x < kTokenSums) totals[threadIdx.x] = sum_of(static_cast<int>(threadIdx.x));
  __syncthreads();
  const float terms = totals[0], squares = totals[1], fourths = totals[2];
  for (int c = threadIdx.x; c < columns - kTokenSums; c += kHeadThreads) {
    const float sum = sum_of(kTokenSums + c);
    sums.centers[bk * (columns - kTokenSums) + c] = !tokens.has_means ? sum
                                                    : terms > 0       ? sum / terms
                                                                      : 0.0f;
  }
  if (threadIdx.x != 0) return;
  LinearHead head;
  head.terms = terms;
  head.squares = squares > 0 ? squares + 32 * (fourths / squares) : 0.0f;
  head.row_unit = 1 / row_scale_of(params, tokens, bk);
  head.gram_unit = head.moment_unit = 0;  // those that round tell
  sums.heads[bk] = head;
}

// Of which entry, and which two columns of its moments, a thread is; a warp has an entry.
struct EntryPlace {
  int64_t index, bk;  // of the two columns; key head
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

// The sums of all parts, less the center's share, in place of the first part's; and the largest.
__global__ void __launch_bounds__(kFinishThreads, 2)
    add_moments_kernel(LinearTokens tokens, FeatureChunks chunks, int F, TokenParts parts,
                       LinearSums sums) {
  const EntryPlace at(chunks, parts);
  if (at.bk >= parts.heads || leaves_out(tokens, at.bk)) return;  // the whole warp
  const int64_t of_part =
      parts.heads * parts.slices * chunks.pairs() * int64_t{kPairEntries * kMomentColumns};
  float2 sum = make_float2(0, 0);
  for (int part = 0; part < parts.of_moments.count; ++part) {
    const float2 own = load_vector<float2>(parts.moments + part * of_part + at.index * 2);
    sum.x += own.x;
    sum.y += own.y;
  }
  if (tokens.has_means) {
    const float weight = parts.gram[at.bk * (F * F) + at.a * F + at.b] * tokens.entry_scale;
    const float2 center = load_vector<float2>(
        sums.centers + (at.bk * parts.slices + at.slice) * kMomentColumns + at.c);
    sum.x -= center.x * weight;
    sum.y -= center.y * weight;
  }
  store_vector(parts.moments + at.index * 2, sum);
  const float size = fmaxf(fabsf(sum.x), fabsf(sum.y));
  const float most = max_of_lanes(is_finite(size) ? size : 0.0f);
  uint32_t* bound = parts.moment_bounds + at.bk;
  // Most are smaller than what another warp has told.
  if (threadIdx.x % 32 == 0 && most > __uint_as_float(*bound)) raise(bound, most);
}

// Moments as Half. key_centers, of queries: of their keys.
__global__ void __launch_bounds__(kFinishThreads, 2)
    round_moments_kernel(LinearTokens tokens, FeatureChunks chunks, int F, TokenParts parts,
                         LinearSums sums, const float* key_centers) {
  const EntryPlace at(chunks, parts);
  if (at.bk >= parts.heads || leaves_out(tokens, at.bk)) return;  // the whole warp
  // Those that count twice, too; 2^-10 for what is rounded.
  const float fit = fitting_power(2.002f * __uint_as_float(parts.moment_bounds[at.bk]));
  const float moment_unit = 1 / fit / tokens.entry_scale;
  const bool is_first = at.pair == 0 && at.slice == 0 && at.a == 0 && at.b == 0;
  if (is_first && at.c == 0) sums.heads[at.bk].moment_unit = moment_unit;
  const float2 sum = load_vector<float2>(parts.moments + at.index * 2);
  if (sums.moments != nullptr) {
    const float own = fit * (at.is_twice ? 2 : 1);
    store_vector(sums.moments + 2 * at.index, pack_f16x2(sum.x * own, sum.y * own));
  }
  if (sums.squares == nullptr) return;
  const uint32_t rounded = pack_f16x2(sum.x * fit, sum.y * fit);
  const int64_t n = chunks.count * kChunk, base = at.bk * n * n;
  store_vector(sums.squares + (base + at.a * n + at.b) * kMomentColumns + at.c, rounded);
  if (at.is_twice) {
    store_vector(sums.squares + (base + at.b * n + at.a) * kMomentColumns + at.c, rounded);
  }
  if (key_centers == nullptr) return;
  // Of the rounded numbers, so that what they were rounded by cancels where this is subtracted.
  const float2 two = unpack<Half>(rounded);
  const float2 center = load_vector<float2>(key_centers + at.bk * kMomentColumns + at.c);
  const float share =
      sum_of_lanes(center.x * two.x + center.y * two.y) * moment_unit * sums.heads[at.bk].row_unit;
  if (threadIdx.x % 32 != 0) return;
  float* gram = parts.gram + at.bk * (F * F);
  gram[at.a * F + at.b] += share;
  if (at.is_twice) gram[at.b * F + at.a] += share;
}

// The Gram matrix as two numbers of Half each; a block has that of a key head.
__global__ void __launch_bounds__(kHeadThreads, 1)
    round_gram_kernel(LinearTokens tokens, int F, TokenParts parts, LinearSums sums) {
  IKATTN_SHARED(float, maxima, kHeadThreads / 32);
  const int64_t bk = blockIdx.x;
  if (leaves_out(tokens, bk)) return;  // the whole block
  const float* gram = parts.gram + bk * (F * F);
  float most = 0;
  for (int index = threadIdx.x; index < F * F; index += kHeadThreads) {
    most = fmaxf(most, fabsf(gram[index]));
  }
  const float fit = fitting_power(max_of_block(most, maxima));
  if (threadIdx.x == 0) sums.heads[bk].gram_unit = 1 / fit;
  Half* high = sums.gram + bk * 2 * (F * F);
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
  const int64_t pairs = parts.heads * parts.slices * chunks.pairs() *
                        (kPairEntries * kMomentColumns / 2);  // of moments
  const dim3 of_gram(heads, static_cast<unsigned>(ceil_div(F * F, kHeadThreads)));
  if (const char* error = launch(finish_head_kernel, of_gram, dim3(kHeadThreads), 0, stream, params,
                                 tokens, F, parts, sums)) {
    return error;
  }
  if (sums.moments != nullptr || sums.squares != nullptr) {
    const dim3 blocks(static_cast<unsigned>(ceil_div(pairs, kFinishThreads)));
    if (const char* error = clear_bounds(parts.moment_bounds, parts.heads, stream)) return error;
    if (const char* error = launch(add_moments_kernel, blocks, dim3(kFinishThreads), 0, stream,
                                   tokens, chunks, F, parts, sums)) {
      return error;
    }
    if (const char* error = launch(round_moments_kernel, blocks, dim3(kFinishThreads), 0, stream,
                                   tokens, chunks, F, parts, sums, key_centers)) {
      return error;
    }
  }
  return launch(round_gram_kernel, dim3(heads), dim3(kHeadThreads), 0, stream, tokens, F, parts,
                sums);
}

}  // namespace ikattn::cuda
