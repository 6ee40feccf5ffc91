// The choice of kernels; see route.h.
#include <algorithm>
#include <array>
#include <string>

#include "attention/calls/determinism.h"
#include "attention/calls/tensor_core_calls.h"
#include "attention/cuda/hopper/pipeline.h"
#include "attention/cuda/linear/linear.h"
#include "attention/cuda/operands/route.h"
#include "support/cuda/families.h"

namespace ikattn::cuda {
namespace {

// Returns why a family is off.
const char* why_off(Family family) {
  static const auto reasons = [] {
    std::array<std::string, kFamilies> said;
    for (size_t i = 0; i < kFamilies; ++i) {
      const std::string name = kLedger[i].name;
      said[i] = is_proven(static_cast<Family>(i))
                    ? "IKATTN_KERNELS turns the family " + name + " off"
                    : "no GPU has proven the family " + name + ", which IKATTN_KERNELS=+" + name +
                          " turns on";
    }
    return said;
  }();
  return reasons[static_cast<size_t>(family)].c_str();
}

// Returns nullptr, or why a call in float32 cannot take split products.
const char* why_no_split_products(const AttentionParams& params) {
  if (params.M > 64 || params.d_v > 128) {
    return "without TF32 (torch.backends.cuda.matmul.fp32_precision = 'tf32') float32 takes at "
           "most 64 frequencies and 128 columns of value on tensor cores";
  }
  if (params.d_v < 1) return "the head size of value must be at least 1";
  return is_on(Family::kSplit) ? nullptr : why_off(Family::kSplit);
}

// nullptr, or why a call goes to CUDA cores: not to the tensor cores as it is, nor by split
// products.
const char* why_cuda_cores(const AttentionParams& params) {
  const char* const reason = why_no_tensor_cores(params);
  if (reason == nullptr || params.value.type != ElementType::kFloat32) return reason;
  const char* const of_split = why_no_split_products(params);
  return of_split == nullptr || !params.allow_tf32 ? of_split : reason;
}

// nullptr, or why a pass cannot take linear time.
const char* why_no_linear_time(const AttentionParams& params, Pass pass) {
  if (!is_on(Family::kLinear)) return why_off(Family::kLinear);
  if (params.is_causal && !is_on(Family::kCausalLinear)) return why_off(Family::kCausalLinear);
  if (params.mask.type != ElementType::kNone) {
    return "linear time takes no attn_mask that differs between queries";
  }
  if (params.dropout_threshold != 0) return "linear time takes no dropout";
  if (is_wide(params)) {
    return "on CUDA linear time takes at most 64 frequencies and 128 columns of value";
  }
  if (params.is_causal && prefixes_of(params, pass).count == 0) {
    return "in linear time a causal call has chunks of up to 2^16 tokens, and more than one";
  }
  if (pass == Pass::kBackward && moment_slices(params) > 1) {
    return "on CUDA the backward in linear time takes at most 64 columns of value";
  }
  return nullptr;
}

// Returns whether a call may have scores of integers.
bool allows_int8(const AttentionParams& params) {
  return params.query.type == params.value.type && params.value.type == ElementType::kBFloat16 &&
         is_on(Family::kInt8);
}

// Returns whether features of 8 bits are exact enough: their errors are about as large as those of
// weights and values in bfloat16, and larger than in float16. With few keys, errors of scores do
// not average out; with fewer frequencies a row would be half empty.
bool serves_int8(const AttentionParams& params) {
  return params.S > kFewKeys && padded_columns(2 * params.M) == Int8Features::kColumns &&
         params.eps <= 0.9 && allows_int8(params);
}

bool linear_time_pays(const AttentionParams& params, Pass pass);

// Returns whether the forward may have scores of integers: not in causal calls whose backward takes
// linear time (takes_int8).
bool forward_may_take_int8(const AttentionParams& params) {
  const bool has_linear_backward = params.is_causal &&
                                   why_no_linear_time(params, Pass::kBackward) == nullptr &&
                                   linear_time_pays(params, Pass::kBackward);
  return serves_int8(params) && !has_linear_backward;
}

// Returns whether linear time is the faster algorithm, where it is possible. The cost model counts
// multiply-adds: pairs do more of them per second, and the overhead of a token counts as a number
// of them. The constants make both algorithms equally fast where they were on an H100, with scores
// of integers on an H200; 1.3, for other GPUs, is not measured.
bool linear_time_pays(const AttentionParams& params, Pass pass) {
  const bool is_backward = pass == Pass::kBackward;
  const FeatureChunks chunks(params);
  const double columns = static_cast<double>(moment_slices(params) * kMomentColumns);
  const double entries = chunks.pairs() * double{kPairEntries} * columns;
  const double squares = double{kPairEntries} * chunks.count * chunks.count * columns;
  const double F = static_cast<double>(padded_columns(2 * params.M));
  const double heads = static_cast<double>(params.H) / static_cast<double>(params.key_heads);
  const double queries = heads * static_cast<double>(params.L);
  const double keys = static_cast<double>(params.S), L = static_cast<double>(params.L);
  const double sums = is_backward ? keys * (2 * entries + squares) + queries * (entries + squares)
                                  : (queries + keys) * entries;
  const double seen = params.is_causal ? std::min(keys, L) * (1 - std::min(keys, L) / L / 2) : keys;
  const double pair = is_backward ? 4 * F + 3 * columns : F + columns;
  const bool has_int8 = !is_backward && forward_may_take_int8(params);
  const double pairs = queries * seen * pair;
  const double around = (queries + keys) * (is_backward ? 232e3 : 118e3);
  const double rate_of_pairs = !has_warpgroups() ? 1.3 : has_int8 ? 2.7 : 2;
  if (!params.is_causal) return rate_of_pairs * (sums + around) < pairs;
  // Counted, not measured: the pairs of chunks by mma.sync, tables of prefixes, and what pairs
  // begin with, through memory. In the backward there are tables of both sides, of all pairs of
  // features, too, and keys begin with twice as many bytes.
  const Prefixes prefixes = prefixes_of(params, pass);
  const double of_chunks = queries * std::min(seen, prefixes.tokens / 2.0) * pair / 1.3;
  const double begins = 22e3 * (queries + (is_backward ? 2 * keys : 0));
  const double tables = (is_backward ? 2300 : 900) * entries * prefixes.count + begins;
  return rate_of_pairs * (sums + around + of_chunks + tables) < pairs;
}

// nullptr, or why Hopper's own kernels cannot take a pass.
const char* why_not_hopper(const AttentionParams& params) {
  if (params.mask.type != ElementType::kNone) {
    return "Hopper's own kernels take no attn_mask that differs between queries";
  }
  if (params.dropout_threshold != 0) return "Hopper's own kernels take no dropout";
  if (is_wide(params)) {
    return "Hopper's own kernels take at most 64 frequencies and 128 columns of value";
  }
  const bool is_empty = params.B == 0 || params.H == 0 || params.L == 0 || params.S == 0;
  return is_empty || params.d_v == 0 ? "there are no pairs" : nullptr;
}
bool can_take_hopper(const AttentionParams& params) {
  return has_warpgroups() && why_not_hopper(params) == nullptr;
}

// Returns how many blocks of queries the forward on tensor cores has.
int64_t blocks_of(const AttentionParams& params) {
  const int64_t heads = params.B * params.H;
  if (is_wide(params)) return heads * ceil_div(params.L, kStep) * ceil_div(params.d_v, 128);
  const int tiles = params.d_v <= 64 ? kRowTilesFor<64> : kRowTilesFor<128>;
  return heads * ceil_div(params.L, int64_t{kWarps} * tiles * 16);
}

// Returns as many parts as give every multiprocessor two blocks, of four tiles or more. Hopper's
// kernels take whole rows, and a multiprocessor has one of their blocks; where the general form may
// be needed, it decides.
int parts_of(const AttentionParams& params) {
  if (every_row_sees_all(params) && can_take_hopper(params) &&
      params.B * params.H * ceil_div(params.L, kWarpgroupRows) >= multiprocessors()) {
    return 1;
  }
  const int64_t blocks = blocks_of(params);
  const int64_t wanted = ceil_div(int64_t{2} * multiprocessors(), blocks > 0 ? blocks : 1);
  const int64_t possible = params.S / (4 * kStep), most = 32;
  const int64_t count = wanted < possible ? wanted : possible;
  return static_cast<int>(count < 1 ? 1 : count < most ? count : most);
}

Route route_without_int8(const AttentionParams& params, bool in_double, Pass pass) {
  Route route;
  route.reason = in_double ? "float64" : why_no_tensor_cores(params);
  if (route.reason != nullptr) {
    const char* const reason = in_double ? route.reason : why_cuda_cores(params);
    route.split_products = reason == nullptr;
    if (route.split_products) {
      route.unit = Unit::kTensorCores;
    } else {
      route.reason = reason;
    }
    return route;
  }
  if (!is_on(Family::kMma)) {
    route.reason = why_off(Family::kMma);
    return route;
  }
  route.unit = Unit::kTensorCores;
  route.is_wide = is_wide(params);
  if (params.batch_invariant) {
    // Linear time, Hopper's kernels, and parts are chosen, or sum, by the size of the call.
    route.reason = has_warpgroups() ? kBatchInvariantReason : nullptr;
    return route;
  }
  const bool is_long = params.L >= 8 && params.S > kFewKeys;
  if (is_long && params.linear_time != LinearTime::kNever) {
    const char* const reason = why_no_linear_time(params, pass);
    if (params.linear_time == LinearTime::kAlways ? reason == nullptr
                                                  : linear_time_pays(params, pass)) {
      route.reason = reason;
      if (reason == nullptr) {
        route.algorithm = Algorithm::kLinear;
        return route;
      }
    }
  }
  if (pass == Pass::kForward) route.parts = parts_of(params);
  if (can_take_hopper(params) && route.parts == 1) {
    route.unit = Unit::kHopper;
  } else if (has_warpgroups() && route.reason == nullptr) {
    route.reason = why_not_hopper(params);
    if (route.reason == nullptr) route.reason = "so few queries share out their keys over blocks";
  }
  return route;
}

// Returns whether scores are products of integers, of the pass that takes this route otherwise.
bool takes_int8(const AttentionParams& params, bool in_double, Pass pass, const Route& route) {
  if (!serves_int8(params)) return false;
  // Both passes have the same scores, or a row's weights would not add up to 1 in the backward.
  // That in linear time has scores of its own: in sums of so many keys the roundings average out,
  // but not in the first rows of a causal call.
  const bool is_forward = pass == Pass::kForward;
  const Route other =
      route_without_int8(params, in_double, is_forward ? Pass::kBackward : Pass::kForward);
  return route.unit == Unit::kHopper &&
         (other.unit == Unit::kHopper ||
          (is_forward && other.algorithm == Algorithm::kLinear && !params.is_causal));
}

}  // namespace

Route route_of(const AttentionParams& params, bool in_double, Pass pass) {
  Route route = route_without_int8(params, in_double, pass);
  route.int8_scores = takes_int8(params, in_double, pass, route);
  return route;
}

std::vector<Family> families_of(const AttentionParams& params, const Route& route) {
  if (route.split_products) return {Family::kSplit};
  if (route.unit == Unit::kCudaCores) return {};
  std::vector<Family> found;
  const auto add = [&](bool is_taken, Family family) {
    if (is_taken) found.push_back(family);
  };
  const bool is_linear = route.algorithm == Algorithm::kLinear;
  const bool on_hopper = route.unit == Unit::kHopper;
  add(!on_hopper || !every_row_sees_all(params), Family::kMma);  // heads that others leave
  add(is_linear, Family::kLinear);
  add(is_linear && params.is_causal, Family::kCausalLinear);
  add(on_hopper, Family::kHopper);
  add(route.int8_scores, Family::kInt8);
  return found;
}

}  // namespace ikattn::cuda
