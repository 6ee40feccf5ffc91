#include "kernels/attention_cases.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <random>
#include <sstream>

#include "attention/calls/linear_time.h"
#include "support/cuda/float16.h"
#include "tier.h"

namespace ikattn {

namespace {

// Resets what tests have set of the interpreter.
struct Reset : ::testing::EmptyTestEventListener {
  void OnTestEnd(const ::testing::TestInfo&) override {
    interpreter::set_order(interpreter::Order::kForward);
    interpreter::set_multiprocessors(1);
    interpreter::set_warpgroups(false);
  }
};
const bool resets = (::testing::UnitTest::GetInstance()->listeners().Append(new Reset), true);

}  // namespace

std::vector<Case> cases_of(const char* table) {
  static const std::map<std::string, int64_t Case::*> sizes = {
      {"B", &Case::B},
      {"H", &Case::H},
      {"G", &Case::G},
      {"L", &Case::L},
      {"S", &Case::S},
      {"d", &Case::d},
      {"d_v", &Case::d_v},
      {"M", &Case::M},
      {"w_heads", &Case::frequency_heads},
      {"w_batches", &Case::frequency_batches}};
  static const std::map<std::string, double Case::*> numbers = {{"p", &Case::p},
                                                                {"eps", &Case::eps},
                                                                {"dropout", &Case::dropout},
                                                                {"magnitude", &Case::magnitude}};
  static const std::map<std::string, bool Case::*> switches = {{"stationary", &Case::stationary},
                                                               {"causal", &Case::causal},
                                                               {"bias", &Case::bias},
                                                               {"key_mask", &Case::key_mask},
                                                               {"half_sides", &Case::half_sides},
                                                               {"lowest", &Case::lowest}};
  static const std::map<std::string, Masking> masks = {{"bool", Masking::kBool},
                                                       {"float", Masking::kFloat},
                                                       {"per_key", Masking::kFloatPerKey},
                                                       {"per_row", Masking::kFloatPerRow},
                                                       {"per_head", Masking::kFloatPerHead},
                                                       {"per_pair", Masking::kFloatPerPair}};
  std::vector<Case> cases;
  std::istringstream lines(table);
  for (std::string line, word; std::getline(lines, line);) {
    std::istringstream words(line);
    Case c;
    if (!(words >> c.name) || c.name[0] == '#') continue;
    c.stands_for_all = c.name == "*";
    if (c.stands_for_all) words >> c.name;
    while (words >> word) {
      const std::string key = word.substr(0, word.find('=')),
                        value = word.substr(word.find('=') + 1);
      if (word == "one_head") {
        c = one_head(c);
      } else if (word == "one_key_head") {
        c.H = 2, c.B = c.G = c.frequency_heads = 1;
      } else if (word == "grouped") {
        c.H = 4, c.G = 2;
      } else if (key == "mask") {
        c.masking = masks.at(value);
      } else if (sizes.contains(key)) {
        c.*sizes.at(key) = std::stoll(value);
      } else if (numbers.contains(key)) {
        c.*numbers.at(key) = std::stod(value);
      } else {
        c.*switches.at(word) = true;
      }
    }
    cases.push_back(c);
  }
  return cases;
}

Case case_of(const char* line) { return cases_of(line).at(0); }

std::vector<Case> cases_of_tier(const std::vector<Case>& all) {
  std::vector<Case> chosen;
  std::ranges::copy_if(all, std::back_inserter(chosen),
                       [](const Case& c) { return c.stands_for_all || runs_everything(); });
  return chosen;
}

size_t turn_of(const Case& c) { return std::accumulate(c.name.begin(), c.name.end(), size_t{0}); }

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

Tensor make(Memory& memory, ElementType type, std::vector<int64_t> sizes,
            std::vector<bool> broadcast) {
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

namespace {

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
    case Masking::kFloatPerPair:
      return {};
    default:
      return {true, false, false, false};
  }
}

}  // namespace

void round_to_11_bits(const Tensor& tensor) {
  for (int64_t i = 0; i < tensor.count; ++i) {
    int exponent;
    const double fraction = std::frexp(read(tensor.array, i), &exponent);
    write(tensor.array, i, std::ldexp(std::nearbyint(std::ldexp(fraction, 11)), exponent - 11));
  }
}

Call::Call(const Case& c) : case_(c) {
  Random random;
  const ElementType type = c.type;
  query = random(memory, type, {c.B, c.H, c.L, c.d}, 1);
  key = random(memory, type, {c.B, c.G, c.S, c.d}, 1);
  value = random(memory, type, {c.B, c.G, c.S, c.d_v}, 1);
  const ElementType side = c.side();
  const std::vector<int64_t> frequency_sizes = {c.frequency_batches, c.frequency_heads, c.d, c.M};
  w1 = random(memory, side, frequency_sizes, 0.2);
  w2 = random(memory, side, frequency_sizes, 0.2);
  bias = random(memory, side, {c.B, c.key_heads(), c.S}, 1);
  if (c.key_mask) {
    bias = make(memory, ElementType::kBool, {c.B, c.key_heads(), c.S});
    for (int64_t i = 0; i < bias.count; ++i) write(bias.array, i, random.generator() % 3 != 0);
  }
  if (c.masking == Masking::kBool) {
    mask = make(memory, ElementType::kBool, {c.B, c.H, c.L, c.S}, broadcast_of(c.masking));
    for (int64_t i = 0; i < mask.count; ++i) write(mask.array, i, random.generator() % 3 != 0);
    // a row that sees nothing
    for (int64_t j = 0; j < c.S; ++j) write(mask.array, j, 0);
  } else if (c.masking != Masking::kNone) {
    mask = random(memory, side, {c.B, c.H, c.L, c.S}, 1, broadcast_of(c.masking));
    if (c.masking == Masking::kFloat) write(mask.array, 0, -INFINITY);
  }
  // Beyond where finite offsets end. Of the mask's rows two see such keys alone, the third some
  // others, too.
  for (int64_t i = 0; c.lowest && i < bias.count; ++i) write(bias.array, i, -1e30 * (1 + i % 3));
  for (int64_t i = 0; c.lowest && i < mask.count; ++i) {
    if (i / c.S % 3 < 2 || i % 2 == 0) write(mask.array, i, -1e30 * (1 + i % 3));
  }
  grad_output = random(memory, type, {c.B, c.H, c.L, c.d_v}, 1);
  if (c.tf32) {
    for (const Tensor* tensor : {&query, &key, &value, &grad_output}) round_to_11_bits(*tensor);
  }
  state_[0] = 1234567890123;
  state_[1] = 42;
}

namespace {

Results room(Memory& memory, const Case& c, ElementType type) {
  // Gradients are made in the type of the arithmetic; the glue rounds them.
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
  if (!broadcast.empty() && broadcast[3]) broadcast[1] = broadcast[2] = false;
  // Sums over tokens are in float64, there as well.
  const bool over_tokens = !broadcast.empty() && (broadcast[2] || broadcast[3]);
  r.grad_mask =
      make(memory, over_tokens ? ElementType::kFloat64 : side, {c.B, c.H, c.L, c.S}, broadcast);
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

}  // namespace

cuda::DeviceExecutor device_executor(Memory& memory) {
  cuda::DeviceExecutor executor;
  executor.allocate = [](void* owner, int64_t bytes) {
    return static_cast<Memory*>(owner)->take(bytes);
  };
  executor.owner = &memory;
  return executor;
}

// The route in float64, which products of 16 bits never take.
Route cpu_route(const AttentionParams& params, bool backward) {
  return {.is_linear = takes_linear_time(params, backward)};
}

Results truth_of(Call& call, const Case& c) {
  Results r = room(call.memory, c, ElementType::kFloat64);
  AttentionBackwardParams params;
  call.set(params);
  params.output = r.output.array;
  params.log_normalizer = r.log_normalizer.array;
  const auto& kernels = truth::attention_kernels;
  kernels.forward[1](params, cpu_route(params, false), cpu_executor(call.memory));
  set_gradients(params, c, r, call.grad_output);
  kernels.backward[1](params, cpu_route(params, true), cpu_executor(call.memory));
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

namespace {

// The gradients of a call of weights, by kernels that run(true, params) and run(false, params) call
// for the forward and the backward.
template <typename Run>
Results weights_gradients(Call& call, const Case& c, ElementType type, const Run& run) {
  Results r = room(call.memory, c, type);
  const Tensor incoming = make(call.memory, type, {c.B, c.H, c.L, c.S});
  const Tensor rounded =
      make(call.memory, c.type, {1});  // rounds to the same numbers in every type
  for (int64_t i = 0; i < incoming.count; ++i) {
    write(rounded.array, 0, std::sin(0.7 * static_cast<double>(i)));
    write(incoming.array, i, read(rounded.array, 0));
  }
  const Tensor sums =
      make(call.memory, type == ElementType::kFloat64 ? type : ElementType::kFloat32,
           {c.B, c.H, c.L, 1});
  AttentionBackwardParams params;
  call.set(params);
  params.value = Array();
  params.grad_weights = incoming.array;
  params.weights_share = 0.5;
  params.output = sums.array;
  params.log_normalizer = r.log_normalizer.array;
  params.d_v = 1;
  run(true, params);
  params.d_v = 0;
  set_gradients(params, c, r, Tensor());
  params.grad_value = Array();
  run(false, params);
  return r;
}

}  // namespace

Results truth_of_weights_gradients(Call& call, const Case& c) {
  return weights_gradients(
      call, c, ElementType::kFloat64, [&](bool forward, const AttentionBackwardParams& params) {
        const auto& kernels = truth::attention_kernels;
        const auto run = [&](const auto& kernel) {
          kernel(params, cpu_route(params, !forward), cpu_executor(call.memory));
        };
        forward ? run(kernels.forward[1]) : run(kernels.backward[1]);
      });
}

Results device_weights_gradients(Call& call, const Case& c) {
  const int wide = c.type == ElementType::kFloat64 ? 1 : 0;
  return weights_gradients(call, c, c.type,
                           [&](bool forward, const AttentionBackwardParams& params) {
                             const auto& kernels = cuda::attention_kernels;
                             const auto executor = device_executor(call.memory);
                             EXPECT_STREQ(forward ? kernels.forward[wide](params, executor)
                                                  : kernels.backward[wide](params, executor),
                                          nullptr);
                           });
}

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

Results device_forward(Call& call, const Case& c) {
  AttentionParams params;
  call.set(params);
  Results results;
  results.output = make(call.memory, c.type, {c.B, c.H, c.L, c.d_v});
  results.log_normalizer = make(call.memory, ElementType::kFloat64, {c.B, c.H, c.L});
  params.output = results.output.array;
  params.log_normalizer = results.log_normalizer.array;
  EXPECT_STREQ(cuda::attention_kernels.forward[0](params, device_executor(call.memory)), nullptr);
  return results;
}

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

void expect_close(const Tensor& got, const Tensor& expected, double tolerance,
                  const std::string& what, double smallest) {
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

void compare_token_gradients(const Results& got, const Results& expected, double gradient,
                             double smallest) {
  expect_close(got.grad_query, expected.grad_query, gradient, "grad_query", smallest);
  expect_close(got.grad_key, expected.grad_key, gradient, "grad_key", smallest);
  expect_close(got.grad_value, expected.grad_value, gradient, "grad_value", smallest);
}

void compare_gradients(const Results& got, const Results& expected, const Case& c,
                       double gradient) {
  compare_token_gradients(got, expected, gradient);
  expect_close(got.grad_w1, expected.grad_w1, gradient, "grad_w1");
  if (!c.stationary) expect_close(got.grad_w2, expected.grad_w2, gradient, "grad_w2");
  if (c.bias) expect_close(got.grad_bias, expected.grad_bias, gradient, "grad_key_bias");
  if (c.masking != Masking::kNone && c.masking != Masking::kBool) {
    // The gradient of a mask with one number per row is zero: rows of dlog sum to nothing, but for
    // the rounding of delta, which on tensor cores is that of the output.
    const double smallest = size_of(c.type) == 2 || c.tf32 ? 3 : 0.1;
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

int64_t rows_that_differ(const Tensor& one, const Tensor& other, int64_t columns, int64_t first,
                         int64_t end) {
  int64_t count = 0;
  for (int64_t row = first; row < (end ? end : one.count / columns); ++row) {
    bool differs = false;
    for (int64_t i = row * columns; i < (row + 1) * columns; ++i) {
      const double x = read(one.array, i), y = read(other.array, i);
      differs = differs || !(x == y || (std::isnan(x) && std::isnan(y)));
    }
    count += differs;
  }
  return count;
}

double largest_difference(const Tensor& one, const Tensor& other, int64_t first) {
  double largest = 0;
  for (int64_t i = first; i < one.count; ++i) {
    largest = std::fmax(largest, std::fabs(read(one.array, i) - read(other.array, i)));
  }
  return largest;
}

void expect_the_same_in_every_order(Call& call, const Case& c) {
  const Results first = device_results(call, c);
  for (const interpreter::Order order :
       {interpreter::Order::kReversed, interpreter::Order::kShuffled}) {
    interpreter::set_order(order);
    compare(device_results(call, c), first, c, 0, 0);
  }
  interpreter::set_order(interpreter::Order::kForward);
}

}  // namespace ikattn
