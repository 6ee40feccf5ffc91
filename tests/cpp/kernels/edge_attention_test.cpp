// The edge attention operators' CUDA kernels in the interpreter, against the CPU kernels in
// float64.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "edge_attention/cpu/kernel.h"
#include "edge_attention/cuda/kernels.h"
#include "kernels/agreement.h"
#include "kernels/memory.h"
#include "tier.h"

namespace ikattn::truth {
extern const EdgeAttentionKernels edge_attention_kernels;
}

namespace ikattn {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Case {
  std::string name;
  int64_t N_q = 9, N_k = 7, H = 2, F = 10, d_v = 3, E = 40;
  bool exponential = false, edge_logits = false, shared_logits = false, dropout = false;
  bool grad_weights = false, hidden = false;
  double negative_slope = 1;
  int64_t into_one = 0, from_one = 0;  // numbers of the edges into target 3, and from source 2
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }
};

// Arrays are one element longer than they need be, so that none is empty.
template <typename T>
std::vector<T> filled(std::mt19937& generator, int64_t count) {
  std::normal_distribution<double> normal;
  std::vector<T> values(count + 1);
  for (T& value : values) value = static_cast<T>(static_cast<float>(normal(generator)));
  return values;
}

// Everything of one call, forward and backward, in one arithmetic type.
template <typename T>
struct Call {
  explicit Call(const Case& c) : case_(c) {
    std::mt19937 generator(5);
    std::vector<int64_t> target(c.E);
    source.resize(c.E + 1);
    for (int64_t e = 0; e < c.E; ++e) {
      target[e] = e < c.into_one ? 3 : static_cast<int64_t>(generator() % (c.N_q - 1));
      source[e] = static_cast<int64_t>(generator() % c.N_k);
    }
    std::sort(target.begin(), target.end());
    for (int64_t e = 0; e < c.from_one; ++e) source[c.E - 1 - e] = 2;
    rowptr.assign(c.N_q + 1, 0);
    for (const int64_t i : target) ++rowptr[i + 1];
    for (int64_t i = 0; i < c.N_q; ++i) rowptr[i + 1] += rowptr[i];
    by_source.resize(c.E + 1);
    for (int64_t e = 0; e < c.E; ++e) by_source[e] = e;
    std::stable_sort(by_source.begin(), by_source.end() - 1,
                     [&](int64_t a, int64_t b) { return source[a] < source[b]; });
    colptr.assign(c.N_k + 1, 0);
    for (int64_t e = 0; e < c.E; ++e) ++colptr[source[e] + 1];
    for (int64_t j = 0; j < c.N_k; ++j) colptr[j + 1] += colptr[j];
    targets.resize(c.E + 1);
    for (int64_t k = 0; k < c.E; ++k) targets[k] = target[by_source[k]];

    query = filled<T>(generator, c.N_q * c.H * c.F);
    key = filled<T>(generator, c.N_k * c.H * c.F);
    value = filled<T>(generator, c.N_k * c.H * c.d_v);
    key_logits = filled<T>(generator, c.N_k * c.H);
    edge_logits = filled<T>(generator, c.E * c.H);
    grad_output = filled<T>(generator, c.N_q * c.H * c.d_v);
    grad_weights = filled<T>(generator, c.E * c.H);
    keep.resize(c.E * c.H + 1);
    for (int64_t k = 0; k < c.E * c.H; ++k) keep[k] = generator() % 4 != 0;
    if (c.hidden) {
      for (int64_t h = 0; h < c.H; ++h) key_logits[2 * c.H + h] = static_cast<T>(-kInfinity);
      const T nan = std::numeric_limits<T>::quiet_NaN();
      std::fill_n(key.begin() + 2 * c.H * c.F, c.H * c.F, nan);
      std::fill_n(value.begin() + 2 * c.H * c.d_v, c.H * c.d_v, nan);
    }
    output.resize(c.N_q * c.H * c.d_v + 1);
    weights.resize(c.E * c.H + 1);
    log_normalizer.resize(c.N_q * c.H + 1);
    grad_query.resize(c.N_q * c.H * c.F + 1);
    of_edges.resize(3 * c.E * c.H + 1);
    grad_key.resize(c.N_k * c.H * c.F + 1);
    grad_value.resize(c.N_k * c.H * c.d_v + 1);
    grad_key_logits.resize(c.N_k * c.H + 1);
  }

  void describe(EdgeParams<T>& params) {
    params.N_q = case_.N_q;
    params.N_k = case_.N_k;
    params.E = case_.E;
    params.H = case_.H;
    params.F = case_.F;
    params.d_v = case_.d_v;
    params.rowptr = rowptr.data();
    params.source = source.data();
    params.query_features = query.data();
    params.key_features = key.data();
    params.value = value.data();
    params.key_logits = key_logits.data();
    params.edge_logits = case_.edge_logits ? edge_logits.data() : nullptr;
    params.edge_heads = case_.shared_logits ? 1 : case_.H;
    params.keep = case_.dropout ? reinterpret_cast<const bool*>(keep.data()) : nullptr;
    params.rescale = T(1.25);
    params.exponential = case_.exponential;
    params.eps = T(0.01);
    params.negative_slope = static_cast<T>(case_.negative_slope);
  }
  EdgeForwardParams<T> forward() {
    EdgeForwardParams<T> params;
    describe(params);
    params.output = output.data();
    params.weights = weights.data();
    params.log_normalizer = log_normalizer.data();
    return params;
  }
  EdgeQueryGradientParams<T> by_target() {
    EdgeQueryGradientParams<T> params;
    describe(params);
    params.output = output.data();
    params.log_normalizer = log_normalizer.data();
    params.grad_output = grad_output.data();
    params.grad_weights = case_.grad_weights ? grad_weights.data() : nullptr;
    params.grad_query_features = grad_query.data();
    params.of_edges = of_edges.data();
    return params;
  }
  EdgeKeyGradientParams<T> by_sources() {
    return {case_.N_q,
            case_.N_k,
            case_.E,
            case_.H,
            case_.F,
            case_.d_v,
            colptr.data(),
            by_source.data(),
            targets.data(),
            query.data(),
            grad_output.data(),
            of_edges.data(),
            grad_key.data(),
            grad_value.data(),
            grad_key_logits.data()};
  }

  std::vector<int64_t> rowptr, source, colptr, by_source, targets;
  std::vector<uint8_t> keep;
  std::vector<T> query, key, value, key_logits, edge_logits, grad_output, grad_weights, output,
      weights, grad_query, of_edges, grad_key, grad_value, grad_key_logits;
  std::vector<double> log_normalizer;

 private:
  Case case_;
};

Call<double> truth_of(const Case& c) {
  Call<double> call(c);
  Memory memory;
  const auto& kernels = truth::edge_attention_kernels.of_double;
  kernels.forward(call.forward(), cpu_executor(memory));
  kernels.query_gradients(call.by_target(), cpu_executor(memory));
  kernels.key_gradients(call.by_sources(), cpu_executor(memory));
  return call;
}

template <typename T>
Call<T> on_device(const Case& c) {
  Call<T> call(c);
  const auto& kernels = [&]() -> const auto& {
    if constexpr (sizeof(T) == 8) {
      return cuda::edge_kernels_of_double;
    } else {
      return cuda::edge_kernels_of_float;
    }
  }();
  const cuda::EdgeScratch sizes = cuda::edge_scratch(c.E, c.H, c.F + c.d_v);
  std::vector<double> numbers(sizes.numbers + 1), mean(c.N_q * c.H + 1);
  std::vector<T> values(sizes.values + 1);
  EXPECT_STREQ(kernels.forward(call.forward(), numbers.data(), values.data(), nullptr), nullptr);
  EXPECT_STREQ(kernels.query_gradients(call.by_target(), mean.data(), numbers.data(), values.data(),
                                       nullptr),
               nullptr);
  EXPECT_STREQ(kernels.key_gradients(call.by_sources(), numbers.data(), values.data(), nullptr),
               nullptr);
  return call;
}

template <typename T>
void compare(const Case& c, double tolerance) {
  const Call<double> truth = truth_of(c);
  const Call<T> got = on_device<T>(c);
  expect_close(got.output, truth.output, tolerance, "output", 1);
  expect_close(got.weights, truth.weights, tolerance, "weights", 1);
  expect_close(got.log_normalizer, truth.log_normalizer, tolerance, "log normalizer", 1);
  expect_close(got.grad_query, truth.grad_query, 8 * tolerance, "gradient of queries", 1);
  expect_close(got.of_edges, truth.of_edges, 8 * tolerance, "what edges give", 1);
  expect_close(got.grad_key, truth.grad_key, 8 * tolerance, "gradient of keys", 1);
  expect_close(got.grad_value, truth.grad_value, 8 * tolerance, "gradient of values", 1);
  expect_close(got.grad_key_logits, truth.grad_key_logits, 8 * tolerance, "gradient of logits", 1);
}

std::vector<Case> cases() {
  return {
      {.name = "plain"},
      {.name = "no_edges", .E = 0},
      {.name = "wide", .H = 3, .F = 70, .d_v = 40},
      {.name = "exponential", .exponential = true},
      {.name = "leaky", .F = 1, .exponential = true, .edge_logits = true, .negative_slope = 0.2},
      {.name = "leaky_hidden",
       .exponential = true,
       .grad_weights = true,
       .hidden = true,
       .negative_slope = 0},
      {.name = "exponential_without_features", .F = 0, .exponential = true, .edge_logits = true},
      {.name = "edge_logits_dropout", .edge_logits = true, .dropout = true},
      {.name = "shared_logits_gradients_of_weights",
       .edge_logits = true,
       .shared_logits = true,
       .grad_weights = true},
      {.name = "hidden", .grad_weights = true, .hidden = true},
      {.name = "hidden_exponential", .exponential = true, .hidden = true},
      {.name = "long_rows", .E = 3400, .into_one = 2500, .from_one = 1900},
      {.name = "long_rows_everything",
       .E = 3300,
       .exponential = true,
       .edge_logits = true,
       .dropout = true,
       .grad_weights = true,
       .hidden = true,
       .into_one = 1200,
       .from_one = 1400},
  };
}

class EdgeAttentionKernels : public testing::TestWithParam<Case> {};

TEST_P(EdgeAttentionKernels, InFloat64ComputeWhatTheCpuComputes) {
  compare<double>(GetParam(), 1e-11);
}
TEST_P(EdgeAttentionKernels, InFloat32ComputeWhatTheCpuComputes) {
  compare<float>(GetParam(), 4e-6);
}

INSTANTIATE_TEST_SUITE_P(Cases, EdgeAttentionKernels, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ikattn
