// The weights of calls in 16 bits on tensor cores, in the interpreter, against the CPU's in
// float64.
#include <limits>

#include "kernels/half_cases.h"

namespace ikattn {
namespace {

constexpr ElementType kSixteenBits[] = {ElementType::kBFloat16, ElementType::kFloat16};

std::vector<Case> weight_cases() {
  const Case plain{.name = "plain", .H = 4, .G = 2, .L = 20, .S = 70, .bias = true};
  std::vector<Case> cases(8, plain);
  cases[0].bias = false;
  cases[1].masking = Masking::kBool;
  cases[1].dropout = 0.3;
  cases[2].masking = Masking::kFloat;
  cases[2].causal = true;
  cases[3] = Case{.name = "tiles", .L = 70, .S = 140, .d = 9, .M = 40, .causal = true};
  cases[4] =
      Case{.name = "slices", .B = 1, .L = 66, .S = 67, .d = 70, .M = 70};  // in slices; odd rows
  cases[5] = Case{.name = "frequencies_of_each_head",
                  .H = 4,
                  .G = 1,
                  .L = 9,
                  .S = 20,
                  .frequency_heads = 4,
                  .stationary = true};
  cases[6] = Case{
      .name = "small_eps", .L = 9, .S = 20, .p = 0, .eps = 1e-9};  // on CUDA cores, for its eps
  cases[7] = Case{.name = "one_pair", .L = 1, .S = 1};
  return cases;
}

// Computes weights of each head, or their average, by a kernel.
template <typename Kernel, typename Executor>
Tensor weights_by(const Kernel& kernel, const Executor& executor, Call& call, const Case& c,
                  ElementType type, bool average) {
  WeightsParams params;
  call.set(params);
  params.value = Array();
  params.d_v = 0;
  params.average_heads = average;
  const Tensor weights = make(call.memory, type, {c.B, average ? 1 : c.H, c.L, c.S});
  params.weights = weights.array;
  kernel(params, executor);
  return weights;
}
Tensor truth_of_weights(Call& call, const Case& c, bool average) {
  return weights_by(truth::attention_kernels.weights[1], cpu_executor(call.memory), call, c,
                    ElementType::kFloat64, average);
}
Tensor device_weights(Call& call, const Case& c, bool average) {
  const auto kernel = [](const WeightsParams& params, const cuda::DeviceExecutor& executor) {
    EXPECT_STREQ(cuda::attention_kernels.weights[0](params, executor), nullptr);
  };
  return weights_by(kernel, device_executor(call.memory), call, c, c.type, average);
}

// A weight's own rounding, and those of the features of a query and a key, which a score squares.
double bound_of(ElementType type) { return 2.02 * roundoff_of(type) + 0x1p-10; }

TEST(HalfWeightsOnDevice, AreRounded) {
  for (const ElementType type : kSixteenBits) {
    int64_t index = 0;
    for (const Case& of_case : weight_cases()) {
      const Case c = of_type(of_case, type);
      Call call(c);
      for (const bool average : {false, true}) {
        const std::string what = "case " + std::to_string(index) + (average ? ", average" : "");
        expect_close(device_weights(call, c, average), truth_of_weights(call, c, average),
                     bound_of(type), what);
      }
      ++index;
    }
  }
}

TEST(HalfWeightsOnDevice, GoToTensorCoresInOneForm) {
  const Case c = of_type(weight_cases()[0], ElementType::kFloat16);
  Call call(c);
  const int before = interpreter::launches_of("weight_kernel");
  device_weights(call, c, false);
  EXPECT_EQ(interpreter::launches_of("weight_kernel"), before + 1);
}

TEST(HalfWeightsOnDevice, OfARowAddUpToOne) {
  for (const ElementType type : kSixteenBits) {
    const Case c = of_type(weight_cases()[3], type);
    Call call(c);
    const Tensor weights = device_weights(call, c, false);
    for (int64_t row = 0; row < c.B * c.H * c.L; ++row) {
      double sum = 0;
      for (int64_t j = 0; j < c.S; ++j) sum += read(weights.array, row * c.S + j);
      EXPECT_NEAR(sum, 1, 2 * roundoff_of(type)) << row;
    }
    EXPECT_EQ(read(weights.array, 0), 1);  // a lone key's
  }
}

TEST(HalfWeightsOnDevice, WhatIsNotFiniteStaysInItsRowsAndHiddenKeysMayHoldAnything) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const ElementType type : kSixteenBits) {
    Case c{.name = "not_finite", .H = 2, .G = 2, .L = 20, .S = 30, .causal = true, .bias = true};
    Call call(c = of_type(c, type));
    write(call.bias.array, 4, -INFINITY);  // the first head
    write(call.key.array, 4 * c.d, nan);
    write(call.query.array, 7 * c.d, INFINITY);
    write(call.key.array, 15 * c.d, nan);  // seen by rows from the 15th on
    expect_close(device_weights(call, c, false), truth_of_weights(call, c, false), bound_of(type),
                 "weights");
  }
}

TEST(HalfWeightsOnDevice, AreTheSameInEveryOrder) {
  const Case c = of_type(weight_cases()[1], ElementType::kBFloat16);
  Call call(c);
  const Tensor first = device_weights(call, c, true);
  for (const interpreter::Order order : interpreter::kEveryOrder) {
    interpreter::set_order(order);
    expect_close(device_weights(call, c, true), first, 0, "weights");
  }
}

}  // namespace
}  // namespace ikattn
