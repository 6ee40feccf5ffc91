// Batch-invariant calls in the interpreter: a row has the same bits in a call of its own, in a
// chunk of a prefill, and in all of it, whatever the GPU.
#include <vector>

#include "kernels/half_cases.h"

namespace ikattn {
namespace {

// Some queries of the first batch item, and its first keys.
struct Part {
  int64_t first = 0, L = 0, S = 0;
  bool causal = false;
  bool lower_right = false;  // a mask makes the queries those of the last keys
};

uint8_t* lower_right_mask(Memory& memory, const Part& part) {
  auto* mask = static_cast<uint8_t*>(memory.take(part.L * part.S));
  for (int64_t i = 0; i < part.L; ++i) {
    for (int64_t j = 0; j < part.S; ++j) {
      mask[i * part.S + j] = j <= part.S - part.L + i;
    }
  }
  return mask;
}

Array from_token(Array array, int64_t token) {
  auto* bytes = static_cast<unsigned char*>(array.data);
  array.data = bytes + token * array.stride[2] * size_of(array.type);
  return array;
}

// [H][L][d_v]
std::vector<double> output_of(Call& call, const Case& c, const Part& part) {
  AttentionParams params;
  call.set(params);
  params.B = 1;
  params.L = part.L;
  params.S = part.S;
  params.is_causal = part.causal;
  params.query = from_token(call.query.array, part.first);
  if (part.lower_right) {
    params.mask = {lower_right_mask(call.memory, part), ElementType::kBool, {0, 0, part.S, 1}};
  }
  const Tensor output = make(call.memory, c.type, {1, c.H, part.L, c.d_v});
  params.output = output.array;
  params.log_normalizer = make(call.memory, ElementType::kFloat64, {1, c.H, part.L}).array;
  EXPECT_STREQ(cuda::attention_kernels.forward[0](params, device_executor(call.memory)), nullptr);
  std::vector<double> numbers;
  for (int64_t i = 0; i < output.count; ++i) numbers.push_back(read(output.array, i));
  return numbers;
}

// The rows of a part in what a larger one has.
std::vector<double> rows_of(const std::vector<double>& output, const Case& c, const Part& whole,
                            const Part& part) {
  std::vector<double> rows;
  for (int64_t h = 0; h < c.H; ++h) {
    const auto begin = output.begin() + (h * whole.L + part.first - whole.first) * c.d_v;
    rows.insert(rows.end(), begin, begin + part.L * c.d_v);
  }
  return rows;
}

class BatchInvariance : public ::testing::Test {
 protected:
  void SetUp() override {
    interpreter::set_multiprocessors(2);  // else blocks of few queries would share the keys
    interpreter::set_warpgroups(true);
  }
  void TearDown() override {
    interpreter::set_multiprocessors(1);
    interpreter::set_warpgroups(false);
  }
  static std::vector<Case> cases(Case c) {
    c.batch_invariant = true;
    Case wide = c;
    wide.d_v = 136;
    wide.M = 70;
    return {of_type(c, ElementType::kBFloat16), of_type(c, ElementType::kFloat16),
            of_type(c, ElementType::kFloat32), of_type(wide, ElementType::kBFloat16)};
  }
};

TEST_F(BatchInvariance, OfSomeRowsAmongOthers) {
  for (const Case& c : cases(one_head({.name = "rows", .L = 130, .S = 550, .d_v = 8}))) {
    Call call(c);
    const Part whole{.L = c.L, .S = c.S};
    const std::vector<double> all = output_of(call, c, whole);
    for (const Part& part :
         {Part{.first = 3, .L = 1, .S = c.S}, Part{.first = 117, .L = 10, .S = c.S}}) {
      EXPECT_EQ(output_of(call, c, part), rows_of(all, c, whole, part)) << c.L << " " << part.L;
    }
  }
}

TEST_F(BatchInvariance, OfChunksAndStepsOfAPrefill) {
  for (const Case& c : cases({.name = "prefill",
                              .G = 1,
                              .L = 150,
                              .S = 150,
                              .d_v = 8,
                              .frequency_heads = 1,
                              .magnitude = 3})) {
    Call call(c);
    const Part whole{.L = 150, .S = 150, .causal = true};
    const std::vector<double> all = output_of(call, c, whole);
    for (const Part& part :
         {Part{.L = 70, .S = 70, .causal = true}, Part{.first = 100, .L = 1, .S = 101},
          Part{.first = 60, .L = 33, .S = 93, .lower_right = true}}) {
      EXPECT_EQ(output_of(call, c, part), rows_of(all, c, whole, part)) << part.first;
    }
  }
}

// Where every row sees all keys, the form is another than without.
TEST_F(BatchInvariance, ErrsByTheSameRoundings) {
  const std::vector<Case> all = cases({.name = "errors", .L = 40, .S = 70, .d_v = 8});
  for (Case c : {all.front(), all[1], all.back()}) {
    c.causal = c.d_v > 128;
    Call call(c);
    const Results truth = truth_of(call, c), got = device_results(call, c);
    expect_forward_within(call, c, got, truth);
    compare_gradients(got, truth, c, 7 * roundoff_of(c.type));
  }
}

}  // namespace
}  // namespace ikattn
