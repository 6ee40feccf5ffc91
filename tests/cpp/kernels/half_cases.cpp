#include "kernels/half_cases.h"

#include "tier.h"

namespace ikattn {

std::vector<ElementType> types_in_turn(size_t turn) {
  if (runs_everything()) return {std::begin(kTypes), std::end(kTypes)};
  return {kTypes[turn % std::size(kTypes)]};
}
std::vector<ElementType> types_in_turn(const Case& c) { return types_in_turn(turn_of(c)); }

double roundoff_of(ElementType type) { return type == ElementType::kBFloat16 ? 0x1p-9 : 0x1p-12; }

Case of_type(Case c, ElementType type) {
  c.type = type;
  c.tf32 = type == ElementType::kFloat32;
  return c;
}

namespace {

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
  truth::attention_kernels.features[1](params, false, cpu_executor(call.memory));
  return features;
}

}  // namespace

Bounds bounds_of(Call& call, const Case& c, const Results& truth, double roundoff,
                 FeatureRoundoff of_features) {
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
          double score = 0, errors = 0;
          for (int64_t f = 0; f < F; ++f) {
            const double of_query = read(phi_q.array, row * F + f);
            const double of_key = read(phi_k.array, (bk * c.S + j) * F + f);
            score += of_query * of_key;
            errors += 2 * of_features.relative * std::fabs(of_query * of_key) +
                      of_features.absolute * (std::fabs(of_query) + std::fabs(of_key));
          }
          score /= static_cast<double>(4 * c.M);
          const double off = errors / static_cast<double>(4 * c.M) + 1e-6;
          const double similarity = score * score + c.eps;
          const double relative =
              (2 * std::fabs(score) + off) * off / similarity + of_features.of_weights;
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

void expect_forward_within(Call& call, const Case& c, const Results& got, const Results& truth,
                           FeatureRoundoff of_features) {
  Bounds bounds = bounds_of(call, c, truth, roundoff_of(c.type), of_features);
  expect_within(got.output, truth.output, bounds.output, "output");
  // Near -2^33, where offsets end, numbers of float64 are 2e-6 apart: each of the two is rounded.
  for (int64_t i = 0; i < truth.log_normalizer.count; ++i) {
    const double log_z = std::fabs(read(truth.log_normalizer.array, i));
    if (std::isfinite(log_z)) bounds.log_normalizer[i] += 0x1p-52 * log_z;
  }
  expect_within(got.log_normalizer, truth.log_normalizer, bounds.log_normalizer, "log_normalizer");
}

void expect_nan_stays_where_it_is_seen(const Case& c, double share) {
  for (Tensor Call::* spoiled : {&Call::query, &Call::key, &Call::value, &Call::grad_output}) {
    Call call(c);
    const Tensor& tensor = call.*spoiled;
    write(tensor.array, static_cast<int64_t>(share * static_cast<double>(tensor.count - 1)), NAN);
    const Results got = device_results(call, c), truth = truth_of(call, c);
    expect_close(got.output, truth.output, 6 * roundoff_of(c.type), "output");
    compare_token_gradients(got, truth, 6 * roundoff_of(c.type));
  }
}

double amplification_of(const Case& c) { return c.magnitude > 10 ? 20 : c.magnitude > 1 ? 5 : 1; }

}  // namespace ikattn
