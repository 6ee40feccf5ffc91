#include "interpreter/interpreter.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <sstream>

#include "interpreter/block.h"

// Weak: only AddressSanitizer brings it.
extern "C" __attribute__((weak)) void __sanitizer_symbolize_pc(void* pc, const char* format,
                                                               char* out, size_t size);

namespace ikattn::interpreter {

BuiltIns built_ins;
Settings settings;

std::string describe(Place place) {
  if (place.line() == 0) return "an unknown place";
  const std::string file = place.file_name();
  return file.substr(file.rfind('/') + 1) + ":" + std::to_string(place.line());
}

namespace {

std::map<const void*, int> launches_by_kernel;

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

}  // namespace

Interpreter& interpreter() {
  static Interpreter the_one;
  return the_one;
}

// --- Threads
// ----------------------------------------------------------------------------------------

template <typename T>
void Interpreter::arrange(std::vector<T>& items) {
  if (settings.order == Order::kReversed) std::reverse(items.begin(), items.end());
  if (settings.order == Order::kShuffled) std::shuffle(items.begin(), items.end(), random_);
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
  if (launch_->dynamic_shared_bytes > settings.shared_limit) {
    fail("asks for " + std::to_string(launch_->dynamic_shared_bytes) +
             " bytes of shared memory, there are " + std::to_string(settings.shared_limit),
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
  barriers_.clear();
  block_synced_ = block_began_ = ++clock_;

  for (int t = 0; t < threads_; ++t) {
    Thread& thread = *pool_[t];
    const Index3 size = launch_->block;
    const unsigned row = static_cast<unsigned>(t) / size.x;
    thread.index = {static_cast<unsigned>(t) % size.x, row % size.y, row / size.y};
    thread.state = Thread::kRunnable;
    thread.copies.clear();
    thread.groups.clear();
    thread.fence_clock = 0;
    for (const uint32_t at : thread.unfenced) unfenced_[at] = {};
    thread.unfenced.clear();
    thread.known.assign(static_cast<size_t>(threads_), 0);
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
  } while (error_.empty() && (any_ends_waiting() || finish_bulk_copy() || release_block()));
  if (error_.empty() && !bulk_copies_.empty()) {
    fail("the block ends, and a copy to byte " + std::to_string(bulk_copies_[0].address) +
             " is under way",
         {});
  }

  // Copies that nobody waited for must not trouble the next block.
  for (int t = 0; t < threads_; ++t) {
    pool_[t]->groups.push_back(std::move(pool_[t]->copies));
    for (const std::vector<Copy>& group : pool_[t]->groups) {
      for (const Copy& copy : group) {
        for (int i = 0; i < 16; ++i) cells_[copy.address + i].in_flight = false;
      }
    }
  }
  for (const BulkCopy& copy : bulk_copies_) {
    for (uint32_t i = 0; i < copy.bytes.size(); ++i) cells_[copy.address + i].in_flight = false;
  }
  bulk_copies_.clear();
}

void Interpreter::run_thread(int thread) {
  current_ = thread;
  built_ins.thread = pool_[thread]->index;
  pool_[thread]->fiber.resume();
  current_ = -1;
}

// Runs a warp until every lane has finished or waits for the block, or some for a phase.
void Interpreter::run_warp(int warp) {
  current_warp_ = warp;
  while (error_.empty()) {
    int at_warp = 0, at_phase = 0;
    for (int lane : lane_order_) {
      const int t = warp * kWarp + lane;
      if (t >= threads_) continue;
      if (pool_[t]->state == Thread::kRunnable || ends_waiting(t)) run_thread(t);
      if (!error_.empty()) return;
      at_warp += pool_[t]->state == Thread::kAtWarp;
      at_phase += pool_[t]->state == Thread::kAtPhase;
    }
    if (at_warp == 0 || at_phase > 0) return;
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
    if (pool_[t]->state != Thread::kAtPhase) continue;
    fail("the phase of a barrier does not end: " + where(t), {});
    return false;
  }
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

// --- The interface
// ----------------------------------------------------------------------------------

void set_order(Order order) { settings.order = order; }
void set_shared_limit(size_t bytes) { settings.shared_limit = bytes; }
size_t shared_limit() { return settings.shared_limit; }
void set_multiprocessors(int count) { settings.multiprocessors = count; }
int multiprocessors() { return settings.multiprocessors; }
void set_warpgroups(bool has) { settings.warpgroups = has; }
bool has_warpgroups() { return settings.warpgroups; }
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
  Interpreter& self = interpreter();
  const unsigned char* from = self.access(self.current_warp() * kWarp + lane,
                                          Access::kReadByProduct, address, bytes, bytes, place);
  if (from && !self.is_fenced(address)) {
    fail("wgmma reads what its writer has not fenced for products", place);
    return nullptr;
  }
  return from;
}
void fence_accesses() { interpreter().fence_accesses(); }

void init_barrier(uint32_t barrier, int arrivals, Place place) {
  interpreter().init_barrier(barrier, arrivals, place);
}
void fence_barriers() { interpreter().fence_barriers(); }
void arrive(uint32_t barrier, uint32_t bytes, Place place) {
  interpreter().arrive(barrier, bytes, place);
}
void wait_for_phase(uint32_t barrier, uint32_t parity, Place place) {
  interpreter().wait_for_phase(barrier, parity, place);
}
void begin_bulk_copy(uint32_t address, std::vector<unsigned char> bytes, uint32_t alignment,
                     uint32_t barrier, Place place) {
  interpreter().begin_bulk_copy({address, barrier, std::move(bytes), 0, 0}, alignment, place);
}

void commit_copies() { interpreter().commit_copies(); }
void wait_for_copies(int pending_groups) {
  interpreter().wait_for_copies(static_cast<size_t>(pending_groups));
}

}  // namespace ikattn::interpreter
