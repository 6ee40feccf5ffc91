// Queries in linear time: the sums of their weights, and whether these keep their digits.
#include <algorithm>
#include <cmath>

#include "attention/cuda/linear/tiles.h"
#include "attention/cuda/operands/feature_source.h"
#include "attention/cuda/tensor_cores/epilogue_forward.h"

namespace ikattn::cuda {
namespace {

// 128 queries: sums [B, H, L] of weights, if they are wanted, and their logs. A block of which a
// query's are small against the mean of random directions takes quadratic time.
template <int F>
__global__ void __launch_bounds__(kFoldedThreads, 2)
    weight_sum_kernel(AttentionParams params, FoldedTokens tokens, FeatureChunks chunks,
                      LinearSums keys, float share_of_mean, float* sums,
                      uint32_t* quadratic_blocks) {
  constexpr uint32_t kGram = F * 2 * F;
  const int warp = threadIdx.x / 32, t = threadIdx.x % 4;
  const QueryBlock at(params, kLinearQueries, blockIdx.x);
  const int blocks = static_cast<int>((params.L + kLinearQueries - 1) / kLinearQueries);
  uint32_t* flag = quadratic_blocks + at.bh * blocks + at.i0 / kLinearQueries;
  const int prefix = keys.prefixes.of(at.i0);
  const int64_t place = int64_t{at.bk} * keys.prefixes.count + prefix;
  if (prefix < 0 || (tokens.forms.state[at.bk] & kLeftToPairs) != 0) {  // the whole block
    if (threadIdx.x == 0) *flag = 1;
    return;
  }
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  const Half* gram = keys.gram + place * int64_t{2 * F * F};
  for (int index = threadIdx.x; index < 2 * F * (F / 8); index += kFoldedThreads) {
    const int row = index / (F / 8), piece = index % (F / 8);  // rows of both numbers
    cp_async_16(base + swizzled(row, piece, 2 * F), gram + row * F + piece * 8);
  }
  cp_async_commit();

  Fragment phi[F / 16][2];
  const int64_t warp_row = at.i0 + warp * 32;
#pragma unroll
  for (int k = 0; k < F / 16; ++k) {
    load_chunk(phi[k], tokens.phi_q + (at.bh * params.L + warp_row) * chunks.width,
               remaining_of(params.L, warp_row), chunks, k);
  }
  cp_async_wait<0>();
  __syncthreads();

  float weights[2][2] = {}, squares[2][2] = {};
  const FragmentAddresses places = FragmentAddresses::of_columns(base, 2 * F);
#pragma unroll
  for (int k = 0; k < F / 16; ++k) {
    float products[2][2][4] = {};
#pragma unroll 1                                   // registers
    for (int number = 1; number >= 0; --number) {  // the small one first
      multiply_by_columns<Half, F / 16>(
          products, [&](int m, int inner) { return phi[inner][m]; },
          [&](int inner) { return number * kGram + places.at<2 * F>(k, inner); });
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 own = unpack<Half>(phi[k][m].registers[i]);
        const float (&row)[4] = products[m][i / 2];
        weights[m][i % 2] += own.x * row[i % 2 * 2] + own.y * row[i % 2 * 2 + 1];
        squares[m][i % 2] += own.x * own.x + own.y * own.y;
      }
    }
  }

  // Found anew: no register holds it over the products.
  const int thread = static_cast<int>(unknown_to_compiler(threadIdx.x));
  const int64_t first = at.i0 + thread / 32 * 32 + thread % 32 / 4;
  const LinearHead head = keys.heads[place];
  const float mean = share_of_mean * head.squares / static_cast<float>(2 * params.M);
  bool errs = false;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      weights[m][half] = sum_of_lanes<4>(weights[m][half]) * head.gram_unit;
      const float square = sum_of_lanes<4>(squares[m][half]);
      const int64_t i = first + m * 16 + 8 * half;
      // A row that is NaN anyhow may be told so here. Without poison, in the backward, all count.
      const bool counts = i < params.L && (tokens.poison == nullptr ||
                                           is_finite(tokens.poison[at.bh * params.L + i]));
      const bool keeps_digits =
          weights[m][half] >= mean * square && weights[m][half] + head.terms > 0;
      errs = errs || (counts && !keeps_digits);
    }
  }
  const bool is_quadratic = __syncthreads_or(errs) != 0;
  if (threadIdx.x == 0) *flag = is_quadratic;
  if (is_quadratic || t != 0 || sums == nullptr) return;
  const double reference = reference_of<Half, false>(tokens, at.bk, 0);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t i = first + m * 16 + 8 * half;
      if (i >= params.L) continue;
      const int64_t row = int64_t{at.bh} * params.L + i;
      const float sum = with_poison(tokens, row, weights[m][half] + head.terms);
      sums[row] = sum;
      if (params.is_causal) continue;  // pairs go on from here
      static_cast<double*>(params.log_normalizer.data)[row] = log_normalizer_of(sum, reference);
    }
  }
}

}  // namespace

// A prefix's table passes through memory in the time of some 900 tokens' entries (counted, on an
// H200). Pairs of a chunk take as long where its length is the root of ten times a table's numbers.
// Chunks are longer where tables of all prefixes, float32 and Half, would be more than a gigabyte;
// each head has one at least. Beyond 2^16 tokens sums on tensor cores have large errors, and pairs
// are not fewer by much. A short call that is to take linear time has the shortest chunks. The
// backward has more and larger tables, and more to do for a pair, so that the same chunks balance
// (counted, too). It adds up the queries of all heads that share keys.
Prefixes prefixes_of(const AttentionParams& params, Pass pass) {
  if (!params.is_causal) return {};
  const FeatureChunks chunks(params);
  const int64_t F = chunks.columns(), heads = params.B * params.key_heads;
  const int64_t numbers =
      chunks.pairs() * int64_t{kPairEntries * kMomentColumns} * moment_slices(params);
  const bool is_backward = pass == Pass::kBackward;
  const int64_t squares = int64_t{chunks.count} * chunks.count * (kPairEntries * kMomentColumns);
  const int64_t more = is_backward ? squares * 2 + F * F * 8 : 0;
  const int64_t bytes = heads * (numbers * 6 + F * F * 8 + more), most = int64_t{1} << 30;
  const auto root = static_cast<int64_t>(std::sqrt(10.0 * static_cast<double>(numbers)));
  const bool is_short = params.linear_time == LinearTime::kAlways && params.L <= root;
  const int64_t least = is_short ? kEntryTokens : root;
  const int64_t count = std::max<int64_t>(1, most / std::max<int64_t>(1, bytes));
  const int64_t tokens =
      ceil_div(std::max(least, ceil_div(params.L, count + 1)), kEntryTokens) * kEntryTokens;
  Prefixes prefixes;
  prefixes.count = 0;
  // Heads that share keys make one group; an empty call has none.
  const int64_t group = is_backward ? params.H / std::max<int64_t>(1, params.key_heads) : 1;
  if (tokens * group > int64_t{1} << 16) return prefixes;
  prefixes.tokens = static_cast<int>(tokens);
  prefixes.count = static_cast<int>(
      std::max<int64_t>(0, std::min(ceil_div(params.L, tokens) - 1, ceil_div(params.S, tokens))));
  return prefixes;
}

const char* find_quadratic_blocks(const AttentionParams& params, const DeviceExecutor& executor,
                                  const LinearSums& keys, float share, float* sums,
                                  FoldedTokens& tokens) {
  const FeatureChunks chunks(params);
  const int F = chunks.columns();
  const int64_t blocks = params.B * params.H * ceil_div(params.L, kLinearQueries);
  uint32_t* quadratic_blocks = executor.take<uint32_t>(blocks);
  tokens.linear.quadratic_blocks = quadratic_blocks;
  return launch(F == 64 ? weight_sum_kernel<64> : weight_sum_kernel<128>,
                dim3(static_cast<unsigned>(blocks)), dim3(kFoldedThreads), 4 * F * F,
                executor.stream, params, tokens, chunks, keys, share, sums, quadratic_blocks);
}

const char* linear_forward(const AttentionParams& params, const DeviceExecutor& executor,
                           FoldedTokens& tokens, InitialSums& initial) {
  LinearSums keys;
  TableMemory memory;
  if (const char* error = sum_tokens(params, executor, keys_of(params, tokens, Pass::kForward),
                                     nullptr, true, false, memory, keys)) {
    return error;
  }
  const int64_t heads = params.B * params.H;
  float* sums = executor.take<float>(heads * params.L);
  if (const char* error =
          find_quadratic_blocks(params, executor, keys, share_of_mean(params), sums, tokens)) {
    return error;
  }
  EntryProducts products = {};
  products.tokens = queries_of(params, tokens);
  products.sums = keys;
  products.output = params.output;
  products.columns = params.d_v;
  products.weights = sums;
  products.quadratic_blocks = tokens.linear.quadratic_blocks;
  if (params.is_causal) {
    const int64_t width = padded_columns(params.d_v);
    float* output = executor.take<float>(heads * params.L * width);
    products.output = contiguous(output, params.H, params.L, width);
    products.columns = width;
    products.goes_on = true;
    products.in_row_units = params.value.type != ElementType::kBFloat16;
    initial = {output, sums, keys.prefixes.tokens, keys.prefixes.count};
  }
  return entry_products(params, products, executor.stream);
}

}  // namespace ikattn::cuda
