// A call of the streamed maps' kernels, and its weights by their definition in float64.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "contributions/cuda/streamed/streamed.h"
#include "support/cuda/float16.h"

namespace ikattn {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Case {
  std::string name;
  int64_t B = 1, H = 4, G = 2, L = 37, S = 37, width = 32;
  bool is_split = false, is_bfloat16 = false, is_implicit = false, is_causal = false;
  bool masked = false, padding = false;
  bool masked_by_head = false, has_offsets = false;
  int64_t d_v = 9;
  int variants = 1;
  int64_t diagonal = 0;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }
};

// Operands of a call, and what the kernels make of them.
struct Call {
  explicit Call(const Case& c) : c(c), factors(c.variants), fragments(c.variants) {
    std::mt19937 generator(5);
    std::normal_distribution<float> normal;
    const auto numbers = [&](int64_t count) {
      std::vector<float> result(count);
      for (float& x : result) x = normal(generator);
      return result;
    };
    const auto operand = [&](int64_t rows) {
      std::vector<uint16_t> result;
      for (const float x : numbers(rows * c.width)) {
        result.push_back(c.is_bfloat16 ? to_bfloat16(x).bits : to_half(x).bits);
      }
      return result;
    };
    query = operand(c.B * c.H * c.L);
    key = operand(c.B * c.G * c.S);
    key_numbers = numbers(c.B * c.H * c.S * 4);
    for (size_t i = 0; i < key_numbers.size(); i += 4) {
      key_numbers[i] = i % 8 == 0 ? 0.5f : 2.0f;
      key_numbers[i + 2] = 1e-8f * key_numbers[i + 1];  // the rest beyond float32
    }
    if (c.masked && c.S > 3) key_numbers[3 * 4 + 1] = -INFINITY;  // one head's key 3
    rows.resize(c.B * c.H * c.L * cuda::kRowNumbers);
    for (size_t i = 0; i < rows.size(); i += cuda::kRowNumbers) rows[i] = 0.2f;
    mask_heads = c.masked_by_head ? c.H : 1;
    mask.resize(c.B * mask_heads * c.L * c.S);
    for (uint8_t& seen : mask) seen = generator() % 4 != 0;
    for (int64_t j = 0; j < c.S && c.L > 5; ++j) mask[5 * c.S + j] = 0;  // a row that sees nothing
    if (c.has_offsets) offsets = numbers(c.B * c.H * c.L * c.S);
    for (size_t i = 0; i < offsets.size(); i += 7) offsets[i] = i % 3 == 0 ? -INFINITY : -3e38f;
    query_padding.resize(c.B * c.L);
    key_padding.resize(c.B * c.S);
    if (c.padding) query_padding[c.L - 1] = key_padding[c.S - 1] = 1;
    const int64_t blocks = (c.S + kFactorBlock - 1) / kFactorBlock;
    for (std::vector<float>& of_variant : factors) {
      of_variant = numbers(c.B * blocks * triangle(c.H) * kFactorBlock);
    }
    units.resize(c.variants, std::vector<float>(c.B * c.S));
    norms.resize(c.variants, std::vector<float>(c.B * c.L * c.S, -1.0f));
    own.assign(c.B * c.H * c.L, 0.0f);
    values = numbers(c.B * c.G * c.S * c.d_v);
    broken.assign(c.B * c.G * c.S, 0.0f);
    sums.assign(c.B * c.H * c.L * c.d_v, -1.0f);
  }

  double operand(const std::vector<uint16_t>& from, int64_t at) const {
    return c.is_bfloat16 ? to_float(BFloat16{from[at]}) : to_float(Half{from[at]});
  }
  float factor(int variant, int64_t b, int64_t j, int64_t entry) const {
    const int64_t blocks = (c.S + kFactorBlock - 1) / kFactorBlock;
    return factors[variant]
                  [((b * blocks + j / kFactorBlock) * triangle(c.H) + entry) * kFactorBlock +
                   j % kFactorBlock];
  }

  void run() {
    const auto& kernels = cuda::streamed_kernels;
    const int64_t words = (c.S + cuda::kMaskKeys - 1) / cuda::kMaskKeys;
    bits.resize(c.B * mask_heads * c.L * words);
    const int64_t pairs = c.L * c.S;
    const cuda::MaskParams mask_params{
        c.B,         c.L,
        c.S,         Array{mask.data(), ElementType::kBool, {mask_heads * pairs, c.S, 1, pairs}},
        bits.data(), mask_heads};
    ASSERT_STREQ(kernels.mask_words(mask_params, nullptr), nullptr);
    params.B = c.B;
    params.H = c.H;
    params.G = c.G;
    params.L = c.L;
    params.S = c.S;
    params.width = c.width;
    const ElementType type = c.is_bfloat16 ? ElementType::kBFloat16 : ElementType::kFloat16;
    const int64_t L = c.L * c.width, S = c.S * c.width;
    params.query = Array{query.data(), type, {c.H * L, L, c.width, 1}};
    params.key = Array{key.data(), type, {c.G * S, S, c.width, 1}};
    params.key_numbers = key_numbers.data();
    params.rows = rows.data();
    params.is_implicit = c.is_implicit;
    params.eps = 1e-3f;
    params.is_causal = c.is_causal;
    if (c.masked) params.mask = bits.data();
    params.mask_heads = mask_heads;
    if (c.has_offsets) {
      params.offsets = Array{offsets.data(), ElementType::kFloat32, {c.H * pairs, pairs, c.S, 1}};
    }
    if (c.is_implicit) params.farthest_offset = 100;
    params.is_split = c.is_split;
    params.variants = c.variants;
    for (int variant = 0; variant < c.variants; ++variant) {
      fragments[variant].resize(c.B * c.S * cuda::fragment_words(c.H, c.is_split));
      const cuda::FragmentParams fragment_params{c.B,
                                                 c.H,
                                                 c.S,
                                                 c.is_split,
                                                 factors[variant].data(),
                                                 fragments[variant].data(),
                                                 units[variant].data()};
      ASSERT_STREQ(kernels.factor_fragments(fragment_params, nullptr), nullptr);
      params.fragments[variant] = fragments[variant].data();
      params.units[variant] = units[variant].data();
      params.norms[variant] =
          Array{norms[variant].data(), ElementType::kFloat32, {c.L * c.S, c.S, 1, 0}};
    }
    params.query_padding = Array{query_padding.data(), ElementType::kBool, {c.L, 1, 0, 0}};
    params.key_padding = Array{key_padding.data(), ElementType::kBool, {c.S, 1, 0, 0}};
    params.own = own.data();
    params.diagonal = c.diagonal;
    ASSERT_STREQ(kernels.row_sums(params, nullptr), nullptr);
    ASSERT_STREQ(kernels.pair_norms(params, nullptr), nullptr);
    cuda::WeighedValueParams weighed{params};
    std::vector<float> own_again(own.size(), 0.0f);
    weighed.own = own_again.data();
    weighed.value_heads = c.G;
    weighed.d_v = c.d_v;
    const int64_t of_head = c.S * c.d_v;
    weighed.values =
        Array{values.data(), ElementType::kFloat32, {c.G * of_head, of_head, c.d_v, 1}};
    weighed.broken = broken.data();
    weighed.sums = sums.data();
    ASSERT_STREQ(kernels.weighed_values(weighed, nullptr), nullptr);
    for (size_t row = 0; row < own.size(); ++row) {
      EXPECT_TRUE(own_again[row] == own[row] || std::isnan(own[row]));
    }
  }

  double offset(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (!c.has_offsets) return 0;
    const double given = offsets[((b * c.H + h) * c.L + i) * c.S + j];
    return c.is_implicit && given < -100 && given != -kInfinity ? -100 : given;
  }

  bool sees(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (c.is_causal && j > i) return false;
    if (key_numbers[((b * c.H + h) * c.S + j) * 4 + 1] == -INFINITY) return false;
    if (c.has_offsets && offset(b, h, i, j) == -kInfinity) return false;
    const int64_t of_mask = b * mask_heads + (c.masked_by_head ? h : 0);
    return !c.masked || mask[(of_mask * c.L + i) * c.S + j] != 0;
  }

  // Weights of a head's query, by their definition.
  std::vector<double> weights(int64_t b, int64_t h, int64_t i) const {
    std::vector<double> magnitude(c.S), logit(c.S, -kInfinity);
    double largest = -kInfinity, sum = 0;
    for (int64_t j = 0; j < c.S; ++j) {
      if (!sees(b, h, i, j)) continue;
      double x = 0;
      for (int64_t column = 0; column < c.width; ++column) {
        x += operand(query, ((b * c.H + h) * c.L + i) * c.width + column) *
             operand(key, ((b * c.G + h / (c.H / c.G)) * c.S + j) * c.width + column);
      }
      const int64_t token = (b * c.H + h) * c.S + j;
      x *= double{0.2f} * key_numbers[token * 4];
      magnitude[j] = c.is_implicit ? x * x + double{1e-3f} : 1;
      logit[j] = key_numbers[token * 4 + 1] + double{key_numbers[token * 4 + 2]} +
                 (c.is_implicit ? 0 : x) + offset(b, h, i, j);
      largest = std::max(largest, logit[j]);
    }
    std::vector<double> result(c.S);
    for (int64_t j = 0; j < c.S; ++j) {
      if (logit[j] == -kInfinity) continue;
      sum += result[j] = magnitude[j] * std::exp(logit[j] - largest);
    }
    for (double& weight : result) weight = sum > 0 ? weight / sum : 0;
    return result;
  }

  Case c;
  std::vector<uint16_t> query, key;
  int64_t mask_heads = 1;
  std::vector<float> key_numbers, rows, own, offsets, values, broken, sums;
  std::vector<uint8_t> mask, query_padding, key_padding;
  std::vector<std::vector<float>> factors, units, norms;
  std::vector<std::vector<uint32_t>> fragments;
  std::vector<uint32_t> bits;
  cuda::StreamedParams params;  // parameters of the call that ran
};

}  // namespace
}  // namespace ikattn
