#include "support/interpreter/warpgroups.h"

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "support/cuda/intrinsics.h"

namespace ikattn::interpreter {
namespace {

constexpr int kLanes = 32, kInner = 16;

// Sums on their way, by lane; those that belong to several products are one.
using Sums = std::array<std::vector<float>, kLanes>;

struct Begun {
  std::array<Product, kLanes> lanes;
  std::array<std::array<uint32_t, 4>, kLanes> a;
  std::shared_ptr<Sums> sums;
  Place place;
};
struct Warp {
  std::vector<Begun> begun;  // not committed
  std::deque<std::vector<Begun>> groups;
  std::map<const float*, std::weak_ptr<Sums>> under_way;  // by the first lane's registers
};
std::map<int, Warp> warps;

// An operand in shared memory, `rows` of `length` numbers.
struct Operand {
  uint64_t descriptor;
  int rows, length;
  int first_row = 0;  // of those that are read
};

// Where an element lies: the 16-byte chunk of an address is turned by its row of 128 bytes.
uint32_t place_of(const Operand& operand, int row, int along) {
  const auto start = static_cast<uint32_t>((operand.descriptor & 0x3fff) << 4);
  const auto atom = static_cast<uint32_t>(operand.descriptor >> 32 & 0x3fff) << 4;
  const int from = operand.first_row + row;
  const uint32_t flat = start + static_cast<uint32_t>(from / 8) * atom +
                        static_cast<uint32_t>(from % 8 * 128 + 2 * along);
  return flat ^ (flat >> 7 & 7) << 4;
}

// numbers [rows][length], by chunks of eight, read as the lanes in turn; false after an error.
bool read(const Operand& operand, bool bfloat16, Place place, std::vector<float>& numbers) {
  // Turned in rows of 128 bytes, whose period begins at a multiple of 1024; the fields between are
  // those of operands of at most 64 columns.
  constexpr uint64_t kFields = ~uint64_t{0x3fff};
  if ((operand.descriptor & kFields) != (uint64_t{1} << 62 | uint64_t{64} << 32 | 1 << 16) ||
      (operand.descriptor << 4 & 0x380) != 0) {
    fail("wgmma: an operand does not lie as its description says", place);
    return false;
  }
  numbers.clear();
  for (int row = 0; row < operand.rows; ++row) {
    for (int along = 0; along < operand.length; along += 8) {
      const int lane = static_cast<int>(numbers.size()) / 8 % kLanes;
      const unsigned char* from =
          read_shared_as_product(lane, place_of(operand, row, along), 16, place);
      if (!from) return false;
      for (int i = 0; i < 8; ++i) {
        uint16_t bits;
        memcpy(&bits, from + 2 * i, 2);
        numbers.push_back(bfloat16 ? to_float(BFloat16{bits}) : to_float(Half{bits}));
      }
    }
  }
  return true;
}

Operand b_of(const Product& product) {
  const int columns = 2 * product.count;
  return {product.b, product.b_by_rows ? kInner : columns, product.b_by_rows ? columns : kInner};
}
// Of the warp that runs.
Operand a_of(const Product& product) {
  return {product.shared_a, 16, kInner, warp_of_operation() % 4 * 16};
}

bool reads(const Begun& begun, std::vector<float>& a, std::vector<float>& b) {
  const Product& product = begun.lanes[0];
  if (!read(b_of(product), product.bfloat16, begun.place, b)) return false;
  if (!product.a) return read(a_of(product), product.bfloat16, begun.place, a);
  a.resize(16 * kInner);
  for (size_t lane = 0; lane < kLanes; ++lane) {
    for (size_t i = 0; i < 4; ++i) {
      const uint32_t packed = begun.a[lane][i];
      const float2 pair = product.bfloat16 ? unpack<BFloat16>(packed) : unpack<Half>(packed);
      const size_t row = lane / 4 + 8 * (i % 2), column = 2 * (lane % 4) + 8 * (i / 2);
      a[row * kInner + column] = pair.x;
      a[row * kInner + column + 1] = pair.y;
    }
  }
  return true;
}

void multiply(const Begun& begun) {
  const Product& product = begun.lanes[0];
  const int columns = 2 * product.count;
  for (size_t lane = 0; product.a && lane < kLanes; ++lane) {
    if (memcmp(begun.lanes[lane].a, begun.a[lane].data(), sizeof(begun.a[lane])) == 0) continue;
    fail("A of a wgmma has changed before the wait for it", begun.place);
    return;
  }
  std::vector<float> a, b;
  if (!reads(begun, a, b)) return;
  for (int lane = 0; lane < kLanes; ++lane) {
    std::vector<float>& sums = (*begun.sums)[static_cast<size_t>(lane)];
    for (int i = 0; i < product.count; ++i) {
      const int row = lane / 4 + 8 * (i % 4 / 2), column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
      float& sum = sums[static_cast<size_t>(i)];
      if (!product.accumulate) sum = 0;
      for (int k = 0; k < kInner; ++k) {
        const int at = product.b_by_rows ? k * columns + column : column * kInner + k;
        sum += a[static_cast<size_t>(row * kInner + k)] * b[static_cast<size_t>(at)];
      }
    }
  }
}

}  // namespace

void forget_products() { warps.clear(); }

void begin_product(void* const* arguments, Place place) {
  Warp& warp = warps[warp_of_operation()];
  Begun begun;
  begun.place = place;
  for (int lane = 0; lane < kLanes; ++lane) {
    begun.lanes[lane] = *static_cast<Product*>(arguments[lane]);
    if (!begun.lanes[lane].a) continue;
    memcpy(begun.a[lane].data(), begun.lanes[lane].a, sizeof(begun.a[lane]));
  }
  std::vector<float> a, b;
  if (!reads(begun, a, b)) return;
  std::weak_ptr<Sums>& known = warp.under_way[begun.lanes[0].sums];
  begun.sums = known.lock();
  if (!begun.sums) {
    begun.sums = std::make_shared<Sums>();
    known = begun.sums;
    for (int lane = 0; lane < kLanes; ++lane) {
      const Product& product = begun.lanes[lane];
      (*begun.sums)[static_cast<size_t>(lane)].assign(product.sums, product.sums + product.count);
      for (int i = 0; i < product.count; ++i) product.sums[i] = __uint_as_float(0x7fffffffu);
    }
  }
  warp.begun.push_back(std::move(begun));
}

void commit_products(void* const*, Place) {
  Warp& warp = warps[warp_of_operation()];
  warp.groups.push_back(std::move(warp.begun));
  warp.begun.clear();
}

void wait_for_products(void* const* arguments, Place) {
  Warp& warp = warps[warp_of_operation()];
  const auto left = static_cast<size_t>(*static_cast<int*>(arguments[0]));
  while (warp.groups.size() > left) {
    for (const Begun& begun : warp.groups.front()) {
      multiply(begun);
      for (int lane = 0; lane < kLanes; ++lane) {
        const std::vector<float>& sums = (*begun.sums)[static_cast<size_t>(lane)];
        std::copy(sums.begin(), sums.end(), begun.lanes[lane].sums);
      }
    }
    warp.groups.pop_front();
  }
}

}  // namespace ikattn::interpreter
