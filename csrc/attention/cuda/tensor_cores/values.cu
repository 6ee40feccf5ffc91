// Values for the tensor cores: which keys are seen, how large what they hold is, and it in 16 bits.
#include "attention/cuda/mma/row_lanes.h"
#include "attention/cuda/operands/math.h"
#include "attention/cuda/tensor_cores/values.h"

namespace ikattn::cuda {
namespace {

__global__ void __launch_bounds__(256, 2) clear_bounds_kernel(uint32_t* bounds, int64_t count) {
  const int64_t index = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (index < count) bounds[index] = 0;
}

// blockIdx.x: 256 keys of a head of the mask; blockIdx.y: rows of it.
__global__ void __launch_bounds__(256, 2) seen_kernel(AttentionParams params, SeenKeys keys) {
  const int64_t blocks = (params.S + 255) / 256, head = blockIdx.x / blocks;
  const int64_t j = blockIdx.x % blocks * 256 + threadIdx.x;
  if (j >= params.S) return;
  const int64_t* stride = params.mask.stride;
  const int64_t base =
      head / keys.heads * stride[0] + head % keys.heads * stride[1] + j * stride[3];
  int64_t first = int64_t{blockIdx.y} * keys.rows_each;
  const int64_t end = min(first + keys.rows_each, keys.rows);
  if (params.is_causal && keys.rows > 1 && first < j) first = j;
  bool any = false;
  for (int64_t i = first; i < end && !any; ++i) {
    const int64_t at = base + i * stride[2];
    any = params.mask.type == ElementType::kBool
              ? static_cast<const uint8_t*>(params.mask.data)[at] != 0
              : load_element<float>(params.mask, at) != minus_infinity<float>();
  }
  if (any) atomicOr(keys.seen + head * params.S + j, 1u);
}

const char* find_seen_keys(const AttentionParams& params, const DeviceExecutor& executor,
                           SeenKeys& keys) {
  if (params.mask.type == ElementType::kNone) return nullptr;
  keys = SeenKeys(params, executor);
  const int64_t heads = int64_t{keys.batches} * keys.heads;
  if (const char* error = clear_bounds(keys.seen, heads * params.S, executor.stream)) return error;
  return launch(seen_kernel,
                dim3(static_cast<unsigned>(heads * ceil_div(params.S, 256)),
                     static_cast<unsigned>(ceil_div(keys.rows, keys.rows_each))),
                dim3(256), 0, executor.stream, params, keys);
}

// The value in 16 bits, rows padded with zeros; of another type multiplied with its scale. What is
// not finite becomes zero, as does what only hidden keys hold.
//   copy [B, G, S, columns]
template <typename T>
__global__ void __launch_bounds__(kRowThreads, 2)
    value_copy_kernel(AttentionParams params, const uint32_t* bounds, int columns, T* copy,
                      float* scales) {
  const RowPlace at(params.G, params.S);
  if (at.row >= params.S) return;
  float scale = 1;
  if (scales != nullptr) {
    const int64_t group = params.key_heads / params.G, first = at.bh * group;
    float bound = 0;
    for (int64_t k = first; k < first + group; ++k) {
      bound = fmaxf(bound, __uint_as_float(bounds[k]));
    }
    scale = fitting_power(bound);
    if (at.lane == 0 && at.row == 0) scales[at.bh] = scale;
  }
  const Row value(params.value, at.b, at.head, at.row);
  T* row = copy + (at.bh * params.S + at.row) * columns;
  for (int column = at.lane * 8; column < columns; column += kLaneColumns) {
    float x[8];
    value.load(x, column, params.d_v);
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] *= scale;
      if (scales != nullptr && !(fabsf(x[i]) < 65504.0f)) x[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = pack<T>(x[2 * i], x[2 * i + 1]);
    store_vector(row + column, make_uint4(words[0], words[1], words[2], words[3]));
  }
}

// Copies the value to rows of T; multiplied with scales where these are Half and it is not.
template <typename T>
const char* copy_values(const AttentionParams& params, const DeviceExecutor& executor,
                        const uint32_t* bounds, Array& rows, int& columns, const float*& scales) {
  const ElementType type = std::is_same_v<T, Half> ? ElementType::kFloat16 : ElementType::kBFloat16;
  columns = static_cast<int>((params.d_v + 7) / 8 * 8);
  const int64_t heads = params.B * params.G;
  T* data = executor.take<T>(heads * params.S * columns);
  const bool is_scaled = std::is_same_v<T, Half> && params.value.type != type;
  float* own_scales = is_scaled ? executor.take<float>(heads) : nullptr;
  scales = own_scales;
  rows.data = data;
  rows.type = type;
  rows.stride[0] = params.G * params.S * columns;
  rows.stride[1] = params.S * columns;
  rows.stride[2] = columns;
  rows.stride[3] = 1;
  return launch(value_copy_kernel<T>, row_blocks(heads, params.S), dim3(kRowThreads), 0,
                executor.stream, params, bounds, columns, data, own_scales);
}

}  // namespace

const char* clear_bounds(uint32_t* bounds, int64_t count, Stream stream) {
  return launch(clear_bounds_kernel, dim3(static_cast<unsigned>(ceil_div(count, 256))), dim3(256),
                0, stream, bounds, count);
}

bool needs_value_norms(const AttentionParams& params, const Route& route, bool for_backward) {
  return params.value.type == ElementType::kFloat32 || for_backward ||
         route.algorithm == Algorithm::kLinear;
}

SeenKeys::SeenKeys(const AttentionParams& params, const DeviceExecutor& executor)
    : batches(params.mask.stride[0] == 0 ? 1 : static_cast<int>(params.B)),
      heads(params.mask.stride[1] == 0 ? 1 : static_cast<int>(params.H)),
      rows(params.mask.stride[2] == 0 ? 1 : params.L) {
  if (rows > 65535 * rows_each) rows_each = ceil_div(rows, 65535);
  seen = executor.take<uint32_t>(batches * int64_t{heads} * params.S);
}

const char* prepare_bounds(const AttentionParams& params, const DeviceExecutor& executor,
                           const Route& route, bool for_backward, ValueBounds& bounds) {
  if (!needs_value_norms(params, route, for_backward)) return nullptr;
  const int64_t key_heads = params.B * params.key_heads;
  bounds.of_all = executor.take<uint32_t>(key_heads);
  if (route.algorithm == Algorithm::kLinear && params.value.type == ElementType::kBFloat16) {
    bounds.of_weight = executor.take<uint32_t>(key_heads);
  }
  return find_seen_keys(params, executor, bounds.keys);
}

const char* place_values(const AttentionParams& params, const DeviceExecutor& executor,
                         const Route& route, const ValueBounds& bounds, FoldedTokens& folded) {
  const bool is_bfloat = params.value.type == ElementType::kBFloat16;
  const auto copy = is_bfloat ? copy_values<BFloat16> : copy_values<Half>;
  folded.value_bounds = bounds.of_all;
  folded.value = params.value;
  folded.value_columns = static_cast<int>(params.d_v);
  if (!lies_ready_for_tensor_cores(params)) {
    if (const char* error = copy(params, executor, bounds.of_all, folded.value,
                                 folded.value_columns, folded.value_scales)) {
      return error;
    }
  }
  if (route.algorithm != Algorithm::kLinear) return nullptr;
  HalfValue& half = folded.linear.half_value;
  if (is_bfloat) {
    return copy_values<Half>(params, executor, bounds.of_weight, half.rows, half.columns,
                             half.scales);
  }
  half = {folded.value, folded.value_columns, folded.value_scales};
  return nullptr;
}

}  // namespace ikattn::cuda
