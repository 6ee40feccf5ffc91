// The interpreter finds what it promises to find, and leaves right kernels alone.
#include "interpreter/interpreter.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "interpreter/sample_kernels.h"
#include "support/cuda/intrinsics.h"

namespace ikattn {
namespace {

class Interpreter : public ::testing::Test {
 protected:
  void TearDown() override {
    interpreter::set_order(interpreter::Order::kForward);
    interpreter::set_shared_limit(227 * 1024);
  }
};

// The message, "" without an error.
template <typename... Arguments>
std::string error_of(Arguments... arguments) {
  const char* error = launch(arguments...);
  return error ? error : "";
}

::testing::AssertionResult says(const std::string& error, std::vector<std::string> parts) {
  for (const std::string& part : parts) {
    if (error.find(part) == std::string::npos) {
      return ::testing::AssertionFailure() << '"' << error << "\" lacks \"" << part << '"';
    }
  }
  return ::testing::AssertionSuccess();
}

TEST_F(Interpreter, RunsAReductionInEveryOrder) {
  std::vector<float> values(3 * 256);
  std::iota(values.begin(), values.end(), 0.0f);
  for (const interpreter::Order order : interpreter::kEveryOrder) {
    interpreter::set_order(order);
    std::vector<float> sums(3);
    ASSERT_STREQ(sample::sum_of_blocks(values.data(), sums.data(), 3, nullptr), nullptr);
    for (int b = 0; b < 3; ++b) EXPECT_EQ(sums[b], 256 * (b * 256 + 127.5f));
  }
}

__global__ void name_threads(int* out) {
  const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  out[block * 30 + thread] += thread + 100 * block;
}

TEST_F(Interpreter, NumbersThreadsAndBlocks) {
  std::vector<int> out(24 * 30);
  ASSERT_STREQ(launch(name_threads, dim3(2, 3, 4), dim3(5, 3, 2), 0, nullptr, out.data()), nullptr);
  for (int i = 0; i < 24 * 30; ++i) EXPECT_EQ(out[i], i % 30 + i / 30 * 100);
}

TEST_F(Interpreter, EmptyGridRunsNothing) {
  EXPECT_EQ(error_of(name_threads, dim3(0), dim3(32), 0, nullptr, static_cast<int*>(nullptr)), "");
}

// --- Races
// ------------------------------------------------------------------------------------------

// Every thread reads what its neighbour in `distance` threads has written.
template <bool kBlockBarrier, bool kWarpBarrier>
__global__ void exchange(float* out, int distance) {
  Shared<float> values = dynamic_shared<float>();
  const int i = threadIdx.x;
  values[i] = static_cast<float>(i);
  if (kBlockBarrier) __syncthreads();
  if (kWarpBarrier) __syncwarp();
  out[i] = values[i ^ distance];
}

TEST_F(Interpreter, ReportsAMissingBarrierWithKernelThreadsAndPlaces) {
  std::vector<float> out(64);
  for (const interpreter::Order order : interpreter::kEveryOrder) {
    interpreter::set_order(order);
    EXPECT_EQ(error_of(exchange<true, false>, 1, 64, 256, nullptr, out.data(), 32), "");
    EXPECT_EQ(out[3], 35);
    EXPECT_TRUE(says(error_of(exchange<false, false>, 1, 64, 256, nullptr, out.data(), 32),
                     {"shared-memory race"}));
    EXPECT_TRUE(says(error_of(exchange<false, true>, 1, 64, 256, nullptr, out.data(), 32),
                     {"shared-memory race"}));
  }
  interpreter::set_order(interpreter::Order::kForward);
  EXPECT_TRUE(says(error_of(exchange<false, false>, 1, 64, 256, nullptr, out.data(), 32),
                   {"block (0, 0, 0)", "thread 32 (warp 1, lane 0)", "thread 0 (warp 0, lane 0)",
                    "byte 128", "interpreter_test.cpp:"}));
}

TEST_F(Interpreter, WithinAWarpSyncwarpIsEnoughAndNeeded) {
  std::vector<float> out(64);
  EXPECT_EQ(error_of(exchange<false, true>, 1, 64, 256, nullptr, out.data(), 1), "");
  EXPECT_EQ(out[3], 2);
  EXPECT_TRUE(says(error_of(exchange<false, false>, 1, 64, 256, nullptr, out.data(), 1),
                   {"shared-memory race"}));
}

__global__ void shuffle_as_barrier(float* out) {
  Shared<float> values = dynamic_shared<float>();
  values[threadIdx.x] = 1;
  __shfl_xor_sync(0xffffffffu, 1.0f, 1);
  out[threadIdx.x] = values[threadIdx.x ^ 1];
}

TEST_F(Interpreter, AShuffleOrdersNoMemory) {
  std::vector<float> out(32);
  EXPECT_TRUE(says(error_of(shuffle_as_barrier, 1, 32, 128, nullptr, out.data()), {"race"}));
}

// A buffer used again: the second round's writes need a barrier behind the first round's reads.
template <bool kBarrier>
__global__ void reuse(float* out) {
  IKATTN_SHARED(float, value, 1);
  float sum = 0;
  for (int round = 0; round < 2; ++round) {
    if (threadIdx.x == 40) value[0] = static_cast<float>(round);
    __syncthreads();
    sum += value[0];
    if (kBarrier) __syncthreads();
  }
  out[threadIdx.x] = sum;
}

TEST_F(Interpreter, ReportsAWriteThatOvertakesReads) {
  std::vector<float> out(64);
  EXPECT_EQ(error_of(reuse<true>, 1, 64, 0, nullptr, out.data()), "");
  EXPECT_EQ(out[63], 1);
  for (const interpreter::Order order : interpreter::kEveryOrder) {
    interpreter::set_order(order);
    EXPECT_TRUE(says(error_of(reuse<false>, 1, 64, 0, nullptr, out.data()), {"race"}));
  }
}

__global__ void same_flag() {
  IKATTN_SHARED(int, flag, 1);
  flag[0] = 1;
}

template <bool kBarrier>
__global__ void counted(int* out) {
  IKATTN_SHARED(int, count, 1);
  if (threadIdx.x == 0) count[0] = 0;
  __syncthreads();
  atomicAdd(&count[0], 2);
  atomicMax(&count[0], 5);
  if (kBarrier) __syncthreads();
  if (threadIdx.x == 0) *out = count[0];
}

TEST_F(Interpreter, AtomicsDoNotRaceWithEachOther) {
  int count = 0;
  EXPECT_EQ(error_of(counted<true>, 1, 64, 0, nullptr, &count), "");
  EXPECT_EQ(count, 131);
  EXPECT_TRUE(says(error_of(counted<false>, 1, 64, 0, nullptr, &count), {"race"}));
  EXPECT_TRUE(says(error_of(same_flag, 1, 64, 0, nullptr), {"race"}));
}

// Neighbouring elements of 16 and 8 bits lie in one word and may be written at once.
template <typename T>
__global__ void small_elements(int* out) {
  Shared<T> values = dynamic_shared<T>();
  values[threadIdx.x] = static_cast<T>(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = values[(threadIdx.x + 1) % blockDim.x];
}

TEST_F(Interpreter, BytesOfOneWordAreIndependent) {
  std::vector<int> out(64);
  EXPECT_EQ(error_of(small_elements<uint8_t>, 1, 64, 64, nullptr, out.data()), "");
  EXPECT_EQ(error_of(small_elements<uint16_t>, 1, 64, 128, nullptr, out.data()), "");
  EXPECT_EQ(out[63], 0);
}

// --- Bounds
// -----------------------------------------------------------------------------------------

__global__ void touch(int index) {
  IKATTN_SHARED(float, before, 4);
  IKATTN_SHARED(float, after, 4);
  Shared<float> values = dynamic_shared<float>();
  before[0] = 0;
  after[0] = 0;
  values[index] = 1;
}

__global__ void touch_static(int index) {
  IKATTN_SHARED(float, before, 4);
  IKATTN_SHARED(float, after, 4);
  after[0] = 0;
  before[index] = 1;
}

TEST_F(Interpreter, ReportsAccessesOutOfBounds) {
  EXPECT_EQ(error_of(touch, 1, 1, 64, nullptr, 15), "");
  for (const int index : {16, -1, 100000}) {
    EXPECT_TRUE(says(error_of(touch, 1, 1, 64, nullptr, index), {"out of bounds"})) << index;
  }
  EXPECT_EQ(error_of(touch_static, 1, 1, 0, nullptr, 3), "");
  EXPECT_TRUE(says(error_of(touch_static, 1, 1, 0, nullptr, 4), {"out of bounds"}));
}

__global__ void misaligned() { load_vector<float4>(dynamic_shared<float>() + 1); }

TEST_F(Interpreter, ReportsMisalignedVectors) {
  EXPECT_TRUE(says(error_of(misaligned, 1, 1, 64, nullptr), {"not a multiple of 16"}));
}

__global__ void nothing() {}

TEST_F(Interpreter, RefusesLaunchesThatNoGpuTakes) {
  EXPECT_TRUE(says(error_of(nothing, 1, 1025, 0, nullptr), {"threads"}));
  EXPECT_TRUE(says(error_of(nothing, dim3(1, 65536), 1, 0, nullptr), {"blocks"}));
  EXPECT_TRUE(says(error_of(nothing, 1, 1, 228 * 1024, nullptr), {"shared memory"}));
  interpreter::set_shared_limit(99 * 1024);
  EXPECT_TRUE(says(error_of(nothing, 1, 1, 100 * 1024, nullptr), {"shared memory"}));
}

__global__ void read_unwritten(float* out) { *out = dynamic_shared<float>()[1]; }

TEST_F(Interpreter, SharedMemoryStartsAsNaNs) {
  float value = 0;
  EXPECT_EQ(error_of(read_unwritten, 1, 1, 64, nullptr, &value), "");
  EXPECT_NE(value, value);
}

// --- Who arrives
// ------------------------------------------------------------------------------------

__global__ void divergent_shuffle() {
  if (threadIdx.x % 32 < 16) __shfl_xor_sync(0xffffffffu, 1, 1);
}

__global__ void divergent_barrier() {
  if (threadIdx.x < 32) __syncthreads();
}

__global__ void two_barriers() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void divergent_mma() {
  float d[4] = {};
  const uint32_t a[4] = {};
  if (threadIdx.x != 7) mma_m16n8k16<Half>(d, a, 0, 0);
}

TEST_F(Interpreter, ReportsWhoDoesNotArrive) {
  for (const interpreter::Order order : interpreter::kEveryOrder) {
    interpreter::set_order(order);
    EXPECT_TRUE(says(error_of(divergent_shuffle, 1, 64, 0, nullptr),
                     {"lane 16) has returned", "__shfl_xor_sync at interpreter_test.cpp:"}));
    EXPECT_TRUE(says(error_of(divergent_shuffle, 1, 8, 0, nullptr), {"does not exist"}));
    EXPECT_TRUE(says(error_of(divergent_barrier, 1, 64, 0, nullptr),
                     {"waits in __syncthreads", "has returned"}));
    EXPECT_TRUE(says(error_of(two_barriers, 1, 64, 0, nullptr), {"same barrier"}));
    EXPECT_TRUE(
        says(error_of(divergent_mma, 1, 32, 0, nullptr), {"mma_m16n8k16", "lane 7) has returned"}));
  }
}

__global__ void votes(int* out) {
  const int lane = threadIdx.x;
  const unsigned ballot = __ballot_sync(0xffffffffu, lane % 2);
  const int any = __any_sync(0xffffffffu, lane == 9), none = __any_sync(0xffffffffu, 0);
  const int all = __all_sync(0xffffffffu, 1), most = __all_sync(0xffffffffu, lane != 9);
  const int down = __shfl_down_sync(0xffffffffu, lane, 4);
  const int first = __shfl_sync(0xffffffffu, lane, 5);
  const int odd = __syncthreads_count(lane % 2);
  const bool right = ballot == 0xaaaaaaaau && any && !none && all && !most &&
                     down == (lane < 28 ? lane + 4 : lane) && first == 5 && odd == 16 &&
                     __syncthreads_or(lane == 3) && !__syncthreads_and(lane == 3);
  out[lane] = right;
}

TEST_F(Interpreter, ShufflesAndVotes) {
  std::vector<int> out(32);
  ASSERT_EQ(error_of(votes, 1, 32, 0, nullptr, out.data()), "");
  EXPECT_EQ(std::accumulate(out.begin(), out.end(), 0), 32);
}

// --- Asynchronous copies
// ----------------------------------------------------------------------------

enum class Wait { kNone, kTooFew, kBehindBarrier, kRight };

// Two groups; each thread reads the neighbour's part of the second.
template <Wait kWait>
__global__ void copied(const float* in, float* out) {
  Shared<float> values = dynamic_shared<float>();
  const int i = threadIdx.x;
  const int other = blockDim.x - 1 - i;
  for (int group = 0; group < 2; ++group) {
    cp_async_16(shared_address(values + (group * 64 + i) * 4), in + (group * 64 + i) * 4, 12);
    cp_async_commit();
  }
  if (kWait == Wait::kTooFew) cp_async_wait<1>();
  if (kWait == Wait::kRight) cp_async_wait<0>();
  __syncthreads();
  if (kWait == Wait::kBehindBarrier) cp_async_wait<0>();
  for (int j = 0; j < 4; ++j) out[i * 4 + j] = values[(64 + other) * 4 + j];
}

TEST_F(Interpreter, SeesAMissingWait) {
  std::vector<float> in(512), out(256);
  std::iota(in.begin(), in.end(), 0.0f);
  const auto run = [&](auto kernel) {
    return error_of(kernel, 1, 64, 2048, nullptr, in.data(), out.data());
  };
  EXPECT_EQ(run(copied<Wait::kRight>), "");
  EXPECT_EQ(out[0], 508);
  EXPECT_EQ(out[2], 510);
  EXPECT_EQ(out[3], 0);  // beyond the twelve bytes
  EXPECT_TRUE(says(run(copied<Wait::kNone>), {"cp_async_wait has not come"}));
  EXPECT_TRUE(says(run(copied<Wait::kTooFew>), {"cp_async_wait has not come"}));
  for (const interpreter::Order order : interpreter::kEveryOrder) {
    interpreter::set_order(order);
    // A copy under way, or a race with it: which, depends on who comes first.
    EXPECT_NE(run(copied<Wait::kBehindBarrier>), "");
  }
}

__global__ void never_waited(const float* in) {
  cp_async_16(shared_address(dynamic_shared<float>()), in);
  cp_async_commit();
}

TEST_F(Interpreter, CopiesOfOneBlockDoNotTroubleTheNext) {
  alignas(16) const float in[4] = {};
  EXPECT_EQ(error_of(never_waited, 3, 1, 64, nullptr, static_cast<const float*>(in)), "");
  EXPECT_EQ(error_of(touch, 1, 1, 64, nullptr, 0), "");
}

// --- Order
// ------------------------------------------------------------------------------------------

__global__ void last_block_wins(unsigned* out) {
  if (threadIdx.x == 0) *out = blockIdx.x;
}

TEST_F(Interpreter, OrderOfBlocksShows) {
  unsigned last = 99;
  ASSERT_EQ(error_of(last_block_wins, 5, 32, 0, nullptr, &last), "");
  EXPECT_EQ(last, 4u);
  interpreter::set_order(interpreter::Order::kReversed);
  ASSERT_EQ(error_of(last_block_wins, 5, 32, 0, nullptr, &last), "");
  EXPECT_EQ(last, 0u);
}

__global__ void last_thread_wins(unsigned* out) { *out = threadIdx.x; }

TEST_F(Interpreter, OrderOfThreadsShows) {
  unsigned last = 99;
  ASSERT_EQ(error_of(last_thread_wins, 1, 64, 0, nullptr, &last), "");
  EXPECT_EQ(last, 63u);
  interpreter::set_order(interpreter::Order::kReversed);
  ASSERT_EQ(error_of(last_thread_wins, 1, 64, 0, nullptr, &last), "");
  EXPECT_EQ(last, 0u);
}

#if defined(__SANITIZE_ADDRESS__)
TEST_F(Interpreter, AddressSanitizerNamesTheKernel) {
  std::vector<float> out(64);
  const std::string error = error_of(exchange<false, false>, 1, 64, 256, nullptr, out.data(), 32);
  EXPECT_TRUE(says(error, {"exchange<false, false>"}));
}

__global__ void read_global(const float* in, float* out) { *out = in[threadIdx.x]; }

TEST_F(Interpreter, AddressSanitizerSeesGlobalMemory) {
  std::vector<float> in(32), out(1);
  EXPECT_DEATH(launch(read_global, 1, 64, 0, nullptr, in.data(), out.data()),
               "heap-buffer-overflow");
}
#endif

}  // namespace
}  // namespace ikattn
