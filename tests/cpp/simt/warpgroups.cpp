#include "simt/warpgroups.h"

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "support/cuda/intrinsics.h"

namespace ikattn::simt {
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

// Where element (inner, column) of b lies: the 16-byte chunk of an address is turned by its row of
// 128 bytes.
uint32_t place_of(const Product& product, int inner, int column) {
  const auto start = static_cast<uint32_t>((product.b & 0x3fff) << 4);
  const auto atom = static_cast<uint32_t>(product.b >> 32 & 0x3fff) << 4;
  const int row = product.b_by_rows ? inner : column, along = product.b_by_rows ? column : inner;
  const uint32_t flat = start + static_cast<uint32_t>(row / 8) * atom +
                        static_cast<uint32_t>(row % 8 * 128 + 2 * along);
  return flat ^ (flat >> 7 & 7) << 4;
}

// b [16][columns] by chunks of eight elements, read as the lanes in turn; false after an error.
bool read_b(const Begun& begun, std::vector<float>& b) {
  const Product& product = begun.lanes[0];
  const int columns = 2 * product.count;
  if (product.b >> 62 != 1) {
    fail("wgmma: b is not turned in rows of 128 bytes", begun.place);
    return false;
  }
  b.resize(static_cast<size_t>(kInner * columns));
  const int rows = product.b_by_rows ? kInner : columns;
  const int length = product.b_by_rows ? columns : kInner;
  for (int row = 0; row < rows; ++row) {
    for (int along = 0; along < length; along += 8) {
      const int inner = product.b_by_rows ? row : along;
      const int column = product.b_by_rows ? along : row;
      const unsigned char* from = read_shared_as_lane(
          (row * length + along) / 8 % kLanes, place_of(product, inner, column), 16, begun.place);
      if (!from) return false;
      for (int i = 0; i < 8; ++i) {
        uint16_t bits;
        memcpy(&bits, from + 2 * i, 2);
        const float x = product.bfloat16 ? to_float(BFloat16{bits}) : to_float(Half{bits});
        const int at_inner = product.b_by_rows ? inner : inner + i;
        const int at_column = product.b_by_rows ? column + i : column;
        b[static_cast<size_t>(at_inner * columns + at_column)] = x;
      }
    }
  }
  return true;
}

void multiply(const Begun& begun) {
  const Product& product = begun.lanes[0];
  const int columns = 2 * product.count;
  std::vector<float> b;
  if (!read_b(begun, b)) return;
  float a[16][kInner];
  for (int lane = 0; lane < kLanes; ++lane) {
    if (memcmp(begun.lanes[lane].a, begun.a[lane].data(), sizeof(begun.a[lane])) != 0) {
      fail("A of a wgmma has changed before the wait for it", begun.place);
      return;
    }
    for (int i = 0; i < 4; ++i) {
      const uint32_t packed = begun.a[lane][static_cast<size_t>(i)];
      const float2 pair = product.bfloat16 ? unpack<BFloat16>(packed) : unpack<Half>(packed);
      const int row = lane / 4 + 8 * (i % 2), column = 2 * (lane % 4) + 8 * (i / 2);
      a[row][column] = pair.x;
      a[row][column + 1] = pair.y;
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    std::vector<float>& sums = (*begun.sums)[static_cast<size_t>(lane)];
    for (int i = 0; i < product.count; ++i) {
      const int row = lane / 4 + 8 * (i % 4 / 2), column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
      float& sum = sums[static_cast<size_t>(i)];
      if (!product.accumulate) sum = 0;
      for (int k = 0; k < kInner; ++k)
        sum += a[row][k] * b[static_cast<size_t>(k * columns + column)];
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
    memcpy(begun.a[lane].data(), begun.lanes[lane].a, sizeof(begun.a[lane]));
  }
  std::vector<float> b;
  if (!read_b(begun, b)) return;
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

}  // namespace ikattn::simt
