// The sample of copies by TMA that the interpreter's tests run, on a GPU: boxes at the array's end
// and beyond, of a head of a batch, rows of other strides, heads that are one, rows of numbers, and
// a ring of stages that goes round. Exits with 1 where a number is wrong.
//
//   nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -Icsrc -Icsrc/include -Itests/cpp
//     tests/cpp/hardware/copies.cu tests/cpp/interpreter/sample_copies.cu -o copies
#include <cstdio>

#include "hardware/managed.h"
#include "interpreter/sample_copies.h"
#include "support/cuda/launch.h"

namespace ikattn::sample {
namespace {

bool is_right(const Rows& rows, const char* name) {
  const int tiles = rows.row_boxes() * rows.column_boxes(), elements = 6 * rows.rows * rows.columns;
  uint16_t *x = take_managed<uint16_t>(elements), *boxes = take_managed<uint16_t>(tiles * kBox);
  float *numbers = take_managed<float>(64), *numbers_out = take_managed<float>(tiles * 64);
  for (int i = 0; i < elements; ++i) x[i] = static_cast<uint16_t>(i % 65521 + 1);
  for (int i = 0; i < 64; ++i) numbers[i] = static_cast<float>(i);
  const char* error = copy_boxes(x, rows, numbers, boxes, numbers_out, CopyMisuse::kNone);
  if (error == nullptr) {
    const cudaError_t status = cudaDeviceSynchronize();
    if (status != cudaSuccess) error = cudaGetErrorString(status);
  }
  int wrong = 0;
  for (int i = 0; error == nullptr && i < tiles * kBox; ++i) {
    wrong += boxes[i] != rows.expected(x, i / kBox, i % kBox);
  }
  for (int i = 0; error == nullptr && i < tiles * 64; ++i) wrong += numbers_out[i] != i % 64 + 1;
  std::printf("%3d rows of %3d, heads %-12s %d wrong%s%s\n", rows.rows, rows.columns, name, wrong,
              error == nullptr ? "" : "; ", error == nullptr ? "" : error);
  return error == nullptr && wrong == 0;
}

}  // namespace
}  // namespace ikattn::sample

int main() {
  using namespace ikattn::sample;
  bool right = true;
  for (const int rows : {1, 64, 150}) {
    for (const int columns : {8, 64, 72, 128}) {
      right &= is_right({rows, columns, Heads::kApart}, "apart");
      right &= is_right({rows, columns, Heads::kInterleaved}, "interleaved");
      right &= is_right({rows, columns, Heads::kShared}, "shared");
    }
  }
  return right ? 0 : 1;
}
