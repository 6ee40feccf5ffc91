// wgmma, emulated warp by warp: that all four come is not checked. Products are done as late as a
// GPU may do them, at the wait; until then their sums are NaN, and A must stay what it was. What
// they read of shared memory must be there when they begin, too.
#pragma once

#include "interpreter/interpreter.h"
#include "support/cuda/float16.h"

namespace ikattn {
namespace interpreter {

enum class ProductType { kHalf, kBFloat16, kInt8 };
template <typename T>
constexpr ProductType kProductType =
    std::is_same_v<T, BFloat16> ? ProductType::kBFloat16 : ProductType::kHalf;

// Product as one lane begins it.
struct Product {
  void* sums;         // float; of kInt8 int32_t
  int count;          // registers; the product has twice as many columns
  const uint32_t* a;  // nullptr: at shared_a
  uint64_t shared_a, b;
  bool accumulate, b_by_rows;
  ProductType type;
};
void begin_product(void* const* arguments, Place place);
void commit_products(void* const* arguments, Place place);
void wait_for_products(void* const* arguments, Place place);  // an int: groups that may be left

inline void begin_product(Product product, Place place) {
  warp_operation(static_cast<WarpOperation>(begin_product), &product, 0xffffffffu, "wgmma", place);
}

}  // namespace interpreter

template <int kRegisters>
void give_registers() {}
template <int kRegisters>
void take_registers() {}

inline void wgmma_fence() {}
template <typename Sums>
void sums_are_there(Sums&) {}
inline void fence_async() { interpreter::fence_accesses(); }
inline void wgmma_commit(interpreter::Place place = interpreter::Place::current()) {
  interpreter::warp_operation(interpreter::commit_products, nullptr, 0xffffffffu, "wgmma_commit",
                              place);
}
template <int kPending>
void wgmma_wait(interpreter::Place place = interpreter::Place::current()) {
  int pending = kPending;
  interpreter::warp_operation(interpreter::wait_for_products, &pending, 0xffffffffu, "wgmma_wait",
                              place);
}

template <typename T, int kCount>
void wgmma_by_columns(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, bool accumulate,
                      interpreter::Place place = interpreter::Place::current()) {
  static_assert(kCount == 4 || kCount == 32 || kCount == 64);
  interpreter::begin_product({d, kCount, a, 0, b, accumulate, false, interpreter::kProductType<T>},
                             place);
}
template <typename T>
void wgmma_by_columns(float (&d)[32], uint64_t a, uint64_t b, bool accumulate,
                      interpreter::Place place = interpreter::Place::current()) {
  interpreter::begin_product(
      {d, 32, nullptr, a, b, accumulate, false, interpreter::kProductType<T>}, place);
}
template <typename T>
void wgmma_by_rows(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool accumulate,
                   interpreter::Place place = interpreter::Place::current()) {
  interpreter::begin_product({d, 32, a, 0, b, accumulate, true, interpreter::kProductType<T>},
                             place);
}
inline void wgmma_int8(int32_t (&d)[64], const uint32_t (&a)[4], uint64_t b, bool accumulate,
                       interpreter::Place place = interpreter::Place::current()) {
  interpreter::begin_product({d, 64, a, 0, b, accumulate, false, interpreter::ProductType::kInt8},
                             place);
}

}  // namespace ikattn
