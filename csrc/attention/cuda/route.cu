// The choice of kernels; see route.h.
#include "attention/cuda/hopper/pipeline.h"
#include "attention/cuda/linear/linear.h"
#include "attention/cuda/operands/route.h"
#include "attention/fast_path.h"

namespace ikattn::cuda {
namespace {

// Whether a pass takes linear time. Multiply-adds are counted: pairs get more of them done in a
// time, and what surrounds the sums of a token counts like so many of them. Both numbers are where
// the two algorithms took the same time on an H100; 1.3, of other GPUs, is not measured.
bool takes_linear_time(const AttentionParams& params, Pass pass) {
  const bool is_backward = pass == Pass::kBackward;
  const bool can = every_row_sees_all(params) && params.dropout_threshold == 0 && !is_wide(params);
  if (!can || params.L < 8 || params.S <= kFewKeys) return false;
  const int slices = moment_slices(params);
  if (is_backward && slices > 1) return false;
  if (params.linear_time != LinearTime::kAuto) return params.linear_time == LinearTime::kAlways;
  const FeatureChunks chunks(params);
  const double columns = static_cast<double>(slices * kMomentColumns);
  const double entries = chunks.pairs() * double{kPairEntries} * columns;
  const double squares = double{kPairEntries} * chunks.count * chunks.count * columns;
  const double F = static_cast<double>(padded_columns(2 * params.M));
  const double heads = static_cast<double>(params.H) / static_cast<double>(params.key_heads);
  const double queries = heads * static_cast<double>(params.L);
  const double keys = static_cast<double>(params.S);
  const double sums = is_backward ? keys * (2 * entries + squares) + queries * (entries + squares)
                                  : (queries + keys) * entries;
  const double pairs = queries * keys * (is_backward ? 4 * F + 3 * columns : F + columns);
  const double around = (queries + keys) * (is_backward ? 232e3 : 118e3);
  const double rate_of_pairs = has_warpgroups() ? 2 : 1.3;
  return rate_of_pairs * (sums + around) < pairs;
}

// Whether Hopper's own kernels can take a call: those of the folded form, without mask and dropout.
bool can_take_hopper(const AttentionParams& params) {
  return params.mask.type == ElementType::kNone && params.dropout_threshold == 0 &&
         !is_wide(params) && params.B > 0 && params.H > 0 && params.L > 0 && params.S > 0 &&
         params.d_v > 0 && has_warpgroups();
}

// Blocks of queries that the forward on tensor cores has.
int64_t blocks_of(const AttentionParams& params) {
  const int64_t heads = params.B * params.H;
  if (is_wide(params)) return heads * ceil_div(params.L, kStep) * ceil_div(params.d_v, 128);
  const int tiles = params.d_v <= 64 ? kRowTilesFor<64> : kRowTilesFor<128>;
  return heads * ceil_div(params.L, int64_t{kWarps} * tiles * 16);
}

// As many parts as give every multiprocessor two blocks, of four tiles or more. Hopper's kernels
// take whole rows, and a multiprocessor has one of their blocks; where the general form may be
// needed, it decides.
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

}  // namespace

Route route_of(const AttentionParams& params, bool in_double, Pass pass) {
  Route route;
  route.why_cuda_cores = in_double ? "float64" : why_no_tensor_cores(params);
  if (route.why_cuda_cores != nullptr) return route;
  route.unit = Unit::kTensorCores;
  route.is_wide = is_wide(params);
  if (takes_linear_time(params, pass)) {
    route.algorithm = Algorithm::kLinear;
    return route;
  }
  if (pass == Pass::kForward) route.parts = parts_of(params);
  if (can_take_hopper(params) && route.parts == 1) route.unit = Unit::kHopper;
  return route;
}

}  // namespace ikattn::cuda
