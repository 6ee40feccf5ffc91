// support/cuda/bulk_copies.h, emulated. What is copied is read when the copy begins, here, where
// AddressSanitizer looks.
#pragma once

#include <vector>

#include "interpreter/interpreter.h"

namespace ikattn {

inline void barrier_init(uint32_t barrier, int arrivals,
                         interpreter::Place place = interpreter::Place::current()) {
  interpreter::init_barrier(barrier, arrivals, place);
}
inline void fence_barriers() { interpreter::fence_barriers(); }
inline void barrier_arrive(uint32_t barrier,
                           interpreter::Place place = interpreter::Place::current()) {
  interpreter::arrive(barrier, 0, place);
}
inline void barrier_arrive(uint32_t barrier, uint32_t bytes,
                           interpreter::Place place = interpreter::Place::current()) {
  interpreter::arrive(barrier, bytes, place);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity,
                         interpreter::Place place = interpreter::Place::current()) {
  interpreter::wait_for_phase(barrier, parity, place);
}

inline void begin_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                        interpreter::Place place = interpreter::Place::current()) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) {
    interpreter::fail("begin_bytes from an address that is no multiple of 16", place);
  }
  std::vector<unsigned char> value(bytes);
  memcpy(value.data(), from, bytes);
  interpreter::begin_bulk_copy(to, std::move(value), 16, barrier, place);
}

struct RowMap {
  const uint16_t* data;
  int64_t sizes[4], strides[4];
  int rows;  // rows of a box
};

inline void begin_box(uint32_t to, const RowMap& map, int batch, int head, int row, int column,
                      uint32_t barrier, interpreter::Place place = interpreter::Place::current()) {
  constexpr int kColumns = 64;
  if (batch < 0 || batch >= map.sizes[0] || head < 0 || head >= map.sizes[1] || row < 0 ||
      column % kColumns != 0) {
    interpreter::fail("begin_box of a head that is not there, or of columns that are no box's",
                      place);
  }
  std::vector<unsigned char> box(static_cast<size_t>(map.rows) * kColumns * 2);
  const uint16_t* from = map.data + batch * map.strides[0] + head * map.strides[1];
  for (int r = 0; r < map.rows && row + r < map.sizes[2]; ++r) {
    for (int c = 0; c < kColumns && column + c < map.sizes[3]; ++c) {
      const int place_of_chunk = r * 128 + ((c / 8) ^ (r % 8)) * 16;
      memcpy(&box[static_cast<size_t>(place_of_chunk + c % 8 * 2)],
             from + (row + r) * map.strides[2] + column + c, 2);
    }
  }
  interpreter::begin_bulk_copy(to, std::move(box), 1024, barrier, place);
}

inline const char* map_rows(RowMap& map, const void* data, const int64_t (&sizes)[4],
                            const int64_t (&strides)[4], int box_rows) {
  map.data = static_cast<const uint16_t*>(data);
  map.rows = box_rows;
  bool fits = reinterpret_cast<uintptr_t>(data) % 16 == 0 && strides[3] == 1 && box_rows <= 256;
  for (int axis = 0; axis < 4; ++axis) {
    map.sizes[axis] = sizes[axis];
    map.strides[axis] = strides[axis];
    fits = fits && sizes[axis] > 0 && sizes[axis] < int64_t{1} << 31;
    const bool steps = axis < 3 && sizes[axis] > 1;
    fits = fits && (!steps || strides[axis] % 8 == 0);
    fits = fits && (axis != 2 || !steps || strides[axis] >= sizes[3]);  // rows are apart
  }
  return fits ? nullptr : "TMA cannot copy rows of these sizes and strides";
}

}  // namespace ikattn
