// Tokens for the tensor cores: which form a head takes, and its features in Half.
#include <cmath>

#include "attention/cuda/feature_source.h"
#include "attention/cuda/folded.h"
#include "attention/cuda/tiles.h"

namespace ikattn::cuda {
namespace {

// Over one key head, a block: max and spread of the logits, what is hidden and poisoned left out,
// and thus the form; then what the form needs of every key.
//   c, scaled_eps: of the folded form; most_spread: in nats, what it bears
__global__ void __launch_bounds__(256, 2)
    fold_kernel(AttentionParams params, SplitLogits<float> logits, float c, float scaled_eps,
                float most_spread, float* scales, float* terms, float* lows, float* largest,
                uint32_t* state) {
  IKATTN_SHARED(float, maxima, 8);
  IKATTN_SHARED(float, minima, 8);
  const int64_t S = params.S, padded = padded_tokens(S);
  const float* high = logits.high + blockIdx.x * S;
  const float* low = logits.low + blockIdx.x * S;
  float most = -INFINITY, least = INFINITY;
  bool unclean = false;
  for (int64_t j = threadIdx.x; j < S; j += 256) {
    const float logit = high[j];
    unclean = unclean || logit != logit || low[j] != low[j];
    if (!is_finite(logit)) continue;
    most = logit > most ? logit : most;
    least = logit < least ? logit : least;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
    least = fminf(least, __shfl_xor_sync(0xffffffffu, least, step));
  }
  if (threadIdx.x % 32 == 0) {
    maxima[threadIdx.x / 32] = most;
    minima[threadIdx.x / 32] = least;
  }
  const bool any_unclean = __syncthreads_or(unclean) != 0;
  for (int warp = 0; warp < 8; ++warp) {
    const float a = maxima[warp], z = minima[warp];
    most = a > most ? a : most;
    least = z < least ? z : least;
  }
  const float reference = most == -INFINITY ? 0.0f : most;
  const bool general = most_spread < 0 || most - least > most_spread;
  if (threadIdx.x == 0) {
    largest[blockIdx.x] = reference;
    state[blockIdx.x] = (general ? kGeneral : 0u) | (any_unclean ? kUnclean : 0u);
  }
  for (int64_t j = threadIdx.x; j < padded; j += 256) {
    const float logit = j < S ? high[j] : -INFINITY;
    const bool hidden = logit == -INFINITY;
    const float e = hidden ? 0.0f : expf((logit - reference) + low[j]);
    terms[blockIdx.x * padded + j] = general ? logit : scaled_eps * e;
    lows[blockIdx.x * padded + j] = hidden ? 0.0f : low[j];
    if (j >= S) continue;
    const float scale = general ? (hidden ? 0.0f : 1.0f) : c * sqrtf(e);
    scales[blockIdx.x * S + j] = logit == logit ? scale : 0.0f;
  }
}

}  // namespace

const char* fold_tokens(const AttentionParams& params, const DeviceExecutor& executor,
                        const SplitLogits<float>& logits, bool clean_queries,
                        FoldedTokens& folded) {
  const int64_t key_heads = params.B * params.key_heads, keys = key_heads * params.S;
  const int64_t F = padded_features(2 * params.M);
  const bool is_half = params.value.type == ElementType::kFloat16;
  // Weights of Half stay below 2^15; those of bfloat16 have the exponents of float32.
  const double four_m = 4.0 * static_cast<double>(params.M);
  const double c = is_half ? std::sqrt(32768.0) / four_m : 4096.0;
  const double root = four_m * c, K = root * root;
  Half* phi_q = executor.take<Half>(params.B * params.H * params.L * F);
  Half* phi_k = executor.take<Half>(keys * F);
  float* scales = executor.take<float>(keys);
  float* terms = executor.take<float>(key_heads * padded_tokens(params.S));
  float* lows = executor.take<float>(key_heads * padded_tokens(params.S));
  float* largest = executor.take<float>(key_heads);
  uint32_t* state = executor.take<uint32_t>(key_heads);
  folded = {phi_q,
            phi_k,
            scales,
            terms,
            lows,
            largest,
            state,
            static_cast<float>(root),
            static_cast<float>(std::log(K))};
  const float most_spread = has_float_mask(params)       ? -1.0f
                            : every_row_sees_all(params) ? static_cast<float>(INFINITY)
                            : is_half                    ? 12.0f
                                                         : 36.0f;
  if (const char* error =
          launch(fold_kernel, dim3(static_cast<unsigned>(key_heads)), dim3(256), 0, executor.stream,
                 params, logits, static_cast<float>(c), static_cast<float>(K * params.eps),
                 most_spread, scales, terms, lows, largest, state)) {
    return error;
  }
  const auto rows_of_half = [&](Half* data, int64_t heads, int64_t N) {
    Array array = contiguous(data, heads, N, F);
    array.type = ElementType::kFloat16;
    return array;
  };
  FeatureOptions<float> options;
  options.width = F;
  options.clean = clean_queries;
  if (const char* error =
          write_features<float>(source_of(params, false), rows_of_half(phi_q, params.H, params.L),
                                options, executor.stream)) {
    return error;
  }
  options.clean = false;
  options.logits = logits.high;
  options.scales = scales;
  return write_features<float>(source_of(params, true),
                               rows_of_half(phi_k, params.key_heads, params.S), options,
                               executor.stream);
}

}  // namespace ikattn::cuda
