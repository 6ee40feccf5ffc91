// The parameters that a kernel reads: pointers, sizes, strides. No tensor, no torch header. The
// letters are those of include/ikattn/attention.h.
#pragma once

#include "support/array.h"
#include "support/philox.h"

namespace ikattn {

// The setting for linear time (linear_time.h): where it is faster, never, or wherever possible.
enum class LinearTime { kAuto, kNever, kAlways };

struct AttentionParams {
  int64_t B = 0, H = 0, G = 0, L = 0, S = 0, d = 0, d_v = 0, M = 0;
  // Heads of the prepared key side: G where frequencies and key_bias are the same for all query
  // heads of a group, otherwise H.
  int64_t key_heads = 0;
  int64_t frequency_heads = 0;    // heads of w1 and w2: G or H
  int64_t frequency_batches = 1;  // B where w1 and w2 have a batch axis

  Array query;     // [B, H, L, d]
  Array key;       // [B, G, S, d]
  Array value;     // [B, G, S, d_v]
  Array w1, w2;    // [B, frequency_heads, d, M]; w2 none: stationary
  Array key_bias;  // [B, key_heads, S]
  Array mask;      // [B, H, L, S], bool (true = may attend) or floating point (added to the logit)

  Array output;          // [B, H, L, d_v]
  Array log_normalizer;  // [B, H, L]

  // The gradient of the weights in their backward, [B, H, L, S], and the share of it that each head
  // gets. The forward, with d_v = 1, reads it as values that differ between queries; the backward,
  // with d_v = 0, reads it as dO V^T, and the output as O . dO.
  Array grad_weights;
  double weights_share = 1;

  double p = 2.0;  // 0: no magnitude
  double magnitude_scale = 0.0;
  double eps = 1e-5;
  bool is_causal = false;
  bool allow_tf32 = false;      // on a GPU: float32 may be rounded to the 11 bits of TF32
  bool allow_bfloat16 = false;  // on the CPU: value, dO and weights, to one bfloat16
  LinearTime linear_time = LinearTime::kAuto;
  // Batch invariance: a row's bits follow from nothing but the row and the keys that it sees
  // (determinism.h).
  bool batch_invariant = false;

  uint32_t dropout_threshold = 0;  // 0: no dropout
  DropoutState dropout;

  bool stationary() const { return !w2; }
  // Tells whether products over pairs may be of 16 bits on the CPU. Their error averages out over
  // some queries and frequencies, and is small against eps where all scores of a row are. Excluded
  // calls are small or rare, such as the backward of weights. In batch-invariant calls a row's bits
  // must not depend on the number of rows.
  bool takes_16_bits() const {
    return (query.type == ElementType::kBFloat16 || allow_bfloat16) && L >= 32 && M >= 8 &&
           eps >= 5e-6 && !grad_weights && !batch_invariant;
  }
};

// The backward also reads output and log_normalizer of the forward. Absent gradients are not
// computed.
struct AttentionBackwardParams : AttentionParams {
  Array grad_output;    // [B, H, L, d_v]
  Array grad_query;     // [B, H, L, d]
  Array grad_key;       // [B, key_heads, S, d]
  Array grad_value;     // [B, key_heads, S, d_v]
  Array grad_w1;        // [frequency_batches, frequency_heads, d, M], contiguous, compute type
  Array grad_w2;        // likewise
  Array grad_key_bias;  // [B, key_heads, S]
  // The gradient of the mask, zero at the start; stride 0 where it is summed. It is float64 where
  // it is summed over tokens, otherwise of the compute type.
  Array grad_mask;
};

// The operator of weights writes [B, H, L, S], or with average_heads [B, (none), L, S], and no
// output.
struct WeightsParams : AttentionParams {
  Array weights;
  bool average_heads = false;
};

// The operator of features phi(x), not scaled.
struct FeaturesParams {
  int64_t B = 0, H = 0, N = 0, d = 0, M = 0;
  int64_t frequency_batches = 1;
  Array x;         // [B, H, N, d]
  Array w1, w2;    // [B, H, d, M]
  Array features;  // [B, H, N, 2 M], cosines first
  // Backward: `features` holds the incoming gradient.
  Array grad_x;            // [B, H, N, d]
  Array grad_w1, grad_w2;  // [frequency_batches, H, d, M], contiguous, compute type

  bool stationary() const { return !w2; }
};

// Attention from features that were computed before.
struct FromFeaturesParams {
  int64_t B = 0, H = 0, L = 0, S = 0, F = 0, d_v = 0;
  int64_t key_heads = 0, value_heads = 0;  // divide H
  Array query{};                           // [B, H, L, F]   phi
  Array key{};                             // [B, key_heads, S, F]   likewise
  Array logits{};                          // [B, H, L, S]   -inf: hidden
  Array value{};                           // [B, value_heads, S, d_v]
  Array output{};                          // [B, H, L, d_v]
  double eps = 1e-5;
};

}  // namespace ikattn
