// Kernels that own whole tokens: eight lanes a token, each of them eight columns at a time, one
// access where these begin at a multiple of 16 bytes.
#pragma once

#include <type_traits>

#include "attention/calls/tensor_core_calls.h"
#include "attention/cuda/operands/math.h"
#include "support/cuda/warps.h"

namespace ikattn::cuda {
namespace {

constexpr int kRowThreads = 256, kTokenLanes = 8, kRowsOfBlock = kRowThreads / kTokenLanes;
constexpr int kLaneColumns = 8 * kTokenLanes;  // that a token's lanes have at a time

// Returns the grid for N tokens of each head; a block has tokens of one, `each` times kRowsOfBlock.
inline dim3 row_blocks(int64_t heads, int64_t N, int each = 1) {
  return dim3(static_cast<unsigned>(heads * ceil_div(N, int64_t{each} * kRowsOfBlock)));
}

struct RowPlace {
  unsigned bh, b, head;  // bh: the head, of all batches'
  // May be N and more. Others of a thread's rows are kRowsOfBlock further on each.
  int64_t row;
  int lane;  // one of eight

  __device__ RowPlace(int64_t heads, int64_t N, int each = 1) {
    const int64_t rows = int64_t{each} * kRowsOfBlock;
    const unsigned blocks = static_cast<unsigned>((N + rows - 1) / rows);
    bh = blockIdx.x / blocks;
    b = bh / static_cast<unsigned>(heads);
    head = bh % static_cast<unsigned>(heads);
    row = int64_t{blockIdx.x % blocks} * rows + threadIdx.x / kTokenLanes;
    lane = threadIdx.x % kTokenLanes;
  }
};

// The columns of one token of an array [B, H, N, width].
class Row {
 public:
  __device__ Row(const Array& array, int64_t b, int64_t h, int64_t token)
      : array_(array), base_(b * array.stride[0] + h * array.stride[1] + token * array.stride[2]) {
    const int64_t bytes = is_half() ? 2 : 4;
    is_together_ = array.type != ElementType::kFloat64 && array.stride[3] == 1 &&
                   (reinterpret_cast<uintptr_t>(array.data) + base_ * bytes) % 16 == 0;
  }

  // Returns whether numbers are of 16 bits, which hold less than others.
  __device__ __forceinline__ bool is_half() const {
    return array_.type == ElementType::kFloat16 || array_.type == ElementType::kBFloat16;
  }

  // Loads columns `column`, a multiple of 8, and on; zeros from `columns` on.
  template <typename T>
  __device__ __forceinline__ void load(T (&x)[8], int64_t column, int64_t columns) const {
    const int64_t at = base_ + column * array_.stride[3];
    if (is_together_ && column + 8 <= columns) {
      if (array_.type == ElementType::kFloat32) {
        load_floats(x, static_cast<const float*>(array_.data) + at);
      } else if (array_.type == ElementType::kBFloat16) {
        load_halves(x, static_cast<const BFloat16*>(array_.data) + at);
      } else {
        load_halves(x, static_cast<const Half*>(array_.data) + at);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] = column + i < columns ? load_element<T>(array_, at + i * array_.stride[3]) : T(0);
    }
  }
  // Calls visit(eight columns) for all that are the lane's, from column `first` on.
  template <typename T, typename Visit>
  __device__ __forceinline__ void visit(int lane, int64_t columns, const Visit& visit,
                                        int64_t first = 0) const {
    for (int64_t column = first + lane * 8; column < columns; column += kLaneColumns) {
      T x[8];
      load(x, column, columns);
      visit(x);
    }
  }

 private:
  template <typename T>
  __device__ __forceinline__ static void load_floats(T (&x)[8], const float* from) {
    const float4 low = load_vector<float4>(from), high = load_vector<float4>(from + 4);
    const float eight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = static_cast<T>(eight[i]);
  }
  template <typename T, typename S>
  __device__ __forceinline__ static void load_halves(T (&x)[8], const S* from) {
    const uint4 packed = load_vector<uint4>(from);
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = unpack<S>(words[i]);
      x[2 * i] = static_cast<T>(two.x);
      x[2 * i + 1] = static_cast<T>(two.y);
    }
  }

  const Array& array_;
  int64_t base_;
  bool is_together_;
};

// Stores eight columns of a row at `offset`, from `column` on, of those below `columns`: together
// where rows lie at multiples of 16 bytes.
__device__ __forceinline__ void store_eight(const Array& array, int64_t offset, int64_t column,
                                            int64_t columns, const float (&x)[8]) {
  const bool is_float = array.type == ElementType::kFloat32;
  const int64_t at = offset + column * array.stride[3];
  unsigned char* to = static_cast<unsigned char*>(array.data) + at * (is_float ? 4 : 2);
  if (array.stride[3] == 1 && column + 8 <= columns && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    if (is_float) {
      store_vector(reinterpret_cast<float4*>(to), make_float4(x[0], x[1], x[2], x[3]));
      store_vector(reinterpret_cast<float4*>(to) + 1, make_float4(x[4], x[5], x[6], x[7]));
    } else {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = array.type == ElementType::kFloat16 ? pack_f16x2(x[2 * i], x[2 * i + 1])
                                                       : pack_bf16x2(x[2 * i], x[2 * i + 1]);
      }
      store_vector(reinterpret_cast<uint4*>(to),
                   make_uint4(words[0], words[1], words[2], words[3]));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (column + i < columns) store_element<float>(array, at + i * array.stride[3], x[i]);
  }
}

// Type by which a kernel reads its rows. For 16 bits whose rows all lie at multiples of 16 bytes, S
// is their type, and eight columns are one access, so that a thread can have those of several rows
// under way before it looks at one. Any: one row after the other, whatever it is made of.
struct Any {};
template <typename S>
constexpr int kRowsAtOnce = std::is_same_v<S, Any> ? 1 : 4;

// Eight columns of a row, as they came.
template <typename T, typename S>
struct EightColumns {
  uint4 packed;

  // Loads columns `column` and on of the row at `row`, zeros from `columns` on, a multiple of 8.
  __device__ __forceinline__ void load(const Array& array, int64_t b, int64_t h, int64_t row,
                                       int64_t column, int64_t columns) {
    packed = make_uint4(0, 0, 0, 0);
    if (column >= columns) return;
    packed = load_vector<uint4>(static_cast<const S*>(array.data) + b * array.stride[0] +
                                h * array.stride[1] + row * array.stride[2] + column);
  }
  __device__ __forceinline__ void unpack_to(T (&x)[8]) const {
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = unpack<S>(words[i]);
      x[2 * i] = static_cast<T>(two.x);
      x[2 * i + 1] = static_cast<T>(two.y);
    }
  }
};
template <typename T>
struct EightColumns<T, Any> {
  T columns_of_row[8];

  __device__ __forceinline__ void load(const Array& array, int64_t b, int64_t h, int64_t row,
                                       int64_t column, int64_t columns) {
    Row(array, b, h, row).load(columns_of_row, column, columns);
  }
  __device__ __forceinline__ void unpack_to(T (&x)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = columns_of_row[i];
  }
};

// Returns whether what is read as S is of 16 bits: other layouts give the same bits.
template <typename S>
__device__ __forceinline__ bool is_half(const Array& array) {
  return !std::is_same_v<S, Any> || array.type == ElementType::kBFloat16 ||
         array.type == ElementType::kFloat16;
}
// Returns whether rows of `columns` can be read as EightColumns of their own type.
inline bool lies_in_eights(const Array& array, int64_t columns) {
  if (array.type == ElementType::kNone) return true;
  return lies_in_rows_of_16_bytes(array, 2) && columns % 8 == 0 &&
         (array.type == ElementType::kBFloat16 || array.type == ElementType::kFloat16);
}
// Calls launch.operator()<S>() for rows of `type`, which all lie so, or for Any.
template <typename Launch>
const char* launch_rows(bool lie_in_eights, ElementType type, const Launch& launch) {
  if (!lie_in_eights) return launch.template operator()<Any>();
  return type == ElementType::kBFloat16 ? launch.template operator()<BFloat16>()
                                        : launch.template operator()<Half>();
}

// Returns whether x holds for all of a token's eight lanes.
__device__ __forceinline__ bool all_of_row(bool x) {
  const unsigned votes = __ballot_sync(0xffffffffu, x);
  return (votes >> (threadIdx.x % 32 / kTokenLanes * kTokenLanes) & 0xffu) == 0xffu;
}

// Returns the sum of the squares of eight elements. Those of 16 bits have exact squares in float32,
// and eight of them are added there, if it holds them.
template <typename T>
__device__ __forceinline__ double squares_of(const T (&x)[8], bool is_half) {
  if (is_half) {
    float sums[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = static_cast<float>(x[2 * i]), high = static_cast<float>(x[2 * i + 1]);
      sums[i] = low * low + high * high;
    }
    const float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    if (sum > 1e-20f && sum < 1e30f) return static_cast<double>(sum);
  }
  double squares = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) squares += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return squares;
}
// Adds up the squares of eight columns; not_finite becomes NaN where one is not finite.
template <typename T>
__device__ __forceinline__ void add_row(const T (&x)[8], bool is_half, double& squares,
                                        T& not_finite) {
  squares += squares_of(x, is_half);
#pragma unroll
  for (int i = 0; i < 8; ++i) not_finite += x[i] * T(0);
}
// Returns x^p, 0 <= x <= 1. Numbers of 16 bits in float32, and weights that follow, hold less.
__device__ __forceinline__ double power_of_element(double x, double p, bool is_half) {
  return is_half ? static_cast<double>(powf(static_cast<float>(x), static_cast<float>(p)))
                 : pow(x, p);
}

// Returns |x|_p of a row, by its eight lanes; 0 of no columns. T: double for float64. Scaled by the
// largest element, so that powers neither overflow nor vanish; squares of what is at most float32
// do neither in float64.
template <typename T>
__device__ __forceinline__ double p_norm(const Row& row, int lane, int64_t columns, double p) {
  if (p == 2 && sizeof(T) == 4) {
    double squares = 0;
    row.visit<T>(lane, columns, [&](const T(&x)[8]) { squares += squares_of(x, row.is_half()); });
    return sqrt(sum_of_lanes<kTokenLanes>(squares));
  }
  double largest = 0, sum = 0;
  row.visit<T>(lane, columns, [&](const T(&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmax(largest, fabs(static_cast<double>(x[i])));
  });
  largest = max_of_lanes<kTokenLanes>(largest);
  const double unit = largest > 0 ? largest : 1;
  row.visit<T>(lane, columns, [&](const T(&elements)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const double x = fabs(static_cast<double>(elements[i])) / unit;
      sum += p == 2 ? x * x : p == 1 ? x : power_of_element(x, p, row.is_half());
    }
  });
  sum = sum_of_lanes<kTokenLanes>(sum);
  return largest == 0 ? 0 : largest * (p == 2 ? sqrt(sum) : p == 1 ? sum : pow(sum, 1 / p));
}

}  // namespace
}  // namespace ikattn::cuda
