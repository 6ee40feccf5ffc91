// The parameters of the kernels of edge attention. Arrays are contiguous.
#pragma once

#include <stdint.h>

namespace ikattn {

// T is the arithmetic type, float or double. E edges sorted by target, F features of a node.
template <typename T>
struct EdgeParams {
  int64_t N_q, N_k, E, H, F, d_v;
  const int64_t* rowptr;    // [N_q + 1]
  const int64_t* source;    // [E]
  const T* query_features;  // [N_q, H, F]
  const T* key_features;    // [N_k, H, F]
  const T* value;           // [N_k, H, d_v]
  const T* key_logits;      // [N_k, H]
  const T* edge_logits;     // [E, H], or [E, 1] where edge_heads is 1; null: zeros
  int64_t edge_heads;
  const bool* keep;  // [E, H]; null: all
  T rescale;         // of what is kept
  // Scores are exp(s) of a product s where exponential, else (s / 2F)^2 + eps.
  bool exponential;
  T eps;
  T negative_slope;  // of the LeakyReLU of an exponential score's logit; 1: none
};

template <typename T>
struct EdgeForwardParams : EdgeParams<T> {
  T* output;               // [N_q, H, d_v]
  T* weights;              // [E, H], after dropout
  double* log_normalizer;  // [N_q, H]; -inf where no edge is seen
};

// Gradients by target, and of every edge the terms of gradients by source.
template <typename T>
struct EdgeQueryGradientParams : EdgeParams<T> {
  const T* output;               // [N_q, H, d_v]
  const double* log_normalizer;  // [N_q, H]
  const T* grad_output;          // [N_q, H, d_v]
  const T* grad_weights;         // [E, H]; null: zeros
  T* grad_query_features;        // [N_q, H, F]
  // [E, 3, H]: the gradient of the logit, of the product s, and the weight after dropout
  T* of_edges;
};

template <typename T>
struct EdgeKeyGradientParams {
  int64_t N_q, N_k, E, H, F, d_v;
  const int64_t* colptr;     // [N_k + 1]: the edges out of source j are
  const int64_t* by_source;  // [E]: by_source[colptr[j]] .. by_source[colptr[j + 1] - 1]
  const int64_t* target;     // [E]: the target of edge by_source[k] is target[k]
  const T* query_features;   // [N_q, H, F]
  const T* grad_output;      // [N_q, H, d_v]
  const T* of_edges;         // [E, 3, H], as above
  T* grad_key_features;      // [N_k, H, F]
  T* grad_value;             // [N_k, H, d_v]
  T* grad_key_logits;        // [N_k, H]
};

}  // namespace ikattn
