// Copies to shared memory that one thread begins and a unit of Hopper's makes (TMA), and the
// barriers at which they, and threads, arrive: what sm_90 has.
//
// A barrier is 8 bytes of shared memory. Its phases 0, 1, ... are over when as many arrivals have
// come as barrier_init said, and all bytes that some of them announced. What was done before an
// arrival, or copied, is seen by those who have waited for the end of its phase.
//
// In the interpreter (csrc/interpreter/bulk_copies.h) a copy comes as late as it may: when
// no thread can go on without it; until then its bytes are NaN.
#pragma once

#include "support/cuda/launch.h"

#if defined(IKATTN_INTERPRETER)
#include "interpreter/bulk_copies.h"
#else

#include <cuda.h>

namespace ikattn {

// Initialises a barrier; one thread does. Before others use it: fence_barriers() by that thread,
// and __syncthreads.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and announces copies of so many bytes.
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Waits until the phase of this parity is over, of the one that goes on and the one before.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t is_over = 0;
  while (is_over == 0) {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, "
        "p;}"
        : "=r"(is_over)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

// Begins to copy bytes, addresses and count multiples of 16.
__device__ __forceinline__ void begin_bytes(uint32_t to, const void* from, uint32_t bytes,
                                            uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
      : "memory");
}

// Rows of 16-bit elements of an array [batches, heads, rows, columns], to be copied by boxes of 64
// columns; a parameter of kernels, const __grid_constant__.
struct RowMap {
  CUtensorMap boxes;
  int batch_step, head_step;  // 0 where all have the same rows
};

// Begins to copy a box, rows of 128 bytes whose 16-byte chunks are swizzled by the row (`to`
// is a multiple of 1024); zeros for what lies beyond the array. column: a multiple of 64.
__device__ __forceinline__ void begin_box(uint32_t to, const RowMap& map, int batch, int head,
                                          int row, int column, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(&map.boxes), "r"(column), "r"(row), "r"(head * map.head_step),
      "r"(batch * map.batch_step), "r"(barrier)
      : "memory");
}

namespace detail {

// Finds the driver's function without linking it; nullptr: the driver is too old.
inline auto tensor_map_encoder() {
  static const auto encoder = [] {
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol,
                                                               12000, cudaEnableDefault, &found);
    if (error != cudaSuccess) (void)cudaGetLastError();
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(symbol);
  }();
  return encoder;
}

}  // namespace detail

// Makes a map of boxes of `box_rows` rows. sizes and strides: of batches, heads, rows, columns, in
// elements, the last stride 1, others and the address multiples of 8 elements, rows apart from each
// other. Returns nullptr, or what is wrong.
inline const char* map_rows(RowMap& map, const void* data, const int64_t (&sizes)[4],
                            const int64_t (&strides)[4], int box_rows) {
  const auto encode = detail::tensor_map_encoder();
  if (encode == nullptr) return "the driver cannot describe copies by TMA: it must know CUDA 12";
  // An axis of one, or one on which all is the same, lies as if it were dense: its stride is not
  // used, but looked at.
  const auto step = [&](int axis) { return strides[axis] != 0 && sizes[axis] > 1; };
  const auto size = [&](int axis) { return step(axis) ? static_cast<cuuint64_t>(sizes[axis]) : 1; };
  const auto stride = [&](int axis, cuuint64_t dense) {
    return step(axis) ? static_cast<cuuint64_t>(strides[axis]) * 2 : dense;
  };
  const cuuint64_t dimensions[4] = {static_cast<cuuint64_t>(sizes[3]),
                                    static_cast<cuuint64_t>(sizes[2]), size(1), size(0)};
  const cuuint64_t of_row = stride(2, (dimensions[0] * 2 + 15) / 16 * 16);
  const cuuint64_t of_head = stride(1, of_row * dimensions[1]);
  const cuuint64_t bytes[3] = {of_row, of_head, stride(0, of_head * dimensions[2])};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t every[4] = {1, 1, 1, 1};
  map.head_step = step(1);
  map.batch_step = step(0);
  const CUresult result =
      encode(&map.boxes, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, const_cast<void*>(data), dimensions,
             bytes, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "TMA cannot copy rows of these sizes and strides";
}

}  // namespace ikattn

#endif  // IKATTN_INTERPRETER
