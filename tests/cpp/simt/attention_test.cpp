// The attention operators' CUDA kernels in the interpreter, against the CPU kernels in float64 on
// the same numbers: every argument, every tile edge.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "attention/cpu/kernel.h"
#include "attention/cuda/kernels.h"
#include "simt/interpreter.h"
#include "simt/memory.h"
#include "support/cuda/float16.h"
#include "support/philox.h"

namespace ikattn::simt_truth {
extern const AttentionKernels attention_kernels;
}

namespace ikattn {
namespace {

enum class Masking { kNone, kBool, kFloat, kFloatPerKey, kFloatPerRow, kFloatPerHead };

struct Case {
  std::string name;
  int64_t B = 2, H = 2, G = 2, L = 5, S = 7, d = 3, d_v = 4, M = 3;
  int64_t frequency_heads = 2, frequency_batches = 1;
  bool stationary = false, causal = false, bias = false;
  Masking masking = Masking::kNone;
  double p = 2, dropout = 0, magnitude = 1;  // the magnitude scale, times its default
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }
  ElementType type = ElementType::kFloat32;

  int64_t key_heads() const { return frequency_heads != G ? H : G; }
};

int64_t size_of(ElementType type) {
  switch (type) {
    case ElementType::kFloat64:
      return 8;
    case ElementType::kFloat32:
      return 4;
    case ElementType::kBool:
      return 1;
    default:
      return 2;
  }
}

double read(const Array& array, int64_t index) {
  switch (array.type) {
    case ElementType::kFloat64:
      return static_cast<double*>(array.data)[index];
    case ElementType::kFloat32:
      return static_cast<float*>(array.data)[index];
    case ElementType::kBFloat16:
      return to_float(static_cast<BFloat16*>(array.data)[index]);
    case ElementType::kFloat16:
      return to_float(static_cast<Half*>(array.data)[index]);
    default:
      return static_cast<uint8_t*>(array.data)[index];
  }
}

void write(const Array& array, int64_t index, double value) {
  switch (array.type) {
    case ElementType::kFloat64:
      static_cast<double*>(array.data)[index] = value;
      break;
    case ElementType::kFloat32:
      static_cast<float*>(array.data)[index] = static_cast<float>(value);
      break;
    case ElementType::kBFloat16:
      static_cast<BFloat16*>(array.data)[index] = to_bfloat16(static_cast<float>(value));
      break;
    case ElementType::kFloat16:
      static_cast<Half*>(array.data)[index] = to_half(static_cast<float>(value));
      break;
    default:
      static_cast<uint8_t*>(array.data)[index] = value != 0;
  }
}

// A contiguous array of the sizes; axes named by 0 are broadcast and get stride 0.
struct Tensor {
  Array array;
  int64_t count = 0;
};

Tensor make(Memory& memory, ElementType type, std::vector<int64_t> sizes,
            std::vector<bool> broadcast = {}) {
  Tensor tensor;
  tensor.array.type = type;
  int64_t stride = 1;
  for (int axis = static_cast<int>(sizes.size()) - 1; axis >= 0; --axis) {
    const bool skipped = !broadcast.empty() && broadcast[axis];
    tensor.array.stride[axis] = skipped ? 0 : stride;
    if (!skipped) stride *= sizes[axis];
  }
  tensor.count = stride;
  tensor.array.data = memory.take(stride * size_of(type));
  for (int64_t i = 0; i < stride; ++i) write(tensor.array, i, 0);
  return tensor;
}

struct Random {
  std::mt19937 generator{11};
  Tensor operator()(Memory& memory, ElementType type, std::vector<int64_t> sizes, double scale,
                    std::vector<bool> broadcast = {}) {
    Tensor tensor = make(memory, type, std::move(sizes), std::move(broadcast));
    std::normal_distribution<double> normal(0, scale);
    for (int64_t i = 0; i < tensor.count; ++i) write(tensor.array, i, normal(generator));
    return tensor;
  }
};

std::vector<bool> broadcast_of(Masking masking) {
  switch (masking) {
    case Masking::kFloatPerKey:
      return {false, true, true, false};
    case Masking::kFloatPerRow:
      return {true, true, false, true};
    case Masking::kFloatPerHead:
      return {true, false, true, true};
    case Masking::kBool:
      return {false, true, false, false};
    default:
      return {true, false, false, false};
  }
}

// The arguments of a case, and room for results, gradients, twice.
class Call {
 public:
  explicit Call(const Case& c) : case_(c) {
    Random random;
    const ElementType type = c.type;
    query = random(memory, type, {c.B, c.H, c.L, c.d}, 1);
    key = random(memory, type, {c.B, c.G, c.S, c.d}, 1);
    value = random(memory, type, {c.B, c.G, c.S, c.d_v}, 1);
    const ElementType side =
        type == ElementType::kFloat64 ? ElementType::kFloat64 : ElementType::kFloat32;
    const std::vector<int64_t> frequency_sizes = {c.frequency_batches, c.frequency_heads, c.d, c.M};
    w1 = random(memory, side, frequency_sizes, 0.2);
    w2 = random(memory, side, frequency_sizes, 0.2);
    bias = random(memory, side, {c.B, c.key_heads(), c.S}, 1);
    if (c.masking == Masking::kBool) {
      mask = make(memory, ElementType::kBool, {c.B, c.H, c.L, c.S}, broadcast_of(c.masking));
      for (int64_t i = 0; i < mask.count; ++i) write(mask.array, i, random.generator() % 3 != 0);
      // a row that sees nothing
      for (int64_t j = 0; j < c.S; ++j) write(mask.array, j, 0);
    } else if (c.masking != Masking::kNone) {
      mask = random(memory, side, {c.B, c.H, c.L, c.S}, 1, broadcast_of(c.masking));
      if (c.masking == Masking::kFloat) write(mask.array, 0, -INFINITY);
    }
    grad_output = random(memory, type, {c.B, c.H, c.L, c.d_v}, 1);
    state_[0] = 1234567890123;
    state_[1] = 42;
  }

  template <typename Params>
  void set(Params& params) const {
    const Case& c = case_;
    params.B = c.B;
    params.H = c.H;
    params.G = c.G;
    params.L = c.L;
    params.S = c.S;
    params.d = c.d;
    params.d_v = c.d_v;
    params.M = c.M;
    params.key_heads = c.key_heads();
    params.frequency_heads = c.frequency_heads;
    params.frequency_batches = c.frequency_batches;
    params.query = query.array;
    params.key = key.array;
    params.value = value.array;
    params.w1 = w1.array;
    if (!c.stationary) params.w2 = w2.array;
    if (c.bias) params.key_bias = bias.array;
    if (c.masking != Masking::kNone) params.mask = mask.array;
    params.p = c.p;
    params.magnitude_scale = 0.5 * c.magnitude / std::sqrt(static_cast<double>(c.d));
    params.is_causal = c.causal;
    if (c.dropout > 0) {
      params.dropout_threshold = dropout_threshold(c.dropout);
      params.dropout_state = state_;
      params.dropout_seed = static_cast<uint64_t>(state_[0]);
      params.dropout_offset = static_cast<uint64_t>(state_[1]);
    }
  }

  Memory memory;
  Tensor query, key, value, w1, w2, bias, mask, grad_output;

 private:
  Case case_;
  int64_t state_[2];
};

struct Results {
  Tensor output, log_normalizer, weights, average;
  Tensor grad_query, grad_key, grad_value, grad_w1, grad_w2, grad_bias, grad_mask;
};

Results room(Memory& memory, const Case& c, ElementType type) {
  const ElementType side =
      type == ElementType::kFloat64 ? ElementType::kFloat64 : ElementType::kFloat32;
  const std::vector<int64_t> frequencies = {c.frequency_batches, c.frequency_heads, c.d, c.M};
  Results r;
  r.output = make(memory, type, {c.B, c.H, c.L, c.d_v});
  r.log_normalizer = make(memory, ElementType::kFloat64, {c.B, c.H, c.L});
  r.weights = make(memory, type, {c.B, c.H, c.L, c.S});
  r.average = make(memory, type, {c.B, 1, c.L, c.S});
  r.grad_query = make(memory, type, {c.B, c.H, c.L, c.d});
  r.grad_key = make(memory, type, {c.B, c.key_heads(), c.S, c.d});
  r.grad_value = make(memory, type, {c.B, c.key_heads(), c.S, c.d_v});
  r.grad_w1 = make(memory, side, frequencies);
  r.grad_w2 = make(memory, side, frequencies);
  r.grad_bias = make(memory, side, {c.B, c.key_heads(), c.S});
  std::vector<bool> broadcast = broadcast_of(c.masking);
  // One value per row keeps its heads and rows apart: see the glue's mask_gradient.
  if (broadcast[3]) broadcast[1] = broadcast[2] = false;
  r.grad_mask = make(memory, side, {c.B, c.H, c.L, c.S}, broadcast);
  return r;
}

template <typename Params>
void set_gradients(Params& params, const Case& c, const Results& r, const Tensor& grad_output) {
  params.grad_output = grad_output.array;
  params.grad_query = r.grad_query.array;
  params.grad_key = r.grad_key.array;
  params.grad_value = r.grad_value.array;
  params.grad_w1 = r.grad_w1.array;
  if (!c.stationary) params.grad_w2 = r.grad_w2.array;
  if (c.bias) params.grad_key_bias = r.grad_bias.array;
  const bool floating = c.masking != Masking::kNone && c.masking != Masking::kBool;
  if (floating) params.grad_mask = r.grad_mask.array;
}

cuda::DeviceExecutor device_executor(Memory& memory) {
  cuda::DeviceExecutor executor;
  executor.allocate = [](void* owner, int64_t bytes) {
    return static_cast<Memory*>(owner)->take(bytes);
  };
  executor.owner = &memory;
  return executor;
}

// Everything by the CPU kernels in float64.
Results truth_of(Call& call, const Case& c) {
  Results r = room(call.memory, c, ElementType::kFloat64);
  AttentionBackwardParams params;
  call.set(params);
  params.output = r.output.array;
  params.log_normalizer = r.log_normalizer.array;
  const auto& kernels = simt_truth::attention_kernels;
  kernels.forward[1](params, cpu_executor(call.memory));
  set_gradients(params, c, r, call.grad_output);
  kernels.backward[1](params, cpu_executor(call.memory));
  WeightsParams weights;
  call.set(weights);
  weights.value = Array();
  weights.d_v = 0;
  weights.weights = r.weights.array;
  kernels.weights[1](weights, cpu_executor(call.memory));
  weights.average_heads = true;
  weights.weights = r.average.array;
  kernels.weights[1](weights, cpu_executor(call.memory));
  return r;
}

// The gradients by the CUDA kernels, from what `forward` holds.
Results device_gradients(Call& call, const Case& c, const Results& forward) {
  Results r = room(call.memory, c, c.type);
  AttentionBackwardParams params;
  call.set(params);
  params.output = forward.output.array;
  params.log_normalizer = forward.log_normalizer.array;
  set_gradients(params, c, r, call.grad_output);
  const int wide = c.type == ElementType::kFloat64 ? 1 : 0;
  EXPECT_STREQ(cuda::attention_kernels.backward[wide](params, device_executor(call.memory)),
               nullptr);
  return r;
}

// Everything by the CUDA kernels.
Results device_results(Call& call, const Case& c) {
  Results r = room(call.memory, c, c.type);
  const int wide = c.type == ElementType::kFloat64 ? 1 : 0;
  AttentionBackwardParams params;
  call.set(params);
  params.output = r.output.array;
  params.log_normalizer = r.log_normalizer.array;
  const auto& kernels = cuda::attention_kernels;
  EXPECT_STREQ(kernels.forward[wide](params, device_executor(call.memory)), nullptr);
  set_gradients(params, c, r, call.grad_output);
  EXPECT_STREQ(kernels.backward[wide](params, device_executor(call.memory)), nullptr);
  WeightsParams weights;
  call.set(weights);
  weights.value = Array();
  weights.d_v = 0;
  weights.weights = r.weights.array;
  EXPECT_STREQ(kernels.weights[wide](weights, device_executor(call.memory)), nullptr);
  weights.average_heads = true;
  weights.weights = r.average.array;
  EXPECT_STREQ(kernels.weights[wide](weights, device_executor(call.memory)), nullptr);
  return r;
}

// The largest difference, relative to the largest element; NaN must meet NaN.
// `smallest`: of the elements that are added up, where their sum may vanish.
void expect_close(const Tensor& got, const Tensor& expected, double tolerance,
                  const std::string& what, double smallest = 1e-3) {
  ASSERT_EQ(got.count, expected.count);
  double largest = smallest, error = 0;
  for (int64_t i = 0; i < got.count; ++i) {
    const double x = read(got.array, i), y = read(expected.array, i);
    if (std::isnan(x) || std::isnan(y) || std::isinf(x) || std::isinf(y)) {
      EXPECT_TRUE(x == y || (std::isnan(x) && std::isnan(y)))
          << what << " at " << i << ": " << x << " for " << y;
      continue;
    }
    largest = std::max(largest, std::fabs(y));
    error = std::max(error, std::fabs(x - y));
  }
  EXPECT_LE(error, tolerance * largest) << what;
}

void compare_gradients(const Results& got, const Results& expected, const Case& c,
                       double gradient) {
  expect_close(got.grad_query, expected.grad_query, gradient, "grad_query");
  expect_close(got.grad_key, expected.grad_key, gradient, "grad_key");
  expect_close(got.grad_value, expected.grad_value, gradient, "grad_value");
  expect_close(got.grad_w1, expected.grad_w1, gradient, "grad_w1");
  if (!c.stationary) expect_close(got.grad_w2, expected.grad_w2, gradient, "grad_w2");
  if (c.bias) expect_close(got.grad_bias, expected.grad_bias, gradient, "grad_key_bias");
  if (c.masking != Masking::kNone && c.masking != Masking::kBool) {
    // Of a mask that is one number per row the gradient is zero: rows of dlog sum to nothing, but
    // for the rounding of delta, which in 16 bits is that of the output.
    const double smallest = size_of(c.type) == 2 ? 3 : 0.1;
    expect_close(got.grad_mask, expected.grad_mask, gradient, "grad_mask", smallest);
  }
}

void compare(const Results& got, const Results& expected, const Case& c, double output,
             double gradient) {
  expect_close(got.output, expected.output, output, "output");
  expect_close(got.log_normalizer, expected.log_normalizer, output, "log_normalizer");
  expect_close(got.weights, expected.weights, output, "weights");
  expect_close(got.average, expected.average, output, "average weights");
  compare_gradients(got, expected, c, gradient);
}

const Case kCases[] = {
    {.name = "plain"},
    {.name = "causal", .L = 9, .S = 9, .causal = true},
    {.name = "bias", .bias = true},
    {.name = "bool_mask", .masking = Masking::kBool},
    {.name = "float_mask", .masking = Masking::kFloat},
    {.name = "float_mask_per_key", .masking = Masking::kFloatPerKey},
    {.name = "float_mask_per_row", .masking = Masking::kFloatPerRow},
    {.name = "float_mask_per_head", .masking = Masking::kFloatPerHead},
    {.name = "causal_and_float_mask", .L = 7, .causal = true, .masking = Masking::kFloat},
    {.name = "stationary", .stationary = true},
    {.name = "no_magnitude", .p = 0},
    {.name = "p_1", .p = 1},
    {.name = "p_3", .p = 3},
    {.name = "grouped", .H = 4, .G = 2},
    {.name = "grouped_own_frequencies", .H = 4, .G = 2, .frequency_heads = 4, .bias = true},
    {.name = "frequencies_per_sample", .frequency_batches = 2},
    {.name = "dropout", .L = 20, .S = 35, .dropout = 0.4},
    {.name = "dropout_and_causal", .L = 40, .S = 40, .causal = true, .dropout = 0.2},
    {.name = "one_of_everything",
     .B = 1,
     .H = 1,
     .G = 1,
     .L = 1,
     .S = 1,
     .d = 1,
     .d_v = 1,
     .M = 1,
     .frequency_heads = 1},
    {.name = "no_keys", .S = 0},
    {.name = "no_queries", .L = 0},
    {.name = "no_columns", .d_v = 0},
    {.name = "tile", .B = 1, .H = 1, .G = 1, .L = 64, .S = 64, .M = 16, .frequency_heads = 1},
    {.name = "tile_minus_1",
     .B = 1,
     .H = 1,
     .G = 1,
     .L = 63,
     .S = 63,
     .M = 15,
     .frequency_heads = 1},
    {.name = "tile_plus_1",
     .B = 1,
     .H = 1,
     .G = 1,
     .L = 65,
     .S = 65,
     .M = 17,
     .frequency_heads = 1},
    {.name = "slices",
     .B = 1,
     .H = 1,
     .G = 1,
     .L = 3,
     .S = 70,
     .d = 18,
     .d_v = 67,
     .M = 35,
     .frequency_heads = 1},
    {.name = "tiles_with_everything",
     .B = 1,
     .H = 2,
     .G = 1,
     .L = 130,
     .S = 130,
     .d_v = 5,
     .frequency_heads = 1,
     .causal = true,
     .bias = true,
     .masking = Masking::kFloatPerKey,
     .dropout = 0.1},
};

class AttentionKernelsOnDevice : public ::testing::TestWithParam<Case> {};

TEST_P(AttentionKernelsOnDevice, Float64EqualsTheCpu) {
  Case c = GetParam();
  c.type = ElementType::kFloat64;
  Call call(c);
  const Results truth = truth_of(call, c);
  compare(device_results(call, c), truth, c, 1e-12, 1e-11);
}

TEST_P(AttentionKernelsOnDevice, Float32ErrsByRounding) {
  const Case c = GetParam();
  Call call(c);
  const Results truth = truth_of(call, c);
  compare(device_results(call, c), truth, c, 3e-6, 2e-5);
}

// The frequencies' gradients, of more than a tile of them and of more tokens than a share. In
// float32 that many rows hold some that follow from scores near zero.
TEST(AttentionKernelsOnDevice, FrequenciesOfManyTokens) {
  for (Case c : {Case{.name = "tiles", .B = 3, .L = 90, .S = 2, .d = 66, .M = 65},
                 Case{.name = "shares", .B = 2, .L = 2049, .S = 2}}) {
    c.H = c.G = c.frequency_heads = 1;
    c.type = ElementType::kFloat64;
    Call call(c);
    const Results truth = truth_of(call, c);
    compare(device_results(call, c), truth, c, 1e-12, 1e-11);
  }
}

INSTANTIATE_TEST_SUITE_P(Simt, AttentionKernelsOnDevice, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

// What goes to the tensor cores, and what of it comes back because magnitudes differ too much.
const Case kHalfCases[] = {
    {.name = "plain", .L = 20, .S = 30, .d_v = 8},
    {.name = "not_a_multiple_of_8", .L = 20, .S = 30, .d_v = 12, .bias = true},
    {.name = "tiles",
     .B = 1,
     .H = 1,
     .G = 1,
     .L = 130,
     .S = 130,
     .d = 8,
     .d_v = 64,
     .M = 64,
     .frequency_heads = 1},
    {.name = "narrow_features_wide_value",
     .B = 1,
     .H = 1,
     .G = 1,
     .L = 33,
     .S = 65,
     .d = 8,
     .d_v = 72,
     .M = 20,
     .frequency_heads = 1},
    {.name = "causal", .B = 1, .L = 150, .S = 150, .d_v = 16, .M = 9, .causal = true},
    {.name = "bool_mask", .L = 40, .S = 70, .d_v = 8, .masking = Masking::kBool},
    {.name = "dropout", .L = 40, .S = 70, .d_v = 8, .dropout = 0.3},
    {.name = "dropout_and_causal", .L = 70, .S = 70, .d_v = 8, .causal = true, .dropout = 0.3},
    {.name = "grouped", .H = 4, .G = 2, .L = 20, .S = 70, .d_v = 8, .bias = true},
    {.name = "wide_features_and_value",
     .B = 1,
     .H = 1,
     .G = 1,
     .L = 70,
     .S = 65,
     .d = 8,
     .d_v = 128,
     .M = 64,
     .frequency_heads = 1,
     .causal = true},
    {.name = "grouped_own_frequencies",
     .H = 4,
     .G = 2,
     .L = 20,
     .S = 30,
     .d_v = 8,
     .frequency_heads = 4,
     .bias = true},
    {.name = "frequencies_per_sample", .L = 20, .S = 30, .d_v = 8, .frequency_batches = 2},
    {.name = "stationary", .L = 20, .S = 30, .d_v = 8, .stationary = true},
    {.name = "uneven_magnitudes_and_causal",
     .L = 70,
     .S = 70,
     .d_v = 8,
     .causal = true,
     .magnitude = 4},
    {.name = "float_mask", .L = 70, .S = 40, .d_v = 8, .masking = Masking::kFloat},
    {.name = "float_mask_per_key", .L = 20, .S = 30, .d_v = 8, .masking = Masking::kFloatPerKey},
    {.name = "float_mask_per_row", .L = 20, .S = 30, .d_v = 8, .masking = Masking::kFloatPerRow},
    {.name = "float_mask_per_head", .L = 20, .S = 30, .d_v = 8, .masking = Masking::kFloatPerHead},
    {.name = "float_mask_and_everything",
     .H = 4,
     .G = 2,
     .L = 70,
     .S = 70,
     .d_v = 72,
     .M = 40,
     .causal = true,
     .bias = true,
     .masking = Masking::kFloat,
     .dropout = 0.3},
    {.name = "no_keys", .S = 0, .d_v = 8},
    {.name = "no_queries", .L = 0, .d_v = 8},
    {.name = "large_magnitudes", .L = 20, .S = 70, .d_v = 8, .M = 32, .magnitude = 40},
    {.name = "large_magnitudes_and_causal",
     .L = 70,
     .S = 70,
     .d_v = 8,
     .causal = true,
     .magnitude = 40},
    {.name = "large_magnitudes_and_dropout",
     .L = 20,
     .S = 70,
     .d_v = 8,
     .dropout = 0.3,
     .magnitude = 40},
};

class HalfAttentionOnDevice : public ::testing::TestWithParam<Case> {};

// phi of queries or keys, in float64.
Tensor features_of(Call& call, const Case& c, const Tensor& tokens, int64_t heads, int64_t N) {
  FeaturesParams params;
  params.B = c.B;
  params.H = heads;
  params.N = N;
  params.d = c.d;
  params.M = c.M;
  params.x = tokens.array;
  params.w1 = call.w1.array;
  params.w2 = call.w2.array;
  if (c.frequency_heads != heads) {  // grouped: the query heads of a group share theirs
    params.w1.stride[1] = params.w2.stride[1] = 0;
  }
  const Tensor features = make(call.memory, ElementType::kFloat64, {c.B, heads, N, 2 * c.M});
  params.features = features.array;
  simt_truth::attention_kernels.features[1](params, false, cpu_executor(call.memory));
  return features;
}

// How far the tensor cores may be off, at most: a weight by its own rounding and by that of both
// features, in Half whatever the type; the output by those of its weights, and by its own.
struct Bounds {
  std::vector<double> output, log_normalizer;
};

Bounds bounds_of(Call& call, const Case& c, const Results& truth, double roundoff) {
  Case undropped = c;
  undropped.dropout = 0;
  Call same(undropped);
  const Results plain = truth_of(same, undropped);
  const Tensor phi_q = features_of(call, c, call.query, c.H, c.L);
  const Tensor phi_k = features_of(call, c, call.key, c.G, c.S);
  const double kept = c.dropout > 0 ? dropout_rescale(dropout_threshold(c.dropout)) : 1;
  const int64_t F = 2 * c.M;
  Bounds bounds;
  for (int64_t b = 0; b < c.B; ++b) {
    for (int64_t h = 0; h < c.H; ++h) {
      const int64_t bk = b * c.G + h * c.G / c.H;
      for (int64_t i = 0; i < c.L; ++i) {
        const int64_t row = (b * c.H + h) * c.L + i;
        double log_bound = 1e-6;
        std::vector<double> output(c.d_v, 1e-6);
        for (int64_t j = 0; j < c.S; ++j) {
          double score = 0, sizes = 0;
          for (int64_t f = 0; f < F; ++f) {
            const double product =
                read(phi_q.array, row * F + f) * read(phi_k.array, (bk * c.S + j) * F + f);
            score += product;
            sizes += std::fabs(product);
          }
          score /= static_cast<double>(4 * c.M);
          const double off = 0x1p-11 * 1.01 * sizes / static_cast<double>(4 * c.M) + 1e-6;
          const double similarity = score * score + 1e-5;
          const double relative = (2 * std::fabs(score) + off) * off / similarity;
          const double weight = read(plain.weights.array, row * c.S + j);
          log_bound += weight * relative;
          for (int64_t column = 0; column < c.d_v; ++column) {
            const double value = std::fabs(read(call.value.array, (bk * c.S + j) * c.d_v + column));
            const double result = std::fabs(read(truth.output.array, row * c.d_v + column));
            output[column] += weight * ((relative + 2 * roundoff) * kept * value +
                                        (relative + 2 * roundoff) * result);
          }
        }
        bounds.log_normalizer.push_back(log_bound);
        bounds.output.insert(bounds.output.end(), output.begin(), output.end());
      }
    }
  }
  return bounds;
}

void expect_within(const Tensor& got, const Tensor& expected, const std::vector<double>& bounds,
                   const std::string& what) {
  ASSERT_EQ(got.count, static_cast<int64_t>(bounds.size()));
  for (int64_t i = 0; i < got.count; ++i) {
    const double x = read(got.array, i), y = read(expected.array, i);
    if (x == y) continue;  // infinite, too
    EXPECT_LE(std::fabs(x - y), bounds[i]) << what << " at " << i << ": " << x << " for " << y;
  }
}

TEST_P(HalfAttentionOnDevice, ErrsByItsRoundings) {
  for (const ElementType type : {ElementType::kBFloat16, ElementType::kFloat16}) {
    Case c = GetParam();
    c.type = type;
    Call call(c);
    const Results truth = truth_of(call, c), got = device_results(call, c);
    const double roundoff = type == ElementType::kBFloat16 ? 0x1p-9 : 0x1p-12;
    const Bounds bounds = bounds_of(call, c, truth, roundoff);
    expect_within(got.output, truth.output, bounds.output, "output");
    expect_within(got.log_normalizer, truth.log_normalizer, bounds.log_normalizer,
                  "log_normalizer");
    // delta comes from the rounded output, which tells where single keys dominate.
    if (c.magnitude == 1) compare_gradients(got, truth, c, 6 * roundoff);
  }
}

// Few queries: blocks share their keys, and what each found is combined.
TEST(HalfAttentionOnDevice, SharedKeysErrByTheirRoundings) {
  simt::set_multiprocessors(3);
  for (const auto& [masking, causal, magnitude, dropout] :
       {std::tuple{Masking::kNone, false, 1.0, 0.0},
        {Masking::kNone, true, 40.0, 0.0},
        {Masking::kFloat, false, 1.0, 0.3},
        {Masking::kBool, false, 1.0, 0.0}}) {
    for (const ElementType type : {ElementType::kBFloat16, ElementType::kFloat16}) {
      Case c{.name = "few", .B = 1, .H = 2, .G = 1, .L = 3, .S = 1100, .d_v = 40};
      c.frequency_heads = 1;
      c.masking = masking;
      c.causal = causal;
      c.magnitude = magnitude;
      c.dropout = dropout;
      c.type = type;
      Call call(c);
      const Results truth = truth_of(call, c), got = device_results(call, c);
      const Bounds bounds =
          bounds_of(call, c, truth, type == ElementType::kBFloat16 ? 0x1p-9 : 0x1p-12);
      expect_within(got.output, truth.output, bounds.output, "output");
      expect_within(got.log_normalizer, truth.log_normalizer, bounds.log_normalizer,
                    "log_normalizer");
    }
  }
  simt::set_multiprocessors(1);
}

// sm_86, sm_89 and sm_120 have the least shared memory; the widest kernels of each form fit.
TEST(HalfAttentionOnDevice, FitsTheLeastSharedMemory) {
  simt::set_shared_limit(99 * 1024);
  for (const int64_t d_v : {64, 128}) {
    for (const auto& [masking, causal] : {std::pair{Masking::kNone, false},
                                          {Masking::kNone, true},
                                          {Masking::kBool, false},
                                          {Masking::kFloat, false}}) {
      Case c{.name = "wide", .B = 1, .H = 1, .G = 1, .L = 2, .S = 3, .d_v = d_v, .M = 64};
      c.frequency_heads = 1;
      c.masking = masking;
      c.causal = causal;
      c.type = ElementType::kBFloat16;
      Call call(c);
      device_results(call, c);  // expects that nothing is refused
    }
  }
  simt::set_shared_limit(227 * 1024);
}

// Alone, what the backward pass adds: the features' rounding in Half and that of its results.
TEST_P(HalfAttentionOnDevice, BackwardErrsByItsRoundings) {
  for (const ElementType type : {ElementType::kBFloat16, ElementType::kFloat16}) {
    Case c = GetParam();
    c.type = type;
    Call call(c);
    const Results truth = truth_of(call, c);
    const double roundoff = type == ElementType::kBFloat16 ? 0x1p-9 : 0x1p-12;
    // Where few keys dominate, rows follow from few scores, and those may be small: the gradient of
    // a score s errs by its rounding over s.
    const double amplification = c.magnitude > 10 ? 20 : c.magnitude > 1 ? 5 : 1;
    compare_gradients(device_gradients(call, c, truth), truth, c,
                      amplification * (2 * roundoff + 0x1p-10));
  }
}

INSTANTIATE_TEST_SUITE_P(Simt, HalfAttentionOnDevice, ::testing::ValuesIn(kHalfCases),
                         [](const auto& info) { return info.param.name; });

// Blocks, warps and lanes in any order give the same bits: nothing adds up by chance.
TEST(AttentionKernelsOnDevice, TheOrderOfBlocksDoesNotMatter) {
  const Case c{.name = "order",
               .L = 70,
               .S = 70,
               .bias = true,
               .masking = Masking::kFloatPerKey,
               .dropout = 0.2};
  Call call(c);
  simt::set_order(simt::Order::kForward);
  const Results first = device_results(call, c);
  for (const simt::Order order : {simt::Order::kReversed, simt::Order::kShuffled}) {
    simt::set_order(order);
    compare(device_results(call, c), first, c, 0, 0);
  }
  simt::set_order(simt::Order::kForward);
}

// NaN behind a mask never shows; a visible one makes exactly the rows that see it NaN.
TEST(AttentionKernelsOnDevice, NanStaysWhereItIsSeen) {
  const Case c{
      .name = "nan", .B = 1, .H = 1, .G = 1, .L = 6, .S = 6, .frequency_heads = 1, .causal = true};
  for (Tensor Call::* spoiled : {&Call::key, &Call::value, &Call::query}) {
    Call call(c);
    const Tensor& tensor = call.*spoiled;
    const int64_t width = tensor.count / 6;
    write(tensor.array, 4 * width, NAN);
    const Results got = device_results(call, c), truth = truth_of(call, c);
    for (int64_t i = 0; i < 6; ++i) {
      const bool sees = spoiled == &Call::query ? i == 4 : i >= 4;
      for (int64_t column = 0; column < c.d_v; ++column) {
        EXPECT_EQ(std::isnan(read(got.output.array, i * c.d_v + column)), sees);
      }
    }
    // Keys after a poisoned query, and queries before a poisoned key, keep clean gradients.
    expect_close(got.grad_query, truth.grad_query, 2e-5, "grad_query");
    expect_close(got.grad_value, truth.grad_value, 2e-5, "grad_value");
  }
}

TEST(HalfAttentionOnDevice, NanStaysWhereItIsSeen) {
  for (const ElementType type : {ElementType::kBFloat16, ElementType::kFloat16}) {
    for (const bool causal : {true, false}) {
      Case c{.name = "nan", .B = 1, .H = 1, .G = 1, .L = 70, .S = 70, .d_v = 8};
      c.frequency_heads = 1;
      c.causal = causal;
      c.type = type;
      for (Tensor Call::* spoiled : {&Call::query, &Call::key, &Call::value, &Call::grad_output}) {
        Call call(c);
        const Tensor& tensor = call.*spoiled;
        write(tensor.array, 40 * (tensor.count / 70), NAN);
        const Results got = device_results(call, c), truth = truth_of(call, c);
        const double roundoff = type == ElementType::kBFloat16 ? 0x1p-9 : 0x1p-12;
        expect_close(got.output, truth.output, 6 * roundoff, "output");
        expect_close(got.grad_query, truth.grad_query, 6 * roundoff, "grad_query");
        expect_close(got.grad_key, truth.grad_key, 6 * roundoff, "grad_key");
        expect_close(got.grad_value, truth.grad_value, 6 * roundoff, "grad_value");
      }
    }
  }
}

// Padding: what a key that key_bias hides holds, nobody sees.
TEST(HalfAttentionOnDevice, HiddenKeysMayHoldAnything) {
  for (const ElementType type : {ElementType::kBFloat16, ElementType::kFloat16}) {
    for (const bool causal : {true, false}) {
      Case c{.name = "hidden", .B = 1, .H = 1, .G = 1, .L = 70, .S = 70, .d_v = 8};
      c.frequency_heads = 1;
      c.causal = causal;
      c.bias = true;
      c.type = type;
      Call clean(c), call(c);
      for (const int64_t j : {int64_t{3}, int64_t{40}}) {
        write(clean.bias.array, j, -INFINITY);
        write(call.bias.array, j, -INFINITY);
        write(call.key.array, j * c.d, NAN);
        for (int64_t column = 0; column < c.d_v; ++column) {
          write(call.value.array, j * c.d_v + column, column % 2 == 0 ? NAN : INFINITY);
        }
      }
      const Results got = device_results(call, c), expected = device_results(clean, c);
      for (int64_t i = 0; i < got.output.count; ++i) {
        EXPECT_EQ(read(got.output.array, i), read(expected.output.array, i)) << i;
      }
      compare_gradients(got, expected, c, 0);
    }
  }
}

TEST(FeatureKernelsOnDevice, ForwardAndBackwardEqualTheCpu) {
  for (const bool stationary : {false, true}) {
    const Case c{.name = "features", .L = 37, .d = 5, .M = 9, .stationary = stationary};
    Call call(c);
    Memory& memory = call.memory;
    const auto params_of = [&](const Tensor& features, ElementType type) {
      FeaturesParams params;
      params.B = c.B;
      params.H = c.H;
      params.N = c.L;
      params.d = c.d;
      params.M = c.M;
      params.x = call.query.array;
      params.w1 = call.w1.array;
      if (!stationary) params.w2 = call.w2.array;
      params.features = features.array;
      params.grad_x = make(memory, type, {c.B, c.H, c.L, c.d}).array;
      params.grad_w1 = make(memory, type, {1, c.H, c.d, c.M}).array;
      if (!stationary) params.grad_w2 = make(memory, type, {1, c.H, c.d, c.M}).array;
      return params;
    };
    const std::vector<int64_t> sizes = {c.B, c.H, c.L, 2 * c.M};
    const Tensor truth = make(memory, ElementType::kFloat64, sizes);
    const Tensor got = make(memory, ElementType::kFloat32, sizes);
    const auto wide = params_of(truth, ElementType::kFloat64);
    const auto narrow = params_of(got, ElementType::kFloat32);
    simt_truth::attention_kernels.features[1](wide, false, cpu_executor(memory));
    ASSERT_STREQ(cuda::attention_kernels.features[0](narrow, false, device_executor(memory)),
                 nullptr);
    expect_close(got, truth, 3e-6, "features");
    // What came out goes in again as the gradient.
    simt_truth::attention_kernels.features[1](wide, true, cpu_executor(memory));
    ASSERT_STREQ(cuda::attention_kernels.features[0](narrow, true, device_executor(memory)),
                 nullptr);
    const auto whole = [&](const Array& array, int64_t count) { return Tensor{array, count}; };
    const int64_t tokens = c.B * c.H * c.L * c.d, frequencies = c.H * c.d * c.M;
    expect_close(whole(narrow.grad_x, tokens), whole(wide.grad_x, tokens), 1e-5, "grad_x");
    expect_close(whole(narrow.grad_w1, frequencies), whole(wide.grad_w1, frequencies), 1e-5,
                 "grad_w1");
    if (!stationary) {
      expect_close(whole(narrow.grad_w2, frequencies), whole(wide.grad_w2, frequencies), 1e-5,
                   "grad_w2");
    }
  }
}

}  // namespace
}  // namespace ikattn
