// CPU: threads and the choice of instruction set.
#include "attention/operator/glue.h"

#include "attention/calls/determinism.h"
#include "attention/calls/linear_time.h"
#include "attention/calls/linear_time_setting.h"
#include "attention/cpu/kernel.h"
#include "attention/operator/which_kernels.h"
#include "support/cpu_glue.h"

namespace ikattn {
namespace {

const AttentionKernels& kernels() { return IKATTN_KERNELS(attention_kernels); }

// How many times as fast as in float32 pairs are, measured by when doing without them pays. With
// AMX, which no machine at hand has: a guess.
double rate_of_16_bits(const AttentionParams& params, bool backward) {
  if (sixteen_bits() == SixteenBits::kAmx) return 2;
  const bool only_scores =
      sixteen_bits() == SixteenBits::kVnni || (!backward && !params.allow_bfloat16);
  return only_scores ? 1.2 : 1.6;
}

// Null: the processor has none, or the call must not take them, or is faster in linear time.
const SixteenBitKernels* sixteen_bit_kernels(const AttentionParams& params, bool backward) {
  if (!params.takes_16_bits() ||
      takes_linear_time(params, backward, rate_of_16_bits(params, backward))) {
    return nullptr;
  }
#if IKATTN_HAVE_AMX
  if (sixteen_bits() == SixteenBits::kAmx) return &amx::sixteen_bit_kernels;
#endif
#if IKATTN_HAVE_AVX512_BF16
  if (sixteen_bits() == SixteenBits::kBFloat16) return &avx512_bf16::sixteen_bit_kernels;
#endif
#if IKATTN_HAVE_AVX512_VNNI
  if (sixteen_bits() == SixteenBits::kVnni) return &avx512_vnni::sixteen_bit_kernels;
#endif
  return nullptr;
}

template <typename Params>
Params with_settings(Params params, at::ScalarType type) {
  params.linear_time = linear_time_setting();
  params.batch_invariant = is_batch_invariant();
  params.allow_bfloat16 = (type == at::kFloat || type == at::kBFloat16) && torch_allows_bfloat16();
  return params;
}

struct Cpu {
  static void forward(const AttentionParams& given, const at::Tensor& query, double work) {
    const AttentionParams params = with_settings(given, query.scalar_type());
    const SixteenBitKernels* narrow = sixteen_bit_kernels(params, false);
    const auto forward = narrow ? narrow->forward : kernels().forward[compute_index(query)];
    forward(params, TorchExecutor("implicit_kernel_attention", work));
  }
  static void backward(const AttentionBackwardParams& given, const at::Tensor& query, double work) {
    const AttentionBackwardParams params = with_settings(given, query.scalar_type());
    const SixteenBitKernels* narrow = sixteen_bit_kernels(params, true);
    const auto backward = narrow ? narrow->backward : kernels().backward[compute_index(query)];
    backward(params, TorchExecutor("implicit_kernel_attention_backward", work));
  }
  static void weights(const WeightsParams& params, const at::Tensor& query, double work) {
    kernels().weights[compute_index(query)](with_settings(params, query.scalar_type()),
                                            TorchExecutor("implicit_kernel_weights", work));
  }
  static void features(const FeaturesParams& params, bool backward, const at::Tensor& x,
                       double work) {
    const char* function = backward ? "spectral_features_backward" : "spectral_features";
    kernels().features[compute_index(x)](params, backward, TorchExecutor(function, work));
  }
  static void from_features(const FromFeaturesParams& params, const at::Tensor& features,
                            double work) {
    kernels().from_features[compute_index(features)](
        params, TorchExecutor("attention_from_features", work));
  }
};

at::Tensor dropout_keep_mask_cpu(const at::Tensor& dropout_seed, int64_t B, int64_t H, int64_t L,
                                 int64_t S, double dropout_p) {
  check_dropout("dropout_keep_mask", dropout_p, dropout_seed);
  const at::Tensor keep = whole_keep_mask(dropout_seed, B, H, L, S);
  if (dropout_p == 0) return keep;
  const at::Tensor numbers = dropout_seed.contiguous();
  const DropoutState state = dropout_state(numbers, H);
  const uint32_t threshold = dropout_threshold(dropout_p);
  bool* out = keep.mutable_data_ptr<bool>();
  for (int64_t bh = 0; bh < B * H; ++bh, out += L * S) {
    for (int64_t row_group = 0; row_group < (L + 15) / 16 * 4; ++row_group) {
      for (int64_t column_group = 0; column_group < (S + 15) / 16 * 4; ++column_group) {
        const PhiloxBlock random = dropout_group(state, bh, row_group, column_group);
        for (int index = 0; index < 16; ++index) {
          const int64_t i =
              row_group / 4 * 16 + dropout_group_member(static_cast<int>(row_group % 4), index / 4);
          const int64_t j = column_group / 4 * 16 +
                            dropout_group_member(static_cast<int>(column_group % 4), index % 4);
          const uint32_t byte = (random.word[index / 4] >> (8 * (index % 4))) & 0xff;
          if (i < L && j < S) out[i * S + j] = byte >= threshold;
        }
      }
    }
  }
  return keep;
}

TORCH_LIBRARY_IMPL(ikattn, CPU, m) {
  AttentionOperators<Cpu>::register_in(m);
  implement<"dropout_keep_mask", dropout_keep_mask_cpu>(m);
}

}  // namespace

KernelChoice cpu_kernels(const AttentionParams& given, at::ScalarType type, bool backward) {
  const AttentionParams params = with_settings(given, type);
  if (sixteen_bit_kernels(params, backward) != nullptr) {
    return {"quadratic", name_of(sixteen_bits()), "", ""};
  }
  KernelChoice choice{takes_linear_time(params, backward) ? "linear" : "quadratic",
                      name_of(instruction_set()), why_no_vectors(), ""};
  const bool is_held_back = choice.algorithm == "quadratic" && wants_linear_time(params, backward);
  if (choice.reason.empty() && is_held_back) choice.reason = why_no_linear_time(params);
  if (choice.algorithm == "linear" || !choice.reason.empty()) return choice;
  AttentionParams free = params;
  free.batch_invariant = false;
  if (sixteen_bit_kernels(free, backward) != nullptr || takes_linear_time(free, backward)) {
    choice.reason = kBatchInvariantReason;
  }
  return choice;
}

}  // namespace ikattn
