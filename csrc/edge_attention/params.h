// What the kernels of edge attention read and write. Arrays are contiguous.
#pragma once

#include <stdint.h>

namespace ikattn {

// T is the arithmetic type, float or double. E edges sorted by target, F = 2M features.
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
  T eps;
};

template <typename T>
struct EdgeForwardParams : EdgeParams<T> {
  T* output;               // [N_q, H, d_v]
  T* weights;              // [E, H], after dropout
  double* log_normalizer;  // [N_q, H]; -inf where no edge is seen
};

template <typename T>
struct EdgeBackwardParams : EdgeParams<T> {
  const int64_t* colptr;         // [N_k + 1]: edges by source, those of source j are
  const int64_t* by_source;      // [E]: by_source[colptr[j]] ..
  const int64_t* target;         // [E]
  const double* log_normalizer;  // [N_q, H]
  const T* grad_output;          // [N_q, H, d_v]
  const T* grad_weights;         // [E, H]; null: zeros
  T* grad_query_features;
  T* grad_key_features;
  T* grad_value;
  T* grad_key_logits;
  T* grad_logits;      // [E, H], of the logit of every edge
  T* weights;          // [E, H]: working memory, after dropout
  T* grad_similarity;  // [E, H]: working memory
};

}  // namespace ikattn
