// Float masks of pairs, as Hopper's own kernels read them: a tile of 128 queries and 64 keys, or of
// 64 queries and 128 keys, is copied by TMA in the mask's own type. To TMA a float32 is two columns
// of 16 bits.
#pragma once

#include "attention/cuda/hopper/pipeline.h"

namespace ikattn::cuda {

// Whether the mask adds to logits, pair by pair.
__host__ __device__ inline bool has_offsets(const AttentionParams& params) {
  return params.mask.type != ElementType::kNone && params.mask.type != ElementType::kBool;
}

// nullptr, or why TMA cannot copy them.
inline const char* why_no_offsets(const AttentionParams& params) {
  const ElementType type = params.mask.type;
  const bool is_float32 = type == ElementType::kFloat32;
  if (!is_float32 && type != ElementType::kFloat16 && type != ElementType::kBFloat16) {
    return "Hopper's own kernels take a floating-point attn_mask that differs between queries in "
           "float32, float16 and bfloat16";
  }
  const bool are_apart = params.L == 1 || params.mask.stride[2] >= params.S;
  if (!are_apart || !lies_in_rows_of_16_bytes(params.mask, is_float32 ? 4 : 2)) {
    return "Hopper's own kernels take a floating-point attn_mask that differs between queries "
           "where its rows lie apart, each at a multiple of 16 bytes";
  }
  return nullptr;
}

namespace {

// Of float32; of 16 bits the first half of them.
using OffsetBoxes = Boxes<kWarpgroupRows, 2 * kStep>;
using TurnedOffsetBoxes = Boxes<kStep, 2 * kWarpgroupRows>;
constexpr uint32_t kOffsetBytes = OffsetBoxes::kBytes;  // of a tile, at most
static_assert(kOffsetBytes == TurnedOffsetBoxes::kBytes);

// Whether a block may have as much shared memory, offsets behind all else.
template <typename Layout>
constexpr bool kHasRoomForOffsets = Layout::kOffsets + kTilesInFlight * kOffsetBytes <= 227 * 1024;

// Columns of 16 bits that an offset takes; 0: there are none.
__host__ __device__ inline int offset_columns(const AttentionParams& params) {
  if (!has_offsets(params)) return 0;
  return params.mask.type == ElementType::kFloat32 ? 2 : 1;
}
// Bytes of a tile.
__device__ __forceinline__ uint32_t offset_bytes(const AttentionParams& params) {
  return kOffsetBytes / 2 * offset_columns(params);
}

// Two offsets of 16 bits.
__device__ __forceinline__ float2 unpack_offsets(ElementType type, uint32_t both) {
  return type == ElementType::kFloat16 ? unpack<Half>(both) : unpack<BFloat16>(both);
}

// By tiles of kRows queries; nothing, where there are none.
template <int kRows>
const char* map_offsets(RowMap& map, const AttentionParams& params) {
  const int64_t columns = offset_columns(params);
  const int64_t* stride = params.mask.stride;
  if (columns == 0) return nullptr;
  return map_rows(map, params.mask.data, {params.B, params.H, params.L, columns * params.S},
                  {columns * stride[0], columns * stride[1], columns * stride[2], 1}, kRows);
}
// Begins to copy a head's tile of kRows queries from i0 on, and keys from j0 on.
template <int kRows>
__device__ __forceinline__ void copy_offsets(const AttentionParams& params, const RowMap& map,
                                             uint32_t to, int batch, int head, int i0, int j0,
                                             uint32_t barrier) {
  constexpr uint32_t kBox = kRows * 128;
  const int first = j0 * offset_columns(params);
  const int boxes = static_cast<int>(offset_bytes(params) / kBox);
#pragma unroll 1  // registers are few
  for (int box = 0; box < boxes; ++box) {
    begin_box(to + box * kBox, map, batch, head, i0, first + box * kBoxColumns, barrier);
  }
}

// Those of 16 bits, of the thread's row g at `row`; see load_offsets().
template <typename T, int kCount>
__device__ __forceinline__ void load_half_offsets(float (&offsets)[kCount],
                                                  Shared<const unsigned char> row, int first) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const int place = ((first + i / 4) ^ g) * 16 + t * 4;
    const float2 two = unpack<T>(*shared_cast<const uint32_t>(row + place + i / 2 % 2 * 8 * 128));
    offsets[i] = two.x;
    offsets[i + 1] = two.y;
  }
}

// The thread's offsets of a tile at `tile`, rows g and g + 8 of its warp's 16: c of tile first + n
// of 8 keys in [4n + c]. Zeros, where there are none.
template <int kCount>
__device__ __forceinline__ void load_offsets(float (&offsets)[kCount], ElementType type,
                                             Shared<const unsigned char> tile, int first = 0) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  Shared<const unsigned char> row = tile + (static_cast<int>(threadIdx.x) / 32 * 16 + g) * 128;
  // Chunks of 16 bytes are turned by the row.
  if (type == ElementType::kFloat32) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const int n = first + i / 4, chunk = (n % 4 * 2 + t / 2) ^ g;
      const int further = n / 4 * static_cast<int>(OffsetBoxes::kBox) + i / 2 % 2 * 8 * 128;
      const float2 two =
          load_vector<float2>(shared_cast<const float>(row + (chunk * 16 + t % 2 * 8) + further));
      offsets[i] = two.x;
      offsets[i + 1] = two.y;
    }
  } else if (type == ElementType::kFloat16) {
    load_half_offsets<Half>(offsets, row, first);
  } else if (type == ElementType::kBFloat16) {
    load_half_offsets<BFloat16>(offsets, row, first);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) offsets[i] = 0;
  }
}

// The same of a tile whose rows are queries, to a thread whose rows are keys: c of tile n of 8
// queries.
__device__ __forceinline__ void load_turned_offsets(float (&offsets)[4], ElementType type,
                                                    Shared<const unsigned char> tile, int n) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const auto place = [&](int c, int bytes) {
    const int i = n * 8 + 2 * t + c % 2;
    const int at = (static_cast<int>(threadIdx.x) / 32 * 16 + g + 8 * (c / 2)) * bytes;
    const int box = at / 128 * static_cast<int>(TurnedOffsetBoxes::kBox);
    return box + i * 128 + ((at % 128 / 16) ^ (i % 8)) * 16 + at % 16;
  };
  if (type == ElementType::kFloat32) {
#pragma unroll
    for (int c = 0; c < 4; ++c) offsets[c] = *shared_cast<const float>(tile + place(c, 4));
  } else if (type == ElementType::kFloat16 || type == ElementType::kBFloat16) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const uint16_t bits = *shared_cast<const uint16_t>(tile + place(c, 2));
      offsets[c] = unpack_offsets(type, bits).x;
    }
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) offsets[c] = 0;
  }
}

}  // namespace
}  // namespace ikattn::cuda
