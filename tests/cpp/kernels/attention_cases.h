// Cases of the attention operators' CUDA kernels, their tensors, and every result by the CUDA
// kernels in the interpreter and by the CPU kernels in float64.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "attention/cpu/kernel.h"
#include "attention/cuda/kernels.h"
#include "interpreter/interpreter.h"
#include "kernels/families.h"
#include "kernels/memory.h"
#include "support/philox.h"

namespace ikattn::truth {
extern const AttentionKernels attention_kernels;
}

namespace ikattn {

enum class Masking {
  kNone,
  kBool,
  kFloat,
  kFloatPerKey,
  kFloatPerRow,
  kFloatPerHead,
  kFloatPerPair,  // the others are the same along some axes
};

struct Case {
  std::string name;
  int64_t B = 2, H = 2, G = 2, L = 5, S = 7, d = 3, d_v = 4, M = 3;
  int64_t frequency_heads = 2, frequency_batches = 1;
  bool stationary = false, causal = false, bias = false;
  bool key_mask = false;    // the bias is a mask of keys, bool
  bool half_sides = false;  // masks, biases and frequencies of 16 bits
  bool tf32 = false;  // float32 may go to the tensor cores; its numbers are then those of float16
  bool batch_invariant = false;
  bool lowest = false;  // finite numbers hide: the bias all keys, the mask rows
  Masking masking = Masking::kNone;
  double p = 2, eps = 1e-5, dropout = 0;
  double magnitude = 1;  // the magnitude scale, times its default
  LinearTime linear_time = LinearTime::kAuto;
  bool stands_for_all = false;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }
  ElementType type = ElementType::kFloat32;

  ElementType side() const {
    if (half_sides) {
      return type == ElementType::kBFloat16 ? ElementType::kBFloat16 : ElementType::kFloat16;
    }
    return type == ElementType::kFloat64 ? ElementType::kFloat64 : ElementType::kFloat32;
  }
  int64_t key_heads() const { return frequency_heads != G ? H : G; }
};

// Whether float32 takes split products or CUDA cores, as long as it lives.
struct SplitSetting : Families {
  explicit SplitSetting(bool allows) : Families(allows ? "+split" : "-split") {}
};

// Reads a table of cases, one a line: a name, and what differs from the defaults, as "L=20",
// "causal", "mask=bool", "one_head", "one_key_head" for two query heads, or "grouped" for four
// query heads on two key heads. A star before the name marks a case that stands for the others, "#"
// a comment.
std::vector<Case> cases_of(const char* table);
// Reads one line of such a table.
Case case_of(const char* line);
// Returns all cases where everything runs, otherwise the marked ones.
std::vector<Case> cases_of_tier(const std::vector<Case>& all);
// A number that cases differ in.
size_t turn_of(const Case& c);

inline Case one_head(Case c) {
  c.B = c.H = c.G = c.frequency_heads = 1;
  return c;
}

int64_t size_of(ElementType type);
double read(const Array& array, int64_t index);
void write(const Array& array, int64_t index, double value);

// A contiguous array of the sizes; axes named by 0 are broadcast and get stride 0.
struct Tensor {
  Array array;
  int64_t count = 0;
};

Tensor make(Memory& memory, ElementType type, std::vector<int64_t> sizes,
            std::vector<bool> broadcast = {});

// Rounds as TF32 does, and the tensor cores with value and grad_output of float32.
void round_to_11_bits(const Tensor& tensor);

// A test of Hopper's own kernels. The interpreter is reset after every test.
class OnHopper : public ::testing::Test {
 protected:
  OnHopper() { interpreter::set_warpgroups(true); }
};

// The arguments of a case, and room for results, gradients, twice.
class Call {
 public:
  explicit Call(const Case& c);

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
    params.eps = c.eps;
    params.magnitude_scale = 0.5 * c.magnitude / std::sqrt(static_cast<double>(c.d));
    params.is_causal = c.causal;
    params.allow_tf32 = c.tf32;
    params.linear_time = c.linear_time;
    params.batch_invariant = c.batch_invariant;
    if (c.dropout > 0) {
      params.dropout_threshold = dropout_threshold(c.dropout);
      params.dropout = {state_, false, static_cast<uint32_t>(params.H)};
    }
  }

  // Sets quadratic or linear time for the same arguments.
  Call& by(LinearTime setting) {
    case_.linear_time = setting;
    return *this;
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

cuda::DeviceExecutor device_executor(Memory& memory);

// Everything by the CPU kernels in float64.
Results truth_of(Call& call, const Case& c);

// Everything by the CUDA kernels; the gradients alone, from what `forward` holds.
Results device_results(Call& call, const Case& c);
Results device_gradients(Call& call, const Case& c, const Results& forward);

// Output and log Z alone.
Results device_forward(Call& call, const Case& c);

// The gradients of a call of weights, for some numbers that come in, but of the value.
Results truth_of_weights_gradients(Call& call, const Case& c);
Results device_weights_gradients(Call& call, const Case& c);

// The largest difference, relative to the largest element; NaN must meet NaN.
// `smallest`: of the elements that are added up, where their sum may vanish.
void expect_close(const Tensor& got, const Tensor& expected, double tolerance,
                  const std::string& what, double smallest = 1e-3);
void compare_token_gradients(const Results& got, const Results& expected, double gradient,
                             double smallest = 1e-3);
void compare_gradients(const Results& got, const Results& expected, const Case& c, double gradient);
void compare(const Results& got, const Results& expected, const Case& c, double output,
             double gradient);

// Counts how many rows differ, of those from the first-th to the end-th (0: the last) of `columns`
// numbers each.
int64_t rows_that_differ(const Tensor& one, const Tensor& other, int64_t columns, int64_t first = 0,
                         int64_t end = 0);
// Returns the largest difference from the first-th number on.
double largest_difference(const Tensor& one, const Tensor& other, int64_t first = 0);

// Blocks, warps and lanes in any order give the same bits: nothing adds up by chance.
void expect_the_same_in_every_order(Call& call, const Case& c);

}  // namespace ikattn
