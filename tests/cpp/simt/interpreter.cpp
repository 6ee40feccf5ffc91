#include "simt/interpreter.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <vector>

#include "simt/fiber.h"

// Weak: only AddressSanitizer brings it.
extern "C" __attribute__((weak)) void __sanitizer_symbolize_pc(void* pc, const char* format,
                                                               char* out, size_t size);

namespace ikattn::simt {

BuiltIns built_ins;

namespace {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;
constexpr uint32_t kArenaBytes = 512 * 1024;
constexpr uint32_t kRedzoneBytes = 256;
constexpr size_t kMaxStaticBytes = 48 * 1024;
constexpr uint16_t kNobody = 0xffff;
constexpr uint16_t kSeveral = 0xfffe;
constexpr unsigned char kPoison = 0xff;  // NaN in every format, -1 as an integer

Order order = Order::kForward;
size_t shared_limit = 227 * 1024;
int multiprocessor_count = 1;
bool warpgroups = false;
std::map<const void*, int> launches_by_kernel;

std::string describe(Place place) {
  if (place.line() == 0) return "an unknown place";
  const std::string file = place.file_name();
  return file.substr(file.rfind('/') + 1) + ":" + std::to_string(place.line());
}

bool is_same(Place a, Place b) {
  return a.line() == b.line() &&
         (a.file_name() == b.file_name() || !strcmp(a.file_name(), b.file_name()));
}

std::string name_of_kernel(const void* kernel) {
  char name[512] = "";
  if (__sanitizer_symbolize_pc) {
    // Takes return addresses: one byte further is still in the function.
    __sanitizer_symbolize_pc(const_cast<char*>(static_cast<const char*>(kernel)) + 1, "%f", name,
                             sizeof(name));
  }
  Dl_info info;
  if (!name[0] && dladdr(kernel, &info) && info.dli_sname) return info.dli_sname;
  if (name[0]) return name;
  std::ostringstream address;
  address << kernel;
  return address.str();
}

std::string describe(Index3 index) {
  std::ostringstream text;
  text << "(" << index.x << ", " << index.y << ", " << index.z << ")";
  return text.str();
}

// What is known of one byte of shared memory. Clocks count barriers. An access is ordered before
// one of thread t when it was made by t, or before the block's last barrier, or by t's warp before
// that warp's last __syncwarp. One writer and two readers are enough to find every unordered pair.
struct Cell {
  Place write_place, read_place;
  uint32_t write_clock = 0, read_clock = 0;
  uint16_t writer = kNobody;
  uint16_t reader = kNobody;
  uint16_t other_reader = kNobody;
  bool atomic = false;
  bool in_flight = false;  // `writer` has begun a cp.async and not waited for it
};

// Unwinds the thread in which an error was found; the block's others just stop.
struct Abandoned {};

struct Copy {
  uint32_t address;
  Place place;
  unsigned char bytes[16];
};

struct Thread {
  enum State { kRunnable, kAtWarp, kAtBlock, kFinished };

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
  uint32_t fence_clock = 0;  // of the last fence_writes
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
  void fence_writes() { pool_[current_]->fence_clock = clock_++; }
  bool is_fenced(uint32_t address) const {
    const Cell& cell = cells_[address];
    return cell.writer >= threads_ || cell.write_clock <= pool_[cell.writer]->fence_clock;
  }

  int current() const { return current_; }
  int current_warp() const { return current_warp_; }

 private:
  void check_configuration();
  void run_block(Index3 block);
  void run_warp(int warp);
  void run_thread(int thread);
  void run_operation(int warp);
  bool release_block();
  void suspend(Thread::State state, const char* name, Place place);

  bool in_bounds(uint32_t address, uint32_t bytes) const;
  bool is_ordered(uint32_t clock, uint16_t by, uint16_t thread) const;
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
};

Interpreter& interpreter() {
  static Interpreter the_one;
  return the_one;
}

// --- Threads
// ----------------------------------------------------------------------------------------

template <typename T>
void Interpreter::arrange(std::vector<T>& items) {
  if (order == Order::kReversed) std::reverse(items.begin(), items.end());
  if (order == Order::kShuffled) std::shuffle(items.begin(), items.end(), random_);
}

std::vector<int> count_to(int count) {
  std::vector<int> items(count);
  for (int i = 0; i < count; ++i) items[i] = i;
  return items;
}

void Interpreter::check_configuration() {
  const Index3 grid = launch_->grid, block = launch_->block;
  const size_t threads = size_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMaxThreads || block.x > 1024 || block.y > 1024 || block.z > 64) {
    fail("a block of " + describe(block) + " threads", {});
  }
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    fail("a grid of " + describe(grid) + " blocks: at most 2^31 - 1, 65535, 65535", {});
  }
  if (launch_->dynamic_shared_bytes > shared_limit) {
    fail("asks for " + std::to_string(launch_->dynamic_shared_bytes) +
             " bytes of shared memory, there are " + std::to_string(shared_limit),
         {});
  }
}

const char* Interpreter::run(const Launch& launch) {
  launch_ = &launch;
  ++launches_by_kernel[launch.kernel];
  error_.clear();
  current_ = -1;
  static_arrays_.clear();
  arena_used_ = static_cast<uint32_t>(launch.dynamic_shared_bytes) + kRedzoneBytes;
  check_configuration();
  if (!error_.empty()) return error_.c_str();

  threads_ = static_cast<int>(launch.block.x * launch.block.y * launch.block.z);
  while (static_cast<int>(pool_.size()) < threads_) pool_.push_back(std::make_unique<Thread>());
  warp_order_ = count_to((threads_ + kWarp - 1) / kWarp);
  lane_order_ = count_to(kWarp);
  arrange(warp_order_);
  arrange(lane_order_);

  std::vector<Index3> blocks;
  for (unsigned z = 0; z < launch.grid.z; ++z) {
    for (unsigned y = 0; y < launch.grid.y; ++y) {
      for (unsigned x = 0; x < launch.grid.x; ++x) blocks.push_back({x, y, z});
    }
  }
  arrange(blocks);
  for (const Index3& block : blocks) {
    run_block(block);
    if (!error_.empty()) return error_.c_str();
  }
  return nullptr;
}

void Interpreter::run_block(Index3 block) {
  block_ = block;
  built_ins.block = block;
  built_ins.block_size = launch_->block;
  built_ins.grid_size = launch_->grid;
  memset(arena_.data(), kPoison, arena_used_);
  forget_products();
  block_synced_ = ++clock_;

  for (int t = 0; t < threads_; ++t) {
    Thread& thread = *pool_[t];
    const Index3 size = launch_->block;
    const unsigned row = static_cast<unsigned>(t) / size.x;
    thread.index = {static_cast<unsigned>(t) % size.x, row % size.y, row / size.y};
    thread.state = Thread::kRunnable;
    thread.copies.clear();
    thread.groups.clear();
    thread.fence_clock = 0;
    thread.fiber.start(
        [](void*) {
          Interpreter& self = interpreter();
          try {
            self.launch_->run_thread(self.launch_->context);
          } catch (const Abandoned&) {
          }
          self.pool_[self.current_]->state = Thread::kFinished;
        },
        nullptr);
  }
  do {
    for (int warp : warp_order_) run_warp(warp);
  } while (error_.empty() && release_block());

  // What nobody waited for must not trouble the next block.
  for (int t = 0; t < threads_; ++t) {
    pool_[t]->groups.push_back(std::move(pool_[t]->copies));
    for (const std::vector<Copy>& group : pool_[t]->groups) {
      for (const Copy& copy : group) {
        for (int i = 0; i < 16; ++i) cells_[copy.address + i].in_flight = false;
      }
    }
  }
}

void Interpreter::run_thread(int thread) {
  current_ = thread;
  built_ins.thread = pool_[thread]->index;
  pool_[thread]->fiber.resume();
  current_ = -1;
}

// Until every lane has finished or waits for the block.
void Interpreter::run_warp(int warp) {
  current_warp_ = warp;
  while (error_.empty()) {
    int at_warp = 0;
    for (int lane : lane_order_) {
      const int t = warp * kWarp + lane;
      if (t >= threads_) continue;
      if (pool_[t]->state == Thread::kRunnable) run_thread(t);
      if (!error_.empty()) return;
      at_warp += pool_[t]->state == Thread::kAtWarp;
    }
    if (at_warp == 0) return;
    run_operation(warp);
  }
}

void Interpreter::run_operation(int warp) {
  const Thread* first = nullptr;
  int waiting = 0;
  for (int t = warp * kWarp; t < std::min(threads_, (warp + 1) * kWarp); ++t) {
    if (!first && pool_[t]->state == Thread::kAtWarp) {
      first = pool_[t].get();
      waiting = t;
    }
  }
  void* arguments[kWarp];
  for (int lane = 0; lane < kWarp; ++lane) {
    const int t = warp * kWarp + lane;
    const bool together = t < threads_ && pool_[t]->state == Thread::kAtWarp &&
                          pool_[t]->operation == first->operation &&
                          is_same(pool_[t]->place, first->place);
    if (!together) {
      fail("not all lanes reach the same warp operation: " + where(waiting) + ", " + where(t), {});
      return;
    }
    arguments[lane] = pool_[t]->argument;
  }
  if (first->operation) {
    first->operation(arguments, first->place);
  } else {
    warp_synced_[warp] = ++clock_;
  }
  for (int lane = 0; lane < kWarp; ++lane) pool_[warp * kWarp + lane]->state = Thread::kRunnable;
}

// Opens the barrier at which all threads wait. False when all have finished.
bool Interpreter::release_block() {
  int finished = 0, first = -1;
  barrier_count_ = 0;
  for (int t = 0; t < threads_; ++t) {
    finished += pool_[t]->state == Thread::kFinished;
    if (first < 0 && pool_[t]->state == Thread::kAtBlock) first = t;
    barrier_count_ += pool_[t]->state == Thread::kAtBlock && pool_[t]->value;
  }
  if (finished == threads_) return false;
  for (int t = 0; t < threads_; ++t) {
    const Thread& thread = *pool_[t];
    if (thread.state != Thread::kAtBlock || !is_same(thread.place, pool_[first]->place)) {
      fail("not all threads reach the same barrier: " + where(first) + ", " + where(t), {});
      return false;
    }
  }
  block_synced_ = ++clock_;
  for (int t = 0; t < threads_; ++t) pool_[t]->state = Thread::kRunnable;
  return true;
}

void Interpreter::suspend(Thread::State state, const char* name, Place place) {
  Thread& thread = *pool_[current_];
  thread.state = state;
  thread.waits_in = name;
  thread.place = place;
  thread.fiber.suspend();
}

int Interpreter::block_barrier(bool value, const char* name, Place place) {
  pool_[current_]->value = value;
  suspend(Thread::kAtBlock, name, place);
  return barrier_count_;
}

void Interpreter::warp_operation(WarpOperation operation, void* argument, const char* name,
                                 Place place) {
  pool_[current_]->operation = operation;
  pool_[current_]->argument = argument;
  suspend(Thread::kAtWarp, name, place);
}

std::string Interpreter::name_of_thread(int thread) const {
  if (thread == kNobody || thread == kSeveral) return "several threads";
  return "thread " + std::to_string(thread) + " (warp " + std::to_string(thread / kWarp) +
         ", lane " + std::to_string(thread % kWarp) + ")";
}

std::string Interpreter::where(int thread) const {
  if (thread >= threads_) return name_of_thread(thread) + " does not exist";
  const Thread& state = *pool_[thread];
  if (state.state == Thread::kFinished) return name_of_thread(thread) + " has returned";
  return name_of_thread(thread) + " waits in " + state.waits_in + " at " + describe(state.place);
}

void Interpreter::fail(const std::string& message, Place place) {
  if (error_.empty()) {
    error_ = name_of_kernel(launch_->kernel) + ", block " + describe(block_) + ": " + message;
    if (place.line() != 0) error_ += ", at " + describe(place);
  }
  if (current_ >= 0) throw Abandoned();
}

// --- Shared memory
// ----------------------------------------------------------------------------------

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
         (by / kWarp == thread / kWarp && clock < warp_synced_[thread / kWarp]);
}

void Interpreter::report_race(Cell& cell, uint16_t thread, const char* does, uint16_t other,
                              const char* other_did, Place other_place, uint32_t address,
                              Place place) {
  const std::string both = name_of_thread(thread) + " " + does + " byte " +
                           std::to_string(address) + " at " + describe(place) + ", " +
                           name_of_thread(other) + " " + other_did + " it at " +
                           describe(other_place);
  if (cell.in_flight) {
    fail("a copy may be under way: " + both + ", and its cp_async_wait has not come", {});
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
    if (reader != kNobody && !is_ordered(cell.read_clock, reader, thread)) {
      report_race(cell, thread, does, reader, "read", cell.read_place, address, place);
      return;
    }
  }
  cell.writer = after_write ? thread : kSeveral;
  cell.write_clock = clock_;
  cell.write_place = place;
  cell.atomic = atomic;
}

// Where the bytes are, or nullptr after an error.
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
  Cell* cells = &cells_[address];
  for (uint32_t i = 0; i < bytes; ++i) {
    if (kind == Access::kRead) {
      check_read(cells[i], who, address + i, place);
    } else {
      check_write(cells[i], who, kind == Access::kAtomic, address + i, place);
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
  if (sum > kMaxStaticBytes || sum + launch_->dynamic_shared_bytes > shared_limit) {
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

}  // namespace

// --- The interface
// ----------------------------------------------------------------------------------

void set_order(Order new_order) { order = new_order; }
void set_shared_limit(size_t bytes) { shared_limit = bytes; }
void set_multiprocessors(int count) { multiprocessor_count = count; }
int multiprocessors() { return multiprocessor_count; }
void set_warpgroups(bool has) { warpgroups = has; }
bool has_warpgroups() { return warpgroups; }
int launches_of(const char* part) {
  int count = 0;
  for (const auto& [kernel, launches] : launches_by_kernel) {
    if (name_of_kernel(kernel).find(part) != std::string::npos) count += launches;
  }
  return count;
}

const char* run(const Launch& launch) { return interpreter().run(launch); }

void fail(const std::string& message, Place place) { interpreter().fail(message, place); }

int lane_of_thread() { return interpreter().current() % kWarp; }
int warp_of_operation() { return interpreter().current_warp(); }

int block_barrier(bool value, const char* name, Place place) {
  return interpreter().block_barrier(value, name, place);
}

void warp_operation(WarpOperation operation, void* argument, unsigned mask, const char* name,
                    Place place) {
  if (mask != 0xffffffffu) fail(std::string(name) + " of less than a whole warp", place);
  interpreter().warp_operation(operation, argument, name, place);
}

unsigned char* access_shared(Access kind, uint32_t address, uint32_t bytes, uint32_t alignment,
                             Place place) {
  Interpreter& self = interpreter();
  return self.access(self.current(), kind, address, bytes, alignment, place);
}

const unsigned char* read_shared_as_lane(int lane, uint32_t address, uint32_t bytes, Place place) {
  Interpreter& self = interpreter();
  return self.access(self.current_warp() * kWarp + lane, Access::kRead, address, bytes, bytes,
                     place);
}

uint32_t static_shared(const void* declaration, size_t bytes, Place place) {
  return interpreter().static_shared(declaration, bytes, place);
}

void begin_copy(uint32_t address, const void* bytes16, Place place) {
  interpreter().begin_copy(address, bytes16, place);
}
const unsigned char* read_shared_as_product(int lane, uint32_t address, uint32_t bytes,
                                            Place place) {
  const unsigned char* from = read_shared_as_lane(lane, address, bytes, place);
  if (from && !interpreter().is_fenced(address)) {
    fail("wgmma reads what its writer has not fenced for products", place);
    return nullptr;
  }
  return from;
}
void fence_writes() { interpreter().fence_writes(); }

void commit_copies() { interpreter().commit_copies(); }
void wait_for_copies(int pending_groups) {
  interpreter().wait_for_copies(static_cast<size_t>(pending_groups));
}

}  // namespace ikattn::simt
