// Counter-based random bytes for dropout: Philox4x32 with seven rounds (Salmon et al., SC 2011).
//
// One mask for every device, tiling and orientation. In an aligned 16 x 16 block of the weight
// matrix, rows and columns fall into four groups {2a, 2a+1, 2a+8, 2a+9}; one call, with the counter
// (i / 16 * 4 + a, j / 16 * 4 + b, b * H + h, offset), gives the sixteen bytes of the 4 x 4 group
// (a, b), byte 4 * row index + column index. A weight is dropped where its byte is below the
// threshold.
#pragma once

#include <stdint.h>

#include "support/host_device.h"

namespace ikattn {

// The dropout_seed of a call, of which its mask is a function. Two numbers are seed and offset.
// With seven the call is a part of a larger one, and has its mask: the others are the first batch
// item and head of the part, the heads of the larger call, and the first query and key, multiples
// of 16.
constexpr int kDropoutNumbers = 2, kPlacedDropoutNumbers = 7;

struct DropoutState {
  const int64_t* numbers = nullptr;
  bool is_placed = false;  // seven numbers
  uint32_t heads = 1;      // of the call itself
};

namespace {

struct PhiloxBlock {
  uint32_t word[4];
};

IKATTN_HOST_DEVICE inline PhiloxBlock philox4x32_7(PhiloxBlock counter, uint64_t seed) {
  uint32_t key0 = static_cast<uint32_t>(seed);
  uint32_t key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 7; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * counter.word[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter.word[2];
    counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0,
                static_cast<uint32_t>(product1),
                static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1,
                static_cast<uint32_t>(product0)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// Returns the sixteen bytes of one 4 x 4 group. row_group = i / 16 * 4 + a, column_group = j / 16 *
// 4 + b.
IKATTN_HOST_DEVICE inline PhiloxBlock dropout_group(const DropoutState& state, int64_t batch_head,
                                                    int64_t row_group, int64_t column_group) {
  const int64_t* numbers = state.numbers;
  uint32_t row = static_cast<uint32_t>(row_group), column = static_cast<uint32_t>(column_group);
  uint32_t head = static_cast<uint32_t>(batch_head);
  if (state.is_placed) {
    const uint32_t batch = head / state.heads + static_cast<uint32_t>(numbers[2]);
    head = head % state.heads + static_cast<uint32_t>(numbers[3]);
    head += batch * static_cast<uint32_t>(numbers[4]);
    row += static_cast<uint32_t>(numbers[5] / 4);
    column += static_cast<uint32_t>(numbers[6] / 4);
  }
  return philox4x32_7({{row, column, head, static_cast<uint32_t>(numbers[1])}},
                      static_cast<uint64_t>(numbers[0]));
}

// Returns the position inside a 16-block of the index-th member (0..3) of group a: {2a, 2a+1, 2a+8,
// 2a+9}.
IKATTN_HOST_DEVICE inline int dropout_group_member(int group, int index) {
  return 2 * group + (index & 1) + 8 * (index >> 1);
}

// Returns dropout_p in steps of 1/256, at most 255: one value in 256 is always kept.
IKATTN_HOST_DEVICE inline uint32_t dropout_threshold(double dropout_p) {
  const uint32_t threshold = static_cast<uint32_t>(dropout_p * 256.0 + 0.5);
  return threshold < 255u ? threshold : 255u;
}

// Returns the factor of weights that are not dropped: one over their exact fraction.
IKATTN_HOST_DEVICE inline double dropout_rescale(uint32_t threshold) {
  return 256.0 / (256.0 - threshold);
}

}  // namespace
}  // namespace ikattn
