// The interpreter's own: one block, its threads, its shared memory and what is known of it. Threads
// are in interpreter.cpp, accesses to shared memory in shared_memory.cpp, barriers with phases in
// phases.cpp.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "interpreter/barriers.h"
#include "interpreter/fiber.h"
#include "interpreter/interpreter.h"

namespace ikattn::interpreter {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;
constexpr uint32_t kArenaBytes = 512 * 1024;
constexpr uint32_t kRedzoneBytes = 256;
constexpr size_t kMaxStaticBytes = 48 * 1024;
constexpr uint16_t kNobody = 0xffff;
constexpr uint16_t kSeveral = 0xfffe;
constexpr unsigned char kPoison = 0xff;  // NaN in every format, -1 as an integer

std::string describe(Place place);

// Knowledge of one byte of shared memory. Clocks count barriers. An access is ordered before one of
// thread t when it was made by t, or before the block's last barrier, or by t's warp before that
// warp's last __syncwarp. One writer and two readers are enough to find every unordered pair.
struct Cell {
  Place write_place, read_place;
  uint32_t write_clock = 0, read_clock = 0;
  uint16_t writer = kNobody;
  uint16_t reader = kNobody;
  uint16_t other_reader = kNobody;
  bool atomic = false;
  bool in_flight = false;  // a copy that `writer` has begun and nobody waited for
  bool by_tma = false;     // the write
};

// Unwinds the thread in which an error was found; the block's others just stop.
struct Abandoned {};

struct Copy {
  uint32_t address;
  Place place;
  unsigned char bytes[16];
};

struct Thread {
  enum State { kRunnable, kAtWarp, kAtPhase, kAtBlock, kFinished };

  Fiber fiber;
  Index3 index;
  State state = kFinished;
  const char* waits_in = "";
  Place place;
  WarpOperation operation = nullptr;
  void* argument = nullptr;
  bool value = false;
  std::vector<Copy> copies;  // begun, not committed
  std::deque<std::vector<Copy>> groups;
  uint32_t fence_clock = 0;        // clock of the last fence_accesses
  std::vector<uint32_t> unfenced;  // its reads since then, by 16 bytes each
  Known known;                     // accesses that are ordered by the phases it waited for
  uint32_t barrier = 0, parity = 0;
};

struct StaticArray {
  const void* declaration;
  uint32_t begin, end;
};

class Interpreter {
 public:
  const char* run(const Launch& launch);
  void fail(const std::string& message, Place place);

  int block_barrier(bool value, const char* name, Place place);
  void warp_operation(WarpOperation operation, void* argument, const char* name, Place place);

  unsigned char* access(int thread, Access kind, uint32_t address, uint32_t bytes,
                        uint32_t alignment, Place place);
  uint32_t static_shared(const void* declaration, size_t bytes, Place place);
  void begin_copy(uint32_t address, const void* bytes16, Place place);
  void commit_copies();
  void wait_for_copies(size_t pending_groups);
  void fence_accesses();
  bool is_fenced(uint32_t address) const {
    const Cell& cell = cells_[address];
    return cell.writer >= threads_ || cell.by_tma ||
           cell.write_clock <= pool_[cell.writer]->fence_clock;
  }

  void init_barrier(uint32_t barrier, int arrivals, Place place);
  void fence_barriers();
  void arrive(uint32_t barrier, uint32_t bytes, Place place);
  void wait_for_phase(uint32_t barrier, uint32_t parity, Place place);
  void begin_bulk_copy(BulkCopy copy, uint32_t alignment, Place place);
  void expect_released(uint32_t address, uint32_t count, int except, const char* does, Place place);
  void expect_fenced_reads(uint32_t address, uint32_t count, Place place);

  int current() const { return current_; }
  int current_warp() const { return current_warp_; }

 private:
  void check_configuration();
  void run_block(Index3 block);
  void run_warp(int warp);
  void run_thread(int thread);
  void run_operation(int warp);
  bool release_block();
  bool ends_waiting(int thread) const;
  bool any_ends_waiting() const;
  bool finish_bulk_copy();
  void suspend(Thread::State state, const char* name, Place place);

  bool in_bounds(uint32_t address, uint32_t bytes) const;
  uint32_t known_to(int thread, int of) const;
  bool is_ordered(uint32_t clock, uint16_t by, uint16_t thread) const;
  PhaseBarrier& barrier_at(uint32_t address, Place place);
  void check_read(Cell& cell, uint16_t thread, uint32_t address, Place place);
  void check_write(Cell& cell, uint16_t thread, bool atomic, uint32_t address, Place place);
  void report_race(Cell& cell, uint16_t thread, const char* does, uint16_t other,
                   const char* other_did, Place other_place, uint32_t address, Place place);
  std::string name_of_thread(int thread) const;
  std::string where(int thread) const;

  template <typename T>
  void arrange(std::vector<T>& items);

  const Launch* launch_ = nullptr;
  int threads_ = 0;
  Index3 block_;
  int current_ = -1;  // thread whose fiber runs; -1: none
  int current_warp_ = -1;
  std::string error_;
  int barrier_count_ = 0;
  std::mt19937 random_{5};
  std::vector<int> warp_order_, lane_order_;

  std::vector<std::unique_ptr<Thread>> pool_;
  std::vector<unsigned char> arena_ = std::vector<unsigned char>(kArenaBytes);
  std::vector<Cell> cells_ = std::vector<Cell>(kArenaBytes);
  uint32_t arena_used_ = 0;
  std::vector<StaticArray> static_arrays_;
  uint32_t clock_ = 1;
  uint32_t block_synced_ = 1;
  uint32_t warp_synced_[kMaxThreads / kWarp] = {};
  uint32_t block_began_ = 1;

  std::map<uint32_t, PhaseBarrier> barriers_;
  std::deque<BulkCopy> bulk_copies_;  // begun
  // Reads of warps, by 16 bytes: when they last read them; and the lanes, as bits, that have read
  // them themselves, not by products, and not fenced that. Kept where there are barriers.
  using OfWarps = std::array<uint32_t, kMaxThreads / kWarp>;
  std::vector<OfWarps> reads_ = std::vector<OfWarps>(kArenaBytes / 16);
  std::vector<OfWarps> unfenced_ = std::vector<OfWarps>(kArenaBytes / 16);
};

Interpreter& interpreter();

// Settings of tests.
struct Settings {
  Order order = Order::kForward;
  size_t shared_limit = 227 * 1024;
  int multiprocessors = 1;
  bool warpgroups = false;
};
extern Settings settings;

}  // namespace ikattn::interpreter
