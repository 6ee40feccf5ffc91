// Pairs of a thread's keys in the key gradients on Hopper: rows are keys and columns queries, 64 of
// a tile, and the queries of all heads that share the keys come one head after the other.
#pragma once

#include "attention/cuda/hopper/pipeline.h"
#include "attention/cuda/tensor_cores/epilogue_backward.h"

namespace ikattn::cuda {
namespace {

// Whether a tile's sums go on while those of the next are made: wider ones leave no registers.
template <int F, int V>
constexpr bool kOverlaps = F + V <= 192;

// Numbers of a thread's two keys that their pairs need.
struct KeyNumbers {
  float fit[2], terms[2];

  // Loads the numbers of keys j and j + 8. fit_of_head: KeyScales::fit; kMarks: a hidden key's fit
  // is -0, by which it is known in the end.
  template <typename T, bool kMarks>
  __device__ __forceinline__ static KeyNumbers load(const AttentionParams& params,
                                                    const FoldedTokens& tokens, const float* logits,
                                                    int64_t bk, int first, float fit_of_head) {
    KeyNumbers numbers;
    const float fit = fit_of_head * static_cast<float>(4 * params.M) * (1 / kWeightScale<T>);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = first + 8 * half;
      const bool there = j < params.S;
      // sqrt(K e_j), with which the score is bounded.
      const float scale = there ? tokens.forms.scales[bk * params.S + j] : 0.0f;
      numbers.fit[half] = scale * fit;
      if (kMarks && there && logits[bk * params.S + j] == minus_infinity<float>()) {
        numbers.fit[half] = -0.0f;
      }
      numbers.terms[half] = there ? tokens.forms.terms[bk * padded_tokens(params.S) + j] : 0.0f;
    }
    return numbers;
  }
  // Returns which keys are hidden, by the marks of kMarks.
  __device__ __forceinline__ HiddenKeys hidden() const {
    return {{__float_as_uint(fit[0]) == 1u << 31, __float_as_uint(fit[1]) == 1u << 31}};
  }
};

// First query of a tile that sees the thread's first key: of the first tile, whose queries begin
// where the keys do, and beyond the last tile of a head.
template <Pairs kPairs>
struct Diagonal {
  int first, beyond, now;

  __device__ __forceinline__ Diagonal(const AttentionParams& params, const KeyBlock& at)
      : first(static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4),
        beyond(at.j0 + first - static_cast<int>(params.L)),
        now(first) {}
  __device__ __forceinline__ void next() {
    if constexpr (kPairs != Pairs::kCausal) return;
    now -= kStep;
    if (now <= beyond) now = first;
  }
};

// Makes factors of the scores s and of x of a tile: s of grad_phi_k, x of grad_value; logit_sums:
// the gradients of the keys' logits.
//   normalizers, deltas: of the tile's queries; diagonal: Diagonal::now
template <typename T, Pairs kPairs>
__device__ __forceinline__ void to_factors(float (&s)[kStep / 2], float (&x)[kStep / 2],
                                           Shared<const float> normalizers, const KeyNumbers& keys,
                                           int diagonal, float (&logit_sums)[2]) {
  const int t = threadIdx.x % 4;
  Shared<const float> deltas = normalizers + kStep;
#pragma unroll
  for (int n = 0; n < kStep / 8; ++n) {
    const float2 pair = load_vector<float2>(normalizers + n * 8 + 2 * t);
    const float2 delta = load_vector<float2>(deltas + n * 8 + 2 * t);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int i = 4 * n + c, column = n * 8 + 2 * t + c % 2;
      float inverse = (c % 2 == 0 ? pair.x : pair.y) * kWeightScale<T>;
      if (kPairs == Pairs::kCausal && diagonal + 8 * (c / 2) > column) inverse = 0;
      float similarity = s[i] * s[i] + keys.terms[c / 2];
      float scaled = inverse * (x[i] - (c % 2 == 0 ? delta.x : delta.y));
      // A key that no query sees may hold anything. Without masks it is hidden, and what its own
      // sums are does not count.
      if (kPairs != Pairs::kAll && inverse == 0) similarity = scaled = 0;
      logit_sums[c / 2] += similarity * scaled;
      s[i] *= keys.fit[c / 2] * scaled;
      x[i] = similarity * inverse;
    }
  }
}

// Makes factors of a tile's scores s and x, whose products are over.
//   numbers: of its queries
template <typename T, Pairs kPairs>
__device__ __forceinline__ void finish_pairs(const KeyNumbers& keys, float (&s)[kStep / 2],
                                             float (&x)[kStep / 2], Shared<const float> numbers,
                                             int diagonal, float (&logit_sums)[2]) {
  sums_are_there(x);
  sums_are_there(s);
  to_factors<T, kPairs>(s, x, numbers, keys, diagonal, logit_sums);
  fence_async();
}

}  // namespace
}  // namespace ikattn::cuda
