// The attention operators' CUDA kernels on arrays that do not lie one row after the other: the same
// bits as of contiguous ones, and nothing written between the rows.
#include <sys/mman.h>

#include <utility>
#include <vector>

#include "kernels/half_cases.h"

namespace ikattn {
namespace {

// Rows of [B, tokens, heads, width], as projections leave them; `step` elements from column to
// column, `gap` more from row to row, the first at `offset`. Gaps that are wide are not read.
struct Layout {
  std::string name;
  int64_t step, gap, offset;
  bool has_wide_gaps = false;
};
const Layout kLayouts[] = {{"heads_last", 1, 0, 0},
                           {"rows_at_multiples_of_16_bytes", 1, 8, 8},
                           {"unaligned_rows", 1, 3, 0},
                           {"unaligned_start", 1, 8, 1},
                           {"strided_columns", 2, 1, 0},
                           // offsets of most rows do not fit 32 bits
                           {"far_apart", 1, (int64_t{1} << 28) + 8, 0, true}};

constexpr double kUntouched = 77;

struct Sizes {
  int64_t B, heads, N, width;
};

// The memory of a test, and ranges of addresses of which little is touched.
class Rooms {
 public:
  Rooms() = default;
  Rooms(const Rooms&) = delete;
  Rooms& operator=(const Rooms&) = delete;
  ~Rooms() {
    for (const auto& [data, bytes] : ranges_) munmap(data, bytes);
  }
  Memory memory;
  bool has_all = true;  // the system gave all ranges that were asked for

  // nullptr: it did not.
  void* take_range(int64_t bytes) {
    const auto size = static_cast<size_t>(bytes);
    void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    has_all = has_all && data != MAP_FAILED;
    if (data == MAP_FAILED) return nullptr;
    ranges_.emplace_back(data, size);
    return data;
  }

 private:
  std::vector<std::pair<void*, size_t>> ranges_;
};

Array room_of(Rooms& rooms, ElementType type, const Sizes& sizes, const Layout& layout) {
  const int64_t row = sizes.width * layout.step + layout.gap;
  const int64_t count = layout.offset + sizes.B * sizes.N * sizes.heads * row;
  Array array;
  array.type = type;
  if (layout.has_wide_gaps) {
    array.data = rooms.take_range(count * size_of(type));
  } else {
    array = make(rooms.memory, type, {count}).array;
    for (int64_t i = 0; i < count; ++i) write(array, i, kUntouched);
  }
  array.data = static_cast<unsigned char*>(array.data) + layout.offset * size_of(type);
  array.stride[0] = sizes.N * sizes.heads * row;
  array.stride[1] = row;
  array.stride[2] = sizes.heads * row;
  array.stride[3] = layout.step;
  return array;
}

// visit(index in a contiguous array, index in `array`).
template <typename Visit>
void for_elements(const Array& array, const Sizes& sizes, const Visit& visit) {
  int64_t index = 0;
  for (int64_t b = 0; b < sizes.B; ++b) {
    for (int64_t head = 0; head < sizes.heads; ++head) {
      for (int64_t n = 0; n < sizes.N; ++n) {
        for (int64_t c = 0; c < sizes.width; ++c) {
          visit(index++, b * array.stride[0] + head * array.stride[1] + n * array.stride[2] +
                             c * array.stride[3]);
        }
      }
    }
  }
}

Array scattered(Rooms& rooms, const Tensor& tensor, const Sizes& sizes, const Layout& layout) {
  const Array array = room_of(rooms, tensor.array.type, sizes, layout);
  if (array.data == nullptr) return array;
  for_elements(array, sizes,
               [&](int64_t from, int64_t to) { write(array, to, read(tensor.array, from)); });
  return array;
}

void expect_same(const Array& got, const Tensor& expected, const Sizes& sizes, const Layout& layout,
                 const std::string& what) {
  for_elements(got, sizes, [&](int64_t from, int64_t at) {
    EXPECT_EQ(read(got, at), read(expected.array, from)) << what << " at " << from;
  });
  if (layout.has_wide_gaps) return;
  const int64_t row = sizes.width * layout.step + layout.gap;
  for (int64_t first = 0; first < sizes.B * sizes.N * sizes.heads * row; first += row) {
    for (int64_t c = 0; c < row; ++c) {
      if (c < sizes.width * layout.step && c % layout.step == 0) continue;
      EXPECT_EQ(read(got, first + c), kUntouched) << what << ", between its elements";
    }
  }
}

void expect_the_same_of_any_layout(const Case& c) {
  Call call(c);
  const Results expected = device_results(call, c);
  const Sizes of_query{c.B, c.H, c.L, c.d}, of_output{c.B, c.H, c.L, c.d_v};
  const Sizes of_key{c.B, c.G, c.S, c.d}, of_value{c.B, c.G, c.S, c.d_v};
  const Sizes of_key_gradient{c.B, c.key_heads(), c.S, c.d};
  const Sizes of_value_gradient{c.B, c.key_heads(), c.S, c.d_v};
  const Sizes of_pairs{c.B, c.H, c.L, c.S};
  const bool has_mask = c.masking == Masking::kFloatPerPair;
  for (const Layout& layout : kLayouts) {
    SCOPED_TRACE(c.name + ", " + layout.name);
    Rooms rooms;
    AttentionBackwardParams params;
    call.set(params);
    params.query = scattered(rooms, call.query, of_query, layout);
    params.key = scattered(rooms, call.key, of_key, layout);
    params.value = scattered(rooms, call.value, of_value, layout);
    params.output = room_of(rooms, c.type, of_output, layout);
    params.grad_output = scattered(rooms, call.grad_output, of_output, layout);
    params.grad_query = room_of(rooms, c.type, of_query, layout);
    params.grad_key = room_of(rooms, c.type, of_key_gradient, layout);
    params.grad_value = room_of(rooms, c.type, of_value_gradient, layout);
    if (has_mask) {
      params.mask = scattered(rooms, call.mask, of_pairs, layout);
      params.grad_mask = room_of(rooms, expected.grad_mask.array.type, of_pairs, layout);
    }
    WeightsParams weights;
    call.set(weights);
    weights.query = params.query;
    weights.key = params.key;
    weights.mask = params.mask;
    weights.value = Array();
    weights.d_v = 0;
    weights.weights = room_of(rooms, c.type, of_pairs, layout);
    if (!rooms.has_all) GTEST_SKIP() << "this system gives no such range of addresses";
    params.log_normalizer = make(rooms.memory, ElementType::kFloat64, {c.B, c.H, c.L}).array;
    const int wide = c.type == ElementType::kFloat64 ? 1 : 0;
    const auto& kernels = cuda::attention_kernels;
    ASSERT_STREQ(kernels.forward[wide](params, device_executor(rooms.memory)), nullptr);
    expect_same(params.output, expected.output, of_output, layout, "output");
    ASSERT_STREQ(kernels.backward[wide](params, device_executor(rooms.memory)), nullptr);
    expect_same(params.grad_query, expected.grad_query, of_query, layout, "grad_query");
    expect_same(params.grad_key, expected.grad_key, of_key_gradient, layout, "grad_key");
    expect_same(params.grad_value, expected.grad_value, of_value_gradient, layout, "grad_value");
    if (has_mask) {
      expect_same(params.grad_mask, expected.grad_mask, of_pairs, layout, "grad_mask");
    }
    ASSERT_STREQ(kernels.weights[wide](weights, device_executor(rooms.memory)), nullptr);
    expect_same(weights.weights, expected.weights, of_pairs, layout, "weights");
  }
}

TEST(StridesOnDevice, GiveTheSameBits) {
  Case c{.name = "narrow", .H = 4, .G = 2, .L = 20, .S = 70, .d = 8, .d_v = 16, .M = 9};
  c.causal = c.bias = true;
  for (const ElementType type : {ElementType::kFloat32, ElementType::kFloat64}) {
    c.type = type;
    expect_the_same_of_any_layout(c);
  }
  for (const ElementType type : types_in_turn(0)) {
    expect_the_same_of_any_layout(of_type(c, type));
  }
}

TEST(StridesOnDevice, GiveTheSameBitsOfWideRows) {
  const Case c =
      one_head({.name = "wide", .L = 20, .S = 30, .d = 72, .d_v = 136, .M = 70, .magnitude = -1});
  for (const ElementType type : types_in_turn(1)) {
    expect_the_same_of_any_layout(of_type(c, type));
  }
}

TEST(StridesOnDevice, GiveTheSameBitsOfMasks) {
  Case c = case_of("masks G=1 w_heads=1 L=9 S=20 d=8 d_v=16 M=9");
  c.masking = Masking::kFloatPerPair;
  c.type = ElementType::kFloat64;
  expect_the_same_of_any_layout(c);
  c.half_sides = true;
  for (const ElementType type : types_in_turn(2)) {
    expect_the_same_of_any_layout(of_type(c, type));
  }
}

TEST(StridesOnDevice, GiveTheSameBitsWithoutPairs) {
  Case c = one_head({.name = "without_pairs", .L = 40, .S = 70, .d = 8, .d_v = 16, .M = 8});
  c.linear_time = LinearTime::kAlways;
  for (const ElementType type : types_in_turn(3)) {
    expect_the_same_of_any_layout(of_type(c, type));
  }
}

TEST(StridesOnDevice, GiveTheSameBitsOfWarpgroups) {
  interpreter::set_warpgroups(true);
  const Case c = one_head({.name = "warpgroups", .L = 140, .S = 130, .d = 16, .d_v = 24, .M = 20});
  for (const ElementType type : types_in_turn(4)) {
    expect_the_same_of_any_layout(of_type(c, type));
  }
}

}  // namespace
}  // namespace ikattn
