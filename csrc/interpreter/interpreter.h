// Runs a kernel's grid on one CPU thread: blocks one after the other, a fiber per thread, and
// watches what a GPU would not tell.
//
// An error stops the launch; launch() returns the message, which names the kernel, the block, the
// threads and the places in the source. Found are
//   * shared-memory races: two threads touch a byte, one writing, and nothing orders them. Bytes,
//     because GPUs write bytes; __syncwarp counts within a warp, shuffles do not (launch.h says
//     why)
//   * accesses outside the dynamic memory asked for and the static arrays, or not aligned
//   * an access to what a copy may still be writing; of TMA also a copy to what is still read, and
//     one that nobody waited for
//   * __syncthreads, or a warp operation, that some threads do not reach; threads that wait at
//     different places, or for the phase of a barrier that does not end
//   * a launch that no GPU would take
// Shared memory starts each block as NaNs. Not watched: global memory between threads. For that,
// run a kernel in every Order and compare: blocks, warps and lanes take turns in that order.
//
// mma, ldmatrix, shuffles, votes and wgmma run when all 32 lanes have come. Not here: clusters,
// named barriers, spinning on memory.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <source_location>
#include <string>
#include <utility>
#include <vector>

namespace ikattn::interpreter {

struct Index3 {
  unsigned x = 1, y = 1, z = 1;
};

using Place = std::source_location;

// --- For tests
// --------------------------------------------------------------------------------------

enum class Order { kForward, kReversed, kShuffled };
inline constexpr Order kEveryOrder[] = {Order::kForward, Order::kReversed, Order::kShuffled};

// Sets the order of later launches; kForward at first. Shuffled is another order in every launch.
void set_order(Order order);

// Sets the shared memory of a block, at first sm_90's. Set 99 KiB to test for sm_86, 89 and 120.
void set_shared_limit(size_t bytes);

// Sets the result of multiprocessors(); 1 at first.
void set_multiprocessors(int count);

// Sets the result of has_warpgroups(); false at first.
void set_warpgroups(bool has);

// Launches so far of kernels whose name contains `part`.
int launches_of(const char* part);

// --- For interpreter/device.h
// ------------------------------------------------------------------------------

struct Launch {
  Index3 grid, block;
  size_t dynamic_shared_bytes = 0;
  const void* kernel = nullptr;         // for its name
  void (*run_thread)(void*) = nullptr;  // calls the kernel with its arguments
  void* context = nullptr;
};
const char* run(const Launch& launch);  // nullptr or what went wrong
int multiprocessors();
bool has_warpgroups();
size_t shared_limit();

// threadIdx and its like, of the thread that runs.
struct BuiltIns {
  Index3 thread, block, block_size, grid_size;
};
extern BuiltIns built_ins;

// Waits for the block; returns how many threads came with `value` true.
int block_barrier(bool value, const char* name, Place place);
// Waits until all lanes of the warp have come to the same place with the same operation, which then
// runs once with their arguments. __syncwarp is the one without an operation.
using WarpOperation = void (*)(void* const* arguments, Place place);
void warp_operation(WarpOperation operation, void* argument, unsigned mask, const char* name,
                    Place place);
int lane_of_thread();
int warp_of_operation();

// Shared memory, addressed in bytes from its start. Each checks the access and returns where the
// bytes are, for this one access.
enum class Access { kRead, kReadByProduct, kWrite, kAtomic };
unsigned char* access_shared(Access kind, uint32_t address, uint32_t bytes, uint32_t alignment,
                             Place place);
// Reads for a lane of the warp operation that runs; nullptr after an error.
const unsigned char* read_shared_as_lane(int lane, uint32_t address, uint32_t bytes, Place place);
// Reads for a product of warpgroups, which sees writes before a fence_accesses; so do copies by
// TMA, before which reads have to be fenced, too.
const unsigned char* read_shared_as_product(int lane, uint32_t address, uint32_t bytes,
                                            Place place);
void fence_accesses();
// The static array that `declaration` (an address) stands for; the same for all threads.
uint32_t static_shared(const void* declaration, size_t bytes, Place place);

void begin_copy(uint32_t address, const void* bytes16, Place place);
void commit_copies();
void wait_for_copies(int pending_groups);

// Emulate barriers in shared memory, and copies that complete their phases
// (support/cuda/bulk_copies.h).
void init_barrier(uint32_t barrier, int arrivals, Place place);
void fence_barriers();
void arrive(uint32_t barrier, uint32_t bytes, Place place);
void wait_for_phase(uint32_t barrier, uint32_t parity, Place place);
void begin_bulk_copy(uint32_t address, std::vector<unsigned char> bytes, uint32_t alignment,
                     uint32_t barrier, Place place);

// Forgets products of warpgroups that nobody waited for (warpgroups.cpp); called as a block begins.
void forget_products();

// Stops the launch with this message. Throws where a kernel calls it, so that its frames unwind;
// returns to a warp operation.
void fail(const std::string& message, Place place);

}  // namespace ikattn::interpreter
