// Conversion between strided rows of any storage type and contiguous rows of the compute type T.
#pragma once

#include "support/array.h"
#include "support/cpu/panel_gemm.h"
#include "support/cpu/schedule.h"

namespace ikattn::IKATTN_ISA {
namespace {

inline float from_bfloat16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  __builtin_memcpy(&value, &wide, sizeof(value));
  return value;
}

inline uint16_t to_bfloat16(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  if (value != value) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <typename T, typename Source, typename Convert>
inline void load_converted(const void* data, int64_t offset, int64_t stride, int64_t count, T* out,
                           Convert convert) {
  const Source* source = static_cast<const Source*>(data) + offset;
  if (stride == 1) {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(convert(source[i]));
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(convert(source[i * stride]));
  }
}

template <typename T, typename Target, typename Convert>
inline void store_converted(void* data, int64_t offset, int64_t stride, int64_t count, const T* in,
                            Convert convert) {
  Target* target = static_cast<Target*>(data) + offset;
  if (stride == 1) {
    for (int64_t i = 0; i < count; ++i) target[i] = convert(in[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) target[i * stride] = convert(in[i]);
  }
}

// Loads out[i] = array.data[offset + i * stride].
template <typename T>
inline void load_row(const Array& array, int64_t offset, int64_t stride, int64_t count, T* out) {
  switch (array.type) {
    case ElementType::kFloat64:
      load_converted<T, double>(array.data, offset, stride, count, out, [](double x) { return x; });
      break;
    case ElementType::kFloat32:
      load_converted<T, float>(array.data, offset, stride, count, out, [](float x) { return x; });
      break;
    case ElementType::kBFloat16:
      load_converted<T, uint16_t>(array.data, offset, stride, count, out, from_bfloat16);
      break;
    case ElementType::kFloat16:
      load_converted<T, _Float16>(array.data, offset, stride, count, out,
                                  [](_Float16 x) { return static_cast<float>(x); });
      break;
    default:
      __builtin_unreachable();
  }
}

template <typename T>
inline void store_row(const Array& array, int64_t offset, int64_t stride, int64_t count,
                      const T* in) {
  switch (array.type) {
    case ElementType::kFloat64:
      store_converted<T, double>(array.data, offset, stride, count, in,
                                 [](T x) { return static_cast<double>(x); });
      break;
    case ElementType::kFloat32:
      store_converted<T, float>(array.data, offset, stride, count, in,
                                [](T x) { return static_cast<float>(x); });
      break;
    case ElementType::kBFloat16:
      store_converted<T, uint16_t>(array.data, offset, stride, count, in,
                                   [](T x) { return to_bfloat16(static_cast<float>(x)); });
      break;
    case ElementType::kFloat16:
      store_converted<T, _Float16>(array.data, offset, stride, count, in, [](T x) {
        return static_cast<_Float16>(static_cast<float>(x));
      });
      break;
    default:
      __builtin_unreachable();
  }
}

template <typename T>
inline T load_element(const Array& array, int64_t offset) {
  T value;
  load_row(array, offset, 1, 1, &value);
  return value;
}

template <typename T>
inline void store_element(const Array& array, int64_t offset, T value) {
  store_row(array, offset, 1, 1, &value);
}

template <typename T>
inline bool is_finite(T x) {
  return x - x == T(0);
}

template <typename T>
inline bool all_finite(const T* x, int64_t count) {
  Vec<T> probes{};
  T probe = 0;
  int64_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>) probes += load(x + i) * T(0);
  for (; i < count; ++i) probe += x[i] * T(0);
  return sum_of_lanes<T>(probes) + probe == T(0);
}

template <typename T>
inline T not_a_number() {
  return static_cast<T>(__builtin_nanf(""));
}

template <typename T>
inline T infinity() {
  return static_cast<T>(__builtin_inff());
}

// One row of a panel.
template <typename T>
inline void copy_row(const T* source, T* target) {
  __builtin_memcpy(target, source, kPanel * sizeof(T));
}

template <typename T>
constexpr ElementType kTypeOf = sizeof(T) == 4 ? ElementType::kFloat32 : ElementType::kFloat64;

// Converts the count % (2 kCount) numbers from `source` on.
template <int64_t kCount, typename T>
inline void copy_rest(const T* source, int64_t count, T* target) {
  const int64_t copied = count & kCount;
  if (copied) __builtin_memcpy(target, source, kCount * sizeof(T));
  if constexpr (kCount > 1) copy_rest<kCount / 2>(source + copied, count, target + copied);
}

// Copies a part of a row, zero from `count` on. No loop here may become a call of memcpy or memset,
// which costs more than the row.
template <typename T>
inline void copy_part_of_row(const T* source, int64_t count, T* target) {
  constexpr int64_t kVectors = kPanel / kLanes<T>;
  const int64_t whole = count / kLanes<T>;
#pragma GCC unroll 16
  for (int64_t v = 0; v < kVectors; ++v) {
    const int64_t at = v * kLanes<T>;
    store<T>(target + at, v < whole ? load(source + at) : Vec<T>{});
  }
  const int64_t at = whole * kLanes<T>;
  copy_rest<kLanes<T> / 2>(source + at, count, target + at);
}

// Loads a matrix [rows, columns] at array.data + offset as panels [columns / 64][panel_rows][64],
// zero beyond its columns up to the panel's end.
template <typename T>
inline void load_panels(const Array& array, int64_t offset, int64_t row_stride,
                        int64_t column_stride, int64_t rows, int64_t columns, T* out,
                        int64_t panel_rows) {
  for (int64_t first = 0; first < columns; first += kPanel) {
    const int64_t width = min_of(kPanel, columns - first);
    T* panel = out + first * panel_rows;
    if (array.type == kTypeOf<T> && column_stride == 1) {
      const T* source = static_cast<const T*>(array.data) + offset + first;
      if (width == kPanel) {
        for (int64_t r = 0; r < rows; ++r) copy_row(source + r * row_stride, panel + r * kPanel);
      } else {
        for (int64_t r = 0; r < rows; ++r) {
          copy_part_of_row(source + r * row_stride, width, panel + r * kPanel);
        }
      }
      continue;
    }
    for (int64_t r = 0; r < rows; ++r) {
      load_row(array, offset + r * row_stride + first * column_stride, column_stride, width,
               panel + r * kPanel);
      for (int64_t c = width; c < kPanel; ++c) panel[r * kPanel + c] = 0;
    }
  }
}

template <typename T>
inline void store_panels(const Array& array, int64_t offset, int64_t row_stride,
                         int64_t column_stride, int64_t rows, int64_t columns, const T* in,
                         int64_t panel_rows) {
  for (int64_t first = 0; first < columns; first += kPanel) {
    const int64_t width = min_of(kPanel, columns - first);
    const T* panel = in + first * panel_rows;
    if (array.type == kTypeOf<T> && column_stride == 1 && width == kPanel) {
      T* target = static_cast<T*>(array.data) + offset + first;
      for (int64_t r = 0; r < rows; ++r) copy_row(panel + r * kPanel, target + r * row_stride);
      continue;
    }
    for (int64_t r = 0; r < rows; ++r) {
      store_row(array, offset + r * row_stride + first * column_stride, column_stride, width,
                panel + r * kPanel);
    }
  }
}

template <typename T>
inline bool row_is_finite(const T* panels, int64_t panel_rows, int64_t row, int64_t columns) {
  for (int64_t first = 0; first < columns; first += kPanel) {
    const T* values = panels + first * panel_rows + row * kPanel;
    if (!all_finite(values, min_of(kPanel, columns - first))) return false;
  }
  return true;
}

// Stores all rows of a block, faster than one by one.
template <typename T>
inline bool rows_are_finite(const T* panels, int64_t panel_rows, int64_t rows, int64_t columns) {
  Vec<T> probes{};
  for (int64_t first = 0; first < columns; first += kPanel) {
    const int64_t width = round_up(min_of(kPanel, columns - first), kLanes<T>);
    const T* values = panels + first * panel_rows;
    for (int64_t r = 0; r < rows; ++r) {
      Vec<T> of_row{};  // chains of additions that do not wait for each other
      for (int64_t c = 0; c < width; c += kLanes<T>) of_row += load(values + r * kPanel + c) * T(0);
      probes += of_row;
    }
  }
  return sum_of_lanes<T>(probes) == T(0);
}

// Copies rows of panels [panels][from_rows][64].
template <typename T>
void copy_rows(int64_t rows, int64_t columns, const T* from, int64_t from_rows, T* to,
               int64_t to_rows) {
  for (int64_t first = 0; first < columns; first += kPanel) {
    __builtin_memcpy(to + first * to_rows, from + first * from_rows, rows * kPanel * sizeof(T));
  }
}

// Sets one row of all panels that hold `columns` columns.
template <typename T>
inline void fill_row(T* panels, int64_t panel_rows, int64_t row, int64_t columns, T value) {
  for (int64_t first = 0; first < columns; first += kPanel) {
    T* values = panels + first * panel_rows + row * kPanel;
    for (int64_t c = 0; c < kPanel; ++c) values[c] = value;
  }
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
