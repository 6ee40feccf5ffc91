// Tokens and frequencies as the products on tensor cores read them.
#include "attention/cuda/turn_products.h"

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
  return launch_turns(source, [&]<typename T, int kSets>() {
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

}  // namespace

const char* prepare_turns(const AttentionParams& params, const DeviceExecutor& executor,
                          TurnOperands& operands) {
  operands.queries = source_of(params, false);
  operands.keys = source_of(params, true);
  if (const char* error = prepare_tokens(executor, operands.queries)) return error;
  if (const char* error = prepare_tokens(executor, operands.keys)) return error;
  FrequencyRows& rows = operands.frequencies;
  rows.rows = ceil_div(params.M, kSliceColumns) * kSliceColumns;
  rows.columns = ceil_div(params.d, kSliceColumns) * kSliceColumns;
  const int sets = params.w2 ? 2 : 1;
  const int64_t count = params.frequency_batches * params.frequency_heads * sets * rows.set_size();
  float* data = executor.take<float>(count);
  rows.data = data;
  return launch(frequency_rows_kernel, copy_blocks(count), dim3(kCopyThreads), 0, executor.stream,
                operands.queries, rows, data, sets, count);
}

}  // namespace ikattn::cuda
