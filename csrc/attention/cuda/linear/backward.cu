// The backward in linear time: what every query brings, and which heads can do without.
#include "attention/cuda/linear/gradients.h"
#include "attention/cuda/mma/row_lanes.h"
#include "attention/cuda/tensor_cores/blocks.h"
#include "attention/cuda/tensor_cores/rows.h"

namespace ikattn::cuda {
namespace {

// Of the queries, as sums over them read them: those of all heads that share keys one after the
// other, N = L H / key_heads of them.
struct LinearRows {
  Half* gradients;     // [B, H, L, 64]  dO / Z, in its own units
  float* deltas;       // [B, H, padded L]  d
  float* terms;        // [B, key_heads, padded N]  d / Z
  Half* gram_weights;  // [B, key_heads, padded N]  d / Z, in its own units
  // [B, key_heads]  of `gradients`, of gram_weights; of scaled gradients, and these times values
  float *row_scales, *gram_scales, *gradient_units, *pair_units;
  uint32_t* quadratic_blocks;  // [B, key_heads]

  LinearRows(const AttentionParams& params, const DeviceExecutor& executor) {
    const int64_t heads = params.B * params.H, key_heads = params.B * params.key_heads;
    gradients = executor.take<Half>(heads * params.L * kMomentColumns);
    deltas = executor.take<float>(heads * padded_tokens(params.L));
    terms = executor.take<float>(sum_count(params));
    gram_weights = executor.take<Half>(sum_count(params));
    for (float** numbers : {&row_scales, &gram_scales, &gradient_units, &pair_units}) {
      *numbers = executor.take<float>(key_heads);
    }
    quadratic_blocks = executor.take<uint32_t>(key_heads);
  }
  // Queries that share keys, and of all with their padding.
  static int64_t group_tokens(const AttentionParams& params) {
    return params.H / params.key_heads * params.L;
  }
  static int64_t sum_count(const AttentionParams& params) {
    return params.B * params.key_heads * padded_tokens(group_tokens(params));
  }
  // Padding is zero.
  const char* clear(const AttentionParams& params, Stream stream) const {
    if (const char* error = clear_bounds(quadratic_blocks, params.B * params.key_heads, stream)) {
      return error;
    }
    const int64_t count = sum_count(params);
    if (const char* error = clear_bounds(reinterpret_cast<uint32_t*>(terms), count, stream)) {
      return error;
    }
    return clear_bounds(reinterpret_cast<uint32_t*>(gram_weights), count / 2, stream);
  }
};

// Every query, those of the padding included: what it brings, and whether its head can do without
// pairs.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, 2)
    linear_row_kernel(AttentionBackwardParams params, FoldedTokens tokens, FoldedRows rows,
                      LinearSums keys, float share_of_mean, LinearRows to) {
  const int64_t padded = padded_tokens(params.L);
  const RowPlace at(params.H, padded);
  const int64_t i = at.row, index = at.bh * padded + i, bk = key_head_of(params, at.bh);
  const bool there = i < params.L;
  if ((tokens.state[bk] & kLeftToPairs) != 0) {  // the whole block
    if (i == 0 && at.lane == 0) atomicOr(to.quadratic_blocks + bk, 1u);
    return;
  }
  const LinearHead head = keys.heads[bk];
  const float normalizer = rows.normalizer[index];
  const float weighted = __uint_as_float(rows.weighted_bound[bk]);
  const float fit = fitting_power(weighted);
  uint4 packed = make_uint4(0, 0, 0, 0);
  const int64_t place = (at.bh * params.L + i) * kMomentColumns + at.lane * 8;
  if (there) packed = load_vector<uint4>(static_cast<const T*>(rows.gradients) + place);
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
  const float* center = keys.centers + bk * kMomentColumns + at.lane * 8;
  float of_center = 0;
  uint32_t scaled[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const float2 two = unpack<T>(words[n]);
    const float2 mean = load_vector<float2>(center + 2 * n);
    of_center += two.x * mean.x + two.y * mean.y;
    scaled[n] = pack_f16x2(two.x * normalizer * fit, two.y * normalizer * fit);
  }
  if (there) {
    store_vector(to.gradients + place, make_uint4(scaled[0], scaled[1], scaled[2], scaled[3]));
  }
  const float value_units = value_scale_of(tokens, value_head_of(params, at.b, at.head));
  const float delta =
      rows.delta[index] / (value_units * head.row_unit) - sum_of_lanes<kTokenLanes>(of_center);

  const int width = static_cast<int>(padded_columns(2 * params.M));
  const Half* phi = tokens.phi_q + (at.bh * params.L + i) * width;
  float square = 0;
  for (int column = at.lane * 8; there && column < width; column += kLaneColumns) {
    const uint4 features = load_vector<uint4>(phi + column);
    const uint32_t pairs[4] = {features.x, features.y, features.z, features.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 two = unpack<Half>(pairs[n]);
      square += two.x * two.x + two.y * two.y;
    }
  }
  square = sum_of_lanes<kTokenLanes>(square);
  if (at.lane != 0) return;
  const float mean = share_of_mean * head.squares / static_cast<float>(2 * params.M);
  // A row that is not finite spoils what it is added to here, too.
  const bool keeps_digits =
      normalizer != normalizer || (normalizer > 0 && 1 / normalizer - head.terms >= mean * square);
  if (there && !keeps_digits) atomicOr(to.quadratic_blocks + bk, 1u);
  // Values that were scaled are below 2^15 each, as is what they are at most from their center.
  const float bound = tokens.half_value.scales == nullptr
                          ? 2.002f * __uint_as_float(tokens.value_bounds[bk])
                          : 65536.0f * sqrtf(static_cast<float>(params.d_v));
  const float gram_scale = fitting_power(weighted * bound);
  to.deltas[index] = there ? delta : 0.0f;
  if (there) {
    const int64_t group = params.H / params.key_heads, group_tokens = group * params.L;
    const int64_t in_group = bk * padded_tokens(group_tokens) + at.bh % group * params.L + i;
    to.terms[in_group] = delta * normalizer;
    to.gram_weights[in_group] = to_half(delta * normalizer * gram_scale);
  }
  if (i != 0) return;  // all heads that share keys write the same
  const float gradient_units = gradient_scale_of(rows, bk);
  to.row_scales[bk] = fit;
  to.gram_scales[bk] = gram_scale;
  to.gradient_units[bk] = gradient_units;
  to.pair_units[bk] = gradient_units / head.row_unit;
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

}  // namespace

const char* linear_backward(const AttentionBackwardParams& params, const DeviceExecutor& executor,
                            FoldedTokens& tokens, const FoldedRows& rows, const float* logits,
                            const FoldedGradients& gradients) {
  const Stream stream = executor.stream;
  LinearTokens keys = keys_of(params, tokens), queries = queries_of(params, tokens);
  LinearSums of_keys;
  if (const char* error =
          sum_tokens(params, executor, keys, nullptr, false, wants_queries(params), of_keys)) {
    return error;
  }
  const LinearRows own(params, executor);
  tokens.quadratic_heads = own.quadratic_blocks;
  if (const char* error = own.clear(params, stream)) return error;
  // Gradients of queries with small sums of weights follow from small numbers over pairs,
  // too.
  const float share = share_of_mean(params) / 2;
  const char* error = launch_type(params, [&]<typename T>() {
    return launch(linear_row_kernel<T>, row_blocks(params.B * params.H, padded_tokens(params.L)),
                  dim3(kRowThreads), 0, stream, params, tokens, rows, of_keys, share, own);
  });
  if (error != nullptr) return error;
  keys.states = queries.states = own.quadratic_blocks;
  keys.left_out = queries.left_out = ~0u;
  if (wants_queries(params)) {
    const ElementType type = params.value.type == ElementType::kBFloat16 ? ElementType::kBFloat16
                                                                         : ElementType::kFloat16;
    const GradientSide side = {.tokens = queries,
                               .rows = rows_of_64(rows.gradients, type, params.H, params.L),
                               .scales = rows.normalizer,
                               .scale_stride = padded_tokens(params.L),
                               .deltas = own.deltas,
                               .pair_units = own.pair_units,
                               .gradients = gradients.phi_q};
    if (const char* failed = feature_gradients(params, side, of_keys, stream)) return failed;
  }
  if (!wants_keys(params)) return nullptr;
  LinearTokens added = queries;
  added.N = LinearRows::group_tokens(params);
  added.heads = added.row_heads = added.scale_heads = params.key_heads;
  added.group = 1;
  added.rows = rows_of_64(own.gradients, ElementType::kFloat16, added.heads, added.N);
  added.terms = own.terms;
  added.gram_weights = own.gram_weights;
  added.gram_scales = own.gram_scales;
  added.row_scales = own.row_scales;
  LinearSums of_queries;
  const bool wants_value = static_cast<bool>(params.grad_value);
  if (const char* failed =
          sum_tokens(params, executor, added, &of_keys, wants_value, true, of_queries)) {
    return failed;
  }
  const GradientSide side = {.tokens = keys,
                             .rows = keys.rows,
                             .scales = tokens.scales,
                             .scale_stride = params.S,
                             .pair_units = own.pair_units,
                             .gradients = gradients.phi_k,
                             .logits = logits,
                             .grad_logits = gradients.logits,
                             .centers = of_keys.centers};
  error = feature_gradients(params, side, of_queries, stream);
  if (error != nullptr || !wants_value) return error;
  EntryProducts products = {};
  products.tokens = keys;
  products.sums = of_queries;
  products.output = params.grad_value;
  products.units = own.gradient_units;
  products.logits = logits;
  return entry_products(params, products, stream);
}

}  // namespace ikattn::cuda
