// Tokens for the tensor cores: which form a head takes, and its features in Half.
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

// The spread of magnitudes, in nats, up to which a head takes the folded form.
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

// Memory for features in 8 bits.
void take_integers(const AttentionParams& params, const DeviceExecutor& executor,
                   FeatureDestination& to, FoldedTokens& folded) {
  to.int8_q = executor.take<int8_t>(params.B * params.H * params.L * Int8Features::kColumns);
  to.int8_k =
      executor.take<int8_t>(params.B * params.key_heads * params.S * Int8Features::kColumns);
  folded.int8.phi_q = to.int8_q;
  folded.int8.phi_k = to.int8_k;
}
// Features in 8 bits of all heads: integers have one scale, whatever the form and the largest logit
// are.
const char* write_integers(const AttentionParams& params, const DeviceExecutor& executor,
                           const AngleOperands& operands, const SplitLogits<float>& logits,
                           float* poison, FoldedTokens& folded) {
  FeatureDestination to;
  to.poison = poison;
  to.logits = logits;
  to.are_integers = true;
  take_integers(params, executor, to, folded);
  return write_features_on_tensor_cores(params, operands, to, executor.stream);
}

// Memory for the form of each head, and for what follows from it for its keys.
KeyForms take_forms(const AttentionParams& params, const DeviceExecutor& executor,
                    const SplitLogits<float>& logits, const Route& route, const ValueBounds& bounds,
                    bool has_integers, FoldedTokens& folded) {
  const int64_t key_heads = params.B * params.key_heads, padded = padded_tokens(params.S);
  const double four_m = 4.0 * static_cast<double>(params.M);
  // Weights of Half stay below 2^15; those of bfloat16 have the exponents of float32.
  const bool is_half = params.value.type != ElementType::kBFloat16;
  const double c = is_half ? std::sqrt(32768.0) / four_m : 4096.0;
  const double root = four_m * c, K = root * root;
  const FoldedKeys keys = {
      .scales = executor.take<float>(key_heads * params.S),
      .terms = executor.take<float>(key_heads * padded),
      .lows = executor.take<float>(key_heads * padded),
      .magnitudes = has_integers ? executor.take<BFloat16>(key_heads * padded) : nullptr,
      .largest = executor.take<double>(key_heads),
      .state = executor.take<uint32_t>(key_heads),
      .item_counters = executor.take<unsigned>(2),
  };
  folded.scales = keys.scales;
  folded.terms = keys.terms;
  folded.lows = keys.lows;
  folded.largest = keys.largest;
  folded.state = keys.state;
  folded.item_counters = keys.item_counters;
  const double weight_scale = is_half ? kWeightScale<Half> : kWeightScale<BFloat16>;
  folded.general.square = static_cast<float>(weight_scale / (four_m * four_m));
  folded.general.eps = static_cast<float>(weight_scale * params.eps);
  folded.root_scale = static_cast<float>(root);
  folded.log_scale = static_cast<float>(std::log(K));
  if (has_integers) {
    folded.int8.magnitudes = keys.magnitudes;
    const double of_byte = 2.0 / Int8Features::kLargest, of_score = of_byte * of_byte / four_m;
    folded.int8.eps = to_float(to_bfloat16(static_cast<float>(params.eps / (of_score * of_score))));
    folded.log_scale = static_cast<float>(-2 * std::log(of_score));
  }
  const FoldScales scales = {static_cast<float>(c), static_cast<float>(K * params.eps),
                             most_spread_of(params, route)};
  return {logits, scales, keys, bounds};
}

const char* choose_form(const AttentionParams& params, const KeyForms& forms, Stream stream) {
  // A block has a head's keys: of many, all the threads that a block may have.
  const unsigned threads = params.S > 1024 ? 1024 : 256;
  return launch(params.S > 1024 ? fold_kernel<1024> : fold_kernel<256>,
                dim3(static_cast<unsigned>(params.B * params.key_heads)), dim3(threads), 0, stream,
                params, forms);
}

}  // namespace

const char* fold_tokens(const AttentionParams& params, const DeviceExecutor& executor,
                        const AngleOperands& operands, const SplitLogits<float>& logits,
                        const Route& route, bool for_backward, FoldedTokens& folded) {
  const int64_t queries = params.B * params.H * params.L;
  const int64_t keys = params.B * params.key_heads * params.S, F = padded_columns(2 * params.M);
  const bool has_integers = route.int8_scores && !for_backward;
  const bool are_made_later = route.is_short && !for_backward;
  float* poison = for_backward ? nullptr : executor.take<float>(queries);
  folded = {};
  folded.poison = poison;
  ValueBounds bounds;
  if (const char* error = prepare_bounds(params, executor, route, for_backward, bounds)) {
    return error;
  }
  const KeyForms forms = take_forms(params, executor, logits, route, bounds, has_integers, folded);
  if (const char* error = choose_form(params, forms, executor.stream)) return error;
  if (has_integers && !are_made_later) {
    if (const char* error = write_integers(params, executor, operands, logits, poison, folded)) {
      return error;
    }
  }
  const auto place = [&] { return place_values(params, executor, route, bounds, folded); };
  // Where integers serve all heads, or the kernel of pairs makes features, nothing else is needed.
  const bool has_others = has_integers || are_made_later;
  if (has_others && every_row_sees_all(params)) return place();
  FeatureDestination to;
  to.phi_q = executor.take<Half>(queries * F);
  to.phi_k = executor.take<Half>(keys * F);
  to.poison = poison;
  to.logits = logits;
  to.scales = folded.scales;
  if (has_others) {
    to.state = folded.state;  // of heads in the general form alone
  } else if (route.int8_scores) {
    to.state = folded.state;
    to.are_integers = true;
    if (route.int8_gradients) take_integers(params, executor, to, folded);
  }
  folded.phi_q = to.phi_q;
  folded.phi_k = to.phi_k;
  if (const char* error = write_features_on_tensor_cores(params, operands, to, executor.stream)) {
    return error;
  }
  return place();  // scaled by bounds
}

}  // namespace ikattn::cuda
