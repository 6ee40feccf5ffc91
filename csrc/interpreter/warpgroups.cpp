#include "interpreter/warpgroups.h"

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "support/cuda/intrinsics.h"

namespace ikattn::interpreter {
namespace {

constexpr int kLanes = 32;
constexpr int kRowBytes = 32;  // bytes of an operand's row, along the inner axis

// Returns how many numbers there are along the inner axis.
int inner_of(const Product& product) { return product.type == ProductType::kInt8 ? 32 : 16; }

// Sums on their way, by lane; those that belong to several products are one. Those of integers are
// below 2^24.
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
  std::map<const void*, std::weak_ptr<Sums>> under_way;  // keyed by the first lane's registers
};
std::map<int, Warp> warps;

// An operand in shared memory, `rows` of so many bytes.
struct Operand {
  uint64_t descriptor;
  int rows, bytes;
  int first_row = 0;  // the first row that is read
};

// Returns where a byte lies: the 16-byte chunk of an address is swizzled by its row of 128 bytes.
uint32_t place_of(const Operand& operand, int row, int along) {
  const auto start = static_cast<uint32_t>((operand.descriptor & 0x3fff) << 4);
  const auto atom = static_cast<uint32_t>(operand.descriptor >> 32 & 0x3fff) << 4;
  const int from = operand.first_row + row;
  const uint32_t flat = start + static_cast<uint32_t>(from / 8) * atom +
                        static_cast<uint32_t>(from % 8 * 128 + along);
  return flat ^ (flat >> 7 & 7) << 4;
}

// Appends the numbers in bytes.
void append(const unsigned char* from, int bytes, ProductType type, std::vector<float>& numbers) {
  if (type == ProductType::kInt8) {
    for (int i = 0; i < bytes; ++i) numbers.push_back(static_cast<int8_t>(from[i]));
    return;
  }
  for (int i = 0; i < bytes; i += 2) {
    uint16_t bits;
    memcpy(&bits, from + i, 2);
    numbers.push_back(type == ProductType::kBFloat16 ? to_float(BFloat16{bits})
                                                     : to_float(Half{bits}));
  }
}

// Reads the numbers of all rows, by chunks of 16 bytes, as the lanes in turn; false after an error.
bool read(const Operand& operand, ProductType type, Place place, std::vector<float>& numbers) {
  // Transposed in rows of 128 bytes, whose period begins at a multiple of 1024; the fields between
  // are those of operands of at most 64 columns.
  constexpr uint64_t kFields = ~uint64_t{0x3fff};
  if ((operand.descriptor & kFields) != (uint64_t{1} << 62 | uint64_t{64} << 32 | 1 << 16) ||
      (operand.descriptor << 4 & 0x380) != 0) {
    fail("wgmma: an operand does not lie as its description says", place);
    return false;
  }
  numbers.clear();
  int chunk = 0;
  for (int row = 0; row < operand.rows; ++row) {
    for (int along = 0; along < operand.bytes; along += 16, ++chunk) {
      const unsigned char* from =
          read_shared_as_product(chunk % kLanes, place_of(operand, row, along), 16, place);
      if (!from) return false;
      append(from, 16, type, numbers);
    }
  }
  return true;
}

Operand b_of(const Product& product) {
  const int columns = 2 * product.count;
  if (product.b_by_rows) return {product.b, inner_of(product), 2 * columns};
  return {product.b, columns, kRowBytes};
}
// Returns the A of the warp that runs.
Operand a_of(const Product& product) {
  return {product.shared_a, 16, kRowBytes, warp_of_operation() % 4 * 16};
}

bool reads(const Begun& begun, std::vector<float>& a, std::vector<float>& b) {
  const Product& product = begun.lanes[0];
  if (!read(b_of(product), product.type, begun.place, b)) return false;
  const int inner = inner_of(product), each = inner / 8;  // numbers of a register
  if (!product.a) return read(a_of(product), product.type, begun.place, a);
  a.resize(static_cast<size_t>(16 * inner));
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 4; ++i) {
      unsigned char bytes[4];
      memcpy(bytes, &begun.a[static_cast<size_t>(lane)][static_cast<size_t>(i)], 4);
      std::vector<float> numbers;
      append(bytes, 4, product.type, numbers);
      const int row = lane / 4 + 8 * (i % 2), column = each * (lane % 4) + inner / 2 * (i / 2);
      std::copy(numbers.begin(), numbers.end(), a.begin() + row * inner + column);
    }
  }
  return true;
}

// Read and write a register of sums.
float sum_in(const Product& product, int i) {
  if (product.type != ProductType::kInt8) return static_cast<const float*>(product.sums)[i];
  return static_cast<float>(static_cast<const int32_t*>(product.sums)[i]);
}
void put_sum(const Product& product, int i, float sum) {
  if (product.type != ProductType::kInt8) {
    static_cast<float*>(product.sums)[i] = sum;
  } else {
    static_cast<int32_t*>(product.sums)[i] = static_cast<int32_t>(sum);
  }
}
void spoil_sum(const Product& product, int i) {
  const uint32_t spoiled = 0x7fffffffu;  // NaN
  memcpy(static_cast<unsigned char*>(product.sums) + 4 * static_cast<ptrdiff_t>(i), &spoiled, 4);
}

void multiply(const Begun& begun) {
  const Product& product = begun.lanes[0];
  const int columns = 2 * product.count, inner = inner_of(product);
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
      for (int k = 0; k < inner; ++k) {
        const int at = product.b_by_rows ? k * columns + column : column * inner + k;
        sum += a[static_cast<size_t>(row * inner + k)] * b[static_cast<size_t>(at)];
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
      for (int i = 0; i < product.count; ++i) {
        (*begun.sums)[static_cast<size_t>(lane)].push_back(sum_in(product, i));
        spoil_sum(product, i);
      }
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
        for (int i = 0; i < begun.lanes[0].count; ++i) {
          put_sum(begun.lanes[static_cast<size_t>(lane)], i, sums[static_cast<size_t>(i)]);
        }
      }
    }
    warp.groups.pop_front();
  }
}

}  // namespace ikattn::interpreter
