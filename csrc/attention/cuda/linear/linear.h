// Attention in linear time on tensor cores, of calls without mask and dropout
// (attention/calls/linear_time.h has the sums and when they pay).
//
// Features are taken 16 at a time, a chunk. An entry is the product of two of them, a and b, of
// chunks A <= B. Where A < B it stands for (b, a), too, and its moments count twice; where A = B
// both are there. A pair of chunks has 256 entries, a by a, and pairs lie (0, 0), (0, 1), (1, 1),
// (0, 2) .., so that the entries of one B follow each other.
//
//   moment_ab = sum_j k_a k_b v_j,  gram_ab = sum_j k_a k_b,  sum_j S_ij^2 = q_i^T gram q_i
//   out_i = m + sum_ab q_a q_b (moment_ab - m gram_ab) / Z_i,  m = sum_j e_j v_j / sum_j e_j
//
// in the letters of operands/operands.h: the term of eps is in m, and small differences of large
// values keep their digits. Products of two features are Half, as are what moments add up to, for
// they are as good as weights of 11 bits are, unless a query's scores are all small against its
// features: a block with such a query is computed in quadratic time.
//
// A causal call goes in chunks of tokens. The sums are those over the keys before a chunk, a
// prefix, for each chunk anew. What its queries take of these, sum of w and sum of w V, is where
// the pairs of the chunk go on from (tensor_cores/forward.cu). So do those of the backward, from
// what queries take of the keys before their chunk, and keys of the queries after theirs.
#pragma once

#include "attention/calls/linear_time.h"
#include "attention/cuda/operands/operands.h"

namespace ikattn::cuda {

constexpr int kChunk = 16;          // features
constexpr int kPairEntries = 256;   // entries of two chunks
constexpr int kMomentColumns = 64;  // columns of the value, in a row of moments
constexpr int kEntryThreads = 256;  // threads of kernels whose warps have 32 tokens each
constexpr int kEntryWarps = kEntryThreads / 32;
constexpr int kEntryTokens = kEntryWarps * 32;

// Layout of the features of a token: cosines, then sines, from half of a row on.
struct FeatureChunks {
  int count, of_cosines, width;

  explicit FeatureChunks(const AttentionParams& params)
      : count(2 * static_cast<int>((params.M + kChunk - 1) / kChunk)),
        of_cosines(count / 2),
        width(static_cast<int>(padded_columns(2 * params.M))) {}
  __device__ __forceinline__ int column(int chunk) const {
    return chunk < of_cosines ? chunk * kChunk : width / 2 + (chunk - of_cosines) * kChunk;
  }
  __host__ __device__ __forceinline__ int pairs() const { return count * (count + 1) / 2; }
  // Returns how many columns the chunks have in shared memory, one after the other.
  int columns() const { return count <= 4 ? 64 : 128; }
};

// Returns how many slices of 64 columns the value has.
inline int moment_slices(const AttentionParams& params) {
  return static_cast<int>((params.d_v + kMomentColumns - 1) / kMomentColumns);
}

// Returns the least sum of a query's weights, over its mean of random directions. Weights of
// bfloat16, with 8 bits, have errors as large as the moments' where a quarter of that is left.
inline float share_of_mean(const AttentionParams& params) {
  return params.value.type == ElementType::kBFloat16 ? 0.0625f : 0.25f;
}

// Packs a number of Half twice.
inline uint32_t twice_half(float x) {
  const uint32_t bits = to_half(x).bits;
  return bits | bits << 16;
}

// Over which tokens there are sums. Of causal calls over the keys before each chunk but the first,
// or from the end: over the queries after each chunk, the last such chunk first. Else over all.
struct Prefixes {
  int count = 1;
  int tokens = 0;         // length of a chunk, a multiple of kEntryTokens; 0: not causal
  int group = 1;          // heads whose tokens of a chunk are added up, one head after the other
  bool from_end = false;  // over queries

  // Returns the prefix that tokens of the other side take, from the i-th on; -1: none.
  __device__ __forceinline__ int of(int i) const {
    if (tokens == 0) return 0;
    const int chunk = min(i / tokens, count);
    return from_end ? count - 1 - chunk : chunk - 1;
  }
};
// Chunks of a pass over the keys. There are no prefixes where the call is one chunk, or chunks
// would be too long: it cannot take linear time then.
Prefixes prefixes_of(const AttentionParams& params, Pass pass);

// Tokens that are added up: keys with their values, or queries with their gradients.
struct LinearTokens {
  const Half* phi;   // [B, heads, N, padded F]
  int64_t N, heads;  // tokens and heads of a batch
  int group;         // heads that share a key head: of queries, but where they are added up
  Array rows;        // [B, row_heads, N, row_columns]  Half, rows aligned to 16 bytes
  int64_t row_heads;
  int row_columns;     // a multiple of 8
  const float* terms;  // [B, heads, padded N]
  bool has_means;      // rows count by their terms; otherwise all alike
  // [B, heads, padded N]  what a token counts in the Gram matrix, times gram_scales [B, key_heads];
  // nullptr: 1
  const Half* gram_weights;
  const float* gram_scales;
  // [B, scale_heads]  of rows; nullptr: 1
  const float* row_scales;
  int64_t scale_heads;
  // [B, key_heads]  heads with one of these bits are left out
  const uint32_t* states;
  uint32_t left_out;
  // [B, key_heads]  of keys, how many chunks, the first ones, go by pairs; nullptr: none
  const uint32_t* chunks_by_pairs;
  float entry_scale;  // scale of products of two features, which makes the largest 2^15
  Prefixes prefixes;
};

// Memory that is taken again, if it is enough: by work that is queued after that which had it.
template <typename T>
struct MemoryInTurn {
  T* data = nullptr;
  int64_t count = 0;

  T* take(const DeviceExecutor& executor, int64_t wanted) {
    if (wanted > count) {
      data = executor.take<T>(wanted);
      count = wanted;
    }
    return data;
  }
};
// Tables that the sums of one side leave to those of the other.
struct TableMemory {
  MemoryInTurn<float> parts;
  MemoryInTurn<Half> squares;
};

// Numbers of a key head beside its sums; see LinearSums.
struct LinearHead {
  float terms;        // their sum
  float squares;      // sum over keys: sum_j |phi_k'|^2, times 1 + 32 / n
                      // (attention/cpu/linear/linear_time.h)
  float gram_unit;    // unit of the stored gram
  float moment_unit;  // unit of moments, beside the units of scaled rows
  float row_unit;     // unit of scaled rows, and of centers
};

// P: prefixes.
struct LinearSums {
  Half* moments;   // [B, key_heads, P, slices, pairs, 256, 64]; nullptr: not wanted
  Half* squares;   // [B, key_heads, P, 16 count, 16 count, 64]  of all a and b; nullptr likewise
  Half* gram;      // [B, key_heads, P, 2, columns, columns]  two split operands
  float* centers;  // [B, key_heads, P, slices * 64]  m; where there are no means, the sum of rows
  LinearHead* heads;  // [B, key_heads, P]
  Prefixes prefixes;
};

// The keys of a call, and its queries, the latter without what they are added up with.
LinearTokens keys_of(const AttentionParams& params, const FoldedTokens& tokens, Pass pass);
LinearTokens queries_of(const AttentionParams& params, const FoldedTokens& tokens);

// Adds up tokens. Keys take the center from their moments. key_centers, of queries: m [B,
// key_heads, 64] of their keys, and gram becomes gram + sum over columns of m moment.
const char* sum_tokens(const AttentionParams& params, const DeviceExecutor& executor,
                       const LinearTokens& tokens, const float* key_centers, bool wants_moments,
                       bool wants_squares, TableMemory& memory, LinearSums& sums);

// Sets tokens.linear.quadratic_blocks: where a query's sum of weights is below `share` of its mean
// of random directions. sums, if not nullptr: these of the others, [B, H, L].
const char* find_quadratic_blocks(const AttentionParams& params, const DeviceExecutor& executor,
                                  const LinearSums& keys, float share, float* sums,
                                  FoldedTokens& tokens);

// Entries of tokens times moments: of queries the output, of keys the gradients of values.
struct EntryProducts {
  LinearTokens tokens;  // whose entries
  LinearSums sums;      // whose moments
  Array output;         // [B, heads, N, columns]
  int64_t columns;
  // [B, heads, N]  of the output, which is center + product / weight; nullptr: of gradients, which
  // are center * term + product, over those of `units`, [B, key_heads]
  const float* weights;
  const float* units;
  const float* logits;               // [B, heads, N]  of gradients: -inf, none
  const uint32_t* quadratic_blocks;  // FoldedTokens::linear, of the output
  // The output, float32 and padded, is weight * center + product, of rows as the kernels of pairs
  // read them: scaled as those here, or not.
  bool goes_on, in_row_units;
};
const char* entry_products(const AttentionParams& params, const EntryProducts& products,
                           Stream stream);

struct FoldedRows;

struct InitialSums;
struct InitialGradients;

// The backward of heads that can do without pairs. Sets tokens.linear.quadratic_heads, and leaves
// the others to the kernels of pairs; of causal calls the pairs of chunks, too, from `initial` on.
const char* linear_backward(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                            FoldedTokens& tokens, const FoldedRows& rows, const float* logits,
                            const FoldedGradients& gradients, InitialGradients& initial);

// The forward. Sets tokens.linear.quadratic_blocks, and leaves these blocks to the kernels of
// pairs; of causal calls the others, too, from `initial` on.
const char* linear_forward(const AttentionParams& params, const DeviceExecutor& executor,
                           FoldedTokens& tokens, InitialSums& initial);

namespace {

// Whether all queries of a head are computed in quadratic time: with few keys a row may be a single
// one's, bit by bit; and what is not finite spoils only its own row there.
constexpr uint32_t kLeftToPairs = kGeneral | kUnclean | kFew;

__device__ __forceinline__ bool leaves_out(const LinearTokens& tokens, int64_t bk) {
  return (tokens.states[bk] & tokens.left_out) != 0;
}
__device__ __forceinline__ float row_scale_of(const AttentionParams& params,
                                              const LinearTokens& tokens, int64_t bk) {
  if (tokens.row_scales == nullptr) return 1;
  const int64_t b = bk / params.key_heads, head = bk % params.key_heads;
  return tokens.row_scales[b * tokens.scale_heads + head * tokens.scale_heads / params.key_heads];
}
// Returns the rows of a head of all batches'; `rows` lie like the rows of `tokens`.
template <typename T>
__device__ __forceinline__ const T* rows_of(const LinearTokens& tokens, const Array& rows,
                                            int64_t bh) {
  const int64_t b = bh / tokens.heads, h = bh % tokens.heads;
  return static_cast<const T*>(rows.data) + b * rows.stride[0] +
         h * tokens.row_heads / tokens.heads * rows.stride[1];
}

// The tokens of one of the blocks that own kEntryTokens tokens of a head each.
struct EntryBlock {
  int bh, first;  // head of all batches', token

  __device__ __forceinline__ EntryBlock(const LinearTokens& tokens, unsigned index) {
    const int blocks = static_cast<int>((tokens.N + kEntryTokens - 1) / kEntryTokens);
    bh = static_cast<int>(index) / blocks;
    first = static_cast<int>(index) % blocks * kEntryTokens;
  }
};

// Returns whether pairs have the 128 queries from the row-th of a block on; of rows beyond the
// last, yes.
__device__ __forceinline__ bool are_by_pairs(const LinearTokens& tokens,
                                             const uint32_t* quadratic_blocks, const EntryBlock& at,
                                             int row) {
  if (quadratic_blocks == nullptr) return false;
  const int blocks = static_cast<int>((tokens.N + kLinearQueries - 1) / kLinearQueries);
  const int block = (at.first + row) / kLinearQueries;
  return block >= blocks || quadratic_blocks[int64_t{at.bh} * blocks + block] != 0;
}
// Returns whether a block has nothing to do: pairs have all its tokens, or they take no sums.
__device__ __forceinline__ bool is_idle(const LinearTokens& tokens, const Prefixes& prefixes,
                                        const uint32_t* quadratic_blocks, const EntryBlock& at) {
  const int64_t bk = at.bh / tokens.group;
  const uint32_t* chunks = tokens.chunks_by_pairs;
  return leaves_out(tokens, bk) || prefixes.of(at.first) < 0 ||
         (chunks != nullptr && static_cast<uint32_t>(at.first / prefixes.tokens) < chunks[bk]) ||
         (are_by_pairs(tokens, quadratic_blocks, at, 0) &&
          are_by_pairs(tokens, quadratic_blocks, at, kLinearQueries));
}
// Returns which of the sums of all heads and prefixes the tokens of a block take.
__device__ __forceinline__ int64_t place_of_sums(const LinearTokens& tokens,
                                                 const Prefixes& prefixes, const EntryBlock& at) {
  return int64_t{at.bh / tokens.group} * prefixes.count + prefixes.of(at.first);
}

// The chunks of a pair.
struct ChunkPair {
  int a, b;

  __device__ __forceinline__ explicit ChunkPair(int pair) : a(pair), b(0) {
    while (a > b) a -= ++b;
  }
};

}  // namespace
}  // namespace ikattn::cuda
