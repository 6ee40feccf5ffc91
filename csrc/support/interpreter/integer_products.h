// The instructions of support/cuda/integer_products.h, emulated.
#pragma once

#include "support/interpreter/interpreter.h"

namespace ikattn {
namespace interpreter {

// Arguments of one lane.
struct IntegerMma {
  int32_t* d;
  const uint32_t* a;
  uint32_t b[2];
};
void mma_int8(void* const* arguments, Place place);

// What has_integer_products() says; false at first.
void set_integer_products(bool has);

}  // namespace interpreter

inline void mma_m16n8k32_int8(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                              interpreter::Place place = interpreter::Place::current()) {
  interpreter::IntegerMma argument{d, a, {b0, b1}};
  interpreter::warp_operation(interpreter::mma_int8, &argument, 0xffffffffu, "mma_m16n8k32_int8",
                              place);
}

bool has_integer_products();

}  // namespace ikattn
