#include "interpreter/sample_copies.h"
#include "support/cuda/bulk_copies.h"
#include "support/cuda/intrinsics.h"
#include "support/cuda/warpgroups.h"

namespace ikattn::sample {
namespace {

constexpr int kStages = 2;
constexpr uint32_t kBoxBytes = kBoxRows * kBoxColumns * 2, kNumberBytes = 64 * 4;
constexpr uint32_t kNumbers = kStages * kBoxBytes;  // where they lie: [stage][64]
constexpr uint32_t kBarriers = kNumbers + kStages * kNumberBytes;
constexpr uint32_t kSharedBytes = kBarriers + kStages * 2 * 8;

// Warp 1 copies, warp 0 reads.
__global__ void __launch_bounds__(64)
    copy_kernel(const __grid_constant__ RowMap map, const float* numbers, uint16_t* out,
                float* numbers_out, int row_boxes, int column_boxes, CopyMisuse misuse) {
#if IKATTN_WARPGROUP_CODE
  Shared<unsigned char> shared = dynamic_shared<unsigned char>();
  const uint32_t base = shared_address(shared);
  const auto full = [&](int stage) { return base + kBarriers + stage * 16; };
  const auto read = [&](int stage) { return base + kBarriers + stage * 16 + 8; };
  const int lane = threadIdx.x % 32, tiles = row_boxes * column_boxes;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(full(stage), 1);
      barrier_init(read(stage), 1);
    }
    if (misuse != CopyMisuse::kNoBarrierFence) fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x >= 32) {
    if (lane > 0) return;
    const int begun = tiles + (misuse == CopyMisuse::kUnread ? 1 : 0);
    for (int tile = 0; tile < begun; ++tile) {
      const int stage = tile % kStages;
      const uint32_t odd = tile / kStages % 2;
      if (misuse != CopyMisuse::kNoRoom) barrier_wait(read(stage), odd ^ 1);
      const uint32_t bytes = kBoxBytes + kNumberBytes;
      barrier_arrive(full(stage), misuse == CopyMisuse::kTooFewBytes    ? bytes - 16
                                  : misuse == CopyMisuse::kTooManyBytes ? bytes + 16
                                                                        : bytes);
      begin_box(base + stage * kBoxBytes, map, 1, 2, tile / column_boxes % row_boxes * kBoxRows,
                tile % column_boxes * kBoxColumns, full(stage));
      begin_bytes(base + kNumbers + stage * kNumberBytes, numbers, kNumberBytes, full(stage));
    }
    return;
  }
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % kStages;
    const auto release = [&] {
      if (misuse != CopyMisuse::kNoWarpSync) __syncwarp();
      if (lane == 0) barrier_arrive(read(stage));
    };
    if (misuse != CopyMisuse::kNoWait) barrier_wait(full(stage), tile / kStages % 2);
    if (misuse == CopyMisuse::kEarlyRelease) release();
    Shared<float> own = shared_cast<float>(shared + (kNumbers + stage * kNumberBytes));
    for (int at = lane; at < 64; at += 32) {
      own[at] += 1.0f;
      numbers_out[tile * 64 + at] = own[at];
    }
    if (misuse == CopyMisuse::kUnfencedRead) fence_async();
    Shared<const uint16_t> box = shared_cast<uint16_t>(shared + stage * kBoxBytes);
    for (int at = lane; at < kBoxRows * kBoxColumns; at += 32) {
      const int row = at / kBoxColumns, column = at % kBoxColumns;
      out[tile * (kBoxRows * kBoxColumns) + at] =
          box[row * 64 + (column / 8 ^ row % 8) * 8 + column % 8];
    }
    if (misuse == CopyMisuse::kUnfencedWrite) {
      // Reads are fenced, what is written after them is not.
      fence_async();
      own[lane] = 0.0f;
    } else if (misuse != CopyMisuse::kUnfencedRead) {
      fence_async();
    }
    if (misuse != CopyMisuse::kEarlyRelease) release();
  }
#else
  (void)map;
  (void)numbers;
  (void)out;
  (void)numbers_out;
  (void)row_boxes;
  (void)column_boxes;
  (void)misuse;
  __trap();
#endif
}

}  // namespace

const char* copy_boxes(const uint16_t* x, const Rows& rows, const float* numbers, uint16_t* out,
                       float* numbers_out, CopyMisuse misuse) {
  RowMap map;
  const char* error =
      map_rows(map, x, {2, 3, rows.rows, rows.columns},
               {rows.batch_stride(), rows.head_stride(), rows.row_stride(), 1}, kBoxRows);
  if (error != nullptr) return error;
  return launch(copy_kernel, 1, 64, kSharedBytes, nullptr, map, numbers, out, numbers_out,
                rows.row_boxes(), rows.column_boxes(), misuse);
}

}  // namespace ikattn::sample
