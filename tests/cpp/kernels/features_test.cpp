// Spectral features as an operator of their own, and what dropout keeps as a tensor: the CUDA
// kernels in the interpreter, against the CPU kernels in float64 and the definition.
#include "kernels/attention_cases.h"

namespace ikattn {
namespace {

struct FeatureCase {
  std::string name;
  int64_t B, H, N, d, M, frequency_batches;
  bool stationary;
  friend void PrintTo(const FeatureCase& c, std::ostream* out) { *out << c.name; }
};

const FeatureCase kFeatureCases[] = {
    {"small", 2, 2, 37, 5, 9, 1, false},
    {"stationary", 2, 2, 37, 5, 9, 1, true},
    {"tiles", 1, 2, 130, 70, 66, 1, false},
    {"shares_of_tokens", 1, 1, 2049, 2, 3, 1, false},
    {"frequencies_per_sample", 2, 2, 20, 5, 9, 2, false},
    {"one_of_everything", 1, 1, 1, 1, 1, 1, false},
    {"no_tokens", 2, 2, 0, 5, 9, 1, false},
};

// The arguments, the features or their gradient, and the gradients.
struct FeatureCall {
  FeatureCall(const FeatureCase& c, const Call& call, ElementType type, Memory& memory) {
    const ElementType sums =
        type == ElementType::kFloat64 ? ElementType::kFloat64 : ElementType::kFloat32;
    const std::vector<int64_t> frequencies = {c.frequency_batches, c.H, c.d, c.M};
    features = make(memory, type, {c.B, c.H, c.N, 2 * c.M});
    grad_x = make(memory, type, {c.B, c.H, c.N, c.d});
    grad_w1 = make(memory, sums, frequencies);
    grad_w2 = make(memory, sums, frequencies);
    params.B = c.B;
    params.H = c.H;
    params.N = c.N;
    params.d = c.d;
    params.M = c.M;
    params.frequency_batches = c.frequency_batches;
    params.x = call.query.array;
    params.w1 = call.w1.array;
    params.features = features.array;
    params.grad_x = grad_x.array;
    params.grad_w1 = grad_w1.array;
    if (!c.stationary) {
      params.w2 = call.w2.array;
      params.grad_w2 = grad_w2.array;
    }
  }

  FeaturesParams params;
  Tensor features, grad_x, grad_w1, grad_w2;
};

double unit_roundoff(ElementType type) {
  switch (type) {
    case ElementType::kFloat64:
      return 0x1p-53;
    case ElementType::kFloat32:
      return 0x1p-24;
    case ElementType::kFloat16:
      return 0x1p-11;
    default:
      return 0x1p-8;
  }
}

class FeatureKernelsOnDevice : public ::testing::TestWithParam<FeatureCase> {};

TEST_P(FeatureKernelsOnDevice, ForwardAndBackwardErrByRounding) {
  const FeatureCase c = GetParam();
  for (const ElementType type : {ElementType::kFloat64, ElementType::kFloat32,
                                 ElementType::kFloat16, ElementType::kBFloat16}) {
    Case arguments{.name = c.name, .B = c.B, .H = c.H, .G = c.H, .L = c.N, .S = 0, .d = c.d};
    arguments.d_v = 2 * c.M;
    arguments.M = c.M;
    arguments.frequency_heads = c.H;
    arguments.frequency_batches = c.frequency_batches;
    arguments.type = type;
    Call call(arguments);
    FeatureCall truth(c, call, ElementType::kFloat64, call.memory);
    FeatureCall got(c, call, type, call.memory);
    const auto kernel = cuda::attention_kernels.features[type == ElementType::kFloat64 ? 1 : 0];
    truth::attention_kernels.features[1](truth.params, false, cpu_executor(call.memory));
    ASSERT_STREQ(kernel(got.params, false, device_executor(call.memory)), nullptr);
    // An angle is a sum of d products of some 0.2, whose roundings add up as random numbers do.
    const ElementType arithmetic =
        type == ElementType::kFloat64 ? ElementType::kFloat64 : ElementType::kFloat32;
    const double d = static_cast<double>(c.d), cycle = 0.2 * d * std::sqrt(d);
    const double wide = unit_roundoff(arithmetic) * (20 + 2 * M_PI * cycle);
    // Frequencies of 16 bits are two split operands of the type, and sines are right to 1e-6.
    const double of_frequency = type == ElementType::kBFloat16  ? 0x1p-17
                                : type == ElementType::kFloat16 ? 0x1p-22
                                                                : 0;
    const double narrow = of_frequency > 0 ? 2e-6 + of_frequency * 2 * M_PI * cycle : 0;
    const double rounding = 1.01 * unit_roundoff(type);
    expect_close(got.features, truth.features, wide + narrow + rounding, "features");
    truth.params.features = got.params.features = call.grad_output.array;
    truth::attention_kernels.features[1](truth.params, true, cpu_executor(call.memory));
    ASSERT_STREQ(kernel(got.params, true, device_executor(call.memory)), nullptr);
    expect_close(got.grad_x, truth.grad_x, 4 * wide + rounding, "grad_x");
    expect_close(got.grad_w1, truth.grad_w1, 4 * wide, "grad_w1");
    expect_close(got.grad_w2, truth.grad_w2, 4 * wide, "grad_w2");
  }
}

INSTANTIATE_TEST_SUITE_P(Interpreter, FeatureKernelsOnDevice, ::testing::ValuesIn(kFeatureCases),
                         [](const auto& info) { return info.param.name; });

TEST(DropoutOnDevice, TheMaskIsThatOfTheDefinition) {
  Memory memory;
  for (const double dropout_p : {0.0, 0.3, 1.0}) {
    AttentionParams params;
    params.B = 2;
    params.H = 3;
    params.L = 70;
    params.S = 131;
    params.dropout_threshold = dropout_threshold(dropout_p);
    const int64_t state[2] = {-1234567890123, 7};
    params.dropout = {state, false, static_cast<uint32_t>(params.H)};
    std::vector<uint8_t> keep(params.B * params.H * params.L * params.S + 1, 9);
    ASSERT_STREQ(cuda::dropout_keep_mask(params, keep.data(), nullptr), nullptr);
    EXPECT_EQ(keep.back(), 9);
    int64_t wrong = 0, kept = 0;
    // Every group of 4 x 4 weights has its bytes of one Philox block; see support/philox.h.
    for (int64_t bh = 0; bh < params.B * params.H; ++bh) {
      for (int64_t group = 0; group < 5 * 4 * 9 * 4; ++group) {
        const int64_t rows = group / 36, columns = group % 36;
        const PhiloxBlock block = dropout_group(params.dropout, bh, rows, columns);
        for (int byte = 0; byte < 16; ++byte) {
          const int64_t i = rows / 4 * 16 + dropout_group_member(rows % 4, byte / 4);
          const int64_t j = columns / 4 * 16 + dropout_group_member(columns % 4, byte % 4);
          if (i >= params.L || j >= params.S) continue;
          const uint32_t drawn = block.word[byte / 4] >> (8 * (byte % 4)) & 255;
          const bool expected = drawn >= params.dropout_threshold;
          kept += expected;
          wrong += keep[(bh * params.L + i) * params.S + j] != expected;
        }
      }
    }
    EXPECT_EQ(wrong, 0);
    const double share = static_cast<double>(kept) / static_cast<double>(keep.size() - 1);
    EXPECT_NEAR(share, 1 / dropout_rescale(params.dropout_threshold), 0.01);
  }
}

}  // namespace
}  // namespace ikattn
