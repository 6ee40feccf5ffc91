// The sums of all parts of a head: its numbers, moments and Gram matrix as Half.
#include "attention/cuda/linear_parts.h"
#include "attention/cuda/tiles.h"

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

// Of a key head, a block: its center, its numbers, and the Gram matrix of all parts.
__global__ void __launch_bounds__(kHeadThreads, 1)
    finish_head_kernel(AttentionParams params, LinearTokens tokens, int F, TokenParts parts,
                       LinearSums sums) {
  IKATTN_SHARED(float, maxima, kHeadThreads / 32);
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
  if (threadIdx.x < kTokenSums) totals[threadIdx.x] = sum_of(static_cast<int>(threadIdx.x));
  const float unit = tokens.gram_scales == nullptr ? 1.0f : 1 / tokens.gram_scales[bk];
  float* gram = parts.gram + bk * (F * F);
  float most = 0;
  for (int index = threadIdx.x; index < F * F; index += kHeadThreads) {
    float sum = gram[index];
    for (int part = 1; part < parts.of_gram.count; ++part) {
      sum += gram[part * parts.heads * (F * F) + index];
    }
    gram[index] = sum * unit;
    if (index / F == index % F) most = fmaxf(most, sum);  // the largest are on the diagonal
  }
  most = max_of_block(most, maxima);
  const float terms = totals[0], squares = totals[1], fourths = totals[2];
  for (int c = threadIdx.x; c < columns - kTokenSums; c += kHeadThreads) {
    const float sum = sum_of(kTokenSums + c);
    sums.centers[bk * (columns - kTokenSums) + c] = !tokens.has_means ? sum
                                                    : terms > 0       ? sum / terms
                                                                      : 0.0f;
  }
  if (threadIdx.x != 0) return;
  const float row_scale = row_scale_of(params, tokens, bk);
  // Of the rows; from a center they are as far away as twice that. 2^-10 for what is rounded.
  const float bound = tokens.row_bounds == nullptr
                          ? 32768.0f
                          : 2.002f * __uint_as_float(tokens.row_bounds[bk]) * row_scale;
  // What the squares of a feature add up to; features that are not folded are at most 2.
  const float size =
      tokens.gram_weights == nullptr ? most : 4.004f * static_cast<float>(tokens.N * tokens.group);
  LinearHead head;
  head.terms = terms;
  head.squares = squares > 0 ? squares + 32 * (fourths / squares) : 0.0f;
  head.gram_unit = 0;  // see round_gram_kernel
  head.moment_fit = fitting_power(2 * bound * (size * tokens.entry_scale));
  head.row_unit = 1 / row_scale;
  head.moment_unit = 1 / (head.moment_fit * tokens.entry_scale);
  sums.heads[bk] = head;
}

// The sums of all parts, less the center's share, as Half; a thread has two columns, and a warp an
// entry. key_centers, of queries: of their keys.
__global__ void __launch_bounds__(kFinishThreads, 2)
    finish_moments_kernel(LinearTokens tokens, FeatureChunks chunks, int F, TokenParts parts,
                          LinearSums sums, const float* key_centers) {
  constexpr int kPairColumns = kMomentColumns / 2;
  static_assert(kPairColumns == 32);
  const int pairs = chunks.pairs();
  const int64_t index = int64_t{blockIdx.x} * kFinishThreads + threadIdx.x;
  const int64_t of_head = int64_t{parts.slices} * pairs * (kPairEntries * kPairColumns);
  const int64_t bk = index / of_head;
  if (bk >= parts.heads || leaves_out(tokens, bk)) return;  // the whole warp
  const int in_head = static_cast<int>(index % of_head);
  const int c = in_head % kPairColumns * 2, entry = in_head / kPairColumns % kPairEntries;
  const int pair = in_head / (kPairColumns * kPairEntries) % pairs;
  const int slice = in_head / (kPairColumns * kPairEntries) / pairs;
  float2 sum = make_float2(0, 0);
  for (int part = 0; part < parts.of_moments.count; ++part) {
    const float2 own =
        load_vector<float2>(parts.moments + (part * parts.heads * of_head + index) * 2);
    sum.x += own.x;
    sum.y += own.y;
  }
  const ChunkPair at(pair);
  const int a = at.a * kChunk + entry / kChunk, b = at.b * kChunk + entry % kChunk;
  float* gram = parts.gram + bk * (F * F);
  const LinearHead head = sums.heads[bk];
  if (tokens.has_means) {
    const float weight = gram[a * F + b] * tokens.entry_scale;
    const float2 center =
        load_vector<float2>(sums.centers + (bk * parts.slices + slice) * kMomentColumns + c);
    sum.x -= center.x * weight;
    sum.y -= center.y * weight;
  }
  if (sums.moments != nullptr) {
    const float fit = head.moment_fit * (at.a == at.b ? 1 : 2);
    store_vector(sums.moments + 2 * index, pack_f16x2(sum.x * fit, sum.y * fit));
  }
  if (sums.squares == nullptr) return;
  const uint32_t rounded = pack_f16x2(sum.x * head.moment_fit, sum.y * head.moment_fit);
  const int64_t n = chunks.count * kChunk, base = bk * n * n;
  store_vector(sums.squares + (base + a * n + b) * kMomentColumns + c, rounded);
  if (at.a != at.b) store_vector(sums.squares + (base + b * n + a) * kMomentColumns + c, rounded);
  if (key_centers == nullptr) return;
  // Of the rounded numbers, so that what they were rounded by cancels where this is subtracted.
  const float2 two = unpack<Half>(rounded);
  const float2 center = load_vector<float2>(key_centers + bk * kMomentColumns + c);
  const float share =
      sum_of_lanes(center.x * two.x + center.y * two.y) * (head.moment_unit * head.row_unit);
  if (threadIdx.x % 32 != 0) return;
  gram[a * F + b] += share;
  if (at.a != at.b) gram[b * F + a] += share;
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
  if (const char* error = launch(finish_head_kernel, dim3(heads), dim3(kHeadThreads), 0, stream,
                                 params, tokens, F, parts, sums)) {
    return error;
  }
  if (const char* error = launch(
          finish_moments_kernel, dim3(static_cast<unsigned>(ceil_div(pairs, kFinishThreads))),
          dim3(kFinishThreads), 0, stream, tokens, chunks, F, parts, sums, key_centers)) {
    return error;
  }
  return launch(round_gram_kernel, dim3(heads), dim3(kHeadThreads), 0, stream, tokens, F, parts,
                sums);
}

}  // namespace ikattn::cuda
