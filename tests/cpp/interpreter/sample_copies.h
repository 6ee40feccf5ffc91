// Rows copied by TMA from one warp for another, for the interpreter's own tests; on a GPU, for
// sm_90a alone.
#pragma once

#include <stdint.h>

namespace ikattn::sample {

enum class CopyMisuse {
  kNone,
  kNoBarrierFence,  // omits the fence behind the barriers' initialisation
  kNoWait,          // reads what may not be there
  kEarlyRelease,    // lets go of what it reads later
  kNoWarpSync,      // lets go of what other lanes still read
  kNoRoom,          // copies to where somebody reads
  kTooFewBytes,     // announces less than it copies
  kTooManyBytes,
  kUnfencedWrite,  // omits a thread's fence, before a copy to the same place
  kUnfencedRead,   // likewise
  kUnread,         // begins a copy that nobody waits for
};

constexpr int kBoxRows = 64, kBoxColumns = 64, kBox = kBoxRows * kBoxColumns;

// How x [2, 3, rows, columns] of 16-bit elements lies: heads one after another, beside one another
// in a row, or all the same.
enum class Heads { kApart, kInterleaved, kShared };
constexpr Heads kEveryHeads[] = {Heads::kApart, Heads::kInterleaved, Heads::kShared};
struct Rows {
  int rows, columns;
  Heads heads;

  int64_t row_stride() const { return heads == Heads::kInterleaved ? 3 * columns : columns; }
  int64_t head_stride() const {
    return heads == Heads::kApart ? int64_t{rows} * columns
                                  : (heads == Heads::kShared ? 0 : columns);
  }
  int64_t batch_stride() const { return heads == Heads::kShared ? 0 : 3 * int64_t{rows} * columns; }
  int row_boxes() const { return (rows + kBoxRows - 1) / kBoxRows; }
  int column_boxes() const { return (columns + kBoxColumns - 1) / kBoxColumns; }
  // Returns an element of out, below.
  uint16_t expected(const uint16_t* x, int tile, int at) const {
    const int row = tile / column_boxes() * kBoxRows + at / kBoxColumns;
    const int column = tile % column_boxes() * kBoxColumns + at % kBoxColumns;
    if (row >= rows || column >= columns) return 0;
    return x[batch_stride() + 2 * head_stride() + row * row_stride() + column];
  }
};

// Copies boxes of head 2 of batch 1: out [row boxes][column boxes][64][64], zeros beyond x;
// numbers_out: the first 64 numbers, one more added, for each of the boxes.
const char* copy_boxes(const uint16_t* x, const Rows& rows, const float* numbers, uint16_t* out,
                       float* numbers_out, CopyMisuse misuse);

}  // namespace ikattn::sample
