// Tokens and frequencies as the products on tensor cores read them.
#include "attention/cuda/features/angle_products.h"
#include "attention/cuda/features/split_weights.h"

namespace ikattn::cuda {
namespace {

constexpr int kCopyThreads = 256;

// rows [frequency_batches, frequency_heads, sets, rows, columns] of w1 and w2 [.., d, M]; see
// FrequencyRows.
__global__ void __launch_bounds__(kCopyThreads, 2)
    frequency_rows_kernel(FeatureSource source, FrequencyRows rows, float* data, int sets,
                          int64_t count) {
  const int64_t index = int64_t{blockIdx.x} * kCopyThreads + threadIdx.x;
  if (index >= count) return;
  const int64_t c = index % rows.columns, m = index / rows.columns % rows.rows;
  const int64_t set = index / rows.set_size() % sets, which = index / rows.set_size() / sets;
  const Array& w = set == 0 ? source.w1 : source.w2;
  const int64_t batch = which / source.frequency_heads, head = which % source.frequency_heads;
  const int64_t from = batch * w.stride[0] + head * w.stride[1] + c * w.stride[2] + m * w.stride[3];
  data[index] = c < source.d && m < source.M ? load_element<float>(w, from) : 0.0f;
}

// A block makes the numbers of 32 frequencies and 64 dimensions of w1 or w2; see SplitFrequencies.
template <typename T>
__global__ void __launch_bounds__(kCopyThreads, 2)
    split_frequency_kernel(FeatureSource source, int sets, int pieces, int slices,
                           bool for_backward, uint16_t* data, float* units) {
  IKATTN_SHARED(float, maxima, kCopyThreads / 32);
  constexpr int kTileSize = kAngleFrequencies * kSliceColumns;
  static_assert(kTileSize == kCopyThreads * 8);
  const int tiles = pieces * slices * sets, tile = static_cast<int>(blockIdx.x) % tiles;
  const int set = tile % sets, slice = tile / sets % slices, piece = tile / sets / slices;
  const int64_t which = blockIdx.x / static_cast<unsigned>(tiles);
  const HeadFrequencies head(source, which);
  const bool is_scaled = std::is_same_v<T, Half> || for_backward;
  const float fit =
      fitting_power(is_scaled ? head.template largest<kCopyThreads>(sets, maxima) : 0.0f);
  const float scale = std::is_same_v<T, Half> ? fit : 1.0f;
  if (threadIdx.x == 0 && tile == 0) {
    units[2 * which] = 1 / scale;
    units[2 * which + 1] = 1 / fit;
  }
  const int row = threadIdx.x % kAngleFrequencies, chunk = threadIdx.x / kAngleFrequencies;
  float w[8];
  head.load(set, piece * kAngleFrequencies + frequency_of_row(row),
            slice * kSliceColumns + chunk * 8, w);
  uint16_t* out = data +
                  ((which * pieces + piece) * slices + slice) * kPlanesOf<T> * sets * kTileSize +
                  set * kTileSize + row * kSliceColumns + chunk * 8;
  uint4 numbers[2];
  split_eight<T>(w, scale, numbers);
#pragma unroll
  for (int number = 0; number < kSplitsOfFrequency<T>; ++number) {
    store_vector(out + number * sets * kTileSize, numbers[number]);
  }
  if (kHalfPlane<T> != 0 && for_backward) {
    split_eight<Half>(w, fit, numbers);
    store_vector(out + kHalfPlane<T> * sets * kTileSize, numbers[0]);
  }
}

// copy [B, x_heads, N, columns], of the tokens' own type.
template <typename T>
__global__ void __launch_bounds__(kCopyThreads, 2)
    token_copy_kernel(FeatureSource source, int columns, int64_t count, T* copy) {
  const int64_t index = int64_t{blockIdx.x} * kCopyThreads + threadIdx.x;
  if (index >= count) return;
  const int64_t c = index % columns, n = index / columns % source.N;
  const int64_t head = index / columns / source.N;
  const int64_t* stride = source.x.stride;
  const int64_t from = head / source.x_heads * stride[0] + head % source.x_heads * stride[1] +
                       n * stride[2] + c * stride[3];
  copy[index] = c < source.d ? static_cast<const T*>(source.x.data)[from] : T{};
}

dim3 copy_blocks(int64_t count) {
  return dim3(static_cast<unsigned>(ceil_div(count, kCopyThreads)));
}

const char* prepare_tokens(const DeviceExecutor& executor, FeatureSource& source) {
  const bool is_float = source.x.type == ElementType::kFloat32;
  if (lies_in_rows_of_16_bytes(source.x, is_float ? 4 : 2)) return nullptr;
  return launch_angles(source, [&]<typename T, int kSets>() {
    constexpr int64_t kWidth = 16 / sizeof(T);
    const int64_t columns = ceil_div(source.d, kWidth) * kWidth;
    const int64_t count = source.B * source.x_heads * source.N * columns;
    T* copy = executor.take<T>(count);
    const char* error = launch(token_copy_kernel<T>, copy_blocks(count), dim3(kCopyThreads), 0,
                               executor.stream, source, static_cast<int>(columns), count, copy);
    const ElementType type = source.x.type;
    source.x = contiguous(copy, source.x_heads, source.N, columns);
    source.x.type = type;
    return error;
  });
}

template <typename T>
const char* split_frequencies(const DeviceExecutor& executor, bool for_backward,
                              AngleOperands& operands) {
  const FeatureSource& source = operands.queries;
  SplitFrequencies& split = operands.split;
  const int sets = source.stationary() ? 1 : 2;
  const int64_t heads = source.frequency_batches * source.frequency_heads;
  const int64_t tiles = heads * split.pieces * split.slices * sets;
  float* units = executor.take<float>(2 * heads);
  uint16_t* data =
      executor.take<uint16_t>(tiles * kPlanesOf<T> * kAngleFrequencies * int64_t{kSliceColumns});
  split.units = units;
  split.data = data;
  return launch(split_frequency_kernel<T>, dim3(static_cast<unsigned>(tiles)), dim3(kCopyThreads),
                0, executor.stream, source, sets, split.pieces, split.slices, for_backward, data,
                units);
}

}  // namespace

const char* prepare_angles(const AttentionParams& params, const DeviceExecutor& executor,
                           bool for_backward, AngleOperands& operands) {
  operands = {};
  operands.queries = source_of(params, false);
  operands.keys = source_of(params, true);
  const FeatureSource& source = operands.queries;
  if (const char* error = prepare_tokens(executor, operands.queries)) return error;
  if (const char* error = prepare_tokens(executor, operands.keys)) return error;
  const int sets = params.w2 ? 2 : 1;
  const bool is_float = source.x.type == ElementType::kFloat32;
  if (!is_float) {
    operands.split.pieces = static_cast<int>(padded_columns(2 * params.M) / 2 / kAngleFrequencies);
    operands.split.slices = static_cast<int>(ceil_div(params.d, kSliceColumns));
    const auto split = source.x.type == ElementType::kBFloat16 ? split_frequencies<BFloat16>
                                                               : split_frequencies<Half>;
    if (const char* error = split(executor, for_backward, operands)) return error;
  }
  if (!is_float && (!for_backward || goes_in_one_pass(source))) return nullptr;
  FrequencyRows& rows = operands.frequencies;
  rows.rows = ceil_div(params.M, kSliceColumns) * kSliceColumns;
  rows.columns = ceil_div(params.d, kSliceColumns) * kSliceColumns;
  const int64_t count = source.frequency_batches * source.frequency_heads * sets * rows.set_size();
  float* data = executor.take<float>(count);
  rows.data = data;
  return launch(frequency_rows_kernel, copy_blocks(count), dim3(kCopyThreads), 0, executor.stream,
                source, rows, data, sets, count);
}

}  // namespace ikattn::cuda
