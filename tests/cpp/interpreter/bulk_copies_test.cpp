// Copies by TMA against plain loops, and what the interpreter finds of their misuse.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "interpreter/interpreter.h"
#include "interpreter/sample_copies.h"

namespace ikattn {
namespace {

using sample::CopyMisuse;

using sample::Heads;
using sample::kBox;
using sample::Rows;

struct Copied {
  std::string error;
  std::vector<uint16_t> x, boxes;
  std::vector<float> numbers;
};

Copied copied(CopyMisuse misuse, Rows rows = {150, 72, Heads::kApart}) {
  const int tiles = rows.row_boxes() * rows.column_boxes();
  Copied result;
  result.x.resize(2 * 3 * rows.rows * rows.columns);
  for (size_t i = 0; i < result.x.size(); ++i) result.x[i] = static_cast<uint16_t>(i % 65521 + 1);
  result.boxes.resize(tiles * kBox, 0xffff);
  result.numbers.resize(tiles * 64);
  alignas(16) float numbers[64];
  for (int i = 0; i < 64; ++i) numbers[i] = static_cast<float>(i);
  const char* error = sample::copy_boxes(result.x.data(), rows, numbers, result.boxes.data(),
                                         result.numbers.data(), misuse);
  if (error) result.error = error;
  return result;
}

TEST(BulkCopies, AreBoxesOfRows) {
  for (const interpreter::Order order : interpreter::kEveryOrder) {
    interpreter::set_order(order);
    for (const Heads heads : sample::kEveryHeads) {
      const Rows rows{150, 72, heads};
      const Copied got = copied(CopyMisuse::kNone, rows);
      ASSERT_EQ(got.error, "");
      for (int tile = 0; tile < rows.row_boxes() * rows.column_boxes(); ++tile) {
        for (int at = 0; at < kBox; ++at) {
          ASSERT_EQ(got.boxes[tile * kBox + at], rows.expected(got.x.data(), tile, at))
              << tile << " " << at;
        }
        for (int i = 0; i < 64; ++i) ASSERT_EQ(got.numbers[tile * 64 + i], i + 1);
      }
    }
  }
}

TEST(BulkCopies, AreWatched) {
  const auto finds = [](CopyMisuse misuse, const char* text) {
    const std::string error = copied(misuse).error;
    EXPECT_NE(error.find(text), std::string::npos) << text << ", not: " << error;
  };
  finds(CopyMisuse::kNoBarrierFence, "nobody has made, or fenced");
  finds(CopyMisuse::kNoWarpSync, "warp 0 has read and not released");
  finds(CopyMisuse::kNoRoom, "copies to");
  finds(CopyMisuse::kTooFewBytes, "more than was announced");
  finds(CopyMisuse::kTooManyBytes, "the phase of a barrier does not end");
  finds(CopyMisuse::kUnfencedWrite, "what its writer has not fenced for copies");
  finds(CopyMisuse::kUnfencedRead, "has read and not fenced for copies");
  finds(CopyMisuse::kUnread, "is under way");
}

// Reads before their copy has begun get unwritten bytes, which an order of warps tells.
TEST(BulkCopies, MustHaveCome) {
  EXPECT_NE(copied(CopyMisuse::kNoWait).error, "");
  interpreter::set_order(interpreter::Order::kReversed);
  EXPECT_NE(copied(CopyMisuse::kNoWait).error.find("the phase that it ends is not over"),
            std::string::npos);
}

TEST(BulkCopies, MustNotComeWhileOthersRead) {
  EXPECT_NE(copied(CopyMisuse::kEarlyRelease).error.find("has read and not released"),
            std::string::npos);
}

TEST(BulkCopies, NeedRowsThatAreAligned) {
  std::vector<uint16_t> x(4096);
  const auto error_of = [&](const uint16_t* from, Rows rows) {
    const char* error =
        sample::copy_boxes(from, rows, nullptr, nullptr, nullptr, CopyMisuse::kNone);
    return std::string(error ? error : "");
  };
  EXPECT_NE(error_of(x.data() + 1, {2, 8, Heads::kApart}).find("TMA cannot copy"),
            std::string::npos);
  EXPECT_NE(error_of(x.data(), {2, 12, Heads::kApart}).find("TMA cannot copy"), std::string::npos);
}

}  // namespace
}  // namespace ikattn
