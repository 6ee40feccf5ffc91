// Gradients of |R_j a_ij|: of the weights, and of the keys as sums of a_ij a_ij^T.
//
// A task computes 64 keys with all rows, a few at a time, so that every sum has one thread and one
// order. It needs three passes over the triangle per pair and variant, where norms need one. The
// number of heads matters little, so that no loop is unrolled.
#pragma once

#include "contributions/cpu/pairs.h"

namespace ikattn::IKATTN_ISA {
namespace {

// The state of one vector of keys; arrays have [heads][kRowGroup] rows of 64.
struct PairGradientBlock {
  int64_t H;
  const double* weights;
  const double* factors;     // [triangle(H)][64]
  const double* grad_norms;  // [kRowGroup][64]
  double* grad_weights;      // added to
  double* outer;             // [triangle(H)][64], added to; nullptr: not wanted
};

// Computes directions [H][kRowGroup], R a / |R a|.
inline void add_pair_gradients(const PairGradientBlock& block, int64_t c, Vec<double>* directions) {
  using T = double;
  constexpr T kSmallest = 2.3e-308;  // what still has an inverse
  const int64_t H = block.H, head_stride = kRowGroup * kFactorBlock;
  const T* weights = block.weights + c;
  Vec<T> largest[kRowGroup] = {};
  Bits<T> seen[kRowGroup] = {};
  const T* r = block.factors + c;
  for (int64_t h = 0; h < H; ++h) {
    Vec<T> sums[kRowGroup] = {};
    const T* a = weights + h * head_stride;
#pragma GCC unroll 4
    for (int m = 0; m < kRowGroup; ++m) seen[m] |= (Bits<T>)load(a + m * kFactorBlock);
    for (int64_t k = h; k < H; ++k, r += kFactorBlock, a += head_stride) {
      const Vec<T> factor = load(r);
#pragma GCC unroll 4
      for (int m = 0; m < kRowGroup; ++m) sums[m] += factor * load(a + m * kFactorBlock);
    }
#pragma GCC unroll 4
    for (int m = 0; m < kRowGroup; ++m) {
      directions[h * kRowGroup + m] = sums[m];
      const Vec<double> size = sums[m] < 0.0 ? -sums[m] : sums[m];
      largest[m] = size > largest[m] || size != size ? size : largest[m];  // NaN stays
    }
  }

  // Computes g / n and R a / n of pairs whose norm is not 0, scaled by the largest element, so that
  // squares stay in range.
  Vec<T> slope[kRowGroup], gradient[kRowGroup];
  Bits<T> lives[kRowGroup];
#pragma GCC unroll 4
  for (int m = 0; m < kRowGroup; ++m) {
    lives[m] = is_weighed<T>(seen[m]) & ~(largest[m] < kSmallest);
    const Vec<T> scale = lives[m] ? T(1) / largest[m] : Vec<T>{};
    Vec<T> squares{};
    for (int64_t h = 0; h < H; ++h) {
      const Vec<T> scaled = directions[h * kRowGroup + m] * scale;
      squares += scaled * scaled;
    }
    const Vec<T> inverse = T(1) / square_root<T>(squares);
    for (int64_t h = 0; h < H; ++h) {
      Vec<T>& direction = directions[h * kRowGroup + m];
      direction = lives[m] ? direction * scale * inverse : Vec<T>{};
    }
    gradient[m] = lives[m] ? load(block.grad_norms + m * kFactorBlock + c) : Vec<T>{};
    slope[m] = lives[m] ? gradient[m] * scale * inverse : Vec<T>{};
  }

  for (int64_t k = 0; k < H; ++k) {
    Vec<T> sums[kRowGroup] = {};
    r = block.factors + k * kFactorBlock + c;  // R_0k, then down the column
    for (int64_t h = 0; h <= k; ++h) {
      const Vec<T> factor = load(r);
#pragma GCC unroll 4
      for (int m = 0; m < kRowGroup; ++m) sums[m] += factor * directions[h * kRowGroup + m];
      r += (H - h - 1) * kFactorBlock;
    }
    T* target = block.grad_weights + k * head_stride + c;
#pragma GCC unroll 4
    for (int m = 0; m < kRowGroup; ++m, target += kFactorBlock) {
      // A key without weight may hold NaN.
      store(target, load(target) + (lives[m] ? gradient[m] * sums[m] : Vec<T>{}));
    }
  }

  if (block.outer == nullptr) return;
  T* outer = block.outer + c;
  for (int64_t h = 0; h < H; ++h) {
    const T* a = weights + h * head_stride;
    Vec<T> scaled[kRowGroup];
#pragma GCC unroll 4
    for (int m = 0; m < kRowGroup; ++m) scaled[m] = slope[m] * load(a + m * kFactorBlock);
    for (int64_t k = h; k < H; ++k, outer += kFactorBlock, a += head_stride) {
      Vec<T> sum = load(outer);
#pragma GCC unroll 4
      for (int m = 0; m < kRowGroup; ++m) sum += scaled[m] * load(a + m * kFactorBlock);
      store(outer, sum);
    }
  }
}

inline void pair_gradients(const PairGradientParams& params, const Executor& executor) {
  using T = double;
  const int64_t H = params.H, S = params.S, rows = params.rows, entries = triangle(H);
  const int64_t blocks = ceil_div(S, kFactorBlock), group = kRowGroup * kFactorBlock;
  struct Scratch {
    T *weights, *grad_weights, *grad_norms;
    Vec<T>* directions;
  };
  const auto cut = [&](Workspace& workspace) {
    Scratch scratch;
    scratch.weights = workspace.take<T>(H * group);
    scratch.grad_weights = workspace.take<T>(H * group);
    scratch.grad_norms = workspace.take<T>(group);
    scratch.directions = workspace.take<Vec<T>>(H * kRowGroup);
    return scratch;
  };
  Workspace measure;
  cut(measure);
  char* memory = static_cast<char*>(
      executor.allocate(executor.owner, measure.bytes() * max_of(1, executor.threads)));

  parallel(executor, params.B * blocks, [&](int64_t task, int thread) {
    Workspace workspace(memory + thread * measure.bytes());
    const Scratch scratch = cut(workspace);
    const int64_t b = task / blocks, j0 = task % blocks * kFactorBlock;
    const int64_t count = min_of(kFactorBlock, S - j0), factors = task * entries * kFactorBlock;
    for (int64_t i = 0; i < rows; i += kRowGroup) {
      const int64_t here = min_of(kRowGroup, rows - i);
      load_weights(params, b, i, here, j0, count, scratch.weights);
      for (int64_t n = 0; n < H * group; ++n) scratch.grad_weights[n] = 0;
      for (int v = 0; v < params.variants; ++v) {
        for (int64_t n = 0; n < group; ++n) scratch.grad_norms[n] = 0;
        const int64_t* stride = params.norms[v].stride;
        for (int64_t m = 0; m < here; ++m) {
          load_row(params.norms[v], b * stride[0] + (i + m) * stride[1] + j0 * stride[2], stride[2],
                   count, scratch.grad_norms + m * kFactorBlock);
        }
        const PairGradientBlock block = {H,
                                         scratch.weights,
                                         static_cast<const T*>(params.factors[v]) + factors,
                                         scratch.grad_norms,
                                         scratch.grad_weights,
                                         params.outer[v] ? params.outer[v] + factors : nullptr};
        for (int64_t c = 0; c < kFactorBlock; c += kLanes<T>) {
          add_pair_gradients(block, c, scratch.directions);
        }
      }
      const Array& grad = params.grad_weights;
      for (int64_t h = 0; grad && h < H; ++h) {
        for (int64_t m = 0; m < here; ++m) {
          const int64_t* stride = grad.stride;
          store_row(grad, b * stride[0] + h * stride[1] + (i + m) * stride[2] + j0 * stride[3],
                    stride[3], count, scratch.grad_weights + (h * kRowGroup + m) * kFactorBlock);
        }
      }
    }
  });
}

}  // namespace
}  // namespace ikattn::IKATTN_ISA
