// Attention of few queries to keys whose features are kept, as in decoding.
//
// A part is 128 keys of a head, wherever the GPU and whatever the call: so a row's bits follow from
// the keys that it sees. What a part leaves of a row is relative to its largest logit (parts.cu);
// here the parts of a row are added up in their order.
#include "attention/cuda/decoding/decoding.h"
#include "attention/cuda/decoding/parts.h"
#include "support/cuda/warps.h"

namespace ikattn::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// A block adds up 32 columns of the parts of one row: a warp takes every eighth part, whatever
// their number, a lane has one column, and the warps' sums are added up.
template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    merge_kernel(FromFeaturesParams params, PartialRows<T> partial) {
  IKATTN_SHARED(T, maxima, kWarps);
  IKATTN_SHARED(T, sums, kWarps);
  IKATTN_SHARED(T, columns, kThreads);
  const int64_t row = blockIdx.x, first = row * partial.parts;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  T largest = minus_infinity<T>();
  for (int64_t part = threadIdx.x; part < partial.parts; part += kThreads) {
    const T maximum = partial.maxima[first + part];
    largest = maximum > largest ? maximum : largest;
  }
  largest = max_of_lanes(largest);
  if (lane == 0) maxima[warp] = largest;
  __syncthreads();
  for (int other = 0; other < kWarps; ++other) {
    const T maximum = maxima[other];
    largest = maximum > largest ? maximum : largest;
  }
  const T reference = largest == minus_infinity<T>() ? T(0) : largest;
  const int64_t column = int64_t{blockIdx.y} * 32 + lane;
  T sum = 0, out = 0;
  for (int64_t part0 = warp; part0 < partial.parts; part0 += 32 * kWarps) {
    const int64_t own = first + part0 + lane * kWarps;
    const bool seen = part0 + lane * kWarps < partial.parts && !partial.is_hidden(own);
    T factor = 0;
    if (seen) {
      // A part of NaN logits alone has no maximum, and a sum that must stay NaN.
      const T maximum = partial.maxima[own];
      factor = exponential((maximum == minus_infinity<T>() ? reference : maximum) - reference);
      sum += partial.sums[own] * factor;
    }
    const unsigned all_seen = __ballot_sync(0xffffffffu, seen);
#pragma unroll 8
    for (int k = 0; k < 32; ++k) {
      const bool there = (all_seen >> k & 1) != 0 && column < params.d_v;
      const int64_t index = first + part0 + k * kWarps;
      const T of_part = there ? partial.out[index * params.d_v + column] : T(0);
      out += of_part * __shfl_sync(0xffffffffu, factor, k);
    }
  }
  sum = sum_of_lanes(sum);
  columns[threadIdx.x] = out;
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (warp > 0 || column >= params.d_v) return;
  T total = 0, whole = 0;
  for (int other = 0; other < kWarps; ++other) {
    total += columns[other * 32 + lane];
    whole += sums[other];
  }
  const int64_t i = row % params.L, h = row / params.L % params.H, b = row / params.L / params.H;
  Tokens(params.output, b, h).template store<T>(i, column, whole == T(0) ? T(0) : total / whole);
}

}  // namespace

template <typename T>
const char* attention_from_features(const FromFeaturesParams& params,
                                    const DeviceExecutor& executor) {
  const int64_t rows = params.B * params.H * params.L;
  if (rows == 0 || params.d_v == 0) return nullptr;
  PartialRows<T> partial;
  partial.parts = ceil_div(params.S, kPartKeys);
  partial.maxima = executor.take<T>(rows * partial.parts);
  partial.sums = executor.take<T>(rows * partial.parts);
  partial.out = executor.take<T>(rows * partial.parts * params.d_v);
  const char* error = attend_parts(params, executor, partial);
  if (error != nullptr) return error;
  const dim3 blocks(static_cast<unsigned>(rows), static_cast<unsigned>(ceil_div(params.d_v, 32)));
  return launch(merge_kernel<T>, blocks, dim3(kThreads), 0, executor.stream, params, partial);
}

template const char* attention_from_features<float>(const FromFeaturesParams&,
                                                    const DeviceExecutor&);
template const char* attention_from_features<double>(const FromFeaturesParams&,
                                                     const DeviceExecutor&);

}  // namespace ikattn::cuda
