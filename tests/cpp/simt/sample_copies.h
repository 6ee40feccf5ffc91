// Rows copied by TMA from one warp for another, for the interpreter's own tests; on a GPU, for
// sm_90a alone.
#pragma once

#include <stdint.h>

namespace ikattn::sample {

enum class CopyMisuse {
  kNone,
  kNoBarrierFence,  // of the barriers, once made
  kNoWait,          // reads what may not be there
  kEarlyRelease,    // lets go of what it reads later
  kNoWarpSync,      // lets go of what other lanes still read
  kNoRoom,          // copies to where somebody reads
  kTooFewBytes,     // announces less than it copies
  kTooManyBytes,
  kUnfencedWrite,  // of a thread, before a copy to the same place
  kUnread,         // begins a copy that nobody waits for
};

constexpr int kBoxRows = 64, kBoxColumns = 64;

// Of head 2 of batch 1 of x [2, 3, rows, columns] 16-bit elements, rows and heads by these strides:
// out [row boxes][column boxes][64][64], zeros beyond x; numbers_out: the first 64 numbers, one
// more added, for each of the boxes.
const char* copy_boxes(const uint16_t* x, int rows, int columns, int64_t head_stride,
                       int64_t row_stride, const float* numbers, uint16_t* out, float* numbers_out,
                       CopyMisuse misuse);

}  // namespace ikattn::sample
