// Tokens for the tensor cores: which form a head takes, and its features in Half.
#include <cmath>

#include "attention/cuda/features/angle_products.h"
#include "attention/cuda/mma/row_lanes.h"
#include "attention/cuda/operands/math.h"
#include "attention/cuda/operands/operands.h"

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

// Over one key head, a block: max and spread of the logits, what is hidden and poisoned left out,
// and thus the form; then what the form needs of every key.
//   c, scaled_eps: of the folded form; most_spread: in nats, what it bears
template <int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads > 512 ? 1 : 2)
    fold_kernel(AttentionParams params, SplitLogits<float> logits, float c, float scaled_eps,
                double most_spread, float* scales, float* terms, float* lows, BFloat16* magnitudes,
                double* largest, uint32_t* state, unsigned* items_taken) {
  constexpr int kWarps = kThreads / 32;
  IKATTN_SHARED(double, maxima, kWarps);
  IKATTN_SHARED(double, minima, kWarps);
  IKATTN_SHARED(int, counts, kWarps);
  const int64_t S = params.S, padded = padded_tokens(S);
  const float* high = logits.high + blockIdx.x * S;
  const float* low = logits.low + blockIdx.x * S;
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
  for (int warp = 0; warp < kWarps; ++warp) {
    const double a = maxima[warp], z = minima[warp];
    most = a > most ? a : most;
    least = z < least ? z : least;
  }
  const double reference = most == -INFINITY ? 0.0 : most;
  const bool general = most_spread < 0 || most - least > most_spread;
  if (blockIdx.x == 0 && threadIdx.x < 2) items_taken[threadIdx.x] = 0;
  const auto reference_high = static_cast<float>(reference);
  const auto reference_low = static_cast<float>(reference - static_cast<double>(reference_high));
  int count = 0;
  for (int64_t j = threadIdx.x; j < padded; j += kThreads) {
    const bool hidden = j >= S || high[j] == -INFINITY;
    const float logit = hidden ? -INFINITY : (high[j] - reference_high) + (low[j] - reference_low);
    count += logit >= -kNatsThatCount;
    const float e = hidden ? 0.0f : expf(logit);
    terms[blockIdx.x * padded + j] = !general ? scaled_eps * e : hidden ? -INFINITY : high[j];
    if (magnitudes != nullptr) magnitudes[blockIdx.x * padded + j] = to_bfloat16(e);
    const float factor = hidden ? 0.0f : general ? 1.0f : c * sqrtf(e);
    const float scale = logit == logit ? factor : 0.0f;
    lows[blockIdx.x * padded + j] = !general ? scale : hidden ? 0.0f : low[j];
    if (j < S) scales[blockIdx.x * S + j] = scale;
  }
  count = sum_of_lanes(count);
  if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = count;
  __syncthreads();
  if (threadIdx.x != 0) return;
  int all = 0;
  for (int warp = 0; warp < kWarps; ++warp) all += counts[warp];
  largest[blockIdx.x] = reference;
  state[blockIdx.x] =
      (general ? kGeneral : 0u) | (any_unclean ? kUnclean : 0u) | (all <= kFewKeys ? kFew : 0u);
}

}  // namespace

const char* fold_tokens(const AttentionParams& params, const DeviceExecutor& executor,
                        const AngleOperands& operands, const SplitLogits<float>& logits,
                        const Route& route, bool for_backward, FoldedTokens& folded) {
  const int64_t key_heads = params.B * params.key_heads, keys = key_heads * params.S;
  const int64_t F = padded_columns(2 * params.M);
  const bool is_half = params.value.type != ElementType::kBFloat16;
  // Weights of Half stay below 2^15; those of bfloat16 have the exponents of float32.
  const double four_m = 4.0 * static_cast<double>(params.M);
  const double c = is_half ? std::sqrt(32768.0) / four_m : 4096.0;
  const double root = four_m * c, K = root * root;
  // Where integers serve all heads, or the kernel of pairs makes features, nothing else is needed.
  const bool has_integers = route.int8_scores && !for_backward;
  const bool are_made_later = route.is_short && !for_backward;
  const bool has_halves = !(has_integers || are_made_later) || !every_row_sees_all(params);
  Half* phi_q = executor.take<Half>(has_halves ? params.B * params.H * params.L * F : 0);
  Half* phi_k = executor.take<Half>(has_halves ? keys * F : 0);
  float* poison = for_backward ? nullptr : executor.take<float>(params.B * params.H * params.L);
  float* scales = executor.take<float>(keys);
  float* terms = executor.take<float>(key_heads * padded_tokens(params.S));
  float* lows = executor.take<float>(key_heads * padded_tokens(params.S));
  BFloat16* magnitudes =
      has_integers ? executor.take<BFloat16>(key_heads * padded_tokens(params.S)) : nullptr;
  double* largest = executor.take<double>(key_heads);
  uint32_t* state = executor.take<uint32_t>(key_heads);
  unsigned* items_taken = executor.take<unsigned>(2);
  folded = {};
  folded.phi_q = phi_q;
  folded.phi_k = phi_k;
  folded.poison = poison;
  folded.scales = scales;
  folded.terms = terms;
  folded.lows = lows;
  folded.largest = largest;
  folded.state = state;
  folded.items_taken = items_taken;
  const double weight_scale = is_half ? kWeightScale<Half> : kWeightScale<BFloat16>;
  folded.general.square = static_cast<float>(weight_scale / (four_m * four_m));
  folded.general.eps = static_cast<float>(weight_scale * params.eps);
  folded.root_scale = static_cast<float>(root);
  folded.log_scale = static_cast<float>(std::log(K));
  // A row may see only keys whose weights are the smallest: there c^2 eps exp(-spread), what a
  // score of 0 leaves, should still be a normal number of Half.
  const double of_half = std::min(12.0, std::log(0x1p29 * params.eps));
  // In causal linear time products of two features are Half in bfloat16, too, of eight bits down to
  // 2^-32 of the largest: 22 nats, of which products of small features need some.
  const bool is_linear = route.algorithm == Algorithm::kLinear;
  const double most_spread = is_general_alone(params)     ? -1.0
                             : every_row_sees_all(params) ? static_cast<double>(INFINITY)
                             : is_half                    ? of_half
                             : is_linear                  ? 16.0
                                                          : 36.0;
  const auto fold = [&](auto kernel, unsigned threads) {
    return launch(kernel, dim3(static_cast<unsigned>(key_heads)), dim3(threads), 0, executor.stream,
                  params, logits, static_cast<float>(c), static_cast<float>(K * params.eps),
                  most_spread, scales, terms, lows, magnitudes, largest, state, items_taken);
  };
  // A block has a head's keys: of many, all the threads that a block may have.
  if (const char* error =
          params.S > 1024 ? fold(fold_kernel<1024>, 1024) : fold(fold_kernel<256>, 256)) {
    return error;
  }
  if (const char* error = fold_values(params, executor, logits, route, for_backward, folded)) {
    return error;
  }
  FeatureDestination to = {phi_q, poison, phi_k, logits.high, scales};
  if (are_made_later) {
    to.state = state;  // of heads in the general form alone
  } else if (route.int8_scores) {
    to.state = state;
    to.int8_q = executor.take<int8_t>(params.B * params.H * params.L * Int8Features::kColumns);
    to.int8_k = executor.take<int8_t>(keys * Int8Features::kColumns);
    to.has_both = for_backward;
    folded.int8.phi_q = to.int8_q;
    folded.int8.phi_k = to.int8_k;
  }
  if (has_integers) {
    folded.int8.magnitudes = magnitudes;
    const double of_byte = 2.0 / Int8Features::kLargest, of_score = of_byte * of_byte / four_m;
    folded.int8.eps = to_float(to_bfloat16(static_cast<float>(params.eps / (of_score * of_score))));
    folded.log_scale = static_cast<float>(-2 * std::log(of_score));
  }
  if (are_made_later && every_row_sees_all(params)) return nullptr;
  return write_features_on_tensor_cores(params, operands, to, executor.stream);
}

}  // namespace ikattn::cuda
