// Argument checks of the attention operators: every message names the argument, what was expected
// and what was given.
#include "support/checks.h"

#include <ATen/ATen.h>

#include <cmath>

#include "attention/operator/arguments.h"
#include "support/philox.h"

namespace ikattn {
namespace {

void check_main(const char* function, const char* name, const at::Tensor& tensor,
                const at::Tensor& query, const char* shape) {
  TORCH_CHECK(tensor.dim() == 4, function, ": ", name, " must have shape ", shape, ", got ",
              tensor.sizes());
  TORCH_CHECK_TYPE(tensor.scalar_type() == query.scalar_type(), function, ": ", name,
                   " must have the dtype of query, ", query.scalar_type(), ", got ",
                   tensor.scalar_type());
  TORCH_CHECK(tensor.size(-1) <= int64_t{1} << 32, function, ": ", name,
              " must have a head size of at most 2^32, got ", tensor.sizes());
}

void check_key_bias(const char* function, const at::Tensor& bias, const at::Tensor& query,
                    int64_t B, int64_t H, int64_t G, int64_t S) {
  TORCH_CHECK_TYPE(bias.is_floating_point(), function, ": key_bias must be floating point, got ",
                   bias.scalar_type());
  check_side_type(function, "key_bias", bias, "query", query.scalar_type());
  TORCH_CHECK(broadcasts_to(bias.sizes(), {B, H, S}) || broadcasts_to(bias.sizes(), {B, G, S}),
              function, ": key_bias must broadcast to [B, H, S] = [", B, ", ", H, ", ", S,
              G == H ? "]" : "] (or the heads of key)", ", got ", bias.sizes());
}

void check_mask(const char* function, const at::Tensor& mask, const at::Tensor& query, int64_t B,
                int64_t H, int64_t L, int64_t S) {
  TORCH_CHECK_TYPE(mask.scalar_type() == at::kBool || mask.is_floating_point(), function,
                   ": attn_mask must be bool (true = may attend) or floating point (added to the "
                   "logit), got ",
                   mask.scalar_type());
  if (mask.scalar_type() != at::kBool) {
    check_side_type(function, "attn_mask", mask, "query", query.scalar_type());
  }
  TORCH_CHECK(broadcasts_to(mask.sizes(), {B, H, L, S}), function,
              ": attn_mask must broadcast to [B, H, L, S] = [", B, ", ", H, ", ", L, ", ", S,
              "], got ", mask.sizes());
}

void check_eps(const char* function, double eps) {
  TORCH_CHECK_VALUE(std::isfinite(eps) && eps > 0, function,
                    ": eps must be finite and positive, got ", eps);
}

// Checks that gradients are asked for only of inputs that are present.
template <size_t kCount>
void check_wanted(const char* function, const std::array<bool, kCount>& wanted,
                  const std::array<bool, kCount>& present) {
  for (size_t i = 0; i < kCount; ++i) {
    TORCH_CHECK(!wanted[i] || present[i], function, ": wanted[", i,
                "] must be false, for that input is absent or not floating point");
  }
}

bool is_mask_added(const AttentionOptions& options) {
  return is_present(options.attn_mask) && options.attn_mask->is_floating_point();
}

}  // namespace

void check_side_type(const char* function, const char* name, const at::Tensor& tensor,
                     const char* of, at::ScalarType wanted) {
  const at::ScalarType type = tensor.scalar_type();
  TORCH_CHECK_TYPE(type == wanted || type == at::kFloat, function, ": ", name,
                   " must have the dtype of ", of, ", ", wanted,
                   wanted == at::kFloat ? "" : ", or Float", ", got ", type);
}

void check_frequencies(const char* function, const char* of, const at::Tensor& w1,
                       const std::optional<at::Tensor>& w2, at::ScalarType type, int64_t B,
                       int64_t H, int64_t G, int64_t d) {
  check_side_type(function, "w1", w1, of, type);
  TORCH_CHECK(w1.dim() == 3 || w1.dim() == 4, function,
              ": w1 must have shape [H, d, M] or [B, H, d, M], got ", w1.sizes());
  TORCH_CHECK(w1.size(-2) == d, function, ": w1 must have shape [H, d, M] with d = ", d,
              " (the head size of ", of, "), got ", w1.sizes());
  const int64_t heads = w1.size(-3);
  if (H == G) {
    TORCH_CHECK(heads == H, function, ": w1 must have shape [H, d, M] with H = ", H,
                " (the heads of ", of, "), got ", w1.sizes());
  } else {
    TORCH_CHECK(heads == H || heads == G, function, ": w1 must have ", H,
                " heads (those of query) or ", G, " (those of key), got ", w1.sizes());
  }
  TORCH_CHECK(w1.dim() == 3 || w1.size(0) == B || w1.size(0) == 1, function,
              ": the leading axis of w1 must be the batch size ", B, ", got ", w1.sizes());
  // Sizes of the memory that a token needs stay within 64 bits up to this limit.
  TORCH_CHECK(w1.size(-1) >= 1 && w1.size(-1) <= int64_t{1} << 20, function,
              ": w1 must hold from 1 to 2^20 frequencies, got ", w1.sizes());
  if (!is_present(w2)) return;
  TORCH_CHECK_TYPE(w2->scalar_type() == w1.scalar_type(), function,
                   ": w2 must have the dtype of w1, ", w1.scalar_type(), ", got ",
                   w2->scalar_type());
  TORCH_CHECK(w2->sizes() == w1.sizes(), function, ": w2 must have the shape of w1, ", w1.sizes(),
              ", got ", w2->sizes());
}

void check_numbers(const char* function, const std::optional<double>& p, double eps,
                   const std::optional<double>& magnitude_scale) {
  TORCH_CHECK_VALUE(!p || (*p >= 1 && std::isfinite(*p)), function,
                    ": p must be a finite number >= 1 or None, got ", *p);
  check_eps(function, eps);
  TORCH_CHECK_VALUE(!magnitude_scale || std::isfinite(*magnitude_scale), function,
                    ": magnitude_scale must be finite, got ", *magnitude_scale);
}

bool check_placement(const char* function, const at::Tensor& query, const at::Tensor& key,
                     const at::Tensor& value, const at::Tensor& w1,
                     const std::optional<at::Tensor>& w2, const AttentionOptions& options) {
  return check_placement(function, "query", query,
                         {{"key", &key},
                          {"value", &value},
                          {"w1", &w1},
                          {"w2", address(w2)},
                          {"key_bias", address(options.key_bias)},
                          {"attn_mask", address(options.attn_mask)},
                          {"dropout_seed", address(options.dropout_seed)}});
}

void check_dropout(const char* function, double dropout_p,
                   const std::optional<at::Tensor>& dropout_seed) {
  TORCH_CHECK_VALUE(dropout_p >= 0 && dropout_p < 1, function,
                    ": dropout_p must be in [0, 1), got ", dropout_p);
  if (dropout_p == 0) return;
  TORCH_CHECK_VALUE(is_present(dropout_seed), function,
                    ": dropout_seed must be given with dropout_p > 0 "
                    "(ikattn.draw_dropout_seed makes one)");
  if (has_symbols({&*dropout_seed})) return;
  const bool is_known =
      dropout_seed->numel() == kDropoutNumbers || dropout_seed->numel() == kPlacedDropoutNumbers;
  TORCH_CHECK(dropout_seed->scalar_type() == at::kLong && is_known && dropout_seed->dim() == 1,
              function, ": dropout_seed must be an int64 tensor of shape [2], or [7] of a part of ",
              "a larger call, got ", dropout_seed->scalar_type(), " ", dropout_seed->sizes());
}

AttentionSizes check_attention(const char* function, const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value, const at::Tensor& w1,
                               const std::optional<at::Tensor>& w2,
                               const AttentionOptions& options) {
  check_placement(function, query, key, value, w1, w2, options);
  TORCH_CHECK_TYPE(is_supported_float(query.scalar_type()), function,
                   ": query must be float64, float32, bfloat16 or float16, got ",
                   query.scalar_type());
  check_main(function, "query", query, query, "[B, H, L, d]");
  check_main(function, "key", key, query, "[B, G, S, d]");
  const int64_t B = query.size(0), H = query.size(1), L = query.size(2), d = query.size(3);
  const int64_t G = key.size(1), S = key.size(2);
  TORCH_CHECK(H >= 1 && d >= 1, function,
              ": query must have at least one head and a head size of "
              "at least 1, got ",
              query.sizes());
  TORCH_CHECK(key.size(0) == B, function, ": key must have the batch size of query, ", B, ", got ",
              key.sizes());
  TORCH_CHECK(key.size(3) == d, function, ": key must have the head size of query, ", d, ", got ",
              key.sizes());
  if (options.enable_gqa) {
    TORCH_CHECK(G >= 1 && H % G == 0, function, ": the heads of key must divide those of query, ",
                H, ", got ", G);
  } else {
    TORCH_CHECK(G == H, function, ": key must have the heads of query, ", H, ", got ", G,
                " (enable_gqa=True allows fewer)");
  }
  if (value.defined()) {
    check_main(function, "value", value, query, "[B, G, S, d_v]");
    TORCH_CHECK(value.size(0) == B && value.size(1) == G && value.size(2) == S, function,
                ": value must have shape [B, G, S, d_v] = [", B, ", ", G, ", ", S, ", d_v], got ",
                value.sizes());
  }
  check_frequencies(function, "query", w1, w2, query.scalar_type(), B, H, G, d);
  if (is_present(options.key_bias)) check_key_bias(function, *options.key_bias, query, B, H, G, S);
  if (is_present(options.attn_mask)) check_mask(function, *options.attn_mask, query, B, H, L, S);
  check_numbers(function, options.p, options.eps, options.magnitude_scale);
  check_dropout(function, options.dropout_p, options.dropout_seed);
  return {B,
          H,
          G,
          L,
          S,
          d,
          value.defined() ? value.size(3) : 0,
          w1.size(-1),
          w1.size(-3),
          w1.dim() == 4 ? w1.size(0) : 1};
}

void check_attention_call(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const at::Tensor& w1, const std::optional<at::Tensor>& w2,
                          const AttentionOptions& options) {
  const char* function = value.defined() ? "implicit_kernel_attention" : "implicit_kernel_weights";
  if (has_symbols({&query, &key, &value, &w1, address(w2), address(options.key_bias),
                   address(options.attn_mask)})) {
    check_placement(function, query, key, value, w1, w2, options);
  } else {
    check_attention(function, query, key, value, w1, w2, options);
  }
}

AttentionSizes check_attention_backward(const at::Tensor& grad_output, const at::Tensor& query,
                                        const at::Tensor& key, const at::Tensor& value,
                                        const at::Tensor& w1, const std::optional<at::Tensor>& w2,
                                        const at::Tensor& output, const at::Tensor& log_normalizer,
                                        const AttentionOptions& options,
                                        const std::array<bool, kAttentionGradients>& wanted) {
  const char* function = "implicit_kernel_attention_backward";
  const AttentionSizes sizes = check_attention(function, query, key, value, w1, w2, options);
  const std::array<int64_t, 4> output_sizes = {sizes.B, sizes.H, sizes.L, sizes.d_v};
  const at::ScalarType type = query.scalar_type();
  check_like(function, "output", output, output_sizes, type, query.device());
  check_like(function, "log_normalizer", log_normalizer, {sizes.B, sizes.H, sizes.L}, at::kDouble,
             query.device());
  check_like(function, "grad_output", grad_output, output_sizes, type, query.device());
  check_wanted(function, wanted,
               {true, true, true, true, is_present(w2), is_present(options.key_bias),
                is_mask_added(options)});
  return sizes;
}

AttentionSizes check_weights_backward(const at::Tensor& grad_weights, const at::Tensor& query,
                                      const at::Tensor& key, const at::Tensor& w1,
                                      const std::optional<at::Tensor>& w2,
                                      const AttentionOptions& options, bool average_heads,
                                      const std::array<bool, kWeightsGradients>& wanted) {
  const char* function = "implicit_kernel_weights_backward";
  const AttentionSizes sizes = check_attention(function, query, key, at::Tensor(), w1, w2, options);
  std::vector<int64_t> weights_sizes = {sizes.B, sizes.L, sizes.S};
  if (!average_heads) weights_sizes.insert(weights_sizes.begin() + 1, sizes.H);
  check_like(function, "grad_weights", grad_weights, weights_sizes, query.scalar_type(),
             query.device());
  check_wanted(
      function, wanted,
      {true, true, true, is_present(w2), is_present(options.key_bias), is_mask_added(options)});
  return sizes;
}

FeatureSizes check_features(const at::Tensor& x, const at::Tensor& w1,
                            const std::optional<at::Tensor>& w2) {
  const char* function = "spectral_features";
  if (!check_placement(function, "x", x, {{"w1", &w1}, {"w2", address(w2)}})) return {};
  TORCH_CHECK_TYPE(is_supported_float(x.scalar_type()), function,
                   ": x must be float64, float32, bfloat16 or float16, got ", x.scalar_type());
  check_main(function, "x", x, x, "[B, H, L, d]");
  const int64_t B = x.size(0), H = x.size(1), d = x.size(3);
  TORCH_CHECK(H >= 1 && d >= 1, function,
              ": x must have at least one head and a head size of at least 1, got ", x.sizes());
  check_frequencies(function, "x", w1, w2, x.scalar_type(), B, H, H, d);
  return {B, H, x.size(2), d, w1.size(-1), w1.dim() == 4 ? w1.size(0) : 1};
}

FeatureSizes check_features_backward(const at::Tensor& grad_features, const at::Tensor& x,
                                     const at::Tensor& w1, const std::optional<at::Tensor>& w2,
                                     const std::array<bool, 3>& wanted) {
  const char* function = "spectral_features_backward";
  const FeatureSizes sizes = check_features(x, w1, w2);
  check_like(function, "grad_features", grad_features, {sizes.B, sizes.H, sizes.N, 2 * sizes.M},
             x.scalar_type(), x.device());
  check_wanted(function, wanted, {true, true, is_present(w2)});
  return sizes;
}

bool check_from_features_placement(const at::Tensor& query_features, const at::Tensor& key_features,
                                   const at::Tensor& logits, const at::Tensor& value) {
  return check_placement("attention_from_features", "query_features", query_features,
                         {{"key_features", &key_features}, {"logits", &logits}, {"value", &value}});
}

FromFeaturesSizes check_from_features(const at::Tensor& query_features,
                                      const at::Tensor& key_features, const at::Tensor& logits,
                                      const at::Tensor& value, double eps) {
  const char* function = "attention_from_features";
  check_from_features_placement(query_features, key_features, logits, value);
  const at::ScalarType type = query_features.scalar_type();
  TORCH_CHECK_TYPE(type == at::kFloat || type == at::kDouble, function,
                   ": query_features must be float32 or float64, got ", type);
  check_main(function, "query_features", query_features, query_features, "[B, H, L, F]");
  const int64_t B = query_features.size(0), H = query_features.size(1), L = query_features.size(2);
  const int64_t F = query_features.size(3);
  TORCH_CHECK(H >= 1 && F >= 1, function,
              ": query_features must have at least one head and one feature, got ",
              query_features.sizes());
  const auto check_type = [&](const char* name, const at::Tensor& tensor) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == type, function, ": ", name,
                     " must have the dtype of query_features, ", type, ", got ",
                     tensor.scalar_type());
  };
  check_type("key_features", key_features);
  check_type("logits", logits);
  const int64_t S = key_features.dim() == 4 ? key_features.size(2) : 0;
  const auto check_keys = [&](const char* name, const at::Tensor& tensor, const char* shape) {
    TORCH_CHECK(tensor.dim() == 4 && tensor.size(0) == B && tensor.size(1) >= 1 &&
                    H % tensor.size(1) == 0 && tensor.size(2) == S,
                function, ": ", name, " must have shape ", shape, " with B = ", B,
                ", heads that divide H = ", H, " and S = ", S, ", got ", tensor.sizes());
  };
  check_keys("key_features", key_features, "[B, K, S, F]");
  TORCH_CHECK(key_features.size(3) == F, function,
              ": key_features must have the features of query_features, ", F, ", got ",
              key_features.sizes());
  check_keys("value", value, "[B, G, S, d_v]");
  TORCH_CHECK_TYPE(is_supported_float(value.scalar_type()), function,
                   ": value must be float64, float32, bfloat16 or float16, got ",
                   value.scalar_type());
  TORCH_CHECK(broadcasts_to(logits.sizes(), {B, H, L, S}), function,
              ": logits must broadcast to [B, H, L, S] = [", B, ", ", H, ", ", L, ", ", S,
              "], got ", logits.sizes());
  check_eps(function, eps);
  return {B, H, L, S, F, value.size(3), key_features.size(1), value.size(1)};
}

}  // namespace ikattn
