// Products of integers of 8 bits. Fragment layouts: support/cuda/integer_products.h.
#include "support/cuda/integer_products.h"

namespace ikattn {

namespace {
bool has_products = false;
}  // namespace

bool has_integer_products() { return has_products; }

namespace interpreter {

void set_integer_products(bool has) { has_products = has; }

void mma_int8(void* const* arguments, Place) {
  int32_t a[16][32], b[32][8];
  const auto byte_of = [](uint32_t bits, int i) {
    return int32_t{static_cast<int8_t>(bits >> (8 * i) & 0xff)};
  };
  for (int lane = 0; lane < warpSize; ++lane) {
    const IntegerMma& own = *static_cast<IntegerMma*>(arguments[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      for (int byte = 0; byte < 4; ++byte) {
        a[g + 8 * (i % 2)][4 * t + 16 * (i / 2) + byte] = byte_of(own.a[i], byte);
        if (i < 2) b[4 * t + 16 * i + byte][g] = byte_of(own.b[i], byte);
      }
    }
  }
  for (int lane = 0; lane < warpSize; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
      // Wraps around, as on a GPU.
      uint32_t sum = static_cast<uint32_t>(static_cast<IntegerMma*>(arguments[lane])->d[i]);
      for (int k = 0; k < 32; ++k) sum += static_cast<uint32_t>(a[row][k] * b[k][column]);
      static_cast<IntegerMma*>(arguments[lane])->d[i] = static_cast<int32_t>(sum);
    }
  }
}

}  // namespace interpreter
}  // namespace ikattn
