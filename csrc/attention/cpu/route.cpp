#include "attention/cpu/route.h"

#include "attention/calls/determinism.h"
#include "attention/calls/linear_time.h"
#include "attention/cpu/kernel.h"
#include "attention/operator/which_kernels.h"
#include "support/instruction_set.h"

namespace ikattn {
namespace {

// Returns the speed of pairs relative to float32, measured by the lengths from which linear time is
// faster. That of AMX is a guess, for no such machine was at hand.
double rate_of_16_bits(const AttentionParams& params, bool backward) {
  if (sixteen_bits() == SixteenBits::kAmx) return 2;
  const bool only_scores =
      sixteen_bits() == SixteenBits::kVnni || (!backward && !params.allow_bfloat16);
  return only_scores ? 1.2 : 1.6;
}

// Returns null where the processor has no such products.
const SixteenBitKernels* sixteen_bit_kernels() {
  switch (sixteen_bits()) {
#if IKATTN_HAVE_AMX
    case SixteenBits::kAmx:
      return &amx::sixteen_bit_kernels;
#endif
#if IKATTN_HAVE_AVX512_BF16
    case SixteenBits::kBFloat16:
      return &avx512_bf16::sixteen_bit_kernels;
#endif
#if IKATTN_HAVE_AVX512_VNNI
    case SixteenBits::kVnni:
      return &avx512_vnni::sixteen_bit_kernels;
#endif
    default:
      return nullptr;
  }
}

// Returns why no faster kernels take a pass; "" where there are none.
std::string why_not_faster(const AttentionParams& params, const Route& route, bool backward) {
  if (route.sixteen_bits) return "";
  if (const char* reason = why_no_vectors(); *reason != '\0' || route.is_linear) return reason;
  if (wants_linear_time(params, backward)) return why_no_linear_time(params);
  AttentionParams free = params;
  free.batch_invariant = false;
  const Route faster = route_of(free, backward);
  return faster.sixteen_bits || faster.is_linear ? kBatchInvariantReason : "";
}

}  // namespace

Route route_of(const AttentionParams& params, bool backward) {
  const SixteenBitKernels* const narrow = takes_16_bits(params) ? sixteen_bit_kernels() : nullptr;
  const double rate_of_pairs = narrow ? rate_of_16_bits(params, backward) : 1;
  if (takes_linear_time(params, backward, rate_of_pairs)) return {.is_linear = true};
  return {.sixteen_bits = narrow};
}

KernelChoice cpu_kernels(const AttentionParams& params, bool backward) {
  const Route route = route_of(params, backward);
  return {.algorithm = route.is_linear ? "linear" : "quadratic",
          .unit = route.sixteen_bits ? name_of(sixteen_bits()) : name_of(instruction_set()),
          .reason = why_not_faster(params, route, backward),
          .scores = "",
          .proven = "the CPU"};
}

}  // namespace ikattn
