// The attention operators' tensor-core kernels in the interpreter, against the CPU kernels in
// float64 on the same numbers: as far off as the roundings of their operands allow.
#include <tuple>

#include "simt/attention_cases.h"

namespace ikattn {
namespace {

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
    {.name = "wide_heads_and_odd_frequencies",
     .B = 1,
     .H = 1,
     .G = 1,
     .L = 70,
     .S = 65,
     .d = 70,
     .d_v = 8,
     .M = 33,
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
    // Wide rows, by slices of 128.
    {.name = "features_of_two_slices",
     .B = 1,
     .H = 2,
     .G = 1,
     .L = 70,
     .S = 130,
     .d = 8,
     .d_v = 8,
     .M = 100,
     .frequency_heads = 1},
    {.name = "value_of_two_slices", .L = 20, .S = 70, .d_v = 136, .bias = true},
    {.name = "many_slices_and_causal",
     .B = 1,
     .H = 1,
     .G = 1,
     .L = 130,
     .S = 100,
     .d = 8,
     .d_v = 300,
     .M = 200,
     .frequency_heads = 1,
     .causal = true},
    {.name = "slices_and_uneven_magnitudes",
     .B = 1,
     .H = 2,
     .G = 1,
     .L = 70,
     .S = 70,
     .d_v = 130,
     .M = 65,
     .frequency_heads = 1,
     .causal = true,
     .magnitude = 4},
    {.name = "slices_and_dropout",
     .B = 1,
     .L = 40,
     .S = 70,
     .d_v = 8,
     .M = 80,
     .masking = Masking::kBool,
     .dropout = 0.3},
    {.name = "slices_and_float_mask",
     .H = 4,
     .G = 2,
     .L = 70,
     .S = 70,
     .d_v = 129,
     .M = 70,
     .bias = true,
     .masking = Masking::kFloat,
     .dropout = 0.3},
    {.name = "slices_float_mask_and_causal",
     .B = 1,
     .L = 70,
     .S = 70,
     .d_v = 129,
     .M = 70,
     .causal = true,
     .bias = true,
     .masking = Masking::kFloat,
     .magnitude = 2},
    {.name = "slices_without_keys", .S = 0, .d_v = 8, .M = 70},
    {.name = "slices_without_queries", .L = 0, .d_v = 136},
    {.name = "mask_of_all_pairs", .L = 20, .S = 70, .d_v = 8, .masking = Masking::kFloatPerPair},
    {.name = "sides_of_16_bits",
     .L = 20,
     .S = 70,
     .d_v = 8,
     .bias = true,
     .half_sides = true,
     .masking = Masking::kFloat},
    {.name = "no_magnitude", .L = 20, .S = 70, .d_v = 8, .p = 0},
    // |k|_1^2 is up to three times |k|_2^2 here.
    {.name = "p_1", .L = 20, .S = 70, .d_v = 8, .p = 1, .magnitude = 0.3},
    {.name = "p_1_5", .L = 20, .S = 70, .d_v = 8, .p = 1.5},
    {.name = "p_3_and_slices", .L = 20, .S = 70, .d_v = 136, .p = 3},
    {.name = "larger_eps", .L = 20, .S = 70, .d_v = 8, .eps = 1e-2},
    {.name = "largest_eps", .L = 70, .S = 70, .d_v = 8, .causal = true, .eps = 0.9},
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

// The types that go there: float32 is rounded as float16 is, after scaling, and its results are
// not.
constexpr ElementType kTypes[] = {ElementType::kBFloat16, ElementType::kFloat16,
                                  ElementType::kFloat32};

double roundoff_of(ElementType type) { return type == ElementType::kBFloat16 ? 0x1p-9 : 0x1p-12; }

Case of_type(Case c, ElementType type) {
  c.type = type;
  c.tf32 = type == ElementType::kFloat32;
  return c;
}

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

// Half rounds a feature by 2^-11 of it at most. Rounding errors differ in sign and size, and sums
// of products over features stay within half of that each, but for cases made of few features.
constexpr double kFeatureRoundoff = 0x1p-12 * 1.01, kLargestFeatureRoundoff = 0x1p-11;

// How far the tensor cores may be off, at most: a weight by its own rounding and by that of both
// features, in Half whatever the type; the output by those of its weights, and by its own.
struct Bounds {
  std::vector<double> output, log_normalizer;
};

Bounds bounds_of(Call& call, const Case& c, const Results& truth, double roundoff,
                 double feature_roundoff = kFeatureRoundoff) {
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
          const double off = 2 * feature_roundoff * sizes / static_cast<double>(4 * c.M) + 1e-6;
          const double similarity = score * score + c.eps;
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

// Where few keys dominate, rows follow from few scores, and those may be small: the gradient of a
// score s errs by its rounding over s.
double amplification_of(const Case& c) { return c.magnitude > 10 ? 20 : c.magnitude > 1 ? 5 : 1; }

TEST_P(HalfAttentionOnDevice, ErrsByItsRoundings) {
  for (const ElementType type : kTypes) {
    const Case c = of_type(GetParam(), type);
    Call call(c);
    const Results truth = truth_of(call, c), got = device_results(call, c);
    const double roundoff = roundoff_of(type);
    const Bounds bounds = bounds_of(call, c, truth, roundoff);
    expect_within(got.output, truth.output, bounds.output, "output");
    expect_within(got.log_normalizer, truth.log_normalizer, bounds.log_normalizer,
                  "log_normalizer");
    // delta comes from the rounded output, which tells where single keys dominate.
    // float32's results are not rounded themselves, which takes from those of float16 some of it.
    if (c.magnitude == 1) compare_gradients(got, truth, c, (c.tf32 ? 8 : 6) * roundoff);
  }
}

// Hopper's own kernels; of heads in the general form they leave the rows.
TEST(HalfAttentionOnDevice, WarpgroupsErrByTheirRoundings) {
  simt::set_warpgroups(true);
  const Case cases[] = {
      {.name = "less_than_a_tile", .L = 20, .S = 30, .d_v = 8, .bias = true},
      {.name = "tiles", .B = 1, .H = 1, .G = 1, .L = 256, .S = 384, .d_v = 64, .M = 64},
      {.name = "wide", .B = 1, .H = 1, .G = 1, .L = 130, .S = 515, .d_v = 128, .M = 64},
      {.name = "odd", .B = 1, .H = 1, .G = 1, .L = 65, .S = 129, .d_v = 72, .M = 33},
      {.name = "one", .B = 1, .H = 1, .G = 1, .L = 1, .S = 1, .d_v = 5},
      {.name = "causal", .B = 1, .H = 1, .G = 1, .L = 300, .S = 300, .d_v = 16, .causal = true},
      {.name = "more_keys", .B = 1, .H = 1, .G = 1, .L = 129, .S = 300, .d_v = 8, .causal = true},
      {.name = "fewer_keys", .B = 1, .H = 1, .G = 1, .L = 300, .S = 70, .d_v = 8, .causal = true},
      {.name = "grouped", .H = 4, .G = 2, .L = 20, .S = 140, .d_v = 8, .causal = true},
      {.name = "general", .L = 70, .S = 140, .d_v = 8, .causal = true, .magnitude = 40},
  };
  for (Case c : cases) {
    SCOPED_TRACE(c.name);
    c.frequency_heads = 1;
    for (const ElementType type : kTypes) {
      Call call(c = of_type(c, type));
      const int before = simt::launches_of("warpgroup_");
      const double roundoff = roundoff_of(type);
      const Results truth = truth_of(call, c), got = device_results(call, c);
      EXPECT_EQ(simt::launches_of("warpgroup_"), before + 3);
      compare_gradients(device_gradients(call, c, truth), truth, c,
                        amplification_of(c) * (2 * roundoff + 0x1p-10));
      const Bounds bounds = bounds_of(call, c, truth, roundoff, kLargestFeatureRoundoff);
      expect_within(got.output, truth.output, bounds.output, "output");
      expect_within(got.log_normalizer, truth.log_normalizer, bounds.log_normalizer,
                    "log_normalizer");
    }
  }
  simt::set_warpgroups(false);
}

TEST(HalfAttentionOnDevice, WarpgroupsGiveTheSameInEveryOrder) {
  simt::set_warpgroups(true);
  Case c{.name = "orders", .B = 1, .H = 2, .G = 1, .L = 140, .S = 400, .d_v = 8, .causal = true};
  c.frequency_heads = 1;
  Call call(c = of_type(c, ElementType::kBFloat16));
  const Results first = device_results(call, c);
  for (const simt::Order order : {simt::Order::kReversed, simt::Order::kShuffled}) {
    simt::set_order(order);
    const Results again = device_results(call, c);
    expect_close(again.output, first.output, 0, "output");
    compare_gradients(again, first, c, 0);
  }
  simt::set_order(simt::Order::kForward);
  simt::set_warpgroups(false);
}

TEST(HalfAttentionOnDevice, FormsGiveTheSameInEveryOrder) {
  simt::set_multiprocessors(6);  // blocks share their keys
  for (const auto& [masking, causal, dropout] : {std::tuple{Masking::kNone, true, 0.0},
                                                 {Masking::kBool, false, 0.3},
                                                 {Masking::kFloat, false, 0.0}}) {
    Case c{.name = "orders", .B = 1, .H = 2, .G = 1, .L = 70, .S = 550, .d_v = 8};
    c.frequency_heads = 1;
    c.masking = masking;
    c.causal = causal;
    c.dropout = dropout;
    Call call(c = of_type(c, ElementType::kFloat32));
    const Results first = device_results(call, c);
    for (const simt::Order order : {simt::Order::kReversed, simt::Order::kShuffled}) {
      simt::set_order(order);
      const Results again = device_results(call, c);
      expect_close(again.output, first.output, 0, "output");
      compare_gradients(again, first, c, 0);
    }
    simt::set_order(simt::Order::kForward);
  }
  simt::set_multiprocessors(1);
}

TEST(HalfAttentionOnDevice, SlicesGiveTheSameInEveryOrder) {
  Case c{.name = "orders", .B = 1, .H = 2, .G = 1, .L = 70, .S = 140, .d_v = 136, .M = 70};
  c.frequency_heads = 1;
  Call call(c = of_type(c, ElementType::kBFloat16));
  const int before = simt::launches_of("wide_");
  const Results first = device_results(call, c);
  EXPECT_EQ(simt::launches_of("wide_"), before + 4);
  for (const simt::Order order : {simt::Order::kReversed, simt::Order::kShuffled}) {
    simt::set_order(order);
    const Results again = device_results(call, c);
    expect_close(again.output, first.output, 0, "output");
    compare_gradients(again, first, c, 0);
  }
  simt::set_order(simt::Order::kForward);
}

TEST(HalfAttentionOnDevice, NanStaysWhereWarpgroupsSeeIt) {
  simt::set_warpgroups(true);
  for (const bool causal : {true, false}) {
    Case c{.name = "nan", .B = 1, .H = 1, .G = 1, .L = 200, .S = 200, .d_v = 8};
    c.frequency_heads = 1;
    c.causal = causal;
    c = of_type(c, ElementType::kBFloat16);
    for (Tensor Call::* spoiled : {&Call::query, &Call::key, &Call::value, &Call::grad_output}) {
      Call call(c);
      const Tensor& tensor = call.*spoiled;
      write(tensor.array, 140 * (tensor.count / 200), NAN);
      const Results got = device_results(call, c), truth = truth_of(call, c);
      const double roundoff = roundoff_of(c.type);
      expect_close(got.output, truth.output, 6 * roundoff, "output");
      expect_close(got.grad_query, truth.grad_query, 6 * roundoff, "grad_query");
      expect_close(got.grad_key, truth.grad_key, 6 * roundoff, "grad_key");
      expect_close(got.grad_value, truth.grad_value, 6 * roundoff, "grad_value");
    }
  }
  simt::set_warpgroups(false);
}

// What padding of the queries alone meets is not seen either.
TEST(HalfAttentionOnDevice, NanThatNoQuerySeesStaysAlone) {
  for (const bool warpgroups : {false, true}) {
    simt::set_warpgroups(warpgroups);
    for (const Masking masking : {Masking::kNone, Masking::kBool, Masking::kFloat}) {
      Case c{.name = "unseen", .B = 1, .H = 1, .G = 1, .L = 70, .S = 120, .d_v = 8};
      c.frequency_heads = 1;
      c.causal = c.bias = true;
      c.masking = masking;
      c = of_type(c, ElementType::kBFloat16);
      Call call(c);
      write(call.key.array, 80 * c.d, NAN);
      compare_gradients(device_results(call, c), truth_of(call, c), c, 6 * roundoff_of(c.type));
    }
  }
  simt::set_warpgroups(false);
}

// Few queries: blocks share their keys, and what each found is combined.
TEST(HalfAttentionOnDevice, SharedKeysErrByTheirRoundings) {
  simt::set_multiprocessors(6);
  for (const auto& [masking, causal, magnitude, dropout, d_v] :
       {std::tuple{Masking::kNone, false, 1.0, 0.0, 40},
        {Masking::kNone, true, 40.0, 0.0, 40},
        {Masking::kFloat, false, 1.0, 0.3, 40},
        {Masking::kBool, false, 1.0, 0.0, 40},
        {Masking::kNone, false, 1.0, 0.0, 200},
        {Masking::kFloat, false, 1.0, 0.3, 200}}) {
    for (const ElementType type : kTypes) {
      Case c{.name = "few", .B = 1, .H = 2, .G = 1, .L = 3, .S = 1100, .d_v = d_v};
      c.frequency_heads = 1;
      c.masking = masking;
      c.causal = causal;
      c.magnitude = magnitude;
      c.dropout = dropout;
      Call call(c = of_type(c, type));
      const Results truth = truth_of(call, c), got = device_results(call, c);
      const Bounds bounds = bounds_of(call, c, truth, roundoff_of(type));
      expect_within(got.output, truth.output, bounds.output, "output");
      expect_within(got.log_normalizer, truth.log_normalizer, bounds.log_normalizer,
                    "log_normalizer");
    }
  }
  simt::set_multiprocessors(1);
}

// A block of warpgroups fills a multiprocessor.
TEST(HalfAttentionOnDevice, WarpgroupsTakeAllKeysOfEnoughRows) {
  simt::set_warpgroups(true);
  const auto taken = [](int multiprocessors, bool causal) {
    simt::set_multiprocessors(multiprocessors);
    Case c{.name = "rows", .B = 1, .H = 1, .G = 1, .L = 129, .S = 600, .d_v = 8};
    c.frequency_heads = 1;
    c.causal = causal;
    c = of_type(c, ElementType::kBFloat16);
    Call call(c);
    const int before = simt::launches_of("warpgroup_forward");
    device_results(call, c);
    return simt::launches_of("warpgroup_forward") - before;
  };
  EXPECT_EQ(taken(2, false), 1);
  EXPECT_EQ(taken(3, false), 0);
  EXPECT_EQ(taken(2, true), 0);  // a head may turn out to need the general form
  simt::set_multiprocessors(1);
  simt::set_warpgroups(false);
}

// There are no tensor maps of nothing.
TEST(HalfAttentionOnDevice, WarpgroupsTakeNoEmptyBatch) {
  simt::set_warpgroups(true);
  Case c{.name = "empty", .B = 0, .H = 1, .G = 1, .L = 20, .S = 30, .d_v = 8};
  c.frequency_heads = 1;
  Call call(c = of_type(c, ElementType::kBFloat16));
  const int before = simt::launches_of("warpgroup_");
  device_results(call, c);
  EXPECT_EQ(simt::launches_of("warpgroup_"), before);
  simt::set_warpgroups(false);
}

// sm_86, sm_89 and sm_120 have the least shared memory; the widest kernels of each form fit.
TEST(HalfAttentionOnDevice, FitsTheLeastSharedMemory) {
  simt::set_shared_limit(99 * 1024);
  for (const int64_t d_v : {64, 128, 256}) {
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
  for (const ElementType type : kTypes) {
    const Case c = of_type(GetParam(), type);
    Call call(c);
    const Results truth = truth_of(call, c);
    const double roundoff = roundoff_of(type);
    compare_gradients(device_gradients(call, c, truth), truth, c,
                      amplification_of(c) * (2 * roundoff + 0x1p-10));
  }
}

INSTANTIATE_TEST_SUITE_P(Simt, HalfAttentionOnDevice, ::testing::ValuesIn(kHalfCases),
                         [](const auto& info) { return info.param.name; });

TEST(HalfAttentionOnDevice, NanStaysWhereItIsSeen) {
  for (const ElementType type : kTypes) {
    for (const auto& [causal, d_v] : {std::pair{true, 8}, {false, 8}, {true, 136}, {false, 136}}) {
      Case c{.name = "nan", .B = 1, .H = 1, .G = 1, .L = 70, .S = 70, .d_v = d_v};
      c.frequency_heads = 1;
      c.causal = causal;
      c = of_type(c, type);
      for (Tensor Call::* spoiled : {&Call::query, &Call::key, &Call::value, &Call::grad_output}) {
        Call call(c);
        const Tensor& tensor = call.*spoiled;
        write(tensor.array, 40 * (tensor.count / 70), NAN);
        const Results got = device_results(call, c), truth = truth_of(call, c);
        const double roundoff = roundoff_of(type);
        expect_close(got.output, truth.output, 6 * roundoff, "output");
        expect_close(got.grad_query, truth.grad_query, 6 * roundoff, "grad_query");
        expect_close(got.grad_key, truth.grad_key, 6 * roundoff, "grad_key");
        expect_close(got.grad_value, truth.grad_value, 6 * roundoff, "grad_value");
      }
    }
  }
}

// Padding: what a key that key_bias hides holds, nobody sees. Large numbers must not make the
// scales coarse either.
void expect_that_hidden_keys_may_hold_anything(Masking masking, int64_t d_v = 8) {
  for (const ElementType type : kTypes) {
    const float largest = type == ElementType::kFloat16 ? 6e4f : 3e38f;
    for (const auto& [causal, garbage] :
         {std::pair{true, NAN}, {false, INFINITY}, {true, largest}, {false, largest}}) {
      Case c{.name = "hidden", .B = 1, .H = 1, .G = 1, .L = 70, .S = 70, .d_v = d_v};
      c.frequency_heads = 1;
      c.causal = causal;
      c.bias = true;
      c.masking = masking;
      c = of_type(c, type);
      Call clean(c), call(c);
      for (const int64_t j : {int64_t{3}, int64_t{40}}) {
        write(clean.bias.array, j, -INFINITY);
        write(call.bias.array, j, -INFINITY);
        write(call.key.array, j * c.d, garbage);
        for (int64_t column = 0; column < c.d_v; ++column) {
          const bool spoiled = !std::isfinite(garbage) && column % 2 == 0;
          write(call.value.array, j * c.d_v + column, spoiled ? NAN : garbage);
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

TEST(HalfAttentionOnDevice, HiddenKeysMayHoldAnything) {
  for (const Masking masking : {Masking::kNone, Masking::kBool, Masking::kFloat}) {
    expect_that_hidden_keys_may_hold_anything(masking);
    expect_that_hidden_keys_may_hold_anything(masking, 136);
  }
  simt::set_warpgroups(true);
  expect_that_hidden_keys_may_hold_anything(Masking::kNone);
  simt::set_warpgroups(false);
}

// Of float32's own numbers value and grad_output are rounded to 11 bits, as TF32 rounds them. They
// may be of any size, and differ by 2^25 within a head.
TEST(HalfAttentionOnDevice, Float32IsRoundedAsTf32Is) {
  constexpr int64_t kColumns = 9, kSmallColumn = 3;
  const auto small_column = [](Call& call, const Tensor& output) {
    const Tensor part = make(call.memory, ElementType::kFloat64, {output.count / kColumns});
    for (int64_t i = 0; i < part.count; ++i) {
      write(part.array, i, read(output.array, i * kColumns + kSmallColumn));
    }
    return part;
  };
  for (const bool causal : {true, false}) {
    for (const double size : {0.3, 1e20, 1e-20}) {
      Case c{.name = "float32", .B = 1, .H = 4, .G = 2, .L = 70, .S = 70, .d_v = kColumns};
      c.causal = causal;
      c = of_type(c, ElementType::kFloat32);
      Call call(c);
      for (int64_t i = 0; i < call.value.count; ++i) {
        const double column = i % kColumns == kSmallColumn ? 0x1p-25 : 1;
        write(call.value.array, i, size * column * read(call.value.array, i));
      }
      for (int64_t i = 0; i < call.grad_output.count; ++i) {
        const double row = i / kColumns % 7 == 3 ? 0x1p-25 : 1;
        write(call.grad_output.array, i, row / size * read(call.grad_output.array, i));
      }
      const Results got = device_results(call, c);
      round_to_11_bits(call.value);
      round_to_11_bits(call.grad_output);
      const Results truth = truth_of(call, c);
      expect_close(got.output, truth.output, 6 * 0x1p-12, "output", size * 1e-3);
      expect_close(small_column(call, got.output), small_column(call, truth.output), 6 * 0x1p-12,
                   "a small column of the output", size * 1e-12);
      // Early rows follow from few scores: float16 errs by 10.5 roundings of the same numbers.
      compare_gradients(got, truth, c, 12 * 0x1p-12);
      expect_close(got.grad_value, truth.grad_value, 6 * 0x1p-12, "grad_value", 1e-3 / size);
    }
  }
}

// The frequencies' gradients, of more tokens than a share. Of two keys many rows have a score near
// zero, and its gradient errs by its rounding over it.
TEST(HalfAttentionOnDevice, FrequenciesOfManyTokens) {
  Case c{.name = "shares", .B = 2, .H = 1, .G = 1, .L = 2049, .S = 2, .d_v = 8};
  c.frequency_heads = 1;
  c = of_type(c, ElementType::kBFloat16);
  Call call(c);
  const Results truth = truth_of(call, c), got = device_gradients(call, c, truth);
  expect_close(got.grad_w1, truth.grad_w1, 5 * (2 * 0x1p-9 + 0x1p-10), "grad_w1");
  expect_close(got.grad_w2, truth.grad_w2, 5 * (2 * 0x1p-9 + 0x1p-10), "grad_w2");
}

// Rows that see only keys up to 12 nats below the largest, whose scores vanish: weights of eps
// alone.
TEST(HalfAttentionOnDevice, WeightsOfEpsAreNotLost) {
  for (const bool warpgroups : {false, true}) {
    simt::set_warpgroups(warpgroups);
    for (const ElementType type : kTypes) {
      for (const double below : {8.7, 9.8, 10.9, 11.4, 11.9}) {
        Case c{.name = "eps", .B = 1, .H = 1, .G = 1, .L = 70, .S = 70, .d = 1, .d_v = 8, .M = 1};
        c.frequency_heads = 1;
        c.stationary = c.causal = c.bias = true;
        c = of_type(c, type);
        Call call(c);
        write(call.w1.array, 0, 1);
        for (int64_t j = 0; j < c.S; ++j) {
          write(call.query.array, j, 0);
          write(call.key.array, j, 0.25);  // a quarter of a turn: no score
          write(call.bias.array, j, j + 1 < c.S ? -below : 0);
        }
        const Results got = device_results(call, c), truth = truth_of(call, c);
        expect_close(got.output, truth.output, 6 * roundoff_of(type), "output");
      }
    }
  }
  simt::set_warpgroups(false);
}

// Neither the sums of squares nor the scales of gradients leave float32.
TEST(HalfAttentionOnDevice, LargeValuesOfBFloat16) {
  for (const bool causal : {true, false}) {
    Case c{.name = "large_values", .B = 1, .H = 1, .G = 1, .L = 70, .S = 70, .d_v = 8};
    c.frequency_heads = 1;
    c.causal = causal;
    c.type = ElementType::kBFloat16;
    Call call(c);
    for (int64_t i = 0; i < call.value.count; ++i) {
      write(call.value.array, i, 1e25 * read(call.value.array, i));
    }
    const Results got = device_results(call, c), truth = truth_of(call, c);
    expect_close(got.output, truth.output, 6 * 0x1p-9, "output");
    compare_gradients(got, truth, c, 6 * 0x1p-9);
  }
}

}  // namespace
}  // namespace ikattn
