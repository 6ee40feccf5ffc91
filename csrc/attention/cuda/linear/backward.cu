// The backward in linear time: numbers of every query, and heads that need no pairs.
#include "attention/cuda/linear/gradients.h"
#include "attention/cuda/mma/row_lanes.h"
#include "attention/cuda/operands/feature_source.h"
#include "attention/cuda/tensor_cores/initial_sums.h"
#include "attention/cuda/tensor_cores/rows.h"

namespace ikattn::cuda {
namespace {

// Rows of the queries, as sums over them read them: all heads that share keys one after the other,
// N = L H / key_heads rows; in causal calls so in each chunk.
struct LinearRows {
  Half* phi;           // [B, key_heads, N, padded F]  nullptr: features lie so
  Half* gradients;     // [B, key_heads, N, 64]  dO / Z, in its own units
  float* deltas;       // [B, H, padded L]  d, of the m that the query's sums over keys have
  float* centers;      // [B, key_heads, 64]  m of the others here
  float* terms;        // [B, key_heads, padded N]  d / Z
  Half* gram_weights;  // [B, key_heads, padded N]  d / Z, in its own units
  // [B, key_heads]  of `gradients`, of gram_weights; of scaled gradients, and these times values
  float *row_scales, *gram_scales, *gradient_units, *pair_units;
  // [B, key_heads]  bits of max |dO_i| / Z'; of causal calls of the queries whose sums are taken
  uint32_t* weighted_bound;
  // [B, key_heads]  which go by pairs; of causal calls how many chunks of their keys, the first
  uint32_t* quadratic_heads;

  // of_all: FoldedRows::weighted_bound
  LinearRows(const AttentionParams& params, const DeviceExecutor& executor, uint32_t* of_all) {
    const int64_t heads = params.B * params.H, key_heads = params.B * params.key_heads;
    const bool lie_so = !params.is_causal || params.H == params.key_heads;
    phi = lie_so ? nullptr : executor.take<Half>(heads * params.L * padded_columns(2 * params.M));
    centers = executor.take<float>(key_heads * kMomentColumns);
    gradients = executor.take<Half>(heads * params.L * kMomentColumns);
    deltas = executor.take<float>(heads * padded_tokens(params.L));
    terms = executor.take<float>(sum_count(params));
    gram_weights = executor.take<Half>(sum_count(params));
    for (float** numbers : {&row_scales, &gram_scales, &gradient_units, &pair_units}) {
      *numbers = executor.take<float>(key_heads);
    }
    quadratic_heads = executor.take<uint32_t>(key_heads);
    weighted_bound = params.is_causal ? executor.take<uint32_t>(key_heads) : of_all;
  }
  // Return how many queries share keys, and how many there are with their padding.
  __host__ __device__ static int64_t group_tokens(const AttentionParams& params) {
    return params.H / params.key_heads * params.L;
  }
  static int64_t sum_count(const AttentionParams& params) {
    return params.B * params.key_heads * padded_tokens(group_tokens(params));
  }
  // Padding is zero.
  const char* clear(const AttentionParams& params, Stream stream) const {
    if (const char* error = clear_bounds(quadratic_heads, params.B * params.key_heads, stream)) {
      return error;
    }
    const int64_t count = sum_count(params);
    if (const char* error = clear_bounds(reinterpret_cast<uint32_t*>(terms), count, stream)) {
      return error;
    }
    return clear_bounds(reinterpret_cast<uint32_t*>(gram_weights), count / 2, stream);
  }
};

// Returns where sums over queries find query i of a head: chunk by chunk, and in each those of the
// `group` heads that share keys one after the other.
__device__ __forceinline__ int64_t place_in_group(const AttentionParams& params,
                                                  const Prefixes& prefixes, int64_t bh, int64_t i) {
  const int64_t group = params.H / params.key_heads, of_head = bh % group;
  const int64_t tokens = prefixes.tokens == 0 ? params.L : prefixes.tokens;
  const int64_t first = i / tokens * tokens;
  return first * group + of_head * min(tokens, params.L - first) + i - first;
}

// Returns whether query i of a causal call goes by pairs alone.
__device__ __forceinline__ bool is_by_pairs(const AttentionParams& params,
                                            const FoldedTokens& tokens, int64_t bh, int64_t i) {
  const int64_t blocks = (params.L + kLinearQueries - 1) / kLinearQueries;
  return tokens.linear.quadratic_blocks[bh * blocks + i / kLinearQueries] != 0;
}

// Bounds weighted rows of causal calls, LinearRows::weighted_bound. Other calls may have far
// smaller sums of weights.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, 2)
    weighted_bound_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows,
                          uint32_t* bounds) {
  const RowPlace at(params.H, params.L);
  const int64_t i = at.row;
  double bound = 0;
  if (i < params.L && !is_by_pairs(params, tokens, at.bh, i)) {
    const uint4 packed = load_vector<uint4>(static_cast<const T*>(rows.gradients) +
                                            (at.bh * params.L + i) * kMomentColumns + at.lane * 8);
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
    float square = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 two = unpack<T>(words[n]);
      square += two.x * two.x + two.y * two.y;
    }
    bound = square;
  }
  const float normalizer = bound > 0 ? rows.normalizer[at.bh * padded_tokens(params.L) + i] : 0.0f;
  const double size = sqrt(sum_of_lanes<kTokenLanes>(bound));
  raise_by_warp(bounds + key_head_of(params, at.bh), size * static_cast<double>(normalizer));
}

// Returns whether what follows from the sums of query i keeps its digits; square: of its features.
__device__ __forceinline__ bool keeps_digits(const AttentionParams& params,
                                             const FoldedTokens& tokens, const LinearSums& keys,
                                             const LinearHead& head, float share_of_mean,
                                             int64_t bh, int64_t i, float normalizer,
                                             float square) {
  if (tokens.linear.quadratic_blocks != nullptr) {
    // Queries of the first chunk are in no sums.
    return i < keys.prefixes.tokens || !is_by_pairs(params, tokens, bh, i);
  }
  const float mean = share_of_mean * head.squares / static_cast<float>(2 * params.M);
  // A row that is not finite spoils what it is added to here, too.
  return normalizer != normalizer ||
         (normalizer > 0 && 1 / normalizer - head.terms >= mean * square);
}

// Makes the numbers of every query, padding included, and finds whether its head can do without
// pairs.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, 2)
    linear_row_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows,
                      LinearSums keys, float share_of_mean, LinearRows to) {
  const int64_t padded = padded_tokens(params.L);
  const RowPlace at(params.H, padded);
  const int64_t i = at.row, index = at.bh * padded + i, bk = key_head_of(params, at.bh);
  const bool there = i < params.L;
  if ((tokens.forms.state[bk] & kLeftToPairs) != 0) {  // the whole block
    if (i == 0 && at.lane == 0) atomicMax(to.quadratic_heads + bk, ~0u);
    return;
  }
  // 1. dO / Z, and dO . m, of the sums that the query takes, and of the last, of which the head is.
  const int64_t first = bk * keys.prefixes.count, last = first + keys.prefixes.count - 1;
  const int64_t own = first + max(keys.prefixes.of(static_cast<int>(i)), 0);
  const LinearHead head = keys.heads[last];
  const float normalizer = rows.normalizer[index];
  const float weighted = __uint_as_float(to.weighted_bound[bk]);
  const float fit = fitting_power(weighted);
  const int64_t N = LinearRows::group_tokens(params);
  const int64_t in_group = place_in_group(params, keys.prefixes, at.bh, i);
  uint4 packed = make_uint4(0, 0, 0, 0);
  if (there) {
    packed = load_vector<uint4>(static_cast<const T*>(rows.gradients) +
                                (at.bh * params.L + i) * kMomentColumns + at.lane * 8);
  }
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
  float of_own = 0, of_last = 0;
  uint32_t scaled[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int column = at.lane * 8 + 2 * n;
    const float2 two = unpack<T>(words[n]);
    const float2 center = load_vector<float2>(keys.centers + last * kMomentColumns + column);
    const float2 mean = load_vector<float2>(keys.centers + own * kMomentColumns + column);
    of_own += two.x * mean.x + two.y * mean.y;
    of_last += two.x * center.x + two.y * center.y;
    scaled[n] = pack_f16x2(two.x * normalizer * fit, two.y * normalizer * fit);
    // All heads that share keys write the same.
    if (i == 0) store_vector(to.centers + bk * kMomentColumns + column, center);
  }
  if (there) {
    store_vector(to.gradients + (bk * N + in_group) * kMomentColumns + at.lane * 8,
                 make_uint4(scaled[0], scaled[1], scaled[2], scaled[3]));
  }
  const float value_units = value_scale_of(tokens, value_head_of(params, at.b, at.head));
  const float whole = rows.delta[index] / (value_units * head.row_unit);
  const float own_delta = whole - sum_of_lanes<kTokenLanes>(of_own);
  const float delta = whole - sum_of_lanes<kTokenLanes>(of_last);

  // 2. Its features.
  const int width = static_cast<int>(padded_columns(2 * params.M));
  const Half* phi = tokens.phi_q + (at.bh * params.L + i) * width;
  float square = 0;
  for (int column = at.lane * 8; there && column < width; column += kLaneColumns) {
    const uint4 features = load_vector<uint4>(phi + column);
    if (to.phi != nullptr) store_vector(to.phi + (bk * N + in_group) * width + column, features);
    const uint32_t pairs[4] = {features.x, features.y, features.z, features.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 two = unpack<Half>(pairs[n]);
      square += two.x * two.x + two.y * two.y;
    }
  }
  square = sum_of_lanes<kTokenLanes>(square);
  if (at.lane != 0) return;

  // 3. Its numbers, and those of the head.
  if (there &&
      !keeps_digits(params, tokens, keys, head, share_of_mean, at.bh, i, normalizer, square)) {
    // Keys before its chunk would have it in their sums.
    const int64_t chunk = params.is_causal ? i / keys.prefixes.tokens : 1;
    atomicMax(to.quadratic_heads + bk, static_cast<uint32_t>(chunk));
  }
  // Values that were scaled are below 2^15 each, as is what they are at most from their center.
  const float bound = tokens.linear.half_value.scales == nullptr
                          ? 2.002f * __uint_as_float(tokens.value_bounds[bk])
                          : 65536.0f * sqrtf(static_cast<float>(params.d_v));
  const float gram_scale = fitting_power(weighted * bound);
  to.deltas[index] = there ? own_delta : 0.0f;
  if (there) {
    to.terms[bk * padded_tokens(N) + in_group] = delta * normalizer;
    to.gram_weights[bk * padded_tokens(N) + in_group] = to_half(delta * normalizer * gram_scale);
  }
  if (i != 0) return;  // all heads that share keys write the same
  const float gradient_units = gradient_scale_of(rows, bk);
  to.row_scales[bk] = fit;
  to.gram_scales[bk] = gram_scale;
  to.gradient_units[bk] = gradient_units;
  to.pair_units[bk] = gradient_units / head.row_unit;
}

// Fills `own`.
const char* make_rows(const AttentionBackwardParams& params, Stream stream,
                      const FoldedTokens& tokens, const FoldedRows& rows, const LinearSums& of_keys,
                      float share_of_mean, const LinearRows& own) {
  const int64_t heads = params.B * params.H, key_heads = params.B * params.key_heads;
  if (const char* error = own.clear(params, stream)) return error;
  return launch_type(params, [&]<typename T>() -> const char* {
    if (params.is_causal) {
      if (const char* error = clear_bounds(own.weighted_bound, key_heads, stream)) return error;
      if (const char* error =
              launch(weighted_bound_kernel<T>, row_blocks(heads, params.L), dim3(kRowThreads), 0,
                     stream, params, tokens, rows, own.weighted_bound)) {
        return error;
      }
    }
    return launch(linear_row_kernel<T>, row_blocks(heads, padded_tokens(params.L)),
                  dim3(kRowThreads), 0, stream, params, tokens, rows, of_keys, share_of_mean, own);
  });
}

// Rows of 64 columns of T, [B, heads, N, 64].
Array rows_of_64(void* data, ElementType type, int64_t heads, int64_t N) {
  Array array;
  array.data = data;
  array.type = type;
  array.stride[0] = heads * N * kMomentColumns;
  array.stride[1] = N * kMomentColumns;
  array.stride[2] = kMomentColumns;
  array.stride[3] = 1;
  return array;
}

// Leaves out whole heads, where there is no causality.
void leave_out_heads(const LinearRows& own, LinearTokens& tokens) {
  tokens.states = own.quadratic_heads;
  tokens.left_out = ~0u;
}

// Queries as their sums read them.
LinearTokens added_queries(const AttentionParams& params, const FoldedTokens& tokens,
                           const LinearRows& own, const Prefixes& of_keys) {
  LinearTokens added = queries_of(params, tokens);
  if (own.phi != nullptr) added.phi = own.phi;
  added.N = LinearRows::group_tokens(params);
  added.heads = added.row_heads = added.scale_heads = params.key_heads;
  added.group = 1;
  added.rows = rows_of_64(own.gradients, ElementType::kFloat16, added.heads, added.N);
  added.terms = own.terms;
  added.gram_weights = own.gram_weights;
  added.gram_scales = own.gram_scales;
  added.row_scales = own.row_scales;
  if (!params.is_causal) leave_out_heads(own, added);
  added.prefixes = of_keys;
  added.prefixes.group = static_cast<int>(params.H / params.key_heads);
  added.prefixes.from_end = true;
  return added;
}

// Computes the gradients of keys from sums over queries; those of values in float32 where pairs add
// to them.
const char* key_gradients(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                          const FoldedTokens& tokens, const LinearTokens& keys,
                          const LinearRows& own, const LinearSums& of_queries, const float* logits,
                          const FoldedGradients& gradients, InitialGradients& initial) {
  const GradientSide side = {.tokens = keys,
                             .rows = keys.rows,
                             .scales = tokens.forms.scales,
                             .scale_stride = params.S,
                             .pair_units = own.pair_units,
                             .gradients = gradients.phi_k,
                             .logits = logits,
                             .grad_logits = gradients.logits,
                             .centers = own.centers};
  const char* error = feature_gradients(params, side, of_queries, executor.stream);
  if (error != nullptr || !params.grad_value) return error;
  EntryProducts products = {};
  products.tokens = keys;
  products.sums = of_queries;
  products.output = params.grad_value;
  products.columns = params.d_v;
  if (params.is_causal) {
    float* value = executor.take<float>(params.B * params.key_heads * params.S * kMomentColumns);
    products.output = contiguous(value, params.key_heads, params.S, kMomentColumns);
    products.columns = kMomentColumns;
    initial.value = value;
  }
  products.units = own.gradient_units;
  products.logits = logits;
  return entry_products(params, products, executor.stream);
}

}  // namespace

const char* linear_backward(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                            FoldedTokens& tokens, const FoldedRows& rows, const float* logits,
                            const FoldedGradients& gradients, InitialGradients& initial) {
  const Stream stream = executor.stream;
  LinearTokens keys = keys_of(params, tokens, Pass::kBackward);
  LinearSums of_keys;
  TableMemory memory;
  const char* error =
      sum_tokens(params, executor, keys, nullptr, false, wants_queries(params), memory, of_keys);
  if (error != nullptr) return error;
  // Gradients of queries with small sums of weights follow from small numbers over pairs,
  // too.
  const float share = share_of_mean(params) / 2;
  if (params.is_causal) {
    error = find_quadratic_blocks(params, executor, of_keys, share, nullptr, tokens);
    if (error != nullptr) return error;
    initial.chunk = keys.prefixes.tokens;
    initial.most = keys.prefixes.count;
  }
  const LinearRows own(params, executor, rows.weighted_bound);
  tokens.linear.quadratic_heads = own.quadratic_heads;
  if ((error = make_rows(params, stream, tokens, rows, of_keys, share, own)) != nullptr)
    return error;
  if (wants_queries(params)) {
    const ElementType type = params.value.type == ElementType::kBFloat16 ? ElementType::kBFloat16
                                                                         : ElementType::kFloat16;
    GradientSide side = {.tokens = queries_of(params, tokens),
                         .rows = rows_of_64(rows.gradients, type, params.H, params.L),
                         .scales = rows.normalizer,
                         .scale_stride = padded_tokens(params.L),
                         .deltas = own.deltas,
                         .quadratic_blocks = tokens.linear.quadratic_blocks,
                         .pair_units = own.pair_units,
                         .gradients = gradients.phi_q};
    if (!params.is_causal) leave_out_heads(own, side.tokens);
    if ((error = feature_gradients(params, side, of_keys, stream)) != nullptr) return error;
  }
  if (!wants_keys(params)) return nullptr;
  LinearSums of_queries;
  error = sum_tokens(params, executor, added_queries(params, tokens, own, keys.prefixes),
                     own.centers, static_cast<bool>(params.grad_value), true, memory, of_queries);
  if (error != nullptr) return error;
  if (params.is_causal) {
    keys.chunks_by_pairs = own.quadratic_heads;
  } else {
    leave_out_heads(own, keys);
  }
  return key_gradients(params, executor, tokens, keys, own, of_queries, logits, gradients, initial);
}

}  // namespace ikattn::cuda
