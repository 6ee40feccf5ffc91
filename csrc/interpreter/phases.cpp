// Barriers with phases, and the copies by TMA that end them.
#include <string.h>

#include <algorithm>

#include "interpreter/block.h"

namespace ikattn::interpreter {

bool Interpreter::ends_waiting(int thread) const {
  const Thread& waiting = *pool_[thread];
  return waiting.state == Thread::kAtPhase && barriers_.at(waiting.barrier).is_over(waiting.parity);
}

bool Interpreter::any_ends_waiting() const {
  for (int t = 0; t < threads_; ++t) {
    if (ends_waiting(t)) return true;
  }
  return false;
}

void Interpreter::init_barrier(uint32_t address, int arrivals, Place place) {
  if (!in_bounds(address, 8) || address % 8 != 0 || arrivals < 1) {
    fail("barrier_init of " + std::to_string(arrivals) + " arrivals at " + std::to_string(address),
         place);
  }
  PhaseBarrier& barrier = barriers_[address];
  barrier = {};
  barrier.arrivals = arrivals;
  barrier.thread = current_;
  barrier.clock = clock_;
}

void Interpreter::fence_barriers() {
  for (auto& [address, barrier] : barriers_) barrier.fenced |= barrier.thread == current_;
}

PhaseBarrier& Interpreter::barrier_at(uint32_t address, Place place) {
  const auto found = barriers_.find(address);
  if (found == barriers_.end() || !found->second.fenced ||
      !is_ordered(found->second.clock, static_cast<uint16_t>(found->second.thread),
                  static_cast<uint16_t>(current_))) {
    fail(name_of_thread(current_) + " uses a barrier at " + std::to_string(address) +
             " that nobody has made, or fenced, before",
         place);
  }
  return found->second;
}

void Interpreter::arrive(uint32_t address, uint32_t bytes, Place place) {
  Known known(static_cast<size_t>(threads_));
  for (int t = 0; t < threads_; ++t) known[static_cast<size_t>(t)] = known_to(current_, t);
  barrier_at(address, place).arrive(bytes, known);
  ++clock_;
}

void Interpreter::wait_for_phase(uint32_t address, uint32_t parity, Place place) {
  const PhaseBarrier& barrier = barrier_at(address, place);
  while (!barrier.is_over(parity)) {
    pool_[current_]->barrier = address;
    pool_[current_]->parity = parity;
    suspend(Thread::kAtPhase, "barrier_wait", place);
  }
  join(pool_[current_]->known, barrier.released());
}

// Fails unless reads by warps, but `except`, of the bytes that this thread changes are over.
void Interpreter::expect_released(uint32_t address, uint32_t count, int except, const char* does,
                                  Place place) {
  for (int warp = 0; warp * kWarp < threads_; ++warp) {
    if (warp == except) continue;
    uint32_t known = clock_;  // smallest clock of all its threads
    for (int t = warp * kWarp; t < std::min(threads_, (warp + 1) * kWarp); ++t) {
      known = std::min(known, known_to(current_, t));
    }
    for (uint32_t at = address / 16; at <= (address + count - 1) / 16; ++at) {
      if (reads_[at][static_cast<size_t>(warp)] <= known) continue;
      fail(name_of_thread(current_) + " " + does + " byte " + std::to_string(at * 16) +
               ", which warp " + std::to_string(warp) + " has read and not released",
           place);
    }
  }
}

void Interpreter::fence_accesses() {
  Thread& thread = *pool_[current_];
  thread.fence_clock = clock_++;
  for (const uint32_t at : thread.unfenced) {
    unfenced_[at][static_cast<size_t>(current_ / kWarp)] &= ~(1u << current_ % kWarp);
  }
  thread.unfenced.clear();
}

// Fails unless reads of the bytes that are copied to have been fenced.
void Interpreter::expect_fenced_reads(uint32_t address, uint32_t count, Place place) {
  for (uint32_t at = address / 16; at <= (address + count - 1) / 16; ++at) {
    for (int warp = 0; warp * kWarp < threads_; ++warp) {
      if (unfenced_[at][static_cast<size_t>(warp)] == 0) continue;
      fail("a copy to byte " + std::to_string(at * 16) + ", which warp " + std::to_string(warp) +
               " has read and not fenced for copies",
           place);
    }
  }
}

void Interpreter::begin_bulk_copy(BulkCopy copy, uint32_t alignment, Place place) {
  const auto count = static_cast<uint32_t>(copy.bytes.size());
  const auto who = static_cast<uint16_t>(current_);
  barrier_at(copy.barrier, place);
  if (!in_bounds(copy.address, count) || count % 16 != 0 || copy.address % alignment != 0) {
    fail("a copy of " + std::to_string(count) + " bytes to " + std::to_string(copy.address) +
             ": out of bounds, or not aligned",
         place);
  }
  expect_released(copy.address, count, -1, "begins a copy to", place);
  expect_fenced_reads(copy.address, count, place);
  for (uint32_t i = copy.address; i < copy.address + count; ++i) {
    Cell& cell = cells_[i];
    if (cell.in_flight || !is_ordered(cell.write_clock, cell.writer, who)) {
      report_race(cell, who, "copies to", cell.writer, "wrote", cell.write_place, i, place);
    }
    if (cell.write_clock >= block_began_ && !is_fenced(i)) {
      fail("a copy to what its writer has not fenced for copies", place);
    }
    cell.reader = cell.other_reader = kNobody;
    cell.writer = who;
    cell.write_clock = clock_;
    cell.write_place = place;
    cell.atomic = false;
    cell.in_flight = cell.by_tma = true;
  }
  memset(&arena_[copy.address], kPoison, count);
  copy.thread = current_;
  copy.clock = clock_;
  bulk_copies_.push_back(std::move(copy));
}

// Finishes a copy as late as may be: when somebody waits for a phase, and nobody can go on.
bool Interpreter::finish_bulk_copy() {
  const auto waits = [](const auto& thread) { return thread->state == Thread::kAtPhase; };
  if (bulk_copies_.empty() || std::none_of(pool_.begin(), pool_.begin() + threads_, waits)) {
    return false;
  }
  const bool last_first = settings.order == Order::kReversed;
  const BulkCopy copy = std::move(last_first ? bulk_copies_.back() : bulk_copies_.front());
  last_first ? bulk_copies_.pop_back() : bulk_copies_.pop_front();
  memcpy(&arena_[copy.address], copy.bytes.data(), copy.bytes.size());
  for (uint32_t i = 0; i < copy.bytes.size(); ++i) cells_[copy.address + i].in_flight = false;
  if (!barriers_.at(copy.barrier).receive(copy)) {
    fail("a copy to byte " + std::to_string(copy.address) + " of more than was announced", {});
    return false;
  }
  return true;
}

}  // namespace ikattn::interpreter
