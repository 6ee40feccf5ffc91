// Tokens for the tensor cores: the form that each head takes, and its features in Half or 8 bits.
#include <cmath>

#include "attention/cuda/features/angle_products.h"
#include "attention/cuda/features/key_forms.h"
#include "attention/cuda/features/key_logits.h"
#include "attention/cuda/mma/row_lanes.h"
#include "attention/cuda/operands/math.h"
#include "attention/cuda/tensor_cores/values.h"

namespace ikattn::cuda {
namespace {

// A logit of a key, of two parts; those of float32 may be large, and the second part then counts.
struct KeyLogit {
  float high, low;

  __device__ __forceinline__ bool is_above(KeyLogit other) const {
    return high > other.high || (high == other.high && low > other.low);
  }
  __device__ __forceinline__ double value() const {
    return static_cast<double>(high) + static_cast<double>(low);
  }
};

// Returns the form of a head by the max and the spread of its logits, leaving out hidden and
// poisoned keys. All threads of the block call it.
//   maxima, minima [warps]
template <int kThreads>
__device__ __forceinline__ HeadForm form_of_head(const float* high, const float* low, int64_t S,
                                                 double most_spread, Shared<double> maxima,
                                                 Shared<double> minima) {
  KeyLogit largest_seen = {-INFINITY, 0}, smallest_seen = {INFINITY, 0};
  bool unclean = false;
  for (int64_t j = threadIdx.x; j < S; j += kThreads) {
    const KeyLogit logit = {high[j], low[j]};
    const float sum = logit.high + logit.low;
    unclean = unclean || sum != sum;
    if (!is_finite(sum)) continue;
    if (logit.is_above(largest_seen)) largest_seen = logit;
    if (smallest_seen.is_above(logit)) smallest_seen = logit;
  }
  double most = max_of_lanes(largest_seen.value());
  double least = -max_of_lanes(-smallest_seen.value());
  if (threadIdx.x % 32 == 0) {
    maxima[threadIdx.x / 32] = most;
    minima[threadIdx.x / 32] = least;
  }
  const bool any_unclean = __syncthreads_or(unclean) != 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    const double a = maxima[warp], z = minima[warp];
    most = a > most ? a : most;
    least = z < least ? z : least;
  }
  return form_of_spread(most, least, any_unclean, most_spread);
}

// Bounds of the keys that a thread, or a warp, has seen: how many count, and the largest norms of
// their values, once of all, once where features have weight.
struct KeyBounds {
  int count = 0;
  float norm = 0, weighted_norm = 0;
};

// Over one key head, a block: its form, what the form needs of every key, and bounds.
template <int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads > 512 ? 1 : 2)
    fold_kernel(AttentionParams params, KeyForms forms) {
  constexpr int kWarps = kThreads / 32;
  IKATTN_SHARED(double, maxima, kWarps);
  IKATTN_SHARED(double, minima, kWarps);
  IKATTN_SHARED(int, counts, kWarps);
  IKATTN_SHARED(float, norms, kWarps);
  IKATTN_SHARED(float, weighted_norms, kWarps);
  const int64_t S = params.S, padded = padded_tokens(S), first = int64_t{blockIdx.x} * S;
  const unsigned warp = threadIdx.x / 32;
  const HeadForm form = form_of_head<kThreads>(forms.logits.high + first, forms.logits.low + first,
                                               S, forms.scales.most_spread, maxima, minima);
  KeyBounds own;
  for (int64_t j = threadIdx.x; j < padded; j += kThreads) {
    const FoldedKey key = fold_key(params, forms, form, blockIdx.x, j);
    const float norm = norm_that_counts(params, forms, blockIdx.x, j, key);
    own.count += key.logit >= -kNatsThatCount;
    own.norm = fmaxf(own.norm, norm);
    if (has_weight(key)) own.weighted_norm = fmaxf(own.weighted_norm, norm);
  }
  own = {sum_of_lanes(own.count), max_of_lanes(own.norm), max_of_lanes(own.weighted_norm)};
  if (threadIdx.x % 32 == 0) {
    counts[warp] = own.count;
    norms[warp] = own.norm;
    weighted_norms[warp] = own.weighted_norm;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  own.count = 0;
  for (int other = 0; other < kWarps; ++other) {
    own.count += counts[other];
    own.norm = fmaxf(own.norm, norms[other]);
    own.weighted_norm = fmaxf(own.weighted_norm, weighted_norms[other]);
  }
  store_head(forms, form, blockIdx.x, static_cast<unsigned>(own.count), own.norm,
             own.weighted_norm);
}

// Returns the spread of magnitudes, in nats, up to which a head takes the folded form.
double most_spread_of(const AttentionParams& params, const Route& route) {
  if (is_general_alone(params)) return -1.0;
  if (every_row_sees_all(params)) return static_cast<double>(INFINITY);
  // A row may see only keys whose weights are the smallest: there c^2 eps exp(-spread), what a
  // score of 0 leaves, should still be a normal number of Half.
  if (params.value.type != ElementType::kBFloat16) {
    return std::min(12.0, std::log(0x1p29 * params.eps));
  }
  // In causal linear time products of two features are Half in bfloat16, too, of eight bits down to
  // 2^-32 of the largest: 22 nats, of which products of small features need some.
  return route.algorithm == Algorithm::kLinear ? 16.0 : 36.0;
}

// Chooses each head's form, and makes the numbers that the form needs of its keys.
const char* choose_forms(const AttentionParams& params, const DeviceExecutor& executor,
                         const SplitLogits<float>& logits, const Route& route,
                         const ValueBounds& bounds, bool has_integers, FoldedTokens& folded) {
  const int64_t key_heads = params.B * params.key_heads, padded = padded_tokens(params.S);
  const double four_m = 4.0 * static_cast<double>(params.M);
  // Weights of Half stay below 2^15; those of bfloat16 have the exponents of float32.
  const bool is_half = params.value.type != ElementType::kBFloat16;
  const double c = is_half ? std::sqrt(32768.0) / four_m : 4096.0;
  const double root = four_m * c, K = root * root;
  const double weight_scale = is_half ? kWeightScale<Half> : kWeightScale<BFloat16>;
  HeadForms& keys = folded.forms;
  keys.scales = executor.take<float>(key_heads * params.S);
  keys.terms = executor.take<float>(key_heads * padded);
  keys.lows = executor.take<float>(key_heads * padded);
  BFloat16* magnitudes = has_integers ? executor.take<BFloat16>(key_heads * padded) : nullptr;
  keys.largest = executor.take<double>(key_heads);
  keys.state = executor.take<uint32_t>(key_heads);
  keys.item_counters = executor.take<unsigned>(2);
  keys.general.square = static_cast<float>(weight_scale / (four_m * four_m));
  keys.general.eps = static_cast<float>(weight_scale * params.eps);
  keys.root_scale = static_cast<float>(root);
  keys.log_scale = static_cast<float>(std::log(K));
  if (has_integers) {
    folded.int8.magnitudes = magnitudes;
    const double of_byte = 2.0 / Int8Features::kLargest, of_score = of_byte * of_byte / four_m;
    folded.int8.eps = to_float(to_bfloat16(static_cast<float>(params.eps / (of_score * of_score))));
    keys.log_scale = static_cast<float>(-2 * std::log(of_score));
  }
  const FoldScales scales = {static_cast<float>(c), static_cast<float>(K * params.eps),
                             most_spread_of(params, route)};
  // A block has a head's keys: of many, all the threads that a block may have.
  const unsigned threads = params.S > 1024 ? 1024 : 256;
  return launch(params.S > 1024 ? fold_kernel<1024> : fold_kernel<256>,
                dim3(static_cast<unsigned>(key_heads)), dim3(threads), 0, executor.stream, params,
                KeyForms{logits, scales, keys, magnitudes, bounds});
}

// Makes features of all heads in 8 bits: integers have one scale, whatever the form and the largest
// logit are.
const char* make_integers(const AttentionParams& params, const DeviceExecutor& executor,
                          const AngleOperands& operands, FeatureDestination to,
                          FoldedTokens& folded) {
  to.are_integers = true;
  to.int8_q = executor.take<int8_t>(params.B * params.H * params.L * Int8Features::kColumns);
  to.int8_k =
      executor.take<int8_t>(params.B * params.key_heads * params.S * Int8Features::kColumns);
  folded.int8.phi_q = to.int8_q;
  folded.int8.phi_k = to.int8_k;
  return write_features_on_tensor_cores(params, operands, to, executor.stream);
}

// Makes features in Half, of the heads whose features the route does not leave to integers.
const char* make_features(const AttentionParams& params, const DeviceExecutor& executor,
                          const AngleOperands& operands, const Route& route, bool has_others,
                          FeatureDestination to, FoldedTokens& folded) {
  const int64_t F = padded_columns(2 * params.M);
  to.phi_q = executor.take<Half>(params.B * params.H * params.L * F);
  to.phi_k = executor.take<Half>(params.B * params.key_heads * params.S * F);
  to.scales = folded.forms.scales;
  // has_others: of heads in the general form alone
  if (has_others || route.int8_scores) to.state = folded.forms.state;
  to.are_integers = !has_others && route.int8_scores;
  folded.phi_q = to.phi_q;
  folded.phi_k = to.phi_k;
  return write_features_on_tensor_cores(params, operands, to, executor.stream);
}

}  // namespace

const char* fold_tokens(const AttentionParams& params, const DeviceExecutor& executor,
                        const AngleOperands& operands, const SplitLogits<float>& logits,
                        const Route& route, bool for_backward, FoldedTokens& folded) {
  const bool has_integers = route.int8_scores && !for_backward;
  FeatureDestination to;
  to.poison = for_backward ? nullptr : executor.take<float>(params.B * params.H * params.L);
  to.logits = logits;
  folded = {};
  folded.poison = to.poison;
  ValueBounds bounds;
  const char* error = prepare_bounds(params, executor, route, for_backward, bounds);
  if (!error) {
    error = choose_forms(params, executor, logits, route, bounds, has_integers, folded);
  }
  if (!error && has_integers) {
    error = make_integers(params, executor, operands, to, folded);
  }
  // Makes no features that nobody reads: integers may serve all heads.
  if (!error && !(has_integers && every_row_sees_all(params))) {
    error = make_features(params, executor, operands, route, has_integers, to, folded);
  }
  return error ? error : place_values(params, executor, route, bounds, folded);  // scaled by bounds
}

}  // namespace ikattn::cuda
