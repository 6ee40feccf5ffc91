// The operators as functions of tensors, from a Device that computes params:
//   forward(params, query, work), backward(...), weights(...), features(params, backward, x, work),
//   from_features(params, query_features, work), keep_mask(params, keep)
// where `work` is the number of multiply-adds.
#pragma once

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>

#include "attention/calls/determinism.h"
#include "attention/calls/linear_time_setting.h"
#include "attention/calls/params.h"
#include "attention/operator/arguments.h"
#include "attention/operator/key_offsets.h"
#include "support/glue.h"
#include "support/memory.h"
#include "support/philox.h"

namespace ikattn {
namespace {

// Tells how torch may round the float32 operands of matrix products. It reads the newer of torch's
// two settings, which the older one sets, too; reading the older raises an error where only the
// newer was used.
inline bool torch_allows(at::Float32Backend backend, at::Float32Precision precision) {
  return at::globalContext().float32Precision(backend, at::Float32Op::MATMUL) == precision;
}
inline bool torch_allows_tf32() {
  return torch_allows(at::Float32Backend::CUDA, at::Float32Precision::TF32);
}
// Tells whether torch.set_float32_matmul_precision("medium") allows bfloat16 on the CPU.
inline bool torch_allows_bfloat16() {
  return torch_allows(at::Float32Backend::MKLDNN, at::Float32Precision::BF16);
}

inline double pair_work(const AttentionSizes& sizes) {
  return static_cast<double>(sizes.B * sizes.H) * static_cast<double>(sizes.L * sizes.S) *
             static_cast<double>(2 * sizes.M + sizes.d_v) +
         static_cast<double>(sizes.B * sizes.H) * static_cast<double>(sizes.L + sizes.S) *
             static_cast<double>(2 * sizes.M * sizes.d);
}

inline Array frequencies(const at::Tensor& w, const AttentionSizes& sizes) {
  return array_of(w, {sizes.frequency_batches, w.size(-3), w.size(-2), w.size(-1)});
}

inline void set_sizes(AttentionParams& params, const AttentionSizes& sizes) {
  params.B = sizes.B;
  params.H = sizes.H;
  params.G = sizes.G;
  params.L = sizes.L;
  params.S = sizes.S;
  params.d = sizes.d;
  params.d_v = sizes.d_v;
  params.M = sizes.M;
  params.frequency_heads = sizes.frequency_heads;
  params.frequency_batches = sizes.frequency_batches;
}

// Returns the state of a seed, which is contiguous and outlives it. Numbers on a GPU are not
// checked.
inline DropoutState dropout_state(const at::Tensor& seed, int64_t H) {
  const int64_t* numbers = seed.const_data_ptr<int64_t>();
  const bool is_placed = seed.numel() == kPlacedDropoutNumbers;
  if (is_placed && seed.is_cpu()) {
    TORCH_CHECK_VALUE(
        numbers[2] >= 0 && numbers[3] >= 0 && numbers[4] - numbers[3] >= H && numbers[5] >= 0 &&
            numbers[5] % 16 == 0 && numbers[6] >= 0 && numbers[6] % 16 == 0,
        "dropout_seed: of seven numbers the last five must be batch item, head, heads "
        ">= head + ",
        H,
        ", query and key, not negative, the last two multiples of "
        "16, got ",
        at::IntArrayRef(numbers + 2, 5));
  }
  return {numbers, is_placed, static_cast<uint32_t>(H)};
}

// The tensors that a call's params point to beside its arguments.
struct HeldTensors {
  at::Tensor bias, dropout_seed, log_normalizer;
};

// Sets everything but value, output and gradients.
inline void set_common(AttentionParams& params, const AttentionSizes& sizes,
                       const at::Tensor& query, const at::Tensor& key, const at::Tensor& w1,
                       const std::optional<at::Tensor>& w2, const AttentionOptions& options,
                       HeldTensors& held) {
  set_sizes(params, sizes);
  set_offsets(params, sizes, options, held.bias);
  params.query = array_of(query);
  params.key = array_of(key);
  params.w1 = frequencies(w1, sizes);
  if (is_present(w2)) params.w2 = frequencies(*w2, sizes);
  params.p = options.p.value_or(0.0);
  params.magnitude_scale = magnitude_scale_or_default(options.magnitude_scale, sizes.d);
  params.eps = options.eps;
  params.is_causal = options.is_causal;
  const at::ScalarType type = query.scalar_type();
  params.allow_tf32 = torch_allows_tf32();
  params.allow_bfloat16 = (type == at::kFloat || type == at::kBFloat16) && torch_allows_bfloat16();
  params.linear_time = linear_time_setting();
  params.batch_invariant = is_batch_invariant();
  if (options.dropout_p > 0) {
    params.dropout_threshold = dropout_threshold(options.dropout_p);
    held.dropout_seed = options.dropout_seed->contiguous();
    params.dropout = dropout_state(held.dropout_seed, sizes.H);
  }
}

// Leaves out the keys after the last query of a causal call, which no query sees.
inline void leave_out_unseen_keys(AttentionParams& params) {
  if (params.is_causal) params.S = std::min(params.S, params.L);
}

// Returns [B, H, L, d_v] laid out as [B, L, H, d_v], as the projection after it reads it.
inline at::Tensor empty_output(const at::Tensor& query, const AttentionSizes& sizes) {
  const int64_t head = std::max<int64_t>(sizes.d_v, 1), token = sizes.H * head;
  return at::empty_strided({sizes.B, sizes.H, sizes.L, sizes.d_v},
                           {std::max<int64_t>(sizes.L, 1) * token, head, token, 1},
                           query.options());
}

inline at::Tensor not_wanted(const at::Tensor& like) { return at::empty({0}, like.options()); }

// Sums the gradient [B, key heads, ...] over the query heads of each group where key heads are
// query heads.
inline at::Tensor sum_groups(const at::Tensor& gradient, int64_t heads) {
  if (gradient.size(1) == heads) return gradient;
  return gradient.unflatten(1, {heads, -1}).sum(2);
}

// Returns the tensor where a kernel writes the gradient of key or value: the result, or one with a
// gradient per query head, to be summed.
inline at::Tensor key_side_gradient(const at::Tensor& tensor, int64_t key_heads) {
  if (tensor.size(1) == key_heads) return at::empty_like(tensor);
  return at::empty({tensor.size(0), key_heads, tensor.size(2), tensor.size(3)},
                   tensor.options().dtype(compute_type(tensor.scalar_type())));
}

inline at::Tensor finish_key_side(const at::Tensor& gradient, const at::Tensor& like) {
  if (gradient.size(1) == like.size(1)) return gradient;
  return at::empty_like(like).copy_(sum_groups(gradient, like.size(1)));
}

// Sums the gradient of logits to the shape and type of what was broadcast and added to them. A
// number for all keys of a row changes no weight: its gradient is 0, where rounding leaves others.
inline at::Tensor finish_broadcast(const at::Tensor& gradient, const at::Tensor& argument,
                                   int64_t keys) {
  at::Tensor sum = at::sum_to(gradient, argument.sizes());
  const bool one_for_all_keys = keys > 1 && (argument.dim() == 0 || argument.size(-1) == 1);
  if (one_for_all_keys) sum = sum.masked_fill(sum.isfinite(), 0);
  return sum.to(argument.scalar_type()).contiguous();
}

// Returns zeros for the gradient of a mask, which the kernel sums over broadcast axes. A mask with
// one value per row has a gradient for each head and row, for several threads may add to the same
// row. Sums over tokens have so many terms that they are in float64.
inline at::Tensor mask_gradient(const at::Tensor& mask, const AttentionSizes& sizes,
                                at::ScalarType type) {
  at::Tensor shape = mask;
  while (shape.dim() < 4) shape = shape.unsqueeze(0);
  std::vector<int64_t> axes = shape.sizes().vec();
  if ((axes[2] == 1 && sizes.L > 1) || (axes[3] == 1 && sizes.S > 1)) type = at::kDouble;
  if (axes[3] == 1) {
    axes[1] = sizes.H;
    axes[2] = sizes.L;
  }
  return at::zeros(axes, mask.options().dtype(type));
}

inline FeaturesParams features_params(const FeatureSizes& sizes, const at::Tensor& x,
                                      const at::Tensor& w1, const std::optional<at::Tensor>& w2,
                                      const at::Tensor& features) {
  FeaturesParams params;
  params.B = sizes.B;
  params.H = sizes.H;
  params.N = sizes.N;
  params.d = sizes.d;
  params.M = sizes.M;
  params.frequency_batches = sizes.frequency_batches;
  params.x = array_of(x);
  const std::vector<int64_t> frequency_sizes = {sizes.frequency_batches, sizes.H, sizes.d, sizes.M};
  params.w1 = array_of(w1, frequency_sizes);
  if (is_present(w2)) params.w2 = array_of(*w2, frequency_sizes);
  params.features = array_of(features);
  return params;
}

inline double feature_work(const FeatureSizes& sizes) {
  return static_cast<double>(sizes.B * sizes.H * sizes.N) *
         static_cast<double>(sizes.d * sizes.M * 2);
}

template <typename Device>
struct AttentionOperators {
  static std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& query,
                                                      const at::Tensor& key,
                                                      const at::Tensor& value, const at::Tensor& w1,
                                                      const std::optional<at::Tensor>& w2,
                                                      IKATTN_OPTION_PARAMETERS) {
    const AttentionOptions options{IKATTN_OPTION_VALUES};
    const AttentionSizes sizes =
        check_attention("implicit_kernel_attention", query, key, value, w1, w2, options);
    // The normalizer is float64: it stands in the backward's exponents, where float32 would cost
    // |log Z| 6e-8 of every weight.
    const auto [output, log_normalizer] =
        with_memory_for("implicit_kernel_attention", "the output and its normalizer", [&] {
          return std::pair{
              empty_output(query, sizes),
              at::empty({sizes.B, sizes.H, sizes.L}, query.options().dtype(at::kDouble))};
        });
    AttentionParams params;
    HeldTensors held;
    set_common(params, sizes, query, key, w1, w2, options, held);
    leave_out_unseen_keys(params);
    params.value = array_of(value);
    params.output = array_of(output);
    params.log_normalizer = array_of(log_normalizer);
    Device::forward(params, query, pair_work(sizes));
    return {output, log_normalizer};
  }

  static AttentionGradients attention_backward(
      const at::Tensor& grad_output, const at::Tensor& query, const at::Tensor& key,
      const at::Tensor& value, const at::Tensor& w1, const std::optional<at::Tensor>& w2,
      const at::Tensor& output, const at::Tensor& log_normalizer, IKATTN_OPTION_PARAMETERS,
      std::array<bool, kAttentionGradients> wanted) {
    const AttentionOptions options{IKATTN_OPTION_VALUES};
    const char* function = "implicit_kernel_attention_backward";
    const AttentionSizes sizes = check_attention_backward(grad_output, query, key, value, w1, w2,
                                                          output, log_normalizer, options, wanted);
    AttentionBackwardParams params;
    HeldTensors held;
    set_common(params, sizes, query, key, w1, w2, options, held);
    leave_out_unseen_keys(params);
    params.value = array_of(value);
    params.output = array_of(output);
    held.log_normalizer = log_normalizer.contiguous();
    params.log_normalizer = array_of(held.log_normalizer);
    params.grad_output = array_of(grad_output);
    return run_backward(function, params, sizes, query, key, value, w1, options, wanted);
  }

  // Computes the gradients of a call whose other params are set. The gradient of a key mask is that
  // of the keys' logits, like the gradient of key_bias.
  static AttentionGradients run_backward(const char* function, AttentionBackwardParams& params,
                                         const AttentionSizes& sizes, const at::Tensor& query,
                                         const at::Tensor& key, const at::Tensor& value,
                                         const at::Tensor& w1, const AttentionOptions& options,
                                         std::array<bool, kAttentionGradients> wanted) {
    const at::ScalarType type = compute_type(query.scalar_type());
    const auto compute = query.options().dtype(type);
    const auto kept_in = [](Array& array, const at::Tensor& gradient) {
      array = array_of(gradient);
      return gradient;
    };
    const std::vector<int64_t> frequency_sizes = {sizes.frequency_batches, sizes.frequency_heads,
                                                  sizes.d, sizes.M};
    const bool wants_key_mask = wanted[6] && !params.mask;
    at::Tensor grad_query, grad_key, grad_value, grad_w1, grad_w2, grad_logits, grad_mask;
    with_memory_for(function, "the gradients", [&] {
      if (wanted[0]) grad_query = kept_in(params.grad_query, at::empty_like(query));
      if (wanted[1]) {
        grad_key = kept_in(params.grad_key, key_side_gradient(key, params.key_heads));
      }
      if (wanted[2]) {
        grad_value = kept_in(params.grad_value, key_side_gradient(value, params.key_heads));
      }
      if (wanted[3]) grad_w1 = kept_in(params.grad_w1, at::zeros(frequency_sizes, compute));
      if (wanted[4]) grad_w2 = kept_in(params.grad_w2, at::zeros(frequency_sizes, compute));
      if (wanted[5] || wants_key_mask) {
        grad_logits =
            kept_in(params.grad_key_bias, at::empty({sizes.B, params.key_heads, sizes.S}, compute));
      }
      if (wanted[6] && !wants_key_mask) {
        grad_mask = mask_gradient(*options.attn_mask, sizes, type);
        params.grad_mask = array_of(grad_mask, {sizes.B, sizes.H, sizes.L, sizes.S});
      }
    });
    if (params.S < sizes.S) {
      for (const at::Tensor& gradient : {grad_key, grad_value, grad_logits}) {
        if (gradient.defined()) gradient.narrow(2, params.S, sizes.S - params.S).zero_();
      }
    }
    Device::backward(params, query, 2.5 * pair_work(sizes));

    const auto none = [&] { return not_wanted(query); };
    at::Tensor grad_bias;
    if (wanted[5]) {
      const int64_t heads = options.key_bias->dim() >= 2 ? options.key_bias->size(-2) : 1;
      grad_bias = heads != 1 ? sum_groups(grad_logits, heads) : grad_logits;
      grad_bias = finish_broadcast(grad_bias, *options.key_bias, sizes.S);
    }
    if (wants_key_mask) grad_mask = grad_logits.unsqueeze(2);
    return {wanted[0] ? grad_query : none(),
            wanted[1] ? finish_key_side(grad_key, key) : none(),
            wanted[2] ? finish_key_side(grad_value, value) : none(),
            wanted[3] ? grad_w1.view(w1.sizes()).to(w1.scalar_type()) : none(),
            wanted[4] ? grad_w2.view(w1.sizes()).to(w1.scalar_type()) : none(),
            wanted[5] ? grad_bias : none(),
            wanted[6] ? finish_broadcast(grad_mask, *options.attn_mask, sizes.S) : none()};
  }

  static at::Tensor weights(const at::Tensor& query, const at::Tensor& key, const at::Tensor& w1,
                            const std::optional<at::Tensor>& w2, IKATTN_OPTION_PARAMETERS,
                            bool average_heads) {
    const AttentionOptions options{IKATTN_OPTION_VALUES};
    const AttentionSizes sizes =
        check_attention("implicit_kernel_weights", query, key, at::Tensor(), w1, w2, options);
    WeightsParams params;
    HeldTensors held;
    set_common(params, sizes, query, key, w1, w2, options, held);
    params.average_heads = average_heads;
    const at::Tensor weights = with_memory_for("implicit_kernel_weights", "the weights", [&] {
      return average_heads ? at::empty({sizes.B, sizes.L, sizes.S}, query.options())
                           : at::empty({sizes.B, sizes.H, sizes.L, sizes.S}, query.options());
    });
    params.weights = array_of(average_heads ? weights.unsqueeze(1) : weights);
    Device::weights(params, query, pair_work(sizes));
    return weights;
  }

  static WeightsGradients weights_backward(const at::Tensor& grad_weights, const at::Tensor& query,
                                           const at::Tensor& key, const at::Tensor& w1,
                                           const std::optional<at::Tensor>& w2,
                                           IKATTN_OPTION_PARAMETERS, bool average_heads,
                                           std::array<bool, kWeightsGradients> wanted) {
    const AttentionOptions options{IKATTN_OPTION_VALUES};
    const char* function = "implicit_kernel_weights_backward";
    const AttentionSizes sizes =
        check_weights_backward(grad_weights, query, key, w1, w2, options, average_heads, wanted);
    const auto compute = query.options().dtype(compute_type(query.scalar_type()));
    const auto [sums, log_normalizer] = with_memory_for(function, "sums of rows", [&] {
      return std::pair{at::empty({sizes.B, sizes.H, sizes.L, 1}, compute),
                       at::empty({sizes.B, sizes.H, sizes.L}, compute.dtype(at::kDouble))};
    });
    AttentionBackwardParams params;
    HeldTensors held;
    set_common(params, sizes, query, key, w1, w2, options, held);
    leave_out_unseen_keys(params);
    params.grad_weights = array_of(average_heads ? grad_weights.unsqueeze(1) : grad_weights,
                                   {sizes.B, sizes.H, sizes.L, sizes.S});
    params.weights_share = average_heads ? 1 / static_cast<double>(sizes.H) : 1;
    params.output = array_of(sums);
    params.log_normalizer = array_of(log_normalizer);
    AttentionParams forward = params;
    forward.d_v = 1;
    Device::forward(forward, query, pair_work(sizes));
    const auto [a, b, c, d, e, f] = wanted;
    const auto [of_query, of_key, of_value, of_w1, of_w2, of_bias, of_mask] = run_backward(
        function, params, sizes, query, key, at::Tensor(), w1, options, {a, b, false, c, d, e, f});
    return {of_query, of_key, of_w1, of_w2, of_bias, of_mask};
  }

  static at::Tensor features(const at::Tensor& x, const at::Tensor& w1,
                             const std::optional<at::Tensor>& w2, bool tokens_first) {
    const FeatureSizes sizes = check_features(x, w1, w2);
    const at::Tensor features = with_memory_for("spectral_features", "the features", [&] {
      const int64_t first = tokens_first ? sizes.N : sizes.H;
      const int64_t second = tokens_first ? sizes.H : sizes.N;
      const at::Tensor made =
          in_large_pages(at::empty({sizes.B, first, second, 2 * sizes.M}, x.options()));
      return tokens_first ? made.transpose(1, 2) : made;
    });
    Device::features(features_params(sizes, x, w1, w2, features), false, x, feature_work(sizes));
    return features;
  }

  static std::tuple<at::Tensor, at::Tensor, at::Tensor> features_backward(
      const at::Tensor& grad_features, const at::Tensor& x, const at::Tensor& w1,
      const std::optional<at::Tensor>& w2, std::array<bool, 3> wanted) {
    const char* function = "spectral_features_backward";
    const FeatureSizes sizes = check_features_backward(grad_features, x, w1, w2, wanted);
    FeaturesParams params = features_params(sizes, x, w1, w2, grad_features);
    const auto compute = x.options().dtype(compute_type(x.scalar_type()));
    const std::vector<int64_t> frequency_sizes = {sizes.frequency_batches, sizes.H, sizes.d,
                                                  sizes.M};
    at::Tensor grad_x = not_wanted(x), grad_w1 = not_wanted(x), grad_w2 = not_wanted(x);
    with_memory_for(function, "the gradients", [&] {
      if (wanted[0]) params.grad_x = array_of(grad_x = at::empty_like(x));
      if (wanted[1]) params.grad_w1 = array_of(grad_w1 = at::zeros(frequency_sizes, compute));
      if (wanted[2]) params.grad_w2 = array_of(grad_w2 = at::zeros(frequency_sizes, compute));
    });
    Device::features(params, true, x, 2.5 * feature_work(sizes));
    if (wanted[1]) grad_w1 = grad_w1.view(w1.sizes()).to(w1.scalar_type());
    if (wanted[2]) grad_w2 = grad_w2.view(w1.sizes()).to(w1.scalar_type());
    return {grad_x, grad_w1, grad_w2};
  }

  static at::Tensor from_features(const at::Tensor& query_features, const at::Tensor& key_features,
                                  const at::Tensor& logits, const at::Tensor& value, double eps) {
    if constexpr (requires { Device::has_decoding(); }) {
      if (!Device::has_decoding()) {
        return composed_from_features(query_features, key_features, logits, value, eps);
      }
    }
    const FromFeaturesSizes sizes =
        check_from_features(query_features, key_features, logits, value, eps);
    const at::Tensor output = with_memory_for("attention_from_features", "the output", [&] {
      return at::empty({sizes.B, sizes.L, sizes.H, sizes.d_v}, value.options());
    });
    FromFeaturesParams params{sizes.B, sizes.H,   sizes.L,         sizes.S,
                              sizes.F, sizes.d_v, sizes.key_heads, sizes.value_heads};
    params.query = array_of(query_features);
    params.key = array_of(key_features);
    params.logits = array_of(logits, {sizes.B, sizes.H, sizes.L, sizes.S});
    params.value = array_of(value);
    params.output = array_of(output.transpose(1, 2));
    params.eps = eps;
    const double work = static_cast<double>(sizes.B * sizes.H) *
                        static_cast<double>(sizes.L * sizes.S) *
                        static_cast<double>(sizes.F + sizes.d_v);
    Device::from_features(params, query_features, work);
    return output.transpose(1, 2);
  }

  static at::Tensor keep_mask(const at::Tensor& dropout_seed, int64_t B, int64_t H, int64_t L,
                              int64_t S, double dropout_p) {
    check_dropout("dropout_keep_mask", dropout_p, dropout_seed);
    double count = 1;  // what strides reach, also beside an axis of 0
    for (const int64_t size : {B, H, L, S})
      count *= static_cast<double>(std::max<int64_t>(1, size));
    TORCH_CHECK(B >= 0 && H >= 0 && L >= 0 && S >= 0,
                "dropout_keep_mask: sizes must not be negative, got ", B, ", ", H, ", ", L, ", ",
                S);
    TORCH_CHECK(count < 0x1p63,
                "dropout_keep_mask: sizes must be those of fewer than 2^63 numbers, got ", B, ", ",
                H, ", ", L, ", ", S);
    const at::Tensor keep = with_memory_for("dropout_keep_mask", "the mask", [&] {
      return at::ones({B, H, L, S}, dropout_seed.options().dtype(at::kBool));
    });
    if (dropout_p == 0 || keep.numel() == 0) return keep;  // an axis may be huge beside one of 0
    const at::Tensor seed = dropout_seed.contiguous();
    AttentionParams params;
    params.B = B;
    params.H = H;
    params.L = L;
    params.S = S;
    params.dropout_threshold = dropout_threshold(dropout_p);
    params.dropout = dropout_state(seed, H);
    Device::keep_mask(params, keep);
    return keep;
  }

  static void register_in(torch::Library& m) {
    implement<"dropout_keep_mask", keep_mask>(m);
    implement<"implicit_kernel_attention", attention>(m);
    implement<"implicit_kernel_attention_backward", attention_backward>(m);
    implement<"implicit_kernel_weights", weights>(m);
    implement<"implicit_kernel_weights_backward", weights_backward>(m);
    implement<"spectral_features", features>(m);
    implement<"spectral_features_backward", features_backward>(m);
    implement<"attention_from_features", from_features>(m);
  }
};

}  // namespace
}  // namespace ikattn
