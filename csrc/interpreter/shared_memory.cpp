// Accesses to shared memory, checked, and copies by cp.async.
#include <string.h>

#include "interpreter/block.h"

namespace ikattn::interpreter {

bool Interpreter::in_bounds(uint32_t address, uint32_t bytes) const {
  const uint64_t end = uint64_t{address} + bytes;
  if (end <= launch_->dynamic_shared_bytes) return true;
  for (const StaticArray& array : static_arrays_) {
    if (address >= array.begin && end <= array.end) return true;
  }
  return false;
}

bool Interpreter::is_ordered(uint32_t clock, uint16_t by, uint16_t thread) const {
  return by == thread || clock < block_synced_ ||
         (by / kWarp == thread / kWarp && clock < warp_synced_[thread / kWarp]) ||
         (by < threads_ && clock <= pool_[thread]->known[by]);
}

// Up to which clock accesses of thread `of` come before what `thread` does now.
uint32_t Interpreter::known_to(int thread, int of) const {
  if (thread == of) return clock_;
  const uint32_t of_warp = thread / kWarp == of / kWarp ? warp_synced_[of / kWarp] : 0;
  const uint32_t synced = std::max(block_synced_, of_warp);  // accesses before it are ordered
  return std::max(synced - 1, pool_[thread]->known[static_cast<size_t>(of)]);
}

void Interpreter::report_race(Cell& cell, uint16_t thread, const char* does, uint16_t other,
                              const char* other_did, Place other_place, uint32_t address,
                              Place place) {
  const std::string both = name_of_thread(thread) + " " + does + " byte " +
                           std::to_string(address) + " at " + describe(place) + ", " +
                           name_of_thread(other) + " " + other_did + " it at " +
                           describe(other_place);
  if (cell.in_flight) {
    fail(
        "a copy may be under way: " + both + ", and " +
            (cell.by_tma ? "the phase that it ends is not over" : "its cp_async_wait has not come"),
        {});
  } else {
    fail("shared-memory race: " + both + ", no barrier between", {});
  }
}

inline void Interpreter::check_read(Cell& cell, uint16_t thread, uint32_t address, Place place) {
  if (cell.in_flight) {
    report_race(cell, thread, "reads", cell.writer, "copies to", cell.write_place, address, place);
    return;
  }
  if (!is_ordered(cell.write_clock, cell.writer, thread)) {
    report_race(cell, thread, "reads", cell.writer, "wrote", cell.write_place, address, place);
    return;
  }
  const int warp = thread / kWarp;
  const bool after_warp = cell.read_clock < warp_synced_[warp];
  if (cell.read_clock < block_synced_) {
    cell.reader = thread;
    cell.other_reader = kNobody;
  } else if (cell.reader == thread || (after_warp && cell.reader / kWarp == warp)) {
    cell.reader = thread;
    if (after_warp && cell.other_reader / kWarp == warp) cell.other_reader = kNobody;
  } else if (cell.other_reader == kNobody || cell.other_reader / kWarp == cell.reader / kWarp) {
    cell.other_reader = thread;
  }
  cell.read_clock = clock_;
  cell.read_place = place;
}

inline void Interpreter::check_write(Cell& cell, uint16_t thread, bool atomic, uint32_t address,
                                     Place place) {
  const char* does = atomic ? "updates" : "writes";
  if (cell.in_flight) {
    report_race(cell, thread, does, cell.writer, "copies to", cell.write_place, address, place);
    return;
  }
  const bool both_atomic = atomic && cell.atomic;
  const bool after_write = is_ordered(cell.write_clock, cell.writer, thread);
  if (!after_write && !both_atomic) {
    report_race(cell, thread, does, cell.writer, "wrote", cell.write_place, address, place);
    return;
  }
  for (uint16_t reader : {cell.reader, cell.other_reader}) {
    if (reader == kNobody) continue;
    // Where phases order warps one by one, another may have read since.
    uint32_t clock = cell.read_clock;
    if (!barriers_.empty()) clock = std::min(clock, reads_[address / 16][reader / kWarp]);
    if (!is_ordered(clock, reader, thread)) {
      report_race(cell, thread, does, reader, "read", cell.read_place, address, place);
      return;
    }
  }
  cell.writer = after_write ? thread : kSeveral;
  cell.write_clock = clock_;
  cell.write_place = place;
  cell.atomic = atomic;
  cell.by_tma = false;
}

// Returns the bytes, or nullptr after an error.
unsigned char* Interpreter::access(int thread, Access kind, uint32_t address, uint32_t bytes,
                                   uint32_t alignment, Place place) {
  if (!error_.empty()) return nullptr;
  if (!in_bounds(address, bytes)) {
    fail(name_of_thread(thread) + " accesses " + std::to_string(bytes) + " bytes at " +
             std::to_string(static_cast<int32_t>(address)) + ", out of bounds: the launch has " +
             std::to_string(launch_->dynamic_shared_bytes) + " bytes of dynamic shared memory",
         place);
    return nullptr;
  }
  if (address % alignment != 0) {
    fail(name_of_thread(thread) + " accesses " + std::to_string(bytes) + " bytes at " +
             std::to_string(address) + ", not a multiple of " + std::to_string(alignment),
         place);
    return nullptr;
  }
  const uint16_t who = static_cast<uint16_t>(thread);
  const bool reads = kind == Access::kRead || kind == Access::kReadByProduct;
  Cell* cells = &cells_[address];
  for (uint32_t i = 0; i < bytes; ++i) {
    if (reads) {
      check_read(cells[i], who, address + i, place);
    } else {
      check_write(cells[i], who, kind == Access::kAtomic, address + i, place);
    }
  }
  if (kind == Access::kWrite && !barriers_.empty() && bytes >= 4) {
    // Two readers of a byte are known, and phases may order these and not others. Of smaller
    // elements a neighbour may be another thread's.
    expect_released(address, bytes, thread / kWarp, "writes", place);
  }
  if (reads && !barriers_.empty()) {
    for (uint32_t at = address / 16; at <= (address + bytes - 1) / 16; ++at) {
      reads_[at][who / kWarp] = clock_;
      uint32_t& lanes = unfenced_[at][who / kWarp];
      if (kind == Access::kReadByProduct || (lanes >> who % kWarp & 1) != 0) continue;
      lanes |= 1u << who % kWarp;
      pool_[thread]->unfenced.push_back(at);
    }
  }
  return error_.empty() ? &arena_[address] : nullptr;
}

uint32_t Interpreter::static_shared(const void* declaration, size_t bytes, Place place) {
  size_t sum = bytes;
  for (const StaticArray& array : static_arrays_) {
    if (array.declaration == declaration) return array.begin;
    sum += array.end - array.begin;
  }
  if (sum > kMaxStaticBytes || sum + launch_->dynamic_shared_bytes > settings.shared_limit) {
    fail("needs " + std::to_string(sum) + " bytes of static shared memory beside " +
             std::to_string(launch_->dynamic_shared_bytes) + " dynamic: too much",
         place);
  }
  const uint32_t begin = (arena_used_ + 15) / 16 * 16;
  const uint32_t end = begin + static_cast<uint32_t>(bytes);
  memset(&arena_[begin], kPoison, bytes);
  static_arrays_.push_back({declaration, begin, end});
  arena_used_ = end + kRedzoneBytes;
  return begin;
}

void Interpreter::begin_copy(uint32_t address, const void* bytes16, Place place) {
  unsigned char* target = access(current_, Access::kWrite, address, 16, 16, place);
  memset(target, kPoison, 16);
  for (int i = 0; i < 16; ++i) cells_[address + i].in_flight = true;
  Copy copy{address, place, {}};
  memcpy(copy.bytes, bytes16, 16);
  pool_[current_]->copies.push_back(copy);
}

void Interpreter::commit_copies() {
  Thread& thread = *pool_[current_];
  thread.groups.push_back(std::move(thread.copies));
  thread.copies.clear();
}

void Interpreter::wait_for_copies(size_t pending_groups) {
  Thread& thread = *pool_[current_];
  while (thread.groups.size() > pending_groups) {
    for (const Copy& copy : thread.groups.front()) {
      memcpy(&arena_[copy.address], copy.bytes, 16);
      for (int i = 0; i < 16; ++i) {
        cells_[copy.address + i].in_flight = false;
        cells_[copy.address + i].write_clock = clock_;
      }
    }
    thread.groups.pop_front();
  }
}

}  // namespace ikattn::interpreter
